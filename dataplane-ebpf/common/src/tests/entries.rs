//! Packets of any kind, made of arbitrary bytes, at every entry of the decisions, a few after another. Whatever a frame
//! said, an entry answers: it does not panic (arithmetic is checked here), names the reason of a drop, and leaves tables
//! that keep their rules.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::collect::Plainly;
use super::sockets::{NAMESPACE, Sockets};
use super::tables::{Collections, LOCAL_PODS, TestFamily, go_on};
use crate::address::{ICMP, ICMPV6, SCTP, TCP, UDP};
use crate::collect::{collect_flow, collect_reply};
use crate::fragment::{self, Extent};
use crate::icmp::relate;
use crate::layout::{
    ENDPOINT_NODE, ENDPOINT_NODE_PORTS, ENDPOINT_PEER, Endpoint, NODE_MASQUERADE, Park,
    RANGE_OVERLAY, Range,
};
use crate::overlay::{is_node, tunnel_for};
use crate::packet::{Action, Decision, Packet, Translation, WITH_PORTS};
use crate::path::{self, Hook};
use crate::reason::DropReason;
use crate::refuse::may_answer;
use crate::sctp::is_torn;
use crate::socket::{self, ClientFamily, Cookie, Place, Socket, Steering};
use crate::{Port, V4, V6, driver};

/// Where a packet comes to.
#[derive(Clone, Copy, Debug)]
enum Entry {
    Pod(u8),
    Network,
    Overlay,
    Own,
    ToPod,
    Stack,
    ToNetwork,
    ToOverlay,
    Driver,
    /// As an error about this packet, which it quotes as sent from its own destination.
    Error,
}

/// Fields of a packet as a frame may have them, sensible or not.
#[derive(Clone, Copy, Debug)]
struct Fields {
    ends: (u8, u8),
    ports: (u16, u16),
    protocol: u8,
    tcp_flags: u8,
    flags: u16,
    identification: u32,
    extent: (u16, u16, bool),
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Arrive(Entry, Fields),
    Pass(u32),
    Collect(bool),
}

fn entry() -> impl Strategy<Value = Entry> {
    prop_oneof![
        3 => (0..=LOCAL_PODS).prop_map(Entry::Pod),
        7 => select(vec![
            Entry::Network,
            Entry::Overlay,
            Entry::Own,
            Entry::ToPod,
            Entry::Stack,
            Entry::ToNetwork,
            Entry::ToOverlay,
            Entry::Driver,
            Entry::Error,
        ]),
    ]
}

fn fields() -> impl Strategy<Value = Fields> {
    let port =
        || prop_oneof![3 => select(vec![0, 80, 8080, 40_000, 30_000, 8472]), 1 => any::<u16>()];
    let protocol = prop_oneof![
        6 => select(vec![TCP, UDP, SCTP, ICMP, ICMPV6]),
        1 => any::<u8>(),
    ];
    // Four bits have a meaning.
    let flags = prop_oneof![4 => Just(WITH_PORTS), 2 => 0u16..16];
    (
        (0u8..16, 0u8..16),
        (port(), port()),
        protocol,
        any::<u8>(),
        flags,
        0u32..3,
        (any::<u16>(), any::<u16>(), any::<bool>()),
    )
        .prop_map(
            |(ends, ports, protocol, tcp_flags, flags, identification, extent)| Fields {
                ends,
                ports,
                protocol,
                tcp_flags,
                flags,
                identification,
                extent,
            },
        )
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => (entry(), fields()).prop_map(|(entry, fields)| Step::Arrive(entry, fields)),
        1 => select(vec![0, 1, 61, 3_601, u32::MAX / 2]).prop_map(Step::Pass),
        1 => any::<bool>().prop_map(Step::Collect),
    ]
}

/// Pods of this node and others, services, the node, another node, addresses of no router, and none at all.
fn end<A: TestFamily>(number: u8) -> A {
    match number {
        0 => A::default(),
        1..=7 => A::pod(number),
        8 | 9 => A::service(number - 7),
        10 => A::node(),
        11 => A::pod(250),
        12 => A::pod(255),
        _ => A::service(number + 100),
    }
}

fn world<A: TestFamily>(seed: u64, room: usize) -> Collections<A> {
    let mut tables = Collections::new(seed, room);
    tables.node.flags = NODE_MASQUERADE;
    (tables.node.node_port_first, tables.node.node_port_last) = (30_000, 32_767);
    (tables.node.overlay_ifindex, tables.node.overlay_port) = (9, 8472);
    tables.park = Park {
        ifindex: 11,
        ..tables.park
    };
    for (address, flags) in [
        (A::node(), ENDPOINT_NODE | ENDPOINT_NODE_PORTS),
        (A::pod(250), ENDPOINT_PEER),
    ] {
        let endpoint = Endpoint {
            flags,
            ..Endpoint::default()
        };
        tables.endpoints.insert(address, endpoint);
    }
    for pod in LOCAL_PODS + 1..8 {
        let range = Range {
            flags: if pod % 2 == 0 { RANGE_OVERLAY } else { 0 },
            remote_v4: V4::new([192, 0, 2, 12]),
            ..Range::default()
        };
        tables.ranges.insert(A::pod(pod), range);
    }
    for protocol in [TCP, UDP, SCTP] {
        tables.serve(1, protocol, &[(1, false), (6, false), (7, true)]);
        tables.serve(2, protocol, &[]);
    }
    tables
}

fn check<A: TestFamily>(packet: &Packet<A>, decision: &Decision<A>) -> Result<(), TestCaseError> {
    let dropped = decision.action == Action::Drop;
    prop_assert_eq!(
        dropped,
        decision.reason != DropReason::None,
        "{:?}",
        decision
    );
    if decision.translation == Translation::None {
        let before = (packet.source, packet.destination);
        prop_assert_eq!((decision.source, decision.destination), before);
        let before = (packet.source_port, packet.destination_port);
        prop_assert_eq!((decision.source_port, decision.destination_port), before);
    } else {
        prop_assert!(packet.has_ports(), "translated without ports: {packet:?}");
    }
    // Whether an SCTP fragment can be written, and whether a refusal may be.
    let _ = (is_torn(packet, decision), may_answer(packet));
    Ok(())
}

fn arrive<A: TestFamily>(
    tables: &mut Collections<A>,
    entry: Entry,
    fields: &Fields,
) -> Result<(), TestCaseError> {
    let mut packet = Packet {
        source: end::<A>(fields.ends.0),
        destination: end::<A>(fields.ends.1),
        source_port: Port::new(fields.ports.0),
        destination_port: Port::new(fields.ports.1),
        protocol: fields.protocol,
        tcp_flags: fields.tcp_flags,
        flags: fields.flags,
        identification: fields.identification,
    };
    if !packet.has_ports() {
        (packet.source_port, packet.destination_port) = (Port(0), Port(0));
    }
    let hook = match entry {
        Entry::Pod(_) => Hook::Pod,
        Entry::Overlay => Hook::Overlay,
        Entry::Own => Hook::Own,
        Entry::ToPod => Hook::Forward,
        Entry::Stack | Entry::ToNetwork | Entry::ToOverlay => Hook::Stack,
        Entry::Network | Entry::Driver | Entry::Error => Hook::Network,
    };
    if packet.flags & crate::packet::FRAGMENT != 0 {
        let (offset, bytes, more) = fields.extent;
        let extent = Extent {
            offset: offset.into(),
            bytes: bytes.into(),
            more: more.into(),
        };
        fragment::complete(tables, hook as u32, &mut packet, &extent);
    }
    let decision = match entry {
        Entry::Pod(number) => path::from_pod(tables, &A::link(number), &packet),
        Entry::Network => path::from_network(tables, &packet),
        Entry::Overlay => path::from_overlay(tables, &packet),
        Entry::Own => path::from_self(tables, &packet),
        Entry::ToPod => path::to_pod(tables, &packet),
        Entry::Stack => path::from_stack(tables, &packet),
        Entry::ToNetwork => path::to_network(tables, &packet),
        Entry::ToOverlay => {
            let _ = (tunnel_for(tables, &packet), is_node(tables, &packet.source));
            return Ok(());
        }
        Entry::Driver => {
            let decision = driver::at_driver(tables, &packet);
            prop_assert!(matches!(decision.action, Action::Open | Action::Network));
            return check(&packet, &decision);
        }
        Entry::Error => {
            let quoted = Packet {
                source: packet.destination,
                ..packet
            };
            relate(tables, &packet, &quoted);
            return Ok(());
        }
    };
    let decision = go_on(tables, hook, &packet, decision);
    check(&packet, &decision)
}

fn run<A: TestFamily>(seed: u64, room: usize, steps: &[Step]) -> Result<(), TestCaseError> {
    let mut tables = world::<A>(seed, room);
    for step in steps {
        match step {
            Step::Arrive(entry, fields) => arrive(&mut tables, *entry, fields)?,
            Step::Pass(seconds) => tables.now_s = tables.now_s.wrapping_add(*seconds),
            Step::Collect(pressure) => {
                let (flows, replies) = (tables.flows.clone(), tables.replies.clone());
                let now_s = tables.now_s;
                let mut store = Plainly(&mut tables);
                for key in flows.keys() {
                    let Ok(_) = collect_flow(&mut store, key, now_s, *pressure);
                }
                for (key, owner) in &replies {
                    let Ok(_) = collect_reply(&mut store, key, owner);
                }
            }
        }
        prop_assert!(
            tables.flows.len() <= room,
            "more flows than there is room for"
        );
    }
    Ok(())
}

/// A system call of any kind, on a socket with this number.
#[derive(Clone, Copy, Debug)]
enum Call {
    Connect,
    Send,
    Receive,
    PeerName,
    Release,
}

const SOCKETS: u64 = 3;

fn call() -> impl Strategy<Value = (Call, u64, Fields, bool)> {
    let call = select(vec![
        Call::Connect,
        Call::Connect,
        Call::Send,
        Call::Send,
        Call::Receive,
        Call::PeerName,
        Call::Release,
    ]);
    (call, 0..SOCKETS, fields(), prop::bool::weighted(0.8))
}

fn make<A: TestFamily + ClientFamily>(
    sockets: &mut Sockets<A>,
    (call, number, fields, known): &(Call, u64, Fields, bool),
) -> Result<(), TestCaseError> {
    let cookie = Cookie::new(*number);
    let place = Place::new(end::<A>(fields.ends.1), Port::new(fields.ports.1));
    let socket = Socket {
        namespace: if *known { NAMESPACE } else { 0 },
        cookie,
        source: end::<A>(fields.ends.0),
        flags: u32::from(fields.flags) & 3,
        protocol: fields.protocol.into(),
    };
    let steering: Steering<A> = match call {
        Call::Connect => socket::connect(sockets, &socket, &place),
        Call::Send => socket::send(sockets, &socket, &place),
        Call::Receive => socket::receive(sockets, &cookie, &place),
        Call::PeerName => socket::peer_name(sockets, &cookie, &place),
        Call::Release => {
            socket::release(sockets, &cookie, fields.protocol.into());
            return Ok(());
        }
    };
    prop_assert!(steering.is_translated() || steering.place == place);
    Ok(())
}

fn run_calls<A: TestFamily + ClientFamily>(
    seed: u64,
    calls: &[(Call, u64, Fields, bool)],
) -> Result<(), TestCaseError> {
    let mut sockets = Sockets::<A>::new(seed, 16);
    for protocol in [TCP, UDP] {
        sockets
            .tables
            .serve(1, protocol, &[(1, false), (6, false), (7, true)]);
    }
    for call in calls {
        make(&mut sockets, call)?;
    }
    for number in 0..SOCKETS {
        for protocol in [TCP, UDP] {
            socket::release(&mut sockets, &Cookie::new(number), protocol.into());
        }
    }
    prop_assert_eq!(sockets.held(), 0, "closed sockets left entries");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_call_is_answered_at_every_socket_hook(
        seed in any::<u64>(), calls in vec(call(), 1..60), v6 in any::<bool>(),
    ) {
        if v6 {
            run_calls::<V6>(seed, &calls)?;
        } else {
            run_calls::<V4>(seed, &calls)?;
        }
    }

    #[test]
    fn any_packet_is_answered_at_every_entry(
        seed in any::<u64>(), room in 1usize..24, steps in vec(step(), 1..60), v6 in any::<bool>(),
    ) {
        if v6 {
            run::<V6>(seed, room, &steps)?;
        } else {
            run::<V4>(seed, room, &steps)?;
        }
    }
}
