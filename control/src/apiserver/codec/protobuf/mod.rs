//! Kubernetes protobuf: the `k8s\0` envelope (`runtime.Unknown`) around one message.

mod decode;
mod encode;
pub(crate) mod wire;

use serde_json::{Map, Value};

use crate::apiserver::registry::Gvk;
use crate::apiserver::schema::{Schema, Type, schema};
use decode::{DecodeError, bytes_field};

/// What every protobuf body of Kubernetes begins with.
pub(crate) const MAGIC: &[u8] = b"k8s\0";
/// Messages nested deeper are refused.
const MAX_DEPTH: usize = 64;

/// Decodes a body. The second value is whether the kind is known; objects of unknown kinds have only apiVersion and kind.
pub(crate) fn decode(body: &[u8], expected: Gvk<'_>) -> Result<(Value, bool), String> {
    let Some(envelope) = body.strip_prefix(MAGIC) else {
        return Err(
            "the body does not begin with the protobuf envelope of Kubernetes (k8s\\0)".into(),
        );
    };
    unknown(envelope, Some(expected)).map_err(|e| e.to_string())
}

/// `runtime.Unknown`: type, and the bytes of the message.
fn unknown(envelope: &[u8], expected: Option<Gvk<'_>>) -> Result<(Value, bool), DecodeError> {
    let type_meta = bytes_field(envelope, 1)?.unwrap_or_default();
    let text = |number| -> Result<String, DecodeError> {
        let bytes = bytes_field(type_meta, number)?.unwrap_or_default();
        String::from_utf8(bytes.to_vec()).map_err(|_| DecodeError::Text { field: "typeMeta" })
    };
    let (mut api_version, mut kind) = (text(1)?, text(2)?);
    if let Some(expected) = expected {
        if api_version.is_empty() {
            api_version = expected.api_version();
        }
        if kind.is_empty() {
            kind = expected.kind.to_owned();
        }
    }
    let raw = bytes_field(envelope, 2)?.unwrap_or_default();
    let found = schema().kind_of(&api_version, &kind);
    let mut object = Map::new();
    object.insert("apiVersion".into(), api_version.into());
    object.insert("kind".into(), kind.into());
    if let Some(t) = found {
        object.extend(decode::message(t, raw)?);
    }
    Ok((Value::Object(object), found.is_some()))
}

/// Encodes an object with its envelope, or `None` when its kind has no message.
pub(crate) fn encode(object: &Value) -> Option<Vec<u8>> {
    let api_version = object.get("apiVersion")?.as_str()?;
    let kind = object.get("kind")?.as_str()?;
    let t = type_for_encoding(schema(), api_version, kind)?;
    let raw = encode::message(t, object.as_object()?);
    let mut type_meta = Vec::new();
    wire::put_bytes(&mut type_meta, 1, api_version.as_bytes());
    wire::put_bytes(&mut type_meta, 2, kind.as_bytes());
    let mut out = MAGIC.to_vec();
    wire::put_bytes(&mut out, 1, &type_meta);
    wire::put_bytes(&mut out, 2, &raw);
    wire::put_bytes(&mut out, 3, b"");
    wire::put_bytes(&mut out, 4, b"");
    Some(out)
}

/// Tables and discovery documents have no message upstream, either.
fn type_for_encoding(
    schema: &'static Schema,
    api_version: &str,
    kind: &str,
) -> Option<&'static Type> {
    let t = schema.kind_of(api_version, kind)?;
    let carried = t.fields.iter().any(|f| f.number != 0);
    (carried && kind != "Table").then_some(t)
}

#[cfg(test)]
mod tests;
