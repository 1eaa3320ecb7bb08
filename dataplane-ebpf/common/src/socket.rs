//! Translation at the socket: the decisions of the cgroup hooks. A process that connects, or sends a datagram, to a
//! service gets a backend at once, so that none of its packets needs translation.
//!
//! The packet path is always right by itself; these hooks only take work off it. Whatever they are not sure of they
//! leave as it is, and the packets are translated on their way: see [`SocketEvent`] for the reasons.
//!
//! Datagram sockets that are connected stay with the packet path, because only that can lead a socket to another
//! backend when its own goes: the kernel keeps the peer of a connected socket, and offers no hook to change it.
//! Datagrams that carry their destination are translated one by one. A socket keeps its backend for each destination as
//! long as a flow would.

mod layout;
mod release;

use crate::address::{Family, Port, TCP, UDP, V4, V6};
use crate::flow::timeout;
use crate::layout::{
    Affinity, AffinityKey, Backend, ENDPOINT_NODE, ENDPOINT_NODE_PORTS, ENDPOINT_PEER, Endpoint,
    FRONTEND_RANGES, Frontend, FrontendKey, PodPolicy, SCOPE_ALL, SlotKey, backend_state,
};
use crate::reason::SocketEvent;
use crate::tables::Inserted;

pub use layout::{
    Connection, Cookie, DestinationKey, NAMESPACE_NODE, Namespace, Place, SocketFlow, SourceKey,
    UseKey,
};
pub use release::{release, release_by, release_destination};

/// Destinations that a datagram socket may have translated at the socket. Datagrams to further ones are translated by
/// the packet path. Bounds what the end of a socket has to clean up.
pub const MAX_SOCKET_DESTINATIONS: u32 = 64;

/// A slot and its backend are read one after the other; a change between the two is met by one more look.
const MAX_PICK_ATTEMPTS: u32 = 2;

/// The socket is bound to a link: its packets may not take the way of others.
pub const BOUND_TO_LINK: u32 = 1;
/// The socket has a peer already.
pub const CONNECTED: u32 = 2;

/// The socket that asks.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Socket<A> {
    /// Cookie of its network namespace.
    pub namespace: u64,
    pub cookie: Cookie,
    /// The address that it is bound to; all zero for none.
    pub source: A,
    /// [`BOUND_TO_LINK`], [`CONNECTED`].
    pub flags: u32,
    pub protocol: u32,
}

/// What becomes of an address that a process gave, or is given.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Steering<A> {
    /// One when `place` is to be written, zero to leave the address as it is. A word, so that no byte is undefined.
    pub translated: u32,
    pub place: Place<A>,
}

impl<A: Family> Steering<A> {
    #[inline(always)]
    fn none(place: &Place<A>) -> Self {
        Self {
            translated: 0,
            place: *place,
        }
    }

    #[inline(always)]
    fn to(address: A, port: Port) -> Self {
        Self {
            translated: 1,
            place: Place::new(address, port),
        }
    }

    #[inline(always)]
    #[must_use]
    pub fn is_translated(&self) -> bool {
        self.translated != 0
    }
}

/// The client's own address, by family.
pub trait ClientFamily: Family {
    /// The address of the namespace's processes; all zero when there is none of this family.
    fn client(namespace: &Namespace) -> Self;
}

impl ClientFamily for V4 {
    #[inline(always)]
    fn client(namespace: &Namespace) -> Self {
        namespace.v4
    }
}

impl ClientFamily for V6 {
    #[inline(always)]
    fn client(namespace: &Namespace) -> Self {
        namespace.v6
    }
}

/// The tables of one address family, as socket hooks see them.
pub trait SocketTables<A> {
    /// Seconds of the monotonic clock.
    fn now_s(&mut self) -> u32;
    fn random(&mut self) -> u32;
    fn count(&mut self, event: SocketEvent);

    /// The pod, or the node, that a network namespace belongs to.
    fn namespace(&mut self, cookie: u64) -> Option<&Namespace>;
    fn endpoint(&mut self, address: &A) -> Option<&Endpoint>;
    /// By the interface index of the host side of a pod's link.
    fn pod_policy(&mut self, ifindex: u32) -> Option<&PodPolicy>;
    fn frontend(&mut self, key: &FrontendKey<A>) -> Option<&Frontend>;
    fn slot(&mut self, key: &SlotKey) -> Option<&u32>;
    fn backend(&mut self, id: u32) -> Option<&Backend<A>>;
    /// See [`crate::layout::backend_state`]. Zero for ids out of range.
    fn backend_state(&mut self, id: u32) -> u32;
    fn affinity(&mut self, key: &AffinityKey<A>) -> Option<&Affinity>;
    /// Adds or replaces. A full table forgets it.
    fn set_affinity(&mut self, key: &AffinityKey<A>, affinity: &Affinity);

    /// The translated connection of a stream socket.
    fn connection(&mut self, cookie: &Cookie) -> Option<&Connection<A>>;
    /// Adds or replaces. False when the table is full.
    fn set_connection(&mut self, cookie: &Cookie, connection: &Connection<A>) -> bool;
    fn remove_connection(&mut self, cookie: &Cookie);

    /// Where a datagram socket's datagrams to one destination go.
    fn socket_flow(&mut self, key: &DestinationKey<A>) -> Option<&mut SocketFlow<A>>;
    /// Adds or replaces. False when the table is full.
    fn set_socket_flow(&mut self, key: &DestinationKey<A>, flow: &SocketFlow<A>) -> bool;
    fn remove_socket_flow(&mut self, key: &DestinationKey<A>);

    /// The destination that a datagram socket wrote to, by the backend that answers.
    fn origin(&mut self, key: &SourceKey<A>) -> Option<&Place<A>>;
    fn insert_origin(&mut self, key: &SourceKey<A>, place: &Place<A>) -> Inserted;
    /// Replaces what is there.
    fn set_origin(&mut self, key: &SourceKey<A>, place: &Place<A>);
    fn remove_origin(&mut self, key: &SourceKey<A>);

    /// The destinations of a datagram socket, counted from zero without gaps.
    fn usage(&mut self, key: &UseKey) -> Option<&Place<A>>;
    fn insert_usage(&mut self, key: &UseKey, place: &Place<A>) -> Inserted;
    fn remove_usage(&mut self, key: &UseKey);
}

/// A process connects a socket.
#[inline(always)]
pub fn connect<A: ClientFamily, T: SocketTables<A>>(
    tables: &mut T,
    socket: &Socket<A>,
    to: &Place<A>,
) -> Steering<A> {
    if socket.protocol != TCP as u32 {
        let event = if socket.protocol == UDP as u32 {
            SocketEvent::PassedConnectedDatagram
        } else {
            SocketEvent::PassedProtocol
        };
        tables.count(event);
        return Steering::none(to);
    }
    let choice = choose(tables, socket, to);
    if choice.reason != SocketEvent::ConnectionTranslated {
        // A socket may be connected again after a failure.
        tables.remove_connection(&socket.cookie);
        tables.count(choice.reason);
        return Steering::none(to);
    }
    let connection = Connection {
        backend: Place::new(choice.backend.address, choice.backend.port),
        service: *to,
    };
    if !tables.set_connection(&socket.cookie, &connection) {
        tables.count(SocketEvent::PassedTableFull);
        return Steering::none(to);
    }
    tables.count(SocketEvent::ConnectionTranslated);
    Steering::to(choice.backend.address, choice.backend.port)
}

/// A process asks for the peer of a socket that is connected to `peer`.
#[inline(always)]
pub fn peer_name<A: ClientFamily, T: SocketTables<A>>(
    tables: &mut T,
    cookie: &Cookie,
    peer: &Place<A>,
) -> Steering<A> {
    let Some(connection) = tables.connection(cookie) else {
        return Steering::none(peer);
    };
    if connection.backend != *peer {
        return Steering::none(peer);
    }
    let service = connection.service;
    tables.count(SocketEvent::PeerRestored);
    Steering::to(service.address, service.port)
}

/// A process sends a datagram with a destination of its own.
#[inline(always)]
pub fn send<A: ClientFamily, T: SocketTables<A>>(
    tables: &mut T,
    socket: &Socket<A>,
    to: &Place<A>,
) -> Steering<A> {
    if socket.protocol != UDP as u32 {
        tables.count(SocketEvent::PassedProtocol);
        return Steering::none(to);
    }
    if socket.flags & CONNECTED != 0 {
        // The kernel takes answers from its peer only, and that is the service.
        tables.count(SocketEvent::PassedConnectedDatagram);
        return Steering::none(to);
    }
    let key = DestinationKey {
        cookie: socket.cookie,
        place: *to,
    };
    let now_s = tables.now_s();
    let known = continue_flow(tables, socket, &key, now_s);
    match known.reason {
        SocketEvent::DatagramTranslated => {
            tables.count(SocketEvent::DatagramTranslated);
            Steering::to(known.backend.address, known.backend.port)
        }
        SocketEvent::PassedAmbiguous => {
            tables.count(SocketEvent::PassedAmbiguous);
            Steering::none(to)
        }
        _ => steer(tables, socket, &key, now_s),
    }
}

/// A datagram from `from` has come in: the process is to see where it had written to.
#[inline(always)]
pub fn receive<A: ClientFamily, T: SocketTables<A>>(
    tables: &mut T,
    cookie: &Cookie,
    from: &Place<A>,
) -> Steering<A> {
    let key = SourceKey {
        cookie: *cookie,
        place: *from,
    };
    let Some(origin) = tables.origin(&key) else {
        return Steering::none(from);
    };
    let origin = *origin;
    if origin == *from {
        return Steering::none(from);
    }
    tables.count(SocketEvent::SourceRestored);
    Steering::to(origin.address, origin.port)
}

/// The flow of a socket, as far as it is known: `DatagramTranslated` with its backend, `PassedAmbiguous` when packets
/// of it are to be translated on their way, anything else when there is none to use.
#[repr(C)]
struct Known<A> {
    reason: SocketEvent,
    backend: Place<A>,
}

#[inline(always)]
fn continue_flow<A: ClientFamily, T: SocketTables<A>>(
    tables: &mut T,
    socket: &Socket<A>,
    key: &DestinationKey<A>,
    now_s: u32,
) -> Known<A> {
    let mut known = Known {
        reason: SocketEvent::PassedNoService,
        backend: key.place,
    };
    let Some(flow) = tables.socket_flow(key) else {
        return known;
    };
    if now_s.saturating_sub(flow.seen_s) > timeout::UDP_ANSWERED_S {
        return known;
    }
    let (id, state, service_id) = (flow.backend_id, flow.backend_state, flow.service_id);
    known.backend = flow.backend;
    if flow.seen_s != now_s {
        flow.seen_s = now_s;
    }
    if id == 0 {
        known.reason = SocketEvent::PassedAmbiguous;
        return known;
    }
    let present = tables.backend_state(id);
    // As for packets: one that drains keeps the datagrams of its clients.
    let lives = backend_state::same_life(present, state)
        && backend_state::kind(present) != backend_state::ABSENT;
    // The address may belong to another service by now, while the backend still serves the first.
    let frontend = frontend_key(tables, &key.place, socket.protocol);
    if lives
        && let Some(frontend) = tables.frontend(&frontend)
        && frontend.service_id == service_id
    {
        known.reason = SocketEvent::DatagramTranslated;
    }
    known
}

/// Chooses a backend for a socket's datagrams to a destination, and notes it in all tables. What the end of the socket
/// cleans up is noted first.
#[inline(always)]
fn steer<A: ClientFamily, T: SocketTables<A>>(
    tables: &mut T,
    socket: &Socket<A>,
    key: &DestinationKey<A>,
    now_s: u32,
) -> Steering<A> {
    let choice = choose(tables, socket, &key.place);
    forget_origin(tables, key);
    if choice.reason != SocketEvent::ConnectionTranslated {
        tables.remove_socket_flow(key);
        if choice.reason == SocketEvent::PassedNoService {
            part_from_services(tables, key);
        }
        tables.count(choice.reason);
        return Steering::none(&key.place);
    }
    let reason = enlist(tables, key);
    if reason != SocketEvent::DatagramTranslated {
        tables.count(reason);
        return Steering::none(&key.place);
    }
    let backend = Place::new(choice.backend.address, choice.backend.port);
    let mut flow = SocketFlow {
        backend,
        backend_id: choice.id,
        backend_state: choice.state,
        service_id: choice.backend.service_id,
        seen_s: now_s,
    };
    let source = SourceKey {
        cookie: key.cookie,
        place: backend,
    };
    let reason = match tables.insert_origin(&source, &key.place) {
        Inserted::Done => SocketEvent::DatagramTranslated,
        Inserted::Full => SocketEvent::PassedTableFull,
        Inserted::Exists => match tables.origin(&source) {
            Some(origin) if *origin == key.place => SocketEvent::DatagramTranslated,
            _ => SocketEvent::PassedAmbiguous,
        },
    };
    if reason == SocketEvent::PassedAmbiguous {
        // Another destination of this socket has the same backend, whose answers could not be told apart. The packet
        // path can: it gives one of the two another source port. It keeps the flow, or the backend would change.
        flow.backend_id = 0;
        flow.backend = key.place;
    }
    if reason == SocketEvent::PassedTableFull || !tables.set_socket_flow(key, &flow) {
        if reason == SocketEvent::DatagramTranslated {
            tables.remove_origin(&source);
        }
        tables.count(SocketEvent::PassedTableFull);
        return Steering::none(&key.place);
    }
    tables.count(reason);
    if reason == SocketEvent::PassedAmbiguous {
        return Steering::none(&key.place);
    }
    tables.count(SocketEvent::FlowSteered);
    Steering::to(backend.address, backend.port)
}

/// The answers of a flow's backend no longer belong to its destination.
#[inline(always)]
fn forget_origin<A: ClientFamily, T: SocketTables<A>>(tables: &mut T, key: &DestinationKey<A>) {
    let Some(flow) = tables.socket_flow(key) else {
        return;
    };
    let backend = flow.backend;
    let source = SourceKey {
        cookie: key.cookie,
        place: backend,
    };
    if let Some(origin) = tables.origin(&source)
        && (*origin == key.place || *origin == backend)
    {
        tables.remove_origin(&source);
    }
}

/// A socket writes to an address that is no service's. If that is the backend of a service it also writes to, answers
/// could not be told apart: the service's packets are translated on their way from now on.
#[inline(always)]
fn part_from_services<A: ClientFamily, T: SocketTables<A>>(
    tables: &mut T,
    key: &DestinationKey<A>,
) {
    let source = SourceKey {
        cookie: key.cookie,
        place: key.place,
    };
    let Some(origin) = tables.origin(&source) else {
        return;
    };
    let service = *origin;
    if service == key.place {
        return;
    }
    let flow = DestinationKey {
        cookie: key.cookie,
        place: service,
    };
    if let Some(flow) = tables.socket_flow(&flow) {
        flow.backend_id = 0;
        // The origin stays with this flow, which removes it in the end.
    }
    tables.set_origin(&source, &key.place);
}

/// Notes a destination for the end of the socket. `DatagramTranslated` when it is noted.
#[inline(always)]
fn enlist<A: ClientFamily, T: SocketTables<A>>(
    tables: &mut T,
    key: &DestinationKey<A>,
) -> SocketEvent {
    let mut index = 0;
    while index < MAX_SOCKET_DESTINATIONS {
        let usage = UseKey {
            cookie: key.cookie,
            index,
        };
        index += 1;
        match tables.insert_usage(&usage, &key.place) {
            Inserted::Done => return SocketEvent::DatagramTranslated,
            Inserted::Full => return SocketEvent::PassedTableFull,
            Inserted::Exists => {}
        }
        if let Some(place) = tables.usage(&usage)
            && *place == key.place
        {
            return SocketEvent::DatagramTranslated;
        }
    }
    SocketEvent::PassedTooManyDestinations
}

/// A backend and the state word it had when it was chosen; `ConnectionTranslated` when there is one.
#[repr(C)]
struct Choice<A> {
    reason: SocketEvent,
    id: u32,
    state: u32,
    backend: Backend<A>,
}

/// The backend for a new flow of this socket, as the packet path would choose it.
#[inline(always)]
fn choose<A: ClientFamily, T: SocketTables<A>>(
    tables: &mut T,
    socket: &Socket<A>,
    to: &Place<A>,
) -> Choice<A> {
    let mut choice = Choice {
        reason: SocketEvent::PassedUnknownNamespace,
        id: 0,
        state: 0,
        backend: Backend {
            address: to.address,
            port: to.port,
            flags: 0,
            service_id: 0,
        },
    };
    let Some(namespace) = tables.namespace(socket.namespace) else {
        return choice;
    };
    let mut client = socket.source;
    if client == A::default() {
        client = A::client(namespace);
    }
    if socket.flags & BOUND_TO_LINK != 0 {
        choice.reason = SocketEvent::PassedBoundToLink;
        return choice;
    }
    let key = frontend_key(tables, to, socket.protocol);
    pick(tables, &key, client, &mut choice);
    if choice.reason != SocketEvent::ConnectionTranslated {
        return choice;
    }
    if is_served(tables, socket, &choice) {
        // Packets to it would be translated once more.
        choice.reason = SocketEvent::PassedChained;
    } else if choice.backend.address == client && is_judged(tables, &client) {
        choice.reason = SocketEvent::PassedPolicy;
    }
    choice
}

/// True for the address of a pod that policies judge.
#[inline(always)]
fn is_judged<A: ClientFamily, T: SocketTables<A>>(tables: &mut T, address: &A) -> bool {
    let ifindex = match tables.endpoint(address) {
        Some(endpoint) => endpoint.ifindex,
        None => 0,
    };
    match tables.pod_policy(ifindex) {
        Some(policy) => policy.flags != 0,
        None => false,
    }
}

#[inline(always)]
fn is_served<A: ClientFamily, T: SocketTables<A>>(
    tables: &mut T,
    socket: &Socket<A>,
    choice: &Choice<A>,
) -> bool {
    let backend = Place::new(choice.backend.address, choice.backend.port);
    let key = frontend_key(tables, &backend, socket.protocol);
    tables.frontend(&key).is_some()
}

/// Where a service port would be found: under its own address, or among those that node addresses serve. As the packet
/// path looks for clients of the cluster.
#[inline(always)]
fn frontend_key<A: ClientFamily, T: SocketTables<A>>(
    tables: &mut T,
    place: &Place<A>,
    protocol: u32,
) -> FrontendKey<A> {
    let mut key = FrontendKey {
        address: place.address,
        port: place.port,
        protocol: (protocol & 0xff) as u8,
        scope: SCOPE_ALL,
    };
    if tables.frontend(&key).is_some() {
        return key;
    }
    let serves = match tables.endpoint(&place.address) {
        Some(endpoint) => {
            endpoint.flags & ENDPOINT_NODE_PORTS != 0
                && endpoint.flags & (ENDPOINT_NODE | ENDPOINT_PEER) != 0
        }
        None => false,
    };
    if serves {
        key.address = A::default();
    }
    key
}

/// The client's own backend where the service has affinity, any usable one otherwise.
#[inline(always)]
fn pick<A: ClientFamily, T: SocketTables<A>>(
    tables: &mut T,
    key: &FrontendKey<A>,
    client: A,
    choice: &mut Choice<A>,
) {
    choice.reason = SocketEvent::PassedNoService;
    let now_s = tables.now_s();
    let mut affinity_key = AffinityKey {
        client,
        service_id: 0,
    };
    let mut affinity_s = 0;
    let mut attempt = 0;
    while attempt < MAX_PICK_ATTEMPTS {
        attempt += 1;
        let Some(frontend) = tables.frontend(key) else {
            return;
        };
        let (service_id, backends) = (frontend.service_id, frontend.backends);
        let flags = frontend.flags;
        affinity_s = frontend.affinity_s;
        affinity_key.service_id = service_id;
        choice.reason = SocketEvent::PassedNoBackend;
        if backends == 0 {
            return;
        }
        if flags & FRONTEND_RANGES != 0 {
            choice.reason = SocketEvent::PassedSourceRanges;
            return;
        }
        if affinity_s != 0 && client == A::default() {
            choice.reason = SocketEvent::PassedUnknownClient;
            return;
        }
        // The first look only: a backend that cannot be used any more gives way to any other.
        if affinity_s != 0 && attempt == 1 {
            let id = remembered(tables, &affinity_key, now_s);
            if id != 0 && take(tables, id, service_id, choice) {
                break;
            }
        }
        let index = ((tables.random() as u64 * backends as u64) >> 32) as u32;
        let Some(id) = tables.slot(&SlotKey { service_id, index }) else {
            continue;
        };
        let id = *id;
        if take(tables, id, service_id, choice) {
            break;
        }
    }
    if choice.reason == SocketEvent::ConnectionTranslated && affinity_s != 0 {
        let affinity = Affinity {
            backend_id: choice.id,
            backend_state: choice.state,
            expires_s: now_s.saturating_add(affinity_s),
        };
        tables.set_affinity(&affinity_key, &affinity);
    }
}

/// The backend that a client was given before; zero, which is no backend's id, when there is none or its time is over.
#[inline(always)]
fn remembered<A: ClientFamily, T: SocketTables<A>>(
    tables: &mut T,
    key: &AffinityKey<A>,
    now_s: u32,
) -> u32 {
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
fn take<A: ClientFamily, T: SocketTables<A>>(
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
    choice.reason = SocketEvent::ConnectionTranslated;
    true
}
