//! What becomes of a packet, on compiled policies.

use std::net::IpAddr;

use dataplane_common::Port;
use dataplane_common::layout::{IDENTITY_ANY, NO_RULE, PodPolicy, PolicyRule, PolicyRuleKey};
use dataplane_common::policy::{Peer, PolicyRules, judge_direction, rule_port};

use super::Compiled;
use super::hosts::Locals;
use super::prefix::PortPrefix;
use super::rule_set::RuleSet;
use super::rules::Direction;

/// A first packet, as policies see it: after services are translated, before the source is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Packet {
    pub source: IpAddr,
    pub destination: IpAddr,
    pub protocol: u8,
    /// The destination's; zero for protocols without.
    pub port: u16,
}

/// Why one direction allows or refuses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Judgement {
    /// Its own node's address; or its own, to which NetworkPolicy does not bar the way.
    Exempt,
    /// Nothing judges the pod in this direction.
    Open,
    /// The rule of this number decides.
    Rule { number: u32, allow: bool },
    /// No rule speaks, and nothing isolates the pod.
    NoRule,
    /// No rule allows it to a pod that policies isolate.
    Isolated,
    /// Nothing may pass.
    Shut,
}

impl Judgement {
    #[must_use]
    pub fn allows(self) -> bool {
        match self {
            Self::Exempt | Self::Open | Self::NoRule => true,
            Self::Rule { allow, .. } => allow,
            Self::Isolated | Self::Shut => false,
        }
    }
}

/// What this node says of a packet. None in a direction: that pod, if it is one, is not here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Verdict {
    pub egress: Option<Judgement>,
    pub ingress: Option<Judgement>,
}

impl Verdict {
    #[must_use]
    pub fn allows(self) -> bool {
        [self.egress, self.ingress]
            .into_iter()
            .flatten()
            .all(Judgement::allows)
    }
}

/// Judges a packet in both directions, as far as its ends are pods of this node. One from a pod to itself has come back
/// through a Service: what is sent to a pod's own address does not leave the pod.
#[must_use]
pub fn verdict(compiled: &Compiled, locals: &Locals, packet: &Packet) -> Verdict {
    let judge = |own: IpAddr, other: IpAddr, direction| {
        let (ifindex, pod) = locals.pod_at(own)?;
        if locals.node_addresses.contains(&other) {
            return Some(Judgement::Exempt);
        }
        let own = pod.addresses.contains(&other);
        Some(compiled.judge(ifindex, direction, other, own, packet))
    };
    Verdict {
        egress: judge(packet.source, packet.destination, Direction::Egress),
        ingress: judge(packet.destination, packet.source, Direction::Ingress),
    }
}

impl Compiled {
    /// Judges one direction of an attached pod. `other` is the address at the other end; `own` says that it is the pod's.
    #[must_use]
    pub fn judge(
        &self,
        ifindex: u32,
        direction: Direction,
        other: IpAddr,
        own: bool,
        packet: &Packet,
    ) -> Judgement {
        let flags = self.flags(ifindex);
        let (judged, _) = direction.flags();
        if flags & judged == 0 {
            return Judgement::Open;
        }
        let Some((_, set)) = self.rules_of(ifindex) else {
            return Judgement::Shut;
        };
        let policy = PodPolicy {
            policy_id: 0,
            flags,
        };
        let peer = Peer {
            identity: self.trie.find(other).unwrap_or(IDENTITY_ANY),
            direction: direction.number(),
            protocol: packet.protocol,
            port: rule_port(packet.protocol, Port::new(packet.port)),
            own: own.into(),
        };
        let said = judge_direction(&mut Rules(set), &policy, &peer);
        match said.rule {
            NO_RULE if said.allowed == 0 => Judgement::Isolated,
            NO_RULE if own => Judgement::Exempt,
            NO_RULE => Judgement::NoRule,
            number => Judgement::Rule {
                number,
                allow: said.allowed != 0,
            },
        }
    }
}

/// A rule set in place of the map. The policy's id is of no interest.
struct Rules<'a>(&'a RuleSet);

impl PolicyRules for Rules<'_> {
    fn policy_rule(&mut self, key: &PolicyRuleKey) -> Option<&PolicyRule> {
        let entries = self.0.entries(key.identity)?;
        let entries = entries.get(usize::from(key.direction))?;
        let one = PortPrefix {
            protocol: key.protocol,
            port: key.port.number(),
            bits: PortPrefix::ONE_PORT,
        };
        // A range comes before those that it holds.
        let holding = entries.iter().rev().find(|(range, _)| range.holds(one));
        holding.map(|(_, said)| said)
    }
}
