//! Keeps the exact number of pods that a ReplicaSet asks for, whatever happens to them.

mod core;

use std::sync::Arc;

use jiff::Timestamp;
use serde_json::Value;

use self::core::{Failure, Step};
use super::batch::slow_start;
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

const API_VERSION: &str = "apps/v1";
const KIND: &str = "ReplicaSet";

#[derive(Debug)]
pub(super) struct ReplicaSets {
    sets: Arc<Store>,
    pods: Arc<Store>,
}

impl ReplicaSets {
    pub(super) fn new(context: &Context, queue: &KeyQueue) -> Self {
        let sets = context.informers.store(resources::REPLICA_SETS);
        enqueue_changes(context, resources::REPLICA_SETS, queue);
        enqueue_owners(context, resources::PODS, KIND, queue);
        let pods = context.informers.store(resources::PODS);
        enqueue_selecting(context, resources::PODS, resources::REPLICA_SETS, queue);
        Self { sets, pods }
    }

    /// Pods of all ReplicaSets of the same managing owner, to see which nodes are crowded.
    fn family(&self, rs: &Value, owned: &[Arc<Value>]) -> Vec<Arc<Value>> {
        let Some(owner) = rs.controller() else {
            return owned.to_vec();
        };
        self.sets
            .by(Index::Controller, owner.uid)
            .iter()
            .flat_map(|sibling| self.pods.by(Index::Controller, sibling.uid()))
            .filter(|pod| pods::is_active(pod))
            .collect()
    }

    /// Adopts and releases; gives the pods that the set has afterwards.
    async fn claim(&self, rs: &Value, session: &Session<'_>) -> Result<Vec<Arc<Value>>, ApiError> {
        let candidates = self.pods.in_namespace(rs.namespace());
        let mut claims = pods::claim(rs, &selector(rs), candidates.into_iter());
        for pod in &claims.release {
            let patch = pods::release(pod, rs.uid());
            tolerate_change(session.merge(resources::PODS, &pod.key(), "", patch).await)?;
        }
        for pod in &claims.adopt {
            let reference = controller_reference(rs, API_VERSION, KIND);
            let patch = pods::adoption(pod, reference);
            let made = session.merge(resources::PODS, &pod.key(), "", patch).await;
            if let Some(pod) = tolerate_change(made)? {
                claims.owned.push(pod);
            }
        }
        Ok(claims.owned)
    }

    async fn carry_out(
        &self,
        rs: &Value,
        step: Step,
        session: &Session<'_>,
    ) -> Result<(), Failure> {
        let recorder = session.recorder().named("replicaset-controller");
        let about = (rs, API_VERSION, KIND);
        match step {
            Step::Nothing => Ok(()),
            Step::Create(count) => {
                let made = slow_start(count, || async {
                    let pod = pods::from_template(
                        rs.at(&["spec", "template"]).unwrap_or(&Value::Null),
                        rs.namespace(),
                        &pods::name_prefix(rs.name()),
                        controller_reference(rs, API_VERSION, KIND),
                    );
                    let pod = session.create(resources::PODS, pod).await?;
                    let message = format!("Created pod: {}", pod.name());
                    recorder.normal(about, "SuccessfulCreate", message);
                    Ok(())
                })
                .await;
                made.map_err(|e: ApiError| {
                    let message = format!("Error creating: {}", e.message);
                    recorder.warning(about, "FailedCreate", message);
                    Failure {
                        reason: "FailedCreate",
                        error: e,
                    }
                })
            }
            Step::Delete(pods) => {
                let deletions = pods.iter().map(|pod| async {
                    session
                        .delete(resources::PODS, pod, DeleteOptions::default())
                        .await?;
                    let message = format!("Deleted pod: {}", pod.name());
                    recorder.normal(about, "SuccessfulDelete", message);
                    Ok(())
                });
                let results = futures::future::join_all(deletions).await;
                results
                    .into_iter()
                    .collect::<Result<(), ApiError>>()
                    .map_err(|e| {
                        let message = format!("Error deleting: {}", e.message);
                        recorder.warning(about, "FailedDelete", message);
                        Failure {
                            reason: "FailedDelete",
                            error: e,
                        }
                    })
            }
        }
    }
}

impl Controller for ReplicaSets {
    const NAME: &'static str = "replicaset";
    const WORKERS: usize = 8;

    async fn reconcile(&self, key: &Key, session: &Session<'_>) -> Result<Again, ApiError> {
        let Some(rs) = self.sets.get(key) else {
            return Ok(None);
        };
        let owned = self.claim(&rs, session).await?;
        let crowd = pods::count_by_node(self.family(&rs, &owned).iter().map(AsRef::as_ref));
        let now = Timestamp::now();
        let step = core::step(&rs, &owned, &crowd, now);
        let outcome = self.carry_out(&rs, step, session).await;
        let (status, again) = core::status(&rs, &owned, outcome.as_ref().err(), now);
        if rs.at(&["status"]) != Some(&status) {
            let written = session
                .replace_status(resources::REPLICA_SETS, &rs, status)
                .await;
            tolerate_change(written)?;
        }
        match outcome {
            Ok(()) => Ok(again),
            Err(f) => Err(f.error),
        }
    }
}

fn selector(rs: &Value) -> Selector {
    Selector::from_label_selector(rs.at(&["spec", "selector"]))
}
