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
    pub(super) cache_entries: Gauge,
    forward_requests: Family<Labels<1>, Counter>,
    forward_responses: Family<Labels<2>, Counter>,
    forward_failures: Family<Labels<1>, Counter>,
    forward_duration: Family<Labels<1>, Histogram, Seconds>,
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
            cache_entries: Gauge::default(),
            forward_requests: Family::default(),
            forward_responses: Family::default(),
            forward_failures: Family::default(),
            forward_duration: Family::new_with_constructor(Seconds),
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
        let labels = [("to", to), ("rcode", rcode_name(rcode))];
        self.forward_responses.get_or_create(&labels).inc();
    }

    pub(super) fn forward_failed(&self, to: SocketAddr) {
        let labels = [("to", to.to_string())];
        self.forward_requests.get_or_create(&labels).inc();
        self.forward_failures.get_or_create(&labels).inc();
    }
}

fn rcode_name(low: u8) -> String {
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
            "coredns_kubernetes_dns_programming_duration_seconds",
            "Time from the API's commit to the answer that shows it",
            m.programming.clone(),
        );
    }
}
