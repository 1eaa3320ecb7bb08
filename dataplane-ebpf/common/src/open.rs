//! From a packet without a flow to one: a service port's backend, or the destination itself; the source that it will
//! see; and the pair of entries.

use crate::address::{Family, ICMP, ICMPV6, Port, SCTP, TCP, UDP};
use crate::claim::enter;
use crate::fragment::PARK_ALIVE_S;
use crate::icmp::is_virtual;
use crate::layout::{
    ENDPOINT_NODE, ENDPOINT_NODE_PORTS, ENDPOINT_PEER, FLOW_INBOUND, FLOW_MASQUERADED, FLOW_PLAIN,
    FLOW_SERVICE, FRONTEND_EXTERNAL_SCOPE, Flow, FrontendKey, NODE_MASQUERADE, Park, RANGE_OWN,
    RANGE_SERVICE, Remembered, SCOPE_ALL, SCOPE_EXTERNAL,
};
use crate::overlay;
use crate::packet::{Action, Decision, LATER_FRAGMENT, Packet, tcp};
use crate::path::{Hook, Translated, deliver};
use crate::policy::{Ends, Verdict, judge, verdict};
use crate::reason::{DropReason, Event};
use crate::scratch::{Scratch, step};
use crate::service;
use crate::tables::Tables;

/// What a destination is to services.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) enum Served {
    /// No address of a service.
    #[default]
    No,
    /// A service port.
    Port,
    /// An address of a service, at a port that it does not have.
    Address,
}

/// What a packet's destination is to the node.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    /// Flags of the endpoint; zero when there is none.
    pub(crate) endpoint: u32,
    /// Flags of the range; zero when there is none, or when the endpoint says enough.
    pub(crate) range: u32,
}

impl Place {
    #[inline(always)]
    pub(crate) fn of<A: Family, T: Tables<A>>(tables: &mut T, address: &A) -> Self {
        let endpoint = match tables.endpoint(address) {
            Some(endpoint) => endpoint.flags,
            None => 0,
        };
        if endpoint != 0 {
            return Self { endpoint, range: 0 };
        }
        let range = match tables.range(address) {
            Some(range) => range.flags,
            None => 0,
        };
        Self { endpoint, range }
    }

    /// Neither in the cluster nor exempt: pods are masqueraded on the way there.
    #[inline(always)]
    pub(crate) fn is_outside(self) -> bool {
        self.endpoint == 0 && self.range == 0
    }

    /// An address of this cluster that nobody has.
    #[inline(always)]
    fn is_nobody(self) -> bool {
        self.range & (RANGE_OWN | RANGE_SERVICE) != 0
    }

    /// Why packets to [nobody](Self::is_nobody) are refused.
    #[inline(always)]
    fn refusal(self) -> DropReason {
        if self.range & RANGE_OWN != 0 {
            DropReason::NoEndpoint
        } else {
            DropReason::NoFrontend
        }
    }

    /// A pod of this node.
    #[inline(always)]
    pub(crate) fn is_local_pod(self) -> bool {
        self.endpoint != 0 && self.endpoint & (ENDPOINT_NODE | ENDPOINT_PEER) == 0
    }
}

/// What is known of a packet before the policies are asked.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Plan {
    /// [`Action::Open`] goes on; anything else is where the packet goes as it is.
    action: Action,
    /// Anything but `None` drops the packet.
    reason: DropReason,
    /// For [`Action::Park`].
    ifindex: u32,
    /// Seconds for which the client's other flows are to go to the same backend.
    pub(crate) affinity_s: u32,
}

impl Plan {
    #[inline(always)]
    fn of(action: Action, reason: DropReason) -> Self {
        Self {
            action,
            reason,
            ifindex: 0,
            affinity_s: 0,
        }
    }
}

/// Makes a flow for a packet that has none, and says where the packet goes. What the policies deny leaves no trace.
#[inline(always)]
pub fn open<A: Family, T: Tables<A>>(
    tables: &mut T,
    hook: Hook,
    packet: &Packet<A>,
    scratch: &mut Scratch<A>,
) -> Decision<A> {
    scratch.hook = hook as u32;
    scratch.flow = Flow::of_packet(packet, tables.now_s());
    scratch.flow.policy = Remembered::new(Verdict::UNASKED.word, tables.policy_generation());
    let (packet, scratch) = step((packet, scratch));
    let own = is_own(scratch.hook(), packet);
    if own {
        scratch.flow.flags = FLOW_PLAIN;
    } else {
        if packet.has_ports() {
            plan(tables, packet, scratch);
        } else {
            scratch.plan = plan_without_ports(tables, scratch.hook(), packet);
        }
        let (packet, scratch) = step((packet, &mut *scratch));
        let plan = &scratch.plan;
        if plan.reason != DropReason::None {
            return Decision::drop(packet, plan.reason);
        }
        if plan.action != Action::Open {
            let mut decision = Decision::untouched(packet, plan.action);
            decision.ifindex = plan.ifindex;
            return decision;
        }
        scratch.verdict = judge_first(tables, packet, scratch);
        let (packet, scratch) = step((packet, scratch));
        if scratch.verdict.reason != DropReason::None {
            return Decision::drop(packet, scratch.verdict.reason);
        }
        service::remember(tables, packet, &scratch.flow, scratch.plan.affinity_s);
        let (hook, verdict, flow) = (scratch.hook(), scratch.verdict, &mut scratch.flow);
        flow.policy = Remembered::new(verdict.word, flow.policy.generation());
        if flow.flags == 0 && has_judged_answers(hook, packet, &verdict) {
            flow.flags = FLOW_PLAIN;
        }
        if hook.is_outside() && flow.flags != 0 {
            flow.flags |= FLOW_INBOUND;
        }
    }
    let (packet, scratch) = step((packet, scratch));
    if scratch.flow.flags == 0 {
        scratch.translated = Translated::none(packet);
    } else {
        track(tables, packet, scratch);
    }
    let (packet, scratch) = step((packet, scratch));
    let hook = scratch.hook();
    if is_own(hook, packet) {
        return Decision::untouched(packet, Action::Stack);
    }
    if scratch.translated.reason != DropReason::None {
        return Decision::drop(packet, scratch.translated.reason);
    }
    deliver(tables, hook, packet, &scratch.translated)
}

/// True for a datagram of a process of this node, from a port where somebody else is served. It goes its way, recorded or
/// not.
#[inline(always)]
fn is_own<A: Family>(hook: Hook, packet: &Packet<A>) -> bool {
    hook == Hook::Stack && packet.has_ports()
}

/// Where a packet with ports leads: to a service's backend, or to its destination.
#[inline(always)]
fn plan<A: Family, T: Tables<A>>(tables: &mut T, packet: &Packet<A>, scratch: &mut Scratch<A>) {
    scratch.plan = Plan::of(Action::Open, DropReason::None);
    scratch.frontend = FrontendKey {
        address: packet.destination,
        port: packet.destination_port,
        protocol: packet.protocol,
        scope: SCOPE_ALL,
    };
    scratch.served = find_frontend(tables, scratch.hook(), &mut scratch.frontend, packet);
    let (packet, scratch) = step((packet, scratch));
    let hook = scratch.hook();
    if hook == Hook::Forward
        || scratch.served == Served::Port && is_for_own_process(tables, hook, packet)
    {
        scratch.served = Served::No;
    }
    let (packet, scratch) = step((packet, scratch));
    scratch.plan.reason = match scratch.served {
        Served::Port => {
            service::choose(tables, packet, scratch);
            let (packet, scratch) = step((packet, &mut *scratch));
            service::lead(tables, packet, scratch)
        }
        Served::Address => DropReason::NoFrontend,
        Served::No => match scratch.hook() {
            Hook::Host => DropReason::NoFrontend,
            Hook::Own | Hook::Stack => {
                scratch.plan.action = Action::Stack;
                return;
            }
            Hook::Pod => direct(tables, packet, &mut scratch.flow),
            Hook::Network | Hook::Overlay => inbound(tables, packet, &mut scratch.flow),
            Hook::Forward => forwarded(tables, packet, &mut scratch.flow),
        },
    };
    let (packet, scratch) = step((packet, scratch));
    if scratch.plan.reason == DropReason::None
        && overlay::is_abused(tables, scratch.hook(), packet, &scratch.flow)
    {
        scratch.plan.reason = DropReason::OverlayPort;
    }
}

/// What the policies say of a packet without a flow, which would lead where the flow in the scratch leads.
#[inline(always)]
fn judge_first<A: Family, T: Tables<A>>(
    tables: &mut T,
    packet: &Packet<A>,
    scratch: &Scratch<A>,
) -> Verdict {
    let (hook, flow) = (scratch.hook(), &scratch.flow);
    if hook == Hook::Pod && packet.destination.stays_on_link() {
        // Nobody but the pod's own node gets it.
        return Verdict::UNASKED;
    }
    let ends = Ends {
        source: packet.source,
        destination: flow.backend,
        port: flow.backend_port,
        protocol: packet.protocol,
        outside: hook.is_outside() as u8,
    };
    let verdict = judge(tables, &ends);
    if verdict.reason != DropReason::None {
        tables.denied(&ends, packet.source_port, &verdict);
    }
    verdict
}

/// True for packets that were judged and need no record but for their answers, which would be judged on their own: echo
/// requests, and what goes to link-local addresses.
#[inline(always)]
fn has_judged_answers<A: Family>(hook: Hook, packet: &Packet<A>, verdict: &Verdict) -> bool {
    if verdict.judged == 0 || !packet.has_ports() {
        return false;
    }
    // From outside only what enters a pod: anybody can write a pod's address as the source.
    if hook.is_outside() && verdict.word & verdict::INGRESS == 0 {
        return false;
    }
    if packet.protocol == ICMP || packet.protocol == ICMPV6 {
        return packet.destination_port == Port(0);
    }
    is_tracked(packet)
}

/// True for a segment of a connection that nobody opened through this node, to an address of the node: a process of the
/// node may have opened it from a port that is a Service's as well. If none has, the stack resets it.
#[inline(always)]
fn is_for_own_process<A: Family, T: Tables<A>>(
    tables: &mut T,
    hook: Hook,
    packet: &Packet<A>,
) -> bool {
    if hook != Hook::Network || !packet.is_connected() || packet.opens() {
        return false;
    }
    match tables.endpoint(&packet.destination) {
        Some(endpoint) => endpoint.flags & ENDPOINT_NODE != 0,
        None => false,
    }
}

/// Packets that no flow can have: other protocols, errors about packets that no flow has, fragments whose first is
/// unknown.
#[inline(always)]
fn plan_without_ports<A: Family, T: Tables<A>>(
    tables: &mut T,
    hook: Hook,
    packet: &Packet<A>,
) -> Plan {
    if is_early(packet) && is_ours(tables, hook, packet) {
        return park(tables, packet);
    }
    match hook {
        Hook::Host => Plan::of(Action::Drop, DropReason::NoFrontend),
        Hook::Own | Hook::Stack => Plan::of(Action::Stack, DropReason::None),
        Hook::Forward if !Place::of(tables, &packet.destination).is_local_pod() => {
            Plan::of(Action::Drop, DropReason::EndpointNotReady)
        }
        Hook::Pod | Hook::Network | Hook::Overlay | Hook::Forward => {
            Plan::of(Action::Open, DropReason::None)
        }
    }
}

/// A fragment whose ports are not known yet.
#[inline(always)]
fn is_early<A: Family>(packet: &Packet<A>) -> bool {
    packet.flags & LATER_FRAGMENT != 0
        && matches!(packet.protocol, TCP | UDP | SCTP | ICMP | ICMPV6)
}

/// True when the way of a fragment depends on its ports. The node's own stack sends fragments in their order.
#[inline(always)]
fn is_ours<A: Family, T: Tables<A>>(tables: &mut T, hook: Hook, packet: &Packet<A>) -> bool {
    match hook {
        Hook::Pod => !packet.destination.is_link_scope(),
        Hook::Host => true,
        Hook::Network | Hook::Overlay => {
            let place = Place::of(tables, &packet.destination);
            place.is_local_pod()
                || place.endpoint & ENDPOINT_NODE != 0
                || is_virtual(tables, packet.destination)
        }
        Hook::Own | Hook::Stack | Hook::Forward => false,
    }
}

/// Keeps a fragment until its first has passed. While nobody keeps it, those for the node itself go on without.
#[inline(always)]
fn park<A: Family, T: Tables<A>>(tables: &mut T, packet: &Packet<A>) -> Plan {
    let park: Park = Tables::<A>::park(tables);
    if park.ifindex != 0 && tables.now_s().saturating_sub(park.alive_s) <= PARK_ALIVE_S {
        let mut plan = Plan::of(Action::Park, DropReason::None);
        plan.ifindex = park.ifindex;
        return plan;
    }
    let on_node = match tables.endpoint(&packet.destination) {
        Some(endpoint) => endpoint.flags & ENDPOINT_NODE != 0,
        None => false,
    };
    if on_node {
        Plan::of(Action::Stack, DropReason::None)
    } else {
        Plan::of(Action::Drop, DropReason::EarlyFragment)
    }
}

/// Looks a destination up among the frontends, and leaves the key of the one to use in `key`.
#[inline(always)]
fn find_frontend<A: Family, T: Tables<A>>(
    tables: &mut T,
    hook: Hook,
    key: &mut FrontendKey<A>,
    packet: &Packet<A>,
) -> Served {
    if is_frontend(tables, hook, key) {
        return Served::Port;
    }
    // A node sends clients on that asked at its own address.
    let serving = if hook == Hook::Network {
        ENDPOINT_NODE
    } else {
        ENDPOINT_NODE | ENDPOINT_PEER
    };
    let node_ports = match tables.endpoint(&packet.destination) {
        Some(endpoint) => {
            endpoint.flags & ENDPOINT_NODE_PORTS != 0 && endpoint.flags & serving != 0
        }
        None => false,
    };
    key.address = A::default();
    if node_ports && is_frontend(tables, hook, key) {
        return Served::Port;
    }
    key.address = packet.destination;
    key.port = Port(0);
    key.protocol = 0;
    key.scope = SCOPE_ALL;
    if tables.frontend(key).is_some() {
        return Served::Address;
    }
    Served::No
}

/// True when a service has this port; clients outside the cluster are led to their own entry where there is one.
#[inline(always)]
fn is_frontend<A: Family, T: Tables<A>>(
    tables: &mut T,
    hook: Hook,
    key: &mut FrontendKey<A>,
) -> bool {
    let Some(frontend) = tables.frontend(key) else {
        return false;
    };
    if hook.is_outside() && frontend.flags & FRONTEND_EXTERNAL_SCOPE != 0 {
        key.scope = SCOPE_EXTERNAL;
    }
    true
}

/// A pod's packet to an address that is no service's. The flow keeps flags of zero when none is to be recorded.
#[inline(always)]
fn direct<A: Family, T: Tables<A>>(
    tables: &mut T,
    packet: &Packet<A>,
    flow: &mut Flow<A>,
) -> DropReason {
    if packet.destination.is_link_scope() {
        return DropReason::None;
    }
    let place = Place::of(tables, &packet.destination);
    if place.is_nobody() {
        return place.refusal();
    }
    // An answer whose flow was not seen from its start keeps its source.
    let answers =
        packet.is_connected() && packet.tcp_flags & (tcp::SYN | tcp::ACK) == tcp::SYN | tcp::ACK;
    if place.is_outside() && !answers && masquerades(tables) {
        flow.flags = FLOW_MASQUERADED;
        return use_node_address(tables, flow);
    }
    if is_tracked(packet) {
        flow.flags = FLOW_PLAIN;
    }
    DropReason::None
}

/// A packet from another machine to an address that is no service's. As [`direct`].
#[inline(always)]
fn inbound<A: Family, T: Tables<A>>(
    tables: &mut T,
    packet: &Packet<A>,
    flow: &mut Flow<A>,
) -> DropReason {
    let place = Place::of(tables, &packet.destination);
    if place.is_nobody() {
        return place.refusal();
    }
    if place.is_local_pod() && is_tracked(packet) {
        flow.flags = FLOW_PLAIN;
    }
    DropReason::None
}

/// A packet on its way into a pod by the node's own routes. As [`direct`].
#[inline(always)]
fn forwarded<A: Family, T: Tables<A>>(
    tables: &mut T,
    packet: &Packet<A>,
    flow: &mut Flow<A>,
) -> DropReason {
    if !Place::of(tables, &packet.destination).is_local_pod() {
        // A pod that is not there yet, or not any more.
        return DropReason::EndpointNotReady;
    }
    if is_tracked(packet) {
        flow.flags = FLOW_PLAIN;
    }
    DropReason::None
}

/// Flows that need no translation are recorded from their start only, so that nobody takes an answer for a question.
#[inline(always)]
fn is_tracked<A: Family>(packet: &Packet<A>) -> bool {
    if packet.protocol == ICMP || packet.protocol == ICMPV6 {
        return false;
    }
    !packet.is_connected() || packet.opens()
}

#[inline(always)]
fn masquerades<A: Family, T: Tables<A>>(tables: &mut T) -> bool {
    match tables.node() {
        Some(node) => node.flags & NODE_MASQUERADE != 0 && node.address != A::default(),
        None => false,
    }
}

/// Enters a flow, or finds the direct one that is there already, and leaves in the scratch what that makes of the packet.
#[inline(always)]
fn track<A: Family, T: Tables<A>>(tables: &mut T, packet: &Packet<A>, scratch: &mut Scratch<A>) {
    scratch.key = packet.key();
    scratch.flow.generation = match tables.node() {
        Some(node) => node.generation,
        None => 0,
    };
    if let Some(present) = tables.flow(&scratch.key)
        && present.flags & FLOW_SERVICE == 0
    {
        if scratch.flow.flags & FLOW_SERVICE == 0 {
            // Looked at again since frontends changed: it is still nobody's.
            present.generation = scratch.flow.generation;
            present.policy = scratch.flow.policy;
            present.note_client(packet.tcp_flags, scratch.flow.client_seen_s);
            scratch.translated = Translated::forward(packet, present);
            return;
        }
        // From before the address was a service's: it gives way.
        let reply_key = present.reply_key();
        tables.remove_reply(&reply_key);
        tables.remove_flow(&scratch.key);
        tables.count(Event::FlowRenewed);
    }
    scratch.plain = scratch.flow.flags & FLOW_PLAIN;
    let (packet, scratch) = step((packet, scratch));
    scratch.translated = enter(tables, scratch, packet);
    let (packet, scratch) = step((packet, scratch));
    if scratch.translated.reason == DropReason::FlowTableFull && scratch.plain != 0 {
        tables.count(Event::FlowUntracked);
        scratch.translated = Translated::none(packet);
    }
}

/// The node's address as the source of a flow, whose port is chosen as it is entered.
#[inline(always)]
pub(crate) fn use_node_address<A: Family, T: Tables<A>>(
    tables: &mut T,
    flow: &mut Flow<A>,
) -> DropReason {
    let address = match tables.node() {
        Some(node) => node.address,
        None => A::default(),
    };
    if address == A::default() {
        return DropReason::NoNodeAddress;
    }
    flow.source = address;
    DropReason::None
}
