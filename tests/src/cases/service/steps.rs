//! Runs the steps of one case on its cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::judge::{Lookup, Record};
use super::probe::Detour;
use super::resolve::{Names, Services};
use crate::actor::command::{Command, Size};
use crate::cases::cluster::api::plural;
use crate::cases::cluster::capture::Capture;
use crate::cases::cluster::slices::{self, MANAGER};
use crate::cases::cluster::spec::{CaseFile, normal_key};
use crate::cases::cluster::{Cluster, Overlay};

/// Limit for agents that start, where a case allows less.
const AGENT_STARTS_WITHIN: Duration = Duration::from_secs(15);

/// One case under way.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) cluster: Cluster,
    prefers_v6: bool,
    settle: Duration,
    services: Services,
    pub(super) records: BTreeMap<String, Record>,
    /// Kept flows and watches by their names.
    pub(super) open: BTreeMap<String, Open>,
    /// Sources of forged segments, by the flows that these belong to.
    pub(super) forgers: BTreeMap<String, BTreeSet<String>>,
}

/// Sockets that outlive their step.
#[derive(Debug, Default)]
pub(super) struct Open {
    pub(super) sources: Vec<String>,
    pub(super) detours: Vec<Detour>,
    pub(super) token: u64,
    /// What the sources of forged segments have sent and received since.
    pub(super) captures: BTreeMap<String, Capture>,
    /// Ends of every connection, as its client and its server see it.
    pub(super) ends: Vec<Ends>,
}

/// One connection: addresses at the client, and at the server that answered.
#[derive(Clone, Debug)]
pub(super) struct Ends {
    pub(super) client: Option<(SocketAddr, SocketAddr)>,
    pub(super) server: Option<(String, SocketAddr, SocketAddr)>,
}

impl Names for Run {
    fn addresses_of(&self, reference: &str) -> Result<Vec<IpAddr>> {
        self.cluster.addresses(reference)
    }

    fn services(&self) -> &Services {
        &self.services
    }

    fn prefers_v6(&self) -> bool {
        self.prefers_v6
    }

    fn overlay(&self) -> Overlay {
        Cluster::overlay()
    }
}

impl Lookup for Run {
    fn addresses(&self, reference: &str) -> Vec<IpAddr> {
        let mut all = self.cluster.addresses(reference).unwrap_or_default();
        if let Some(node) = reference
            .strip_prefix("node:")
            .and_then(|n| self.cluster.nodes.get(n))
        {
            all.extend(&node.spec.also);
        }
        all
    }

    fn record(&self, id: &str) -> Option<Record> {
        self.records.get(id).cloned()
    }
}

pub(super) fn strings(value: &Value) -> Vec<String> {
    match value {
        Value::Array(list) => list
            .iter()
            .filter_map(Value::as_str)
            .map(str::to_owned)
            .collect(),
        Value::String(one) => vec![one.clone()],
        _ => Vec::new(),
    }
}

pub(super) fn number(value: &Value, default: u64) -> u64 {
    value.as_u64().unwrap_or(default)
}

pub(super) fn size_of(value: &Value, default: usize) -> Result<Size> {
    match value {
        Value::Null => Ok(Size::Bytes(default)),
        Value::String(s) if s == "mtu" => Ok(Size::Mtu(0)),
        Value::String(s) if s == "mtu+1" => Ok(Size::Mtu(1)),
        other => Ok(Size::Bytes(usize::try_from(
            other.as_u64().context("bad size")?,
        )?)),
    }
}

/// Who forges segments of which flow, in steps and in repeated steps.
fn forgers(steps: &[Value], found: &mut BTreeMap<String, BTreeSet<String>>) {
    for step in steps {
        let nested = step["repeat"]["steps"].as_array();
        forgers(nested.map(Vec::as_slice).unwrap_or_default(), found);
        let raw = &step["raw"];
        if let (Some(flow), Some(from)) = (raw["flow"].as_str(), raw["from"].as_str()) {
            let all = found.entry(flow.to_owned()).or_default();
            all.insert(from.to_owned());
        }
    }
}

impl Run {
    /// Brings the case's objects up on a fresh cluster.
    ///
    /// # Errors
    /// When an agent does not follow within the case's time.
    pub(super) fn start(case: &CaseFile, cluster: Cluster) -> Result<Self> {
        let mut run = Self {
            cluster,
            prefers_v6: case.prefers_v6(),
            settle: Duration::from_secs_f64(case.settle.clamp(0.0, 600.0)),
            services: BTreeMap::new(),
            records: BTreeMap::new(),
            open: BTreeMap::new(),
            forgers: BTreeMap::new(),
        };
        forgers(&case.steps, &mut run.forgers);
        for object in &case.objects {
            run.put(object)?;
        }
        run.generate(&case.generate)?;
        run.settle()?;
        Ok(run)
    }

    /// Runs steps in order.
    ///
    /// # Errors
    /// The first step that failed, by number and kind.
    pub(super) fn steps(&mut self, steps: &[Value]) -> Result<()> {
        for (index, step) in steps.iter().enumerate() {
            let (kind, body) = step
                .as_object()
                .and_then(|m| m.iter().next())
                .with_context(|| format!("step {}: not a map with one key", index + 1))?;
            let done = self.step(kind, body);
            // Whatever a step expected: nothing may have crashed meanwhile.
            self.cluster
                .alive()
                .and(done)
                .with_context(|| format!("step {} ({kind})", index + 1))?;
        }
        Ok(())
    }

    fn step(&mut self, kind: &str, body: &Value) -> Result<()> {
        match kind {
            "probe" => return self.probe(body),
            "send" => return self.send(body),
            "close" => return self.close(body.as_str().unwrap_or_default()),
            "watch" => return self.watch(body),
            "unwatch" => return self.unwatch(body),
            "http" => return self.http(body),
            "raw" => return self.raw(body),
            "wait" => {
                std::thread::sleep(Duration::from_secs_f64(
                    body.as_f64().unwrap_or(0.0).clamp(0.0, 600.0),
                ));
                return Ok(());
            }
            "repeat" => {
                let steps = body["steps"].as_array().cloned().unwrap_or_default();
                for _ in 0..number(&body["times"], 1) {
                    self.steps(&steps)?;
                }
                return Ok(());
            }
            _ => {}
        }
        let asked = self.settle;
        if matches!(kind, "start" | "restart" | "join" | "outage") {
            // An agent loads its programs first, beside those of other cases; it may have started during the outage.
            self.settle = asked.max(AGENT_STARTS_WITHIN);
        }
        let done = self.change(kind, body).and_then(|()| self.settle());
        self.settle = asked;
        done
    }

    fn change(&mut self, kind: &str, body: &Value) -> Result<()> {
        match kind {
            "apply" => {
                for object in body.as_array().into_iter().flatten() {
                    self.put(object)?;
                }
            }
            "delete" => {
                for item in body.as_array().into_iter().flatten() {
                    self.delete(item);
                }
            }
            "generate" => self.generate(body.as_array().map(Vec::as_slice).unwrap_or_default())?,
            "create" => {
                for name in strings(body) {
                    let spec = self.cluster.specs.get(&normal_key(&name)).cloned();
                    self.cluster
                        .create_pod(&spec.with_context(|| format!("no pod {name}"))?)?;
                }
            }
            "remove" => {
                for name in strings(body) {
                    self.cluster.remove_pod(&normal_key(&name))?;
                }
            }
            "set" => self.set(body)?,
            "join" => self.cluster.join(&strings(body))?,
            "leave" => self.cluster.leave(body.as_str().unwrap_or_default())?,
            "stop" | "start" | "restart" => self.agent(kind, body)?,
            "outage" => self.cluster.set_outage(body["control"] == "down")?,
            other => bail!("unknown step {other}"),
        }
        Ok(())
    }

    fn agent(&mut self, kind: &str, body: &Value) -> Result<()> {
        let name = body["agent"].as_str().unwrap_or_default();
        if kind != "start" {
            self.cluster.stop_agent(name, body["kill"] == true)?;
        }
        if kind != "stop" {
            self.cluster.start_agent(name)?;
        }
        Ok(())
    }

    /// Derived slices follow the pods; then every agent that can has confirmed.
    fn settle(&mut self) -> Result<()> {
        let pods = self.cluster.pod_views();
        let wanted: Vec<Value> = self
            .services
            .values()
            .flat_map(|s| slices::derive(s, &pods))
            .collect();
        let objects = &self.cluster.control.objects;
        let is = |slice: &Value, other: &Value| {
            slice["metadata"]["name"] == other["metadata"]["name"]
                && slice["metadata"]["namespace"] == other["metadata"]["namespace"]
        };
        for present in objects.all("endpointslices") {
            let ours =
                present["metadata"]["labels"]["endpointslice.kubernetes.io/managed-by"] == MANAGER;
            if ours && !wanted.iter().any(|w| is(w, &present)) {
                let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
                objects.remove(
                    "endpointslices",
                    &text(&present["metadata"]["namespace"]),
                    &text(&present["metadata"]["name"]),
                );
            }
        }
        for slice in wanted {
            objects.put("endpointslices", slice);
        }
        let followers = self.cluster.followers();
        self.cluster.confirmed(&followers, self.settle)
    }

    fn put(&mut self, object: &Value) -> Result<()> {
        let mut object = self.resolve(object)?;
        let kind = object["kind"].as_str().unwrap_or_default().to_owned();
        if kind == "Service" {
            slices::default_service(&mut object);
            let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
            let key = (
                text(&object["metadata"]["namespace"]),
                text(&object["metadata"]["name"]),
            );
            self.services.insert(key, object.clone());
        } else if object["metadata"]["namespace"].is_null() {
            object["metadata"]["namespace"] = "default".into();
        }
        self.cluster.control.objects.put(&plural(&kind), object);
        Ok(())
    }

    fn delete(&mut self, item: &Value) {
        let kind = item["kind"].as_str().unwrap_or_default();
        let namespace = item["namespace"].as_str().unwrap_or("default");
        let pattern = item["name"].as_str().unwrap_or_default();
        let matches = |name: &str| match pattern.strip_suffix('*') {
            Some(prefix) => name.starts_with(prefix),
            None => name == pattern,
        };
        self.services
            .retain(|(ns, name), _| !(kind == "Service" && ns == namespace && matches(name)));
        let objects = &self.cluster.control.objects;
        for object in objects.all(&plural(kind)) {
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            if object["metadata"]["namespace"] == namespace && matches(name) {
                objects.remove(&plural(kind), namespace, name);
            }
        }
    }

    fn generate(&mut self, items: &[Value]) -> Result<()> {
        for item in items {
            for object in slices::generate(item).map_err(anyhow::Error::msg)? {
                self.put(&object)?;
            }
        }
        Ok(())
    }

    fn set(&mut self, body: &Value) -> Result<()> {
        if let Some(name) = body["node"].as_str() {
            return self.cluster.set_node(name, body);
        }
        let key = normal_key(body["pod"].as_str().unwrap_or_default());
        let pod = self
            .cluster
            .pods
            .get_mut(&key)
            .with_context(|| format!("no pod {key}"))?;
        if let Some(ready) = body["ready"].as_bool() {
            pod.spec.ready = ready;
        }
        if let Some(terminating) = body["terminating"].as_bool() {
            pod.spec.terminating = terminating;
        }
        if !body["labels"].is_null() {
            pod.spec.labels = serde_json::from_value(body["labels"].clone())?;
            // Policies select by what the API serves of it.
            let mut object = pod.spec.object();
            pod.spec.wired(&mut object, &pod.ips);
            self.cluster.control.objects.put("pods", object);
        }
        match body["listening"].as_bool() {
            Some(false) => {
                pod.actor.call(Command::Unlisten, Duration::from_secs(5))?;
            }
            Some(true) => crate::cases::cluster::listen(&pod.actor, &pod.spec.listen, &key)?,
            None => {}
        }
        Ok(())
    }
}
