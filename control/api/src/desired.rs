//! Everything a node should be, as the feed told it: a snapshot replaces it, deltas change it.

use std::collections::{BTreeMap, BTreeSet};

use crate::name_map::NameMap;
use crate::slice::Slice;
use crate::slices::Slices;
use crate::v1::{
    Announcement, ClusterConfig, Delta, KeyedData, Node, Object, ObjectKey, ObjectKind, PodSpec,
    Policy, PolicyPeer, Service, Snapshot, object,
};

/// Namespace and name; the namespace is empty for cluster-scoped objects.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name {
    pub namespace: String,
    pub name: String,
}

impl Name {
    #[must_use]
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
        }
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.namespace.is_empty() {
            write!(f, "{}", self.name)
        } else {
            write!(f, "{}/{}", self.namespace, self.name)
        }
    }
}

/// The whole desired state of one node at a revision. A copy shares the services and their endpoints.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DesiredState {
    pub revision: u64,
    pub config: ClusterConfig,
    pub nodes: BTreeMap<String, Node>,
    pub services: NameMap<Service>,
    pub endpoint_slices: Slices,
    pub pods: BTreeMap<Name, PodSpec>,
    pub config_maps: BTreeMap<Name, KeyedData>,
    pub secrets: BTreeMap<Name, KeyedData>,
    /// By address: the node that answers for it.
    pub announcements: BTreeMap<String, Announcement>,
    pub policies: NameMap<Policy>,
    pub policy_peers: NameMap<PolicyPeer>,
}

/// What a delta touched, so that the stages after it compare only that. A snapshot touches everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    pub everything: bool,
    pub config: bool,
    pub nodes: BTreeSet<String>,
    /// Services whose own object or whose endpoint slices changed.
    pub services: BTreeSet<Name>,
    pub pods: BTreeSet<Name>,
    pub config_maps: BTreeSet<Name>,
    pub secrets: BTreeSet<Name>,
    /// Addresses that another node, or nobody, answers for now.
    pub announcements: BTreeSet<String>,
    pub policies: BTreeSet<Name>,
    pub policy_peers: BTreeSet<Name>,
}

impl Changes {
    /// Touches everything: what a snapshot does.
    #[must_use]
    pub fn everything() -> Self {
        Self {
            everything: true,
            ..Self::default()
        }
    }

    /// True when nothing was touched (a delta that only moves the revision).
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Adds what a later delta touched.
    pub fn merge(&mut self, later: Self) {
        self.everything |= later.everything;
        self.config |= later.config;
        self.nodes.extend(later.nodes);
        self.services.extend(later.services);
        self.pods.extend(later.pods);
        self.config_maps.extend(later.config_maps);
        self.secrets.extend(later.secrets);
        self.announcements.extend(later.announcements);
        self.policies.extend(later.policies);
        self.policy_peers.extend(later.policy_peers);
    }
}

impl DesiredState {
    /// A state made of a snapshot's objects (all parts of it, in order).
    #[must_use]
    pub fn from_snapshot(parts: impl IntoIterator<Item = Snapshot>) -> Self {
        let mut state = Self::default();
        for part in parts {
            state.add_part(part);
        }
        state
    }

    /// Adds one part of a snapshot to those before it.
    pub fn add_part(&mut self, part: Snapshot) {
        self.revision = part.revision;
        for object in part.objects {
            // A snapshot touches everything: what each object touches is of no interest.
            self.upsert(object, &mut Changes::default());
        }
    }

    /// Applies a delta and says what it touched. Removing what is not there is not an error.
    pub fn apply(&mut self, delta: Delta) -> Changes {
        let mut changes = Changes::default();
        for key in delta.removals {
            self.remove(key, &mut changes);
        }
        for object in delta.upserts {
            self.upsert(object, &mut changes);
        }
        self.revision = delta.revision;
        changes
    }

    /// Slices of one service, in the order of their names.
    pub fn slices_of<'a>(&'a self, service: &'a Name) -> impl Iterator<Item = &'a Slice> {
        self.endpoint_slices.of(service)
    }

    fn upsert(&mut self, object: Object, changes: &mut Changes) {
        match object.kind {
            Some(object::Kind::Config(config)) => {
                changes.config = true;
                self.config = config;
            }
            Some(object::Kind::Node(node)) => {
                changes.nodes.insert(node.name.clone());
                self.nodes.insert(node.name.clone(), node);
            }
            Some(object::Kind::Service(service)) => {
                let name = Name::new(&service.namespace, &service.name);
                changes.services.insert(name.clone());
                self.services.insert(name, service);
            }
            Some(object::Kind::EndpointSlice(slice)) => {
                let name = Name::new(&slice.namespace, &slice.name);
                changes
                    .services
                    .insert(Name::new(&slice.namespace, &slice.service));
                let namespace = slice.namespace.clone();
                if let Some(before) = self.endpoint_slices.insert(name, slice) {
                    changes
                        .services
                        .insert(Name::new(namespace, &*before.service));
                }
            }
            Some(object::Kind::Pod(pod)) => {
                let name = Name::new(&pod.namespace, &pod.name);
                changes.pods.insert(name.clone());
                self.pods.insert(name, pod);
            }
            Some(object::Kind::ConfigMap(data)) => {
                let name = Name::new(&data.namespace, &data.name);
                changes.config_maps.insert(name.clone());
                self.config_maps.insert(name, data);
            }
            Some(object::Kind::Secret(data)) => {
                let name = Name::new(&data.namespace, &data.name);
                changes.secrets.insert(name.clone());
                self.secrets.insert(name, data);
            }
            Some(object::Kind::Announcement(announcement)) => {
                changes.announcements.insert(announcement.address.clone());
                self.announcements
                    .insert(announcement.address.clone(), announcement);
            }
            Some(object::Kind::Policy(policy)) => {
                let name = Name::new(&policy.namespace, &policy.name);
                changes.policies.insert(name.clone());
                self.policies.insert(name, policy);
            }
            Some(object::Kind::PolicyPeer(peer)) => {
                let name = Name::new(&peer.namespace, &peer.name);
                changes.policy_peers.insert(name.clone());
                self.policy_peers.insert(name, peer);
            }
            // A kind this version does not know: a newer control plane may send it.
            None => {}
        }
    }

    fn remove(&mut self, key: ObjectKey, changes: &mut Changes) {
        let kind = key.kind();
        let name = Name::new(key.namespace, key.name);
        match kind {
            ObjectKind::Unspecified => {}
            ObjectKind::Config => {
                changes.config = true;
                self.config = ClusterConfig::default();
            }
            ObjectKind::Node => {
                self.nodes.remove(&name.name);
                changes.nodes.insert(name.name);
            }
            ObjectKind::Service => {
                self.services.remove(&name);
                changes.services.insert(name);
            }
            ObjectKind::EndpointSlice => {
                if let Some(slice) = self.endpoint_slices.remove(&name) {
                    changes
                        .services
                        .insert(Name::new(name.namespace, &*slice.service));
                }
            }
            ObjectKind::Pod => {
                self.pods.remove(&name);
                changes.pods.insert(name);
            }
            ObjectKind::ConfigMap => {
                self.config_maps.remove(&name);
                changes.config_maps.insert(name);
            }
            ObjectKind::Secret => {
                self.secrets.remove(&name);
                changes.secrets.insert(name);
            }
            ObjectKind::Announcement => {
                self.announcements.remove(&name.name);
                changes.announcements.insert(name.name);
            }
            ObjectKind::Policy => {
                self.policies.remove(&name);
                changes.policies.insert(name);
            }
            ObjectKind::PolicyPeer => {
                self.policy_peers.remove(&name);
                changes.policy_peers.insert(name);
            }
        }
    }
}
