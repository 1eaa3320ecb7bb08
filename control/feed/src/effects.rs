//! What a change in the cluster means for nodes.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use control_api::desired::Name;
use control_api::v1::{Object, ObjectKey, ObjectKind, object};
use prost::Message;

/// One change of a node's desired state.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// An encoded `Object`, shared by everybody who gets it.
    Upsert(Bytes),
    Remove(ObjectKey),
}

/// What one change means: for every node, and on top of it for single nodes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Effects {
    pub shared: Vec<Op>,
    /// For single nodes, whether their agents run pods or not.
    pub per_node: BTreeMap<String, Vec<Op>>,
    /// For single nodes whose agents run pods.
    pub per_runner: BTreeMap<String, Vec<Op>>,
    /// Nodes that so much changes for that they take a snapshot instead; `per_node` says nothing of them.
    pub afresh: BTreeSet<String>,
}

impl Effects {
    pub(crate) fn shared(ops: impl IntoIterator<Item = Op>) -> Self {
        Self {
            shared: ops.into_iter().collect(),
            ..Self::default()
        }
    }

    pub(crate) fn runners(ops: impl IntoIterator<Item = (String, Vec<Op>)>) -> Self {
        Self {
            per_runner: ops.into_iter().collect(),
            ..Self::default()
        }
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.shared.is_empty()
            && self.per_node.is_empty()
            && self.per_runner.is_empty()
            && self.afresh.is_empty()
    }

    /// Adds later effects. Operations keep their order; the caller must not merge two changes of one object.
    pub fn extend(&mut self, later: Self) {
        self.shared.extend(later.shared);
        self.afresh.extend(later.afresh);
        for (all, later) in [
            (&mut self.per_node, later.per_node),
            (&mut self.per_runner, later.per_runner),
        ] {
            for (node, ops) in later {
                all.entry(node).or_default().extend(ops);
            }
        }
    }

    /// Everything that one node has to be told, in order.
    pub fn of_node<'a>(
        &'a self,
        node: &str,
        runs_pods: bool,
    ) -> impl Iterator<Item = &'a Op> + Clone + use<'a> {
        let own = self.per_node.get(node).into_iter().flatten();
        let pods = self.per_runner.get(node).filter(|_| runs_pods);
        self.shared
            .iter()
            .chain(own)
            .chain(pods.into_iter().flatten())
    }
}

pub(crate) fn encode(kind: object::Kind) -> Bytes {
    Object { kind: Some(kind) }.encode_to_vec().into()
}

pub(crate) fn key_of(kind: ObjectKind, name: &Name) -> ObjectKey {
    ObjectKey {
        kind: kind.into(),
        namespace: name.namespace.clone(),
        name: name.name.clone(),
    }
}
