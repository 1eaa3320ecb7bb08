//! Pods and pod templates.

use serde_json::{Map, Value, json};

use super::{items, member, set, set_in, text};
use crate::apiserver::schema::quantity::Quantity;

/// File mode of volumes made from API objects: 0644.
const VOLUME_MODE: i64 = 0o644;
/// Seconds that a pod stays on a node that is not ready or not reachable, unless it says otherwise.
const LOST_NODE_SECONDS: i64 = 300;
const PROJECTED_TOKEN_SECONDS: i64 = 3600;
const GRACE_PERIOD_SECONDS: i64 = 30;

const CONTAINER_LISTS: [&str; 3] = ["initContainers", "containers", "ephemeralContainers"];

/// Defaults of structs, wherever a pod template stands.
pub(super) fn of_type(name: &str, object: &mut Map<String, Value>) {
    match name {
        "PodSpec" => pod_spec(object),
        "Container" | "EphemeralContainer" => container(object),
        "Volume" => volume(object),
        "Probe" => {
            for (key, value) in [
                ("timeoutSeconds", 1),
                ("periodSeconds", 10),
                ("successThreshold", 1),
                ("failureThreshold", 3),
            ] {
                set(object, key, value);
            }
        }
        "HTTPGetAction" => {
            set(object, "path", "/");
            set(object, "scheme", "HTTP");
        }
        "ObjectFieldSelector" => set(object, "apiVersion", "v1"),
        "SecretVolumeSource"
        | "ConfigMapVolumeSource"
        | "DownwardAPIVolumeSource"
        | "ProjectedVolumeSource" => {
            set(object, "defaultMode", VOLUME_MODE);
        }
        "ServiceAccountTokenProjection" => {
            set(object, "expirationSeconds", PROJECTED_TOKEN_SECONDS)
        }
        "HostPathVolumeSource" => set(object, "type", ""),
        "ImageVolumeSource" => {
            let policy = pull_policy(text(object, "reference"));
            set(object, "pullPolicy", policy);
        }
        _ => {}
    }
}

fn pod_spec(spec: &mut Map<String, Value>) {
    set(spec, "restartPolicy", "Always");
    set(spec, "terminationGracePeriodSeconds", GRACE_PERIOD_SECONDS);
    set(spec, "dnsPolicy", "ClusterFirst");
    // The older name of the field is kept equal, as both are read by clients.
    let account = [
        text(spec, "serviceAccountName"),
        text(spec, "serviceAccount"),
    ]
    .into_iter()
    .find(|name| !name.is_empty())
    .map(str::to_owned);
    if let Some(account) = account {
        spec.insert("serviceAccountName".into(), account.clone().into());
        spec.insert("serviceAccount".into(), account.into());
    }
    set(spec, "securityContext", json!({}));
    set(spec, "schedulerName", "default-scheduler");
}

fn container(container: &mut Map<String, Value>) {
    set(container, "resources", json!({}));
    set(container, "terminationMessagePath", "/dev/termination-log");
    set(container, "terminationMessagePolicy", "File");
    let policy = pull_policy(text(container, "image"));
    set(container, "imagePullPolicy", policy);
}

/// Always for images whose tag is latest, explicitly or by absence.
fn pull_policy(image: &str) -> &'static str {
    let (name, digest) = image
        .split_once('@')
        .map_or((image, None), |(name, d)| (name, Some(d)));
    // A colon before the last slash belongs to the registry's port.
    let last = name.rsplit('/').next().unwrap_or(name);
    match last.split_once(':') {
        Some((_, "latest")) => "Always",
        None if digest.is_none() => "Always",
        _ => "IfNotPresent",
    }
}

fn volume(volume: &mut Map<String, Value>) {
    if volume.keys().all(|key| key == "name") {
        volume.insert("emptyDir".into(), json!({}));
    }
}

/// What only pods themselves get, not templates; admission's additions are made once, on create.
pub(super) fn before(pod: &mut Map<String, Value>, old: Option<&Value>) {
    let spec = member(pod, "spec");
    for list in CONTAINER_LISTS {
        for container in items(spec, list) {
            if list != "ephemeralContainers" {
                requests_from_limits(container);
            }
        }
    }
    if spec.get("hostNetwork") == Some(&Value::Bool(true)) {
        for list in ["initContainers", "containers"] {
            for port in items(spec, list).flat_map(|c| items(c, "ports")) {
                if let Some(number) = port.get("containerPort").cloned() {
                    set(port, "hostPort", number);
                }
            }
        }
    }
    set(spec, "enableServiceLinks", true);
    if old.is_none() {
        if text(spec, "serviceAccountName").is_empty() && text(spec, "serviceAccount").is_empty() {
            spec.insert("serviceAccountName".into(), "default".into());
        }
        set(spec, "priority", 0);
        set(spec, "preemptionPolicy", "PreemptLowerPriority");
        tolerate_lost_nodes(spec);
    }
}

fn requests_from_limits(container: &mut Map<String, Value>) {
    let Some(resources) = container
        .get_mut("resources")
        .and_then(Value::as_object_mut)
    else {
        return;
    };
    let Some(limits) = resources.get("limits").and_then(Value::as_object).cloned() else {
        return;
    };
    let requests = member(resources, "requests");
    for (name, amount) in limits {
        set(requests, &name, amount);
    }
}

fn tolerate_lost_nodes(spec: &mut Map<String, Value>) {
    for key in [
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/unreachable",
    ] {
        let list = spec.entry("tolerations").or_insert_with(|| json!([]));
        let Value::Array(tolerations) = list else {
            return;
        };
        let covered = tolerations.iter().any(|t| {
            let field = |name: &str| t.get(name).and_then(Value::as_str).unwrap_or_default();
            (field("key") == key || field("key").is_empty())
                && ["", "NoExecute"].contains(&field("effect"))
        });
        if !covered {
            tolerations.push(json!({
                "key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_NODE_SECONDS,
            }));
        }
    }
}

pub(super) fn after(pod: &mut Map<String, Value>, old: Option<&Value>) {
    let class = quality_of_service(pod.get("spec").unwrap_or(&Value::Null));
    if old.is_none() {
        set_in(pod, "status", "phase", "Pending");
    }
    set_in(pod, "status", "qosClass", class);
}

/// BestEffort without any cpu or memory request or limit, Guaranteed when every container limits both and requests
/// equal limits, Burstable otherwise.
fn quality_of_service(spec: &Value) -> &'static str {
    const COMPUTE: [&str; 2] = ["cpu", "memory"];
    let containers: Vec<&Value> = ["initContainers", "containers"]
        .iter()
        .filter_map(|list| spec.get(list)?.as_array())
        .flatten()
        .collect();
    let amount = |container: &Value, side: &str, name: &str| {
        let value = container.get("resources")?.get(side)?.get(name)?;
        Quantity::from_json(value).ok().filter(|q| !q.is_zero())
    };
    let any = containers.iter().any(|c| {
        COMPUTE
            .iter()
            .any(|n| amount(c, "requests", n).is_some() || amount(c, "limits", n).is_some())
    });
    let all = containers.iter().all(|c| {
        COMPUTE.iter().all(|n| {
            amount(c, "limits", n)
                .is_some_and(|limit| amount(c, "requests", n).is_none_or(|r| r == limit))
        })
    });
    match (any, all) {
        (false, _) => "BestEffort",
        (true, true) => "Guaranteed",
        (true, false) => "Burstable",
    }
}
