use control_api::desired::{Changes, DesiredState, Name as ObjectName};
use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::{DNSClass, Name, RecordType};
use proptest::prelude::*;

use super::{put_service, put_slice, service, slice, state};
use crate::dns::upstream::parse_resolv_conf;
use crate::dns::{Options, Step, Transport, Zone, handle};

fn zone() -> Zone {
    let mut zone = Zone::new(Options::default());
    zone.update(&state(), &Changes::everything());
    zone.set_synced();
    zone
}

fn query(name: &str, record_type: RecordType) -> Message {
    let mut message = Message::new(7, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(Name::from_ascii(name).unwrap(), record_type));
    message
}

fn ask(zone: &Zone, query: &Message) -> Message {
    match handle(zone, &query.to_vec().unwrap(), Transport::Udp, false, 0) {
        Step::Reply(reply) => Message::from_vec(&reply).unwrap(),
        other => panic!("{other:?}"),
    }
}

fn addresses(zone: &Zone, name: &str) -> Vec<String> {
    let reply = ask(zone, &query(name, RecordType::A));
    let mut list: Vec<String> = reply.answers.iter().map(|r| r.data.to_string()).collect();
    list.sort();
    list
}

#[test]
fn the_question_is_echoed_as_it_was_spelled() {
    let reply = ask(
        &zone(),
        &query("CaRt.Shop.SVC.cluster.LOCAL.", RecordType::A),
    );
    assert_eq!(
        reply.answers[0].name.to_ascii(),
        "CaRt.Shop.SVC.cluster.LOCAL."
    );
    assert_eq!(
        reply.queries[0].name().to_ascii(),
        "CaRt.Shop.SVC.cluster.LOCAL."
    );
    assert!(reply.authoritative && !reply.recursion_available && reply.recursion_desired);
    assert_eq!(reply.id, 7);
}

#[test]
fn reverse_zones_follow_the_cluster_networks() {
    let zone = zone();
    let rcode = |name: &str, kind| ask(&zone, &query(name, kind)).response_code;
    let ptr = ask(&zone, &query("5.10.96.10.in-addr.arpa.", RecordType::PTR));
    assert_eq!(
        ptr.answers[0].data.to_string(),
        "cart.shop.svc.cluster.local."
    );
    assert_eq!(
        rcode("9.9.96.10.in-addr.arpa.", RecordType::PTR),
        ResponseCode::NXDomain
    );
    // Above an address that exists, names exist (RFC 8020), and resolvers that minimise ask for them.
    assert_eq!(
        rcode("10.96.10.in-addr.arpa.", RecordType::PTR),
        ResponseCode::NoError
    );
    assert_eq!(
        rcode("11.96.10.in-addr.arpa.", RecordType::PTR),
        ResponseCode::NXDomain
    );
    assert_eq!(
        rcode("96.10.in-addr.arpa.", RecordType::A),
        ResponseCode::NoError
    );
    // Not the cluster's: whoever else knows, and nobody is asked here.
    assert_eq!(
        rcode("1.2.0.192.in-addr.arpa.", RecordType::PTR),
        ResponseCode::Refused
    );
    assert_eq!(
        rcode("05.10.96.10.in-addr.arpa.", RecordType::PTR),
        ResponseCode::Refused
    );
    let negative = ask(&zone, &query("9.9.96.10.in-addr.arpa.", RecordType::PTR));
    assert_eq!(
        negative.authorities[0].name.to_ascii(),
        "96.10.in-addr.arpa."
    );
}

#[test]
fn other_names_and_classes() {
    let zone = zone();
    let any = ask(
        &zone,
        &query("cart.shop.svc.cluster.local.", RecordType::ANY),
    );
    assert_eq!(any.answers[0].record_type(), RecordType::HINFO);
    let server = ask(&zone, &query("ns.dns.cluster.local.", RecordType::A));
    assert_eq!(server.answers[0].data.to_string(), "10.96.0.10");
    let below = ask(
        &zone,
        &query("_tcp.cart.shop.svc.cluster.local.", RecordType::A),
    );
    assert_eq!(below.response_code, ResponseCode::NoError);
    let mut chaos = query("cart.shop.svc.cluster.local.", RecordType::TXT);
    chaos.queries[0].set_query_class(DNSClass::CH);
    assert_eq!(ask(&zone, &chaos).response_code, ResponseCode::Refused);
    let mut two = query("a.", RecordType::A);
    two.add_query(Query::query(Name::root(), RecordType::A));
    assert_eq!(ask(&zone, &two).response_code, ResponseCode::FormErr);
    let mut response = query("a.", RecordType::A);
    response.metadata.message_type = MessageType::Response;
    let packet = response.to_vec().unwrap();
    assert!(matches!(
        handle(&zone, &packet, Transport::Udp, true, 0),
        Step::Drop
    ));
}

/// A zone that followed deltas equals one built from the final state, whatever the deltas were.
#[test]
fn deltas_lead_to_the_zone_of_the_state() {
    let mut followed = zone();
    let mut state = state();
    let changed = |names: &[(&str, &str)]| Changes {
        services: names
            .iter()
            .map(|(ns, name)| ObjectName::new(*ns, *name))
            .collect(),
        ..Changes::default()
    };
    let late = "late.shop.svc.cluster.local.";
    assert!(addresses(&followed, late).is_empty());
    put_service(&mut state, service("shop", "late", &["10.96.10.90"]));
    followed.update(&state, &changed(&[("shop", "late")]));
    assert_eq!(addresses(&followed, late), ["10.96.10.90"]);

    put_slice(
        &mut state,
        slice(
            "data",
            "pg",
            &[("10.244.1.10", "pg-0"), ("10.244.2.99", "pg-1")],
        ),
    );
    followed.update(&state, &changed(&[("data", "pg")]));
    assert_eq!(
        addresses(&followed, "pg-1.pg.data.svc.cluster.local."),
        ["10.244.2.99"]
    );
    let old = ask(
        &followed,
        &query("11.2.244.10.in-addr.arpa.", RecordType::PTR),
    );
    assert_eq!(old.response_code, ResponseCode::NXDomain);

    state.services.remove(&ObjectName::new("shop", "late"));
    state.services.remove(&ObjectName::new("shop", "cart"));
    followed.update(&state, &changed(&[("shop", "late"), ("shop", "cart")]));
    let mut built = Zone::new(Options::default());
    built.update(&state, &Changes::everything());
    assert_eq!(followed.pointers, built.pointers);
    assert_eq!(followed.services, built.services);
}

#[test]
fn before_the_first_state_nothing_is_missing() {
    let mut zone = Zone::new(Options::default());
    let ghost = query("ghost.shop.svc.cluster.local.", RecordType::A);
    assert_eq!(ask(&zone, &ghost).response_code, ResponseCode::ServFail);
    // A state left on disk may be old: what it has is answered, what it lacks may exist.
    zone.update(&state(), &Changes::everything());
    assert_eq!(
        addresses(&zone, "cart.shop.svc.cluster.local."),
        ["10.96.10.5"]
    );
    assert_eq!(ask(&zone, &ghost).response_code, ResponseCode::ServFail);
    zone.set_synced();
    assert_eq!(ask(&zone, &ghost).response_code, ResponseCode::NXDomain);
}

#[test]
fn large_answers_are_cut_and_small_ones_whole() {
    let mut state = DesiredState::default();
    state.config.namespaces = vec!["data".into()];
    put_service(
        &mut state,
        control_api::v1::Service {
            headless: true,
            ..service("data", "big", &[])
        },
    );
    let texts: Vec<String> = (1..=100).map(|i| format!("10.244.50.{i}")).collect();
    let endpoints: Vec<(&str, &str)> = texts.iter().map(|t| (t.as_str(), "")).collect();
    put_slice(&mut state, slice("data", "big", &endpoints));
    let mut zone = Zone::new(Options::default());
    zone.update(&state, &Changes::everything());
    let mut question = query("big.data.svc.cluster.local.", RecordType::A);
    for (offered, limit) in [
        (None, 512),
        (Some(100), 512),
        (Some(1000), 1000),
        (Some(9000), 1232),
    ] {
        question.edns = offered.map(|size| {
            let mut edns = Edns::new();
            edns.set_max_payload(size);
            edns
        });
        let packet = question.to_vec().unwrap();
        let Step::Reply(reply) = handle(&zone, &packet, Transport::Udp, false, 3) else {
            panic!()
        };
        let message = Message::from_vec(&reply).unwrap();
        assert!(
            message.truncation && reply.len() <= limit,
            "{offered:?}: {}",
            reply.len()
        );
        assert!(
            limit - reply.len() < 32,
            "{offered:?}: {} bytes leave room",
            reply.len()
        );
        assert_eq!(message.edns.is_some(), offered.is_some());
    }
    let packet = question.to_vec().unwrap();
    let Step::Reply(reply) = handle(&zone, &packet, Transport::Tcp, false, 0) else {
        panic!()
    };
    let message = Message::from_vec(&reply).unwrap();
    assert_eq!((message.answers.len(), message.truncation), (100, false));
}

#[test]
fn resolv_conf_lines() {
    let text = "# nameserver 192.0.2.9\nsearch a b\nnameserver 192.0.2.1\n nameserver\tfe80::1%3\n\
        nameserver nonsense\noptions ndots:5\n";
    let servers: Vec<String> = parse_resolv_conf(text)
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(servers, ["192.0.2.1:53", "[fe80::1%3]:53"]);
}

fn packet() -> impl Strategy<Value = Vec<u8>> {
    let random = prop::collection::vec(any::<u8>(), 0..200);
    let names = prop::sample::select(vec![
        "cart.shop.svc.cluster.local.",
        "_http._tcp.pg.data.svc.cluster.local.",
        "1.2.96.10.in-addr.arpa.",
        "www.example.test.",
        "a-b--c.shop.pod.cluster.local.",
    ]);
    // A real query with some bytes changed comes further than noise.
    let bent = (
        names,
        any::<u16>(),
        prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
    )
        .prop_map(|(name, kind, changes)| {
            let mut bytes = query(name, RecordType::from(kind)).to_vec().unwrap();
            for (at, value) in changes {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            bytes
        });
    prop_oneof![random, bent]
}

proptest! {
    #[test]
    fn no_packet_panics_or_gets_an_unreadable_answer(bytes in packet(), recursion: bool, tcp: bool, rotation: usize, noise in prop::collection::vec(any::<u8>(), 0..100)) {
        let transport = if tcp { Transport::Tcp } else { Transport::Udp };
        match handle(&zone(), &bytes, transport, recursion, rotation) {
            Step::Reply(reply) => {
                prop_assert_eq!(&reply[..2], &bytes[..2]);
                let message = Message::from_vec(&reply);
                prop_assert!(message.is_ok(), "{message:?}");
                prop_assert!(tcp || reply.len() <= 1232);
            }
            Step::Drop => {}
            Step::Ask(request) => {
                prop_assert!(recursion);
                prop_assert!(request.upstream_query(1).is_some());
                for reply in [request.relay(noise.clone()), request.finish(Some(&noise)), request.finish(None)] {
                    prop_assert!(!reply.is_empty());
                }
            }
        }
    }
}
