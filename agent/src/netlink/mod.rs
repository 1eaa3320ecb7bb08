//! Links, addresses, neighbours, routes and network sysctls of this node, by rtnetlink and /proc/sys.
//!
//! Calls are synchronous: a request and its acknowledgement take microseconds, and setting up a pod is one straight
//! line with a rollback. Async callers go through `spawn_blocking`. What a route or link should be is decided in
//! `compile`, never here; objects without our protocol number or our names are never changed.

pub mod base;
pub mod changed_sysctls;
pub mod link;
pub mod neighbour;
pub mod netns;
pub mod overlay;
pub mod reserved_ports;
pub mod route;
pub mod shape;
mod socket;
pub mod sync;
pub mod sysctl;
pub mod watch;

pub use socket::Netlink;

/// The routing protocol number of every route this agent owns (`ip route show proto 87`).
pub const ROUTE_PROTOCOL: u8 = 87;

/// Ends of the veth pair through which the node's own processes reach services.
pub const HOST_LINK: &str = "weir_host";
/// The far end of [`HOST_LINK`], in the same namespace; it carries the programs.
pub const HOST_LINK_PEER: &str = "weir_hostp";

/// The VXLAN device that reaches nodes of other segments.
pub const OVERLAY_LINK: &str = "weir_vxlan";
/// Ends of the veth pair on which the programs hand fragments to the agent, and get them back.
pub const PARK_LINK: &str = "weir_park";
/// The far end of [`PARK_LINK`], in the same namespace; the agent listens there.
pub const PARK_LINK_PEER: &str = "weir_parkp";

/// A change or query of the kernel's network state that failed.
#[derive(Debug, thiserror::Error)]
#[error("{action}: {source}")]
pub struct NetlinkError {
    /// What was attempted, on what.
    pub action: String,
    pub source: std::io::Error,
}

impl NetlinkError {
    pub(crate) fn new(action: impl Into<String>, source: std::io::Error) -> Self {
        Self {
            action: action.into(),
            source,
        }
    }

    /// The object is already there.
    #[must_use]
    pub fn exists(&self) -> bool {
        self.source.raw_os_error() == Some(libc::EEXIST)
    }

    /// The kernel has nothing of that kind.
    #[must_use]
    pub fn is_unsupported(&self) -> bool {
        matches!(
            self.source.raw_os_error(),
            Some(libc::EOPNOTSUPP | libc::EAFNOSUPPORT)
        )
    }

    /// The object, or the link it hangs on, is not there.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        matches!(
            self.source.raw_os_error(),
            Some(libc::ENOENT | libc::ENODEV | libc::ESRCH | libc::EADDRNOTAVAIL)
        )
    }
}

/// Turns the absence of what was to be removed into success.
pub(crate) fn absent_is_done(result: Result<(), NetlinkError>) -> Result<(), NetlinkError> {
    match result {
        Err(e) if e.is_absent() => Ok(()),
        other => other,
    }
}
