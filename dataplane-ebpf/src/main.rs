//! The eBPF programs: entry points, one per hook. Each reads the packet, asks `dataplane_common::path` what to do, and
//! does it. Nothing is decided here.
#![no_std]
#![no_main]

mod act;
mod maps;
mod packet;
mod refuse;
mod rewrite;
mod socket;
mod socket_maps;

use aya_ebpf::macros::classifier;
use aya_ebpf::programs::TcContext;
use dataplane_common::path::{self, LinkAddress};
use dataplane_common::reason::DropReason;
use dataplane_common::refuse::Refuse;
use dataplane_common::{V4, V6};

use crate::act::Wire;
use crate::maps::{MapTables, drop_packet};
use crate::packet::{ARP, IPV4, IPV6, Parsed};

/// Let the packet go on: to the next program on this hook, then to the stack.
const PASS: i32 = aya_ebpf::bindings::TC_ACT_UNSPEC;
/// Drop the packet.
const DROP: i32 = aya_ebpf::bindings::TC_ACT_SHOT as i32;

/// Ingress of the host side of a pod's link, and of the peer of the host link.
#[classifier]
#[inline(always)]
pub fn from_pod(context: TcContext) -> i32 {
    match packet::ether_type(&context) {
        IPV4 => run_from_pod::<V4>(&context),
        IPV6 => run_from_pod::<V6>(&context),
        ARP => PASS,
        _ => drop_packet(DropReason::UnsupportedProtocol),
    }
}

/// Egress of the host side of a pod's link: packets of the node's own stack.
#[classifier]
#[inline(always)]
pub fn to_pod(context: TcContext) -> i32 {
    match packet::ether_type(&context) {
        IPV4 => run_to_pod::<V4>(&context),
        IPV6 => run_to_pod::<V6>(&context),
        _ => PASS,
    }
}

/// Ingress of an uplink.
#[classifier]
#[inline(always)]
pub fn from_network(context: TcContext) -> i32 {
    match packet::ether_type(&context) {
        IPV4 => run_from_network::<V4>(&context),
        IPV6 => run_from_network::<V6>(&context),
        _ => PASS,
    }
}

/// Tail of `from_pod`, reached for packets that are refused: the sender is answered in their place.
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
fn run_refuse<A: Wire + Refuse>(context: &TcContext) -> i32 {
    let parsed: Parsed<A> = packet::parse(context);
    if !parsed.valid {
        return DROP;
    }
    refuse::answer(context, &parsed)
}

#[inline(always)]
fn run_from_pod<A: LinkAddress + Wire>(context: &TcContext) -> i32
where
    MapTables: dataplane_common::Tables<A>,
{
    let Some(link) = maps::link(packet::ifindex(context)) else {
        return drop_packet(DropReason::UnknownLink);
    };
    let mut parsed: Parsed<A> = packet::parse(context);
    if !parsed.valid {
        return drop_packet(DropReason::Malformed);
    }
    path::complete_fragment(&mut MapTables, &mut parsed.packet);
    let decision = path::from_pod(&mut MapTables, link, &parsed.packet);
    act::carry_out(context, &parsed, &decision)
}

#[inline(always)]
fn run_to_pod<A: LinkAddress + Wire>(context: &TcContext) -> i32
where
    MapTables: dataplane_common::Tables<A>,
{
    let mut parsed: Parsed<A> = packet::parse(context);
    if !parsed.valid {
        return drop_packet(DropReason::Malformed);
    }
    path::complete_fragment(&mut MapTables, &mut parsed.packet);
    let decision = path::to_pod(&mut MapTables, &parsed.packet);
    act::carry_out(context, &parsed, &decision)
}

#[inline(always)]
fn run_from_network<A: LinkAddress + Wire>(context: &TcContext) -> i32
where
    MapTables: dataplane_common::Tables<A>,
{
    let mut parsed: Parsed<A> = packet::parse(context);
    if !parsed.valid {
        // Not for us to judge: the stack knows more of malformed packets, and counts them.
        return PASS;
    }
    path::complete_fragment(&mut MapTables, &mut parsed.packet);
    let decision = path::from_network(&mut MapTables, &parsed.packet);
    act::carry_out(context, &parsed, &decision)
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
