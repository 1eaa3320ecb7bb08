//! Removes pods from nodes whose NoExecute taints they do not tolerate, or tolerate only for a while.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use crate::client::{DeleteOptions, resources};
use crate::controllers::runtime::informer::{Index, Store};
use crate::controllers::runtime::object::{Key, Object, seconds_between, set_condition};
use crate::controllers::runtime::session::{Context, Session};
use crate::controllers::runtime::worker::{
    Again, Controller, KeyQueue, enqueue_changes, tolerate_change,
};
use crate::scheduler::fitting::toleration_covers;
use crate::status::ApiError;

/// How long pods stay on a node that stopped answering when they say nothing about it.
const DEFAULT_TOLERATION_S: i64 = 300;
const SOFT_TAINTS: [&str; 2] = [
    "node.kubernetes.io/not-ready",
    "node.kubernetes.io/unreachable",
];

/// When a pod must leave because of these taints; each comes with the time since which it stands.
fn leave_at(pod: &Value, taints: &[(Value, Timestamp)]) -> Option<Timestamp> {
    taints
        .iter()
        .filter_map(|(taint, since)| leave_at_for(pod, taint, *since))
        .min()
}

fn leave_at_for(pod: &Value, taint: &Value, since: Timestamp) -> Option<Timestamp> {
    let (key, value) = (taint.text(&["key"]), taint.text(&["value"]));
    let tolerations = pod.items(&["spec", "tolerations"]);
    let covering: Vec<&Value> = tolerations
        .iter()
        .filter(|t| toleration_covers(t, key, value, taint.text(&["effect"])))
        .collect();
    let stay_s = if covering.is_empty() {
        Some(if SOFT_TAINTS.contains(&key) {
            DEFAULT_TOLERATION_S
        } else {
            0
        })
    } else {
        // A toleration without a limit is for ever; the shortest of the limits counts.
        covering
            .iter()
            .filter_map(|t| t.number(&["tolerationSeconds"]))
            .min()
    };
    // Beyond the range of times is as good as for ever.
    since
        .checked_add(SignedDuration::from_secs(stay_s?.max(0)))
        .ok()
}

#[derive(Debug)]
pub(in crate::controllers) struct TaintEviction {
    nodes: Arc<Store>,
    pods: Arc<Store>,
    /// Since when taints without a time of their own stand: node, key, value.
    first_seen: Mutex<HashMap<(String, String, String), Timestamp>>,
}

impl TaintEviction {
    pub(in crate::controllers) fn new(context: &Context, queue: &KeyQueue) -> Self {
        let nodes = context.informers.store(resources::NODES);
        let pods = context.informers.store(resources::PODS);
        enqueue_changes(context, resources::NODES, queue);
        let (queue, lookup) = (queue.clone(), nodes.clone());
        pods.subscribe(move |change| {
            let Some(pod) = &change.new else { return };
            let placed = |pod: &Value| pod.text(&["spec", "nodeName"]).to_owned();
            let tolerations = ["spec", "tolerations"];
            if change.old.as_ref().is_some_and(|old| {
                placed(old) == placed(pod) && old.at(&tolerations) == pod.at(&tolerations)
            }) {
                return;
            }
            let key = Key::new("", &placed(pod));
            if lookup
                .get(&key)
                .is_some_and(|node| no_execute(&node).next().is_some())
            {
                queue.add(key);
            }
        });
        Self {
            nodes,
            pods,
            first_seen: Mutex::default(),
        }
    }

    fn standing_taints(&self, node: &Value, now: Timestamp) -> Vec<(Value, Timestamp)> {
        let mut seen = self
            .first_seen
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let slot = |taint: &Value| {
            let (key, value) = (taint.text(&["key"]), taint.text(&["value"]));
            (node.name().to_owned(), key.to_owned(), value.to_owned())
        };
        let standing: Vec<_> = no_execute(node).map(slot).collect();
        seen.retain(|slot, _| slot.0 != node.name() || standing.contains(slot));
        no_execute(node)
            .map(|taint| {
                let noticed = *seen.entry(slot(taint)).or_insert(now);
                (taint.clone(), taint.time(&["timeAdded"]).unwrap_or(noticed))
            })
            .collect()
    }

    async fn evict(&self, pod: &Value, session: &Session<'_>) -> Result<(), ApiError> {
        let mut status = pod.at(&["status"]).cloned().unwrap_or_else(|| json!({}));
        let (reason, message) = (
            "DeletionByTaintManager",
            "Taint manager: deleting due to NoExecute taint",
        );
        set_condition(
            &mut status,
            "DisruptionTarget",
            "True",
            reason,
            message,
            Timestamp::now(),
        );
        let patch = json!({
            "metadata": {"uid": pod.uid()},
            "status": {"conditions": status.at(&["conditions"])},
        });
        tolerate_change(
            session
                .merge(resources::PODS, &pod.key(), "status", patch)
                .await,
        )?;
        let message = format!("Marking for deletion Pod {}", pod.key());
        let recorder = session.recorder().named("taint-eviction-controller");
        recorder.normal((pod, "v1", "Pod"), "TaintManagerEviction", message);
        session
            .delete(resources::PODS, pod, DeleteOptions::default())
            .await
    }
}

fn no_execute(node: &Value) -> impl Iterator<Item = &Value> {
    node.items(&["spec", "taints"])
        .iter()
        .filter(|t| t.text(&["effect"]) == "NoExecute")
}

impl Controller for TaintEviction {
    const NAME: &'static str = "taint-eviction";
    const WORKERS: usize = 2;

    async fn reconcile(&self, key: &Key, session: &Session<'_>) -> Result<Again, ApiError> {
        let Some(node) = self.nodes.get(key) else {
            return Ok(None);
        };
        let now = Timestamp::now();
        let taints = self.standing_taints(&node, now);
        if taints.is_empty() {
            return Ok(None);
        }
        let mut again: Again = None;
        for pod in self.pods.by(Index::Node, node.name()) {
            if pod.is_deleting() || crate::controllers::pods::is_finished(&pod) {
                continue;
            }
            let Some(at) = leave_at(&pod, &taints) else {
                continue;
            };
            let left = seconds_between(now, at);
            if left <= 0 {
                self.evict(&pod, session).await?;
            } else {
                let left = Duration::from_secs(left.unsigned_abs());
                again = Some(again.map_or(left, |a| a.min(left)));
            }
        }
        Ok(again)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tolerations_decide_how_long_a_pod_stays() {
        let since: Timestamp = "2024-01-01T00:00:00Z".parse().unwrap();
        let after = |s: i64| Some(since + SignedDuration::from_secs(s));
        let soft = (json!({"key": SOFT_TAINTS[1], "effect": "NoExecute"}), since);
        let hard = (
            json!({"key": "out", "value": "1", "effect": "NoExecute"}),
            since,
        );
        let pod = |tolerations: Value| json!({"spec": {"tolerations": tolerations}});
        let both = [soft.clone(), hard.clone()];
        assert_eq!(
            leave_at(&pod(json!([])), std::slice::from_ref(&soft)),
            after(300)
        );
        assert_eq!(leave_at(&pod(json!([])), &both), after(0));
        assert_eq!(leave_at(&pod(json!([{"operator": "Exists"}])), &both), None);
        let limited = json!([
            {"key": SOFT_TAINTS[1], "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5},
            {"key": "out", "operator": "Equal", "value": "1", "effect": "NoExecute"},
        ]);
        assert_eq!(leave_at(&pod(limited.clone()), &both), after(5));
        assert_eq!(leave_at(&pod(limited), &[hard]), None);
    }
}
