//! Numbers about this process in the text format of Prometheus.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use crate::apiserver::api::Api;

/// What the server counts.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) requests: AtomicU64,
    pub(super) connections: AtomicI64,
}

/// Holds a gauge up by one while it lives.
#[derive(Debug)]
pub(super) struct Held<'a>(&'a AtomicI64);

impl<'a> Held<'a> {
    pub(super) fn new(gauge: &'a AtomicI64) -> Self {
        gauge.fetch_add(1, Ordering::Relaxed);
        Self(gauge)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Counters {
    pub(super) async fn text(&self, api: &Api) -> String {
        let revision = api.revision().await.unwrap_or(0);
        let connections = u64::try_from(self.connections.load(Ordering::Relaxed)).unwrap_or(0);
        let mut text = String::new();
        for (name, kind, help, value) in [
            (
                "weir_store_revision",
                "gauge",
                "Last committed revision of the store.",
                revision,
            ),
            (
                "weir_api_requests_total",
                "counter",
                "Requests answered by the API server.",
                self.requests.load(Ordering::Relaxed),
            ),
            (
                "weir_api_connections",
                "gauge",
                "Open connections to the API server.",
                connections,
            ),
            (
                "process_resident_memory_bytes",
                "gauge",
                "Resident memory of the control plane.",
                resident_bytes().unwrap_or(0),
            ),
        ] {
            let _ = writeln!(
                text,
                "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}"
            );
        }
        text
    }
}

fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
