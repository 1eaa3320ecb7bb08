//! Tunnel keys: read off packets that the overlay's device has unwrapped, set on those that it is to wrap.

use core::mem::size_of;

use aya_ebpf::bindings::{BPF_F_TUNINFO_IPV6, BPF_F_ZERO_CSUM_TX};
use aya_ebpf::helpers::{bpf_skb_get_tunnel_key, bpf_skb_set_tunnel_key};
use aya_ebpf::programs::TcContext;
use dataplane_common::overlay::{self, Tunnel};
use dataplane_common::{OVERLAY_MAC, OVERLAY_SOURCE_MAC, V4, V6};

use crate::maps::{MapTables, overlay_network};
use crate::rewrite::write_macs;

/// Hops that a wrapped packet may take.
const HOPS: u8 = 64;

/// `struct bpf_tunnel_key` up to its flow label: the part that every kernel takes, for both families.
#[repr(C)]
#[derive(Clone, Copy)]
struct TunnelKey {
    network: u32,
    /// IPv4 in host order in the first word, or IPv6 as in a packet.
    remote: [u32; 4],
    service: u8,
    hops: u8,
    flags: u16,
}

const EMPTY: TunnelKey = TunnelKey {
    network: 0,
    remote: [0; 4],
    service: 0,
    hops: 0,
    flags: 0,
};

/// True when the packet was wrapped by another node, for our network.
#[inline(always)]
pub(crate) fn is_from_node(context: &TcContext) -> bool {
    let mut key = EMPTY;
    if read(context, &mut key, 0) {
        let source = V4(u32::to_be(key.remote[0]));
        key.network == overlay_network() && overlay::is_node(&mut MapTables, &source)
    } else if read(context, &mut key, BPF_F_TUNINFO_IPV6.into()) {
        key.network == overlay_network() && overlay::is_node(&mut MapTables, &V6(key.remote))
    } else {
        false
    }
}

#[inline(always)]
fn read(context: &TcContext, key: &mut TunnelKey, flags: u64) -> bool {
    // SAFETY: the key is as large as said.
    unsafe {
        bpf_skb_get_tunnel_key(
            context.skb.skb,
            core::ptr::from_mut(key).cast(),
            size_of::<TunnelKey>() as u32,
            flags,
        ) == 0
    }
}

/// Has the device wrap the packet. False when the kernel refused.
///
/// The outer packet may be cut on its way (IPv4), so that what does not fit arrives nevertheless.
#[inline(always)]
pub(crate) fn wrap(context: &TcContext, tunnel: &Tunnel) -> bool {
    if !write_macs(context, &OVERLAY_MAC, &OVERLAY_SOURCE_MAC) {
        return false;
    }
    let mut key = EMPTY;
    key.network = overlay_network();
    key.hops = HOPS;
    let flags = if tunnel.remote_v4 == V4::default() {
        key.remote = tunnel.remote_v6.0;
        BPF_F_TUNINFO_IPV6
    } else {
        key.remote[0] = u32::from_be(tunnel.remote_v4.0);
        // RFC 7348, section 5: the inner packet has its own.
        BPF_F_ZERO_CSUM_TX
    };
    // SAFETY: the key is as large as said.
    unsafe {
        bpf_skb_set_tunnel_key(
            context.skb.skb,
            core::ptr::from_mut(&mut key).cast(),
            size_of::<TunnelKey>() as u32,
            flags.into(),
        ) == 0
    }
}
