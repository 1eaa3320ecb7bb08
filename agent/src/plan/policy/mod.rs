//! Wanted policies against what the maps hold: operations in an order in which no packet is ever judged by a mixture. At
//! every moment, whatever a pod says of a packet is what it said before, or what it says after.
//!
//! A pod changes its rules by one write: its entry names a policy whose rules are all in place. An address changes its
//! identity by one write as well. Where both change, what a pod says of an address could be neither the old nor the new;
//! [`order`] says how that is avoided. Pure.

mod order;
mod present;

#[cfg(test)]
pub(crate) mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use dataplane_common::layout::{IDENTITY_ANY, PodPolicy};

use crate::compile::policy::{Compiled, Entries, PodState, Prefix, RuleSetId, SHUT_FLAGS, Touched};
use order::{Move, Order};
pub use present::Present;
use present::{Rules, same};

/// One write to a map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    PutRule(RuleKey, dataplane_common::layout::PolicyRule),
    RemoveRule(RuleKey),
    PutIdentity(Prefix, u32),
    RemoveIdentity(Prefix),
    /// By the interface index of the host side of the pod's link.
    PutPod(u32, PodPolicy),
    RemovePod(u32),
    /// Flows that were judged before are judged again.
    NextGeneration,
}

/// Which entry of the rules.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct RuleKey {
    pub policy_id: u32,
    pub identity: u32,
    pub direction: u8,
    pub ports: crate::compile::policy::PortPrefix,
}

/// What the maps hold, and which of it stands for what.
#[derive(Debug, Default)]
pub struct Planner {
    present: Present,
    /// Policies of the rule sets that are in place.
    ids: HashMap<RuleSetId, u32>,
    last_id: u32,
}

/// Pods that get other entries.
#[derive(Clone, Copy, Debug)]
struct Flip {
    ifindex: u32,
    from: Option<PodPolicy>,
    to: PodPolicy,
}

/// Rules that have to be changed after identities and pods were.
type Later = BTreeSet<(u32, u32)>;

const NOTHING: fn() -> [Entries; 2] = || [Entries::from([]), Entries::from([])];

impl Planner {
    /// A planner for maps that hold this.
    #[must_use]
    pub fn new(present: Present) -> Self {
        let last_id = present.rules.keys().copied().max().unwrap_or(0);
        let pods = present.pods.values().map(|pod| pod.policy_id).max();
        Self {
            last_id: last_id.max(pods.unwrap_or(0)),
            present,
            ids: HashMap::new(),
        }
    }

    #[must_use]
    pub fn present(&self) -> &Present {
        &self.present
    }

    /// The rule set that a policy of the maps stands for.
    #[must_use]
    pub fn rule_set_of(&self, policy_id: u32) -> Option<RuleSetId> {
        let mut ids = self.ids.iter();
        ids.find(|(_, id)| **id == policy_id).map(|(set, _)| *set)
    }

    /// Operations that shut those of these pods that have no entry.
    pub fn shut_unknown(&mut self, pods: &[u32]) -> Vec<Operation> {
        let shut = PodPolicy {
            policy_id: 0,
            flags: SHUT_FLAGS,
        };
        let mut steps = Vec::new();
        for ifindex in pods {
            if !self.present.pods.contains_key(ifindex) {
                self.present.pods.insert(*ifindex, shut);
                steps.push(Operation::PutPod(*ifindex, shut));
            }
        }
        steps
    }

    /// Operations that open pods, whatever the maps say of them.
    pub fn open(&mut self, pods: &BTreeSet<u32>) -> Vec<Operation> {
        let open = |ifindex: &u32| {
            self.present.pods.insert(*ifindex, PodPolicy::default());
            Operation::PutPod(*ifindex, PodPolicy::default())
        };
        pods.iter().map(open).collect()
    }

    /// Operations that make the maps equal to what was compiled. Looks only at what is touched; the first call must say
    /// everything.
    pub fn plan(&mut self, compiled: &Compiled, touched: &Touched) -> Vec<Operation> {
        let mut steps = Vec::new();
        let mut later = Later::new();
        let mut fresh = self.choose_ids(compiled, touched, &mut steps, &mut later);
        let moves = self.moves(compiled, touched);
        let mut flips = self.flips(compiled);
        let mut order = self.order(compiled, &flips, &moves, &fresh);
        if matches!(order, Order::Through(_)) {
            // Pods that stay must not see what is arranged for those that leave.
            let left: BTreeSet<u32> = flips
                .iter()
                .filter_map(|f| Some(f.from?.policy_id))
                .collect();
            let kept: Vec<RuleSetId> = self
                .ids
                .iter()
                .filter(|(_, id)| left.contains(id))
                .map(|(set, _)| *set)
                .collect();
            for set in kept {
                fresh.insert(self.install(compiled, set, &mut steps));
            }
            flips = self.flips(compiled);
            order = self.order(compiled, &flips, &moves, &fresh);
        }
        self.arrange(compiled, &order, &mut steps, &mut later);
        order.first(&moves, &mut steps);
        steps.extend(
            flips
                .iter()
                .map(|flip| Operation::PutPod(flip.ifindex, flip.to)),
        );
        order.last(&moves, &mut steps);
        if !flips.is_empty() || !moves.is_empty() {
            steps.push(Operation::NextGeneration);
        }
        self.finish(compiled, touched, (&flips, &moves), &later, &mut steps);
        steps
    }

    /// Gives every rule set in question a policy: the one it has, where nobody can see what changes in it; a new one
    /// otherwise. Returns the new ones.
    fn choose_ids(
        &mut self,
        compiled: &Compiled,
        touched: &Touched,
        steps: &mut Vec<Operation>,
        later: &mut Later,
    ) -> BTreeSet<u32> {
        if touched.everything {
            self.ids.clear();
        }
        let fits = |set: &RuleSetId| {
            compiled.rule_sets.contains_key(set) && !compiled.shut.contains_key(set)
        };
        self.ids.retain(|set, _| fits(set));
        let mut used: BTreeMap<RuleSetId, Vec<u32>> = BTreeMap::new();
        for (ifindex, state) in &compiled.pods {
            if let PodState::Judged(set) = state
                && fits(set)
            {
                let present = self.present.pods.get(ifindex);
                let ids = used.entry(*set).or_default();
                ids.extend(present.map(|pod| pod.policy_id));
            }
        }
        let mut rules: BTreeMap<RuleSetId, BTreeSet<u32>> = BTreeMap::new();
        for (set, identity) in &touched.rules {
            rules.entry(*set).or_default().insert(*identity);
        }
        let mut fresh = BTreeSet::new();
        for (set, candidates) in used {
            let adopted = match self.ids.get(&set) {
                Some(id) => match rules.get(&set) {
                    Some(identities) => self.adapt(compiled, set, *id, identities, later),
                    None => continue,
                },
                None => {
                    let taken: BTreeSet<u32> = self.ids.values().copied().collect();
                    let mut free = candidates
                        .into_iter()
                        .filter(|id| *id != 0 && !taken.contains(id));
                    free.find_map(|id| self.adopt(compiled, set, id, later))
                }
            };
            match adopted {
                Some((id, now)) => {
                    self.ids.insert(set, id);
                    self.present.rules.entry(id).or_default();
                    for identity in now {
                        let entries = wanted(compiled, set, identity);
                        self.present.set(id, identity, entries, steps);
                    }
                }
                None => {
                    fresh.insert(self.install(compiled, set, steps));
                }
            }
        }
        fresh
    }

    /// A policy that an earlier agent, or an earlier state, had for the same rules.
    fn adopt(
        &self,
        compiled: &Compiled,
        set: RuleSetId,
        id: u32,
        later: &mut Later,
    ) -> Option<(u32, Vec<u32>)> {
        // One that has no rules is in no map but that of the pods.
        let present = self.present.rules.get(&id).into_iter().flatten();
        let mut identities: BTreeSet<u32> = present.map(|(identity, _)| *identity).collect();
        identities.extend(compiled.rule_sets.get(&set)?.identities());
        self.adapt(compiled, set, id, &identities, later)
    }

    /// The identities whose rules may be changed at once, since no address has them; those of addresses that will have
    /// another go to `later`. None where somebody would see the change.
    fn adapt(
        &self,
        compiled: &Compiled,
        set: RuleSetId,
        id: u32,
        identities: &BTreeSet<u32>,
        later: &mut Later,
    ) -> Option<(u32, Vec<u32>)> {
        let (mut now, mut after) = (Vec::new(), Vec::new());
        for identity in identities {
            let entries = wanted(compiled, set, *identity);
            if same(self.present.get(id, *identity), &entries) {
                continue;
            }
            let everybody = *identity == IDENTITY_ANY;
            match (
                self.present.live.contains_key(identity),
                compiled.live.contains_key(identity),
            ) {
                _ if everybody => return None,
                (true, true) => return None,
                (true, false) => after.push((id, *identity)),
                (false, _) => now.push(*identity),
            }
        }
        later.extend(after);
        Some((id, now))
    }

    /// Puts all rules of a set in place, under a new policy.
    fn install(&mut self, compiled: &Compiled, set: RuleSetId, steps: &mut Vec<Operation>) -> u32 {
        loop {
            self.last_id = self.last_id.wrapping_add(1).max(1);
            if !self.present.rules.contains_key(&self.last_id) {
                break;
            }
        }
        let id = self.last_id;
        self.ids.insert(set, id);
        self.present.rules.insert(id, Rules::new());
        if let Some(rules) = compiled.rule_sets.get(&set) {
            for identity in rules.identities() {
                let entries = wanted(compiled, set, identity);
                self.present.set(id, identity, entries, steps);
            }
        }
        id
    }

    /// Pods that get other entries.
    fn flips(&self, compiled: &Compiled) -> Vec<Flip> {
        let mut flips = Vec::new();
        for ifindex in compiled.pods.keys() {
            let policy_id = compiled
                .rules_of(*ifindex)
                .and_then(|(set, _)| self.ids.get(&set));
            let flags = compiled.flags(*ifindex);
            let to = PodPolicy {
                policy_id: policy_id.copied().unwrap_or(0),
                flags: if policy_id.is_some() || flags == 0 {
                    flags
                } else {
                    SHUT_FLAGS
                },
            };
            let from = self.present.pods.get(ifindex).copied();
            if from != Some(to) {
                flips.push(Flip {
                    ifindex: *ifindex,
                    from,
                    to,
                });
            }
        }
        flips
    }

    /// Puts in place what the order needs besides the rules themselves.
    fn arrange(
        &mut self,
        compiled: &Compiled,
        order: &Order,
        steps: &mut Vec<Operation>,
        later: &mut Later,
    ) {
        let extras = order.extras(&self.present, compiled, &self.ids);
        for ((id, identity), entries) in extras {
            self.present.set(id, identity, entries, steps);
            later.insert((id, identity));
        }
    }

    /// Removes what nobody looks at any more, and notes what the maps hold now.
    fn finish(
        &mut self,
        compiled: &Compiled,
        touched: &Touched,
        (flips, moves): (&[Flip], &[Move]),
        later: &Later,
        steps: &mut Vec<Operation>,
    ) {
        for flip in flips {
            self.present.pods.insert(flip.ifindex, flip.to);
        }
        let gone: Vec<u32> = if touched.everything {
            let pods = self.present.pods.keys().copied();
            pods.filter(|ifindex| !compiled.pods.contains_key(ifindex))
                .collect()
        } else {
            let pods = touched.pods.iter().copied();
            pods.filter(|ifindex| !compiled.pods.contains_key(ifindex))
                .collect()
        };
        for ifindex in gone {
            if self.present.pods.remove(&ifindex).is_some() {
                steps.push(Operation::RemovePod(ifindex));
            }
        }
        self.present.count(moves);
        let by_id: HashMap<u32, RuleSetId> = self.ids.iter().map(|(set, id)| (*id, *set)).collect();
        for (id, identity) in later {
            let Some(set) = by_id.get(id) else {
                continue;
            };
            let entries = wanted(compiled, *set, *identity);
            self.present.set(*id, *identity, entries, steps);
        }
        let present = self.present.rules.keys().copied();
        let unused: Vec<u32> = present.filter(|id| !by_id.contains_key(id)).collect();
        for id in unused {
            self.present.remove_policy(id, steps);
        }
    }
}

fn wanted(compiled: &Compiled, set: RuleSetId, identity: u32) -> [Entries; 2] {
    let rules = compiled.rule_sets.get(&set);
    let entries = rules.and_then(|rules| rules.entries(identity));
    entries.cloned().unwrap_or_else(NOTHING)
}
