//! Clusters of Kubernetes objects under the control plane's own index, which says what every node is told.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;

use anyhow::{Context as _, Result};
use control_api::desired::{DesiredState, Name};
use control_api::v1::{ClusterConfig, Object, ObjectKey};
use control_feed::{Effects, Index, Kind, Op};
use prost::Message as _;
use serde_json::{Value, json};

use crate::agents;
use crate::feed::Feed;
use crate::fleet::{CLUSTER_CIDR, NODE_PORT_FIRST, NODE_PORT_LAST, SERVICE_CIDR};
use crate::lab::NODES;

/// Objects and what nodes hold of them.
#[derive(Debug)]
pub(super) struct Cluster {
    index: Index,
}

/// What one node is told of a change.
#[derive(Debug)]
pub(super) enum Told {
    Delta(Vec<Object>, Vec<ObjectKey>),
    Afresh(Vec<Object>),
}

/// Pods of one node at most; the others are on the next ones.
pub(super) const PODS_OF_NODE: usize = 250;

/// Node `number`, from 1 on.
pub(super) fn node_name(number: usize) -> String {
    format!("n{number}")
}

/// A pod's address when it is the `place`th of node `number`.
pub(super) fn pod_address(number: usize, place: usize) -> Ipv4Addr {
    let byte = |number: usize| u8::try_from(number).unwrap_or(u8::MAX);
    Ipv4Addr::new(10, 244, byte(number), byte(place + 2))
}

impl Cluster {
    /// Nodes without pods. Changes are worked out once [`Self::listen`] was called.
    pub(super) fn new(nodes: usize) -> Self {
        let mut index = Index::new(ClusterConfig {
            cluster_domain: "cluster.local".into(),
            service_cidrs: vec![SERVICE_CIDR.into()],
            pod_cidrs: vec![CLUSTER_CIDR.into()],
            node_port_first: NODE_PORT_FIRST.into(),
            node_port_last: NODE_PORT_LAST.into(),
            policies: true,
            ..ClusterConfig::default()
        });
        index.set_quiet(true);
        let mut cluster = Self { index };
        for number in 1..=nodes {
            cluster.put(Kind::Node, &node(number));
        }
        cluster
    }

    pub(super) fn listen(&mut self) {
        self.index.set_quiet(false);
    }

    /// Takes an object, new or changed.
    pub(super) fn put(&mut self, kind: Kind, object: &Value) -> Effects {
        self.index.upsert(kind, object, 1)
    }

    /// Takes all objects of a kind; others of it are gone.
    pub(super) fn replace(&mut self, kind: Kind, objects: &[Value]) {
        self.index.set_quiet(true);
        self.index.replace(kind, objects.iter(), 1);
        self.index.set_quiet(false);
    }

    /// Everything that a node is told.
    pub(super) fn snapshot(&self, node: &str) -> Result<Vec<Object>> {
        let encoded = self.index.snapshot(node, false).into_iter();
        let objects = encoded.map(Object::decode).collect::<Result<_, _>>();
        objects.context("decode what the index encoded")
    }

    /// The same, as the node holds it.
    pub(super) fn state(&self, node: &str) -> DesiredState {
        self.index.desired_state(node, false, 1)
    }

    /// What a change means for a node.
    pub(super) fn told(&self, node: &str, effects: &Effects) -> Result<Told> {
        if effects.afresh.contains(node) {
            return self.snapshot(node).map(Told::Afresh);
        }
        let (mut upserts, mut removals) = (Vec::new(), Vec::new());
        for op in effects.of_node(node, false) {
            match op {
                Op::Upsert(bytes) => upserts.push(Object::decode(bytes.clone())?),
                Op::Remove(key) => removals.push(key.clone()),
            }
        }
        Ok(Told::Delta(upserts, removals))
    }
}

impl Told {
    /// Sends it, empty or not; the revision that the node acknowledges.
    pub(super) fn send(self, feed: &Feed, node: &str) -> u64 {
        match self {
            Self::Delta(upserts, removals) => feed.tell(Some(node), upserts, removals).0,
            Self::Afresh(objects) => feed.renew(node, &objects).0,
        }
    }
}

fn node(number: usize) -> Value {
    let address = match NODES.get(number - 1) {
        Some(address) => *address,
        None => Ipv4Addr::from(u32::from(NODES[0]) + u32::try_from(number).unwrap_or(0)),
    };
    json!({"metadata": {"name": node_name(number)},
        "spec": {"podCIDRs": [format!("10.244.{number}.0/24")]},
        "status": {"addresses": [{"type": "InternalIP", "address": address.to_string()}],
            "conditions": [{"type": "Ready", "status": "True"}]}})
}

/// A pod as the API knows it; `labels` is an object.
pub(super) fn pod(name: &Name, node: &str, labels: &Value, address: Option<Ipv4Addr>) -> Value {
    let Name { namespace, name } = name;
    let mut object = json!({
        "metadata": {"namespace": namespace, "name": name, "uid": agents::uid(namespace, name), "labels": labels},
        "spec": {"nodeName": node, "containers": [{"ports": [{"name": "http", "containerPort": 8080}]}]},
        "status": {"phase": "Running"},
    });
    if let Some(address) = address {
        object["status"]["podIPs"] = json!([{"ip": address.to_string()}]);
    }
    object
}

pub(super) fn namespace(name: &str, labels: &Value) -> Value {
    json!({"metadata": {"name": name, "labels": labels}})
}

/// A NetworkPolicy; `spec` is its whole.
pub(super) fn policy(name: &Name, spec: &Value) -> Value {
    json!({"metadata": {"namespace": name.namespace, "name": name.name}, "spec": spec})
}

/// Names of nodes that a change is told to.
pub(super) fn concerned(effects: &Effects) -> BTreeSet<&str> {
    let nodes = effects.per_node.keys().chain(&effects.afresh);
    nodes.map(String::as_str).collect()
}
