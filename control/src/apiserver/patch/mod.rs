//! Patches and field ownership: JSON patch, merge patch, strategic merge patch, server-side apply. Pure.

use serde_json::Value;

use super::registry::Gvk;
use crate::status::ApiError;

/// RFC 6902. `patch` is the list of operations.
///
/// # Errors
/// 400 for a malformed patch, 422 when an operation cannot be applied.
pub fn apply_json_patch(target: &mut Value, patch: &Value) -> Result<(), ApiError> {
    let _ = (target, patch);
    Err(ApiError::bad_request("JSON patch is not linked in"))
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
    let _ = gvk;
    apply_merge_patch(target, patch);
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
    let mut object = request
        .live
        .cloned()
        .unwrap_or_else(|| request.config.clone());
    apply_merge_patch(&mut object, request.config);
    Ok(object)
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
    let _ = (gvk, old, new, manager, subresource, now);
}
