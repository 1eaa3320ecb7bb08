//! Whether a packet may pass: the policies of the pods of this node that it leaves or enters.
//!
//! Judged is the packet as it is after service translation, with the address that its client has: the source before this
//! node gives it another, the backend's address and port. The pod that it leaves and the pod that it enters must both
//! agree. A pod and its own node always reach one another. What a pod sends to its own address does not leave it; what comes
//! back to it through a Service is bound by ClusterNetworkPolicy alone.
//!
//! User space asks the same code: for explanations, for models in tests ([`host`]).

use crate::address::{Family, Port, SCTP, TCP, UDP};
use crate::layout::{
    DIRECTION_EGRESS, DIRECTION_INGRESS, ENDPOINT_NODE, ENDPOINT_PEER, Endpoint, FLOW_INBOUND,
    Flow, FlowKey, IDENTITY_ANY, NO_RULE, POLICY_EGRESS, POLICY_EGRESS_CLOSED, POLICY_INGRESS,
    POLICY_INGRESS_CLOSED, POLICY_SHUT, PodPolicy, PolicyRule, PolicyRuleKey, RULE_ALLOW,
    RULE_BITS_ONE_PORT, RULE_DENY,
};
use crate::reason::DropReason;

pub mod event;
#[cfg(any(test, feature = "std"))]
pub mod host;

/// The rules of all policies, to be asked by longest prefix.
pub trait PolicyRules {
    /// The entry with the longest prefix that holds the key, all of whose bits count.
    fn policy_rule(&mut self, key: &PolicyRuleKey) -> Option<&PolicyRule>;
}

/// What a judgement depends on.
pub trait PolicyTables<A>: PolicyRules {
    /// Who has an address: a pod of this node, the node itself, or another node.
    fn endpoint(&mut self, address: &A) -> Option<&Endpoint>;
    /// By the interface index of the host side of the pod's link.
    fn pod_policy(&mut self, ifindex: u32) -> Option<&PodPolicy>;
    /// [`IDENTITY_ANY`] for addresses that no peer set holds.
    fn identity(&mut self, address: &A) -> u32;
    /// See [`crate::layout::PolicyState`].
    fn policy_generation(&mut self) -> u32;

    /// Told of every packet that is dropped for its verdict. `source_port` as the client wrote it.
    fn denied(&mut self, _ends: &Ends<A>, _source_port: Port, _verdict: &Verdict) {}
}

/// The other end of a packet, as the rules of one direction see it.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Peer {
    pub identity: u32,
    /// [`DIRECTION_INGRESS`] or [`DIRECTION_EGRESS`], of the pod whose policy is asked.
    pub direction: u8,
    pub protocol: u8,
    /// The packet's destination port; zero for protocols without ports.
    pub port: Port,
    /// One for the pod itself, which a Service has led back to it.
    pub own: u32,
}

/// What the rules of one direction of one pod say.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Judgement {
    /// One or zero.
    pub allowed: u32,
    /// Number of the rule that decided; [`NO_RULE`] when none matched, and what is closed is denied.
    pub rule: u32,
}

/// A packet's ends after service translation.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Ends<A> {
    /// As the client wrote it.
    pub source: A,
    /// Pod, node or outsider that gets the packet.
    pub destination: A,
    pub port: Port,
    pub protocol: u8,
    /// One when the packet came from another machine: nobody there has an address of this node or of its pods.
    pub outside: u8,
}

impl<A: Family> Ends<A> {
    /// Those of a flow, in the direction in which it was opened.
    #[allow(
        clippy::cast_possible_truncation,
        reason = "protocols are bytes, in words so that no byte of a key is padding"
    )]
    #[inline(always)]
    #[must_use]
    pub fn of_flow(key: &FlowKey<A>, flow: &Flow<A>) -> Self {
        Self {
            source: key.source,
            destination: flow.backend,
            port: flow.backend_port,
            protocol: flow.protocol as u8,
            outside: (flow.flags & FLOW_INBOUND != 0) as u8,
        }
    }
}

/// Whether a packet may pass, and who says so.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Verdict {
    /// `None` lets it pass.
    pub reason: DropReason,
    /// As flows remember it: see [`verdict`].
    pub word: u32,
    /// Link of the pod whose policy denies; zero when none does.
    pub ifindex: u32,
    /// One when a policy was asked, whatever it said.
    pub judged: u32,
}

/// The word in which a flow remembers its verdict. Zero: nothing was to be asked.
pub mod verdict {
    /// Set when the packets may not pass.
    pub const DENIED: u32 = 1 << 31;
    /// Set when the rule is of the ingress side.
    pub const INGRESS: u32 = 1 << 30;
    /// In place of a rule: what applies to the pod is not known, or did not fit.
    pub const PENDING: u32 = INGRESS - 1;

    /// The rule's number plus one; zero when no rule matched.
    #[inline(always)]
    #[must_use]
    pub const fn rule_plus_one(word: u32) -> u32 {
        word & PENDING
    }
}

impl Verdict {
    /// No policy had to be asked.
    pub const UNASKED: Self = Self {
        reason: DropReason::None,
        word: 0,
        ifindex: 0,
        judged: 0,
    };

    /// The verdict that a flow remembers. The pod is not told.
    #[inline(always)]
    #[must_use]
    pub const fn of_word(word: u32) -> Self {
        Self {
            reason: reason_of(word),
            word,
            ifindex: 0,
            judged: (word != 0) as u32,
        }
    }
}

/// Why packets with this verdict are dropped.
#[inline(always)]
#[must_use]
pub const fn reason_of(word: u32) -> DropReason {
    if word & verdict::DENIED == 0 {
        DropReason::None
    } else if verdict::rule_plus_one(word) == verdict::PENDING {
        DropReason::PolicyPending
    } else if word & verdict::INGRESS != 0 {
        DropReason::PolicyIngress
    } else {
        DropReason::PolicyEgress
    }
}

impl PolicyRule {
    /// Matches nothing.
    pub const NONE: Self = Self {
        admin_rule: NO_RULE,
        admin_action: 0,
        rule: NO_RULE,
        action: 0,
    };
}

/// The first of the rules that were found, each with its action in one word: the smaller word is that of the rule that
/// comes first. So the verifier has no pairs to tell apart.
#[repr(C)]
struct First {
    admin: u64,
    after: u64,
}

impl First {
    #[inline(always)]
    fn take(&mut self, rule: &PolicyRule) {
        let word = |rule: u32, action: u32| (rule as u64) << 32 | action as u64;
        self.admin = self.admin.min(word(rule.admin_rule, rule.admin_action));
        self.after = self.after.min(word(rule.rule, rule.action));
    }

    #[allow(clippy::cast_possible_truncation, reason = "both halves are kept")]
    #[inline(always)]
    fn rule_and_action(word: u64) -> (u32, u32) {
        ((word >> 32) as u32, word as u32)
    }
}

/// What the rules of `policy` say about a peer, whether its pod is judged in this direction or not: see
/// [`is_judged`]. The tier Admin decides unless it passes or has no rule; then the tiers after it; then, what is closed
/// stays closed. NetworkPolicy, which closes pods, does not keep a pod from itself.
#[inline(always)]
pub fn judge_direction<R: PolicyRules>(
    rules: &mut R,
    policy: &PodPolicy,
    peer: &Peer,
) -> Judgement {
    let mut key = PolicyRuleKey {
        prefix_bits: RULE_BITS_ONE_PORT,
        policy_id: policy.policy_id,
        identity: IDENTITY_ANY,
        direction: peer.direction,
        protocol: peer.protocol,
        port: peer.port,
    };
    let mut first = First {
        admin: u64::MAX,
        after: u64::MAX,
    };
    if let Some(rule) = rules.policy_rule(&key) {
        first.take(rule);
    }
    if peer.identity != IDENTITY_ANY {
        key.identity = peer.identity;
        if let Some(rule) = rules.policy_rule(&key) {
            first.take(rule);
        }
    }
    let admin = First::rule_and_action(first.admin);
    let final_admin = admin.0 != NO_RULE && (admin.1 == RULE_ALLOW || admin.1 == RULE_DENY);
    let closing = if peer.direction == DIRECTION_INGRESS {
        POLICY_INGRESS_CLOSED
    } else {
        POLICY_EGRESS_CLOSED
    };
    let closed = policy.flags & closing != 0;
    let (rule, action) = if final_admin {
        admin
    } else if closed && peer.own != 0 {
        (NO_RULE, RULE_ALLOW)
    } else {
        First::rule_and_action(first.after)
    };
    let allowed = if rule == NO_RULE {
        !closed || peer.own != 0
    } else {
        action == RULE_ALLOW
    };
    Judgement {
        allowed: allowed as u32,
        rule,
    }
}

/// True when packets of this direction are judged by rules.
#[inline(always)]
#[must_use]
pub const fn is_judged(policy: &PodPolicy, direction: u8) -> bool {
    let flag = if direction == DIRECTION_INGRESS {
        POLICY_INGRESS
    } else {
        POLICY_EGRESS
    };
    policy.flags & flag != 0
}

/// The port that rules are asked for: protocols without ports have none, echo identifiers are none.
#[inline(always)]
#[must_use]
pub const fn rule_port(protocol: u8, port: Port) -> Port {
    if protocol == TCP || protocol == UDP || protocol == SCTP {
        port
    } else {
        Port(0)
    }
}

/// Judges a packet by the policies of both of its ends, as far as they are pods of this node.
#[inline(always)]
pub fn judge<A: Family, T: PolicyTables<A>>(tables: &mut T, ends: &Ends<A>) -> Verdict {
    let source = place(tables, &ends.source);
    let destination = place(tables, &ends.destination);
    if source.ifindex == 0 && destination.ifindex == 0 {
        return Verdict::UNASKED;
    }
    if destination.is_node() || (ends.outside == 0 && source.is_node()) {
        return Verdict::UNASKED;
    }
    let mut verdict = Verdict::UNASKED;
    if source.ifindex != 0 {
        ask(tables, ends, DIRECTION_EGRESS, source.ifindex, &mut verdict);
    }
    if destination.ifindex != 0 && verdict.reason == DropReason::None {
        ask(
            tables,
            ends,
            DIRECTION_INGRESS,
            destination.ifindex,
            &mut verdict,
        );
    }
    verdict
}

/// Adds what the pod at `ifindex` says to the verdict.
#[inline(always)]
fn ask<A: Family, T: PolicyTables<A>>(
    tables: &mut T,
    ends: &Ends<A>,
    direction: u8,
    ifindex: u32,
    verdict: &mut Verdict,
) {
    let side = if direction == DIRECTION_INGRESS {
        verdict::INGRESS
    } else {
        0
    };
    let policy = match tables.pod_policy(ifindex) {
        Some(policy) => *policy,
        None => PodPolicy {
            policy_id: 0,
            flags: POLICY_SHUT,
        },
    };
    if policy.flags & POLICY_SHUT != 0 {
        verdict.reason = DropReason::PolicyPending;
        verdict.word = verdict::DENIED | side | verdict::PENDING;
        verdict.ifindex = ifindex;
        verdict.judged = 1;
        return;
    }
    if !is_judged(&policy, direction) {
        return;
    }
    let other = if direction == DIRECTION_INGRESS {
        &ends.source
    } else {
        &ends.destination
    };
    let peer = Peer {
        identity: tables.identity(other),
        direction,
        protocol: ends.protocol,
        port: rule_port(ends.protocol, ends.port),
        own: (ends.outside == 0 && ends.source == ends.destination) as u32,
    };
    let judgement = judge_direction(tables, &policy, &peer);
    // The number of no rule becomes zero.
    verdict.word = side | (judgement.rule.wrapping_add(1) & verdict::PENDING);
    verdict.judged = 1;
    if judgement.allowed == 0 {
        verdict.word |= verdict::DENIED;
        verdict.reason = reason_of(verdict.word);
        verdict.ifindex = ifindex;
    }
}

/// What an address is to policies.
#[repr(C)]
struct Place {
    /// Link of a pod of this node; zero for all others.
    ifindex: u32,
    /// Flags of the endpoint.
    flags: u32,
}

impl Place {
    #[inline(always)]
    fn is_node(&self) -> bool {
        self.flags & ENDPOINT_NODE != 0
    }
}

#[inline(always)]
fn place<A: Family, T: PolicyTables<A>>(tables: &mut T, address: &A) -> Place {
    match tables.endpoint(address) {
        Some(endpoint) if endpoint.flags & (ENDPOINT_NODE | ENDPOINT_PEER) == 0 => Place {
            ifindex: endpoint.ifindex,
            flags: endpoint.flags,
        },
        Some(endpoint) => Place {
            ifindex: 0,
            flags: endpoint.flags,
        },
        None => Place {
            ifindex: 0,
            flags: 0,
        },
    }
}
