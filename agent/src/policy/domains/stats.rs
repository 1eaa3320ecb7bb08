//! Metrics of learnt names.

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::compile::policy::DomainLimit;

/// Seconds.
const BUCKETS: [f64; 8] = [0.000_1, 0.000_5, 0.002, 0.01, 0.05, 0.25, 1.0, 2.0];

/// Cheap to clone; clones share their values.
#[derive(Clone, Debug)]
pub struct DomainStats {
    names: Gauge,
    addresses: Gauge,
    refused: Family<[(&'static str, &'static str); 1], Counter>,
    wait: Histogram,
    late: Counter,
}

impl Default for DomainStats {
    fn default() -> Self {
        let refused = Family::default();
        for limit in DomainLimit::ALL {
            drop(refused.get_or_create(&[("limit", limit.name())]));
        }
        Self {
            names: Gauge::default(),
            addresses: Gauge::default(),
            refused,
            wait: Histogram::new(BUCKETS),
            late: Counter::default(),
        }
    }
}

impl DomainStats {
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "weir_policy_domain_names",
            "Domain names of rules of which addresses are known",
            self.names.clone(),
        );
        registry.register(
            "weir_policy_domain_addresses",
            "Known addresses of domain names of rules",
            self.addresses.clone(),
        );
        registry.register(
            "weir_policy_domain_refused",
            "Addresses of domain names that were not learnt, by the limit in their way: rules do not match them",
            self.refused.clone(),
        );
        registry.register(
            "weir_policy_domain_wait_seconds",
            "Time that DNS answers waited for their addresses to be in the kernel",
            self.wait.clone(),
        );
        registry.register(
            "weir_policy_domain_late",
            "DNS answers that went out before their addresses were in the kernel",
            self.late.clone(),
        );
    }

    pub(super) fn known(&self, names: usize, addresses: usize) {
        let number = |count| i64::try_from(count).unwrap_or(i64::MAX);
        self.names.set(number(names));
        self.addresses.set(number(addresses));
    }

    pub(super) fn refused(&self, limit: DomainLimit, addresses: usize) {
        self.refused
            .get_or_create(&[("limit", limit.name())])
            .inc_by(addresses as u64);
    }

    pub(super) fn waited(&self, time: Duration) {
        self.wait.observe(time.as_secs_f64());
    }

    pub(super) fn late(&self) {
        self.late.inc();
    }
}
