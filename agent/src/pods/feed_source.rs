//! The node feed as the pod runner's control plane.

use std::sync::Arc;

use async_trait::async_trait;
use control_api::desired::DesiredState;
use control_api::v1::{EventReport, PodStatus};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::report::{ControlPlane, ReportFailure};
use super::runner::{PodRunner, StartError, Update, start_with};
use crate::config::Config;
use crate::feed::{FeedHandle, Origin};

/// Updates that wait for the runner; the feed coalesces the rest.
const PENDING_UPDATES: usize = 4;

#[async_trait]
impl ControlPlane for FeedHandle {
    fn state(&self) -> Arc<DesiredState> {
        Self::state(self)
    }

    async fn report_pods(&self, pods: Vec<PodStatus>) -> Result<(), ReportFailure> {
        Ok(Self::report_pods(self, pods).await?)
    }

    async fn report_events(&self, events: Vec<EventReport>) -> Result<(), ReportFailure> {
        Ok(Self::report_events(self, events).await?)
    }
}

/// Runs the pods that the feed lists, until `shutdown`.
///
/// # Errors
/// [`StartError`] without a `[pods]` section, or when its folders cannot be made.
pub fn start(
    config: &Config,
    feed: &FeedHandle,
    shutdown: CancellationToken,
) -> Result<PodRunner, StartError> {
    let (sender, receiver) = mpsc::channel(PENDING_UPDATES);
    let runner = start_with(config, Arc::new(feed.clone()), receiver, shutdown.clone())?;
    runner.serve_node_api(config, shutdown)?;
    let mut updates = feed.updates();
    tokio::spawn(async move {
        loop {
            let update = updates.next().await;
            let authoritative = update.origin == Origin::Server;
            // The state itself is not kept: workers ask for the current one when they need it.
            let update = Update {
                changes: update.changes,
                authoritative,
            };
            if sender.send(update).await.is_err() {
                return;
            }
        }
    });
    Ok(runner)
}
