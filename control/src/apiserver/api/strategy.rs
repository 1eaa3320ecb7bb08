//! What every kind needs before it is stored: server-owned metadata, initial status, generations. Pure.

use serde_json::{Map, Value, json};

use crate::apiserver::object::{map_mut, put, text};
use crate::apiserver::registry::ResourceDef;
use crate::status::{ApiError, Cause};

/// Metadata that a writer cannot set.
const SERVER_OWNED: [&str; 5] = [
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
    "selfLink",
];

/// Kinds that are created with the status in the body: agents and kubelets register Nodes with it.
const KEEPS_STATUS: [&str; 1] = ["Node"];

/// Server-owned metadata and initial status of a new object.
pub(super) fn prepare_create(
    def: &ResourceDef,
    object: &mut Value,
    uid: &str,
    now: &str,
) -> Result<(), ApiError> {
    let metadata = map_mut(object, "metadata")?;
    let version = metadata.shift_remove("resourceVersion");
    if version
        .as_ref()
        .and_then(Value::as_str)
        .is_some_and(|v| !v.is_empty() && v != "0")
    {
        return Err(ApiError::bad_request(
            "resourceVersion should not be set on objects to be created",
        ));
    }
    for key in SERVER_OWNED {
        metadata.shift_remove(key);
    }
    metadata.insert("uid".into(), uid.into());
    metadata.insert("creationTimestamp".into(), now.into());
    if def.has_generation {
        metadata.insert("generation".into(), 1.into());
    }
    if let Value::Object(map) = object
        && def.has_status()
        && !KEEPS_STATUS.contains(&&*def.kind)
    {
        put(map, "status", initial_status(def));
    }
    if def.group.is_empty() && def.kind == "Pod" {
        mark_gated(object, now)?;
    }
    if def.group.is_empty() && def.kind == "Namespace" {
        furnish_namespace(object)?;
    }
    Ok(())
}

fn initial_status(def: &ResourceDef) -> Option<Value> {
    match &*def.kind {
        "Pod" | "PersistentVolumeClaim" | "PersistentVolume" => Some(json!({"phase": "Pending"})),
        "Namespace" => Some(json!({"phase": "Active"})),
        "Service" | "Ingress" => Some(json!({"loadBalancer": {}})),
        "Deployment"
        | "ReplicaSet"
        | "StatefulSet"
        | "ReplicationController"
        | "DaemonSet"
        | "Job"
        | "CronJob"
        | "CertificateSigningRequest"
        | "ResourceQuota" => Some(json!({})),
        _ => None,
    }
}

/// A pod with scheduling gates says from the start why it waits.
fn mark_gated(pod: &mut Value, now: &str) -> Result<(), ApiError> {
    if pod["spec"]["schedulingGates"]
        .as_array()
        .is_none_or(Vec::is_empty)
    {
        return Ok(());
    }
    let condition = json!({"type": "PodScheduled", "status": "False", "reason": "SchedulingGated",
        "message": "Scheduling is blocked due to non-empty scheduling gates",
        "lastTransitionTime": now});
    map_mut(pod, "status")?.insert("conditions".into(), json!([condition]));
    Ok(())
}

/// Every namespace carries its name as a label, so that selectors can name it.
fn label_with_name(namespace: &mut Value) -> Result<(), ApiError> {
    let name = text(namespace, "/metadata/name").to_owned();
    let labels = map_mut(namespace, "metadata")?
        .entry("labels")
        .or_insert(Value::Null);
    if labels.is_null() {
        *labels = Value::Object(Map::new());
    }
    if let Value::Object(labels) = labels {
        labels.insert("kubernetes.io/metadata.name".into(), name.into());
    }
    Ok(())
}

fn furnish_namespace(object: &mut Value) -> Result<(), ApiError> {
    label_with_name(object)?;
    let finalizers = map_mut(object, "spec")?
        .entry("finalizers")
        .or_insert(Value::Null);
    if finalizers.as_array().is_none_or(Vec::is_empty) {
        *finalizers = json!(["kubernetes"]);
    }
    Ok(())
}

/// Carries over what a writer cannot change. `subresource` is empty for the main resource.
pub(super) fn prepare_update(
    def: &ResourceDef,
    new: &mut Value,
    old: &Value,
) -> Result<(), ApiError> {
    let old_metadata = &old["metadata"];
    let metadata = map_mut(new, "metadata")?;
    for key in SERVER_OWNED.iter().chain(&["name", "namespace", "uid"]) {
        put(metadata, key, old_metadata.get(*key).cloned());
    }
    if !metadata.contains_key("managedFields") {
        put(
            metadata,
            "managedFields",
            old_metadata.get("managedFields").cloned(),
        );
    }
    metadata.insert(
        "resourceVersion".into(),
        old_metadata["resourceVersion"].clone(),
    );
    if let Value::Object(map) = new
        && def.has_status()
    {
        put(map, "status", old.get("status").cloned());
    }
    if def.group.is_empty() && def.kind == "Namespace" {
        // Only the finalize subresource changes them.
        let finalizers = old.pointer("/spec/finalizers").cloned();
        put(map_mut(new, "spec")?, "finalizers", finalizers);
        label_with_name(new)?;
    }
    Ok(())
}

/// Raises `metadata.generation` when the desired state changed.
pub(super) fn bump_generation(def: &ResourceDef, new: &mut Value, old: &Value) {
    if !def.has_generation || !desired_changed(new, old) {
        return;
    }
    let generation = old["metadata"]["generation"].as_i64().unwrap_or(0) + 1;
    if let Some(Value::Object(metadata)) = new.get_mut("metadata") {
        metadata.insert("generation".into(), generation.into());
    }
}

fn desired_changed(new: &Value, old: &Value) -> bool {
    let (Some(new), Some(old)) = (new.as_object(), old.as_object()) else {
        return false;
    };
    let wanted = |key: &&String| !matches!(key.as_str(), "metadata" | "status");
    new.keys()
        .chain(old.keys())
        .filter(wanted)
        .any(|key| new.get(key) != old.get(key))
}

/// The old object with the new status.
pub(super) fn only_status(new: &Value, old: &Value) -> Result<Value, ApiError> {
    let mut result = old.clone();
    if let Value::Object(map) = &mut result {
        put(map, "status", new.get("status").cloned());
    }
    let managed = new.pointer("/metadata/managedFields").cloned();
    if managed.is_some() {
        put(map_mut(&mut result, "metadata")?, "managedFields", managed);
    }
    Ok(result)
}

fn strings<'a>(object: &'a Value, pointer: &str) -> Vec<&'a str> {
    let list = object.pointer(pointer).and_then(Value::as_array);
    list.into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect()
}

/// An object that is being deleted takes no new finalizers.
pub(super) fn check_finalizers(new: &Value, old: &Value) -> Vec<Cause> {
    if text(old, "/metadata/deletionTimestamp").is_empty() {
        return Vec::new();
    }
    let before = strings(old, "/metadata/finalizers");
    let added: Vec<_> = strings(new, "/metadata/finalizers")
        .into_iter()
        .filter(|f| !before.contains(f))
        .collect();
    if added.is_empty() {
        return Vec::new();
    }
    let message = format!(
        "Forbidden: no new finalizers can be added if the object is being deleted, found new finalizers {added:?}"
    );
    vec![Cause {
        reason: "FieldValueForbidden",
        message,
        field: "metadata.finalizers".into(),
    }]
}

/// Whether an object that is being deleted has nothing left to wait for.
pub(super) fn is_finished(def: &ResourceDef, object: &Value) -> bool {
    let metadata = &object["metadata"];
    if text(object, "/metadata/deletionTimestamp").is_empty() {
        return false;
    }
    if metadata["deletionGracePeriodSeconds"].as_i64().unwrap_or(0) > 0 {
        return false;
    }
    let namespace = def.group.is_empty() && def.kind == "Namespace";
    strings(object, "/metadata/finalizers").is_empty()
        && (!namespace || strings(object, "/spec/finalizers").is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apiserver::registry::Registry;

    fn def(group: &str, plural: &str) -> std::sync::Arc<ResourceDef> {
        std::sync::Arc::clone(Registry::builtin().find(group, "v1", plural).unwrap())
    }

    #[test]
    fn restored_objects_get_new_server_owned_metadata() {
        let mut object = json!({"metadata": {"name": "a", "uid": "old", "generation": 9,
            "deletionTimestamp": "x"}, "status": {"replicas": 7}});
        prepare_create(&def("apps", "deployments"), &mut object, "new", "t").unwrap();
        assert_eq!(
            object,
            json!({"metadata": {"name": "a", "uid": "new", "creationTimestamp": "t",
                "generation": 1}, "status": {}})
        );
    }

    #[test]
    fn only_the_desired_state_raises_the_generation() {
        let deployments = def("apps", "deployments");
        let old = json!({"metadata": {"generation": 1}, "spec": {"a": 1}, "status": {}});
        let mut new = json!({"metadata": {"generation": 1, "labels": {}}, "spec": {"a": 1}});
        bump_generation(&deployments, &mut new, &old);
        assert_eq!(new["metadata"]["generation"], 1);
        new["spec"]["a"] = json!(2);
        bump_generation(&deployments, &mut new, &old);
        assert_eq!(new["metadata"]["generation"], 2);
    }

    #[test]
    fn a_namespace_waits_for_both_lists_of_finalizers() {
        let namespaces = def("", "namespaces");
        let mut object = json!({"metadata": {"deletionTimestamp": "t"},
            "spec": {"finalizers": ["kubernetes"]}});
        assert!(!is_finished(&namespaces, &object));
        object["spec"]["finalizers"] = json!([]);
        assert!(is_finished(&namespaces, &object));
        object["metadata"]["finalizers"] = json!(["x"]);
        assert!(!is_finished(&namespaces, &object));
    }
}
