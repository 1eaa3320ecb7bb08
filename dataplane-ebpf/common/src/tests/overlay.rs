//! Two nodes and the overlay between them: clients that are sent on, and senders that are not let in.

use super::tables::{Collections, LOCAL_PODS, TestFamily};
use crate::address::{Family, TCP, UDP};
use crate::flow::timeout;
use crate::layout::{
    BACKEND_LOCAL, ENDPOINT_NODE, ENDPOINT_NODE_PORTS, ENDPOINT_PEER, ENDPOINT_READY, Endpoint,
    FRONTEND_DSR, FrontendKey, NODE_MASQUERADE, RANGE_EXEMPT, Range,
};
use crate::overlay::{is_node, tunnel_for};
use crate::packet::{Action, Decision, Packet, Translation, WITH_PORTS, tcp};
use crate::path::{self, Hook, Scratch};
use crate::reason::DropReason;
use crate::{Port, V4, V6};

const NODE_PORT: u16 = 30_080;
const OVERLAY_PORT: u16 = 8_472;
/// Of the first node; the second is a number outside those of pods.
const SECOND: u8 = 200;
const CLIENT: u8 = 250;
/// On the second node.
const FAR_POD: u8 = LOCAL_PODS + 1;
const REMOTE: V4 = V4::new([192, 0, 2, 12]);

fn endpoint(flags: u32) -> Endpoint {
    Endpoint {
        flags,
        ..Endpoint::default()
    }
}

/// A NodePort at the first node's address, whose only backend is on the second node. `first` says which of the two this is.
fn node<A: TestFamily>(first: bool, protocol: u8) -> Collections<A> {
    let mut tables = Collections::<A>::new(7, 64);
    tables.node.overlay_ifindex = 9;
    tables.node.overlay_port = OVERLAY_PORT;
    tables.node.flags = NODE_MASQUERADE;
    let (own, peer) = (
        endpoint(ENDPOINT_NODE | ENDPOINT_NODE_PORTS),
        endpoint(ENDPOINT_PEER | ENDPOINT_NODE_PORTS),
    );
    let (at_first, at_second) = if first { (own, peer) } else { (peer, own) };
    tables.endpoints.insert(A::node(), at_first);
    tables.endpoints.insert(A::service(SECOND), at_second);
    if first {
        let range = Range {
            flags: RANGE_EXEMPT,
            remote_v4: REMOTE,
            ..Range::default()
        };
        tables.ranges.insert(A::pod(FAR_POD), range);
    } else {
        tables
            .endpoints
            .insert(A::pod(FAR_POD), endpoint(ENDPOINT_READY));
    }
    tables.serve(1, protocol, &[(FAR_POD, false)]);
    let at = |address: A, port: u16| FrontendKey {
        address,
        port: Port::new(port),
        protocol,
        scope: 0,
    };
    let mut frontend = tables.frontends.remove(&at(A::service(1), 80)).unwrap();
    frontend.flags = FRONTEND_DSR;
    if !first {
        frontend.local_backends = frontend.backends;
        for backend in tables.backends.values_mut() {
            backend.flags = BACKEND_LOCAL;
        }
    }
    tables
        .frontends
        .insert(at(A::default(), NODE_PORT), frontend);
    tables
}

fn packet<A: Family>(from: (A, u16), to: (A, u16), protocol: u8, flags: u8) -> Packet<A> {
    Packet {
        source: from.0,
        destination: to.0,
        source_port: Port::new(from.1),
        destination_port: Port::new(to.1),
        protocol,
        tcp_flags: if protocol == TCP { flags } else { 0 },
        flags: WITH_PORTS,
        identification: 0,
    }
}

fn run<A: TestFamily>(tables: &mut Collections<A>, hook: Hook, packet: &Packet<A>) -> Decision<A> {
    let decision = match hook {
        Hook::Network => path::from_network(tables, packet),
        Hook::Overlay => path::from_overlay(tables, packet),
        _ => path::from_pod(tables, &A::link(1), packet),
    };
    if decision.action == Action::Open {
        path::open(tables, hook, packet, &mut Scratch::default())
    } else {
        decision
    }
}

fn answers_come_from_the_backends_node<A: TestFamily>(protocol: u8) {
    let (mut first, mut second) = (node::<A>(true, protocol), node::<A>(false, protocol));
    let (client, dialled) = ((A::service(CLIENT), 4_000), (A::node(), NODE_PORT));
    for flags in [tcp::SYN, tcp::ACK] {
        first.now_s += 1;
        let asked = packet(client, dialled, protocol, flags);
        let sent = run(&mut first, Hook::Network, &asked);
        assert_eq!(
            (sent.action, sent.translation),
            (Action::Overlay, Translation::None)
        );
        let tunnel = tunnel_for(&mut first, &asked);
        assert_eq!((tunnel.found, tunnel.remote_v4), (1, REMOTE));

        let received = run(&mut second, Hook::Overlay, &asked);
        assert_eq!(received.action, Action::Pod);
        assert_eq!(
            (received.source, received.source_port),
            (client.0, Port::new(client.1)),
            "the pod sees the client"
        );
        assert_eq!(received.destination, A::pod(FAR_POD));
        let answer = packet(
            (received.destination, 8_080),
            client,
            protocol,
            flags | tcp::ACK,
        );
        let mut link = A::link(1);
        (link.v4, link.v6) = (A::link(FAR_POD).v4, A::link(FAR_POD).v6);
        let answered = path::from_pod(&mut second, &link, &answer);
        assert_eq!(answered.action, Action::Network);
        assert_eq!(
            (answered.source, answered.source_port),
            (dialled.0, Port::new(dialled.1)),
            "the client sees whom it asked"
        );
    }
    // Nothing of the backend's side passes the first node, and yet the flow lasts as long as an answered one.
    let flow = first.flows.values().next().unwrap();
    let lasts = if protocol == TCP {
        timeout::TCP_ESTABLISHED_S
    } else {
        timeout::UDP_ANSWERED_S
    };
    assert_eq!(flow.timeout_s(false), lasts);
    // A node that is sent a client for whom it has no backend sends it no further.
    let mut third = node::<A>(true, protocol);
    let asked = packet(client, (A::service(SECOND), NODE_PORT), protocol, tcp::SYN);
    assert_eq!(run(&mut third, Hook::Overlay, &asked).action, Action::Drop);
    // Without the overlay the first node answers for the backend.
    let mut alone = node::<A>(true, protocol);
    alone.node.overlay_ifindex = 0;
    let asked = packet(client, dialled, protocol, tcp::SYN);
    let sent = run(&mut alone, Hook::Network, &asked);
    assert_eq!(
        (sent.action, sent.source),
        (Action::Network, A::node()),
        "translated as usual"
    );
}

#[test]
fn direct_return_keeps_the_client_and_the_dialled_address() {
    for protocol in [TCP, UDP] {
        answers_come_from_the_backends_node::<V4>(protocol);
        answers_come_from_the_backends_node::<V6>(protocol);
    }
}

#[test]
fn a_flow_of_a_backend_that_left_is_sent_elsewhere_or_refused() {
    let mut first = node::<V4>(true, UDP);
    let asked = packet(
        (V4::service(CLIENT), 4_000),
        (V4::node(), NODE_PORT),
        UDP,
        0,
    );
    assert_eq!(
        run(&mut first, Hook::Network, &asked).action,
        Action::Overlay
    );
    for state in first.states.values_mut() {
        *state = crate::layout::backend_state::ended(*state);
    }
    first.frontends.values_mut().for_each(|f| f.backends = 0);
    let decision = run(&mut first, Hook::Network, &asked);
    assert_eq!(decision.reason, DropReason::NoBackend);
    assert_eq!(tunnel_for(&mut first, &asked).found, 0);
}

#[test]
fn pods_reach_the_overlay_port_of_nobody_but_pods() {
    let mut tables = node::<V4>(true, UDP);
    let cases = [
        (V4::node(), true),
        (V4::service(SECOND), true),
        // Some other address of a node, for all this node knows: it would be masqueraded.
        (V4::service(123), true),
        (V4::pod(2), false),
        (V4::pod(FAR_POD), false),
    ];
    for (to, dropped) in cases {
        let sent = packet((V4::pod(1), 4_000), (to, OVERLAY_PORT), UDP, 0);
        let decision = run(&mut tables, Hook::Pod, &sent);
        let expected = if dropped {
            DropReason::OverlayPort
        } else {
            DropReason::None
        };
        assert_eq!(decision.reason, expected, "{to:?}");
        let other = packet((V4::pod(1), 4_000), (to, OVERLAY_PORT + 1), UDP, 0);
        assert_eq!(run(&mut tables, Hook::Pod, &other).reason, DropReason::None);
    }
    // Nor through a service that somebody pointed there.
    for backend in tables.backends.values_mut() {
        backend.address = V4::service(SECOND);
        backend.port = Port::new(OVERLAY_PORT);
    }
    tables.frontends.values_mut().for_each(|f| f.flags = 0);
    let asked = packet(
        (V4::service(CLIENT), 4_000),
        (V4::node(), NODE_PORT),
        UDP,
        0,
    );
    let decision = run(&mut tables, Hook::Network, &asked);
    assert_eq!(decision.reason, DropReason::OverlayPort);
    assert!(
        tables
            .flows
            .values()
            .all(|f| f.backend_port != Port::new(OVERLAY_PORT) || f.source == V4::pod(1))
    );
    // What nodes send one another is the stack's.
    let wrapped = packet(
        (V4::service(SECOND), 4_000),
        (V4::node(), OVERLAY_PORT),
        UDP,
        0,
    );
    let decision = run(&mut tables, Hook::Network, &wrapped);
    assert_eq!(
        (decision.action, decision.reason),
        (Action::Stack, DropReason::None)
    );
}

#[test]
fn tunnels_lead_to_ranges_of_nodes() {
    let mut tables = node::<V6>(true, TCP);
    let to_pod = packet((V6::pod(1), 4_000), (V6::pod(FAR_POD), 80), TCP, tcp::SYN);
    let tunnel = tunnel_for(&mut tables, &to_pod);
    assert_eq!((tunnel.found, tunnel.remote_v4), (1, REMOTE));
    let to_nobody = packet((V6::pod(1), 4_000), (V6::service(77), 80), TCP, tcp::SYN);
    assert_eq!(tunnel_for(&mut tables, &to_nobody).found, 0);
    assert!(is_node(&mut tables, &V6::service(SECOND)));
    for stranger in [V6::node(), V6::pod(1), V6::service(CLIENT)] {
        assert!(!is_node(&mut tables, &stranger), "{stranger:?}");
    }
}
