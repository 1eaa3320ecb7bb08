//! Places for a new flow: its two entries, and the source port where translation chooses one.

use crate::address::{Family, Port};
use crate::layout::{FLOW_DSR, FLOW_MASQUERADED, FLOW_PLAIN, Flow, FlowKey};
use crate::packet::Packet;
use crate::path::Translated;
use crate::ports::{BLOCK, Ports, Tier};
use crate::reason::{DropReason, Event};
use crate::scratch::{Scratch, step};
use crate::tables::{Inserted, Tables};
use crate::{PORT_CURSORS, RECENT_FLOWS};

/// How many recent flows are looked at for one that may make room.
const ROOM_ATTEMPTS: u32 = 4;

/// Enters both halves: first the reply, which finds collisions, then the record. Never leaves one without the other.
#[inline(always)]
pub(crate) fn enter<A: Family, T: Tables<A>>(
    tables: &mut T,
    scratch: &mut Scratch<A>,
    packet: &Packet<A>,
) -> Translated<A> {
    scratch.place = tables.random() % RECENT_FLOWS;
    claim_reply(tables, scratch);
    let (packet, scratch) = step((packet, scratch));
    if scratch.inserted == Inserted::Full && make_room(tables, scratch) {
        scratch.reply = scratch.flow.reply_key();
        scratch.inserted = tables.insert_reply(&scratch.reply, &scratch.key);
    }
    let (packet, scratch) = step((packet, scratch));
    match scratch.inserted {
        Inserted::Done => {}
        Inserted::Full => return Translated::drop(packet, DropReason::FlowTableFull),
        Inserted::Exists => return Translated::drop(packet, DropReason::SourcePortsExhausted),
    }
    scratch.inserted = tables.insert_flow(&scratch.key, &scratch.flow);
    let scratch = step(scratch);
    if scratch.inserted == Inserted::Full && make_room(tables, scratch) {
        scratch.inserted = tables.insert_flow(&scratch.key, &scratch.flow);
    }
    let (packet, scratch) = step((packet, scratch));
    match scratch.inserted {
        Inserted::Done => {
            tables.count(Event::FlowCreated);
            tables.set_recent(scratch.place, &scratch.key);
            Translated::forward(packet, &scratch.flow)
        }
        Inserted::Full => {
            scratch.reply = scratch.flow.reply_key();
            tables.remove_reply(&scratch.reply);
            Translated::drop(packet, DropReason::FlowTableFull)
        }
        Inserted::Exists => {
            // Another CPU was first with a packet of the same flow: its record counts.
            scratch.reply = scratch.flow.reply_key();
            let now_s = scratch.flow.client_seen_s;
            let (theirs, same) = match tables.flow(&scratch.key) {
                Some(other) => {
                    other.note_client(packet.tcp_flags, now_s);
                    (
                        Translated::forward(packet, other),
                        other.is_answered_by(&scratch.reply),
                    )
                }
                None => (Translated::drop(packet, DropReason::BackendMissing), false),
            };
            if !same {
                tables.remove_reply(&scratch.reply);
            }
            theirs
        }
    }
}

/// Removes a recent flow that carries no conversation, so that a flood of half-open connections displaces itself and
/// nothing else. The new flow gets its place among the recent ones, and the number of those that can be displaced stays
/// as it is.
#[inline(always)]
fn make_room<A: Family, T: Tables<A>>(tables: &mut T, scratch: &mut Scratch<A>) -> bool {
    let mut attempt = 0;
    while attempt < ROOM_ATTEMPTS {
        let scratch = step(&mut *scratch);
        attempt += 1;
        let candidate = tables.random() % RECENT_FLOWS;
        match tables.recent(candidate) {
            Some(key) => scratch.other = *key,
            None => continue,
        }
        match tables.flow(&scratch.other) {
            Some(flow) if flow.is_disposable() => scratch.reply = flow.reply_key(),
            _ => continue,
        }
        let own = match tables.reply(&scratch.reply) {
            Some(owner) => *owner == scratch.other,
            None => false,
        };
        if own {
            tables.remove_reply(&scratch.reply);
        }
        tables.remove_flow(&scratch.other);
        tables.count(Event::FlowDisplaced);
        scratch.place = candidate;
        return true;
    }
    false
}

/// Claims a reply tuple for the flow, with another source port when a living flow has the one it asks for, and leaves in
/// the scratch whether it has: what it asked for last exists when none was found.
#[inline(always)]
fn claim_reply<A: Family, T: Tables<A>>(tables: &mut T, scratch: &mut Scratch<A>) {
    scratch.inserted = Inserted::Exists;
    // A flow keeps its source port, unless its source became the node's address: there one has to be chosen.
    if scratch.flow.flags & FLOW_MASQUERADED == 0 {
        scratch.reply = scratch.flow.reply_key();
        if !asked_by_other(tables, scratch) {
            scratch.inserted = tables.insert_reply(&scratch.reply, &scratch.key);
            if scratch.inserted == Inserted::Exists && release_if_dead(tables, scratch, false) {
                scratch.inserted = tables.insert_reply(&scratch.reply, &scratch.key);
            }
        }
        let scratch = step(&mut *scratch);
        // The node of a backend that answers the client itself must see the client's own port.
        if scratch.inserted != Inserted::Exists || scratch.flow.flags & FLOW_DSR != 0 {
            return;
        }
        tables.count(Event::SourcePortChanged);
        scratch.flow.flags &= !FLOW_PLAIN;
    }
    let mut tier = 0;
    while tier < Tier::ALL.len() {
        let scratch = step(&mut *scratch);
        if scratch.inserted == Inserted::Exists {
            claim_port(tables, scratch, Tier::ALL[tier]);
        }
        tier += 1;
    }
    let scratch = step(scratch);
    // Ports are scarce: that of a flow which is as good as over will do.
    if scratch.inserted == Inserted::Exists
        && tables.reply(&scratch.reply).is_some()
        && release_if_dead(tables, scratch, true)
    {
        scratch.inserted = tables.insert_reply(&scratch.reply, &scratch.key);
    }
}

/// True when the answers to a translated flow would be taken for questions: the other end has a flow of its own with
/// this tuple. One without a conversation, such as a late answer makes, gives way.
#[inline(always)]
fn asked_by_other<A: Family, T: Tables<A>>(tables: &mut T, scratch: &mut Scratch<A>) -> bool {
    if scratch.flow.flags & FLOW_PLAIN != 0 {
        return false;
    }
    match tables.flow(&scratch.reply) {
        Some(flow) if !flow.is_disposable() => return true,
        Some(flow) => scratch.other = flow.reply_key(),
        None => return false,
    }
    let own = match tables.reply(&scratch.other) {
        Some(owner) => *owner == scratch.reply,
        None => false,
    };
    if own {
        tables.remove_reply(&scratch.other);
    }
    tables.remove_flow(&scratch.reply);
    tables.count(Event::FlowDisplaced);
    false
}

/// Claims one of the next ports of a tier, and leaves in the scratch whether it has. Nothing changes there when all are
/// taken.
#[inline(always)]
fn claim_port<A: Family, T: Tables<A>>(tables: &mut T, scratch: &mut Scratch<A>, tier: Tier) {
    scratch.cursor_index = destination_hash(&scratch.flow) % (PORT_CURSORS / 2) * 2 + tier as u32;
    let mut cursor = tables.port_cursor(scratch.cursor_index);
    if cursor == 0 {
        cursor = tables.random();
    }
    scratch.cursor = cursor.wrapping_add(1);
    let ports = match tables.node() {
        Some(node) => Ports::of(node),
        None => Ports::default(),
    };
    scratch.first_port = ports.block(tier, scratch.cursor / BLOCK);
    let scratch = step(scratch);
    if scratch.first_port == 0 {
        return;
    }
    let mut attempt = 0;
    while attempt < BLOCK {
        let scratch = step(&mut *scratch);
        let number = scratch.cursor.wrapping_add(attempt);
        attempt += 1;
        let port = scratch.first_port + number % BLOCK;
        scratch.flow.source_port = Port::new((port & 0xffff) as u16);
        scratch.reply = scratch.flow.reply_key();
        let masqueraded = scratch.flow.flags & FLOW_MASQUERADED != 0;
        if tables.flow(&scratch.reply).is_some() || masqueraded && tables.is_bound(&scratch.reply) {
            continue;
        }
        scratch.inserted = tables.insert_reply(&scratch.reply, &scratch.key);
        if scratch.inserted != Inserted::Exists {
            tables.set_port_cursor(scratch.cursor_index, number);
            return;
        }
    }
    let scratch = step(scratch);
    tables.set_port_cursor(scratch.cursor_index, scratch.cursor.wrapping_add(BLOCK));
}

/// Flows to one destination share a cursor among the ports, so that each finds the first one that it tries free until
/// all have been used once (RFC 6056, section 3.3.4).
#[inline(always)]
fn destination_hash<A: Family>(flow: &Flow<A>) -> u32 {
    let destination = FlowKey {
        source: flow.backend,
        destination: flow.backend,
        source_port: flow.backend_port,
        destination_port: flow.backend_port,
        protocol: flow.protocol,
    };
    destination.hash()
}

/// Removes the reply entry in `scratch` if its flow is over, belongs to another tuple, or is missing. True when it was
/// removed. `pressure` as for [`Flow::is_expired`]: ports are scarce.
#[inline(always)]
fn release_if_dead<A: Family, T: Tables<A>>(
    tables: &mut T,
    scratch: &mut Scratch<A>,
    pressure: bool,
) -> bool {
    let now_s = scratch.flow.client_seen_s;
    match tables.reply(&scratch.reply) {
        Some(owner) => scratch.other = *owner,
        None => return true,
    }
    let (own, expired) = match tables.flow(&scratch.other) {
        Some(flow) => (
            flow.is_answered_by(&scratch.reply),
            flow.is_expired(now_s, pressure),
        ),
        None => (false, false),
    };
    if own && !expired {
        return false;
    }
    tables.remove_reply(&scratch.reply);
    if own {
        tables.remove_flow(&scratch.other);
    } else {
        tables.count(Event::FlowHealed);
    }
    true
}
