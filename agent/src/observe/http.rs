//! The endpoints: a small HTTP server on TCP (metrics, health) and on a socket for `weirctl` (the same, and reports).

use std::convert::Infallible;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, Uri, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use super::{Observe, ObserveError};

/// Connections at once on each listener; the next ones wait to be accepted.
const MAX_CONNECTIONS: usize = 32;
/// A client that has not sent its request in this time is cut off.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Who is asking: the socket's clients are root and may see everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Door {
    Tcp,
    Unix,
}

pub(super) async fn serve_tcp(
    observe: Observe,
    address: SocketAddr,
    shutdown: CancellationToken,
) -> Result<(), ObserveError> {
    let listener = TcpListener::bind(address)
        .await
        .map_err(|source| ObserveError::Listen { address, source })?;
    tokio::spawn(async move {
        let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            let Ok(permit) = Arc::clone(&permits).acquire_owned().await else {
                return;
            };
            tokio::select! {
                () = shutdown.cancelled() => return,
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => spawn(observe.clone(), stream, Door::Tcp, permit),
                    Err(_) => tokio::time::sleep(ACCEPT_RETRY).await,
                },
            }
        }
    });
    Ok(())
}

pub(super) fn serve_unix(
    observe: Observe,
    path: PathBuf,
    shutdown: CancellationToken,
) -> Result<(), ObserveError> {
    let fail = |action| {
        let path = path.clone();
        move |source| ObserveError::Socket {
            action,
            path,
            source,
        }
    };
    // Under its name the socket is only ever seen with its final mode.
    let fresh = path.with_extension("new");
    let _ = fs::remove_file(&fresh);
    let listener = UnixListener::bind(&fresh).map_err(fail("bind"))?;
    fs::set_permissions(&fresh, fs::Permissions::from_mode(0o600))
        .map_err(fail("set the mode of"))?;
    fs::rename(&fresh, &path).map_err(fail("publish"))?;
    tokio::spawn(async move {
        let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            let Ok(permit) = Arc::clone(&permits).acquire_owned().await else {
                return;
            };
            tokio::select! {
                () = shutdown.cancelled() => {
                    let _ = fs::remove_file(&path);
                    return;
                }
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => spawn(observe.clone(), stream, Door::Unix, permit),
                    Err(_) => tokio::time::sleep(ACCEPT_RETRY).await,
                },
            }
        }
    });
    Ok(())
}

fn spawn(
    observe: Observe,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    door: Door,
    permit: OwnedSemaphorePermit,
) {
    connection(stream, permit, move |request| {
        respond(&observe, request.method(), request.uri(), door)
    });
}

/// Answers the requests of one connection until it ends; the permit is given back then.
pub(crate) fn connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    permit: OwnedSemaphorePermit,
    answer: impl Fn(&Request<Incoming>) -> Response<Full<Bytes>> + Send + Sync + 'static,
) {
    tokio::spawn(async move {
        let _permit = permit;
        let service = service_fn(move |request: Request<Incoming>| {
            let response = answer(&request);
            async move { Ok::<_, Infallible>(response) }
        });
        // A client that breaks off is no concern of the agent.
        let _ = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEADER_TIMEOUT)
            .serve_connection(TokioIo::new(stream), service)
            .await;
    });
}

fn respond(observe: &Observe, method: &Method, uri: &Uri, door: Door) -> Response<Full<Bytes>> {
    if method != Method::GET && method != Method::HEAD {
        return text(StatusCode::METHOD_NOT_ALLOWED, "use GET\n".into());
    }
    match (uri.path(), door) {
        ("/metrics", _) => metrics(observe),
        // Answering at all is the proof: what can hang has its own time limits.
        ("/livez", _) => text(StatusCode::OK, "ok\n".into()),
        ("/readyz", _) => {
            let ready = observe.checks().is_ready();
            let status = if ready {
                StatusCode::OK
            } else {
                StatusCode::SERVICE_UNAVAILABLE
            };
            text(status, observe.checks().text())
        }
        ("/v1/status", Door::Unix) => json(&observe.status_report()),
        ("/v1/services", Door::Unix) => json(&observe.services_report()),
        ("/v1/addresses", Door::Unix) => match observe.addresses_report() {
            Some(addresses) => json(&addresses),
            None => text(
                StatusCode::SERVICE_UNAVAILABLE,
                "the pods of this node are not adopted yet\n".into(),
            ),
        },
        ("/v1/flows", Door::Unix) => match observe.flows_report() {
            Some(flows) => json(&flows),
            None => text(
                StatusCode::SERVICE_UNAVAILABLE,
                "the dataplane is not loaded yet\n".into(),
            ),
        },
        (path, Door::Unix) if path.starts_with("/v1/policy/") => {
            policy(observe, path, uri.query().unwrap_or_default())
        }
        _ => text(
            StatusCode::NOT_FOUND,
            "there are /metrics, /livez and /readyz\n".into(),
        ),
    }
}

fn policy(observe: &Observe, path: &str, query: &str) -> Response<Full<Bytes>> {
    let Some(policies) = observe.policies() else {
        return text(
            StatusCode::SERVICE_UNAVAILABLE,
            "policies are not loaded yet\n".into(),
        );
    };
    let asked = |name: &str| {
        let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        let found = pairs.find(|(own, _)| *own == name);
        found.map(|(_, value)| decode(value)).unwrap_or_default()
    };
    match path {
        "/v1/policy/explain" => match policies.explain(&asked("from"), &asked("to")) {
            Ok(said) => json(&said),
            Err(why) => text(StatusCode::NOT_FOUND, why + "\n"),
        },
        "/v1/policy/list" => json(&policies.list()),
        "/v1/policy/diff" => match policies.diff() {
            Ok(diff) => json(&diff),
            Err(why) => text(StatusCode::INTERNAL_SERVER_ERROR, why + "\n"),
        },
        _ => text(
            StatusCode::NOT_FOUND,
            "there are explain, list and diff\n".into(),
        ),
    }
}

/// A value of a query, without its marks.
fn decode(value: &str) -> String {
    let mut bytes = Vec::with_capacity(value.len());
    let mut rest = value.as_bytes();
    while let [first, after @ ..] = rest {
        let hex = |digits: &[u8]| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok();
        match (first, after.get(..2).and_then(hex)) {
            (b'%', Some(byte)) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn metrics(observe: &Observe) -> Response<Full<Bytes>> {
    match observe.metrics_text() {
        Ok(body) => with_type(
            StatusCode::OK,
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
            body,
        ),
        Err(_) => text(
            StatusCode::INTERNAL_SERVER_ERROR,
            "metrics cannot be encoded\n".into(),
        ),
    }
}

fn json(value: &impl Serialize) -> Response<Full<Bytes>> {
    match serde_json::to_string(value) {
        Ok(body) => with_type(StatusCode::OK, "application/json", body),
        Err(error) => text(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("encode the report: {error}\n"),
        ),
    }
}

fn text(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    with_type(status, "text/plain; charset=utf-8", body)
}

fn with_type(
    status: StatusCode,
    content_type: &'static str,
    body: String,
) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let value = header::HeaderValue::from_static(content_type);
    response.headers_mut().insert(header::CONTENT_TYPE, value);
    response
}
