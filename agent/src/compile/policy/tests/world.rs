//! Small random clusters as a node's feed tells them: few addresses, ports and names, so that everything overlaps.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Range;

use control_api::desired::{Changes, DesiredState, Name};
use control_api::v1::{
    IpBlock, NamedPort, PeerSet, Policy, PolicyAction, PolicyName, PolicyPeer, PolicyRule,
    PolicyRulePeer, PolicyRulePort, PolicyTier, Protocol, policy_rule_peer,
};

use crate::compile::policy::{DomainAnswers, LocalPod, Locals};

pub(crate) const NODE: &str = "n1";
const PROTOCOLS: [Protocol; 3] = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp];
const PORT_NAMES: [&str; 2] = ["http", "dns"];
const DOMAINS: [&str; 4] = ["a.example", "*.example", "b.a.example", "*.a.example"];
const ASKED: [&str; 3] = ["a.example", "b.a.example", "other.test"];
const PORTS: [u16; 9] = [1, 2, 3, 4, 7, 8, 80, 1023, 65535];

/// Everything that decides, and the dice.
pub(crate) struct World {
    pub(crate) state: DesiredState,
    pub(crate) locals: Locals,
    pub(crate) domains: DomainAnswers,
    dice: Dice,
}

/// The same throws for the same seed (SplitMix64).
struct Dice(u64);

impl Dice {
    fn random_range<T: TryFrom<i64> + Into<i64>>(&mut self, range: Range<T>) -> T {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let thrown = i64::try_from((mixed ^ (mixed >> 31)) >> 1).unwrap();
        let (start, end) = (range.start.into(), range.end.into());
        T::try_from(start + thrown % (end - start)).ok().unwrap()
    }
}

/// Addresses of pods, nodes and others: 10.0.0.0 to 10.0.0.7, and the same below fd00::.
pub(crate) fn pool() -> Vec<IpAddr> {
    let v4 = (0..8).map(|last| Ipv4Addr::new(10, 0, 0, last).into());
    let v6 = (0..8).map(|last| Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last).into());
    v4.chain(v6).collect()
}

/// Protocols and ports at which rules may differ.
pub(crate) fn services() -> Vec<(u8, u16)> {
    let mut all = vec![(1, 0)];
    for protocol in [6, 17, 132] {
        all.extend(PORTS.map(|port| (protocol, port)));
    }
    all
}

impl World {
    pub(crate) fn new(seed: u64) -> Self {
        let mut world = Self {
            state: DesiredState::default(),
            locals: Locals {
                node_name: NODE.into(),
                node_addresses: BTreeSet::from([IpAddr::from([10, 0, 0, 0])]),
                pods: BTreeMap::new(),
            },
            domains: DomainAnswers::default(),
            dice: Dice(seed),
        };
        for ifindex in 10..12 + world.dice.random_range(0..2) {
            world.attach(ifindex);
        }
        for _ in 0..world.dice.random_range(1..4) {
            world.change_policy(&mut Changes::default());
        }
        for _ in 0..world.dice.random_range(2..6) {
            world.change_peer(&mut Changes::default());
        }
        // Most of the pods that are attached are known.
        let names: Vec<Name> = world
            .locals
            .pods
            .values()
            .filter_map(|pod| pod.name.clone())
            .collect();
        for name in names {
            world.put_peer(&name, &mut Changes::default());
        }
        for _ in 0..world.dice.random_range(0..3) {
            world.answer();
        }
        world
    }

    fn chance(&mut self, percent: u32) -> bool {
        self.dice.random_range(0..100) < percent
    }

    fn one<T: Clone>(&mut self, of: &[T]) -> T {
        let last = u32::try_from(of.len()).unwrap();
        let place = self.dice.random_range(0..last);
        of[usize::try_from(place).unwrap()].clone()
    }

    fn pod_name(&mut self) -> Name {
        let number = self.dice.random_range(0..6);
        Name::new("ns", format!("p{number}"))
    }

    fn policy_name(&mut self) -> (PolicyTier, Name) {
        match self.dice.random_range(0..6) {
            0 => (PolicyTier::Admin, Name::new("", "admin-a")),
            1 => (PolicyTier::Admin, Name::new("", "admin-b")),
            2 => (PolicyTier::Baseline, Name::new("", "baseline")),
            number => (
                PolicyTier::NetworkPolicy,
                Name::new("ns", format!("policy-{number}")),
            ),
        }
    }

    fn set(&mut self) -> Vec<u8> {
        vec![self.dice.random_range(1..5); 16]
    }

    fn attach(&mut self, ifindex: u32) {
        let name = if self.chance(90) {
            Some(self.pod_name())
        } else {
            None
        };
        let mut pool = pool();
        pool.retain(|address| self.locals.pod_at(*address).is_none());
        let addresses = vec![self.one(&pool[1..])];
        let uid = self.one(&["", "1", "2"]).into();
        let pod = LocalPod {
            name,
            uid,
            addresses,
        };
        self.locals.pods.insert(ifindex, pod);
    }

    fn answer(&mut self) {
        let name = self.one(&ASKED);
        let address = self.one(&pool());
        let until = self.dice.random_range(0..10);
        self.domains.learn(name, &[address], until);
    }

    fn change_policy(&mut self, changes: &mut Changes) {
        let (tier, name) = self.policy_name();
        changes.policies.insert(name.clone());
        if self.chance(20) {
            self.state.policies.remove(&name);
            return;
        }
        let namespaced = tier == PolicyTier::NetworkPolicy;
        let mut policy = Policy {
            tier: tier.into(),
            namespace: name.namespace.clone(),
            name: name.name.clone(),
            priority: self.dice.random_range(0..2),
            isolates_ingress: namespaced && self.chance(70),
            isolates_egress: namespaced && self.chance(70),
            staged: self.chance(10),
            ..Policy::default()
        };
        for _ in 0..self.dice.random_range(0..4) {
            policy.ingress.push(self.rule(namespaced));
        }
        for _ in 0..self.dice.random_range(0..4) {
            policy.egress.push(self.rule(namespaced));
        }
        self.state.policies.insert(name, policy);
    }

    fn rule(&mut self, namespaced: bool) -> PolicyRule {
        let action = if namespaced {
            PolicyAction::Allow
        } else {
            self.one(&[PolicyAction::Allow, PolicyAction::Deny, PolicyAction::Pass])
        };
        let (any_peer, any_port) = (self.chance(30), self.chance(30));
        let mut rule = PolicyRule {
            action: action.into(),
            any_peer,
            any_port,
            ..PolicyRule::default()
        };
        if !any_peer {
            for _ in 0..self.dice.random_range(0..3) {
                let kind = Some(self.peer_kind());
                rule.peers.push(PolicyRulePeer { kind });
            }
        }
        if !any_port {
            for _ in 0..self.dice.random_range(0..3) {
                rule.ports.push(self.rule_port());
            }
        }
        rule
    }

    fn peer_kind(&mut self) -> policy_rule_peer::Kind {
        match self.dice.random_range(0..10) {
            0..5 => policy_rule_peer::Kind::Set(PeerSet {
                id: self.set(),
                text: String::new(),
            }),
            5..9 => {
                let cidr = self.range(&[0, 29, 30, 31, 32]);
                let except = (0..self.dice.random_range(0..3))
                    .map(|_| self.range(&[30, 31, 32]))
                    .collect();
                policy_rule_peer::Kind::IpBlock(IpBlock { cidr, except })
            }
            _ => policy_rule_peer::Kind::DomainName(self.one(&DOMAINS).into()),
        }
    }

    /// In CIDR notation, with host bits set at times. Lengths are those of IPv4.
    fn range(&mut self, lengths: &[u8]) -> String {
        let (address, length) = (self.one(&pool()), self.one(lengths));
        let length = match (address.is_ipv4(), length) {
            (false, length) if length > 0 => length + 96,
            (_, length) => length,
        };
        format!("{address}/{length}")
    }

    fn rule_port(&mut self) -> PolicyRulePort {
        let mut port = PolicyRulePort {
            protocol: self.one(&PROTOCOLS).into(),
            ..PolicyRulePort::default()
        };
        match self.dice.random_range(0..10) {
            0..2 => {}
            2..5 => {
                port.name = self.one(&PORT_NAMES).into();
                if self.chance(30) {
                    port.protocol = Protocol::Unspecified.into();
                }
            }
            5..8 => {
                port.first = self.one(&PORTS).into();
                port.last = port.first;
            }
            _ => {
                let (one, other) = (self.one(&PORTS), self.one(&PORTS));
                port.first = one.min(other).into();
                port.last = one.max(other).into();
            }
        }
        port
    }

    fn change_peer(&mut self, changes: &mut Changes) {
        let name = if self.chance(20) {
            Name::new("", self.one(&["n1", "n2"]))
        } else {
            self.pod_name()
        };
        if self.chance(20) {
            changes.policy_peers.insert(name.clone());
            self.state.policy_peers.remove(&name);
        } else {
            self.put_peer(&name, changes);
        }
    }

    fn put_peer(&mut self, name: &Name, changes: &mut Changes) {
        changes.policy_peers.insert(name.clone());
        let node = name.namespace.is_empty();
        let local = self
            .locals
            .pods
            .values()
            .any(|pod| pod.name.as_ref() == Some(name));
        let mut peer = PolicyPeer {
            namespace: name.namespace.clone(),
            name: name.name.clone(),
            node: if node {
                name.name.clone()
            } else if local && self.chance(95) {
                NODE.into()
            } else {
                "n2".into()
            },
            created_at_us: self.dice.random_range(0..3),
            ..PolicyPeer::default()
        };
        if !node {
            peer.uid = self.one(&["", "1", "1", "1"]).into();
        }
        for _ in 0..self.dice.random_range(0..3) {
            peer.addresses.push(self.one(&pool()).to_string());
        }
        let sets: BTreeSet<Vec<u8>> = (0..self.dice.random_range(0..3))
            .map(|_| self.set())
            .collect();
        peer.sets = sets.into_iter().collect();
        if !node {
            for _ in 0..self.dice.random_range(0..3) {
                peer.named_ports.push(NamedPort {
                    name: self.one(&PORT_NAMES).into(),
                    protocol: self.one(&PROTOCOLS).into(),
                    port: self.one(&PORTS).into(),
                });
            }
            let known: Vec<Name> = self.state.policies.keys().cloned().collect();
            for policy in known {
                if self.chance(60) {
                    peer.policies.push(PolicyName {
                        namespace: policy.namespace,
                        name: policy.name,
                    });
                }
            }
        }
        self.state.policy_peers.insert(name.clone(), peer);
    }

    /// Something happens; what of it the feed told.
    pub(crate) fn step(&mut self) -> Changes {
        let mut changes = Changes::default();
        for _ in 0..self.dice.random_range(1..4) {
            match self.dice.random_range(0..20) {
                0..8 => self.change_peer(&mut changes),
                8..14 => self.change_policy(&mut changes),
                14..16 => {
                    let ifindex = self.dice.random_range(10..14);
                    if self.locals.pods.remove(&ifindex).is_none() {
                        self.attach(ifindex);
                    }
                }
                16..18 => self.answer(),
                18 => {
                    let now = self.dice.random_range(0..10);
                    self.domains.expire(now, |_, _| false);
                }
                _ => changes.everything = true,
            }
        }
        changes
    }
}
