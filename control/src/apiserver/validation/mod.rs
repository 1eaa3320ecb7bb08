//! Validation per kind. Returns causes; an empty list means valid. Pure.
//!
//! The caller has checked that apiVersion, kind, name and namespace agree with the request.

use serde_json::Value;

use super::registry::Gvk;
use crate::status::Cause;

/// A defaulted object that is about to be created, metadata included (name syntax by kind, labels, annotations,
/// ownerReferences, finalizers).
#[must_use]
pub fn validate_create(gvk: Gvk<'_>, object: &Value) -> Vec<Cause> {
    let _ = (gvk, object);
    Vec::new()
}

/// A defaulted object that replaces `old`: everything of create plus immutable fields.
#[must_use]
pub fn validate_update(gvk: Gvk<'_>, new: &Value, old: &Value) -> Vec<Cause> {
    let _ = (gvk, new, old);
    Vec::new()
}

/// A write to the `status` subresource.
#[must_use]
pub fn validate_status_update(gvk: Gvk<'_>, new: &Value, old: &Value) -> Vec<Cause> {
    let _ = (gvk, new, old);
    Vec::new()
}
