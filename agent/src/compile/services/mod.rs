//! Services, endpoint slices and host ports to what the service maps of this node should hold.
//!
//! A *service* here is what has an id in the maps: one port of a Kubernetes Service, one family, one view of its
//! endpoints; or one host port. It has backends, and *frontends* that lead to them: cluster address, node port,
//! balancer and external addresses. `endpoints` decides which endpoints a view has, `frontends` which addresses a
//! Service has and what holds for each, `claims` who has an address that several want, and [`Catalog`] keeps what is
//! needed to compile one changed Service without looking at the others.

mod catalog;
mod claims;
mod endpoints;
mod frontends;
mod host_ports;
pub mod maglev;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use control_api::desired::Name;
use ipnetwork::IpNetwork;

pub use catalog::{Catalog, Wanted};
pub use endpoints::local_ready;
pub use host_ports::HostPort;

/// IP protocol numbers.
pub const TCP: u8 = 6;
pub const UDP: u8 = 17;
pub const SCTP: u8 = 132;

/// Who this node is, as far as packets show it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeIdentity {
    pub name: String,
    /// The node's addresses; the first of each family is the source of translated packets.
    pub addresses: Vec<IpAddr>,
    /// Where this node's cluster DNS listens on those addresses.
    pub dns_port: u16,
}

/// What the operator chose for the services of this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServiceOptions {
    /// Backends for clients outside are chosen by Maglev hashing.
    pub maglev: bool,
    /// Backends on other nodes answer clients outside directly.
    pub dsr: bool,
    /// Overrides what the control plane says of externalIPs.
    pub external_ips: Option<bool>,
}

/// The set of maps of an address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    V4,
    V6,
}

impl Family {
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    #[must_use]
    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() {
            Self::V4
        } else {
            Self::V6
        }
    }

    /// The address that stands for every node address: all zero.
    #[must_use]
    pub fn wildcard(self) -> IpAddr {
        match self {
            Self::V4 => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            Self::V6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        }
    }
}

/// Which clients an entry is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// All clients; those inside the cluster when there is an external entry beside it.
    #[default]
    All,
    /// Clients outside the cluster.
    External,
}

/// A service port as packets name it. The wildcard address stands for every address that serves node ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Frontend {
    pub address: IpAddr,
    pub port: u16,
    /// IP protocol number.
    pub protocol: u8,
    pub scope: Scope,
}

impl std::fmt::Display for Frontend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.address.is_unspecified() {
            let nodes = if self.address.is_ipv4() { "*" } else { "[*]" };
            write!(f, "{nodes}:{}", self.port)?;
        } else {
            write!(f, "{}", std::net::SocketAddr::new(self.address, self.port))?;
        }
        match self.protocol {
            TCP => f.write_str("/TCP")?,
            UDP => f.write_str("/UDP")?,
            SCTP => f.write_str("/SCTP")?,
            other => write!(f, "/{other}")?,
        }
        match self.scope {
            Scope::All => Ok(()),
            Scope::External => f.write_str(" from outside"),
        }
    }
}

/// What holds for one frontend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct FrontendOptions {
    /// Clients outside the cluster have an entry of their own.
    pub external_scope: bool,
    /// Clients outside are shown to the backend as they are.
    pub keep_source: bool,
    /// Without a usable backend packets are dropped instead of refused: there are endpoints elsewhere.
    pub drop_empty: bool,
    /// Only sources in the service's ranges are served.
    pub ranges: bool,
    /// Backends answer clients outside directly.
    pub dsr: bool,
    /// The backend is chosen by Maglev hashing, else at random.
    pub maglev: bool,
}

/// One endpoint of a service port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WantedBackend {
    pub address: IpAddr,
    pub port: u16,
    /// Runs on this node.
    pub local: bool,
    /// Gets no new flows.
    pub draining: bool,
}

/// What a service id should lead to, and from where.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WantedService {
    /// In their order, each once; at least one, all of one family.
    pub frontends: Vec<(Frontend, FrontendOptions)>,
    /// In the order of address and port, each once.
    pub backends: Vec<WantedBackend>,
    /// Seconds; zero means none.
    pub affinity_s: u32,
    /// Sources that frontends with `ranges` admit; networks of the family, in order, each once.
    pub ranges: Vec<IpNetwork>,
}

/// Which of a Service's endpoints a service has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum View {
    /// Those of the whole cluster, by topology.
    Cluster,
    /// Those of this node.
    Local,
}

/// Whose a service is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Owner {
    Service(Name),
    /// A pod's attachment, by its id.
    HostPort(String),
}

impl std::fmt::Display for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Service(name) => write!(f, "service {name}"),
            Self::HostPort(pod) => write!(f, "host port of {pod}"),
        }
    }
}

/// Identity of a service for as long as its owner and port exist.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceKey {
    pub owner: Owner,
    pub family: Family,
    /// Name of the Service's port.
    pub port: String,
    pub protocol: u8,
    /// Number of a host port; zero for Services.
    pub host_port: u16,
    pub view: View,
}

/// A part of what was asked for that is not served, and why. The rest is in place.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Refusal {
    pub owner: Owner,
    /// The frontend or endpoint that is left out.
    pub what: String,
    pub why: String,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}: {}", self.owner, self.what, self.why)
    }
}

/// Why packets must not be led to this address, whatever a Service says: translation would reach what only the node
/// itself may reach, or no single host.
#[must_use]
pub(super) fn unusable(address: IpAddr) -> Option<&'static str> {
    let link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    let mapped = matches!(address, IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some());
    let broadcast = matches!(address, IpAddr::V4(v4) if v4.is_broadcast() || v4.octets()[0] == 0);
    if address.is_loopback() {
        Some("a loopback address")
    } else if link_local {
        Some("a link-local address")
    } else if address.is_multicast() {
        Some("a multicast address")
    } else if address.is_unspecified() || broadcast {
        Some("no address of a host")
    } else if mapped {
        Some("an IPv4 address written as IPv6")
    } else {
        None
    }
}

#[cfg(test)]
mod tests;
