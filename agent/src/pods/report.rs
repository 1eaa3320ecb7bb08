//! Carries pod statuses and events to the control plane: the latest status of each pod, until it has arrived.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use control_api::desired::DesiredState;
use control_api::v1::{EventReport, PodStatus};
use tokio::sync::Notify;

/// Events beyond this many wait for nobody: the oldest are dropped.
const MAX_PENDING_EVENTS: usize = 1000;
/// Statuses in one report.
const MAX_BATCH: usize = 200;
const RETRY_FIRST: Duration = Duration::from_millis(200);
const RETRY_LONGEST: Duration = Duration::from_secs(5);

/// A report did not arrive; it will be sent again.
pub type ReportFailure = Box<dyn std::error::Error + Send + Sync>;

/// The control plane as the pod runner sees it.
#[async_trait]
pub trait ControlPlane: Send + Sync + 'static {
    /// The desired state held now. Not to be kept.
    fn state(&self) -> Arc<DesiredState>;
    /// Delivers whole statuses.
    ///
    /// # Errors
    /// When they did not arrive.
    async fn report_pods(&self, pods: Vec<PodStatus>) -> Result<(), ReportFailure>;
    /// Delivers events, best effort.
    ///
    /// # Errors
    /// When they did not arrive.
    async fn report_events(&self, events: Vec<EventReport>) -> Result<(), ReportFailure>;
}

/// What waits to be sent.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    pending: Mutex<Pending>,
    wake: Notify,
}

#[derive(Debug, Default)]
struct Pending {
    pods: BTreeMap<String, PodStatus>,
    events: VecDeque<EventReport>,
}

impl Outbox {
    pub(crate) fn pod(&self, status: PodStatus) {
        self.pending().pods.insert(status.uid.clone(), status);
        self.wake.notify_one();
    }

    pub(crate) fn event(&self, event: EventReport) {
        let mut pending = self.pending();
        if pending.events.len() >= MAX_PENDING_EVENTS {
            pending.events.pop_front();
        }
        pending.events.push_back(event);
        drop(pending);
        self.wake.notify_one();
    }

    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> (Vec<PodStatus>, Vec<EventReport>) {
        let mut pending = self.pending();
        let mut pods = Vec::new();
        while pods.len() < MAX_BATCH {
            let Some((_, status)) = pending.pods.pop_first() else {
                break;
            };
            pods.push(status);
        }
        (pods, pending.events.drain(..).collect())
    }

    /// Statuses that did not arrive go back, unless a newer one waits already.
    fn give_back(&self, pods: Vec<PodStatus>) {
        let mut pending = self.pending();
        for status in pods {
            pending.pods.entry(status.uid.clone()).or_insert(status);
        }
    }

    /// Sends for ever.
    pub(crate) async fn run(self: Arc<Self>, control: Arc<dyn ControlPlane>) {
        let mut retry = RETRY_FIRST;
        loop {
            let (pods, events) = self.take();
            if pods.is_empty() && events.is_empty() {
                self.wake.notified().await;
                continue;
            }
            // Statuses first: others wait for them.
            if !pods.is_empty() {
                if let Err(error) = control.report_pods(pods.clone()).await {
                    tracing::warn!(%error, pods = pods.len(), "pod statuses not delivered, will retry");
                    self.give_back(pods);
                    tokio::time::sleep(retry).await;
                    retry = (retry * 2).min(RETRY_LONGEST);
                } else {
                    retry = RETRY_FIRST;
                }
            }
            if !events.is_empty()
                && let Err(error) = control.report_events(events).await
            {
                tracing::debug!(%error, "events not delivered");
            }
        }
    }
}
