//! The API for the rooms in this process: the same path as HTTP, without bytes.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::api::{
    Api, DeleteRequest, ListQuery, PatchRequest, Target, Warnings, WriteOptions, read_view,
};
use super::codec::FieldValidation;
use super::object;
use super::registry::{ResourceDef, SubresourceKind, Text, Verb};
use crate::client::{
    CatalogEntry, DeleteOptions, EventKind, List, ObjectClient, PatchKind, Resource, WatchEvent,
};
use crate::status::ApiError;
use crate::store::{Event, StoreError};

/// Events on their way to one reader in the process.
const WATCH_QUEUE: usize = 256;

/// An [`ObjectClient`] on the API in this process.
#[derive(Clone, Debug)]
pub struct LocalClient {
    api: Arc<Api>,
    /// Recorded as the field manager of writes.
    manager: &'static str,
}

impl LocalClient {
    #[must_use]
    pub const fn new(api: Arc<Api>, manager: &'static str) -> Self {
        Self { api, manager }
    }

    fn def(&self, r: Resource) -> Result<Arc<ResourceDef>, ApiError> {
        self.api.resource(r.group, r.version, r.plural)
    }

    fn options(&self) -> WriteOptions {
        WriteOptions {
            dry_run: false,
            manager: self.manager.into(),
            validation: FieldValidation::Ignore,
            warnings: Warnings::default(),
        }
    }

    async fn write(
        &self,
        r: Resource,
        object: Value,
        sub: Option<SubresourceKind>,
    ) -> Result<Arc<Value>, ApiError> {
        let def = self.def(r)?;
        let (namespace, name) = (
            object::namespace(&object).to_owned(),
            object::name(&object).to_owned(),
        );
        let target = Target {
            def: &def,
            namespace: &namespace,
            name: &name,
            sub,
        };
        self.api
            .update(target, object, &self.options())
            .await
            .map(|(object, _)| object)
    }
}

#[async_trait]
impl ObjectClient for LocalClient {
    async fn get(&self, r: Resource, namespace: &str, name: &str) -> Result<Arc<Value>, ApiError> {
        self.api.get(&*self.def(r)?, namespace, name).await
    }

    async fn list(&self, r: Resource, namespace: &str) -> Result<List, ApiError> {
        let def = self.def(r)?;
        let listed = self
            .api
            .list(&def, namespace, &ListQuery::default())
            .await?;
        let items = listed.records.iter().map(|record| read_view(&def, record));
        Ok(List {
            items: items.collect::<Result<_, _>>()?,
            revision: listed.revision,
        })
    }

    async fn watch(
        &self,
        r: Resource,
        revision: u64,
    ) -> Result<mpsc::Receiver<WatchEvent>, ApiError> {
        let def = self.def(r)?;
        let watch = self.api.watch(&def, "", revision).await?;
        let (sender, receiver) = mpsc::channel(WATCH_QUEUE);
        tokio::spawn(pump(def, watch, sender));
        Ok(receiver)
    }

    async fn create(
        &self,
        r: Resource,
        namespace: &str,
        mut object: Value,
    ) -> Result<Arc<Value>, ApiError> {
        let def = self.def(r)?;
        if let Value::Object(map) = &mut object {
            map.insert("apiVersion".into(), def.api_version().into());
            map.insert("kind".into(), json!(def.kind));
        }
        self.api
            .create(&def, namespace, object, &self.options())
            .await
    }

    async fn update(&self, r: Resource, object: Value) -> Result<Arc<Value>, ApiError> {
        self.write(r, object, None).await
    }

    async fn update_status(&self, r: Resource, object: Value) -> Result<Arc<Value>, ApiError> {
        self.write(r, object, Some(SubresourceKind::Status)).await
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
        let def = self.def(r)?;
        let sub = match subresource {
            "" => None,
            other => match def.subresource(other) {
                Some(found) => Some(found.what),
                None => return Err(super::api::no_such_path()),
            },
        };
        let target = Target {
            def: &def,
            namespace,
            name,
            sub,
        };
        let request = PatchRequest::Patch(kind, patch);
        let ((object, _), _) = self.api.patch(target, &request, &self.options()).await?;
        Ok(object)
    }

    async fn delete(
        &self,
        r: Resource,
        namespace: &str,
        name: &str,
        options: DeleteOptions,
    ) -> Result<(), ApiError> {
        let request = DeleteRequest {
            grace_period_s: options.grace_period_s,
            uid: options.uid,
            resource_version: options.resource_version,
            propagation: options.propagation,
            dry_run: false,
        };
        self.api
            .delete(&*self.def(r)?, namespace, name, &request)
            .await
            .map(|_| ())
    }

    fn catalog(&self) -> Vec<CatalogEntry> {
        let registry = self.api.registry();
        let stored = registry.iter().filter(|def| {
            let topic = if def.group.is_empty() {
                "core"
            } else {
                &*def.group
            };
            let own_topic = def.storage.split_once('/') == Some((topic, &*def.plural));
            let reads = [Verb::List, Verb::Watch, Verb::Delete];
            own_topic
                && def.storage_version == def.api_version()
                && reads.iter().all(|verb| def.allows(*verb))
        });
        stored
            .map(|def| CatalogEntry {
                resource: Resource {
                    group: interned(&def.group),
                    version: interned(&def.version),
                    plural: interned(&def.plural),
                },
                kind: interned(&def.kind),
                namespaced: def.namespaced,
            })
            .collect()
    }

    async fn bind(&self, namespace: &str, pod: &str, node: &str) -> Result<(), ApiError> {
        let binding = json!({"target": {"kind": "Node", "name": node}});
        self.api
            .bind(namespace, pod, &binding, &self.options())
            .await
    }
}

/// Names of resources that are defined at run time live as long as the process; each is kept once.
fn interned(text: &Text) -> &'static str {
    static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    match text {
        Cow::Borrowed(name) => name,
        Cow::Owned(name) => {
            let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(known) = names.get(name.as_str()) {
                return known;
            }
            let kept: &'static str = Box::leak(name.clone().into_boxed_str());
            names.insert(kept);
            kept
        }
    }
}

/// How often a watch of a quiet resource tells how far the store has come.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

async fn pump(
    def: Arc<ResourceDef>,
    mut watch: Box<dyn crate::store::Watch>,
    sender: mpsc::Sender<WatchEvent>,
) {
    let mut progress = tokio::time::interval(PROGRESS_INTERVAL);
    progress.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut told = 0;
    loop {
        let events = tokio::select! {
            events = watch.next() => events,
            () = sender.closed() => return,
            _ = progress.tick() => {
                let reached = watch.progress();
                // A reader with a full queue is behind anyway.
                if reached > told && sender.try_send(bookmark(reached)).is_ok() {
                    told = reached;
                }
                continue;
            }
        };
        let events = match events {
            Ok(events) => events,
            // The closed channel tells the reader to list again.
            Err(StoreError::Closed | StoreError::Compacted { .. }) => return,
            Err(e) => {
                tracing::warn!(resource = %def.plural, error = %e, "a watch ended");
                return;
            }
        };
        for event in events {
            match translate(&def, &event) {
                Ok(event) => {
                    told = event.revision;
                    if sender.send(event).await.is_err() {
                        return;
                    }
                }
                Err(e) => {
                    tracing::error!(resource = %def.plural, error = %e, "a stored object cannot be read");
                    return;
                }
            }
        }
    }
}

/// Nothing older than `revision` is still to come.
fn bookmark(revision: u64) -> WatchEvent {
    WatchEvent {
        kind: EventKind::Bookmark,
        object: Arc::new(Value::Null),
        revision,
        committed_at_us: 0,
    }
}

fn translate(def: &ResourceDef, event: &Event) -> Result<WatchEvent, ApiError> {
    let kind = match (&event.previous, event.deleted) {
        (_, true) => EventKind::Deleted,
        (Some(_), false) => EventKind::Modified,
        (None, false) => EventKind::Added,
    };
    Ok(WatchEvent {
        kind,
        object: read_view(def, &event.record)?,
        revision: event.record.revision,
        committed_at_us: event.committed_at_us,
    })
}
