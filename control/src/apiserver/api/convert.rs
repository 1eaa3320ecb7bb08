//! Between the served and the stored version of kinds that are served in several. Pure.

use serde_json::{Map, Value, json};

use crate::apiserver::object::{put, text};
use crate::apiserver::registry::ResourceDef;

pub(super) fn is_stored_version(def: &ResourceDef) -> bool {
    def.api_version() == def.storage_version
}

/// The served form of a stored object.
pub(super) fn from_stored(def: &ResourceDef, stored: &Value) -> Value {
    let mut object = stored.clone();
    match (&*def.group, &*def.version) {
        ("events.k8s.io", _) => event_from_core(&mut object),
        ("autoscaling", "v1") => scaler_to_v1(&mut object),
        _ => {}
    }
    set_version(&mut object, &def.api_version());
    object
}

/// The stored form of a served object.
pub(super) fn to_stored(def: &ResourceDef, mut object: Value) -> Value {
    if is_stored_version(def) {
        return object;
    }
    match (&*def.group, &*def.version) {
        ("events.k8s.io", _) => event_to_core(&mut object),
        ("autoscaling", "v1") => scaler_to_v2(&mut object),
        _ => {}
    }
    set_version(&mut object, &def.storage_version);
    object
}

fn set_version(object: &mut Value, api_version: &str) {
    if let Value::Object(map) = object {
        map.insert("apiVersion".into(), api_version.into());
    }
}

/// Field names of a core Event and of an events.k8s.io Event.
const EVENT_NAMES: [(&str, &str); 7] = [
    ("involvedObject", "regarding"),
    ("message", "note"),
    ("reportingComponent", "reportingController"),
    ("source", "deprecatedSource"),
    ("firstTimestamp", "deprecatedFirstTimestamp"),
    ("lastTimestamp", "deprecatedLastTimestamp"),
    ("count", "deprecatedCount"),
];

fn event_from_core(object: &mut Value) {
    let Value::Object(map) = object else { return };
    for (core, served) in EVENT_NAMES {
        if let Some(value) = map.shift_remove(core) {
            map.insert(served.into(), value);
        }
    }
    if let Some(Value::Object(series)) = map.get_mut("series") {
        series.shift_remove("state");
    }
}

fn event_to_core(object: &mut Value) {
    let Value::Object(map) = object else { return };
    for (core, served) in EVENT_NAMES {
        if let Some(value) = map.shift_remove(served) {
            map.insert(core.into(), value);
        }
    }
}

/// autoscaling/v1 knows one metric, CPU utilization; the others travel in an annotation so that nothing is lost.
const METRICS: &str = "autoscaling.alpha.kubernetes.io/metrics";

fn is_cpu_utilization(metric: &Value) -> bool {
    text(metric, "/type") == "Resource"
        && text(metric, "/resource/name") == "cpu"
        && text(metric, "/resource/target/type") == "Utilization"
}

fn scaler_to_v1(object: &mut Value) {
    let metrics = object["spec"]["metrics"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let (cpu, mut others): (Vec<_>, Vec<_>) = metrics.into_iter().partition(is_cpu_utilization);
    let mut cpu = cpu.into_iter();
    let target = cpu
        .next()
        .map(|m| m["resource"]["target"]["averageUtilization"].clone());
    others.extend(cpu);
    let current = object["status"]["currentMetrics"].as_array().and_then(|m| {
        let found = m.iter().find(|m| text(m, "/resource/name") == "cpu")?;
        found
            .pointer("/resource/current/averageUtilization")
            .cloned()
    });
    if let Some(Value::Object(spec)) = object.get_mut("spec") {
        spec.shift_remove("metrics");
        spec.shift_remove("behavior");
        put(spec, "targetCPUUtilizationPercentage", target);
    }
    if let Some(Value::Object(status)) = object.get_mut("status") {
        status.shift_remove("currentMetrics");
        status.shift_remove("conditions");
        put(status, "currentCPUUtilizationPercentage", current);
    }
    if !others.is_empty()
        && let Ok(metadata) = crate::apiserver::object::map_mut(object, "metadata")
        && let Value::Object(annotations) = metadata
            .entry("annotations")
            .or_insert_with(|| Value::Object(Map::new()))
    {
        annotations.insert(METRICS.into(), Value::Array(others).to_string().into());
    }
}

fn scaler_to_v2(object: &mut Value) {
    let kept = object
        .pointer_mut("/metadata/annotations")
        .and_then(Value::as_object_mut)
        .and_then(|a| a.shift_remove(METRICS));
    let mut metrics: Vec<Value> = kept
        .as_ref()
        .and_then(Value::as_str)
        .and_then(|text| serde_json::from_str(text).ok())
        .unwrap_or_default();
    if let Some(Value::Object(spec)) = object.get_mut("spec") {
        if let Some(target) = spec.shift_remove("targetCPUUtilizationPercentage") {
            let target = json!({"type": "Utilization", "averageUtilization": target});
            let resource = json!({"name": "cpu", "target": target});
            metrics.insert(0, json!({"type": "Resource", "resource": resource}));
        }
        if !metrics.is_empty() {
            spec.insert("metrics".into(), Value::Array(metrics));
        }
    }
    if let Some(Value::Object(status)) = object.get_mut("status") {
        status.shift_remove("currentCPUUtilizationPercentage");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apiserver::registry::Registry;

    #[test]
    fn an_event_keeps_all_through_both_groups() {
        let registry = Registry::builtin();
        let def = registry.find("events.k8s.io", "v1", "events").unwrap();
        let core = json!({"apiVersion": "v1", "kind": "Event", "metadata": {"name": "e"},
            "involvedObject": {"kind": "Pod"}, "message": "m", "count": 3, "type": "Normal"});
        let served = from_stored(def, &core);
        assert_eq!(served["regarding"]["kind"], "Pod");
        assert_eq!(served["deprecatedCount"], 3);
        assert_eq!(to_stored(def, served), core);
    }

    #[test]
    fn a_scaler_keeps_its_cpu_target_through_v1() {
        let registry = Registry::builtin();
        let def = registry
            .find("autoscaling", "v1", "horizontalpodautoscalers")
            .unwrap();
        let v1 = json!({"apiVersion": "autoscaling/v1", "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": "h"}, "spec": {"maxReplicas": 3, "targetCPUUtilizationPercentage": 80}});
        let stored = to_stored(def, v1.clone());
        assert_eq!(
            stored["spec"]["metrics"][0]["resource"]["target"]["averageUtilization"],
            80
        );
        assert_eq!(from_stored(def, &stored), v1);
    }
}
