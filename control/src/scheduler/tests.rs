//! The scheduler's core under random events, against a model that knows nothing of queues and caches.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use serde_json::{Value, json};

use super::core::{Core, Decision};
use crate::controllers::runtime::informer::Change;
use crate::controllers::runtime::object::Object;

fn node(name: &str, cpu: i64, pods: i64) -> Arc<Value> {
    Arc::new(json!({
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "status": {"allocatable": {"cpu": cpu.to_string(), "memory": "8Gi", "pods": pods.to_string()}},
    }))
}

fn pod(name: &str, cpu: i64, port: i64, priority: i64) -> Value {
    let ports = if port > 0 {
        json!([{"containerPort": port, "hostPort": port}])
    } else {
        json!([])
    };
    json!({
        "metadata": {"name": name, "namespace": "ns", "uid": name, "resourceVersion": "1"},
        "spec": {"priority": priority, "containers": [{"name": "c", "ports": ports,
            "resources": {"requests": {"cpu": cpu.to_string()}}}]},
    })
}

fn added(object: &Arc<Value>) -> Change {
    Change {
        old: None,
        new: Some(object.clone()),
    }
}

#[derive(Clone, Debug)]
enum Step {
    AddNode(u8, i64, i64),
    RemoveNode(u8),
    AddPod(u8, i64, i64, i64),
    RemovePod(u8),
    Schedule,
    /// The answer of the API to a binding, good or bad, and the pod's new form.
    Answer(bool),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        1 => (0..4_u8, 0..5_i64, 0..4_i64).prop_map(|(n, c, p)| Step::AddNode(n, c, p)),
        1 => (0..4_u8).prop_map(Step::RemoveNode),
        4 => (0..20_u8, 0..4_i64, 0..2_i64, Just(0_i64)).prop_map(|(n, c, t, p)| Step::AddPod(n, c, t, p)),
        2 => (0..20_u8).prop_map(Step::RemovePod),
        6 => Just(Step::Schedule),
        4 => any::<bool>().prop_map(Step::Answer),
    ]
}

#[derive(Default)]
struct World {
    core: Core,
    nodes: BTreeMap<String, Arc<Value>>,
    pods: BTreeMap<String, Arc<Value>>,
    /// Decided, not answered: uid and node.
    open: Vec<(String, String)>,
}

impl World {
    /// Requests and ports on a node, by the pods' own words; open decisions count as well.
    fn load(&self, node: &str) -> (i64, usize, Vec<i64>) {
        let on_node = |pod: &&Arc<Value>| {
            pod.text(&["spec", "nodeName"]) == node
                || self
                    .open
                    .iter()
                    .any(|(uid, n)| uid == pod.uid() && n == node)
        };
        let pods: Vec<_> = self.pods.values().filter(on_node).collect();
        let container = |p: &Value| p.items(&["spec", "containers"])[0].clone();
        let cpu = |p: &&Arc<Value>| {
            container(p)
                .text(&["resources", "requests", "cpu"])
                .parse::<i64>()
                .unwrap()
        };
        let ports = pods
            .iter()
            .flat_map(|p| container(p).items(&["ports"]).to_vec());
        let ports = ports.filter_map(|p| p.number(&["hostPort"])).collect();
        (pods.iter().map(cpu).sum(), pods.len(), ports)
    }

    fn fits(&self, pod: &Value, node: &Value) -> bool {
        let (cpu, count, ports) = self.load(node.name());
        let number = |name: &str| {
            node.text(&["status", "allocatable", name])
                .parse::<i64>()
                .unwrap()
        };
        let container = &pod.items(&["spec", "containers"])[0];
        let wanted: i64 = container
            .text(&["resources", "requests", "cpu"])
            .parse()
            .unwrap();
        let clash = container.items(&["ports"]).iter().any(|p| {
            p.number(&["hostPort"])
                .is_some_and(|port| ports.contains(&port))
        });
        !clash
            && i64::try_from(count).unwrap() < number("pods")
            && (wanted == 0 || wanted + cpu <= number("cpu"))
    }
}

proptest! {
    #[test]
    fn no_node_is_overcommitted_and_no_pod_waits_in_vain(
        steps in prop::collection::vec(step(), 0..200),
    ) {
        let mut world = World::default();
        let mut now = Instant::now();
        for step in steps {
            now += Duration::from_secs(20);
            match step {
                Step::AddNode(n, cpu, pods) => {
                    let node = node(&format!("n{n}"), cpu, pods);
                    // Shrinking a node under its pods would break the bound by itself.
                    if world.nodes.contains_key(node.name()) { continue }
                    world.core.node_changed(&added(&node), now);
                    world.nodes.insert(node.name().to_owned(), node);
                }
                Step::RemoveNode(n) => {
                    let name = format!("n{n}");
                    let (_, count, _) = world.load(&name);
                    if count > 0 { continue }
                    if let Some(old) = world.nodes.remove(&name) {
                        world.core.node_changed(&Change { old: Some(old), new: None }, now);
                    }
                }
                Step::AddPod(n, cpu, port, priority) => {
                    let name = format!("p{n}");
                    if world.pods.contains_key(&name) { continue }
                    let pod = Arc::new(pod(&name, cpu, port * 8080, priority));
                    world.core.pod_changed(&added(&pod), now);
                    world.pods.insert(name, pod);
                }
                Step::RemovePod(n) => {
                    let name = format!("p{n}");
                    if let Some(old) = world.pods.remove(&name) {
                        world.open.retain(|(uid, _)| *uid != name);
                        world.core.pod_changed(&Change { old: Some(old), new: None }, now);
                    }
                }
                Step::Schedule => match world.core.next(now) {
                    Some(Decision::Bind { pod, node }) => {
                        let object = world.nodes.get(&node).unwrap();
                        prop_assert!(world.fits(&pod.object, object), "{} on {node}", pod.uid);
                        world.open.push((pod.uid.clone(), node));
                    }
                    Some(Decision::Unschedulable { pod, .. }) => {
                        let fitting = world.nodes.values().find(|n| world.fits(&pod.object, n));
                        prop_assert!(fitting.is_none(), "{} fits on {fitting:?}", pod.uid);
                    }
                    Some(Decision::Preempt { .. }) | None => {}
                },
                Step::Answer(good) => {
                    let Some((uid, node)) = world.open.pop() else { continue };
                    if good {
                        world.core.bound(&uid);
                        let old = world.pods[&uid].clone();
                        let mut new = old.as_ref().clone();
                        new["spec"]["nodeName"] = node.into();
                        new["metadata"]["resourceVersion"] = "2".into();
                        let new = Arc::new(new);
                        world.core.pod_changed(&Change { old: Some(old), new: Some(new.clone()) }, now);
                        world.pods.insert(uid, new);
                    } else {
                        world.core.not_bound(&uid, false, now);
                    }
                }
            }
        }
        // Whatever waits now waits because it fits nowhere.
        for _ in 0..100 {
            now += Duration::from_secs(20);
            let Some(decision) = world.core.next(now) else { continue };
            if let Decision::Bind { pod, node } = decision {
                world.open.push((pod.uid.clone(), node));
            }
        }
        for pod in world.pods.values() {
            let placed = !pod.text(&["spec", "nodeName"]).is_empty()
                || world.open.iter().any(|(uid, _)| uid == pod.uid());
            let fitting = world.nodes.values().any(|node| world.fits(pod, node));
            prop_assert!(placed || !fitting, "{} waits in vain", pod.name());
        }
    }
}

fn decide(core: &mut Core, now: Instant) -> Vec<(String, String)> {
    std::iter::from_fn(|| core.next(now))
        .map(|decision| match decision {
            Decision::Bind { pod, node } => (pod.uid.clone(), node),
            Decision::Unschedulable { pod, message } => (pod.uid.clone(), message),
            Decision::Preempt { pod, node, .. } => (pod.uid.clone(), format!("preempt on {node}")),
        })
        .collect()
}

#[test]
fn reasons_are_counted_over_the_nodes() {
    let now = Instant::now();
    let mut core = Core::default();
    core.node_changed(&added(&node("a", 1, 10)), now);
    core.node_changed(&added(&node("b", 1, 10)), now);
    let mut tainted = node("c", 8, 10).as_ref().clone();
    tainted["spec"]["taints"] = json!([{"key": "only", "value": "x", "effect": "NoSchedule"}]);
    core.node_changed(&added(&Arc::new(tainted)), now);
    core.pod_changed(&added(&Arc::new(pod("p", 4, 0, 0))), now);
    let decisions = decide(&mut core, now);
    assert!(
        decisions[0].1.starts_with(
            "0/3 nodes are available: 1 node(s) had untolerated taint {only: x}, 2 Insufficient cpu."
        ),
        "{decisions:?}"
    );
    let mut core = Core::default();
    core.pod_changed(&added(&Arc::new(pod("p", 4, 0, 0))), now);
    assert_eq!(
        decide(&mut core, now)[0].1,
        "no nodes available to schedule pods"
    );
}

#[test]
fn pods_of_one_owner_spread_over_the_nodes() {
    let now = Instant::now();
    let mut core = Core::default();
    for name in ["a", "b", "c"] {
        core.node_changed(&added(&node(name, 64, 100)), now);
    }
    for n in 0..9 {
        let mut pod = pod(&format!("p{n}"), 0, 0, 0);
        pod["metadata"]["ownerReferences"] = json!([{"uid": "owner", "controller": true}]);
        core.pod_changed(&added(&Arc::new(pod)), now);
    }
    let mut by_node = BTreeMap::new();
    for (_, node) in decide(&mut core, now) {
        *by_node.entry(node).or_insert(0) += 1;
    }
    assert_eq!(by_node.into_values().collect::<Vec<_>>(), [3, 3, 3]);
}

#[test]
fn who_has_a_gate_or_another_scheduler_is_left_alone() {
    let now = Instant::now();
    let mut core = Core::default();
    core.node_changed(&added(&node("a", 64, 100)), now);
    let mut gated = pod("gated", 0, 0, 0);
    gated["spec"]["schedulingGates"] = json!([{"name": "g"}]);
    let gated = Arc::new(gated);
    core.pod_changed(&added(&gated), now);
    let mut other = pod("other", 0, 0, 0);
    other["spec"]["schedulerName"] = "someone-else".into();
    core.pod_changed(&added(&Arc::new(other)), now);
    assert!(decide(&mut core, now).is_empty());
    let mut open = gated.as_ref().clone();
    open["spec"]["schedulingGates"] = json!([]);
    core.pod_changed(
        &Change {
            old: Some(gated),
            new: Some(Arc::new(open)),
        },
        now,
    );
    assert_eq!(
        decide(&mut core, now),
        [("gated".to_owned(), "a".to_owned())]
    );
}

#[test]
fn affinity_and_taints_lead_to_the_right_node() {
    let now = Instant::now();
    let mut core = Core::default();
    core.node_changed(&added(&node("a", 64, 100)), now);
    core.node_changed(&added(&node("b", 64, 100)), now);
    let term = |name: &str| {
        json!({"matchExpressions":
            [{"key": "kubernetes.io/hostname", "operator": "In", "values": [name]}]})
    };
    let mut required = pod("required", 0, 0, 0);
    required["spec"]["affinity"] = json!({"nodeAffinity":
        {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term("b")]}}});
    let mut preferred = pod("preferred", 0, 0, 0);
    preferred["spec"]["affinity"] = json!({"nodeAffinity":
        {"preferredDuringSchedulingIgnoredDuringExecution":
            [{"weight": 100, "preference": term("b")}]}});
    let mut by_field = pod("by-field", 0, 0, 0);
    by_field["spec"]["affinity"] = json!({"nodeAffinity":
        {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["a"]}]}]}}});
    for pod in [required, preferred, by_field] {
        core.pod_changed(&added(&Arc::new(pod)), now);
    }
    let nodes: Vec<String> = decide(&mut core, now)
        .into_iter()
        .map(|(_, node)| node)
        .collect();
    assert_eq!(nodes, ["b", "b", "a"]);
}
