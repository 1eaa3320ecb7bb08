//! Counters, drop reasons, metrics, health endpoints, and what `weirctl` shows.
//!
//! The other rooms hand in what they have; nothing that is observed here ever becomes desired state.

mod collect;
mod health;
pub(crate) mod http;
mod report;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

pub use collect::Dataplane;
pub use health::{Check, Checks};
pub use report::{
    AddressesReport, AttachmentReport, CollectorReport, CounterReport, DnsReport, FeedReport,
    FlowTableReport, FlowsReport, LatencyReport, PortReport, ProgrammedReport, RestingReport,
    ServiceReport, StatusReport,
};

use crate::cni_api::Attachments;
use crate::config::Config;
use crate::dns::DnsHandle;
use crate::feed::FeedHandle;
use crate::kernel::Kernel;
use crate::policy::{DiffReport, DropCounters, Enforcer, Explanation, PolicyList};

/// Name of the socket for `weirctl` in the run directory.
pub const SOCKET_NAME: &str = "agent.sock";

/// Seconds from the API's commit to the kernel.
const LATENCY_BUCKETS: [f64; 12] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0,
];
/// Latencies kept for the percentiles of `weirctl status`.
const LATENCIES_KEPT: usize = 1024;

/// Why the endpoints could not be served.
#[derive(Debug, thiserror::Error)]
pub enum ObserveError {
    #[error(
        "serve metrics and health on {address}: {source}; set observe.listen to a free address"
    )]
    Listen {
        address: SocketAddr,
        source: std::io::Error,
    },
    #[error("{action} the weirctl socket {path}: {source}")]
    Socket {
        action: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
}

/// The observing part of the agent. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Observe {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    node_name: String,
    started: Instant,
    registry: Mutex<Registry>,
    checks: Checks,
    feed: OnceLock<FeedHandle>,
    dns: OnceLock<DnsHandle>,
    dataplane: OnceLock<Arc<dyn Dataplane>>,
    attachments: OnceLock<Arc<Attachments>>,
    policies: OnceLock<Policies>,
    latency: Histogram,
    apply_duration: Histogram,
    operations: Counter,
    latencies_us: Mutex<VecDeque<u64>>,
}

/// Who is asked about policies.
#[derive(Debug)]
struct Policies {
    kernel: Arc<Kernel>,
    enforcer: Arc<Enforcer>,
    feed: FeedHandle,
}

/// Flows of each family that are compared with staged policies.
const MOST_FLOWS: usize = 100_000;

impl Policies {
    fn explain(&self, from: &str, to: &str) -> Result<Vec<Explanation>, String> {
        let state = self.feed.state();
        self.enforcer.explain(&state, &*self.kernel, from, to)
    }

    fn list(&self) -> PolicyList {
        self.enforcer.list()
    }

    fn diff(&self) -> Result<DiffReport, String> {
        let flows = self.kernel.some_flows(MOST_FLOWS);
        let flows = flows.map_err(|e| e.to_string())?;
        Ok(self.enforcer.diff(&self.feed.state(), &flows))
    }
}

/// Starts to serve: /metrics, /livez and /readyz by TCP; the same and `weirctl`'s data on a socket of the run directory.
///
/// # Errors
/// [`ObserveError`] when the address or the socket cannot be had.
pub async fn start(
    config: &Config,
    checks: Checks,
    shutdown: CancellationToken,
) -> Result<Observe, ObserveError> {
    let observe = Observe::new(&config.node_name, checks);
    http::serve_tcp(observe.clone(), config.observe.listen, shutdown.clone()).await?;
    http::serve_unix(observe.clone(), config.run_dir.join(SOCKET_NAME), shutdown)?;
    Ok(observe)
}

impl Observe {
    fn new(node_name: &str, checks: Checks) -> Self {
        let inner = Inner {
            node_name: node_name.to_owned(),
            started: Instant::now(),
            registry: Mutex::default(),
            checks,
            feed: OnceLock::new(),
            dns: OnceLock::new(),
            dataplane: OnceLock::new(),
            attachments: OnceLock::new(),
            policies: OnceLock::new(),
            latency: Histogram::new(LATENCY_BUCKETS),
            apply_duration: Histogram::new(LATENCY_BUCKETS),
            operations: Counter::default(),
            latencies_us: Mutex::default(),
        };
        let mut registry = Registry::default();
        let version = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("weir_agent", "The running agent", version);
        registry.register(
            "weir_commit_to_kernel_seconds",
            "Time from the API's commit of a change to the kernel that acts on it",
            inner.latency.clone(),
        );
        registry.register(
            "weir_apply_duration_seconds",
            "Time of one comparison of desired state and kernel tables",
            inner.apply_duration.clone(),
        );
        registry.register(
            "weir_apply_operations",
            "Changes of kernel table entries",
            inner.operations.clone(),
        );
        registry.register_collector(Box::new(collect::Process));
        *lock(&inner.registry) = registry;
        Self {
            inner: Arc::new(inner),
        }
    }

    /// What /readyz waits for.
    #[must_use]
    pub fn checks(&self) -> &Checks {
        &self.inner.checks
    }

    /// Shows the feed.
    pub fn set_feed(&self, feed: FeedHandle) {
        self.collect(collect::Feed(feed.clone()));
        let _ = self.inner.feed.set(feed);
    }

    /// Shows cluster DNS.
    pub fn set_dns(&self, dns: DnsHandle) {
        dns.metrics().register(&mut lock(&self.inner.registry));
        let _ = self.inner.dns.set(dns);
    }

    /// Shows the kernel's counters.
    pub fn set_dataplane(&self, dataplane: Arc<dyn Dataplane>) {
        self.collect(collect::Kernel(Arc::clone(&dataplane)));
        let _ = self.inner.dataplane.set(dataplane);
    }

    /// Shows pod attachments and their addresses.
    pub fn set_attachments(&self, attachments: Arc<Attachments>) {
        self.collect(collect::Pods(Arc::clone(&attachments)));
        let _ = self.inner.attachments.set(attachments);
    }

    /// Answers questions about policies, and shows their metrics.
    pub fn set_policies(&self, kernel: Arc<Kernel>, enforcer: Arc<Enforcer>, feed: FeedHandle) {
        enforcer.stats().register(&mut lock(&self.inner.registry));
        self.collect(DropCounters(Arc::clone(&kernel)));
        let policies = Policies {
            kernel,
            enforcer,
            feed,
        };
        let _ = self.inner.policies.set(policies);
    }

    fn policies(&self) -> Option<&Policies> {
        self.inner.policies.get()
    }

    /// Lets another room add metrics of its own.
    pub fn register(&self, add: impl FnOnce(&mut Registry)) {
        add(&mut lock(&self.inner.registry));
    }

    /// Notes one pass of the apply loop: the commit time of the oldest change in it, how long the pass took and how
    /// many entries it changed.
    pub fn applied(&self, committed_at_us: Option<i64>, took: Duration, changed: usize) {
        self.inner.apply_duration.observe(took.as_secs_f64());
        self.inner.operations.inc_by(changed as u64);
        let Some(committed_at_us) = committed_at_us else {
            return;
        };
        let committed = UNIX_EPOCH + Duration::from_micros(committed_at_us.unsigned_abs());
        let latency = SystemTime::now()
            .duration_since(committed)
            .unwrap_or_default();
        self.inner.latency.observe(latency.as_secs_f64());
        let mut kept = lock(&self.inner.latencies_us);
        if kept.len() >= LATENCIES_KEPT {
            kept.pop_front();
        }
        kept.push_back(u64::try_from(latency.as_micros()).unwrap_or(u64::MAX));
    }

    fn collect(&self, collector: impl prometheus_client::collector::Collector) {
        lock(&self.inner.registry).register_collector(Box::new(collector));
    }

    /// The exposition of every metric.
    fn metrics_text(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &lock(&self.inner.registry))?;
        Ok(text)
    }
}

/// The values behind these locks are valid after any panic of a holder.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
