//! What gives Services the addresses that clients outside the cluster use: the role of a cloud controller manager.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use control_feed::LOAD_BALANCER_CLASS;
use serde_json::Value;

use super::core::{Allocator, Outcome, Request};
use super::pools::Pool;
use crate::controllers::runtime::object::{Key, Object};

/// A source of load-balancer addresses. Calls are repeated until they hold, also after restarts, so they must be
/// idempotent; what a Service has by its status is handed in by [`LoadBalancers::adopt`] before the first one.
pub(super) trait LoadBalancers: Send + Sync + 'static {
    /// Whether this provider gives addresses to such a Service at all.
    fn serves(&self, service: &Value) -> bool;

    /// Takes over what the status of a Service says that it has.
    fn adopt(&self, service: &Value);

    /// What the Service has from now on.
    fn ensure(&self, service: &Value) -> Outcome;

    /// The Service needs nothing any more. True when others may get what it had.
    fn release(&self, key: &Key) -> bool;
}

/// The first provider: addresses from pools, announced by the nodes themselves.
#[derive(Debug, Default)]
pub(super) struct PoolProvider {
    allocator: Mutex<Allocator>,
}

impl PoolProvider {
    fn lock(&self) -> MutexGuard<'_, Allocator> {
        self.allocator
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_pools(&self, pools: Vec<Pool>) {
        self.lock().set_pools(pools);
    }

    /// Addresses that an object uses without having got them here.
    pub(super) fn set_foreign(&self, owner: &Key, addresses: &BTreeSet<IpAddr>) {
        self.lock().set_foreign(owner, addresses);
    }
}

impl LoadBalancers for PoolProvider {
    fn serves(&self, service: &Value) -> bool {
        let class = service.text(&["spec", "loadBalancerClass"]);
        service.text(&["spec", "type"]) == "LoadBalancer"
            && (class.is_empty() || class == LOAD_BALANCER_CLASS)
    }

    fn adopt(&self, service: &Value) {
        let request = Request::of(service);
        self.lock()
            .adopt(&service.key(), &request, &ingress(service));
    }

    fn ensure(&self, service: &Value) -> Outcome {
        self.lock().assign(&service.key(), &Request::of(service))
    }

    fn release(&self, key: &Key) -> bool {
        self.lock().release(key)
    }
}

/// Addresses in the status of a Service.
pub(super) fn ingress(service: &Value) -> Vec<IpAddr> {
    let list = service.items(&["status", "loadBalancer", "ingress"]).iter();
    list.filter_map(|entry| entry.text(&["ip"]).parse().ok())
        .collect()
}

/// `spec.externalIPs`.
pub(super) fn external_ips(service: &Value) -> Vec<IpAddr> {
    let list = service.items(&["spec", "externalIPs"]).iter();
    list.filter_map(|ip| ip.as_str()?.parse().ok()).collect()
}
