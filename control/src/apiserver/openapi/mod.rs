//! OpenAPI v2 and v3 documents of the served resources. Pure; the caller caches the bytes.
//!
//! The documents carry what clients act on: paths with their kinds, query parameters and patch types, and schemas with
//! list and merge keys. They have no descriptions.

mod gnostic;
mod paths;
mod schemas;
mod v2;

use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

use super::registry::{Registry, join_group_version};
use schemas::Style;

/// `/openapi/v3`: paths with their hashed URLs.
#[must_use]
pub fn v3_index(registry: &Registry) -> Value {
    let mut paths = Map::new();
    for (group, version) in group_versions(registry) {
        let path = document_path(&group, &version);
        let url = format!(
            "/openapi/v3/{path}?hash={}",
            document_hash(registry, &group, &version)
        );
        paths.insert(path, json!({"serverRelativeURL": url}));
    }
    json!({"paths": paths})
}

/// `/openapi/v3/PATH`, PATH being `api/v1` or `apis/GROUP/VERSION`.
#[must_use]
pub fn v3_document(registry: &Registry, path: &str) -> Option<Value> {
    let (group, version) = group_versions(registry)
        .into_iter()
        .find(|(g, v)| document_path(g, v) == path)?;
    let defs: Vec<_> = registry.of_version(&group, &version).cloned().collect();
    let mut all = Map::new();
    for def in &defs {
        paths::add(def, Style::V3, &mut all);
    }
    let roots = schemas::roots(&defs);
    let components = schemas::documents(&roots, Style::V3);
    Some(json!({
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": "unversioned"},
        "paths": all,
        "components": {"schemas": components},
    }))
}

/// `/openapi/v2` as JSON.
#[must_use]
pub fn v2_document(registry: &Registry) -> Value {
    v2::document(registry)
}

/// `/openapi/v2` as `application/com.github.proto-openapi.spec.v2@v1.0+protobuf`.
#[must_use]
pub fn v2_protobuf(registry: &Registry) -> Vec<u8> {
    gnostic::encode(&v2::document(registry))
}

fn group_versions(registry: &Registry) -> Vec<(String, String)> {
    registry
        .groups()
        .into_iter()
        .flat_map(|(group, versions)| versions.into_iter().map(move |v| (group.clone(), v)))
        .collect()
}

fn document_path(group: &str, version: &str) -> String {
    if group.is_empty() {
        format!("api/{version}")
    } else {
        format!("apis/{group}/{version}")
    }
}

/// A hash of everything that the document is made from, so that the index is cheap and clients may cache by it.
fn document_hash(registry: &Registry, group: &str, version: &str) -> String {
    let mut hash = Sha256::new();
    hash.update(super::schema::TABLE.as_bytes());
    hash.update(join_group_version(group, version).as_bytes());
    for def in registry.of_version(group, version) {
        hash.update(format!("{def:?}").as_bytes());
    }
    hash.finalize()
        .iter()
        .map(|byte| format!("{byte:02X}"))
        .collect()
}

#[cfg(test)]
mod tests;
