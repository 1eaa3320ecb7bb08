//! The protobuf form of the OpenAPI v2 document that older clients ask for (`openapi.v2.Document` of gnostic).
//!
//! Messages and numbers are those of gnostic's OpenAPIv2.proto; only what our document contains is encoded.

use serde_json::{Map, Value};

use crate::apiserver::codec::wire::{put_bytes, put_int};

/// Encodes the document of [`super::v2`].
pub(super) fn encode(document: &Value) -> Vec<u8> {
    let mut out = Vec::new();
    put_text(&mut out, 1, &document["swagger"]);
    let mut info = Vec::new();
    put_text(&mut info, 1, &document["info"]["title"]);
    put_text(&mut info, 2, &document["info"]["version"]);
    put_bytes(&mut out, 2, &info);
    let mut paths = Vec::new();
    for (name, item) in members(&document["paths"]) {
        put_bytes(&mut paths, 2, &named(name, &path_item(item)));
    }
    put_bytes(&mut out, 8, &paths);
    let mut definitions = Vec::new();
    for (name, item) in members(&document["definitions"]) {
        put_bytes(&mut definitions, 1, &named(name, &schema(item)));
    }
    put_bytes(&mut out, 9, &definitions);
    out
}

fn members(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flatten()
}

fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn put_text(out: &mut Vec<u8>, number: u32, value: &Value) {
    if let Some(text) = value.as_str() {
        put_bytes(out, number, text.as_bytes());
    }
}

fn put_flag(out: &mut Vec<u8>, number: u32, value: &Value) {
    if value == &Value::Bool(true) {
        put_int(out, number, 1);
    }
}

/// A name and a message.
fn named(name: &str, message: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    put_bytes(&mut out, 1, name.as_bytes());
    put_bytes(&mut out, 2, message);
    out
}

/// One alternative of a union.
fn choice(number: u32, message: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    put_bytes(&mut out, number, message);
    out
}

/// Any JSON value, as YAML text.
fn any(value: &Value) -> Vec<u8> {
    let mut out = Vec::new();
    put_bytes(&mut out, 2, value.to_string().as_bytes());
    out
}

fn put_extensions(out: &mut Vec<u8>, number: u32, object: &Value) {
    for (name, value) in members(object).filter(|(name, _)| name.starts_with("x-")) {
        put_bytes(out, number, &named(name, &any(value)));
    }
}

fn path_item(item: &Value) -> Vec<u8> {
    let mut out = Vec::new();
    for (method, number) in [
        ("get", 2),
        ("put", 3),
        ("post", 4),
        ("delete", 5),
        ("patch", 8),
    ] {
        if let Some(found) = item.get(method) {
            put_bytes(&mut out, number, &operation(found));
        }
    }
    for parameter in items(&item["parameters"]) {
        put_bytes(&mut out, 9, &parameters_item(parameter));
    }
    out
}

fn operation(operation: &Value) -> Vec<u8> {
    let mut out = Vec::new();
    for (key, number) in [
        ("tags", 1),
        ("produces", 6),
        ("consumes", 7),
        ("schemes", 10),
    ] {
        for text in items(&operation[key]) {
            put_text(&mut out, number, text);
        }
    }
    put_text(&mut out, 5, &operation["operationId"]);
    for parameter in items(&operation["parameters"]) {
        put_bytes(&mut out, 8, &parameters_item(parameter));
    }
    let mut responses = Vec::new();
    for (code, response) in members(&operation["responses"]) {
        let mut message = Vec::new();
        put_text(&mut message, 1, &response["description"]);
        if let Some(body) = response.get("schema") {
            put_bytes(&mut message, 2, &choice(1, &schema(body)));
        }
        put_bytes(&mut responses, 1, &named(code, &choice(1, &message)));
    }
    put_bytes(&mut out, 9, &responses);
    put_extensions(&mut out, 13, operation);
    out
}

fn parameters_item(parameter: &Value) -> Vec<u8> {
    let mut out = Vec::new();
    let place = parameter["in"].as_str().unwrap_or_default();
    if place == "body" {
        put_text(&mut out, 2, &parameter["name"]);
        put_text(&mut out, 3, &parameter["in"]);
        put_flag(&mut out, 4, &parameter["required"]);
        put_bytes(&mut out, 5, &schema(&parameter["schema"]));
        return choice(1, &choice(1, &out));
    }
    put_flag(&mut out, 1, &parameter["required"]);
    put_text(&mut out, 2, &parameter["in"]);
    put_text(&mut out, 4, &parameter["name"]);
    let (kind, type_number, unique_number) = if place == "path" {
        (4, 5, 19)
    } else {
        (3, 6, 20)
    };
    put_text(&mut out, type_number, &parameter["type"]);
    put_flag(&mut out, unique_number, &parameter["uniqueItems"]);
    choice(1, &choice(2, &choice(kind, &out)))
}

fn schema(schema_: &Value) -> Vec<u8> {
    let mut out = Vec::new();
    put_text(&mut out, 1, &schema_["$ref"]);
    put_text(&mut out, 2, &schema_["format"]);
    if let Some(default) = schema_.get("default") {
        put_bytes(&mut out, 5, &any(default));
    }
    for name in items(&schema_["required"]) {
        put_text(&mut out, 19, name);
    }
    if let Some(values) = schema_.get("additionalProperties") {
        put_bytes(&mut out, 21, &choice(1, &schema(values)));
    }
    if let Some(kind) = schema_.get("type") {
        let mut message = Vec::new();
        put_text(&mut message, 1, kind);
        put_bytes(&mut out, 22, &message);
    }
    if let Some(element) = schema_.get("items") {
        put_bytes(&mut out, 23, &choice(1, &schema(element)));
    }
    if let Some(properties) = schema_.get("properties").and_then(Value::as_object) {
        put_bytes(&mut out, 25, &named_schemas(properties));
    }
    put_extensions(&mut out, 31, schema_);
    out
}

fn named_schemas(properties: &Map<String, Value>) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, property) in properties {
        put_bytes(&mut out, 1, &named(name, &schema(property)));
    }
    out
}
