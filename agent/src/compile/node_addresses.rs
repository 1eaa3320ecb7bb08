//! Which addresses are nodes': this node's and its peers', and on which of them node ports are served.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use control_api::v1::Node;
use ipnetwork::IpNetwork;

use super::services::{Family, unusable};

/// What the addresses follow from.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    pub node_name: &'a str,
    /// The addresses that the configuration names, the primary ones first.
    pub configured: &'a [IpAddr],
    /// All addresses on interfaces of this node, those of pods' links and loopback aside.
    pub present: &'a [IpAddr],
    pub nodes: &'a BTreeMap<String, Node>,
    /// Node ports are served on addresses in these networks; all when empty.
    pub node_port_addresses: &'a [IpNetwork],
}

/// Addresses of nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeAddresses {
    primary: BTreeMap<Family, IpAddr>,
    /// This node's; true where node ports are served.
    own: BTreeMap<IpAddr, bool>,
    /// Those of other nodes. A pod of this node that dials a node port there is served here.
    peers: BTreeMap<IpAddr, bool>,
    /// Pod ranges of all nodes.
    pod_cidrs: BTreeSet<IpNetwork>,
}

impl NodeAddresses {
    #[must_use]
    pub fn new(input: &Input<'_>) -> Self {
        let serves = |address: &IpAddr| {
            let networks = input.node_port_addresses;
            networks.is_empty() || networks.iter().any(|network| network.contains(*address))
        };
        let usable = |address: &IpAddr| unusable(*address).is_none();
        let mut present: BTreeSet<IpAddr> = input.present.iter().copied().filter(usable).collect();
        for family in Family::ALL {
            // An address that the configuration names counts only while there is nothing better to go by.
            if !present.iter().any(|a| Family::of(*a) == family) {
                let configured = input.configured.iter().copied().filter(usable);
                present.extend(configured.filter(|a| Family::of(*a) == family));
            }
        }
        let told = input.nodes.get(input.node_name);
        let preferred: Vec<IpAddr> = told
            .into_iter()
            .flat_map(|node| parsed(&node.internal_ips))
            .chain(input.configured.iter().copied())
            .collect();
        let primary = |family: Family| {
            let of_family = || preferred.iter().filter(|a| Family::of(**a) == family);
            of_family()
                .find(|address| present.contains(address))
                .or_else(|| of_family().next())
                .map(|address| (family, *address))
        };
        let primary = Family::ALL.into_iter().filter_map(primary).collect();
        let of_node = |node: &Node| -> Vec<IpAddr> {
            let internal = parsed(&node.internal_ips);
            internal.chain(parsed(&node.external_ips)).collect()
        };
        // An external address may be a router's that leads here: it means this node all the same.
        let own = told.into_iter().flat_map(of_node).filter(usable);
        present.extend(own);
        let peers = input
            .nodes
            .values()
            .filter(|node| node.name != input.node_name)
            .flat_map(of_node)
            .filter(|address| usable(address) && !present.contains(address))
            .map(|address| (address, serves(&address)))
            .collect();
        let pod_cidrs = input.nodes.values().flat_map(|node| &node.pod_cidrs);
        Self {
            primary,
            own: present.iter().map(|a| (*a, serves(a))).collect(),
            peers,
            pod_cidrs: pod_cidrs.filter_map(|text| text.parse().ok()).collect(),
        }
    }

    /// Source of translated packets, and where the node's own servers are reached.
    #[must_use]
    pub fn primary(&self, family: Family) -> Option<IpAddr> {
        self.primary.get(&family).copied()
    }

    /// This node's addresses, and whether node ports are served there.
    pub fn own(&self) -> impl Iterator<Item = (IpAddr, bool)> {
        self.own.iter().map(|(address, serves)| (*address, *serves))
    }

    /// Addresses of other nodes, and whether node ports are served there.
    pub fn peers(&self) -> impl Iterator<Item = (IpAddr, bool)> {
        self.peers
            .iter()
            .map(|(address, serves)| (*address, *serves))
    }

    #[must_use]
    pub fn is_own(&self, address: IpAddr) -> bool {
        self.own.contains_key(&address)
    }

    /// Of any node.
    #[must_use]
    pub fn is_node(&self, address: IpAddr) -> bool {
        self.is_own(address) || self.peers.contains_key(&address)
    }

    /// In a range of pod addresses of any node.
    #[must_use]
    pub fn is_pod(&self, address: IpAddr) -> bool {
        self.pod_cidrs.iter().any(|cidr| cidr.contains(address))
    }
}

fn parsed(texts: &[String]) -> impl Iterator<Item = IpAddr> {
    texts.iter().filter_map(|text| text.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn node(name: &str, internal: &[&str], external: &[&str]) -> (String, Node) {
        let texts = |list: &[&str]| list.iter().map(|t| (*t).to_owned()).collect();
        let node = Node {
            name: name.into(),
            internal_ips: texts(internal),
            external_ips: texts(external),
            pod_cidrs: vec!["10.244.1.0/24".into()],
            ..Node::default()
        };
        (name.into(), node)
    }

    fn compile(present: &[&str], filter: &[&str], nodes: &[(String, Node)]) -> NodeAddresses {
        let present: Vec<IpAddr> = present.iter().map(|t| ip(t)).collect();
        let filter: Vec<IpNetwork> = filter.iter().map(|t| t.parse().unwrap()).collect();
        NodeAddresses::new(&Input {
            node_name: "n1",
            configured: &[ip("192.0.2.11"), ip("2001:db8::11")],
            present: &present,
            nodes: &nodes.iter().cloned().collect(),
            node_port_addresses: &filter,
        })
    }

    #[test]
    fn what_is_on_interfaces_is_this_nodes() {
        let addresses = compile(
            &["192.0.2.201", "192.0.2.11", "127.0.0.1", "fe80::1"],
            &[],
            &[],
        );
        let own: Vec<_> = addresses.own().collect();
        assert_eq!(
            own,
            [
                (ip("192.0.2.11"), true),
                (ip("192.0.2.201"), true),
                (ip("2001:db8::11"), true)
            ]
        );
        assert_eq!(addresses.primary(Family::V4), Some(ip("192.0.2.11")));
    }

    #[test]
    fn an_address_that_went_is_no_longer_the_primary_one() {
        let nodes = [node("n1", &["192.0.2.77"], &[])];
        let addresses = compile(&["192.0.2.77"], &[], &nodes);
        assert_eq!(addresses.primary(Family::V4), Some(ip("192.0.2.77")));
        assert!(!addresses.is_node(ip("192.0.2.11")));
    }

    #[test]
    fn peers_have_internal_and_external_addresses() {
        let nodes = [
            node("n1", &["192.0.2.11"], &["203.0.113.1"]),
            node("n2", &["192.0.2.12", "192.0.2.11"], &["203.0.113.2"]),
        ];
        let addresses = compile(&["192.0.2.11"], &["192.0.2.0/24"], &nodes);
        let peers: Vec<_> = addresses.peers().collect();
        assert_eq!(
            peers,
            [(ip("192.0.2.12"), true), (ip("203.0.113.2"), false)],
            "nobody takes over an address of this node"
        );
        assert!(addresses.is_own(ip("203.0.113.1")));
        assert!(addresses.is_pod(ip("10.244.1.9")));
    }
}
