//! What surrounds a node: the addresses of nodes, and which ranges belong to pods and services.
//!
//! Pods keep their address on the way to pods, nodes and exempt ranges, and get the node's on the way out of the cluster.

use std::collections::BTreeMap;
use std::net::IpAddr;

use control_api::desired::DesiredState;
use dataplane_common::layout::{
    ENDPOINT_NODE, ENDPOINT_NODE_PORTS, ENDPOINT_PEER, NODE_MASQUERADE, Node, RANGE_EXEMPT,
    RANGE_OVERLAY, RANGE_OWN, RANGE_SERVICE, Range,
};
use dataplane_common::{V4, V6};
use ipnetwork::IpNetwork;

use super::node_addresses::{Input, NodeAddresses};
use super::peers::Tunnels;

/// What the operator chose for this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choices {
    /// The node's addresses by its configuration, the primary ones first.
    pub configured: Vec<IpAddr>,
    /// Pods get the node's address on their way out of the cluster.
    pub masquerade: bool,
    /// Ranges outside the cluster that see pods as they are.
    pub masquerade_except: Vec<IpNetwork>,
    /// NodePorts are served on node addresses in these ranges; on all of them when there is none.
    pub node_port_addresses: Vec<IpNetwork>,
}

impl Default for Choices {
    fn default() -> Self {
        Self {
            configured: Vec::new(),
            masquerade: true,
            masquerade_except: Vec::new(),
            node_port_addresses: Vec::new(),
        }
    }
}

/// What the dataplane is to know of the world around it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Surroundings {
    /// Addresses of nodes with their `ENDPOINT_` flags.
    pub addresses: BTreeMap<IpAddr, u32>,
    pub ranges: BTreeMap<IpNetwork, Range>,
    /// Whose they are.
    pub nodes: NodeAddresses,
    /// First and last NodePort; zero and zero for none.
    pub node_ports: (u16, u16),
    pub masquerade: bool,
}

impl Surroundings {
    /// Adds the ranges that other nodes can be reached at through the overlay.
    pub fn add_tunnels(&mut self, tunnels: &Tunnels) {
        for (network, tunnel) in tunnels {
            let range = self.ranges.entry(*network).or_default();
            if tunnel.needed {
                range.flags |= RANGE_OVERLAY;
            }
            match tunnel.remote {
                IpAddr::V4(remote) => range.remote_v4 = V4::new(remote.octets()),
                IpAddr::V6(remote) => range.remote_v6 = V6::new(remote.octets()),
            }
        }
    }

    /// Enters in the node's own record what is not in a table.
    pub(crate) fn enter<A>(&self, node: &mut Node<A>) {
        node.flags = if self.masquerade { NODE_MASQUERADE } else { 0 };
        (node.node_port_first, node.node_port_last) = self.node_ports;
    }
}

/// The surroundings of the node with this name and these own addresses. Texts that are no addresses or networks are
/// passed over: whoever compiles routes tells of them.
#[must_use]
pub fn surroundings(
    desired: &DesiredState,
    node_name: &str,
    own: &[IpAddr],
    choices: &Choices,
) -> Surroundings {
    let mut wanted = Surroundings {
        masquerade: choices.masquerade,
        node_ports: (
            u16::try_from(desired.config.node_port_first).unwrap_or(0),
            u16::try_from(desired.config.node_port_last).unwrap_or(0),
        ),
        ..Surroundings::default()
    };
    wanted.nodes = NodeAddresses::new(&Input {
        node_name,
        configured: &choices.configured,
        present: own,
        nodes: &desired.nodes,
        node_port_addresses: &choices.node_port_addresses,
    });
    let kinds = wanted.nodes.own().map(|own| (own, ENDPOINT_NODE));
    let peers = wanted.nodes.peers().map(|peer| (peer, ENDPOINT_PEER));
    wanted.addresses = kinds
        .chain(peers)
        .map(|((address, serves), kind)| {
            let node_ports = if serves { ENDPOINT_NODE_PORTS } else { 0 };
            (address, kind | node_ports)
        })
        .collect();
    let mut add = |texts: &[String], flags: u32| {
        for network in texts.iter().filter_map(|text| network(text)) {
            wanted.ranges.entry(network).or_default().flags |= flags;
        }
    };
    add(&desired.config.pod_cidrs, RANGE_EXEMPT);
    add(&desired.config.service_cidrs, RANGE_SERVICE);
    for node in desired.nodes.values() {
        let own = if node.name == node_name { RANGE_OWN } else { 0 };
        add(&node.pod_cidrs, RANGE_EXEMPT | own);
    }
    for network in &choices.masquerade_except {
        wanted.ranges.entry(*network).or_default().flags |= RANGE_EXEMPT;
    }
    wanted
}

/// In canonical form: host bits cleared.
fn network(text: &str) -> Option<IpNetwork> {
    let network: IpNetwork = text.parse().ok()?;
    IpNetwork::new(network.network(), network.prefix()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::peers::Tunnel;
    use control_api::v1;

    fn desired() -> DesiredState {
        let node = |name: &str, ip: &str, cidr: &str| v1::Node {
            name: name.into(),
            internal_ips: vec![ip.into()],
            pod_cidrs: vec![cidr.into(), "nonsense".into()],
            ..v1::Node::default()
        };
        let mut desired = DesiredState::default();
        desired.config.pod_cidrs = vec!["10.244.0.0/16".into()];
        desired.config.service_cidrs = vec!["10.96.0.0/16".into()];
        (
            desired.config.node_port_first,
            desired.config.node_port_last,
        ) = (30_000, 32_767);
        for (name, ip, cidr) in [
            ("n1", "192.0.2.11", "10.244.1.0/24"),
            ("n2", "192.0.2.12", "10.244.2.7/24"),
        ] {
            desired.nodes.insert(name.into(), node(name, ip, cidr));
        }
        desired
    }

    #[test]
    fn own_and_foreign_addresses_and_ranges_are_told_apart() {
        let own: IpAddr = "192.0.2.201".parse().unwrap();
        let found = surroundings(&desired(), "n1", &[own], &Choices::default());
        let flags = |text: &str| found.addresses[&text.parse::<IpAddr>().unwrap()];
        assert_eq!(flags("192.0.2.201"), ENDPOINT_NODE | ENDPOINT_NODE_PORTS);
        assert_eq!(flags("192.0.2.11"), ENDPOINT_NODE | ENDPOINT_NODE_PORTS);
        assert_eq!(flags("192.0.2.12"), ENDPOINT_PEER | ENDPOINT_NODE_PORTS);
        let range = |text: &str| found.ranges[&text.parse::<IpNetwork>().unwrap()].flags;
        assert_eq!(range("10.244.1.0/24"), RANGE_EXEMPT | RANGE_OWN);
        assert_eq!(range("10.244.2.0/24"), RANGE_EXEMPT);
        assert_eq!(range("10.244.0.0/16"), RANGE_EXEMPT);
        assert_eq!(range("10.96.0.0/16"), RANGE_SERVICE);
        assert_eq!(found.ranges.len(), 4);
        assert_eq!(found.node_ports, (30_000, 32_767));
    }

    #[test]
    fn tunnels_add_to_what_a_range_is() {
        let mut found = surroundings(&desired(), "n1", &[], &Choices::default());
        let tunnel = |remote: &str, needed| Tunnel {
            remote: remote.parse().unwrap(),
            mtu: 1450,
            needed,
        };
        let (range, address): (IpNetwork, IpNetwork) = (
            "10.244.2.0/24".parse().unwrap(),
            "2001:db8::12/128".parse().unwrap(),
        );
        found.add_tunnels(&Tunnels::from([
            (range, tunnel("192.0.2.12", true)),
            (address, tunnel("2001:db8::12", false)),
        ]));
        let wrapped = found.ranges[&range];
        assert_eq!(wrapped.flags, RANGE_EXEMPT | RANGE_OVERLAY);
        assert_eq!(wrapped.remote_v4, V4::new([192, 0, 2, 12]));
        assert_eq!(wrapped.remote_v6, V6::default());
        let direct = found.ranges[&address];
        assert_eq!((direct.flags, direct.remote_v4), (0, V4::default()));
        assert_ne!(direct.remote_v6, V6::default());
    }

    #[test]
    fn choices_narrow_node_ports_and_widen_exceptions() {
        let choices = Choices {
            masquerade_except: vec!["203.0.113.0/24".parse().unwrap()],
            node_port_addresses: vec!["198.51.100.0/24".parse().unwrap()],
            ..Choices::default()
        };
        let own: IpAddr = "198.51.100.11".parse().unwrap();
        let found = surroundings(&desired(), "n1", &[own], &choices);
        assert_eq!(found.addresses[&own], ENDPOINT_NODE | ENDPOINT_NODE_PORTS);
        let other: IpAddr = "192.0.2.11".parse().unwrap();
        assert_eq!(found.addresses[&other], ENDPOINT_NODE);
        let except: IpNetwork = "203.0.113.0/24".parse().unwrap();
        assert_eq!(found.ranges[&except].flags, RANGE_EXEMPT);
    }
}
