//! What the maps hold.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use dataplane_common::layout::{PodPolicy, PolicyRule};

use super::order::Move;
use super::{NOTHING, Operation, RuleKey};
use crate::compile::policy::{Entries, Entry, PortPrefix, Prefix, Trie};

/// Rules of one policy by identity; by direction.
pub(super) type Rules = HashMap<u32, [Entries; 2]>;

/// The maps of policies, as they were read or written last.
#[derive(Clone, Debug, Default)]
pub struct Present {
    pub(super) pods: BTreeMap<u32, PodPolicy>,
    pub(super) rules: HashMap<u32, Rules>,
    pub(super) trie: Trie,
    /// How many ranges have an identity.
    pub(super) live: HashMap<u32, usize>,
}

impl Present {
    /// From what the maps were read to hold.
    pub fn new(
        pods: impl IntoIterator<Item = (u32, PodPolicy)>,
        rules: impl IntoIterator<Item = (RuleKey, PolicyRule)>,
        identities: impl IntoIterator<Item = (Prefix, u32)>,
    ) -> Self {
        let mut present = Self {
            pods: pods.into_iter().collect(),
            ..Self::default()
        };
        let mut lists: BTreeMap<(u32, u32, u8), Vec<Entry>> = BTreeMap::new();
        for (key, rule) in rules {
            let list = lists
                .entry((key.policy_id, key.identity, key.direction))
                .or_default();
            list.push((key.ports, rule));
        }
        for ((policy, identity, direction), mut list) in lists {
            list.sort_unstable_by_key(|(ports, _)| *ports);
            let rules = present.rules.entry(policy).or_default();
            let sides = rules.entry(identity).or_insert_with(NOTHING);
            if let Some(side) = sides.get_mut(usize::from(direction)) {
                *side = list.into();
            }
        }
        for (range, identity) in identities {
            present.trie.insert(range, identity);
        }
        for (_, identity) in present.trie.iter() {
            *present.live.entry(identity).or_default() += 1;
        }
        present
    }

    /// Counts ranges that moved.
    pub(super) fn count(&mut self, moves: &[Move]) {
        for one in moves {
            if one.stays {
                *self.live.entry(one.to).or_default() += 1;
            }
        }
        for had in moves.iter().filter_map(|one| one.had) {
            if let Some(count) = self.live.get_mut(&had) {
                *count -= 1;
                if *count == 0 {
                    self.live.remove(&had);
                }
            }
        }
    }

    #[must_use]
    pub fn pods(&self) -> &BTreeMap<u32, PodPolicy> {
        &self.pods
    }

    #[must_use]
    pub fn policy_count(&self) -> usize {
        self.rules.len()
    }

    #[must_use]
    pub fn identity_count(&self) -> usize {
        self.live.len()
    }

    /// True when an address has the identity, or rules speak of it.
    #[must_use]
    pub fn speaks_of(&self, identity: u32) -> bool {
        let mut policies = self.rules.values();
        self.live.contains_key(&identity) || policies.any(|rules| rules.contains_key(&identity))
    }

    pub(super) fn get(&self, policy: u32, identity: u32) -> Option<&[Entries; 2]> {
        self.rules.get(&policy)?.get(&identity)
    }

    /// Makes the rules of an identity equal to these.
    pub(super) fn set(
        &mut self,
        policy_id: u32,
        identity: u32,
        entries: [Entries; 2],
        steps: &mut Vec<Operation>,
    ) {
        let rules = self.rules.entry(policy_id).or_default();
        let before = rules.remove(&identity).unwrap_or_else(NOTHING);
        for ((before, now), direction) in before.iter().zip(&entries).zip(0..) {
            if Arc::ptr_eq(before, now) {
                continue;
            }
            let key = |ports: PortPrefix| RuleKey {
                policy_id,
                identity,
                direction,
                ports,
            };
            let find = |entries: &Entries, ports: &PortPrefix| {
                let place = entries.binary_search_by_key(ports, |(ports, _)| *ports);
                place.ok().map(|place| entries[place].1)
            };
            for (ports, rule) in now.iter() {
                if find(before, ports) != Some(*rule) {
                    steps.push(Operation::PutRule(key(*ports), *rule));
                }
            }
            for (ports, _) in before.iter() {
                if find(now, ports).is_none() {
                    steps.push(Operation::RemoveRule(key(*ports)));
                }
            }
        }
        if entries.iter().any(|entries| !entries.is_empty()) {
            rules.insert(identity, entries);
        }
    }

    pub(super) fn remove_policy(&mut self, policy_id: u32, steps: &mut Vec<Operation>) {
        for (identity, sides) in self.rules.remove(&policy_id).unwrap_or_default() {
            for (entries, direction) in sides.iter().zip(0..) {
                steps.extend(entries.iter().map(|(ports, _)| {
                    Operation::RemoveRule(RuleKey {
                        policy_id,
                        identity,
                        direction,
                        ports: *ports,
                    })
                }));
            }
        }
    }
}

/// Nothing, and no entries, are the same.
pub(super) fn same(present: Option<&[Entries; 2]>, wanted: &[Entries; 2]) -> bool {
    match present {
        Some(present) => present
            .iter()
            .zip(wanted)
            .all(|(a, b)| Arc::ptr_eq(a, b) || a == b),
        None => wanted.iter().all(|entries| entries.is_empty()),
    }
}
