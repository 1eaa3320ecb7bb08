//! The cluster of a case as plain values, and what changes do to it. Pure: no verdicts here.

use std::collections::BTreeMap;
use std::net::IpAddr;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::case::{
    Change, Family, HostSpec, Labels, Phase, PodSpec, Query, ServicePort, ServiceSpec, TargetPort,
    Traffic,
};
use crate::actor::command::Protocol;

/// The label that the API server gives every namespace.
const NAME_LABEL: &str = "kubernetes.io/metadata.name";
/// Pods are made one second after another, so that of two the younger is known.
const FIRST_SECOND: i64 = 1_700_000_000;

#[derive(Clone, Debug)]
pub(super) struct Pod {
    pub(super) spec: PodSpec,
    /// Counts pods: a later one has a greater number.
    pub(super) number: u64,
}

impl Pod {
    /// Its containers run, or will: it has its addresses.
    pub(super) fn is_live(&self) -> bool {
        !self.spec.phase.is_some_and(Phase::is_terminal)
    }

    /// The number of a port that it declares by name.
    pub(super) fn named_port(
        &self,
        name: &str,
        protocol: Option<Protocol>,
    ) -> Vec<(u16, Protocol)> {
        let named = self.spec.ports.iter().filter(|p| p.name == name);
        named
            .filter(|p| protocol.is_none_or(|wanted| wanted == p.protocol))
            .map(|p| (p.port, p.protocol))
            .collect()
    }
}

pub(super) type Key = (String, String);

/// Objects of a cluster.
#[derive(Clone, Debug, Default)]
pub(super) struct World {
    pub(super) nodes: BTreeMap<String, HostSpec>,
    pub(super) externals: BTreeMap<String, HostSpec>,
    pub(super) namespaces: BTreeMap<String, Labels>,
    pub(super) pods: BTreeMap<Key, Pod>,
    pub(super) services: BTreeMap<Key, ServiceSpec>,
    /// As users wrote them, by kind, namespace and name.
    pub(super) policies: BTreeMap<(String, String, String), Value>,
    made: u64,
}

/// `namespace/name` as a key.
pub(super) fn key_of(reference: &str) -> Result<Key> {
    let (namespace, name) = reference
        .split_once('/')
        .with_context(|| format!("{reference} is not NAMESPACE/NAME"))?;
    Ok((namespace.to_owned(), name.to_owned()))
}

fn policy_key(object: &Value) -> Result<(String, String, String)> {
    let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
    let kind = text(&object["kind"]);
    let known = matches!(
        (object["apiVersion"].as_str(), kind.as_str()),
        (Some("networking.k8s.io/v1"), "NetworkPolicy")
            | (
                Some("policy.networking.k8s.io/v1alpha2"),
                "ClusterNetworkPolicy"
            )
    );
    if !known {
        bail!("no policy: {} {kind}", object["apiVersion"]);
    }
    let meta = &object["metadata"];
    let namespace = match kind.as_str() {
        "NetworkPolicy" => text(&meta["namespace"]),
        _ => String::new(),
    };
    Ok((kind, namespace, text(&meta["name"])))
}

impl World {
    /// The first state of a case.
    ///
    /// # Errors
    /// What contradicts itself in it.
    pub(super) fn new(case: &Traffic) -> Result<Self> {
        let by_name = |hosts: &[HostSpec]| {
            let named = hosts.iter().map(|h| (h.name.clone(), h.clone()));
            named.collect::<BTreeMap<_, _>>()
        };
        let mut world = Self {
            nodes: by_name(&case.nodes),
            externals: by_name(&case.externals),
            ..Self::default()
        };
        for namespace in &case.namespaces {
            world.put_namespace(&namespace.name, &namespace.labels);
        }
        for pod in &case.pods {
            world.create_pod(pod)?;
        }
        for service in &case.services {
            let key = (service.namespace.clone(), service.name.clone());
            world.services.insert(key, service.clone());
        }
        for object in &case.policies {
            world.policies.insert(policy_key(object)?, object.clone());
        }
        Ok(world)
    }

    pub(super) fn put_namespace(&mut self, name: &str, labels: &Labels) {
        let mut labels = labels.clone();
        labels.insert(NAME_LABEL.to_owned(), name.to_owned());
        self.namespaces.insert(name.to_owned(), labels);
    }

    pub(super) fn create_pod(&mut self, spec: &PodSpec) -> Result<()> {
        let node = self.nodes.get(&spec.node);
        let node = node.with_context(|| format!("pod {} is on no node", spec.name))?;
        let mut spec = spec.clone();
        if spec.host_network {
            spec.ips.clone_from(&node.ips);
        }
        self.made += 1;
        let pod = Pod {
            number: self.made,
            spec,
        };
        let key = (pod.spec.namespace.clone(), pod.spec.name.clone());
        if self.pods.contains_key(&key) {
            bail!("pod {}/{} is there already", key.0, key.1);
        }
        // A namespace that a case leaves out has no labels of its own.
        if !self.namespaces.contains_key(&key.0) {
            self.put_namespace(&key.0, &Labels::new());
        }
        self.pods.insert(key, pod);
        Ok(())
    }

    fn pod_mut(&mut self, reference: &str) -> Result<&mut Pod> {
        let pod = self.pods.get_mut(&key_of(reference)?);
        pod.with_context(|| format!("no pod {reference}"))
    }

    /// What a change does to the objects; flows and agents are no objects.
    ///
    /// # Errors
    /// When it speaks of something that is not there.
    pub(super) fn change(&mut self, change: &Change) -> Result<()> {
        match change {
            Change::Apply(object) => {
                self.policies.insert(policy_key(object)?, object.clone());
            }
            Change::DeletePolicy(policy) => {
                let before = self.policies.len();
                self.policies.retain(|(kind, namespace, name), _| {
                    let other_kind = policy.kind.as_ref().is_some_and(|k| k != kind);
                    other_kind || (&policy.namespace, &policy.name) != (namespace, name)
                });
                if self.policies.len() == before {
                    bail!("no policy {}/{}", policy.namespace, policy.name);
                }
            }
            Change::LabelPod(to) => self.pod_mut(&to.pod)?.spec.labels = to.labels.clone(),
            Change::LabelNamespace(to) | Change::CreateNamespace(to) => {
                self.put_namespace(&to.name, &to.labels);
            }
            Change::CreatePod(spec) => self.create_pod(spec)?,
            Change::DeletePod(gone) => {
                let pod = self.pods.remove(&key_of(&gone.pod)?);
                pod.with_context(|| format!("no pod {}", gone.pod))?;
            }
            Change::SetPod(set) => {
                let spec = &mut self.pod_mut(&set.pod)?.spec;
                spec.phase = set.phase.or(spec.phase);
                spec.ready = set.ready.or(spec.ready);
                if set.deletion_timestamp.is_some() {
                    spec.deletion_timestamp.clone_from(&set.deletion_timestamp);
                }
            }
            Change::DeleteNamespace(gone) => {
                self.namespaces.remove(&gone.name);
                self.pods.retain(|key, _| key.0 != gone.name);
                self.services.retain(|key, _| key.0 != gone.name);
                self.policies.retain(|key, _| key.1 != gone.name);
            }
            Change::OpenFlow(_) | Change::Agent(_) => {}
        }
        Ok(())
    }

    /// Addresses of `NAMESPACE/POD`, `node:NAME` or `ext:NAME`.
    ///
    /// # Errors
    /// When there is no such thing.
    pub(super) fn addresses(&self, reference: &str) -> Result<&[IpAddr]> {
        let host = match (
            reference.strip_prefix("node:"),
            reference.strip_prefix("ext:"),
        ) {
            (Some(name), _) => self.nodes.get(name),
            (_, Some(name)) => self.externals.get(name),
            _ => {
                let pod = self.pods.get(&key_of(reference)?);
                return Ok(&pod.with_context(|| format!("no pod {reference}"))?.spec.ips);
            }
        };
        Ok(&host.with_context(|| format!("no host {reference}"))?.ips)
    }

    /// The pod of a reference, unless it is its node.
    pub(super) fn pod(&self, reference: &str) -> Option<&Pod> {
        let pod = self.pods.get(&key_of(reference).ok()?);
        pod.filter(|pod| !pod.spec.host_network)
    }

    /// The node that a reference runs on, or is.
    pub(super) fn node_of<'a>(&'a self, reference: &'a str) -> Option<&'a str> {
        if let Some(name) = reference.strip_prefix("node:") {
            return Some(name);
        }
        let pod = self.pods.get(&key_of(reference).ok()?)?;
        Some(&pod.spec.node)
    }

    /// The pod that has an address now: of several the youngest.
    pub(super) fn owner(&self, address: IpAddr) -> Option<&Pod> {
        let live = self
            .pods
            .values()
            .filter(|p| p.is_live() && !p.spec.host_network);
        live.filter(|p| p.spec.ips.contains(&address))
            .max_by_key(|p| p.number)
    }

    /// Pods that a Service leads to, each with its port there.
    pub(super) fn backends(&self, service: &ServiceSpec, port: &ServicePort) -> Vec<(Key, u16)> {
        let selected = |(key, pod): &(&Key, &Pod)| {
            let has = |(k, v): (&String, &String)| pod.spec.labels.get(k) == Some(v);
            key.0 == service.namespace && pod.is_live() && service.selector.iter().all(has)
        };
        let port_on = |pod: &Pod| match &port.target_port {
            Some(TargetPort::Number(number)) => Some(*number),
            None => Some(port.port),
            Some(TargetPort::Name(name)) => {
                let found = pod.named_port(name, Some(port.protocol));
                found.first().map(|(number, _)| *number)
            }
        };
        let chosen = self.pods.iter().filter(selected);
        chosen
            .filter_map(|(key, pod)| Some((key.clone(), port_on(pod)?)))
            .collect()
    }

    /// Where a query's packets go once a Service is translated: pods (or hosts) and ports.
    ///
    /// # Errors
    /// When there is no such Service, port or backend.
    pub(super) fn destinations(&self, query: &Query) -> Result<Vec<(String, u16)>> {
        let Some(name) = query.to.strip_prefix("svc:") else {
            return Ok(vec![(query.to.clone(), query.port)]);
        };
        let service = self.services.get(&key_of(name)?);
        let service = service.with_context(|| format!("no Service {name}"))?;
        let is = |p: &&ServicePort| p.port == query.port && p.protocol == query.protocol;
        let port = service.ports.iter().find(is);
        let port = port.with_context(|| format!("{name} has no port {}", query.port))?;
        let all = self.backends(service, port);
        let mut found: Vec<(String, u16)> = all
            .into_iter()
            .map(|((namespace, pod), port)| (format!("{namespace}/{pod}"), port))
            .collect();
        if let Some(backend) = &query.backend {
            found.retain(|(pod, _)| pod == backend);
        }
        if found.is_empty() {
            bail!("{name} has no backend for {query}");
        }
        Ok(found)
    }

    /// The address family of a query: the one it names, else the first that both ends have.
    ///
    /// # Errors
    /// When they share none.
    pub(super) fn ends(&self, query: &Query, to: &str) -> Result<(IpAddr, IpAddr)> {
        let (from, to) = (self.addresses(&query.from)?, self.addresses(to)?);
        let asked = match (query.family, query.to.strip_prefix("svc:")) {
            (Some(family), _) => Some(family == Family::V6),
            (None, Some(name)) => {
                let service = self.services.get(&key_of(name)?);
                service.map(|s| s.cluster_ip.is_ipv6())
            }
            (None, None) => None,
        };
        let of = |ips: &[IpAddr], v6: bool| ips.iter().copied().find(|ip| ip.is_ipv6() == v6);
        for v6 in asked.map_or(vec![false, true], |v6| vec![v6]) {
            if let (Some(from), Some(to)) = (of(from, v6), of(to, v6)) {
                return Ok((from, to));
            }
        }
        bail!("{query}: no address family that both ends have")
    }
}

/// Kubernetes objects of the world, as the API serves them.
impl World {
    pub(super) fn namespace_object(&self, name: &str) -> Value {
        json!({"apiVersion": "v1", "kind": "Namespace",
            "metadata": {"name": name, "labels": self.namespaces.get(name)}})
    }

    pub(super) fn node_object(host: &HostSpec) -> Value {
        let address = |ip: &IpAddr| json!({"type": "InternalIP", "address": ip.to_string()});
        let mut labels = host.labels.clone();
        labels.insert("kubernetes.io/hostname".into(), host.name.clone());
        let addresses: Vec<Value> = host.ips.iter().map(address).collect();
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": host.name, "labels": labels, "uid": format!("node-{}", host.name)},
            "spec": {}, "status": {"addresses": addresses, "conditions": [{"type": "Ready", "status": "True"}]}})
    }

    /// A pod; without addresses until it is wired.
    pub(super) fn pod_object(pod: &Pod, wired: bool) -> Value {
        let spec = &pod.spec;
        let port = |p: &super::case::PortSpec| {
            let mut port = json!({"containerPort": p.port, "protocol": p.protocol.name()});
            if !p.name.is_empty() {
                port["name"] = p.name.clone().into();
            }
            port
        };
        let ports: Vec<Value> = spec.ports.iter().map(port).collect();
        let ips: Vec<Value> = spec
            .ips
            .iter()
            .map(|ip| json!({"ip": ip.to_string()}))
            .collect();
        let phase = spec.phase.unwrap_or(Phase::Running);
        let seconds = FIRST_SECOND + i64::try_from(pod.number).unwrap_or(0);
        let made = jiff::Timestamp::from_second(seconds).unwrap_or_default();
        let ready = if spec.ready.unwrap_or(true) {
            "True"
        } else {
            "False"
        };
        let mut object = json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"namespace": spec.namespace, "name": spec.name, "labels": spec.labels,
                "uid": format!("pod-{}", pod.number), "creationTimestamp": made.to_string()},
            "spec": {"nodeName": spec.node, "hostNetwork": spec.host_network,
                "containers": [{"name": "c", "image": "none", "ports": ports}]},
            "status": {"phase": phase.name(), "conditions": [{"type": "Ready", "status": ready}]}});
        if let Some(at) = &spec.deletion_timestamp {
            object["metadata"]["deletionTimestamp"] = at.clone().into();
        }
        if !wired {
            object["status"]["phase"] = "Pending".into();
        } else if !ips.is_empty() {
            object["status"]["podIP"] = ips[0]["ip"].clone();
            object["status"]["podIPs"] = ips.into();
        }
        if let Some(node) = spec.host_network.then(|| spec.ips.first()).flatten() {
            object["status"]["hostIP"] = node.to_string().into();
        }
        object
    }
}
