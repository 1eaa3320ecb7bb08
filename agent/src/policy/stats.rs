//! Metrics of policies.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::compile::policy::{Compiled, Direction};
use crate::plan::policy::Planner;

/// Seconds.
const BUCKETS: [f64; 8] = [0.000_1, 0.000_5, 0.002, 0.01, 0.05, 0.25, 1.0, 5.0];

/// Cheap to clone; clones share their values.
#[derive(Clone, Debug)]
pub struct Stats {
    policies: Gauge,
    rules: Gauge,
    identities: Gauge,
    shut: Gauge,
    compile: Histogram,
    drops: Family<[(&'static str, &'static str); 1], Counter<u64, AtomicU64>>,
}

impl Default for Stats {
    fn default() -> Self {
        Self {
            policies: Gauge::default(),
            rules: Gauge::default(),
            identities: Gauge::default(),
            shut: Gauge::default(),
            compile: Histogram::new(BUCKETS),
            drops: Family::default(),
        }
    }
}

impl Stats {
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "weir_policy_policies",
            "Policies that select pods of this node",
            self.policies.clone(),
        );
        registry.register(
            "weir_policy_rules",
            "Entries of policy rules in the kernel",
            self.rules.clone(),
        );
        registry.register(
            "weir_policy_identities",
            "Identities that addresses have",
            self.identities.clone(),
        );
        registry.register(
            "weir_policy_shut_pods",
            "Pods to and from which nothing may pass, since their policies are not known or do not fit",
            self.shut.clone(),
        );
        registry.register(
            "weir_policy_compile_duration_seconds",
            "Time to compile a change of policies, peers or pods",
            self.compile.clone(),
        );
        registry.register(
            "weir_policy_drops",
            "Packets that policies dropped, by the direction that refused them",
            self.drops.clone(),
        );
    }

    pub(super) fn compiled(&self, took: Duration) {
        self.compile.observe(took.as_secs_f64());
    }

    pub(super) fn programmed(&self, compiled: &Compiled, planner: &Planner, policies: usize) {
        let pods = compiled.pods.keys();
        let shut = pods.filter(|pod| compiled.why_shut(**pod).is_some());
        self.shut.set(number(shut.count()));
        self.policies.set(number(policies));
        let rules = compiled.rule_sets.values().map(|set| set.len());
        self.rules.set(number(rules.sum()));
        self.identities
            .set(number(planner.present().identity_count()));
    }

    /// Packets that a pod's policies refused.
    pub fn dropped(&self, direction: Direction, packets: u64) {
        self.drops
            .get_or_create(&[("direction", direction.name())])
            .inc_by(packets);
    }
}

fn number(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
