//! A longest prefix match over ordinary collections, and the address ranges that rules name.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use super::peer::{Block, PeerSet, PeerSets, SetId};
use super::prefix::Prefix;

/// Identities by address range.
#[derive(Clone, Debug, Default)]
pub struct Trie {
    ranges: BTreeMap<Prefix, u32>,
    /// How many ranges have a length, by family.
    lengths: BTreeMap<(bool, u8), usize>,
}

impl PartialEq for Trie {
    fn eq(&self, other: &Self) -> bool {
        self.ranges == other.ranges
    }
}

impl Trie {
    /// What the range had before.
    pub fn insert(&mut self, range: Prefix, identity: u32) -> Option<u32> {
        let before = self.ranges.insert(range, identity);
        if before.is_none() {
            *self
                .lengths
                .entry((range.is_ipv6(), range.len))
                .or_default() += 1;
        }
        before
    }

    pub fn remove(&mut self, range: Prefix) -> Option<u32> {
        let before = self.ranges.remove(&range);
        if before.is_some()
            && let Some(count) = self.lengths.get_mut(&(range.is_ipv6(), range.len))
        {
            *count -= 1;
            if *count == 0 {
                self.lengths.remove(&(range.is_ipv6(), range.len));
            }
        }
        before
    }

    #[must_use]
    pub fn get(&self, range: Prefix) -> Option<u32> {
        self.ranges.get(&range).copied()
    }

    /// The identity of the longest range that has an address.
    #[must_use]
    pub fn find(&self, address: IpAddr) -> Option<u32> {
        self.around(Prefix::host(address))
    }

    /// The identity of the longest range that holds another, which may be that itself.
    #[must_use]
    pub fn around(&self, inner: Prefix) -> Option<u32> {
        let family = inner.is_ipv6();
        let lengths = self.lengths.range((family, 0)..=(family, inner.len)).rev();
        let mut ranges = lengths.filter_map(|((_, len), _)| self.ranges.get(&inner.cut(*len)));
        ranges.next().copied()
    }

    pub fn iter(&self) -> impl Iterator<Item = (Prefix, u32)> {
        self.ranges.iter().map(|(range, id)| (*range, *id))
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }
}

/// The blocks that rules name, and the ranges at which the set of blocks around an address changes.
#[derive(Clone, Debug, Default)]
pub(super) struct Blocks {
    by_range: HashMap<Prefix, Vec<(SetId, Block)>>,
    lengths: BTreeSet<(bool, u8)>,
    /// Blocks and holes.
    bounds: BTreeSet<Prefix>,
}

impl Blocks {
    pub(super) fn new(used: &BTreeSet<SetId>, sets: &PeerSets) -> Self {
        let mut all = Self::default();
        for id in used {
            let Some(PeerSet::Block(block)) = sets.get(*id) else {
                continue;
            };
            let range = block.range;
            all.lengths.insert((range.is_ipv6(), range.len));
            all.bounds.insert(range);
            let holes = block.except.iter().copied();
            all.bounds.extend(holes.filter(|hole| range.holds(*hole)));
            all.by_range
                .entry(range)
                .or_default()
                .push((*id, block.clone()));
        }
        all
    }

    pub(super) fn bounds(&self) -> impl Iterator<Item = Prefix> {
        self.bounds.iter().copied()
    }

    /// Blocks that hold all of a range.
    pub(super) fn around(&self, range: Prefix) -> impl Iterator<Item = SetId> {
        let family = range.is_ipv6();
        let lengths = self.lengths.range((family, 0)..=(family, range.len));
        lengths
            .filter_map(move |(_, len)| self.by_range.get(&range.cut(*len)))
            .flatten()
            .filter(move |(_, block)| block.holds(range))
            .map(|(id, _)| *id)
    }
}
