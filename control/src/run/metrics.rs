//! Plain HTTP for scrapers and probes: /metrics, /livez, /readyz.

use std::fmt::Write as _;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::apiserver::api::Api;
use crate::apiserver::http::Server;
use crate::serve::FeedStatus;

#[derive(Clone)]
struct Sources {
    api: Arc<Api>,
    server: Arc<Server>,
    feed: FeedStatus,
}

pub(super) async fn serve(
    listener: TcpListener,
    api: Arc<Api>,
    server: Arc<Server>,
    feed: FeedStatus,
    shutdown: CancellationToken,
) {
    let router = Router::new()
        .route("/metrics", get(metrics))
        .route("/livez", get(health))
        .route("/readyz", get(ready))
        .with_state(Sources { api, server, feed });
    let served = axum::serve(listener, router)
        .with_graceful_shutdown(async move { shutdown.cancelled().await })
        .await;
    if let Err(error) = served {
        tracing::error!(%error, "serve metrics");
    }
}

async fn health(State(sources): State<Sources>) -> Response {
    match sources.api.revision().await {
        Ok(_) => "ok".into_response(),
        Err(e) => (StatusCode::INTERNAL_SERVER_ERROR, e.message).into_response(),
    }
}

/// Nodes can be served once the feed has read the cluster.
async fn ready(State(sources): State<Sources>) -> Response {
    if !sources.feed.is_synced() {
        let missing = "the node feed has not read the cluster yet";
        return (StatusCode::SERVICE_UNAVAILABLE, missing).into_response();
    }
    health(State(sources)).await
}

async fn metrics(State(sources): State<Sources>) -> Response {
    let revision = sources.api.revision().await.unwrap_or(0);
    let mut text = String::new();
    let mut put = |name: &str, kind: &str, help: &str, value: u64| {
        let _ = writeln!(
            text,
            "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}"
        );
    };
    put(
        "weir_store_revision",
        "gauge",
        "Last committed revision of the store.",
        revision,
    );
    let requests = sources.server.requests();
    put(
        "weir_api_requests_total",
        "counter",
        "Requests answered by the API server.",
        requests,
    );
    put(
        "process_resident_memory_bytes",
        "gauge",
        "Resident memory of the control plane.",
        resident_bytes().unwrap_or(0),
    );
    text.push_str(&sources.feed.metrics_text());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
