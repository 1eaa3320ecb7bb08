//! The VXLAN device of the overlay: one per node, without state of its own. Programs give every packet its tunnel key.

use super::link::{Link, Mac};
use super::{Netlink, NetlinkError, OVERLAY_LINK, absent_is_done, base};

/// Address of the device on every node: nobody has to learn it.
pub const OVERLAY_MAC: Mac = dataplane_common::OVERLAY_MAC;

/// Makes or adopts the device, with this MTU in bytes. One with another port is made anew. A new one is down: it is for
/// its programs to say whose packets it takes.
///
/// # Errors
/// [`NetlinkError`] names the step; [`NetlinkError::is_unsupported`] when the kernel has no VXLAN.
pub fn ensure(netlink: &mut Netlink, port: u16, mtu: u32) -> Result<Link, NetlinkError> {
    let fits = |link: &Link| link.overlay_port == Some(port) && link.mac == OVERLAY_MAC;
    let found = match netlink.link(OVERLAY_LINK)? {
        Some(link) if fits(&link) => link,
        other => {
            if other.is_some() {
                absent_is_done(netlink.delete_link(OVERLAY_LINK))?;
            }
            netlink.create_overlay(OVERLAY_LINK, OVERLAY_MAC, port, mtu)?;
            let made = netlink.link(OVERLAY_LINK)?;
            made.ok_or_else(|| {
                NetlinkError::new(
                    "find the VXLAN device just created",
                    std::io::ErrorKind::NotFound.into(),
                )
            })?
        }
    };
    base::quiet(OVERLAY_LINK)?;
    super::sysctl::set(&format!("net/ipv4/conf/{OVERLAY_LINK}/forwarding"), "1")?;
    if found.mtu != mtu {
        netlink.set_link_mtu(found.index, mtu)?;
    }
    Ok(Link { mtu, ..found })
}

/// Removes the device; true when there was one.
///
/// # Errors
/// [`NetlinkError`] when the kernel refuses.
pub fn remove(netlink: &mut Netlink) -> Result<bool, NetlinkError> {
    let there = netlink.link(OVERLAY_LINK)?.is_some();
    if there {
        absent_is_done(netlink.delete_link(OVERLAY_LINK))?;
    }
    Ok(there)
}
