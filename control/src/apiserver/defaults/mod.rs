//! Defaults per kind, applied to every object before validation; canonical quantities. Pure.
//!
//! One walk along the schema visits every struct of an object: defaults that the schema declares, then those of the
//! struct's type ([`pod`], [`workloads`], [`services`], [`policies`]). Defaults of a whole kind follow.

mod pod;
mod policies;
mod services;
mod workloads;

use serde_json::{Map, Value};

use super::registry::Gvk;
use super::schema::{Field, Kind, Type, schema};

/// Fills defaults in place. metadata.uid, namespace and creationTimestamp are set already. `old` is the stored object
/// on updates. Also canonical forms (quantities, stringData of Secrets, `selector` of Jobs by uid), not addresses or
/// ports of Services, which the API server allocates.
pub fn apply_defaults(gvk: Gvk<'_>, object: &mut Value, old: Option<&Value>) {
    let Some(t) = schema().kind(gvk.group, gvk.version, gvk.kind) else {
        return;
    };
    let Value::Object(map) = object else { return };
    // Objects made inside the process have not been through a decoder. One that does not fit its type is left as it is:
    // validation names the field.
    let mut normal = Value::Object(std::mem::take(map));
    let _ = super::schema::normalize::normalize(t, &mut normal);
    let Value::Object(mut normal) = normal else {
        return;
    };
    before(gvk, &mut normal, old);
    walk(t, &mut normal);
    after(gvk, &mut normal, old);
    *map = normal;
}

/// Whole kinds whose defaults decide what the walk will see.
fn before(gvk: Gvk<'_>, object: &mut Map<String, Value>, old: Option<&Value>) {
    match (gvk.group, gvk.kind) {
        ("", "Pod") => pod::before(object, old),
        ("", "Secret") => services::secret(object),
        ("batch", "Job") => workloads::job(object, old),
        ("autoscaling", "HorizontalPodAutoscaler") => policies::autoscaler(gvk.version, object),
        _ => {}
    }
}

fn after(gvk: Gvk<'_>, object: &mut Map<String, Value>, old: Option<&Value>) {
    match (gvk.group, gvk.kind) {
        ("", "Pod") => pod::after(object, old),
        ("", "Service") => services::service(object),
        ("", "Namespace") => services::namespace(object, old),
        ("", "Node") => services::node(object),
        ("", "PersistentVolumeClaim") => set_in(object, "status", "phase", "Pending"),
        ("", "PersistentVolume") => set_in(object, "status", "phase", "Pending"),
        ("", "ReplicationController") => workloads::replication_controller(object),
        ("apps", _) => workloads::apps(gvk.kind, object),
        ("discovery.k8s.io", "EndpointSlice") => services::endpoint_slice(object),
        ("networking.k8s.io", "NetworkPolicy") => policies::network_policy(object),
        ("apiextensions.k8s.io", "CustomResourceDefinition") => policies::definition(object),
        ("scheduling.k8s.io", "PriorityClass") => {
            set(object, "preemptionPolicy", "PreemptLowerPriority");
        }
        ("storage.k8s.io", "StorageClass") => {
            set(object, "reclaimPolicy", "Delete");
            set(object, "volumeBindingMode", "Immediate");
        }
        ("authentication.k8s.io", "TokenRequest") => {
            set(member(object, "spec"), "expirationSeconds", 3600);
        }
        _ => {}
    }
}

/// Visits the structs of an object, the inner ones first.
fn walk(t: &'static Type, object: &mut Map<String, Value>) {
    for (key, value) in object.iter_mut() {
        if let Some(field) = schema().field(t, key) {
            walk_value(&field.kind, value);
        }
    }
    schema().each_field(t, &mut |field| declared_default(field, object));
    match t.name {
        "ContainerPort" | "EndpointPort" | "NetworkPolicyPort" | "ServicePort" => {
            set(object, "protocol", "TCP");
        }
        _ => {
            pod::of_type(t.name, object);
            workloads::of_type(t.name, object);
            policies::of_type(t.name, object);
        }
    }
}

fn walk_value(kind: &'static Kind, value: &mut Value) {
    match (kind, value) {
        (Kind::Object(id), Value::Object(map)) => walk(schema().get(*id), map),
        (Kind::List(inner), Value::Array(items)) => {
            items.iter_mut().for_each(|item| walk_value(inner, item));
        }
        (Kind::Map(inner), Value::Object(map)) => {
            map.values_mut().for_each(|item| walk_value(inner, item));
        }
        _ => {}
    }
}

/// A default that the type's own schema declares. Empty ones only matter where absent and empty differ.
fn declared_default(field: &'static Field, object: &mut Map<String, Value>) {
    if field.default.is_empty() || object.contains_key(field.json) {
        return;
    }
    if let Ok(value) = serde_json::from_str::<Value>(field.default) {
        let empty = super::schema::normalize::is_empty(&field.kind, &value) || value.is_object();
        if !empty || (field.pointer && value.is_string()) {
            object.insert(field.json.to_owned(), value);
        }
    }
}

/// Sets a member that is absent.
fn set(object: &mut Map<String, Value>, key: &str, value: impl Into<Value>) {
    if object.get(key).is_none_or(Value::is_null) {
        object.insert(key.to_owned(), value.into());
    }
}

/// Sets a member of a member that is absent.
fn set_in(object: &mut Map<String, Value>, outer: &str, key: &str, value: impl Into<Value>) {
    set(member(object, outer), key, value);
}

/// A member as an object, made if need be.
fn member<'a>(object: &'a mut Map<String, Value>, key: &str) -> &'a mut Map<String, Value> {
    let value = object.entry(key).or_insert(Value::Null);
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    match value {
        Value::Object(map) => map,
        _ => unreachable!("the value was made an object above"),
    }
}

/// The elements of a list member that are objects.
fn items<'a>(
    object: &'a mut Map<String, Value>,
    key: &str,
) -> impl Iterator<Item = &'a mut Map<String, Value>> {
    object
        .get_mut(key)
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
        .filter_map(Value::as_object_mut)
}

fn text<'a>(object: &'a Map<String, Value>, key: &str) -> &'a str {
    object.get(key).and_then(Value::as_str).unwrap_or_default()
}

#[cfg(test)]
mod tests;
