//! The nodes with what stands on them, pods that are on their way to a node included. Pure.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use serde_json::Value;

use super::pod::{Amounts, Pod};
use crate::controllers::runtime::object::Object;

/// A node and the pods that count against it.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) object: Arc<Value>,
    pub(super) allocatable: Amounts,
    pub(super) requested: Amounts,
    pub(super) weight_cpu_milli: i64,
    pub(super) weight_memory: i64,
    pub(super) pods: BTreeMap<String, Arc<Pod>>,
    /// Pods per managing owner.
    owners: HashMap<String, usize>,
    /// False for a node that pods name but that is not known (yet).
    known: bool,
}

impl Node {
    fn unknown() -> Self {
        Self {
            object: Arc::new(Value::Null),
            allocatable: Amounts::default(),
            requested: Amounts::default(),
            weight_cpu_milli: 0,
            weight_memory: 0,
            pods: BTreeMap::new(),
            owners: HashMap::new(),
            known: false,
        }
    }

    pub(super) fn add(&mut self, pod: Arc<Pod>) {
        self.requested.add(&pod.requests);
        self.weight_cpu_milli += pod.weight_cpu_milli;
        self.weight_memory += pod.weight_memory;
        if !pod.owner.is_empty() {
            *self.owners.entry(pod.owner.clone()).or_insert(0) += 1;
        }
        self.pods.insert(pod.uid.clone(), pod);
    }

    pub(super) fn remove(&mut self, uid: &str) -> Option<Arc<Pod>> {
        let pod = self.pods.remove(uid)?;
        self.requested.subtract(&pod.requests);
        self.weight_cpu_milli -= pod.weight_cpu_milli;
        self.weight_memory -= pod.weight_memory;
        if let Some(count) = self.owners.get_mut(&pod.owner) {
            *count -= 1;
            if *count == 0 {
                self.owners.remove(&pod.owner);
            }
        }
        Some(pod)
    }

    pub(super) fn of_owner(&self, owner: &str) -> usize {
        self.owners.get(owner).copied().unwrap_or(0)
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Cluster {
    nodes: BTreeMap<String, Node>,
    /// Pod uid to the node it counts against.
    placed: HashMap<String, String>,
}

impl Cluster {
    pub(super) fn nodes(&self) -> impl Iterator<Item = (&String, &Node)> {
        self.nodes.iter().filter(|(_, node)| node.known)
    }

    pub(super) fn node(&self, name: &str) -> Option<&Node> {
        self.nodes.get(name).filter(|node| node.known)
    }

    pub(super) fn node_mut(&mut self, name: &str) -> Option<&mut Node> {
        self.nodes.get_mut(name).filter(|node| node.known)
    }

    /// Every pod that counts against some node.
    pub(super) fn pods(&self) -> impl Iterator<Item = (&Node, &Arc<Pod>)> {
        self.nodes
            .values()
            .flat_map(|node| node.pods.values().map(move |pod| (node, pod)))
    }

    pub(super) fn is_placed(&self, uid: &str) -> bool {
        self.placed.contains_key(uid)
    }

    pub(super) fn put_node(&mut self, object: Arc<Value>) {
        let node = self
            .nodes
            .entry(object.name().to_owned())
            .or_insert_with(Node::unknown);
        let allocatable = object.at(&["status", "allocatable"]);
        node.allocatable =
            Amounts::read(allocatable.or_else(|| object.at(&["status", "capacity"])));
        node.object = object;
        node.known = true;
    }

    pub(super) fn remove_node(&mut self, name: &str) {
        if let Some(node) = self.nodes.get_mut(name) {
            node.known = false;
            if node.pods.is_empty() {
                self.nodes.remove(name);
            }
        }
    }

    /// Counts the pod against a node: where it is bound, or where it is about to be.
    pub(super) fn place(&mut self, pod: Arc<Pod>, node: &str) {
        self.lift(&pod.uid);
        self.placed.insert(pod.uid.clone(), node.to_owned());
        self.nodes
            .entry(node.to_owned())
            .or_insert_with(Node::unknown)
            .add(pod);
    }

    /// The pod counts against no node any more. True when it did.
    pub(super) fn lift(&mut self, uid: &str) -> bool {
        let Some(name) = self.placed.remove(uid) else {
            return false;
        };
        if let Some(node) = self.nodes.get_mut(&name) {
            node.remove(uid);
            if !node.known && node.pods.is_empty() {
                self.nodes.remove(&name);
            }
        }
        true
    }
}
