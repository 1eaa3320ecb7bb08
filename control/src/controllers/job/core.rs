//! Job: how many pods to run, what their ends mean, and when the Job itself has ended. Pure: one call is one round.
//!
//! Finished pods are counted exactly once, although pods and counters are different objects: each pod carries a
//! finalizer until its uid stands in `status.uncountedTerminatedPods`, and moves from there into the counter once the
//! finalizer is gone.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::indexes;
use crate::controllers::pods;
use crate::controllers::runtime::object::{
    Object, controller_reference, seconds_between, set, set_condition, time_text, unset,
};

pub(super) const API_VERSION: &str = "batch/v1";
pub(super) const KIND: &str = "Job";
pub(super) const FINALIZER: &str = "batch.kubernetes.io/job-tracking";
/// Wait after a failed pod; doubles with each further one in a row.
const FIRST_BACKOFF_S: i64 = 10;
const LAST_BACKOFF_S: i64 = 600;
/// Pods made in one round.
const BURST: i64 = 500;

/// How the Job ends.
#[derive(Clone, Debug, PartialEq)]
struct End {
    complete: bool,
    reason: &'static str,
    message: String,
}

/// The next round.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) create: Vec<Value>,
    pub(super) delete: Vec<Arc<Value>>,
    /// To be released after the status is written.
    pub(super) release: Vec<Arc<Value>>,
    pub(super) status: Value,
    pub(super) events: Vec<(bool, &'static str, String)>,
    pub(super) again: Option<Duration>,
    /// The Job has outlived its end.
    pub(super) expired: bool,
}

pub(super) fn has_finalizer(pod: &Value) -> bool {
    pod.items(&["metadata", "finalizers"])
        .iter()
        .any(|f| f.as_str() == Some(FINALIZER))
}

fn condition_is_true(job: &Value, kind: &str) -> bool {
    job.condition(kind)
        .is_some_and(|c| c.text(&["status"]) == "True")
}

pub(super) fn is_finished(job: &Value) -> bool {
    condition_is_true(job, "Complete") || condition_is_true(job, "Failed")
}

pub(super) fn is_indexed(job: &Value) -> bool {
    job.text(&["spec", "completionMode"]) == "Indexed"
}

struct Round<'a> {
    job: &'a Value,
    pods: &'a [Arc<Value>],
    now: Timestamp,
    plan: Plan,
    status: Value,
    active: Vec<&'a Arc<Value>>,
    succeeded: i64,
    failed: i64,
    indexes: BTreeSet<i64>,
}

pub(super) fn plan(job: &Value, owned: &[Arc<Value>], now: Timestamp) -> Plan {
    let mut round = Round {
        job,
        pods: owned,
        now,
        plan: Plan::default(),
        status: job.at(&["status"]).cloned().unwrap_or_else(|| json!({})),
        active: owned.iter().filter(|p| pods::is_active(p)).collect(),
        succeeded: 0,
        failed: 0,
        indexes: indexes::parse(job.text(&["status", "completedIndexes"])),
    };
    round.count();
    if is_finished(job) {
        round.expire();
    } else if !job.is_deleting() {
        round.advance();
    }
    round.finish()
}

impl<'a> Round<'a> {
    fn number(&self, field: &str) -> Option<i64> {
        self.job.number(&["spec", field])
    }

    fn wake_in(&mut self, seconds: i64) {
        let left = Duration::from_secs(seconds.max(1).unsigned_abs());
        self.plan.again = Some(self.plan.again.map_or(left, |a| a.min(left)));
    }

    fn uncounted(&self, field: &str) -> Vec<String> {
        let list = self
            .job
            .items(&["status", "uncountedTerminatedPods", field]);
        list.iter()
            .filter_map(|u| u.as_str().map(str::to_owned))
            .collect()
    }

    /// Takes every end into account that has not been before.
    fn count(&mut self) {
        let held: BTreeMap<&str, &Arc<Value>> = self
            .pods
            .iter()
            .filter(|p| has_finalizer(p))
            .map(|p| (p.uid(), p))
            .collect();
        let mut uncounted = BTreeMap::new();
        for field in ["succeeded", "failed"] {
            let (held_still, gone): (Vec<String>, Vec<String>) = self
                .uncounted(field)
                .into_iter()
                .partition(|uid| held.contains_key(uid.as_str()));
            let before = self.job.number(&["status", field]).unwrap_or(0);
            let total = before + i64::try_from(gone.len()).unwrap_or(0);
            set_count(&mut self.status, field, total);
            uncounted.insert(field, held_still);
        }
        let known: BTreeSet<String> = uncounted.values().flatten().cloned().collect();
        for (uid, pod) in held {
            let field = match pod.text(&["status", "phase"]) {
                "Succeeded" => "succeeded",
                "Failed" => "failed",
                _ if pod.is_deleting() => "failed",
                _ => continue,
            };
            if !known.contains(uid) {
                if field == "succeeded" {
                    self.indexes.extend(indexes::of_pod(pod));
                }
                uncounted.entry(field).or_default().push(uid.to_owned());
            }
            self.plan.release.push(pod.clone());
        }
        let total = |status: &Value, field: &str| {
            let open = uncounted.get(field).map_or(0, Vec::len);
            status.number(&[field]).unwrap_or(0) + i64::try_from(open).unwrap_or(0)
        };
        self.succeeded = total(&self.status, "succeeded");
        self.failed = total(&self.status, "failed");
        if is_indexed(self.job) {
            let completions = self.number("completions").unwrap_or(0);
            self.indexes.retain(|i| *i < completions);
            self.succeeded = i64::try_from(self.indexes.len()).unwrap_or(0);
        }
        uncounted.retain(|_, uids| !uids.is_empty());
        set(
            &mut self.status,
            &["uncountedTerminatedPods"],
            json!(uncounted),
        );
    }

    fn expire(&mut self) {
        let Some(ttl) = self.number("ttlSecondsAfterFinished") else {
            return;
        };
        let end = ["Complete", "Failed"]
            .iter()
            .filter_map(|kind| self.job.condition(kind))
            .find(|c| c.text(&["status"]) == "True")
            .and_then(|c| c.time(&["lastTransitionTime"]));
        let Some(end) = end else { return };
        let left = ttl - seconds_between(end, self.now);
        if left <= 0 {
            self.plan.expired = true;
        } else {
            self.wake_in(left);
        }
    }

    fn advance(&mut self) {
        let suspended = self.job.flag(&["spec", "suspend"]);
        self.note_suspension(suspended);
        if let Some(end) = self.ending(suspended) {
            self.end(&end);
            return;
        }
        if suspended {
            let active = self.active.iter().map(|p| (*p).clone());
            self.plan.delete.extend(active);
            return;
        }
        if self.job.text(&["status", "startTime"]).is_empty() {
            set(&mut self.status, &["startTime"], time_text(self.now).into());
        }
        self.scale();
    }

    fn note_suspension(&mut self, suspended: bool) {
        let was = condition_is_true(self.job, "Suspended");
        let now = self.now;
        if suspended && !was {
            let (reason, message) = ("JobSuspended", "Job suspended");
            set_condition(&mut self.status, "Suspended", "True", reason, message, now);
            unset(&mut self.status, &["startTime"]);
            self.plan
                .events
                .push((true, "Suspended", message.to_owned()));
        } else if !suspended && was {
            let (reason, message) = ("JobResumed", "Job resumed");
            set_condition(&mut self.status, "Suspended", "False", reason, message, now);
            set(&mut self.status, &["startTime"], time_text(now).into());
            self.plan.events.push((true, "Resumed", message.to_owned()));
        }
    }

    /// Whether the Job has run its course, in one way or the other.
    fn ending(&mut self, suspended: bool) -> Option<End> {
        let fail = |reason: &'static str, message: &str| {
            Some(End {
                complete: false,
                reason,
                message: message.to_owned(),
            })
        };
        // An end that was decided stays decided while the last pods go.
        if let Some(c) = self.job.condition("FailureTarget") {
            let reason = match c.text(&["reason"]) {
                "DeadlineExceeded" => "DeadlineExceeded",
                _ => "BackoffLimitExceeded",
            };
            return fail(reason, c.text(&["message"]));
        }
        let limit = self.number("backoffLimit").unwrap_or(6);
        let restarts = self
            .job
            .text(&["spec", "template", "spec", "restartPolicy"])
            == "OnFailure";
        let in_place: i64 = if restarts {
            self.active.iter().map(|p| restart_count(p)).sum()
        } else {
            0
        };
        if self.failed > limit
            || (restarts && in_place > 0 && self.failed + in_place >= limit.max(1))
        {
            let message = "Job has reached the specified backoff limit";
            return fail("BackoffLimitExceeded", message);
        }
        let started = self
            .job
            .time(&["status", "startTime"])
            .filter(|_| !suspended);
        if let (Some(deadline), Some(start)) = (self.number("activeDeadlineSeconds"), started) {
            let left = deadline - seconds_between(start, self.now);
            if left <= 0 {
                let message = "Job was active longer than specified deadline";
                return fail("DeadlineExceeded", message);
            }
            self.wake_in(left);
        }
        let complete = match self.number("completions") {
            Some(completions) => self.succeeded >= completions && (completions > 0 || !suspended),
            None => self.succeeded > 0 && self.active.is_empty(),
        };
        complete.then(|| End {
            complete: true,
            reason: "CompletionsReached",
            message: "Reached expected number of succeeded pods".to_owned(),
        })
    }

    /// Removes what still runs; the last word is said when nothing does, and when everything is counted.
    fn end(&mut self, end: &End) {
        let target = if end.complete {
            "SuccessCriteriaMet"
        } else {
            "FailureTarget"
        };
        let now = self.now;
        set_condition(
            &mut self.status,
            target,
            "True",
            end.reason,
            &end.message,
            now,
        );
        let active = self.active.iter().map(|p| (*p).clone());
        self.plan.delete.extend(active);
        let counted = self.plan.release.is_empty()
            && self.status.at(&["uncountedTerminatedPods"]) == Some(&json!({}));
        let running = self.pods.iter().any(|p| !pods::is_finished(p));
        if running || !counted {
            return;
        }
        let kind = if end.complete { "Complete" } else { "Failed" };
        set_condition(
            &mut self.status,
            kind,
            "True",
            end.reason,
            &end.message,
            now,
        );
        if end.complete {
            set(&mut self.status, &["completionTime"], time_text(now).into());
            self.plan
                .events
                .push((true, "Completed", "Job completed".to_owned()));
        } else {
            self.plan
                .events
                .push((false, end.reason, end.message.clone()));
        }
        if let Some(ttl) = self.number("ttlSecondsAfterFinished") {
            self.wake_in(ttl);
        }
    }

    fn scale(&mut self) {
        let parallelism = self.number("parallelism").unwrap_or(1);
        let active = i64::try_from(self.active.len()).unwrap_or(0);
        let wanted = match self.number("completions") {
            Some(completions) => parallelism.min(completions - self.succeeded),
            // Once one has succeeded no new ones are made.
            None if self.succeeded > 0 => active.min(parallelism),
            None => parallelism,
        };
        // A pod on its way out may still run, when only failed ones are to be replaced.
        let leaving = if self.job.text(&["spec", "podReplacementPolicy"]) == "Failed" {
            self.pods
                .iter()
                .filter(|p| p.is_deleting() && !pods::is_finished(p))
                .count()
        } else {
            0
        };
        let missing = wanted - active - i64::try_from(leaving).unwrap_or(0);
        if missing < 0 {
            let surplus = usize::try_from(active - wanted.max(0)).unwrap_or(0);
            let all: Vec<Arc<Value>> = self.active.iter().map(|p| (*p).clone()).collect();
            let order = pods::deletion_order(&all, &std::collections::HashMap::new(), self.now);
            self.plan
                .delete
                .extend(order.into_iter().take(surplus).cloned());
        } else if missing > 0 {
            let wait = self.backoff_left();
            if wait > 0 {
                self.wake_in(wait);
            } else {
                self.create(missing.min(BURST));
            }
        }
    }

    /// Seconds until the next pod may follow the failures since the last success.
    fn backoff_left(&self) -> i64 {
        let end = |pod: &Value| {
            let statuses = pod.items(&["status", "containerStatuses"]);
            let finished = statuses
                .iter()
                .filter_map(|s| s.time(&["state", "terminated", "finishedAt"]));
            finished
                .max()
                .or_else(|| pod.condition("Ready")?.time(&["lastTransitionTime"]))
        };
        let ended = |phase: &str| {
            let pods = self
                .pods
                .iter()
                .filter(move |p| p.text(&["status", "phase"]) == phase);
            pods.filter_map(|p| end(p)).collect::<Vec<_>>()
        };
        let last_success = ended("Succeeded").into_iter().max();
        let failures: Vec<Timestamp> = ended("Failed")
            .into_iter()
            .filter(|t| last_success.is_none_or(|s| *t > s))
            .collect();
        let Some(last) = failures.iter().max() else {
            return 0;
        };
        let doublings = u32::try_from(failures.len() - 1)
            .unwrap_or(u32::MAX)
            .min(10);
        let wait = (FIRST_BACKOFF_S << doublings).min(LAST_BACKOFF_S);
        wait - seconds_between(*last, self.now)
    }

    fn create(&mut self, count: i64) {
        let null = Value::Null;
        let template = self.job.at(&["spec", "template"]).unwrap_or(&null);
        let reference = controller_reference(self.job, API_VERSION, KIND);
        let mut free = if is_indexed(self.job) {
            let used: BTreeSet<i64> = self
                .active
                .iter()
                .filter_map(|p| indexes::of_pod(p))
                .collect();
            let completions = self.number("completions").unwrap_or(0);
            (0..completions)
                .filter(|i| !used.contains(i) && !self.indexes.contains(i))
                .collect::<Vec<_>>()
                .into_iter()
        } else {
            Vec::new().into_iter()
        };
        for _ in 0..count {
            let prefix = pods::name_prefix(self.job.name());
            let mut pod =
                pods::from_template(template, self.job.namespace(), &prefix, reference.clone());
            if is_indexed(self.job) {
                let Some(index) = free.next() else { return };
                indexes::dress(&mut pod, self.job.name(), index);
            }
            let mut finalizers = pod.items(&["metadata", "finalizers"]).to_vec();
            finalizers.push(FINALIZER.into());
            set(&mut pod, &["metadata", "finalizers"], finalizers.into());
            self.plan.create.push(pod);
        }
    }

    fn finish(mut self) -> Plan {
        let ready = self.active.iter().filter(|p| pods::is_ready(p)).count();
        let leaving = self
            .pods
            .iter()
            .filter(|p| p.is_deleting() && !pods::is_finished(p))
            .count();
        let made = self.plan.create.len();
        let gone = self.plan.delete.len();
        let active = (self.active.len() + made).saturating_sub(gone);
        for (field, count) in [
            ("active", active),
            ("ready", ready),
            ("terminating", leaving + gone),
        ] {
            // These two are always shown.
            if field == "active" {
                set_count(&mut self.status, field, i64::try_from(count).unwrap_or(0));
            } else {
                set(&mut self.status, &[field], count.into());
            }
        }
        if is_indexed(self.job) {
            let text = indexes::format(&self.indexes);
            if text.is_empty() {
                unset(&mut self.status, &["completedIndexes"]);
            } else {
                set(&mut self.status, &["completedIndexes"], text.into());
            }
        }
        self.plan.status = self.status;
        self.plan
    }
}

fn restart_count(pod: &Value) -> i64 {
    let of = |field: &'static str| pod.items(&["status", field]).iter();
    let all = of("containerStatuses").chain(of("initContainerStatuses"));
    all.filter_map(|s| s.number(&["restartCount"])).sum()
}

fn set_count(status: &mut Value, field: &str, count: i64) {
    if count == 0 {
        unset(status, &[field]);
    } else {
        set(status, &[field], count.into());
    }
}
