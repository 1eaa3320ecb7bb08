//! From a service port to a flow: the backend's choice, and the source that it will see.

use crate::address::Family;
use crate::layout::{
    ALGORITHM_MAGLEV, Affinity, AffinityKey, BACKEND_LOCAL, Backend, ENDPOINT_NODE, FLOW_DSR,
    FLOW_MASQUERADED, FLOW_PLAIN, FLOW_SERVICE, FRONTEND_DROP_EMPTY, FRONTEND_DSR,
    FRONTEND_KEEP_SOURCE, FRONTEND_RANGES, Flow, MAGLEV_SIZE, NODE_MASQUERADE, SlotKey,
    backend_state,
};
use crate::open::{Place, use_node_address};
use crate::overlay;
use crate::packet::Packet;
use crate::path::Hook;
use crate::reason::DropReason;
use crate::scratch::{Scratch, step};
use crate::tables::Tables;

/// A slot and its backend are read one after the other; a change between the two is met by one more look.
const MAX_PICK_ATTEMPTS: u32 = 2;

/// A backend and the state word it had when it was chosen.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Choice<A> {
    reason: DropReason,
    id: u32,
    state: u32,
    /// Of the frontend, both.
    flags: u32,
    affinity_s: u32,
    backend: Backend<A>,
}

/// Leads the flow in the scratch to the backend that was [chosen](choose) for it.
#[inline(always)]
pub(crate) fn lead<A: Family, T: Tables<A>>(
    tables: &mut T,
    packet: &Packet<A>,
    scratch: &mut Scratch<A>,
) -> DropReason {
    let hook = scratch.hook();
    let (choice, flow) = (&scratch.choice, &mut scratch.flow);
    if choice.reason != DropReason::None {
        return choice.reason;
    }
    flow.backend = choice.backend.address;
    flow.backend_port = choice.backend.port;
    flow.backend_id = choice.id;
    flow.backend_state = choice.state;
    flow.service_id = choice.backend.service_id;
    flow.flags = FLOW_SERVICE;
    scratch.plan.affinity_s = choice.affinity_s;
    if hook == Hook::Network
        && choice.flags & FRONTEND_DSR != 0
        && choice.backend.flags & BACKEND_LOCAL == 0
        && overlay::reaches(tables, &choice.backend.address)
    {
        flow.flags |= FLOW_DSR | FLOW_PLAIN;
        flow.backend = packet.destination;
        flow.backend_port = packet.destination_port;
        return DropReason::None;
    }
    if needs_node_address(tables, hook, packet, choice.flags, &choice.backend.address) {
        flow.flags |= FLOW_MASQUERADED;
        return use_node_address(tables, flow);
    }
    DropReason::None
}

/// Whether the backend's answers would not come back through this node, or not be taken, with the client's own address.
#[inline(always)]
fn needs_node_address<A: Family, T: Tables<A>>(
    tables: &mut T,
    hook: Hook,
    packet: &Packet<A>,
    frontend_flags: u32,
    backend: &A,
) -> bool {
    match hook {
        // A pod that was led to itself would take the answer for its own; the world does not know pods.
        Hook::Pod => {
            let masquerade = match tables.node() {
                Some(node) => node.flags & NODE_MASQUERADE != 0,
                None => false,
            };
            *backend == packet.source || (masquerade && Place::of(tables, backend).is_outside())
        }
        Hook::Host | Hook::Own | Hook::Stack => match tables.endpoint(&packet.source) {
            Some(endpoint) => endpoint.flags & ENDPOINT_NODE == 0,
            None => true,
        },
        // Its own node keeps the client's address, for this one to answer to.
        Hook::Overlay | Hook::Forward => false,
        Hook::Network => {
            if frontend_flags & FRONTEND_KEEP_SOURCE != 0 {
                return false;
            }
            let place = Place::of(tables, backend);
            !place.is_local_pod() && place.endpoint & ENDPOINT_NODE == 0
        }
    }
}

/// Chooses the backend of a new flow to the service port in the scratch: the client's own where the service has affinity,
/// any usable one otherwise.
#[inline(always)]
pub(crate) fn choose<A: Family, T: Tables<A>>(
    tables: &mut T,
    packet: &Packet<A>,
    scratch: &mut Scratch<A>,
) {
    scratch.choice = Choice {
        reason: DropReason::NoBackend,
        id: 0,
        state: 0,
        flags: 0,
        affinity_s: 0,
        backend: Backend::default(),
    };
    let mut attempt = 0;
    while attempt < MAX_PICK_ATTEMPTS {
        let (packet, scratch) = step((packet, &mut *scratch));
        attempt += 1;
        if pick(tables, packet, scratch, attempt == 1) {
            break;
        }
    }
}

/// One attempt of [`choose`]. False when another one may do better.
#[inline(always)]
fn pick<A: Family, T: Tables<A>>(
    tables: &mut T,
    packet: &Packet<A>,
    scratch: &mut Scratch<A>,
    first: bool,
) -> bool {
    let hook = scratch.hook();
    let choice = &mut scratch.choice;
    let random = tables.random();
    let Some(frontend) = tables.frontend(&scratch.frontend) else {
        return true;
    };
    let service_id = frontend.service_id;
    // Whoever is sent here by another node is sent no further.
    let backends = if hook == Hook::Overlay {
        frontend.local_backends
    } else {
        frontend.backends
    };
    let algorithm = frontend.algorithm;
    choice.flags = frontend.flags;
    choice.affinity_s = frontend.affinity_s;
    choice.reason = refusal(tables, choice.flags, service_id, backends, packet);
    if choice.reason != DropReason::None {
        return true;
    }
    choice.reason = DropReason::BackendMissing;
    // The first look only: a backend that cannot be used any more gives way to any other.
    if choice.affinity_s != 0 && first {
        let key = AffinityKey {
            client: packet.source,
            service_id,
        };
        let id = remembered(tables, &key, scratch.flow.created_s);
        if id != 0 && take(tables, hook, id, service_id, choice) {
            return true;
        }
    }
    if algorithm == ALGORITHM_MAGLEV && hook.is_outside() && first {
        let id = tables.maglev(service_id, packet.key().hash() % MAGLEV_SIZE);
        if take(tables, hook, id, service_id, choice) {
            return true;
        }
    }
    let index = ((random as u64 * backends as u64) >> 32) as u32;
    let Some(id) = tables.slot(&SlotKey { service_id, index }) else {
        return false;
    };
    let id = *id;
    take(tables, hook, id, service_id, choice)
}

/// Has the other flows of a client go to the backend of this one, for `affinity_s` seconds unless that is zero.
#[inline(always)]
pub(crate) fn remember<A: Family, T: Tables<A>>(
    tables: &mut T,
    packet: &Packet<A>,
    flow: &Flow<A>,
    affinity_s: u32,
) {
    if affinity_s == 0 {
        return;
    }
    let key = AffinityKey {
        client: packet.source,
        service_id: flow.service_id,
    };
    let affinity = Affinity {
        backend_id: flow.backend_id,
        backend_state: flow.backend_state,
        expires_s: flow.created_s.saturating_add(affinity_s),
    };
    tables.set_affinity(&key, &affinity);
}

/// Why a service has no backend for this client, if so.
#[inline(always)]
fn refusal<A: Family, T: Tables<A>>(
    tables: &mut T,
    flags: u32,
    service_id: u32,
    backends: u32,
    packet: &Packet<A>,
) -> DropReason {
    if flags & FRONTEND_RANGES != 0 && !tables.source_allowed(service_id, &packet.source) {
        return DropReason::SourceRange;
    }
    if backends != 0 {
        return DropReason::None;
    }
    if flags & FRONTEND_DROP_EMPTY != 0 {
        DropReason::NoLocalBackend
    } else {
        DropReason::NoBackend
    }
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

/// Chooses this backend, if new flows from this hook may use it.
#[inline(always)]
fn take<A: Family, T: Tables<A>>(
    tables: &mut T,
    hook: Hook,
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
    if hook == Hook::Overlay && backend.flags & BACKEND_LOCAL == 0 {
        return false;
    }
    choice.backend = *backend;
    choice.id = id;
    choice.state = state;
    choice.reason = DropReason::None;
    true
}
