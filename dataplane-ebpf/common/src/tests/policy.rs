//! The judge against a naive evaluator: random rules in random tables, in which the longest prefix carries what all
//! rules that cover it say, as the compiler writes them.

use proptest::prelude::*;
use proptest::sample::select;

use super::tables::TestFamily;
use crate::address::{ICMP, SCTP, TCP, UDP};
use crate::layout::{
    DIRECTION_EGRESS, DIRECTION_INGRESS, ENDPOINT_NODE, ENDPOINT_PEER, ENDPOINT_READY, Endpoint,
    IDENTITY_ANY, NO_RULE, POLICY_EGRESS, POLICY_EGRESS_CLOSED, POLICY_INGRESS,
    POLICY_INGRESS_CLOSED, POLICY_SHUT, PodPolicy, PolicyRule, PolicyRuleKey, RULE_ALLOW,
    RULE_BITS_ANY_PORT, RULE_BITS_ANY_PROTOCOL, RULE_DENY, RULE_PASS, RangeKey,
};
use crate::policy::host::HostTables;
use crate::policy::{Ends, Verdict, judge, reason_of, verdict};
use crate::reason::DropReason;
use crate::{Port, V4, V6};

/// A rule as people write it: everything that it does not restrict is absent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rule {
    pub(super) policy_id: u32,
    pub(super) direction: u8,
    pub(super) admin: bool,
    pub(super) number: u32,
    pub(super) action: u32,
    pub(super) identity: u32,
    pub(super) protocol: Option<u8>,
    /// A block of ports by its first one, and how many of its bits count.
    pub(super) port: Option<(u16, u32)>,
}

impl Rule {
    fn bits(&self) -> u32 {
        match (self.protocol, self.port) {
            (None, _) => RULE_BITS_ANY_PROTOCOL,
            (Some(_), None) => RULE_BITS_ANY_PORT,
            (Some(_), Some((_, bits))) => RULE_BITS_ANY_PORT + bits,
        }
    }

    fn key(&self) -> PolicyRuleKey {
        PolicyRuleKey {
            prefix_bits: self.bits(),
            policy_id: self.policy_id,
            identity: self.identity,
            direction: self.direction,
            protocol: self.protocol.unwrap_or(0),
            port: Port::new(self.protocol.and(self.port).map_or(0, |(first, _)| first)),
        }
    }

    /// Matches, naively.
    fn matches(
        &self,
        policy_id: u32,
        direction: u8,
        identity: u32,
        protocol: u8,
        port: u16,
    ) -> bool {
        let in_block = |(first, bits): (u16, u32)| {
            (0..bits).all(|bit| (first >> (15 - bit)) & 1 == (port >> (15 - bit)) & 1)
        };
        self.policy_id == policy_id
            && self.direction == direction
            && (self.identity == IDENTITY_ANY || self.identity == identity)
            && self.protocol.is_none_or(|own| own == protocol)
            && (self.protocol.is_none() || self.port.is_none_or(in_block))
    }

    /// Covers everything that `other` matches, for the same policy, direction and identity.
    fn covers(&self, other: &Self) -> bool {
        (self.policy_id, self.direction, self.identity)
            == (other.policy_id, other.direction, other.identity)
            && self.bits() <= other.bits()
            && self.protocol.is_none_or(|own| Some(own) == other.protocol)
            && (self.protocol.is_none()
                || self.port.is_none_or(|(first, bits)| {
                    other.port.is_some_and(|(port, _)| {
                        (0..bits).all(|bit| (first >> (15 - bit)) & 1 == (port >> (15 - bit)) & 1)
                    })
                }))
    }
}

/// Writes rules as the compiler does: under each prefix, the first of all rules that cover it.
pub(super) fn enter<A: TestFamily>(tables: &mut HostTables<A>, rules: &[Rule]) {
    for place in rules {
        let mut value = PolicyRule::NONE;
        for rule in rules.iter().filter(|rule| rule.covers(place)) {
            if rule.admin && rule.number < value.admin_rule {
                (value.admin_rule, value.admin_action) = (rule.number, rule.action);
            }
            if !rule.admin && rule.number < value.rule {
                (value.rule, value.action) = (rule.number, rule.action);
            }
        }
        tables.rules.insert(place.key(), value);
    }
}

/// The flags that say of a direction that it is judged, and that it is closed.
fn flags_of(direction: u8) -> (u32, u32) {
    if direction == DIRECTION_INGRESS {
        (POLICY_INGRESS, POLICY_INGRESS_CLOSED)
    } else {
        (POLICY_EGRESS, POLICY_EGRESS_CLOSED)
    }
}

/// What the text of the rules says about one direction.
pub(super) fn naive(
    rules: &[Rule],
    policy: &PodPolicy,
    direction: u8,
    identity: u32,
    protocol: u8,
    port: u16,
) -> (bool, u32) {
    let (judged, closed) = flags_of(direction);
    if policy.flags & judged == 0 {
        return (true, NO_RULE);
    }
    let mut matching: Vec<&Rule> = rules
        .iter()
        .filter(|rule| rule.matches(policy.policy_id, direction, identity, protocol, port))
        .collect();
    matching.sort_by_key(|rule| rule.number);
    let admin = matching.iter().find(|rule| rule.admin);
    if let Some(rule) = admin
        && rule.action != RULE_PASS
    {
        return (rule.action == RULE_ALLOW, rule.number);
    }
    match matching.iter().find(|rule| !rule.admin) {
        Some(rule) => (rule.action == RULE_ALLOW, rule.number),
        None => (policy.flags & closed == 0, NO_RULE),
    }
}

/// As [`naive`], for a pod that comes back to itself: where NetworkPolicy closes it, only the tier Admin has a say.
pub(super) fn naive_of_itself(
    rules: &[Rule],
    policy: &PodPolicy,
    direction: u8,
    identity: u32,
    protocol: u8,
    port: u16,
) -> (bool, u32) {
    let (_, closed) = flags_of(direction);
    let exempt = policy.flags & closed != 0;
    let asked: Vec<Rule> = rules
        .iter()
        .filter(|rule| rule.admin || !exempt)
        .copied()
        .collect();
    let (allowed, rule) = naive(&asked, policy, direction, identity, protocol, port);
    (allowed || (exempt && rule == NO_RULE), rule)
}

/// Rules about some of these ports, and about blocks of ports around them.
pub(super) fn rule(ports: Vec<u16>) -> impl Strategy<Value = Rule> {
    let block = (select(ports), 12u32..=16)
        .prop_map(|(port, bits)| (port & (0xffff_u16 << (16 - bits)), bits));
    (
        (1u32..3, 0u8..2, any::<bool>(), 0u32..12),
        1u32..=3,
        0u32..4,
        prop::option::of(prop_oneof![Just(TCP), Just(UDP), Just(SCTP)]),
        prop::option::of(block),
    )
        .prop_map(
            |((policy_id, direction, admin, number), action, identity, protocol, port)| {
                let action = if !admin && action == RULE_PASS {
                    RULE_DENY
                } else {
                    action
                };
                Rule {
                    policy_id,
                    direction,
                    admin,
                    number,
                    action,
                    identity,
                    protocol,
                    port,
                }
            },
        )
}

/// Numbers are the order in which rules are asked: no two rules of a policy share one.
pub(super) fn distinct(rules: Vec<Rule>) -> Vec<Rule> {
    let mut rules = rules;
    for (index, rule) in rules.iter_mut().enumerate() {
        rule.number = rule.number * 64 + u32::try_from(index).unwrap();
    }
    rules
}

pub(super) fn pod_policy() -> impl Strategy<Value = PodPolicy> {
    (1u32..3, 0u32..16).prop_map(|(policy_id, flags)| PodPolicy { policy_id, flags })
}

/// Pods 1 and 2 live here, 3 and 4 elsewhere; their identities are their numbers modulo 4. The node has the address of
/// its family.
fn cluster<A: TestFamily>(rules: &[Rule], pods: &[PodPolicy; 2]) -> HostTables<A> {
    let mut tables = HostTables::default();
    for number in 1..=2u8 {
        let endpoint = Endpoint {
            ifindex: number.into(),
            flags: ENDPOINT_READY,
            ..Endpoint::default()
        };
        tables.endpoints.insert(A::pod(number), endpoint);
        tables
            .pods
            .insert(number.into(), pods[usize::from(number) - 1]);
    }
    for (address, flags) in [(A::node(), ENDPOINT_NODE), (A::pod(9), ENDPOINT_PEER)] {
        let endpoint = Endpoint {
            flags,
            ..Endpoint::default()
        };
        tables.endpoints.insert(address, endpoint);
    }
    for number in 1..=4u8 {
        let key = RangeKey {
            prefix_bits: A::BITS,
            address: A::pod(number),
        };
        tables.identities.insert(key, u32::from(number) % 4);
    }
    enter(&mut tables, rules);
    tables
}

fn ends<A: TestFamily>(source: A, destination: A, protocol: u8, port: u16) -> Ends<A> {
    Ends {
        source,
        destination,
        port: Port::new(port),
        protocol,
        outside: 0,
    }
}

fn agrees<A: TestFamily>(
    rules: &[Rule],
    pods: &[PodPolicy; 2],
    (from, to): (u8, u8),
    protocol: u8,
    port: u16,
) {
    let mut tables = cluster::<A>(rules, pods);
    let said = judge(&mut tables, &ends(A::pod(from), A::pod(to), protocol, port));
    let rule_port = if protocol == ICMP { 0 } else { port };
    let ask = |pod: u8, direction, other: u8| {
        let policy = pods[usize::from(pod) - 1];
        let identity = u32::from(other) % 4;
        if pod == other {
            naive_of_itself(rules, &policy, direction, identity, protocol, rule_port)
        } else {
            naive(rules, &policy, direction, identity, protocol, rule_port)
        }
    };
    let mut wanted = (true, DIRECTION_EGRESS, NO_RULE);
    if from <= 2 {
        let (allowed, rule) = ask(from, DIRECTION_EGRESS, to);
        wanted = (allowed, DIRECTION_EGRESS, rule);
    }
    if to <= 2 && wanted.0 {
        let (allowed, rule) = ask(to, DIRECTION_INGRESS, from);
        if pods[usize::from(to) - 1].flags & POLICY_INGRESS != 0 {
            wanted = (allowed, DIRECTION_INGRESS, rule);
        }
    }
    assert_eq!(
        said.reason == DropReason::None,
        wanted.0,
        "{from}->{to}: {said:?} {wanted:?}"
    );
    assert_eq!(
        verdict::rule_plus_one(said.word),
        wanted.2.wrapping_add(1),
        "{said:?} {wanted:?}"
    );
    let ingress = said.word & verdict::INGRESS != 0;
    assert_eq!(
        ingress,
        wanted.1 == DIRECTION_INGRESS,
        "{said:?} {wanted:?}"
    );
    assert_eq!(reason_of(said.word), said.reason);
    assert_eq!(said.reason != DropReason::None, said.ifindex != 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3_000, ..ProptestConfig::default() })]

    #[test]
    fn the_judge_says_what_the_rules_say(
        rules in prop::collection::vec(rule((0..8).collect()), 0..24).prop_map(distinct),
        pods in [pod_policy(), pod_policy()],
        packets in prop::collection::vec(
            ((1u8..=4, 1u8..=4), prop_oneof![Just(TCP), Just(UDP), Just(SCTP), Just(ICMP)], 0u16..20),
            1..40,
        ),
    ) {
        for (who, protocol, port) in packets {
            agrees::<V4>(&rules, &pods, who, protocol, port);
            agrees::<V6>(&rules, &pods, who, protocol, port);
        }
    }
}

const CLOSED: u32 = POLICY_INGRESS | POLICY_EGRESS | POLICY_INGRESS_CLOSED | POLICY_EGRESS_CLOSED;

fn shut_pods(flags: u32) -> [PodPolicy; 2] {
    [PodPolicy {
        policy_id: 1,
        flags,
    }; 2]
}

/// A pod reaches its node, and its node reaches it, whatever its policy says; not so what another machine sends with such
/// an address.
#[test]
fn a_pod_and_its_node_are_always_open() {
    for flags in [CLOSED, POLICY_SHUT] {
        let mut tables = cluster::<V4>(&[], &shut_pods(flags));
        let mut open = |from, to| judge(&mut tables, &ends(from, to, TCP, 80));
        assert_eq!(open(V4::pod(1), V4::node()), Verdict::UNASKED);
        assert_eq!(open(V4::node(), V4::pod(1)), Verdict::UNASKED);
        assert_ne!(open(V4::pod(9), V4::pod(1)).reason, DropReason::None);
        assert_ne!(open(V4::pod(1), V4::pod(9)).reason, DropReason::None);
        for source in [V4::node(), V4::pod(1)] {
            let mut forged = ends(source, V4::pod(1), TCP, 80);
            forged.outside = 1;
            let said = judge(&mut tables, &forged);
            assert_ne!(said.reason, DropReason::None, "{source:?}");
        }
    }
}

/// What a Service leads back to the pod that asked: the tier Admin is asked, and so is Baseline where no NetworkPolicy
/// closes the pod; what is closed is open to itself.
#[test]
fn a_pod_reaches_itself_through_its_service_unless_a_cluster_policy_says_no() {
    let deny = |admin, identity| Rule {
        policy_id: 1,
        direction: DIRECTION_INGRESS,
        admin,
        number: 3,
        action: RULE_DENY,
        identity,
        protocol: None,
        port: None,
    };
    let judged = POLICY_INGRESS | POLICY_EGRESS;
    for (rules, flags, allowed) in [
        (vec![], CLOSED, true),
        (vec![], judged, true),
        (vec![], POLICY_SHUT, false),
        (vec![deny(true, 1)], CLOSED, false),
        (vec![deny(true, IDENTITY_ANY)], judged, false),
        (vec![deny(true, 2)], CLOSED, true),
        (vec![deny(false, 1)], CLOSED, true),
        (vec![deny(false, 1)], judged, false),
    ] {
        let mut tables = cluster::<V4>(&rules, &shut_pods(flags));
        let said = judge(&mut tables, &ends(V4::pod(1), V4::pod(1), TCP, 80));
        assert_eq!(
            said.reason == DropReason::None,
            allowed,
            "{rules:?} {flags}"
        );
    }
}

/// A pod of which nothing is known is closed, and says so.
#[test]
fn a_pod_without_an_entry_is_closed() {
    for known in [false, true] {
        let mut tables = cluster::<V6>(&[], &shut_pods(POLICY_SHUT));
        if !known {
            tables.pods.clear();
        }
        let out = judge(&mut tables, &ends(V6::pod(1), V6::pod(3), UDP, 53));
        assert_eq!(out.reason, DropReason::PolicyPending);
        assert_eq!((out.ifindex, out.word & verdict::INGRESS), (1, 0));
        let inward = judge(&mut tables, &ends(V6::pod(3), V6::pod(2), UDP, 53));
        assert_eq!(inward.reason, DropReason::PolicyPending);
        assert_eq!(
            (inward.ifindex, inward.word & verdict::INGRESS),
            (2, verdict::INGRESS)
        );
    }
}

/// An open pod is not asked for anything.
#[test]
fn pods_without_policies_are_not_judged() {
    let mut tables = cluster::<V4>(&[], &shut_pods(0));
    for (from, to) in [(1, 2), (1, 3), (3, 2), (3, 4)] {
        let said = judge(&mut tables, &ends(V4::pod(from), V4::pod(to), TCP, 80));
        assert_eq!(said, Verdict::UNASKED);
    }
}
