//! Schemas of types, for both versions of OpenAPI.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::apiserver::registry::{ResourceDef, Verb};
use crate::apiserver::schema::{Field, Kind, ListType, Type, schema};

/// Which version of OpenAPI a document is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    V2,
    V3,
}

const META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1";
const EXTENSIONS: &str = "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1";

/// The reference to a named schema.
pub(super) fn reference(style: Style, name: &str) -> Value {
    match style {
        Style::V2 => json!({"$ref": format!("#/definitions/{name}")}),
        Style::V3 => json!({"$ref": format!("#/components/schemas/{name}")}),
    }
}

/// The schema name of a kind; custom kinds are named by their group, version and kind.
pub(super) fn kind_name(group: &str, version: &str, kind: &str) -> String {
    match schema().kind(group, version, kind) {
        Some(t) => schema().full_name(t),
        None => {
            let reversed: Vec<&str> = group.split('.').rev().collect();
            format!("{}.{version}.{kind}", reversed.join("."))
        }
    }
}

pub(super) fn meta_name(kind: &str) -> String {
    format!("{META}.{kind}")
}

/// Types that the documents of some resources start from: the kinds, their lists and the kinds of subresources.
pub(super) fn roots(defs: &[Arc<ResourceDef>]) -> Vec<(String, String, String)> {
    let mut roots = vec![
        (String::new(), "v1".to_owned(), "DeleteOptions".to_owned()),
        (String::new(), "v1".to_owned(), "Status".to_owned()),
    ];
    for def in defs {
        let (group, version) = (def.group.to_string(), def.version.to_string());
        roots.push((group.clone(), version.clone(), def.kind.to_string()));
        if def.allows(Verb::List) {
            roots.push((group, version, format!("{}List", def.kind)));
        }
        for sub in &def.subresources {
            roots.push((
                sub.group.to_string(),
                sub.version.to_string(),
                sub.kind.to_string(),
            ));
        }
    }
    roots
}

/// All schemas that the roots refer to, by name.
pub(super) fn documents(roots: &[(String, String, String)], style: Style) -> Map<String, Value> {
    let mut found = Found {
        style,
        schemas: BTreeMap::new(),
    };
    for (group, version, kind) in roots {
        match schema().kind(group, version, kind) {
            Some(t) => found.add_type(t),
            None => found.add_custom(group, version, kind),
        }
    }
    found
        .schemas
        .insert(meta_name("Patch"), json!({"type": "object"}));
    found.schemas.into_iter().collect()
}

struct Found {
    style: Style,
    schemas: BTreeMap<String, Value>,
}

impl Found {
    fn add_type(&mut self, t: &'static Type) {
        let name = schema().full_name(t);
        if self.schemas.contains_key(&name) {
            return;
        }
        self.schemas.insert(name.clone(), Value::Null);
        let mut properties = BTreeMap::new();
        let mut required = Vec::new();
        schema().each_field(t, &mut |field| {
            properties.insert(field.json.to_owned(), self.property(field));
            if field.required {
                required.push(field.json);
            }
        });
        let mut document = Map::new();
        document.insert("type".into(), "object".into());
        if !properties.is_empty() {
            document.insert(
                "properties".into(),
                Value::Object(properties.into_iter().collect()),
            );
        }
        if !required.is_empty() {
            required.sort_unstable();
            document.insert("required".into(), json!(required));
        }
        if t.atomic {
            document.insert("x-kubernetes-map-type".into(), "atomic".into());
        }
        let package = schema().package(t);
        if t.is_kind && !package.group.starts_with('-') {
            let group = if package.group == crate::apiserver::schema::META_GROUP {
                ""
            } else {
                package.group
            };
            let gvk = json!([{"group": group, "version": package.version, "kind": t.name}]);
            document.insert("x-kubernetes-group-version-kind".into(), gvk);
        }
        self.schemas.insert(name, Value::Object(document));
    }

    /// A kind without a type of ours takes any fields.
    fn add_custom(&mut self, group: &str, version: &str, kind: &str) {
        let metadata = self.metadata();
        let document = json!({
            "type": "object",
            "properties": {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": metadata},
            "x-kubernetes-preserve-unknown-fields": true,
            "x-kubernetes-group-version-kind": [{"group": group, "version": version, "kind": kind}],
        });
        self.schemas
            .insert(kind_name(group, version, kind), document);
    }

    fn metadata(&mut self) -> Value {
        let pod = schema().kind("", "v1", "Pod");
        match pod.and_then(|t| schema().kind_at(t, &["metadata"])) {
            Some(kind) => self.kind(kind),
            None => json!({"type": "object"}),
        }
    }

    fn property(&mut self, field: &'static Field) -> Value {
        let mut property = self.kind(&field.kind);
        if let (Kind::Object(_), Style::V3, false, Value::Object(map)) =
            (&field.kind, self.style, field.pointer, &mut property)
        {
            map.insert("default".into(), json!({}));
        }
        let Value::Object(map) = &mut property else {
            return property;
        };
        let is_reference = map.contains_key("$ref");
        // In version 2 nothing may stand beside a reference.
        if !is_reference {
            extensions(field, map);
            if let Ok(default) = serde_json::from_str::<Value>(field.default) {
                map.insert("default".into(), default);
            }
        }
        property
    }

    fn kind(&mut self, kind: &'static Kind) -> Value {
        match kind {
            Kind::String => json!({"type": "string"}),
            Kind::Int32 => json!({"type": "integer", "format": "int32"}),
            Kind::Int64 => json!({"type": "integer", "format": "int64"}),
            Kind::Bool => json!({"type": "boolean"}),
            Kind::Double => json!({"type": "number", "format": "double"}),
            Kind::Bytes => json!({"type": "string", "format": "byte"}),
            Kind::Any => json!({}),
            Kind::StringList => json!({"type": "array", "items": {"type": "string"}}),
            Kind::List(inner) => {
                let mut items = self.kind(inner);
                if let (Kind::Object(_), Style::V3, Value::Object(map)) =
                    (&**inner, self.style, &mut items)
                {
                    map.insert("default".into(), json!({}));
                }
                json!({"type": "array", "items": items})
            }
            Kind::Map(inner) => json!({"type": "object", "additionalProperties": self.kind(inner)}),
            Kind::Object(id) => {
                let t = schema().get(*id);
                self.add_type(t);
                self.refer(&schema().full_name(t))
            }
            special => {
                let (name, document) = self.special(special);
                self.schemas.entry(name.clone()).or_insert(document);
                self.refer(&name)
            }
        }
    }

    /// Version 3 wraps references, because other keys stand beside them.
    fn refer(&self, name: &str) -> Value {
        match self.style {
            Style::V2 => reference(self.style, name),
            Style::V3 => json!({"allOf": [reference(self.style, name)]}),
        }
    }

    fn special(&self, kind: &Kind) -> (String, Value) {
        let (name, document) = match kind {
            Kind::Time => (meta_name("Time"), json!({"type": "string", "format": "date-time"})),
            Kind::MicroTime => (meta_name("MicroTime"), json!({"type": "string", "format": "date-time"})),
            Kind::Duration => (meta_name("Duration"), json!({"type": "string"})),
            Kind::FieldsV1 => (meta_name("FieldsV1"), json!({"type": "object"})),
            Kind::RawExtension => {
                ("io.k8s.apimachinery.pkg.runtime.RawExtension".to_owned(), json!({"type": "object"}))
            }
            Kind::Quantity => (
                "io.k8s.apimachinery.pkg.api.resource.Quantity".to_owned(),
                self.either(json!({"oneOf": [{"type": "string"}, {"type": "number"}]}), json!({"type": "string"})),
            ),
            Kind::IntOrString => (
                "io.k8s.apimachinery.pkg.util.intstr.IntOrString".to_owned(),
                self.either(
                    json!({"format": "int-or-string", "oneOf": [{"type": "integer"}, {"type": "string"}]}),
                    json!({"type": "string", "format": "int-or-string"}),
                ),
            ),
            Kind::SchemaOrBool => (format!("{EXTENSIONS}.JSONSchemaPropsOrBool"), json!({})),
            Kind::SchemaOrArray => (format!("{EXTENSIONS}.JSONSchemaPropsOrArray"), json!({})),
            Kind::SchemaOrStrings => (format!("{EXTENSIONS}.JSONSchemaPropsOrStringArray"), json!({})),
            _ => (format!("{EXTENSIONS}.JSON"), json!({})),
        };
        (name, document)
    }

    fn either(&self, v3: Value, v2: Value) -> Value {
        if self.style == Style::V3 { v3 } else { v2 }
    }
}

fn extensions(field: &Field, map: &mut Map<String, Value>) {
    match &field.list_type {
        Some(ListType::Atomic) => {
            map.insert("x-kubernetes-list-type".into(), "atomic".into());
        }
        Some(ListType::Set) => {
            map.insert("x-kubernetes-list-type".into(), "set".into());
        }
        Some(ListType::Map(keys)) => {
            map.insert("x-kubernetes-list-type".into(), "map".into());
            map.insert("x-kubernetes-list-map-keys".into(), json!(keys));
        }
        None => {}
    }
    for (set, kind) in [(field.atomic, "atomic"), (field.granular, "granular")] {
        if set {
            map.insert("x-kubernetes-map-type".into(), kind.into());
        }
    }
    let strategies: Vec<&str> = [
        (field.patch_merge, "merge"),
        (field.patch_retain_keys, "retainKeys"),
        (field.patch_replace, "replace"),
    ]
    .into_iter()
    .filter_map(|(set, name)| set.then_some(name))
    .collect();
    if !strategies.is_empty() {
        map.insert(
            "x-kubernetes-patch-strategy".into(),
            strategies.join(",").into(),
        );
    }
    if !field.merge_key.is_empty() {
        map.insert(
            "x-kubernetes-patch-merge-key".into(),
            field.merge_key.into(),
        );
    }
}
