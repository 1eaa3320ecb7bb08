//! Small clusters, policies and changes by chance: few names and numbers, so that things meet.

use std::net::IpAddr;

use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use serde_json::{Value, json};

use crate::actor::command::Protocol;
use crate::cases::policy::case::{
    AgentChange, Change, Family, HostSpec, LabelPod, Labels, NamespaceSpec, Phase, PodRef, PodSpec,
    PolicyRef, PortSpec, Query, SetPod,
};
use crate::cases::policy::world::World;

/// Changes of one history.
pub(super) const STEPS: usize = 3;
const QUERIES: usize = 12;
const NAMESPACES: [&str; 3] = ["red", "blue", "green"];
const NODES: [&str; 2] = ["n1", "n2"];
const NAMES: [&str; 6] = ["a", "b", "c", "d", "e", "f"];
const PORTS: [u16; 10] = [1, 53, 79, 80, 81, 443, 8000, 8080, 8191, 65535];
const PROTOCOLS: [Protocol; 3] = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp];
const CIDRS: [&str; 10] = [
    "0.0.0.0/0",
    "10.10.0.0/16",
    "10.10.1.0/24",
    "10.10.1.4/30",
    "10.10.1.5/32",
    "192.0.2.0/24",
    "203.0.113.0/25",
    "::/0",
    "fd10:1::/64",
    "fd00:a::/64",
];
const HOLES: [(&str, &[&str]); 4] = [
    (
        "0.0.0.0/0",
        &[
            "10.10.1.0/24",
            "192.0.2.0/24",
            "10.10.0.0/16",
            "203.0.113.9/32",
        ],
    ),
    (
        "10.10.0.0/16",
        &["10.10.1.4/30", "10.10.2.0/24", "10.10.1.5/32"],
    ),
    ("192.0.2.0/24", &["192.0.2.11/32"]),
    ("::/0", &["fd10:1::/64", "fd10::/16", "2001:db8::/32"]),
];

fn pick<'a, T>(rng: &mut StdRng, all: &'a [T]) -> &'a T {
    all.choose(rng).expect("something to choose from")
}

fn chance(rng: &mut StdRng, percent: u32) -> bool {
    rng.random_range(0..100) < percent
}

fn labels(rng: &mut StdRng) -> Labels {
    let mut labels = Labels::new();
    for key in ["k", "l"] {
        if chance(rng, 60) {
            labels.insert(key.into(), (*pick(rng, &["x", "y", ""])).into());
        }
    }
    labels
}

pub(super) fn world(rng: &mut StdRng) -> World {
    let mut world = World::default();
    let ips = |texts: [&str; 2]| {
        texts
            .iter()
            .map(|t| t.parse().unwrap())
            .collect::<Vec<IpAddr>>()
    };
    let mut host = |name: &str, texts| HostSpec {
        name: name.into(),
        labels: labels(rng),
        ips: ips(texts),
    };
    for (name, texts) in [
        ("n1", ["192.0.2.11", "fd00:a::11"]),
        ("n2", ["192.0.2.12", "fd00:a::12"]),
    ] {
        world.nodes.insert(name.into(), host(name, texts));
    }
    world
        .externals
        .insert("out".into(), host("out", ["203.0.113.9", "2001:db8::9"]));
    for name in NAMESPACES {
        world.put_namespace(name, &labels(rng));
    }
    for _ in 0..rng.random_range(2..7) {
        if let Some(spec) = pod_that_fits(rng, &world) {
            world.create_pod(&spec).unwrap();
        }
    }
    for _ in 0..rng.random_range(0..5) {
        let policy = Change::Apply(policy(rng));
        world.change(&policy).unwrap();
    }
    world
}

fn pod(rng: &mut StdRng) -> PodSpec {
    let node = rng.random_range(1..3);
    let host = rng.random_range(3..9);
    let mut ips: Vec<IpAddr> = vec![format!("10.10.{node}.{host}").parse().unwrap()];
    if chance(rng, 50) {
        ips.push(format!("fd10:{node}::{host}").parse().unwrap());
    }
    let mut ports = Vec::new();
    for (name, protocol) in [
        ("web", Protocol::Tcp),
        ("dns", Protocol::Udp),
        ("web", Protocol::Udp),
    ] {
        if chance(rng, 30) {
            let port = *pick(rng, &PORTS);
            ports.push(PortSpec {
                name: name.into(),
                port,
                protocol,
            });
        }
    }
    PodSpec {
        namespace: (*pick(rng, &NAMESPACES)).into(),
        name: (*pick(rng, &NAMES)).into(),
        node: NODES[node - 1].into(),
        labels: labels(rng),
        ips,
        ports,
        host_network: chance(rng, 10),
        phase: chance(rng, 8)
            .then(|| *pick(rng, &[Phase::Succeeded, Phase::Failed, Phase::Pending])),
        ready: chance(rng, 20).then_some(false),
        deletion_timestamp: chance(rng, 10).then(|| "2030-01-01T00:00:00Z".into()),
    }
}

fn selector(rng: &mut StdRng) -> Value {
    let mut selector = json!({});
    if chance(rng, 45) {
        selector["matchLabels"] = json!({*pick(rng, &["k", "l"]): pick(rng, &["x", "y", ""])});
    }
    if chance(rng, 30) {
        let operator = *pick(rng, &["In", "NotIn", "Exists", "DoesNotExist"]);
        let mut one = json!({"key": pick(rng, &["k", "l"]), "operator": operator});
        if operator.ends_with("In") {
            one["values"] = (*pick(rng, &[json!(["x"]), json!(["x", "y"]), json!([""])])).clone();
        }
        selector["matchExpressions"] = json!([one]);
    }
    selector
}

fn namespace_selector(rng: &mut StdRng) -> Value {
    if chance(rng, 30) {
        return json!({"matchLabels": {"kubernetes.io/metadata.name": pick(rng, &NAMESPACES)}});
    }
    selector(rng)
}

fn few(rng: &mut StdRng, most: usize, mut one: impl FnMut(&mut StdRng) -> Value) -> Value {
    let count = rng.random_range(0..=most);
    (0..count).map(|_| one(rng)).collect()
}

fn policy(rng: &mut StdRng) -> Value {
    if chance(rng, 40) {
        cluster_policy(rng)
    } else {
        network_policy(rng)
    }
}

fn network_policy(rng: &mut StdRng) -> Value {
    let mut spec = json!({"podSelector": selector(rng)});
    match rng.random_range(0..4) {
        0 => spec["policyTypes"] = json!(["Ingress", "Egress"]),
        1 => spec["policyTypes"] = json!(["Egress"]),
        2 => spec["policyTypes"] = json!(["Ingress"]),
        _ => {}
    }
    for (rules, peers) in [("ingress", "from"), ("egress", "to")] {
        if chance(rng, 70) {
            spec[rules] = few(rng, 2, |rng| {
                let mut rule = json!({});
                if chance(rng, 70) {
                    rule[peers] = few(rng, 2, peer);
                }
                if chance(rng, 60) {
                    rule["ports"] = few(rng, 2, port);
                }
                rule
            });
        }
    }
    json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"namespace": pick(rng, &NAMESPACES), "name": pick(rng, &NAMES)}, "spec": spec})
}

fn peer(rng: &mut StdRng) -> Value {
    match rng.random_range(0..4) {
        0 => json!({"podSelector": selector(rng)}),
        1 => json!({"namespaceSelector": namespace_selector(rng)}),
        2 => json!({"namespaceSelector": namespace_selector(rng), "podSelector": selector(rng)}),
        _ if chance(rng, 50) => json!({"ipBlock": {"cidr": pick(rng, &CIDRS)}}),
        _ => {
            let (cidr, holes) = *pick(rng, &HOLES);
            let first = *pick(rng, holes);
            let second = *pick(rng, holes);
            json!({"ipBlock": {"cidr": cidr, "except": [first, second]}})
        }
    }
}

fn port(rng: &mut StdRng) -> Value {
    let mut port = json!({});
    if chance(rng, 60) {
        port["protocol"] = pick(rng, &PROTOCOLS).name().into();
    }
    match rng.random_range(0..4) {
        0 => port["port"] = (*pick(rng, &["web", "dns", "none"])).into(),
        1 => {
            let (one, other) = (*pick(rng, &PORTS), *pick(rng, &PORTS));
            port["port"] = one.min(other).into();
            port["endPort"] = one.max(other).into();
        }
        2 => port["port"] = (*pick(rng, &PORTS)).into(),
        _ => {}
    }
    port
}

fn cluster_policy(rng: &mut StdRng) -> Value {
    let mut spec = json!({"tier": pick(rng, &["Admin", "Admin", "Baseline"]), "priority": rng.random_range(0..3)});
    spec["subject"] = cluster_pods(rng);
    for (rules, peers) in [("ingress", "from"), ("egress", "to")] {
        if chance(rng, 70) {
            let baseline = spec["tier"] == "Baseline";
            spec[rules] = few(rng, 3, |rng| cluster_rule(rng, peers, baseline));
        }
    }
    json!({"apiVersion": "policy.networking.k8s.io/v1alpha2", "kind": "ClusterNetworkPolicy",
        "metadata": {"name": pick(rng, &NAMES)}, "spec": spec})
}

fn cluster_pods(rng: &mut StdRng) -> Value {
    if chance(rng, 50) {
        return json!({"namespaces": namespace_selector(rng)});
    }
    json!({"pods": {"namespaceSelector": namespace_selector(rng), "podSelector": selector(rng)}})
}

fn cluster_rule(rng: &mut StdRng, peers: &str, baseline: bool) -> Value {
    let actions: &[&str] = if baseline {
        &["Accept", "Deny"]
    } else {
        &["Accept", "Deny", "Pass"]
    };
    let mut rule = json!({"action": pick(rng, actions)});
    let mut by_address = false;
    let count = rng.random_range(1..3);
    let list: Vec<Value> = (0..count)
        .map(|_| {
            let kind = if peers == "to" {
                rng.random_range(0..10)
            } else {
                0
            };
            by_address |= kind > 5;
            match kind {
                6 | 7 => json!({"networks": [pick(rng, &CIDRS)]}),
                8 => json!({"networks": [pick(rng, &CIDRS), pick(rng, &CIDRS)]}),
                9 => json!({"nodes": selector(rng)}),
                _ if chance(rng, 4) => json!({"carrots": {}}),
                _ => cluster_pods(rng),
            }
        })
        .collect();
    rule[peers] = list.into();
    if chance(rng, 50) {
        let count = rng.random_range(1..3);
        let protocols: Vec<Value> = (0..count).map(|_| cluster_port(rng, by_address)).collect();
        rule["protocols"] = protocols.into();
    }
    rule
}

fn cluster_port(rng: &mut StdRng, by_address: bool) -> Value {
    if !by_address && chance(rng, 30) {
        return json!({"destinationNamedPort": pick(rng, &["web", "dns"])});
    }
    let protocol = *pick(rng, &["tcp", "udp", "sctp"]);
    let (one, other) = (*pick(rng, &PORTS), *pick(rng, &PORTS));
    let port = if chance(rng, 50) || one == other {
        json!({"number": one})
    } else {
        json!({"range": {"start": one.min(other), "end": one.max(other)}})
    };
    json!({protocol: {"destinationPort": port}})
}

/// Packets between things of the world, to ports that somebody may speak of.
pub(super) fn queries(rng: &mut StdRng, world: &World) -> Vec<Query> {
    let mut ends: Vec<String> = world
        .pods
        .iter()
        .filter(|(_, pod)| {
            let owns = |ip: &IpAddr| world.owner(*ip).is_some_and(|o| o.number == pod.number);
            // Of two pods with one address only the younger can send and get.
            pod.spec.host_network || pod.spec.ips.iter().all(owns)
        })
        .map(|((namespace, name), _)| format!("{namespace}/{name}"))
        .collect();
    ends.extend(["node:n1", "node:n2", "ext:out"].map(str::to_owned));
    let one = |rng: &mut StdRng| {
        let protocol = match rng.random_range(0..8) {
            0 => Protocol::Icmp,
            n => PROTOCOLS[n % 3],
        };
        let around: i32 = *pick(rng, &[0, 0, 0, 1, -1]);
        let port = u16::try_from(i32::from(*pick(rng, &PORTS)) + around)
            .unwrap_or(1)
            .max(1);
        Query {
            from: pick(rng, &ends).clone(),
            to: pick(rng, &ends).clone(),
            port: if protocol == Protocol::Icmp { 0 } else { port },
            protocol,
            family: chance(rng, 40).then_some(Family::V6),
            size: None,
            backend: None,
        }
    };
    (0..QUERIES).map(|_| one(rng)).collect()
}

/// Something that may happen to the world.
pub(super) fn change(rng: &mut StdRng, world: &World) -> Option<Change> {
    let keys: Vec<_> = world.pods.keys().cloned().collect();
    let pod = keys
        .choose(rng)
        .map(|(namespace, name)| format!("{namespace}/{name}"));
    Some(match rng.random_range(0..12) {
        0..=3 => Change::Apply(policy(rng)),
        4 => {
            let all: Vec<_> = world.policies.keys().cloned().collect();
            let (kind, namespace, name) = all.choose(rng)?.clone();
            Change::DeletePolicy(PolicyRef {
                namespace,
                name,
                kind: Some(kind),
            })
        }
        5 | 6 => Change::LabelPod(LabelPod {
            pod: pod?,
            labels: labels(rng),
        }),
        7 => Change::LabelNamespace(NamespaceSpec {
            name: (*pick(rng, &NAMESPACES)).into(),
            labels: labels(rng),
        }),
        8 => {
            let spec = pod_that_fits(rng, world)?;
            Change::CreatePod(spec)
        }
        9 => Change::DeletePod(PodRef { pod: pod? }),
        10 => Change::SetPod(SetPod {
            pod: pod?,
            phase: Some(*pick(rng, &[Phase::Succeeded, Phase::Failed])),
            ready: None,
            deletion_timestamp: None,
        }),
        _ => Change::Agent(AgentChange::GracefulRestart),
    })
}

/// A pod with a name and addresses that no other has: nodes give an address anew only when its pod has left the wire.
fn pod_that_fits(rng: &mut StdRng, world: &World) -> Option<PodSpec> {
    let spec = pod(rng);
    let key = (spec.namespace.clone(), spec.name.clone());
    let mut live = world.pods.values().filter(|pod| pod.is_live());
    let taken = live.any(|pod| pod.spec.ips.iter().any(|ip| spec.ips.contains(ip)));
    (!world.pods.contains_key(&key) && !taken).then_some(spec)
}
