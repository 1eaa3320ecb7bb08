//! Rows of the kinds that make pods.

use serde_json::Value;

use super::row::{NONE, Row, labels, member, selector, selector_or_none};
use crate::apiserver::schema::time::{human_duration, parse_time};

pub(super) fn cells(kind: &str, row: &Row<'_>) -> Option<Vec<Value>> {
    Some(match kind {
        "Deployment" => deployment(row),
        "ReplicaSet" => replica_set(row),
        "ReplicationController" => {
            let mut cells = replica_set(row);
            if let Some(last) = cells.last_mut() {
                *last = labels(row.at("/spec/selector")).into();
            }
            cells
        }
        "StatefulSet" => {
            let (names, images) = row.containers("/spec/template/spec");
            vec![row.name(), ready(row), row.age(), names, images]
        }
        "DaemonSet" => daemon_set(row),
        "Job" => job(row),
        "CronJob" => cron_job(row),
        "ControllerRevision" => {
            vec![
                row.name(),
                controller(row).into(),
                row.int("/revision").into(),
                row.age(),
            ]
        }
        "PodTemplate" => {
            let (names, images) = row.containers("/template/spec");
            vec![
                row.name(),
                names,
                images,
                labels(row.at("/template/metadata/labels")).into(),
            ]
        }
        _ => return None,
    })
}

fn ready(row: &Row<'_>) -> Value {
    format!(
        "{}/{}",
        row.int("/status/readyReplicas"),
        row.int("/spec/replicas")
    )
    .into()
}

fn deployment(row: &Row<'_>) -> Vec<Value> {
    let (names, images) = row.containers("/spec/template/spec");
    vec![
        row.name(),
        ready(row),
        row.int("/status/updatedReplicas").into(),
        row.int("/status/availableReplicas").into(),
        row.age(),
        names,
        images,
        selector(row.at("/spec/selector")).into(),
    ]
}

fn replica_set(row: &Row<'_>) -> Vec<Value> {
    let (names, images) = row.containers("/spec/template/spec");
    vec![
        row.name(),
        row.int("/spec/replicas").into(),
        row.int("/status/replicas").into(),
        row.int("/status/readyReplicas").into(),
        row.age(),
        names,
        images,
        selector_or_none(row.at("/spec/selector")),
    ]
}

fn daemon_set(row: &Row<'_>) -> Vec<Value> {
    let (names, images) = row.containers("/spec/template/spec");
    vec![
        row.name(),
        row.int("/status/desiredNumberScheduled").into(),
        row.int("/status/currentNumberScheduled").into(),
        row.int("/status/numberReady").into(),
        row.int("/status/updatedNumberScheduled").into(),
        row.int("/status/numberAvailable").into(),
        labels(row.at("/spec/template/spec/nodeSelector")).into(),
        row.age(),
        names,
        images,
        selector_or_none(row.at("/spec/selector")),
    ]
}

fn job(row: &Row<'_>) -> Vec<Value> {
    let (names, images) = row.containers("/spec/template/spec");
    let succeeded = row.int("/status/succeeded");
    let completions = match (row.at("/spec/completions"), row.int("/spec/parallelism")) {
        (Some(wanted), _) => format!("{succeeded}/{wanted}"),
        (None, parallelism) if parallelism > 1 => format!("{succeeded}/1 of {parallelism}"),
        _ => format!("{succeeded}/1"),
    };
    let duration = parse_time(row.text("/status/startTime")).map(|start| {
        match parse_time(row.text("/status/completionTime")) {
            Some(end) => human_duration(end.as_second() - start.as_second()),
            None => row.since("/status/startTime"),
        }
    });
    vec![
        row.name(),
        job_status(row).into(),
        completions.into(),
        duration.unwrap_or_default().into(),
        row.age(),
        names,
        images,
        selector_or_none(row.at("/spec/selector")),
    ]
}

fn job_status(row: &Row<'_>) -> &'static str {
    if row.has_condition("Complete") {
        "Complete"
    } else if row.has_condition("Failed") {
        "Failed"
    } else if row.is_deleted() {
        "Terminating"
    } else {
        ["Suspended", "FailureTarget", "SuccessCriteriaMet"]
            .into_iter()
            .find(|kind| row.has_condition(kind))
            .unwrap_or("Running")
    }
}

fn cron_job(row: &Row<'_>) -> Vec<Value> {
    let (names, images) = row.containers("/spec/jobTemplate/spec/template/spec");
    let last = match row.text("/status/lastScheduleTime") {
        "" => NONE.to_owned(),
        time => row.since_text(time),
    };
    vec![
        row.name(),
        row.text("/spec/schedule").into(),
        row.text_or("/spec/timeZone", NONE).into(),
        row.is_true("/spec/suspend").into(),
        row.list("/status/active").len().into(),
        last.into(),
        row.age(),
        names,
        images,
        selector_or_none(row.at("/spec/jobTemplate/spec/selector")),
    ]
}

/// The owner that manages the object, as kind.group/name.
fn controller(row: &Row<'_>) -> String {
    let owner = row
        .list("/metadata/ownerReferences")
        .iter()
        .find(|o| o.get("controller") == Some(&Value::Bool(true)));
    let Some(owner) = owner else {
        return NONE.to_owned();
    };
    let kind = member(owner, "kind").to_lowercase();
    match member(owner, "apiVersion").split_once('/') {
        Some((group, _)) => format!("{kind}.{group}/{}", member(owner, "name")),
        None => format!("{kind}/{}", member(owner, "name")),
    }
}
