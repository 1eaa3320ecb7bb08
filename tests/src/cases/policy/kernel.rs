//! Policy cases on real network namespaces: agents, CNI plugin, feed, sockets.

mod flows;
mod probes;
mod restarts;
mod sampling;
mod sctp;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use self::flows::Flow;
use self::sampling::Sampler;
use super::case::{Change, Expectation, Step, Traffic};
use super::layout::{self, Listeners};
use super::oracle;
use super::world::{Key, World, key_of};
use crate::cases::cluster::api::plural;
use crate::cases::cluster::slices::{self, MANAGER, PodView};
use crate::cases::cluster::spec::pod_key;
use crate::cases::cluster::{Binaries, Cluster, listen};

/// From a change to every agent's word that it is in force.
const PROGRAMMED_WITHIN: Duration = Duration::from_secs(30);
/// Continuous probes go on so long after a step's changes are in force.
const HOLDS_FOR: Duration = Duration::from_millis(400);

/// A case under way.
#[derive(Debug)]
pub(super) struct Run<'a> {
    cluster: Cluster,
    world: World,
    listeners: &'a Listeners,
    sctp: bool,
    flows: BTreeMap<String, Flow>,
}

/// Runs one case.
///
/// # Errors
/// What could not be built, or the first thing that is not as the case has it.
pub(super) fn run(case: &Traffic, binaries: &Binaries) -> Result<()> {
    let listeners = layout::listeners(case)?;
    let cluster = Cluster::build(&layout::layout(case), binaries).context("build the cluster")?;
    let mut run = Run {
        cluster,
        world: World::new(case)?,
        listeners: &listeners,
        sctp: sctp::has_sockets(),
        flows: BTreeMap::new(),
    };
    run.start().context("bring up the objects")?;
    run.check(&case.expectations).context("at the start")?;
    for (number, step) in case.steps.iter().enumerate() {
        let done = run.step(step);
        run.cluster
            .alive()
            .and(done)
            .with_context(|| format!("step {}", number + 1))?;
    }
    Ok(())
}

impl Run<'_> {
    fn start(&mut self) -> Result<()> {
        for node in &self
            .cluster
            .nodes
            .values()
            .map(|n| n.spec.clone())
            .collect::<Vec<_>>()
        {
            for cidr in node.pod_cidrs.iter().flatten() {
                let v6 = cidr.contains(':');
                let via = node.ips.iter().flatten().find(|ip| ip.is_ipv6() == v6);
                self.cluster
                    .route(cidr, *via.context("a node lacks a family")?)?;
            }
        }
        for (name, node) in &self.cluster.nodes {
            let reference = format!("node:{name}");
            let ports = layout::listen(self.listeners, &reference, self.sctp);
            listen(&node.actor, &ports, &reference)?;
        }
        for (name, external) in &self.cluster.externals {
            let reference = format!("ext:{name}");
            let ports = layout::listen(self.listeners, &reference, self.sctp);
            listen(&external.actor, &ports, &reference)?;
        }
        for name in self.world.namespaces.keys() {
            self.put("Namespace", self.world.namespace_object(name));
        }
        for object in self.world.policies.values() {
            self.put(object["kind"].as_str().unwrap_or_default(), object.clone());
        }
        let pods: Vec<Key> = self.world.pods.keys().cloned().collect();
        for key in pods {
            self.create(&key)?;
        }
        self.put_services();
        self.programmed()
    }

    fn put(&self, kind: &str, object: Value) {
        self.cluster.control.objects.put(&plural(kind), object);
    }

    fn create(&mut self, key: &Key) -> Result<()> {
        let pod = self.world.pods.get(key).context("no such pod")?;
        let spec = layout::pod_spec(pod, self.listeners, self.sctp);
        if !pod.is_live() {
            // Its containers have ended: there is an object, and nothing on the wire.
            self.put("Pod", World::pod_object(pod, true));
            return Ok(());
        }
        self.cluster.create_pod(&spec)
    }

    /// Services and their slices as pods are now.
    fn put_services(&self) {
        self.put_slices(None);
        for service in self.world.services.values() {
            self.put("Service", service_object(service));
        }
    }

    /// Slices; those of the Service `only` lead to one pod alone.
    fn put_slices(&self, only: Option<(&Key, &str)>) {
        let mut wanted = Vec::new();
        for (key, service) in &self.world.services {
            let pick = only
                .filter(|(service, _)| *service == key)
                .map(|(_, pod)| pod);
            let views: Vec<PodView> = self
                .world
                .pods
                .values()
                .filter(|pod| pod.is_live())
                .map(|pod| view(&layout::pod_spec(pod, self.listeners, true), pod))
                .filter(|view| {
                    pick.is_none_or(|p| format!("{}/{}", view.namespace, view.name) == p)
                })
                .collect();
            wanted.extend(slices::derive(&service_object(service), &views));
        }
        let objects = &self.cluster.control.objects;
        let name = |o: &Value| {
            let meta = &o["metadata"];
            (meta["namespace"].clone(), meta["name"].clone())
        };
        for present in objects.all("endpointslices") {
            let ours = &present["metadata"]["labels"]["endpointslice.kubernetes.io/managed-by"];
            if *ours == MANAGER && !wanted.iter().any(|w| name(w) == name(&present)) {
                let (namespace, name) = name(&present);
                let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
                objects.remove("endpointslices", &text(&namespace), &text(&name));
            }
        }
        for slice in wanted {
            objects.put("endpointslices", slice);
        }
    }

    /// Waits for the word of every agent that can give it.
    fn programmed(&mut self) -> Result<()> {
        let followers = self.cluster.followers();
        self.cluster.confirmed(&followers, PROGRAMMED_WITHIN)
    }

    fn step(&mut self, step: &Step) -> Result<()> {
        if step.probe.is_none() {
            self.changes(&step.changes, |_| Ok(()))?;
            return self.check(&step.expectations);
        }
        let (mut early, mut late) = (Vec::new(), Vec::new());
        for expectation in &step.expectations {
            if self.holds_now(expectation) {
                early.push(expectation);
            } else {
                late.push(expectation);
            }
        }
        let mut sampler = Sampler::default();
        sampler.begin(self, &early)?;
        // Whoever is born into this step is watched from birth.
        self.changes(&step.changes, |run| {
            let born = |e: &&Expectation| run.can_be_watched(e);
            let (now, rest): (Vec<_>, Vec<_>) = late.drain(..).partition(born);
            late = rest;
            sampler.begin(run, &now)
        })?;
        sampler.begin(self, &late)?;
        std::thread::sleep(HOLDS_FOR);
        sampler.end(self)?;
        // What no sampler watches (SCTP by raw packets) is looked at once.
        self.check(&step.expectations)
    }

    /// Is it so before anything changes? Then no sample may differ from the start on.
    fn holds_now(&self, expectation: &Expectation) -> bool {
        match expectation {
            Expectation::Flow { id, .. } => self.flows.contains_key(id),
            Expectation::Verdict { query, allow } => {
                oracle::allows(&self.world, query).is_ok_and(|now| now == *allow)
                    && self.is_wired(&query.from)
            }
        }
    }

    /// What is refused is refused from the first packet; what is allowed may follow a little later, but for the own node.
    fn can_be_watched(&self, expectation: &Expectation) -> bool {
        let Expectation::Verdict { query, allow } = expectation else {
            return false;
        };
        let home = self.world.node_of(&query.from) == self.world.node_of(&query.to);
        let at_once = !allow || (query.from.starts_with("node:") && home);
        let to = query.to.starts_with("svc:") || self.is_wired(&query.to);
        at_once && to && self.is_wired(&query.from)
    }

    fn is_wired(&self, reference: &str) -> bool {
        self.cluster.source(reference).is_ok()
    }

    /// Applies changes and waits until they are in force; `born` is called after each pod that is made.
    fn changes(
        &mut self,
        changes: &[Change],
        mut born: impl FnMut(&mut Self) -> Result<()>,
    ) -> Result<()> {
        let mut waiting: Vec<Key> = Vec::new();
        for change in changes {
            if let Change::OpenFlow(flow) = change {
                self.put_services();
                self.programmed()?;
                self.open(flow)?;
                continue;
            }
            self.change(change, &mut waiting)
                .with_context(|| format!("change {change:?}"))?;
            // Pods that were made while their agents were away are wired once those are back.
            for key in std::mem::take(&mut waiting) {
                if self.has_agent(&key) {
                    self.create(&key)?;
                    born(self)?;
                } else {
                    waiting.push(key);
                }
            }
        }
        if let Some((namespace, name)) = waiting.first() {
            bail!("{namespace}/{name} was made while no agent ran, and none was started");
        }
        self.put_services();
        self.programmed()
    }

    fn has_agent(&self, key: &Key) -> bool {
        let pod = self.world.pods.get(key);
        let node = pod.and_then(|p| self.cluster.nodes.get(&p.spec.node));
        node.is_some_and(|n| n.has_agent())
    }

    fn change(&mut self, change: &Change, made: &mut Vec<Key>) -> Result<()> {
        let before = self.world.clone();
        self.world.change(change)?;
        match change {
            Change::Apply(object) => {
                self.put(object["kind"].as_str().unwrap_or_default(), object.clone());
            }
            Change::LabelPod(to) => self.put_pod(&to.pod)?,
            Change::SetPod(to) => {
                self.put_pod(&to.pod)?;
                self.end_if_finished(&to.pod)?;
            }
            Change::LabelNamespace(to) | Change::CreateNamespace(to) => {
                self.put("Namespace", self.world.namespace_object(&to.name));
            }
            Change::CreatePod(spec) => {
                made.push((spec.namespace.clone(), spec.name.clone()));
            }
            Change::DeletePod(gone) => self.delete_pod(&key_of(&gone.pod)?)?,
            Change::DeletePolicy(_) | Change::DeleteNamespace(_) => {
                self.follow_removals(&before)?
            }
            Change::Agent(what) => self.agent(*what)?,
            Change::OpenFlow(_) => {}
        }
        Ok(())
    }

    fn put_pod(&self, reference: &str) -> Result<()> {
        let pod = self.world.pods.get(&key_of(reference)?);
        let pod = pod.with_context(|| format!("no pod {reference}"))?;
        self.put("Pod", World::pod_object(pod, true));
        Ok(())
    }

    /// A pod whose containers have ended for good leaves the wire, and its object stays.
    fn end_if_finished(&mut self, reference: &str) -> Result<()> {
        let key = key_of(reference)?;
        let finished = self.world.pods.get(&key).is_some_and(|pod| !pod.is_live());
        let own = pod_key(&key.0, &key.1);
        if finished && let Some(pod) = self.cluster.pods.remove(&own) {
            self.cluster.unwire(&pod)?;
        }
        Ok(())
    }

    fn delete_pod(&mut self, key: &Key) -> Result<()> {
        let own = pod_key(&key.0, &key.1);
        self.flows.retain(|_, flow| !flow.is_of(&own));
        if self.cluster.pods.contains_key(&own) {
            return self.cluster.remove_pod(&own);
        }
        self.cluster.control.objects.remove("pods", &key.0, &key.1);
        Ok(())
    }

    /// Takes away what the world has no more.
    fn follow_removals(&mut self, before: &World) -> Result<()> {
        let gone = |key: &&Key| !self.world.pods.contains_key(*key);
        let pods: Vec<Key> = before.pods.keys().filter(gone).cloned().collect();
        for key in pods {
            self.delete_pod(&key)?;
        }
        let objects = &self.cluster.control.objects;
        for key in before
            .policies
            .keys()
            .filter(|k| !self.world.policies.contains_key(*k))
        {
            objects.remove(&plural(&key.0), &key.1, &key.2);
        }
        for key in before
            .services
            .keys()
            .filter(|k| !self.world.services.contains_key(*k))
        {
            objects.remove("services", &key.0, &key.1);
        }
        for name in before
            .namespaces
            .keys()
            .filter(|n| !self.world.namespaces.contains_key(*n))
        {
            objects.remove("namespaces", "", name);
        }
        Ok(())
    }
}

fn service_object(service: &super::case::ServiceSpec) -> Value {
    let port = |p: &super::case::ServicePort| {
        let target = match &p.target_port {
            Some(super::case::TargetPort::Name(name)) => json!(name),
            Some(super::case::TargetPort::Number(number)) => json!(number),
            None => json!(p.port),
        };
        json!({"name": p.name, "port": p.port, "protocol": p.protocol.name(), "targetPort": target})
    };
    let ports: Vec<Value> = service.ports.iter().map(port).collect();
    let mut object = json!({"apiVersion": "v1", "kind": "Service",
        "metadata": {"namespace": service.namespace, "name": service.name},
        "spec": {"clusterIP": service.cluster_ip.to_string(), "selector": service.selector, "ports": ports}});
    slices::default_service(&mut object);
    object
}

/// A pod as slices see it: by the ports that it declares.
fn view(spec: &crate::cases::cluster::spec::PodSpec, pod: &super::world::Pod) -> PodView {
    let declared = pod
        .spec
        .ports
        .iter()
        .map(|p| crate::cases::cluster::spec::Listen {
            port: p.port,
            protocol: p.protocol,
            name: p.name.clone(),
        });
    let mut view = PodView::new(spec, &pod.spec.ips, None);
    view.listen = declared.collect();
    view
}
