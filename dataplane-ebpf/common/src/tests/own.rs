//! Processes of the node that use a port at which a pod is served.

use super::tables::{Collections, TestFamily, from_network};
use crate::address::UDP;
use crate::layout::{FrontendKey, SCOPE_ALL};
use crate::packet::{Action, Packet, Translation, WITH_PORTS};
use crate::path::{self, Hook, Scratch};
use crate::{Port, V4, V6};

const PORT: u16 = 5_353;

fn datagram<A: TestFamily>(source: (A, u16), destination: (A, u16)) -> Packet<A> {
    Packet {
        source: source.0,
        destination: destination.0,
        source_port: Port::new(source.1),
        destination_port: Port::new(destination.1),
        protocol: UDP,
        flags: WITH_PORTS,
        ..Packet::default()
    }
}

/// A node whose port leads to its first pod.
fn node<A: TestFamily>() -> Collections<A> {
    let mut tables = Collections::<A>::new(3, 100);
    tables.serve(1, UDP, &[(1, false)]);
    let (_, frontend) = tables.frontends.drain().next().expect("the service's");
    let key = FrontendKey {
        address: A::node(),
        port: Port::new(PORT),
        protocol: UDP,
        scope: SCOPE_ALL,
    };
    tables.frontends.insert(key, frontend);
    tables
}

fn send<A: TestFamily>(tables: &mut Collections<A>, packet: &Packet<A>) {
    let mut sent = path::to_network(tables, packet);
    if sent.action == Action::Open {
        sent = path::open(tables, Hook::Stack, packet, &mut Scratch::default());
    }
    assert_eq!(sent.action, Action::Stack, "it goes its way");
    assert_eq!(sent.translation, Translation::None);
}

fn answers_are_the_processs<A: TestFamily>() {
    let mut tables = node::<A>();
    let (server, stranger) = (A::pod(201), A::pod(202));
    let asked = datagram((A::node(), PORT), (server, 53));
    let answer = datagram((server, 53), (A::node(), PORT));
    send(&mut tables, &asked);
    let taken = from_network(&mut tables, &answer);
    assert_eq!(taken.action, Action::Stack);
    assert_eq!(taken.translation, Translation::None);
    // Further questions keep the conversation alive, and use the same record.
    tables.now_s += 20;
    send(&mut tables, &asked);
    assert_eq!((tables.flows.len(), tables.replies.len()), (1, 1));
    // Everybody else is a client of the pod.
    let client = datagram((stranger, 53), (A::node(), PORT));
    let served = from_network(&mut tables, &client);
    assert_eq!(served.translation, Translation::Forward);
    assert_eq!(served.destination, A::pod(1));
    // So is that server once the conversation is over.
    tables.now_s += 1_000;
    tables.collect();
    let served = from_network(&mut tables, &answer);
    assert_eq!(served.translation, Translation::Forward);
}

#[test]
fn answers_to_a_process_of_the_node_are_not_clients_of_a_pod() {
    answers_are_the_processs::<V4>();
    answers_are_the_processs::<V6>();
}

/// Nothing is recorded for processes that use other ports.
#[test]
fn other_processes_leave_no_record() {
    let mut tables = node::<V4>();
    send(
        &mut tables,
        &datagram((V4::node(), PORT + 1), (V4::pod(201), 53)),
    );
    assert!(tables.flows.is_empty());
}
