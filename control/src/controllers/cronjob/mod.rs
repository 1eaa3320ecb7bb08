//! Starts Jobs by the clock.

mod core;
mod schedule;

use std::sync::Arc;

use jiff::Timestamp;
use serde_json::Value;

use self::core::{API_VERSION, KIND, Plan, plan};
use super::runtime::informer::{Index, Store};
use super::runtime::object::{Key, Object};
use super::runtime::session::{Context, Session};
use super::runtime::worker::{
    Again, Controller, KeyQueue, enqueue_changes, enqueue_owners, tolerate_change,
};
use crate::client::{DeleteOptions, Propagation, resources};
use crate::status::ApiError;

#[derive(Debug)]
pub(super) struct CronJobs {
    crons: Arc<Store>,
    jobs: Arc<Store>,
}

impl CronJobs {
    pub(super) fn new(context: &Context, queue: &KeyQueue) -> Self {
        enqueue_changes(context, resources::CRON_JOBS, queue);
        enqueue_owners(context, resources::JOBS, KIND, queue);
        Self {
            crons: context.informers.store(resources::CRON_JOBS),
            jobs: context.informers.store(resources::JOBS),
        }
    }

    async fn remove(&self, job: &Value, session: &Session<'_>) -> Result<(), ApiError> {
        let options = DeleteOptions {
            propagation: Some(Propagation::Background),
            ..DeleteOptions::default()
        };
        session.delete(resources::JOBS, job, options).await
    }
}

impl Controller for CronJobs {
    const NAME: &'static str = "cronjob";
    const WORKERS: usize = 2;

    async fn reconcile(&self, key: &Key, session: &Session<'_>) -> Result<Again, ApiError> {
        let Some(cron) = self.crons.get(key) else {
            return Ok(None);
        };
        let jobs = self.jobs.by(Index::Controller, cron.uid());
        let Plan {
            start,
            stop,
            forget,
            status,
            warnings,
            again,
        } = plan(&cron, &jobs, Timestamp::now());
        let recorder = session.recorder().named("cronjob-controller");
        let about = (cron.as_ref(), API_VERSION, KIND);
        for (reason, message) in warnings {
            recorder.warning(about, reason, message);
        }
        for job in stop.iter().chain(&forget) {
            self.remove(job, session).await?;
            recorder.normal(
                about,
                "SuccessfulDelete",
                format!("Deleted job {}", job.name()),
            );
        }
        if let Some(job) = start {
            match session.create(resources::JOBS, job).await {
                Ok(made) => {
                    let message = format!("Created job {}", made.name());
                    recorder.normal(about, "SuccessfulCreate", message);
                }
                // Made before, by an attempt whose status was not written.
                Err(e) if e.is_already_exists() => {}
                Err(e) => {
                    let message = format!("Error creating job: {}", e.message);
                    recorder.warning(about, "FailedCreate", message);
                    return Err(e);
                }
            }
        }
        if cron.at(&["status"]) != Some(&status) {
            let r = resources::CRON_JOBS;
            tolerate_change(session.replace_status(r, &cron, status).await)?;
        }
        Ok(again)
    }
}
