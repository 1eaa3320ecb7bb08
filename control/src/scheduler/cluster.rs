//! The nodes with what stands on them, pods that are on their way to a node included. Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap};
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
    /// Uids of placed pods that keep others away.
    guards: BTreeSet<String>,
    /// Pods for which room is being made, by uid: node and pod.
    nominated: BTreeMap<String, (String, Arc<Pod>)>,
    namespaces: HashMap<String, Arc<Value>>,
}

impl Cluster {
    pub(super) fn nodes(&self) -> impl Iterator<Item = (&String, &Node)> {
        self.nodes.iter().filter(|(_, node)| node.known)
    }

    pub(super) fn node(&self, name: &str) -> Option<&Node> {
        self.nodes.get(name).filter(|node| node.known)
    }

    /// Every pod that counts against some node.
    pub(super) fn pods(&self) -> impl Iterator<Item = (&Node, &Arc<Pod>)> {
        self.nodes
            .values()
            .flat_map(|node| node.pods.values().map(move |pod| (node, pod)))
    }

    /// Placed pods that keep others away, with their nodes.
    pub(super) fn guards(&self) -> impl Iterator<Item = (&Node, &Arc<Pod>)> {
        self.guards.iter().filter_map(|uid| {
            let node = self.nodes.get(self.placed.get(uid)?)?;
            Some((node, node.pods.get(uid)?))
        })
    }

    pub(super) fn namespace(&self, name: &str) -> Option<&Value> {
        self.namespaces.get(name).map(AsRef::as_ref)
    }

    pub(super) fn put_namespace(&mut self, object: Arc<Value>) {
        self.namespaces.insert(object.name().to_owned(), object);
    }

    pub(super) fn remove_namespace(&mut self, name: &str) {
        self.namespaces.remove(name);
    }

    /// Room is being made for the pod on this node.
    pub(super) fn nominate(&mut self, pod: Arc<Pod>, node: &str) {
        self.nominated
            .insert(pod.uid.clone(), (node.to_owned(), pod));
    }

    pub(super) fn withdraw_nomination(&mut self, uid: &str) {
        self.nominated.remove(uid);
    }

    pub(super) fn nomination(&self, uid: &str) -> Option<&str> {
        self.nominated.get(uid).map(|(node, _)| node.as_str())
    }

    /// Pods for which room is kept on the node, the given one and less important ones excepted.
    pub(super) fn nominated_before(
        &self,
        pod: &Pod,
        node: &str,
    ) -> impl Iterator<Item = &Arc<Pod>> {
        self.nominated.values().filter_map(move |(on, other)| {
            let first = other.priority >= pod.priority && other.uid != pod.uid;
            (on == node && first).then_some(other)
        })
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
        self.nominated.remove(&pod.uid);
        if pod.rules.guards() {
            self.guards.insert(pod.uid.clone());
        }
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
        self.guards.remove(uid);
        if let Some(node) = self.nodes.get_mut(&name) {
            node.remove(uid);
            if !node.known && node.pods.is_empty() {
                self.nodes.remove(&name);
            }
        }
        true
    }
}
