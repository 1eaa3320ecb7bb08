//! The OpenAPI v2 document, one for all groups.

use serde_json::{Map, Value, json};

use super::paths;
use super::schemas::{self, Style};
use crate::apiserver::registry::Registry;

pub(super) fn document(registry: &Registry) -> Value {
    let defs: Vec<_> = registry.iter().cloned().collect();
    let mut all = Map::new();
    for def in &defs {
        paths::add(def, Style::V2, &mut all);
    }
    json!({
        "swagger": "2.0",
        "info": {"title": "Kubernetes", "version": "v1"},
        "paths": all,
        "definitions": schemas::documents(&schemas::roots(&defs), Style::V2),
    })
}
