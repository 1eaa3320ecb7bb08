//! Map layouts and packet decisions, shared by the eBPF programs and the host.
//!
//! Pure and `no_std`: no I/O, no clock, no allocation. Nothing here names aya. The eBPF crate implements [`Tables`]
//! with maps, tests implement it with ordinary collections, and both run the same [`path`].
//!
//! Rules of this room, all of them set by the kernel's verifier: results are fully initialised `repr(C)` values with a
//! kind field (an enum with data leaves bytes undefined), functions are inlined, loops have a constant bound.
#![cfg_attr(not(any(test, feature = "std")), no_std)]

pub mod address;
pub mod checksum;
mod claim;
pub mod collect;
pub mod driver;
pub mod flow;
pub mod fragment;
pub mod icmp;
pub mod layout;
pub mod limit;
mod open;
pub mod overlay;
pub mod packet;
pub mod path;
pub mod policy;
pub mod ports;
pub mod reason;
pub mod refuse;
pub mod scratch;
pub mod sctp;
mod service;
pub mod socket;
pub mod tables;

#[cfg(test)]
mod tests;

pub use address::{Family, Port, V4, V6};
pub use tables::Tables;

/// Part of the pin path: a layout that changes takes a new number, so that programs never read maps of another shape.
pub const ABI_VERSION: u32 = 4;

/// The oldest version of which every table has the shape that it has now: an agent of this version takes such tables over
/// as they are, flows included. Those of any other version are made anew.
pub const ABI_SAME_SINCE: u32 = 3;

/// New flows that are remembered per address family, as candidates to be displaced in a full table.
pub const RECENT_FLOWS: u32 = 8_192;

/// Destinations, by hash, whose source ports are given one after the other: two cursors for each.
pub const PORT_CURSORS: u32 = 2_048;

/// Places of programs that are called at the end of another.
pub mod tail {
    /// Answers refused packets.
    pub const REFUSE: u32 = 0;
    /// The IPv6 halves of the hooks.
    pub const FROM_POD_V6: u32 = 1;
    pub const FROM_NETWORK_V6: u32 = 2;
    /// Packets without a flow.
    pub const OPEN_V4: u32 = 3;
    pub const OPEN_V6: u32 = 4;
    /// Carry out what was decided for them.
    pub const ACT_V4: u32 = 5;
    pub const ACT_V6: u32 = 6;
    /// ICMP errors about packets of flows.
    pub const RELATE_V4: u32 = 7;
    pub const RELATE_V6: u32 = 8;
    /// The IPv6 half of the hook on the overlay's device.
    pub const FROM_OVERLAY_V6: u32 = 9;
    /// Packets of flows that the policies have to be asked about again, or that they deny.
    pub const JUDGE_V4: u32 = 10;
    pub const JUDGE_V6: u32 = 11;
    /// The IPv6 half of the hook into pods.
    pub const TO_POD_V6: u32 = 12;
    /// How many places there are.
    pub const COUNT: u32 = 32;
}

/// Address of the overlay device on every node, and so the destination of every frame inside it.
pub const OVERLAY_MAC: [u8; 6] = [0x0a, 0x57, 0x45, 0x49, 0x52, 0x03];

/// Source of every frame inside the overlay. A VXLAN device takes a frame from its own address for a loop.
pub const OVERLAY_SOURCE_MAC: [u8; 6] = [0x0a, 0x57, 0x45, 0x49, 0x52, 0x04];
