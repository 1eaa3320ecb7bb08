//! For tests: an API that refuses some writes, loses some answers, and delivers its watches late and in fits.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use serde_json::Value;
use tokio::sync::mpsc;

use crate::client::{
    CatalogEntry, DeleteOptions, List, ObjectClient, PatchKind, Resource, WatchEvent,
};
use crate::status::ApiError;

/// Every so many-th write is refused before, and another one after it was done.
const REFUSED: u32 = 7;
const LOST: u32 = 11;
/// Watches end after so many events.
const WATCH_EVENTS: usize = 40;

pub(crate) struct Faulty {
    inner: Arc<dyn ObjectClient>,
    writes: AtomicU32,
    delay: Duration,
}

impl Faulty {
    pub(crate) fn new(inner: Arc<dyn ObjectClient>, delay: Duration) -> Self {
        Self {
            inner,
            writes: AtomicU32::new(0),
            delay,
        }
    }

    async fn write<T>(
        &self,
        work: impl Future<Output = Result<T, ApiError>> + Send,
    ) -> Result<T, ApiError> {
        let n = self.writes.fetch_add(1, Ordering::SeqCst);
        let fault = || Err(ApiError::new(500, "InternalError", "injected fault"));
        if n.is_multiple_of(REFUSED) {
            return fault();
        }
        let done = work.await;
        if n.is_multiple_of(LOST) {
            fault()
        } else {
            done
        }
    }
}

#[async_trait]
impl ObjectClient for Faulty {
    async fn get(&self, r: Resource, namespace: &str, name: &str) -> Result<Arc<Value>, ApiError> {
        self.inner.get(r, namespace, name).await
    }

    async fn list(&self, r: Resource, namespace: &str) -> Result<List, ApiError> {
        self.inner.list(r, namespace).await
    }

    async fn watch(
        &self,
        r: Resource,
        revision: u64,
    ) -> Result<mpsc::Receiver<WatchEvent>, ApiError> {
        let mut events = self.inner.watch(r, revision).await?;
        let (sender, receiver) = mpsc::channel(1);
        let delay = self.delay;
        tokio::spawn(async move {
            for _ in 0..WATCH_EVENTS {
                let event = tokio::select! {
                    event = events.recv() => event,
                    () = sender.closed() => return,
                };
                let Some(event) = event else { return };
                tokio::time::sleep(delay).await;
                if sender.send(event).await.is_err() {
                    return;
                }
            }
        });
        Ok(receiver)
    }

    async fn create(
        &self,
        r: Resource,
        namespace: &str,
        object: Value,
    ) -> Result<Arc<Value>, ApiError> {
        self.write(self.inner.create(r, namespace, object)).await
    }

    async fn update(&self, r: Resource, object: Value) -> Result<Arc<Value>, ApiError> {
        self.write(self.inner.update(r, object)).await
    }

    async fn update_status(&self, r: Resource, object: Value) -> Result<Arc<Value>, ApiError> {
        self.write(self.inner.update_status(r, object)).await
    }

    async fn patch(
        &self,
        r: Resource,
        namespace: &str,
        name: &str,
        subresource: &str,
        kind: PatchKind,
        patch: Value,
    ) -> Result<Arc<Value>, ApiError> {
        self.write(
            self.inner
                .patch(r, namespace, name, subresource, kind, patch),
        )
        .await
    }

    async fn delete(
        &self,
        r: Resource,
        namespace: &str,
        name: &str,
        options: DeleteOptions,
    ) -> Result<(), ApiError> {
        self.write(self.inner.delete(r, namespace, name, options))
            .await
    }

    async fn bind(&self, namespace: &str, pod: &str, node: &str) -> Result<(), ApiError> {
        self.write(self.inner.bind(namespace, pod, node)).await
    }

    fn catalog(&self) -> Vec<CatalogEntry> {
        self.inner.catalog()
    }
}
