//! The `scale` subresource: an autoscaling/v1 Scale over a workload's replicas. Pure.

use serde_json::{Value, json};

use crate::apiserver::object::{map_mut, text};
use crate::apiserver::registry::ResourceDef;
use crate::apiserver::selector::LabelSelector;
use crate::status::{ApiError, Cause};

/// The Scale of an object.
pub(super) fn of(def: &ResourceDef, object: &Value) -> Value {
    let metadata = &object["metadata"];
    let selector = if def.kind == "ReplicationController" {
        LabelSelector::from_object(&json!({"matchLabels": object["spec"]["selector"]}))
    } else {
        LabelSelector::from_object(&object["spec"]["selector"])
    };
    let mut scale = json!({
        "apiVersion": "autoscaling/v1", "kind": "Scale",
        "metadata": {
            "name": metadata["name"], "namespace": metadata["namespace"], "uid": metadata["uid"],
            "resourceVersion": metadata["resourceVersion"],
            "creationTimestamp": metadata["creationTimestamp"],
        },
        "spec": {},
        "status": {
            "replicas": object["status"]["replicas"].as_i64().unwrap_or(0),
            "selector": selector.map(|s| s.to_string()).unwrap_or_default(),
        },
    });
    // As upstream: zero replicas are left out.
    if let Some(replicas) = object["spec"]["replicas"].as_i64().filter(|r| *r != 0) {
        scale["spec"]["replicas"] = replicas.into();
    }
    scale
}

/// The object with the replicas of `scale`.
pub(super) fn apply(scale: &Value, object: &Value) -> Result<Value, ApiError> {
    let replicas = match &scale["spec"]["replicas"] {
        Value::Null => Some(0),
        other => other.as_i64(),
    };
    let Some(replicas) = replicas.filter(|r| (0..=i64::from(i32::MAX)).contains(r)) else {
        let given = &scale["spec"]["replicas"];
        let cause = Cause {
            reason: "FieldValueInvalid",
            message: format!("Invalid value: {given}: must be greater than or equal to 0"),
            field: "spec.replicas".into(),
        };
        let name = text(object, "/metadata/name");
        return Err(ApiError::invalid("autoscaling", "Scale", name, vec![cause]));
    };
    let mut result = object.clone();
    map_mut(&mut result, "spec")?.insert("replicas".into(), replicas.into());
    Ok(result)
}
