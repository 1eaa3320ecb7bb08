//! CronJob: which Jobs to start, stop and forget now, and when to look again. Pure.

use std::sync::Arc;
use std::time::Duration;

use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::schedule::Schedule;
use crate::controllers::runtime::object::{
    Object, controller_reference, seconds_between, set, time_text, unset,
};

pub(super) const API_VERSION: &str = "batch/v1";
pub(super) const KIND: &str = "CronJob";
/// More missed times than this point at a broken clock or schedule; only the last one is used and a warning is given.
const MISSED_LIMIT: usize = 100;
const SCHEDULED_AT: &str = "batch.kubernetes.io/cronjob-scheduled-timestamp";

/// The next round.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) start: Option<Value>,
    pub(super) stop: Vec<Arc<Value>>,
    pub(super) forget: Vec<Arc<Value>>,
    pub(super) status: Value,
    pub(super) warnings: Vec<(&'static str, String)>,
    pub(super) again: Option<Duration>,
}

fn ended(job: &Value, kind: &str) -> bool {
    job.condition(kind)
        .is_some_and(|c| c.text(&["status"]) == "True")
}

fn zone(cron: &Value) -> Option<TimeZone> {
    match cron.text(&["spec", "timeZone"]) {
        "" => Some(TimeZone::UTC),
        name => TimeZone::get(name).ok(),
    }
}

pub(super) fn plan(cron: &Value, jobs: &[Arc<Value>], now: Timestamp) -> Plan {
    let mut plan = Plan {
        status: status(cron, jobs),
        ..Plan::default()
    };
    if cron.is_deleting() {
        return plan;
    }
    plan.forget = surplus(cron, jobs);
    if cron.flag(&["spec", "suspend"]) {
        return plan;
    }
    let text = cron.text(&["spec", "schedule"]);
    let Some(schedule) = Schedule::parse(text) else {
        plan.warnings.push((
            "UnparseableSchedule",
            format!("unparseable schedule: {text}"),
        ));
        return plan;
    };
    let Some(zone) = zone(cron) else {
        let name = cron.text(&["spec", "timeZone"]);
        plan.warnings
            .push(("UnknownTimeZone", format!("invalid timeZone: {name}")));
        return plan;
    };
    plan.again = schedule.next(now, &zone).map(|next| {
        let left = seconds_between(now, next).max(0).unsigned_abs();
        // Just after the full minute, so that the clock has surely passed it.
        Duration::from_secs(left) + Duration::from_millis(100)
    });
    let Some(due) = due(cron, &schedule, &zone, now, &mut plan) else {
        return plan;
    };
    let running: Vec<&Arc<Value>> = jobs
        .iter()
        .filter(|j| !ended(j, "Complete") && !ended(j, "Failed"))
        .collect();
    match cron.text(&["spec", "concurrencyPolicy"]) {
        "Forbid" if !running.is_empty() => {
            let message = "Not starting job because prior execution is running and concurrency policy is Forbid";
            plan.warnings.push(("JobAlreadyActive", message.to_owned()));
            return plan;
        }
        "Replace" => plan.stop = running.into_iter().cloned().collect(),
        _ => {}
    }
    let job = job(cron, due);
    if jobs.iter().all(|j| j.name() != job.name()) {
        plan.start = Some(job);
    }
    set(
        &mut plan.status,
        &["lastScheduleTime"],
        time_text(due).into(),
    );
    plan
}

/// The last scheduled time that has passed and not been served, if it is not too late for it.
fn due(
    cron: &Value,
    schedule: &Schedule,
    zone: &TimeZone,
    now: Timestamp,
    plan: &mut Plan,
) -> Option<Timestamp> {
    let mut from = cron
        .time(&["status", "lastScheduleTime"])
        .or_else(|| cron.created_at())
        .unwrap_or(now);
    let deadline = cron.number(&["spec", "startingDeadlineSeconds"]);
    if let Some(earliest) =
        deadline.and_then(|s| now.checked_sub(SignedDuration::from_secs(s)).ok())
    {
        from = from.max(earliest);
    }
    let mut last = None;
    let mut missed = 0;
    let mut at = from;
    while let Some(next) = schedule.next(at, zone).filter(|next| *next <= now) {
        last = Some(next);
        at = next;
        missed += 1;
        if missed > MISSED_LIMIT {
            let message = format!(
                "too many missed start times: more than {MISSED_LIMIT}. Set or decrease .spec.startingDeadlineSeconds or check clock skew"
            );
            plan.warnings.push(("TooManyMissedTimes", message));
            // The hour before now holds the last time of every schedule that can miss so many.
            at = at.max(now.checked_sub(SignedDuration::from_hours(1)).unwrap_or(at));
            missed = 0;
        }
    }
    last
}

/// The Job of one scheduled time: its name makes a second one of the same time impossible.
fn job(cron: &Value, at: Timestamp) -> Value {
    let template = cron.at(&["spec", "jobTemplate"]);
    let part = |path: &[&str]| {
        template
            .and_then(|t| t.at(path))
            .cloned()
            .unwrap_or_else(|| json!({}))
    };
    let mut annotations = part(&["metadata", "annotations"]);
    set(&mut annotations, &[SCHEDULED_AT], time_text(at).into());
    json!({
        "apiVersion": API_VERSION, "kind": "Job",
        "metadata": {
            "name": format!("{}-{}", cron.name(), at.as_second() / 60),
            "namespace": cron.namespace(),
            "labels": part(&["metadata", "labels"]), "annotations": annotations,
            "ownerReferences": [controller_reference(cron, API_VERSION, KIND)],
        },
        "spec": part(&["spec"]),
    })
}

/// Finished Jobs beyond the history limits, oldest first.
fn surplus(cron: &Value, jobs: &[Arc<Value>]) -> Vec<Arc<Value>> {
    let mut out = Vec::new();
    for (kind, field, default) in [
        ("Complete", "successfulJobsHistoryLimit", 3),
        ("Failed", "failedJobsHistoryLimit", 1),
    ] {
        let limit = cron.number(&["spec", field]).unwrap_or(default);
        let mut of_kind: Vec<Arc<Value>> = jobs
            .iter()
            .filter(|j| ended(j, kind) && !j.is_deleting())
            .cloned()
            .collect();
        of_kind.sort_by_key(|j| (j.time(&["status", "startTime"]), j.name().to_owned()));
        let surplus = of_kind
            .len()
            .saturating_sub(usize::try_from(limit).unwrap_or(0));
        out.extend(of_kind.into_iter().take(surplus));
    }
    out
}

fn status(cron: &Value, jobs: &[Arc<Value>]) -> Value {
    let mut status = cron.at(&["status"]).cloned().unwrap_or_else(|| json!({}));
    let active: Vec<Value> = jobs
        .iter()
        .filter(|j| !ended(j, "Complete") && !ended(j, "Failed"))
        .map(|j| json!({
            "apiVersion": API_VERSION, "kind": "Job", "name": j.name(), "namespace": j.namespace(),
            "uid": j.uid(), "resourceVersion": j.text(&["metadata", "resourceVersion"]),
        }))
        .collect();
    // The version of a running Job changes all the time and is nobody's concern here.
    let names = |list: &[Value]| {
        list.iter()
            .map(|a| a.text(&["uid"]).to_owned())
            .collect::<Vec<_>>()
    };
    if names(&active) != names(status.items(&["active"])) {
        if active.is_empty() {
            unset(&mut status, &["active"]);
        } else {
            set(&mut status, &["active"], active.into());
        }
    }
    let completed = jobs
        .iter()
        .filter(|j| ended(j, "Complete"))
        .filter_map(|j| j.time(&["status", "completionTime"]))
        .max();
    if let Some(time) = completed.filter(|t| {
        status
            .time(&["lastSuccessfulTime"])
            .is_none_or(|known| *t > known)
    }) {
        set(&mut status, &["lastSuccessfulTime"], time_text(time).into());
    }
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cron(policy: &str, last: Option<&str>) -> Value {
        json!({
            "metadata": {"name": "c", "namespace": "ns", "uid": "u",
                "creationTimestamp": "2024-01-01T00:00:30Z"},
            "spec": {"schedule": "* * * * *", "concurrencyPolicy": policy,
                "successfulJobsHistoryLimit": 1, "jobTemplate": {"spec": {"parallelism": 1}}},
            "status": last.map_or(json!({}), |l| json!({"lastScheduleTime": l})),
        })
    }

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    #[test]
    fn one_job_is_made_at_each_full_minute() {
        let before = plan(&cron("Allow", None), &[], at("2024-01-01T00:00:40Z"));
        assert!(before.start.is_none());
        assert_eq!(before.again, Some(Duration::from_millis(20_100)));
        let due = plan(&cron("Allow", None), &[], at("2024-01-01T00:01:00Z"));
        let job = due.start.unwrap();
        assert_eq!(
            job.name(),
            format!("c-{}", at("2024-01-01T00:01:00Z").as_second() / 60)
        );
        assert_eq!(
            due.status.text(&["lastScheduleTime"]),
            "2024-01-01T00:01:00Z"
        );
        let served = cron("Allow", Some("2024-01-01T00:01:00Z"));
        assert!(
            plan(&served, &[], at("2024-01-01T00:01:10Z"))
                .start
                .is_none()
        );
    }

    #[test]
    fn only_the_last_missed_time_is_made_up_for() {
        let late = plan(&cron("Allow", None), &[], at("2024-01-01T09:00:01Z"));
        let job = late.start.unwrap();
        assert_eq!(job.annotation(SCHEDULED_AT), Some("2024-01-01T09:00:00Z"));
        assert_eq!(late.warnings[0].0, "TooManyMissedTimes");
    }

    #[test]
    fn policies_decide_about_a_job_that_still_runs() {
        let running = [Arc::new(json!({"metadata": {"name": "old", "uid": "j"}}))];
        let now = at("2024-01-01T00:01:00Z");
        let forbid = plan(&cron("Forbid", None), &running, now);
        assert!(forbid.start.is_none() && forbid.warnings[0].0 == "JobAlreadyActive");
        assert_eq!(forbid.status.items(&["active"]).len(), 1);
        let replace = plan(&cron("Replace", None), &running, now);
        assert_eq!((replace.stop.len(), replace.start.is_some()), (1, true));
        assert!(plan(&cron("Allow", None), &running, now).start.is_some());
    }

    #[test]
    fn history_is_kept_within_its_limits() {
        let done = |name: &str, start: &str| {
            Arc::new(json!({"metadata": {"name": name},
            "status": {"startTime": start, "conditions": [{"type": "Complete", "status": "True"}]}}))
        };
        let jobs = [
            done("b", "2024-01-01T00:02:00Z"),
            done("a", "2024-01-01T00:01:00Z"),
        ];
        let plan = plan(&cron("Allow", None), &jobs, at("2024-01-01T00:00:40Z"));
        assert_eq!(
            plan.forget.iter().map(|j| j.name()).collect::<Vec<_>>(),
            ["a"]
        );
    }
}
