//! Rows of nodes, namespaces, events, configuration, storage, access and the smaller groups.

use serde_json::Value;

use super::network::default_marked;
use super::row::{NONE, Row, UNKNOWN, UNSET, member};
use crate::apiserver::schema::time::human_duration;

const ROLE_PREFIX: &str = "node-role.kubernetes.io/";
const ROLE_LABEL: &str = "kubernetes.io/role";
/// Metrics of an autoscaler shown before «+ N more».
const METRICS_SHOWN: usize = 2;

pub(super) fn cells(group: &str, kind: &str, row: &Row<'_>) -> Option<Vec<Value>> {
    let count = |pointer: &str| {
        row.at(pointer)
            .and_then(Value::as_object)
            .map_or(0, serde_json::Map::len)
    };
    Some(match (group, kind) {
        ("", "Node") => node(row),
        ("" | "events.k8s.io", "Event") => event(row),
        ("", "Namespace") => vec![row.name(), row.text("/status/phase").into(), row.age()],
        ("", "ConfigMap") => vec![
            row.name(),
            (count("/data") + count("/binaryData")).into(),
            row.age(),
        ],
        ("", "Secret") => vec![
            row.name(),
            row.text("/type").into(),
            count("/data").into(),
            row.age(),
        ],
        ("", "ServiceAccount") => vec![row.name(), row.age()],
        ("", "ResourceQuota") => quota(row),
        ("", "PersistentVolume") => persistent_volume(row),
        ("", "PersistentVolumeClaim") => claim(row),
        ("coordination.k8s.io", "Lease") => {
            vec![
                row.name(),
                row.text("/spec/holderIdentity").into(),
                row.age(),
            ]
        }
        ("autoscaling", "Scale") => {
            vec![
                row.name(),
                row.int("/spec/replicas").into(),
                row.int("/status/replicas").into(),
                row.age(),
            ]
        }
        ("autoscaling", "HorizontalPodAutoscaler") => autoscaler(row),
        ("policy", "PodDisruptionBudget") => vec![
            row.name(),
            int_or_string(row, "/spec/minAvailable").into(),
            int_or_string(row, "/spec/maxUnavailable").into(),
            row.int("/status/disruptionsAllowed").into(),
            row.age(),
        ],
        ("rbac.authorization.k8s.io", "RoleBinding" | "ClusterRoleBinding") => binding(row),
        ("certificates.k8s.io", "CertificateSigningRequest") => signing_request(row),
        ("scheduling.k8s.io", "PriorityClass") => vec![
            row.name(),
            row.int("/value").into(),
            row.is_true("/globalDefault").into(),
            row.age(),
            row.text("/preemptionPolicy").into(),
        ],
        ("node.k8s.io" | "storage.k8s.io", kind) => return runtime_and_storage(kind, row),
        _ => return None,
    })
}

fn runtime_and_storage(kind: &str, row: &Row<'_>) -> Option<Vec<Value>> {
    Some(match kind {
        "RuntimeClass" => vec![row.name(), row.text("/handler").into(), row.age()],
        "StorageClass" => vec![
            default_marked(row, "storageclass.kubernetes.io/is-default-class"),
            row.text("/provisioner").into(),
            row.text_or("/reclaimPolicy", "Delete").into(),
            row.text_or("/volumeBindingMode", "Immediate").into(),
            row.is_true("/allowVolumeExpansion").into(),
            row.age(),
        ],
        "CSINode" => vec![
            row.name(),
            row.list("/spec/drivers").len().into(),
            row.age(),
        ],
        "VolumeAttachment" => vec![
            row.name(),
            row.text("/spec/attacher").into(),
            row.text("/spec/source/persistentVolumeName").into(),
            row.text("/spec/nodeName").into(),
            row.is_true("/status/attached").into(),
            row.age(),
        ],
        _ => return None,
    })
}

fn node(row: &Row<'_>) -> Vec<Value> {
    let ready = row
        .list("/status/conditions")
        .iter()
        .find(|c| member(c, "type") == "Ready");
    let mut status = match ready {
        Some(condition) if member(condition, "status") == "True" => "Ready".to_owned(),
        Some(_) => "NotReady".into(),
        None => "Unknown".into(),
    };
    if row.is_true("/spec/unschedulable") {
        status.push_str(",SchedulingDisabled");
    }
    let address = |kind: &str| {
        let found = row
            .list("/status/addresses")
            .iter()
            .find(|a| member(a, "type") == kind);
        Value::from(found.map_or(NONE, |a| member(a, "address")))
    };
    let mut kernel = row.text_or("/status/nodeInfo/kernelVersion", UNKNOWN);
    let architecture = row.text("/status/nodeInfo/architecture");
    if !architecture.is_empty() {
        kernel = format!("{kernel} ({architecture})");
    }
    vec![
        row.name(),
        status.into(),
        roles(row).into(),
        row.age(),
        row.text("/status/nodeInfo/kubeletVersion").into(),
        address("InternalIP"),
        address("ExternalIP"),
        row.text_or("/status/nodeInfo/osImage", UNKNOWN).into(),
        kernel.into(),
        row.text_or("/status/nodeInfo/containerRuntimeVersion", UNKNOWN)
            .into(),
    ]
}

fn roles(row: &Row<'_>) -> String {
    let labels = row.at("/metadata/labels").and_then(Value::as_object);
    let mut roles: Vec<&str> = labels
        .into_iter()
        .flatten()
        .filter_map(|(key, value)| match key.strip_prefix(ROLE_PREFIX) {
            Some(role) => Some(role),
            None if key == ROLE_LABEL => value.as_str(),
            None => None,
        })
        .filter(|role| !role.is_empty())
        .collect();
    roles.sort_unstable();
    roles.dedup();
    if roles.is_empty() {
        NONE.to_owned()
    } else {
        roles.join(",")
    }
}

/// Both groups' fields: an event is stored once and read under either name.
fn event(row: &Row<'_>) -> Vec<Value> {
    let first_of = |pointers: &[&str]| {
        pointers
            .iter()
            .map(|p| row.text(p))
            .find(|text| !text.is_empty())
            .unwrap_or_default()
    };
    let first = first_of(&["/firstTimestamp", "/deprecatedFirstTimestamp", "/eventTime"]);
    let last = first_of(&[
        "/series/lastObservedTime",
        "/lastTimestamp",
        "/deprecatedLastTimestamp",
    ]);
    let last = if last.is_empty() { first } else { last };
    let count = ["/series/count", "/count", "/deprecatedCount"]
        .iter()
        .map(|p| row.int(p))
        .find(|n| *n > 0);
    let kind = first_of(&["/involvedObject/kind", "/regarding/kind"]).to_lowercase();
    let name = first_of(&["/involvedObject/name", "/regarding/name"]);
    let component = first_of(&[
        "/source/component",
        "/reportingComponent",
        "/reportingController",
    ]);
    let instance = first_of(&["/source/host", "/reportingInstance"]);
    let source = if instance.is_empty() {
        component.to_owned()
    } else {
        format!("{component}, {instance}")
    };
    vec![
        row.since_text(last).into(),
        row.text("/type").into(),
        row.text("/reason").into(),
        if name.is_empty() {
            kind.into()
        } else {
            format!("{kind}/{name}").into()
        },
        first_of(&["/involvedObject/fieldPath", "/regarding/fieldPath"]).into(),
        source.into(),
        first_of(&["/message", "/note"]).trim().into(),
        row.since_text(first).into(),
        count.unwrap_or(1).into(),
        row.name(),
    ]
}

fn quota(row: &Row<'_>) -> Vec<Value> {
    let mut names: Vec<&String> = row
        .at("/status/hard")
        .and_then(Value::as_object)
        .into_iter()
        .flat_map(|m| m.keys())
        .collect();
    names.sort();
    let (mut requests, mut limits) = (Vec::new(), Vec::new());
    for name in names {
        let amount = |side: &str| {
            row.at(side)
                .and_then(|m| m.get(name))
                .and_then(Value::as_str)
                .unwrap_or("0")
                .to_owned()
        };
        let text = format!(
            "{name}: {}/{}",
            amount("/status/used"),
            amount("/status/hard")
        );
        if name.starts_with("limits.") {
            limits.push(text);
        } else {
            requests.push(text);
        }
    }
    vec![
        row.name(),
        requests.join(", ").into(),
        limits.join(", ").into(),
        row.age(),
    ]
}

fn access_modes(row: &Row<'_>, pointer: &str) -> String {
    let modes = row.texts(pointer);
    [
        ("ReadWriteOnce", "RWO"),
        ("ReadOnlyMany", "ROX"),
        ("ReadWriteMany", "RWX"),
        ("ReadWriteOncePod", "RWOP"),
    ]
    .into_iter()
    .filter(|(long, _)| modes.contains(long))
    .map(|(_, short)| short)
    .collect::<Vec<_>>()
    .join(",")
}

fn phase(row: &Row<'_>) -> Value {
    if row.is_deleted() {
        "Terminating".into()
    } else {
        row.text("/status/phase").into()
    }
}

fn persistent_volume(row: &Row<'_>) -> Vec<Value> {
    let claim = match row.at("/spec/claimRef") {
        Some(claim) => format!("{}/{}", member(claim, "namespace"), member(claim, "name")),
        None => String::new(),
    };
    vec![
        row.name(),
        row.text("/spec/capacity/storage").into(),
        access_modes(row, "/spec/accessModes").into(),
        row.text("/spec/persistentVolumeReclaimPolicy").into(),
        phase(row),
        claim.into(),
        row.text("/spec/storageClassName").into(),
        row.text_or("/spec/volumeAttributesClassName", UNSET).into(),
        row.text("/status/reason").into(),
        row.age(),
        row.text_or("/spec/volumeMode", UNSET).into(),
    ]
}

fn claim(row: &Row<'_>) -> Vec<Value> {
    let bound = !row.text("/spec/volumeName").is_empty();
    let (capacity, modes) = if bound {
        (
            row.text("/status/capacity/storage"),
            access_modes(row, "/status/accessModes"),
        )
    } else {
        ("", String::new())
    };
    vec![
        row.name(),
        phase(row),
        row.text("/spec/volumeName").into(),
        capacity.into(),
        modes.into(),
        row.text("/spec/storageClassName").into(),
        row.text_or("/spec/volumeAttributesClassName", UNSET).into(),
        row.age(),
        row.text_or("/spec/volumeMode", UNSET).into(),
    ]
}

fn int_or_string(row: &Row<'_>, pointer: &str) -> String {
    match row.at(pointer) {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Number(number)) => number.to_string(),
        _ => "N/A".to_owned(),
    }
}

fn binding(row: &Row<'_>) -> Vec<Value> {
    let subjects = |kind: &str| {
        let names: Vec<String> = row
            .list("/subjects")
            .iter()
            .filter(|s| member(s, "kind") == kind)
            .map(|s| match member(s, "namespace") {
                namespace if kind == "ServiceAccount" => {
                    format!("{namespace}/{}", member(s, "name"))
                }
                _ => member(s, "name").to_owned(),
            })
            .collect();
        Value::String(names.join(", "))
    };
    vec![
        row.name(),
        format!(
            "{}/{}",
            row.text("/roleRef/kind"),
            row.text("/roleRef/name")
        )
        .into(),
        row.age(),
        subjects("User"),
        subjects("Group"),
        subjects("ServiceAccount"),
    ]
}

fn signing_request(row: &Row<'_>) -> Vec<Value> {
    let has = |kind: &str| {
        row.list("/status/conditions")
            .iter()
            .any(|c| member(c, "type") == kind)
    };
    let mut condition = match (has("Denied"), has("Approved")) {
        (true, _) => "Denied",
        (false, true) => "Approved",
        _ => "Pending",
    }
    .to_owned();
    if has("Failed") {
        condition.push_str(",Failed");
    }
    if !row.text("/status/certificate").is_empty() {
        condition.push_str(",Issued");
    }
    let duration = match row.at("/spec/expirationSeconds").and_then(Value::as_i64) {
        Some(seconds) => human_duration(seconds),
        None => NONE.to_owned(),
    };
    vec![
        row.name(),
        row.age(),
        row.text_or("/spec/signerName", NONE).into(),
        row.text("/spec/username").into(),
        duration.into(),
        condition.into(),
    ]
}

fn autoscaler(row: &Row<'_>) -> Vec<Value> {
    let minimum = match row.at("/spec/minReplicas").and_then(Value::as_i64) {
        Some(minimum) => minimum.to_string(),
        None => UNSET.to_owned(),
    };
    vec![
        row.name(),
        format!(
            "{}/{}",
            row.text("/spec/scaleTargetRef/kind"),
            row.text("/spec/scaleTargetRef/name")
        )
        .into(),
        metrics(row).into(),
        minimum.into(),
        row.int("/spec/maxReplicas").into(),
        row.int("/status/currentReplicas").into(),
        row.age(),
    ]
}

/// `cpu: 12%/80%` for each metric, current over target.
fn metrics(row: &Row<'_>) -> String {
    let specs = row.list("/spec/metrics");
    if specs.is_empty() {
        return match row.at("/spec/targetCPUUtilizationPercentage") {
            Some(target) => format!("cpu: {UNKNOWN}/{target}%"),
            None => NONE.to_owned(),
        };
    }
    let statuses = row.list("/status/currentMetrics");
    let texts: Vec<String> = specs
        .iter()
        .enumerate()
        .map(|(index, spec)| metric(spec, statuses.get(index)))
        .collect();
    let shown = texts[..texts.len().min(METRICS_SHOWN)].join(", ");
    if texts.len() > METRICS_SHOWN {
        format!("{shown} + {} more...", texts.len() - METRICS_SHOWN)
    } else {
        shown
    }
}

fn metric(spec: &Value, status: Option<&Value>) -> String {
    let (key, named) = match member(spec, "type") {
        "Resource" => ("resource", true),
        "ContainerResource" => ("containerResource", true),
        "Pods" => ("pods", false),
        "Object" => ("object", false),
        "External" => ("external", false),
        _ => return "<unknown type>".to_owned(),
    };
    let value = |side: Option<&Value>, inner: &str, what: &str| {
        side.and_then(|s| s.pointer(&format!("/{key}/{inner}/{what}")))
            .map(|v| match v {
                Value::String(text) => text.clone(),
                other => other.to_string(),
            })
    };
    let prefix = if named {
        format!(
            "{}: ",
            spec.pointer(&format!("/{key}/name"))
                .and_then(Value::as_str)
                .unwrap_or_default()
        )
    } else {
        String::new()
    };
    if named && value(Some(spec), "target", "averageValue").is_none() {
        let percent =
            |side, inner| value(side, inner, "averageUtilization").map(|n| format!("{n}%"));
        let current = percent(status, "current").unwrap_or_else(|| UNKNOWN.to_owned());
        let target = percent(Some(spec), "target").unwrap_or_else(|| "<auto>".to_owned());
        return format!("{prefix}{current}/{target}");
    }
    let what = if value(Some(spec), "target", "averageValue").is_some() {
        "averageValue"
    } else {
        "value"
    };
    let current = value(status, "current", what).unwrap_or_else(|| UNKNOWN.to_owned());
    let target = value(Some(spec), "target", what).unwrap_or_default();
    let note = if !named && key != "pods" && what == "averageValue" {
        " (avg)"
    } else {
        ""
    };
    format!("{prefix}{current}/{target}{note}")
}
