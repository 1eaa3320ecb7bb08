//! ReplicaSet: how many pods to make or to give up, and the status that describes what is there. Pure.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::controllers::pods::{self, Availability};
use crate::controllers::runtime::object::{Object, set, set_condition, unset};
use crate::status::ApiError;

/// Pods made or deleted in one round; the next round goes on from there.
pub(super) const BURST: usize = 500;

/// What to do about the number of pods.
#[derive(Debug, PartialEq)]
pub(super) enum Step {
    Nothing,
    Create(usize),
    Delete(Vec<Arc<Value>>),
}

pub(super) fn replicas(rs: &Value) -> usize {
    usize::try_from(rs.number(&["spec", "replicas"]).unwrap_or(1)).unwrap_or(0)
}

/// `owned` are all pods of the set; `on_same_node` counts pods of the whole family (all sets of one Deployment).
pub(super) fn step(
    rs: &Value,
    owned: &[Arc<Value>],
    on_same_node: &HashMap<String, usize>,
    now: Timestamp,
) -> Step {
    if rs.is_deleting() {
        return Step::Nothing;
    }
    let active: Vec<Arc<Value>> = owned
        .iter()
        .filter(|p| pods::is_active(p))
        .cloned()
        .collect();
    let wanted = replicas(rs);
    if active.len() < wanted {
        return Step::Create((wanted - active.len()).min(BURST));
    }
    let surplus = (active.len() - wanted).min(BURST);
    if surplus == 0 {
        return Step::Nothing;
    }
    let order = pods::deletion_order(&active, on_same_node, now);
    Step::Delete(order.into_iter().take(surplus).cloned().collect())
}

/// Why pods could not be made or deleted, for the ReplicaFailure condition.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Failure {
    pub(super) reason: &'static str,
    pub(super) error: ApiError,
}

/// The status, and when it will change by the mere passing of time.
pub(super) fn status(
    rs: &Value,
    owned: &[Arc<Value>],
    failure: Option<&Failure>,
    now: Timestamp,
) -> (Value, Option<Duration>) {
    let min_ready_s = rs.number(&["spec", "minReadySeconds"]).unwrap_or(0);
    let template_labels = rs.fields(&["spec", "template", "metadata", "labels"]);
    let (mut total, mut labeled, mut ready, mut available) = (0_u64, 0_u64, 0_u64, 0_u64);
    let mut again: Option<Duration> = None;
    for pod in owned.iter().filter(|p| pods::is_active(p)) {
        total += 1;
        let has = |k: &String, v: &Value| pod.labels().and_then(|l| l.get(k)) == Some(v);
        labeled += u64::from(template_labels.is_none_or(|l| l.iter().all(|(k, v)| has(k, v))));
        ready += u64::from(pods::is_ready(pod));
        match pods::availability(pod, min_ready_s, now) {
            Availability::Available => available += 1,
            Availability::In(left) => again = Some(again.map_or(left, |a| a.min(left))),
            Availability::No => {}
        }
    }
    let mut status = rs.at(&["status"]).cloned().unwrap_or_else(|| json!({}));
    set(&mut status, &["replicas"], total.into());
    set_count(&mut status, "fullyLabeledReplicas", labeled);
    set_count(&mut status, "readyReplicas", ready);
    set_count(&mut status, "availableReplicas", available);
    set(&mut status, &["observedGeneration"], rs.generation().into());
    match failure {
        Some(f) => {
            set_condition(
                &mut status,
                "ReplicaFailure",
                "True",
                f.reason,
                &f.error.message,
                now,
            );
        }
        None => drop_condition(&mut status, "ReplicaFailure"),
    }
    (status, again)
}

/// Counts of zero are left out, as the API's own types do.
fn set_count(status: &mut Value, field: &str, count: u64) {
    if count == 0 {
        unset(status, &[field]);
    } else {
        set(status, &[field], count.into());
    }
}

fn drop_condition(status: &mut Value, kind: &str) {
    let conditions = status.items(&["conditions"]);
    let kept: Vec<Value> = conditions
        .iter()
        .filter(|c| c.text(&["type"]) != kind)
        .cloned()
        .collect();
    if kept.is_empty() {
        unset(status, &["conditions"]);
    } else if kept.len() < conditions.len() {
        set(status, &["conditions"], kept.into());
    }
}
