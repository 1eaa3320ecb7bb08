//! Socket hooks: random histories against a model that remembers what each socket was told, and each choice against
//! what the packet path may choose with the same tables.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use proptest::prelude::*;

use super::tables::{Collections, TestFamily, from_pod};
use crate::address::{TCP, UDP};
use crate::layout::{
    Affinity, AffinityKey, Backend, ENDPOINT_NODE, ENDPOINT_NODE_PORTS, ENDPOINT_PEER,
    ENDPOINT_READY, Endpoint, FRONTEND_RANGES, Frontend, FrontendKey, POLICY_EGRESS,
    POLICY_INGRESS, PodPolicy, SCOPE_ALL, SlotKey,
};
use crate::packet::{Packet, Translation, WITH_PORTS, tcp};
use crate::policy::PolicyTables;
use crate::reason::SocketEvent;
use crate::socket::{
    BOUND_TO_LINK, CONNECTED, ClientFamily, Connection, Cookie, DestinationKey,
    MAX_SOCKET_DESTINATIONS, Namespace, Place, Socket, SocketFlow, SocketTables, SourceKey, UseKey,
    connect, peer_name, receive, release, send,
};
use crate::tables::{Inserted, Tables};
use crate::{Port, V4, V6};

/// The namespace of the client, pod 1, and one that nobody knows.
pub(super) const NAMESPACE: u64 = 77;
const UNKNOWN: u64 = 78;
const CLIENT: u8 = 1;
const SERVICES: u8 = 4;

pub(super) struct Sockets<A> {
    pub(super) tables: Collections<A>,
    room: usize,
    namespace: Namespace,
    /// A further address and what it is.
    node: Option<(A, Endpoint)>,
    connections: HashMap<Cookie, Connection<A>>,
    flows: HashMap<DestinationKey<A>, SocketFlow<A>>,
    origins: HashMap<SourceKey<A>, Place<A>>,
    uses: HashMap<UseKey, Place<A>>,
    events: HashMap<SocketEvent, u64>,
}

impl<A: TestFamily + ClientFamily> Sockets<A> {
    pub(super) fn new(seed: u64, room: usize) -> Self {
        let link = A::link(CLIENT);
        Self {
            tables: Collections::new(seed, 10_000),
            room,
            namespace: Namespace {
                flags: 0,
                ifindex: CLIENT.into(),
                v4: link.v4,
                v6: link.v6,
            },
            node: None,
            connections: HashMap::new(),
            flows: HashMap::new(),
            origins: HashMap::new(),
            uses: HashMap::new(),
            events: HashMap::new(),
        }
    }

    fn counted(&self, event: SocketEvent) -> u64 {
        self.events.get(&event).copied().unwrap_or(0)
    }

    pub(super) fn held(&self) -> usize {
        self.connections.len() + self.flows.len() + self.origins.len() + self.uses.len()
    }

    fn set_affinity_time(&mut self, seconds: u32) {
        for frontend in self.tables.frontends.values_mut() {
            frontend.affinity_s = seconds;
        }
    }

    /// Where the packet path would lead a new flow of the client from this port; none when it drops or passes it.
    fn packet_choice(&mut self, to: &Place<A>, protocol: u8, port: u16) -> Option<Place<A>> {
        let packet = Packet {
            source: A::pod(CLIENT),
            destination: to.address,
            source_port: Port::new(port),
            destination_port: to.port,
            protocol,
            tcp_flags: if protocol == TCP { tcp::SYN } else { 0 },
            flags: WITH_PORTS,
            identification: 0,
        };
        let decision = from_pod(&mut self.tables, &A::link(CLIENT), &packet);
        (decision.translation == Translation::Forward)
            .then(|| Place::new(decision.destination, decision.destination_port))
    }
}

impl<A: TestFamily> SocketTables<A> for Sockets<A> {
    fn now_s(&mut self) -> u32 {
        self.tables.now_s()
    }
    fn random(&mut self) -> u32 {
        self.tables.random()
    }
    fn count(&mut self, event: SocketEvent) {
        *self.events.entry(event).or_default() += 1;
    }
    fn namespace(&mut self, cookie: u64) -> Option<&Namespace> {
        (cookie == NAMESPACE).then_some(&self.namespace)
    }
    fn endpoint(&mut self, address: &A) -> Option<&Endpoint> {
        match &self.node {
            Some((node, endpoint)) if node == address => Some(endpoint),
            _ => self.tables.endpoint(address),
        }
    }
    fn pod_policy(&mut self, ifindex: u32) -> Option<&PodPolicy> {
        self.tables.pod_policy(ifindex)
    }
    fn frontend(&mut self, key: &FrontendKey<A>) -> Option<&Frontend> {
        self.tables.frontend(key)
    }
    fn slot(&mut self, key: &SlotKey) -> Option<&u32> {
        self.tables.slot(key)
    }
    fn backend(&mut self, id: u32) -> Option<&Backend<A>> {
        self.tables.backend(id)
    }
    fn backend_state(&mut self, id: u32) -> u32 {
        self.tables.backend_state(id)
    }
    fn affinity(&mut self, key: &AffinityKey<A>) -> Option<&Affinity> {
        self.tables.affinity(key)
    }
    fn set_affinity(&mut self, key: &AffinityKey<A>, affinity: &Affinity) {
        self.tables.set_affinity(key, affinity);
    }
    fn connection(&mut self, cookie: &Cookie) -> Option<&Connection<A>> {
        self.connections.get(cookie)
    }
    fn set_connection(&mut self, cookie: &Cookie, connection: &Connection<A>) -> bool {
        replace(&mut self.connections, self.room, *cookie, *connection)
    }
    fn remove_connection(&mut self, cookie: &Cookie) {
        self.connections.remove(cookie);
    }
    fn socket_flow(&mut self, key: &DestinationKey<A>) -> Option<&mut SocketFlow<A>> {
        self.flows.get_mut(key)
    }
    fn set_socket_flow(&mut self, key: &DestinationKey<A>, flow: &SocketFlow<A>) -> bool {
        replace(&mut self.flows, self.room, *key, *flow)
    }
    fn remove_socket_flow(&mut self, key: &DestinationKey<A>) {
        self.flows.remove(key);
    }
    fn origin(&mut self, key: &SourceKey<A>) -> Option<&Place<A>> {
        self.origins.get(key)
    }
    fn insert_origin(&mut self, key: &SourceKey<A>, place: &Place<A>) -> Inserted {
        insert(&mut self.origins, self.room, *key, *place)
    }
    fn set_origin(&mut self, key: &SourceKey<A>, place: &Place<A>) {
        self.origins.insert(*key, *place);
    }
    fn remove_origin(&mut self, key: &SourceKey<A>) {
        self.origins.remove(key);
    }
    fn usage(&mut self, key: &UseKey) -> Option<&Place<A>> {
        self.uses.get(key)
    }
    fn insert_usage(&mut self, key: &UseKey, place: &Place<A>) -> Inserted {
        insert(&mut self.uses, self.room, *key, *place)
    }
    fn remove_usage(&mut self, key: &UseKey) {
        self.uses.remove(key);
    }
}

fn replace<K: Eq + std::hash::Hash, V>(
    table: &mut HashMap<K, V>,
    room: usize,
    key: K,
    value: V,
) -> bool {
    if table.len() >= room && !table.contains_key(&key) {
        return false;
    }
    table.insert(key, value);
    true
}

fn insert<K: Eq + std::hash::Hash, V>(
    table: &mut HashMap<K, V>,
    room: usize,
    key: K,
    value: V,
) -> Inserted {
    if table.contains_key(&key) {
        return Inserted::Exists;
    }
    if replace(table, room, key, value) {
        Inserted::Done
    } else {
        Inserted::Full
    }
}

fn socket<A: TestFamily>(number: u64, protocol: u8) -> Socket<A> {
    Socket {
        namespace: NAMESPACE,
        cookie: Cookie::new(number),
        source: A::default(),
        flags: 0,
        protocol: protocol.into(),
    }
}

fn service<A: TestFamily>(number: u8) -> Place<A> {
    Place::new(A::service(number), Port::new(80))
}

fn backend<A: TestFamily>(pod: u8) -> Place<A> {
    Place::new(A::pod(pod), Port::new(8080))
}

#[derive(Clone, Debug)]
enum Step {
    /// Pods and whether they drain.
    Serve {
        service: u8,
        pods: BTreeMap<u8, bool>,
    },
    End {
        service: u8,
    },
    Affinity {
        seconds: u32,
    },
    Connect {
        socket: u64,
        service: u8,
    },
    Send {
        socket: u64,
        service: u8,
    },
    /// A datagram to a pod by its own address.
    SendDirect {
        socket: u64,
        pod: u8,
    },
    Release {
        socket: u64,
    },
    Pass {
        seconds: u32,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let pods = prop::collection::btree_map(1u8..7, prop::bool::weighted(0.2), 0..4);
    prop_oneof![
        3 => (1..SERVICES, pods).prop_map(|(service, pods)| Step::Serve { service, pods }),
        1 => (1..SERVICES).prop_map(|service| Step::End { service }),
        1 => prop_oneof![Just(0u32), Just(10)].prop_map(|seconds| Step::Affinity { seconds }),
        4 => (1u64..4, 1..SERVICES).prop_map(|(socket, service)| Step::Connect { socket, service }),
        8 => (1u64..4, 1..SERVICES).prop_map(|(socket, service)| Step::Send { socket, service }),
        2 => (1u64..4, 1u8..7).prop_map(|(socket, pod)| Step::SendDirect { socket, pod }),
        1 => (1u64..4).prop_map(|socket| Step::Release { socket }),
        2 => prop_oneof![Just(1u32), Just(11), Just(181)].prop_map(|seconds| Step::Pass { seconds }),
    ]
}

/// What is known without looking into the tables: who serves, and where each socket's datagrams went.
struct Model<A> {
    sockets: Sockets<A>,
    serving: HashMap<u8, BTreeSet<u8>>,
    /// Pods that keep the flows they have.
    draining: HashMap<u8, BTreeSet<u8>>,
    /// By socket and service: the pod, and when it was last written to.
    told: HashMap<(u64, u8), (u8, u32)>,
    /// Pods that a socket wrote to by their own address.
    direct: HashSet<(u64, u8)>,
}

impl<A: TestFamily + ClientFamily> Model<A> {
    fn pod_of(place: &Place<A>) -> u8 {
        (1..7)
            .find(|pod| backend::<A>(*pod) == *place)
            .expect("a pod's address")
    }

    fn run(&mut self, step: &Step) {
        match step {
            Step::Serve { service, pods } => {
                let list: Vec<_> = pods.iter().map(|(pod, drains)| (*pod, *drains)).collect();
                for protocol in [TCP, UDP] {
                    self.sockets.tables.serve(*service, protocol, &list);
                }
                // A pod that leaves and comes back is another.
                self.told
                    .retain(|(_, to), (pod, _)| to != service || pods.contains_key(pod));
                let drains = list.iter().filter(|(_, drains)| *drains);
                self.draining
                    .insert(*service, drains.map(|(pod, _)| *pod).collect());
                let usable = list.iter().filter(|(_, drains)| !drains);
                self.serving
                    .insert(*service, usable.map(|(pod, _)| *pod).collect());
            }
            Step::End { service } => {
                for protocol in [TCP, UDP] {
                    self.sockets.tables.end(*service, protocol);
                }
                self.serving.remove(service);
                self.draining.remove(service);
                self.told.retain(|(_, to), _| to != service);
            }
            Step::Affinity { seconds } => self.sockets.set_affinity_time(*seconds),
            Step::Connect {
                socket: number,
                service: to,
            } => self.connect(*number, *to),
            Step::Send {
                socket: number,
                service: to,
            } => self.send(*number, *to),
            Step::SendDirect {
                socket: number,
                pod,
            } => {
                let sent = send(&mut self.sockets, &socket(*number, UDP), &backend(*pod));
                assert!(!sent.is_translated());
                self.direct.insert((*number, *pod));
                // From here on a packet of the pod is shown as the pod's.
                let shown = receive(&mut self.sockets, &Cookie::new(*number), &backend(*pod));
                assert!(!shown.is_translated());
                self.told
                    .retain(|(socket, _), (told, _)| (*socket, *told) != (*number, *pod));
            }
            Step::Release { socket: number } => {
                let cookie = Cookie::new(*number);
                release(&mut self.sockets, &cookie, TCP.into());
                release(&mut self.sockets, &cookie, UDP.into());
                self.told.retain(|(socket, _), _| socket != number);
                self.direct.retain(|(socket, _)| socket != number);
            }
            Step::Pass { seconds } => self.sockets.tables.now_s += seconds,
        }
    }

    fn connect(&mut self, number: u64, to: u8) {
        let asked = connect(&mut self.sockets, &socket(number, TCP), &service(to));
        let serving = self.serving.get(&to).cloned().unwrap_or_default();
        assert_eq!(asked.is_translated(), !serving.is_empty());
        let peer = peer_name(&mut self.sockets, &Cookie::new(number), &asked.place);
        assert_eq!(peer.is_translated(), asked.is_translated());
        if asked.is_translated() {
            assert!(serving.contains(&Self::pod_of(&asked.place)));
            assert_eq!(peer.place, service(to));
        }
    }

    fn send(&mut self, number: u64, to: u8) {
        let now_s = self.sockets.tables.now_s;
        let sent = send(&mut self.sockets, &socket(number, UDP), &service(to));
        let serving = self.serving.get(&to).cloned().unwrap_or_default();
        let draining = self.draining.get(&to).cloned().unwrap_or_default();
        let before = self.told.remove(&(number, to));
        let kept = before.filter(|(pod, seen_s)| {
            (serving.contains(pod) || draining.contains(pod)) && now_s - seen_s <= 180
        });
        if !sent.is_translated() {
            assert_eq!(kept, None, "a flow with a living backend was given up");
            return;
        }
        let pod = Self::pod_of(&sent.place);
        match kept {
            Some((told, _)) => assert_eq!(told, pod, "a flow changed its backend without need"),
            None => assert!(serving.contains(&pod), "pod {pod} does not serve {to}"),
        }
        self.told.insert((number, to), (pod, now_s));
        for ((socket, service_number), (pod, _)) in &self.told {
            if *socket != number {
                continue;
            }
            let shown = receive(&mut self.sockets, &Cookie::new(number), &backend(*pod));
            assert_eq!(
                shown.place,
                service(*service_number),
                "answers of pod {pod} are shown as another's"
            );
        }
    }

    fn check(&mut self) {
        // No answer is translated that nobody waits for, and nothing is held that no socket can clean up.
        for key in self.sockets.origins.keys() {
            assert!(
                self.sockets
                    .flows
                    .iter()
                    .any(|(flow, value)| flow.cookie == key.cookie && value.backend == key.place),
                "an origin without its flow"
            );
        }
        for key in self.sockets.flows.keys() {
            assert!(
                self.sockets
                    .uses
                    .iter()
                    .any(|(usage, place)| usage.cookie == key.cookie && *place == key.place),
                "a flow that the end of its socket does not find"
            );
        }
    }
}

fn history<A: TestFamily + ClientFamily>(seed: u64, steps: &[Step]) {
    let mut model: Model<A> = Model {
        sockets: Sockets::new(seed, 1_000),
        serving: HashMap::new(),
        draining: HashMap::new(),
        told: HashMap::new(),
        direct: HashSet::new(),
    };
    for step in steps {
        model.run(step);
        model.check();
    }
    for socket in 1..4 {
        model.run(&Step::Release { socket });
    }
    assert_eq!(model.sockets.held(), 0, "closed sockets left entries");
}

/// With little room everything is allowed but to lie: what is translated can be told back.
fn crowded<A: TestFamily + ClientFamily>(seed: u64, room: usize, steps: &[Step]) {
    let mut sockets: Sockets<A> = Sockets::new(seed, room);
    for number in 1..SERVICES {
        for protocol in [TCP, UDP] {
            sockets
                .tables
                .serve(number, protocol, &[(2, false), (3, false)]);
        }
    }
    for step in steps {
        match step {
            Step::Connect {
                socket: number,
                service: to,
            } => {
                let asked = connect(&mut sockets, &socket(*number, TCP), &service(*to));
                if asked.is_translated() {
                    let peer = peer_name(&mut sockets, &Cookie::new(*number), &asked.place);
                    assert_eq!(peer.place, service(*to));
                }
            }
            Step::Send {
                socket: number,
                service: to,
            } => {
                let sent = send(&mut sockets, &socket(*number, UDP), &service(*to));
                if sent.is_translated() {
                    let shown = receive(&mut sockets, &Cookie::new(*number), &sent.place);
                    assert_eq!(shown.place, service(*to));
                }
            }
            _ => {}
        }
    }
    for number in 1..4 {
        for protocol in [TCP, UDP] {
            release(&mut sockets, &Cookie::new(number), protocol.into());
        }
    }
    assert_eq!(sockets.held(), 0, "closed sockets left entries");
}

/// The hooks choose among exactly the backends that the packet path chooses among.
fn same_choices<A: TestFamily + ClientFamily>(seed: u64, pods: &BTreeMap<u8, bool>, protocol: u8) {
    let mut sockets: Sockets<A> = Sockets::new(seed, 10_000);
    let list: Vec<_> = pods.iter().map(|(pod, drains)| (*pod, *drains)).collect();
    sockets.tables.serve(1, protocol, &list);
    let to = service::<A>(1);
    let (mut by_socket, mut by_packet) = (BTreeSet::new(), BTreeSet::new());
    for number in 0..200u16 {
        by_packet.extend(sockets.packet_choice(&to, protocol, 10_000 + number));
        let asking = socket(number.into(), protocol);
        let steering = if protocol == TCP {
            connect(&mut sockets, &asking, &to)
        } else {
            send(&mut sockets, &asking, &to)
        };
        by_socket.extend(steering.is_translated().then_some(steering.place));
    }
    assert_eq!(by_socket, by_packet);
}

/// Both remember the same backend for a client, whoever was asked first.
fn same_affinity<A: TestFamily + ClientFamily>(seed: u64, packet_first: bool) {
    let mut sockets: Sockets<A> = Sockets::new(seed, 10_000);
    sockets
        .tables
        .serve(1, TCP, &[(2, false), (3, false), (4, false), (5, false)]);
    sockets.set_affinity_time(100);
    let to = service::<A>(1);
    let mut chosen = BTreeSet::new();
    for number in 0..20u16 {
        if (number % 2 == 0) == packet_first {
            chosen.extend(sockets.packet_choice(&to, TCP, 10_000 + number));
        } else {
            let asked = connect(&mut sockets, &socket(number.into(), TCP), &to);
            chosen.extend(asked.is_translated().then_some(asked.place));
        }
    }
    assert_eq!(chosen.len(), 1, "{chosen:?}");
}

proptest! {
    #[test]
    fn sockets_are_told_the_truth_v4(seed in any::<u64>(), steps in prop::collection::vec(step(), 1..80)) {
        history::<V4>(seed, &steps);
    }

    #[test]
    fn sockets_are_told_the_truth_v6(seed in any::<u64>(), steps in prop::collection::vec(step(), 1..80)) {
        history::<V6>(seed, &steps);
    }

    #[test]
    fn full_tables_leave_sockets_to_the_packet_path(
        seed in any::<u64>(), room in 0usize..5, steps in prop::collection::vec(step(), 1..60)
    ) {
        crowded::<V4>(seed, room, &steps);
        crowded::<V6>(seed, room, &steps);
    }

    #[test]
    fn hooks_and_packets_choose_among_the_same_backends(
        seed in any::<u64>(), pods in prop::collection::btree_map(2u8..7, any::<bool>(), 0..5)
    ) {
        for protocol in [TCP, UDP] {
            same_choices::<V4>(seed, &pods, protocol);
            same_choices::<V6>(seed, &pods, protocol);
        }
    }

    #[test]
    fn hooks_and_packets_share_affinity(seed in any::<u64>(), packet_first in any::<bool>()) {
        same_affinity::<V4>(seed, packet_first);
        same_affinity::<V6>(seed, packet_first);
    }
}

fn serving() -> Sockets<V4> {
    let mut sockets = Sockets::new(1, 10_000);
    for protocol in [TCP, UDP] {
        sockets.tables.serve(1, protocol, &[(2, false)]);
    }
    sockets
}

/// What a pod sends to itself leaves it only as long as it is for a service: policies that judge it must see it.
#[test]
fn a_pod_that_is_judged_comes_back_to_itself_by_packets() {
    for (flags, translated) in [(0, true), (POLICY_INGRESS, false), (POLICY_EGRESS, false)] {
        let mut sockets = serving();
        sockets.tables.serve(1, TCP, &[(CLIENT, false)]);
        sockets.tables.serve(1, UDP, &[(CLIENT, false)]);
        let ifindex = sockets.tables.endpoints[&V4::pod(CLIENT)].ifindex;
        let policy = PodPolicy {
            policy_id: 1,
            flags,
        };
        sockets.tables.policies.pods.insert(ifindex, policy);
        let connected = connect(&mut sockets, &socket(1, TCP), &service(1));
        let sent = send(&mut sockets, &socket(2, UDP), &service(1));
        assert_eq!(connected.is_translated(), translated, "{flags}");
        assert_eq!(sent.is_translated(), translated, "{flags}");
        let passed = if translated { 0 } else { 2 };
        assert_eq!(sockets.counted(SocketEvent::PassedPolicy), passed);
    }
}

#[test]
fn what_is_uncertain_passes_and_says_why() {
    type Case = (fn(&mut Socket<V4>), u8, SocketEvent);
    let cases: [Case; 5] = [
        (
            |s| s.namespace = UNKNOWN,
            TCP,
            SocketEvent::PassedUnknownNamespace,
        ),
        (
            |s| s.flags = BOUND_TO_LINK,
            TCP,
            SocketEvent::PassedBoundToLink,
        ),
        (
            |s| s.flags = CONNECTED,
            UDP,
            SocketEvent::PassedConnectedDatagram,
        ),
        (
            |s| s.namespace = UNKNOWN,
            UDP,
            SocketEvent::PassedUnknownNamespace,
        ),
        (|s| s.protocol = 132, UDP, SocketEvent::PassedProtocol),
    ];
    for (change, protocol, event) in cases {
        let mut sockets = serving();
        let mut asking = socket(1, protocol);
        change(&mut asking);
        let steering = if protocol == TCP {
            connect(&mut sockets, &asking, &service(1))
        } else {
            send(&mut sockets, &asking, &service(1))
        };
        assert!(!steering.is_translated(), "{event:?}");
        assert_eq!(sockets.counted(event), 1, "{event:?}");
        assert_eq!(sockets.held(), 0, "{event:?}");
    }
}

#[test]
fn connected_datagram_sockets_are_left_alone() {
    let mut sockets = serving();
    assert!(!connect(&mut sockets, &socket(1, UDP), &service(1)).is_translated());
    assert_eq!(sockets.counted(SocketEvent::PassedConnectedDatagram), 1);
}

#[test]
fn a_backend_that_is_a_service_is_left_to_packets() {
    let mut sockets = serving();
    let chained = FrontendKey {
        address: V4::pod(2),
        port: Port::new(8080),
        protocol: TCP,
        scope: 0,
    };
    sockets
        .tables
        .frontends
        .insert(chained, Frontend::default());
    assert!(!connect(&mut sockets, &socket(1, TCP), &service(1)).is_translated());
    assert_eq!(sockets.counted(SocketEvent::PassedChained), 1);
}

#[test]
fn a_socket_has_so_many_destinations_and_no_more() {
    let mut sockets: Sockets<V4> = Sockets::new(1, 10_000);
    let asking = socket(1, UDP);
    let more = u8::try_from(MAX_SOCKET_DESTINATIONS).expect("few") + 5;
    for number in 1..=more {
        // Each has a pod of its own, so that none is ambiguous.
        sockets.tables.serve(number, UDP, &[(100 + number, false)]);
        send(&mut sockets, &asking, &service(number));
    }
    assert_eq!(
        sockets.counted(SocketEvent::DatagramTranslated),
        MAX_SOCKET_DESTINATIONS.into()
    );
    assert_eq!(sockets.counted(SocketEvent::PassedTooManyDestinations), 5);
    release(&mut sockets, &asking.cookie, UDP.into());
    assert_eq!(sockets.held(), 0);
}

#[test]
fn a_connection_that_failed_is_forgotten_by_the_next() {
    let mut sockets = serving();
    let asking = socket(1, TCP);
    let first = connect(&mut sockets, &asking, &service(1));
    assert!(first.is_translated());
    // The same socket, directly to the backend that it had through the service.
    assert!(!connect(&mut sockets, &asking, &first.place).is_translated());
    assert!(!peer_name(&mut sockets, &asking.cookie, &first.place).is_translated());
}

#[test]
fn an_address_that_passes_to_another_service_takes_its_flows_along() {
    let mut sockets = serving();
    let asking = socket(1, UDP);
    assert_eq!(send(&mut sockets, &asking, &service(1)).place, backend(2));
    sockets.tables.serve(2, UDP, &[(3, false)]);
    let key = |number| FrontendKey {
        address: V4::service(number),
        port: Port::new(80),
        protocol: UDP,
        scope: 0,
    };
    // The first service goes on elsewhere: its backend lives.
    let other = sockets.tables.frontends[&key(2)];
    sockets.tables.frontends.insert(key(1), other);
    assert_eq!(send(&mut sockets, &asking, &service(1)).place, backend(3));
}

#[test]
fn ports_of_nodes_are_served_at_their_addresses_only() {
    let mut sockets = serving();
    let served = sockets.tables.frontends[&FrontendKey {
        address: V4::service(1),
        port: Port::new(80),
        protocol: TCP,
        scope: SCOPE_ALL,
    }];
    let node_port = FrontendKey {
        address: V4::default(),
        port: Port::new(30_080),
        protocol: TCP,
        scope: SCOPE_ALL,
    };
    sockets.tables.frontends.insert(node_port, served);
    let node = V4::new([192, 0, 2, 77]);
    for (flags, serves) in [
        (ENDPOINT_NODE | ENDPOINT_NODE_PORTS, true),
        (ENDPOINT_PEER | ENDPOINT_NODE_PORTS, true),
        (ENDPOINT_NODE, false),
        (ENDPOINT_READY, false),
    ] {
        sockets.node = Some((
            node,
            Endpoint {
                flags,
                ..Endpoint::default()
            },
        ));
        let to = Place::new(node, Port::new(30_080));
        let asked = connect(&mut sockets, &socket(1, TCP), &to);
        assert_eq!(asked.is_translated(), serves, "{flags}");
        if serves {
            assert_eq!(
                peer_name(&mut sockets, &Cookie::new(1), &asked.place).place,
                to
            );
        }
    }
    let loopback = Place::new(V4::new([127, 0, 0, 1]), Port::new(30_080));
    assert!(!connect(&mut sockets, &socket(1, TCP), &loopback).is_translated());
}

#[test]
fn services_for_certain_sources_are_left_to_packets() {
    let mut sockets = serving();
    for frontend in sockets.tables.frontends.values_mut() {
        frontend.flags |= FRONTEND_RANGES;
    }
    assert!(!connect(&mut sockets, &socket(1, TCP), &service(1)).is_translated());
    assert!(!send(&mut sockets, &socket(2, UDP), &service(1)).is_translated());
    assert_eq!(sockets.counted(SocketEvent::PassedSourceRanges), 2);
}
