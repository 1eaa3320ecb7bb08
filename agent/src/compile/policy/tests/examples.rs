//! What has a limit, what cannot be read, what outlives the agent.

use control_api::desired::{Changes, DesiredState, Name};
use control_api::v1::{
    IpBlock, PeerSet, Policy, PolicyAction, PolicyName, PolicyPeer, PolicyRule, PolicyRulePeer,
    PolicyRulePort, PolicyTier, Protocol, policy_rule_peer,
};

use super::world::NODE;
use crate::compile::policy::{
    Compiler, DomainAnswers, Input, Judgement, Limits, LocalPod, Locals, Mode, Packet, PodState,
    PortPrefix, SHUT_FLAGS, Shut, full, verdict,
};

const POD: &str = "10.0.0.1";
const OTHER: &str = "10.0.0.9";

fn set(number: u8) -> policy_rule_peer::Kind {
    policy_rule_peer::Kind::Set(PeerSet {
        id: vec![number; 16],
        text: String::new(),
    })
}

fn block(cidr: &str) -> policy_rule_peer::Kind {
    policy_rule_peer::Kind::IpBlock(IpBlock {
        cidr: cidr.into(),
        except: Vec::new(),
    })
}

fn rule(
    action: PolicyAction,
    peers: impl IntoIterator<Item = policy_rule_peer::Kind>,
) -> PolicyRule {
    let peers = peers.into_iter().map(Some);
    PolicyRule {
        action: action.into(),
        peers: peers.map(|kind| PolicyRulePeer { kind }).collect(),
        any_port: true,
        ..PolicyRule::default()
    }
}

fn policy(tier: PolicyTier, name: &str, ingress: Vec<PolicyRule>) -> Policy {
    let namespaced = tier == PolicyTier::NetworkPolicy;
    Policy {
        tier: tier.into(),
        namespace: if namespaced { "ns" } else { "" }.into(),
        name: name.into(),
        isolates_ingress: namespaced,
        ingress,
        ..Policy::default()
    }
}

/// One pod of this node that these policies select, and one elsewhere in the set 1.
fn cluster(policies: Vec<Policy>) -> (DesiredState, Locals) {
    let mut state = DesiredState::default();
    let names = policies.iter().map(|policy| PolicyName {
        namespace: policy.namespace.clone(),
        name: policy.name.clone(),
    });
    let pod = PolicyPeer {
        namespace: "ns".into(),
        name: "pod".into(),
        uid: "u1".into(),
        node: NODE.into(),
        policies: names.collect(),
        ..PolicyPeer::default()
    };
    let other = PolicyPeer {
        namespace: "ns".into(),
        name: "other".into(),
        node: "n2".into(),
        addresses: vec![OTHER.into()],
        sets: vec![vec![1; 16]],
        ..PolicyPeer::default()
    };
    for peer in [pod, other] {
        state
            .policy_peers
            .insert(Name::new(&peer.namespace, &peer.name), peer);
    }
    for policy in policies {
        let name = Name::new(&policy.namespace, &policy.name);
        state.policies.insert(name, policy);
    }
    let mut locals = Locals {
        node_name: NODE.into(),
        ..Locals::default()
    };
    let attached = LocalPod {
        name: Some(Name::new("ns", "pod")),
        uid: "u1".into(),
        addresses: vec![POD.parse().unwrap()],
    };
    locals.pods.insert(7, attached);
    (state, locals)
}

fn ingress(state: &DesiredState, locals: &Locals) -> Judgement {
    let packet = Packet {
        source: OTHER.parse().unwrap(),
        destination: POD.parse().unwrap(),
        protocol: 6,
        port: 80,
    };
    verdict(&full(state, locals), locals, &packet)
        .ingress
        .unwrap()
}

#[test]
fn a_rule_that_cannot_be_read_allows_nobody_and_denies_everybody() {
    let broken = || block("10.0.0.0/33");
    let allow = policy(
        PolicyTier::NetworkPolicy,
        "p",
        vec![rule(PolicyAction::Allow, [broken()])],
    );
    let (state, locals) = cluster(vec![allow]);
    assert_eq!(ingress(&state, &locals), Judgement::Isolated);
    for action in [PolicyAction::Deny, PolicyAction::Pass] {
        let admin = policy(PolicyTier::Admin, "p", vec![rule(action, [broken()])]);
        let (state, locals) = cluster(vec![admin]);
        let denied = Judgement::Rule {
            number: 0,
            allow: false,
        };
        assert_eq!(ingress(&state, &locals), denied, "{action:?}");
    }
    // A range of ports that ends before it begins.
    let mut reversed = rule(PolicyAction::Allow, [set(1)]);
    reversed.any_port = false;
    reversed.ports = vec![PolicyRulePort {
        protocol: Protocol::Tcp.into(),
        first: 90,
        last: 70,
        ..PolicyRulePort::default()
    }];
    let (state, locals) = cluster(vec![policy(PolicyTier::NetworkPolicy, "p", vec![reversed])]);
    assert_eq!(ingress(&state, &locals), Judgement::Isolated);
}

#[test]
fn who_is_not_known_is_shut() {
    let (mut state, mut locals) = cluster(Vec::new());
    assert_eq!(ingress(&state, &locals), Judgement::Open);
    if let Some(pod) = locals.pods.get_mut(&7) {
        pod.uid = "u2".into();
    }
    assert_eq!(
        ingress(&state, &locals),
        Judgement::Shut,
        "a later pod of the same name"
    );
    if let Some(pod) = locals.pods.get_mut(&7) {
        pod.name = None;
    }
    assert_eq!(ingress(&state, &locals), Judgement::Open, "no pod at all");
    let (other, locals) = cluster(vec![policy(PolicyTier::Admin, "p", Vec::new())]);
    state.policy_peers = other.policy_peers;
    let compiled = full(&state, &locals);
    let why = PodState::Shut(Shut::Missing(Name::new("", "p")));
    assert_eq!(compiled.pods.get(&7), Some(&why));
    assert_eq!(compiled.flags(7), SHUT_FLAGS);
}

/// The pod 7 has one rule that 21 identities match, the pod 8 twenty rules, each for one.
fn two_large_pods() -> (DesiredState, Locals) {
    let large = policy(
        PolicyTier::NetworkPolicy,
        "large",
        vec![rule(PolicyAction::Allow, [set(1)])],
    );
    let (mut state, mut locals) = cluster(vec![large]);
    for number in 0..20u8 {
        let peer = PolicyPeer {
            namespace: "ns".into(),
            name: format!("p{number}"),
            node: "n2".into(),
            addresses: vec![format!("10.0.1.{number}")],
            // Each has an identity of its own.
            sets: vec![vec![1; 16], vec![number + 2; 16]],
            ..PolicyPeer::default()
        };
        state
            .policy_peers
            .insert(Name::new("ns", &peer.name), peer.clone());
    }
    let rules = (0..20u8).map(|n| rule(PolicyAction::Allow, [set(n + 2)]));
    let small = policy(PolicyTier::NetworkPolicy, "small", rules.collect());
    let mut pod = state
        .policy_peers
        .get(&Name::new("ns", "pod"))
        .unwrap()
        .clone();
    pod.name = "second".into();
    pod.policies[0].name = "small".into();
    state
        .policies
        .insert(Name::new("ns", "small"), small.clone());
    state
        .policy_peers
        .insert(Name::new("ns", "second"), pod.clone());
    let attached = LocalPod {
        name: Some(Name::new("ns", "second")),
        uid: "u1".into(),
        addresses: vec!["10.0.0.2".parse().unwrap()],
    };
    locals.pods.insert(8, attached);
    (state, locals)
}

/// Too many entries shut the pod that needs them, and no other; fewer open it again.
#[test]
fn what_does_not_fit_is_shut_alone() {
    let (state, locals) = two_large_pods();
    let too_many = Limits {
        rules_per_policy: 20,
        rules: 100,
    };
    let no_room = Limits {
        rules_per_policy: 30,
        rules: 40,
    };
    for (limits, expected) in [
        (too_many, [Some(Shut::TooManyRules), None]),
        (no_room, [None, Some(Shut::NoRoom)]),
    ] {
        let mut compiler = Compiler::new(Mode::Enforced, limits, &[]);
        let shut_after = |compiler: &mut Compiler, state: &DesiredState, changes: &Changes| {
            let domains = DomainAnswers::default();
            let input = Input::new(state, &locals, &domains);
            compiler.update(&input, changes);
            [7, 8].map(|pod| compiler.compiled().why_shut(pod).cloned())
        };
        let shut = shut_after(&mut compiler, &state, &Changes::everything());
        assert_eq!(shut, expected);

        let mut state = state.clone();
        let gone = Name::new("ns", "p0");
        state.policy_peers.remove(&gone);
        let mut changes = Changes::default();
        changes.policy_peers.insert(gone);
        let shut = shut_after(&mut compiler, &state, &changes);
        assert_eq!(shut, [None, None], "{limits:?}");
    }
}

#[test]
fn identities_keep_their_numbers_over_a_restart() {
    let rules = vec![
        rule(PolicyAction::Allow, [set(1)]),
        rule(
            PolicyAction::Allow,
            [
                block("10.0.0.0/30"),
                policy_rule_peer::Kind::DomainName("*.example".into()),
            ],
        ),
    ];
    let (state, locals) = cluster(vec![policy(PolicyTier::NetworkPolicy, "p", rules)]);
    let domains = DomainAnswers::default();
    let input = Input::new(&state, &locals, &domains);
    let mut first = Compiler::new(Mode::Enforced, Limits::default(), &[]);
    first.update(&input, &Changes::everything());
    let mut records = first.take_fresh_identities();
    assert_eq!(records.len(), 2);
    assert!(
        first.take_fresh_identities().is_empty(),
        "they are on disk now"
    );
    records.reverse();
    records[0].id += 5;
    let numbers: Vec<u32> = records.iter().map(|record| record.id).collect();
    let mut second = Compiler::new(Mode::Enforced, Limits::default(), &records);
    second.update(&input, &Changes::everything());
    assert!(second.take_fresh_identities().is_empty());
    let found = second.compiled().trie.iter().map(|(_, id)| id);
    assert!(found.into_iter().all(|id| numbers.contains(&id)));
}

#[test]
fn ranges_of_ports_are_cut_into_as_few_as_can_be() {
    for (first, last, pieces) in [
        (0, 65535, 1),
        (0, 0, 1),
        (80, 80, 1),
        (1, 65535, 16),
        (1, 65534, 30),
        (1024, 2047, 1),
        (7, 8, 2),
    ] {
        let cut = PortPrefix::of_range(6, first, last);
        assert_eq!(cut.len(), pieces, "{first}-{last}: {cut:?}");
        for port in [0, 1, 7, 8, 79, 80, 81, 1023, 1024, 2047, 2048, 65534, 65535] {
            let one = PortPrefix {
                protocol: 6,
                port,
                bits: 24,
            };
            let inside = cut.iter().filter(|piece| piece.holds(one)).count();
            assert_eq!(
                inside,
                usize::from((first..=last).contains(&port)),
                "{port} in {cut:?}"
            );
        }
    }
}
