//! From a service port to a flow: the backend's choice, and the source that it will see.

use crate::address::Family;
use crate::layout::{
    ALGORITHM_MAGLEV, Affinity, AffinityKey, BACKEND_LOCAL, Backend, ENDPOINT_NODE, FLOW_DSR,
    FLOW_MASQUERADED, FLOW_PLAIN, FLOW_SERVICE, FRONTEND_DROP_EMPTY, FRONTEND_DSR,
    FRONTEND_KEEP_SOURCE, FRONTEND_RANGES, Flow, FrontendKey, MAGLEV_SIZE, NODE_MASQUERADE,
    SlotKey, backend_state,
};
use crate::open::{Place, use_node_address};
use crate::overlay;
use crate::packet::Packet;
use crate::path::Hook;
use crate::reason::DropReason;
use crate::tables::Tables;

/// A slot and its backend are read one after the other; a change between the two is met by one more look.
const MAX_PICK_ATTEMPTS: u32 = 2;

/// A backend and the state word it had when it was chosen.
#[repr(C)]
struct Choice<A> {
    reason: DropReason,
    id: u32,
    state: u32,
    /// Of the frontend, both.
    flags: u32,
    affinity_s: u32,
    backend: Backend<A>,
}

/// Leads a flow to a backend of the service port with this key. Leaves in `affinity_s` for how long its client's other
/// flows are to go there too, see [`remember`].
#[inline(always)]
pub(crate) fn plan<A: Family, T: Tables<A>>(
    tables: &mut T,
    hook: Hook,
    frontend: &FrontendKey<A>,
    packet: &Packet<A>,
    flow: &mut Flow<A>,
    affinity_s: &mut u32,
) -> DropReason {
    let choice = choose(tables, hook, frontend, packet, flow.created_s);
    if choice.reason != DropReason::None {
        return choice.reason;
    }
    flow.backend = choice.backend.address;
    flow.backend_port = choice.backend.port;
    flow.backend_id = choice.id;
    flow.backend_state = choice.state;
    flow.service_id = choice.backend.service_id;
    flow.flags = FLOW_SERVICE;
    *affinity_s = choice.affinity_s;
    if hook == Hook::Network
        && choice.flags & FRONTEND_DSR != 0
        && choice.backend.flags & BACKEND_LOCAL == 0
        && overlay::reaches(tables, &flow.backend)
    {
        flow.flags |= FLOW_DSR | FLOW_PLAIN;
        flow.backend = packet.destination;
        flow.backend_port = packet.destination_port;
        return DropReason::None;
    }
    if needs_node_address(tables, hook, packet, choice.flags, &flow.backend) {
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

/// The backend of a new flow: the client's own where the service has affinity, any usable one otherwise.
#[inline(always)]
fn choose<A: Family, T: Tables<A>>(
    tables: &mut T,
    hook: Hook,
    key: &FrontendKey<A>,
    packet: &Packet<A>,
    now_s: u32,
) -> Choice<A> {
    let mut choice = Choice {
        reason: DropReason::NoBackend,
        id: 0,
        state: 0,
        flags: 0,
        affinity_s: 0,
        backend: Backend {
            address: key.address,
            port: key.port,
            flags: 0,
            service_id: 0,
        },
    };
    let mut affinity_key = AffinityKey {
        client: packet.source,
        service_id: 0,
    };
    let mut attempt = 0;
    while attempt < MAX_PICK_ATTEMPTS {
        attempt += 1;
        let random = tables.random();
        let Some(frontend) = tables.frontend(key) else {
            break;
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
            break;
        }
        choice.reason = DropReason::BackendMissing;
        affinity_key.service_id = service_id;
        // The first look only: a backend that cannot be used any more gives way to any other.
        if choice.affinity_s != 0 && attempt == 1 {
            let id = remembered(tables, &affinity_key, now_s);
            if id != 0 && take(tables, hook, id, service_id, &mut choice) {
                break;
            }
        }
        if algorithm == ALGORITHM_MAGLEV && hook.is_outside() && attempt == 1 {
            let id = tables.maglev(service_id, packet.key().hash() % MAGLEV_SIZE);
            if take(tables, hook, id, service_id, &mut choice) {
                break;
            }
        }
        let index = ((random as u64 * backends as u64) >> 32) as u32;
        let Some(id) = tables.slot(&SlotKey { service_id, index }) else {
            continue;
        };
        let id = *id;
        if take(tables, hook, id, service_id, &mut choice) {
            break;
        }
    }
    choice
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
