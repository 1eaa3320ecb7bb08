//! Removes pods that nobody else removes: those of nodes that no longer exist, and finished ones beyond a limit.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::pods::is_finished;
use super::runtime::informer::{Index, Store};
use super::runtime::object::{Key, Object, set_condition};
use super::runtime::session::{Context, Session};
use super::runtime::worker::{Again, Controller, KeyQueue, tolerate_change};
use crate::client::{DeleteOptions, ObjectClient, resources};
use crate::status::ApiError;

/// A node may come back under its name; its pods are kept for so long.
const QUARANTINE: Duration = Duration::from_secs(40);
/// Pods that were told to go are not kept so long: nobody is left who could confirm their end.
const LEAVING_QUARANTINE: Duration = Duration::from_secs(3);
/// Finished pods kept in the whole cluster; beyond it the oldest go.
const FINISHED_LIMIT: usize = 12_500;
/// How often finished pods are counted.
const COUNT_INTERVAL: Duration = Duration::from_secs(60);
/// The key under which finished pods are counted. No node can have this name.
const COUNT_KEY: &str = "";

pub(super) struct PodGc {
    client: Arc<dyn ObjectClient>,
    nodes: Arc<Store>,
    pods: Arc<Store>,
    missing_since: Mutex<HashMap<String, Instant>>,
}

impl PodGc {
    pub(super) fn new(context: &Context, queue: &KeyQueue) -> Self {
        let nodes = context.informers.store(resources::NODES);
        let pods = context.informers.store(resources::PODS);
        let by_node = queue.clone();
        nodes.subscribe(move |change| {
            if change.new.is_none() {
                by_node.add(Key::new("", change.object().name()));
            }
        });
        let (by_pod, lookup) = (queue.clone(), nodes.clone());
        pods.subscribe(move |change| {
            let Some(pod) = &change.new else { return };
            let key = Key::new("", pod.text(&["spec", "nodeName"]));
            if !key.name.is_empty() && lookup.get(&key).is_none() {
                by_pod.add(key);
            }
        });
        queue.add_after(Key::new("", COUNT_KEY), COUNT_INTERVAL);
        Self {
            client: context.client.clone(),
            nodes,
            pods,
            missing_since: Mutex::default(),
        }
    }

    /// How long the node has been missing.
    fn missing_for(&self, node: &str, now: Instant) -> Duration {
        let mut missing = self
            .missing_since
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        now.duration_since(*missing.entry(node.to_owned()).or_insert(now))
    }

    fn release(&self, node: &str) {
        self.missing_since
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(node);
    }

    async fn remove(
        &self,
        pod: &Value,
        orphaned: bool,
        session: &Session<'_>,
    ) -> Result<(), ApiError> {
        if orphaned && !is_finished(pod) {
            let mut status = pod.at(&["status"]).cloned().unwrap_or_else(|| json!({}));
            let now = jiff::Timestamp::now();
            let (reason, message) = ("DeletionByPodGC", "PodGC: node no longer exists");
            set_condition(
                &mut status,
                "DisruptionTarget",
                "True",
                reason,
                message,
                now,
            );
            let patch = json!({
                "metadata": {"uid": pod.uid()},
                "status": {"phase": "Failed", "conditions": status.at(&["conditions"])},
            });
            tolerate_change(
                session
                    .merge(resources::PODS, &pod.key(), "status", patch)
                    .await,
            )?;
        }
        let at_once = DeleteOptions {
            grace_period_s: Some(0),
            ..DeleteOptions::default()
        };
        session.delete(resources::PODS, pod, at_once).await
    }

    async fn remove_surplus(&self, session: &Session<'_>) -> Result<(), ApiError> {
        if self.pods.len() <= FINISHED_LIMIT {
            return Ok(());
        }
        let mut finished = self.pods.all();
        finished.retain(|pod| is_finished(pod) && !pod.is_deleting());
        finished.sort_by_key(|pod| pod.created_at());
        let surplus = finished.len().saturating_sub(FINISHED_LIMIT);
        for pod in finished.iter().take(surplus) {
            self.remove(pod, false, session).await?;
        }
        Ok(())
    }
}

impl Controller for PodGc {
    const NAME: &'static str = "pod-gc";
    const WORKERS: usize = 1;

    async fn reconcile(&self, key: &Key, session: &Session<'_>) -> Result<Again, ApiError> {
        if &*key.name == COUNT_KEY {
            self.remove_surplus(session).await?;
            return Ok(Some(COUNT_INTERVAL));
        }
        if self.nodes.get(key).is_some() {
            self.release(&key.name);
            return Ok(None);
        }
        let pods = self.pods.by(Index::Node, &key.name);
        if pods.is_empty() {
            self.release(&key.name);
            return Ok(None);
        }
        let missing_for = self.missing_for(&key.name, Instant::now());
        let left = |pod: &Value| {
            let keep = if pod.is_deleting() {
                LEAVING_QUARANTINE
            } else {
                QUARANTINE
            };
            keep.saturating_sub(missing_for)
        };
        let (due, kept): (Vec<_>, Vec<_>) = pods.into_iter().partition(|pod| left(pod).is_zero());
        let again = kept.iter().map(|pod| left(pod)).min();
        if due.is_empty() {
            return Ok(again);
        }
        // The cache may be behind: only the API itself says that the node is really gone.
        match self.client.get(resources::NODES, "", &key.name).await {
            Ok(_) => return Ok(Some(LEAVING_QUARANTINE)),
            Err(e) if e.is_not_found() => {}
            Err(e) => return Err(e),
        }
        for pod in due {
            self.remove(&pod, true, session).await?;
        }
        Ok(again)
    }
}
