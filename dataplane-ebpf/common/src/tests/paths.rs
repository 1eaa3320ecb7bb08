//! Histories over every kind of flow at once: through ClusterIPs and NodePorts, masqueraded, direct, inbound; with full
//! tables, sockets of the node, and the collector in between.

use std::collections::{BTreeMap, HashMap};

use proptest::prelude::*;
use proptest::sample::select;

use super::collect::Plainly;
use super::histories::answer;
use super::tables::{Collections, LOCAL_PODS, TestFamily, from_network, from_pod};
use crate::address::{TCP, UDP};
use crate::collect::{collect_flow, collect_reply};
use crate::layout::{
    ENDPOINT_NODE, ENDPOINT_NODE_PORTS, Endpoint, FLOW_MASQUERADED, FLOW_PLAIN, FLOW_SERVICE, Flow,
    FlowKey, FrontendKey, NODE_MASQUERADE, RANGE_EXEMPT, Range, backend_state,
};
use crate::packet::{Action, Decision, Packet, Translation, WITH_PORTS, tcp};
use crate::ports::{BLOCK, Ports, Tier};
use crate::{Port, V4, V6};

const NODE_PORT_FIRST: u16 = 30_000;
const NODE_PORT_LAST: u16 = 32_767;

/// Where a client's packet goes.
#[derive(Clone, Copy, Debug)]
enum Target {
    Service(u8),
    NodePort(u8),
    Pod(u8),
    /// A machine outside the cluster.
    Outside(u8),
}

/// Who sends it. Only outside clients come in from the network.
#[derive(Clone, Copy, Debug)]
enum Client {
    Pod(u8),
    Outside(u8),
}

#[derive(Clone, Copy, Debug)]
struct Sent {
    client: Client,
    port: u16,
    target: Target,
    protocol: u8,
    flags: u8,
}

#[derive(Clone, Debug)]
enum Step {
    Send(Sent),
    /// The other end of what was sent last with this tuple answers.
    Answer(Sent),
    Serve {
        service: u8,
        protocol: u8,
        pods: BTreeMap<u8, bool>,
    },
    Pass(u32),
    /// A process of the node talks to an outside machine from this port.
    Bind {
        port: u16,
        machine: u8,
        protocol: u8,
    },
    Collect {
        pressure: bool,
    },
}

fn sent() -> impl Strategy<Value = Sent> {
    let client = prop_oneof![
        3 => (1..=LOCAL_PODS).prop_map(Client::Pod),
        1 => (1u8..4).prop_map(Client::Outside),
    ];
    let target = prop_oneof![
        3 => (1u8..3).prop_map(Target::Service),
        2 => (1u8..3).prop_map(Target::NodePort),
        2 => (1u8..8).prop_map(Target::Pod),
        2 => (1u8..3).prop_map(Target::Outside),
    ];
    let flags = select(vec![
        tcp::SYN,
        tcp::ACK,
        tcp::FIN | tcp::ACK,
        tcp::RST | tcp::ACK,
    ]);
    (client, 1u16..4, target, select(vec![TCP, UDP]), flags).prop_map(
        |(client, port, target, protocol, flags)| Sent {
            client,
            port,
            target,
            protocol,
            flags,
        },
    )
}

fn step() -> impl Strategy<Value = Step> {
    let pods = prop::collection::btree_map(1u8..8, any::<bool>(), 0..4);
    let protocol = || select(vec![TCP, UDP]);
    prop_oneof![
        10 => sent().prop_map(Step::Send),
        8 => sent().prop_map(Step::Answer),
        1 => (1u8..3, protocol(), pods)
            .prop_map(|(service, protocol, pods)| Step::Serve { service, protocol, pods }),
        2 => select(vec![0, 1, 4, 11, 31, 126, 181, 3_601, 7_501, 86_401]).prop_map(Step::Pass),
        1 => (1_024u16..1_060, 1u8..3, protocol())
            .prop_map(|(port, machine, protocol)| Step::Bind { port, machine, protocol }),
        1 => any::<bool>().prop_map(|pressure| Step::Collect { pressure }),
    ]
}

fn outside<A: TestFamily>(number: u8) -> A {
    // No test address lies there: pods and services are numbered from one.
    A::pod(200 + number)
}

struct Model<A> {
    tables: Collections<A>,
    told: HashMap<FlowKey<A>, Decision<A>>,
}

impl<A: TestFamily> Model<A> {
    fn new(seed: u64, room: usize) -> Self {
        let mut tables = Collections::new(seed, room);
        tables.node.flags = NODE_MASQUERADE;
        tables.node.node_port_first = NODE_PORT_FIRST;
        tables.node.node_port_last = NODE_PORT_LAST;
        let own = Endpoint {
            flags: ENDPOINT_NODE | ENDPOINT_NODE_PORTS,
            ..Endpoint::default()
        };
        tables.endpoints.insert(A::node(), own);
        for pod in LOCAL_PODS + 1..8 {
            let range = Range {
                flags: RANGE_EXEMPT,
                ..Range::default()
            };
            tables.ranges.insert(A::pod(pod), range);
        }
        // Ports begin where sockets are, so that they meet.
        for index in 0..crate::PORT_CURSORS {
            tables.cursors.insert(index, 33_512 - 1);
        }
        let mut model = Self {
            tables,
            told: HashMap::new(),
        };
        for service in 1..3 {
            for protocol in [TCP, UDP] {
                model.serve(service, protocol, &[(1, false), (5, false)]);
            }
        }
        model
    }

    fn serve(&mut self, service: u8, protocol: u8, pods: &[(u8, bool)]) {
        self.tables.serve(service, protocol, pods);
        let cluster_ip = FrontendKey {
            address: A::service(service),
            port: Port::new(80),
            protocol,
            scope: 0,
        };
        let frontend = self.tables.frontends[&cluster_ip];
        let node_port = FrontendKey {
            address: A::default(),
            port: Port::new(NODE_PORT_FIRST + u16::from(service)),
            ..cluster_ip
        };
        self.tables.frontends.insert(node_port, frontend);
        self.tables.node.generation += 1;
    }

    fn packet(sent: Sent) -> Packet<A> {
        let (destination, port) = match sent.target {
            Target::Service(service) => (A::service(service), 80),
            Target::NodePort(service) => (A::node(), NODE_PORT_FIRST + u16::from(service)),
            Target::Pod(pod) => (A::pod(pod), 8_080),
            Target::Outside(machine) => (outside(machine), 443),
        };
        Packet {
            source: match sent.client {
                Client::Pod(pod) => A::pod(pod),
                Client::Outside(machine) => outside(machine),
            },
            destination,
            source_port: Port::new(sent.port),
            destination_port: Port::new(port),
            protocol: sent.protocol,
            tcp_flags: if sent.protocol == TCP { sent.flags } else { 0 },
            flags: WITH_PORTS,
            identification: 0,
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Send(sent) => self.send(sent),
            Step::Answer(sent) => self.answer(sent),
            Step::Serve {
                service,
                protocol,
                pods,
            } => self.serve(service, protocol, &pods.into_iter().collect::<Vec<_>>()),
            Step::Pass(seconds) => self.tables.now_s += seconds,
            Step::Bind {
                port,
                machine,
                protocol,
            } => {
                let reply = FlowKey {
                    source: outside(machine),
                    destination: A::node(),
                    source_port: Port::new(443),
                    destination_port: Port::new(port),
                    protocol: protocol.into(),
                };
                if !self.tables.replies.contains_key(&reply) {
                    self.tables.sockets.insert(reply);
                }
            }
            Step::Collect { pressure } => self.collect(pressure),
        }
    }

    fn send(&mut self, sent: Sent) {
        let packet = Self::packet(sent);
        let key = packet.key();
        let before = self.tables.clone();
        let decision = match sent.client {
            Client::Pod(pod) => from_pod(&mut self.tables, &A::link(pod), &packet),
            Client::Outside(_) => from_network(&mut self.tables, &packet),
        };
        self.keeps_conversations(&before, Some(&key));
        let Some(flow) = self.tables.flows.get(&key).copied() else {
            return;
        };
        if decision.action == Action::Drop {
            return;
        }
        if !before.flows.contains_key(&key) {
            self.starts_well(&flow);
        }
        if !packet.is_tcp() && flow.flags & FLOW_SERVICE != 0 {
            assert_ne!(
                self.kind_of_backend(&flow),
                backend_state::ABSENT,
                "a datagram to a removed backend"
            );
        }
        self.has_its_reverse(&packet, &decision, &flow);
        self.told.insert(key, decision);
    }

    /// Named invariant: no conversation is lost but by its own end. A full table displaces flows without one, and a
    /// port is taken from flows that are over.
    fn keeps_conversations(&self, before: &Collections<A>, own: Option<&FlowKey<A>>) {
        for (key, flow) in &before.flows {
            if Some(key) == own || self.tables.flows.contains_key(key) {
                continue;
            }
            assert!(
                flow.is_disposable() || flow.is_expired(self.tables.now_s, true),
                "a conversation was lost: {key:?} {flow:?}"
            );
        }
    }

    /// Named invariant: no flow begins at a backend that is removed or draining, nor with a source port of the NodePort
    /// range or of a socket.
    fn starts_well(&self, flow: &Flow<A>) {
        if flow.flags & FLOW_SERVICE != 0 {
            assert_eq!(
                self.kind_of_backend(flow),
                backend_state::ACTIVE,
                "a new flow at a backend that is no more or drains"
            );
        }
        if flow.flags & FLOW_MASQUERADED != 0 {
            let port = flow.source_port.number();
            assert_eq!(flow.source, A::node());
            assert!(port >= 1_024 && !(NODE_PORT_FIRST..=NODE_PORT_LAST).contains(&port));
            assert!(
                !self.tables.sockets.contains(&flow.reply_key()),
                "a process of the node lost its port {port}"
            );
        }
    }

    /// Of the life that the flow began with.
    fn kind_of_backend(&self, flow: &Flow<A>) -> u32 {
        let word = self.tables.states[&flow.backend_id];
        if backend_state::same_life(word, flow.backend_state) {
            backend_state::kind(word)
        } else {
            backend_state::ABSENT
        }
    }

    /// Named invariant: no translation without its reverse, exactly.
    fn has_its_reverse(&self, packet: &Packet<A>, decision: &Decision<A>, flow: &Flow<A>) {
        let mut tables = self.tables.clone();
        let back = self.answer_to(&mut tables, decision, packet.protocol, tcp::ACK);
        let translation = if flow.flags & FLOW_PLAIN == 0 {
            Translation::Reply
        } else {
            Translation::None
        };
        assert_eq!(back.translation, translation, "{flow:?}");
        assert_eq!(
            (back.source, back.source_port),
            (packet.destination, packet.destination_port)
        );
        assert_eq!(
            (back.destination, back.destination_port),
            (packet.source, packet.source_port)
        );
    }

    /// The answer comes in where the backend is.
    fn answer_to(
        &self,
        tables: &mut Collections<A>,
        told: &Decision<A>,
        protocol: u8,
        flags: u8,
    ) -> Decision<A> {
        let back = answer(told, protocol, flags);
        let local = (1..=LOCAL_PODS).find(|pod| A::pod(*pod) == back.source);
        match local {
            Some(pod) => from_pod(tables, &A::link(pod), &back),
            None => from_network(tables, &back),
        }
    }

    fn answer(&mut self, sent: Sent) {
        let key = Self::packet(sent).key();
        let Some(told) = self.told.get(&key).copied() else {
            return;
        };
        let before = self.tables.clone();
        let mut tables = self.tables.clone();
        let back = self.answer_to(&mut tables, &told, sent.protocol, sent.flags | tcp::ACK);
        self.tables = tables;
        let tuple = answer(&told, sent.protocol, 0).key();
        self.keeps_conversations(&before, Some(&tuple));
        let alive = before
            .flows
            .get(&key)
            .is_some_and(|flow| flow.reply_key() == tuple);
        if alive && back.action != Action::Drop {
            assert_eq!(
                (back.destination, back.destination_port),
                (key.source, key.source_port)
            );
        }
    }

    fn collect(&mut self, pressure: bool) {
        let before = self.tables.clone();
        let now_s = self.tables.now_s;
        let mut store = Plainly(&mut self.tables);
        for key in before.flows.keys() {
            let Ok(_) = collect_flow(&mut store, key, now_s, pressure);
        }
        for (key, owner) in &before.replies {
            let Ok(_) = collect_reply(&mut store, key, owner);
        }
        for (key, flow) in &before.flows {
            let state = before.states.get(&flow.backend_id).copied().unwrap_or(0);
            let over = flow.is_over(state, now_s, pressure);
            assert_ne!(self.tables.flows.contains_key(key), over, "{flow:?}");
        }
    }

    /// Named invariant: no half pairs, and no two flows that look the same to the other end.
    fn no_half_pairs(&self) {
        assert!(self.tables.flows.len() <= self.tables.room);
        assert_eq!(self.tables.flows.len(), self.tables.replies.len());
        for (key, flow) in &self.tables.flows {
            assert_eq!(self.tables.replies.get(&flow.reply_key()), Some(key));
        }
    }
}

fn run<A: TestFamily>(seed: u64, room: usize, history: Vec<Step>) {
    let mut model = Model::<A>::new(seed, room);
    for step in history {
        model.step(step);
        model.no_half_pairs();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn ipv4_paths(seed in any::<u64>(), room in 1usize..40, history in prop::collection::vec(step(), 1..100)) {
        run::<V4>(seed, room, history);
    }

    #[test]
    fn ipv6_paths(seed in any::<u64>(), room in 1usize..40, history in prop::collection::vec(step(), 1..100)) {
        run::<V6>(seed, room, history);
    }

    /// Each tier names each of its ports once, wherever the NodePort range lies.
    #[test]
    fn every_port_has_one_place(first in any::<u16>(), size in 0u16..4_000) {
        let last = first.saturating_add(size);
        let ports = Ports::without(first, last);
        let mut seen = vec![false; 65_536];
        for tier in [Tier::Preferred, Tier::Shared] {
            for number in 0..ports.blocks(tier) {
                let block = ports.block(tier, number);
                for port in block..block + BLOCK {
                    let place = usize::try_from(port).unwrap();
                    prop_assert!(!std::mem::replace(&mut seen[place], true));
                    prop_assert!(port >= 1_024 && !(first..=last).contains(&u16::try_from(port).unwrap()));
                    let shared = (32_768..61_000).contains(&port);
                    prop_assert_eq!(shared, tier == Tier::Shared);
                }
            }
        }
        // Whole blocks are left out where the range begins and ends.
        let wanted = (1_024..=u16::MAX).filter(|port| !(first..=last).contains(port)).count();
        let got = seen.iter().filter(|seen| **seen).count();
        prop_assert!(got <= wanted && got + 2 * 3 >= wanted);
    }
}

/// Sends a SYN from a client's port to an outside machine.
fn reach_out(model: &mut Model<V4>, client: u8, port: u16) -> Decision<V4> {
    let packet = Packet {
        source_port: Port::new(port),
        ..Model::<V4>::packet(Sent {
            client: Client::Pod(client),
            port: 1,
            target: Target::Outside(1),
            protocol: TCP,
            flags: tcp::SYN,
        })
    };
    from_pod(&mut model.tables, &V4::link(client), &packet)
}

#[test]
fn more_than_sixty_thousand_flows_reach_one_destination() {
    let mut model = Model::<V4>::new(3, 100_000);
    let all = 65_536 - 1_024 - 2_768;
    let mut preferred = 0;
    for number in 0..all {
        let client = u8::try_from(1 + number % 4).unwrap();
        let sent = reach_out(&mut model, client, u16::try_from(number / 4 + 1).unwrap());
        assert_eq!(sent.translation, Translation::Forward, "flow {number}");
        let port = sent.source_port.number();
        if number < 33_512 {
            preferred += u32::from(!(32_768..61_000).contains(&port));
        }
    }
    assert_eq!(preferred, 33_512, "the node's own range comes last");
    assert_eq!(model.tables.replies.len(), usize::try_from(all).unwrap());
    let one_more = reach_out(&mut model, 1, 60_000);
    assert_eq!(
        one_more.reason,
        crate::reason::DropReason::SourcePortsExhausted
    );
    model.no_half_pairs();
}

/// A late answer opens a flow of the backend's own. What the client asks next from its port is answered as the service.
#[test]
fn a_late_answer_does_not_capture_the_next_question() {
    let ask = Sent {
        client: Client::Pod(2),
        port: 1,
        target: Target::Service(1),
        protocol: UDP,
        flags: 0,
    };
    for conversation in [false, true] {
        let mut model = Model::<V4>::new(3, 100);
        model.serve(1, UDP, &[(1, false)]);
        let late = Packet {
            source: V4::pod(1),
            destination: V4::pod(2),
            source_port: Port::new(8_080),
            destination_port: Port::new(1),
            ..Model::<V4>::packet(ask)
        };
        from_pod(&mut model.tables, &V4::link(1), &late);
        if conversation {
            let direct = Sent {
                target: Target::Pod(1),
                ..ask
            };
            from_pod(
                &mut model.tables,
                &V4::link(2),
                &Model::<V4>::packet(direct),
            );
        }
        model.send(ask);
        model.no_half_pairs();
        let flow = model.tables.flows[&Model::<V4>::packet(ask).key()];
        assert_eq!(flow.source_port != Port::new(1), conversation);
    }
}

/// A flood of half-open connections displaces itself: established flows stay, and each new client gets its place.
#[test]
fn a_flood_displaces_only_itself() {
    let mut model = Model::<V4>::new(3, 2_000);
    let mut established = Vec::new();
    for port in 1..1_001 {
        let sent = reach_out(&mut model, 1, port);
        from_network(&mut model.tables, &answer(&sent, TCP, tcp::SYN | tcp::ACK));
        let mut ack = Model::<V4>::packet(Sent {
            client: Client::Pod(1),
            port,
            target: Target::Outside(1),
            protocol: TCP,
            flags: tcp::ACK,
        });
        ack.tcp_flags = tcp::ACK;
        from_pod(&mut model.tables, &V4::link(1), &ack);
        established.push(ack.key());
    }
    let mut refused = 0;
    for number in 0..60_000u16 {
        let sent = reach_out(&mut model, 2, 1 + number);
        refused += u32::from(sent.action == Action::Drop);
        if number % 1_000 == 0 {
            let legitimate = reach_out(&mut model, 3, 1 + number);
            assert_eq!(legitimate.translation, Translation::Forward);
            let back = from_network(
                &mut model.tables,
                &answer(&legitimate, TCP, tcp::SYN | tcp::ACK),
            );
            assert_eq!(back.translation, Translation::Reply);
        }
    }
    assert!(refused < 600, "{refused} of 60,000 found no place");
    for key in established {
        assert!(model.tables.flows[&key].is_established());
    }
    model.no_half_pairs();
}
