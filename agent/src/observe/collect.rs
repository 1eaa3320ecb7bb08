//! Values that are read when somebody asks: kernel counters, the feed, attachments, the process itself.

use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};

use crate::cni_api::Attachments;
use crate::feed::FeedHandle;
use crate::kernel;

type Labels = [(&'static str, String); 1];
type Encoded = Result<(), std::fmt::Error>;

/// What the dataplane can be asked for.
pub trait Dataplane: std::fmt::Debug + Send + Sync + 'static {
    /// Every counter; empty when the kernel cannot be read.
    fn counters(&self) -> Vec<kernel::Counter>;

    /// How full the flow tables are.
    fn flow_table(&self) -> kernel::FlowTableStatus;

    /// Sums over the service maps.
    fn service_totals(&self) -> kernel::ServiceTotals;

    /// What the service maps hold; and what is asked for and not in them, with the reasons.
    fn service_details(&self) -> (Vec<kernel::ServiceDetails>, Vec<(String, String)>);
}

impl Dataplane for kernel::Kernel {
    fn counters(&self) -> Vec<kernel::Counter> {
        kernel::Kernel::counters(self).unwrap_or_else(|error| {
            tracing::warn!(%error, "read the dataplane's counters");
            Vec::new()
        })
    }

    fn flow_table(&self) -> kernel::FlowTableStatus {
        kernel::Kernel::flow_table(self)
    }

    fn service_totals(&self) -> kernel::ServiceTotals {
        kernel::Kernel::service_totals(self)
    }

    fn service_details(&self) -> (Vec<kernel::ServiceDetails>, Vec<(String, String)>) {
        kernel::Kernel::service_details(self)
    }
}

#[derive(Debug)]
pub(super) struct Kernel(pub(super) Arc<dyn Dataplane>);

impl Collector for Kernel {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Encoded {
        let drops = Family::<Labels, Counter>::default();
        let forwards = Family::<Labels, Counter>::default();
        let sockets = Family::<Labels, Counter>::default();
        for counter in self.0.counters() {
            let (family, label) = match counter.kind {
                kernel::CounterKind::Drop => (&drops, "reason"),
                kernel::CounterKind::Forward => (&forwards, "event"),
                kernel::CounterKind::Socket => (&sockets, "event"),
            };
            family
                .get_or_create(&[(label, counter.name.to_owned())])
                .inc_by(counter.packets);
        }
        family(
            &mut encoder,
            "weir_dropped_packets",
            "Packets dropped by the dataplane",
            &drops,
        )?;
        family(
            &mut encoder,
            "weir_dataplane_events",
            "Packets and flows that took this path through the dataplane",
            &forwards,
        )?;
        family(
            &mut encoder,
            "weir_socket_events",
            "What the socket hooks did with connections and datagrams of this node's processes",
            &sockets,
        )?;
        service_totals(&mut encoder, self.0.service_totals())?;
        flow_table(&mut encoder, &self.0.flow_table())
    }
}

fn service_totals(encoder: &mut DescriptorEncoder<'_>, totals: kernel::ServiceTotals) -> Encoded {
    for (name, help, value) in [
        (
            "weir_programmed_frontends",
            "Addresses and ports of services in the kernel's tables",
            totals.frontends,
        ),
        (
            "weir_programmed_endpoints",
            "Usable endpoints in the kernel's tables, for each service port that has them",
            totals.endpoints,
        ),
        (
            "weir_refused_frontends",
            "Frontends and endpoints of services that are asked for and not served",
            totals.refused,
        ),
    ] {
        gauge(
            encoder,
            name,
            help,
            i64::try_from(value).unwrap_or(i64::MAX),
        )?;
    }
    Ok(())
}

fn flow_table(encoder: &mut DescriptorEncoder<'_>, status: &kernel::FlowTableStatus) -> Encoded {
    let flows = status.flows.iter().sum();
    gauge(
        encoder,
        "weir_flows",
        "Flows known to the dataplane",
        count(flows),
    )?;
    let per_family = |values: [usize; 2]| {
        let gauges = Family::<Labels, Gauge>::default();
        for (label, value) in kernel::FlowTableStatus::FAMILIES.into_iter().zip(values) {
            gauges
                .get_or_create(&[("family", label.to_owned())])
                .set(count(value));
        }
        gauges
    };
    for (name, help, values) in [
        (
            "weir_flow_table_entries",
            "Flows in the table at the end of the last walk",
            status.flows,
        ),
        (
            "weir_flow_table_capacity",
            "Flows that the table may hold",
            status.capacity,
        ),
        (
            "weir_flow_table_pressure",
            "1 while flows that were never established have to hurry",
            status.pressure.map(usize::from),
        ),
    ] {
        family(encoder, name, help, &per_family(values))?;
    }
    collector(encoder, status)
}

fn collector(encoder: &mut DescriptorEncoder<'_>, status: &kernel::FlowTableStatus) -> Encoded {
    let total = status.total;
    for (name, help, value) in [
        (
            "weir_flow_entries_walked",
            "Entries of the flow tables that the collector has read",
            total.walked,
        ),
        (
            "weir_flows_collected",
            "Flows that were over and removed",
            total.removed,
        ),
        (
            "weir_flow_halves_collected",
            "Entries without their other half that were removed",
            total.repaired,
        ),
        (
            "weir_affinities_collected",
            "Session affinities that were over and removed",
            total.affinities,
        ),
    ] {
        let counter = ConstCounter::new(u64::try_from(value).unwrap_or(u64::MAX));
        let metric = encoder.encode_descriptor(name, help, None, counter.metric_type())?;
        counter.encode(metric)?;
    }
    let busy = ConstCounter::new(status.busy.as_secs_f64());
    let help = "Time that the collector has worked";
    let kind = busy.metric_type();
    let metric = encoder.encode_descriptor(
        "weir_flow_collector",
        help,
        Some(&prometheus_client::registry::Unit::Seconds),
        kind,
    )?;
    busy.encode(metric)
}

#[derive(Debug)]
pub(super) struct Feed(pub(super) FeedHandle);

impl Collector for Feed {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Encoded {
        let status = self.0.status();
        let revision = |r: u64| i64::try_from(r).unwrap_or(i64::MAX);
        for (name, help, value) in [
            (
                "weir_feed_connected",
                "1 while a feed server is followed",
                i64::from(!status.server.is_empty()),
            ),
            (
                "weir_feed_held_revision",
                "Store revision of the desired state of this node",
                revision(status.held_revision),
            ),
            (
                "weir_feed_applied_revision",
                "Store revision that is programmed in the kernel",
                revision(status.applied_revision),
            ),
            (
                "weir_feed_apply_failing",
                "1 while the last apply failed",
                i64::from(!status.apply_error.is_empty()),
            ),
        ] {
            gauge(&mut encoder, name, help, value)?;
        }
        for (name, help, value) in [
            (
                "weir_feed_snapshots",
                "Snapshots received",
                status.snapshots,
            ),
            ("weir_feed_deltas", "Deltas received", status.deltas),
            (
                "weir_feed_disconnects",
                "Feed connections lost",
                status.disconnects,
            ),
        ] {
            let counter = ConstCounter::new(value);
            let metric = encoder.encode_descriptor(name, help, None, counter.metric_type())?;
            counter.encode(metric)?;
        }
        let state = self.0.state();
        for (name, help, value) in [
            (
                "weir_services",
                "Services in the desired state",
                state.services.len(),
            ),
            (
                "weir_endpoint_slices",
                "Slices in the desired state",
                state.endpoint_slices.len(),
            ),
            (
                "weir_nodes",
                "Nodes in the desired state",
                state.nodes.len(),
            ),
            (
                "weir_pods_desired",
                "Pods that this node is to run",
                state.pods.len(),
            ),
        ] {
            gauge(&mut encoder, name, help, count(value))?;
        }
        Ok(())
    }
}

#[derive(Debug)]
pub(super) struct Pods(pub(super) Arc<Attachments>);

impl Collector for Pods {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Encoded {
        let records = self.0.records();
        let in_use = Family::<Labels, Gauge>::default();
        for label in ["ipv4", "ipv6"] {
            drop(in_use.get_or_create(&[("family", label.to_owned())]));
        }
        for address in records.iter().flat_map(|record| &record.addresses) {
            let label = if address.is_ipv4() { "ipv4" } else { "ipv6" };
            in_use.get_or_create(&[("family", label.to_owned())]).inc();
        }
        let help = "Pod addresses in use on this node";
        family(&mut encoder, "weir_ipam_addresses_in_use", help, &in_use)?;
        let help = "Pods attached by CNI ADD and not yet detached";
        gauge(
            &mut encoder,
            "weir_cni_attachments",
            help,
            count(records.len()),
        )
    }
}

/// The usual metrics of a process, from /proc.
#[derive(Debug)]
pub(super) struct Process;

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Encoded {
        if let Some(bytes) = resident_bytes() {
            let help = "Resident memory size in bytes";
            gauge(&mut encoder, "process_resident_memory_bytes", help, bytes)?;
        }
        if let Ok(descriptors) = std::fs::read_dir("/proc/self/fd") {
            let help = "Open file descriptors";
            gauge(
                &mut encoder,
                "process_open_fds",
                help,
                count(descriptors.count()),
            )?;
        }
        Ok(())
    }
}

/// `VmRSS` of this process.
pub(super) fn resident_bytes() -> Option<i64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: i64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

fn count(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

fn gauge(encoder: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: i64) -> Encoded {
    let gauge = ConstGauge::new(value);
    let metric = encoder.encode_descriptor(name, help, None, gauge.metric_type())?;
    gauge.encode(metric)
}

fn family(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    family: &impl EncodeMetric,
) -> Encoded {
    let metric = encoder.encode_descriptor(name, help, None, family.metric_type())?;
    family.encode(metric)
}
