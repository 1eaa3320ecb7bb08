//! Strategic merge patch: lists merge by the key that the type declares, and directives (`$patch`, `$retainKeys`,
//! `$setElementOrder/…`, `$deleteFromPrimitiveList/…`) steer the rest. The rules are those of the API documentation
//! ("Update API objects in place using kubectl patch") and its design proposals.

use serde_json::{Map, Value};

use crate::apiserver::schema::{Field, Kind, Type, schema};
use crate::status::ApiError;

const PATCH: &str = "$patch";
const RETAIN_KEYS: &str = "$retainKeys";
const SET_ELEMENT_ORDER: &str = "$setElementOrder/";
const DELETE_FROM_PRIMITIVE_LIST: &str = "$deleteFromPrimitiveList/";

/// Merges a patch into an object of a type; without a type, as a merge patch with directives.
pub(super) fn merge_object(
    t: Option<&'static Type>,
    target: &mut Map<String, Value>,
    patch: &Map<String, Value>,
) -> Result<(), ApiError> {
    match patch.get(PATCH).map(|v| v.as_str().unwrap_or_default()) {
        None | Some("merge") => {}
        Some("replace") => {
            target.clear();
        }
        Some("delete") => {
            target.clear();
            return Ok(());
        }
        Some(other) => return Err(malformed(format!("unknown patch type found: {other}"))),
    }
    if let Some(keys) = patch.get(RETAIN_KEYS) {
        retain_keys(target, patch, keys)?;
    }
    for (key, value) in patch {
        if let Some(list) = key.strip_prefix(DELETE_FROM_PRIMITIVE_LIST) {
            delete_primitives(target, list, value)?;
        } else if let Some(list) = key.strip_prefix(SET_ELEMENT_ORDER) {
            if !patch.contains_key(list) {
                let field = t.and_then(|t| schema().field(t, list));
                let before = elements(target.get(list));
                reorder(field, target, list, &before, value)?;
            }
        } else if !key.starts_with('$') || !is_directive(key) {
            let order = patch.get(&format!("{SET_ELEMENT_ORDER}{key}"));
            merge_member(t, target, key, value, order)?;
        }
    }
    Ok(())
}

fn is_directive(key: &str) -> bool {
    key == PATCH
        || key == RETAIN_KEYS
        || key.starts_with(SET_ELEMENT_ORDER)
        || key.starts_with(DELETE_FROM_PRIMITIVE_LIST)
}

fn malformed(message: String) -> ApiError {
    ApiError::bad_request(format!("invalid strategic merge patch: {message}"))
}

fn merge_member(
    t: Option<&'static Type>,
    target: &mut Map<String, Value>,
    key: &str,
    value: &Value,
    order: Option<&Value>,
) -> Result<(), ApiError> {
    let field = t.and_then(|t| schema().field(t, key));
    match value {
        Value::Null => {
            target.shift_remove(key);
        }
        Value::Object(patch) => {
            let member = target.entry(key).or_insert(Value::Null);
            if field.is_some_and(|f| f.patch_replace) {
                *member = Value::Null;
            }
            let inner = field.and_then(|f| object_type(&f.kind));
            merge_into(inner, member, patch)?;
        }
        Value::Array(patch) => {
            let before = elements(target.get(key));
            let merged = match field {
                Some(f) if f.patch_merge => merge_list(f, &before, patch)?,
                _ => plain_list(patch),
            };
            target.insert(key.to_owned(), Value::Array(merged));
            // Without an order of its own, a patch's elements come in the order that the patch has them.
            let merges = field.is_some_and(|f| f.patch_merge);
            if let Some(order) = order.or(merges.then_some(value)) {
                reorder(field, target, key, &before, order)?;
            }
        }
        scalar => {
            target.insert(key.to_owned(), scalar.clone());
        }
    }
    Ok(())
}

/// Maps of structs have no field names of their own, so their values are merged without a type, as upstream does.
fn object_type(kind: &Kind) -> Option<&'static Type> {
    match kind {
        Kind::Object(id) => Some(schema().get(*id)),
        _ => None,
    }
}

fn merge_into(
    t: Option<&'static Type>,
    member: &mut Value,
    patch: &Map<String, Value>,
) -> Result<(), ApiError> {
    if !member.is_object() {
        *member = Value::Object(Map::new());
    }
    match member {
        Value::Object(map) => merge_object(t, map, patch),
        _ => Ok(()),
    }
}

fn elements(list: Option<&Value>) -> Vec<Value> {
    list.and_then(Value::as_array).cloned().unwrap_or_default()
}

/// A list that replaces: the elements without their directives.
fn plain_list(patch: &[Value]) -> Vec<Value> {
    patch
        .iter()
        .filter(|item| item.get(PATCH).is_none())
        .map(without_directives)
        .collect()
}

fn without_directives(value: &Value) -> Value {
    match value {
        Value::Object(map) => map
            .iter()
            .filter(|(key, value)| !is_directive(key) && !value.is_null())
            .map(|(key, value)| (key.clone(), without_directives(value)))
            .collect::<Map<_, _>>()
            .into(),
        Value::Array(items) => Value::Array(plain_list(items)),
        other => other.clone(),
    }
}

fn merge_list(
    field: &'static Field,
    before: &[Value],
    patch: &[Value],
) -> Result<Vec<Value>, ApiError> {
    if field.merge_key.is_empty() {
        let mut merged = before.to_vec();
        for item in patch {
            if !merged.contains(item) {
                merged.push(item.clone());
            }
        }
        return Ok(merged);
    }
    if patch
        .iter()
        .any(|item| item.get(PATCH).and_then(Value::as_str) == Some("replace"))
    {
        return Ok(plain_list(patch));
    }
    let key = field.merge_key;
    let mut merged = before.to_vec();
    for item in patch {
        let Value::Object(item) = item else {
            return Err(malformed(format!(
                "elements of {} must be objects",
                field.json
            )));
        };
        let Some(wanted) = item.get(key) else {
            return Err(malformed(format!(
                "map: {} does not contain declared merge key: {key}",
                Value::Object(item.clone())
            )));
        };
        let matches = |other: &Value| other.get(key) == Some(wanted);
        match item.get(PATCH).map(|v| v.as_str().unwrap_or_default()) {
            Some("delete") => merged.retain(|other| !matches(other)),
            None => {
                let inner = match &field.kind {
                    Kind::List(inner) => object_type(inner),
                    _ => None,
                };
                let index = merged.iter().position(matches).unwrap_or_else(|| {
                    merged.push(Value::Object(Map::new()));
                    merged.len() - 1
                });
                merge_into(inner, &mut merged[index], item)?;
            }
            Some(other) => {
                return Err(malformed(format!(
                    "patch type {other} is not supported in a list"
                )));
            }
        }
    }
    Ok(merged)
}

fn retain_keys(
    target: &mut Map<String, Value>,
    patch: &Map<String, Value>,
    keys: &Value,
) -> Result<(), ApiError> {
    let Value::Array(keys) = keys else {
        return Err(malformed("$retainKeys must be a list".into()));
    };
    let retained = |key: &str| keys.iter().any(|k| k.as_str() == Some(key));
    for (key, value) in patch {
        if !is_directive(key) && !value.is_null() && !retained(key) {
            return Err(malformed(format!(
                "{key} is set but missing in $retainKeys"
            )));
        }
    }
    target.retain(|key, _| retained(key));
    Ok(())
}

fn delete_primitives(
    target: &mut Map<String, Value>,
    list: &str,
    values: &Value,
) -> Result<(), ApiError> {
    let Value::Array(values) = values else {
        return Err(malformed(format!(
            "{DELETE_FROM_PRIMITIVE_LIST}{list} must be a list"
        )));
    };
    if let Some(Value::Array(items)) = target.get_mut(list) {
        items.retain(|item| !values.contains(item));
    }
    Ok(())
}

/// Puts the elements that the order names into that order; the others, which only the server has, keep their place
/// relative to the ones that were there before.
fn reorder(
    field: Option<&'static Field>,
    target: &mut Map<String, Value>,
    list: &str,
    before: &[Value],
    order: &Value,
) -> Result<(), ApiError> {
    let Value::Array(order) = order else {
        return Err(malformed(format!(
            "{SET_ELEMENT_ORDER}{list} must be a list"
        )));
    };
    let Some(Value::Array(items)) = target.get_mut(list) else {
        return Ok(());
    };
    let key = field.map_or("", |f| f.merge_key);
    let identity = |item: &Value| {
        if key.is_empty() {
            item.clone()
        } else {
            item.get(key).cloned().unwrap_or_default()
        }
    };
    let position = |item: &Value| order.iter().position(|o| identity(o) == identity(item));
    let (mut named, server): (Vec<Value>, Vec<Value>) = std::mem::take(items)
        .into_iter()
        .partition(|item| position(item).is_some());
    named.sort_by_key(|item| position(item));
    let live = |item: &Value| before.iter().position(|b| identity(b) == identity(item));
    let mut named = named.into_iter().peekable();
    for item in server {
        while let Some(next) = named.peek() {
            let goes_first = matches!((live(&item), live(next)), (Some(a), Some(b)) if a < b);
            if goes_first {
                break;
            }
            items.extend(named.next());
        }
        items.push(item);
    }
    items.extend(named);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn patched(kind: (&str, &str), target: Value, patch: Value) -> Result<Value, ApiError> {
        let t = schema().kind_of(kind.0, kind.1);
        let (Value::Object(mut target), Value::Object(patch)) = (target, patch) else {
            panic!()
        };
        merge_object(t, &mut target, &patch).map(|()| Value::Object(target))
    }

    fn pod_spec(target: Value, patch: Value) -> Value {
        patched(
            ("v1", "Pod"),
            json!({"spec": target}),
            json!({"spec": patch}),
        )
        .unwrap()["spec"]
            .take()
    }

    #[test]
    fn containers_and_env_merge_by_name() {
        let out = pod_spec(
            json!({"containers": [
                {"name": "one", "image": "1", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
                {"name": "two", "image": "2"}]}),
            json!({"containers": [
                {"name": "one", "env": [{"name": "B", "value": "9"}, {"name": "C", "value": "3"}]},
                {"name": "three", "image": "3", "env": null}]}),
        );
        assert_eq!(
            out["containers"],
            json!([
                {"name": "one", "image": "1", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "9"}, {"name": "C", "value": "3"}]},
                {"name": "three", "image": "3"},
                {"name": "two", "image": "2"}])
        );
    }

    #[test]
    fn replace_and_delete_directives() {
        let target =
            json!({"containers": [{"name": "one"}, {"name": "two"}], "nodeSelector": {"a": "1"}});
        let out = pod_spec(
            target.clone(),
            json!({"containers": [{"$patch": "replace"}, {"name": "new"}], "nodeSelector": {"$patch": "replace", "b": "2"}}),
        );
        assert_eq!(
            out,
            json!({"containers": [{"name": "new"}], "nodeSelector": {"b": "2"}})
        );
        let out = pod_spec(
            target.clone(),
            json!({"containers": [{"$patch": "delete", "name": "one"}]}),
        );
        assert_eq!(out["containers"], json!([{"name": "two"}]));
        let out = pod_spec(target, json!({"nodeSelector": {"$patch": "delete"}}));
        assert_eq!(out["nodeSelector"], json!({}));
    }

    #[test]
    fn element_order_is_set_and_server_only_elements_keep_their_place() {
        let out = pod_spec(
            json!({"containers": [{"name": "side"}, {"name": "one"}, {"name": "two"}]}),
            json!({"$setElementOrder/containers": [{"name": "two"}, {"name": "three"}, {"name": "one"}],
                   "containers": [{"name": "three"}]}),
        );
        let names: Vec<&str> = out["containers"]
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|c| c["name"].as_str())
            .collect();
        assert_eq!(names, ["side", "two", "three", "one"]);
        let out = pod_spec(
            out,
            json!({"$setElementOrder/containers": [{"name": "one"}, {"name": "two"}, {"name": "three"}]}),
        );
        assert_eq!(out["containers"][1]["name"], "one");
    }

    #[test]
    fn primitive_lists_merge_as_sets() {
        let meta = |target, patch| {
            patched(
                ("v1", "Pod"),
                json!({"metadata": target}),
                json!({"metadata": patch}),
            )
            .unwrap()["metadata"]
                .take()
        };
        let out = meta(
            json!({"finalizers": ["a", "b"]}),
            json!({"finalizers": ["b", "c"]}),
        );
        assert_eq!(out["finalizers"], json!(["a", "b", "c"]));
        let out = meta(
            out,
            json!({"$deleteFromPrimitiveList/finalizers": ["a", "c"]}),
        );
        assert_eq!(out["finalizers"], json!(["b"]));
        assert_eq!(meta(out, json!({"finalizers": null})), json!({}));
    }

    #[test]
    fn retain_keys_clears_the_other_members_of_a_union() {
        let out = patched(
            ("apps/v1", "Deployment"),
            json!({"spec": {"strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1}}}}),
            json!({"spec": {"strategy": {"$retainKeys": ["type"], "type": "Recreate"}}}),
        );
        assert_eq!(
            out.unwrap()["spec"]["strategy"],
            json!({"type": "Recreate"})
        );
    }

    #[test]
    fn ports_of_services_merge_by_port_and_lists_without_key_are_replaced() {
        let out = patched(
            ("v1", "Service"),
            json!({"spec": {"ports": [{"name": "http", "port": 80}, {"name": "https", "port": 443}], "externalIPs": ["192.0.2.1"]}}),
            json!({"spec": {"ports": [{"port": 443, "targetPort": 9443}], "externalIPs": ["192.0.2.2"]}}),
        );
        assert_eq!(
            out.unwrap()["spec"],
            json!({"ports": [{"name": "http", "port": 80}, {"name": "https", "port": 443, "targetPort": 9443}],
                   "externalIPs": ["192.0.2.2"]})
        );
    }

    #[test]
    fn malformed_patches_are_400() {
        for patch in [
            json!({"spec": {"containers": [{"image": "nameless"}]}}),
            json!({"spec": {"containers": ["text"]}}),
            json!({"spec": {"$patch": "frob"}}),
            json!({"spec": {"$retainKeys": "x"}}),
            json!({"spec": {"containers": [{"name": "one", "$patch": "merge"}]}}),
        ] {
            let target = json!({"spec": {"containers": [{"name": "one"}]}});
            let error = patched(("v1", "Pod"), target, patch.clone()).unwrap_err();
            assert_eq!(error.code, 400, "{patch}");
        }
    }
}
