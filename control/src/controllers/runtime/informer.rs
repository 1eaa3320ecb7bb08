//! The shared cache: one copy of every object of the watched resources, with indexes, for scheduler and controllers.
//!
//! Objects are the very `Arc`s that the watch delivers; nothing is copied. Subscribers are called in the order of the
//! changes, after the cache has taken them in.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use serde_json::Value;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::object::{Key, Object};
use super::reflect::{Sink, reflect};
use crate::client::{EventKind, ObjectClient, Resource, WatchEvent};

/// What an object can be looked up by, besides its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Index {
    /// The uid of the managing owner.
    Controller,
    /// `spec.nodeName`.
    Node,
    /// The label that ties an EndpointSlice to its Service.
    Service,
}

const INDEXES: [Index; 3] = [Index::Controller, Index::Node, Index::Service];

/// The label whose value is the Service's name.
pub(crate) const SERVICE_NAME_LABEL: &str = "kubernetes.io/service-name";

impl Index {
    fn value(self, object: &Value) -> Option<String> {
        let value = match self {
            Self::Controller => object.controller()?.uid.to_owned(),
            Self::Node => object.text(&["spec", "nodeName"]).to_owned(),
            Self::Service => {
                format!(
                    "{}/{}",
                    object.namespace(),
                    object.label(SERVICE_NAME_LABEL)?
                )
            }
        };
        (!value.is_empty()).then_some(value)
    }
}

/// A change of one object: at least one of the two is there.
#[derive(Clone, Debug)]
pub(crate) struct Change {
    pub(crate) old: Option<Arc<Value>>,
    pub(crate) new: Option<Arc<Value>>,
}

impl Change {
    /// The newest known form of the object.
    pub(crate) fn object(&self) -> &Value {
        static NULL: Value = Value::Null;
        self.new.as_deref().or(self.old.as_deref()).unwrap_or(&NULL)
    }
}

type Handler = Box<dyn Fn(&Change) + Send + Sync>;

#[derive(Debug, Default)]
struct Content {
    objects: BTreeMap<Key, Arc<Value>>,
    by_index: HashMap<(Index, String), BTreeSet<Key>>,
}

impl Content {
    fn put(&mut self, object: Arc<Value>) -> Option<Arc<Value>> {
        let key = object.key();
        let old = self.take(&key);
        for index in INDEXES {
            if let Some(value) = index.value(&object) {
                self.by_index
                    .entry((index, value))
                    .or_default()
                    .insert(key.clone());
            }
        }
        self.objects.insert(key, object);
        old
    }

    /// Makes `items` the whole content; gives what changed by that.
    fn exchange(&mut self, items: Vec<Arc<Value>>) -> Vec<Change> {
        let wanted: BTreeSet<Key> = items.iter().map(|o| o.key()).collect();
        let gone: Vec<Key> = self
            .objects
            .keys()
            .filter(|k| !wanted.contains(*k))
            .cloned()
            .collect();
        let mut changes: Vec<Change> = gone
            .iter()
            .map(|key| Change {
                old: self.take(key),
                new: None,
            })
            .collect();
        for object in items {
            let old = self.put(object.clone());
            if old
                .as_ref()
                .is_some_and(|o| o.revision() == object.revision())
            {
                continue;
            }
            // Another object under the same name: the old one's end must be seen too.
            let replaced = old.as_ref().is_some_and(|o| o.uid() != object.uid());
            let (gone, old) = if replaced { (old, None) } else { (None, old) };
            changes.extend(gone.map(|old| Change {
                old: Some(old),
                new: None,
            }));
            changes.push(Change {
                old,
                new: Some(object),
            });
        }
        changes
    }

    fn take(&mut self, key: &Key) -> Option<Arc<Value>> {
        let old = self.objects.remove(key)?;
        for index in INDEXES {
            let Some(value) = index.value(&old) else {
                continue;
            };
            let slot = (index, value);
            if let Some(keys) = self.by_index.get_mut(&slot) {
                keys.remove(key);
                if keys.is_empty() {
                    self.by_index.remove(&slot);
                }
            }
        }
        Some(old)
    }
}

/// The cache of one resource.
pub(crate) struct Store {
    content: RwLock<Content>,
    /// Held while a change goes in and is handed out, so that a new subscriber misses none and sees none twice.
    handlers: Mutex<Vec<Handler>>,
    seen: watch::Sender<Option<u64>>,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store")
            .field("seen", &*self.seen.borrow())
            .finish_non_exhaustive()
    }
}

impl Store {
    fn new() -> Self {
        Self {
            content: RwLock::default(),
            handlers: Mutex::default(),
            seen: watch::Sender::new(None),
        }
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, Content> {
        self.content.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, Content> {
        self.content.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self, key: &Key) -> Option<Arc<Value>> {
        self.read().objects.get(key).cloned()
    }

    pub(crate) fn all(&self) -> Vec<Arc<Value>> {
        self.read().objects.values().cloned().collect()
    }

    /// Number of objects of the resource.
    pub(crate) fn len(&self) -> usize {
        self.read().objects.len()
    }

    pub(crate) fn in_namespace(&self, namespace: &str) -> Vec<Arc<Value>> {
        let start = Key::new(namespace, "");
        self.read()
            .objects
            .range(start..)
            .take_while(|(key, _)| &*key.namespace == namespace)
            .map(|(_, object)| object.clone())
            .collect()
    }

    pub(crate) fn by(&self, index: Index, value: &str) -> Vec<Arc<Value>> {
        let content = self.read();
        let Some(keys) = content.by_index.get(&(index, value.to_owned())) else {
            return Vec::new();
        };
        keys.iter()
            .filter_map(|key| content.objects.get(key).cloned())
            .collect()
    }

    /// Calls `handler` for everything present, then for every change. It runs in the task that feeds the cache: it
    /// must not block and must not subscribe.
    pub(crate) fn subscribe(&self, handler: impl Fn(&Change) + Send + Sync + 'static) {
        let mut handlers = self.handlers.lock().unwrap_or_else(PoisonError::into_inner);
        for object in self.all() {
            handler(&Change {
                old: None,
                new: Some(object),
            });
        }
        handlers.push(Box::new(handler));
    }

    /// Returns once `reached` holds; it is asked after every change.
    pub(crate) async fn wait_until(&self, reached: impl Fn(&Self, u64) -> bool) {
        let mut seen = self.seen.subscribe();
        let holds = |revision: &Option<u64>| revision.is_some_and(|r| reached(self, r));
        // The sender lives as long as self, so this cannot fail.
        let _ = seen.wait_for(holds).await;
    }

    fn publish(&self, revision: u64) {
        self.seen
            .send_modify(|seen| *seen = Some(seen.unwrap_or(0).max(revision)));
    }

    fn hand_out(handlers: &[Handler], change: &Change) {
        for handler in handlers {
            handler(change);
        }
    }
}

impl Sink for Store {
    fn replace(&self, items: Vec<Arc<Value>>, revision: u64) {
        let handlers = self.handlers.lock().unwrap_or_else(PoisonError::into_inner);
        // All of it at once: whoever reads between two objects would see a state that never was.
        let changes = self.write().exchange(items);
        for change in &changes {
            Self::hand_out(&handlers, change);
        }
        drop(handlers);
        self.publish(revision);
    }

    fn apply(&self, event: WatchEvent) {
        let handlers = self.handlers.lock().unwrap_or_else(PoisonError::into_inner);
        match event.kind {
            EventKind::Bookmark => {}
            EventKind::Deleted => {
                let old = self.write().take(&event.object.key());
                Self::hand_out(
                    &handlers,
                    &Change {
                        old: old.or(Some(event.object)),
                        new: None,
                    },
                );
            }
            EventKind::Added | EventKind::Modified => {
                let old = self.write().put(event.object.clone());
                Self::hand_out(
                    &handlers,
                    &Change {
                        old,
                        new: Some(event.object),
                    },
                );
            }
        }
        drop(handlers);
        self.publish(event.revision);
    }
}

struct Shared {
    client: Arc<dyn ObjectClient>,
    stores: Mutex<HashMap<Resource, Arc<Store>>>,
    shutdown: CancellationToken,
}

/// The caches of all resources that somebody asked for. Cheap to clone; one per process, so that each object is held
/// once.
#[derive(Clone)]
pub struct Informers {
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Informers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Informers").finish_non_exhaustive()
    }
}

impl Informers {
    /// Nothing is watched until a resource is asked for; all watches end with `shutdown`.
    #[must_use]
    pub fn new(client: Arc<dyn ObjectClient>, shutdown: CancellationToken) -> Self {
        Self {
            shared: Arc::new(Shared {
                client,
                stores: Mutex::default(),
                shutdown,
            }),
        }
    }

    /// The cache of a resource; the first call starts its watch (inside a tokio runtime).
    pub(crate) fn store(&self, resource: Resource) -> Arc<Store> {
        let mut stores = self
            .shared
            .stores
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(store) = stores.get(&resource) {
            return store.clone();
        }
        let store = Arc::new(Store::new());
        stores.insert(resource, store.clone());
        let (client, shutdown) = (self.shared.client.clone(), self.shared.shutdown.clone());
        tokio::spawn(reflect(client, resource, store.clone(), shutdown));
        store
    }

    /// The cache of a resource that is watched already.
    pub(crate) fn existing(&self, resource: Resource) -> Option<Arc<Store>> {
        let stores = self
            .shared
            .stores
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        stores.get(&resource).cloned()
    }

    /// Returns when every resource asked for so far has been listed once.
    pub(crate) async fn synced(&self) {
        let stores: Vec<_> = {
            let stores = self
                .shared
                .stores
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            stores.values().cloned().collect()
        };
        for store in stores {
            store.wait_until(|_, _| true).await;
        }
    }
}
