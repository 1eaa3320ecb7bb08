//! Counters of CNI operations, for the agent's metrics.

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::wire::Command;

/// Seconds. An ADD takes milliseconds; one that waits for the first snapshot takes seconds.
const BUCKETS: [f64; 9] = [0.001, 0.004, 0.016, 0.064, 0.25, 1.0, 4.0, 15.0, 30.0];

#[derive(Clone, Copy, Debug)]
struct Seconds;

impl MetricConstructor<Histogram> for Seconds {
    fn new_metric(&self) -> Histogram {
        Histogram::new(BUCKETS)
    }
}

/// Cheap to clone; clones share their values.
#[derive(Clone, Debug)]
pub struct Stats {
    operations: Family<[(&'static str, String); 2], Counter>,
    duration: Family<[(&'static str, &'static str); 1], Histogram, Seconds>,
}

impl Default for Stats {
    fn default() -> Self {
        Self {
            operations: Family::default(),
            duration: Family::new_with_constructor(Seconds),
        }
    }
}

impl Stats {
    /// `code` is the CNI error code, 0 for success.
    pub(super) fn record(&self, command: Command, code: u32, took: Duration) {
        let command = match command {
            Command::Add => "ADD",
            Command::Del => "DEL",
            Command::Check => "CHECK",
            Command::Status => "STATUS",
            Command::Gc => "GC",
        };
        let labels = [("command", command.to_owned()), ("code", code.to_string())];
        self.operations.get_or_create(&labels).inc();
        let labels = [("command", command)];
        self.duration
            .get_or_create(&labels)
            .observe(took.as_secs_f64());
    }

    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "weir_cni_operations",
            "CNI requests by command and CNI error code (0 = success)",
            self.operations.clone(),
        );
        registry.register(
            "weir_cni_operation_duration_seconds",
            "Time to serve a CNI request",
            self.duration.clone(),
        );
    }
}
