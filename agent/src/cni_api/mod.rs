//! The local socket that `weir-cni` calls, and IPAM.
//!
//! A pod's network is one transaction: an address that is durable before anything uses it, a veth pair made straight in
//! the pod's namespace, programs attached before the link comes up, and the whole undone when any step fails. Records
//! are keyed by container id and interface name, so a late DEL of an old sandbox can never hit a newer pod.
//!
//! Requests are served by threads that block: they do netlink and disk work, and few run at once.

mod attach;
mod bandwidth;
pub mod conf;
mod host_ports;
mod ipam;
pub mod ranges;
mod reconcile;
mod record;
mod server;
mod service;
mod stats;
mod store;
mod wire;

pub use bandwidth::Bandwidth;
pub use host_ports::PortMapping;
pub use record::{Key, Record};
pub use server::{Server, ServerError};
pub use service::{Attachments, MAX_COOL_DOWN, PodRanges, Settings};
pub use stats::Stats;
pub use store::{Store, StoreError};

/// Names below the state directory that this room writes.
pub const STATE_NAMES: [&str; 3] = [store::RECORDS, store::DELETES, store::RESTING];

/// True for names that host sides of pod links have.
#[must_use]
pub fn is_pod_link(name: &str) -> bool {
    record::is_host_name(name)
}

/// Failure of a CNI command as the plugin reports it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct CniError {
    pub code: Code,
    pub message: String,
    pub details: String,
}

/// Codes of the CNI specification, and above 99 our own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    InvalidEnvironment,
    Io,
    Decode,
    InvalidConfig,
    /// The namespace is the plugin's own.
    OwnNamespace,
    /// Transient: the runtime may call again.
    TryAgain,
    /// STATUS: no ADD can be served.
    NotAvailable,
    /// The container has this interface already.
    Exists,
    /// The kernel refused a step.
    Setup,
    /// CHECK found that something is missing.
    Broken,
}

impl Code {
    /// The number on the wire.
    #[must_use]
    pub fn number(self) -> u32 {
        match self {
            Self::InvalidEnvironment => 4,
            Self::Io => 5,
            Self::Decode => 6,
            Self::InvalidConfig => 7,
            Self::OwnNamespace => 8,
            Self::TryAgain => 11,
            Self::NotAvailable => 50,
            Self::Exists => 100,
            Self::Setup => 101,
            Self::Broken => 102,
        }
    }
}

impl CniError {
    fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            details: String::new(),
        }
    }

    fn with_details(mut self, details: impl std::fmt::Display) -> Self {
        self.details = details.to_string();
        self
    }
}
