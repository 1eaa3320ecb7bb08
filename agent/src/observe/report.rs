//! What `weirctl` shows, as data: the agent writes it as JSON, `weirctl` reads it.

use std::collections::BTreeMap;
use std::net::IpAddr;

use control_api::desired::{DesiredState, Name};
use control_api::v1;
use serde::{Deserialize, Serialize};

use super::{Check, Observe, collect, lock};
use crate::cni_api::Record;
use crate::compile::services::{Frontend, Owner};
use crate::kernel::{CounterKind, FlowTableStatus, ServiceDetails};
use crate::plan::services::{BackendUse, FrontendEntry, PresentBackend};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StatusReport {
    pub node: String,
    pub version: String,
    pub uptime_s: u64,
    pub resident_bytes: i64,
    pub ready: bool,
    pub checks: Vec<Check>,
    pub feed: Option<FeedReport>,
    pub latency: Option<LatencyReport>,
    pub services: usize,
    pub endpoints: usize,
    pub nodes: usize,
    /// Pods attached to the network of this node.
    pub attached_pods: usize,
    pub flows: Option<FlowsReport>,
    pub dns: Option<DnsReport>,
}

/// What `weirctl ip list` shows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AddressesReport {
    /// CIDRs that addresses come from.
    pub ranges: Vec<String>,
    /// Why no pod gets an address; empty when pods do.
    pub problem: String,
    pub attachments: Vec<AttachmentReport>,
    pub resting: Vec<RestingReport>,
}

/// A pod's interface.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttachmentReport {
    pub addresses: Vec<String>,
    /// NAMESPACE/NAME, or empty where the runtime told none.
    pub pod: String,
    pub container_id: String,
    pub interface: String,
    pub host_link: String,
}

/// An address whose pod has gone and that nobody else gets yet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RestingReport {
    pub address: String,
    pub left_s: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FeedReport {
    pub server: String,
    pub held_revision: u64,
    pub applied_revision: u64,
    pub apply_error: String,
    pub synced: bool,
    pub snapshots: u64,
    pub deltas: u64,
    pub disconnects: u64,
    pub last_error: String,
}

/// From the API's commit to the kernel, over the last changes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LatencyReport {
    pub changes: usize,
    pub median_ms: f64,
    pub p99_ms: f64,
    pub max_ms: f64,
    pub last_ms: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FlowsReport {
    pub flows: usize,
    pub tables: Vec<FlowTableReport>,
    pub collector: CollectorReport,
    pub drops: Vec<CounterReport>,
    pub events: Vec<CounterReport>,
    /// What the socket hooks did.
    #[serde(default)]
    pub sockets: Vec<CounterReport>,
}

/// The flow table of one family.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FlowTableReport {
    pub family: String,
    /// At the end of the collector's last walk.
    pub flows: usize,
    pub capacity: usize,
    /// The table is nearly full: flows that were never established have to hurry.
    pub pressure: bool,
}

/// What the flow collector has done since the agent started.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CollectorReport {
    /// Entries read.
    pub walked: usize,
    /// Flows removed.
    pub removed: usize,
    /// Entries without their other half.
    pub repaired: usize,
    pub affinities: usize,
    /// Time that it worked.
    pub busy_s: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CounterReport {
    pub name: String,
    pub packets: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DnsReport {
    pub addresses: Vec<String>,
    pub synced: bool,
    /// The cluster's Corefile serves, not what is built in.
    #[serde(default)]
    pub from_cluster: bool,
    /// Why a newer configuration does not serve.
    #[serde(default)]
    pub error: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServiceReport {
    pub namespace: String,
    pub name: String,
    pub kind: String,
    pub cluster_ips: Vec<String>,
    pub ports: Vec<PortReport>,
    /// What the kernel's tables hold of it.
    #[serde(default)]
    pub programmed: Vec<ProgrammedReport>,
    /// What is asked for and not served, with the reason.
    #[serde(default)]
    pub refused: Vec<String>,
}

/// One service id in the kernel's tables.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProgrammedReport {
    pub service_id: u32,
    /// Address, port and protocol, then what holds for it, for example `*:30080/TCP external`.
    pub frontends: Vec<String>,
    /// Usable backends as ADDRESS:PORT; those of this node are marked `local`.
    pub backends: Vec<String>,
    /// Backends that keep their connections and get no new ones.
    pub draining: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PortReport {
    pub name: String,
    pub protocol: String,
    pub port: u32,
    pub node_port: u32,
    /// Ready endpoints as ADDRESS:PORT.
    pub backends: Vec<String>,
    /// Endpoints that are not ready.
    pub not_ready: usize,
}

impl Observe {
    pub(super) fn status_report(&self) -> StatusReport {
        let inner = &self.inner;
        let state = inner
            .feed
            .get()
            .map(crate::feed::FeedHandle::state)
            .unwrap_or_default();
        StatusReport {
            node: inner.node_name.clone(),
            version: env!("CARGO_PKG_VERSION").into(),
            uptime_s: inner.started.elapsed().as_secs(),
            resident_bytes: collect::resident_bytes().unwrap_or_default(),
            ready: inner.checks.is_ready(),
            checks: inner.checks.list(),
            feed: inner.feed.get().map(|feed| feed_report(feed.status())),
            latency: self.latency_report(),
            services: state.services.len(),
            endpoints: state
                .endpoint_slices
                .iter()
                .map(|(_, slice)| slice.endpoints().count())
                .sum(),
            nodes: state.nodes.len(),
            attached_pods: inner.attachments.get().map_or(0, |a| a.records().len()),
            flows: self.flows_report(),
            dns: inner.dns.get().map(|dns| {
                let configuration = dns.configuration();
                DnsReport {
                    addresses: dns.addresses().iter().map(ToString::to_string).collect(),
                    synced: dns.is_synced(),
                    from_cluster: configuration.from_cluster,
                    error: configuration.error,
                }
            }),
        }
    }

    pub(super) fn flows_report(&self) -> Option<FlowsReport> {
        let dataplane = self.inner.dataplane.get()?;
        let counters = dataplane.counters();
        let of = |kind: CounterKind| {
            counters
                .iter()
                .filter(|counter| counter.kind == kind)
                .map(|c| CounterReport {
                    name: c.name.to_owned(),
                    packets: c.packets,
                })
                .collect()
        };
        let status = dataplane.flow_table();
        let table = |family: usize| FlowTableReport {
            family: FlowTableStatus::FAMILIES[family].to_owned(),
            flows: status.flows[family],
            capacity: status.capacity[family],
            pressure: status.pressure[family],
        };
        Some(FlowsReport {
            flows: status.flows.iter().sum(),
            tables: vec![table(0), table(1)],
            collector: CollectorReport {
                walked: status.total.walked,
                removed: status.total.removed,
                repaired: status.total.repaired,
                affinities: status.total.affinities,
                busy_s: status.busy.as_secs_f64(),
            },
            drops: of(CounterKind::Drop),
            events: of(CounterKind::Forward),
            sockets: of(CounterKind::Socket),
        })
    }

    pub(super) fn addresses_report(&self) -> Option<AddressesReport> {
        let attachments = self.inner.attachments.get()?;
        let texts = |addresses: &[IpAddr]| addresses.iter().map(ToString::to_string).collect();
        let (ranges, problem) = match attachments.pod_ranges() {
            Ok(ranges) => (ranges, String::new()),
            Err(e) => (Vec::new(), e.to_string()),
        };
        let of_record = |record: Record| AttachmentReport {
            addresses: texts(&record.addresses),
            pod: if record.pod.name.is_empty() {
                String::new()
            } else {
                format!("{}/{}", record.pod.namespace, record.pod.name)
            },
            host_link: record.key.host_name(),
            container_id: record.key.container_id,
            interface: record.key.if_name,
        };
        let mut records = attachments.records();
        records.sort_by(|a, b| a.addresses.cmp(&b.addresses));
        let resting = attachments.resting().into_iter();
        Some(AddressesReport {
            ranges: ranges.iter().map(ToString::to_string).collect(),
            problem,
            attachments: records.into_iter().map(of_record).collect(),
            resting: resting
                .map(|(address, left)| RestingReport {
                    address: address.to_string(),
                    left_s: left.as_secs(),
                })
                .collect(),
        })
    }

    pub(super) fn services_report(&self) -> Vec<ServiceReport> {
        let Some(feed) = self.inner.feed.get() else {
            return Vec::new();
        };
        let state = feed.state();
        let dataplane = self.inner.dataplane.get();
        let (details, refused) = dataplane.map(|d| d.service_details()).unwrap_or_default();
        let mut programmed: BTreeMap<Owner, Vec<ProgrammedReport>> = BTreeMap::new();
        for details in details {
            let report = programmed_report(&details);
            programmed.entry(details.owner).or_default().push(report);
        }
        let reports = state.services.iter().map(|(name, service)| {
            let owner = Owner::Service(name.clone());
            let mut report = service_report(&state, name, service);
            report.programmed = programmed.remove(&owner).unwrap_or_default();
            let prefix = format!("{owner}: ");
            report.refused = refused
                .iter()
                .filter_map(|(what, why)| Some(format!("{}: {why}", what.strip_prefix(&prefix)?)))
                .collect();
            report
        });
        let mut reports: Vec<ServiceReport> = reports.collect();
        reports.extend(programmed.into_iter().map(host_port_report));
        reports
    }

    fn latency_report(&self) -> Option<LatencyReport> {
        let kept = lock(&self.inner.latencies_us);
        let last = *kept.back()?;
        let mut sorted: Vec<u64> = kept.iter().copied().collect();
        drop(kept);
        sorted.sort_unstable();
        Some(LatencyReport {
            changes: sorted.len(),
            median_ms: millis(percentile(&sorted, 50)),
            p99_ms: millis(percentile(&sorted, 99)),
            max_ms: millis(percentile(&sorted, 100)),
            last_ms: millis(last),
        })
    }
}

/// The smallest value that so many percent of the values do not exceed.
fn percentile(sorted: &[u64], percent: usize) -> u64 {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or_default()
}

fn millis(us: u64) -> f64 {
    std::time::Duration::from_micros(us).as_secs_f64() * 1000.0
}

fn feed_report(status: crate::feed::FeedStatus) -> FeedReport {
    FeedReport {
        server: status.server,
        held_revision: status.held_revision,
        applied_revision: status.applied_revision,
        apply_error: status.apply_error,
        synced: status.synced,
        snapshots: status.snapshots,
        deltas: status.deltas,
        disconnects: status.disconnects,
        last_error: status.last_error,
    }
}

fn programmed_report(details: &ServiceDetails) -> ProgrammedReport {
    let frontend = |(frontend, entry): &(Frontend, FrontendEntry)| {
        let options = entry.options;
        let flags = [
            (options.external_scope, " external"),
            (options.keep_source, " keep-source"),
            (options.drop_empty, " drop-empty"),
            (options.ranges, " ranges"),
            (options.dsr, " dsr"),
            (options.maglev, " maglev"),
            (entry.affinity_s > 0, " affinity"),
        ];
        let set = flags.iter().filter_map(|(set, flag)| set.then_some(*flag));
        format!("{frontend}{}", set.collect::<String>())
    };
    let backend = |backend: &PresentBackend| {
        let local = if backend.local { " local" } else { "" };
        let socket = std::net::SocketAddr::new(backend.address, backend.port);
        format!("{socket}{local}")
    };
    let of = |usage: BackendUse| {
        let backends = details.backends.iter().filter(|b| b.usage == usage);
        backends.map(backend).collect()
    };
    ProgrammedReport {
        service_id: details.service_id,
        frontends: details.frontends.iter().map(frontend).collect(),
        backends: of(BackendUse::Active),
        draining: of(BackendUse::Draining),
    }
}

/// What is programmed and belongs to no Service that the state has.
fn host_port_report((owner, programmed): (Owner, Vec<ProgrammedReport>)) -> ServiceReport {
    let (kind, namespace, name) = match owner {
        Owner::HostPort(pod) => ("HostPort", String::new(), pod),
        Owner::Service(name) => ("Gone", name.namespace, name.name),
    };
    ServiceReport {
        namespace,
        name,
        kind: kind.into(),
        cluster_ips: Vec::new(),
        ports: Vec::new(),
        programmed,
        refused: Vec::new(),
    }
}

pub(super) fn service_report(
    state: &DesiredState,
    name: &Name,
    service: &v1::Service,
) -> ServiceReport {
    let kind = match service.r#type() {
        v1::ServiceType::NodePort => "NodePort",
        v1::ServiceType::LoadBalancer => "LoadBalancer",
        v1::ServiceType::ExternalName => "ExternalName",
        _ if service.headless => "Headless",
        _ => "ClusterIP",
    };
    let port_report = |port: &v1::ServicePort| {
        let mut report = PortReport {
            name: port.name.clone(),
            protocol: port.protocol().as_str_name().to_owned(),
            port: port.port,
            node_port: port.node_port,
            backends: Vec::new(),
            not_ready: 0,
        };
        for slice in state.slices_of(name) {
            let target = slice
                .ports
                .iter()
                .find(|p| p.name == port.name && p.protocol == port.protocol);
            let Some(target) = target else { continue };
            for endpoint in slice.endpoints() {
                if !endpoint.ready() {
                    report.not_ready += 1;
                    continue;
                }
                report.backends.extend(endpoint.addresses().map(|address| {
                    std::net::SocketAddr::new(address, wire_port(target.port)).to_string()
                }));
            }
        }
        report
    };
    ServiceReport {
        namespace: name.namespace.clone(),
        name: name.name.clone(),
        kind: kind.to_owned(),
        cluster_ips: if service.external_name.is_empty() {
            service.cluster_ips.clone()
        } else {
            vec![service.external_name.clone()]
        },
        ports: service.ports.iter().map(port_report).collect(),
        programmed: Vec::new(),
        refused: Vec::new(),
    }
}

fn wire_port(port: u32) -> u16 {
    u16::try_from(port).unwrap_or_default()
}
