//! Which nodes a pod may run on, and why not on the others. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;

use super::cluster::{Cluster, Node};
use super::pod::Pod;
use crate::controllers::runtime::object::Object;

/// Why a node was refused, in the words that users know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) reasons: Vec<String>,
    /// What would have to change for the node to be accepted.
    pub(super) cause: Cause,
}

/// What the refusal comes from, and so what could cure it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// Pods on the node take what is needed; preemption can help.
    Occupied,
    /// Pods stand where they should not; preemption can help.
    Neighbours,
    /// A pod is missing that should be near.
    Missing,
    /// The node itself does not match.
    Node,
}

fn refuse(cause: Cause, reason: impl Into<String>) -> Refusal {
    Refusal {
        reasons: vec![reason.into()],
        cause,
    }
}

/// The first rule that the node fails, in the order that upstream documents.
pub(super) fn check(pod: &Pod, name: &str, node: &Node, cluster: &Cluster) -> Result<(), Refusal> {
    let object = node.object.as_ref();
    if object.flag(&["spec", "unschedulable"])
        && !tolerates(
            pod.tolerations(),
            "node.kubernetes.io/unschedulable",
            "",
            "NoSchedule",
        )
    {
        return Err(refuse(Cause::Node, "node(s) were unschedulable"));
    }
    if !pod.node().is_empty() && pod.node() != name {
        return Err(refuse(
            Cause::Node,
            "node(s) didn't match the requested node name",
        ));
    }
    if let Some(taint) = untolerated(pod, object, &["NoSchedule", "NoExecute"]) {
        let (key, value) = (taint.text(&["key"]), taint.text(&["value"]));
        let reason = format!("node(s) had untolerated taint {{{key}: {value}}}");
        return Err(refuse(Cause::Node, reason));
    }
    if !pod.accepts(object) {
        return Err(refuse(
            Cause::Node,
            "node(s) didn't match Pod's node affinity/selector",
        ));
    }
    let kept: Vec<&Arc<Pod>> = cluster.nominated_before(pod, name).collect();
    let taken = || {
        node.pods
            .values()
            .chain(kept.iter().copied())
            .flat_map(|p| &p.ports)
    };
    if pod
        .ports
        .iter()
        .any(|port| taken().any(|other| port.overlaps(other)))
    {
        let reason = "node(s) didn't have free ports for the requested pod ports";
        return Err(refuse(Cause::Occupied, reason));
    }
    fits(pod, node, &kept)
}

/// Requests against what is allocatable and not yet requested. A request of nothing always fits, even on a node that
/// is overfull.
fn fits(pod: &Pod, node: &Node, kept: &[&Arc<Pod>]) -> Result<(), Refusal> {
    let mut reasons = Vec::new();
    let mut cause = Cause::Occupied;
    let limit = node.allocatable.get("pods");
    let count = node.pods.len() + kept.len();
    if i64::try_from(count).unwrap_or(i64::MAX) >= limit {
        reasons.push("Too many pods".to_owned());
        if limit < 1 {
            cause = Cause::Node;
        }
    }
    for (name, wanted) in &pod.requests.0 {
        if *wanted <= 0 {
            continue;
        }
        let allocatable = node.allocatable.get(name);
        let reserved: i64 = kept.iter().map(|p| p.requests.get(name)).sum();
        let used = node.requested.get(name).saturating_add(reserved);
        if *wanted > allocatable.saturating_sub(used) {
            reasons.push(format!("Insufficient {name}"));
            if *wanted > allocatable {
                cause = Cause::Node;
            }
        }
    }
    if reasons.is_empty() {
        Ok(())
    } else {
        Err(Refusal { reasons, cause })
    }
}

/// Whether no taint of the node keeps the pod away.
pub(super) fn tolerates_node(pod: &Pod, node: &Value) -> bool {
    untolerated(pod, node, &["NoSchedule", "NoExecute"]).is_none()
}

/// The first taint with one of these effects that the pod does not tolerate.
fn untolerated<'a>(pod: &Pod, node: &'a Value, effects: &[&str]) -> Option<&'a Value> {
    node.items(&["spec", "taints"]).iter().find(|taint| {
        effects.contains(&taint.text(&["effect"]))
            && !tolerates(
                pod.tolerations(),
                taint.text(&["key"]),
                taint.text(&["value"]),
                taint.text(&["effect"]),
            )
    })
}

/// Whether one of the tolerations covers the taint.
pub(crate) fn tolerates(tolerations: &[Value], key: &str, value: &str, effect: &str) -> bool {
    tolerations
        .iter()
        .any(|t| toleration_covers(t, key, value, effect))
}

/// Whether this toleration covers the taint. An empty effect covers all effects, an empty key with Exists all taints.
pub(crate) fn toleration_covers(t: &Value, key: &str, value: &str, effect: &str) -> bool {
    let own = |field: &str| t.text(&[field]);
    let effect_covered = own("effect").is_empty() || own("effect") == effect;
    let key_covered = own("key").is_empty() || own("key") == key;
    let value_covered = match own("operator") {
        "Exists" => true,
        "" | "Equal" => !own("key").is_empty() && own("value") == value,
        _ => false,
    };
    effect_covered && key_covered && value_covered
}

/// What preemption could have done, in the words of the condition's message.
pub(super) fn preemption_message(refusals: &[(String, Refusal)]) -> String {
    let curable = refusals
        .iter()
        .filter(|(_, r)| matches!(r.cause, Cause::Occupied | Cause::Neighbours))
        .count();
    let mut parts = Vec::new();
    if curable > 0 {
        parts.push(format!(
            "{curable} No preemption victims found for incoming pod"
        ));
    }
    if refusals.len() > curable {
        let helpless = refusals.len() - curable;
        parts.push(format!(
            "{helpless} Preemption is not helpful for scheduling"
        ));
    }
    format!(
        "preemption: 0/{} nodes are available: {}.",
        refusals.len(),
        parts.join(", ")
    )
}

/// The message of the PodScheduled condition and of the FailedScheduling event.
pub(super) fn message<'a>(total: usize, refusals: impl Iterator<Item = &'a Refusal>) -> String {
    if total == 0 {
        return "no nodes available to schedule pods".to_owned();
    }
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for reason in refusals.flat_map(|r| &r.reasons) {
        *counts.entry(reason).or_insert(0) += 1;
    }
    let mut parts: Vec<String> = counts.iter().map(|(r, n)| format!("{n} {r}")).collect();
    parts.sort();
    format!("0/{total} nodes are available: {}.", parts.join(", "))
}
