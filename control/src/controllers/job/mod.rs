//! Runs pods of Jobs until enough of them have succeeded, and removes finished Jobs when their time is over.

mod core;
mod indexes;

use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Value, json};

use self::core::{API_VERSION, FINALIZER, KIND, Plan, has_finalizer, plan};
use super::pods;
use super::runtime::informer::{Index, Store};
use super::runtime::object::{Key, Object};
use super::runtime::session::{Context, Session};
use super::runtime::worker::{
    Again, Controller, KeyQueue, enqueue_changes, enqueue_owners, tolerate_change,
};
use crate::client::{DeleteOptions, Propagation, resources};
use crate::status::ApiError;

#[derive(Debug)]
pub(super) struct Jobs {
    jobs: Arc<Store>,
    pods: Arc<Store>,
}

impl Jobs {
    pub(super) fn new(context: &Context, queue: &KeyQueue) -> Self {
        enqueue_changes(context, resources::JOBS, queue);
        enqueue_owners(context, resources::PODS, KIND, queue);
        Self {
            jobs: context.informers.store(resources::JOBS),
            pods: context.informers.store(resources::PODS),
        }
    }

    async fn release(&self, pod: &Value, session: &Session<'_>) -> Result<(), ApiError> {
        let finalizers = pod.items(&["metadata", "finalizers"]);
        let kept: Vec<&Value> = finalizers
            .iter()
            .filter(|f| f.as_str() != Some(FINALIZER))
            .collect();
        let patch = json!({"metadata": {
            "uid": pod.uid(), "resourceVersion": pod.text(&["metadata", "resourceVersion"]),
            "finalizers": kept,
        }});
        tolerate_change(session.merge(resources::PODS, &pod.key(), "", patch).await)?;
        Ok(())
    }

    /// Nobody counts the pods of a Job that is gone: they must not be held back.
    async fn release_orphans(
        &self,
        key: &Key,
        uid: Option<&str>,
        session: &Session<'_>,
    ) -> Result<(), ApiError> {
        for pod in self.pods.in_namespace(&key.namespace) {
            let of_this_name = pod
                .controller()
                .is_some_and(|o| o.kind == KIND && o.name == &*key.name && Some(o.uid) != uid);
            if of_this_name && has_finalizer(&pod) {
                self.release(&pod, session).await?;
            }
        }
        Ok(())
    }

    async fn carry_out(
        &self,
        job: &Value,
        plan: &Plan,
        session: &Session<'_>,
    ) -> Result<(), ApiError> {
        let recorder = session.recorder().named("job-controller");
        let about = (job, API_VERSION, KIND);
        let deletions = plan.delete.iter().map(|pod| async {
            // A pod that this controller takes away is no failure of the Job: it must not be counted.
            if has_finalizer(pod) {
                self.release(pod, session).await?;
            }
            session
                .delete(resources::PODS, pod, DeleteOptions::default())
                .await?;
            recorder.normal(
                about,
                "SuccessfulDelete",
                format!("Deleted pod: {}", pod.name()),
            );
            Ok(())
        });
        let deleted: Result<(), ApiError> = futures::future::join_all(deletions)
            .await
            .into_iter()
            .collect();
        deleted?;
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

    async fn remove(&self, job: &Value, session: &Session<'_>) -> Result<(), ApiError> {
        let options = DeleteOptions {
            propagation: Some(Propagation::Foreground),
            resource_version: Some(job.text(&["metadata", "resourceVersion"]).to_owned()),
            ..DeleteOptions::default()
        };
        session.delete(resources::JOBS, job, options).await
    }
}

impl Controller for Jobs {
    const NAME: &'static str = "job";
    const WORKERS: usize = 4;

    async fn reconcile(&self, key: &Key, session: &Session<'_>) -> Result<Again, ApiError> {
        let job = self.jobs.get(key).filter(|job| !job.is_deleting());
        self.release_orphans(key, job.as_ref().map(|j| j.uid()), session)
            .await?;
        let Some(job) = job else { return Ok(None) };
        // Some other controller was asked to run it.
        let manager = job.text(&["spec", "managedBy"]);
        if !manager.is_empty() && manager != "kubernetes.io/job-controller" {
            return Ok(None);
        }
        let mut owned = self.pods.by(Index::Controller, job.uid());
        owned.retain(|pod| pod.namespace() == &*key.namespace);
        let plan = plan(&job, &owned, Timestamp::now());
        if plan.expired {
            self.remove(&job, session).await?;
            return Ok(None);
        }
        let outcome = self.carry_out(&job, &plan, session).await;
        if job.at(&["status"]) != Some(&plan.status) {
            let mut status = plan.status.clone();
            if outcome.is_err() {
                // What was planned is not what is there; the next round says how many run.
                let active = owned.iter().filter(|p| pods::is_active(p)).count();
                super::runtime::object::set(&mut status, &["active"], active.into());
            }
            let written = session.replace_status(resources::JOBS, &job, status).await;
            if tolerate_change(written)?.is_none() {
                return Ok(None);
            }
        }
        // Only now that the status names them may the pods go.
        for pod in &plan.release {
            self.release(pod, session).await?;
        }
        let recorder = session.recorder().named("job-controller");
        for (good, reason, message) in &plan.events {
            let about = (job.as_ref(), API_VERSION, KIND);
            if *good {
                recorder.normal(about, reason, message.clone());
            } else {
                recorder.warning(about, reason, message.clone());
            }
        }
        outcome.map(|()| plan.again)
    }
}
