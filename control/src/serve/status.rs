//! «Programmed everywhere»: what each node has acknowledged, for waiting inside the process and for `/metrics`.

use std::collections::BTreeMap;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::registry::Registry;

use super::hub::{Counters, Hub};

/// A view of the feed. Cheap to clone.
#[derive(Clone, Debug)]
pub struct FeedStatus {
    pub(super) hub: Arc<Hub>,
}

/// One node as the feed sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeStatus {
    pub connected: bool,
    /// Everything up to this revision that concerns the node is in its kernel.
    pub applied_revision: u64,
    /// What failed at the node's last apply; empty when nothing did.
    pub apply_error: String,
}

impl FeedStatus {
    /// Every node that has followed the feed since this process started.
    #[must_use]
    pub fn nodes(&self) -> BTreeMap<String, NodeStatus> {
        let inner = self.hub.lock();
        let status = |node| NodeStatus {
            connected: false,
            applied_revision: inner.applied(node),
            apply_error: node.apply_error.clone(),
        };
        inner
            .nodes
            .iter()
            .map(|(name, node)| {
                (
                    name.clone(),
                    NodeStatus {
                        connected: node.connected,
                        ..status(node)
                    },
                )
            })
            .collect()
    }

    /// The revision that one node has applied; `None` for a node that never followed.
    #[must_use]
    pub fn applied(&self, node: &str) -> Option<u64> {
        let inner = self.hub.lock();
        inner.nodes.get(node).map(|node| inner.applied(node))
    }

    /// True when every connected node has applied `revision`, and the feed itself has reached it.
    #[must_use]
    pub fn all_applied(&self, revision: u64) -> bool {
        let inner = self.hub.lock();
        inner.head_revision >= revision
            && inner
                .nodes
                .values()
                .filter(|node| node.connected)
                .all(|node| inner.applied(node) >= revision)
    }

    /// Waits until `revision` is programmed on every connected node.
    pub async fn wait_all_applied(&self, revision: u64) {
        let mut ticks = self.hub.ticks();
        while !self.all_applied(revision) {
            if ticks.changed().await.is_err() {
                return;
            }
        }
    }

    /// True once the first complete list of every kind is in.
    #[must_use]
    pub fn is_synced(&self) -> bool {
        self.hub.is_synced()
    }

    /// Exports the feed under `weir_feed_`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register_collector(Box::new(self.clone()));
    }

    /// The feed's metrics as part of a text exposition.
    #[must_use]
    pub fn metrics_text(&self) -> String {
        let mut registry = Registry::default();
        self.register(&mut registry);
        let mut text = String::new();
        match prometheus_client::encoding::text::encode_registry(&mut text, &registry) {
            Ok(()) => text,
            // A half-written exposition would spoil the other metrics as well.
            Err(_) => String::new(),
        }
    }
}

type NodeLabels = [(&'static str, String); 1];

impl Collector for FeedStatus {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.encode_nodes(&mut encoder)?;
        let inner = self.hub.lock();
        let revision = i64::try_from(inner.head_revision).unwrap_or(i64::MAX);
        let counts = counts(&inner.counters);
        drop(inner);
        let gauge = ConstGauge::new(revision);
        let help = "Store revision that the feed has reached";
        let metric =
            encoder.encode_descriptor("weir_feed_revision", help, None, gauge.metric_type())?;
        gauge.encode(metric)?;
        for (name, help, value) in counts {
            let counter = ConstCounter::new(value);
            let metric = encoder.encode_descriptor(name, help, None, counter.metric_type())?;
            counter.encode(metric)?;
        }
        Ok(())
    }
}

impl FeedStatus {
    fn encode_nodes(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let applied = Family::<NodeLabels, Gauge>::default();
        let connected = Family::<NodeLabels, Gauge>::default();
        let failing = Family::<NodeLabels, Gauge>::default();
        for (name, node) in self.nodes() {
            let labels = [("node", name)];
            let revision = i64::try_from(node.applied_revision).unwrap_or(i64::MAX);
            applied.get_or_create(&labels).set(revision);
            connected.get_or_create(&labels).set(node.connected.into());
            failing
                .get_or_create(&labels)
                .set((!node.apply_error.is_empty()).into());
        }
        for (name, help, family) in [
            (
                "weir_feed_applied_revision",
                "Store revision that the node has programmed in its kernel",
                applied,
            ),
            (
                "weir_feed_node_connected",
                "1 while the node follows the feed",
                connected,
            ),
            (
                "weir_feed_node_apply_failing",
                "1 while the node's last apply failed",
                failing,
            ),
        ] {
            let metric = encoder.encode_descriptor(name, help, None, family.metric_type())?;
            family.encode(metric)?;
        }
        Ok(())
    }
}

fn counts(counters: &Counters) -> [(&'static str, &'static str, u64); 7] {
    [
        ("weir_feed_snapshots", "Snapshots sent", counters.snapshots),
        (
            "weir_feed_resumes",
            "Streams that resumed without a snapshot",
            counters.resumes,
        ),
        (
            "weir_feed_changes",
            "Changes that concerned some node",
            counters.changes,
        ),
        ("weir_feed_frames", "Deltas sent", counters.frames),
        (
            "weir_feed_frame_bytes",
            "Bytes of deltas sent",
            counters.frame_bytes,
        ),
        (
            "weir_feed_fell_behind",
            "Streams cut for falling behind the log",
            counters.fell_behind,
        ),
        (
            "weir_feed_silent",
            "Streams cut for silence",
            counters.silent,
        ),
    ]
}
