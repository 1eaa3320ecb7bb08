//! The tables of policies over ordinary collections, with the kernel's meaning of a longest prefix: for models, for
//! explanations, for tests.

use std::collections::{BTreeMap, HashMap};

use super::{PolicyRules, PolicyTables};
use crate::address::{Family, Port};
use crate::layout::{
    Endpoint, IDENTITY_ANY, PodPolicy, PolicyRule, PolicyRuleKey, RULE_BITS_ONE_PORT, RangeKey,
};

/// Rules by their keys.
#[derive(Clone, Debug, Default)]
pub struct RuleTable {
    rules: HashMap<PolicyRuleKey, PolicyRule>,
    /// Prefix lengths in use, with how many rules have each.
    lengths: BTreeMap<u32, usize>,
}

impl RuleTable {
    /// Adds or replaces. Bits behind the key's prefix do not count.
    pub fn insert(&mut self, key: PolicyRuleKey, rule: PolicyRule) {
        let key = masked(&key, key.prefix_bits);
        if self.rules.insert(key, rule).is_none() {
            *self.lengths.entry(key.prefix_bits).or_default() += 1;
        }
    }

    pub fn remove(&mut self, key: &PolicyRuleKey) -> Option<PolicyRule> {
        let key = masked(key, key.prefix_bits);
        let removed = self.rules.remove(&key)?;
        if let Some(count) = self.lengths.get_mut(&key.prefix_bits) {
            *count -= 1;
        }
        self.lengths.retain(|_, count| *count > 0);
        Some(removed)
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.rules.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = (&PolicyRuleKey, &PolicyRule)> {
        self.rules.iter()
    }

    /// The entry with the longest prefix that holds the key, and its own key.
    #[must_use]
    pub fn longest(&self, key: &PolicyRuleKey) -> Option<(&PolicyRuleKey, &PolicyRule)> {
        self.lengths
            .range(..=key.prefix_bits)
            .rev()
            .find_map(|(&bits, _)| self.rules.get_key_value(&masked(key, bits)))
    }
}

impl FromIterator<(PolicyRuleKey, PolicyRule)> for RuleTable {
    fn from_iter<I: IntoIterator<Item = (PolicyRuleKey, PolicyRule)>>(entries: I) -> Self {
        let mut table = Self::default();
        for (key, rule) in entries {
            table.insert(key, rule);
        }
        table
    }
}

impl PolicyRules for RuleTable {
    fn policy_rule(&mut self, key: &PolicyRuleKey) -> Option<&PolicyRule> {
        self.longest(key).map(|(_, rule)| rule)
    }
}

/// The key as its first `bits` bits have it, zeroes after them.
fn masked(key: &PolicyRuleKey, bits: u32) -> PolicyRuleKey {
    let mut bytes = [0; 12];
    bytes[..4].copy_from_slice(&key.policy_id.to_ne_bytes());
    bytes[4..8].copy_from_slice(&key.identity.to_ne_bytes());
    bytes[8] = key.direction;
    bytes[9] = key.protocol;
    bytes[10..].copy_from_slice(&key.port.0.to_ne_bytes());
    mask(&mut bytes, bits);
    let [a, b, c, d, e, f, g, h, direction, protocol, i, j] = bytes;
    PolicyRuleKey {
        prefix_bits: bits.min(RULE_BITS_ONE_PORT),
        policy_id: u32::from_ne_bytes([a, b, c, d]),
        identity: u32::from_ne_bytes([e, f, g, h]),
        direction,
        protocol,
        port: Port(u16::from_ne_bytes([i, j])),
    }
}

/// Zeroes what is behind the first `bits` bits, which are counted as the kernel does: in the order of the bytes, from each
/// byte's highest bit.
fn mask(bytes: &mut [u8], bits: u32) {
    for (index, byte) in (0u32..).zip(bytes) {
        let kept = bits.saturating_sub(index * 8).min(8);
        *byte &= !0xffu8.checked_shr(kept).unwrap_or(0);
    }
}

/// Addresses that can be masked.
pub trait Masked: Family {
    const BITS: u32;

    /// The address as its first `bits` bits have it, zeroes after them.
    #[must_use]
    fn masked(self, bits: u32) -> Self;
}

impl Masked for crate::V4 {
    const BITS: u32 = 32;

    fn masked(self, bits: u32) -> Self {
        let mut octets = self.octets();
        mask(&mut octets, bits);
        Self::new(octets)
    }
}

impl Masked for crate::V6 {
    const BITS: u32 = 128;

    fn masked(self, bits: u32) -> Self {
        let mut octets = self.octets();
        mask(&mut octets, bits);
        Self::new(octets)
    }
}

/// Identities of one family by address prefix.
#[derive(Clone, Debug)]
pub struct IdentityTable<A> {
    identities: HashMap<RangeKey<A>, u32>,
    /// Prefix lengths in use, with how many ranges have each.
    lengths: BTreeMap<u32, usize>,
}

impl<A> Default for IdentityTable<A> {
    fn default() -> Self {
        Self {
            identities: HashMap::new(),
            lengths: BTreeMap::new(),
        }
    }
}

impl<A: Masked> IdentityTable<A> {
    /// Adds or replaces. Bits behind the prefix do not count.
    pub fn insert(&mut self, key: RangeKey<A>, identity: u32) {
        if self.identities.insert(prefix(key), identity).is_none() {
            *self.lengths.entry(key.prefix_bits).or_default() += 1;
        }
    }

    pub fn remove(&mut self, key: RangeKey<A>) {
        if self.identities.remove(&prefix(key)).is_none() {
            return;
        }
        if let Some(count) = self.lengths.get_mut(&key.prefix_bits) {
            *count -= 1;
        }
        self.lengths.retain(|_, count| *count > 0);
    }

    /// The identity of the longest prefix that holds the address.
    #[must_use]
    pub fn of(&self, address: &A) -> u32 {
        self.lengths
            .keys()
            .rev()
            .find_map(|&prefix_bits| {
                self.identities.get(&RangeKey {
                    prefix_bits,
                    address: address.masked(prefix_bits),
                })
            })
            .copied()
            .unwrap_or(IDENTITY_ANY)
    }
}

fn prefix<A: Masked>(key: RangeKey<A>) -> RangeKey<A> {
    RangeKey {
        prefix_bits: key.prefix_bits,
        address: key.address.masked(key.prefix_bits),
    }
}

/// All that a judgement depends on, for one family.
#[derive(Clone, Debug)]
pub struct HostTables<A> {
    pub endpoints: HashMap<A, Endpoint>,
    pub pods: HashMap<u32, PodPolicy>,
    pub identities: IdentityTable<A>,
    pub rules: RuleTable,
    pub generation: u32,
}

impl<A> Default for HostTables<A> {
    fn default() -> Self {
        Self {
            endpoints: HashMap::new(),
            pods: HashMap::new(),
            identities: IdentityTable::default(),
            rules: RuleTable::default(),
            generation: 0,
        }
    }
}

impl<A> PolicyRules for HostTables<A> {
    fn policy_rule(&mut self, key: &PolicyRuleKey) -> Option<&PolicyRule> {
        self.rules.policy_rule(key)
    }
}

impl<A: Masked> PolicyTables<A> for HostTables<A> {
    fn endpoint(&mut self, address: &A) -> Option<&Endpoint> {
        self.endpoints.get(address)
    }
    fn pod_policy(&mut self, ifindex: u32) -> Option<&PodPolicy> {
        self.pods.get(&ifindex)
    }
    fn identity(&mut self, address: &A) -> u32 {
        self.identities.of(address)
    }
    fn policy_generation(&mut self) -> u32 {
        self.generation
    }
}
