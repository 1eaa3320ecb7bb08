//! Nodes on two segments with a router in between that knows no pod: which way each peer is reached, live.

use std::time::{Duration, Instant};

use control_api::v1::{ObjectKey, ObjectKind};
use weir_tests::topology::Namespace;

use super::agents::{finish, left_out};
use super::cluster::Cluster;
use super::support::talk;

/// Notice of a changed route, a pause until the changes are over, and a comparison.
const NOTICED_WITHIN: Duration = Duration::from_secs(5);

fn route(namespace: &Namespace, destination: &str) -> String {
    let family = if destination.contains(':') {
        "-6"
    } else {
        "-4"
    };
    let shown = namespace
        .ip(&[family, "route", "show", destination])
        .unwrap();
    // Metrics come at the end of a line of their own.
    let words: Vec<&str> = shown.split_whitespace().skip(1).collect();
    words.join(" ")
}

fn mtu(namespace: &Namespace, link: &str) -> u32 {
    let shown = namespace.ip(&["-o", "link", "show", link]).unwrap();
    let mut words = shown.split_whitespace().skip_while(|w| *w != "mtu");
    words.nth(1).unwrap().parse().unwrap()
}

/// Waits for what no revision announces.
fn noticed(what: &str, check: impl Fn() -> bool) {
    let deadline = Instant::now() + NOTICED_WITHIN;
    while !check() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_peer_is_reached_its_own_way_and_that_changes_live() {
    if left_out("every_peer_is_reached_its_own_way_and_that_changes_live") {
        return;
    }
    let mut cluster = Cluster::start_on(&[0, 0, 1]).await;
    let pod = cluster.pod(0, "a");
    let n1 = &cluster.members[0].namespace;

    assert_eq!(
        route(n1, "10.244.2.0/24"),
        "via 192.0.2.12 dev eth0 proto 87 src 192.0.2.11 onlink"
    );
    let wrapped = "via 169.254.1.1 dev weir_vxlan proto 87 src 192.0.2.11 onlink mtu 1450";
    assert_eq!(route(n1, "10.244.3.0/24"), wrapped);
    assert!(route(n1, "fd00:10:244:2::/64").contains("via 2001:db8::12 dev eth0"));
    assert!(route(n1, "fd00:10:244:3::/64").contains("via fe80::1 dev weir_vxlan"));
    assert_eq!(mtu(&pod.namespace, "eth0"), 1450);
    assert_eq!(mtu(n1, "weir_host"), 1450);

    // The segments grow together for this node, and apart again.
    n1.ip(&["route", "add", "198.51.100.0/24", "dev", "eth0"])
        .unwrap();
    n1.ip(&["route", "add", "2001:db8:51::/64", "dev", "eth0"])
        .unwrap();
    let direct = "via 198.51.100.13 dev eth0 proto 87 src 192.0.2.11 onlink";
    noticed("a peer became a neighbour", || {
        route(n1, "10.244.3.0/24") == direct
            && route(n1, "fd00:10:244:3::/64").contains("via 2001:db8:51::13 dev eth0")
    });
    noticed("pods use the whole MTU", || {
        mtu(&pod.namespace, "eth0") == 1500 && mtu(n1, "weir_host") == 1500
    });
    n1.ip(&["route", "del", "198.51.100.0/24", "dev", "eth0"])
        .unwrap();
    noticed("a neighbour went behind the router", || {
        route(n1, "10.244.3.0/24") == wrapped && mtu(&pod.namespace, "eth0") == 1450
    });
    n1.ip(&["link", "del", "weir_vxlan"]).unwrap();
    noticed("the device comes back with its routes", || {
        route(n1, "10.244.3.0/24") == wrapped
    });

    let gone = ObjectKey {
        kind: ObjectKind::Node.into(),
        name: "n3".into(),
        ..ObjectKey::default()
    };
    let revision = cluster.control.change(Vec::new(), vec![("n3", gone)]);
    cluster.programmed(revision).await;
    let n1 = &cluster.members[0].namespace;
    assert_eq!(route(n1, "10.244.3.0/24"), "");
    assert_eq!(mtu(&pod.namespace, "eth0"), 1500);
    finish(&mut cluster, vec![pod]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_reach_one_another_over_a_router_that_knows_none() {
    if left_out("pods_reach_one_another_over_a_router_that_knows_none") {
        return;
    }
    let mut cluster = Cluster::start_on(&[0, 0, 1]).await;
    let pods = [
        cluster.pod(0, "a"),
        cluster.pod(1, "b"),
        cluster.pod(2, "c"),
    ];
    let [a, b, c] = &pods;
    for at in [0, 1] {
        for (from, to) in [(a, b), (a, c), (c, a), (b, c), (c, b)] {
            assert_eq!(
                talk(&from.namespace, &to.namespace, to.ips[at]),
                from.ips[at]
            );
        }
        for member in &cluster.members {
            let name = &member.name;
            for to in [a, b, c] {
                let seen = talk(&member.namespace, &to.namespace, to.ips[at]);
                assert_eq!(seen, member.ips[at], "{name} to {}", to.ips[at]);
            }
            let seen = talk(&c.namespace, &member.namespace, member.ips[at]);
            assert_eq!(seen, c.ips[at], "c to {name}");
        }
    }
    finish(&mut cluster, pods.into());
}
