//! Notifications of the kernel: links, addresses or routes changed, look again.

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

use super::NetlinkError;

/// Multicast groups of rtnetlink: link, IPv4 address, IPv4 route, IPv6 address, IPv6 route.
const GROUPS: [u32; 5] = [1, 5, 7, 9, 11];

/// Calls `changed` on a thread of its own whenever links, addresses or routes of this namespace change, until the
/// process ends. What changed is not said: whoever listens compares the whole.
///
/// # Errors
/// [`NetlinkError`] when the groups cannot be joined.
pub fn start(changed: impl Fn() + Send + 'static) -> Result<(), NetlinkError> {
    let open = || -> std::io::Result<Socket> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind(&SocketAddr::new(0, 0))?;
        for group in GROUPS {
            socket.add_membership(group)?;
        }
        Ok(socket)
    };
    let socket = open().map_err(|e| NetlinkError::new("listen to link and route changes", e))?;
    std::thread::Builder::new()
        .name("netlink-watch".into())
        .spawn(move || {
            loop {
                match socket.recv_from_full() {
                    Ok(_) => changed(),
                    // Notifications were lost, which is a change as well.
                    Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => changed(),
                    Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                    Err(e) => {
                        tracing::error!(error = %e, "stopped listening to link and route changes; routes are still compared periodically");
                        return;
                    }
                }
            }
        })
        .map(|_| ())
        .map_err(|e| NetlinkError::new("start the thread that listens to route changes", e))
}
