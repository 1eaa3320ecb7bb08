//! Services, Secrets, Namespaces, Nodes.

use base64::Engine as _;
use serde_json::{Map, Value, json};

use super::{items, member, set, set_in, text};

/// Client affinity without an own timeout lasts three hours.
const AFFINITY_SECONDS: i64 = 10_800;

pub(super) fn service(object: &mut Map<String, Value>) {
    let spec = member(object, "spec");
    set(spec, "type", "ClusterIP");
    set(spec, "sessionAffinity", "None");
    match text(spec, "sessionAffinity") {
        "ClientIP" => {
            let client = member(member(spec, "sessionAffinityConfig"), "clientIP");
            set(client, "timeoutSeconds", AFFINITY_SECONDS);
        }
        "None" => {
            spec.shift_remove("sessionAffinityConfig");
        }
        _ => {}
    }
    for port in items(spec, "ports") {
        let unset = match port.get("targetPort") {
            None => true,
            Some(target) => target == &json!(0) || target == &json!(""),
        };
        if let (true, Some(number)) = (unset, port.get("port").cloned()) {
            port.insert("targetPort".into(), number);
        }
    }
    traffic_policies(spec);
    if text(spec, "type") == "LoadBalancer"
        && let Some(status) = object.get_mut("status").and_then(Value::as_object_mut)
    {
        for ingress in items(member(status, "loadBalancer"), "ingress") {
            if ingress.contains_key("ip") {
                set(ingress, "ipMode", "VIP");
            }
        }
    }
    member(member(object, "status"), "loadBalancer");
}

/// Fields that exist only for some types of Service. Where one is set for another type, validation says so.
fn traffic_policies(spec: &mut Map<String, Value>) {
    let kind = text(spec, "type").to_owned();
    let external_ips = spec
        .get("externalIPs")
        .and_then(Value::as_array)
        .is_some_and(|ips| !ips.is_empty());
    let balanced = kind == "LoadBalancer";
    if balanced || kind == "NodePort" || (kind == "ClusterIP" && external_ips) {
        set(spec, "externalTrafficPolicy", "Cluster");
    }
    if kind != "ExternalName" {
        set(spec, "internalTrafficPolicy", "Cluster");
    }
    if balanced {
        set(spec, "allocateLoadBalancerNodePorts", true);
    }
}

/// `stringData` is a write-only convenience that wins over `data`.
pub(super) fn secret(object: &mut Map<String, Value>) {
    if let Some(Value::Object(plain)) = object.shift_remove("stringData") {
        let data = member(object, "data");
        for (key, value) in plain {
            let bytes = value.as_str().unwrap_or_default();
            let encoded = base64::engine::general_purpose::STANDARD.encode(bytes);
            data.insert(key, encoded.into());
        }
    }
    set(object, "type", "Opaque");
}

pub(super) fn namespace(object: &mut Map<String, Value>, old: Option<&Value>) {
    let metadata = member(object, "metadata");
    let name = text(metadata, "name").to_owned();
    if !name.is_empty() {
        member(metadata, "labels").insert("kubernetes.io/metadata.name".into(), name.into());
    }
    if old.is_none() {
        set_in(object, "spec", "finalizers", json!(["kubernetes"]));
        set_in(object, "status", "phase", "Active");
    }
}

/// A port without a name has the empty one, so that readers can compare ports by name.
pub(super) fn endpoint_slice(object: &mut Map<String, Value>) {
    let Some(Value::Array(ports)) = object.get_mut("ports") else {
        return;
    };
    for port in ports.iter_mut().filter_map(Value::as_object_mut) {
        set(port, "name", "");
        set(port, "protocol", "TCP");
    }
}

pub(super) fn node(object: &mut Map<String, Value>) {
    let Some(status) = object.get_mut("status").and_then(Value::as_object_mut) else {
        return;
    };
    if let Some(capacity) = status.get("capacity").cloned() {
        set(status, "allocatable", capacity);
    }
}
