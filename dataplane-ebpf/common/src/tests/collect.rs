//! The collector among packets: what it read is old when it judges, and the same packets must go on as if it were not
//! there.

use std::collections::VecDeque;
use std::convert::Infallible;

use proptest::prelude::*;

use super::histories::{answer, packet};
use super::tables::{Collections, LOCAL_PODS, TestFamily, from_network, from_pod};
use crate::address::{TCP, UDP};
use crate::collect::{Outcome, Store, collect_affinity, collect_flow, collect_reply};
use crate::flow::timeout;
use crate::layout::{Affinity, AffinityKey, Flow, FlowKey};
use crate::packet::{Decision, Translation, tcp};
use crate::{V4, V6};

/// What happens between the two looks of one removal, at most once each.
type Between<A> = VecDeque<Box<dyn FnOnce(&mut Collections<A>)>>;

/// The store of user space over the collections.
pub(super) struct Plainly<'a, A>(pub(super) &'a mut Collections<A>);

/// The same with packets between its calls.
struct Busy<'a, A> {
    tables: &'a mut Collections<A>,
    before_take: Between<A>,
}

impl<A: TestFamily> Busy<'_, A> {
    fn interrupt(&mut self) {
        if let Some(event) = self.before_take.pop_front() {
            event(self.tables);
        }
    }
}

impl<A: TestFamily> Store<A> for Plainly<'_, A> {
    type Error = Infallible;

    fn backend_state(&mut self, id: u32) -> Result<u32, Infallible> {
        Ok(self.0.states.get(&id).copied().unwrap_or(0))
    }
    fn flow(&mut self, key: &FlowKey<A>) -> Result<Option<Flow<A>>, Infallible> {
        Ok(self.0.flows.get(key).copied())
    }
    fn take_flow(&mut self, key: &FlowKey<A>) -> Result<Option<Flow<A>>, Infallible> {
        Ok(self.0.flows.remove(key))
    }
    fn put_back_flow(&mut self, key: &FlowKey<A>, flow: &Flow<A>) -> Result<(), Infallible> {
        self.0.flows.entry(*key).or_insert(*flow);
        Ok(())
    }
    fn reply(&mut self, key: &FlowKey<A>) -> Result<Option<FlowKey<A>>, Infallible> {
        Ok(self.0.replies.get(key).copied())
    }
    fn take_reply(&mut self, key: &FlowKey<A>) -> Result<Option<FlowKey<A>>, Infallible> {
        Ok(self.0.replies.remove(key))
    }
    fn put_back_reply(&mut self, key: &FlowKey<A>, owner: &FlowKey<A>) -> Result<(), Infallible> {
        self.0.replies.entry(*key).or_insert(*owner);
        Ok(())
    }
    fn affinity(&mut self, key: &AffinityKey<A>) -> Result<Option<Affinity>, Infallible> {
        Ok(self.0.affinities.get(key).copied())
    }
    fn take_affinity(&mut self, key: &AffinityKey<A>) -> Result<Option<Affinity>, Infallible> {
        Ok(self.0.affinities.remove(key))
    }
    fn put_back_affinity(
        &mut self,
        key: &AffinityKey<A>,
        affinity: &Affinity,
    ) -> Result<(), Infallible> {
        self.0.affinities.entry(*key).or_insert(*affinity);
        Ok(())
    }
}

impl<A: TestFamily> Store<A> for Busy<'_, A> {
    type Error = Infallible;

    fn backend_state(&mut self, id: u32) -> Result<u32, Infallible> {
        Plainly(self.tables).backend_state(id)
    }
    fn flow(&mut self, key: &FlowKey<A>) -> Result<Option<Flow<A>>, Infallible> {
        Plainly(self.tables).flow(key)
    }
    fn take_flow(&mut self, key: &FlowKey<A>) -> Result<Option<Flow<A>>, Infallible> {
        self.interrupt();
        Plainly(self.tables).take_flow(key)
    }
    fn put_back_flow(&mut self, key: &FlowKey<A>, flow: &Flow<A>) -> Result<(), Infallible> {
        Plainly(self.tables).put_back_flow(key, flow)
    }
    fn reply(&mut self, key: &FlowKey<A>) -> Result<Option<FlowKey<A>>, Infallible> {
        Plainly(self.tables).reply(key)
    }
    fn take_reply(&mut self, key: &FlowKey<A>) -> Result<Option<FlowKey<A>>, Infallible> {
        self.interrupt();
        Plainly(self.tables).take_reply(key)
    }
    fn put_back_reply(&mut self, key: &FlowKey<A>, owner: &FlowKey<A>) -> Result<(), Infallible> {
        Plainly(self.tables).put_back_reply(key, owner)
    }
    fn affinity(&mut self, key: &AffinityKey<A>) -> Result<Option<Affinity>, Infallible> {
        Plainly(self.tables).affinity(key)
    }
    fn take_affinity(&mut self, key: &AffinityKey<A>) -> Result<Option<Affinity>, Infallible> {
        self.interrupt();
        Plainly(self.tables).take_affinity(key)
    }
    fn put_back_affinity(
        &mut self,
        key: &AffinityKey<A>,
        affinity: &Affinity,
    ) -> Result<(), Infallible> {
        Plainly(self.tables).put_back_affinity(key, affinity)
    }
}

/// A client's packet of a flow, by numbers.
#[derive(Clone, Copy, Debug)]
struct Sent {
    client: u8,
    port: u16,
    service: u8,
    protocol: u8,
    flags: u8,
}

#[derive(Clone, Debug)]
enum Step {
    Send(Sent),
    Answer(Sent),
    Serve {
        service: u8,
        protocol: u8,
        pods: Vec<u8>,
    },
    Pass(u32),
    /// The collector reads everything; what it judges from then on is this.
    Read,
    /// It judges some of what it read, and a packet comes in between.
    Judge {
        entries: usize,
        between: Sent,
    },
}

fn sent() -> impl Strategy<Value = Sent> {
    let flags = prop::sample::select(vec![
        tcp::SYN,
        tcp::ACK,
        tcp::ACK,
        tcp::FIN | tcp::ACK,
        tcp::RST | tcp::ACK,
    ]);
    let protocol = prop::sample::select(vec![TCP, UDP]);
    (1..=LOCAL_PODS, 1u16..4, 1u8..3, protocol, flags).prop_map(
        |(client, port, service, protocol, flags)| Sent {
            client,
            port,
            service,
            protocol,
            flags,
        },
    )
}

fn step() -> impl Strategy<Value = Step> {
    let seconds = prop::sample::select(vec![0, 1, 4, 11, 31, 181, 3_601, 86_401]);
    let pods = prop::collection::vec(1u8..8, 0..3);
    prop_oneof![
        6 => sent().prop_map(Step::Send),
        5 => sent().prop_map(Step::Answer),
        1 => (1u8..3, prop::sample::select(vec![TCP, UDP]), pods)
            .prop_map(|(service, protocol, pods)| Step::Serve { service, protocol, pods }),
        2 => seconds.prop_map(Step::Pass),
        2 => Just(Step::Read),
        4 => (0usize..6, sent()).prop_map(|(entries, between)| Step::Judge { entries, between }),
    ]
}

/// What was read and not judged yet.
struct Batch<A> {
    flows: Vec<FlowKey<A>>,
    replies: Vec<(FlowKey<A>, FlowKey<A>)>,
    affinities: Vec<AffinityKey<A>>,
}

fn send<A: TestFamily>(tables: &mut Collections<A>, sent: Sent) -> Decision<A> {
    let packet = packet(
        sent.client,
        sent.port,
        sent.service,
        sent.protocol,
        sent.flags,
    );
    from_pod(tables, &A::link(sent.client), &packet)
}

fn reply<A: TestFamily>(tables: &mut Collections<A>, sent: Sent) {
    let key = packet::<A>(
        sent.client,
        sent.port,
        sent.service,
        sent.protocol,
        sent.flags,
    )
    .key();
    let Some(flow) = tables.flows.get(&key).copied() else {
        return;
    };
    let back = flow.reply_key();
    let packet = crate::packet::Packet {
        source: back.source,
        destination: back.destination,
        source_port: back.source_port,
        destination_port: back.destination_port,
        ..packet::<A>(
            sent.client,
            sent.port,
            sent.service,
            sent.protocol,
            sent.flags | tcp::ACK,
        )
    };
    let decision = from_network(tables, &packet);
    assert_eq!(
        decision.translation,
        Translation::Reply,
        "a live flow lost its answers"
    );
}

/// Named invariants: the collector removes no flow that a packet could use, and no half pairs stay.
fn run<A: TestFamily>(seed: u64, history: Vec<Step>) {
    let mut tables = Collections::<A>::new(seed, 64);
    for frontend in [(1, TCP), (1, UDP), (2, TCP), (2, UDP)] {
        tables.serve(frontend.0, frontend.1, &[(1, false), (5, false)]);
    }
    for frontend in tables.frontends.values_mut() {
        frontend.affinity_s = 100;
    }
    let mut read = Batch {
        flows: Vec::new(),
        replies: Vec::new(),
        affinities: Vec::new(),
    };
    for step in history {
        match step {
            Step::Send(sent) => drop(send(&mut tables, sent)),
            Step::Answer(sent) => reply(&mut tables, sent),
            Step::Serve {
                service,
                protocol,
                pods,
            } => {
                let mut pods: Vec<_> = pods.into_iter().map(|pod| (pod, false)).collect();
                pods.sort_unstable();
                pods.dedup();
                tables.serve(service, protocol, &pods);
            }
            Step::Pass(seconds) => tables.now_s += seconds,
            Step::Read => {
                read = Batch {
                    flows: tables.flows.keys().copied().collect(),
                    replies: tables.replies.iter().map(|(k, v)| (*k, *v)).collect(),
                    affinities: tables.affinities.keys().copied().collect(),
                };
            }
            Step::Judge { entries, between } => {
                for _ in 0..entries {
                    judge(&mut tables, &mut read, between);
                }
            }
        }
        assert_eq!(
            tables.flows.len(),
            tables.replies.len(),
            "a half pair stayed"
        );
        for (key, flow) in &tables.flows {
            assert_eq!(tables.replies.get(&flow.reply_key()), Some(key));
        }
    }
}

fn judge<A: TestFamily>(tables: &mut Collections<A>, read: &mut Batch<A>, between: Sent) {
    let now_s = tables.now_s;
    let before = tables.clone();
    let mut busy = Busy {
        tables,
        before_take: VecDeque::new(),
    };
    busy.before_take.push_back(Box::new(move |tables| {
        send(tables, between);
    }));
    if let Some(key) = read.flows.pop() {
        let Ok(outcome) = collect_flow(&mut busy, &key, now_s, false);
        if outcome == Outcome::Removed {
            let flow = before.flows[&key];
            let state = before.states.get(&flow.backend_id).copied().unwrap_or(0);
            assert!(flow.is_over(state, now_s, false), "a live flow was removed");
            assert!(!tables.flows.contains_key(&key));
        }
    } else if let Some((key, owner)) = read.replies.pop() {
        let Ok(outcome) = collect_reply(&mut busy, &key, &owner);
        assert_ne!(
            outcome,
            Outcome::Removed,
            "packets leave no halves to remove"
        );
    } else if let Some(key) = read.affinities.pop() {
        let Ok(outcome) = collect_affinity(&mut busy, &key, now_s);
        if outcome == Outcome::Removed {
            let affinity = before.affinities[&key];
            let state = before
                .states
                .get(&affinity.backend_id)
                .copied()
                .unwrap_or(0);
            assert!(crate::collect::is_affinity_over(&affinity, state, now_s));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn ipv4_collection_among_packets(seed in any::<u64>(), history in prop::collection::vec(step(), 1..120)) {
        run::<V4>(seed, history);
    }

    #[test]
    fn ipv6_collection_among_packets(seed in any::<u64>(), history in prop::collection::vec(step(), 1..120)) {
        run::<V6>(seed, history);
    }
}

const OPEN: Sent = Sent {
    client: 1,
    port: 1,
    service: 1,
    protocol: TCP,
    flags: tcp::SYN,
};

/// Both sides of a connection through service 1.
fn established(tables: &mut Collections<V4>) -> (FlowKey<V4>, Decision<V4>) {
    tables.serve(1, TCP, &[(5, false)]);
    let sent = send(tables, OPEN);
    let back = answer(&sent, TCP, tcp::SYN | tcp::ACK);
    from_network(tables, &back);
    send(
        tables,
        Sent {
            flags: tcp::ACK,
            ..OPEN
        },
    );
    (packet::<V4>(1, 1, 1, TCP, tcp::SYN).key(), sent)
}

#[test]
fn a_flow_revived_in_the_moment_of_its_removal_stays() {
    let mut tables = Collections::<V4>::new(7, 16);
    let (key, sent) = established(&mut tables);
    tables.now_s += timeout::TCP_ESTABLISHED_S + 1;
    let now_s = tables.now_s;
    let mut busy = Busy {
        tables: &mut tables,
        before_take: VecDeque::new(),
    };
    // The backend's answers revive a flow that has been idle for too long.
    busy.before_take.push_back(Box::new(move |tables| {
        from_network(tables, &answer(&sent, TCP, tcp::ACK));
    }));
    assert_eq!(
        collect_flow(&mut busy, &key, now_s, false),
        Ok(Outcome::Kept)
    );
    assert!(tables.flows.contains_key(&key) && tables.replies.len() == 1);
}

#[test]
fn an_affinity_renewed_in_the_moment_of_its_removal_stays() {
    let mut tables = Collections::<V4>::new(7, 16);
    tables.serve(1, TCP, &[(5, false), (6, false), (7, false)]);
    for frontend in tables.frontends.values_mut() {
        frontend.affinity_s = 10;
    }
    send(&mut tables, OPEN);
    let (key, _) = tables
        .affinities
        .iter()
        .map(|(k, v)| (*k, *v))
        .next()
        .unwrap();
    tables.now_s += 11;
    let now_s = tables.now_s;
    let mut busy = Busy {
        tables: &mut tables,
        before_take: VecDeque::new(),
    };
    busy.before_take.push_back(Box::new(|tables| {
        send(tables, Sent { port: 2, ..OPEN });
    }));
    assert_eq!(collect_affinity(&mut busy, &key, now_s), Ok(Outcome::Kept));
    assert_eq!(tables.affinities[&key].expires_s, now_s + 10);
}

/// A reset outside the window ends nothing: its receiver ignores it and both sides go on.
#[test]
fn a_reset_that_nobody_believed_does_not_end_the_flow() {
    let mut tables = Collections::<V4>::new(7, 16);
    let (key, sent) = established(&mut tables);
    from_network(&mut tables, &answer(&sent, TCP, tcp::RST | tcp::ACK));
    assert!(tables.flows[&key].is_reset() && !tables.flows[&key].is_established());
    // What was on its way when the reset came proves nothing.
    send(
        &mut tables,
        Sent {
            flags: tcp::ACK,
            ..OPEN
        },
    );
    assert!(tables.flows[&key].is_reset());
    tables.now_s += 5;
    send(
        &mut tables,
        Sent {
            flags: tcp::ACK,
            ..OPEN
        },
    );
    assert!(tables.flows[&key].is_reset(), "one side may not know yet");
    from_network(&mut tables, &answer(&sent, TCP, tcp::ACK));
    assert!(tables.flows[&key].is_established());
    tables.now_s += 6 * 3_600;
    assert!(!tables.flows[&key].is_expired(tables.now_s, false));
}

#[test]
fn both_sides_may_open_at_once_and_close_one_after_the_other() {
    let mut tables = Collections::<V4>::new(7, 16);
    tables.serve(1, TCP, &[(5, false)]);
    let sent = send(&mut tables, OPEN);
    let key = packet::<V4>(1, 1, 1, TCP, tcp::SYN).key();
    let back = |tables: &mut Collections<V4>, flags| {
        let decision = from_network(tables, &answer(&sent, TCP, flags));
        assert_eq!(decision.translation, Translation::Reply);
    };
    back(&mut tables, tcp::SYN);
    assert!(tables.flows[&key].is_disposable());
    send(
        &mut tables,
        Sent {
            flags: tcp::SYN | tcp::ACK,
            ..OPEN
        },
    );
    back(&mut tables, tcp::SYN | tcp::ACK);
    assert!(tables.flows[&key].is_established() && !tables.flows[&key].is_disposable());
    send(
        &mut tables,
        Sent {
            flags: tcp::FIN | tcp::ACK,
            ..OPEN
        },
    );
    let half_closed = tables.flows[&key];
    assert!(!half_closed.is_disposable() && !half_closed.is_expired(tables.now_s + 3_600, false));
    assert!(
        !half_closed.is_expired(tables.now_s + 240, true),
        "RFC 5382: 4 minutes"
    );
    back(&mut tables, tcp::FIN | tcp::ACK);
    assert!(tables.flows[&key].is_closed() && tables.flows[&key].is_disposable());
}

/// kubernetes/kubernetes#81775: a client that uses its port again must not wait for what is left of its last connection.
#[test]
fn a_port_used_again_chooses_anew_once_a_side_has_closed() {
    for (client, server) in [
        (tcp::FIN, 0),
        (0, tcp::FIN),
        (tcp::FIN, tcp::FIN),
        (tcp::RST, 0),
    ] {
        let mut tables = Collections::<V4>::new(7, 16);
        let (key, sent) = established(&mut tables);
        send(
            &mut tables,
            Sent {
                flags: tcp::ACK | client,
                ..OPEN
            },
        );
        from_network(&mut tables, &answer(&sent, TCP, tcp::ACK | server));
        tables.serve(1, TCP, &[(5, true), (6, false)]);
        send(
            &mut tables,
            Sent {
                flags: tcp::ACK,
                ..OPEN
            },
        );
        assert_eq!(
            tables.flows[&key].backend,
            V4::pod(5),
            "stray segments use the old flow"
        );
        send(&mut tables, OPEN);
        assert_eq!(tables.flows[&key].backend, V4::pod(6));
    }
}
