//! Who is in which set, which policy selects whom, and which node holds what, kept up change by change.
//!
//! Every step that changes what a node is told of a peer or a policy calls `touch_*` first: the view before the first
//! touch is what the node holds, and `sending` compares it with the view after the last.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use bytes::Bytes;
use control_api::desired::Name;

use super::peers::Peer as Facts;
use super::rules::Translated;
use super::selector::{Labels, Members, SetId};
use super::sending::Touched;
use super::slab::Slab;

#[derive(Debug)]
pub(super) struct Set {
    pub(super) id: SetId,
    pub(super) of: Members,
    pub(super) members: BTreeSet<u32>,
    /// Nodes with a policy that refers to it.
    pub(super) nodes: BTreeSet<Arc<str>>,
    /// Policies that apply to its members.
    pub(super) subjects: BTreeSet<u32>,
    /// Policies that name it, as their subject or in a rule.
    pub(super) users: usize,
}

#[derive(Debug)]
pub(super) struct Peer {
    pub(super) facts: Facts,
    pub(super) node: Arc<str>,
    pub(super) sets: BTreeSet<u32>,
    pub(super) policies: BTreeSet<u32>,
    /// Changes with `facts`.
    pub(super) version: u64,
    /// Changes with `policies`.
    pub(super) policies_version: u64,
}

impl Peer {
    pub(super) fn is_pod(&self) -> bool {
        !self.facts.message.namespace.is_empty()
    }
}

#[derive(Debug)]
pub(super) struct Policy {
    pub(super) name: Name,
    pub(super) translated: Translated,
    pub(super) bytes: Bytes,
    pub(super) version: u64,
    pub(super) subject: Option<u32>,
    pub(super) sets: BTreeSet<u32>,
    /// How many of each node's pods it selects.
    pub(super) nodes: BTreeMap<Arc<str>, usize>,
}

#[derive(Debug, Default)]
pub(super) struct Namespace {
    /// Unset until the namespace itself is known.
    pub(super) labels: Option<Labels>,
    pub(super) pods: BTreeSet<u32>,
    /// Sets that look into it.
    pub(super) sets: BTreeSet<u32>,
}

/// What one node holds, and why.
#[derive(Debug, Default)]
pub(super) struct Share {
    pub(super) pods: BTreeSet<u32>,
    pub(super) policies: BTreeSet<u32>,
    /// How many of its policies refer to a set.
    pub(super) sets: BTreeMap<u32, usize>,
}

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct Graph {
    pub(super) sets: Slab<Set>,
    pub(super) set_ids: HashMap<SetId, u32>,
    pub(super) peers: Slab<Peer>,
    pub(super) peer_ids: BTreeMap<Name, u32>,
    pub(super) policies: Slab<Policy>,
    pub(super) policy_ids: BTreeMap<Name, u32>,
    pub(super) namespaces: BTreeMap<String, Namespace>,
    /// Sets that choose namespaces by label.
    pub(super) choosing_sets: BTreeSet<u32>,
    pub(super) node_sets: BTreeSet<u32>,
    pub(super) node_peers: BTreeSet<u32>,
    pub(super) shares: BTreeMap<Arc<str>, Share>,
    pub(super) touched: Touched,
    versions: u64,
}

impl Graph {
    pub(super) fn policy_names(&self) -> impl Iterator<Item = &Name> {
        self.policy_ids.keys()
    }

    pub(super) fn peer_names(&self) -> impl Iterator<Item = &Name> {
        self.peer_ids.keys()
    }

    /// Nothing is left behind when everything has gone.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        let slabs = [
            self.sets.ids().count(),
            self.peers.ids().count(),
            self.policies.ids().count(),
        ];
        let maps = [
            self.set_ids.len(),
            self.peer_ids.len(),
            self.policy_ids.len(),
        ];
        slabs == [0; 3]
            && maps == [0; 3]
            && self.namespaces.is_empty()
            && self.choosing_sets.is_empty()
            && self.node_sets.is_empty()
            && self.node_peers.is_empty()
            && self.shares.is_empty()
    }

    pub(super) fn version(&mut self) -> u64 {
        self.versions += 1;
        self.versions
    }

    // ---- peers ----

    pub(super) fn put_peer(&mut self, name: &Name, facts: Option<Facts>) {
        let Some(facts) = facts else {
            self.drop_peer(name);
            return;
        };
        let Some(&id) = self.peer_ids.get(name) else {
            self.add_peer(name, facts);
            return;
        };
        let Some(peer) = self.peers.get(id) else {
            return;
        };
        if peer.facts == facts {
            return;
        }
        if peer.facts.message.node != facts.message.node {
            self.drop_peer(name);
            self.add_peer(name, facts);
            return;
        }
        let relabelled = peer.facts.labels != facts.labels;
        if peer.facts.message != facts.message {
            self.touch_holders(id);
            let version = self.version();
            if let Some(peer) = self.peers.get_mut(id) {
                peer.version = version;
                peer.facts.message = facts.message;
            }
        }
        if relabelled {
            self.relabel(id, facts.labels);
        }
    }

    fn add_peer(&mut self, name: &Name, facts: Facts) {
        let (version, policies_version) = (self.version(), self.version());
        let node: Arc<str> = facts.message.node.as_str().into();
        let id = self.peers.insert(Peer {
            node: Arc::clone(&node),
            facts,
            sets: BTreeSet::new(),
            policies: BTreeSet::new(),
            version,
            policies_version,
        });
        self.peer_ids.insert(name.clone(), id);
        if name.namespace.is_empty() {
            self.node_peers.insert(id);
        } else {
            let namespace = self.namespaces.entry(name.namespace.clone()).or_default();
            namespace.pods.insert(id);
            if !node.is_empty() {
                self.touch_peer(&node, id);
                self.shares.entry(node).or_default().pods.insert(id);
            }
        }
        for set in self.matching_sets(id) {
            self.join(id, set);
        }
    }

    fn drop_peer(&mut self, name: &Name) {
        let Some(id) = self.peer_ids.get(name).copied() else {
            return;
        };
        self.touch_holders(id);
        let Some(peer) = self.peers.get(id) else {
            return;
        };
        let (node, sets) = (Arc::clone(&peer.node), peer.sets.clone());
        for set in sets {
            self.leave(id, set);
        }
        self.peer_ids.remove(name);
        self.node_peers.remove(&id);
        if let Some(namespace) = self.namespaces.get_mut(&name.namespace) {
            namespace.pods.remove(&id);
        }
        self.tidy_namespace(&name.namespace);
        if let Some(share) = self.shares.get_mut(&node) {
            share.pods.remove(&id);
        }
        self.tidy_share(&node);
        self.peers.remove(id);
        self.touched.peer_left(id, name);
    }

    fn relabel(&mut self, id: u32, labels: Labels) {
        let Some(peer) = self.peers.get_mut(id) else {
            return;
        };
        peer.facts.labels = labels;
        let before = peer.sets.clone();
        let after = self.matching_sets(id);
        for set in after.difference(&before) {
            self.join(id, *set);
        }
        for set in before.difference(&after) {
            self.leave(id, *set);
        }
    }

    /// Sets that a peer belongs in by its labels.
    fn matching_sets(&self, id: u32) -> BTreeSet<u32> {
        let Some(peer) = self.peers.get(id) else {
            return BTreeSet::new();
        };
        let candidates = if peer.is_pod() {
            self.namespaces
                .get(&peer.facts.message.namespace)
                .map(|namespace| &namespace.sets)
        } else {
            Some(&self.node_sets)
        };
        let candidates = candidates.into_iter().flatten().copied();
        candidates.filter(|set| self.selects(*set, peer)).collect()
    }

    pub(super) fn selects(&self, set: u32, peer: &Peer) -> bool {
        match self.sets.get(set).map(|set| &set.of) {
            Some(Members::Pods { pods, .. }) => pods.matches(&peer.facts.labels),
            Some(Members::Nodes(nodes)) => nodes.matches(&peer.facts.labels),
            None => false,
        }
    }

    // ---- membership ----

    /// Every node that holds the set has to look at the peer again. Returns the policies whose subjects the set is.
    fn touch_member(&mut self, id: u32, set: u32) -> Option<BTreeSet<u32>> {
        let entry = self.sets.get(set)?;
        let (nodes, subjects) = (entry.nodes.clone(), entry.subjects.clone());
        for node in &nodes {
            self.touch_peer(node, id);
        }
        Some(subjects)
    }

    pub(super) fn join(&mut self, id: u32, set: u32) {
        let Some(subjects) = self.touch_member(id, set) else {
            return;
        };
        if let Some(entry) = self.sets.get_mut(set) {
            entry.members.insert(id);
        }
        if let Some(peer) = self.peers.get_mut(id) {
            peer.sets.insert(set);
        }
        for policy in subjects {
            self.select(policy, id);
        }
    }

    pub(super) fn leave(&mut self, id: u32, set: u32) {
        let Some(subjects) = self.touch_member(id, set) else {
            return;
        };
        if let Some(entry) = self.sets.get_mut(set) {
            entry.members.remove(&id);
        }
        if let Some(peer) = self.peers.get_mut(id) {
            peer.sets.remove(&set);
        }
        for policy in subjects {
            self.deselect(policy, id);
        }
    }

    pub(super) fn select(&mut self, policy: u32, id: u32) {
        if let Some(node) = self.change_selection(policy, id, true) {
            let Some(entry) = self.policies.get_mut(policy) else {
                return;
            };
            let count = entry.nodes.entry(Arc::clone(&node)).or_default();
            *count += 1;
            if *count == 1 {
                self.gain(&node, policy);
            }
        }
    }

    pub(super) fn deselect(&mut self, policy: u32, id: u32) {
        if let Some(node) = self.change_selection(policy, id, false) {
            let Some(entry) = self.policies.get_mut(policy) else {
                return;
            };
            let Some(count) = entry.nodes.get_mut(&node) else {
                return;
            };
            *count -= 1;
            if *count == 0 {
                entry.nodes.remove(&node);
                self.lose(&node, policy);
            }
        }
    }

    /// Notes a policy on a pod or takes it off; the pod's node, when that concerns one.
    fn change_selection(&mut self, policy: u32, id: u32, selected: bool) -> Option<Arc<str>> {
        let node = Arc::clone(&self.peers.get(id)?.node);
        if !node.is_empty() {
            self.touch_peer(&node, id);
        }
        let version = self.version();
        let peer = self.peers.get_mut(id)?;
        let changed = if selected {
            peer.policies.insert(policy)
        } else {
            peer.policies.remove(&policy)
        };
        if changed {
            peer.policies_version = version;
        }
        (changed && !node.is_empty()).then_some(node)
    }

    // ---- what nodes need ----

    fn gain(&mut self, node: &Arc<str>, policy: u32) {
        self.touch_policy(node, policy);
        let share = self.shares.entry(Arc::clone(node)).or_default();
        share.policies.insert(policy);
        for set in self.sets_of(policy) {
            self.refer(node, set);
        }
    }

    fn lose(&mut self, node: &Arc<str>, policy: u32) {
        self.touch_policy(node, policy);
        if let Some(share) = self.shares.get_mut(node) {
            share.policies.remove(&policy);
        }
        for set in self.sets_of(policy) {
            self.unrefer(node, set);
        }
        self.tidy_share(node);
    }

    fn sets_of(&self, policy: u32) -> BTreeSet<u32> {
        self.policies
            .get(policy)
            .map(|policy| policy.sets.clone())
            .unwrap_or_default()
    }

    pub(super) fn refer(&mut self, node: &Arc<str>, set: u32) {
        let share = self.shares.entry(Arc::clone(node)).or_default();
        if let Some(count) = share.sets.get_mut(&set) {
            *count += 1;
            return;
        }
        self.touch_members(node, set);
        if let Some(share) = self.shares.get_mut(node) {
            share.sets.insert(set, 1);
        }
        if let Some(entry) = self.sets.get_mut(set) {
            entry.nodes.insert(Arc::clone(node));
        }
    }

    pub(super) fn unrefer(&mut self, node: &Arc<str>, set: u32) {
        let count = self.shares.get_mut(node).and_then(|s| s.sets.get_mut(&set));
        match count {
            Some(count) if *count > 1 => *count -= 1,
            Some(_) => {
                self.touch_members(node, set);
                if let Some(share) = self.shares.get_mut(node) {
                    share.sets.remove(&set);
                }
                if let Some(entry) = self.sets.get_mut(set) {
                    entry.nodes.remove(node);
                }
            }
            None => {}
        }
    }

    pub(super) fn tidy_share(&mut self, node: &Arc<str>) {
        let empty = |share: &Share| share.pods.is_empty() && share.policies.is_empty();
        if self.shares.get(node).is_some_and(empty) {
            self.shares.remove(node);
        }
    }

    pub(super) fn touch_members(&mut self, node: &Arc<str>, set: u32) {
        if self.touched.is_quiet() {
            return;
        }
        let Some(entry) = self.sets.get(set) else {
            return;
        };
        self.touched.expect(node, entry.members.len());
        for id in entry.members.clone() {
            self.touch_peer(node, id);
        }
    }

    /// Everybody who is told of this peer, or would be if it had an address.
    pub(super) fn touch_holders(&mut self, id: u32) {
        let Some(peer) = self.peers.get(id).filter(|_| !self.touched.is_quiet()) else {
            return;
        };
        let sets = peer.sets.iter().filter_map(|set| self.sets.get(*set));
        let mut nodes: BTreeSet<Arc<str>> = sets.flat_map(|s| s.nodes.iter().cloned()).collect();
        if peer.is_pod() && !peer.node.is_empty() {
            nodes.insert(Arc::clone(&peer.node));
        }
        for node in nodes {
            self.touch_peer(&node, id);
        }
    }
}
