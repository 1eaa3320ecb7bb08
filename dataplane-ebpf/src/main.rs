//! The eBPF programs: entry points, one per hook, and the stages that they end in: a hook's program knows packets of
//! flows, and hands others to the stage that opens flows. Each reads the packet, asks `dataplane_common::path` what to do, and
//! does it. Nothing is decided here.
#![no_std]
#![no_main]

mod act;
mod driver;
mod icmp;
mod maps;
mod overlay;
mod packet;
mod park;
mod policy_maps;
mod refuse;
mod rewrite;
mod socket;
mod socket_maps;
mod yardstick;

use aya_ebpf::macros::classifier;
use aya_ebpf::programs::TcContext;
use dataplane_common::fragment;
use dataplane_common::overlay::tunnel_for;
use dataplane_common::packet::{Action, FRAGMENT, Translation};
use dataplane_common::path::{self, Hook, LinkAddress};
use dataplane_common::reason::DropReason;
use dataplane_common::refuse::Refuse;
use dataplane_common::scratch::step;
use dataplane_common::{V4, V6, tail};

use crate::act::Wire;
use crate::icmp::Fields;
use crate::maps::{Handed, MapTables, Opening, drop_packet};
use crate::packet::{ARP, IPV4, IPV6, Parsed, Pending};

/// Let the packet go on: to the next program on this hook, then to the stack.
const PASS: i32 = aya_ebpf::bindings::TC_ACT_UNSPEC;
/// Drop the packet.
const DROP: i32 = aya_ebpf::bindings::TC_ACT_SHOT as i32;

/// Ingress of the host side of a pod's link, and of the peer of the host link.
#[classifier]
#[inline(always)]
pub fn from_pod(context: TcContext) -> i32 {
    match packet::ether_type(&context) {
        IPV4 => run_from_pod::<V4>(&context, tail::OPEN_V4),
        IPV6 => go_on(&context, tail::FROM_POD_V6),
        ARP => PASS,
        _ => drop_packet(DropReason::UnsupportedProtocol),
    }
}

/// The IPv6 half of `from_pod`.
#[classifier]
#[inline(always)]
pub fn from_pod_v6(context: TcContext) -> i32 {
    run_from_pod::<V6>(&context, tail::OPEN_V6)
}

/// Egress of the host side of a pod's link: packets of the node's own stack, and what it forwards from links that have no
/// program.
#[classifier]
#[inline(always)]
pub fn to_pod(context: TcContext) -> i32 {
    match packet::ether_type(&context) {
        IPV4 => run_to_pod::<V4>(&context, tail::OPEN_V4),
        IPV6 => go_on(&context, tail::TO_POD_V6),
        _ => PASS,
    }
}

/// The IPv6 half of `to_pod`.
#[classifier]
#[inline(always)]
pub fn to_pod_v6(context: TcContext) -> i32 {
    run_to_pod::<V6>(&context, tail::OPEN_V6)
}

/// Ingress of an uplink.
#[classifier]
#[inline(always)]
pub fn from_network(context: TcContext) -> i32 {
    if packet::is_for_another_host(&context) {
        return PASS;
    }
    match packet::ether_type(&context) {
        IPV4 => run_from_network::<V4>(&context, tail::OPEN_V4),
        IPV6 => go_on(&context, tail::FROM_NETWORK_V6),
        _ => PASS,
    }
}

/// The IPv6 half of `from_network`.
#[classifier]
#[inline(always)]
pub fn from_network_v6(context: TcContext) -> i32 {
    run_from_network::<V6>(&context, tail::OPEN_V6)
}

/// Ingress of the overlay's device: what other nodes have wrapped.
#[classifier]
#[inline(always)]
pub fn from_overlay(context: TcContext) -> i32 {
    if !overlay::is_from_node(&context) && !park::is_taken_back(&context) {
        return drop_packet(DropReason::ForeignTunnel);
    }
    match packet::ether_type(&context) {
        IPV4 => run_from_overlay::<V4>(&context, tail::OPEN_V4),
        IPV6 => go_on(&context, tail::FROM_OVERLAY_V6),
        _ => drop_packet(DropReason::UnsupportedProtocol),
    }
}

/// The IPv6 half of `from_overlay`.
#[classifier]
#[inline(always)]
pub fn from_overlay_v6(context: TcContext) -> i32 {
    run_from_overlay::<V6>(&context, tail::OPEN_V6)
}

/// Egress of the overlay's device: every packet gets its tunnel, wherever it comes from.
#[classifier]
#[inline(always)]
pub fn to_overlay(context: TcContext) -> i32 {
    match packet::ether_type(&context) {
        IPV4 => run_to_overlay::<V4>(&context),
        IPV6 => run_to_overlay::<V6>(&context),
        _ => drop_packet(DropReason::UnsupportedProtocol),
    }
}

/// Egress of an uplink. Packets that were forwarded have passed a program on their way in; those of the node's own
/// stack may be answers to a translated flow.
#[classifier]
#[inline(always)]
pub fn to_network(context: TcContext) -> i32 {
    if packet::came_in_by(&context) != 0 {
        return PASS;
    }
    match packet::ether_type(&context) {
        IPV4 => run_to_network::<V4>(&context, tail::OPEN_V4),
        IPV6 => run_to_network::<V6>(&context, tail::OPEN_V6),
        _ => PASS,
    }
}

/// Egress of the loopback link: packets of the node's own processes to its own addresses.
#[classifier]
#[inline(always)]
pub fn from_self(context: TcContext) -> i32 {
    match packet::ether_type(&context) {
        IPV4 => run_from_self::<V4>(&context, tail::OPEN_V4, tail::ACT_V4),
        IPV6 => run_from_self::<V6>(&context, tail::OPEN_V6, tail::ACT_V6),
        _ => PASS,
    }
}

/// Tail of the hooks, for IPv4 packets that no flow has.
#[classifier]
#[inline(always)]
pub fn open_v4(context: TcContext) -> i32 {
    run_open::<V4>(&context, tail::ACT_V4)
}

/// Tail of the hooks, for IPv6 packets that no flow has.
#[classifier]
#[inline(always)]
pub fn open_v6(context: TcContext) -> i32 {
    run_open::<V6>(&context, tail::ACT_V6)
}

/// Tail of `open_v4`.
#[classifier]
#[inline(always)]
pub fn act_v4(context: TcContext) -> i32 {
    run_act::<V4>(&context)
}

/// Tail of `open_v6`.
#[classifier]
#[inline(always)]
pub fn act_v6(context: TcContext) -> i32 {
    run_act::<V6>(&context)
}

/// Tail of the hooks, for ICMP errors over IPv4.
#[classifier]
#[inline(always)]
pub fn relate_v4(context: TcContext) -> i32 {
    icmp::run::<V4>(&context, tail::OPEN_V4, tail::ACT_V4)
}

/// Tail of the hooks, for ICMP errors over IPv6.
#[classifier]
#[inline(always)]
pub fn relate_v6(context: TcContext) -> i32 {
    icmp::run::<V6>(&context, tail::OPEN_V6, tail::ACT_V6)
}

/// Tail of the hooks, for IPv4 packets of flows that the policies have to be asked about again, or that they deny.
#[classifier]
#[inline(always)]
pub fn judge_v4(context: TcContext) -> i32 {
    run_judge::<V4>(&context, tail::OPEN_V4, tail::ACT_V4)
}

/// As `judge_v4`, for IPv6.
#[classifier]
#[inline(always)]
pub fn judge_v6(context: TcContext) -> i32 {
    run_judge::<V6>(&context, tail::OPEN_V6, tail::ACT_V6)
}

/// Ingress of the near side of the link to user space: fragments that have waited for the first of their datagram.
#[classifier]
#[inline(always)]
pub fn from_park(context: TcContext) -> i32 {
    park::take_back(&context)
}

/// Tail of the hooks, reached for packets that are refused: the sender is answered in their place.
#[classifier]
#[inline(always)]
pub fn refuse(context: TcContext) -> i32 {
    match packet::ether_type(&context) {
        IPV4 => run_refuse::<V4>(&context),
        IPV6 => run_refuse::<V6>(&context),
        _ => DROP,
    }
}

#[inline(always)]
fn run_refuse<A: Fields + Refuse>(context: &TcContext) -> i32
where
    MapTables: dataplane_common::Tables<A>,
{
    let parsed: Parsed<A> = packet::parse(context);
    if !parsed.valid {
        return DROP;
    }
    refuse::answer(context, &parsed)
}

/// Goes on in another program.
#[inline(always)]
fn go_on(context: &TcContext, place: u32) -> i32 {
    maps::call(context, place);
    drop_packet(DropReason::ProgramMissing)
}

/// Does what was decided, or goes on in the program that opens flows.
#[inline(always)]
fn finish<A: Wire + Handed>(context: &TcContext, pending: &Pending<A>, opener: u32) -> i32 {
    let decision = &pending.decision;
    match decision.action {
        Action::Open => return go_on(context, opener),
        Action::Relate => return go_on(context, A::RELATE),
        Action::Judge => return go_on(context, A::JUDGE),
        _ => {}
    }
    act::carry_out(
        context,
        &pending.parsed,
        decision,
        pending.hook == Hook::Own as u32,
    )
}

/// Gives a later fragment its ports.
#[inline(always)]
fn complete_fragment<A: Wire>(context: &TcContext, parsed: &mut Parsed<A>, hook: Hook)
where
    MapTables: dataplane_common::Tables<A>,
{
    if parsed.packet.flags & FRAGMENT != 0 {
        let extent = A::extent(context, parsed);
        fragment::complete(&mut MapTables, hook as u32, &mut parsed.packet, &extent);
    }
}

/// This CPU's place for a packet, with the packet's headers; `None` when they are malformed, or there is no place.
#[inline(always)]
fn read<A: Wire + Handed>(context: &TcContext, hook: Hook) -> Option<&'static mut Pending<A>>
where
    MapTables: dataplane_common::Tables<A>,
{
    let pending = A::pending()?;
    pending.hook = hook as u32;
    pending.parsed = packet::parse(context);
    if !pending.parsed.valid {
        return None;
    }
    complete_fragment(context, &mut pending.parsed, hook);
    Some(step(pending))
}

#[inline(always)]
fn run_from_pod<A: LinkAddress + Wire + Handed>(context: &TcContext, opener: u32) -> i32
where
    MapTables: dataplane_common::Tables<A>,
{
    let Some(link) = maps::link(packet::ifindex(context)) else {
        return drop_packet(DropReason::UnknownLink);
    };
    let Some(pending) = read::<A>(context, path::hook_of(link)) else {
        return drop_packet(DropReason::Malformed);
    };
    pending.decision = path::from_pod(&mut MapTables, link, &pending.parsed.packet);
    finish(context, step(pending), opener)
}

#[inline(always)]
fn run_to_pod<A: LinkAddress + Wire + Handed>(context: &TcContext, opener: u32) -> i32
where
    MapTables: dataplane_common::Tables<A>,
{
    let hook = if packet::came_in_by(context) == 0 {
        Hook::Stack
    } else {
        Hook::Forward
    };
    let Some(pending) = read::<A>(context, hook) else {
        return drop_packet(DropReason::Malformed);
    };
    let hook = Hook::from_number(pending.hook);
    pending.decision = if hook == Hook::Stack {
        path::from_stack(&mut MapTables, &pending.parsed.packet)
    } else {
        path::to_pod(&mut MapTables, &pending.parsed.packet)
    };
    let pending = step(pending);
    match pending.decision.action {
        Action::Open => go_on(context, opener),
        Action::Relate => go_on(context, A::RELATE),
        Action::Judge => go_on(context, A::JUDGE),
        _ => act::carry_out_in_place(context, &pending.parsed, &pending.decision),
    }
}

#[inline(always)]
fn run_to_network<A: LinkAddress + Wire + Handed>(context: &TcContext, opener: u32) -> i32
where
    MapTables: dataplane_common::Tables<A>,
{
    let Some(pending) = read::<A>(context, Hook::Stack) else {
        return drop_packet(DropReason::Malformed);
    };
    pending.decision = path::to_network(&mut MapTables, &pending.parsed.packet);
    let pending = step(pending);
    match pending.decision.action {
        Action::Relate => go_on(context, A::RELATE),
        Action::Open => go_on(context, opener),
        Action::Host => act::to_host(context, &pending.decision),
        _ => act::carry_out_in_place(context, &pending.parsed, &pending.decision),
    }
}

#[inline(always)]
fn run_from_network<A: LinkAddress + Wire + Handed>(context: &TcContext, opener: u32) -> i32
where
    MapTables: dataplane_common::Tables<A>,
{
    let Some(pending) = read::<A>(context, Hook::Network) else {
        // Not for us to judge: the stack knows more of malformed packets, and counts them.
        return PASS;
    };
    pending.decision = path::from_network(&mut MapTables, &pending.parsed.packet);
    finish(context, step(pending), opener)
}

#[inline(always)]
fn run_from_overlay<A: LinkAddress + Wire + Handed>(context: &TcContext, opener: u32) -> i32
where
    MapTables: dataplane_common::Tables<A>,
{
    let Some(pending) = read::<A>(context, Hook::Overlay) else {
        return drop_packet(DropReason::Malformed);
    };
    pending.decision = path::from_overlay(&mut MapTables, &pending.parsed.packet);
    finish(context, step(pending), opener)
}

#[inline(always)]
fn run_to_overlay<A: LinkAddress + Wire + Handed>(context: &TcContext) -> i32
where
    MapTables: dataplane_common::Tables<A>,
{
    let Some(pending) = read::<A>(context, Hook::Stack) else {
        return drop_packet(DropReason::Malformed);
    };
    if packet::came_in_by(context) == 0 {
        pending.decision = path::from_stack(&mut MapTables, &pending.parsed.packet);
        let pending = step(&mut *pending);
        let decision = &pending.decision;
        // Errors about translated packets are of no use to the other node.
        if decision.action != Action::Relate
            && act::carry_out_in_place(context, &pending.parsed, decision) != PASS
        {
            return DROP;
        }
        let packet = &mut pending.parsed.packet;
        packet.source = decision.source;
        packet.destination = decision.destination;
        packet.source_port = decision.source_port;
        packet.destination_port = decision.destination_port;
    }
    let tunnel = tunnel_for(&mut MapTables, &pending.parsed.packet);
    if tunnel.found == 0 {
        return drop_packet(DropReason::NoTunnel);
    }
    if !overlay::wrap(context, &tunnel) {
        return drop_packet(DropReason::RewriteFailed);
    }
    PASS
}

#[inline(always)]
fn run_from_self<A: LinkAddress + Wire + Handed>(
    context: &TcContext,
    opener: u32,
    actor: u32,
) -> i32
where
    MapTables: dataplane_common::Tables<A>,
{
    let Some(pending) = read::<A>(context, Hook::Own) else {
        return PASS;
    };
    pending.decision = path::from_self(&mut MapTables, &pending.parsed.packet);
    let pending = step(pending);
    match pending.decision.action {
        Action::Open => go_on(context, opener),
        Action::Relate => go_on(context, A::RELATE),
        Action::Judge => go_on(context, A::JUDGE),
        Action::Stack if pending.decision.translation == Translation::None => PASS,
        // Both families are read in one program: there is no room to act in.
        _ => go_on(context, actor),
    }
}

#[inline(always)]
fn run_open<A: LinkAddress + Wire + Handed>(context: &TcContext, actor: u32) -> i32
where
    for<'a> Opening<'a>: dataplane_common::Tables<A>,
{
    let Some(pending) = A::pending() else {
        return drop_packet(DropReason::ProgramMissing);
    };
    let hook = Hook::from_number(pending.hook);
    pending.decision = path::open(
        &mut Opening(context),
        hook,
        &pending.parsed.packet,
        &mut pending.scratch,
    );
    go_on(context, actor)
}

#[inline(always)]
fn run_judge<A: LinkAddress + Wire + Handed>(context: &TcContext, opener: u32, actor: u32) -> i32
where
    MapTables: dataplane_common::Tables<A>,
{
    let Some(pending) = A::pending() else {
        return drop_packet(DropReason::ProgramMissing);
    };
    let hook = Hook::from_number(pending.hook);
    pending.decision = path::settle(
        &mut MapTables,
        hook,
        &pending.parsed.packet,
        &mut pending.scratch,
    );
    match pending.decision.action {
        Action::Open => go_on(context, opener),
        Action::Relate => go_on(context, A::RELATE),
        _ => go_on(context, actor),
    }
}

#[inline(always)]
fn run_act<A: Wire + Handed>(context: &TcContext) -> i32 {
    let Some(pending) = A::pending() else {
        return drop_packet(DropReason::ProgramMissing);
    };
    if pending.decision.action == Action::Park {
        return park::hand_over(context, pending.hook, pending.decision.ifindex);
    }
    // On their way out of a link, all of them.
    let own = pending.hook == Hook::Own as u32
        || pending.hook == Hook::Stack as u32
        || pending.hook == Hook::Forward as u32;
    act::carry_out(context, &pending.parsed, &pending.decision, own)
}

#[cfg(not(test))]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    // Unreachable: the linker removes every path that panics, and the verifier refuses what is left.
    loop {}
}

/// The kernel gives its GPL-only helpers to programs that say this.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
