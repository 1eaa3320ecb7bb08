//! Writing on behalf of one unit of work, and waiting until the cache shows what was written.
//!
//! A controller that looks at its cache before its own last writes have arrived there would repeat them: create a pod
//! too many, delete one too many. So every write is noted, and the key of the work is given back to the queue only
//! after the cache has caught up with all of them.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::Value;

use super::events::Recorder;
use super::informer::{Informers, Store};
use super::object::{Key, Object};
use crate::client::{DeleteOptions, ObjectClient, PatchKind, Resource};
use crate::status::ApiError;

/// A write that takes longer than this to come back through the watch is worth a line in the log.
const SLOW_ECHO: Duration = Duration::from_secs(10);

/// What every controller works with.
#[derive(Clone)]
pub(crate) struct Context {
    pub(crate) client: Arc<dyn ObjectClient>,
    pub(crate) informers: Informers,
    pub(crate) recorder: Recorder,
}

enum Pending {
    /// The cache must have seen this revision.
    Revision(Arc<Store>, u64),
    /// The object of this uid must be gone, or be on its way out.
    Deletion(Arc<Store>, Key, String),
}

/// One unit of work; see the module.
pub(crate) struct Session<'a> {
    context: &'a Context,
    pending: Mutex<Vec<Pending>>,
}

impl<'a> Session<'a> {
    pub(crate) fn new(context: &'a Context) -> Self {
        Self {
            context,
            pending: Mutex::default(),
        }
    }

    pub(crate) fn recorder(&self) -> &Recorder {
        &self.context.recorder
    }

    fn note(&self, pending: Pending) {
        self.pending
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(pending);
    }

    fn note_object(&self, resource: Resource, object: &Value) {
        if let Some(store) = self.context.informers.existing(resource) {
            self.note(Pending::Revision(store, object.revision()));
        }
    }

    /// Creates in the namespace that the object names.
    pub(crate) async fn create(
        &self,
        resource: Resource,
        object: Value,
    ) -> Result<Arc<Value>, ApiError> {
        let namespace = object.namespace().to_owned();
        match self
            .context
            .client
            .create(resource, &namespace, object)
            .await
        {
            Ok(made) => {
                self.note_object(resource, &made);
                Ok(made)
            }
            Err(e) => {
                if e.code >= 500 {
                    self.note_doubt(resource, &namespace).await;
                }
                Err(e)
            }
        }
    }

    /// The answer was lost, so the object may have been made: the cache must show all that the API has now.
    async fn note_doubt(&self, resource: Resource, namespace: &str) {
        let Some(store) = self.context.informers.existing(resource) else {
            return;
        };
        match self.context.client.list(resource, namespace).await {
            Ok(list) => {
                let newest = list.items.iter().map(|o| o.revision()).max();
                self.note(Pending::Revision(store, newest.unwrap_or(0)));
            }
            Err(error) => {
                tracing::debug!(resource = resource.plural, %error, "list after a doubtful create")
            }
        }
    }

    pub(crate) async fn update(
        &self,
        resource: Resource,
        object: Value,
    ) -> Result<Arc<Value>, ApiError> {
        let made = self.context.client.update(resource, object).await?;
        self.note_object(resource, &made);
        Ok(made)
    }

    pub(crate) async fn update_status(
        &self,
        resource: Resource,
        object: Value,
    ) -> Result<Arc<Value>, ApiError> {
        let made = self.context.client.update_status(resource, object).await?;
        self.note_object(resource, &made);
        Ok(made)
    }

    /// Replaces the status of the object as it was read; refused (409) when the object has changed since.
    pub(crate) async fn replace_status(
        &self,
        resource: Resource,
        read: &Value,
        status: Value,
    ) -> Result<Arc<Value>, ApiError> {
        let mut object = read.clone();
        super::object::set(&mut object, &["status"], status);
        self.update_status(resource, object).await
    }

    /// Merge patch of an object or, when `subresource` is not empty, of its part.
    pub(crate) async fn merge(
        &self,
        resource: Resource,
        key: &Key,
        subresource: &str,
        patch: Value,
    ) -> Result<Arc<Value>, ApiError> {
        let client = &self.context.client;
        let made = client
            .patch(
                resource,
                &key.namespace,
                &key.name,
                subresource,
                PatchKind::Merge,
                patch,
            )
            .await?;
        self.note_object(resource, &made);
        Ok(made)
    }

    /// Deletes the very object that was read. One that is gone already counts as deleted.
    pub(crate) async fn delete(
        &self,
        resource: Resource,
        object: &Value,
        mut options: DeleteOptions,
    ) -> Result<(), ApiError> {
        options.uid.get_or_insert_with(|| object.uid().to_owned());
        let client = &self.context.client;
        match client
            .delete(resource, object.namespace(), object.name(), options)
            .await
        {
            Ok(()) => {}
            // A conflict is about the uid: the object that was meant is gone, another has its name.
            Err(e) if e.is_not_found() || e.is_conflict() => {}
            Err(e) => return Err(e),
        }
        if let Some(store) = self.context.informers.existing(resource) {
            self.note(Pending::Deletion(
                store,
                object.key(),
                object.uid().to_owned(),
            ));
        }
        Ok(())
    }

    /// Returns when the cache shows everything that was written.
    pub(crate) async fn settle(self) {
        let pending = self
            .pending
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        for write in pending {
            let mut echo = std::pin::pin!(async {
                match &write {
                    Pending::Revision(store, revision) => {
                        store.wait_until(|_, seen| seen >= *revision).await;
                    }
                    Pending::Deletion(store, key, uid) => {
                        store
                            .wait_until(|store, _| {
                                store
                                    .get(key)
                                    .is_none_or(|o| o.uid() != uid || o.is_deleting())
                            })
                            .await;
                    }
                }
            });
            while tokio::time::timeout(SLOW_ECHO, &mut echo).await.is_err() {
                tracing::warn!("a write has not come back through the watch yet; still waiting");
            }
        }
    }
}
