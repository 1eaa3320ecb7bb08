//! Gives every waiting pod a node. The core decides (pure); this runtime feeds it with changes and carries decisions out.

mod cluster;
mod core;
mod filters;
pub(crate) mod fitting;
mod pod;
mod preempt;
mod queue;
mod rules;
mod scores;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::{Notify, Semaphore};
use tokio_util::sync::CancellationToken;

use self::core::{Core, Decision};
use self::pod::Pod;
use crate::client::{DeleteOptions, ObjectClient, PatchKind, resources};
use crate::controllers::Informers;
use crate::controllers::runtime::events::Recorder;
use crate::controllers::runtime::object::{Object, set_condition};

/// Writes (bindings and conditions) under way at the same time.
const WRITES_LIMIT: usize = 64;
/// How often pods that have waited very long are looked for.
const OVERDUE_CHECK: Duration = Duration::from_secs(30);

struct Scheduler {
    client: Arc<dyn ObjectClient>,
    recorder: Recorder,
    core: Mutex<Core>,
    wake: Notify,
    writes: Arc<Semaphore>,
}

/// Schedules pods of `default-scheduler` until shutdown.
pub async fn run(client: Arc<dyn ObjectClient>, informers: Informers, shutdown: CancellationToken) {
    let recorder = Recorder::start(client.clone(), shutdown.clone()).named("default-scheduler");
    let scheduler = Arc::new(Scheduler {
        client,
        recorder,
        core: Mutex::default(),
        wake: Notify::new(),
        writes: Arc::new(Semaphore::new(WRITES_LIMIT)),
    });
    let (nodes, pods) = (
        informers.store(resources::NODES),
        informers.store(resources::PODS),
    );
    let namespaces = informers.store(resources::NAMESPACES);
    let budgets = informers.store(resources::POD_DISRUPTION_BUDGETS);
    // Everything that exists must be known before the first decision, or a full node looks empty.
    informers.synced().await;
    let on_namespace = scheduler.clone();
    namespaces.subscribe(move |change| on_namespace.core().namespace_changed(change));
    let on_budget = scheduler.clone();
    budgets.subscribe(move |change| on_budget.core().budget_changed(change));
    let on_node = scheduler.clone();
    nodes.subscribe(move |change| {
        on_node.core().node_changed(change, Instant::now());
        on_node.wake.notify_one();
    });
    let on_pod = scheduler.clone();
    pods.subscribe(move |change| {
        on_pod.core().pod_changed(change, Instant::now());
        on_pod.wake.notify_one();
    });
    tokio::select! {
        () = scheduler.decide() => {}
        () = shutdown.cancelled() => {}
    }
}

impl Scheduler {
    fn core(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes decision after decision, and sleeps while none is due.
    async fn decide(self: &Arc<Self>) {
        let mut overdue = tokio::time::interval(OVERDUE_CHECK);
        loop {
            let (decision, due) = {
                let mut core = self.core();
                (core.next(Instant::now()), core.due())
            };
            if let Some(decision) = decision {
                // Waiting for a free place here bounds what is decided but not yet written.
                let Ok(permit) = self.writes.clone().acquire_owned().await else {
                    return;
                };
                let scheduler = self.clone();
                tokio::spawn(async move {
                    scheduler.carry_out(decision).await;
                    drop(permit);
                });
                continue;
            }
            let until_due = async {
                match due {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.wake.notified() => {}
                () = until_due => {}
                _ = overdue.tick() => self.core().wake_overdue(Instant::now()),
            }
        }
    }

    async fn carry_out(&self, decision: Decision) {
        match decision {
            Decision::Bind { pod, node } => self.bind(&pod, &node).await,
            Decision::Unschedulable { pod, message } => self.report(&pod, message, None).await,
            Decision::Preempt {
                pod,
                node,
                victims,
                message,
            } => {
                self.report(&pod, message, Some(&node)).await;
                for victim in victims {
                    self.preempt(&victim, &pod, &node).await;
                }
            }
        }
    }

    async fn bind(&self, pod: &Pod, node: &str) {
        let (namespace, name) = (&pod.key.namespace, &pod.key.name);
        let about = (pod.object.as_ref(), "v1", "Pod");
        match self.client.bind(namespace, name, node).await {
            Ok(()) => {
                self.core().bound(&pod.uid);
                let message = format!("Successfully assigned {} to {node}", pod.key);
                self.recorder.normal(about, "Scheduled", message);
            }
            Err(error) => {
                tracing::debug!(pod = %pod.key, node, %error, "binding refused");
                let there = self.client.get(resources::PODS, namespace, name).await;
                let gone = match &there {
                    Ok(now) => now.uid() != pod.uid,
                    Err(e) => e.is_not_found(),
                };
                {
                    let mut core = self.core();
                    core.not_bound(&pod.uid, gone, Instant::now());
                    core.replace(there.ok().filter(|_| !gone), Instant::now());
                }
                if !gone {
                    let message = format!("binding rejected: {}", error.message);
                    self.recorder.warning(about, "FailedScheduling", message);
                }
                self.wake.notify_one();
            }
        }
    }

    /// Tells why the pod has no node: in its PodScheduled condition and as an event.
    async fn report(&self, pod: &Pod, message: String, nominated: Option<&str>) {
        let object = pod.object.as_ref();
        let mut status: Value = object.at(&["status"]).cloned().unwrap_or_else(|| json!({}));
        let now = Timestamp::now();
        let changed = set_condition(
            &mut status,
            "PodScheduled",
            "False",
            "Unschedulable",
            &message,
            now,
        );
        if changed || nominated.is_some() {
            let mut patch = json!({
                "metadata": {"uid": pod.uid},
                "status": {"conditions": status.at(&["conditions"])},
            });
            if let Some(node) = nominated {
                patch["status"]["nominatedNodeName"] = node.into();
            }
            self.patch_status(pod, patch).await;
        }
        self.recorder
            .warning((object, "v1", "Pod"), "FailedScheduling", message);
    }

    async fn patch_status(&self, pod: &Pod, patch: Value) {
        let (namespace, name) = (&pod.key.namespace, &pod.key.name);
        let r = resources::PODS;
        match self
            .client
            .patch(r, namespace, name, "status", PatchKind::Merge, patch)
            .await
        {
            Ok(_) => {}
            Err(e) if e.is_not_found() || e.is_conflict() => {}
            Err(error) => tracing::warn!(pod = %pod.key, %error, "write the pod's status"),
        }
    }

    /// Tells a pod to leave so that a more important one can come.
    async fn preempt(&self, victim: &Pod, by: &Pod, node: &str) {
        let mut status = victim
            .object
            .at(&["status"])
            .cloned()
            .unwrap_or_else(|| json!({}));
        let message = "default-scheduler: preempting to accommodate a higher priority pod";
        let reason = "PreemptionByScheduler";
        let now = Timestamp::now();
        set_condition(
            &mut status,
            "DisruptionTarget",
            "True",
            reason,
            message,
            now,
        );
        let patch = json!({
            "metadata": {"uid": victim.uid},
            "status": {"conditions": status.at(&["conditions"])},
        });
        self.patch_status(victim, patch).await;
        let options = DeleteOptions {
            uid: Some(victim.uid.clone()),
            ..DeleteOptions::default()
        };
        let (namespace, name) = (&victim.key.namespace, &victim.key.name);
        match self
            .client
            .delete(resources::PODS, namespace, name, options)
            .await
        {
            Ok(()) => {
                let message = format!("Preempted by pod {} on node {node}", by.uid);
                let about = (victim.object.as_ref(), "v1", "Pod");
                self.recorder.normal(about, "Preempted", message);
            }
            Err(e) if e.is_not_found() || e.is_conflict() => {}
            Err(error) => {
                tracing::warn!(pod = %victim.key, %error, "delete a pod to make room");
                self.core().make_room_again(&by.uid, Instant::now());
                self.wake.notify_one();
            }
        }
    }
}
