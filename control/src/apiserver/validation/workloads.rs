//! Deployments, ReplicaSets, StatefulSets, DaemonSets, Jobs, CronJobs.

use serde_json::Value;

use super::cron;
use super::cursor::At;
use super::metadata::{label_selector, labels};
use super::{names, pod};

const SELECTOR_MISMATCH: &str = "`selector` does not match template `labels`";
const STATEFUL_SET_MUTABLE: &[&str] = &[
    "replicas",
    "ordinals",
    "template",
    "updateStrategy",
    "revisionHistoryLimit",
    "persistentVolumeClaimRetentionPolicy",
    "minReadySeconds",
];

/// A selector that must exist, select something, and select the template's pods.
fn selector_and_template(spec: &At<'_>) {
    let selector = spec.get("selector");
    let template = spec.get("template");
    if selector.exists() {
        label_selector(&selector);
        if selector.get("matchLabels").is_empty() && selector.get("matchExpressions").is_empty() {
            selector.invalid("empty selector is invalid for deployment");
        } else if !matches(&selector, &template.get("metadata").get("labels")) {
            let at = template.get("metadata").get("labels");
            at.invalid(SELECTOR_MISMATCH);
        }
    } else {
        selector.required("");
    }
    pod::template(&template);
}

/// Whether a label selector matches labels.
fn matches(selector: &At<'_>, labels: &At<'_>) -> bool {
    let equal = selector
        .get("matchLabels")
        .entries()
        .iter()
        .all(|(key, wanted)| labels.key(key).value() == wanted.value());
    equal
        && selector
            .get("matchExpressions")
            .items()
            .iter()
            .all(|expression| {
                let found = labels.key(expression.get("key").text());
                let listed = expression
                    .get("values")
                    .items()
                    .iter()
                    .any(|v| v.value() == found.value());
                match expression.get("operator").text() {
                    "In" => found.exists() && listed,
                    "NotIn" => !listed,
                    "Exists" => found.exists(),
                    "DoesNotExist" => !found.exists(),
                    _ => true,
                }
            })
}

fn always_restarts(spec: &At<'_>) {
    let policy = spec.get("template").get("spec").get("restartPolicy");
    if !policy.is_empty() && policy.text() != "Always" {
        policy.not_supported(&["Always"]);
    }
    let deadline = spec
        .get("template")
        .get("spec")
        .get("activeDeadlineSeconds");
    if deadline.exists() {
        deadline.forbidden("activeDeadlineSeconds in ReplicaSet is not Supported");
    }
}

pub(super) fn deployment(root: &At<'_>) {
    let spec = root.get("spec");
    for field in [
        "replicas",
        "minReadySeconds",
        "revisionHistoryLimit",
        "progressDeadlineSeconds",
    ] {
        spec.get(field).non_negative();
    }
    selector_and_template(&spec);
    always_restarts(&spec);
    let deadline = spec.get("progressDeadlineSeconds");
    if let (Some(limit), Some(ready)) = (
        deadline.int(),
        spec.get("minReadySeconds").int().or(Some(0)),
    ) && limit <= ready
    {
        deadline.invalid("must be greater than minReadySeconds");
    }
    let strategy = spec.get("strategy");
    strategy
        .get("type")
        .needed_one_of(&["Recreate", "RollingUpdate"]);
    let rolling = strategy.get("rollingUpdate");
    match strategy.get("type").text() {
        "Recreate" if rolling.exists() => {
            rolling.forbidden("may not be specified when strategy `type` is 'Recreate'");
        }
        "RollingUpdate" => rolling_bounds(&rolling),
        _ => {}
    }
}

fn rolling_bounds(rolling: &At<'_>) {
    let (surge, unavailable) = (rolling.get("maxSurge"), rolling.get("maxUnavailable"));
    count_or_percent(&surge);
    count_or_percent(&unavailable);
    if percent(&unavailable).is_some_and(|p| p > 100) {
        unavailable.invalid("must not be greater than 100%");
    }
    let zero = |at: &At<'_>| at.int() == Some(0) || percent(at) == Some(0);
    if zero(&surge) && zero(&unavailable) {
        unavailable.invalid("may not be 0 when `maxSurge` is 0");
    }
}

fn percent(at: &At<'_>) -> Option<i64> {
    at.text().strip_suffix('%')?.parse().ok()
}

/// A non-negative number or a percentage.
pub(super) fn count_or_percent(at: &At<'_>) {
    match at.value() {
        Some(Value::String(_)) if percent(at).is_none_or(|p| p < 0) => at.invalid(
            "a valid percent string must be a numeric string followed by an ending '%' (e.g. '1%', or '93%', regex used \
             for validation is '[0-9]+%')",
        ),
        Some(Value::Number(_)) => at.non_negative(),
        _ => {}
    }
}

pub(super) fn replica_set(root: &At<'_>) {
    let spec = root.get("spec");
    spec.get("replicas").non_negative();
    spec.get("minReadySeconds").non_negative();
    selector_and_template(&spec);
    always_restarts(&spec);
}

pub(super) fn replication_controller(root: &At<'_>) {
    let spec = root.get("spec");
    spec.get("replicas").non_negative();
    spec.get("minReadySeconds").non_negative();
    let selector = spec.get("selector");
    if selector.needed() {
        labels(&selector);
    }
    if spec.get("template").exists() {
        let found = spec.get("template").get("metadata").get("labels");
        if !selector
            .entries()
            .iter()
            .all(|(key, wanted)| found.key(key).value() == wanted.value())
        {
            found.invalid(SELECTOR_MISMATCH);
        }
        pod::template(&spec.get("template"));
    } else {
        spec.get("template").required("");
    }
}

pub(super) fn stateful_set(root: &At<'_>) {
    let spec = root.get("spec");
    for field in ["replicas", "minReadySeconds", "revisionHistoryLimit"] {
        spec.get(field).non_negative();
    }
    spec.get("podManagementPolicy")
        .needed_one_of(&["OrderedReady", "Parallel"]);
    let strategy = spec.get("updateStrategy");
    strategy
        .get("type")
        .needed_one_of(&["OnDelete", "RollingUpdate"]);
    strategy
        .get("rollingUpdate")
        .get("partition")
        .non_negative();
    count_or_percent(&strategy.get("rollingUpdate").get("maxUnavailable"));
    selector_and_template(&spec);
    always_restarts(&spec);
}

pub(super) fn stateful_set_update(new: &At<'_>, old: &At<'_>) {
    let (new, old) = (new.get("spec"), old.get("spec"));
    let fixed = |at: &At<'_>| {
        let mut spec = at.value().cloned().unwrap_or_default();
        if let Value::Object(map) = &mut spec {
            map.retain(|key, _| !STATEFUL_SET_MUTABLE.contains(&key.as_str()));
        }
        spec
    };
    if fixed(&new) != fixed(&old) {
        new.forbidden(
            "updates to statefulset spec for fields other than 'replicas', 'ordinals', 'template', 'updateStrategy', \
             'revisionHistoryLimit', 'persistentVolumeClaimRetentionPolicy' and 'minReadySeconds' are forbidden",
        );
    }
}

pub(super) fn daemon_set(root: &At<'_>) {
    let spec = root.get("spec");
    spec.get("minReadySeconds").non_negative();
    spec.get("revisionHistoryLimit").non_negative();
    selector_and_template(&spec);
    always_restarts(&spec);
    let strategy = spec.get("updateStrategy");
    strategy
        .get("type")
        .needed_one_of(&["OnDelete", "RollingUpdate"]);
    if strategy.get("type").text() == "RollingUpdate" {
        rolling_bounds(&strategy.get("rollingUpdate"));
    }
}

/// The selector of a workload is fixed once set.
pub(super) fn fixed_selector(new: &At<'_>, old: &At<'_>) {
    new.get("spec")
        .get("selector")
        .immutable(&old.get("spec").get("selector"));
}

pub(super) fn job(root: &At<'_>) {
    let spec = root.get("spec");
    job_spec(&spec);
    let selector = spec.get("selector");
    if selector.exists() {
        label_selector(&selector);
        if !matches(
            &selector,
            &spec.get("template").get("metadata").get("labels"),
        ) {
            spec.get("template")
                .get("metadata")
                .get("labels")
                .invalid(SELECTOR_MISMATCH);
        }
    } else {
        selector.required("");
    }
}

fn job_spec(spec: &At<'_>) {
    for field in [
        "parallelism",
        "completions",
        "activeDeadlineSeconds",
        "backoffLimit",
        "ttlSecondsAfterFinished",
        "backoffLimitPerIndex",
        "maxFailedIndexes",
    ] {
        spec.get(field).non_negative();
    }
    spec.get("completionMode")
        .one_of(&["Indexed", "NonIndexed"]);
    if spec.get("completionMode").text() == "Indexed" && !spec.get("completions").exists() {
        spec.get("completions")
            .required("when completion mode is Indexed");
    }
    pod::template(&spec.get("template"));
    let policy = spec.get("template").get("spec").get("restartPolicy");
    if !["OnFailure", "Never"].contains(&policy.text()) && !policy.is_empty() {
        policy.not_supported(&["OnFailure", "Never"]);
    }
}

pub(super) fn job_update(new: &At<'_>, old: &At<'_>) {
    let (new, old) = (new.get("spec"), old.get("spec"));
    for field in [
        "selector",
        "completionMode",
        "podFailurePolicy",
        "backoffLimitPerIndex",
        "managedBy",
        "manualSelector",
    ] {
        new.get(field).immutable(&old.get(field));
    }
    // An indexed job grows and shrinks with its parallelism.
    let elastic = new.get("completionMode").text() == "Indexed"
        && new.get("completions").value() == new.get("parallelism").value();
    if !elastic {
        new.get("completions").immutable(&old.get("completions"));
    }
    if !old.get("suspend").is_true() {
        new.get("template").immutable(&old.get("template"));
    }
}

pub(super) fn cron_job(root: &At<'_>) {
    let spec = root.get("spec");
    let schedule = spec.get("schedule");
    if schedule.needed() {
        if schedule.text().starts_with("TZ=") || schedule.text().starts_with("CRON_TZ=") {
            schedule.invalid("cannot use TZ or CRON_TZ in schedule, use timeZone field instead");
        } else if let Err(error) = cron::check(schedule.text()) {
            schedule.invalid(error);
        }
    }
    let zone = spec.get("timeZone");
    if zone.exists()
        && (zone.text().is_empty()
            || zone.text() == "Local"
            || jiff::tz::db().get(zone.text()).is_err())
    {
        zone.invalid(format!("unknown time zone {}", zone.text()));
    }
    spec.get("concurrencyPolicy")
        .needed_one_of(&["Allow", "Forbid", "Replace"]);
    for field in [
        "startingDeadlineSeconds",
        "successfulJobsHistoryLimit",
        "failedJobsHistoryLimit",
    ] {
        spec.get(field).non_negative();
    }
    job_spec(&spec.get("jobTemplate").get("spec"));
    let template_labels = spec.get("jobTemplate").get("metadata").get("labels");
    for (key, _) in template_labels.entries() {
        for error in names::qualified(key) {
            template_labels.invalid_value(key, error);
        }
    }
}
