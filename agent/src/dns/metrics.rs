//! Counters of the server, under the names that CoreDNS dashboards use.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hickory_proto::op::ResponseCode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::message::Transport;

/// Seconds. Cluster names answer in microseconds, forwarded ones in up to seconds.
const BUCKETS: [f64; 10] = [
    0.000_05, 0.000_25, 0.001, 0.004, 0.016, 0.064, 0.25, 1.0, 2.0, 4.0,
];

type Labels<const N: usize> = [(&'static str, String); N];

#[derive(Clone, Copy, Debug)]
struct Seconds;

impl MetricConstructor<Histogram> for Seconds {
    fn new_metric(&self) -> Histogram {
        Histogram::new(BUCKETS)
    }
}

#[derive(Debug)]
pub(super) struct Metrics {
    requests: Family<Labels<2>, Counter>,
    responses: Family<Labels<1>, Counter>,
    duration: Histogram,
    pub(super) cache_requests: Counter,
    pub(super) cache_hits: Counter,
    pub(super) cache_misses: Counter,
    pub(super) cache_stale: Counter,
    pub(super) cache_prefetches: Counter,
    cache_entries: Family<Labels<1>, Gauge>,
    forward_requests: Family<Labels<1>, Counter>,
    forward_responses: Family<Labels<2>, Counter>,
    forward_failures: Family<Labels<1>, Counter>,
    forward_duration: Family<Labels<1>, Histogram, Seconds>,
    proxy_duration: Family<Labels<3>, Histogram, Seconds>,
    probe_failures: Family<Labels<2>, Counter>,
    /// Questions while every server of a directive was down.
    pub(super) health_broken: Counter,
    /// Questions beyond max_concurrent.
    pub(super) forward_rejects: Counter,
    pub(super) hosts_entries: Gauge,
    pub(super) reload_failed: Counter,
    /// Upstream servers that lead back here.
    pub(super) loops: Gauge,
    pub(super) programming: Histogram,
    pub(super) dropped: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            requests: Family::default(),
            responses: Family::default(),
            duration: Histogram::new(BUCKETS),
            cache_requests: Counter::default(),
            cache_hits: Counter::default(),
            cache_misses: Counter::default(),
            cache_stale: Counter::default(),
            cache_prefetches: Counter::default(),
            cache_entries: Family::default(),
            forward_requests: Family::default(),
            forward_responses: Family::default(),
            forward_failures: Family::default(),
            forward_duration: Family::new_with_constructor(Seconds),
            proxy_duration: Family::new_with_constructor(Seconds),
            probe_failures: Family::default(),
            health_broken: Counter::default(),
            forward_rejects: Counter::default(),
            hosts_entries: Gauge::default(),
            reload_failed: Counter::default(),
            loops: Gauge::default(),
            programming: Histogram::new(BUCKETS),
            dropped: Counter::default(),
        }
    }
}

impl Metrics {
    pub(super) fn request(&self, transport: Transport, client: SocketAddr) {
        let proto = match transport {
            Transport::Udp => "udp",
            Transport::Tcp => "tcp",
        };
        let family = if client.is_ipv4() { "1" } else { "2" };
        let labels = [("proto", proto.to_owned()), ("family", family.to_owned())];
        self.requests.get_or_create(&labels).inc();
    }

    pub(super) fn response(&self, reply: &[u8], took: Duration) {
        let low = reply.get(3).map_or(0, |flags| flags & 0x0f);
        self.responses
            .get_or_create(&[("rcode", rcode_name(low))])
            .inc();
        self.duration.observe(took.as_secs_f64());
    }

    pub(super) fn forwarded(&self, to: SocketAddr, rcode: u8, took: Duration) {
        let to = to.to_string();
        self.forward_requests
            .get_or_create(&[("to", to.clone())])
            .inc();
        self.forward_duration
            .get_or_create(&[("to", to.clone())])
            .observe(took.as_secs_f64());
        let labels = [("to", to.clone()), ("rcode", rcode_name(rcode))];
        self.forward_responses.get_or_create(&labels).inc();
        let labels = [
            ("proxy_name", PROXY.into()),
            ("to", to),
            ("rcode", rcode_name(rcode)),
        ];
        let duration = self.proxy_duration.get_or_create(&labels);
        duration.observe(took.as_secs_f64());
    }

    pub(super) fn probe_failed(&self, to: SocketAddr) {
        let labels = [("proxy_name", PROXY.into()), ("to", to.to_string())];
        self.probe_failures.get_or_create(&labels).inc();
    }

    /// Answers in all caches, and of them those that are no denials.
    pub(super) fn cached(&self, (all, successes): (usize, usize)) {
        for (kind, count) in [("success", successes), ("denial", all - successes)] {
            let count = i64::try_from(count).unwrap_or(i64::MAX);
            let labels = [("type", kind.into())];
            self.cache_entries.get_or_create(&labels).set(count);
        }
    }

    pub(super) fn forward_failed(&self, to: SocketAddr) {
        let labels = [("to", to.to_string())];
        self.forward_requests.get_or_create(&labels).inc();
        self.forward_failures.get_or_create(&labels).inc();
    }
}

/// What CoreDNS calls the user of its upstream connections.
const PROXY: &str = "forward";

pub(super) fn rcode_name(low: u8) -> String {
    match low {
        0 => "NOERROR".into(),
        1 => "FORMERR".into(),
        2 => "SERVFAIL".into(),
        3 => "NXDOMAIN".into(),
        4 => "NOTIMP".into(),
        5 => "REFUSED".into(),
        other => ResponseCode::from(0, other).to_string(),
    }
}

/// The metrics of a running server, for the registry of the process.
#[derive(Clone, Debug)]
pub struct DnsMetrics(pub(super) Arc<Metrics>);

impl DnsMetrics {
    pub fn register(&self, registry: &mut Registry) {
        let m = &self.0;
        registry.register("coredns_dns_requests", "DNS requests", m.requests.clone());
        registry.register(
            "coredns_dns_responses",
            "DNS responses",
            m.responses.clone(),
        );
        registry.register(
            "coredns_dns_request_duration_seconds",
            "Time to answer",
            m.duration.clone(),
        );
        registry.register(
            "coredns_dns_dropped",
            "Packets without an answer",
            m.dropped.clone(),
        );
        self.register_cache(registry);
        self.register_forward(registry);
        registry.register(
            "coredns_hosts_entries",
            "Names in tables of hosts",
            m.hosts_entries.clone(),
        );
        registry.register(
            "coredns_reload_failed",
            "Configurations that were not taken",
            m.reload_failed.clone(),
        );
        registry.register(
            "weir_dns_upstream_loops",
            "Upstream servers that lead back here and are not asked",
            m.loops.clone(),
        );
        registry.register(
            "coredns_kubernetes_dns_programming_duration_seconds",
            "Time from the API's commit to the answer that shows it",
            m.programming.clone(),
        );
    }

    fn register_cache(&self, registry: &mut Registry) {
        let m = &self.0;
        registry.register(
            "coredns_cache_requests",
            "Cache lookups",
            m.cache_requests.clone(),
        );
        registry.register("coredns_cache_hits", "Cache hits", m.cache_hits.clone());
        registry.register(
            "coredns_cache_misses",
            "Cache misses",
            m.cache_misses.clone(),
        );
        registry.register(
            "coredns_cache_entries",
            "Cache entries",
            m.cache_entries.clone(),
        );
        registry.register(
            "coredns_cache_served_stale",
            "Answers that were over",
            m.cache_stale.clone(),
        );
        registry.register(
            "coredns_cache_prefetch",
            "Popular answers asked for before their end",
            m.cache_prefetches.clone(),
        );
    }

    fn register_forward(&self, registry: &mut Registry) {
        let m = &self.0;
        registry.register(
            "coredns_forward_requests",
            "Questions put to an upstream server",
            m.forward_requests.clone(),
        );
        registry.register(
            "coredns_forward_responses",
            "Answers of an upstream server",
            m.forward_responses.clone(),
        );
        registry.register(
            "coredns_forward_failures",
            "Questions that an upstream server did not answer",
            m.forward_failures.clone(),
        );
        registry.register(
            "coredns_forward_request_duration_seconds",
            "Time of an upstream server to answer",
            m.forward_duration.clone(),
        );
        registry.register(
            "coredns_proxy_request_duration_seconds",
            "Time of an upstream server to answer, by the answer's code",
            m.proxy_duration.clone(),
        );
        registry.register(
            "coredns_proxy_healthcheck_failures",
            "Probes that an upstream server did not answer",
            m.probe_failures.clone(),
        );
        registry.register(
            "coredns_forward_healthcheck_broken",
            "Questions while every upstream server was down",
            m.health_broken.clone(),
        );
        registry.register(
            "coredns_forward_max_concurrent_rejects",
            "Questions refused because too many were in flight",
            m.forward_rejects.clone(),
        );
    }
}
