//! Counters of what was said on the segment.

use std::sync::atomic::{AtomicI64, AtomicU64};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// Metrics under `weir_announce_`. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    addresses: Gauge<i64, AtomicI64>,
    answers: Counter<u64, AtomicU64>,
    proclamations: Counter<u64, AtomicU64>,
    foreign_claims: Counter<u64, AtomicU64>,
}

impl Stats {
    /// Exports the metrics.
    pub fn register(&self, registry: &mut Registry) {
        let registry = registry.sub_registry_with_prefix("weir_announce");
        let addresses = "Load-balancer addresses that this node answers for";
        registry.register("addresses", addresses, self.addresses.clone());
        let answers = "ARP requests and neighbour solicitations answered";
        registry.register("answers", answers, self.answers.clone());
        let proclamations = "Frames sent unasked to say that an address is here";
        registry.register("proclamations", proclamations, self.proclamations.clone());
        let claims = "Frames in which another host claims an address of this node";
        registry.register("foreign_claims", claims, self.foreign_claims.clone());
    }

    pub(super) fn set_addresses(&self, count: usize) {
        self.addresses.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    pub(super) fn answered(&self) {
        self.answers.inc();
    }

    pub(super) fn proclaimed(&self) {
        self.proclamations.inc();
    }

    pub(super) fn claimed(&self) {
        self.foreign_claims.inc();
    }
}
