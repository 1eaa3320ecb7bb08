//! The garbage collector: objects whose owners are gone go too, in the background, in the foreground or not at all
//! (orphaned), as the deletion asked for.
//!
//! It follows every resource of the catalog, custom ones included, but keeps only who owns whom. Before it deletes
//! because an owner is missing it asks the API: the graph is assembled from independent watches and may be behind.

mod graph;

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use self::graph::{FOREGROUND, Graph, ORPHAN, OwnerRef, OwnerState, Vertex};
use super::pods;
use super::runtime::events::Recorder;
use super::runtime::object::{Key, Object};
use super::runtime::queue::Queue;
use super::runtime::reflect::{Sink, reflect};
use super::runtime::session::Context;
use super::runtime::worker::KeyQueue;
use crate::client::{
    CatalogEntry, DeleteOptions, EventKind, ObjectClient, PatchKind, Propagation, Resource,
    WatchEvent,
};
use crate::status::ApiError;

const WORKERS: usize = 8;
/// How often the catalog is looked at for new and for gone resources.
const CATALOG_INTERVAL: Duration = Duration::from_secs(2);
/// Resources whose objects are neither owned nor owners, and many.
const IGNORED: [(&str, &str); 2] = [("", "events"), ("events.k8s.io", "events")];

struct Shared {
    client: Arc<dyn ObjectClient>,
    recorder: Recorder,
    graph: Mutex<Graph>,
    /// Uids to look at.
    queue: Queue<String>,
    /// Namespaces that lost an object: one that is being emptied looks again.
    namespaces: KeyQueue,
    /// Told about every namespace that won or lost an object.
    content_changed: Box<dyn Fn(&str) + Send + Sync>,
}

impl Shared {
    fn graph(&self) -> MutexGuard<'_, Graph> {
        self.graph.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look_at(&self, uids: Vec<String>) {
        for uid in uids {
            self.queue.add(uid);
        }
    }

    fn put(&self, entry: CatalogEntry, object: &Value) {
        let vertex = Vertex::read(entry.resource, entry.kind, object);
        let (new, look_at) = {
            let mut graph = self.graph();
            (
                graph.get(object.uid()).is_none(),
                graph.put(object.uid(), vertex),
            )
        };
        self.look_at(look_at);
        if new && !object.namespace().is_empty() {
            (self.content_changed)(object.namespace());
        }
    }

    fn remove(&self, uid: &str) {
        let (namespace, look_at) = {
            let mut graph = self.graph();
            (
                graph.get(uid).map(|v| v.key.namespace.clone()),
                graph.remove(uid),
            )
        };
        self.look_at(look_at);
        if let Some(namespace) = namespace.filter(|n| !n.is_empty()) {
            (self.content_changed)(&namespace);
            self.namespaces.add(Key {
                namespace: "".into(),
                name: namespace,
            });
        }
    }
}

/// Feeds the graph from one resource.
struct Feed {
    shared: Arc<Shared>,
    entry: CatalogEntry,
}

impl Sink for Feed {
    fn replace(&self, items: Vec<Arc<Value>>, _: u64) {
        let present: BTreeSet<String> = items.iter().map(|o| o.uid().to_owned()).collect();
        for object in &items {
            self.shared.put(self.entry, object);
        }
        let gone = self.shared.graph().missing(self.entry.resource, &present);
        gone.iter().for_each(|uid| self.shared.remove(uid));
    }

    fn apply(&self, event: WatchEvent) {
        match event.kind {
            EventKind::Added | EventKind::Modified => self.shared.put(self.entry, &event.object),
            EventKind::Deleted => self.shared.remove(event.object.uid()),
            EventKind::Bookmark => {}
        }
    }
}

/// Collects until shutdown. `namespaces` gets the namespaces that lost an object; `content_changed` is told about every
/// namespace that won or lost one.
pub(super) async fn run(
    context: Context,
    namespaces: KeyQueue,
    content_changed: impl Fn(&str) + Send + Sync + 'static,
    shutdown: CancellationToken,
) {
    let shared = Arc::new(Shared {
        client: context.client.clone(),
        recorder: context.recorder.named("garbage-collector-controller"),
        graph: Mutex::default(),
        queue: Queue::new(),
        namespaces,
        content_changed: Box::new(content_changed),
    });
    let mut tasks = JoinSet::new();
    tasks.spawn(follow_catalog(shared.clone(), shutdown.clone()));
    for _ in 0..WORKERS {
        let (shared, shutdown) = (shared.clone(), shutdown.clone());
        tasks.spawn(async move {
            loop {
                let uid = tokio::select! {
                    uid = shared.queue.next() => uid,
                    () = shutdown.cancelled() => return,
                };
                match shared.collect(&uid).await {
                    Ok(()) => shared.queue.forget(&uid),
                    Err(e) => {
                        let delay = shared.queue.retry(uid.clone());
                        tracing::debug!(%uid, ?delay, error = %e, "garbage collection: trying again");
                    }
                }
                shared.queue.done(&uid);
            }
        });
    }
    while tasks.join_next().await.is_some() {}
}

/// Starts a watch for each resource of the catalog, and ends those of resources that are gone.
async fn follow_catalog(shared: Arc<Shared>, shutdown: CancellationToken) {
    let mut watches: HashMap<Resource, CancellationToken> = HashMap::new();
    let mut tick = tokio::time::interval(CATALOG_INTERVAL);
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            () = shutdown.cancelled() => return,
        }
        let mut catalog = shared.client.catalog();
        catalog.retain(|e| !IGNORED.contains(&(e.resource.group, e.resource.plural)));
        for entry in &catalog {
            watches.entry(entry.resource).or_insert_with(|| {
                let stop = shutdown.child_token();
                let feed = Arc::new(Feed {
                    shared: shared.clone(),
                    entry: *entry,
                });
                let client = shared.client.clone();
                tokio::spawn(reflect(client, entry.resource, feed, stop.clone()));
                stop
            });
        }
        watches.retain(|resource, stop| {
            let stays = catalog.iter().any(|e| e.resource == *resource);
            if !stays {
                stop.cancel();
                let gone = shared.graph().missing(*resource, &BTreeSet::new());
                gone.iter().for_each(|uid| shared.remove(uid));
            }
            stays
        });
    }
}

/// The owners of an object by what they mean for it.
#[derive(Default)]
struct Verdict {
    alive: bool,
    waiting: Vec<String>,
    missing: Vec<String>,
}

impl Shared {
    async fn collect(&self, uid: &str) -> Result<(), ApiError> {
        let Some(vertex) = self.graph().get(uid).cloned() else {
            return Ok(());
        };
        if vertex.deleting {
            if vertex.orphan {
                return self.orphan_dependents(uid, &vertex).await;
            }
            if vertex.foreground {
                return self.free_when_alone(uid, &vertex).await;
            }
            return Ok(());
        }
        if vertex.owners.is_empty() {
            return Ok(());
        }
        let verdict = self.judge(&vertex).await?;
        if verdict.alive {
            let gone: Vec<String> = verdict.missing.into_iter().chain(verdict.waiting).collect();
            return if gone.is_empty() {
                Ok(())
            } else {
                self.drop_owners(uid, &vertex, &gone).await
            };
        }
        let has_dependents = self.graph().dependents(uid).next().is_some();
        let in_foreground = !verdict.waiting.is_empty() && has_dependents;
        let propagation = if in_foreground || vertex.foreground {
            Propagation::Foreground
        } else if vertex.orphan {
            Propagation::Orphan
        } else {
            Propagation::Background
        };
        let options = DeleteOptions {
            uid: Some(uid.to_owned()),
            propagation: Some(propagation),
            ..DeleteOptions::default()
        };
        let Key { namespace, name } = &vertex.key;
        tolerate(
            self.client
                .delete(vertex.resource, namespace, name, options)
                .await,
        )
    }

    async fn judge(&self, vertex: &Vertex) -> Result<Verdict, ApiError> {
        let mut verdict = Verdict::default();
        for owner in &vertex.owners {
            let state = self.graph().owner_state(vertex, owner);
            match state {
                OwnerState::Alive => verdict.alive = true,
                OwnerState::Waiting => verdict.waiting.push(owner.uid.clone()),
                OwnerState::Foreign => {
                    self.warn_foreign(vertex, owner).await;
                    verdict.missing.push(owner.uid.clone());
                }
                OwnerState::Unknown if self.exists(vertex, owner).await? => verdict.alive = true,
                OwnerState::Unknown => verdict.missing.push(owner.uid.clone()),
            }
        }
        Ok(verdict)
    }

    /// Asks the API whether the owner is there under this very uid. A kind that is not served may come back, so its
    /// objects count as existing.
    async fn exists(&self, vertex: &Vertex, owner: &OwnerRef) -> Result<bool, ApiError> {
        let catalog = self.client.catalog();
        let group = owner
            .api_version
            .split_once('/')
            .map_or("", |(group, _)| group);
        let Some(entry) = catalog
            .iter()
            .find(|e| e.resource.group == group && e.kind == owner.kind)
        else {
            return Ok(true);
        };
        let namespace = if entry.namespaced {
            &*vertex.key.namespace
        } else {
            ""
        };
        if entry.namespaced && namespace.is_empty() {
            // A cluster-scoped object cannot be owned by a namespaced one.
            return Ok(false);
        }
        match self
            .client
            .get(entry.resource, namespace, &owner.name)
            .await
        {
            Ok(found) => Ok(found.uid() == owner.uid),
            Err(e) if e.is_not_found() => Ok(false),
            Err(e) => Err(e),
        }
    }

    async fn warn_foreign(&self, vertex: &Vertex, owner: &OwnerRef) {
        let found = self
            .client
            .get(vertex.resource, &vertex.key.namespace, &vertex.key.name)
            .await;
        let Ok(object) = found else { return };
        let message = format!(
            "ownerRef [{}/{}, namespace: {}, name: {}, uid: {}] does not exist in namespace \"{}\"",
            owner.api_version,
            owner.kind,
            vertex.key.namespace,
            owner.name,
            owner.uid,
            vertex.key.namespace
        );
        let version = object.text(&["apiVersion"]).to_owned();
        let about = (object.as_ref(), version.as_str(), vertex.kind);
        self.recorder
            .warning(about, "OwnerRefInvalidNamespace", message);
    }

    /// Reads the object anew and gives it only when it is still the same.
    async fn read(&self, uid: &str, vertex: &Vertex) -> Result<Option<Arc<Value>>, ApiError> {
        let Key { namespace, name } = &vertex.key;
        match self.client.get(vertex.resource, namespace, name).await {
            Ok(object) => Ok(Some(object).filter(|o| o.uid() == uid)),
            Err(e) if e.is_not_found() => Ok(None),
            Err(e) => Err(e),
        }
    }

    async fn merge(&self, vertex: &Vertex, patch: Value) -> Result<(), ApiError> {
        let Key { namespace, name } = &vertex.key;
        let patched = self
            .client
            .patch(
                vertex.resource,
                namespace,
                name,
                "",
                PatchKind::Merge,
                patch,
            )
            .await;
        match patched {
            Ok(_) => Ok(()),
            Err(e) if e.is_not_found() => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// Removes references to owners that are gone or going from an object that has another living one.
    async fn drop_owners(
        &self,
        uid: &str,
        vertex: &Vertex,
        gone: &[String],
    ) -> Result<(), ApiError> {
        let Some(object) = self.read(uid, vertex).await? else {
            return Ok(());
        };
        let kept: Vec<&Value> = object
            .items(&["metadata", "ownerReferences"])
            .iter()
            .filter(|o| !gone.iter().any(|g| g == o.text(&["uid"])))
            .collect();
        let patch = json!({"metadata": {
            "uid": uid, "resourceVersion": object.text(&["metadata", "resourceVersion"]),
            "ownerReferences": kept,
        }});
        self.merge(vertex, patch).await
    }

    async fn remove_finalizer(
        &self,
        uid: &str,
        vertex: &Vertex,
        finalizer: &str,
    ) -> Result<(), ApiError> {
        let Some(object) = self.read(uid, vertex).await? else {
            return Ok(());
        };
        let kept: Vec<&Value> = object
            .items(&["metadata", "finalizers"])
            .iter()
            .filter(|f| f.as_str() != Some(finalizer))
            .collect();
        let patch = json!({"metadata": {
            "uid": uid, "resourceVersion": object.text(&["metadata", "resourceVersion"]),
            "finalizers": kept,
        }});
        self.merge(vertex, patch).await
    }

    /// Dependents as the API has them now, those included that the graph has not heard of yet.
    async fn live_dependents(
        &self,
        uid: &str,
        vertex: &Vertex,
    ) -> Result<Vec<(CatalogEntry, Arc<Value>)>, ApiError> {
        let mut found = Vec::new();
        let mut catalog = self.client.catalog();
        catalog.retain(|e| !IGNORED.contains(&(e.resource.group, e.resource.plural)));
        for entry in catalog {
            let list = match self
                .client
                .list(entry.resource, &vertex.key.namespace)
                .await
            {
                Ok(list) => list,
                Err(e) if e.is_not_found() || e.code == 405 => continue,
                Err(e) => return Err(e),
            };
            let owned = list
                .items
                .into_iter()
                .filter(|o| o.owners().any(|r| r.uid == uid));
            found.extend(owned.map(|o| (entry, o)));
        }
        Ok(found)
    }

    async fn orphan_dependents(&self, uid: &str, vertex: &Vertex) -> Result<(), ApiError> {
        for (entry, object) in self.live_dependents(uid, vertex).await? {
            let dependent = Vertex::read(entry.resource, entry.kind, &object);
            self.merge(&dependent, pods::release(&object, uid)).await?;
        }
        self.remove_finalizer(uid, vertex, ORPHAN).await
    }

    /// Deletes the dependents of an owner that waits, and lets it go when none of them blocks it any more.
    async fn free_when_alone(&self, uid: &str, vertex: &Vertex) -> Result<(), ApiError> {
        let (blocking, to_delete) = {
            let graph = self.graph();
            let blocks = |v: &Vertex| v.owners.iter().any(|o| o.uid == uid && o.blocks);
            let blocking = graph.dependents(uid).filter(|(_, v)| blocks(v)).count();
            let to_delete: Vec<String> = graph
                .dependents(uid)
                .filter(|(_, v)| !v.deleting)
                .map(|(uid, _)| uid.clone())
                .collect();
            (blocking, to_delete)
        };
        self.look_at(to_delete);
        if blocking > 0 {
            return Ok(());
        }
        // The graph may not know the newest dependents yet; their own watches will wake this owner again.
        let live = self.live_dependents(uid, vertex).await?;
        let blocks = |o: &Value| o.owners().any(|r| r.uid == uid && r.block_owner_deletion);
        if live.iter().any(|(_, object)| blocks(object)) {
            return Err(ApiError::conflict(
                "",
                vertex.kind,
                &vertex.key.name,
                "has dependents",
            ));
        }
        self.remove_finalizer(uid, vertex, FOREGROUND).await
    }
}

/// An object that is gone, or replaced by another of its name, needs no deletion.
fn tolerate(result: Result<(), ApiError>) -> Result<(), ApiError> {
    match result {
        Err(e) if !(e.is_not_found() || e.is_conflict()) => Err(e),
        _ => Ok(()),
    }
}
