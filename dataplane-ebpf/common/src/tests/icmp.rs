//! Errors about translated packets, against the same errors about the packets as they were before translation, written
//! from scratch.

use proptest::prelude::*;

use super::tables::{Collections, TestFamily};
use super::wire::{WireFamily, message, packet, sum};
use crate::address::{SCTP, TCP, UDP};
use crate::icmp::{
    Checksums, Messages, NO_CHECKSUM, Related, WITHOUT_ADDRESSES, echo_checksum, is_virtual,
    move_checksums, relate,
};
use crate::layout::{Flow, FlowKey, Frontend, FrontendKey};
use crate::packet::{Packet, Translation, WITH_PORTS};
use crate::{Family, Port, V4, V6};

/// A client's flow through service 1, and who sends an error about which of its packets.
#[derive(Clone, Debug)]
struct Case {
    protocol: u8,
    /// Ports of client, service, what the backend sees, backend.
    ports: [u16; 4],
    /// The backend sees the node as its client.
    masqueraded: bool,
    /// The flow has no service: both ends know one another.
    direct: bool,
    about_answer: bool,
    by_receiver: bool,
    sealed: bool,
    payload: Vec<u8>,
    /// Bytes of the transport that the error quotes.
    quoted: usize,
}

fn case() -> impl Strategy<Value = Case> {
    (
        prop_oneof![Just(TCP), Just(UDP), Just(SCTP)],
        any::<[u16; 4]>(),
        any::<[bool; 5]>(),
        prop::collection::vec(any::<u8>(), 0..600),
        // Nobody cuts a field in half.
        (4usize..350).prop_map(|words| words * 2),
    )
        .prop_map(|(protocol, ports, flags, payload, quoted)| Case {
            protocol,
            ports,
            masqueraded: flags[0],
            direct: flags[1],
            about_answer: flags[2],
            by_receiver: flags[3],
            sealed: flags[4],
            payload,
            quoted,
        })
}

fn header<A: Family>(from: (A, Port), to: (A, Port), protocol: u8) -> Packet<A> {
    Packet {
        source: from.0,
        destination: to.0,
        source_port: from.1,
        destination_port: to.1,
        protocol,
        flags: WITH_PORTS,
        ..Packet::default()
    }
}

/// Writes what was decided into the error, where the programs write it.
fn carry_out<A: WireFamily>(bytes: &mut [u8], related: &Related<A>, new: Checksums) {
    let put = |bytes: &mut [u8], at: usize, value: &[u8]| {
        bytes[at..at + value.len()].copy_from_slice(value);
    };
    let quote = A::HEADER + 8;
    for (at, source, destination) in [
        (0, related.source, related.destination),
        (quote, related.quoted_source, related.quoted_destination),
    ] {
        let width = source.bytes().len();
        put(bytes, at + A::SOURCE, &source.bytes());
        put(bytes, at + A::SOURCE + width, &destination.bytes());
    }
    if let Some(at) = A::CHECKSUM {
        put(bytes, at, &[0, 0]);
        let own = sum(&bytes[..A::HEADER]).to_be_bytes();
        put(bytes, at, &own);
        put(bytes, quote + at, &new.quoted_header.to_ne_bytes());
    }
    put(bytes, A::HEADER + 2, &new.message.to_ne_bytes());
    let transport = quote + A::HEADER;
    put(
        bytes,
        transport,
        &related.quoted_source_port.0.to_ne_bytes(),
    );
    put(
        bytes,
        transport + 2,
        &related.quoted_destination_port.0.to_ne_bytes(),
    );
    if new.flags & NO_CHECKSUM == 0 {
        let protocol = bytes[quote + if A::CHECKSUM.is_some() { 9 } else { 6 }];
        let at = transport + if protocol == TCP { 16 } else { 6 };
        put(bytes, at, &new.quoted_transport.to_ne_bytes());
    }
}

/// One's complement has two zeroes; both check out.
fn without_zeroes(mut bytes: Vec<u8>, at: &[usize]) -> Vec<u8> {
    for at in at {
        if bytes.get(*at..at + 2) == Some(&[0xff, 0xff]) {
            bytes[*at..at + 2].copy_from_slice(&[0, 0]);
        }
    }
    bytes
}

/// Address and port.
type End<A> = (A, Port);

/// The two ends of the quoted packet: as on the wire after translation, and as its sender wrote them.
struct Sides<A> {
    wire: (End<A>, End<A>),
    written: (End<A>, End<A>),
}

/// Enters the flow of a case.
fn flow_of<A: TestFamily>(tables: &mut Collections<A>, case: &Case) -> Sides<A> {
    let port = |index: usize| Port::new(case.ports[index]);
    let client = (A::pod(1), port(0));
    let node = (A::node(), port(2));
    let (service, seen, backend) = match (case.direct, case.masqueraded) {
        (false, false) => ((A::service(1), port(1)), client, (A::pod(9), port(3))),
        (false, true) => ((A::service(1), port(1)), node, (A::pod(9), port(3))),
        (true, false) => ((A::pod(9), port(3)), client, (A::pod(9), port(3))),
        (true, true) => ((A::pod(9), port(3)), node, (A::pod(9), port(3))),
    };
    let key = header(client, service, case.protocol).key();
    let flow = Flow {
        backend: backend.0,
        source: seen.0,
        backend_port: backend.1,
        source_port: seen.1,
        protocol: case.protocol.into(),
        ..Flow::default()
    };
    tables.flows.insert(key, flow);
    tables.replies.insert(flow.reply_key(), key);
    if case.about_answer {
        Sides {
            wire: (service, client),
            written: (backend, seen),
        }
    } else {
        Sides {
            wire: (seen, backend),
            written: (client, service),
        }
    }
}

/// The error of a case about the packet between `ends`.
fn error_about<A: WireFamily + TestFamily>(case: &Case, ends: (End<A>, End<A>)) -> Vec<u8> {
    let mut quote = packet(ends.0, ends.1, case.protocol, case.sealed, &case.payload);
    quote.truncate(A::HEADER + case.quoted);
    let kind = if A::CHECKSUM.is_some() {
        (3, 4)
    } else {
        (2, 0)
    };
    let rest = [0, 0, 5, 20];
    message(reporter(case, ends), ends.0.0, kind, rest, &quote)
}

/// Who sends it: the destination itself, or a router.
fn reporter<A: TestFamily>(case: &Case, ends: (End<A>, End<A>)) -> A {
    if case.by_receiver {
        ends.1.0
    } else {
        A::service(200)
    }
}

/// The checksums as the programs read them off the error.
fn checksums_of<A: WireFamily>(case: &Case, error: &[u8]) -> Checksums {
    let field = |at: usize| {
        let field = error.get(at..at + 2)?;
        Some(u16::from_ne_bytes([field[0], field[1]]))
    };
    let transport = A::HEADER * 2 + 8;
    let checksum = match case.protocol {
        TCP => field(transport + 16),
        UDP => field(transport + 6).filter(|sum| *sum != 0),
        _ => None,
    };
    Checksums {
        message: field(A::HEADER + 2).expect("whole"),
        quoted_header: A::CHECKSUM
            .and_then(|at| field(A::HEADER + 8 + at))
            .unwrap_or(0),
        quoted_transport: checksum.unwrap_or(0),
        flags: if checksum.is_some() { 0 } else { NO_CHECKSUM },
    }
}

fn check<A: TestFamily + WireFamily + Messages>(case: &Case) -> Result<(), TestCaseError> {
    let mut tables = Collections::<A>::new(1, 16);
    let sides = flow_of(&mut tables, case);
    let mut got = error_about(case, sides.wire);
    let wanted = error_about(case, sides.written);

    let outer = Packet {
        source: reporter(case, sides.wire),
        destination: sides.wire.0.0,
        ..Packet::default()
    };
    let inner = header(sides.wire.0, sides.wire.1, case.protocol);
    let related = relate(&mut tables, &outer, &inner);
    let towards = if case.about_answer {
        Translation::Forward
    } else {
        Translation::Reply
    };
    prop_assert_eq!(related.translation, towards);
    let old = checksums_of::<A>(case, &got);
    let new = move_checksums(old, &outer, &inner, &related);
    carry_out(&mut got, &related, new);
    let transport = A::HEADER * 2 + 8;
    let sums = [A::HEADER + 2, A::HEADER + 18, transport + 16, transport + 6];
    prop_assert_eq!(without_zeroes(got, &sums), without_zeroes(wanted, &sums));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn an_error_is_about_the_packet_as_its_sender_wrote_it(case in case()) {
        check::<V4>(&case)?;
        check::<V6>(&case)?;
    }

    /// The identifier of an echo request stands for the source's port, and its checksum covers no address in IPv4.
    #[test]
    fn the_identifier_of_a_quoted_echo_request_is_restored(from in any::<u16>(), to in any::<u16>(), body in any::<[u8; 12]>()) {
        let (node, pod, far) = (V4::node(), V4::pod(1), V4::service(9));
        let echo = |source: V4, identifier: u16| {
            let [high, low] = identifier.to_be_bytes();
            message(source, far, (8, 0), [high, low, 0, 1], &body)
        };
        let inner = header((node, Port::new(from)), (far, Port(0)), 1);
        let related = Related {
            unsettled: 0,
            flow: crate::layout::FlowKey::default(),
            translation: Translation::Reply,
            changes: 1,
            source: far,
            destination: pod,
            quoted_source: pod,
            quoted_destination: far,
            quoted_source_port: Port::new(to),
            quoted_destination_port: Port(0),
        };
        let outer = Packet { source: far, destination: node, ..Packet::default() };
        let before = message(far, node, (11, 0), [0; 4], &echo(node, from));
        let wanted = message(far, pod, (11, 0), [0; 4], &echo(pod, to));
        let field = |bytes: &[u8], at: usize| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
        let old = Checksums {
            message: field(&before, 22),
            quoted_header: field(&before, 38),
            quoted_transport: field(&before, 50),
            flags: WITHOUT_ADDRESSES,
        };
        let new = move_checksums(old, &outer, &inner, &related);
        let same = |a: u16, b: u16| a == b || (a | b == 0xffff && a & b == 0 && (a == 0 || b == 0));
        prop_assert!(same(new.message, field(&wanted, 22)));
        prop_assert!(same(new.quoted_header, field(&wanted, 38)));
        prop_assert!(same(new.quoted_transport, field(&wanted, 50)));
    }

    #[test]
    fn the_reply_to_an_echo_request_has_the_right_checksum(rest in any::<[u8; 4]>(), body in prop::collection::vec(any::<u8>(), 0..99)) {
        fn check<A: TestFamily + WireFamily + Messages>(rest: [u8; 4], body: &[u8]) -> Result<(), TestCaseError> {
            let field = |bytes: &[u8]| u16::from_ne_bytes([bytes[A::HEADER + 2], bytes[A::HEADER + 3]]);
            let request = message(A::pod(1), A::service(1), (A::ECHO_REQUEST, 0), rest, body);
            let reply = message(A::service(1), A::pod(1), (A::ECHO_REPLY, 0), rest, body);
            let (got, wanted) = (echo_checksum::<A>(field(&request)), field(&reply));
            prop_assert!(got == wanted || (got == 0xffff && wanted == 0) || (got == 0 && wanted == 0xffff));
            Ok(())
        }
        check::<V4>(rest, &body)?;
        check::<V6>(rest, &body)?;
    }
}

fn passes_without_a_flow<A: TestFamily>() {
    let mut tables = Collections::<A>::new(1, 16);
    let outer = Packet {
        source: A::service(9),
        destination: A::pod(1),
        ..Packet::default()
    };
    let inner = header((A::pod(1), Port::new(7)), (A::pod(9), Port::new(8)), TCP);
    let related = relate(&mut tables, &outer, &inner);
    assert_eq!(related.translation, Translation::None);
    assert_eq!(
        (related.source, related.destination),
        (outer.source, outer.destination)
    );

    // Half a flow is none.
    let key = FlowKey {
        source: A::pod(1),
        ..inner.key()
    };
    tables.replies.insert(inner.key().reversed(), key);
    assert_eq!(
        relate(&mut tables, &outer, &inner).translation,
        Translation::None
    );

    // Nor may an error be about a packet that another host sent.
    let flow = Flow {
        backend: A::pod(9),
        source: A::pod(1),
        backend_port: Port::new(8),
        source_port: Port::new(7),
        protocol: TCP.into(),
        ..Flow::default()
    };
    tables.flows.insert(key, flow);
    assert_eq!(
        relate(&mut tables, &outer, &inner).translation,
        Translation::Reply
    );
    let astray = Packet {
        destination: A::pod(2),
        ..outer
    };
    assert_eq!(
        relate(&mut tables, &astray, &inner).translation,
        Translation::None
    );
}

#[test]
fn an_error_without_a_flow_stays_as_it_is() {
    passes_without_a_flow::<V4>();
    passes_without_a_flow::<V6>();
}

#[test]
fn echo_is_answered_for_addresses_of_services_only() {
    fn check<A: TestFamily>() {
        let mut tables = Collections::<A>::new(1, 16);
        let key = FrontendKey {
            address: A::service(1),
            ..FrontendKey::default()
        };
        tables.frontends.insert(key, Frontend::default());
        assert!(is_virtual(&mut tables, A::service(1)));
        assert!(!is_virtual(&mut tables, A::service(2)));
        assert!(!is_virtual(&mut tables, A::node()));
    }
    check::<V4>();
    check::<V6>();
}

#[test]
fn redirects_and_queries_are_no_errors() {
    let errors = |is: fn(u8) -> bool| (0..=255u8).filter(|kind| is(*kind)).collect::<Vec<_>>();
    assert_eq!(errors(V4::is_error), [3, 4, 11, 12]);
    assert_eq!(errors(V6::is_error), [1, 2, 3, 4]);
}
