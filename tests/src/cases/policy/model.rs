//! Policy cases without root: the product's own feed, compiler and packet decisions as plain code, compared with what the
//! case expects, which in turn has to agree with a reading of the policies themselves.
//!
//! What it does not have: sockets, flow tables, time. A flow lives as long as its packets may pass. Pure.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};

use super::case::{AgentChange, Change, Expectation, Query, Step, Traffic};
use super::chain::Chain;
use super::oracle::{self, Packet};
use super::world::{Key, Pod, World, key_of};

#[derive(Debug)]
pub(super) struct Model {
    pub(super) world: World,
    /// The world as the agents know it.
    told: World,
    chain: Chain,
    flows: BTreeMap<String, Query>,
    api: bool,
    /// Pods that were made while no agent ran.
    waiting: Vec<Key>,
}

/// Runs one case.
///
/// # Errors
/// The first expectation that does not hold.
pub(super) fn run(case: &Traffic) -> Result<()> {
    let mut model = Model::new(World::new(case)?)?;
    model.check(&case.expectations).context("at the start")?;
    for (number, step) in case.steps.iter().enumerate() {
        model
            .step(step)
            .with_context(|| format!("step {}", number + 1))?;
    }
    Ok(())
}

impl Model {
    /// A cluster of these objects, all of it in force.
    pub(super) fn new(world: World) -> Result<Self> {
        let hosts = world
            .nodes
            .iter()
            .map(|(n, h)| (n.as_str(), h.ips.as_slice()));
        let mut model = Self {
            chain: Chain::new(hosts),
            told: world.clone(),
            world,
            flows: BTreeMap::new(),
            api: true,
            waiting: Vec::new(),
        };
        for name in model.world.namespaces.keys() {
            model.chain.upsert(&model.world.namespace_object(name));
        }
        for host in model.world.nodes.values() {
            model.chain.upsert(&World::node_object(host));
        }
        for policy in model.world.policies.values() {
            model.chain.upsert(policy);
        }
        let pods: Vec<Key> = model.world.pods.keys().cloned().collect();
        for key in pods {
            model.create(&key)?;
        }
        model.chain.start_agents();
        Ok(model)
    }

    fn create(&mut self, key: &Key) -> Result<()> {
        let pod = self.world.pods.get(key).context("no such pod")?;
        self.chain.upsert(&World::pod_object(pod, false));
        if pod.is_live() && !pod.spec.host_network {
            let uid = format!("pod-{}", pod.number);
            self.chain
                .attach(&pod.spec.node, (&key.0, &key.1, &uid), &pod.spec.ips);
        }
        self.chain.upsert(&World::pod_object(pod, true));
        Ok(())
    }

    fn step(&mut self, step: &Step) -> Result<()> {
        let continuous = step.probe.is_some();
        let mut early: Vec<&Expectation> = Vec::new();
        if continuous {
            early.extend(
                step.expectations
                    .iter()
                    .filter(|e| self.holds(e).unwrap_or(false)),
            );
        }
        for change in &step.changes {
            self.change(change)
                .with_context(|| format!("change {change:?}"))?;
            for expectation in &early {
                ensure!(
                    self.holds(expectation)?,
                    "all along: {expectation:?} after {change:?}"
                );
            }
        }
        if let Some((namespace, name)) = self.waiting.first() {
            bail!("{namespace}/{name} was made while no agent ran, and none was started");
        }
        self.check(&step.expectations)
    }

    fn check(&mut self, expectations: &[Expectation]) -> Result<()> {
        let mut wrong = Vec::new();
        for expectation in expectations {
            if let Expectation::Verdict { query, allow } = expectation {
                let meant = oracle::allows(&self.told, query)?;
                if meant != *allow {
                    wrong.push(format!("{query}: the policies themselves say {meant}"));
                }
            }
            if !self.holds(expectation)? {
                wrong.push(match expectation {
                    Expectation::Verdict { query, allow } => format!("{query}: not {allow}"),
                    Expectation::Flow { id, alive } => format!("flow {id}: not alive: {alive}"),
                });
            }
        }
        ensure!(wrong.is_empty(), "{}", wrong.join("; "));
        Ok(())
    }

    fn holds(&mut self, expectation: &Expectation) -> Result<bool> {
        match expectation {
            Expectation::Verdict { query, allow } => Ok(self.allows(query)? == *allow),
            Expectation::Flow { id, alive } => {
                let query = self.flows.get(id).cloned();
                let query = query.with_context(|| format!("no flow {id}"))?;
                Ok(self.allows(&query)? == *alive)
            }
        }
    }

    /// What the chain says of a query: every destination that a Service may choose has to agree.
    pub(super) fn allows(&mut self, query: &Query) -> Result<bool> {
        let mut verdicts = Vec::new();
        for (to, port) in self.world.destinations(query)? {
            let (source, destination) = self.world.ends(query, &to)?;
            let packet = Packet {
                source,
                destination,
                port,
                protocol: query.protocol,
            };
            let own = query.from == to && !query.to.starts_with("svc:");
            let nodes = (self.world.node_of(&query.from), self.world.node_of(&to));
            // A pod's packets to its own address do not leave it.
            verdicts.push(own || self.chain.allows(packet, nodes.0, nodes.1));
        }
        verdicts.dedup();
        ensure!(verdicts.len() == 1, "backends of {query} differ: name one");
        Ok(verdicts[0])
    }

    /// Changes objects, agents or flows.
    pub(super) fn change(&mut self, change: &Change) -> Result<()> {
        let before = self.world.clone();
        self.world.change(change)?;
        match change {
            Change::Apply(object) => self.chain.upsert(object),
            Change::LabelPod(to) => self.update_pod(&key_of(&to.pod)?)?,
            Change::SetPod(to) => self.update_pod(&key_of(&to.pod)?)?,
            Change::LabelNamespace(to) | Change::CreateNamespace(to) => {
                self.chain.upsert(&self.world.namespace_object(&to.name));
            }
            Change::CreatePod(spec) => {
                let key = (spec.namespace.clone(), spec.name.clone());
                if !before.namespaces.contains_key(&key.0) {
                    self.chain.upsert(&self.world.namespace_object(&key.0));
                }
                if self.chain.agents_run() {
                    self.create(&key)?;
                } else {
                    self.waiting.push(key);
                }
            }
            Change::DeletePod(_) | Change::DeletePolicy(_) | Change::DeleteNamespace(_) => {
                self.follow_removals(&before);
            }
            Change::Agent(what) => self.agent(*what)?,
            Change::OpenFlow(flow) => {
                let query = flow.query();
                ensure!(self.allows(&query)?, "flow {} cannot be opened", flow.id);
                self.flows.insert(flow.id.clone(), query);
            }
        }
        if self.api && self.chain.agents_run() {
            self.told = self.world.clone();
        }
        Ok(())
    }

    fn update_pod(&mut self, key: &Key) -> Result<()> {
        let pod = self.world.pods.get(key).context("no such pod")?;
        self.chain.upsert(&World::pod_object(pod, true));
        if !pod.is_live() {
            self.chain.detach(&pod.spec.node, (&key.0, &key.1));
        }
        Ok(())
    }

    fn follow_removals(&mut self, before: &World) {
        for (key, pod) in &before.pods {
            if !self.world.pods.contains_key(key) {
                self.remove_pod(key, pod);
            }
        }
        for (key, policy) in &before.policies {
            if !self.world.policies.contains_key(key) {
                self.chain.remove(policy);
            }
        }
        for name in before.namespaces.keys() {
            if !self.world.namespaces.contains_key(name) {
                self.chain.remove(&before.namespace_object(name));
            }
        }
    }

    fn remove_pod(&mut self, key: &Key, pod: &Pod) {
        self.waiting.retain(|other| other != key);
        self.chain.detach(&pod.spec.node, (&key.0, &key.1));
        self.chain.remove(&World::pod_object(pod, true));
    }

    fn agent(&mut self, what: AgentChange) -> Result<()> {
        match what {
            AgentChange::Kill => self.chain.stop_agents(),
            AgentChange::Start => self.chain.start_agents(),
            AgentChange::GracefulRestart
            | AgentChange::Upgrade
            | AgentChange::UpgradeLayouts
            | AgentChange::Boot => {
                self.chain.stop_agents();
                self.chain.start_agents();
            }
            // The model's index is always whole.
            AgentChange::StoreRestart => {}
            AgentChange::ApiDown | AgentChange::ApiUp => {
                self.api = what == AgentChange::ApiUp;
                self.chain.set_api(self.api);
            }
        }
        if self.chain.agents_run() {
            for key in std::mem::take(&mut self.waiting) {
                self.create(&key)?;
            }
        }
        Ok(())
    }
}
