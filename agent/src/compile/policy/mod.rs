//! Network policies to what the kernel looks up: an identity for every address, and rules for every pod.
//!
//! A *peer set* is what a rule may call the other end: a selector, a block of addresses, a domain name. The *identity* of
//! an address is the set of all peer sets that hold it, as a number of this node's own. A *rule set* is what pods with
//! the same policies share: rules in the order in which they are asked, and for each identity what they come to, port by
//! port. Pure: who persists identities and fills maps is elsewhere.

mod compiler;
mod domains;
mod flatten;
mod hosts;
mod identity;
mod judge;
mod peer;
mod prefix;
mod rule_set;
mod rules;
mod trie;

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) use tests::world;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use control_api::desired::{Changes, DesiredState};
use dataplane_common::layout::{
    POLICY_EGRESS, POLICY_EGRESS_CLOSED, POLICY_INGRESS, POLICY_INGRESS_CLOSED, POLICY_SHUT,
};

pub use compiler::{Compiler, Input, Mode};
pub use domains::{DomainAnswers, DomainLimit, Lesson, Wanted};
pub use flatten::{Entries, Entry};
pub use hosts::{LocalPod, Locals};
pub use identity::{Identities, Members, NamedPort, Record};
pub use judge::{Judgement, Packet, Verdict, verdict};
pub use peer::{Block, PeerSet, PeerSets, SetId};
pub use prefix::{PortPrefix, Prefix};
pub use rule_set::{RuleSet, RuleSetId, ports};
pub use rules::{Action, Direction, Peers, PortMatch, Ports, Rule, Side, Tier};
pub use trie::Trie;

/// Flags of a pod that gets and sends nothing.
pub const SHUT_FLAGS: u32 =
    POLICY_SHUT | POLICY_INGRESS | POLICY_EGRESS | POLICY_INGRESS_CLOSED | POLICY_EGRESS_CLOSED;

/// How much may be compiled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Entries of one rule set; pods that need more are shut.
    pub rules_per_policy: usize,
    /// Entries of all; pods whose rules come after that are shut.
    pub rules: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            rules_per_policy: 65_536,
            rules: 1_000_000,
        }
    }
}

/// Why nothing may pass to or from a pod.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Shut {
    /// The control plane has not told anything of it.
    Unknown,
    /// A policy selects it that the control plane has not told.
    Missing(control_api::desired::Name),
    TooManyRules,
    NoRoom,
}

impl std::fmt::Display for Shut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unknown => {
                f.write_str("the control plane has not told which policies apply to it")
            }
            Self::Missing(name) => write!(f, "policy {name} selects it and is not known here"),
            Self::TooManyRules => f.write_str(
                "its policies come to more rules than one pod may have (65,536): use fewer ports or peers",
            ),
            Self::NoRoom => f.write_str(
                "the policies of this node's pods come to more rules than fit (1,000,000)",
            ),
        }
    }
}

/// What applies to a pod.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PodState {
    /// No policy selects it.
    Open,
    Shut(Shut),
    Judged(RuleSetId),
}

/// Everything that maps and people need.
#[derive(Clone, Debug, Default)]
pub struct Compiled {
    pub sets: PeerSets,
    pub identities: Identities,
    /// Which address has which identity; a range is left out where one around it says the same.
    pub trie: Trie,
    /// How many of those ranges have an identity.
    pub live: HashMap<u32, usize>,
    /// Attached pods, by the interface index of the host side of their link.
    pub pods: BTreeMap<u32, PodState>,
    pub rule_sets: BTreeMap<RuleSetId, RuleSet>,
    /// Rule sets that do not fit.
    pub shut: BTreeMap<RuleSetId, Shut>,
}

/// What one update may have changed; the planner compares that and no more.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Touched {
    pub everything: bool,
    pub ranges: BTreeSet<Prefix>,
    /// Rule sets that came or went.
    pub rule_sets: BTreeSet<RuleSetId>,
    /// What rule sets that stay say of an identity.
    pub rules: BTreeSet<(RuleSetId, u32)>,
    pub pods: BTreeSet<u32>,
}

impl Touched {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl Compiled {
    /// The rules of a pod, where it has some that fit.
    #[must_use]
    pub fn rules_of(&self, ifindex: u32) -> Option<(RuleSetId, &RuleSet)> {
        match self.pods.get(&ifindex)? {
            PodState::Judged(id) if !self.shut.contains_key(id) => {
                self.rule_sets.get(id).map(|set| (*id, set))
            }
            _ => None,
        }
    }

    /// Why a pod is shut.
    #[must_use]
    pub fn why_shut(&self, ifindex: u32) -> Option<&Shut> {
        match self.pods.get(&ifindex)? {
            PodState::Open => None,
            PodState::Shut(why) => Some(why),
            PodState::Judged(id) => self.shut.get(id),
        }
    }

    /// The flags of a pod's entry. One that is not attached is closed.
    #[must_use]
    pub fn flags(&self, ifindex: u32) -> u32 {
        match self.pods.get(&ifindex) {
            Some(PodState::Open) => 0,
            Some(_) => self
                .rules_of(ifindex)
                .map_or(SHUT_FLAGS, |(_, set)| set.flags),
            None => SHUT_FLAGS,
        }
    }
}

/// Compiles the enforced policies of a whole state, for tools and tests.
#[must_use]
pub fn full(state: &DesiredState, locals: &Locals) -> Compiled {
    let mut compiler = Compiler::new(Mode::Enforced, Limits::default(), &[]);
    let domains = DomainAnswers::default();
    let input = Input::new(state, locals, &domains);
    compiler.update(&input, &Changes::everything());
    compiler.compiled().clone()
}
