//! What a node's silence and its conditions mean: conditions that become Unknown, and the taints that follow. Pure.

use std::collections::HashMap;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::controllers::runtime::object::{Object, seconds_between, time_text};

/// A node that has given no sign of life for this long is Unknown.
pub(super) const SILENCE_LIMIT_S: i64 = 40;

const NOT_READY: &str = "node.kubernetes.io/not-ready";
const UNREACHABLE: &str = "node.kubernetes.io/unreachable";
const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";
/// Conditions that keep new pods away while they are True.
const PRESSURES: [(&str, &str); 4] = [
    ("MemoryPressure", "node.kubernetes.io/memory-pressure"),
    ("DiskPressure", "node.kubernetes.io/disk-pressure"),
    ("PIDPressure", "node.kubernetes.io/pid-pressure"),
    (
        "NetworkUnavailable",
        "node.kubernetes.io/network-unavailable",
    ),
];
/// Conditions that only the node itself can know.
const REPORTED: [&str; 4] = ["Ready", "MemoryPressure", "DiskPressure", "PIDPressure"];

/// When each node was last heard of, by this process's own clock: those of the nodes may differ.
#[derive(Debug, Default)]
pub(super) struct Heartbeats {
    seen: HashMap<String, (String, Timestamp)>,
}

impl Heartbeats {
    /// Notes the lease's renewal and the status's heartbeat; a text that has not been seen before is a sign of life.
    pub(super) fn note(&mut self, node: &str, sign: String, now: Timestamp) {
        match self.seen.get_mut(node) {
            Some((old, at)) if *old != sign => {
                *old = sign;
                *at = now;
            }
            Some(_) => {}
            None => {
                self.seen.insert(node.to_owned(), (sign, now));
            }
        }
    }

    pub(super) fn knows(&self, node: &str) -> bool {
        self.seen.contains_key(node)
    }

    pub(super) fn forget(&mut self, node: &str) {
        self.seen.remove(node);
    }

    /// Time left until the node counts as silent; `None` when it does already.
    pub(super) fn left(&self, node: &str, now: Timestamp) -> Option<Duration> {
        let at = self.seen.get(node).map_or(now, |(_, at)| *at);
        let left = SILENCE_LIMIT_S - seconds_between(at, now);
        u64::try_from(left)
            .ok()
            .filter(|left| *left > 0)
            .map(Duration::from_secs)
    }
}

/// The conditions of a silent node, when they differ from what stands there.
pub(super) fn silent_conditions(node: &Value, now: Timestamp) -> Option<Vec<Value>> {
    let mut conditions = node.items(&["status", "conditions"]).to_vec();
    let mut changed = false;
    for kind in REPORTED {
        match conditions.iter_mut().find(|c| c.text(&["type"]) == kind) {
            Some(c) if c.text(&["status"]) == "Unknown" => {}
            Some(c) => {
                changed = true;
                let heartbeat = c.text(&["lastHeartbeatTime"]).to_owned();
                *c = unknown(
                    kind,
                    "NodeStatusUnknown",
                    "Kubelet stopped posting node status.",
                    &heartbeat,
                    now,
                );
            }
            None => {
                changed = true;
                conditions.push(unknown(
                    kind,
                    "NodeStatusNeverUpdated",
                    "Kubelet never posted node status.",
                    node.text(&["metadata", "creationTimestamp"]),
                    now,
                ));
            }
        }
    }
    changed.then_some(conditions)
}

fn unknown(kind: &str, reason: &str, message: &str, heartbeat: &str, now: Timestamp) -> Value {
    json!({
        "type": kind, "status": "Unknown", "lastHeartbeatTime": heartbeat,
        "lastTransitionTime": time_text(now), "reason": reason, "message": message,
    })
}

/// The taints that the node should have, when they differ from those it has. Taints of others stay as they are.
pub(super) fn taints(node: &Value, now: Timestamp) -> Option<Vec<Value>> {
    let present = node.items(&["spec", "taints"]);
    let mut wanted: Vec<(&str, &str)> = Vec::new();
    match node.condition("Ready").map(|c| c.text(&["status"])) {
        Some("True") => {}
        Some("Unknown") => wanted.extend([(UNREACHABLE, "NoSchedule"), (UNREACHABLE, "NoExecute")]),
        Some(_) => wanted.extend([(NOT_READY, "NoSchedule"), (NOT_READY, "NoExecute")]),
        // It has only just been registered: no pods yet, and none to evict.
        None => wanted.push((NOT_READY, "NoSchedule")),
    }
    for (condition, key) in PRESSURES {
        if node
            .condition(condition)
            .is_some_and(|c| c.text(&["status"]) == "True")
        {
            wanted.push((key, "NoSchedule"));
        }
    }
    if node.flag(&["spec", "unschedulable"]) {
        wanted.push((UNSCHEDULABLE, "NoSchedule"));
    }
    let is_managed = |t: &Value| {
        let key = t.text(&["key"]);
        let by_condition = PRESSURES.iter().any(|(_, k)| *k == key) || key == UNSCHEDULABLE;
        let effect = t.text(&["effect"]);
        (by_condition && effect == "NoSchedule")
            || ([NOT_READY, UNREACHABLE].contains(&key)
                && ["NoSchedule", "NoExecute"].contains(&effect))
    };
    let same = |t: &Value, key: &str, effect: &str| {
        t.text(&["key"]) == key && t.text(&["effect"]) == effect
    };
    let mut taints: Vec<Value> = present
        .iter()
        .filter(|t| !is_managed(t) || wanted.iter().any(|(k, e)| same(t, k, e)))
        .cloned()
        .collect();
    for (key, effect) in wanted {
        if !taints.iter().any(|t| same(t, key, effect)) {
            taints.push(json!({"key": key, "effect": effect, "timeAdded": time_text(now)}));
        }
    }
    (taints != present).then_some(taints)
}
