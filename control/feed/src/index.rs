//! The index: the translated cluster, who needs which part of it, and what each change means for whom.
//!
//! Holds encoded objects only; the JSON they came from is not kept. A change that translates to the same bytes (a
//! Lease-like heartbeat in a Node's status, a pod's own status) has no effect and costs no node anything.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use control_api::desired::Name;
use control_api::v1::{ClusterConfig, KeyedData, ObjectKind, object};
use serde_json::Value;

use crate::effects::{encode, key_of};
use crate::election::Election;
use crate::policy::Policies;
use crate::{Effects, Kind, Op, pod, translate, volume};

#[derive(Debug)]
struct Pod {
    node: String,
    /// Encoded with revision zero: what is compared.
    plain: Bytes,
    /// Encoded with the revision of its last change: what is sent.
    sent: Bytes,
    references: BTreeSet<(ObjectKind, String)>,
}

type SharedKey = (ObjectKind, Name);

/// See the module documentation.
#[derive(Debug)]
pub struct Index {
    base: ClusterConfig,
    namespaces: BTreeSet<String>,
    /// What the configuration of cluster DNS is made of, by ConfigMap.
    dns: BTreeMap<Name, KeyedData>,
    config: Bytes,
    /// Nodes, services, endpoint slices and announcements, which every node gets.
    shared: BTreeMap<SharedKey, Bytes>,
    /// Every ConfigMap and Secret: a pod may come to need any of them.
    keyed: BTreeMap<SharedKey, Bytes>,
    pods: BTreeMap<Name, Pod>,
    pods_of_node: BTreeMap<String, BTreeSet<Name>>,
    /// How many pods of each node refer to a ConfigMap or Secret.
    referrers: BTreeMap<SharedKey, BTreeMap<String, usize>>,
    election: Election,
    policies: Policies,
}

impl Index {
    /// An index for a cluster with this configuration; its namespaces are kept up by the index.
    #[must_use]
    pub fn new(base: ClusterConfig) -> Self {
        let mut index = Self {
            base,
            namespaces: BTreeSet::new(),
            dns: BTreeMap::new(),
            config: Bytes::new(),
            shared: BTreeMap::new(),
            keyed: BTreeMap::new(),
            pods: BTreeMap::new(),
            pods_of_node: BTreeMap::new(),
            referrers: BTreeMap::new(),
            election: Election::default(),
            policies: Policies::default(),
        };
        index.config = index.encode_config();
        index
    }

    /// Takes the present state of an object.
    pub fn upsert(&mut self, kind: Kind, object: &Value, revision: u64) -> Effects {
        let mut effects = self.put(kind, object, revision);
        effects.extend(self.settle());
        effects
    }

    /// While nobody listens, changes are not worked out for single nodes: that makes the first sync of a large cluster
    /// faster.
    pub fn set_quiet(&mut self, quiet: bool) {
        self.policies.set_quiet(quiet);
    }

    /// Nodes that nothing is heard of: others answer for their addresses.
    pub fn set_lost(&mut self, nodes: BTreeSet<String>) -> Effects {
        self.election.set_lost(nodes);
        self.elect()
    }

    /// Whether some address has to be answered for.
    #[must_use]
    pub fn has_announcements(&self) -> bool {
        self.election.has_addresses()
    }

    /// Names of the nodes that exist.
    pub fn nodes(&self) -> impl Iterator<Item = &str> {
        self.election.nodes()
    }

    /// What follows from a change for objects other than its own.
    fn settle(&mut self) -> Effects {
        let mut effects = self.elect();
        effects.extend(self.policies.flush());
        effects
    }

    fn elect(&mut self) -> Effects {
        let mut effects = Effects::default();
        for (address, winner) in self.election.settle() {
            let key = (ObjectKind::Announcement, Name::new("", address));
            effects.extend(self.set_shared(key, winner.map(object::Kind::Announcement)));
        }
        effects
    }

    fn put(&mut self, kind: Kind, object: &Value, revision: u64) -> Effects {
        let name = kind.name_of(object);
        self.election.put(kind, &name, Some(object));
        let translated = match kind {
            Kind::Namespace => {
                self.policies.namespace(object);
                return self.namespace(&name.name, true);
            }
            Kind::Pod => {
                self.policies.pod(object);
                return self.upsert_pod(name, object, revision);
            }
            Kind::NetworkPolicy => {
                self.policies.network_policy(object);
                return Effects::default();
            }
            Kind::ClusterNetworkPolicy => {
                self.policies.cluster_network_policy(object);
                return Effects::default();
            }
            Kind::ConfigMap => {
                let data = translate::keyed_data(object, false);
                let mut effects = self.set_dns(&name, Some(&data));
                let key = (ObjectKind::ConfigMap, name);
                effects.extend(self.set_keyed(key, Some(object::Kind::ConfigMap(data))));
                return effects;
            }
            Kind::Secret => {
                return self.set_keyed(
                    (ObjectKind::Secret, name),
                    Some(object::Kind::Secret(translate::keyed_data(object, true))),
                );
            }
            Kind::Node => {
                self.policies.node(object);
                Some(object::Kind::Node(translate::node(object)))
            }
            Kind::Service => Some(object::Kind::Service(translate::service(object))),
            Kind::EndpointSlice => {
                translate::endpoint_slice(object).map(object::Kind::EndpointSlice)
            }
        };
        self.set_shared((kind.feed_kind(), name), translated)
    }

    /// Takes the deletion of an object; only its name is read.
    pub fn remove(&mut self, kind: Kind, object: &Value) -> Effects {
        let mut effects = self.remove_name(kind, kind.name_of(object));
        effects.extend(self.settle());
        effects
    }

    /// Takes a complete list of one kind: what it lacks is gone. For the first sync, and after a lost watch.
    pub fn replace<'a>(
        &mut self,
        kind: Kind,
        objects: impl Iterator<Item = &'a Value>,
        revision: u64,
    ) -> Effects {
        let mut gone = self.names(kind);
        let mut effects = Effects::default();
        for object in objects {
            gone.remove(&kind.name_of(object));
            effects.extend(self.put(kind, object, revision));
        }
        for name in gone {
            effects.extend(self.remove_name(kind, name));
        }
        effects.extend(self.settle());
        effects
    }

    /// Everything that `node` needs, encoded.
    #[must_use]
    pub fn snapshot(&self, node: &str, runs_pods: bool) -> Vec<Bytes> {
        let mut objects = Vec::with_capacity(self.shared.len() + 1);
        objects.push(self.config.clone());
        objects.extend(self.shared.values().cloned());
        objects.extend(self.policies.snapshot(node));
        if runs_pods {
            let needed = self.keyed.iter().filter(|(key, _)| {
                self.referrers
                    .get(*key)
                    .is_some_and(|nodes| nodes.contains_key(node))
            });
            objects.extend(needed.map(|(_, bytes)| bytes.clone()));
            let pods = self.pods_of_node.get(node).into_iter().flatten();
            objects.extend(pods.filter_map(|name| Some(self.pods.get(name)?.sent.clone())));
        }
        objects
    }

    #[cfg(test)]
    pub(crate) fn policies(&mut self) -> &mut Policies {
        &mut self.policies
    }

    #[cfg(test)]
    pub(crate) fn policies_are_empty(&self) -> bool {
        self.policies.is_empty()
    }

    fn names(&self, kind: Kind) -> BTreeSet<Name> {
        let of = |map: &BTreeMap<SharedKey, Bytes>, wanted: ObjectKind| {
            map.keys()
                .filter(|(k, _)| *k == wanted)
                .map(|(_, name)| name.clone())
                .collect()
        };
        match kind {
            Kind::Namespace => self.namespaces.iter().map(|n| Name::new("", n)).collect(),
            // Pods that no node has yet may be spoken of in policies.
            Kind::Pod => {
                let known = self.policies.peers().filter(|n| !n.namespace.is_empty());
                self.pods.keys().chain(known).cloned().collect()
            }
            Kind::NetworkPolicy | Kind::ClusterNetworkPolicy => {
                let namespaced = kind == Kind::NetworkPolicy;
                let known = self.policies.policies();
                known
                    .filter(|name| name.namespace.is_empty() != namespaced)
                    .cloned()
                    .collect()
            }
            Kind::ConfigMap => of(&self.keyed, ObjectKind::ConfigMap),
            Kind::Secret => of(&self.keyed, ObjectKind::Secret),
            other => of(&self.shared, other.feed_kind()),
        }
    }

    fn remove_name(&mut self, kind: Kind, name: Name) -> Effects {
        self.election.put(kind, &name, None);
        match kind {
            Kind::Namespace => {
                self.policies.remove_namespace(&name.name);
                self.namespace(&name.name, false)
            }
            Kind::Pod => {
                self.policies.remove_peer(&name);
                self.remove_pod(&name)
            }
            Kind::NetworkPolicy | Kind::ClusterNetworkPolicy => {
                self.policies.remove_policy(&name);
                Effects::default()
            }
            Kind::Node => {
                self.policies.remove_peer(&name);
                self.set_shared((ObjectKind::Node, name), None)
            }
            Kind::ConfigMap => {
                let mut effects = self.set_dns(&name, None);
                effects.extend(self.set_keyed((ObjectKind::ConfigMap, name), None));
                effects
            }
            Kind::Secret => self.set_keyed((ObjectKind::Secret, name), None),
            other => self.set_shared((other.feed_kind(), name), None),
        }
    }

    fn namespace(&mut self, name: &str, present: bool) -> Effects {
        let changed = if present {
            self.namespaces.insert(name.to_owned())
        } else {
            self.namespaces.remove(name)
        };
        if !changed {
            return Effects::default();
        }
        self.tell_config()
    }

    /// Every node serves cluster DNS, whether its agent runs pods or not.
    fn set_dns(&mut self, name: &Name, to: Option<&KeyedData>) -> Effects {
        if translate::dns_folder(name).is_none() || self.dns.get(name) == to {
            return Effects::default();
        }
        match to {
            Some(data) => drop(self.dns.insert(name.clone(), data.clone())),
            None => drop(self.dns.remove(name)),
        }
        self.tell_config()
    }

    fn tell_config(&mut self) -> Effects {
        self.config = self.encode_config();
        Effects::shared([Op::Upsert(self.config.clone())])
    }

    fn encode_config(&self) -> Bytes {
        let mut config = self.base.clone();
        config.namespaces = self.namespaces.iter().cloned().collect();
        config.dns_files = translate::dns_files(&self.dns);
        encode(object::Kind::Config(config))
    }

    fn set_shared(&mut self, key: SharedKey, to: Option<object::Kind>) -> Effects {
        Effects::shared(set(&mut self.shared, key, to))
    }

    fn set_keyed(&mut self, key: SharedKey, to: Option<object::Kind>) -> Effects {
        let Some(op) = set(&mut self.keyed, key.clone(), to) else {
            return Effects::default();
        };
        let nodes = self
            .referrers
            .get(&key)
            .into_iter()
            .flat_map(BTreeMap::keys);
        Effects::runners(nodes.map(|node| (node.clone(), vec![op.clone()])))
    }

    fn upsert_pod(&mut self, name: Name, object: &Value, revision: u64) -> Effects {
        let node = translate::text(&object["spec"]["nodeName"]);
        if node.is_empty() {
            return self.remove_pod(&name);
        }
        let mut spec = pod::pod_spec(object);
        let plain = encode(object::Kind::Pod(spec.clone()));
        if self
            .pods
            .get(&name)
            .is_some_and(|old| old.plain == plain && old.node == node)
        {
            return Effects::default();
        }
        let references = volume::references(&spec);
        spec.revision = revision;
        let sent = encode(object::Kind::Pod(spec));

        let mut effects = Effects::default();
        if self.pods.get(&name).is_some_and(|old| old.node != node) {
            effects.extend(self.remove_pod(&name));
        }
        let mut ops = Vec::new();
        for (kind, referred) in &references {
            let key = (*kind, Name::new(name.namespace.clone(), referred));
            if self.refer(&key, &node) {
                ops.extend(self.keyed.get(&key).cloned().map(Op::Upsert));
            }
        }
        ops.push(Op::Upsert(sent.clone()));
        self.pods_of_node
            .entry(node.clone())
            .or_default()
            .insert(name.clone());
        let old = self.pods.insert(
            name.clone(),
            Pod {
                node: node.clone(),
                plain,
                sent,
                references,
            },
        );
        if let Some(old) = old {
            ops.extend(self.unrefer_all(&name.namespace, &old.references, &node));
        }
        effects.per_runner.entry(node).or_default().extend(ops);
        effects
    }

    fn remove_pod(&mut self, name: &Name) -> Effects {
        let Some(old) = self.pods.remove(name) else {
            return Effects::default();
        };
        if let Some(names) = self.pods_of_node.get_mut(&old.node) {
            names.remove(name);
            if names.is_empty() {
                self.pods_of_node.remove(&old.node);
            }
        }
        let mut ops = vec![Op::Remove(key_of(ObjectKind::Pod, name))];
        ops.extend(self.unrefer_all(&name.namespace, &old.references, &old.node));
        Effects::runners([(old.node, ops)])
    }

    /// Counts a reference; true when it is this node's first.
    fn refer(&mut self, key: &SharedKey, node: &str) -> bool {
        let count = self
            .referrers
            .entry(key.clone())
            .or_default()
            .entry(node.to_owned())
            .or_default();
        *count += 1;
        *count == 1
    }

    /// Takes references back; removals for what this node no longer needs and was sent.
    fn unrefer_all(
        &mut self,
        namespace: &str,
        references: &BTreeSet<(ObjectKind, String)>,
        node: &str,
    ) -> Vec<Op> {
        let mut ops = Vec::new();
        for (kind, name) in references {
            let key = (*kind, Name::new(namespace, name));
            let Some(nodes) = self.referrers.get_mut(&key) else {
                continue;
            };
            let Some(count) = nodes.get_mut(node) else {
                continue;
            };
            *count -= 1;
            if *count > 0 {
                continue;
            }
            nodes.remove(node);
            if nodes.is_empty() {
                self.referrers.remove(&key);
            }
            if self.keyed.contains_key(&key) {
                ops.push(Op::Remove(key_of(key.0, &key.1)));
            }
        }
        ops
    }
}

/// Sets or removes an entry; the operation that tells others, when it changed anything.
fn set(
    map: &mut BTreeMap<SharedKey, Bytes>,
    key: SharedKey,
    to: Option<object::Kind>,
) -> Option<Op> {
    let Some(to) = to else {
        map.remove(&key)?;
        return Some(Op::Remove(key_of(key.0, &key.1)));
    };
    let bytes = encode(to);
    if map.get(&key) == Some(&bytes) {
        return None;
    }
    map.insert(key, bytes.clone());
    Some(Op::Upsert(bytes))
}
