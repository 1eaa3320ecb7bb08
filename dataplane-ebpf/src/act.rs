//! Carrying out a decision: translate, then hand the packet to where it goes.

use core::mem::zeroed;

use aya_ebpf::bindings::{
    BPF_FIB_LKUP_RET_NO_NEIGH, BPF_FIB_LKUP_RET_SUCCESS, BPF_FIB_LKUP_RET_UNREACHABLE,
    bpf_fib_lookup as FibLookup, bpf_redir_neigh as NextHop,
};
use aya_ebpf::helpers::{bpf_fib_lookup, bpf_redirect, bpf_redirect_neigh, bpf_redirect_peer};
use aya_ebpf::programs::TcContext;
use dataplane_common::layout::RANGE_OWN;
use dataplane_common::packet::{Action, Decision, Translation};
use dataplane_common::reason::{DropReason, Event};
use dataplane_common::{Tables, V4, V6, sctp, tail};

use crate::PASS;
use crate::maps::{
    MapTables, call, count_event, drop_packet, host_ifindex, host_peer_and_uplink, overlay_ifindex,
};
use crate::packet::{Headers, Parsed, ifindex};
use crate::rewrite::{Addresses, count_hop, rewrite, write_macs};

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

/// Families that the programs can read, write and route.
pub(crate) trait Wire: Headers + Addresses {
    /// Fills in what a route lookup needs of this family.
    fn ask(lookup: &mut FibLookup, source: &Self, destination: &Self);
    /// True for addresses of this node's pods, whether a pod has them or not.
    fn is_own_range(address: &Self) -> bool;
    /// The gateway, or the destination itself, as the lookup answered it.
    fn next_hop(lookup: &FibLookup) -> NextHop;
}

/// `own` says that the packet is on its way out of the loopback link.
#[inline(always)]
pub(crate) fn carry_out<A: Wire>(
    context: &TcContext,
    parsed: &Parsed<A>,
    decision: &Decision<A>,
    own: bool,
) -> i32 {
    if decision.action == Action::Drop {
        return drop_or_refuse(context, decision.reason);
    }
    let mut way = Way::none();
    if decision.action == Action::Network {
        // Asked before the packet is changed: whoever sent it is told in its own words when there is no way.
        way = find_way(context, parsed, decision, own);
        if way.reason != DropReason::None {
            return drop_or_refuse(context, way.reason);
        }
    }
    let refused = translate(context, parsed, decision);
    if refused != DropReason::None {
        return drop_packet(refused);
    }
    match decision.action {
        Action::Drop => drop_packet(decision.reason),
        Action::Stack => {
            count_event(Event::ToStack);
            PASS
        }
        Action::Pod => to_pod(context, decision, own),
        Action::Host => to_host(context, decision),
        Action::Network => to_network(context, parsed, &mut way),
        Action::Overlay => to_backend_node(),
        // Whoever asked for a decision takes these to the next program.
        Action::Open | Action::Relate | Action::Park | Action::Judge => {
            drop_packet(DropReason::ProgramMissing)
        }
    }
}

/// As [`carry_out`], for hooks whose packets go on where they are, translated or not.
#[inline(always)]
pub(crate) fn carry_out_in_place<A: Wire>(
    context: &TcContext,
    parsed: &Parsed<A>,
    decision: &Decision<A>,
) -> i32 {
    if decision.action == Action::Drop {
        return drop_packet(decision.reason);
    }
    let refused = translate(context, parsed, decision);
    if refused != DropReason::None {
        return drop_packet(refused);
    }
    PASS
}

/// Why the packet cannot be as decided, if it cannot.
#[inline(always)]
fn translate<A: Wire>(
    context: &TcContext,
    parsed: &Parsed<A>,
    decision: &Decision<A>,
) -> DropReason {
    if decision.translation == Translation::None {
        return DropReason::None;
    }
    if sctp::is_torn(&parsed.packet, decision) {
        return DropReason::SctpFragment;
    }
    if !rewrite(context, parsed, decision) {
        return DropReason::RewriteFailed;
    }
    DropReason::None
}

/// Counts the drop, and lets the sender know where it should.
#[inline(always)]
fn drop_or_refuse(context: &TcContext, reason: DropReason) -> i32 {
    let verdict = drop_packet(reason);
    if reason.is_refusal() {
        call(context, tail::REFUSE);
    }
    verdict
}

#[inline(always)]
fn to_pod<A>(context: &TcContext, decision: &Decision<A>, own: bool) -> i32 {
    if !write_macs(context, &decision.destination_mac, &decision.source_mac) {
        return drop_packet(DropReason::RewriteFailed);
    }
    count_event(Event::ToPod);
    if own {
        // The way into the peer is open to packets that came in only.
        // SAFETY: plain numbers; the kernel looks the link up.
        return unsafe { bpf_redirect(decision.ifindex, 0) as i32 };
    }
    // SAFETY: plain numbers; the kernel looks the link up.
    unsafe { bpf_redirect_peer(decision.ifindex, 0) as i32 }
}

/// Out of one end of the host link, and so in at the other: that of the node's own stack, or that of its program.
#[inline(always)]
pub(crate) fn to_host<A>(context: &TcContext, decision: &Decision<A>) -> i32 {
    if !write_macs(context, &decision.destination_mac, &decision.source_mac) {
        return drop_packet(DropReason::RewriteFailed);
    }
    count_event(Event::ToHost);
    // SAFETY: plain numbers; the kernel looks the link up.
    unsafe { bpf_redirect(decision.ifindex, 0) as i32 }
}

/// How a packet leaves for another machine.
#[repr(C)]
struct Way {
    /// Anything but `None` drops the packet.
    reason: DropReason,
    /// The link to leave by; zero leaves the packet to the stack.
    ifindex: u32,
    /// One when the next hop is known; the kernel looks it up itself otherwise.
    resolved: u32,
    next_hop: NextHop,
}

impl Way {
    #[inline(always)]
    fn none() -> Self {
        Self {
            reason: DropReason::None,
            ifindex: 0,
            resolved: 0,
            // SAFETY: a C structure of integers, for which zero is valid.
            next_hop: unsafe { zeroed() },
        }
    }
}

#[inline(always)]
fn find_way<A: Wire>(
    context: &TcContext,
    parsed: &Parsed<A>,
    decision: &Decision<A>,
    own: bool,
) -> Way {
    let mut way = Way::none();
    // SAFETY: a C structure of integers, for which zero is valid.
    let mut lookup: FibLookup = unsafe { zeroed() };
    lookup.l4_protocol = parsed.packet.protocol;
    lookup.sport = decision.source_port.0;
    lookup.dport = decision.destination_port.0;
    lookup.ifindex = ifindex(context);
    A::ask(&mut lookup, &decision.source, &decision.destination);
    // SAFETY: the structure is as large as said.
    let result = unsafe {
        bpf_fib_lookup(
            context.skb.skb.cast(),
            core::ptr::from_mut(&mut lookup),
            size_of::<FibLookup>() as i32,
            0,
        )
    };
    let found = result == BPF_FIB_LKUP_RET_SUCCESS as i64;
    // Kernels before 5.12 do not name the link while the neighbour is unknown.
    let unresolved =
        result == BPF_FIB_LKUP_RET_NO_NEIGH as i64 && lookup.ifindex != ifindex(context);
    if found || unresolved {
        if lookup.ifindex == host_ifindex() {
            // Routed to the host link: an address of the service ranges, where nothing is served.
            way.reason = DropReason::NoFrontend;
        }
        way.ifindex = lookup.ifindex;
        way.resolved = 1;
        way.next_hop = A::next_hop(&lookup);
    } else if result == BPF_FIB_LKUP_RET_NO_NEIGH as i64 {
        // The stack would refuse the node's own address as a source from outside, so the way out is an uplink: the one
        // that a packet came in by, or the first.
        let (host_peer, uplink) = host_peer_and_uplink();
        way.ifindex = if ifindex(context) == host_peer || own {
            uplink
        } else {
            ifindex(context)
        };
    } else if result == BPF_FIB_LKUP_RET_UNREACHABLE as i64
        && (decision.translation != Translation::None || A::is_own_range(&decision.destination))
    {
        way.reason = DropReason::NoEndpoint;
    }
    // No route, a packet too big, or an address of this node: the stack knows what to answer.
    way
}

/// Out of the overlay's device, whose program finds the tunnel by the packet's flow.
#[inline(always)]
fn to_backend_node() -> i32 {
    count_event(Event::ToBackendNode);
    // SAFETY: plain numbers; the kernel looks the link up.
    unsafe { bpf_redirect(overlay_ifindex(), 0) as i32 }
}

/// A packet that has no hop left is the stack's, which tells its sender.
#[inline(always)]
fn to_network<A: Wire>(context: &TcContext, parsed: &Parsed<A>, way: &mut Way) -> i32 {
    if way.ifindex == 0 || parsed.hops <= 1 {
        count_event(Event::ToStack);
        return PASS;
    }
    if !count_hop::<A>(context, parsed.hops) {
        return drop_packet(DropReason::RewriteFailed);
    }
    count_event(Event::ToNetwork);
    let (next_hop, length) = if way.resolved != 0 {
        (
            core::ptr::from_mut(&mut way.next_hop),
            size_of::<NextHop>() as i32,
        )
    } else {
        (core::ptr::null_mut(), 0)
    };
    // SAFETY: the structure is as large as said, or there is none.
    unsafe { bpf_redirect_neigh(way.ifindex, next_hop, length, 0) as i32 }
}

impl Wire for V4 {
    #[inline(always)]
    fn is_own_range(address: &Self) -> bool {
        match MapTables.range(address) {
            Some(range) => range.flags & RANGE_OWN != 0,
            None => false,
        }
    }

    #[inline(always)]
    fn ask(lookup: &mut FibLookup, source: &Self, destination: &Self) {
        lookup.family = AF_INET;
        lookup.__bindgen_anon_3.ipv4_src = source.0;
        lookup.__bindgen_anon_4.ipv4_dst = destination.0;
    }

    #[inline(always)]
    fn next_hop(lookup: &FibLookup) -> NextHop {
        // SAFETY: a C structure of integers, for which zero is valid; the union is initialised in full.
        let mut next_hop: NextHop = unsafe { zeroed() };
        next_hop.nh_family = AF_INET.into();
        // SAFETY: the lookup answers in the family it was asked in.
        next_hop.__bindgen_anon_1.ipv4_nh = unsafe { lookup.__bindgen_anon_4.ipv4_dst };
        next_hop
    }
}

impl Wire for V6 {
    #[inline(always)]
    fn is_own_range(address: &Self) -> bool {
        match MapTables.range(address) {
            Some(range) => range.flags & RANGE_OWN != 0,
            None => false,
        }
    }

    #[inline(always)]
    fn ask(lookup: &mut FibLookup, source: &Self, destination: &Self) {
        lookup.family = AF_INET6;
        lookup.__bindgen_anon_3.ipv6_src = source.0;
        lookup.__bindgen_anon_4.ipv6_dst = destination.0;
    }

    #[inline(always)]
    fn next_hop(lookup: &FibLookup) -> NextHop {
        // SAFETY: as for IPv4.
        let mut next_hop: NextHop = unsafe { zeroed() };
        next_hop.nh_family = AF_INET6.into();
        // SAFETY: as for IPv4.
        next_hop.__bindgen_anon_1.ipv6_nh = unsafe { lookup.__bindgen_anon_4.ipv6_dst };
        next_hop
    }
}
