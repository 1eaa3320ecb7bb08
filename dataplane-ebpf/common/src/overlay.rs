//! The overlay: which tunnel a packet takes, and who may send wrapped packets.

use crate::address::{Family, UDP, V4, V6};
use crate::layout::{ENDPOINT_NODE, ENDPOINT_PEER, FLOW_DSR, FLOW_SERVICE, Flow, Range};
use crate::open::Place;
use crate::packet::Packet;
use crate::path::Hook;
use crate::tables::Tables;

/// The other end of the overlay for a packet.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Tunnel {
    /// One when there is a tunnel; without, the rest means nothing.
    pub found: u32,
    /// Exactly one of the two is not all zero.
    pub remote_v4: V4,
    pub remote_v6: V6,
}

impl Tunnel {
    #[inline(always)]
    fn to(range: &Range) -> Self {
        Self {
            found: is_reached(range) as u32,
            remote_v4: range.remote_v4,
            remote_v6: range.remote_v6,
        }
    }
}

/// The tunnel for a packet that leaves by the overlay's device.
#[inline(always)]
pub fn tunnel_for<A: Family, T: Tables<A>>(tables: &mut T, packet: &Packet<A>) -> Tunnel {
    if let Some(range) = tables.range(&packet.destination)
        && is_reached(range)
    {
        return Tunnel::to(range);
    }
    let backend_id = match tables.flow(&packet.key()) {
        Some(flow) if flow.flags & FLOW_DSR != 0 => flow.backend_id,
        _ => return Tunnel::default(),
    };
    let backend = match tables.backend(backend_id) {
        Some(backend) => backend.address,
        None => return Tunnel::default(),
    };
    match tables.range(&backend) {
        Some(range) => Tunnel::to(range),
        None => Tunnel::default(),
    }
}

/// True when the node that has the address takes wrapped packets.
#[inline(always)]
pub(crate) fn reaches<A: Family, T: Tables<A>>(tables: &mut T, address: &A) -> bool {
    let ready = match tables.node() {
        Some(node) => node.overlay_ifindex != 0,
        None => false,
    };
    match tables.range(address) {
        Some(range) => ready && is_reached(range),
        None => false,
    }
}

#[inline(always)]
fn is_reached(range: &Range) -> bool {
    range.remote_v4 != V4::default() || range.remote_v6 != V6::default()
}

/// True when the outer source of a wrapped packet is another node of the cluster.
#[inline(always)]
pub fn is_node<A: Family, T: Tables<A>>(tables: &mut T, source: &A) -> bool {
    match tables.endpoint(source) {
        Some(endpoint) => endpoint.flags & ENDPOINT_PEER != 0,
        None => false,
    }
}

/// True when a new flow would bring datagrams of a pod or an outsider to the port on which nodes take wrapped packets,
/// perhaps with this node's address as the source.
#[inline(always)]
pub(crate) fn is_abused<A: Family, T: Tables<A>>(
    tables: &mut T,
    hook: Hook,
    packet: &Packet<A>,
    flow: &Flow<A>,
) -> bool {
    let sent_by_us = hook == Hook::Host || hook == Hook::Own;
    // An outsider's own packet is judged by whoever unwraps it.
    let ours_to_judge = hook == Hook::Pod || flow.flags & FLOW_SERVICE != 0;
    if packet.protocol != UDP || sent_by_us || !ours_to_judge || flow.flags & FLOW_DSR != 0 {
        return false;
    }
    let port = match tables.node() {
        Some(node) => node.overlay_port,
        None => 0,
    };
    if port == 0 || u16::from_be(flow.backend_port.0) != port {
        return false;
    }
    let place = Place::of(tables, &flow.backend);
    place.endpoint & (ENDPOINT_NODE | ENDPOINT_PEER) != 0 || place.is_outside()
}
