//! Random histories: what nodes hold after every step is what a naive computation over the objects says.

use std::collections::{BTreeMap, BTreeSet};

use control_api::desired::{DesiredState, Name};
use control_api::name_map::NameMap;
use control_api::v1::{ClusterConfig, FeedMessage, Policy, PolicyName, PolicyPeer, feed_message};
use proptest::prelude::*;
use prost::Message;
use serde_json::{Value, json};

use super::super::rules::{Translated, cluster_network_policy, network_policy};
use super::super::selector::{Labels, Members, Namespaces, namespace_labels};
use super::super::{peers, selector};
use crate::{Effects, Index, Kind, frame};

const NODES: [&str; 3] = ["n0", "n1", "n2"];

#[derive(Clone, Debug)]
struct Step {
    kind: usize,
    name: u8,
    namespace: u8,
    bits: [u8; 4],
    delete: bool,
    relist: bool,
}

fn step() -> impl Strategy<Value = Step> {
    (
        0usize..12,
        0u8..4,
        0u8..3,
        any::<[u8; 4]>(),
        0u8..4,
        0u8..12,
    )
        .prop_map(|(kind, name, namespace, bits, delete, relist)| Step {
            kind,
            name,
            namespace,
            bits,
            delete: delete == 0,
            relist: relist == 0,
        })
}

/// Pods and policies are what most steps are about.
fn kind_of(step: &Step) -> Kind {
    match step.kind {
        0 => Kind::Namespace,
        1 => Kind::Node,
        2..6 => Kind::NetworkPolicy,
        6..8 => Kind::ClusterNetworkPolicy,
        _ => Kind::Pod,
    }
}

fn some_labels(bits: u8) -> Value {
    let mut labels = json!({});
    if bits & 1 != 0 {
        labels["a"] = json!(if bits & 2 != 0 { "x" } else { "y" });
    }
    if bits & 4 != 0 {
        labels["b"] = json!("x");
    }
    labels
}

fn some_selector(bits: u8) -> Value {
    match bits % 7 {
        0 => json!({}),
        1 => json!({"matchLabels": {"a": "x"}}),
        2 => json!({"matchLabels": {"a": "y"}}),
        3 => json!({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["x"]}]}),
        4 => json!({"matchExpressions": [{"key": "b", "operator": "DoesNotExist"}]}),
        5 => json!({"matchExpressions": [{"key": "b", "operator": "Exists"}]}),
        _ => json!({"matchLabels": {"no good": "x"}}),
    }
}

fn object_of(step: &Step) -> Value {
    let [a, b, c, d] = step.bits;
    let mut object = json!({"metadata": {"name": format!("o{}", step.name),
        "namespace": format!("o{}", step.namespace)}});
    match kind_of(step) {
        Kind::Pod => {
            object["metadata"]["labels"] = some_labels(a);
            object["metadata"]["uid"] = json!((b % 2).to_string());
            let node = NODES.get(usize::from(b >> 1 & 3)).unwrap_or(&"");
            object["spec"] = json!({"nodeName": node, "hostNetwork": c % 8 == 0});
            object["status"] = json!({"phase": (["Running", "Failed"])[usize::from(c % 5 == 1)]});
            if d % 3 != 0 {
                object["status"]["podIP"] = json!(format!("10.0.0.{}", d % 4 + 1));
            }
        }
        Kind::Node => {
            object["metadata"] =
                json!({"name": NODES[usize::from(step.name % 3)], "labels": some_labels(a)});
            object["status"] = json!({"addresses": [{"type": "InternalIP", "address": format!("192.0.2.{}", b % 2)}]});
        }
        Kind::NetworkPolicy => {
            object["spec"] = json!({"podSelector": some_selector(a), "policyTypes": ["Ingress", "Egress"],
                "ingress": [{"from": [{"podSelector": some_selector(b)}]}],
                "egress": [{"to": [{"namespaceSelector": some_selector(c), "podSelector": some_selector(d)}]}]});
        }
        Kind::ClusterNetworkPolicy => {
            object["metadata"] = json!({"name": format!("o{}", step.name)});
            object["spec"] = json!({"tier": "Admin", "priority": 1, "subject": {"namespaces": some_selector(a)},
                "ingress": [{"action": "Accept", "from": [{"namespaces": some_selector(b)}]}],
                "egress": [{"action": "Deny", "to": [{"nodes": some_selector(c)},
                    {"pods": {"namespaceSelector": some_selector(d), "podSelector": some_selector(a)}}]}]});
        }
        _ => {
            object["metadata"] =
                json!({"name": format!("o{}", step.namespace), "labels": some_labels(a)})
        }
    }
    object
}

type Cluster = BTreeMap<(Kind, Name), Value>;

fn all(cluster: &Cluster, kind: Kind) -> impl Iterator<Item = &Value> {
    let of_kind = cluster.iter().filter(move |((k, _), _)| *k == kind);
    of_kind.map(|(_, object)| object)
}

fn in_set(members: &Members, peer: &peers::Peer, namespaces: &BTreeMap<String, Labels>) -> bool {
    let namespace = &peer.message.namespace;
    match members {
        Members::Nodes(nodes) => namespace.is_empty() && nodes.matches(&peer.labels),
        Members::Pods {
            namespaces: wanted,
            pods,
        } => {
            let there = match wanted {
                Namespaces::One(name) => name == namespace,
                Namespaces::Matching(s) => namespaces.get(namespace).is_some_and(|l| s.matches(l)),
            };
            !namespace.is_empty() && there && pods.matches(&peer.labels)
        }
    }
}

fn naive(cluster: &Cluster, node: &str) -> (NameMap<Policy>, NameMap<PolicyPeer>) {
    let namespaces: BTreeMap<String, Labels> = all(cluster, Kind::Namespace)
        .map(|n| (crate::translate::name(n), namespace_labels(n)))
        .collect();
    let mut peers: Vec<peers::Peer> = all(cluster, Kind::Pod).filter_map(peers::pod).collect();
    peers.extend(all(cluster, Kind::Node).map(peers::of_node));
    let own = |peer: &peers::Peer| !peer.message.namespace.is_empty() && peer.message.node == node;
    let policies: Vec<Translated> = all(cluster, Kind::NetworkPolicy)
        .map(network_policy)
        .chain(all(cluster, Kind::ClusterNetworkPolicy).filter_map(cluster_network_policy))
        .collect();
    let selects = |policy: &Translated, peer: &peers::Peer| {
        let subject = policy.subject.as_ref();
        subject.is_some_and(|subject| in_set(subject, peer, &namespaces))
    };
    let mut wanted = (NameMap::default(), NameMap::default());
    let mut sets: Vec<&Members> = Vec::new();
    for policy in &policies {
        if peers.iter().any(|peer| own(peer) && selects(policy, peer)) {
            let name = Name::new(&policy.message.namespace, &policy.message.name);
            wanted.0.insert(name, policy.message.clone());
            sets.extend(policy.sets.values());
        }
    }
    for peer in &peers {
        let mut message = peer.message.clone();
        let of_peer = sets.iter().filter(|set| in_set(set, peer, &namespaces));
        let ids: BTreeSet<Vec<u8>> = of_peer.map(|set| set.id().to_vec()).collect();
        message.sets = ids.into_iter().collect();
        if own(peer) {
            let selecting = policies.iter().filter(|policy| selects(policy, peer));
            let names = selecting.map(|p| Name::new(&p.message.namespace, &p.message.name));
            let sorted: BTreeSet<Name> = names.collect();
            let message_of = |n: Name| PolicyName {
                namespace: n.namespace,
                name: n.name,
            };
            message.policies = sorted.into_iter().map(message_of).collect();
        } else if message.sets.is_empty() || message.addresses.is_empty() {
            continue;
        }
        let name = Name::new(&message.namespace, &message.name);
        wanted.1.insert(name, message);
    }
    wanted
}

fn apply(state: &mut DesiredState, node: &str, effects: &Effects) {
    // Agents that run no pods need policies all the same.
    let bytes = frame::delta(1, 1, effects.of_node(node, false));
    match FeedMessage::decode(bytes).unwrap().kind {
        Some(feed_message::Kind::Delta(delta)) => state.apply(delta),
        other => panic!("{other:?}"),
    };
}

proptest! {
    #[test]
    fn nodes_hold_what_a_naive_computation_says(steps in prop::collection::vec(step(), 1..50), limits in (0usize..8, 0usize..20)) {
        let mut index = Index::new(ClusterConfig::default());
        index.policies().set_limits(limits.0, limits.1);
        let mut cluster = Cluster::new();
        let mut states: Vec<DesiredState> = vec![DesiredState::default(); NODES.len()];
        for step in &steps {
            let (kind, object) = (kind_of(step), object_of(step));
            let key = (kind, kind.name_of(&object));
            if step.delete {
                cluster.remove(&key);
            } else {
                cluster.insert(key, object.clone());
            }
            let effects = match (step.relist, step.delete) {
                (true, _) => index.replace(kind, all(&cluster, kind), 1),
                (_, true) => index.remove(kind, &object),
                (_, false) => index.upsert(kind, &object, 1),
            };
            for (node, state) in NODES.iter().zip(&mut states) {
                if effects.afresh.contains(*node) {
                    prop_assert!(!effects.per_node.contains_key(*node));
                    *state = index.desired_state(node, false, 1);
                } else {
                    apply(state, node, &effects);
                }
                let (policies, peers) = naive(&cluster, node);
                prop_assert_eq!(&state.policies, &policies, "{} {:?}", node, step);
                prop_assert_eq!(&state.policy_peers, &peers, "{} {:?}", node, step);
            }
        }
        // The same from a snapshot, from an index made of the survivors, and a list of them changes nothing.
        for (node, state) in NODES.iter().zip(&states) {
            let fresh = crate::desired_state(ClusterConfig::default(), [], node, false);
            prop_assert!(fresh.policy_peers.is_empty());
            let mut fresh = Index::new(ClusterConfig::default());
            for ((kind, _), object) in cluster.iter().rev() {
                fresh.upsert(*kind, object, 1);
            }
            for index in [&fresh, &index] {
                let held = index.desired_state(node, false, 1);
                prop_assert_eq!(&held.policies, &state.policies);
                prop_assert_eq!(&held.policy_peers, &state.policy_peers);
            }
        }
        for kind in Kind::ALL {
            prop_assert_eq!(index.replace(kind, all(&cluster, kind), 1), Effects::default());
        }
        for kind in Kind::ALL {
            index.replace(kind, std::iter::empty(), 1);
        }
        prop_assert_eq!(index.snapshot("n1", true).len(), 1);
        prop_assert!(index.policies_are_empty());
    }
}

#[test]
fn equal_selectors_are_one_set_whatever_their_spelling() {
    let parse = |value: Value| {
        let selector = selector::Selector::parse(&value).unwrap();
        Members::of_namespaces(selector)
    };
    let a = parse(json!({"matchLabels": {"a": "x", "b": "y"}}));
    let b = parse(json!({"matchExpressions": [
        {"key": "b", "operator": "In", "values": ["y", "y"]},
        {"key": "a", "operator": "In", "values": ["x"]}]}));
    assert_eq!((a.id(), a.to_string()), (b.id(), b.to_string()));
    assert_eq!(a.to_string(), "pods in namespaces [a=x,b=y]");
    // Ids are made of this text and must stay the same between versions.
    let hex: String = a.id().iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, "6153bac908ad1a042f817865ef9d744b");
}
