//! [`Tables`] over ordinary collections, and addresses by number for both families.

use std::collections::{HashMap, HashSet};

use crate::layout::{
    Affinity, AffinityKey, Backend, Datagram, ENDPOINT_NODE, ENDPOINT_READY, Endpoint, Flow,
    FlowKey, FragmentKey, Frontend, FrontendKey, LINK_HAS_V4, LINK_HAS_V6, LINK_POD, Link, Node,
    Park, PodPolicy, PolicyRule, PolicyRuleKey, Range, SlotKey, backend_state,
};
use crate::packet::{Action, Decision, Packet};
use crate::path::{self, Hook, LinkAddress, Scratch};
use crate::policy::host::{HostTables, Masked};
use crate::policy::{Ends, PolicyRules, PolicyTables, Verdict};
use crate::reason::Event;
use crate::tables::{Inserted, Tables};
use crate::{Port, V4, V6};

/// A family whose addresses can be made from small numbers.
pub(super) trait TestFamily: LinkAddress + Masked {
    fn pod(number: u8) -> Self;
    fn service(number: u8) -> Self;
    fn node() -> Self;
    fn link(number: u8) -> Link;
}

impl TestFamily for V4 {
    fn pod(number: u8) -> Self {
        Self::new([10, 244, 0, number])
    }
    fn service(number: u8) -> Self {
        Self::new([10, 96, 0, number])
    }
    fn node() -> Self {
        Self::new([192, 0, 2, 11])
    }
    fn link(number: u8) -> Link {
        Link {
            flags: LINK_POD | LINK_HAS_V4,
            v4: Self::pod(number),
            v6: V6::default(),
        }
    }
}

impl TestFamily for V6 {
    fn pod(number: u8) -> Self {
        Self::new([0xfd, 0, 2, 0x44, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, number])
    }
    fn service(number: u8) -> Self {
        Self::new([0xfd, 0, 0, 0x96, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, number])
    }
    fn node() -> Self {
        Self::new([0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x11])
    }
    fn link(number: u8) -> Link {
        Link {
            flags: LINK_POD | LINK_HAS_V6,
            v4: V4::default(),
            v6: Self::pod(number),
        }
    }
}

/// As few as the flows of a history, so that a candidate is often found.
const RECENT: u32 = 16;

/// Pods 1 to 4 live on this node; higher numbers elsewhere.
pub(super) const LOCAL_PODS: u8 = 4;

/// What happens to the tables at once.
pub(super) type Act<A> = fn(&mut Collections<A>);

#[derive(Clone, Debug)]
pub(super) struct Collections<A> {
    pub(super) now_s: u32,
    pub(super) random: u64,
    pub(super) room: usize,
    pub(super) node: Node<A>,
    pub(super) endpoints: HashMap<A, Endpoint>,
    /// By whole addresses: the tests need no prefixes.
    pub(super) ranges: HashMap<A, Range>,
    pub(super) sources: HashMap<u32, Vec<A>>,
    pub(super) maglev: HashMap<(u32, u32), u32>,
    pub(super) frontends: HashMap<FrontendKey<A>, Frontend>,
    pub(super) slots: HashMap<SlotKey, u32>,
    pub(super) backends: HashMap<u32, Backend<A>>,
    pub(super) states: HashMap<u32, u32>,
    pub(super) flows: HashMap<FlowKey<A>, Flow<A>>,
    pub(super) replies: HashMap<FlowKey<A>, FlowKey<A>>,
    pub(super) affinities: HashMap<AffinityKey<A>, Affinity>,
    pub(super) datagrams: HashMap<FragmentKey<A>, Datagram>,
    pub(super) park: Park,
    pub(super) recent: HashMap<u32, FlowKey<A>>,
    pub(super) cursors: HashMap<u32, u32>,
    /// Reply tuples that sockets of the node take.
    pub(super) sockets: HashSet<FlowKey<A>>,
    pub(super) events: HashMap<Event, u64>,
    /// Its endpoints are not used: see `endpoints`. Pods of this node are open.
    pub(super) policies: HostTables<A>,
    /// Packets that policies denied.
    pub(super) denied: Vec<(Ends<A>, Verdict)>,
    /// What another CPU does just after so many more looks at the generation of the policies.
    pub(super) other_cpu: Option<(u32, Act<A>)>,
}

impl<A: TestFamily> Collections<A> {
    pub(super) fn new(seed: u64, room: usize) -> Self {
        let node = Node {
            address: A::node(),
            ..Node::default()
        };
        let mut endpoints = HashMap::new();
        endpoints.insert(
            A::node(),
            Endpoint {
                flags: ENDPOINT_NODE,
                ..Endpoint::default()
            },
        );
        let mut policies = HostTables::default();
        for number in 1..=LOCAL_PODS {
            policies.pods.insert(number.into(), PodPolicy::default());
            let endpoint = Endpoint {
                ifindex: number.into(),
                flags: ENDPOINT_READY,
                ..Endpoint::default()
            };
            endpoints.insert(A::pod(number), endpoint);
        }
        Self {
            now_s: 1_000,
            random: seed | 1,
            room,
            node,
            endpoints,
            ranges: HashMap::new(),
            sources: HashMap::new(),
            maglev: HashMap::new(),
            frontends: HashMap::new(),
            slots: HashMap::new(),
            backends: HashMap::new(),
            states: HashMap::new(),
            flows: HashMap::new(),
            replies: HashMap::new(),
            affinities: HashMap::new(),
            datagrams: HashMap::new(),
            park: Park::default(),
            recent: HashMap::new(),
            cursors: HashMap::new(),
            sockets: HashSet::new(),
            events: HashMap::new(),
            policies,
            denied: Vec::new(),
            other_cpu: None,
        }
    }

    /// Serves `service` by these pods (number, draining). Ids: the service's own number, and one for each pair.
    pub(super) fn serve(&mut self, service: u8, protocol: u8, pods: &[(u8, bool)]) {
        let service_id = u32::from(service) * 256 + u32::from(protocol);
        let id = |pod: u8| service_id * 16 + u32::from(pod);
        let mut index = 0;
        for (pod, draining) in pods {
            let (id, kind) = (
                id(*pod),
                if *draining {
                    backend_state::DRAINING
                } else {
                    backend_state::ACTIVE
                },
            );
            let port = Port::new(8080);
            let backend = Backend {
                address: A::pod(*pod),
                port,
                flags: 0,
                service_id,
            };
            self.backends.insert(id, backend);
            let word = self.states.get(&id).copied().unwrap_or(0);
            self.states.insert(id, backend_state::with_kind(word, kind));
            if !draining {
                self.slots.insert(SlotKey { service_id, index }, id);
                index += 1;
            }
        }
        let frontend = Frontend {
            service_id,
            backends: index,
            ..Frontend::default()
        };
        self.frontends
            .insert(Self::frontend_key(service, protocol), frontend);
        self.node.generation += 1;
        self.end_all_but(
            service_id,
            &pods.iter().map(|(pod, _)| id(*pod)).collect::<Vec<_>>(),
        );
    }

    pub(super) fn end(&mut self, service: u8, protocol: u8) {
        let service_id = u32::from(service) * 256 + u32::from(protocol);
        self.frontends
            .remove(&Self::frontend_key(service, protocol));
        self.slots.retain(|key, _| key.service_id != service_id);
        self.end_all_but(service_id, &[]);
    }

    fn frontend_key(service: u8, protocol: u8) -> FrontendKey<A> {
        FrontendKey {
            address: A::service(service),
            port: Port::new(80),
            protocol,
            scope: 0,
        }
    }

    fn end_all_but(&mut self, service_id: u32, kept: &[u32]) {
        let gone: Vec<u32> = self
            .backends
            .iter()
            .filter(|(id, backend)| backend.service_id == service_id && !kept.contains(id))
            .map(|(id, _)| *id)
            .collect();
        for id in gone {
            self.backends.remove(&id);
            let word = self.states.get(&id).copied().unwrap_or(0);
            self.states.insert(id, backend_state::ended(word));
        }
    }

    /// What user space does between packets.
    pub(super) fn collect(&mut self) {
        let over: Vec<_> = self
            .flows
            .iter()
            .filter(|(_, flow)| {
                let state = self.states.get(&flow.backend_id).copied().unwrap_or(0);
                flow.is_over(state, self.now_s, false)
            })
            .map(|(key, flow)| (*key, flow.reply_key()))
            .collect();
        for (key, reply) in over {
            self.replies.remove(&reply);
            self.flows.remove(&key);
        }
    }
}

impl<A: TestFamily> PolicyRules for Collections<A> {
    fn policy_rule(&mut self, key: &PolicyRuleKey) -> Option<&PolicyRule> {
        self.policies.policy_rule(key)
    }
}

impl<A: TestFamily> PolicyTables<A> for Collections<A> {
    fn endpoint(&mut self, address: &A) -> Option<&Endpoint> {
        self.endpoints.get(address)
    }
    fn pod_policy(&mut self, ifindex: u32) -> Option<&PodPolicy> {
        self.policies.pod_policy(ifindex)
    }
    fn identity(&mut self, address: &A) -> u32 {
        self.policies.identity(address)
    }
    fn policy_generation(&mut self) -> u32 {
        let generation = self.policies.policy_generation();
        match self.other_cpu.take() {
            Some((0, acts)) => acts(self),
            Some((more, acts)) => self.other_cpu = Some((more - 1, acts)),
            None => {}
        }
        generation
    }
    fn denied(&mut self, ends: &Ends<A>, _source_port: Port, verdict: &Verdict) {
        self.denied.push((*ends, *verdict));
    }
}

impl<A: TestFamily> Tables<A> for Collections<A> {
    fn now_s(&mut self) -> u32 {
        self.now_s
    }
    fn random(&mut self) -> u32 {
        // xorshift: the same history gives the same choices.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 32) as u32
    }
    fn count(&mut self, event: Event) {
        *self.events.entry(event).or_default() += 1;
    }
    fn node(&mut self) -> Option<&Node<A>> {
        Some(&self.node)
    }
    fn frontend(&mut self, key: &FrontendKey<A>) -> Option<&Frontend> {
        self.frontends.get(key)
    }
    fn slot(&mut self, key: &SlotKey) -> Option<&u32> {
        self.slots.get(key)
    }
    fn backend(&mut self, id: u32) -> Option<&Backend<A>> {
        self.backends.get(&id)
    }
    fn backend_state(&mut self, id: u32) -> u32 {
        self.states.get(&id).copied().unwrap_or(0)
    }
    fn maglev(&mut self, service_id: u32, place: u32) -> u32 {
        self.maglev.get(&(service_id, place)).copied().unwrap_or(0)
    }
    fn source_allowed(&mut self, service_id: u32, source: &A) -> bool {
        let ranges = self.sources.get(&service_id);
        ranges.is_some_and(|sources| sources.contains(source))
    }
    fn range(&mut self, address: &A) -> Option<&Range> {
        self.ranges.get(address)
    }
    fn affinity(&mut self, key: &AffinityKey<A>) -> Option<&Affinity> {
        self.affinities.get(key)
    }
    fn set_affinity(&mut self, key: &AffinityKey<A>, affinity: &Affinity) {
        self.affinities.insert(*key, *affinity);
    }
    fn datagram(&mut self, key: &FragmentKey<A>) -> Option<&mut Datagram> {
        self.datagrams.get_mut(key)
    }
    fn set_datagram(&mut self, key: &FragmentKey<A>, datagram: &Datagram) {
        self.datagrams.insert(*key, *datagram);
    }
    fn park(&mut self) -> Park {
        self.park
    }
    fn flow(&mut self, key: &FlowKey<A>) -> Option<&mut Flow<A>> {
        self.flows.get_mut(key)
    }
    fn insert_flow(&mut self, key: &FlowKey<A>, flow: &Flow<A>) -> Inserted {
        insert(&mut self.flows, self.room, *key, *flow)
    }
    fn remove_flow(&mut self, key: &FlowKey<A>) {
        self.flows.remove(key);
    }
    fn reply(&mut self, key: &FlowKey<A>) -> Option<&FlowKey<A>> {
        self.replies.get(key)
    }
    fn insert_reply(&mut self, key: &FlowKey<A>, flow: &FlowKey<A>) -> Inserted {
        // One more than the flow table: the table that is full first must not matter.
        insert(&mut self.replies, self.room + 1, *key, *flow)
    }
    fn remove_reply(&mut self, key: &FlowKey<A>) {
        self.replies.remove(key);
    }
    fn recent(&mut self, place: u32) -> Option<&FlowKey<A>> {
        self.recent.get(&(place % RECENT))
    }
    fn set_recent(&mut self, place: u32, key: &FlowKey<A>) {
        self.recent.insert(place % RECENT, *key);
    }
    fn port_cursor(&mut self, index: u32) -> u32 {
        self.cursors.get(&index).copied().unwrap_or(0)
    }
    fn set_port_cursor(&mut self, index: u32, cursor: u32) {
        self.cursors.insert(index, cursor);
    }
    fn is_bound(&mut self, reply: &FlowKey<A>) -> bool {
        self.sockets.contains(reply)
    }
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
    if table.len() >= room {
        return Inserted::Full;
    }
    table.insert(key, value);
    Inserted::Done
}

/// All stages of the path of a packet from a pod.
pub(super) fn from_pod<A: TestFamily>(
    tables: &mut Collections<A>,
    link: &Link,
    packet: &Packet<A>,
) -> Decision<A> {
    let decision = path::from_pod(tables, link, packet);
    go_on(tables, Hook::Pod, packet, decision)
}

/// All stages of the path of a packet from another machine.
pub(super) fn from_network<A: TestFamily>(
    tables: &mut Collections<A>,
    packet: &Packet<A>,
) -> Decision<A> {
    let decision = path::from_network(tables, packet);
    go_on(tables, Hook::Network, packet, decision)
}

/// The stages behind a hook.
pub(super) fn go_on<A: TestFamily>(
    tables: &mut Collections<A>,
    hook: Hook,
    packet: &Packet<A>,
    decision: Decision<A>,
) -> Decision<A> {
    let scratch = &mut Scratch::default();
    let decision = if decision.action == Action::Judge {
        path::settle(tables, hook, packet, scratch)
    } else {
        decision
    };
    if decision.action == Action::Open {
        return path::open(tables, hook, packet, scratch);
    }
    decision
}
