//! Patches and field ownership: JSON patch, merge patch, strategic merge patch, server-side apply. Pure.

mod apply;
mod json;
mod strategic;

use serde_json::Value;

use super::registry::Gvk;
use super::schema::schema;
use crate::status::ApiError;

/// RFC 6902. `patch` is the list of operations.
///
/// # Errors
/// 400 for a malformed patch, 422 when an operation cannot be applied.
pub fn apply_json_patch(target: &mut Value, patch: &Value) -> Result<(), ApiError> {
    json::apply(target, patch)
}

/// RFC 7386.
pub fn apply_merge_patch(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        target.clone_from(patch);
        return;
    };
    if !target.is_object() {
        *target = Value::Object(serde_json::Map::new());
    }
    let Value::Object(map) = target else { return };
    for (key, value) in patch {
        if value.is_null() {
            map.shift_remove(key);
        } else {
            apply_merge_patch(map.entry(key.clone()).or_insert(Value::Null), value);
        }
    }
}

/// Strategic merge patch by the schema of the kind.
///
/// # Errors
/// 400 for malformed directives, 415 for kinds without a schema.
pub fn apply_strategic_merge(
    gvk: Gvk<'_>,
    target: &mut Value,
    patch: &Value,
) -> Result<(), ApiError> {
    let Some(t) = schema().kind(gvk.group, gvk.version, gvk.kind) else {
        let message = "the body of the request was in an unknown format - accepted media types include: \
                       application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml";
        return Err(ApiError::new(415, "UnsupportedMediaType", message));
    };
    let (Value::Object(map), Value::Object(patch)) = (&mut *target, patch) else {
        return Err(ApiError::bad_request(
            "a strategic merge patch must be an object",
        ));
    };
    let mut result = map.clone();
    strategic::merge_object(Some(t), &mut result, patch)?;
    *map = result;
    Ok(())
}

/// One server-side apply.
#[derive(Debug)]
pub struct Apply<'a> {
    pub gvk: Gvk<'a>,
    /// The stored object; `None` when apply creates it.
    pub live: Option<&'a Value>,
    pub config: &'a Value,
    pub manager: &'a str,
    pub force: bool,
    /// Empty for the main resource.
    pub subresource: &'a str,
    /// RFC 3339, for managedFields.
    pub now: &'a str,
}

/// The object that an apply results in, with its managedFields.
///
/// # Errors
/// 409 with one cause per conflicting field, 400 and 422 for configurations that cannot be applied.
pub fn server_side_apply(request: &Apply<'_>) -> Result<Value, ApiError> {
    apply::server_side_apply(request)
}

/// Updates managedFields of `new` for a write that is not an apply: `manager` owns what it changed. An unchanged object
/// keeps its managedFields, times included.
pub fn track_update(
    gvk: Gvk<'_>,
    old: Option<&Value>,
    new: &mut Value,
    manager: &str,
    subresource: &str,
    now: &str,
) {
    apply::track_update(gvk, old, new, manager, subresource, now);
}
