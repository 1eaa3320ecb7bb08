//! Bodies in and out: JSON, YAML and Kubernetes protobuf to JSON values and back. Pure.
//!
//! Objects of known kinds come out as typed clients would write them (see `schema::normalize`). Objects of other kinds
//! are taken as they are.

mod protobuf;
mod strict;

use serde_json::Value;

pub(crate) use protobuf::wire;

use super::registry::Gvk;
use super::schema::normalize::{FieldError, normalize};
use super::schema::schema;
use crate::status::{ApiError, Cause};

/// `fieldValidation` of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldValidation {
    Ignore,
    Warn,
    Strict,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyFormat {
    Json,
    Yaml,
    Protobuf,
}

/// A decoded body and the texts of the `Warning` headers it earned.
#[derive(Clone, Debug)]
pub struct Decoded {
    pub object: Value,
    pub warnings: Vec<String>,
}

/// Decodes a request body. `expected` names the endpoint's kind and fills an absent apiVersion or kind; the caller
/// compares them when they are present. Unknown and duplicate fields of known kinds are dropped, reported as warnings
/// (`Warn`) or refused with 400 (`Strict`).
///
/// # Errors
/// 400 for malformed bodies and strict violations.
pub fn decode_object(
    format: BodyFormat,
    body: &[u8],
    expected: Gvk<'_>,
    validation: FieldValidation,
) -> Result<Decoded, ApiError> {
    let (mut object, mut violations) = match format {
        BodyFormat::Protobuf => {
            let (object, _) = protobuf::decode(body, expected).map_err(|e| malformed(&e))?;
            (object, Vec::new())
        }
        BodyFormat::Json => parsed(strict::parse_json(body))?,
        BodyFormat::Yaml => parsed(strict::parse_yaml(body))?,
    };
    let Value::Object(map) = &mut object else {
        return Err(ApiError::bad_request(
            "the body of the request must be an object",
        ));
    };
    for (key, text) in [
        ("apiVersion", expected.api_version()),
        ("kind", expected.kind.to_owned()),
    ] {
        let member = map.entry(key).or_insert(Value::Null);
        if member.is_null() || member.as_str() == Some("") {
            *member = Value::String(text);
        }
        if !member.is_string() {
            return Err(malformed(&format!("{key} must be a string")));
        }
    }
    let api_version = object["apiVersion"].as_str().unwrap_or_default().to_owned();
    let kind = object["kind"].as_str().unwrap_or_default().to_owned();
    if let Some(t) = schema().kind_of(&api_version, &kind) {
        let unknown = normalize(t, &mut object)
            .map_err(|e| cannot_be_handled(&api_version, &kind, &e.to_string()))?;
        violations.splice(0..0, unknown.iter().map(|path| unknown_field(path)));
    }
    let warnings = match validation {
        FieldValidation::Strict if !violations.is_empty() => {
            let text = format!("strict decoding error: {}", violations.join(", "));
            return Err(cannot_be_handled(&api_version, &kind, &text));
        }
        FieldValidation::Warn => violations,
        _ => Vec::new(),
    };
    Ok(Decoded { object, warnings })
}

/// Reads the configuration of a server-side apply: YAML without rules for its fields.
///
/// # Errors
/// What is wrong with the text.
pub fn parse_yaml(body: &[u8]) -> Result<Value, String> {
    strict::parse_yaml(body).map(|parsed| parsed.value)
}

fn parsed(result: Result<strict::Parsed, String>) -> Result<(Value, Vec<String>), ApiError> {
    let parsed = result.map_err(|e| malformed(&e))?;
    let duplicates = parsed
        .duplicates
        .iter()
        .map(|path| format!("duplicate field \"{path}\""));
    Ok((parsed.value, duplicates.collect()))
}

fn unknown_field(path: &str) -> String {
    format!("unknown field \"{path}\"")
}

fn cannot_be_handled(api_version: &str, kind: &str, why: &str) -> ApiError {
    let (_, version) = super::schema::split_api_version(api_version);
    ApiError::bad_request(format!(
        "{kind} in version \"{version}\" cannot be handled as a {kind}: {why}"
    ))
}

/// Checks an object that a patch produced against its schema: like the field rules of [`decode_object`].
///
/// # Errors
/// 422 for strict violations and fields of the wrong type, with the patch as the field at fault.
pub fn check_fields(
    gvk: Gvk<'_>,
    object: &mut Value,
    validation: FieldValidation,
) -> Result<Vec<String>, ApiError> {
    let Some(t) = schema().kind(gvk.group, gvk.version, gvk.kind) else {
        return Ok(Vec::new());
    };
    let unknown = normalize(t, object).map_err(|FieldError { message }| bad_patch(message))?;
    let violations: Vec<String> = unknown.iter().map(|path| unknown_field(path)).collect();
    match validation {
        FieldValidation::Strict if !violations.is_empty() => Err(bad_patch(format!(
            "strict decoding error: {}",
            violations.join(", ")
        ))),
        FieldValidation::Warn => Ok(violations),
        _ => Ok(Vec::new()),
    }
}

/// 422 that blames the patch.
pub(crate) fn bad_patch(message: String) -> ApiError {
    let mut error = ApiError::new(
        422,
        "Invalid",
        format!(" \"\" is invalid: patch: Invalid value: {message}"),
    );
    error.details.causes = vec![Cause {
        reason: "FieldValueInvalid",
        message: format!("Invalid value: {message}"),
        field: "patch".into(),
    }];
    error
}

/// Encodes an object, list, Status or PartialObjectMetadata(List) in the `k8s\0` envelope.
///
/// # Errors
/// 406 when the kind has no protobuf form.
pub fn encode_protobuf(object: &Value) -> Result<Vec<u8>, ApiError> {
    protobuf::encode(object).ok_or_else(|| {
        let kind = object["kind"].as_str().unwrap_or_default();
        ApiError::new(406, "NotAcceptable", format!("{kind} has no protobuf form"))
    })
}

fn malformed(e: &dyn std::fmt::Display) -> ApiError {
    ApiError::bad_request(format!("the body of the request could not be decoded: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG_MAP: Gvk<'static> = Gvk::new("", "v1", "ConfigMap");

    fn decode(body: &str, validation: FieldValidation) -> Result<Decoded, ApiError> {
        decode_object(BodyFormat::Json, body.as_bytes(), CONFIG_MAP, validation)
    }

    #[test]
    fn strict_names_unknown_and_duplicate_fields() {
        let body = r#"{"apiVersion":"v1","kind":"ConfigMap","immutable":false,"immutable":false,"dta":{}}"#;
        let error = decode(body, FieldValidation::Strict).unwrap_err();
        assert_eq!((error.code, error.reason), (400, "BadRequest"));
        assert_eq!(
            error.message,
            "ConfigMap in version \"v1\" cannot be handled as a ConfigMap: strict decoding error: \
             unknown field \"dta\", duplicate field \"immutable\""
        );
        let warned = decode(body, FieldValidation::Warn).unwrap();
        assert_eq!(
            warned.warnings,
            ["unknown field \"dta\"", "duplicate field \"immutable\""]
        );
        assert!(warned.object.get("dta").is_none());
        assert!(
            decode(body, FieldValidation::Ignore)
                .unwrap()
                .warnings
                .is_empty()
        );
    }

    #[test]
    fn absent_type_is_the_endpoints() {
        let decoded = decode("{}", FieldValidation::Strict).unwrap();
        assert_eq!(decoded.object["kind"], "ConfigMap");
        assert_eq!(decoded.object["apiVersion"], "v1");
    }

    #[test]
    fn malformed_bodies_are_400() {
        for body in [
            "",
            "{\"apiVersion\":\"v1\",\"kind\":",
            "[]",
            "{\"kind\":1}",
            "{} {}",
        ] {
            assert_eq!(
                decode(body, FieldValidation::Ignore).unwrap_err().code,
                400,
                "{body}"
            );
        }
        let error = decode(r#"{"data":{"k":1}}"#, FieldValidation::Ignore).unwrap_err();
        assert_eq!(error.code, 400, "{error}");
    }

    #[test]
    fn a_patch_that_breaks_types_is_422() {
        let mut object = serde_json::json!({"spec": {"replicas": "three"}});
        let gvk = Gvk::new("apps", "v1", "Deployment");
        let error = check_fields(gvk, &mut object, FieldValidation::Warn).unwrap_err();
        assert_eq!(
            (error.code, error.details.causes[0].field.as_str()),
            (422, "patch")
        );
    }
}
