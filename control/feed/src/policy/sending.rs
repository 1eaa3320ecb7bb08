//! What nodes have to be told: views before and after, snapshots, encoding.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use bytes::Bytes;
use control_api::desired::Name;
use control_api::v1::{ObjectKind, PolicyName, PolicyPeer, object};

use super::graph::{Graph, Peer, Share};
use crate::effects::{Effects, Op, encode, key_of};

/// Peers of one node that a change may concern; a node that it concerns with more takes a snapshot.
const MAX_TOUCHED: usize = 32_768;
/// The same over all nodes: those for whom nothing is left take a snapshot.
const MAX_TOUCHED_IN_ALL: usize = 131_072;

/// What a node is told of a peer, short of its text.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct View {
    version: u64,
    /// Of the policies that select it, when it is a pod of the node.
    own: Option<u64>,
    /// Those that the node's policies refer to.
    sets: Vec<u32>,
}

#[derive(Debug, Default)]
struct OfNode {
    /// More than is worth comparing; nothing else is noted down then.
    afresh: bool,
    /// The view before the first touch; none when the node did not hold the peer.
    peers: HashMap<u32, Option<View>>,
    /// The version before the first touch.
    policies: HashMap<u32, Option<u64>>,
}

/// What changed since the last flush.
#[derive(Debug)]
pub(super) struct Touched {
    quiet: bool,
    limit: usize,
    limit_in_all: usize,
    /// Peers noted down, over all nodes.
    in_all: usize,
    nodes: BTreeMap<Arc<str>, OfNode>,
    /// Names of what has gone since.
    left_peers: HashMap<u32, Name>,
    left_policies: HashMap<u32, Name>,
}

impl Default for Touched {
    fn default() -> Self {
        Self {
            quiet: false,
            limit: MAX_TOUCHED,
            limit_in_all: MAX_TOUCHED_IN_ALL,
            in_all: 0,
            nodes: BTreeMap::new(),
            left_peers: HashMap::new(),
            left_policies: HashMap::new(),
        }
    }
}

impl Touched {
    #[cfg(test)]
    pub(super) fn set_limits(&mut self, of_node: usize, in_all: usize) {
        self.limit = of_node;
        self.limit_in_all = in_all;
    }

    fn of_node(&mut self, node: &Arc<str>) -> &mut OfNode {
        self.nodes.entry(Arc::clone(node)).or_default()
    }

    /// Whether what is touched on this node has not to be noted any more.
    fn is_settled(&self, node: &str) -> bool {
        self.quiet || self.nodes.get(node).is_some_and(|of_node| of_node.afresh)
    }

    /// Gives up on single peers when there are more than `more` of them to come.
    pub(super) fn expect(&mut self, node: &Arc<str>, more: usize) {
        let (limit, room) = (self.limit, self.limit_in_all.checked_sub(self.in_all));
        let of_node = self.of_node(node);
        let noted = of_node.peers.len();
        if noted.max(more) > limit || room.is_none_or(|room| more > room) {
            *of_node = OfNode {
                afresh: true,
                ..OfNode::default()
            };
            self.in_all -= noted;
        }
    }

    pub(super) fn is_quiet(&self) -> bool {
        self.quiet
    }

    pub(super) fn peer_left(&mut self, id: u32, name: &Name) {
        if !self.quiet {
            self.left_peers.insert(id, name.clone());
        }
    }

    pub(super) fn policy_left(&mut self, id: u32, name: &Name) {
        if !self.quiet {
            self.left_policies.insert(id, name.clone());
        }
    }
}

impl Graph {
    pub(super) fn set_quiet(&mut self, quiet: bool) {
        self.touched = Touched {
            quiet,
            ..Touched::default()
        };
    }

    pub(super) fn touch_peer(&mut self, node: &Arc<str>, id: u32) {
        if self.touched.is_settled(node) {
            return;
        }
        let known = self.touched.nodes.get(node);
        if known.is_some_and(|of_node| of_node.peers.contains_key(&id)) {
            return;
        }
        let view = self.view(node, id);
        self.touched.of_node(node).peers.insert(id, view);
        self.touched.in_all += 1;
        self.touched.expect(node, 0);
    }

    pub(super) fn touch_policy(&mut self, node: &Arc<str>, id: u32) {
        if self.touched.is_settled(node) {
            return;
        }
        let held = self.held_policy(node, id);
        let of_node = self.touched.of_node(node);
        of_node.policies.entry(id).or_insert(held);
    }

    fn held_policy(&self, node: &str, id: u32) -> Option<u64> {
        let share = self.shares.get(node)?;
        let policy = self.policies.get(id)?;
        share.policies.contains(&id).then_some(policy.version)
    }

    /// `None` when the node is not told of the peer.
    fn view(&self, node: &str, id: u32) -> Option<View> {
        let (peer, share) = (self.peers.get(id)?, self.shares.get(node)?);
        let own = share.pods.contains(&id);
        let sets = referred(peer, share);
        // Somewhere else, what has no address cannot be met.
        let met = !sets.is_empty() && !peer.facts.message.addresses.is_empty();
        (own || met).then(|| View {
            version: peer.version,
            own: own.then_some(peer.policies_version),
            sets,
        })
    }

    pub(super) fn flush(&mut self) -> Effects {
        let touched = std::mem::take(&mut self.touched.nodes);
        self.touched.in_all = 0;
        let mut encoded = HashMap::new();
        let mut effects = Effects::default();
        for (node, of_node) in touched {
            if of_node.afresh {
                effects.afresh.insert(node.as_ref().to_owned());
                continue;
            }
            let mut ops = self.policy_ops(&node, of_node.policies);
            ops.extend(self.peer_ops(&node, of_node.peers, &mut encoded));
            if !ops.is_empty() {
                effects.per_node.insert(node.as_ref().to_owned(), ops);
            }
        }
        self.touched.left_peers.clear();
        self.touched.left_policies.clear();
        self.sets.settle();
        self.peers.settle();
        self.policies.settle();
        effects
    }

    fn policy_ops(&self, node: &str, before: HashMap<u32, Option<u64>>) -> Vec<Op> {
        let mut ops = Vec::new();
        for (id, before) in before {
            let after = self.held_policy(node, id);
            let policy = self.policies.get(id);
            match (after, policy) {
                (Some(_), Some(policy)) if before != after => {
                    ops.push((policy.name.clone(), Op::Upsert(policy.bytes.clone())));
                }
                (None, policy) if before.is_some() => {
                    let name = policy.map(|policy| &policy.name);
                    if let Some(name) = name.or(self.touched.left_policies.get(&id)) {
                        let key = key_of(ObjectKind::Policy, name);
                        ops.push((name.clone(), Op::Remove(key)));
                    }
                }
                _ => {}
            }
        }
        sorted(ops)
    }

    fn peer_ops(
        &self,
        node: &str,
        before: HashMap<u32, Option<View>>,
        encoded: &mut HashMap<(u32, View), Bytes>,
    ) -> Vec<Op> {
        let mut ops = Vec::new();
        for (id, before) in before {
            let after = self.view(node, id);
            let peer = self.peers.get(id);
            match (after, peer) {
                (Some(after), Some(peer)) if before.as_ref() != Some(&after) => {
                    let bytes = encoded
                        .entry((id, after))
                        .or_insert_with_key(|(_, view)| self.encode_peer(peer, view))
                        .clone();
                    ops.push((name_of(peer), Op::Upsert(bytes)));
                }
                (None, peer) if before.is_some() => {
                    let left = || self.touched.left_peers.get(&id).cloned();
                    if let Some(name) = peer.map(name_of).or_else(left) {
                        let key = key_of(ObjectKind::PolicyPeer, &name);
                        ops.push((name, Op::Remove(key)));
                    }
                }
                _ => {}
            }
        }
        sorted(ops)
    }

    fn encode_peer(&self, peer: &Peer, view: &View) -> Bytes {
        let ids = view.sets.iter().filter_map(|set| self.sets.get(*set));
        let mut sets: Vec<Vec<u8>> = ids.map(|set| set.id.to_vec()).collect();
        sets.sort_unstable();
        let mut policies: Vec<&Name> = Vec::new();
        if view.own.is_some() {
            let selecting = peer.policies.iter().filter_map(|id| self.policies.get(*id));
            policies.extend(selecting.map(|policy| &policy.name));
        }
        policies.sort_unstable();
        let policies = policies.into_iter().map(|name| PolicyName {
            namespace: name.namespace.clone(),
            name: name.name.clone(),
        });
        encode(object::Kind::PolicyPeer(PolicyPeer {
            sets,
            policies: policies.collect(),
            ..peer.facts.message.clone()
        }))
    }

    pub(super) fn snapshot(&self, node: &str) -> Vec<Bytes> {
        let Some(share) = self.shares.get(node) else {
            return Vec::new();
        };
        let policies = share
            .policies
            .iter()
            .filter_map(|id| self.policies.get(*id));
        let mut objects: Vec<Bytes> = policies.map(|policy| policy.bytes.clone()).collect();
        let mut ids = share.pods.clone();
        for set in share.sets.keys().filter_map(|set| self.sets.get(*set)) {
            ids.extend(&set.members);
        }
        objects.extend(ids.into_iter().filter_map(|id| {
            let view = self.view(node, id)?;
            Some(self.encode_peer(self.peers.get(id)?, &view))
        }));
        objects
    }
}

/// Sets of a peer that a node's policies refer to.
fn referred(peer: &Peer, share: &Share) -> Vec<u32> {
    let shared = peer.sets.iter().copied();
    shared.filter(|set| share.sets.contains_key(set)).collect()
}

fn name_of(peer: &Peer) -> Name {
    let message = &peer.facts.message;
    Name::new(&message.namespace, &message.name)
}

fn sorted(mut ops: Vec<(Name, Op)>) -> Vec<Op> {
    ops.sort_by(|a, b| a.0.cmp(&b.0));
    ops.into_iter().map(|(_, op)| op).collect()
}
