//! From a service port to a flow: the backend's choice, the source that it will see, and the pair of entries.

use crate::address::{Family, Port};
use crate::layout::{
    Affinity, AffinityKey, Backend, ENDPOINT_NODE, Flow, FlowKey, FrontendKey, SlotKey,
    backend_state,
};
use crate::packet::Packet;
use crate::path::{Origin, Translated};
use crate::reason::{DropReason, Event};
use crate::tables::{Inserted, Tables};
use crate::{MAX_PORT_ATTEMPTS, SNAT_PORT_COUNT, SNAT_PORT_FIRST};

/// A slot and its backend are read one after the other; a change between the two is met by one more look.
const MAX_PICK_ATTEMPTS: u32 = 2;

/// A backend and the state word it had when it was chosen.
#[repr(C)]
struct Choice<A> {
    reason: DropReason,
    id: u32,
    state: u32,
    backend: Backend<A>,
}

/// Makes a flow for a packet to a service port; `Translated::none` when its destination is none.
#[inline(always)]
pub(crate) fn open<A: Family, T: Tables<A>>(
    tables: &mut T,
    packet: &Packet<A>,
    origin: Origin,
    now_s: u32,
) -> Translated<A> {
    let frontend_key = FrontendKey {
        address: packet.destination,
        port: packet.destination_port,
        protocol: packet.protocol,
        scope: 0,
    };
    if tables.frontend(&frontend_key).is_none() {
        return Translated::none(packet);
    }
    let choice = choose(tables, &frontend_key, packet.source, now_s);
    if choice.reason != DropReason::None {
        return Translated::drop(packet, choice.reason);
    }
    let mut flow = Flow {
        backend: choice.backend.address,
        source: packet.source,
        backend_port: choice.backend.port,
        source_port: packet.source_port,
        backend_id: choice.id,
        backend_state: choice.state,
        service_id: choice.backend.service_id,
        policy_generation: 0,
        policy_verdict: 0,
        created_s: now_s,
        client_seen_s: now_s,
        server_seen_s: 0,
        client_flags: crate::flow::noted(0, packet.tcp_flags, now_s),
        server_flags: 0,
        protocol: packet.protocol as u32,
    };
    let reason = translate_source(tables, packet, origin, &mut flow);
    if reason != DropReason::None {
        return Translated::drop(packet, reason);
    }
    enter(tables, &packet.key(), &mut flow, packet)
}

/// The backend of a new flow: the client's own where the service has affinity, any usable one otherwise.
#[inline(always)]
fn choose<A: Family, T: Tables<A>>(
    tables: &mut T,
    key: &FrontendKey<A>,
    client: A,
    now_s: u32,
) -> Choice<A> {
    let mut choice = Choice {
        reason: DropReason::NoBackend,
        id: 0,
        state: 0,
        backend: Backend {
            address: key.address,
            port: key.port,
            flags: 0,
            service_id: 0,
        },
    };
    let mut affinity_key = AffinityKey {
        client,
        service_id: 0,
    };
    let mut affinity_s = 0;
    let mut attempt = 0;
    while attempt < MAX_PICK_ATTEMPTS {
        attempt += 1;
        let random = tables.random();
        let Some(frontend) = tables.frontend(key) else {
            break;
        };
        let (service_id, backends) = (frontend.service_id, frontend.backends);
        if backends == 0 {
            choice.reason = DropReason::NoBackend;
            break;
        }
        choice.reason = DropReason::BackendMissing;
        affinity_s = frontend.affinity_s;
        affinity_key.service_id = service_id;
        // The first look only: a backend that cannot be used any more gives way to any other.
        if affinity_s != 0 && attempt == 1 {
            let id = remembered(tables, &affinity_key, now_s);
            if id != 0 && take(tables, id, service_id, &mut choice) {
                break;
            }
        }
        let index = ((random as u64 * backends as u64) >> 32) as u32;
        let Some(id) = tables.slot(&SlotKey { service_id, index }) else {
            continue;
        };
        let id = *id;
        if take(tables, id, service_id, &mut choice) {
            break;
        }
    }
    if choice.reason == DropReason::None && affinity_s != 0 {
        let affinity = Affinity {
            backend_id: choice.id,
            backend_state: choice.state,
            expires_s: now_s.saturating_add(affinity_s),
        };
        tables.set_affinity(&affinity_key, &affinity);
    }
    choice
}

/// The backend that a client was given before; zero, which is no backend's id, when there is none or its time is over.
#[inline(always)]
fn remembered<A: Family, T: Tables<A>>(tables: &mut T, key: &AffinityKey<A>, now_s: u32) -> u32 {
    let Some(affinity) = tables.affinity(key) else {
        return 0;
    };
    let (id, state, expires_s) = (
        affinity.backend_id,
        affinity.backend_state,
        affinity.expires_s,
    );
    if now_s > expires_s || !backend_state::same_life(tables.backend_state(id), state) {
        return 0;
    }
    id
}

/// Chooses this backend, if new flows may use it.
#[inline(always)]
fn take<A: Family, T: Tables<A>>(
    tables: &mut T,
    id: u32,
    service_id: u32,
    choice: &mut Choice<A>,
) -> bool {
    let state = tables.backend_state(id);
    let Some(backend) = tables.backend(id) else {
        return false;
    };
    if backend_state::kind(state) != backend_state::ACTIVE || backend.service_id != service_id {
        return false;
    }
    choice.backend = *backend;
    choice.id = id;
    choice.state = state;
    choice.reason = DropReason::None;
    true
}

/// Gives the flow another source address where the backend's answer would not come back through us otherwise.
#[inline(always)]
fn translate_source<A: Family, T: Tables<A>>(
    tables: &mut T,
    packet: &Packet<A>,
    origin: Origin,
    flow: &mut Flow<A>,
) -> DropReason {
    let hairpin = flow.backend == packet.source;
    if !hairpin && origin == Origin::Pod {
        return DropReason::None;
    }
    let Some(node) = tables.node() else {
        return DropReason::NoNodeAddress;
    };
    let (address, host_source) = (node.address, node.host_source);
    if address == A::default() {
        return DropReason::NoNodeAddress;
    }
    if origin == Origin::Host {
        let on_node = match tables.endpoint(&flow.backend) {
            Some(endpoint) => endpoint.flags & ENDPOINT_NODE != 0,
            None => false,
        };
        if on_node {
            flow.source = host_source;
        } else if packet.source != address {
            // Not this node's own packet, or one from a further address of it: answers must come back here.
            flow.source = address;
            flow.source_port = random_port(tables);
        }
    } else {
        flow.source = address;
        flow.source_port = random_port(tables);
    }
    DropReason::None
}

/// Enters both halves: first the reply, which finds collisions, then the record. Never leaves one without the other.
#[inline(always)]
fn enter<A: Family, T: Tables<A>>(
    tables: &mut T,
    key: &FlowKey<A>,
    flow: &mut Flow<A>,
    packet: &Packet<A>,
) -> Translated<A> {
    let reason = claim_reply(tables, key, flow);
    if reason != DropReason::None {
        return Translated::drop(packet, reason);
    }
    match tables.insert_flow(key, flow) {
        Inserted::Done => {
            tables.count(Event::FlowCreated);
            Translated::forward(packet, flow)
        }
        Inserted::Full => {
            tables.remove_reply(&flow.reply_key());
            Translated::drop(packet, DropReason::FlowTableFull)
        }
        Inserted::Exists => {
            // Another CPU was first with a packet of the same flow: its record counts.
            let ours = flow.reply_key();
            let theirs = match tables.flow(key) {
                Some(other) => {
                    other.note_client(packet.tcp_flags, flow.client_seen_s);
                    Translated::forward(packet, other)
                }
                None => Translated::drop(packet, DropReason::BackendMissing),
            };
            if theirs.reply_key(packet) != ours {
                tables.remove_reply(&ours);
            }
            theirs
        }
    }
}

/// Claims a reply tuple for the flow, with another source port when a living flow has the one it asks for.
#[inline(always)]
fn claim_reply<A: Family, T: Tables<A>>(
    tables: &mut T,
    key: &FlowKey<A>,
    flow: &mut Flow<A>,
) -> DropReason {
    let reply_key = flow.reply_key();
    let mut inserted = tables.insert_reply(&reply_key, key);
    if inserted == Inserted::Exists && release_if_dead(tables, &reply_key, flow.client_seen_s) {
        inserted = tables.insert_reply(&reply_key, key);
    }
    if inserted == Inserted::Exists {
        tables.count(Event::SourcePortChanged);
    }
    let mut attempt = 0;
    while inserted == Inserted::Exists && attempt < MAX_PORT_ATTEMPTS {
        attempt += 1;
        flow.source_port = random_port(tables);
        inserted = tables.insert_reply(&flow.reply_key(), key);
    }
    match inserted {
        Inserted::Done => DropReason::None,
        Inserted::Full => DropReason::FlowTableFull,
        Inserted::Exists => DropReason::SourcePortsExhausted,
    }
}

/// Removes a reply entry whose flow is over, belongs to another tuple, or is missing. True when it was removed.
#[inline(always)]
fn release_if_dead<A: Family, T: Tables<A>>(
    tables: &mut T,
    reply_key: &FlowKey<A>,
    now_s: u32,
) -> bool {
    let Some(owner) = tables.reply(reply_key) else {
        return true;
    };
    let owner = *owner;
    let (own, expired) = match tables.flow(&owner) {
        Some(flow) => (
            flow.reply_key() == *reply_key,
            flow.is_expired(now_s, false),
        ),
        None => (false, false),
    };
    if own && !expired {
        return false;
    }
    tables.remove_reply(reply_key);
    if own {
        tables.remove_flow(&owner);
    } else {
        tables.count(Event::FlowHealed);
    }
    true
}

#[inline(always)]
fn random_port<A, T: Tables<A>>(tables: &mut T) -> Port {
    let offset = ((tables.random() & 0xffff) * SNAT_PORT_COUNT as u32) >> 16;
    Port::new(SNAT_PORT_FIRST + offset as u16)
}
