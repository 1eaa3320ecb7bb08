//! The decisions, one per hook. Each reads as the packet's path: who sent it, which flow or service it belongs to,
//! where it goes.

use crate::address::{Family, ICMPV6, Port, V4, V6};
use crate::flow::Fitness;
use crate::layout::{
    ENDPOINT_NODE, ENDPOINT_READY, Endpoint, Flow, FlowKey, FragmentKey, FragmentPorts,
    LINK_HAS_V4, LINK_HAS_V6, LINK_HOST, Link,
};
use crate::packet::{Action, Decision, FRAGMENT, Packet, Translation, WITH_PORTS};
use crate::reason::{DropReason, Event};
use crate::service;
use crate::tables::{Inserted, Tables};

/// Who sent a packet that may open a flow.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    Pod,
    /// A process of this node, or one that was routed here to reach a service.
    Host,
}

/// Addresses and ports after translation.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Translated<A> {
    pub(crate) translation: Translation,
    /// Anything but `None` drops the packet.
    pub(crate) reason: DropReason,
    pub(crate) source: A,
    pub(crate) destination: A,
    pub(crate) source_port: Port,
    pub(crate) destination_port: Port,
}

impl<A: Family> Translated<A> {
    #[inline(always)]
    pub(crate) fn none(packet: &Packet<A>) -> Self {
        Self {
            translation: Translation::None,
            reason: DropReason::None,
            source: packet.source,
            destination: packet.destination,
            source_port: packet.source_port,
            destination_port: packet.destination_port,
        }
    }

    #[inline(always)]
    pub(crate) fn drop(packet: &Packet<A>, reason: DropReason) -> Self {
        let mut translated = Self::none(packet);
        translated.reason = reason;
        translated
    }

    #[inline(always)]
    pub(crate) fn forward(packet: &Packet<A>, flow: &Flow<A>) -> Self {
        let mut translated = Self::none(packet);
        translated.translation = Translation::Forward;
        translated.source = flow.source;
        translated.destination = flow.backend;
        translated.source_port = flow.source_port;
        translated.destination_port = flow.backend_port;
        translated
    }

    /// The tuple of answers to a packet translated forward.
    #[inline(always)]
    pub(crate) fn reply_key(&self, packet: &Packet<A>) -> FlowKey<A> {
        FlowKey {
            source: self.destination,
            destination: self.source,
            source_port: self.destination_port,
            destination_port: self.source_port,
            protocol: packet.protocol as u32,
        }
    }
}

/// Which address of a family a link may send from.
pub trait LinkAddress: Family {
    /// True when `source` is the link's own.
    fn owned_by(source: &Self, link: &Link) -> bool;

    /// Neighbour discovery between a pod and its gateway, which uses addresses of the link.
    fn is_neighbour_discovery(packet: &Packet<Self>) -> bool;
}

impl LinkAddress for V4 {
    #[inline(always)]
    fn owned_by(source: &Self, link: &Link) -> bool {
        link.flags & LINK_HAS_V4 != 0 && *source == link.v4
    }

    #[inline(always)]
    fn is_neighbour_discovery(_packet: &Packet<Self>) -> bool {
        false
    }
}

impl LinkAddress for V6 {
    #[inline(always)]
    fn owned_by(source: &Self, link: &Link) -> bool {
        link.flags & LINK_HAS_V6 != 0 && *source == link.v6
    }

    #[inline(always)]
    fn is_neighbour_discovery(packet: &Packet<Self>) -> bool {
        packet.protocol == ICMPV6 && packet.destination.is_link_scope()
    }
}

/// Gives later fragments the ports that their first fragment had, and remembers those of a first. To be called before
/// the decision. Fragments that overtake their first stay without ports.
#[inline(always)]
pub fn complete_fragment<A: Family, T: Tables<A>>(tables: &mut T, packet: &mut Packet<A>) {
    if packet.flags & FRAGMENT == 0 {
        return;
    }
    let key = FragmentKey {
        source: packet.source,
        destination: packet.destination,
        identification: packet.identification,
        protocol: packet.protocol as u32,
    };
    if packet.has_ports() {
        let ports = FragmentPorts {
            source_port: packet.source_port,
            destination_port: packet.destination_port,
        };
        tables.set_fragment(&key, &ports);
    } else if let Some(ports) = tables.fragment(&key) {
        packet.source_port = ports.source_port;
        packet.destination_port = ports.destination_port;
        packet.flags |= WITH_PORTS;
    }
}

/// A packet that came in on a pod's link or on the host link.
#[inline(always)]
pub fn from_pod<A: LinkAddress, T: Tables<A>>(
    tables: &mut T,
    link: &Link,
    packet: &Packet<A>,
) -> Decision<A> {
    // What the kernel says on every link (solicitations, group reports) asks for no service.
    if A::is_neighbour_discovery(packet) {
        return Decision::untouched(packet, Action::Stack);
    }
    if link.flags & LINK_HOST != 0 {
        return from_host(tables, packet);
    }
    if !A::owned_by(&packet.source, link) {
        return Decision::drop(packet, DropReason::SpoofedSource);
    }
    let translated = translate(tables, packet, Origin::Pod);
    if translated.reason != DropReason::None {
        return Decision::drop(packet, translated.reason);
    }
    if translated.translation == Translation::None && packet.destination.is_link_scope() {
        return Decision::untouched(packet, Action::Stack);
    }
    deliver(tables, packet, &translated, Action::Network)
}

/// A packet from this node's own stack to a service address: everything on the host link is that, or an answer to it.
#[inline(always)]
fn from_host<A: Family, T: Tables<A>>(tables: &mut T, packet: &Packet<A>) -> Decision<A> {
    let translated = translate(tables, packet, Origin::Host);
    if translated.reason != DropReason::None {
        return Decision::drop(packet, translated.reason);
    }
    if translated.translation == Translation::None {
        return Decision::drop(packet, DropReason::NoFrontend);
    }
    deliver(tables, packet, &translated, Action::Network)
}

/// A packet from another machine.
#[inline(always)]
pub fn from_network<A: Family, T: Tables<A>>(tables: &mut T, packet: &Packet<A>) -> Decision<A> {
    let translated = answer_if_any(tables, packet);
    deliver(tables, packet, &translated, Action::Stack)
}

/// A packet of the node's own stack on its way into a pod.
#[inline(always)]
pub fn to_pod<A: Family, T: Tables<A>>(tables: &mut T, packet: &Packet<A>) -> Decision<A> {
    let translated = answer_if_any(tables, packet);
    decision(tables, packet, &translated, Action::Stack)
}

/// As [`answer`], for hooks where only answers are translated.
#[inline(always)]
fn answer_if_any<A: Family, T: Tables<A>>(tables: &mut T, packet: &Packet<A>) -> Translated<A> {
    if !packet.has_ports() {
        return Translated::none(packet);
    }
    let now_s = tables.now_s();
    answer(tables, packet, now_s)
}

/// Whether a packet, as it is after translation, may be put into the pod at `endpoint`. Asked for every packet that
/// enters a pod without passing its link's own egress hook.
#[inline(always)]
fn admit(endpoint: &Endpoint) -> DropReason {
    if endpoint.flags & ENDPOINT_READY == 0 {
        DropReason::EndpointNotReady
    } else {
        DropReason::None
    }
}

/// Finds the flow of a packet, or makes one when its destination is a service port.
#[inline(always)]
fn translate<A: Family, T: Tables<A>>(
    tables: &mut T,
    packet: &Packet<A>,
    origin: Origin,
) -> Translated<A> {
    if !packet.has_ports() {
        return Translated::none(packet);
    }
    let now_s = tables.now_s();
    let known = continue_flow(tables, packet, now_s);
    if known.translation != Translation::None {
        return known;
    }
    let answered = answer(tables, packet, now_s);
    if answered.translation != Translation::None {
        return answered;
    }
    service::open(tables, packet, origin, now_s)
}

/// A further packet of a client. A flow that may not be used any more is dissolved.
#[inline(always)]
fn continue_flow<A: Family, T: Tables<A>>(
    tables: &mut T,
    packet: &Packet<A>,
    now_s: u32,
) -> Translated<A> {
    let key = packet.key();
    let Some(flow) = tables.flow(&key) else {
        return Translated::none(packet);
    };
    let backend_id = flow.backend_id;
    let state = tables.backend_state(backend_id);
    let Some(flow) = tables.flow(&key) else {
        return Translated::none(packet);
    };
    let reply_key = flow.reply_key();
    if flow.fitness(packet, state, now_s) == Fitness::Renew {
        tables.remove_reply(&reply_key);
        tables.remove_flow(&key);
        tables.count(Event::FlowRenewed);
        return Translated::none(packet);
    }
    let first_in_second = flow.note_client(packet.tcp_flags, now_s);
    let translated = Translated::forward(packet, flow);
    if first_in_second && tables.insert_reply(&reply_key, &key) == Inserted::Done {
        tables.count(Event::FlowHealed);
    }
    translated
}

/// An answer of a backend. A reply entry without its flow is removed.
#[inline(always)]
fn answer<A: Family, T: Tables<A>>(
    tables: &mut T,
    packet: &Packet<A>,
    now_s: u32,
) -> Translated<A> {
    let key = packet.key();
    let Some(original) = tables.reply(&key) else {
        return Translated::none(packet);
    };
    let original = *original;
    let own = match tables.flow(&original) {
        Some(flow) if flow.reply_key() == key => {
            flow.note_server(packet.tcp_flags, now_s);
            true
        }
        _ => false,
    };
    if !own {
        tables.remove_reply(&key);
        tables.count(Event::FlowHealed);
        return Translated::none(packet);
    }
    let mut translated = Translated::none(packet);
    translated.translation = Translation::Reply;
    translated.source = original.destination;
    translated.destination = original.source;
    translated.source_port = original.destination_port;
    translated.destination_port = original.source_port;
    translated
}

/// Where a packet goes by its destination after translation; `otherwise` when that is nowhere on this node.
#[inline(always)]
fn deliver<A: Family, T: Tables<A>>(
    tables: &mut T,
    packet: &Packet<A>,
    translated: &Translated<A>,
    otherwise: Action,
) -> Decision<A> {
    let Some(endpoint) = tables.endpoint(&translated.destination) else {
        return decision(tables, packet, translated, otherwise);
    };
    let endpoint = *endpoint;
    if endpoint.flags & ENDPOINT_NODE != 0 {
        return deliver_to_node(tables, packet, translated);
    }
    let reason = admit(&endpoint);
    if reason != DropReason::None {
        return Decision::drop(packet, reason);
    }
    let mut decision = decision(tables, packet, translated, Action::Pod);
    decision.ifindex = endpoint.ifindex;
    decision.destination_mac = endpoint.pod_mac;
    decision.source_mac = endpoint.host_mac;
    decision
}

/// Packets that carry a service's address or the host link's own must come in where those are routed to, or a strict
/// reverse path filter refuses them.
#[inline(always)]
fn deliver_to_node<A: Family, T: Tables<A>>(
    tables: &mut T,
    packet: &Packet<A>,
    translated: &Translated<A>,
) -> Decision<A> {
    let mut ifindex = 0;
    let (mut host_mac, mut peer_mac) = ([0; 6], [0; 6]);
    let mut over_link = translated.translation == Translation::Reply;
    if let Some(node) = tables.node() {
        over_link |= translated.source == node.host_source;
        ifindex = node.host_peer_ifindex;
        host_mac = node.host_mac;
        peer_mac = node.peer_mac;
    }
    if !over_link || ifindex == 0 {
        return decision(tables, packet, translated, Action::Stack);
    }
    let mut decision = decision(tables, packet, translated, Action::Host);
    decision.ifindex = ifindex;
    decision.destination_mac = host_mac;
    decision.source_mac = peer_mac;
    decision
}

#[inline(always)]
fn decision<A: Family, T: Tables<A>>(
    tables: &mut T,
    packet: &Packet<A>,
    translated: &Translated<A>,
    action: Action,
) -> Decision<A> {
    match translated.translation {
        Translation::None => {}
        Translation::Forward => tables.count(Event::TranslatedForward),
        Translation::Reply => tables.count(Event::TranslatedReply),
    }
    let mut decision = Decision::untouched(packet, action);
    decision.translation = translated.translation;
    decision.source = translated.source;
    decision.destination = translated.destination;
    decision.source_port = translated.source_port;
    decision.destination_port = translated.destination_port;
    decision
}
