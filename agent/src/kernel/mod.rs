//! Load, attach, pin, and map access. The only room of the agent with `unsafe`, and the only one that names aya.

use std::net::IpAddr;

/// A pod's link as the dataplane sees it (host side of the pair).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodLink {
    /// Interface index of the host side, in the agent's network namespace.
    pub ifindex: u32,
    pub host_name: String,
    /// MAC address of the pod's own interface.
    pub pod_mac: [u8; 6],
    /// MAC address of the host side.
    pub host_mac: [u8; 6],
    /// At most one address per family.
    pub addresses: Vec<IpAddr>,
}

/// What the CNI room needs of the dataplane: a seam with three occupants (real, fake, faulty).
pub trait PodPrograms: Send + Sync {
    /// Attaches the pod programs to the host side and enters the pod in the local endpoint tables. Safe to repeat.
    /// When this returns, the first packet of the pod meets its programs.
    ///
    /// # Errors
    /// [`AttachError`] names the link and the step; nothing is left behind.
    fn attach_pod(&self, link: &PodLink) -> Result<(), AttachError>;

    /// Removes what `attach_pod` made, also when the link is already gone. Never fails on absence.
    ///
    /// # Errors
    /// [`AttachError`] when the kernel refuses a removal.
    fn detach_pod(&self, ifindex: u32, addresses: &[IpAddr]) -> Result<(), AttachError>;

    /// True when programs are attached to this link and its addresses are in the endpoint tables (CNI CHECK).
    fn is_attached(&self, link: &PodLink) -> bool;
}

/// A pod link could not be given its programs.
#[derive(Debug, thiserror::Error)]
#[error("{step} for pod link {link}: {source}")]
pub struct AttachError {
    pub step: &'static str,
    pub link: String,
    pub source: Box<dyn std::error::Error + Send + Sync>,
}
