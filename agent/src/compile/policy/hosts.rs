//! Who has which address: pods and nodes as the feed tells them, pods of this node as they are attached.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use control_api::desired::Name;
use control_api::v1::PolicyPeer;

use super::identity::NamedPort;
use super::peer::{PeerSet, PeerSets, SetId};

/// What the agent knows of the node by itself.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Locals {
    pub node_name: String,
    /// All of the node's own.
    pub node_addresses: BTreeSet<IpAddr>,
    /// Attached pods, by the interface index of the host side of their link.
    pub pods: BTreeMap<u32, LocalPod>,
}

/// An attachment of a pod to this node.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LocalPod {
    /// None for a container that is no pod of the cluster.
    pub name: Option<Name>,
    /// Empty where the runtime does not tell.
    pub uid: String,
    pub addresses: Vec<IpAddr>,
}

impl LocalPod {
    /// True when the feed speaks of this pod, and not of an earlier or later one of the same name.
    #[must_use]
    pub fn is(&self, peer: &PolicyPeer) -> bool {
        self.name
            .as_ref()
            .is_some_and(|name| (&name.namespace, &name.name) == (&peer.namespace, &peer.name))
            && (self.uid.is_empty() || peer.uid.is_empty() || self.uid == peer.uid)
    }
}

impl Locals {
    /// The pod of this node that has an address, with the index of its link.
    #[must_use]
    pub fn pod_at(&self, address: IpAddr) -> Option<(u32, &LocalPod)> {
        let mut pods = self.pods.iter();
        pods.find(|(_, pod)| pod.addresses.contains(&address))
            .map(|(ifindex, pod)| (*ifindex, pod))
    }
}

/// A pod or a node, as far as rules ask.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Peer {
    addresses: Vec<IpAddr>,
    pub(super) sets: Vec<SetId>,
    pub(super) ports: Vec<NamedPort>,
    /// An attached pod has its address, whatever others say; of others, the youngest.
    rank: (bool, i64),
}

/// Peers by name and by address.
#[derive(Clone, Debug, Default)]
pub(super) struct Hosts {
    peers: HashMap<Name, Peer>,
    claims: HashMap<IpAddr, Vec<Name>>,
}

impl Hosts {
    /// Takes what the feed says of a peer now. Returns the addresses of which something may have changed.
    pub(super) fn set(&mut self, name: &Name, peer: Option<Peer>) -> Vec<IpAddr> {
        let before = self.peers.get(name);
        if before == peer.as_ref() {
            return Vec::new();
        }
        let mut touched = Vec::new();
        if let Some(before) = self.peers.remove(name) {
            for address in before.addresses {
                if let Some(names) = self.claims.get_mut(&address) {
                    names.retain(|other| other != name);
                    if names.is_empty() {
                        self.claims.remove(&address);
                    }
                }
                touched.push(address);
            }
        }
        if let Some(peer) = peer {
            for address in &peer.addresses {
                self.claims.entry(*address).or_default().push(name.clone());
                touched.push(*address);
            }
            self.peers.insert(name.clone(), peer);
        }
        touched
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &Name> {
        self.peers.keys()
    }

    pub(super) fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.claims.keys().copied()
    }

    /// Whose an address is.
    pub(super) fn owner(&self, address: IpAddr) -> Option<(&Name, &Peer)> {
        let names = self.claims.get(&address)?;
        let peers = names
            .iter()
            .filter_map(|name| self.peers.get_key_value(name));
        peers.max_by(|(one, a), (other, b)| a.rank.cmp(&b.rank).then_with(|| one.cmp(other)))
    }
}

/// A peer as rules ask for it: of its sets and named ports only those that `used` has.
pub(super) fn read_peer(
    peer: &PolicyPeer,
    locals: &Locals,
    sets: &PeerSets,
    used: &BTreeSet<SetId>,
) -> Peer {
    let find = |set: &PeerSet| sets.find(set).filter(|id| used.contains(id));
    let selectors = peer.sets.iter().filter_map(|id| {
        let id = id.as_slice().try_into().ok()?;
        find(&PeerSet::Selector(id))
    });
    let local = !peer.namespace.is_empty() && peer.node == locals.node_name;
    let addresses = if local {
        let attached = locals.pods.values().filter(|pod| pod.is(peer));
        attached.flat_map(|pod| pod.addresses.clone()).collect()
    } else {
        peer.addresses
            .iter()
            .filter_map(|text| text.parse().ok())
            .collect()
    };
    Peer {
        addresses,
        sets: selectors.collect(),
        ports: named_ports(peer, |name| find(&PeerSet::PortName(name.into()))),
        rank: (local, peer.created_at_us),
    }
}

/// Those named ports of a peer whose names have a number.
pub(super) fn named_ports(
    peer: &PolicyPeer,
    number: impl Fn(&str) -> Option<SetId>,
) -> Vec<NamedPort> {
    let ports = peer.named_ports.iter().filter_map(|port| {
        Some(NamedPort {
            name: number(&port.name)?,
            protocol: u8::try_from(port.protocol).ok()?,
            port: u16::try_from(port.port).ok()?,
        })
    });
    let mut ports: Vec<NamedPort> = ports.collect();
    ports.sort_unstable();
    ports.dedup();
    ports
}
