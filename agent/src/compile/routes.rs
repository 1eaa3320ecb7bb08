//! Nodes, local pods and services to the routes this node should have.
//!
//! Every route goes to the main table with our protocol number. A destination has one path; metrics are not used.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use control_api::v1::Node;
use ipnetwork::IpNetwork;

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
    /// Nothing there: senders are told so.
    Unreachable,
}

/// Wanted routes by destination.
pub type Routes = BTreeMap<IpNetwork, Path>;

/// What the kernel says about the way to a peer's InternalIP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// A neighbour on this link: no gateway in between.
    OnLink { link: u32 },
    /// Behind a gateway, which does not know pod addresses.
    Routed,
    /// No way at all.
    Unknown,
}

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
    /// Interface index of the host link.
    pub host_link: u32,
    /// Sources that the dataplane puts on packets of the node to itself; their replies go back over the host link.
    pub host_link_addresses: &'a [IpAddr],
    pub pods: &'a [LocalPod],
    /// Answer for every address that [`peer_addresses`] names.
    pub reach: &'a BTreeMap<IpAddr, Reach>,
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
    #[error(
        "node {node} has pod range {cidr} but no InternalIP of that family; pods there cannot be reached"
    )]
    NoAddress { node: String, cidr: IpNetwork },
    #[error(
        "node {node} ({gateway}) is behind a router; only nodes on a common segment are connected, so pod range {cidr} has no route"
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

/// Addresses of peers whose reach must be known before [`routes`] is called.
#[must_use]
pub fn peer_addresses(node_name: &str, nodes: &BTreeMap<String, Node>) -> BTreeSet<IpAddr> {
    nodes
        .values()
        .filter(|n| n.name != node_name)
        .flat_map(|n| &n.internal_ips)
        .filter_map(|ip| ip.parse().ok())
        .collect()
}

/// The routes this node should have, and what stands in the way of others.
#[must_use]
pub fn routes(input: &Input<'_>) -> (Routes, Vec<Problem>) {
    let mut routes = Routes::new();
    let mut problems = Vec::new();
    peers(input, &mut routes, &mut problems);
    if let Some(node) = input.nodes.get(input.node_name) {
        for cidr in parse("pod range of this node", &node.pod_cidrs, &mut problems) {
            // What is not a pod of ours is nowhere else: never send it to a default route.
            routes.insert(cidr, Path::Unreachable);
        }
    }
    for cidr in parse("service range", input.service_cidrs, &mut problems) {
        routes.insert(cidr, over_host_link(input, cidr.ip()));
    }
    for address in input.host_link_addresses {
        routes.insert(IpNetwork::from(*address), over_host_link(input, *address));
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
    (routes, problems)
}

fn peers(input: &Input<'_>, routes: &mut Routes, problems: &mut Vec<Problem>) {
    let mut owners: BTreeMap<IpNetwork, &str> = BTreeMap::new();
    // Our own ranges first: no peer may claim them.
    let own = input.nodes.get(input.node_name);
    for node in own
        .into_iter()
        .chain(input.nodes.values().filter(|n| n.name != input.node_name))
    {
        let what = format!("pod range of node {}", node.name);
        for cidr in parse(&what, &node.pod_cidrs, problems) {
            if let Some(other) = owners.get(&cidr) {
                problems.push(Problem::Claimed {
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
            match peer_path(input, node, cidr) {
                Ok(path) => {
                    routes.insert(cidr, path);
                }
                Err(problem) => problems.push(problem),
            }
        }
    }
}

fn peer_path(input: &Input<'_>, node: &Node, cidr: IpNetwork) -> Result<Path, Problem> {
    let gateway = node
        .internal_ips
        .iter()
        .filter_map(|ip| ip.parse::<IpAddr>().ok())
        .find(|ip| ip.is_ipv4() == cidr.is_ipv4())
        .ok_or_else(|| Problem::NoAddress {
            node: node.name.clone(),
            cidr,
        })?;
    match input.reach.get(&gateway).copied().unwrap_or(Reach::Unknown) {
        Reach::OnLink { link } => Ok(Path::Via {
            gateway,
            link,
            source: source_for(input.node_ips, gateway),
        }),
        Reach::Routed => Err(Problem::NotOnLink {
            node: node.name.clone(),
            gateway,
            cidr,
        }),
        Reach::Unknown => Err(Problem::Unreachable {
            node: node.name.clone(),
            gateway,
            cidr,
        }),
    }
}

fn over_host_link(input: &Input<'_>, address: IpAddr) -> Path {
    Path::Via {
        gateway: gateway_for(address),
        link: input.host_link,
        source: source_for(input.node_ips, address),
    }
}

fn source_for(node_ips: &[IpAddr], address: IpAddr) -> Option<IpAddr> {
    node_ips
        .iter()
        .copied()
        .find(|ip| ip.is_ipv4() == address.is_ipv4())
}

/// Networks in canonical form (host bits cleared).
fn parse(what: &str, texts: &[String], problems: &mut Vec<Problem>) -> Vec<IpNetwork> {
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
mod tests {
    use super::*;

    fn node(name: &str, ips: &[&str], cidrs: &[&str]) -> (String, Node) {
        let strings = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect();
        let node = Node {
            name: name.into(),
            internal_ips: strings(ips),
            pod_cidrs: strings(cidrs),
            ..Node::default()
        };
        (name.into(), node)
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn net(text: &str) -> IpNetwork {
        text.parse().unwrap()
    }

    fn compile(
        nodes: &BTreeMap<String, Node>,
        reach: &[(&str, Reach)],
        pods: &[LocalPod],
    ) -> (Routes, Vec<Problem>) {
        let reach = reach.iter().map(|(a, r)| (ip(a), *r)).collect();
        routes(&Input {
            node_name: "n1",
            node_ips: &[ip("192.0.2.11"), ip("2001:db8::11")],
            nodes,
            service_cidrs: &["10.96.0.0/16".into(), "fd00:96::/112".into()],
            host_link: 3,
            host_link_addresses: &[],
            pods,
            reach: &reach,
        })
    }

    #[test]
    fn peers_on_the_segment_get_direct_routes_of_both_families() {
        let nodes = BTreeMap::from([
            node("n1", &["192.0.2.11"], &["10.244.1.0/24", "fd00:244:1::/64"]),
            node(
                "n2",
                &["192.0.2.12", "2001:db8::12"],
                &["10.244.2.0/24", "fd00:244:2::/64"],
            ),
        ]);
        let on_link = Reach::OnLink { link: 2 };
        let (routes, problems) = compile(
            &nodes,
            &[("192.0.2.12", on_link), ("2001:db8::12", on_link)],
            &[],
        );
        assert_eq!(problems, []);
        assert_eq!(
            routes[&net("10.244.2.0/24")],
            Path::Via {
                gateway: ip("192.0.2.12"),
                link: 2,
                source: Some(ip("192.0.2.11"))
            }
        );
        assert_eq!(
            routes[&net("fd00:244:2::/64")],
            Path::Via {
                gateway: ip("2001:db8::12"),
                link: 2,
                source: Some(ip("2001:db8::11"))
            }
        );
        assert_eq!(routes[&net("10.244.1.0/24")], Path::Unreachable);
        assert_eq!(
            routes[&net("10.96.0.0/16")],
            Path::Via {
                gateway: GATEWAY_V4,
                link: 3,
                source: Some(ip("192.0.2.11"))
            }
        );
        assert_eq!(routes.len(), 6);
    }

    #[test]
    fn each_peer_decides_for_itself() {
        let nodes = BTreeMap::from([
            node("n1", &[], &["10.244.1.0/24"]),
            node("n2", &["192.0.2.12"], &["10.244.2.0/24"]),
            node("n3", &["198.51.100.13"], &["10.244.3.0/24"]),
            node("n4", &["2001:db8::14"], &["10.244.4.0/24"]),
            node("n5", &["192.0.2.15"], &["nonsense"]),
        ]);
        let (routes, problems) = compile(
            &nodes,
            &[
                ("192.0.2.12", Reach::OnLink { link: 2 }),
                ("198.51.100.13", Reach::Routed),
            ],
            &[],
        );
        assert!(routes.contains_key(&net("10.244.2.0/24")));
        assert!(!routes.contains_key(&net("10.244.3.0/24")));
        let text: Vec<String> = problems.iter().map(ToString::to_string).collect();
        assert_eq!(problems.len(), 3, "{text:?}");
        assert!(
            text.iter()
                .any(|t| t.contains("n3") && t.contains("router"))
        );
        assert!(
            text.iter()
                .any(|t| t.contains("n4") && t.contains("family"))
        );
        assert!(text.iter().any(|t| t.contains("nonsense")));
    }

    #[test]
    fn nobody_takes_over_the_range_of_this_node() {
        let nodes = BTreeMap::from([
            node("a", &["192.0.2.10"], &["10.244.1.0/24"]),
            node("n1", &[], &["10.244.1.0/24"]),
        ]);
        let (routes, problems) = compile(&nodes, &[("192.0.2.10", Reach::OnLink { link: 2 })], &[]);
        assert_eq!(routes[&net("10.244.1.0/24")], Path::Unreachable);
        assert!(matches!(&problems[..], [Problem::Claimed { other, .. }] if other == "n1"));
    }

    #[test]
    fn local_pods_are_neighbours() {
        let pods = [LocalPod {
            address: ip("fd00:244:1::5"),
            link: 9,
        }];
        let (routes, _) = compile(&BTreeMap::new(), &[], &pods);
        assert_eq!(
            routes[&net("fd00:244:1::5/128")],
            Path::Link {
                link: 9,
                source: Some(ip("2001:db8::11"))
            }
        );
    }
}
