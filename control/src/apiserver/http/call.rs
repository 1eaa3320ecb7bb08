//! One request on its way through the server.

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Method, header};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;

use super::authn::Identity;
use super::negotiate::{Endpoint, Form, negotiate};
use super::route::{Query, ResourcePath};
use crate::apiserver::codec::BodyFormat;
use crate::status::ApiError;

/// Largest request body.
pub(super) const BODY_BYTES: usize = 3 << 20;
/// So much of a larger body is read and dropped: most clients look for the answer only after they have sent all.
const DRAINED_BYTES: usize = 16 << 20;

#[derive(Debug)]
pub(super) struct Call {
    pub(super) identity: Identity,
    pub(super) method: Method,
    pub(super) headers: HeaderMap,
    pub(super) query: Query,
    pub(super) path: ResourcePath,
    /// `None` once it was read.
    pub(super) body: Option<Incoming>,
}

impl Call {
    pub(super) fn header(&self, name: header::HeaderName) -> &str {
        self.headers
            .get(name)
            .and_then(|v| v.to_str().ok())
            .unwrap_or_default()
    }

    pub(super) fn form(&self, endpoint: Endpoint) -> Result<Form, ApiError> {
        negotiate(self.header(header::ACCEPT), endpoint)
    }

    pub(super) fn user_agent(&self) -> &str {
        self.header(header::USER_AGENT)
    }

    /// The media type of the body, without parameters.
    pub(super) fn content_type(&self) -> String {
        let full = self.header(header::CONTENT_TYPE);
        full.split(';')
            .next()
            .unwrap_or_default()
            .trim()
            .to_ascii_lowercase()
    }

    /// How the body is written. No Content-Type means JSON.
    pub(super) fn body_format(&self) -> Result<BodyFormat, ApiError> {
        match self.content_type().as_str() {
            "" | "application/json" => Ok(BodyFormat::Json),
            "application/yaml" => Ok(BodyFormat::Yaml),
            "application/vnd.kubernetes.protobuf" => Ok(BodyFormat::Protobuf),
            _ => Err(unsupported(
                "application/json, application/yaml, application/vnd.kubernetes.protobuf",
            )),
        }
    }

    /// The whole body.
    pub(super) async fn read_body(&mut self) -> Result<Bytes, ApiError> {
        let Some(mut body) = self.body.take() else {
            return Ok(Bytes::new());
        };
        let (mut kept, mut total) = (BytesMut::new(), 0_usize);
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|e| {
                ApiError::bad_request(format!("the body of the request broke off: {e}"))
            })?;
            let Ok(data) = frame.into_data() else {
                continue;
            };
            total = total.saturating_add(data.len());
            if total <= BODY_BYTES {
                kept.extend_from_slice(&data);
            } else if total > BODY_BYTES + DRAINED_BYTES {
                break;
            }
        }
        if total > BODY_BYTES {
            return Err(too_large());
        }
        Ok(kept.freeze())
    }
}

fn too_large() -> ApiError {
    let message = format!("Request entity too large: limit is {BODY_BYTES}");
    ApiError::new(413, "RequestEntityTooLarge", message)
}

/// 415 that names what the endpoint reads.
pub(super) fn unsupported(accepted: &str) -> ApiError {
    let message = format!(
        "the body of the request was in an unknown format - accepted media types include: {accepted}"
    );
    ApiError::new(415, "UnsupportedMediaType", message)
}
