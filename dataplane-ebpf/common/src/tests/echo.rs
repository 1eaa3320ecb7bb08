//! Echo through masquerade: the identifier stands for a port, and whoever asks gets its own answers.

use std::collections::HashMap;

use proptest::prelude::*;

use super::tables::{Collections, LOCAL_PODS, TestFamily, from_network, from_pod};
use crate::icmp::Messages;
use crate::layout::NODE_MASQUERADE;
use crate::packet::{Action, Packet, Translation, WITH_PORTS};
use crate::{Port, V4, V6};

/// Hosts outside are numbered like services: nobody in the cluster has these addresses.
fn request<A: TestFamily + Messages>(pod: u8, host: u8, identifier: u16) -> Packet<A> {
    Packet {
        source: A::pod(pod),
        destination: A::service(host),
        source_port: Port::new(identifier),
        protocol: A::PROTOCOL,
        flags: WITH_PORTS,
        ..Packet::default()
    }
}

/// Asks and answers in any order; the model remembers who asked what.
fn check<A: TestFamily + Messages>(
    seed: u64,
    asked: &[(u8, u8, u16)],
) -> Result<(), TestCaseError> {
    let mut tables = Collections::<A>::new(seed, 1_000);
    tables.node.flags |= NODE_MASQUERADE;
    let mut outside: HashMap<(A, Port), (u8, u16)> = HashMap::new();
    for (pod, host, identifier) in asked {
        let sent = from_pod(
            &mut tables,
            &A::link(*pod),
            &request(*pod, *host, *identifier),
        );
        prop_assert_eq!(
            (sent.action, sent.translation),
            (Action::Network, Translation::Forward)
        );
        prop_assert_eq!(
            (sent.source, sent.destination),
            (A::node(), A::service(*host))
        );
        prop_assert_eq!(
            sent.destination_port,
            Port(0),
            "a request has one identifier"
        );
        let owner = outside
            .entry((sent.destination, sent.source_port))
            .or_insert((*pod, *identifier));
        prop_assert_eq!(
            *owner,
            (*pod, *identifier),
            "two clients under one identifier"
        );

        let reply = Packet {
            source: sent.destination,
            destination: sent.source,
            destination_port: sent.source_port,
            protocol: A::PROTOCOL,
            flags: WITH_PORTS,
            ..Packet::default()
        };
        let back = from_network(&mut tables, &reply);
        prop_assert_eq!(
            (back.action, back.translation),
            (Action::Pod, Translation::Reply)
        );
        prop_assert_eq!(
            (back.source, back.destination),
            (A::service(*host), A::pod(*pod))
        );
        prop_assert_eq!(
            (back.source_port, back.destination_port),
            (Port(0), Port::new(*identifier))
        );
    }
    Ok(())
}

proptest! {
    #[test]
    fn every_client_gets_its_own_replies(
        seed in any::<u64>(),
        asked in prop::collection::vec((1..=LOCAL_PODS, 100u8..103, 1u16..4), 1..60),
    ) {
        check::<V4>(seed, &asked)?;
        check::<V6>(seed, &asked)?;
    }
}

#[test]
fn echo_inside_the_cluster_is_nobodys_flow() {
    fn check<A: TestFamily + Messages>() {
        let mut tables = Collections::<A>::new(1, 16);
        tables.node.flags |= NODE_MASQUERADE;
        let to = |destination| Packet {
            destination,
            ..request::<A>(1, 100, 7)
        };
        let near = from_pod(&mut tables, &A::link(1), &to(A::pod(2)));
        assert_eq!(
            (near.action, near.translation),
            (Action::Pod, Translation::None)
        );
        let node = from_pod(&mut tables, &A::link(1), &to(A::node()));
        assert_eq!(
            (node.action, node.translation),
            (Action::Stack, Translation::None)
        );
        assert!(tables.flows.is_empty());
    }
    check::<V4>();
    check::<V6>();
}
