//! OpenAPI v2 and v3 documents of the served resources. Pure; the caller caches the bytes.

use serde_json::{Value, json};

use super::registry::Registry;

/// `/openapi/v3`: paths with their hashed URLs.
#[must_use]
pub fn v3_index(registry: &Registry) -> Value {
    let _ = registry;
    json!({"paths": {}})
}

/// `/openapi/v3/PATH`, PATH being `api/v1` or `apis/GROUP/VERSION`.
#[must_use]
pub fn v3_document(registry: &Registry, path: &str) -> Option<Value> {
    let _ = (registry, path);
    None
}

/// `/openapi/v2` as JSON.
#[must_use]
pub fn v2_document(registry: &Registry) -> Value {
    let _ = registry;
    json!({"swagger": "2.0", "info": {"title": "Kubernetes", "version": "v1"}, "paths": {}, "definitions": {}})
}

/// `/openapi/v2` as `application/com.github.proto-openapi.spec.v2@v1.0+protobuf`.
#[must_use]
pub fn v2_protobuf(registry: &Registry) -> Vec<u8> {
    let _ = registry;
    Vec::new()
}
