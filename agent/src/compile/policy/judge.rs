//! What becomes of a packet, on compiled policies.

use std::net::IpAddr;

use dataplane_common::layout::{
    IDENTITY_ANY, NO_RULE, POLICY_SHUT, PolicyRule, RULE_ALLOW, RULE_PASS,
};

use super::flatten::SILENT;
use super::hosts::Locals;
use super::prefix::PortPrefix;
use super::rules::Direction;
use super::{Compiled, Entries};

/// A first packet, as policies see it: after services are translated, before the source is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
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
    /// Its own address, or its own node's: never refused.
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

/// Judges a packet in both directions, as far as its ends are pods of this node.
#[must_use]
pub fn verdict(compiled: &Compiled, locals: &Locals, packet: &Packet) -> Verdict {
    let judge = |own: IpAddr, other: IpAddr, direction| {
        let (ifindex, pod) = locals.pod_at(own)?;
        if pod.addresses.contains(&other) || locals.node_addresses.contains(&other) {
            return Some(Judgement::Exempt);
        }
        Some(compiled.judge(ifindex, direction, other, packet.protocol, packet.port))
    };
    Verdict {
        egress: judge(packet.source, packet.destination, Direction::Egress),
        ingress: judge(packet.destination, packet.source, Direction::Ingress),
    }
}

impl Compiled {
    /// Judges one direction of an attached pod. `other` is the address at the other end.
    #[must_use]
    pub fn judge(
        &self,
        ifindex: u32,
        direction: Direction,
        other: IpAddr,
        protocol: u8,
        port: u16,
    ) -> Judgement {
        let flags = self.flags(ifindex);
        let (judged, closed) = direction.flags();
        if flags & judged == 0 {
            return Judgement::Open;
        }
        let Some((_, set)) = self.rules_of(ifindex).filter(|_| flags & POLICY_SHUT == 0) else {
            return Judgement::Shut;
        };
        let look_up = |identity: u32| {
            let entries = set.entries(identity)?;
            longest(&entries[direction as usize], protocol, port)
        };
        let identity = self.trie.find(other).unwrap_or(IDENTITY_ANY);
        let exact = if identity == IDENTITY_ANY {
            SILENT
        } else {
            look_up(identity).unwrap_or(SILENT)
        };
        decide(
            exact,
            look_up(IDENTITY_ANY).unwrap_or(SILENT),
            flags & closed != 0,
        )
    }
}

fn decide(exact: PolicyRule, any: PolicyRule, closed: bool) -> Judgement {
    let admin = if exact.admin_rule < any.admin_rule {
        exact
    } else {
        any
    };
    if admin.admin_rule != NO_RULE && admin.admin_action != RULE_PASS {
        return Judgement::Rule {
            number: admin.admin_rule,
            allow: admin.admin_action == RULE_ALLOW,
        };
    }
    let later = if exact.rule < any.rule { exact } else { any };
    match later.rule {
        NO_RULE if closed => Judgement::Isolated,
        NO_RULE => Judgement::NoRule,
        number => Judgement::Rule {
            number,
            allow: later.action == RULE_ALLOW,
        },
    }
}

/// What the longest range says that has a port.
fn longest(entries: &Entries, protocol: u8, port: u16) -> Option<PolicyRule> {
    let one = PortPrefix {
        protocol,
        port,
        bits: 24,
    };
    // A range comes before those that it holds.
    let holding = entries.iter().rev().find(|(range, _)| range.holds(one));
    holding.map(|(_, said)| *said)
}
