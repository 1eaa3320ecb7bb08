//! Keeps compiled policies up with the desired state: what changes touch is worked out again, and no more.

mod pods;
mod ranges;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use control_api::desired::{Changes, DesiredState, Name};
use control_api::name_map::NameMap;
use control_api::v1::{Policy, PolicyPeer};

use super::domains::{self, DomainAnswers};
use super::hosts::{self, Hosts, Locals};
use super::identity::{Identities, NamedPort, Record};
use super::peer::{PeerSet, PeerSets, SetId};
use super::prefix::Prefix;
use super::rule_set::RuleSetId;
use super::rules::{self, Read};
use super::trie::Blocks;
use super::{Compiled, Limits, Touched};

/// Peer sets and identities that nothing uses are kept for their return, up to about so many.
const UNUSED_KEPT: usize = 4_096;

/// Where everything comes from.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    pub policies: &'a NameMap<Policy>,
    pub peers: &'a NameMap<PolicyPeer>,
    pub locals: &'a Locals,
    pub domains: &'a DomainAnswers,
}

impl<'a> Input<'a> {
    /// Of a whole state.
    #[must_use]
    pub fn new(state: &'a DesiredState, locals: &'a Locals, domains: &'a DomainAnswers) -> Self {
        Self {
            policies: &state.policies,
            peers: &state.policy_peers,
            locals,
            domains,
        }
    }
}

/// Which policies count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    Enforced,
    /// Staged policies as if they were not.
    Staged,
}

/// Policies of a pod and its own ports as rules call them: pods that agree in both share a rule set.
type Key = (Vec<Name>, Vec<NamedPort>);

/// Compiled policies, and what it takes to change them.
#[derive(Debug)]
pub struct Compiler {
    mode: Mode,
    limits: Limits,
    compiled: Compiled,
    read: BTreeMap<Name, Arc<Read>>,
    /// Peer sets and names of ports that policies refer to.
    used: BTreeSet<SetId>,
    hosts: Hosts,
    blocks: Blocks,
    /// Domain names that rules use, by the addresses that answers gave them.
    domains: HashMap<IpAddr, Vec<SetId>>,
    /// Living identities by what they belong to, names of ports included.
    by_set: HashMap<SetId, BTreeSet<u32>>,
    keys: HashMap<Key, RuleSetId>,
    locals: Locals,
    last_rule_set: u64,
}

impl Compiler {
    /// Nothing compiled yet. `known` are the identities that an earlier agent gave.
    #[must_use]
    pub fn new(mode: Mode, limits: Limits, known: &[Record]) -> Self {
        let mut compiled = Compiled::default();
        compiled.identities = Identities::from_records(known, &mut compiled.sets);
        Self {
            mode,
            limits,
            compiled,
            read: BTreeMap::new(),
            used: BTreeSet::new(),
            hosts: Hosts::default(),
            blocks: Blocks::default(),
            domains: HashMap::new(),
            by_set: HashMap::new(),
            keys: HashMap::new(),
            locals: Locals::default(),
            last_rule_set: 0,
        }
    }

    #[must_use]
    pub fn compiled(&self) -> &Compiled {
        &self.compiled
    }

    /// Identities that have to be on disk before anything of this is used.
    pub fn take_fresh_identities(&mut self) -> Vec<Record> {
        let Compiled {
            identities, sets, ..
        } = &mut self.compiled;
        identities.take_fresh(sets)
    }

    /// Compiles what `changes` name; attachments and domain names are compared by themselves. The first call must say
    /// `everything`.
    pub fn update(&mut self, input: &Input<'_>, changes: &Changes) -> Touched {
        let mut touched = Touched {
            everything: changes.everything,
            ..Touched::default()
        };
        if self.compiled.sets.len() > UNUSED_KEPT + 4 * self.used.len() {
            self.renew();
            touched.everything = true;
        }
        let everything = touched.everything;
        let dirty = self.read_policies(input.policies, changes, everything);
        let asked = if everything || !dirty.is_empty() {
            self.find_used()
        } else {
            BTreeSet::new()
        };
        let mut names = self.locals_changed(input.locals);
        names.extend(changes.policy_peers.iter().cloned());
        names.extend(self.peers_of(&asked, input.peers));
        let mut addresses = self.find_hosts(input, &names, everything);
        addresses.extend(self.find_domains(input.domains));
        let turnover = if everything {
            self.blocks = Blocks::new(&self.used, &self.compiled.sets);
            self.set_all_ranges(&mut touched)
        } else {
            let mut ranges: BTreeSet<Prefix> = addresses.into_iter().map(Prefix::host).collect();
            ranges.extend(self.change_blocks(&asked));
            self.set_ranges(&ranges, &mut touched)
        };
        if everything {
            self.keys.clear();
        } else {
            self.forget_rule_sets(&dirty);
        }
        self.adapt_rule_sets(&turnover, &mut touched);
        self.assign_pods(input, &mut touched);
        self.shut_what_does_not_fit(&mut touched);
        let live = &self.compiled.live;
        if self.compiled.identities.len() > UNUSED_KEPT + 2 * live.len() {
            self.compiled.identities.keep(|id| live.contains_key(&id));
        }
        touched
    }

    /// Forgets peer sets that nobody refers to any more.
    fn renew(&mut self) {
        let live = &self.compiled.live;
        self.compiled.identities.keep(|id| live.contains_key(&id));
        let mut sets = PeerSets::default();
        let old = &self.compiled.sets;
        self.compiled.identities = self.compiled.identities.renumbered(old, &mut sets);
        self.compiled.sets = sets;
        self.read.clear();
        self.used.clear();
        self.hosts = Hosts::default();
        self.domains.clear();
    }

    /// Reads policies that changed; returns those that are not what they were.
    fn read_policies(
        &mut self,
        policies: &NameMap<Policy>,
        changes: &Changes,
        everything: bool,
    ) -> BTreeSet<Name> {
        let names: BTreeSet<Name> = if everything {
            let present = self.read.keys().cloned();
            present.chain(policies.keys().cloned()).collect()
        } else {
            changes.policies.clone()
        };
        let mut dirty = BTreeSet::new();
        for name in names {
            let policy = policies.get(&name);
            let policy = policy.filter(|policy| self.mode == Mode::Staged || !policy.staged);
            let now = policy.map(|policy| rules::read(policy, &mut self.compiled.sets));
            if now.as_ref() == self.read.get(&name).map(AsRef::as_ref) {
                continue;
            }
            match now {
                Some(read) => self.read.insert(name.clone(), Arc::new(read)),
                None => self.read.remove(&name),
            };
            dirty.insert(name);
        }
        dirty
    }

    /// Finds the peer sets in use; returns those that were not and are now, or the other way round.
    fn find_used(&mut self) -> BTreeSet<SetId> {
        let used: BTreeSet<SetId> = self.read.values().flat_map(|read| read.sets()).collect();
        let before = std::mem::replace(&mut self.used, used);
        before.symmetric_difference(&self.used).copied().collect()
    }

    /// Peers that the feed has in one of these sets, or that have a port of such a name.
    fn peers_of(&self, sets: &BTreeSet<SetId>, peers: &NameMap<PolicyPeer>) -> Vec<Name> {
        let (mut selectors, mut ports) = (HashSet::new(), HashSet::new());
        for set in sets.iter().filter_map(|id| self.compiled.sets.get(*id)) {
            match set {
                PeerSet::Selector(id) => drop(selectors.insert(&id[..])),
                PeerSet::PortName(name) => drop(ports.insert(name.as_str())),
                PeerSet::Block(_) | PeerSet::Domain(_) => {}
            }
        }
        if selectors.is_empty() && ports.is_empty() {
            return Vec::new();
        }
        let concerned = peers.iter().filter(|(_, peer)| {
            let mut sets = peer.sets.iter();
            let mut named = peer.named_ports.iter();
            sets.any(|set| selectors.contains(&set[..]))
                || named.any(|port| ports.contains(port.name.as_str()))
        });
        concerned.map(|(name, _)| name.clone()).collect()
    }

    /// Takes the attachments, and names the pods of which they changed.
    fn locals_changed(&mut self, locals: &Locals) -> BTreeSet<Name> {
        if self.locals == *locals {
            return BTreeSet::new();
        }
        let before = std::mem::replace(&mut self.locals, locals.clone());
        let differ = |from: &Locals, to: &Locals| -> Vec<Name> {
            let all = from.node_name != to.node_name;
            let pods = from.pods.iter();
            pods.filter(|(ifindex, pod)| all || to.pods.get(ifindex) != Some(pod))
                .filter_map(|(_, pod)| pod.name.clone())
                .collect()
        };
        let mut names: BTreeSet<Name> = differ(&before, locals).into_iter().collect();
        names.extend(differ(locals, &before));
        names
    }

    /// Reads these peers again, or all of them; returns addresses of which something may have changed.
    fn find_hosts(
        &mut self,
        input: &Input<'_>,
        names: &BTreeSet<Name>,
        everything: bool,
    ) -> BTreeSet<IpAddr> {
        let mut addresses = BTreeSet::new();
        let mut set = |hosts: &mut Hosts, name: &Name, peer: Option<&PolicyPeer>| {
            let sets = &self.compiled.sets;
            let peer = peer.map(|peer| hosts::read_peer(peer, input.locals, sets, &self.used));
            addresses.extend(hosts.set(name, peer));
        };
        if everything {
            let gone = self.hosts.names();
            let gone: Vec<Name> = gone
                .filter(|name| !input.peers.contains_key(name))
                .cloned()
                .collect();
            for name in gone {
                set(&mut self.hosts, &name, None);
            }
            for (name, peer) in input.peers.iter() {
                set(&mut self.hosts, name, Some(peer));
            }
        } else {
            for name in names {
                set(&mut self.hosts, name, input.peers.get(name));
            }
        }
        addresses
    }

    /// Works out which addresses domain names of rules have; returns those of which that changed.
    fn find_domains(&mut self, answers: &DomainAnswers) -> BTreeSet<IpAddr> {
        let sets = &self.compiled.sets;
        let domain = |id: &SetId| matches!(sets.get(*id), Some(PeerSet::Domain(_)));
        let mut now: HashMap<IpAddr, Vec<SetId>> = HashMap::new();
        if self.used.iter().any(domain) {
            for (name, addresses) in answers.iter() {
                let patterns = domains::patterns(name).into_iter().map(PeerSet::Domain);
                let ids: Vec<SetId> = patterns
                    .filter_map(|pattern| sets.find(&pattern).filter(|id| self.used.contains(id)))
                    .collect();
                if ids.is_empty() {
                    continue;
                }
                for (address, _) in addresses {
                    now.entry(address).or_default().extend(&ids);
                }
            }
        }
        let before = std::mem::replace(&mut self.domains, now);
        let all = before.keys().chain(self.domains.keys());
        all.filter(|address| before.get(address) != self.domains.get(address))
            .copied()
            .collect()
    }
}
