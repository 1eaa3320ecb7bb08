//! Random histories of packets, changes, time and full tables, against a model that remembers what each client was
//! told and nothing else.

use std::collections::{BTreeMap, HashMap};

use proptest::prelude::*;

use super::tables::{Collections, LOCAL_PODS, TestFamily, from_network, from_pod};
use crate::address::{SCTP, TCP, UDP};
use crate::layout::{FLOW_SERVICE, FlowKey, backend_state};
use crate::packet::{Action, Decision, Packet, Translation, WITH_PORTS, tcp};
use crate::reason::DropReason;
use crate::{Port, V4, V6};

/// One event of a history. Numbers are small, so that everything collides often.
#[derive(Clone, Debug)]
enum Step {
    Send {
        client: u8,
        port: u16,
        service: u8,
        protocol: u8,
        flags: u8,
    },
    /// The answer to the last packet of this client's flow, if there is one.
    Answer {
        client: u8,
        port: u16,
        service: u8,
        protocol: u8,
        flags: u8,
    },
    Serve {
        service: u8,
        protocol: u8,
        pods: BTreeMap<u8, bool>,
    },
    End {
        service: u8,
        protocol: u8,
    },
    Pass {
        seconds: u32,
    },
    Collect,
}

fn step() -> impl Strategy<Value = Step> {
    let protocol = prop_oneof![Just(TCP), Just(UDP), Just(SCTP)];
    let flags = prop_oneof![
        Just(tcp::SYN),
        Just(tcp::ACK),
        Just(tcp::FIN | tcp::ACK),
        Just(tcp::RST | tcp::ACK),
    ];
    let seconds = prop_oneof![
        Just(0u32),
        Just(1),
        Just(9),
        Just(31),
        Just(181),
        Just(901),
        Just(7_501)
    ];
    let who = (1..=LOCAL_PODS, 1u16..4, 1u8..4, protocol.clone(), flags);
    prop_oneof![
        8 => who.clone().prop_map(|(client, port, service, protocol, flags)| Step::Send {
            client, port, service, protocol, flags
        }),
        6 => who.prop_map(|(client, port, service, protocol, flags)| Step::Answer {
            client, port, service, protocol, flags
        }),
        3 => (1u8..4, protocol.clone(), prop::collection::btree_map(1u8..8, any::<bool>(), 0..4))
            .prop_map(|(service, protocol, pods)| Step::Serve { service, protocol, pods }),
        1 => (1u8..4, protocol).prop_map(|(service, protocol)| Step::End { service, protocol }),
        2 => seconds.prop_map(|seconds| Step::Pass { seconds }),
        1 => Just(Step::Collect),
    ]
}

/// What the model knows of a client's tuple: where its last packet went.
#[derive(Clone, Copy, Debug)]
struct Told<A> {
    sent: Decision<A>,
    backend_id: u32,
    backend_word: u32,
}

struct Model<A> {
    tables: Collections<A>,
    told: HashMap<FlowKey<A>, Told<A>>,
}

pub(super) fn packet<A: TestFamily>(
    client: u8,
    port: u16,
    service: u8,
    protocol: u8,
    flags: u8,
) -> Packet<A> {
    Packet {
        source: A::pod(client),
        destination: A::service(service),
        source_port: Port::new(port),
        destination_port: Port::new(80),
        protocol,
        tcp_flags: if protocol == UDP { 0 } else { flags },
        flags: WITH_PORTS,
        identification: 0,
    }
}

pub(super) fn answer<A: TestFamily>(to: &Decision<A>, protocol: u8, flags: u8) -> Packet<A> {
    Packet {
        source: to.destination,
        destination: to.source,
        source_port: to.destination_port,
        destination_port: to.source_port,
        protocol,
        tcp_flags: if protocol == UDP { 0 } else { flags },
        flags: WITH_PORTS,
        identification: 0,
    }
}

impl<A: TestFamily> Model<A> {
    fn run(seed: u64, room: usize, history: &[Step]) {
        let mut model = Self {
            tables: Collections::new(seed, room),
            told: HashMap::new(),
        };
        for step in history {
            model.step(step);
            model.no_half_pairs();
        }
    }

    fn step(&mut self, step: &Step) {
        match step.clone() {
            Step::Send {
                client,
                port,
                service,
                protocol,
                flags,
            } => {
                self.send(client, &packet(client, port, service, protocol, flags));
            }
            Step::Answer {
                client,
                port,
                service,
                protocol,
                flags,
            } => {
                let key = packet::<A>(client, port, service, protocol, flags).key();
                if let Some(told) = self.told.get(&key).copied() {
                    self.answer(&key, &told, protocol, flags | tcp::ACK);
                }
            }
            Step::Serve {
                service,
                protocol,
                pods,
            } => {
                let pods: Vec<_> = pods.into_iter().collect();
                self.tables.serve(service, protocol, &pods);
            }
            Step::End { service, protocol } => self.tables.end(service, protocol),
            Step::Pass { seconds } => self.tables.now_s += seconds,
            Step::Collect => self.tables.collect(),
        }
    }

    fn send(&mut self, client: u8, packet: &Packet<A>) {
        let key = packet.key();
        let flow_before = self.tables.flows.get(&key).copied();
        let flows_before = self.tables.flows.len();
        let decision = from_pod(&mut self.tables, &A::link(client), packet);
        match decision.translation {
            Translation::Forward => {
                let flow = self.tables.flows[&key];
                self.goes_to_a_living_backend(packet, &decision);
                let told = Told {
                    sent: decision,
                    backend_id: flow.backend_id,
                    backend_word: flow.backend_state,
                };
                if let (Some(before), Some(last)) = (flow_before, self.told.get(&key)) {
                    self.stays_where_it_was(packet, &before, last, &decision);
                }
                self.told.insert(key, told);
                self.has_its_reverse(packet, &decision);
            }
            Translation::Reply => panic!("a client's packet was taken for an answer: {packet:?}"),
            Translation::None => self.went_nowhere(packet, &decision, flows_before),
        }
    }

    /// Named invariant: no packet to a removed backend, and nothing new to a draining one.
    fn goes_to_a_living_backend(&self, packet: &Packet<A>, decision: &Decision<A>) {
        let flow = self.tables.flows[&packet.key()];
        if packet.is_connected() && !packet.opens() {
            // Connections go on, whatever became of their service: nothing here says that the backend has gone.
            return;
        }
        let backend = self
            .tables
            .backends
            .get(&flow.backend_id)
            .expect("a packet to a removed backend");
        assert_eq!(
            (backend.address, backend.port),
            (decision.destination, decision.destination_port)
        );
        let word = self.tables.states[&flow.backend_id];
        assert!(backend_state::same_life(word, flow.backend_state));
        assert!(
            backend_state::kind(word) == backend_state::ACTIVE || !packet.opens(),
            "nothing new goes to a draining backend"
        );
    }

    /// Named invariant: a flow that may go on does not move.
    fn stays_where_it_was(
        &self,
        packet: &Packet<A>,
        before: &crate::layout::Flow<A>,
        last: &Told<A>,
        now: &Decision<A>,
    ) {
        let word = self
            .tables
            .states
            .get(&last.backend_id)
            .copied()
            .unwrap_or(0);
        let alive = backend_state::same_life(word, last.backend_word)
            && backend_state::kind(word) == backend_state::ACTIVE;
        let may_end = packet.opens() && before.is_closing();
        if alive && !may_end && !before.is_expired(self.tables.now_s, false) {
            assert_eq!(
                (
                    last.sent.destination,
                    last.sent.source,
                    last.sent.source_port
                ),
                (now.destination, now.source, now.source_port),
                "a live flow moved"
            );
        }
    }

    /// Named invariant: no translation without its reverse, exactly.
    fn has_its_reverse(&self, packet: &Packet<A>, decision: &Decision<A>) {
        let mut tables = self.tables.clone();
        let back = answer(decision, packet.protocol, tcp::ACK);
        let back = from_network(&mut tables, &back);
        assert_eq!(back.translation, Translation::Reply);
        assert_eq!(
            (back.source, back.source_port),
            (packet.destination, packet.destination_port)
        );
        assert_eq!(
            (back.destination, back.destination_port),
            (packet.source, packet.source_port)
        );
        assert_eq!(
            back.action,
            Action::Pod,
            "the answer goes straight to the client"
        );
    }

    /// A packet that was not translated: dropped for a reason that is true, or for no service at all.
    fn went_nowhere(&self, packet: &Packet<A>, decision: &Decision<A>, flows_before: usize) {
        let key = (packet.destination, packet.protocol);
        let frontend = self
            .tables
            .frontends
            .iter()
            .find(|(frontend, _)| (frontend.address, frontend.protocol) == key)
            .map(|(_, frontend)| *frontend);
        match (decision.action, decision.reason) {
            (Action::Network, DropReason::None) => {
                let connected = packet.is_connected() && !packet.opens();
                let flow = self.tables.flows.get(&packet.key());
                assert!(
                    frontend.is_none() || (connected && flow.is_some()),
                    "a service was passed by"
                );
                assert!(
                    flow.is_none_or(|flow| flow.flags & FLOW_SERVICE == 0),
                    "a flow outlived its service"
                );
            }
            (Action::Drop, DropReason::NoBackend) => {
                assert_eq!(frontend.expect("the service exists").backends, 0);
            }
            (Action::Drop, DropReason::FlowTableFull) => {
                assert!(self.tables.flows.len() >= self.tables.room.min(flows_before));
            }
            (Action::Drop, DropReason::SourcePortsExhausted) => {
                assert!(
                    self.tables.replies.len() > 1,
                    "ports are exhausted only where many are taken"
                );
            }
            other => panic!("{packet:?} ended as {other:?}"),
        }
    }

    fn answer(&mut self, key: &FlowKey<A>, told: &Told<A>, protocol: u8, flags: u8) {
        let back = answer(&told.sent, protocol, flags);
        let alive = self
            .tables
            .flows
            .get(key)
            .is_some_and(|flow| flow.reply_key() == back.key());
        let decision = from_network(&mut self.tables, &back);
        if alive {
            assert_eq!(decision.translation, Translation::Reply);
            assert_eq!(
                (decision.source, decision.destination),
                (key.destination, key.source)
            );
        } else if decision.translation == Translation::Reply {
            // The tuple belongs to another flow by now: its client gets it, nobody else.
            let owner = self.tables.replies[&back.key()];
            assert_eq!(
                (decision.destination, decision.destination_port),
                (owner.source, owner.source_port)
            );
        }
    }

    /// Named invariant: no half pairs. Every record has its reply entry, and every reply entry its record.
    fn no_half_pairs(&self) {
        assert!(self.tables.flows.len() <= self.tables.room);
        assert_eq!(self.tables.flows.len(), self.tables.replies.len());
        for (key, flow) in &self.tables.flows {
            assert_eq!(
                self.tables.replies.get(&flow.reply_key()),
                Some(key),
                "half a pair: {key:?}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn ipv4_histories(seed in any::<u64>(), room in 1usize..40, history in prop::collection::vec(step(), 1..120)) {
        Model::<V4>::run(seed, room, &history);
    }

    #[test]
    fn ipv6_histories(seed in any::<u64>(), room in 1usize..40, history in prop::collection::vec(step(), 1..120)) {
        Model::<V6>::run(seed, room, &history);
    }
}

/// A record whose reply entry was lost completes itself with the next second's first packet, and a reply entry whose
/// record was lost is removed by the packet that finds it.
#[test]
fn halves_heal() {
    let mut tables = Collections::<V4>::new(7, 16);
    tables.serve(1, TCP, &[(5, false)]);
    let request = packet::<V4>(1, 1, 1, TCP, tcp::SYN);
    let sent = from_pod(&mut tables, &V4::link(1), &request);
    tables.replies.clear();
    tables.now_s += 1;
    from_pod(&mut tables, &V4::link(1), &request);
    assert_eq!(tables.replies.len(), 1);

    tables.flows.clear();
    let back = from_network(&mut tables, &answer(&sent, TCP, tcp::ACK));
    assert_eq!(back.translation, Translation::None);
    assert!(tables.replies.is_empty());
}

/// A flood of half-open connections ends before the connections that are established.
#[test]
fn pressure_hurries_half_open_flows_only() {
    let mut tables = Collections::<V4>::new(7, 16);
    tables.serve(1, TCP, &[(5, false)]);
    let open = packet::<V4>(1, 1, 1, TCP, tcp::SYN);
    let sent = from_pod(&mut tables, &V4::link(1), &open);
    let half_open = tables.flows[&open.key()];
    from_network(&mut tables, &answer(&sent, TCP, tcp::SYN | tcp::ACK));
    from_pod(
        &mut tables,
        &V4::link(1),
        &packet::<V4>(1, 1, 1, TCP, tcp::ACK),
    );
    let established = tables.flows[&open.key()];
    assert!(established.is_established());
    assert!(
        half_open.is_expired(tables.now_s + 4, true)
            && !half_open.is_expired(tables.now_s + 4, false)
    );
    assert!(!established.is_expired(tables.now_s + 7_000, true));
}

/// A client stays with its backend while that may be used and its time is not over; others choose freely.
#[test]
fn affinity_holds_until_its_time_or_its_backend_ends() {
    let mut tables = Collections::<V4>::new(7, 64);
    let pods: Vec<_> = (5..=8).map(|pod| (pod, false)).collect();
    tables.serve(1, TCP, &pods);
    for frontend in tables.frontends.values_mut() {
        frontend.affinity_s = 100;
    }
    let open = |tables: &mut Collections<V4>, client, port| {
        from_pod(
            tables,
            &V4::link(client),
            &packet::<V4>(client, port, 1, TCP, tcp::SYN),
        )
        .destination
    };
    let first = open(&mut tables, 1, 1);
    for port in 2..20 {
        tables.now_s += 90;
        assert_eq!(
            open(&mut tables, 1, port),
            first,
            "each new connection renews it"
        );
    }
    let others: std::collections::HashSet<_> = (1..20)
        .map(|port| open(&mut tables, 2 + (port % 2) as u8, port))
        .collect();
    assert!(others.len() <= 2, "one backend for each client");
    tables.now_s += 101;
    let later: std::collections::HashSet<_> = (20..40)
        .map(|port| {
            tables.now_s += 101;
            open(&mut tables, 1, port)
        })
        .collect();
    assert!(later.len() > 1, "after its time the client chooses again");
    let kept = open(&mut tables, 1, 50);
    let left: Vec<_> = pods
        .iter()
        .copied()
        .filter(|(pod, _)| V4::pod(*pod) != kept)
        .collect();
    tables.serve(1, TCP, &left);
    for frontend in tables.frontends.values_mut() {
        frontend.affinity_s = 100;
    }
    assert_ne!(
        open(&mut tables, 1, 51),
        kept,
        "a backend that went gives way"
    );
}

/// A backend that drains keeps a client's datagrams and connections, and gets no new connection; one that has left keeps
/// connections only.
#[test]
fn draining_backends_keep_what_they_have() {
    let mut tables = Collections::<V4>::new(7, 64);
    let to = |tables: &mut Collections<V4>, protocol, port, flags| {
        let packet = packet::<V4>(1, port, 1, protocol, flags);
        from_pod(tables, &V4::link(1), &packet).destination
    };
    for protocol in [TCP, UDP] {
        tables.serve(1, protocol, &[(5, false)]);
        assert_eq!(to(&mut tables, protocol, 1, tcp::SYN), V4::pod(5));
        tables.serve(1, protocol, &[(5, true), (6, false)]);
        assert_eq!(to(&mut tables, protocol, 1, tcp::ACK), V4::pod(5));
        assert_eq!(to(&mut tables, protocol, 2, tcp::SYN), V4::pod(6));
    }
    assert_eq!(to(&mut tables, TCP, 1, tcp::SYN), V4::pod(6), "asked again");
    tables.serve(1, TCP, &[(5, false)]);
    assert_eq!(to(&mut tables, TCP, 3, tcp::SYN), V4::pod(5));
    for protocol in [TCP, UDP] {
        tables.serve(1, protocol, &[(6, false)]);
    }
    assert_eq!(to(&mut tables, TCP, 3, tcp::ACK), V4::pod(5));
    assert_eq!(to(&mut tables, UDP, 1, 0), V4::pod(6));
}

/// The node's own connection from a port that a service has at the node's address: its answers are not clients.
#[test]
fn answers_to_the_nodes_own_connections_reach_its_stack() {
    let mut tables = Collections::<V4>::new(7, 16);
    tables.serve(1, TCP, &[(5, false)]);
    let (mut key, frontend) = tables
        .frontends
        .iter()
        .map(|(k, f)| (*k, *f))
        .next()
        .unwrap();
    key.address = V4::node();
    tables.frontends.insert(key, frontend);
    let mut answer = packet::<V4>(1, 443, 1, TCP, tcp::SYN | tcp::ACK);
    (answer.source, answer.destination) = (V4::new([198, 51, 100, 7]), V4::node());
    let decision = from_network(&mut tables, &answer);
    assert_eq!(
        (decision.action, decision.translation),
        (Action::Stack, Translation::None)
    );
    answer.tcp_flags = tcp::SYN;
    let decision = from_network(&mut tables, &answer);
    assert_eq!(decision.destination, V4::pod(5), "a client's first segment");
}
