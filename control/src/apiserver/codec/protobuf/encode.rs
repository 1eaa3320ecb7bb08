//! JSON to protobuf messages, by the schema table. The object has been normalised, so values that do not fit their
//! field do not occur; should one, it is left out.

use base64::Engine as _;
use serde_json::{Map, Value};

use super::wire::{put_bytes, put_double, put_int};
use crate::apiserver::schema::{Kind, Type, schema, time};

/// Encodes the members of an object as a message of its type.
pub(crate) fn message(t: &'static Type, object: &Map<String, Value>) -> Vec<u8> {
    let mut out = Vec::new();
    into(t, object, &mut out);
    out
}

fn into(t: &'static Type, object: &Map<String, Value>, out: &mut Vec<u8>) {
    for field in &t.fields {
        if field.number == 0 {
            continue;
        }
        if let (true, Kind::Object(inner)) = (field.is_inline(), &field.kind) {
            let nested = message(schema().get(*inner), object);
            if !nested.is_empty() {
                put_bytes(out, field.number, &nested);
            }
        } else if let Some(value) = object.get(field.json) {
            put(t, field.number, &field.kind, value, out);
        }
    }
}

fn put(t: &'static Type, number: u32, kind: &Kind, value: &Value, out: &mut Vec<u8>) {
    match (kind, value) {
        (_, Value::Null) => {}
        (Kind::List(inner), Value::Array(items)) => {
            for item in items {
                put(t, number, inner, item, out);
            }
        }
        (Kind::Map(inner), Value::Object(map)) => {
            for (key, item) in map {
                let mut entry = Vec::new();
                put_bytes(&mut entry, 1, key.as_bytes());
                put(t, 2, inner, item, &mut entry);
                put_bytes(out, number, &entry);
            }
        }
        (Kind::Object(id), Value::Object(map)) => {
            put_bytes(out, number, &message(schema().get(*id), map));
        }
        (Kind::String, Value::String(text)) => put_bytes(out, number, text.as_bytes()),
        (Kind::Bool, Value::Bool(b)) => put_int(out, number, i64::from(*b)),
        (Kind::Int32 | Kind::Int64, Value::Number(n)) => {
            put_int(out, number, n.as_i64().unwrap_or_default());
        }
        (Kind::Double, Value::Number(n)) => put_double(out, number, n.as_f64().unwrap_or_default()),
        (Kind::Bytes, Value::String(text)) => {
            if let Ok(bytes) = base64::engine::general_purpose::STANDARD.decode(text) {
                put_bytes(out, number, &bytes);
            }
        }
        _ => {
            if let Some(bytes) = special(t, kind, value) {
                put_bytes(out, number, &bytes);
            }
        }
    }
}

/// Types whose message differs from their JSON form.
fn special(t: &'static Type, kind: &Kind, value: &Value) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    match (kind, value) {
        (Kind::Time | Kind::MicroTime, Value::String(text)) => {
            let time = time::parse_time(text)?;
            put_int(&mut out, 1, time.as_second());
            put_int(&mut out, 2, i64::from(time.subsec_nanosecond()));
        }
        (Kind::Duration, Value::String(text)) => put_int(&mut out, 1, time::parse_duration(text)?),
        (Kind::Quantity, Value::String(text)) => put_bytes(&mut out, 1, text.as_bytes()),
        (Kind::IntOrString, Value::String(text)) => {
            put_int(&mut out, 1, 1);
            put_int(&mut out, 2, 0);
            put_bytes(&mut out, 3, text.as_bytes());
        }
        (Kind::IntOrString, Value::Number(n)) => {
            put_int(&mut out, 1, 0);
            put_int(&mut out, 2, n.as_i64()?);
            put_bytes(&mut out, 3, b"");
        }
        (Kind::RawExtension | Kind::FieldsV1 | Kind::Json, _) => {
            put_bytes(&mut out, 1, value.to_string().as_bytes());
        }
        (Kind::StringList, Value::Array(items)) => put_strings(&mut out, 1, items),
        (Kind::SchemaOrBool, Value::Bool(b)) => put_int(&mut out, 1, i64::from(*b)),
        (Kind::SchemaOrBool, Value::Object(map)) => {
            put_int(&mut out, 1, 1);
            put_bytes(&mut out, 2, &message(t, map));
        }
        (Kind::SchemaOrArray | Kind::SchemaOrStrings, Value::Object(map)) => {
            put_bytes(&mut out, 1, &message(t, map));
        }
        (Kind::SchemaOrArray, Value::Array(items)) => {
            for item in items.iter().filter_map(Value::as_object) {
                put_bytes(&mut out, 2, &message(t, item));
            }
        }
        (Kind::SchemaOrStrings, Value::Array(items)) => put_strings(&mut out, 2, items),
        _ => return None,
    }
    Some(out)
}

fn put_strings(out: &mut Vec<u8>, number: u32, items: &[Value]) {
    for text in items.iter().filter_map(Value::as_str) {
        put_bytes(out, number, text.as_bytes());
    }
}
