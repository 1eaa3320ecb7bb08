//! Documents that are not resources: health, version, OpenAPI.

use std::collections::HashMap;
use std::io::{Read as _, Write as _};
use std::sync::{Arc, Mutex, PoisonError};

use axum::body::Body;
use bytes::Bytes;
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use http::{HeaderValue, Response, header};
use serde_json::{Value, json};

use super::call::Call;
use super::respond::{self, Answer};
use crate::apiserver::api::{Api, no_such_path};
use crate::apiserver::openapi;
use crate::apiserver::registry::Registry;
use crate::status::ApiError;

/// The Kubernetes version whose behaviour clients may expect.
const MAJOR: &str = "1";
const MINOR: &str = "36";
const GIT_VERSION: &str = concat!("v1.36.4+weir.", env!("CARGO_PKG_VERSION"));
/// Asked for with an `@` before the version, which no media type may hold.
const OPENAPI_V2_PROTOBUF: &str = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf";

/// OpenAPI documents, kept compressed once they were asked for.
#[derive(Debug, Default)]
pub(super) struct Documents {
    compressed: Mutex<HashMap<String, Bytes>>,
}

pub(super) fn version() -> Answer {
    let version = json!({
        "major": MAJOR, "minor": MINOR, "gitVersion": GIT_VERSION,
        "emulationMajor": MAJOR, "emulationMinor": MINOR,
        "gitCommit": "", "gitTreeState": "clean", "buildDate": "1970-01-01T00:00:00Z",
        "goVersion": "", "compiler": "rustc",
        "platform": concat!("linux/", "amd64"),
    });
    respond::value(200, super::negotiate::Media::Json, &version)
}

impl Documents {
    /// `/healthz`, `/livez` and `/readyz`: plain text, with `verbose` one line per check.
    pub(super) async fn health(&self, api: &Arc<Api>, check: &str, call: &Call) -> Response<Body> {
        let store = api.health().await;
        let checks = [("ping", None), ("store", store.err().map(|e| e.message))];
        let failed = checks.iter().any(|(_, error)| error.is_some());
        let mut text = String::new();
        for (name, error) in &checks {
            let line = match error {
                None => format!("[+]{name} ok\n"),
                Some(why) => format!("[-]{name} failed: {why}\n"),
            };
            text.push_str(&line);
        }
        if failed {
            text.push_str(&format!("{check} check failed\n"));
            return respond::bytes(500, "text/plain; charset=utf-8", text);
        }
        if call.query.has("verbose") {
            text.push_str(&format!("{check} check passed\n"));
        } else {
            "ok".clone_into(&mut text);
        }
        respond::bytes(200, "text/plain; charset=utf-8", text)
    }

    pub(super) fn openapi_v2(&self, registry: &Registry, call: &Call) -> Answer {
        let accept = call.header(header::ACCEPT);
        if accept.contains("proto-openapi") {
            let make = || Some(openapi::v2_protobuf(registry));
            return self.document("v2.pb", OPENAPI_V2_PROTOBUF, call, make);
        }
        let make = || json_bytes(&openapi::v2_document(registry));
        self.document("v2.json", "application/json", call, make)
    }

    pub(super) fn openapi_v3_index(&self, registry: &Registry, call: &Call) -> Answer {
        let make = || json_bytes(&openapi::v3_index(registry));
        self.document("v3", "application/json", call, make)
    }

    pub(super) fn openapi_v3(&self, registry: &Registry, path: &str, call: &Call) -> Answer {
        if call.header(header::ACCEPT).contains("proto-openapi")
            && !call.header(header::ACCEPT).contains("json")
        {
            return Err(ApiError::new(
                406,
                "NotAcceptable",
                "only the following media types are accepted: application/json",
            ));
        }
        let make = || {
            openapi::v3_document(registry, path)
                .as_ref()
                .and_then(json_bytes)
        };
        self.document(&format!("v3/{path}"), "application/json", call, make)
    }

    fn document(
        &self,
        key: &str,
        content_type: &str,
        call: &Call,
        make: impl FnOnce() -> Option<Vec<u8>>,
    ) -> Answer {
        let failed = |e: std::io::Error| {
            ApiError::new(
                500,
                "InternalError",
                format!("Internal error occurred: {key}: {e}"),
            )
        };
        let mut kept = self
            .compressed
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let compressed = match kept.get(key) {
            Some(found) => found.clone(),
            None => {
                let document = make().ok_or_else(no_such_path)?;
                let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
                encoder.write_all(&document).map_err(failed)?;
                let compressed = Bytes::from(encoder.finish().map_err(failed)?);
                kept.insert(key.to_owned(), compressed.clone());
                compressed
            }
        };
        drop(kept);
        if call.header(header::ACCEPT_ENCODING).contains("gzip") {
            let mut response = respond::bytes(200, content_type, compressed);
            let gzip = HeaderValue::from_static("gzip");
            response
                .headers_mut()
                .insert(header::CONTENT_ENCODING, gzip);
            return Ok(response);
        }
        let mut document = Vec::new();
        GzDecoder::new(&compressed[..])
            .read_to_end(&mut document)
            .map_err(failed)?;
        Ok(respond::bytes(200, content_type, document))
    }
}

fn json_bytes(value: &Value) -> Option<Vec<u8>> {
    serde_json::to_vec(value).ok()
}
