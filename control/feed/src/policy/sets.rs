//! Sets of peers: which namespaces they look into, when they begin, and when nobody needs them any more.

use std::collections::BTreeSet;

use super::graph::{Graph, Namespace, Set};
use super::selector::{Labels, Members, Namespaces};

impl Graph {
    pub(super) fn put_namespace(&mut self, name: &str, labels: Option<Labels>) {
        let namespace = self.namespaces.entry(name.to_owned()).or_default();
        if namespace.labels != labels {
            namespace.labels = labels;
            for set in self.choosing_sets.clone() {
                self.choose(set, name);
            }
        }
        self.tidy_namespace(name);
    }

    /// Lets a set look into a namespace, or look away, as its labels want.
    pub(super) fn choose(&mut self, set: u32, name: &str) {
        let Some(namespace) = self.namespaces.get_mut(name) else {
            return;
        };
        let labels = namespace.labels.as_ref();
        let wanted = match self.sets.get(set).map(|set| &set.of) {
            Some(Members::Pods {
                namespaces: Namespaces::Matching(selector),
                ..
            }) => labels.is_some_and(|labels| selector.matches(labels)),
            _ => return,
        };
        let changed = if wanted {
            namespace.sets.insert(set)
        } else {
            namespace.sets.remove(&set)
        };
        if !changed {
            return;
        }
        for id in namespace.pods.clone() {
            let Some(peer) = self.peers.get(id) else {
                continue;
            };
            if wanted && self.selects(set, peer) {
                self.join(id, set);
            } else if !wanted && peer.sets.contains(&set) {
                self.leave(id, set);
            }
        }
    }

    pub(super) fn tidy_namespace(&mut self, name: &str) {
        let empty = |n: &Namespace| n.labels.is_none() && n.pods.is_empty() && n.sets.is_empty();
        if self.namespaces.get(name).is_some_and(empty) {
            self.namespaces.remove(name);
        }
    }

    /// The set of a selector, made when nobody has it yet. Counts as one use.
    pub(super) fn acquire(&mut self, of: &Members) -> u32 {
        let id = of.id();
        if let Some(&set) = self.set_ids.get(&id) {
            if let Some(entry) = self.sets.get_mut(set) {
                entry.users += 1;
            }
            return set;
        }
        let set = self.sets.insert(Set {
            id,
            of: of.clone(),
            members: BTreeSet::new(),
            nodes: BTreeSet::new(),
            subjects: BTreeSet::new(),
            users: 1,
        });
        self.set_ids.insert(id, set);
        match of {
            Members::Nodes(_) => {
                self.node_sets.insert(set);
                for peer in self.node_peers.clone() {
                    if self.peers.get(peer).is_some_and(|p| self.selects(set, p)) {
                        self.join(peer, set);
                    }
                }
            }
            Members::Pods {
                namespaces: Namespaces::One(name),
                ..
            } => {
                let namespace = self.namespaces.entry(name.clone()).or_default();
                namespace.sets.insert(set);
                for pod in namespace.pods.clone() {
                    if self.peers.get(pod).is_some_and(|p| self.selects(set, p)) {
                        self.join(pod, set);
                    }
                }
            }
            Members::Pods { .. } => {
                self.choosing_sets.insert(set);
                let names: Vec<String> = self.namespaces.keys().cloned().collect();
                for name in names {
                    self.choose(set, &name);
                }
            }
        }
        set
    }

    /// Gives one use back. Nobody refers to a set without users.
    pub(super) fn release(&mut self, set: u32) {
        let Some(entry) = self.sets.get_mut(set) else {
            return;
        };
        entry.users -= 1;
        if entry.users > 0 {
            return;
        }
        let Some(entry) = self.sets.remove(set) else {
            return;
        };
        self.set_ids.remove(&entry.id);
        self.choosing_sets.remove(&set);
        self.node_sets.remove(&set);
        for id in entry.members {
            if let Some(peer) = self.peers.get_mut(id) {
                peer.sets.remove(&set);
            }
        }
        match entry.of {
            Members::Nodes(_) => {}
            Members::Pods {
                namespaces: Namespaces::One(name),
                ..
            } => {
                if let Some(namespace) = self.namespaces.get_mut(&name) {
                    namespace.sets.remove(&set);
                }
                self.tidy_namespace(&name);
            }
            Members::Pods { .. } => {
                for namespace in self.namespaces.values_mut() {
                    namespace.sets.remove(&set);
                }
            }
        }
    }
}
