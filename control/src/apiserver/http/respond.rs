//! Answers: objects, Status bodies, warnings.

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use serde_json::{Value, json};

use super::negotiate::Media;
use crate::apiserver::codec;
use crate::status::ApiError;

pub(super) type Answer = Result<Response<Body>, ApiError>;

pub(super) fn bytes(code: u16, content_type: &str, body: impl Into<Bytes>) -> Response<Body> {
    let body: Bytes = body.into();
    let mut response = Response::new(Body::from(body));
    *response.status_mut() =
        StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let value = HeaderValue::from_str(content_type);
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        value.unwrap_or(HeaderValue::from_static("application/octet-stream")),
    );
    headers.insert(
        header::CACHE_CONTROL,
        HeaderValue::from_static("no-cache, private"),
    );
    response
}

/// A value in the media type that was agreed on.
pub(super) fn value(code: u16, media: Media, value: &Value) -> Answer {
    let body = match media {
        Media::Json => serde_json::to_vec(value).map_err(|e| encoding(&e))?,
        Media::Yaml => serde_yaml_ng::to_string(value)
            .map_err(|e| encoding(&e))?
            .into_bytes(),
        Media::Protobuf => codec::encode_protobuf(value)?,
    };
    Ok(bytes(code, media.content_type(), body))
}

fn encoding(error: &dyn std::fmt::Display) -> ApiError {
    ApiError::new(
        500,
        "InternalError",
        format!("Internal error occurred: encode the answer: {error}"),
    )
}

/// An error as a Status; JSON when the agreed type cannot hold it.
pub(super) fn error(media: Media, error: &ApiError) -> Response<Body> {
    status(
        media,
        error.code,
        &error.to_status(),
        error.details.retry_after_s,
    )
}

pub(super) fn status(
    media: Media,
    code: u16,
    status: &Value,
    retry_after_s: u32,
) -> Response<Body> {
    let mut response = value(code, media, status)
        .unwrap_or_else(|_| bytes(code, Media::Json.content_type(), status.to_string()));
    if retry_after_s > 0 {
        response
            .headers_mut()
            .insert(header::RETRY_AFTER, retry_after_s.into());
    }
    response
}

/// Status of a success, with details of what it was about.
pub(super) fn success(details: Value) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success",
        "details": details})
}

/// Adds `Warning: 299` headers.
pub(super) fn warn(mut response: Response<Body>, warnings: &[String]) -> Response<Body> {
    for warning in warnings {
        let quoted = warning.replace('\\', "\\\\").replace('"', "\\\"");
        if let Ok(value) = HeaderValue::from_str(&format!("299 - \"{quoted}\"")) {
            response.headers_mut().append(header::WARNING, value);
        }
    }
    response
}
