//! The way of a policy through the product, as plain code: objects into the feed's index, what nodes are told of it, the
//! agents' compiler, and the judgement of the packet programs on what it made. Pure.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::net::IpAddr;

use control_api::desired::{Changes, DesiredState, Name};
use control_api::v1::{ClusterConfig, Delta, Object};
use control_feed::{Effects, Index, Kind, Op};
use dataplane_common::layout::{
    DIRECTION_EGRESS, DIRECTION_INGRESS, ENDPOINT_NODE, ENDPOINT_PEER, Endpoint, PodPolicy,
    PolicyRuleKey, RULE_BITS_ANY_PROTOCOL, RangeKey,
};
use dataplane_common::policy::host::{HostTables, Masked};
use dataplane_common::policy::{Ends, judge};
use dataplane_common::reason::DropReason;
use dataplane_common::{Port, V4, V6};
use prost::Message as _;
use serde_json::Value;
use weir_agent::compile::policy::{
    Compiled, Compiler, DomainAnswers, Input, Limits, LocalPod, Locals, Mode, RuleSetId,
};

use super::oracle::Packet;

/// A node's agent and what it has put into place.
#[derive(Debug)]
struct Node {
    addresses: Vec<IpAddr>,
    state: DesiredState,
    locals: Locals,
    compiler: Compiler,
    v4: HostTables<V4>,
    v6: HostTables<V6>,
    generation: u32,
    /// Addresses of all nodes.
    peers: Vec<IpAddr>,
    /// The tables have what was compiled last.
    is_filled: bool,
    /// Names of pods that were attached, by link.
    links: BTreeMap<(String, String), u32>,
    runs: bool,
}

/// Control plane and nodes.
#[derive(Debug)]
pub(super) struct Chain {
    index: Index,
    revision: u64,
    nodes: BTreeMap<String, Node>,
    api: bool,
    next_link: u32,
}

impl Node {
    fn new(name: &str, addresses: &[IpAddr]) -> Self {
        Self {
            addresses: addresses.to_vec(),
            state: DesiredState::default(),
            locals: Locals {
                node_name: name.to_owned(),
                node_addresses: addresses.iter().copied().collect(),
                pods: BTreeMap::new(),
            },
            compiler: Compiler::new(Mode::Enforced, Limits::default(), &[]),
            v4: HostTables::default(),
            v6: HostTables::default(),
            generation: 0,
            peers: Vec::new(),
            is_filled: false,
            links: BTreeMap::new(),
            runs: false,
        }
    }

    fn compile(&mut self, changes: &Changes, peers: &[IpAddr]) {
        if !self.runs {
            return;
        }
        let domains = DomainAnswers::default();
        let input = Input::new(&self.state, &self.locals, &domains);
        self.compiler.update(&input, changes);
        self.generation += 1;
        self.peers = peers.to_vec();
        self.is_filled = false;
    }

    /// Fills the tables with what was compiled last, once somebody asks.
    fn fill(&mut self) {
        if std::mem::replace(&mut self.is_filled, true) {
            return;
        }
        let compiled = self.compiler.compiled();
        let hosts = Hosts {
            locals: &self.locals,
            own: &self.addresses,
            peers: &self.peers,
        };
        self.v4 = tables(compiled, &hosts, self.generation, |ip| match ip {
            IpAddr::V4(a) => Some(V4::new(a.octets())),
            IpAddr::V6(_) => None,
        });
        self.v6 = tables(compiled, &hosts, self.generation, |ip| match ip {
            IpAddr::V6(a) => Some(V6::new(a.octets())),
            IpAddr::V4(_) => None,
        });
    }
}

/// Who has which address, for the table of endpoints.
struct Hosts<'a> {
    locals: &'a Locals,
    own: &'a [IpAddr],
    peers: &'a [IpAddr],
}

fn policy_id(id: RuleSetId) -> u32 {
    u32::try_from(id.0).unwrap_or(u32::MAX)
}

/// What the packet programs find for one address family.
fn tables<A: Masked + Hash + Eq>(
    compiled: &Compiled,
    hosts: &Hosts<'_>,
    generation: u32,
    of: impl Fn(IpAddr) -> Option<A>,
) -> HostTables<A> {
    let mut tables = HostTables {
        generation,
        ..HostTables::default()
    };
    let mut endpoints: HashMap<A, Endpoint> = HashMap::new();
    let flagged = |flags, ifindex| Endpoint {
        flags,
        ifindex,
        ..Endpoint::default()
    };
    for ip in hosts.peers {
        endpoints.extend(of(*ip).map(|a| (a, flagged(ENDPOINT_PEER, 0))));
    }
    for ip in hosts.own {
        endpoints.extend(of(*ip).map(|a| (a, flagged(ENDPOINT_NODE, 0))));
    }
    for (link, pod) in &hosts.locals.pods {
        for ip in &pod.addresses {
            endpoints.extend(of(*ip).map(|a| (a, flagged(0, *link))));
        }
        let policy = PodPolicy {
            policy_id: compiled.rules_of(*link).map_or(0, |(id, _)| policy_id(id)),
            flags: compiled.flags(*link),
        };
        tables.pods.insert(*link, policy);
    }
    tables.endpoints = endpoints;
    for (range, identity) in compiled.trie.iter() {
        if let Some(address) = of(range.address()) {
            let key = RangeKey {
                prefix_bits: range.len.into(),
                address,
            };
            tables.identities.insert(key, identity);
        }
    }
    for (id, set) in &compiled.rule_sets {
        for identity in set.identities() {
            let Some(entries) = set.entries(identity) else {
                continue;
            };
            for (direction, entries) in [DIRECTION_INGRESS, DIRECTION_EGRESS]
                .into_iter()
                .zip(entries)
            {
                for (range, rule) in entries.iter() {
                    let key = PolicyRuleKey {
                        prefix_bits: RULE_BITS_ANY_PROTOCOL + u32::from(range.bits),
                        policy_id: policy_id(*id),
                        identity,
                        direction,
                        protocol: range.protocol,
                        port: Port::new(range.port),
                    };
                    tables.rules.insert(key, *rule);
                }
            }
        }
    }
    tables
}

impl Chain {
    /// A control plane, and nodes whose agents are still to be started.
    pub(super) fn new<'a>(nodes: impl Iterator<Item = (&'a str, &'a [IpAddr])>) -> Self {
        let nodes = nodes.map(|(name, ips)| (name.to_owned(), Node::new(name, ips)));
        Self {
            index: Index::new(ClusterConfig::default()),
            revision: 0,
            nodes: nodes.collect(),
            api: true,
            next_link: 1,
        }
    }

    /// An object appears or changes.
    pub(super) fn upsert(&mut self, object: &Value) {
        let Some(kind) = Kind::of(object) else {
            return;
        };
        self.revision += 1;
        let effects = self.index.upsert(kind, object, self.revision);
        self.tell(&effects);
    }

    /// An object goes.
    pub(super) fn remove(&mut self, object: &Value) {
        let Some(kind) = Kind::of(object) else {
            return;
        };
        self.revision += 1;
        let effects = self.index.remove(kind, object);
        self.tell(&effects);
    }

    fn tell(&mut self, effects: &Effects) {
        if !self.api || effects.is_empty() {
            return;
        }
        let all = self.all_node_addresses();
        let revision = self.revision;
        for (name, node) in self.nodes.iter_mut().filter(|(_, n)| n.runs) {
            let mut delta = Delta {
                revision,
                ..Delta::default()
            };
            for op in effects.of_node(name, false) {
                match op {
                    Op::Upsert(bytes) => delta.upserts.extend(Object::decode(bytes.clone())),
                    Op::Remove(key) => delta.removals.push(key.clone()),
                }
            }
            if !delta.upserts.is_empty() || !delta.removals.is_empty() {
                let changes = node.state.apply(delta);
                node.compile(&changes, &all);
            }
        }
    }

    fn all_node_addresses(&self) -> Vec<IpAddr> {
        let all = self
            .nodes
            .values()
            .flat_map(|n| n.addresses.iter().copied());
        all.collect()
    }

    /// A pod is wired to its node. With an agent that does not run it is not.
    pub(super) fn attach(&mut self, node: &str, pod: (&str, &str, &str), addresses: &[IpAddr]) {
        let all = self.all_node_addresses();
        let link = self.next_link;
        let Some(node) = self.nodes.get_mut(node) else {
            return;
        };
        self.next_link += 1;
        let (namespace, name, uid) = pod;
        node.links
            .insert((namespace.to_owned(), name.to_owned()), link);
        let attached = LocalPod {
            name: Some(Name::new(namespace, name)),
            uid: uid.to_owned(),
            addresses: addresses.to_vec(),
        };
        node.locals.pods.insert(link, attached);
        node.compile(&Changes::default(), &all);
    }

    /// A pod's wire is cut.
    pub(super) fn detach(&mut self, node: &str, pod: (&str, &str)) {
        let all = self.all_node_addresses();
        let Some(node) = self.nodes.get_mut(node) else {
            return;
        };
        let key = (pod.0.to_owned(), pod.1.to_owned());
        if let Some(link) = node.links.remove(&key) {
            node.locals.pods.remove(&link);
            node.compile(&Changes::default(), &all);
        }
    }

    /// The agents' processes end; what they put into place stays.
    pub(super) fn stop_agents(&mut self) {
        self.nodes.values_mut().for_each(|node| node.runs = false);
    }

    /// New agents: they know what the old ones wrote down, and then what the control plane tells.
    pub(super) fn start_agents(&mut self) {
        for node in self.nodes.values_mut() {
            node.runs = true;
            let known = node.compiler.take_fresh_identities();
            node.compiler = Compiler::new(Mode::Enforced, Limits::default(), &known);
        }
        self.catch_up();
    }

    pub(super) fn agents_run(&self) -> bool {
        self.nodes.values().all(|node| node.runs)
    }

    /// The way to the control plane is cut or mended.
    pub(super) fn set_api(&mut self, up: bool) {
        self.api = up;
        self.catch_up();
    }

    /// Running agents compile all they know: a snapshot where they can get one, else what they had.
    fn catch_up(&mut self) {
        let all = self.all_node_addresses();
        for (name, node) in self.nodes.iter_mut().filter(|(_, n)| n.runs) {
            if self.api {
                node.state = self.index.desired_state(name, false, self.revision);
            }
            node.compile(&Changes::everything(), &all);
        }
    }

    /// What one node says of a packet. `outside`: it came in over the wire.
    fn passes(&mut self, node: &str, packet: Packet, outside: bool) -> bool {
        let Some(node) = self.nodes.get_mut(node) else {
            return true;
        };
        node.fill();
        let port = Port::new(packet.port);
        let protocol = packet.protocol.number(packet.source.is_ipv6());
        let outside = u8::from(outside);
        let verdict = match (packet.source, packet.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => judge(
                &mut node.v4,
                &Ends {
                    source: V4::new(source.octets()),
                    destination: V4::new(destination.octets()),
                    port,
                    protocol,
                    outside,
                },
            ),
            (IpAddr::V6(source), IpAddr::V6(destination)) => judge(
                &mut node.v6,
                &Ends {
                    source: V6::new(source.octets()),
                    destination: V6::new(destination.octets()),
                    port,
                    protocol,
                    outside,
                },
            ),
            _ => return false,
        };
        verdict.reason == DropReason::None
    }

    /// Would a packet from one node (none: from outside) get to another?
    pub(super) fn allows(&mut self, packet: Packet, from: Option<&str>, to: Option<&str>) -> bool {
        let leaves = from.is_none_or(|node| self.passes(node, packet, false));
        leaves && (from == to || to.is_none_or(|node| self.passes(node, packet, true)))
    }
}
