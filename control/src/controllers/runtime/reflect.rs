//! Follows one resource: list, then watch, and list again whenever the watch ends.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio_util::sync::CancellationToken;

use crate::client::{List, ObjectClient, Resource, WatchEvent};
use crate::status::ApiError;

/// Pause before a list that follows a failure; doubles up to [`LAST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(5);
/// A custom resource without objects answers 404 until its definition is served.
const NOT_SERVED_PAUSE: Duration = Duration::from_secs(5);

/// Takes what a resource's list and watch report, in order.
pub(crate) trait Sink: Send + Sync {
    /// The whole content: what is not in it is gone.
    fn replace(&self, items: Vec<Arc<Value>>, revision: u64);
    fn apply(&self, event: WatchEvent);
}

/// Feeds the sink until shutdown.
pub(crate) async fn reflect(
    client: Arc<dyn ObjectClient>,
    resource: Resource,
    sink: Arc<dyn Sink>,
    shutdown: CancellationToken,
) {
    let mut pause = FIRST_PAUSE;
    while !shutdown.is_cancelled() {
        let outcome = tokio::select! {
            outcome = follow(client.as_ref(), resource, sink.as_ref()) => outcome,
            () = shutdown.cancelled() => return,
        };
        let wait = match outcome {
            Ok(()) => {
                pause = FIRST_PAUSE;
                Duration::ZERO
            }
            // Compacted between list and watch: an ordinary race, so list again at once.
            Err(e) if e.code == 410 => Duration::ZERO,
            Err(e) if e.is_not_found() => NOT_SERVED_PAUSE,
            Err(e) => {
                tracing::warn!(
                    group = resource.group, resource = resource.plural, error = %e,
                    "list and watch failed; retrying"
                );
                let wait = pause;
                pause = (pause * 2).min(LAST_PAUSE);
                wait
            }
        };
        if !wait.is_zero() {
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = shutdown.cancelled() => return,
            }
        } else {
            tokio::task::yield_now().await;
        }
    }
}

/// One list and the watch that follows it; returns when the watch ends.
async fn follow(
    client: &dyn ObjectClient,
    resource: Resource,
    sink: &dyn Sink,
) -> Result<(), ApiError> {
    let List { items, revision } = client.list(resource, "").await?;
    sink.replace(items, revision);
    let mut events = client.watch(resource, revision).await?;
    while let Some(event) = events.recv().await {
        sink.apply(event);
    }
    Ok(())
}
