//! The decision at an uplink's driver (XDP), before the kernel has made anything of a frame.
//!
//! It only takes work off the link's ingress hook, which decides the same for what is left to it: packets of flows that
//! are led on to another machine, in either direction. Whatever opens a flow, stays on this node, travels in the
//! overlay, in fragments or with options goes the ordinary way.

use crate::address::Family;
use crate::layout::{ENDPOINT_PEER, RANGE_OVERLAY};
use crate::packet::{Action, Decision, FRAGMENT, Packet, Translation};
use crate::path::known_flow_answers_first;
use crate::tables::Tables;

/// A packet of the network. [`Action::Network`] with its translation, or [`Action::Open`] to leave it as it is to the
/// link's ingress hook.
#[inline(always)]
pub fn at_driver<A: Family, T: Tables<A>>(tables: &mut T, packet: &Packet<A>) -> Decision<A> {
    let left = Decision::untouched(packet, Action::Open);
    if packet.flags & FRAGMENT != 0 {
        return left;
    }
    let known = known_flow_answers_first(tables, packet);
    if known.found == 0 || known.unsettled != 0 || known.translation == Translation::None {
        return left;
    }
    if let Some(endpoint) = tables.endpoint(&known.destination)
        && endpoint.flags & ENDPOINT_PEER == 0
    {
        return left;
    }
    if let Some(range) = tables.range(&known.destination)
        && range.flags & RANGE_OVERLAY != 0
    {
        return left;
    }
    let mut decision = Decision::untouched(packet, Action::Network);
    decision.translation = known.translation;
    decision.source = known.source;
    decision.destination = known.destination;
    decision.source_port = known.source_port;
    decision.destination_port = known.destination_port;
    decision
}
