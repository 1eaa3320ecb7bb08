//! Who owns whom: every object of the cluster by uid, reduced to what the garbage collector asks. Pure.

use std::collections::{BTreeSet, HashMap};

use serde_json::Value;

use crate::client::Resource;
use crate::controllers::runtime::object::{Key, Object};

pub(super) const FOREGROUND: &str = "foregroundDeletion";
pub(super) const ORPHAN: &str = "orphan";

/// One owner reference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OwnerRef {
    pub(super) api_version: String,
    pub(super) kind: String,
    pub(super) name: String,
    pub(super) uid: String,
    pub(super) blocks: bool,
}

/// One object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Vertex {
    pub(super) resource: Resource,
    pub(super) kind: &'static str,
    pub(super) key: Key,
    pub(super) owners: Vec<OwnerRef>,
    pub(super) deleting: bool,
    pub(super) foreground: bool,
    pub(super) orphan: bool,
}

impl Vertex {
    pub(super) fn read(resource: Resource, kind: &'static str, object: &Value) -> Self {
        let has = |name: &str| {
            object
                .items(&["metadata", "finalizers"])
                .iter()
                .any(|f| f.as_str() == Some(name))
        };
        let owners = object.owners().map(|o| OwnerRef {
            api_version: o.api_version.to_owned(),
            kind: o.kind.to_owned(),
            name: o.name.to_owned(),
            uid: o.uid.to_owned(),
            blocks: o.block_owner_deletion,
        });
        Self {
            resource,
            kind,
            key: object.key(),
            owners: owners.collect(),
            deleting: object.is_deleting(),
            foreground: has(FOREGROUND),
            orphan: has(ORPHAN),
        }
    }

    /// Waits for its dependents to go first.
    pub(super) fn waits_for_dependents(&self) -> bool {
        self.deleting && self.foreground
    }
}

/// What an object's owner reference leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OwnerState {
    Alive,
    /// Being deleted in the foreground: its dependents go now.
    Waiting,
    /// Not in the graph; the API must say whether it exists.
    Unknown,
    /// The uid belongs to an object of another namespace, which cannot own this one.
    Foreign,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Graph {
    vertices: HashMap<String, Vertex>,
    dependents: HashMap<String, BTreeSet<String>>,
}

impl Graph {
    pub(super) fn get(&self, uid: &str) -> Option<&Vertex> {
        self.vertices.get(uid)
    }

    pub(super) fn dependents(&self, uid: &str) -> impl Iterator<Item = (&String, &Vertex)> {
        let uids = self.dependents.get(uid).into_iter().flatten();
        uids.filter_map(|uid| self.vertices.get_key_value(uid))
    }

    /// Takes in the newest form of an object; gives the uids that should be looked at because of it.
    pub(super) fn put(&mut self, uid: &str, vertex: Vertex) -> Vec<String> {
        let old = self.vertices.get(uid).cloned();
        if old.as_ref() == Some(&vertex) {
            return Vec::new();
        }
        let mut look_at = Vec::new();
        for owner in old.iter().flat_map(|v| &v.owners) {
            if !vertex.owners.iter().any(|o| o.uid == owner.uid) {
                self.forget_dependent(&owner.uid, uid);
            }
            // One that no longer blocks, or is no longer owned, may be the last that its owner waits for.
            look_at.extend(self.waiting(&owner.uid));
        }
        for owner in &vertex.owners {
            self.dependents
                .entry(owner.uid.clone())
                .or_default()
                .insert(uid.to_owned());
        }
        if !vertex.owners.is_empty() || vertex.deleting {
            look_at.push(uid.to_owned());
        }
        self.vertices.insert(uid.to_owned(), vertex);
        look_at
    }

    /// The object is gone; gives the uids that should be looked at because of it.
    pub(super) fn remove(&mut self, uid: &str) -> Vec<String> {
        let Some(vertex) = self.vertices.remove(uid) else {
            return Vec::new();
        };
        let mut look_at: Vec<String> = self
            .dependents
            .get(uid)
            .into_iter()
            .flatten()
            .cloned()
            .collect();
        for owner in &vertex.owners {
            self.forget_dependent(&owner.uid, uid);
            look_at.extend(self.waiting(&owner.uid));
        }
        look_at
    }

    fn waiting(&self, uid: &str) -> Option<String> {
        self.vertices
            .get(uid)
            .filter(|v| v.waits_for_dependents())
            .map(|_| uid.to_owned())
    }

    fn forget_dependent(&mut self, owner: &str, uid: &str) {
        if let Some(dependents) = self.dependents.get_mut(owner) {
            dependents.remove(uid);
            if dependents.is_empty() {
                self.dependents.remove(owner);
            }
        }
    }

    pub(super) fn owner_state(&self, vertex: &Vertex, owner: &OwnerRef) -> OwnerState {
        match self.vertices.get(&owner.uid) {
            None => OwnerState::Unknown,
            Some(found)
                if !found.key.namespace.is_empty()
                    && found.key.namespace != vertex.key.namespace =>
            {
                OwnerState::Foreign
            }
            Some(found) if found.waits_for_dependents() => OwnerState::Waiting,
            Some(_) => OwnerState::Alive,
        }
    }

    /// Objects of one resource that are not in `present`: they went while nobody watched.
    pub(super) fn missing(&self, resource: Resource, present: &BTreeSet<String>) -> Vec<String> {
        self.vertices
            .iter()
            .filter(|(uid, v)| v.resource == resource && !present.contains(*uid))
            .map(|(uid, _)| uid.clone())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::client::resources::CONFIG_MAPS;

    fn vertex(name: &str, owner: Option<&str>, finalizer: Option<&str>) -> Vertex {
        let owners: Vec<Value> = owner
            .iter()
            .map(|uid| {
                json!({"apiVersion": "v1", "kind": "ConfigMap", "uid": uid,
                "name": uid, "blockOwnerDeletion": true})
            })
            .collect();
        let mut object = json!({"metadata": {
            "name": name, "namespace": "ns", "ownerReferences": owners,
            "finalizers": finalizer.iter().collect::<Vec<_>>(),
        }});
        if finalizer.is_some() {
            object["metadata"]["deletionTimestamp"] = "2024-01-01T00:00:00Z".into();
        }
        Vertex::read(CONFIG_MAPS, "ConfigMap", &object)
    }

    #[test]
    fn the_end_of_an_owner_leads_to_its_dependents() {
        let mut graph = Graph::default();
        assert!(graph.put("o", vertex("o", None, None)).is_empty());
        assert_eq!(graph.put("c", vertex("c", Some("o"), None)), ["c"]);
        assert_eq!(graph.remove("o"), ["c"]);
        let child = graph.get("c").unwrap().clone();
        assert_eq!(
            graph.owner_state(&child, &child.owners[0]),
            OwnerState::Unknown
        );
        assert!(graph.remove("c").is_empty());
        assert!(graph.dependents.is_empty() && graph.vertices.is_empty());
    }

    #[test]
    fn the_end_of_a_dependent_leads_to_the_owner_that_waits() {
        let mut graph = Graph::default();
        graph.put("o", vertex("o", None, Some(FOREGROUND)));
        graph.put("c", vertex("c", Some("o"), None));
        let child = graph.get("c").unwrap().clone();
        assert_eq!(
            graph.owner_state(&child, &child.owners[0]),
            OwnerState::Waiting
        );
        assert_eq!(graph.remove("c"), ["o"]);
    }

    #[test]
    fn an_unchanged_object_leads_nowhere() {
        let mut graph = Graph::default();
        graph.put("c", vertex("c", Some("o"), None));
        assert!(graph.put("c", vertex("c", Some("o"), None)).is_empty());
    }
}
