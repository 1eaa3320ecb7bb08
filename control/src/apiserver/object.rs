//! Objects as JSON values, and their stored form: compact JSON that begins with apiVersion, kind and metadata and
//! leaves the resourceVersion out, because the store's revision is it.

use std::sync::Arc;

use bytes::Bytes;
use serde::ser::{Serialize, SerializeMap as _, Serializer};
use serde_json::{Map, Value};

use crate::status::ApiError;
use crate::store::Record;

const HEAD: [&str; 3] = ["apiVersion", "kind", "metadata"];
const METADATA: &[u8] = b"\"metadata\":{";

/// Text at a JSON pointer; empty when it is absent or not text.
#[must_use]
pub fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object
        .pointer(pointer)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

/// `metadata.name`.
#[must_use]
pub fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap_or_default()
}

/// `metadata.namespace`; empty for cluster-scoped objects.
#[must_use]
pub fn namespace(object: &Value) -> &str {
    object["metadata"]["namespace"].as_str().unwrap_or_default()
}

/// A map at `key`, made when it is absent or null.
///
/// # Errors
/// 400 when something else is there.
pub fn map_mut<'a>(
    object: &'a mut Value,
    key: &str,
) -> Result<&'a mut Map<String, Value>, ApiError> {
    let Value::Object(map) = object else {
        return Err(ApiError::bad_request("an object was expected"));
    };
    let slot = map.entry(key).or_insert(Value::Null);
    if slot.is_null() {
        *slot = Value::Object(Map::new());
    }
    match slot {
        Value::Object(inner) => Ok(inner),
        _ => Err(ApiError::bad_request(format!("{key} must be an object"))),
    }
}

/// Sets or, with `None`, removes a field.
pub fn put(map: &mut Map<String, Value>, key: &str, value: Option<Value>) {
    match value {
        Some(value) => {
            map.insert(key.to_owned(), value);
        }
        None => {
            map.shift_remove(key);
        }
    }
}

struct Stored<'a>(&'a Value);

impl Serialize for Stored<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Value::Object(object) = self.0 else {
            return self.0.serialize(serializer);
        };
        let mut map = serializer.serialize_map(None)?;
        for key in &HEAD[..2] {
            map.serialize_entry(key, object.get(*key).unwrap_or(&Value::Null))?;
        }
        map.serialize_entry(
            HEAD[2],
            &Metadata(object.get(HEAD[2]).unwrap_or(&Value::Null)),
        )?;
        for (key, value) in object.iter().filter(|(k, _)| !HEAD.contains(&k.as_str())) {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

struct Metadata<'a>(&'a Value);

impl Serialize for Metadata<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Value::Object(metadata) = self.0 else {
            return self.0.serialize(serializer);
        };
        let mut map = serializer.serialize_map(None)?;
        for (key, value) in metadata.iter().filter(|(k, _)| *k != "resourceVersion") {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

/// The stored form. Objects have a name, so their metadata is never empty.
///
/// # Errors
/// 500 when the value cannot be written as JSON.
pub fn encode(object: &Value) -> Result<Bytes, ApiError> {
    serde_json::to_vec(&Stored(object))
        .map(Bytes::from)
        .map_err(|e| {
            ApiError::new(
                500,
                "InternalError",
                format!("encode {}: {e}", name(object)),
            )
        })
}

/// The object of a record with its resourceVersion, shared between all who hold it.
///
/// # Errors
/// 500 when the stored bytes are not an object.
pub fn decode(record: &Record) -> Result<Arc<Value>, ApiError> {
    record.decoded(|record| {
        let damaged = |why: String| {
            ApiError::new(
                500,
                "InternalError",
                format!("stored object {}: {why}", record.key),
            )
        };
        let mut object: Value =
            serde_json::from_slice(&record.value).map_err(|e| damaged(e.to_string()))?;
        let metadata = map_mut(&mut object, "metadata").map_err(|e| damaged(e.message))?;
        metadata.insert("resourceVersion".into(), record.revision.to_string().into());
        Ok(object)
    })
}

/// Appends the JSON of a record with its resourceVersion, without decoding it.
pub fn write_json(record: &Record, out: &mut Vec<u8>) {
    let value = &record.value;
    let at = value.windows(METADATA.len()).position(|w| w == METADATA);
    let (head, tail) = value.split_at(at.map_or(value.len(), |at| at + METADATA.len()));
    out.extend_from_slice(head);
    if !tail.is_empty() {
        out.extend_from_slice(b"\"resourceVersion\":\"");
        out.extend_from_slice(record.revision.to_string().as_bytes());
        out.extend_from_slice(b"\",");
        out.extend_from_slice(tail);
    }
}

/// The parts of an object that selectors of labels need, read without decoding the rest.
#[derive(Debug, serde::Deserialize)]
pub struct Head {
    pub metadata: HeadMetadata,
}

/// `metadata` of a [`Head`].
#[derive(Debug, serde::Deserialize)]
pub struct HeadMetadata {
    #[serde(default)]
    pub labels: Option<Map<String, Value>>,
}

/// Time now as Kubernetes writes it (RFC 3339, whole seconds).
#[must_use]
pub fn rfc3339(time: jiff::Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_stored_form_takes_the_revision_back() {
        let object = json!({"metadata": {"resourceVersion": "7", "name": "a"}, "data": {"metadata": {}},
            "kind": "K", "apiVersion": "v1"});
        let stored = encode(&object).unwrap();
        assert_eq!(
            &*stored,
            br#"{"apiVersion":"v1","kind":"K","metadata":{"name":"a"},"data":{"metadata":{}}}"#
        );
        let record = Record::new("core/k/a".into(), stored, 9);
        let mut json = Vec::new();
        write_json(&record, &mut json);
        let spliced: Value = serde_json::from_slice(&json).unwrap();
        assert_eq!(spliced["metadata"]["resourceVersion"], "9");
        assert_eq!(*decode(&record).unwrap(), spliced);
        let (one, two) = (decode(&record).unwrap(), decode(&record).unwrap());
        assert!(Arc::ptr_eq(&one, &two), "one decoded copy is shared");
    }

    #[test]
    fn damaged_records_are_errors() {
        let record = Record::new("core/k/a".into(), Bytes::from_static(b"[1"), 9);
        assert_eq!(decode(&record).unwrap_err().code, 500);
        let mut out = Vec::new();
        write_json(&record, &mut out);
        assert_eq!(out, b"[1");
    }
}
