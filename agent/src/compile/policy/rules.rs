//! Policies as the feed tells them, read into rules; and the ordered rules that pods with the same policies share.

use std::sync::Arc;

use control_api::desired::Name;
use control_api::v1::{
    IpBlock, Policy, PolicyAction, PolicyRule as FeedRule, PolicyRulePort, PolicyTier, Protocol,
    policy_rule_peer,
};
use dataplane_common::layout::{
    DIRECTION_EGRESS, DIRECTION_INGRESS, POLICY_EGRESS, POLICY_EGRESS_CLOSED, POLICY_INGRESS,
    POLICY_INGRESS_CLOSED,
};

use super::peer::{Block, PeerSet, PeerSets, SetId};
use super::prefix::Prefix;

/// Seen from the pod that a policy selects.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Direction {
    Ingress,
    Egress,
}

impl Direction {
    pub const BOTH: [Self; 2] = [Self::Ingress, Self::Egress];

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        }
    }

    /// As maps have it.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Self::Ingress => DIRECTION_INGRESS,
            Self::Egress => DIRECTION_EGRESS,
        }
    }

    /// The flags of a pod that is judged in this direction, and of one that is closed in it as well.
    #[must_use]
    pub fn flags(self) -> (u32, u32) {
        match self {
            Self::Ingress => (POLICY_INGRESS, POLICY_INGRESS_CLOSED),
            Self::Egress => (POLICY_EGRESS, POLICY_EGRESS_CLOSED),
        }
    }
}

/// The tiers in the order in which they are asked.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Tier {
    Admin,
    NetworkPolicy,
    Baseline,
}

impl Tier {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Admin => "Admin",
            Self::NetworkPolicy => "NetworkPolicy",
            Self::Baseline => "Baseline",
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Action {
    Allow,
    Deny,
    Pass,
}

impl Action {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Deny => "deny",
            Self::Pass => "pass",
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Peers {
    Everybody,
    /// Sorted. Empty: nobody.
    Sets(Vec<SetId>),
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Ports {
    /// Protocols without ports included.
    Everything,
    /// Empty: nothing.
    Some(Vec<PortMatch>),
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PortMatch {
    Range {
        protocol: u8,
        first: u16,
        last: u16,
    },
    /// What the destination calls so. Protocol zero: that of the port, whatever it is.
    Named {
        protocol: u8,
        name: SetId,
    },
}

/// One rule, and where it comes from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rule {
    pub tier: Tier,
    /// The namespace is empty for a ClusterNetworkPolicy.
    pub policy: Name,
    /// Place among the policy's rules of its direction, from 0.
    pub index: usize,
    /// Empty unless the policy names its rules.
    pub name: String,
    pub action: Action,
    pub peers: Peers,
    pub ports: Ports,
}

/// A policy, read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Read {
    pub(super) tier: Tier,
    pub(super) name: Name,
    pub(super) priority: i32,
    /// By [`Direction`]: what no rule allows is not allowed.
    pub(super) isolates: [bool; 2],
    pub(super) rules: [Vec<Arc<Rule>>; 2],
    pub(super) staged: bool,
}

impl Read {
    /// Tiers, then priorities, then names.
    fn order(&self) -> (Tier, i32, &Name) {
        (self.tier, self.priority, &self.name)
    }

    /// Peer sets and names of ports that its rules refer to.
    pub(super) fn sets(&self) -> impl Iterator<Item = SetId> {
        let [ingress, egress] = &self.rules;
        let peers = ingress
            .iter()
            .chain(egress)
            .filter_map(|rule| match &rule.peers {
                Peers::Everybody => None,
                Peers::Sets(sets) => Some(sets.iter().copied()),
            });
        let ports = egress.iter().flat_map(|rule| rule.named_ports());
        peers.flatten().chain(ports.map(|(_, name)| name))
    }
}

impl Rule {
    /// Protocols and names of the ports that it names.
    pub fn named_ports(&self) -> impl Iterator<Item = (u8, SetId)> {
        let ports: &[PortMatch] = match &self.ports {
            Ports::Everything => &[],
            Ports::Some(ports) => ports,
        };
        ports.iter().filter_map(|port| match port {
            PortMatch::Named { protocol, name } => Some((*protocol, *name)),
            PortMatch::Range { .. } => None,
        })
    }
}

/// Reads a policy. What cannot be read matches nothing where it would allow, and everything where it would deny or pass on:
/// then it denies.
pub(super) fn read(policy: &Policy, sets: &mut PeerSets) -> Read {
    let tier = match policy.tier() {
        PolicyTier::Admin => Tier::Admin,
        PolicyTier::Baseline => Tier::Baseline,
        PolicyTier::NetworkPolicy | PolicyTier::Unspecified => Tier::NetworkPolicy,
    };
    let namespaced = tier == Tier::NetworkPolicy;
    let name = Name::new(&policy.namespace, &policy.name);
    let isolates = [
        namespaced && policy.isolates_ingress,
        namespaced && policy.isolates_egress,
    ];
    let mut list = |rules: &[FeedRule], speaks: bool| -> Vec<Arc<Rule>> {
        let rules = rules.iter().filter(|_| speaks).enumerate();
        rules
            .map(|(index, rule)| Arc::new(read_rule(tier, &name, index, rule, sets)))
            .collect()
    };
    Read {
        tier,
        priority: if namespaced { 0 } else { policy.priority },
        isolates,
        rules: [
            list(&policy.ingress, !namespaced || isolates[0]),
            list(&policy.egress, !namespaced || isolates[1]),
        ],
        staged: policy.staged,
        name,
    }
}

fn read_rule(
    tier: Tier,
    policy: &Name,
    index: usize,
    rule: &FeedRule,
    sets: &mut PeerSets,
) -> Rule {
    let mut action = match rule.action() {
        PolicyAction::Allow => Action::Allow,
        PolicyAction::Pass => Action::Pass,
        PolicyAction::Deny | PolicyAction::Unspecified => Action::Deny,
    };
    if tier == Tier::NetworkPolicy {
        action = Action::Allow;
    }
    let read_peers = read_peers(rule, sets);
    let read_ports = read_ports(rule, sets);
    let broken = read_peers.1 || read_ports.1;
    let (mut peers, mut ports) = (read_peers.0, read_ports.0);
    if broken && action != Action::Allow {
        (action, peers, ports) = (Action::Deny, Peers::Everybody, Ports::Everything);
    }
    Rule {
        tier,
        policy: policy.clone(),
        index,
        name: rule.name.clone(),
        action,
        peers,
        ports,
    }
}

/// And whether one of them could not be read.
fn read_peers(rule: &FeedRule, sets: &mut PeerSets) -> (Peers, bool) {
    if rule.any_peer {
        return (Peers::Everybody, false);
    }
    let mut broken = false;
    let mut list = Vec::new();
    for peer in &rule.peers {
        let set = match &peer.kind {
            Some(policy_rule_peer::Kind::Set(set)) => {
                set.id.as_slice().try_into().ok().map(PeerSet::Selector)
            }
            Some(policy_rule_peer::Kind::IpBlock(block)) => read_block(block).map(PeerSet::Block),
            Some(policy_rule_peer::Kind::DomainName(name)) => Some(PeerSet::Domain(
                name.trim_end_matches('.').to_ascii_lowercase(),
            )),
            None => None,
        };
        match set {
            Some(set) => list.push(sets.id(&set)),
            None => broken = true,
        }
    }
    list.sort_unstable();
    list.dedup();
    (Peers::Sets(list), broken)
}

fn read_block(block: &IpBlock) -> Option<Block> {
    let range = Prefix::parse(&block.cidr)?;
    let holes = block.except.iter().map(|hole| Prefix::parse(hole));
    let mut except = holes.collect::<Option<Vec<_>>>()?;
    except.sort_unstable();
    except.dedup();
    Some(Block { range, except })
}

/// And whether one of them could not be read.
fn read_ports(rule: &FeedRule, sets: &mut PeerSets) -> (Ports, bool) {
    if rule.any_port {
        return (Ports::Everything, false);
    }
    let mut broken = false;
    let mut list = Vec::new();
    for port in &rule.ports {
        match read_port(port, sets) {
            Some(port) => list.push(port),
            None => broken = true,
        }
    }
    (Ports::Some(list), broken)
}

fn read_port(port: &PolicyRulePort, sets: &mut PeerSets) -> Option<PortMatch> {
    let protocol = match port.protocol() {
        Protocol::Unspecified if !port.name.is_empty() => 0,
        Protocol::Unspecified => return None,
        known => u8::try_from(i32::from(known)).ok()?,
    };
    if !port.name.is_empty() {
        let name = sets.id(&PeerSet::PortName(port.name.clone()));
        return Some(PortMatch::Named { protocol, name });
    }
    let first = u16::try_from(port.first).ok()?;
    let last = match u16::try_from(port.last).ok()? {
        0 if first == 0 => u16::MAX,
        0 => first,
        last => last,
    };
    (first <= last).then_some(PortMatch::Range {
        protocol,
        first,
        last,
    })
}

/// What applies to a pod in one direction.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Side {
    /// Policies that close the pod but for what rules allow.
    pub isolated_by: Vec<Name>,
    /// By number: the order in which they are asked.
    pub rules: Vec<Arc<Rule>>,
}

impl Side {
    #[must_use]
    pub fn is_judged(&self) -> bool {
        !self.isolated_by.is_empty() || !self.rules.is_empty()
    }
}

/// Puts policies that select one pod in order. The flags are those of the pod's entry.
pub(super) fn combine(policies: &[Arc<Read>]) -> (u32, [Side; 2]) {
    let mut ordered: Vec<&Arc<Read>> = policies.iter().collect();
    ordered.sort_by_key(|policy| policy.order());
    let mut sides = [Side::default(), Side::default()];
    let mut flags = 0;
    for (direction, side) in Direction::BOTH.into_iter().zip(&mut sides) {
        let at = direction as usize;
        let isolating = ordered.iter().filter(|policy| policy.isolates[at]);
        side.isolated_by = isolating.map(|policy| policy.name.clone()).collect();
        let isolated = !side.isolated_by.is_empty();
        for policy in &ordered {
            // The tier after is for pods that no NetworkPolicy isolates.
            if policy.tier != Tier::Baseline || !isolated {
                side.rules.extend(policy.rules[at].iter().cloned());
            }
        }
        let (judged, closed) = direction.flags();
        if side.is_judged() {
            flags |= judged;
        }
        if isolated {
            flags |= closed;
        }
    }
    (flags, sides)
}
