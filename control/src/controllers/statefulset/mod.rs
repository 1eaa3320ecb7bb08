//! Keeps pods with lasting names and claims, one after the other.

mod core;

use std::collections::BTreeSet;
use std::sync::Arc;

use jiff::Timestamp;
use serde_json::Value;

use self::core::{API_VERSION, Action, KIND, Plan, Revisions, plan};
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
pub(super) struct StatefulSets {
    sets: Arc<Store>,
    pods: Arc<Store>,
    claims: Arc<Store>,
    revisions: Arc<Store>,
}

impl StatefulSets {
    pub(super) fn new(context: &Context, queue: &KeyQueue) -> Self {
        enqueue_changes(context, resources::STATEFUL_SETS, queue);
        enqueue_owners(context, resources::PODS, KIND, queue);
        enqueue_selecting(context, resources::PODS, resources::STATEFUL_SETS, queue);
        Self {
            sets: context.informers.store(resources::STATEFUL_SETS),
            pods: context.informers.store(resources::PODS),
            claims: context.informers.store(resources::PERSISTENT_VOLUME_CLAIMS),
            revisions: context.informers.store(resources::CONTROLLER_REVISIONS),
        }
    }

    async fn claim(&self, set: &Value, session: &Session<'_>) -> Result<Vec<Arc<Value>>, ApiError> {
        let selector = Selector::from_label_selector(set.at(&["spec", "selector"]));
        let candidates = self.pods.in_namespace(set.namespace());
        let named = candidates
            .into_iter()
            .filter(|p| core::ordinal(set, p.name()).is_some());
        let mut claims = pods::claim(set, &selector, named);
        let r = resources::PODS;
        for pod in &claims.release {
            tolerate_change(
                session
                    .merge(r, &pod.key(), "", pods::release(pod, set.uid()))
                    .await,
            )?;
        }
        for pod in &claims.adopt {
            let patch = pods::adoption(pod, controller_reference(set, API_VERSION, KIND));
            if let Some(pod) = tolerate_change(session.merge(r, &pod.key(), "", patch).await)? {
                claims.owned.push(pod);
            }
        }
        Ok(claims.owned)
    }

    /// The revision of the current template, made when it is new.
    async fn update_revision(
        &self,
        set: &Value,
        revisions: &[Arc<Value>],
        session: &Session<'_>,
    ) -> Result<Arc<Value>, ApiError> {
        let r = resources::CONTROLLER_REVISIONS;
        match history::step(set, (API_VERSION, KIND), revisions, 0) {
            Step::Keep(revision) => Ok(revision),
            Step::Renumber(revision) => session.update(r, revision).await,
            Step::Create(revision) => session.create(r, revision).await,
        }
    }

    async fn carry_out(
        &self,
        set: &Value,
        action: Action,
        session: &Session<'_>,
    ) -> Result<(), ApiError> {
        let recorder = session.recorder().named("statefulset-controller");
        let about = (set, API_VERSION, KIND);
        match action {
            Action::Create { pod, claims } => {
                for claim in claims {
                    if self.claims.get(&claim.key()).is_some() {
                        continue;
                    }
                    let name = claim.name().to_owned();
                    match session
                        .create(resources::PERSISTENT_VOLUME_CLAIMS, claim)
                        .await
                    {
                        Ok(_) => recorder.normal(
                            about,
                            "SuccessfulCreate",
                            format!(
                                "create Claim {name} Pod {} in StatefulSet {} success",
                                pod.name(),
                                set.name()
                            ),
                        ),
                        Err(e) if e.is_already_exists() => {}
                        Err(e) => return Err(e),
                    }
                }
                let name = pod.name().to_owned();
                match session.create(resources::PODS, pod).await {
                    Ok(_) => {
                        let message =
                            format!("create Pod {name} in StatefulSet {} successful", set.name());
                        recorder.normal(about, "SuccessfulCreate", message);
                        Ok(())
                    }
                    // Of an earlier set of this name, still on its way out: its end wakes this set.
                    Err(e) if e.is_already_exists() => Ok(()),
                    Err(e) => {
                        let message = format!(
                            "create Pod {name} in StatefulSet {} failed error: {}",
                            set.name(),
                            e.message
                        );
                        recorder.warning(about, "FailedCreate", message);
                        Err(e)
                    }
                }
            }
            Action::Delete(pod) => {
                session
                    .delete(resources::PODS, &pod, DeleteOptions::default())
                    .await?;
                let message = format!(
                    "delete Pod {} in StatefulSet {} successful",
                    pod.name(),
                    set.name()
                );
                recorder.normal(about, "SuccessfulDelete", message);
                Ok(())
            }
        }
    }

    async fn forget_old_revisions(
        &self,
        set: &Value,
        owned: &[Arc<Value>],
        status: &Value,
        revisions: &[Arc<Value>],
        session: &Session<'_>,
    ) -> Result<(), ApiError> {
        let mut in_use: BTreeSet<String> = owned
            .iter()
            .filter_map(|p| p.label(history::HASH_LABEL))
            .map(str::to_owned)
            .collect();
        for field in ["currentRevision", "updateRevision"] {
            in_use.insert(status.text(&[field]).to_owned());
        }
        for revision in history::surplus(set, revisions, &in_use) {
            let r = resources::CONTROLLER_REVISIONS;
            session
                .delete(r, &revision, DeleteOptions::default())
                .await?;
        }
        Ok(())
    }
}

impl Controller for StatefulSets {
    const NAME: &'static str = "statefulset";
    const WORKERS: usize = 2;

    async fn reconcile(&self, key: &Key, session: &Session<'_>) -> Result<Again, ApiError> {
        let Some(set) = self.sets.get(key) else {
            return Ok(None);
        };
        let owned = self.claim(&set, session).await?;
        let mut revisions = self.revisions.by(Index::Controller, set.uid());
        if set.is_deleting() && revisions.is_empty() {
            return Ok(None);
        }
        let update = self.update_revision(&set, &revisions, session).await?;
        revisions.retain(|r| r.name() != update.name());
        revisions.push(update.clone());
        let named = set.text(&["status", "currentRevision"]);
        let current = revisions
            .iter()
            .find(|r| r.name() == named)
            .unwrap_or(&update)
            .clone();
        let revisions_now = Revisions {
            current: &current,
            update: &update,
        };
        let Plan {
            actions,
            status,
            again,
        } = plan(&set, &owned, revisions_now, Timestamp::now());
        for action in actions {
            self.carry_out(&set, action, session).await?;
        }
        self.forget_old_revisions(&set, &owned, &status, &revisions, session)
            .await?;
        if set.at(&["status"]) != Some(&status) {
            let r = resources::STATEFUL_SETS;
            tolerate_change(session.replace_status(r, &set, status).await)?;
        }
        Ok(again)
    }
}
