//! Keeps one pod on every node that a DaemonSet fits.

mod core;

use std::collections::BTreeSet;
use std::sync::Arc;

use jiff::Timestamp;
use serde_json::Value;

use self::core::{API_VERSION, KIND, Plan, plan};
use super::history::{self, Step};
use super::pods;
use super::runtime::informer::{Index, Store};
use super::runtime::object::{Key, Object, controller_reference};
use super::runtime::selector::Selector;
use super::runtime::session::{Context, Session};
use super::runtime::worker::{
    Again, Controller, KeyQueue, enqueue_changes, enqueue_owners, enqueue_selecting,
    tolerate_change,
};
use crate::client::{DeleteOptions, resources};
use crate::status::ApiError;

#[derive(Debug)]
pub(super) struct DaemonSets {
    sets: Arc<Store>,
    pods: Arc<Store>,
    nodes: Arc<Store>,
    revisions: Arc<Store>,
}

impl DaemonSets {
    pub(super) fn new(context: &Context, queue: &KeyQueue) -> Self {
        enqueue_changes(context, resources::DAEMON_SETS, queue);
        enqueue_owners(context, resources::PODS, KIND, queue);
        enqueue_selecting(context, resources::PODS, resources::DAEMON_SETS, queue);
        let sets = context.informers.store(resources::DAEMON_SETS);
        let nodes = context.informers.store(resources::NODES);
        let (by_node, lookup) = (queue.clone(), sets.clone());
        nodes.subscribe(move |change| {
            let paths: [&[&str]; 2] = [&["metadata", "labels"], &["spec", "taints"]];
            let same = match (&change.old, &change.new) {
                (Some(old), Some(new)) => paths.iter().all(|path| old.at(path) == new.at(path)),
                _ => false,
            };
            if !same {
                lookup.all().iter().for_each(|ds| by_node.add(ds.key()));
            }
        });
        Self {
            sets,
            nodes,
            pods: context.informers.store(resources::PODS),
            revisions: context.informers.store(resources::CONTROLLER_REVISIONS),
        }
    }

    async fn claim(&self, ds: &Value, session: &Session<'_>) -> Result<Vec<Arc<Value>>, ApiError> {
        let selector = Selector::from_label_selector(ds.at(&["spec", "selector"]));
        let candidates = self.pods.in_namespace(ds.namespace());
        let mut claims = pods::claim(ds, &selector, candidates.into_iter());
        let r = resources::PODS;
        for pod in &claims.release {
            tolerate_change(
                session
                    .merge(r, &pod.key(), "", pods::release(pod, ds.uid()))
                    .await,
            )?;
        }
        for pod in &claims.adopt {
            let patch = pods::adoption(pod, controller_reference(ds, API_VERSION, KIND));
            if let Some(pod) = tolerate_change(session.merge(r, &pod.key(), "", patch).await)? {
                claims.owned.push(pod);
            }
        }
        Ok(claims.owned)
    }

    /// The hash of the current template, after its revision is there; old revisions go.
    async fn sync_revisions(
        &self,
        ds: &Value,
        owned: &[Arc<Value>],
        session: &Session<'_>,
    ) -> Result<String, ApiError> {
        let r = resources::CONTROLLER_REVISIONS;
        let revisions = self.revisions.by(Index::Controller, ds.uid());
        let current = match history::step(ds, (API_VERSION, KIND), &revisions, 0) {
            Step::Keep(revision) => revision,
            Step::Renumber(revision) => session.update(r, revision).await?,
            Step::Create(revision) => session.create(r, revision).await?,
        };
        let mut in_use: BTreeSet<String> = owned
            .iter()
            .filter_map(|p| p.label(history::HASH_LABEL))
            .map(str::to_owned)
            .collect();
        in_use.insert(current.name().to_owned());
        for revision in history::surplus(ds, &revisions, &in_use) {
            session
                .delete(r, &revision, DeleteOptions::default())
                .await?;
        }
        Ok(history::hash(&current).to_owned())
    }

    async fn carry_out(
        &self,
        ds: &Value,
        plan: &Plan,
        session: &Session<'_>,
    ) -> Result<(), ApiError> {
        let recorder = session.recorder().named("daemonset-controller");
        let about = (ds, API_VERSION, KIND);
        for pod in &plan.failed {
            let message = format!(
                "Found failed daemon pod {} on node {}, will try to kill it",
                pod.key(),
                pod.text(&["spec", "nodeName"])
            );
            recorder.warning(about, "FailedDaemonPod", message);
        }
        for pod in plan.delete.iter().chain(&plan.failed) {
            session
                .delete(resources::PODS, pod, DeleteOptions::default())
                .await?;
            recorder.normal(
                about,
                "SuccessfulDelete",
                format!("Deleted pod: {}", pod.name()),
            );
        }
        let creations = plan.create.iter().map(|pod| async {
            match session.create(resources::PODS, pod.clone()).await {
                Ok(made) => {
                    let message = format!("Created pod: {}", made.name());
                    recorder.normal(about, "SuccessfulCreate", message);
                    Ok(())
                }
                Err(e) => {
                    let message = format!("Error creating: {}", e.message);
                    recorder.warning(about, "FailedCreate", message);
                    Err(e)
                }
            }
        });
        futures::future::join_all(creations)
            .await
            .into_iter()
            .collect()
    }
}

impl Controller for DaemonSets {
    const NAME: &'static str = "daemonset";
    const WORKERS: usize = 2;

    async fn reconcile(&self, key: &Key, session: &Session<'_>) -> Result<Again, ApiError> {
        let Some(ds) = self.sets.get(key) else {
            return Ok(None);
        };
        if ds.is_deleting() {
            return Ok(None);
        }
        let owned = self.claim(&ds, session).await?;
        let hash = self.sync_revisions(&ds, &owned, session).await?;
        let plan = plan(&ds, &owned, &self.nodes.all(), &hash, Timestamp::now());
        let outcome = self.carry_out(&ds, &plan, session).await;
        if ds.at(&["status"]) != Some(&plan.status) {
            let r = resources::DAEMON_SETS;
            tolerate_change(session.replace_status(r, &ds, plan.status).await)?;
        }
        match outcome {
            // A pod that failed is replaced with patience: its reason may last.
            Ok(()) if !plan.failed.is_empty() => Err(ApiError::new(
                500,
                "InternalError",
                "daemon pods failed and are replaced",
            )),
            Ok(()) => Ok(plan.again),
            Err(e) => Err(e),
        }
    }
}
