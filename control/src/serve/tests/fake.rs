//! An API of JSON values in memory: revisions, watches, resourceVersion conflicts. Nothing is validated.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::client::{
    DeleteOptions, EventKind, List, ObjectClient, PatchKind, Resource, WatchEvent,
};
use crate::status::ApiError;

type Key = (Resource, String, String);

#[derive(Default)]
struct State {
    revision: u64,
    objects: BTreeMap<Key, Arc<Value>>,
    history: Vec<(Resource, WatchEvent)>,
    watchers: Vec<(Resource, mpsc::Sender<WatchEvent>)>,
}

#[derive(Default)]
pub(crate) struct FakeApi {
    state: Mutex<State>,
}

impl State {
    fn emit(&mut self, r: Resource, kind: EventKind, object: &Arc<Value>) {
        let committed_at_us = i64::try_from(self.revision).unwrap();
        let event = WatchEvent {
            kind,
            object: Arc::clone(object),
            revision: self.revision,
            committed_at_us,
        };
        self.history.push((r, event.clone()));
        self.watchers
            .retain(|(resource, sender)| *resource != r || sender.try_send(event.clone()).is_ok());
    }

    fn write(&mut self, r: Resource, namespace: &str, name: &str, mut object: Value) -> Arc<Value> {
        self.revision += 1;
        object["metadata"]["resourceVersion"] = json!(self.revision.to_string());
        let key = (r, namespace.to_owned(), name.to_owned());
        let kind = if self.objects.contains_key(&key) {
            EventKind::Modified
        } else {
            object["metadata"]["uid"] = json!(format!("uid-{}", self.revision));
            EventKind::Added
        };
        let object = Arc::new(object);
        self.objects.insert(key, Arc::clone(&object));
        self.emit(r, kind, &object);
        object
    }
}

impl FakeApi {
    pub(crate) fn put(&self, r: Resource, object: Value) -> u64 {
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        let namespace = object["metadata"]["namespace"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let mut state = self.state.lock().unwrap();
        state.write(r, &namespace, &name, object);
        state.revision
    }

    /// Closes every watch, as a server does with watchers that fell behind.
    pub(crate) fn drop_watchers(&self) {
        self.state.lock().unwrap().watchers.clear();
    }
}

fn not_found(r: Resource, name: &str) -> ApiError {
    ApiError::not_found(r.group, r.plural, name)
}

fn merge(target: &mut Value, patch: &Value) {
    let Some(fields) = patch.as_object() else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (key, value) in fields {
        if value.is_null() {
            target.as_object_mut().unwrap().shift_remove(key);
        } else {
            merge(&mut target[key], value);
        }
    }
}

#[async_trait]
impl ObjectClient for FakeApi {
    async fn get(&self, r: Resource, namespace: &str, name: &str) -> Result<Arc<Value>, ApiError> {
        let state = self.state.lock().unwrap();
        let key = (r, namespace.to_owned(), name.to_owned());
        state
            .objects
            .get(&key)
            .cloned()
            .ok_or_else(|| not_found(r, name))
    }

    async fn list(&self, r: Resource, _: &str) -> Result<List, ApiError> {
        let state = self.state.lock().unwrap();
        let items = state.objects.iter().filter(|((k, ..), _)| *k == r);
        Ok(List {
            items: items.map(|(_, v)| Arc::clone(v)).collect(),
            revision: state.revision,
        })
    }

    async fn watch(
        &self,
        r: Resource,
        revision: u64,
    ) -> Result<mpsc::Receiver<WatchEvent>, ApiError> {
        let (sender, receiver) = mpsc::channel(10_000);
        let mut state = self.state.lock().unwrap();
        for (resource, event) in &state.history {
            if *resource == r && event.revision > revision {
                sender.try_send(event.clone()).unwrap();
            }
        }
        state.watchers.push((r, sender));
        Ok(receiver)
    }

    async fn create(
        &self,
        r: Resource,
        namespace: &str,
        object: Value,
    ) -> Result<Arc<Value>, ApiError> {
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        let mut state = self.state.lock().unwrap();
        if state
            .objects
            .contains_key(&(r, namespace.to_owned(), name.clone()))
        {
            return Err(ApiError::already_exists(r.group, r.plural, &name));
        }
        Ok(state.write(r, namespace, &name, object))
    }

    async fn update(&self, r: Resource, object: Value) -> Result<Arc<Value>, ApiError> {
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        let namespace = object["metadata"]["namespace"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let mut state = self.state.lock().unwrap();
        let key = (r, namespace.clone(), name.clone());
        let current = state.objects.get(&key).ok_or_else(|| not_found(r, &name))?;
        if current["metadata"]["resourceVersion"] != object["metadata"]["resourceVersion"] {
            return Err(ApiError::conflict(r.group, r.plural, &name, "stale"));
        }
        Ok(state.write(r, &namespace, &name, object))
    }

    async fn update_status(&self, r: Resource, object: Value) -> Result<Arc<Value>, ApiError> {
        self.update(r, object).await
    }

    async fn patch(
        &self,
        r: Resource,
        namespace: &str,
        name: &str,
        _: &str,
        kind: PatchKind,
        patch: Value,
    ) -> Result<Arc<Value>, ApiError> {
        assert_eq!(kind, PatchKind::Merge);
        let mut object = Value::clone(&*self.get(r, namespace, name).await?);
        merge(&mut object, &patch);
        Ok(self.state.lock().unwrap().write(r, namespace, name, object))
    }

    async fn delete(
        &self,
        r: Resource,
        namespace: &str,
        name: &str,
        options: DeleteOptions,
    ) -> Result<(), ApiError> {
        let mut state = self.state.lock().unwrap();
        let key = (r, namespace.to_owned(), name.to_owned());
        let object = state
            .objects
            .get(&key)
            .cloned()
            .ok_or_else(|| not_found(r, name))?;
        if options
            .uid
            .is_some_and(|uid| object["metadata"]["uid"] != *uid)
        {
            return Err(ApiError::conflict(r.group, r.plural, name, "uid"));
        }
        state.objects.remove(&key);
        state.revision += 1;
        state.emit(r, EventKind::Deleted, &object);
        Ok(())
    }

    async fn bind(&self, namespace: &str, pod: &str, node: &str) -> Result<(), ApiError> {
        let patch = json!({"spec": {"nodeName": node}});
        self.patch(
            crate::client::resources::PODS,
            namespace,
            pod,
            "",
            PatchKind::Merge,
            patch,
        )
        .await
        .map(|_| ())
    }
}
