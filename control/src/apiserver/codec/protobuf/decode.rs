//! Protobuf messages to JSON, by the schema table.

use base64::Engine as _;
use jiff::Timestamp;
use serde_json::{Map, Number, Value};

use super::wire::{Reader, WireError, WireValue};
use super::{MAGIC, MAX_DEPTH};
use crate::apiserver::schema::normalize::is_empty;
use crate::apiserver::schema::{Field, Kind, Type, schema, time};

/// Why a body is not a protobuf object.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DecodeError {
    #[error("{0}")]
    Wire(#[from] WireError),
    #[error("field {field} of {message} has the wrong wire type")]
    Mismatch {
        message: &'static str,
        field: &'static str,
    },
    #[error("field {field} is not UTF-8 text")]
    Text { field: &'static str },
    #[error("field {field} does not hold JSON: {source}")]
    Json {
        field: &'static str,
        source: serde_json::Error,
    },
    #[error("the message is nested too deeply")]
    Depth,
    #[error("the time of field {field} is out of range")]
    Time { field: &'static str },
}

/// Decodes one message of a type into the members of a JSON object.
pub(crate) fn message(t: &'static Type, bytes: &[u8]) -> Result<Map<String, Value>, DecodeError> {
    let mut out = Map::new();
    into(t, bytes, &mut out, 0)?;
    Ok(out)
}

fn into(
    t: &'static Type,
    bytes: &[u8],
    out: &mut Map<String, Value>,
    depth: usize,
) -> Result<(), DecodeError> {
    if depth > MAX_DEPTH {
        return Err(DecodeError::Depth);
    }
    let mut reader = Reader::new(bytes);
    while let Some((number, wire)) = reader.next()? {
        // Fields of newer clients are skipped, as protobuf intends.
        let Some(field) = t.fields.iter().find(|f| f.number == number && number != 0) else {
            continue;
        };
        if let (true, Kind::Object(inner), WireValue::Bytes(bytes)) =
            (field.is_inline(), &field.kind, wire)
        {
            into(schema().get(*inner), bytes, out, depth + 1)?;
            continue;
        }
        member(t, field, wire, out, depth)?;
    }
    Ok(())
}

fn member(
    t: &'static Type,
    field: &'static Field,
    wire: WireValue<'_>,
    out: &mut Map<String, Value>,
    depth: usize,
) -> Result<(), DecodeError> {
    let reader = FieldReader { t, field, depth };
    match &field.kind {
        Kind::List(inner) => {
            let list = out
                .entry(field.json)
                .or_insert_with(|| Value::Array(Vec::new()));
            if let Value::Array(items) = list {
                reader.elements(inner, wire, items)?;
            }
        }
        Kind::Map(inner) => {
            let (key, value) = reader.entry(inner, wire)?;
            let map = out
                .entry(field.json)
                .or_insert_with(|| Value::Object(Map::new()));
            if let Value::Object(map) = map {
                map.insert(key, value);
            }
        }
        kind => {
            let value = reader.value(kind, wire)?;
            if value.is_null() || (field.omit_empty && !field.pointer && is_empty(kind, &value)) {
                return Ok(());
            }
            out.insert(field.json.to_owned(), value);
        }
    }
    Ok(())
}

struct FieldReader {
    t: &'static Type,
    field: &'static Field,
    depth: usize,
}

impl FieldReader {
    fn mismatch(&self) -> DecodeError {
        DecodeError::Mismatch {
            message: self.t.name,
            field: self.field.json,
        }
    }

    /// One element, or several packed numbers.
    fn elements(
        &self,
        inner: &Kind,
        wire: WireValue<'_>,
        items: &mut Vec<Value>,
    ) -> Result<(), DecodeError> {
        if let (Kind::Int32 | Kind::Int64 | Kind::Bool, WireValue::Bytes(packed)) = (inner, wire) {
            // A packed list is a run of varints: the field reader's own encoding without tags.
            let mut rest = packed;
            while !rest.is_empty() {
                let end = rest
                    .iter()
                    .position(|b| b & 0x80 == 0)
                    .ok_or(WireError::Truncated)?
                    + 1;
                let mut tagged = vec![0_u8];
                tagged.extend_from_slice(&rest[..end]);
                let mut reader = Reader::new(&tagged);
                if let Some((_, value)) = reader.next()? {
                    items.push(self.value(inner, value)?);
                }
                rest = &rest[end..];
            }
            return Ok(());
        }
        items.push(self.value(inner, wire)?);
        Ok(())
    }

    fn entry(&self, inner: &Kind, wire: WireValue<'_>) -> Result<(String, Value), DecodeError> {
        let WireValue::Bytes(bytes) = wire else {
            return Err(self.mismatch());
        };
        let mut key = String::new();
        let mut value = crate::apiserver::schema::normalize::zero(inner);
        if matches!(inner, Kind::StringList) {
            value = Value::Array(Vec::new());
        }
        let mut reader = Reader::new(bytes);
        while let Some((number, wire)) = reader.next()? {
            match number {
                1 => key = self.text(wire)?,
                2 => value = self.value(inner, wire)?,
                _ => {}
            }
        }
        Ok((key, value))
    }

    fn text(&self, wire: WireValue<'_>) -> Result<String, DecodeError> {
        let WireValue::Bytes(bytes) = wire else {
            return Err(self.mismatch());
        };
        String::from_utf8(bytes.to_vec()).map_err(|_| DecodeError::Text {
            field: self.field.json,
        })
    }

    fn value(&self, kind: &Kind, wire: WireValue<'_>) -> Result<Value, DecodeError> {
        match (kind, wire) {
            (Kind::String, wire) => Ok(Value::String(self.text(wire)?)),
            (Kind::Bool, WireValue::Varint(v)) => Ok(Value::Bool(v != 0)),
            (Kind::Int32 | Kind::Int64, WireValue::Varint(v)) => {
                Ok(Value::Number(i64::from_le_bytes(v.to_le_bytes()).into()))
            }
            (Kind::Double, WireValue::Fixed64(v)) => {
                Ok(Number::from_f64(f64::from_bits(v)).map_or(Value::Null, Value::Number))
            }
            (Kind::Bytes, WireValue::Bytes(bytes)) => Ok(base64::engine::general_purpose::STANDARD
                .encode(bytes)
                .into()),
            (Kind::Object(id), WireValue::Bytes(bytes)) => {
                let mut inner = Map::new();
                into(schema().get(*id), bytes, &mut inner, self.depth + 1)?;
                Ok(Value::Object(inner))
            }
            (_, WireValue::Bytes(bytes)) => self.special(kind, bytes),
            _ => Err(self.mismatch()),
        }
    }

    /// Types whose JSON form differs from their message.
    fn special(&self, kind: &Kind, bytes: &[u8]) -> Result<Value, DecodeError> {
        match kind {
            Kind::Time => self.time(bytes, time::format_time),
            Kind::MicroTime => self.time(bytes, time::format_micro_time),
            Kind::Duration => Ok(time::format_duration(int_field(bytes, 1)?.unwrap_or(0)).into()),
            Kind::Quantity => {
                let text = match bytes_field(bytes, 1)? {
                    Some(text) => self.text(WireValue::Bytes(text))?,
                    None => String::new(),
                };
                Ok(if text.is_empty() {
                    "0".into()
                } else {
                    text.into()
                })
            }
            Kind::IntOrString => match int_field(bytes, 1)? {
                Some(1) => self
                    .text(WireValue::Bytes(bytes_field(bytes, 3)?.unwrap_or_default()))
                    .map(Value::String),
                _ => Ok(int_field(bytes, 2)?.unwrap_or(0).into()),
            },
            Kind::RawExtension | Kind::FieldsV1 | Kind::Json => match bytes_field(bytes, 1)? {
                Some(raw) if !raw.is_empty() => self.embedded(raw),
                _ => Ok(Value::Null),
            },
            Kind::StringList => self.strings(bytes, 1),
            Kind::SchemaOrBool => match bytes_field(bytes, 2)? {
                Some(inner) => self.json_schema(inner),
                None => Ok(Value::Bool(int_field(bytes, 1)?.unwrap_or(0) != 0)),
            },
            Kind::SchemaOrArray => match bytes_field(bytes, 1)? {
                Some(inner) => self.json_schema(inner),
                None => {
                    let mut items = Vec::new();
                    let mut reader = Reader::new(bytes);
                    while let Some((number, wire)) = reader.next()? {
                        if let (2, WireValue::Bytes(inner)) = (number, wire) {
                            items.push(self.json_schema(inner)?);
                        }
                    }
                    Ok(Value::Array(items))
                }
            },
            Kind::SchemaOrStrings => match bytes_field(bytes, 1)? {
                Some(inner) => self.json_schema(inner),
                None => self.strings(bytes, 2),
            },
            _ => Err(self.mismatch()),
        }
    }

    /// JSON text, or a whole object in its envelope.
    fn embedded(&self, raw: &[u8]) -> Result<Value, DecodeError> {
        if let Some(body) = raw.strip_prefix(MAGIC) {
            if self.depth > MAX_DEPTH {
                return Err(DecodeError::Depth);
            }
            return super::unknown(body, None).map(|(object, _)| object);
        }
        serde_json::from_slice(raw).map_err(|source| DecodeError::Json {
            field: self.field.json,
            source,
        })
    }

    fn json_schema(&self, bytes: &[u8]) -> Result<Value, DecodeError> {
        // The unions stand only in JSONSchemaProps, so the type that holds the field is the type they refer to.
        let mut inner = Map::new();
        into(self.t, bytes, &mut inner, self.depth + 1)?;
        Ok(Value::Object(inner))
    }

    fn strings(&self, bytes: &[u8], wanted: u32) -> Result<Value, DecodeError> {
        let mut items = Vec::new();
        let mut reader = Reader::new(bytes);
        while let Some((number, wire)) = reader.next()? {
            if number == wanted {
                items.push(Value::String(self.text(wire)?));
            }
        }
        Ok(Value::Array(items))
    }

    /// An absent time is an empty message.
    fn time(&self, bytes: &[u8], format: fn(Timestamp) -> String) -> Result<Value, DecodeError> {
        let seconds = int_field(bytes, 1)?.unwrap_or(0);
        let nanos = int_field(bytes, 2)?.unwrap_or(0);
        if seconds == 0 && nanos == 0 {
            return Ok(Value::Null);
        }
        let nanos = i32::try_from(nanos).map_err(|_| DecodeError::Time {
            field: self.field.json,
        })?;
        Timestamp::new(seconds, nanos)
            .map(|t| format(t).into())
            .map_err(|_| DecodeError::Time {
                field: self.field.json,
            })
    }
}

/// The last varint with this number.
fn int_field(bytes: &[u8], wanted: u32) -> Result<Option<i64>, WireError> {
    let mut reader = Reader::new(bytes);
    let mut found = None;
    while let Some((number, wire)) = reader.next()? {
        if let (true, WireValue::Varint(v)) = (number == wanted, wire) {
            found = Some(i64::from_le_bytes(v.to_le_bytes()));
        }
    }
    Ok(found)
}

/// The last length-delimited value with this number.
pub(super) fn bytes_field(bytes: &[u8], wanted: u32) -> Result<Option<&[u8]>, WireError> {
    let mut reader = Reader::new(bytes);
    let mut found = None;
    while let Some((number, wire)) = reader.next()? {
        if let (true, WireValue::Bytes(v)) = (number == wanted, wire) {
            found = Some(v);
        }
    }
    Ok(found)
}
