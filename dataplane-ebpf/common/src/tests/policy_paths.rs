//! Histories in which policies change between packets. What each packet may do is worked out by the text of the rules;
//! where it goes is what it does in the same tables with every pod open.

use std::collections::{BTreeMap, HashMap};

use proptest::prelude::*;
use proptest::sample::select;

use super::histories::answer;
use super::policy::{Rule, distinct, enter, naive, naive_of_itself, pod_policy, rule};
use super::tables::{Act, Collections, LOCAL_PODS, TestFamily, from_network, from_pod, go_on};
use crate::address::{ICMP, TCP, UDP};
use crate::icmp::{Messages, relate};
use crate::layout::{
    DIRECTION_EGRESS, DIRECTION_INGRESS, ENDPOINT_NODE, ENDPOINT_NODE_PORTS, Endpoint, FlowKey,
    FrontendKey, IDENTITY_ANY, NODE_MASQUERADE, POLICY_EGRESS, POLICY_EGRESS_CLOSED,
    POLICY_INGRESS, POLICY_INGRESS_CLOSED, PodPolicy, RANGE_EXEMPT, RULE_ALLOW, Range, RangeKey,
};
use crate::packet::{Action, Decision, ERROR, Packet, WITH_PORTS, tcp};
use crate::path::{self, Hook, Scratch};
use crate::policy::verdict;
use crate::reason::DropReason;
use crate::{Port, V4, V6};

const PODS: u8 = 7;
const OUTSIDERS: u8 = 2;
const NODE_PORT: u16 = 30_000;
/// Of every pod's server.
const SERVER: u16 = 8_080;

#[derive(Clone, Copy, Debug)]
enum Target {
    Service(u8),
    NodePort(u8),
    Pod(u8),
    Outside(u8),
    Node,
}

#[derive(Clone, Copy, Debug)]
struct Sent {
    /// Pods of this node, then outsiders.
    client: u8,
    port: u16,
    target: Target,
    protocol: u8,
    flags: u8,
}

#[derive(Clone, Debug)]
enum Step {
    Send(Sent),
    Answer(Sent),
    /// New policies for all pods of this node, and new rules.
    Policies(Vec<PodPolicy>, Vec<Rule>),
    Serve(u8, BTreeMap<u8, bool>),
    Pass(u32),
}

fn sent() -> impl Strategy<Value = Sent> {
    let target = prop_oneof![
        3 => (1u8..3).prop_map(Target::Service),
        2 => (1u8..3).prop_map(Target::NodePort),
        4 => (1..=PODS).prop_map(Target::Pod),
        1 => (1..=OUTSIDERS).prop_map(Target::Outside),
        1 => Just(Target::Node),
    ];
    let flags = select(vec![tcp::SYN, tcp::ACK, tcp::ACK, tcp::FIN | tcp::ACK]);
    (
        1..=LOCAL_PODS + OUTSIDERS,
        1u16..3,
        target,
        select(vec![TCP, UDP, ICMP]),
        flags,
    )
        .prop_map(|(client, port, target, protocol, flags)| Sent {
            client,
            port,
            target,
            protocol,
            flags,
        })
}

fn step() -> impl Strategy<Value = Step> {
    let policies = prop::collection::vec(pod_policy(), usize::from(LOCAL_PODS));
    let rules = prop::collection::vec(rule(vec![SERVER, 443, 9_000]), 0..12).prop_map(distinct);
    prop_oneof![
        10 => sent().prop_map(Step::Send),
        8 => sent().prop_map(Step::Answer),
        3 => (policies, rules).prop_map(|(policies, rules)| Step::Policies(policies, rules)),
        1 => (1u8..3, prop::collection::btree_map(1..=PODS, any::<bool>(), 0..4))
            .prop_map(|(service, pods)| Step::Serve(service, pods)),
        1 => select(vec![0, 1, 31, 181]).prop_map(Step::Pass),
    ]
}

fn outside<A: TestFamily>(number: u8) -> A {
    A::pod(200 + number)
}

/// A client's address; its number among the pods if it is one.
fn client<A: TestFamily>(number: u8) -> (A, Option<u8>) {
    if number <= LOCAL_PODS {
        (A::pod(number), Some(number))
    } else {
        (outside(number - LOCAL_PODS), None)
    }
}

fn packet<A: TestFamily + Messages>(sent: Sent) -> Packet<A> {
    let (destination, port) = match sent.target {
        Target::Service(service) => (A::service(service), 80),
        Target::NodePort(service) => (A::node(), NODE_PORT + u16::from(service)),
        Target::Pod(pod) => (A::pod(pod), SERVER),
        Target::Outside(machine) => (outside(machine), 443),
        Target::Node => (A::node(), 22),
    };
    let echo = sent.protocol == ICMP;
    Packet {
        source: client(sent.client).0,
        destination,
        source_port: Port::new(sent.port),
        destination_port: Port::new(if echo { 0 } else { port }),
        protocol: if echo { A::PROTOCOL } else { sent.protocol },
        tcp_flags: if sent.protocol == TCP { sent.flags } else { 0 },
        flags: WITH_PORTS,
        identification: 0,
    }
}

struct Model<A> {
    tables: Collections<A>,
    rules: Vec<Rule>,
    told: HashMap<FlowKey<A>, Decision<A>>,
}

/// Source, destination, protocol and port as policies see them.
type Seen<A> = (A, A, u8, u16);

impl<A: TestFamily + Messages> Model<A> {
    fn new(seed: u64, room: usize) -> Self {
        let mut tables = Collections::new(seed, room);
        tables.node.flags = NODE_MASQUERADE;
        let own = Endpoint {
            flags: ENDPOINT_NODE | ENDPOINT_NODE_PORTS,
            ..Endpoint::default()
        };
        tables.endpoints.insert(A::node(), own);
        let numbers = (1..=PODS).chain((1..=OUTSIDERS).map(|machine| 200 + machine));
        for number in numbers {
            let address = A::pod(number);
            if (LOCAL_PODS + 1..=PODS).contains(&number) {
                let range = Range {
                    flags: RANGE_EXEMPT,
                    ..Range::default()
                };
                tables.ranges.insert(address, range);
            }
            let key = RangeKey {
                prefix_bits: A::BITS,
                address,
            };
            let identity = u32::from(number) % 4;
            if identity != IDENTITY_ANY {
                tables.policies.identities.insert(key, identity);
            }
        }
        let mut model = Self {
            tables,
            rules: Vec::new(),
            told: HashMap::new(),
        };
        for service in 1..3 {
            model.serve(service, &[(1, false), (2, false), (5, false)]);
        }
        model
    }

    fn serve(&mut self, service: u8, pods: &[(u8, bool)]) {
        for protocol in [TCP, UDP] {
            self.tables.serve(service, protocol, pods);
            let cluster_ip = FrontendKey {
                address: A::service(service),
                port: Port::new(80),
                protocol,
                scope: 0,
            };
            let frontend = self.tables.frontends.get_mut(&cluster_ip).unwrap();
            // Clients of the first stay with their backend.
            frontend.affinity_s = if service == 1 { 100 } else { 0 };
            let frontend = *frontend;
            let node_port = FrontendKey {
                address: A::default(),
                port: Port::new(NODE_PORT + u16::from(service)),
                ..cluster_ip
            };
            self.tables.frontends.insert(node_port, frontend);
        }
        self.tables.node.generation += 1;
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Send(sent) => {
                let packet = packet::<A>(sent);
                let pod = client::<A>(sent.client).1;
                let decision = self.pass(pod, &packet);
                if decision.action != Action::Drop {
                    self.told.insert(packet.key(), decision);
                }
            }
            Step::Answer(sent) => {
                let key = packet::<A>(sent).key();
                let Some(told) = self.told.get(&key).copied() else {
                    return;
                };
                let protocol = if sent.protocol == ICMP {
                    A::PROTOCOL
                } else {
                    sent.protocol
                };
                let mut back = answer(&told, protocol, sent.flags | tcp::ACK);
                if protocol == A::PROTOCOL {
                    back.tcp_flags = 0;
                }
                let pod = (1..=LOCAL_PODS).find(|pod| A::pod(*pod) == back.source);
                // The node's own answers come by its stack, and are nobody's to judge.
                if back.source != A::node() {
                    self.pass(pod, &back);
                }
            }
            Step::Policies(policies, rules) => {
                self.tables.policies.rules = crate::policy::host::RuleTable::default();
                enter(&mut self.tables.policies, &rules);
                for (pod, policy) in (1..).zip(policies) {
                    self.tables.policies.pods.insert(pod, policy);
                }
                self.rules = rules;
                self.tables.policies.generation += 1;
            }
            Step::Serve(service, pods) => {
                self.serve(service, &pods.into_iter().collect::<Vec<_>>());
            }
            Step::Pass(seconds) => self.tables.now_s += seconds,
        }
    }

    fn run(tables: &mut Collections<A>, pod: Option<u8>, packet: &Packet<A>) -> Decision<A> {
        match pod {
            Some(pod) => from_pod(tables, &A::link(pod), packet),
            None => from_network(tables, packet),
        }
    }

    /// Sends a packet by the programs' code, and compares with what it may do and where it would go.
    fn pass(&mut self, pod: Option<u8>, packet: &Packet<A>) -> Decision<A> {
        let before = self.tables.clone();
        let mut open = self.tables.clone();
        for policy in open.policies.pods.values_mut() {
            policy.flags = 0;
        }
        open.policies.generation += 1;
        let would = Self::run(&mut open, pod, packet);
        let seen = Self::seen(&before, &open, pod, packet, &would);
        let decision = Self::run(&mut self.tables, pod, packet);
        let by_policy = matches!(
            decision.reason,
            DropReason::PolicyIngress | DropReason::PolicyEgress
        );
        if would.action == Action::Drop {
            // Where it would have gone is not known, nor what its policy would say.
            assert_eq!(decision.action, Action::Drop, "{packet:?}");
        } else if self.is_allowed(&seen) {
            assert_eq!(decision, would, "{packet:?} is allowed: {seen:?}");
        } else {
            assert!(
                by_policy,
                "{packet:?} is denied: {seen:?}, and ends as {decision:?}"
            );
        }
        if by_policy {
            self.left_no_trace(&before);
        }
        decision
    }

    /// What policies see: of a packet of a flow, the flow as it was opened.
    fn seen(
        before: &Collections<A>,
        open: &Collections<A>,
        pod: Option<u8>,
        packet: &Packet<A>,
        would: &Decision<A>,
    ) -> Seen<A> {
        let of_flow = |tables: &Collections<A>, key: &FlowKey<A>| {
            let flow = tables.flows.get(key)?;
            Some((
                key.source,
                flow.backend,
                packet.protocol,
                flow.backend_port.number(),
            ))
        };
        let of_answer = || {
            let original = before.replies.get(&packet.key())?;
            let flow = before.flows.get(original)?;
            flow.is_answered_by(&packet.key())
                .then(|| of_flow(before, original))?
        };
        let as_client = of_flow(open, &packet.key());
        let found = if pod.is_some() {
            as_client.or_else(of_answer)
        } else {
            of_answer().or(as_client)
        };
        let port = would.destination_port.number();
        found.unwrap_or((packet.source, would.destination, packet.protocol, port))
    }

    fn is_allowed(&self, (source, destination, protocol, port): &Seen<A>) -> bool {
        let number = |address: &A| (1..=210u8).find(|number| A::pod(*number) == *address);
        let identity = |address: &A| number(address).map_or(0, |number| u32::from(number) % 4);
        if *source == A::node() || *destination == A::node() {
            return true;
        }
        let port = if *protocol == A::PROTOCOL { 0 } else { *port };
        let asks = |pod: &A, direction, other: &A| match number(pod) {
            Some(number) if number <= LOCAL_PODS => {
                let policy = self.tables.policies.pods[&number.into()];
                let identity = identity(other);
                let asked = if pod == other { naive_of_itself } else { naive };
                asked(&self.rules, &policy, direction, identity, *protocol, port).0
            }
            _ => true,
        };
        asks(source, DIRECTION_EGRESS, destination) && asks(destination, DIRECTION_INGRESS, source)
    }

    /// Named invariant: a packet that is denied makes no flow, takes no port, displaces nobody and chooses no backend
    /// for those after it.
    fn left_no_trace(&self, before: &Collections<A>) {
        let new = |key: &&FlowKey<A>| !before.flows.contains_key(*key);
        assert_eq!(self.tables.flows.keys().find(new), None);
        let new = |key: &&FlowKey<A>| !before.replies.contains_key(*key);
        assert_eq!(self.tables.replies.keys().find(new), None);
        assert_eq!(self.tables.cursors, before.cursors);
        assert_eq!(self.tables.recent, before.recent);
        assert_eq!(self.tables.affinities, before.affinities);
    }

    /// Named invariants: no half pairs, and what a flow remembers is true while the policies are those that it
    /// remembers.
    fn is_sound(&self) {
        assert_eq!(self.tables.flows.len(), self.tables.replies.len());
        for (key, flow) in &self.tables.flows {
            assert_eq!(self.tables.replies.get(&flow.reply_key()), Some(key));
            if flow.policy.generation() == self.tables.policies.generation {
                let protocol = u8::try_from(flow.protocol).unwrap();
                let seen = (
                    key.source,
                    flow.backend,
                    protocol,
                    flow.backend_port.number(),
                );
                let denied = flow.policy.verdict() & verdict::DENIED != 0;
                assert_eq!(!denied, self.is_allowed(&seen), "{key:?} {flow:?}");
            }
        }
    }
}

fn run<A: TestFamily + Messages>(seed: u64, room: usize, history: Vec<Step>) {
    let mut model = Model::<A>::new(seed, room);
    for step in history {
        model.step(step);
        model.is_sound();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn ipv4_histories(seed in any::<u64>(), room in 2usize..40, history in prop::collection::vec(step(), 1..100)) {
        run::<V4>(seed, room, history);
    }

    #[test]
    fn ipv6_histories(seed in any::<u64>(), room in 2usize..40, history in prop::collection::vec(step(), 1..100)) {
        run::<V6>(seed, room, history);
    }
}

const SHUT_IN: u32 = POLICY_INGRESS | POLICY_INGRESS_CLOSED;
const SHUT_OUT: u32 = POLICY_EGRESS | POLICY_EGRESS_CLOSED;

fn set(tables: &mut Collections<V4>, pod: u32, flags: u32) {
    let policy = PodPolicy {
        policy_id: pod,
        flags,
    };
    tables.policies.pods.insert(pod, policy);
    tables.policies.generation += 1;
}

fn direct(from: V4, to: V4, protocol: u8, flags: u8) -> Packet<V4> {
    Packet {
        source: from,
        destination: to,
        source_port: Port::new(4_000),
        destination_port: Port::new(SERVER),
        protocol,
        tcp_flags: flags,
        flags: WITH_PORTS,
        identification: 0,
    }
}

/// A server that streams is cut with its client, and goes on when the policies allow it again.
#[test]
fn both_directions_of_a_revoked_flow_stop() {
    for protocol in [TCP, UDP] {
        let mut tables = Collections::<V4>::new(7, 16);
        let (a, far) = (V4::pod(1), V4::pod(5));
        let ask = direct(a, far, protocol, tcp::SYN);
        let sent = from_pod(&mut tables, &V4::link(1), &ask);
        assert_eq!(sent.action, Action::Network);
        let back = answer(&sent, protocol, tcp::ACK);
        assert_eq!(from_network(&mut tables, &back).action, Action::Pod);
        set(&mut tables, 1, SHUT_OUT);
        for _ in 0..3 {
            let stream = from_network(&mut tables, &back);
            assert_eq!(
                stream.reason,
                DropReason::PolicyEgress,
                "the server goes on"
            );
            let more = direct(a, far, protocol, tcp::ACK);
            let more = from_pod(&mut tables, &V4::link(1), &more);
            assert_eq!(more.reason, DropReason::PolicyEgress);
        }
        assert_eq!(tables.denied.len(), 6, "each is told");
        set(&mut tables, 1, SHUT_IN);
        assert_eq!(
            from_network(&mut tables, &back).action,
            Action::Pod,
            "an answer needs no rule"
        );
    }
}

/// Two CPUs judge one flow while the policies change, at every moment in which one of them looks at their generation:
/// the next packet of the flow has the new verdict, whichever of them wrote last.
#[test]
fn a_late_verdict_is_never_taken_for_one_of_now() {
    let shut: Act<V4> = |tables| set(tables, 1, SHUT_OUT);
    let open: Act<V4> = |tables| set(tables, 1, 0);
    let ask = direct(V4::pod(1), V4::pod(5), UDP, 0);
    for (before, after, allowed) in [(shut, open, true), (open, shut, false)] {
        let other_cpu: Act<V4> = if allowed {
            |tables| {
                set(tables, 1, 0);
                from_pod(
                    tables,
                    &V4::link(1),
                    &direct(V4::pod(1), V4::pod(5), UDP, 0),
                );
            }
        } else {
            |tables| {
                set(tables, 1, SHUT_OUT);
                from_pod(
                    tables,
                    &V4::link(1),
                    &direct(V4::pod(1), V4::pod(5), UDP, 0),
                );
            }
        };
        let mut met = 0;
        for moment in 0..8 {
            let mut tables = Collections::<V4>::new(7, 16);
            from_pod(&mut tables, &V4::link(1), &ask);
            before(&mut tables);
            tables.other_cpu = Some((moment, other_cpu));
            from_pod(&mut tables, &V4::link(1), &ask);
            if tables.other_cpu.take().is_none() {
                met += 1;
            } else {
                after(&mut tables);
            }
            let next = from_pod(&mut tables, &V4::link(1), &ask);
            let passes = next.action == Action::Network;
            assert_eq!(passes, allowed, "moment {moment}");
            let flow = tables.flows[&ask.key()];
            let generation = tables.policies.generation;
            assert_eq!(flow.policy.generation(), generation);
            assert_eq!(flow.policy.verdict() & verdict::DENIED == 0, allowed);
        }
        assert!(met >= 3, "a packet that is judged again looks three times");
    }
}

/// Errors about a flow go its way, and stop with it; those about nothing are judged like other protocols.
#[test]
fn errors_share_the_verdict_of_their_flow() {
    let mut tables = Collections::<V4>::new(7, 16);
    let ask = direct(V4::pod(1), V4::pod(5), UDP, 0);
    from_pod(&mut tables, &V4::link(1), &ask);
    let error = |tables: &mut Collections<V4>, quoted: &Packet<V4>| {
        let message = Packet {
            source: V4::pod(5),
            destination: quoted.source,
            protocol: ICMP,
            flags: ERROR,
            ..Packet::default()
        };
        let related = relate(tables, &message, quoted);
        let mut scratch = Scratch::default();
        if related.unsettled != 0 {
            scratch.set_flow(&related.flow);
            return path::settle(tables, Hook::Network, &message, &mut scratch);
        }
        path::open(tables, Hook::Network, &message, &mut scratch)
    };
    set(&mut tables, 1, SHUT_IN);
    assert_eq!(
        error(&mut tables, &ask).action,
        Action::Relate,
        "judged again, then as before"
    );
    set(&mut tables, 1, SHUT_OUT);
    assert_eq!(error(&mut tables, &ask).reason, DropReason::PolicyEgress);
    let stranger = direct(V4::pod(1), V4::pod(6), UDP, 0);
    assert_eq!(error(&mut tables, &stranger).action, Action::Pod);
    set(&mut tables, 1, SHUT_IN);
    assert_eq!(
        error(&mut tables, &stranger).reason,
        DropReason::PolicyIngress
    );
}

/// An echo request that a policy let out brings its reply back, whatever the other direction says.
#[test]
fn echo_replies_need_no_rule() {
    let mut tables = Collections::<V4>::new(7, 16);
    set(&mut tables, 1, SHUT_IN | POLICY_EGRESS);
    let mut request = direct(V4::pod(1), V4::pod(5), ICMP, 0);
    request.destination_port = Port(0);
    let sent = from_pod(&mut tables, &V4::link(1), &request);
    assert_eq!(sent.action, Action::Network);
    let reply = answer(&sent, ICMP, 0);
    assert_eq!(from_network(&mut tables, &reply).action, Action::Pod);
    let mut other = reply;
    other.destination_port = Port::new(4_001);
    assert_eq!(
        from_network(&mut tables, &other).reason,
        DropReason::PolicyIngress
    );
}

/// What the node's stack forwards from a link without a program is judged where it enters the pod, and only there.
#[test]
fn what_the_stack_forwards_is_judged_at_the_pod() {
    let forward = |tables: &mut Collections<V4>, packet: &Packet<V4>| {
        let decision = path::to_pod(tables, packet);
        go_on(tables, Hook::Forward, packet, decision)
    };
    let mut tables = Collections::<V4>::new(7, 16);
    let stranger = V4::new([203, 0, 113, 9]);
    let ask = direct(stranger, V4::pod(1), UDP, 0);
    set(&mut tables, 1, SHUT_IN);
    assert_eq!(forward(&mut tables, &ask).reason, DropReason::PolicyIngress);
    assert!(tables.flows.is_empty());
    set(&mut tables, 1, SHUT_OUT);
    assert_eq!(forward(&mut tables, &ask).action, Action::Stack);
    let sent = forward(&mut tables, &ask);
    let back = from_pod(&mut tables, &V4::link(1), &answer(&sent, UDP, 0));
    assert_eq!(back.action, Action::Network, "an answer needs no rule");
    let missing = direct(stranger, V4::pod(5), UDP, 0);
    assert_eq!(
        forward(&mut tables, &missing).reason,
        DropReason::EndpointNotReady
    );
}

/// With no room for a flow each packet is judged; an allowed one passes untracked.
#[test]
fn flows_without_a_record_are_judged_packet_by_packet() {
    let mut tables = Collections::<V4>::new(7, 0);
    let ask = direct(V4::pod(1), V4::pod(2), UDP, 0);
    assert_eq!(
        from_pod(&mut tables, &V4::link(1), &ask).action,
        Action::Pod
    );
    set(&mut tables, 2, SHUT_IN);
    for _ in 0..2 {
        let said = from_pod(&mut tables, &V4::link(1), &ask);
        assert_eq!(said.reason, DropReason::PolicyIngress);
    }
    let rule = Rule {
        policy_id: 2,
        direction: DIRECTION_INGRESS,
        admin: false,
        number: 0,
        action: RULE_ALLOW,
        identity: IDENTITY_ANY,
        protocol: Some(UDP),
        port: Some((SERVER, 16)),
    };
    enter(&mut tables.policies, &[rule]);
    assert_eq!(
        from_pod(&mut tables, &V4::link(1), &ask).action,
        Action::Pod
    );
}
