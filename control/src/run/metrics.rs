//! Plain HTTP for scrapers and probes: /metrics, /livez, /readyz.

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
    match sources.api.health().await {
        Ok(()) => "ok".into_response(),
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
    let mut text = sources.server.metrics().await;
    text.push_str(&sources.feed.metrics_text());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}
