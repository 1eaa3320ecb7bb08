//! Rolls a Deployment's template out over ReplicaSets.

mod core;
mod progress;
pub(crate) mod sets;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Value, json};

use self::core::{Action, Plan, PodCounts, plan};
use self::sets::{API_VERSION, KIND, REVISION, count, is_rolling, replicas, same_template};
use super::pods::{self, Availability};
use super::runtime::informer::{Index, Store};
use super::runtime::object::{Key, Object, controller_reference, set};
use super::runtime::selector::Selector;
use super::runtime::session::{Context, Session};
use super::runtime::worker::{
    Again, Controller, KeyQueue, enqueue_changes, enqueue_owners, enqueue_selecting,
    tolerate_change,
};
use crate::client::{DeleteOptions, resources};
use crate::status::ApiError;

#[derive(Debug)]
pub(super) struct Deployments {
    deployments: Arc<Store>,
    sets: Arc<Store>,
    pods: Arc<Store>,
}

impl Deployments {
    pub(super) fn new(context: &Context, queue: &KeyQueue) -> Self {
        let deployments = context.informers.store(resources::DEPLOYMENTS);
        let sets = context.informers.store(resources::REPLICA_SETS);
        let pods = context.informers.store(resources::PODS);
        enqueue_changes(context, resources::DEPLOYMENTS, queue);
        enqueue_owners(context, resources::REPLICA_SETS, KIND, queue);
        enqueue_selecting(
            context,
            resources::REPLICA_SETS,
            resources::DEPLOYMENTS,
            queue,
        );
        // Recreate goes on when the last old pod is gone.
        let (queue, lookup_sets, lookup) = (queue.clone(), sets.clone(), deployments.clone());
        pods.subscribe(move |change| {
            if change.new.as_ref().is_some_and(|p| !pods::is_finished(p)) {
                return;
            }
            let pod = change.object();
            let Some(owner) = pod.controller().filter(|o| o.kind == "ReplicaSet") else {
                return;
            };
            let Some(rs) = lookup_sets.get(&Key::new(pod.namespace(), owner.name)) else {
                return;
            };
            let Some(owner) = rs.controller().filter(|o| o.kind == KIND) else {
                return;
            };
            let key = Key::new(pod.namespace(), owner.name);
            if lookup.get(&key).is_some_and(|d| !is_rolling(&d)) {
                queue.add(key);
            }
        });
        Self {
            deployments,
            sets,
            pods,
        }
    }

    async fn claim(&self, d: &Value, session: &Session<'_>) -> Result<Vec<Arc<Value>>, ApiError> {
        let candidates = self.sets.in_namespace(d.namespace());
        let mut claims = pods::claim(d, &selector(d), candidates.into_iter());
        let r = resources::REPLICA_SETS;
        for rs in &claims.release {
            tolerate_change(
                session
                    .merge(r, &rs.key(), "", pods::release(rs, d.uid()))
                    .await,
            )?;
        }
        for rs in &claims.adopt {
            let patch = pods::adoption(rs, controller_reference(d, API_VERSION, KIND));
            if let Some(rs) = tolerate_change(session.merge(r, &rs.key(), "", patch).await)? {
                claims.owned.push(rs);
            }
        }
        Ok(claims.owned)
    }

    /// Whether pods of another set than that of the current template exist.
    fn old_pods_left(&self, d: &Value, owned: &[Arc<Value>]) -> bool {
        let new = sets::find_new(d, owned).map(|rs| rs.uid().to_owned());
        owned
            .iter()
            .filter(|rs| new.as_deref() != Some(rs.uid()))
            .flat_map(|rs| self.pods.by(Index::Controller, rs.uid()))
            .any(|pod| !pods::is_finished(&pod))
    }

    /// Pods by the uid of their set.
    fn pod_counts(
        &self,
        d: &Value,
        owned: &[Arc<Value>],
        now: Timestamp,
    ) -> HashMap<String, PodCounts> {
        let min_ready_s = d.number(&["spec", "minReadySeconds"]).unwrap_or(0);
        let count = |rs: &Arc<Value>| {
            let mut counts = PodCounts::default();
            for pod in self.pods.by(Index::Controller, rs.uid()) {
                if pods::is_active(&pod) {
                    counts.active += 1;
                    let available = pods::availability(&pod, min_ready_s, now);
                    counts.available += i64::from(available == Availability::Available);
                }
            }
            (rs.uid().to_owned(), counts)
        };
        owned.iter().map(count).collect()
    }

    async fn carry_out(
        &self,
        d: &Value,
        action: Action,
        session: &Session<'_>,
    ) -> Result<(), ApiError> {
        let recorder = session.recorder().named("deployment-controller");
        let scaled = |rs: &Value, from: i64| {
            let to = replicas(rs);
            let way = if to > from { "up" } else { "down" };
            let message = format!("Scaled {way} replica set {} from {from} to {to}", rs.name());
            recorder.normal((d, API_VERSION, KIND), "ScalingReplicaSet", message);
        };
        match action {
            Action::Create(rs) => match session.create(resources::REPLICA_SETS, rs.clone()).await {
                Ok(made) => {
                    if replicas(&made) > 0 {
                        scaled(&made, 0);
                    }
                    Ok(())
                }
                Err(e) if e.is_already_exists() => self.resolve_collision(d, &rs, session).await,
                Err(e) => Err(e),
            },
            Action::Update { set, was } => {
                let Some(made) =
                    tolerate_change(session.update(resources::REPLICA_SETS, set).await)?
                else {
                    return Ok(());
                };
                if let Some(from) = was {
                    scaled(&made, from);
                }
                Ok(())
            }
            Action::Delete(rs) => {
                let r = resources::REPLICA_SETS;
                session.delete(r, &rs, DeleteOptions::default()).await
            }
        }
    }

    /// The name of the new set is taken. By the set that was meant: nothing to do. By another template with the same
    /// hash: the next name is computed with a higher collision count.
    async fn resolve_collision(
        &self,
        d: &Value,
        wanted: &Value,
        session: &Session<'_>,
    ) -> Result<(), ApiError> {
        let Some(there) = self.sets.get(&wanted.key()) else {
            // Not in the cache yet: look again when it is.
            return Err(ApiError::conflict(
                "apps",
                "replicasets",
                wanted.name(),
                "exists already",
            ));
        };
        let ours = there.controller().is_some_and(|o| o.uid == d.uid());
        let template = ["spec", "template"];
        let null = Value::Null;
        if ours
            && same_template(
                there.at(&template).unwrap_or(&null),
                wanted.at(&template).unwrap_or(&null),
            )
        {
            return Ok(());
        }
        let mut status = d.at(&["status"]).cloned().unwrap_or_else(|| json!({}));
        set(
            &mut status,
            &["collisionCount"],
            (count(d, "collisionCount") + 1).into(),
        );
        session
            .replace_status(resources::DEPLOYMENTS, d, status)
            .await?;
        Ok(())
    }
}

impl Controller for Deployments {
    const NAME: &'static str = "deployment";
    const WORKERS: usize = 4;

    async fn reconcile(&self, key: &Key, session: &Session<'_>) -> Result<Again, ApiError> {
        let Some(d) = self.deployments.get(key) else {
            return Ok(None);
        };
        if selector(&d).is_empty() {
            let about = (d.as_ref(), API_VERSION, KIND);
            let message =
                "This deployment is selecting all pods. A non-empty selector is required.";
            session
                .recorder()
                .warning(about, "SelectingAll", message.to_owned());
            return Ok(None);
        }
        let owned = self.claim(&d, session).await?;
        let old_pods_left = !is_rolling(&d) && self.old_pods_left(&d, &owned);
        let now = Timestamp::now();
        let pods = self.pod_counts(&d, &owned, now);
        let Plan {
            actions,
            revision,
            status,
            again,
        } = plan(&d, &owned, &pods, old_pods_left, now);
        for action in actions {
            self.carry_out(&d, action, session).await?;
        }
        let mut read = d;
        if let Some(revision) = revision.map(|r| r.to_string())
            && read.annotation(REVISION) != Some(revision.as_str())
        {
            let patch = json!({"metadata": {"annotations": {REVISION: revision}}});
            let made = session.merge(resources::DEPLOYMENTS, key, "", patch).await;
            let Some(made) = tolerate_change(made)? else {
                return Ok(None);
            };
            // The status below was computed for this generation; a newer one comes with its own event.
            if made.generation() != read.generation() {
                return Ok(None);
            }
            read = made;
        }
        if read.at(&["status"]) != Some(&status) {
            let written = session
                .replace_status(resources::DEPLOYMENTS, &read, status)
                .await;
            tolerate_change(written)?;
        }
        Ok(again)
    }
}

fn selector(d: &Value) -> Selector {
    Selector::from_label_selector(d.at(&["spec", "selector"]))
}
