//! Watches over nodes: pod networks for new ones, silence, conditions and taints.

mod cidr;
mod core;
pub(super) mod eviction;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ipnetwork::IpNetwork;
use jiff::Timestamp;
use serde_json::{Value, json};

use self::core::Heartbeats;
use super::runtime::informer::{Index, Store};
use super::runtime::object::{Key, Object, set, set_condition};
use super::runtime::session::{Context, Session};
use super::runtime::worker::{Again, Controller, KeyQueue, enqueue_changes, tolerate_change};
use crate::client::resources;
use crate::config::Network;
use crate::status::ApiError;

const LEASE_NAMESPACE: &str = "kube-node-lease";
const COMPONENT: &str = "node-controller";

#[derive(Debug)]
pub(super) struct Nodes {
    nodes: Arc<Store>,
    pods: Arc<Store>,
    network: Network,
    heartbeats: Arc<Mutex<Heartbeats>>,
}

fn lock(heartbeats: &Mutex<Heartbeats>) -> MutexGuard<'_, Heartbeats> {
    heartbeats.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Nodes {
    pub(super) fn new(context: &Context, queue: &KeyQueue, network: Network) -> Self {
        let heartbeats: Arc<Mutex<Heartbeats>> = Arc::default();
        let nodes = context.informers.store(resources::NODES);
        enqueue_changes(context, resources::NODES, queue);
        let from_lease = heartbeats.clone();
        context
            .informers
            .store(resources::LEASES)
            .subscribe(move |change| {
                let Some(lease) = change
                    .new
                    .as_ref()
                    .filter(|l| l.namespace() == LEASE_NAMESPACE)
                else {
                    return;
                };
                let renewed = lease.text(&["spec", "renewTime"]).to_owned();
                lock(&from_lease).note(
                    &format!("lease/{}", lease.name()),
                    renewed,
                    Timestamp::now(),
                );
            });
        let from_node = heartbeats.clone();
        nodes.subscribe(move |change| {
            let name = change.object().name().to_owned();
            let mut heartbeats = lock(&from_node);
            match &change.new {
                Some(node) => {
                    let ready = node.condition("Ready");
                    // What this controller writes itself (Unknown) is no sign of life.
                    let sign = ready
                        .filter(|c| c.text(&["status"]) != "Unknown")
                        .map_or("", |c| c.text(&["lastHeartbeatTime"]));
                    heartbeats.note(&name, sign.to_owned(), Timestamp::now());
                }
                None => {
                    heartbeats.forget(&name);
                    heartbeats.forget(&format!("lease/{name}"));
                }
            }
        });
        Self {
            nodes,
            pods: context.informers.store(resources::PODS),
            network,
            heartbeats,
        }
    }

    /// Gives the node one share of every cluster network.
    async fn assign_networks(&self, node: &Value, session: &Session<'_>) -> Result<(), ApiError> {
        let present = node.items(&["spec", "podCIDRs"]);
        if !present.is_empty() || self.network.pod_cidrs.is_empty() {
            return Ok(());
        }
        let used: BTreeSet<IpNetwork> = self
            .nodes
            .all()
            .iter()
            .flat_map(|n| n.items(&["spec", "podCIDRs"]).to_vec())
            .filter_map(|c| c.as_str()?.parse().ok())
            .collect();
        let mut shares = Vec::new();
        for network in &self.network.pod_cidrs {
            let prefix = if network.is_ipv4() {
                self.network.node_prefix_v4
            } else {
                self.network.node_prefix_v6
            };
            let Some(share) = cidr::first_free(*network, prefix, &used) else {
                let about = (node, "v1", "Node");
                let message = format!(
                    "Node {} gets no pod network: every /{prefix} of {network} is taken",
                    node.name()
                );
                session
                    .recorder()
                    .named(COMPONENT)
                    .warning(about, "CIDRNotAvailable", message);
                return Ok(());
            };
            shares.push(share.to_string());
        }
        let patch = json!({
            "metadata": {"uid": node.uid()},
            "spec": {"podCIDR": shares.first(), "podCIDRs": shares},
        });
        tolerate_change(
            session
                .merge(resources::NODES, &node.key(), "", patch)
                .await,
        )?;
        Ok(())
    }

    /// Marks a silent node. Gives the node as it is then.
    async fn judge_silence(
        &self,
        node: Arc<Value>,
        session: &Session<'_>,
    ) -> Result<Option<Arc<Value>>, ApiError> {
        let now = Timestamp::now();
        let Some(conditions) = core::silent_conditions(&node, now) else {
            return Ok(Some(node));
        };
        let mut status = node.at(&["status"]).cloned().unwrap_or_else(|| json!({}));
        set(&mut status, &["conditions"], conditions.into());
        let written = session
            .replace_status(resources::NODES, &node, status)
            .await;
        let Some(written) = tolerate_change(written)? else {
            return Ok(None);
        };
        let about = (written.as_ref(), "v1", "Node");
        let message = format!("Node {} status is now: NodeNotReady", written.name());
        session
            .recorder()
            .named(COMPONENT)
            .normal(about, "NodeNotReady", message);
        Ok(Some(written))
    }

    /// Pods of a node that is not Ready must not receive traffic.
    async fn withdraw_pods(&self, node: &Value, session: &Session<'_>) -> Result<(), ApiError> {
        let now = Timestamp::now();
        for pod in self.pods.by(Index::Node, node.name()) {
            if !super::pods::is_ready(&pod) {
                continue;
            }
            let mut status = pod.at(&["status"]).cloned().unwrap_or_else(|| json!({}));
            let reason = "NodeNotReady";
            set_condition(
                &mut status,
                "Ready",
                "False",
                reason,
                "Node is not ready",
                now,
            );
            let patch = json!({
                "metadata": {"uid": pod.uid(),
                    "resourceVersion": pod.text(&["metadata", "resourceVersion"])},
                "status": {"conditions": status.at(&["conditions"])},
            });
            let written = session
                .merge(resources::PODS, &pod.key(), "status", patch)
                .await;
            if tolerate_change(written)?.is_none() {
                // It changed meanwhile; the retry sees it as it is now.
                return Err(ApiError::conflict(
                    "",
                    "pods",
                    pod.name(),
                    "changed meanwhile",
                ));
            }
        }
        Ok(())
    }
}

impl Controller for Nodes {
    const NAME: &'static str = "node";
    // One at a time: a share of the pod network must not be given out twice.
    const WORKERS: usize = 1;

    async fn reconcile(&self, key: &Key, session: &Session<'_>) -> Result<Again, ApiError> {
        let Some(node) = self.nodes.get(key).filter(|n| !n.is_deleting()) else {
            return Ok(None);
        };
        self.assign_networks(&node, session).await?;
        let left = {
            let (now, heartbeats) = (Timestamp::now(), lock(&self.heartbeats));
            let by_lease = heartbeats.left(&format!("lease/{}", node.name()), now);
            // Without a lease `left` starts anew at each look, so only what was seen of the node itself counts.
            let by_lease = by_lease.filter(|_| heartbeats.knows(&format!("lease/{}", node.name())));
            by_lease.max(heartbeats.left(node.name(), now))
        };
        let node = match left {
            Some(_) => node,
            None => match self.judge_silence(node, session).await? {
                Some(node) => node,
                None => return Ok(Some(Duration::from_secs(1))),
            },
        };
        if let Some(taints) = core::taints(&node, Timestamp::now()) {
            let taints = if taints.is_empty() {
                Value::Null
            } else {
                Value::Array(taints)
            };
            let patch = json!({
                "metadata": {"uid": node.uid(),
                    "resourceVersion": node.text(&["metadata", "resourceVersion"])},
                "spec": {"taints": taints},
            });
            let written = session.merge(resources::NODES, key, "", patch).await;
            if tolerate_change(written)?.is_none() {
                // The networks may have been written just now: look again with the node as it is.
                return Ok(Some(Duration::from_millis(5)));
            }
        }
        // A node that still speaks knows best about its pods.
        let silent = node
            .condition("Ready")
            .is_some_and(|c| c.text(&["status"]) == "Unknown");
        if silent {
            self.withdraw_pods(&node, session).await?;
        }
        Ok(left.map(|l| l + Duration::from_secs(1)))
    }
}
