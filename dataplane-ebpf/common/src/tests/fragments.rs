//! Fragments in any order, some of them parked, against the datagrams that they were cut from.

use proptest::prelude::*;

use super::tables::{Collections, TestFamily};
use crate::address::UDP;
use crate::fragment::{Extent, LIFE_S, PARK_ALIVE_S, complete, park_mark};
use crate::layout::Park;
use crate::packet::{Action, FRAGMENT, LATER_FRAGMENT, Packet, WITH_PORTS};
use crate::path::{Hook, Scratch, open};
use crate::reason::DropReason;
use crate::{Port, V4, V6};

/// A datagram of a client: its identification, its own source port, and how it is cut.
#[derive(Clone, Debug)]
struct Sent {
    identification: u32,
    port: u16,
    cuts: Vec<u32>,
}

/// A fragment on its way.
#[derive(Clone, Copy, Debug)]
struct Part<A> {
    packet: Packet<A>,
    extent: Extent,
    /// Source port of the datagram that it was cut from.
    owner: u16,
}

fn parts<A: TestFamily>(sent: &Sent) -> Vec<Part<A>> {
    let mut offset = 0;
    let last = sent.cuts.len() - 1;
    let mut parts = Vec::new();
    for (index, bytes) in sent.cuts.iter().enumerate() {
        let mut packet = Packet {
            source: A::pod(1),
            destination: A::service(1),
            protocol: UDP,
            flags: FRAGMENT | LATER_FRAGMENT,
            identification: sent.identification,
            ..Packet::default()
        };
        if index == 0 {
            packet.flags = FRAGMENT | WITH_PORTS;
            packet.source_port = Port::new(sent.port);
            packet.destination_port = Port::new(80);
        }
        let extent = Extent {
            offset,
            bytes: *bytes,
            more: u32::from(index != last),
        };
        offset += bytes;
        parts.push(Part {
            packet,
            extent,
            owner: sent.port,
        });
    }
    parts
}

/// A fragment meets the programs: the port it was given, or none when it has to wait.
fn meet<A: TestFamily>(tables: &mut Collections<A>, part: &Part<A>) -> Option<u16> {
    let mut packet = part.packet;
    complete(tables, Hook::Pod as u32, &mut packet, &part.extent);
    packet.has_ports().then(|| packet.source_port.number())
}

/// Datagrams one after the other under few identifications, each in any order of its parts: every part gets the port of
/// its own datagram, and none waits for ever.
fn check<A: TestFamily>(
    datagrams: &[(Sent, Vec<prop::sample::Index>)],
) -> Result<(), TestCaseError> {
    let mut tables = Collections::<A>::new(3, 16);
    for (sent, order) in datagrams {
        let mut waiting: Vec<Part<A>> = Vec::new();
        let mut coming = parts::<A>(sent);
        for index in order {
            if coming.is_empty() {
                break;
            }
            let part = coming.remove(index.index(coming.len()));
            match meet(&mut tables, &part) {
                Some(port) => prop_assert_eq!(port, part.owner),
                None => waiting.push(part),
            }
            let first_has_passed = tables.datagrams.values().any(|datagram| {
                datagram.is_open(tables.now_s) && datagram.source_port == Port::new(sent.port)
            });
            if first_has_passed {
                for part in waiting.drain(..) {
                    prop_assert_eq!(meet(&mut tables, &part), Some(part.owner));
                }
            }
        }
        prop_assert!(waiting.is_empty() && coming.is_empty());
    }
    Ok(())
}

fn datagram() -> impl Strategy<Value = (Sent, Vec<prop::sample::Index>)> {
    let cuts = prop::collection::vec((1u32..180).prop_map(|units| units * 8), 2..9);
    let order = prop::collection::vec(any::<prop::sample::Index>(), 9);
    (0u32..3, any::<u16>(), cuts, order).prop_map(|(identification, port, cuts, order)| {
        (
            Sent {
                identification,
                port,
                cuts,
            },
            order,
        )
    })
}

proptest! {
    #[test]
    fn every_fragment_gets_the_ports_of_its_own_datagram(datagrams in prop::collection::vec(datagram(), 1..12)) {
        check::<V4>(&datagrams)?;
        check::<V6>(&datagrams)?;
    }

    #[test]
    fn a_mark_is_read_as_it_was_written(hook in 0u32..5, ifindex in 1u32..) {
        prop_assert_eq!(park_mark::read(park_mark::write(hook, ifindex)), Some((hook, ifindex)));
    }
}

#[test]
fn a_datagram_that_lost_a_part_does_not_lead_the_next_astray() {
    let mut tables = Collections::<V4>::new(3, 16);
    let first = Sent {
        identification: 7,
        port: 1_000,
        cuts: vec![800, 800, 800],
    };
    for part in &parts::<V4>(&first)[..2] {
        assert_eq!(meet(&mut tables, part), Some(1_000));
    }
    tables.now_s += LIFE_S + 1;
    let second = Sent {
        port: 2_000,
        ..first
    };
    let coming = parts::<V4>(&second);
    assert_eq!(
        meet(&mut tables, &coming[1]),
        None,
        "it waits for its own first"
    );
    assert_eq!(meet(&mut tables, &coming[0]), Some(2_000));
    assert_eq!(meet(&mut tables, &coming[1]), Some(2_000));
}

#[test]
fn hooks_do_not_count_the_same_fragment_twice() {
    let mut tables = Collections::<V4>::new(3, 16);
    let sent = Sent {
        identification: 7,
        port: 1_000,
        cuts: vec![800, 800, 800],
    };
    for part in parts::<V4>(&sent) {
        for hook in [Hook::Network, Hook::Stack] {
            let mut packet = part.packet;
            complete(&mut tables, hook as u32, &mut packet, &part.extent);
            assert!(packet.has_ports());
        }
    }
}

/// Early fragments are parked where their way depends on their ports, while somebody keeps them.
#[test]
fn early_fragments_wait_go_on_or_are_dropped_by_name() {
    fn check<A: TestFamily>() {
        let mut tables = Collections::<A>::new(3, 16);
        let sent = Sent {
            identification: 7,
            port: 1_000,
            cuts: vec![800, 800],
        };
        let early = parts::<A>(&sent)[1].packet;
        let to = |destination| Packet {
            destination,
            ..early
        };
        let act = |tables: &mut Collections<A>, hook, packet: &Packet<A>| {
            let decision = open(tables, hook, packet, &mut Scratch::default());
            (decision.action, decision.reason)
        };
        let dropped = (Action::Drop, DropReason::EarlyFragment);
        assert_eq!(act(&mut tables, Hook::Pod, &early), dropped);
        assert_eq!(act(&mut tables, Hook::Host, &early), dropped);
        let (node, pod, elsewhere) = (to(A::node()), to(A::pod(2)), to(A::pod(99)));
        assert_eq!(act(&mut tables, Hook::Network, &pod), dropped);
        // It may be one of the node's own, and the stack puts those together.
        assert_eq!(act(&mut tables, Hook::Network, &node).0, Action::Stack);

        tables.park = Park {
            ifindex: 9,
            alive_s: tables.now_s - PARK_ALIVE_S,
        };
        for (hook, packet) in [
            (Hook::Pod, &early),
            (Hook::Host, &early),
            (Hook::Network, &pod),
            (Hook::Network, &node),
        ] {
            assert_eq!(act(&mut tables, hook, packet).0, Action::Park);
        }
        assert_eq!(act(&mut tables, Hook::Network, &elsewhere).0, Action::Stack);
        // Protocols without ports have nothing to wait for.
        let other = Packet {
            protocol: 47,
            ..pod
        };
        assert_eq!(act(&mut tables, Hook::Network, &other).0, Action::Pod);

        tables.now_s += 1;
        assert_eq!(act(&mut tables, Hook::Network, &pod), dropped);
    }
    check::<V4>();
    check::<V6>();
}
