//! Which identity every address has.

use std::collections::{BTreeSet, HashMap};

use dataplane_common::layout::IDENTITY_ANY;

use super::super::Touched;
use super::super::identity::Members;
use super::super::peer::{PeerSet, SetId};
use super::super::prefix::Prefix;
use super::super::trie::{Blocks, Trie};
use super::Compiler;

/// Identities that some range has now and none had before, and those that no range has any more.
#[derive(Debug, Default)]
pub(super) struct Turnover {
    pub(super) born: BTreeSet<u32>,
    pub(super) dead: BTreeSet<u32>,
}

impl Turnover {
    pub(super) fn is_empty(&self) -> bool {
        self.born.is_empty() && self.dead.is_empty()
    }
}

impl Compiler {
    /// The identity of a range, wherever no longer range has another.
    fn identify(&mut self, range: Prefix) -> u32 {
        let mut sets: Vec<SetId> = self.blocks.around(range).collect();
        let mut ports = Vec::new();
        if range.is_host() {
            let address = range.address();
            if let Some((_, owner)) = self.hosts.owner(address) {
                sets.extend(&owner.sets);
                ports.clone_from(&owner.ports);
            }
            sets.extend(self.domains.get(&address).into_iter().flatten());
        }
        self.compiled.identities.id(Members::new(sets, ports))
    }

    /// Works out all ranges again.
    pub(super) fn set_all_ranges(&mut self, touched: &mut Touched) -> Turnover {
        let hosts = self.hosts.addresses().chain(self.domains.keys().copied());
        let candidates: BTreeSet<Prefix> = self
            .blocks
            .bounds()
            .chain(hosts.map(Prefix::host))
            .collect();
        let mut trie = Trie::default();
        // A range comes after those that hold it.
        for range in candidates {
            let identity = self.identify(range);
            if trie.around(range).unwrap_or(IDENTITY_ANY) != identity {
                trie.insert(range, identity);
            }
        }
        let old = std::mem::replace(&mut self.compiled.trie, trie);
        let now = &self.compiled.trie;
        let changed = old
            .iter()
            .filter(|(range, id)| now.get(*range) != Some(*id));
        touched.ranges.extend(changed.map(|(range, _)| range));
        let new = now.iter().filter(|(range, _)| old.get(*range).is_none());
        touched.ranges.extend(new.map(|(range, _)| range));

        let mut before = std::mem::take(&mut self.compiled.live);
        for (_, identity) in self.compiled.trie.iter() {
            *self.compiled.live.entry(identity).or_default() += 1;
            before.entry(identity).or_default();
        }
        self.turnover(&before)
    }

    /// Takes the blocks in use now, of which these changed. Returns all ranges that those hold, which is where something
    /// may be different.
    pub(super) fn change_blocks(&mut self, changed: &BTreeSet<SetId>) -> Vec<Prefix> {
        let sets = &self.compiled.sets;
        let mut outer = Trie::default();
        for id in changed {
            if let Some(PeerSet::Block(block)) = sets.get(*id) {
                outer.insert(block.range, IDENTITY_ANY);
            }
        }
        if outer.is_empty() {
            return Vec::new();
        }
        let now = Blocks::new(&self.used, sets);
        let before = std::mem::replace(&mut self.blocks, now);
        let hosts = self.hosts.addresses().chain(self.domains.keys().copied());
        let candidates = before
            .bounds()
            .chain(self.blocks.bounds())
            .chain(hosts.map(Prefix::host));
        let held = candidates.filter(|range| outer.around(*range).is_some());
        held.collect()
    }

    /// Works out these ranges again. Where one is not that of a single address, all ranges in it are among them.
    pub(super) fn set_ranges(
        &mut self,
        ranges: &BTreeSet<Prefix>,
        touched: &mut Touched,
    ) -> Turnover {
        let mut before: HashMap<u32, usize> = HashMap::new();
        // A range comes after those that hold it.
        for range in ranges.iter().copied() {
            let old = self.compiled.trie.remove(range);
            let identity = self.identify(range);
            let around = self.compiled.trie.around(range).unwrap_or(IDENTITY_ANY);
            let new = (identity != around).then_some(identity);
            if let Some(new) = new {
                self.compiled.trie.insert(range, new);
            }
            if old == new {
                continue;
            }
            touched.ranges.insert(range);
            for id in [old, new].into_iter().flatten() {
                let count = self.compiled.live.get(&id).copied().unwrap_or(0);
                before.entry(id).or_insert(count);
            }
            if let Some(old) = old
                && let Some(count) = self.compiled.live.get_mut(&old)
            {
                *count -= 1;
                if *count == 0 {
                    self.compiled.live.remove(&old);
                }
            }
            if let Some(new) = new {
                *self.compiled.live.entry(new).or_default() += 1;
            }
        }
        self.turnover(&before)
    }

    /// `before` has the counts of every identity whose count changed.
    fn turnover(&mut self, before: &HashMap<u32, usize>) -> Turnover {
        let mut turnover = Turnover::default();
        for (id, count) in before.iter().filter(|(id, _)| **id != IDENTITY_ANY) {
            match (*count > 0, self.compiled.live.contains_key(id)) {
                (false, true) => turnover.born.insert(*id),
                (true, false) => turnover.dead.insert(*id),
                _ => continue,
            };
        }
        for id in &turnover.dead {
            for set in self.sets_of(*id) {
                if let Some(ids) = self.by_set.get_mut(&set) {
                    ids.remove(id);
                    if ids.is_empty() {
                        self.by_set.remove(&set);
                    }
                }
            }
        }
        for id in &turnover.born {
            for set in self.sets_of(*id) {
                self.by_set.entry(set).or_default().insert(*id);
            }
        }
        turnover
    }

    /// Peer sets of an identity and names of its ports.
    fn sets_of(&self, identity: u32) -> Vec<SetId> {
        let members = self.compiled.identities.members(identity);
        let all = members.into_iter().flat_map(|members| {
            let names = members.ports.iter().map(|port| port.name);
            members.sets.iter().copied().chain(names)
        });
        all.collect()
    }
}
