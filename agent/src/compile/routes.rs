//! Nodes, local pods and services to the routes this node should have.
//!
//! Every route goes to the main table with our protocol number. A destination has one path; priorities are not used.

use std::collections::BTreeMap;
use std::net::IpAddr;

use control_api::v1::Node;
use ipnetwork::IpNetwork;

use super::peers::{self, Reach, Tunnels};

/// Gateway of every pod's default route, IPv4, and of the host link. It exists as a permanent neighbour only.
pub const GATEWAY_V4: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(169, 254, 1, 1));
/// Gateway of every pod's default route, IPv6, and of the host link.
pub const GATEWAY_V6: IpAddr = IpAddr::V6(std::net::Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1));

/// The gateway of the address's family.
#[must_use]
pub fn gateway_for(address: IpAddr) -> IpAddr {
    if address.is_ipv4() {
        GATEWAY_V4
    } else {
        GATEWAY_V6
    }
}

/// How packets leave for a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Path {
    /// The destination is a neighbour on this link (scope link).
    Link { link: u32, source: Option<IpAddr> },
    /// Through a gateway that is a neighbour on this link.
    Via {
        gateway: IpAddr,
        link: u32,
        source: Option<IpAddr>,
    },
    /// Through the overlay's device, where programs find the tunnel. Packets of up to `mtu` bytes fit.
    Overlay {
        link: u32,
        source: Option<IpAddr>,
        mtu: u32,
    },
    /// Nothing there: senders are told so.
    Unreachable,
}

/// Wanted routes by destination.
pub type Routes = BTreeMap<IpNetwork, Path>;

/// A pod of this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalPod {
    pub address: IpAddr,
    /// Interface index of the host side of its link.
    pub link: u32,
}

/// Everything that the routes of this node depend on.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    pub node_name: &'a str,
    pub node_ips: &'a [IpAddr],
    pub nodes: &'a BTreeMap<String, Node>,
    pub service_cidrs: &'a [String],
    /// Addresses of services, within those ranges and outside (balancers): what the node's own processes send there
    /// must find a program, whatever other routes there are.
    pub service_addresses: &'a [IpAddr],
    /// Interface index of the host link.
    pub host_link: u32,
    /// Interface index of the overlay's device, where there is one.
    pub overlay_link: Option<u32>,
    pub pods: &'a [LocalPod],
    /// Answer for every address that [`peers::addresses`] names.
    pub reach: &'a BTreeMap<IpAddr, Reach>,
}

/// What [`routes`] makes of its input.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Compiled {
    pub routes: Routes,
    /// Where the programs send packets for pods that are reached through the overlay.
    pub tunnels: Tunnels,
    /// What stands in the way of other routes.
    pub problems: Vec<Problem>,
}

/// Why a peer or a range has no route. None of these stops the others.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    #[error("{what} {text:?} is not a network in CIDR form; it gets no route")]
    BadCidr { what: String, text: String },
    #[error(
        "pod range {cidr} of node {node} is also that of node {other}; its route leads to {other}"
    )]
    Claimed {
        cidr: IpNetwork,
        node: String,
        other: String,
    },
    #[error("node {node} has pod range {cidr} but no InternalIP; pods there cannot be reached")]
    NoAddress { node: String, cidr: IpNetwork },
    #[error(
        "node {node} ({gateway}) is behind a router and this node has no overlay, so pod range {cidr} has no route"
    )]
    NotOnLink {
        node: String,
        gateway: IpAddr,
        cidr: IpNetwork,
    },
    #[error("no route to node {node} ({gateway}), so pod range {cidr} has none either")]
    Unreachable {
        node: String,
        gateway: IpAddr,
        cidr: IpNetwork,
    },
}

/// The routes this node should have.
#[must_use]
pub fn routes(input: &Input<'_>) -> Compiled {
    let mut compiled = Compiled::default();
    peers::add(input, &mut compiled);
    let Compiled {
        routes, problems, ..
    } = &mut compiled;
    if let Some(node) = input.nodes.get(input.node_name) {
        for cidr in parse("pod range of this node", &node.pod_cidrs, problems) {
            // What is not a pod of ours is nowhere else: never send it to a default route.
            routes.insert(cidr, Path::Unreachable);
        }
    }
    let service_cidrs = parse("service range", input.service_cidrs, problems);
    for address in input.service_addresses {
        if !service_cidrs.iter().any(|cidr| cidr.contains(*address)) {
            routes.insert(IpNetwork::from(*address), over_host_link(input, *address));
        }
    }
    for cidr in service_cidrs {
        routes.insert(cidr, over_host_link(input, cidr.ip()));
    }
    for pod in input.pods {
        let source = source_for(input.node_ips, pod.address);
        routes.insert(
            IpNetwork::from(pod.address),
            Path::Link {
                link: pod.link,
                source,
            },
        );
    }
    compiled
}

fn over_host_link(input: &Input<'_>, address: IpAddr) -> Path {
    Path::Via {
        gateway: gateway_for(address),
        link: input.host_link,
        source: source_for(input.node_ips, address),
    }
}

pub(super) fn source_for(node_ips: &[IpAddr], address: IpAddr) -> Option<IpAddr> {
    node_ips
        .iter()
        .copied()
        .find(|ip| ip.is_ipv4() == address.is_ipv4())
}

/// Networks in canonical form (host bits cleared).
pub(super) fn parse(what: &str, texts: &[String], problems: &mut Vec<Problem>) -> Vec<IpNetwork> {
    let mut networks = Vec::with_capacity(texts.len());
    for text in texts {
        let network = text
            .parse::<IpNetwork>()
            .ok()
            .and_then(|n| IpNetwork::new(n.network(), n.prefix()).ok());
        match network {
            Some(network) => networks.push(network),
            None => {
                problems.push(Problem::BadCidr {
                    what: what.to_owned(),
                    text: text.clone(),
                });
            }
        }
    }
    networks
}

#[cfg(test)]
mod tests;
