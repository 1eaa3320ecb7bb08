//! Deployments, ReplicaSets, StatefulSets, DaemonSets, Jobs, CronJobs.

use serde_json::{Map, Value, json};

use super::{member, set, set_in, text};

/// Defaults of structs that stand in several kinds.
pub(super) fn of_type(name: &str, object: &mut Map<String, Value>) {
    match name {
        "PersistentVolumeClaimSpec" => set(object, "volumeMode", "Filesystem"),
        "PersistentVolumeSpec" => {
            set(object, "persistentVolumeReclaimPolicy", "Retain");
            set(object, "volumeMode", "Filesystem");
        }
        "PodFailurePolicyOnPodConditionsPattern" => set(object, "status", "True"),
        "CronJobSpec" => {
            set(object, "concurrencyPolicy", "Allow");
            set(object, "suspend", false);
            set(object, "successfulJobsHistoryLimit", 3);
            set(object, "failedJobsHistoryLimit", 1);
        }
        _ => {}
    }
}

pub(super) fn apps(kind: &str, object: &mut Map<String, Value>) {
    match kind {
        "Deployment" => deployment(member(object, "spec")),
        "ReplicaSet" => {
            set_in(object, "spec", "replicas", 1);
            set_in(object, "status", "replicas", 0);
        }
        "StatefulSet" => {
            stateful_set(member(object, "spec"));
            set_in(object, "status", "replicas", 0);
            set_in(object, "status", "availableReplicas", 0);
        }
        "DaemonSet" => {
            daemon_set(member(object, "spec"));
            for counter in [
                "currentNumberScheduled",
                "numberMisscheduled",
                "desiredNumberScheduled",
                "numberReady",
            ] {
                set_in(object, "status", counter, 0);
            }
        }
        _ => {}
    }
}

fn deployment(spec: &mut Map<String, Value>) {
    set(spec, "replicas", 1);
    let strategy = member(spec, "strategy");
    set(strategy, "type", "RollingUpdate");
    if text(strategy, "type") == "RollingUpdate" {
        set_in(strategy, "rollingUpdate", "maxSurge", "25%");
        set_in(strategy, "rollingUpdate", "maxUnavailable", "25%");
    }
    set(spec, "revisionHistoryLimit", 10);
    set(spec, "progressDeadlineSeconds", 600);
}

fn stateful_set(spec: &mut Map<String, Value>) {
    set(spec, "replicas", 1);
    set(spec, "podManagementPolicy", "OrderedReady");
    set(spec, "revisionHistoryLimit", 10);
    let strategy = member(spec, "updateStrategy");
    if text(strategy, "type").is_empty() {
        set(strategy, "type", "RollingUpdate");
        set(strategy, "rollingUpdate", json!({}));
    }
    if text(strategy, "type") == "RollingUpdate" && strategy.contains_key("rollingUpdate") {
        set_in(strategy, "rollingUpdate", "partition", 0);
    }
    set_in(
        spec,
        "persistentVolumeClaimRetentionPolicy",
        "whenDeleted",
        "Retain",
    );
    set_in(
        spec,
        "persistentVolumeClaimRetentionPolicy",
        "whenScaled",
        "Retain",
    );
    for claim in super::items(spec, "volumeClaimTemplates") {
        set(claim, "apiVersion", "v1");
        set(claim, "kind", "PersistentVolumeClaim");
        set_in(claim, "status", "phase", "Pending");
    }
}

fn daemon_set(spec: &mut Map<String, Value>) {
    set(spec, "revisionHistoryLimit", 10);
    let strategy = member(spec, "updateStrategy");
    set(strategy, "type", "RollingUpdate");
    if text(strategy, "type") == "RollingUpdate" {
        set_in(strategy, "rollingUpdate", "maxSurge", 0);
        set_in(strategy, "rollingUpdate", "maxUnavailable", 1);
    }
}

/// A Job's selector is made from its uid, so that no two jobs ever share pods.
pub(super) fn job(object: &mut Map<String, Value>, old: Option<&Value>) {
    let metadata = member(object, "metadata");
    let uid = text(metadata, "uid").to_owned();
    let name = text(metadata, "name").to_owned();
    let spec = member(object, "spec");
    if !spec.contains_key("completions") && !spec.contains_key("parallelism") {
        set(spec, "completions", 1);
    }
    set(spec, "parallelism", 1);
    let backoff = if spec.contains_key("backoffLimitPerIndex") {
        i32::MAX
    } else {
        6
    };
    set(spec, "backoffLimit", backoff);
    set(spec, "completionMode", "NonIndexed");
    set(spec, "suspend", false);
    set(spec, "manualSelector", false);
    let replacement = if spec.contains_key("podFailurePolicy") {
        "Failed"
    } else {
        "TerminatingOrFailed"
    };
    set(spec, "podReplacementPolicy", replacement);
    let generates = spec.get("manualSelector") == Some(&Value::Bool(false));
    if old.is_none() && generates && !uid.is_empty() {
        let labels = member(member(member(spec, "template"), "metadata"), "labels");
        for (key, value) in [
            ("batch.kubernetes.io/controller-uid", &uid),
            ("controller-uid", &uid),
            ("batch.kubernetes.io/job-name", &name),
            ("job-name", &name),
        ] {
            labels.insert(key.into(), value.clone().into());
        }
        let selector = member(member(spec, "selector"), "matchLabels");
        set(selector, "batch.kubernetes.io/controller-uid", uid);
    }
    let template_labels = spec
        .get("template")
        .and_then(|t| t.get("metadata")?.get("labels"))
        .cloned();
    if let Some(labels) = template_labels {
        set(member(object, "metadata"), "labels", labels);
    }
}

pub(super) fn replication_controller(object: &mut Map<String, Value>) {
    let spec = member(object, "spec");
    set(spec, "replicas", 1);
    let labels = spec
        .get("template")
        .and_then(|t| t.get("metadata")?.get("labels"))
        .cloned();
    if let Some(labels) = labels {
        set(spec, "selector", labels.clone());
        set(member(object, "metadata"), "labels", labels);
    }
    set_in(object, "status", "replicas", 0);
}
