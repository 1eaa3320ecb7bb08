//! Carrying out a decision: translate, then hand the packet to where it goes.

use core::mem::zeroed;

use aya_ebpf::bindings::{
    BPF_FIB_LKUP_RET_NO_NEIGH, BPF_FIB_LKUP_RET_SUCCESS, bpf_fib_lookup as FibLookup,
    bpf_redir_neigh as NextHop,
};
use aya_ebpf::helpers::{bpf_fib_lookup, bpf_redirect, bpf_redirect_neigh, bpf_redirect_peer};
use aya_ebpf::programs::TcContext;
use dataplane_common::packet::{Action, Decision, Translation};
use dataplane_common::reason::{DropReason, Event};
use dataplane_common::{V4, V6};

use crate::PASS;
use crate::maps::{call_refuse, count_event, drop_packet, host_ifindex, host_peer_and_uplink};
use crate::packet::{Headers, Parsed, ifindex};
use crate::rewrite::{Addresses, rewrite, write_macs};

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

/// Families that the programs can read, write and route.
pub(crate) trait Wire: Headers + Addresses {
    /// Fills in what a route lookup needs of this family.
    fn ask(lookup: &mut FibLookup, source: &Self, destination: &Self);
    /// The gateway, or the destination itself, as the lookup answered it.
    fn next_hop(lookup: &FibLookup) -> NextHop;
}

#[inline(always)]
pub(crate) fn carry_out<A: Wire>(
    context: &TcContext,
    parsed: &Parsed<A>,
    decision: &Decision<A>,
) -> i32 {
    if decision.action == Action::Drop {
        return drop_or_refuse(context, decision.reason);
    }
    if decision.translation != Translation::None && !rewrite(context, parsed, decision) {
        return drop_packet(DropReason::RewriteFailed);
    }
    match decision.action {
        Action::Drop => drop_packet(decision.reason),
        Action::Stack => {
            count_event(Event::ToStack);
            PASS
        }
        Action::Pod => to_pod(context, decision),
        Action::Host => to_host(context, decision),
        Action::Network => to_network(context, parsed, decision),
    }
}

/// Counts the drop, and lets the sender know where it should.
#[inline(always)]
fn drop_or_refuse(context: &TcContext, reason: DropReason) -> i32 {
    let verdict = drop_packet(reason);
    if reason.is_refusal() {
        call_refuse(context);
    }
    verdict
}

#[inline(always)]
fn to_pod<A>(context: &TcContext, decision: &Decision<A>) -> i32 {
    if !write_macs(context, &decision.destination_mac, &decision.source_mac) {
        return drop_packet(DropReason::RewriteFailed);
    }
    count_event(Event::ToPod);
    // SAFETY: plain numbers; the kernel looks the link up.
    unsafe { bpf_redirect_peer(decision.ifindex, 0) as i32 }
}

/// Out of the host link's peer, and so in at the side that the service ranges are routed to.
#[inline(always)]
fn to_host<A>(context: &TcContext, decision: &Decision<A>) -> i32 {
    if !write_macs(context, &decision.destination_mac, &decision.source_mac) {
        return drop_packet(DropReason::RewriteFailed);
    }
    count_event(Event::ToHost);
    // SAFETY: plain numbers; the kernel looks the link up.
    unsafe { bpf_redirect(decision.ifindex, 0) as i32 }
}

#[inline(always)]
fn to_network<A: Wire>(context: &TcContext, parsed: &Parsed<A>, decision: &Decision<A>) -> i32 {
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
            return drop_or_refuse(context, DropReason::NoFrontend);
        }
        let mut next_hop = A::next_hop(&lookup);
        count_event(Event::ToNetwork);
        // SAFETY: the structure is as large as said.
        return unsafe {
            bpf_redirect_neigh(
                lookup.ifindex,
                core::ptr::from_mut(&mut next_hop),
                size_of::<NextHop>() as i32,
                0,
            ) as i32
        };
    }
    let (host_peer, uplink) = host_peer_and_uplink();
    if result == BPF_FIB_LKUP_RET_NO_NEIGH as i64 && ifindex(context) == host_peer && uplink != 0 {
        // The stack would refuse the node's own address as a source from outside.
        count_event(Event::ToNetwork);
        // SAFETY: no next hop: the kernel looks the route up itself.
        return unsafe { bpf_redirect_neigh(uplink, core::ptr::null_mut(), 0, 0) as i32 };
    }
    // No route, a packet too big, or an address of this node: the stack knows what to answer.
    count_event(Event::ToStack);
    PASS
}

impl Wire for V4 {
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
