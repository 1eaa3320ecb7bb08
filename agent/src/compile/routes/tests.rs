use control_api::v1::Node;

use super::*;
use crate::compile::peers::{Reach, Tunnel, pod_mtu};

const OVERLAY: u32 = 4;
const ON_LINK: Reach = Reach::OnLink { link: 2, mtu: 1500 };
const ROUTED: Reach = Reach::Routed { mtu: 1500 };

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

fn compile(nodes: &BTreeMap<String, Node>, reach: &[(&str, Reach)], pods: &[LocalPod]) -> Compiled {
    compile_with(nodes, reach, pods, Some(OVERLAY))
}

fn compile_with(
    nodes: &BTreeMap<String, Node>,
    reach: &[(&str, Reach)],
    pods: &[LocalPod],
    overlay_link: Option<u32>,
) -> Compiled {
    let reach = reach.iter().map(|(a, r)| (ip(a), *r)).collect();
    routes(&Input {
        node_name: "n1",
        node_ips: &[ip("192.0.2.11"), ip("2001:db8::11")],
        nodes,
        service_cidrs: &["10.96.0.0/16".into(), "fd00:96::/112".into()],
        service_addresses: &[ip("10.96.0.20"), ip("203.0.113.10")],
        host_link: 3,
        overlay_link,
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
    let compiled = compile(
        &nodes,
        &[("192.0.2.12", ON_LINK), ("2001:db8::12", ON_LINK)],
        &[],
    );
    let routes = compiled.routes;
    assert_eq!(compiled.problems, []);
    let over_v4 = Tunnel {
        remote: ip("192.0.2.12"),
        mtu: 1450,
        needed: false,
    };
    for range in ["10.244.2.0/24", "fd00:244:2::/64", "192.0.2.12/32"] {
        assert_eq!(compiled.tunnels[&net(range)], over_v4, "{range}");
    }
    assert_eq!(
        compiled.tunnels[&net("2001:db8::12/128")].remote,
        ip("2001:db8::12")
    );
    assert_eq!(compiled.tunnels.len(), 4);
    assert_eq!(pod_mtu(1500, &compiled.tunnels, false), 1500);
    assert_eq!(pod_mtu(1500, &compiled.tunnels, true), 1430);
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
    assert_eq!(
        routes[&net("203.0.113.10/32")],
        routes[&net("10.96.0.0/16")],
        "a balancer's address leads to the programs; those of the service range do already"
    );
    assert_eq!(routes.len(), 7);
}

/// Ranges without another way, with remote and MTU.
fn needed(compiled: &Compiled) -> Vec<(IpNetwork, IpAddr, u32)> {
    let tunnels = compiled.tunnels.iter().filter(|(_, t)| t.needed);
    tunnels.map(|(n, t)| (*n, t.remote, t.mtu)).collect()
}

#[test]
fn each_peer_decides_for_itself() {
    let nodes = BTreeMap::from([
        node("n1", &[], &["10.244.1.0/24"]),
        node("n2", &["192.0.2.12"], &["10.244.2.0/24"]),
        node("n3", &["198.51.100.13"], &["10.244.3.0/24"]),
        node("n4", &["192.0.2.14"], &["10.244.4.0/24"]),
        node("n5", &["192.0.2.15"], &["nonsense"]),
        node("n6", &[], &["10.244.6.0/24"]),
    ]);
    let reach = [("192.0.2.12", ON_LINK), ("198.51.100.13", ROUTED)];
    let compiled = compile(&nodes, &reach, &[]);
    assert!(matches!(
        compiled.routes[&net("10.244.2.0/24")],
        Path::Via { link: 2, .. }
    ));
    assert_eq!(
        compiled.routes[&net("10.244.3.0/24")],
        Path::Overlay {
            link: OVERLAY,
            source: Some(ip("192.0.2.11")),
            mtu: 1450
        }
    );
    assert_eq!(
        needed(&compiled),
        [(net("10.244.3.0/24"), ip("198.51.100.13"), 1450)]
    );
    let text: Vec<String> = compiled.problems.iter().map(ToString::to_string).collect();
    assert_eq!(text.len(), 3, "{text:?}");
    let told = |name: &str, what: &str| text.iter().any(|t| t.contains(name) && t.contains(what));
    assert!(told("n4", "no route"));
    assert!(told("n5", "nonsense"));
    assert!(told("n6", "InternalIP"));
}

#[test]
fn without_the_overlay_a_router_in_between_is_a_problem() {
    let nodes = BTreeMap::from([node("n3", &["198.51.100.13"], &["10.244.3.0/24"])]);
    let compiled = compile_with(&nodes, &[("198.51.100.13", ROUTED)], &[], None);
    assert!(!compiled.routes.contains_key(&net("10.244.3.0/24")));
    assert_eq!(compiled.tunnels, Tunnels::new());
    assert!(matches!(
        &compiled.problems[..],
        [Problem::NotOnLink { node, .. }] if node == "n3"
    ));
}

#[test]
fn families_decide_for_themselves_and_prefer_the_shorter_header() {
    let ranges = ["10.244.2.0/24", "fd00:244:2::/64"];
    let nodes = BTreeMap::from([node("n2", &["198.51.100.12", "2001:db8::12"], &ranges)]);
    let v4 = Reach::Routed { mtu: 1400 };

    let compiled = compile(
        &nodes,
        &[("198.51.100.12", v4), ("2001:db8::12", ON_LINK)],
        &[],
    );
    assert!(matches!(
        compiled.routes[&net("fd00:244:2::/64")],
        Path::Via { gateway, .. } if gateway == ip("2001:db8::12")
    ));
    let over_v4 = |mtu| Tunnel {
        remote: ip("198.51.100.12"),
        mtu,
        needed: true,
    };
    assert_eq!(
        needed(&compiled),
        [(net("10.244.2.0/24"), ip("198.51.100.12"), 1350)]
    );

    let compiled = compile(
        &nodes,
        &[("198.51.100.12", v4), ("2001:db8::12", ROUTED)],
        &[],
    );
    assert_eq!(compiled.tunnels[&net("fd00:244:2::/64")], over_v4(1350));

    let narrow = [("198.51.100.12", Reach::Routed { mtu: 600 })];
    let compiled = compile(&nodes, &narrow, &[]);
    assert_eq!(compiled.tunnels[&net("10.244.2.0/24")], over_v4(576));
    assert_eq!(compiled.tunnels[&net("fd00:244:2::/64")], over_v4(1280));

    let compiled = compile(&nodes, &[("2001:db8::12", ROUTED)], &[]);
    let over_v6 = Tunnel {
        remote: ip("2001:db8::12"),
        mtu: 1430,
        needed: true,
    };
    assert_eq!(compiled.tunnels[&net("10.244.2.0/24")], over_v6);
    assert_eq!(compiled.tunnels[&net("fd00:244:2::/64")], over_v6);
}

#[test]
fn any_address_on_a_link_of_ours_makes_a_neighbour() {
    let nodes = BTreeMap::from([node(
        "n2",
        &["198.51.100.12", "192.0.2.12"],
        &["10.244.2.0/24"],
    )]);
    let reach = [("198.51.100.12", ROUTED), ("192.0.2.12", ON_LINK)];
    let compiled = compile(&nodes, &reach, &[]);
    assert!(matches!(
        compiled.routes[&net("10.244.2.0/24")],
        Path::Via { gateway, .. } if gateway == ip("192.0.2.12")
    ));
    assert_eq!(needed(&compiled), []);
}

#[test]
fn pods_leave_room_for_the_headers_only_while_they_are_needed() {
    let tunnel = |remote: &str| Tunnel {
        remote: ip(remote),
        mtu: 1300,
        needed: true,
    };
    let mut tunnels = Tunnels::new();
    assert_eq!(pod_mtu(1500, &tunnels, false), 1500);
    tunnels.insert(net("10.244.3.0/24"), tunnel("198.51.100.13"));
    assert_eq!(pod_mtu(1500, &tunnels, false), 1450);
    tunnels.insert(net("fd00:244:4::/64"), tunnel("2001:db8::14"));
    assert_eq!(pod_mtu(1500, &tunnels, false), 1430);
    assert_eq!(pod_mtu(60, &tunnels, false), 0);
}

#[test]
fn nobody_takes_over_the_range_of_this_node() {
    let nodes = BTreeMap::from([
        node("a", &["192.0.2.10"], &["10.244.1.0/24"]),
        node("n1", &[], &["10.244.1.0/24"]),
    ]);
    let compiled = compile(&nodes, &[("192.0.2.10", ON_LINK)], &[]);
    assert_eq!(compiled.routes[&net("10.244.1.0/24")], Path::Unreachable);
    assert!(matches!(&compiled.problems[..], [Problem::Claimed { other, .. }] if other == "n1"));
}

#[test]
fn local_pods_are_neighbours() {
    let pods = [LocalPod {
        address: ip("fd00:244:1::5"),
        link: 9,
    }];
    let routes = compile(&BTreeMap::new(), &[], &pods).routes;
    assert_eq!(
        routes[&net("fd00:244:1::5/128")],
        Path::Link {
            link: 9,
            source: Some(ip("2001:db8::11"))
        }
    );
}
