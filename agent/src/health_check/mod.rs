//! HTTP health checks for load balancers: one port per Service that asks for it, and one for the node.
//!
//! A balancer sends traffic of a Service with externalTrafficPolicy Local only to nodes that have endpoints of it, and
//! asks for that at the Service's `healthCheckNodePort`. Traffic of other Services goes to every node whose proxy works,
//! unless the node is about to go (KEP-3836). Answers have the form that kube-proxy gives them: controllers of clouds
//! rely on it.
//!
//! What to answer is decided here from the desired state; `server` has the sockets.

mod server;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use control_api::desired::{Changes, DesiredState, Name};
use control_api::v1::{Service, ServiceType, TrafficPolicy};
use http::{HeaderValue, Method, Response, StatusCode, header};
use http_body_util::Full;
use serde_json::json;

use crate::compile::services::local_ready;

pub use server::{HealthServer, Listen};

/// Changes that wait longer than this to be programmed make the proxy unhealthy, as with kube-proxy.
const PENDING_AT_MOST: Duration = Duration::from_secs(120);

/// What one port answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceHealth {
    pub port: u16,
    pub name: Name,
    /// Ready endpoints on this node.
    pub local_endpoints: usize,
}

/// The health checks that the changed services want; `None` where a Service wants none.
#[must_use]
pub fn wanted(
    state: &DesiredState,
    changes: &Changes,
    node: &str,
) -> BTreeMap<Name, Option<ServiceHealth>> {
    let names: Box<dyn Iterator<Item = &Name>> = if changes.everything {
        Box::new(state.services.keys())
    } else {
        Box::new(changes.services.iter())
    };
    names
        .map(|name| {
            let port = state.services.get(name).and_then(health_port);
            let health = port.map(|port| ServiceHealth {
                port,
                name: name.clone(),
                local_endpoints: local_ready(state.slices_of(name), node),
            });
            (name.clone(), health)
        })
        .collect()
}

/// Only balancers with policy Local have one that means anything (core/v1 ServiceSpec).
fn health_port(service: &Service) -> Option<u16> {
    let asks = service.r#type() == ServiceType::LoadBalancer
        && service.external_traffic_policy() == TrafficPolicy::Local;
    let port = u16::try_from(service.health_check_node_port).ok()?;
    (asks && port != 0).then_some(port)
}

/// How the node does, for the answers of every port. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct NodeHealth {
    inner: Arc<Mutex<NodeState>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct NodeState {
    /// The oldest change that is not programmed yet.
    pending_since: Option<Instant>,
    /// When the kernel was last equal to the desired state.
    programmed_at: Option<SystemTime>,
    leaving: bool,
}

impl NodeHealth {
    /// There are changes that are not programmed yet.
    pub fn pending(&self) {
        self.with(|state| {
            state.pending_since.get_or_insert_with(Instant::now);
        });
    }

    /// Everything is programmed.
    pub fn programmed(&self) {
        self.with(|state| {
            state.pending_since = None;
            state.programmed_at = Some(SystemTime::now());
        });
    }

    /// The node is about to go, or is not any more.
    pub fn set_leaving(&self, leaving: bool) {
        self.with(|state| state.leaving = leaving);
    }

    fn with<T>(&self, f: impl FnOnce(&mut NodeState) -> T) -> T {
        f(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn is_healthy(&self) -> bool {
        let pending = self.with(|state| state.pending_since);
        pending.is_none_or(|since| since.elapsed() <= PENDING_AT_MOST)
    }

    /// The answer at the node's port. `/livez` leaves out whether the node is about to go.
    fn answer(&self, method: &Method, path: &str) -> Response<Full<Bytes>> {
        if let Some(refused) = refuse_method(method) {
            return refused;
        }
        let state = self.with(|state| *state);
        let healthy = self.is_healthy();
        let good = match path {
            "/healthz" => healthy && !state.leaving,
            "/livez" => healthy,
            _ => return text(StatusCode::NOT_FOUND, "there are /healthz and /livez\n"),
        };
        let time = |at: SystemTime| {
            jiff::Timestamp::try_from(at)
                .map(|at| at.to_string())
                .unwrap_or_default()
        };
        let body = json!({
            "lastUpdated": state.programmed_at.map(time),
            "currentTime": time(SystemTime::now()),
            "nodeEligible": !state.leaving,
        });
        answer(good, &body)
    }
}

impl ServiceHealth {
    /// The answer at the Service's port, whatever the path.
    fn answer(&self, node: &NodeHealth, method: &Method) -> Response<Full<Bytes>> {
        if let Some(refused) = refuse_method(method) {
            return refused;
        }
        let healthy = node.is_healthy();
        let body = json!({
            "service": { "namespace": self.name.namespace, "name": self.name.name },
            "localEndpoints": self.local_endpoints,
            "serviceProxyHealthy": healthy,
        });
        let mut response = answer(healthy && self.local_endpoints > 0, &body);
        response.headers_mut().insert(
            "x-load-balancing-endpoint-weight",
            HeaderValue::from(self.local_endpoints),
        );
        response
    }
}

fn refuse_method(method: &Method) -> Option<Response<Full<Bytes>>> {
    let read = method == Method::GET || method == Method::HEAD;
    (!read).then(|| text(StatusCode::METHOD_NOT_ALLOWED, "use GET\n"))
}

fn answer(good: bool, body: &serde_json::Value) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body.to_string())));
    if !good {
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    }
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    // A balancer must not stay connected to a port that its Service has given up.
    headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    headers.insert(
        header::X_CONTENT_TYPE_OPTIONS,
        HeaderValue::from_static("nosniff"),
    );
    response
}

fn text(status: StatusCode, body: &'static str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from_static(body.as_bytes())));
    *response.status_mut() = status;
    response
}

#[cfg(test)]
mod tests;
