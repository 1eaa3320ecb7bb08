//! How the pod ranges of other nodes are reached: directly where the peer is a neighbour, through the overlay where a
//! router lies between, which does not know pod addresses. Every peer and family decides for itself.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use control_api::v1::Node;
use ipnetwork::IpNetwork;

use super::routes::{Compiled, Input, Path, Problem, parse, source_for};

/// What the kernel says about the way to an address of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// A neighbour on this link: no gateway in between. Packets of up to `mtu` bytes fit.
    OnLink { link: u32, mtu: u32 },
    /// Behind a gateway, which does not know pod addresses.
    Routed { mtu: u32 },
    /// No way at all.
    Unknown,
}

/// The other end of the overlay for addresses of another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tunnel {
    /// Address of the node.
    pub remote: IpAddr,
    /// Bytes of the largest packet that fits once it is wrapped.
    pub mtu: u32,
    /// There is no other way. Neighbours have a tunnel too, for clients whose backend is to answer them itself.
    pub needed: bool,
}

/// Tunnels by the pod ranges and node addresses behind them; empty without the overlay.
pub type Tunnels = BTreeMap<IpNetwork, Tunnel>;

/// Bytes that the overlay puts in front of a packet: Ethernet 14, VXLAN 8 (RFC 7348), UDP 8, and the IP header.
#[must_use]
pub const fn overhead(remote: IpAddr) -> u32 {
    const ETHERNET_VXLAN_UDP: u32 = 14 + 8 + 8;
    match remote {
        IpAddr::V4(_) => ETHERNET_VXLAN_UDP + 20,
        IpAddr::V6(_) => ETHERNET_VXLAN_UDP + 40,
    }
}

/// No path is narrower: RFC 791 and RFC 8200. Wrapped packets that do not fit a link travel in fragments then.
const LEAST_MTU_V4: u32 = 576;
const LEAST_MTU_V6: u32 = 1280;

/// Addresses of peers whose reach must be known before routes are compiled.
#[must_use]
pub fn addresses(node_name: &str, nodes: &BTreeMap<String, Node>) -> BTreeSet<IpAddr> {
    nodes
        .values()
        .filter(|n| n.name != node_name)
        .flat_map(internal_ips)
        .collect()
}

/// Bytes of a pod's packets that every path of this node takes: `uplink_mtu` less the headers of the overlay while it
/// is in use. With direct return it always is, by clients, who learn from pods how large their segments may be.
#[must_use]
pub fn pod_mtu(uplink_mtu: u32, tunnels: &Tunnels, direct_return: bool) -> u32 {
    let needed = tunnels.values().filter(|t| t.needed || direct_return);
    let headers = needed.map(|t| overhead(t.remote)).max();
    uplink_mtu.saturating_sub(headers.unwrap_or(0))
}

/// The tunnels alone, without the overlay none.
#[must_use]
pub fn tunnels(input: &Input<'_>) -> Tunnels {
    let mut compiled = Compiled::default();
    add(input, &mut compiled);
    compiled.tunnels
}

/// Adds the routes, tunnels and problems of all peers.
pub(super) fn add(input: &Input<'_>, compiled: &mut Compiled) {
    let mut owners: BTreeMap<IpNetwork, &str> = BTreeMap::new();
    // Our own ranges first: no peer may claim them.
    let own = input.nodes.get(input.node_name);
    for node in own
        .into_iter()
        .chain(input.nodes.values().filter(|n| n.name != input.node_name))
    {
        let what = format!("pod range of node {}", node.name);
        for cidr in parse(&what, &node.pod_cidrs, &mut compiled.problems) {
            if let Some(other) = owners.get(&cidr) {
                compiled.problems.push(Problem::Claimed {
                    cidr,
                    node: node.name.clone(),
                    other: (*other).to_owned(),
                });
                continue;
            }
            owners.insert(cidr, &node.name);
            if node.name == input.node_name {
                continue;
            }
            if let Err(problem) = add_range(input, node, cidr, compiled) {
                compiled.problems.push(problem);
            }
        }
        if node.name != input.node_name {
            add_addresses(input, node, compiled);
        }
    }
}

/// The node's own addresses: processes there may be backends.
fn add_addresses(input: &Input<'_>, node: &Node, compiled: &mut Compiled) {
    if input.overlay_link.is_none() {
        return;
    }
    for remote in internal_ips(node) {
        if let Some(tunnel) = tunnel_to(input, remote, LEAST_MTU_V6) {
            compiled.tunnels.insert(IpNetwork::from(remote), tunnel);
        }
    }
}

fn add_range(
    input: &Input<'_>,
    node: &Node,
    cidr: IpNetwork,
    compiled: &mut Compiled,
) -> Result<(), Problem> {
    if let Some((gateway, link)) = neighbour(input, node, cidr) {
        let source = source_for(input.node_ips, gateway);
        compiled.routes.insert(
            cidr,
            Path::Via {
                gateway,
                link,
                source,
            },
        );
        if let (Some(_), Ok(tunnel)) = (input.overlay_link, tunnel(input, node, cidr)) {
            compiled.tunnels.insert(cidr, tunnel);
        }
        return Ok(());
    }
    let tunnel = Tunnel {
        needed: true,
        ..tunnel(input, node, cidr)?
    };
    let Some(link) = input.overlay_link else {
        return Err(Problem::NotOnLink {
            node: node.name.clone(),
            gateway: tunnel.remote,
            cidr,
        });
    };
    compiled.routes.insert(
        cidr,
        Path::Overlay {
            link,
            source: source_for(input.node_ips, cidr.ip()),
            mtu: tunnel.mtu,
        },
    );
    compiled.tunnels.insert(cidr, tunnel);
    Ok(())
}

/// An address of the range's family that is on a link of ours.
fn neighbour(input: &Input<'_>, node: &Node, cidr: IpNetwork) -> Option<(IpAddr, u32)> {
    internal_ips(node)
        .filter(|ip| ip.is_ipv4() == cidr.is_ipv4())
        .find_map(|ip| match input.reach.get(&ip) {
            Some(Reach::OnLink { link, .. }) => Some((ip, *link)),
            _ => None,
        })
}

/// IPv4 first, whatever the range's family: its headers are shorter.
fn tunnel(input: &Input<'_>, node: &Node, cidr: IpNetwork) -> Result<Tunnel, Problem> {
    let all: Vec<IpAddr> = internal_ips(node).collect();
    let (v4, v6): (Vec<_>, Vec<_>) = all.iter().copied().partition(IpAddr::is_ipv4);
    let least = if cidr.is_ipv4() {
        LEAST_MTU_V4
    } else {
        LEAST_MTU_V6
    };
    let found = v4
        .into_iter()
        .chain(v6)
        .find_map(|remote| tunnel_to(input, remote, least));
    found.ok_or_else(|| {
        let node = node.name.clone();
        match all.first() {
            Some(gateway) => Problem::Unreachable {
                node,
                gateway: *gateway,
                cidr,
            },
            None => Problem::NoAddress { node, cidr },
        }
    })
}

/// A tunnel to an address of a node, unless there is no way to it. `least` is an MTU in bytes.
fn tunnel_to(input: &Input<'_>, remote: IpAddr, least: u32) -> Option<Tunnel> {
    match input.reach.get(&remote) {
        Some(Reach::OnLink { mtu, .. } | Reach::Routed { mtu }) => Some(Tunnel {
            remote,
            mtu: mtu.saturating_sub(overhead(remote)).max(least),
            needed: false,
        }),
        _ => None,
    }
}

fn internal_ips(node: &Node) -> impl Iterator<Item = IpAddr> + '_ {
    node.internal_ips.iter().filter_map(|ip| ip.parse().ok())
}
