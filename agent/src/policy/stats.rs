//! Metrics of policies.

use std::sync::Arc;
use std::time::Duration;

use dataplane_common::reason::DropReason;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::compile::policy::Compiled;
use crate::kernel::{CounterKind, Kernel};
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
    untold: Gauge,
    compile: Histogram,
}

impl Default for Stats {
    fn default() -> Self {
        Self {
            policies: Gauge::default(),
            rules: Gauge::default(),
            identities: Gauge::default(),
            shut: Gauge::default(),
            untold: Gauge::default(),
            compile: Histogram::new(BUCKETS),
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
            "weir_policy_untold_pods",
            "Pods that are open since the control plane does not speak of policies",
            self.untold.clone(),
        );
        registry.register(
            "weir_policy_compile_duration_seconds",
            "Time to compile a change of policies, peers or pods",
            self.compile.clone(),
        );
    }

    pub(super) fn untold(&self, pods: usize) {
        self.untold.set(number(pods));
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
}

fn number(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// Packets that policies dropped, as the kernel counts them.
#[derive(Debug)]
pub struct DropCounters(pub Arc<Kernel>);

/// Reasons of drops, and the direction that each stands for.
const REASONS: [(DropReason, &str); 3] = [
    (DropReason::PolicyEgress, "egress"),
    (DropReason::PolicyIngress, "ingress"),
    (DropReason::PolicyPending, "pending"),
];

impl Collector for DropCounters {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let counters = self.0.counters().unwrap_or_default();
        let mut family = encoder.encode_descriptor(
            "weir_policy_drops",
            "Packets that policies dropped, by the direction that refused them; pending: nothing was known of the pod",
            None,
            MetricType::Counter,
        )?;
        for (reason, direction) in REASONS {
            let found = counters
                .iter()
                .find(|one| one.kind == CounterKind::Drop && one.name == reason.name());
            let labels = [("direction", direction)];
            let packets = ConstCounter::new(found.map_or(0, |one| one.packets));
            packets.encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}
