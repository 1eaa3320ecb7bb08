//! Gives a decoded JSON object the form that typed clients produce: fields of the right type only, no nulls, nothing
//! empty that is left out of JSON, canonical quantities and times.

use serde_json::{Map, Value};

use super::quantity::Quantity;
use super::{Kind, Schema, Type, schema, time};

/// A value that cannot be a value of its field.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct FieldError {
    pub message: String,
}

/// Unknown fields that are named in one answer; further ones are dropped without a word.
pub const MAX_REPORTED: usize = 100;

/// Normalises in place and returns the paths of fields that the type does not have, which are removed.
///
/// # Errors
/// For a value of the wrong type, with its path.
pub fn normalize(t: &'static Type, object: &mut Value) -> Result<Vec<String>, FieldError> {
    normalize_with(t, object, false)
}

/// [`normalize`], but empty values stay where they were given: to an apply they mean something.
///
/// # Errors
/// For a value of the wrong type, with its path.
pub fn normalize_keeping_empty(
    t: &'static Type,
    object: &mut Value,
) -> Result<Vec<String>, FieldError> {
    normalize_with(t, object, true)
}

fn normalize_with(
    t: &'static Type,
    object: &mut Value,
    keep_empty: bool,
) -> Result<Vec<String>, FieldError> {
    let mut walk = Walk {
        schema: schema(),
        path: Vec::new(),
        unknown: Vec::new(),
        keep_empty,
    };
    walk.object(t, object)?;
    Ok(walk.unknown)
}

enum Step {
    Field(&'static str),
    Key(String),
    Index(usize),
}

struct Walk {
    schema: &'static Schema,
    path: Vec<Step>,
    unknown: Vec<String>,
    keep_empty: bool,
}

impl Walk {
    fn object(&mut self, t: &'static Type, value: &mut Value) -> Result<(), FieldError> {
        let Value::Object(map) = value else {
            return Err(self.mismatch(value, t.name));
        };
        let mut failure = None;
        map.retain(|key, value| {
            if failure.is_some() {
                return true;
            }
            match self.member(t, key, value) {
                Ok(keep) => keep,
                Err(error) => {
                    failure = Some(error);
                    true
                }
            }
        });
        failure.map_or(Ok(()), Err)
    }

    /// Whether the member stays.
    fn member(
        &mut self,
        t: &'static Type,
        key: &str,
        value: &mut Value,
    ) -> Result<bool, FieldError> {
        let Some(field) = self.schema.field(t, key) else {
            if self.unknown.len() < MAX_REPORTED {
                let path = self.text_with(key);
                self.unknown.push(path);
            }
            return Ok(false);
        };
        if value.is_null() {
            return Ok(matches!(field.kind, Kind::Any | Kind::Json));
        }
        self.path.push(Step::Field(field.json));
        self.value(&field.kind, value)?;
        self.path.pop();
        Ok(
            self.keep_empty
                || !(field.omit_empty && !field.pointer && is_empty(&field.kind, value)),
        )
    }

    fn value(&mut self, kind: &Kind, value: &mut Value) -> Result<(), FieldError> {
        match kind {
            Kind::Object(id) => {
                if value.is_null() {
                    *value = Value::Object(Map::new());
                }
                self.object(self.schema.get(*id), value)
            }
            Kind::List(inner) => self.list(inner, value),
            Kind::Map(inner) => self.map(inner, value),
            Kind::StringList => self.list(&Kind::String, value),
            Kind::SchemaOrBool | Kind::SchemaOrArray | Kind::SchemaOrStrings => {
                self.schema_union(kind, value)
            }
            _ => self.scalar(kind, value),
        }
    }

    fn list(&mut self, inner: &Kind, value: &mut Value) -> Result<(), FieldError> {
        let Value::Array(items) = value else {
            return Err(self.mismatch(value, "[]"));
        };
        for (index, item) in items.iter_mut().enumerate() {
            self.path.push(Step::Index(index));
            self.value(inner, item)?;
            self.path.pop();
        }
        Ok(())
    }

    fn map(&mut self, inner: &Kind, value: &mut Value) -> Result<(), FieldError> {
        let Value::Object(map) = value else {
            return Err(self.mismatch(value, "map[string]"));
        };
        for (key, item) in map.iter_mut() {
            self.path.push(Step::Key(key.clone()));
            self.value(inner, item)?;
            if *inner == Kind::Quantity
                && let Ok(quantity) = Quantity::from_json(item)
            {
                *item = quantity.rounded_to_millis().to_string().into();
            }
            self.path.pop();
        }
        Ok(())
    }

    /// The schema document's unions: a schema, or the other form.
    fn schema_union(&mut self, kind: &Kind, value: &mut Value) -> Result<(), FieldError> {
        let schema_type = self
            .schema
            .kind("apiextensions.k8s.io", "v1", "CustomResourceDefinition")
            .and_then(|crd| {
                self.schema
                    .kind_at(crd, &["spec", "versions", "schema", "openAPIV3Schema"])
            });
        let Some(Kind::Object(id)) = schema_type else {
            return Ok(());
        };
        match (kind, &mut *value) {
            (Kind::SchemaOrBool, Value::Bool(_)) => Ok(()),
            (Kind::SchemaOrStrings, Value::Array(_)) => self.list(&Kind::String, value),
            (Kind::SchemaOrArray, Value::Array(_)) => self.list(&Kind::Object(*id), value),
            _ => self.object(self.schema.get(*id), value),
        }
    }

    fn scalar(&mut self, kind: &Kind, value: &mut Value) -> Result<(), FieldError> {
        if value.is_null() {
            // Elements of lists and maps: null is the zero value, as in Go.
            *value = zero(kind);
            return Ok(());
        }
        match kind {
            Kind::String if !value.is_string() => Err(self.mismatch(value, "string")),
            Kind::Bool if !value.is_boolean() => Err(self.mismatch(value, "bool")),
            Kind::Double if !value.is_number() => Err(self.mismatch(value, "float64")),
            Kind::Int32
                if !value
                    .as_i64()
                    .is_some_and(|n| i32::try_from(n).is_ok() || u32::try_from(n).is_ok()) =>
            {
                Err(self.mismatch(value, "int32"))
            }
            Kind::Int64 if value.as_i64().is_none() => Err(self.mismatch(value, "int64")),
            Kind::Bytes => self.bytes(value),
            Kind::Quantity => match Quantity::from_json(value) {
                Ok(quantity) => {
                    *value = quantity.to_string().into();
                    Ok(())
                }
                Err(message) => Err(FieldError {
                    message: message.into(),
                }),
            },
            Kind::Time => self.time(value, time::format_time),
            Kind::MicroTime => self.time(value, time::format_micro_time),
            Kind::Duration => match value.as_str().and_then(time::parse_duration) {
                Some(nanos) => {
                    *value = time::format_duration(nanos).into();
                    Ok(())
                }
                None => Err(self.invalid("time: invalid duration", value)),
            },
            Kind::IntOrString if value.is_string() => Ok(()),
            Kind::IntOrString => match value.as_i64().and_then(|n| i32::try_from(n).ok()) {
                Some(_) => Ok(()),
                None => Err(self.mismatch(value, "int32")),
            },
            Kind::FieldsV1 if !value.is_object() => Err(self.mismatch(value, "FieldsV1")),
            _ => Ok(()),
        }
    }

    fn bytes(&self, value: &Value) -> Result<(), FieldError> {
        use base64::Engine as _;
        let Value::String(text) = value else {
            return Err(self.mismatch(value, "[]uint8"));
        };
        match base64::engine::general_purpose::STANDARD.decode(text) {
            Ok(_) => Ok(()),
            Err(error) => Err(FieldError {
                message: format!("illegal base64 data in {}: {error}", self.text()),
            }),
        }
    }

    fn time(
        &self,
        value: &mut Value,
        format: fn(jiff::Timestamp) -> String,
    ) -> Result<(), FieldError> {
        match value.as_str().and_then(time::parse_time) {
            Some(parsed) => {
                *value = format(parsed).into();
                Ok(())
            }
            None => Err(self.invalid("not an RFC 3339 time", value)),
        }
    }

    fn invalid(&self, what: &str, value: &Value) -> FieldError {
        FieldError {
            message: format!("{}: {what}: {value}", self.text()),
        }
    }

    /// The words that Go's decoder uses, which clients show to people.
    fn mismatch(&self, value: &Value, wanted: &str) -> FieldError {
        let found = match value {
            Value::Null => "null".to_owned(),
            Value::Bool(_) => "bool".into(),
            Value::Number(n) => format!("number {n}"),
            Value::String(_) => "string".into(),
            Value::Array(_) => "array".into(),
            Value::Object(_) => "object".into(),
        };
        FieldError {
            message: format!(
                "json: cannot unmarshal {found} into Go struct field {} of type {wanted}",
                self.text()
            ),
        }
    }

    fn text(&self) -> String {
        let mut out = String::new();
        for step in &self.path {
            match step {
                Step::Field(name) => push_name(&mut out, name),
                Step::Key(name) => push_name(&mut out, name),
                Step::Index(index) => out.push_str(&format!("[{index}]")),
            }
        }
        out
    }

    fn text_with(&self, last: &str) -> String {
        let mut out = self.text();
        push_name(&mut out, last);
        out
    }
}

fn push_name(out: &mut String, name: &str) {
    if !out.is_empty() {
        out.push('.');
    }
    out.push_str(name);
}

/// The zero value of an element.
#[must_use]
pub fn zero(kind: &Kind) -> Value {
    match kind {
        Kind::String | Kind::Bytes => Value::String(String::new()),
        Kind::Int32 | Kind::Int64 | Kind::Double | Kind::IntOrString => 0.into(),
        Kind::Bool => false.into(),
        Kind::Quantity => "0".into(),
        Kind::Object(_) => Value::Object(Map::new()),
        _ => Value::Null,
    }
}

/// Whether Go's `omitempty` would leave the value out. Structs never are empty in that sense.
#[must_use]
pub fn is_empty(kind: &Kind, value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(b) => !b,
        Value::Number(n) => n.as_f64() == Some(0.0),
        Value::String(s) => s.is_empty(),
        Value::Array(a) => a.is_empty(),
        Value::Object(map) => matches!(kind, Kind::Map(_)) && map.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(mut spec: Value) -> Result<(Value, Vec<String>), String> {
        let t = schema().kind_of("v1", "Pod").unwrap();
        normalize(t, &mut spec)
            .map(|unknown| (spec, unknown))
            .map_err(|e| e.message)
    }

    #[test]
    fn nulls_and_empty_fields_go_pointers_stay() {
        let (out, unknown) = pod(json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "p", "creationTimestamp": null, "labels": {}},
            "spec": {"nodeName": "", "priority": 0, "hostNetwork": false, "securityContext": {},
                     "containers": [{"name": "c", "resources": {"limits": {"cpu": 0.5}}}]},
        }))
        .unwrap();
        assert_eq!(unknown, Vec::<String>::new());
        assert_eq!(
            out,
            json!({
                "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
                "spec": {"priority": 0, "securityContext": {},
                         "containers": [{"name": "c", "resources": {"limits": {"cpu": "500m"}}}]},
            })
        );
    }

    #[test]
    fn unknown_fields_are_named_with_their_path() {
        let (out, unknown) = pod(json!({
            "metadta": {}, "spec": {"containers": [{"name": "c", "imagee": "x"}]},
        }))
        .unwrap();
        assert_eq!(unknown, ["metadta", "spec.containers[0].imagee"]);
        assert_eq!(out, json!({"spec": {"containers": [{"name": "c"}]}}));
    }

    #[test]
    fn wrong_types_are_refused_with_their_path() {
        let message = pod(json!({"spec": {"containers": "text"}})).unwrap_err();
        assert!(message.contains("cannot unmarshal string") && message.contains("spec.containers"));
        let message = pod(json!({"spec": {"priority": 1.5, "containers": []}})).unwrap_err();
        assert!(message.contains("number 1.5"), "{message}");
        let lots = json!({"spec": {"containers": [{"resources": {"requests": {"cpu": "lots"}}}]}});
        assert!(pod(lots).unwrap_err().contains("quantities must match"));
        let times = json!({"metadata": {"creationTimestamp": "yesterday"}});
        assert!(pod(times).unwrap_err().contains("RFC 3339"));
    }
}
