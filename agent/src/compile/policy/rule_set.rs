//! The rules of pods with the same policies, as the entries that the kernel looks up.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::flatten::{self, Entries};
use super::identity::{Members, NamedPort};
use super::peer::SetId;
use super::prefix::PortPrefix;
use super::rules::{Direction, Peers, PortMatch, Ports, Rule, Side};

/// Number of a rule set in this process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct RuleSetId(pub u64);

/// Rules by number, and what they come to for every identity.
#[derive(Clone, Debug)]
pub struct RuleSet {
    /// Of the entries of its pods.
    pub flags: u32,
    /// By [`Direction`].
    pub sides: [Side; 2],
    /// Of its pods: what rules for what comes in may call by name.
    own_ports: Vec<NamedPort>,
    /// Rules that may match what is in a set, by direction. The sets include names of ports.
    by_set: [HashMap<SetId, Vec<u32>>; 2],
    /// Rules about everybody.
    everybody: [Entries; 2],
    /// Rules about identities; only those that have some.
    identities: HashMap<u32, [Entries; 2]>,
    /// What lists of rules come to.
    known: HashMap<(Direction, Vec<u32>), Entries>,
    len: usize,
    /// At most so many entries; more are not kept.
    limit: usize,
}

impl RuleSet {
    pub(super) fn new(
        flags: u32,
        sides: [Side; 2],
        own_ports: Vec<NamedPort>,
        limit: usize,
    ) -> Self {
        let mut set = Self {
            flags,
            sides,
            own_ports,
            by_set: Default::default(),
            everybody: [Entries::from([]), Entries::from([])],
            identities: HashMap::new(),
            known: HashMap::new(),
            len: 0,
            limit,
        };
        for direction in Direction::BOTH {
            set.index(direction);
            set.everybody[direction as usize] = set.flatten_everybody(direction);
        }
        set.len = set.everybody.iter().map(|entries| entries.len()).sum();
        set
    }

    fn index(&mut self, direction: Direction) {
        let at = direction as usize;
        for (number, rule) in numbered(&self.sides[at].rules) {
            let sets: Vec<SetId> = match &rule.peers {
                Peers::Sets(sets) => sets.clone(),
                Peers::Everybody if direction == Direction::Egress => {
                    rule.named_ports().map(|(_, name)| name).collect()
                }
                Peers::Everybody => Vec::new(),
            };
            for set in sets {
                let rules = self.by_set[at].entry(set).or_default();
                if rules.last() != Some(&number) {
                    rules.push(number);
                }
            }
        }
    }

    fn flatten_everybody(&self, direction: Direction) -> Entries {
        let rules = numbered(&self.sides[direction as usize].rules);
        let general = rules.filter(|(_, rule)| rule.peers == Peers::Everybody);
        flatten::flatten(general.map(|(number, rule)| {
            let named = match direction {
                Direction::Ingress => &self.own_ports[..],
                // By identity: each destination has its own.
                Direction::Egress => &[],
            };
            (number, rule, ports(rule, named))
        }))
    }

    /// Peer sets and names of ports that make a difference to it.
    pub(super) fn sets(&self) -> BTreeSet<SetId> {
        let keys = self.by_set.iter().flat_map(|by_set| by_set.keys());
        keys.copied().collect()
    }

    /// Works out the entries of an identity. False when it has none.
    pub(super) fn add(&mut self, identity: u32, members: &Members) -> bool {
        let entries = Direction::BOTH.map(|direction| self.entries_of(direction, members));
        let count = entries[0].len() + entries[1].len();
        if count == 0 {
            return false;
        }
        self.len += count;
        if self.is_too_large() {
            // Its pods are shut: nobody will ask.
            self.identities.clear();
            self.known.clear();
        } else {
            self.identities.insert(identity, entries);
        }
        true
    }

    /// False when it had none.
    pub(super) fn remove(&mut self, identity: u32) -> bool {
        let Some(entries) = self.identities.remove(&identity) else {
            return false;
        };
        self.len -= entries[0].len() + entries[1].len();
        true
    }

    fn entries_of(&mut self, direction: Direction, members: &Members) -> Entries {
        let at = direction as usize;
        let by_set = &self.by_set[at];
        if by_set.is_empty() {
            return Entries::from([]);
        }
        let names = members.ports.iter().map(|port| port.name);
        let sets = members.sets.iter().copied().chain(names);
        let mut numbers: Vec<u32> = sets
            .filter_map(|set| by_set.get(&set))
            .flatten()
            .copied()
            .collect();
        numbers.sort_unstable();
        numbers.dedup();
        let rules = &self.sides[at].rules;
        let found = |number: &u32| rules.get(*number as usize).map(|rule| (*number, &**rule));
        let named = match direction {
            Direction::Ingress => &self.own_ports,
            Direction::Egress => &members.ports,
        };
        let resolved = |numbers: &[u32]| {
            flatten::flatten(numbers.iter().filter_map(found).map(|(number, rule)| {
                let ports = match rule.peers {
                    Peers::Sets(_) => ports(rule, named),
                    // The rest of such a rule is everybody's.
                    Peers::Everybody => named_ports(rule, named).collect(),
                };
                (number, rule, ports)
            }))
        };
        let depends = direction == Direction::Egress
            && numbers
                .iter()
                .filter_map(found)
                .any(|(_, rule)| rule.named_ports().next().is_some());
        if depends {
            return resolved(&numbers);
        }
        let key = (direction, numbers);
        if let Some(entries) = self.known.get(&key) {
            return Arc::clone(entries);
        }
        let entries = resolved(&key.1);
        self.known.insert(key, Arc::clone(&entries));
        entries
    }

    /// More entries than a policy may have: its pods are shut.
    #[must_use]
    pub fn is_too_large(&self) -> bool {
        self.len > self.limit
    }

    /// Entries that its pods' policy takes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// By direction: what rules say of an identity alone; under the identity 0, what they say of everybody.
    #[must_use]
    pub fn entries(&self, identity: u32) -> Option<&[Entries; 2]> {
        if identity == dataplane_common::layout::IDENTITY_ANY {
            Some(&self.everybody)
        } else {
            self.identities.get(&identity)
        }
    }

    /// Identities that have entries, everybody (0) included.
    pub fn identities(&self) -> impl Iterator<Item = u32> {
        let everybody = dataplane_common::layout::IDENTITY_ANY;
        std::iter::once(everybody).chain(self.identities.keys().copied())
    }

    /// A rule by its number.
    #[must_use]
    pub fn rule(&self, direction: Direction, number: u32) -> Option<&Rule> {
        let rules = &self.sides[direction as usize].rules;
        rules.get(number as usize).map(AsRef::as_ref)
    }

    /// The pods' own ports that rules for what comes in may call by name.
    #[must_use]
    pub fn own_ports(&self) -> &[NamedPort] {
        &self.own_ports
    }
}

fn numbered(rules: &[Arc<Rule>]) -> impl Iterator<Item = (u32, &Rule)> {
    (0..).zip(rules.iter().map(AsRef::as_ref))
}

/// The ports that a rule matches, where the destination has these named ones.
#[must_use]
pub fn ports(rule: &Rule, named: &[NamedPort]) -> Vec<PortPrefix> {
    let Ports::Some(list) = &rule.ports else {
        return vec![PortPrefix::EVERYTHING];
    };
    let plain = list.iter().flat_map(|port| match port {
        PortMatch::Range {
            protocol,
            first,
            last,
        } => PortPrefix::of_range(*protocol, *first, *last),
        PortMatch::Named { .. } => Vec::new(),
    });
    plain.chain(named_ports(rule, named)).collect()
}

fn named_ports(rule: &Rule, named: &[NamedPort]) -> impl Iterator<Item = PortPrefix> {
    rule.named_ports().flat_map(move |(protocol, name)| {
        let matching = named
            .iter()
            .filter(move |port| port.name == name && (protocol == 0 || port.protocol == protocol));
        matching.map(|port| PortPrefix {
            protocol: port.protocol,
            port: port.port,
            bits: 24,
        })
    })
}
