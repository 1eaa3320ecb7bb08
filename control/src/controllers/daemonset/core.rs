//! DaemonSet: which nodes run its pod, and the order in which pods of an old template are replaced. Pure.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::controllers::deployment::sets::resolve_percent;
use crate::controllers::history;
use crate::controllers::pods::{self, Availability};
use crate::controllers::runtime::object::{Object, controller_reference, set, unset};
use crate::scheduler::fitting::{accepts_node, tolerates};

pub(super) const API_VERSION: &str = "apps/v1";
pub(super) const KIND: &str = "DaemonSet";

/// What every daemon pod tolerates: it belongs to the node, whatever the node's state.
const TOLERATED: [(&str, &str); 6] = [
    ("node.kubernetes.io/not-ready", "NoExecute"),
    ("node.kubernetes.io/unreachable", "NoExecute"),
    ("node.kubernetes.io/disk-pressure", "NoSchedule"),
    ("node.kubernetes.io/memory-pressure", "NoSchedule"),
    ("node.kubernetes.io/pid-pressure", "NoSchedule"),
    ("node.kubernetes.io/unschedulable", "NoSchedule"),
];

#[derive(Clone, Debug, Default)]
pub(super) struct Plan {
    pub(super) create: Vec<Value>,
    pub(super) delete: Vec<Arc<Value>>,
    /// Pods that failed: deleted, and said so.
    pub(super) failed: Vec<Arc<Value>>,
    pub(super) status: Value,
    pub(super) again: Option<Duration>,
}

/// The pod for a node: bound to it by affinity to its name, so that the scheduler counts it like any other.
fn pod_for(ds: &Value, template: &Value, node: &str, hash: &str) -> Value {
    let reference = controller_reference(ds, API_VERSION, KIND);
    let prefix = pods::name_prefix(ds.name());
    let mut pod = pods::from_template(template, ds.namespace(), &prefix, reference);
    set(
        &mut pod,
        &["metadata", "labels", history::HASH_LABEL],
        hash.into(),
    );
    let field = json!([{"key": "metadata.name", "operator": "In", "values": [node]}]);
    let path = [
        "spec",
        "affinity",
        "nodeAffinity",
        "requiredDuringSchedulingIgnoredDuringExecution",
        "nodeSelectorTerms",
    ];
    let mut terms = pod.items(&path).to_vec();
    if terms.is_empty() {
        terms.push(json!({}));
    }
    for term in &mut terms {
        set(term, &["matchFields"], field.clone());
    }
    set(&mut pod, &path, terms.into());
    let mut tolerations = pod.items(&["spec", "tolerations"]).to_vec();
    let host = pod.flag(&["spec", "hostNetwork"]);
    let network = [("node.kubernetes.io/network-unavailable", "NoSchedule")];
    for (key, effect) in TOLERATED.iter().chain(network.iter().filter(|_| host)) {
        let toleration = json!({"key": key, "operator": "Exists", "effect": effect});
        if !tolerations.contains(&toleration) {
            tolerations.push(toleration);
        }
    }
    set(&mut pod, &["spec", "tolerations"], tolerations.into());
    pod
}

/// The node that a daemon pod is on or is meant for.
pub(super) fn node_of(pod: &Value) -> Option<&str> {
    let bound = pod.text(&["spec", "nodeName"]);
    if !bound.is_empty() {
        return Some(bound);
    }
    let path = [
        "spec",
        "affinity",
        "nodeAffinity",
        "requiredDuringSchedulingIgnoredDuringExecution",
        "nodeSelectorTerms",
    ];
    pod.items(&path)
        .iter()
        .flat_map(|t| t.items(&["matchFields"]))
        .find(|f| f.text(&["key"]) == "metadata.name")?
        .items(&["values"])
        .first()?
        .as_str()
}

/// Whether the node should get a pod, and whether a pod that is there may stay.
fn eligible(ds: &Value, node: &Value) -> (bool, bool) {
    let empty = json!({});
    let template = ds.at(&["spec", "template"]).unwrap_or(&empty);
    let pod = pod_for(ds, template, node.name(), "");
    if !accepts_node(&pod, node) {
        return (false, false);
    }
    let tolerations = pod.items(&["spec", "tolerations"]);
    let free_of = |effect: &str| {
        node.items(&["spec", "taints"])
            .iter()
            .filter(|t| t.text(&["effect"]) == effect)
            .all(|t| tolerates(tolerations, t.text(&["key"]), t.text(&["value"]), effect))
    };
    let stays = free_of("NoExecute");
    (stays && free_of("NoSchedule"), stays)
}

pub(super) fn plan(
    ds: &Value,
    owned: &[Arc<Value>],
    nodes: &[Arc<Value>],
    hash: &str,
    now: Timestamp,
) -> Plan {
    let mut by_node: BTreeMap<&str, Vec<&Arc<Value>>> = BTreeMap::new();
    for pod in owned {
        by_node
            .entry(node_of(pod).unwrap_or_default())
            .or_default()
            .push(pod);
    }
    let mut round = Round {
        ds,
        hash,
        now,
        min_ready_s: ds.number(&["spec", "minReadySeconds"]).unwrap_or(0),
        plan: Plan::default(),
        counts: Counts::default(),
        kept: Vec::new(),
    };
    let known: HashSet<&str> = nodes.iter().map(|n| n.name()).collect();
    for node in nodes {
        let pods = by_node.get(node.name()).map_or(&[][..], Vec::as_slice);
        round.visit(node, pods);
    }
    // A pod that waits for a node that is gone would wait for ever.
    for pod in owned
        .iter()
        .filter(|p| p.text(&["spec", "nodeName"]).is_empty())
    {
        if node_of(pod).is_some_and(|n| !known.contains(n)) && !pod.is_deleting() {
            round.plan.delete.push(pod.clone());
        }
    }
    if ds.is_deleting() {
        round.plan = Plan {
            again: round.plan.again,
            ..Plan::default()
        };
    } else {
        round.replace_outdated();
    }
    round.finish()
}

#[derive(Debug, Default)]
struct Counts {
    desired: i64,
    current: i64,
    misscheduled: i64,
    ready: i64,
    available: i64,
    updated: i64,
}

struct Round<'a> {
    ds: &'a Value,
    hash: &'a str,
    now: Timestamp,
    min_ready_s: i64,
    plan: Plan,
    counts: Counts,
    /// The pod of each node that should have one.
    kept: Vec<Arc<Value>>,
}

impl Round<'_> {
    fn is_available(&mut self, pod: &Value) -> bool {
        match pods::availability(pod, self.min_ready_s, self.now) {
            Availability::Available => !pod.is_deleting(),
            Availability::In(left) => {
                self.plan.again = Some(self.plan.again.map_or(left, |a| a.min(left)));
                false
            }
            Availability::No => false,
        }
    }

    fn visit(&mut self, node: &Value, pods: &[&Arc<Value>]) {
        let (runs, stays) = eligible(self.ds, node);
        if runs {
            self.counts.desired += 1;
        }
        if !stays {
            let leaving = pods
                .iter()
                .filter(|p| !p.is_deleting())
                .map(|p| (*p).clone());
            self.plan.delete.extend(leaving);
        }
        let mut live: Vec<&Arc<Value>> = Vec::new();
        for pod in pods {
            if pods::is_finished(pod) {
                if stays && !pod.is_deleting() {
                    self.plan.failed.push((*pod).clone());
                }
            } else {
                live.push(pod);
            }
        }
        if !live.is_empty() && !runs {
            self.counts.misscheduled += 1;
        }
        if !stays {
            return;
        }
        // One that is on its way out still has the node; its end brings the next.
        live.sort_by_key(|p| {
            (
                p.is_deleting(),
                p.text(&["spec", "nodeName"]).is_empty(),
                p.created_at(),
            )
        });
        let finished_left = pods.iter().any(|p| pods::is_finished(p));
        match live.split_first() {
            None if runs && !finished_left => {
                let null = Value::Null;
                let template = self.ds.at(&["spec", "template"]).unwrap_or(&null);
                let pod = pod_for(self.ds, template, node.name(), self.hash);
                self.plan.create.push(pod);
            }
            None => {}
            Some((oldest, surplus)) => {
                let surplus = surplus.iter().filter(|p| !p.is_deleting());
                self.plan.delete.extend(surplus.map(|p| (*p).clone()));
                if runs {
                    self.count(oldest);
                    self.kept.push((*oldest).clone());
                }
            }
        }
    }

    fn count(&mut self, pod: &Value) {
        self.counts.current += 1;
        self.counts.ready += i64::from(pods::is_ready(pod));
        self.counts.available += i64::from(self.is_available(pod));
        let updated = pod.label(history::HASH_LABEL) == Some(self.hash);
        self.counts.updated += i64::from(updated);
    }

    /// Old pods that serve nobody go at once, others within the number that may be unavailable.
    fn replace_outdated(&mut self) {
        if self.ds.text(&["spec", "updateStrategy", "type"]) == "OnDelete" {
            return;
        }
        let path = ["spec", "updateStrategy", "rollingUpdate", "maxUnavailable"];
        let most = resolve_percent(self.ds.at(&path), self.counts.desired, true)
            .unwrap_or(1)
            .max(1);
        let room = (most - (self.counts.desired - self.counts.available)).max(0);
        let outdated: Vec<Arc<Value>> = self
            .kept
            .iter()
            .filter(|p| p.label(history::HASH_LABEL) != Some(self.hash) && !p.is_deleting())
            .cloned()
            .collect();
        let (serving, idle): (Vec<_>, Vec<_>) =
            outdated.into_iter().partition(|p| self.is_available(p));
        self.plan.delete.extend(idle);
        let room = usize::try_from(room).unwrap_or(usize::MAX);
        self.plan.delete.extend(serving.into_iter().take(room));
    }

    fn finish(mut self) -> Plan {
        let mut status = self
            .ds
            .at(&["status"])
            .cloned()
            .unwrap_or_else(|| json!({}));
        let counts = &self.counts;
        for (field, value, always) in [
            ("currentNumberScheduled", counts.current, true),
            ("numberMisscheduled", counts.misscheduled, true),
            ("desiredNumberScheduled", counts.desired, true),
            ("numberReady", counts.ready, true),
            ("updatedNumberScheduled", counts.updated, false),
            ("numberAvailable", counts.available, false),
            (
                "numberUnavailable",
                counts.desired - counts.available,
                false,
            ),
        ] {
            if value == 0 && !always {
                unset(&mut status, &[field]);
            } else {
                set(&mut status, &[field], value.into());
            }
        }
        set(
            &mut status,
            &["observedGeneration"],
            self.ds.generation().into(),
        );
        self.plan.status = status;
        self.plan
    }
}
