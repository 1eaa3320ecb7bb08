//! What the kernel's own work costs: programs that do one thing, and sit on no hook. `cargo xtask bench packet` runs
//! them beside the others; an agent does not load them.

use aya_ebpf::macros::classifier;
use aya_ebpf::programs::TcContext;
use dataplane_common::address::TCP;
use dataplane_common::layout::FlowKey;
use dataplane_common::{Port, Tables, V4, V6};

use crate::maps::MapTables;
use crate::packet::{ETHERNET_HEADER, load};
use crate::{DROP, PASS};

/// Where the addresses lie in a header of each family; the ports follow, where there are no options.
const SOURCE_V4: u32 = ETHERNET_HEADER + 12;
const SOURCE_V6: u32 = ETHERNET_HEADER + 8;

/// Does nothing.
#[classifier]
pub fn yard_empty(_context: TcContext) -> i32 {
    PASS
}

/// Reads the key of an IPv4 packet.
#[classifier]
pub fn yard_read_v4(context: TcContext) -> i32 {
    read::<V4>(&context, SOURCE_V4)
}

/// Reads the key of an IPv6 packet.
#[classifier]
pub fn yard_read_v6(context: TcContext) -> i32 {
    read::<V6>(&context, SOURCE_V6)
}

/// Reads the key of an IPv4 packet, and looks its flow up.
#[classifier]
pub fn yard_find_v4(context: TcContext) -> i32 {
    find::<V4>(&context, SOURCE_V4)
}

/// Reads the key of an IPv6 packet, and looks its flow up.
#[classifier]
pub fn yard_find_v6(context: TcContext) -> i32 {
    find::<V6>(&context, SOURCE_V6)
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Tuple<A> {
    source: A,
    destination: A,
    source_port: Port,
    destination_port: Port,
}

#[inline(always)]
fn key<A: Copy>(context: &TcContext, at: u32) -> Option<FlowKey<A>> {
    let tuple = load::<Tuple<A>>(context, at)?;
    Some(FlowKey {
        source: tuple.source,
        destination: tuple.destination,
        source_port: tuple.source_port,
        destination_port: tuple.destination_port,
        protocol: TCP.into(),
    })
}

/// A packet without a source port is dropped, so that the compiler cannot leave the reading out.
#[inline(always)]
fn read<A: Copy>(context: &TcContext, at: u32) -> i32 {
    match key::<A>(context, at) {
        Some(key) if key.source_port.0 != 0 => PASS,
        _ => DROP,
    }
}

/// A packet without a flow is dropped: the bench would notice that it measures a miss.
#[inline(always)]
fn find<A: dataplane_common::Family>(context: &TcContext, at: u32) -> i32
where
    MapTables: Tables<A>,
{
    let Some(key) = key::<A>(context, at) else {
        return DROP;
    };
    if MapTables.flow(&key).is_some() {
        PASS
    } else {
        DROP
    }
}
