//! Events live for an hour after they were last seen.

use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use super::{Api, DeleteRequest, ListQuery, read};
use crate::apiserver::object::{self, text};
use crate::status::ApiError;

const EVENT_LIFE: SignedDuration = SignedDuration::from_hours(1);
const SWEEP_EVERY: Duration = Duration::from_secs(300);
/// Events looked at in one step of a sweep.
const PAGE: usize = 500;

impl Api {
    /// Removes old Events until shutdown.
    pub async fn expire_events(self: Arc<Self>, shutdown: CancellationToken) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(SWEEP_EVERY) => {}
                () = shutdown.cancelled() => return,
            }
            if let Err(error) = self.sweep_events(Timestamp::now()).await {
                tracing::warn!(%error, "remove old events");
            }
        }
    }

    pub(super) async fn sweep_events(&self, now: Timestamp) -> Result<usize, ApiError> {
        let def = self.resource("", "v1", "events")?;
        let mut query = ListQuery {
            limit: PAGE,
            ..ListQuery::default()
        };
        let mut removed = 0;
        loop {
            let listed = self.list(&def, "", &query).await?;
            for record in &listed.records {
                let event = read::view(&def, record)?;
                if !is_old(&event, now) {
                    continue;
                }
                let request = DeleteRequest {
                    resource_version: Some(record.revision.to_string()),
                    ..DeleteRequest::default()
                };
                let (namespace, name) = (object::namespace(&event), object::name(&event));
                match self.delete(&def, namespace, name, &request).await {
                    Ok(_) => removed += 1,
                    // Seen again or gone meanwhile.
                    Err(e) if e.is_not_found() || e.is_conflict() => {}
                    Err(e) => return Err(e),
                }
            }
            match listed.next {
                Some(next) => query.after = Some(next),
                None => return Ok(removed),
            }
        }
    }
}

fn is_old(event: &Value, now: Timestamp) -> bool {
    let times = [
        "/series/lastObservedTime",
        "/lastTimestamp",
        "/eventTime",
        "/metadata/creationTimestamp",
    ];
    let seen = times
        .iter()
        .filter_map(|p| text(event, p).parse::<Timestamp>().ok())
        .max();
    seen.is_some_and(|seen| now.duration_since(seen) > EVENT_LIFE)
}
