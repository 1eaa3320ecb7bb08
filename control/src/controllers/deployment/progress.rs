//! The status of a Deployment: counts, availability, progress and its deadline. Pure.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::sets::{bounds, count, replicas};
use crate::controllers::runtime::object::{Object, seconds_between, set, time_text, unset};

/// A deadline of this many seconds means that there is none.
const NO_DEADLINE: i64 = 2_147_483_647;

const AVAILABLE: &str = "Available";
const PROGRESSING: &str = "Progressing";
const REPLICA_FAILURE: &str = "ReplicaFailure";
const NEW_SET_AVAILABLE: &str = "NewReplicaSetAvailable";
const TIMED_OUT: &str = "ProgressDeadlineExceeded";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Counts {
    replicas: i64,
    updated: i64,
    ready: i64,
    available: i64,
}

fn counts(new: Option<&Arc<Value>>, old: &[&Arc<Value>]) -> Counts {
    let sum = |field: &str| {
        old.iter()
            .chain(new.iter())
            .map(|rs| count(rs, field))
            .sum()
    };
    Counts {
        replicas: sum("replicas"),
        updated: new.map_or(0, |rs| count(rs, "replicas")),
        ready: sum("readyReplicas"),
        available: sum("availableReplicas"),
    }
}

/// Every wanted pod is of the new template and available, and no other is left.
pub(super) fn is_complete(d: &Value, new: Option<&Arc<Value>>, old: &[&Arc<Value>]) -> bool {
    let now = counts(new, old);
    let wanted = replicas(d);
    now.updated == wanted && now.replicas == wanted && now.available == wanted
}

/// The status after this round, and when time alone will change it.
pub(super) fn status(
    d: &Value,
    new: Option<&Arc<Value>>,
    old: &[&Arc<Value>],
    created: Option<&Value>,
    now: Timestamp,
) -> (Value, Option<Duration>) {
    let current = counts(new, old);
    let mut status = d.at(&["status"]).cloned().unwrap_or_else(|| json!({}));
    let size: i64 = old.iter().chain(new.iter()).map(|rs| replicas(rs)).sum();
    for (field, value) in [
        ("replicas", current.replicas),
        ("updatedReplicas", current.updated),
        ("readyReplicas", current.ready),
        ("availableReplicas", current.available),
        ("unavailableReplicas", (size - current.available).max(0)),
    ] {
        if value == 0 {
            unset(&mut status, &[field]);
        } else {
            set(&mut status, &[field], value.into());
        }
    }
    set(&mut status, &["observedGeneration"], d.generation().into());
    let mut conditions = Conditions::new(&status, now);
    set_available(d, current.available, &mut conditions);
    let again = if d.is_deleting() {
        None
    } else {
        set_progressing(d, new, old, created, current, &mut conditions)
    };
    let failure = new.into_iter().chain(old.iter().copied());
    match failure
        .filter_map(|rs| rs.condition(REPLICA_FAILURE))
        .next()
    {
        Some(c) => conditions.put(
            REPLICA_FAILURE,
            c.text(&["status"]),
            c.text(&["reason"]),
            c.text(&["message"]).to_owned(),
        ),
        None => conditions.drop(REPLICA_FAILURE),
    }
    conditions.write(&mut status);
    (status, again)
}

fn set_available(d: &Value, available: i64, conditions: &mut Conditions) {
    let (state, reason, message) = if available >= replicas(d) - bounds(d).unavailable {
        (
            "True",
            "MinimumReplicasAvailable",
            "Deployment has minimum availability.",
        )
    } else {
        (
            "False",
            "MinimumReplicasUnavailable",
            "Deployment does not have minimum availability.",
        )
    };
    conditions.put(AVAILABLE, state, reason, message.to_owned());
}

fn deadline(d: &Value) -> Option<i64> {
    d.number(&["spec", "progressDeadlineSeconds"])
        .filter(|s| *s != NO_DEADLINE)
}

fn set_progressing(
    d: &Value,
    new: Option<&Arc<Value>>,
    old: &[&Arc<Value>],
    created: Option<&Value>,
    current: Counts,
    conditions: &mut Conditions,
) -> Option<Duration> {
    let Some(deadline_s) = deadline(d) else {
        conditions.drop(PROGRESSING);
        return None;
    };
    let reason = conditions.reason(PROGRESSING);
    if d.flag(&["spec", "paused"]) {
        if reason != TIMED_OUT && reason != "DeploymentPaused" {
            let message = "Deployment is paused".to_owned();
            conditions.put(PROGRESSING, "Unknown", "DeploymentPaused", message);
        }
        return None;
    }
    if reason == "DeploymentPaused" {
        let message = "Deployment is resumed".to_owned();
        conditions.put(PROGRESSING, "Unknown", "DeploymentResumed", message);
        return None;
    }
    if let Some(created) = created {
        let message = format!("Created new replica set \"{}\"", created.name());
        conditions.renew(PROGRESSING, "True", "NewReplicaSetCreated", message);
        return Some(after(deadline_s));
    }
    let subject = new.map_or_else(
        || format!("Deployment \"{}\"", d.name()),
        |rs| format!("ReplicaSet \"{}\"", rs.name()),
    );
    if conditions.reason(PROGRESSING).is_empty() {
        let name = new.map_or("", |rs| rs.name());
        let message = format!("Found new replica set \"{name}\"");
        conditions.renew(PROGRESSING, "True", "FoundNewReplicaSet", message);
    }
    let settled = reason == NEW_SET_AVAILABLE && current.replicas == current.updated;
    if settled {
        return None;
    }
    if is_complete(d, new, old) {
        let message = format!("{subject} has successfully progressed.");
        conditions.put(PROGRESSING, "True", NEW_SET_AVAILABLE, message);
        return None;
    }
    if has_progressed(d, current) {
        let message = format!("{subject} is progressing.");
        conditions.renew(PROGRESSING, "True", "ReplicaSetUpdated", message);
        return Some(after(deadline_s));
    }
    if conditions.reason(PROGRESSING) == TIMED_OUT {
        return None;
    }
    if conditions.reason(PROGRESSING) == NEW_SET_AVAILABLE {
        // A finished rollout cannot time out; it starts again with its next change.
        return None;
    }
    let left = deadline_s - conditions.age(PROGRESSING);
    if left < 0 {
        let message = format!("{subject} has timed out progressing.");
        conditions.put(PROGRESSING, "False", TIMED_OUT, message);
        return None;
    }
    Some(after(left))
}

/// Just past the moment, since times in conditions have whole seconds.
fn after(seconds: i64) -> Duration {
    Duration::from_secs(seconds.max(0).unsigned_abs() + 1)
}

/// Compared with the status as it was last written.
fn has_progressed(d: &Value, now: Counts) -> bool {
    let was = |field: &str| count(d, field);
    let old_left = was("replicas") - was("updatedReplicas");
    now.updated > was("updatedReplicas")
        || now.replicas - now.updated < old_left
        || now.ready > was("readyReplicas")
        || now.available > was("availableReplicas")
}

/// Conditions with the update time that Deployments carry besides the transition time.
struct Conditions {
    list: Vec<Value>,
    now: Timestamp,
}

impl Conditions {
    fn new(status: &Value, now: Timestamp) -> Self {
        Self {
            list: status.items(&["conditions"]).to_vec(),
            now,
        }
    }

    fn find(&self, kind: &str) -> Option<&Value> {
        self.list.iter().find(|c| c.text(&["type"]) == kind)
    }

    fn reason(&self, kind: &str) -> String {
        self.find(kind)
            .map(|c| c.text(&["reason"]).to_owned())
            .unwrap_or_default()
    }

    /// Seconds since the last update.
    fn age(&self, kind: &str) -> i64 {
        let updated = self.find(kind).and_then(|c| c.time(&["lastUpdateTime"]));
        updated.map_or(0, |t| seconds_between(t, self.now))
    }

    /// Leaves a condition of the same state and reason as it is.
    fn put(&mut self, kind: &str, state: &str, reason: &str, message: String) {
        let same = |c: &Value| c.text(&["status"]) == state && c.text(&["reason"]) == reason;
        if !self.find(kind).is_some_and(same) {
            self.renew(kind, state, reason, message);
        }
    }

    /// Writes the condition with a new update time.
    fn renew(&mut self, kind: &str, state: &str, reason: &str, message: String) {
        let now = time_text(self.now);
        let transition = match self.find(kind) {
            Some(c) if c.text(&["status"]) == state => c.text(&["lastTransitionTime"]).to_owned(),
            _ => now.clone(),
        };
        let condition = json!({
            "type": kind, "status": state, "lastUpdateTime": now,
            "lastTransitionTime": transition, "reason": reason, "message": message,
        });
        match self.list.iter_mut().find(|c| c.text(&["type"]) == kind) {
            Some(slot) => *slot = condition,
            None => self.list.push(condition),
        }
    }

    fn drop(&mut self, kind: &str) {
        self.list.retain(|c| c.text(&["type"]) != kind);
    }

    fn write(self, status: &mut Value) {
        if self.list.is_empty() {
            unset(status, &["conditions"]);
        } else {
            set(status, &["conditions"], self.list.into());
        }
    }
}
