//! The decisions, one per hook. Each reads as the packet's path: who sent it, which flow it belongs to, where it goes.
//! A packet that belongs to no flow yet is for [`open`](crate::open), which runs as a program of its own.

use crate::address::{Family, ICMPV6, Port, V4, V6};
use crate::flow::Fitness;
use crate::icmp::Related;
use crate::layout::{
    ENDPOINT_NODE, ENDPOINT_PEER, ENDPOINT_READY, Endpoint, FLOW_DSR, FLOW_PLAIN, FLOW_SERVICE,
    Flow, FlowKey, FrontendKey, LINK_HAS_V4, LINK_HAS_V6, LINK_HOST, Link, Remembered, SCOPE_ALL,
};
use crate::packet::{Action, Decision, Packet, ROUTER, Translation};
use crate::policy::{Ends, Verdict, judge};
use crate::reason::{DropReason, Event};
use crate::tables::{Inserted, Tables};

pub use crate::open::open;
pub use crate::scratch::Scratch;
use crate::scratch::step;

/// Where a packet was met.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hook {
    /// In from a pod's link.
    Pod = 0,
    /// In from the host link: a process of this node that asks for a service.
    Host = 1,
    /// In from an uplink.
    Network = 2,
    /// Out of the loopback link: a process of this node that asks for an address of this node.
    Own = 3,
    /// Out to a pod or an uplink, from the node's own stack.
    Stack = 4,
    /// In from the overlay's device: a pod of another node, or a client that a node has sent here.
    Overlay = 5,
    /// Out to a pod: forwarded by the node's own stack, from a link without a program.
    Forward = 6,
}

impl Hook {
    /// The hook with this number; [`Hook::Pod`] for a number that none has.
    #[inline(always)]
    #[must_use]
    pub const fn from_number(number: u32) -> Self {
        match number {
            1 => Self::Host,
            2 => Self::Network,
            3 => Self::Own,
            4 => Self::Stack,
            5 => Self::Overlay,
            6 => Self::Forward,
            _ => Self::Pod,
        }
    }

    /// The sender may be outside the cluster.
    #[inline(always)]
    #[must_use]
    pub const fn is_outside(self) -> bool {
        matches!(self, Self::Network | Self::Overlay)
    }
}

/// Addresses and ports after translation.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Translated<A> {
    pub(crate) translation: Translation,
    /// Anything but `None` drops the packet.
    pub(crate) reason: DropReason,
    /// One when the packet belongs to a flow, translated or not.
    pub(crate) found: u32,
    /// One when another node does the translation.
    pub(crate) elsewhere: u32,
    /// One when the policies have to be asked before the packet goes on.
    pub(crate) unsettled: u32,
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
            found: 0,
            elsewhere: 0,
            unsettled: 0,
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
        translated.found = 1;
        if flow.flags & FLOW_DSR != 0 {
            translated.elsewhere = 1;
        }
        if flow.flags & FLOW_PLAIN == 0 {
            translated.translation = Translation::Forward;
            translated.source = flow.source;
            translated.destination = flow.backend;
            translated.source_port = flow.source_port;
            translated.destination_port = flow.backend_port;
        }
        translated
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

/// A packet that came in on a pod's link or on the host link.
#[inline(always)]
pub fn from_pod<A: LinkAddress, T: Tables<A>>(
    tables: &mut T,
    link: &Link,
    packet: &Packet<A>,
) -> Decision<A> {
    let hook = hook_of(link);
    if hook == Hook::Pod && packet.flags & ROUTER != 0 {
        return Decision::drop(packet, DropReason::SpoofedSource);
    }
    // What the kernel says on every link (solicitations, group reports) asks for no service.
    if A::is_neighbour_discovery(packet) {
        return Decision::untouched(packet, Action::Stack);
    }
    if hook == Hook::Pod && !A::owned_by(&packet.source, link) {
        return Decision::drop(packet, DropReason::SpoofedSource);
    }
    let known = known_flow(tables, packet);
    go_on(tables, hook, packet, &known)
}

/// A packet's flow, if it has one, says where it goes.
#[inline(always)]
fn go_on<A: Family, T: Tables<A>>(
    tables: &mut T,
    hook: Hook,
    packet: &Packet<A>,
    known: &Translated<A>,
) -> Decision<A> {
    if known.found == 0 {
        return undecided(packet);
    }
    if known.unsettled != 0 {
        return Decision::untouched(packet, Action::Judge);
    }
    deliver(tables, hook, packet, known)
}

/// No flow has the packet: which program says where it goes.
#[inline(always)]
fn undecided<A: Family>(packet: &Packet<A>) -> Decision<A> {
    let action = if packet.is_error() {
        Action::Relate
    } else {
        Action::Open
    };
    Decision::untouched(packet, action)
}

/// An ICMP error about a packet of a flow goes where the flow's packets go. `related` is what it is about.
#[inline(always)]
pub fn deliver_error<A: Family, T: Tables<A>>(
    tables: &mut T,
    hook: Hook,
    packet: &Packet<A>,
    related: &Related<A>,
) -> Decision<A> {
    let mut translated = Translated::none(packet);
    translated.found = 1;
    if related.changes != 0 {
        translated.translation = related.translation;
        translated.source = related.source;
        translated.destination = related.destination;
    }
    // The node's own stack has found the way already, unless it leads elsewhere now.
    let stays = hook == Hook::Stack && related.destination == packet.destination;
    if stays || hook == Hook::Forward {
        return decision(tables, packet, &translated, Action::Stack);
    }
    deliver(tables, hook, packet, &translated)
}

/// The hook that a link's ingress is.
#[inline(always)]
#[must_use]
pub fn hook_of(link: &Link) -> Hook {
    if link.flags & LINK_HOST != 0 {
        Hook::Host
    } else {
        Hook::Pod
    }
}

/// A packet from another machine.
#[inline(always)]
pub fn from_network<A: Family, T: Tables<A>>(tables: &mut T, packet: &Packet<A>) -> Decision<A> {
    from_elsewhere(tables, Hook::Network, packet)
}

/// A packet that another node has wrapped.
#[inline(always)]
pub fn from_overlay<A: Family, T: Tables<A>>(tables: &mut T, packet: &Packet<A>) -> Decision<A> {
    from_elsewhere(tables, Hook::Overlay, packet)
}

#[inline(always)]
fn from_elsewhere<A: Family, T: Tables<A>>(
    tables: &mut T,
    hook: Hook,
    packet: &Packet<A>,
) -> Decision<A> {
    let known = known_flow_answers_first(tables, packet);
    go_on(tables, hook, packet, &known)
}

/// A packet of a process of this node to an address of this node, on the loopback link.
#[inline(always)]
pub fn from_self<A: Family, T: Tables<A>>(tables: &mut T, packet: &Packet<A>) -> Decision<A> {
    if packet.destination.is_loopback() || !(packet.has_ports() || packet.is_error()) {
        return Decision::untouched(packet, Action::Stack);
    }
    let known = known_flow_answers_first(tables, packet);
    go_on(tables, Hook::Own, packet, &known)
}

/// A packet on its way into a pod that the node's own stack has forwarded, from a link without a program.
#[inline(always)]
pub fn to_pod<A: Family, T: Tables<A>>(tables: &mut T, packet: &Packet<A>) -> Decision<A> {
    let known = known_flow_answers_first(tables, packet);
    go_on(tables, Hook::Forward, packet, &known)
}

/// A packet of the node's own stack on its way into a pod: only answers are translated. Policies are not asked: a pod and
/// its node always reach one another.
#[inline(always)]
pub fn from_stack<A: Family, T: Tables<A>>(tables: &mut T, packet: &Packet<A>) -> Decision<A> {
    if packet.is_error() {
        return Decision::untouched(packet, Action::Relate);
    }
    if !packet.has_ports() {
        return Decision::untouched(packet, Action::Stack);
    }
    let now_s = tables.now_s();
    let translated = answer(tables, packet, now_s);
    decision(tables, packet, &translated, Action::Stack)
}

/// A packet of the node's own stack on its way out of an uplink. Answers are translated. What asks for a frontend is led
/// over the host link: of an address that is not a service's as a whole no route leads there.
#[inline(always)]
pub fn to_network<A: Family, T: Tables<A>>(tables: &mut T, packet: &Packet<A>) -> Decision<A> {
    let mut decision = from_stack(tables, packet);
    if decision.action != Action::Stack
        || decision.translation != Translation::None
        || !packet.has_ports()
    {
        return decision;
    }
    let key = FrontendKey {
        address: packet.destination,
        port: packet.destination_port,
        protocol: packet.protocol,
        scope: SCOPE_ALL,
    };
    if tables.frontend(&key).is_none() {
        // A process that sends datagrams from a port where a pod is served: what comes to that port from there is for it.
        let own = FrontendKey {
            address: packet.source,
            port: packet.source_port,
            ..key
        };
        if packet.is_udp() && tables.frontend(&own).is_some() {
            decision.action = Action::Open;
        }
        return decision;
    }
    if let Some(node) = tables.node()
        && node.host_ifindex != 0
    {
        decision.action = Action::Host;
        decision.ifindex = node.host_ifindex;
        decision.destination_mac = node.peer_mac;
        decision.source_mac = node.host_mac;
    }
    decision
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

/// The flow of a packet, as its client's or as an answer; not found when it has none.
#[inline(always)]
fn known_flow<A: Family, T: Tables<A>>(tables: &mut T, packet: &Packet<A>) -> Translated<A> {
    if !packet.has_ports() {
        return Translated::none(packet);
    }
    let now_s = tables.now_s();
    let known = continue_flow(tables, packet, now_s);
    if known.found != 0 {
        return known;
    }
    answer(tables, packet, now_s)
}

/// As [`known_flow`], for hooks where most packets are answers.
#[inline(always)]
pub(crate) fn known_flow_answers_first<A: Family, T: Tables<A>>(
    tables: &mut T,
    packet: &Packet<A>,
) -> Translated<A> {
    if !packet.has_ports() {
        return Translated::none(packet);
    }
    let now_s = tables.now_s();
    let known = answer(tables, packet, now_s);
    if known.found != 0 {
        return known;
    }
    continue_flow(tables, packet, now_s)
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
    let flow = *flow;
    if flow.flags & FLOW_SERVICE == 0 && (!packet.is_connected() || packet.opens()) {
        let generation = match tables.node() {
            Some(node) => node.generation,
            None => flow.generation,
        };
        if flow.generation != generation {
            // There may be a service at this address by now: the frontends are asked again.
            return Translated::none(packet);
        }
    }
    let state = if flow.flags & FLOW_SERVICE != 0 {
        tables.backend_state(flow.backend_id)
    } else {
        0
    };
    if flow.fitness(packet, state, now_s) == Fitness::Renew {
        tables.remove_reply(&flow.reply_key());
        tables.remove_flow(&key);
        tables.count(Event::FlowRenewed);
        return Translated::none(packet);
    }
    if flow.is_news_of_client(packet.tcp_flags, now_s) {
        let first_in_second = match tables.flow(&key) {
            Some(record) => record.note_client(packet.tcp_flags, now_s),
            None => false,
        };
        if first_in_second && tables.insert_reply(&flow.reply_key(), &key) == Inserted::Done {
            tables.count(Event::FlowHealed);
        }
    }
    let mut translated = Translated::forward(packet, &flow);
    translated.unsettled = !flow.is_settled(tables.policy_generation()) as u32;
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
    let generation = tables.policy_generation();
    let (mut flags, mut settled) = (0, true);
    let own = match tables.flow(&original) {
        Some(flow) if flow.is_answered_by(&key) => {
            flow.note_server(packet.tcp_flags, now_s);
            flags = flow.flags;
            settled = flow.is_settled(generation);
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
    translated.found = 1;
    translated.unsettled = !settled as u32;
    if flags & FLOW_PLAIN == 0 {
        translated.translation = Translation::Reply;
        translated.source = original.destination;
        translated.destination = original.source;
        translated.source_port = original.destination_port;
        translated.destination_port = original.source_port;
    }
    translated
}

/// Asks the policies about the flow of a packet, and says where the packet goes. What was a denied flow's stays in the
/// table, so that answers are not taken for questions; it is allowed again when the policies change their mind. An ICMP
/// error's flow is the one in `scratch`: see [`Scratch::set_flow`].
#[inline(always)]
pub fn settle<A: Family, T: Tables<A>>(
    tables: &mut T,
    hook: Hook,
    packet: &Packet<A>,
    scratch: &mut Scratch<A>,
) -> Decision<A> {
    scratch.hook = hook as u32;
    if !packet.is_error() {
        scratch.key = key_of_flow(tables, hook, packet);
    }
    let (packet, scratch) = step((packet, scratch));
    let generation = tables.policy_generation();
    match tables.flow(&scratch.key) {
        Some(flow) => scratch.flow = *flow,
        None if packet.is_error() => return Decision::untouched(packet, Action::Open),
        None => return undecided(packet),
    }
    let ends = Ends::of_flow(&scratch.key, &scratch.flow);
    if scratch.flow.policy.generation() == generation {
        scratch.verdict = Verdict::of_word(scratch.flow.policy.verdict());
    } else {
        scratch.verdict = judge(tables, &ends);
        let scratch = step(&mut *scratch);
        // A verdict that came late must not be taken for one on the policies of now.
        if tables.policy_generation() == generation
            && let Some(flow) = tables.flow(&scratch.key)
        {
            flow.policy = Remembered::new(scratch.verdict.word, generation);
        }
    }
    let (packet, scratch) = step((packet, scratch));
    if scratch.verdict.reason != DropReason::None {
        let ends = Ends::of_flow(&scratch.key, &scratch.flow);
        tables.denied(&ends, scratch.key.source_port, &scratch.verdict);
        return Decision::drop(packet, scratch.verdict.reason);
    }
    if packet.is_error() {
        return Decision::untouched(packet, Action::Relate);
    }
    let hook = scratch.hook();
    scratch.translated = if hook == Hook::Pod || hook == Hook::Host {
        known_flow(tables, packet)
    } else {
        known_flow_answers_first(tables, packet)
    };
    let (packet, scratch) = step((packet, scratch));
    if scratch.translated.found == 0 {
        return undecided(packet);
    }
    deliver(tables, scratch.hook(), packet, &scratch.translated)
}

/// The key of the flow that [`known_flow`] or [`known_flow_answers_first`] finds for a packet; of no flow if they find
/// none.
#[inline(always)]
fn key_of_flow<A: Family, T: Tables<A>>(
    tables: &mut T,
    hook: Hook,
    packet: &Packet<A>,
) -> FlowKey<A> {
    let key = packet.key();
    let client_first = hook == Hook::Pod || hook == Hook::Host;
    if client_first && tables.flow(&key).is_some() {
        return key;
    }
    let original = match tables.reply(&key) {
        Some(original) => *original,
        None => return key,
    };
    match tables.flow(&original) {
        Some(flow) if flow.is_answered_by(&key) => original,
        _ => key,
    }
}

/// Where a packet goes by its destination after translation.
#[inline(always)]
pub(crate) fn deliver<A: Family, T: Tables<A>>(
    tables: &mut T,
    hook: Hook,
    packet: &Packet<A>,
    translated: &Translated<A>,
) -> Decision<A> {
    if translated.elsewhere != 0 {
        return decision(tables, packet, translated, Action::Overlay);
    }
    // What comes in untranslated and is for nobody here is the stack's to forward.
    let elsewhere = if hook.is_outside() && translated.translation == Translation::None {
        Action::Stack
    } else {
        Action::Network
    };
    if hook == Hook::Forward {
        return decision(tables, packet, translated, Action::Stack);
    }
    let Some(endpoint) = tables.endpoint(&translated.destination) else {
        if hook == Hook::Pod && translated.destination.is_link_scope() {
            return decision(tables, packet, translated, Action::Stack);
        }
        if elsewhere == Action::Stack && translated.found != 0 {
            // Of what comes in untranslated, only flows of this node's pods are recorded: the pod has gone.
            return Decision::drop(packet, DropReason::NoEndpoint);
        }
        return decision(tables, packet, translated, elsewhere);
    };
    let endpoint = *endpoint;
    if endpoint.flags & ENDPOINT_NODE != 0 {
        return deliver_to_node(tables, hook, packet, translated);
    }
    if endpoint.flags & ENDPOINT_PEER != 0 {
        return decision(tables, packet, translated, elsewhere);
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

/// Packets that carry a service's address or one of the node's own must come in over the host link, which accepts
/// them, or a reverse path filter refuses them.
#[inline(always)]
fn deliver_to_node<A: Family, T: Tables<A>>(
    tables: &mut T,
    hook: Hook,
    packet: &Packet<A>,
    translated: &Translated<A>,
) -> Decision<A> {
    let over_link = match translated.translation {
        Translation::None => false,
        Translation::Reply => true,
        Translation::Forward => hook == Hook::Host || hook == Hook::Own,
    };
    let mut ifindex = 0;
    let (mut host_mac, mut peer_mac) = ([0; 6], [0; 6]);
    if over_link && let Some(node) = tables.node() {
        ifindex = node.host_peer_ifindex;
        host_mac = node.host_mac;
        peer_mac = node.peer_mac;
    }
    if ifindex == 0 {
        return decision(tables, packet, translated, Action::Stack);
    }
    let mut decision = decision(tables, packet, translated, Action::Host);
    decision.ifindex = ifindex;
    decision.destination_mac = host_mac;
    decision.source_mac = peer_mac;
    decision
}

#[inline(always)]
pub(crate) fn decision<A: Family, T: Tables<A>>(
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
