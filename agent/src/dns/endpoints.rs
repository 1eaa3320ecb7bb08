//! Health, readiness and metrics over HTTP, at CoreDNS's paths and ports.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use bytes::Bytes;
use http::{Response, StatusCode, header};
use http_body_util::Full;
use prometheus_client::registry::Registry;
use socket2::{Domain, Socket, Type};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;

use super::forward::lock;
use super::metrics::{DnsMetrics, Metrics};
use super::zone::Zone;
use crate::observe::http::connection;

/// Connections at once on each address; the next ones wait to be accepted.
const MAX_CONNECTIONS: usize = 32;
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
const BACKLOG: i32 = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Page {
    Health,
    Ready,
    Metrics,
}

/// What the pages say.
#[derive(Debug)]
pub(super) struct Status {
    registry: Registry,
    zone: Arc<RwLock<Zone>>,
    kubernetes: AtomicBool,
    ending: AtomicBool,
}

impl Status {
    pub(super) fn new(metrics: Arc<Metrics>, zone: Arc<RwLock<Zone>>) -> Self {
        let mut registry = Registry::default();
        DnsMetrics(metrics).register(&mut registry);
        Self {
            registry,
            zone,
            kubernetes: AtomicBool::new(false),
            ending: AtomicBool::new(false),
        }
    }

    /// Whether names of the cluster are served, so that there is something to wait for.
    pub(super) fn set_kubernetes(&self, served: bool) {
        self.kubernetes.store(served, Ordering::Relaxed);
    }

    /// From now on clients should go elsewhere.
    pub(super) fn set_ending(&self) {
        self.ending.store(true, Ordering::Relaxed);
    }

    fn is_ready(&self) -> bool {
        let zone = self.zone.read().unwrap_or_else(PoisonError::into_inner);
        let synced = zone.synced || !self.kubernetes.load(Ordering::Relaxed);
        synced && !self.ending.load(Ordering::Relaxed)
    }

    fn page(&self, pages: &[Page], path: &str) -> Response<Full<Bytes>> {
        let page = match path {
            "/health" => Page::Health,
            "/ready" => Page::Ready,
            "/metrics" => Page::Metrics,
            _ => {
                return answer(
                    StatusCode::NOT_FOUND,
                    "there is /health, /ready or /metrics\n",
                );
            }
        };
        if !pages.contains(&page) {
            return answer(StatusCode::NOT_FOUND, "not served on this port\n");
        }
        match page {
            Page::Health => answer(StatusCode::OK, "OK"),
            Page::Ready if self.is_ready() => answer(StatusCode::OK, "OK"),
            Page::Ready => answer(StatusCode::SERVICE_UNAVAILABLE, "kubernetes"),
            Page::Metrics => {
                let mut text = String::new();
                match prometheus_client::encoding::text::encode(&mut text, &self.registry) {
                    Ok(()) => answer(StatusCode::OK, text),
                    Err(_) => answer(
                        StatusCode::INTERNAL_SERVER_ERROR,
                        "metrics cannot be encoded\n",
                    ),
                }
            }
        }
    }
}

fn answer(status: StatusCode, body: impl Into<String>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body.into())));
    *response.status_mut() = status;
    let text = header::HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, text);
    response
}

/// The listeners that are open, and what each serves.
#[derive(Debug)]
pub(super) struct Endpoints {
    status: Arc<Status>,
    open: Mutex<BTreeMap<SocketAddr, (Vec<Page>, AbortHandle)>>,
}

impl Drop for Endpoints {
    fn drop(&mut self) {
        self.open(&BTreeMap::new());
    }
}

impl Endpoints {
    pub(super) fn new(status: Arc<Status>) -> Self {
        Self {
            status,
            open: Mutex::default(),
        }
    }

    /// Serves these pages and no others. A port that somebody else has is tried again with the next call; names are
    /// served all the same.
    pub(super) fn open(&self, wanted: &BTreeMap<SocketAddr, Vec<Page>>) {
        let mut open = lock(&self.open);
        open.retain(|address, (pages, task)| {
            let keep = wanted.get(address) == Some(pages);
            if !keep {
                task.abort();
            }
            keep
        });
        for (address, pages) in wanted {
            if open.contains_key(address) {
                continue;
            }
            match listen(*address) {
                Ok(listener) => {
                    let serving = serve(listener, Arc::clone(&self.status), pages.clone());
                    let task = tokio::spawn(serving).abort_handle();
                    open.insert(*address, (pages.clone(), task));
                }
                Err(error) => {
                    tracing::warn!(%address, ?pages, %error, "listen for HTTP of DNS; it is tried again");
                }
            }
        }
    }
}

/// The unspecified address of IPv6 takes IPv4 as well; where there is no IPv6, that of IPv4 stands in.
fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let bind = |address: SocketAddr| -> std::io::Result<TcpListener> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        socket.set_reuse_address(true)?;
        if address.is_ipv6() {
            socket.set_only_v6(false)?;
        }
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        TcpListener::from_std(socket.into())
    };
    let unspecified = address.is_ipv6() && address.ip().is_unspecified();
    match bind(address) {
        Err(error) if unspecified && error.kind() != std::io::ErrorKind::AddrInUse => {
            bind(SocketAddr::from(([0, 0, 0, 0], address.port())))
        }
        bound => bound,
    }
}

async fn serve(listener: TcpListener, status: Arc<Status>, pages: Vec<Page>) {
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let pages: Arc<[Page]> = pages.into();
    loop {
        let Ok(permit) = Arc::clone(&permits).acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, _)) => {
                let (status, pages) = (Arc::clone(&status), Arc::clone(&pages));
                connection(stream, permit, move |request| {
                    status.page(&pages, request.uri().path())
                });
            }
            Err(_) => tokio::time::sleep(ACCEPT_RETRY).await,
        }
    }
}
