//! Network policy for single nodes: which policies select a pod of the node, and whom those policies speak of.
//!
//! A node gets the policies that select a pod bound to it, an entry for every such pod, and entries of those pods and
//! nodes anywhere that are in a set one of these policies refers to. Everything is incremental: sets are found by
//! namespace, each node counts why it holds what it holds, and a change visits what it concerns.

mod address;
mod changes;
mod graph;
mod peers;
mod rules;
mod selector;
mod sending;
mod sets;
mod slab;
#[cfg(test)]
mod tests;

use bytes::Bytes;
use control_api::desired::Name;
use serde_json::Value;

use crate::Effects;
use graph::Graph;
pub use rules::{STAGED_ANNOTATION, is_staged, unknown_parts, unknown_staged};

/// See the module documentation.
#[derive(Debug, Default)]
pub(crate) struct Policies {
    graph: Graph,
}

impl Policies {
    pub(crate) fn pod(&mut self, object: &Value) {
        let name = Name::new(
            crate::translate::namespace(object),
            crate::translate::name(object),
        );
        self.graph.put_peer(&name, peers::pod(object));
    }

    pub(crate) fn node(&mut self, object: &Value) {
        let name = Name::new("", crate::translate::name(object));
        self.graph.put_peer(&name, Some(peers::of_node(object)));
    }

    pub(crate) fn namespace(&mut self, object: &Value) {
        let labels = selector::namespace_labels(object);
        self.graph
            .put_namespace(&crate::translate::name(object), Some(labels));
    }

    pub(crate) fn network_policy(&mut self, object: &Value) {
        let policy = rules::network_policy(object);
        let name = Name::new(&policy.message.namespace, &policy.message.name);
        self.graph.put_policy(&name, Some(policy));
    }

    pub(crate) fn cluster_network_policy(&mut self, object: &Value) {
        let name = Name::new("", crate::translate::name(object));
        self.graph
            .put_policy(&name, rules::cluster_network_policy(object));
    }

    /// Takes the deletion of a pod, or, without a namespace, of a node.
    pub(crate) fn remove_peer(&mut self, name: &Name) {
        self.graph.put_peer(name, None);
    }

    pub(crate) fn remove_namespace(&mut self, name: &str) {
        self.graph.put_namespace(name, None);
    }

    pub(crate) fn remove_policy(&mut self, name: &Name) {
        self.graph.put_policy(name, None);
    }

    pub(crate) fn policies(&self) -> impl Iterator<Item = &Name> {
        self.graph.policy_names()
    }

    pub(crate) fn peers(&self) -> impl Iterator<Item = &Name> {
        self.graph.peer_names()
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.graph.is_empty()
    }

    /// What changes since the last call mean for each node.
    pub(crate) fn flush(&mut self) -> Effects {
        self.graph.flush()
    }

    #[cfg(test)]
    pub(crate) fn set_limits(&mut self, of_node: usize, in_all: usize) {
        self.graph.touched.set_limits(of_node, in_all);
    }

    /// While nobody listens, changes are not noted down.
    pub(crate) fn set_quiet(&mut self, quiet: bool) {
        self.graph.set_quiet(quiet);
    }

    /// Everything that a node needs, encoded.
    pub(crate) fn snapshot(&self, node: &str) -> Vec<Bytes> {
        self.graph.snapshot(node)
    }
}
