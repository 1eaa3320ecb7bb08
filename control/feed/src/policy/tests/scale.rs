//! Ten thousand pods, a thousand policies, two hundred namespaces: what a build and a change cost.

use std::time::{Duration, Instant};

use control_api::v1::ClusterConfig;
use serde_json::{Value, json};

use crate::{Index, Kind};

const NAMESPACES: usize = 200;
const PODS: usize = 10_000;
const POLICIES: usize = 1_000;
const NODES: usize = 100;
const CHANGES: usize = 500;

fn pod(i: usize, colour: usize) -> Value {
    json!({"metadata": {"namespace": format!("ns-{}", i % NAMESPACES), "name": format!("pod-{i}"),
            "labels": {"app": format!("app-{}", i / NAMESPACES % 10), "colour": format!("c{colour}")}},
        "spec": {"nodeName": format!("node-{}", (i + i / NAMESPACES * 7) % NODES),
            "containers": [{"ports": [{"name": "http", "containerPort": 8080}]}]},
        "status": {"podIP": format!("10.{}.{}.{}", i >> 16, i >> 8 & 255, i & 255)}})
}

fn policy(i: usize) -> Value {
    let app = format!("app-{}", i / NAMESPACES);
    json!({"metadata": {"namespace": format!("ns-{}", i % NAMESPACES), "name": format!("policy-{i}")},
        "spec": {"podSelector": {"matchLabels": {"app": app}}, "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": {"colour": "c1"}}}], "ports": [{"port": 80}]},
                {"from": [{"namespaceSelector": {"matchLabels": {"team": format!("t{}", i % 20)}},
                    "podSelector": {"matchLabels": {"app": app}}}]}],
            "egress": [{"to": [{"ipBlock": {"cidr": format!("10.{}.0.0/16", i % 256)}}]}]}})
}

fn index() -> (Index, Duration) {
    let mut index = Index::new(ClusterConfig::default());
    index.set_quiet(true);
    let namespaces: Vec<Value> = (0..NAMESPACES)
        .map(|i| json!({"metadata": {"name": format!("ns-{i}"), "labels": {"team": format!("t{}", i % 20)}}}))
        .collect();
    let policies: Vec<Value> = (0..POLICIES).map(policy).collect();
    let pods: Vec<Value> = (0..PODS).map(|i| pod(i, i % 3)).collect();
    let start = Instant::now();
    index.replace(Kind::Namespace, namespaces.iter(), 1);
    index.replace(Kind::NetworkPolicy, policies.iter(), 1);
    index.replace(Kind::Pod, pods.iter(), 1);
    index.set_quiet(false);
    (index, start.elapsed())
}

#[test]
fn a_change_of_labels_is_cheap_in_a_large_cluster() {
    let (mut index, built) = index();
    let mut times = Vec::new();
    let mut nodes = 0;
    for i in 0..CHANGES {
        let object = pod(i * 13 % PODS, i % 3 + 1);
        let start = Instant::now();
        nodes += index.upsert(Kind::Pod, &object, 2).per_node.len();
        times.push(start.elapsed());
    }
    times.sort_unstable();
    let (median, worst) = (times[CHANGES / 2], times[CHANGES - 1]);
    let start = Instant::now();
    let held = index.snapshot("node-1", false).len();
    let snapshot = start.elapsed();
    eprintln!(
        "build {built:?}, change of labels median {median:?} worst {worst:?} ({nodes} nodes told in {CHANGES}), snapshot {snapshot:?} of {held}"
    );
    assert!(nodes > 0 && held > PODS / NODES);
    // Wide of what is measured, so that only a change of the order of growth fails on a busy machine.
    assert!(median < Duration::from_millis(20), "{median:?}");
}

#[test]
fn a_policy_for_the_whole_cluster_does_not_hold_up_the_feed() {
    let (mut index, _) = index();
    let all = json!({"namespaces": {}});
    let policy = json!({"metadata": {"name": "c"}, "spec": {"tier": "Admin", "priority": 1, "subject": all,
        "ingress": [{"action": "Accept", "from": [all]}]}});
    let start = Instant::now();
    let effects = index.upsert(Kind::ClusterNetworkPolicy, &policy, 2);
    let there = start.elapsed();
    // Everybody is told of everybody: most by snapshots, not one by one.
    assert!(effects.afresh.len() > NODES / 2, "{}", effects.afresh.len());
    assert_eq!(effects.afresh.len() + effects.per_node.len(), NODES);
    let mut pod = pod(3, 1);
    pod["metadata"]["name"] = json!("new");
    let start = Instant::now();
    assert_eq!(index.upsert(Kind::Pod, &pod, 3).per_node.len(), NODES);
    let new = start.elapsed();
    eprintln!("policy for the whole cluster {there:?}, a new pod under it {new:?}");
}
