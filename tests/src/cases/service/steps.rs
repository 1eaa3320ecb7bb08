//! Runs the steps of one case on its cluster.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::api::plural;
use super::cluster::Cluster;
use super::judge::{self, Lookup, Record, Seen};
use super::slices::{self, MANAGER};
use super::world::{self, CaseFile, normal_key};
use crate::actor::command::{
    Close, Command, Forged, Fragments, Order, Probe, Protocol, Reply, Send, Size,
};

/// Time for a forged packet to arrive (or not).
const ARRIVAL: Duration = Duration::from_millis(300);

/// A probe that expects replies and gets none this often in a row has failed.
const GIVE_UP_AFTER: usize = 10;

/// One case under way.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) cluster: Cluster,
    pub(super) prefers_v6: bool,
    settle: Duration,
    pub(super) services: BTreeMap<(String, String), Value>,
    records: BTreeMap<String, Record>,
    /// Sources of kept flows and of watches.
    owners: BTreeMap<String, Vec<String>>,
    watched: BTreeMap<String, u64>,
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

fn number(value: &Value, default: u64) -> u64 {
    value.as_u64().unwrap_or(default)
}

fn size_of(value: &Value, default: usize) -> Result<Size> {
    match value {
        Value::Null => Ok(Size::Bytes(default)),
        Value::String(s) if s == "mtu" => Ok(Size::Mtu(0)),
        Value::String(s) if s == "mtu+1" => Ok(Size::Mtu(1)),
        other => Ok(Size::Bytes(usize::try_from(
            other.as_u64().context("bad size")?,
        )?)),
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
            owners: BTreeMap::new(),
            watched: BTreeMap::new(),
        };
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
            self.step(kind, body)
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
        self.change(kind, body)?;
        self.settle()
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
            "join" => self.cluster.join(body.as_str().unwrap_or_default())?,
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
        let behind = self
            .cluster
            .control
            .settle(&self.cluster.followers(), self.settle);
        ensure!(
            behind.is_empty(),
            "agents of {behind:?} have not confirmed: {}\n{}",
            self.cluster.control.errors(),
            behind
                .first()
                .map(|n| self.cluster.log_tail(n))
                .unwrap_or_default()
        );
        Ok(())
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
            return self.set_node(name, body);
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
        }
        match body["listening"].as_bool() {
            Some(false) => {
                pod.actor.call(Command::Unlisten, Duration::from_secs(5))?;
            }
            Some(true) => super::cluster::listen(&pod.actor, &pod.spec.listen, &key)?,
            None => {}
        }
        Ok(())
    }

    fn set_node(&mut self, name: &str, body: &Value) -> Result<()> {
        ensure!(
            body["segment"].is_null(),
            "moving a node between segments is not run here"
        );
        let node = self
            .cluster
            .nodes
            .get_mut(name)
            .with_context(|| format!("no node {name}"))?;
        if !body["zone"].is_null() {
            node.spec.zone = body["zone"].as_str().map(str::to_owned);
        }
        for (key, list) in [("ips", &mut node.ips), ("also", &mut node.spec.also)] {
            if body[key].is_null() {
                continue;
            }
            let new: Vec<IpAddr> = serde_json::from_value(body[key].clone())?;
            for ip in list.iter().filter(|ip| !new.contains(ip)) {
                let length = if ip.is_ipv4() {
                    world::V4_PREFIX
                } else {
                    world::V6_PREFIX
                };
                node.namespace
                    .ip(&["address", "del", &format!("{ip}/{length}"), "dev", "eth0"])?;
            }
            for ip in new.iter().filter(|ip| !list.contains(ip)) {
                let length = if ip.is_ipv4() {
                    world::V4_PREFIX
                } else {
                    world::V6_PREFIX
                };
                node.namespace
                    .ip(&["address", "add", &format!("{ip}/{length}"), "dev", "eth0"])?;
            }
            *list = new;
        }
        self.cluster.put_node(name)
    }

    fn build_probe(&self, body: &Value, to: SocketAddr, from: &str) -> Result<Probe> {
        let protocol: world::Transport = match &body["protocol"] {
            Value::Null => world::Transport::Tcp,
            other => serde_json::from_value(other.clone())?,
        };
        let fragments = match &body["fragments"] {
            Value::Null => None,
            cut => Some(Fragments {
                size: usize::try_from(number(&cut["size"], 1200))?,
                order: serde_json::from_value::<Order>(cut["order"].clone())?,
                gap_ms: number(&cut["gap_ms"], 0),
            }),
        };
        let close = match &body["close"] {
            Value::Null => Close::Client,
            other => serde_json::from_value(other.clone())?,
        };
        Ok(Probe {
            to,
            protocol: protocol
                .spoken()
                .context("this kernel has no SCTP sockets")?,
            count: usize::try_from(number(&body["count"], 1))?,
            size: size_of(&body["size"], 32)?,
            from_port: u16::try_from(number(&body["from_port"], 0))?,
            from_ips: self.sources_of(body, from)?,
            close,
            interval_ms: number(&body["interval_ms"], 0),
            timeout_ms: number(&body["timeout_ms"], 1000),
            answer_size: usize::try_from(number(&body["answer_size"], 0))?,
            answer_after_ms: seconds_ms(&body["answer_after_s"]),
            half_close: body["half_close"] == true,
            dont_fragment: body["dont_fragment"] == true,
            fragments,
            keep: body["keep"].as_str().map(str::to_owned),
            give_up_after: if body["expect"]["outcome"].is_null() {
                GIVE_UP_AFTER
            } else {
                0
            },
            token: 0,
        })
    }

    fn sources_of(&self, body: &Value, from: &str) -> Result<Vec<IpAddr>> {
        let wanted = u32::try_from(number(&body["from_ips"], 0))?;
        if wanted == 0 {
            return Ok(Vec::new());
        }
        let external = from
            .strip_prefix("ext:")
            .and_then(|n| self.cluster.externals.get(n));
        let owns = &external
            .with_context(|| format!("{from} owns no addresses"))?
            .spec
            .owns;
        let range = owns.first().context("from_ips without owns")?;
        Ok((1..=wanted)
            .filter_map(|n| world::nth_of(range, n))
            .collect())
    }

    fn probe(&mut self, body: &Value) -> Result<()> {
        let icmp = body["protocol"] == "ICMP";
        let to = body["to"].as_str().context("probe without to")?;
        let targets = self.target(to, body["family"].as_str(), icmp)?;
        let sources = strings(&body["from"]);
        let token: u64 = rand::random();
        let mut detours = Vec::new();
        let mut seen: Vec<Seen> = Vec::new();
        for target in &targets {
            for from in &sources {
                if let Some(node) = body["via"].as_str() {
                    detours.push(self.detour(from, target.ip(), node)?);
                }
                let mut probe = self.build_probe(body, *target, from)?;
                probe.token = token;
                let limit = limit_of(&probe);
                let (actor, addresses, _) = self.cluster.source(from)?;
                let attempts = actor.attempts(Command::Probe(probe), limit)?;
                seen.push(Seen {
                    source: from.clone(),
                    addresses: addresses.to_vec(),
                    attempts,
                });
            }
        }
        if let Some(id) = body["keep"].as_str() {
            self.records.insert(id.to_owned(), judge::record(&seen));
            self.owners.insert(id.to_owned(), sources);
        } else {
            // The path belongs to the probe's sockets; those are closed.
            detours
                .into_iter()
                .try_for_each(|d| d.undo(&self.cluster))?;
        }
        if let Some(id) = body["note"].as_str() {
            self.records.insert(id.to_owned(), judge::record(&seen));
        }
        ensure!(
            body["expect"]["wire"].is_null(),
            "what is on the wire is not looked at here"
        );
        judge::check(&body["expect"], &seen, self).map_err(anyhow::Error::msg)?;
        self.not_seen(&body["expect"], token)
    }

    fn not_seen(&self, expect: &Value, token: u64) -> Result<()> {
        for name in strings(&expect["not_seen_by"]) {
            ensure!(!self.saw(&name, token)?, "{name} saw the probe");
        }
        Ok(())
    }

    fn saw(&self, name: &str, token: u64) -> Result<bool> {
        let Ok((actor, _, _)) = self.cluster.source(name) else {
            return Ok(false);
        };
        Ok(matches!(
            actor.call(Command::Seen { token }, Duration::ZERO)?,
            Reply::Seen(true)
        ))
    }

    fn send(&mut self, body: &Value) -> Result<()> {
        let flow = body["flow"].as_str().context("send without flow")?;
        let owners = self
            .owners
            .get(flow)
            .with_context(|| format!("no flow {flow}"))?;
        let send = Send {
            flow: flow.to_owned(),
            count: usize::try_from(number(&body["count"], 1))?,
            size: size_of(&body["size"], 32)?,
            timeout_ms: number(&body["timeout_ms"], 1000),
            answer_size: usize::try_from(number(&body["answer_size"], 0))?,
            token: rand::random(),
        };
        let limit = Duration::from_millis(send.timeout_ms * 64);
        let mut seen = Vec::new();
        for from in owners {
            let (actor, addresses, _) = self.cluster.source(from)?;
            let attempts = actor.attempts(Command::Send(send.clone()), limit)?;
            seen.push(Seen {
                source: from.clone(),
                addresses: addresses.to_vec(),
                attempts,
            });
        }
        judge::check(&body["expect"], &seen, self).map_err(anyhow::Error::msg)?;
        self.not_seen(&body["expect"], send.token)
    }

    fn close(&mut self, flow: &str) -> Result<()> {
        for from in self
            .owners
            .remove(flow)
            .with_context(|| format!("no flow {flow}"))?
        {
            let (actor, _, _) = self.cluster.source(&from)?;
            actor.call(
                Command::Close {
                    flow: flow.to_owned(),
                },
                Duration::ZERO,
            )?;
        }
        Ok(())
    }

    fn watch(&mut self, body: &Value) -> Result<()> {
        let id = body["id"].as_str().context("watch without id")?.to_owned();
        let to = body["to"].as_str().context("watch without to")?;
        let targets = self.target(to, body["family"].as_str(), false)?;
        let target = *targets.first().context("watch without target")?;
        let sources = strings(&body["from"]);
        let token: u64 = rand::random();
        for from in &sources {
            if let Some(node) = body["via"].as_str() {
                self.detour(from, target.ip(), node)?;
            }
            let mut probe = self.build_probe(body, target, from)?;
            probe.token = token;
            let command = Command::Watch {
                id: id.clone(),
                every_ms: number(&body["every_ms"], 50),
                reuse: body["reuse"] == true,
                probe,
            };
            self.cluster.source(from)?.0.call(command, Duration::ZERO)?;
        }
        self.owners.insert(id.clone(), sources);
        self.watched.insert(id, token);
        Ok(())
    }

    fn unwatch(&mut self, body: &Value) -> Result<()> {
        let id = body["id"].as_str().context("unwatch without id")?;
        let owners = self
            .owners
            .remove(id)
            .with_context(|| format!("no watch {id}"))?;
        let token = self.watched.remove(id).unwrap_or_default();
        let mut seen = Vec::new();
        for from in owners {
            let (actor, addresses, _) = self.cluster.source(&from)?;
            let attempts = actor.attempts(
                Command::Unwatch { id: id.to_owned() },
                Duration::from_secs(30),
            )?;
            ensure!(!attempts.is_empty(), "the watch never probed");
            seen.push(Seen {
                source: from.clone(),
                addresses: addresses.to_vec(),
                attempts,
            });
        }
        judge::check(&body["expect"], &seen, self).map_err(anyhow::Error::msg)?;
        self.not_seen(&body["expect"], token)
    }

    fn http(&mut self, body: &Value) -> Result<()> {
        let to = body["to"].as_str().context("http without to")?;
        let target = *self
            .target(to, body["family"].as_str(), false)?
            .first()
            .context("no target")?;
        let path = body["path"].as_str().unwrap_or("/").to_owned();
        let (actor, _, _) = self
            .cluster
            .source(body["from"].as_str().unwrap_or_default())?;
        let command = Command::Http {
            to: target,
            path,
            timeout_ms: number(&body["timeout_ms"], 1000),
        };
        let reply = actor.call(command, Duration::ZERO)?;
        let expect = &body["expect"];
        match (&reply, expect["status"].as_u64()) {
            (Reply::Http { status, body: text }, Some(wanted)) => {
                ensure!(
                    u64::from(*status) == wanted,
                    "status {status}, expected {wanted}: {text}"
                );
                let found: Value = serde_json::from_str(text).unwrap_or(Value::Null);
                for (key, value) in expect["json"].as_object().into_iter().flatten() {
                    ensure!(
                        found[key] == *value,
                        "{key} is {}, expected {value}",
                        found[key]
                    );
                }
                Ok(())
            }
            (Reply::HttpFailed(outcome), None) => {
                let allowed = strings(&expect["outcome"]);
                let name = serde_json::to_value(outcome)?;
                ensure!(
                    allowed.iter().any(|a| name == a.as_str()),
                    "{outcome:?}, expected {allowed:?}"
                );
                Ok(())
            }
            (other, _) => bail!("{other:?}, expected {expect}"),
        }
    }

    fn raw(&mut self, body: &Value) -> Result<()> {
        ensure!(
            body["flow"].is_null(),
            "segments of kept flows are not forged here"
        );
        let packet = self.resolve(&body["packet"])?;
        let address = |key: &str, port: &str| -> Result<SocketAddr> {
            let ip: IpAddr = packet[key]
                .as_str()
                .unwrap_or_default()
                .parse()
                .with_context(|| format!("packet {key}"))?;
            Ok(SocketAddr::new(
                ip,
                u16::try_from(number(&packet[port], 0))?,
            ))
        };
        ensure!(
            packet["protocol"].is_null() || packet["protocol"] == "UDP",
            "only UDP packets are forged here"
        );
        let inside = match &body["inside"] {
            Value::Null => None,
            outer => {
                let outer = self.resolve(outer)?;
                let ip: IpAddr = outer["dst"].as_str().unwrap_or_default().parse()?;
                let number_of =
                    |v: &Value| v.as_u64().or_else(|| v.as_str()?.parse().ok()).unwrap_or(0);
                let port = u16::try_from(number_of(&outer["port"]))?;
                Some((
                    SocketAddr::new(ip, port),
                    u32::try_from(number_of(&outer["vni"]))?,
                ))
            }
        };
        let token: u64 = rand::random();
        let forged = Forged {
            src: address("src", "sport")?,
            dst: address("dst", "dport")?,
            token,
            inside,
        };
        let (actor, _, _) = self
            .cluster
            .source(body["from"].as_str().unwrap_or_default())?;
        actor.call(Command::Forge(forged), Duration::ZERO)?;
        std::thread::sleep(ARRIVAL);
        if body["expect"]["arrives_at"].is_null() {
            return Ok(());
        }
        let wanted: Vec<String> = strings(&body["expect"]["arrives_at"])
            .iter()
            .map(|n| normal_key(n))
            .collect();
        let externals = self.cluster.externals.keys().map(|n| format!("ext:{n}"));
        let everybody: Vec<String> = self.cluster.pods.keys().cloned().chain(externals).collect();
        for name in everybody {
            let saw = self.saw(&name, token)?;
            ensure!(
                saw == wanted.contains(&name),
                "{name} {} the packet",
                if saw { "saw" } else { "did not see" }
            );
        }
        Ok(())
    }

    /// Leads the path from a source to an address through a node.
    fn detour(&self, from: &str, to: IpAddr, node: &str) -> Result<Detour> {
        let ips = self.cluster.addresses(&format!("node:{node}"))?;
        let via = world::of_family(&ips, to.is_ipv6()).context("the node lacks this family")?;
        let (_, own, namespace) = self.cluster.source(from)?;
        let segment = self.cluster.segments.iter().find(|s| s.holds(via));
        let near = own.iter().any(|ip| segment.is_some_and(|s| s.holds(*ip)));
        let route = format!("{to}/{}", if to.is_ipv4() { 32 } else { 128 });
        let at = if near {
            namespace
        } else {
            &self.cluster.router
        };
        at.ip(&["route", "replace", &route, "via", &via.to_string()])?;
        Ok(Detour {
            source: near.then(|| from.to_owned()),
            route,
        })
    }
}

/// A host route that a probe's `via` made.
struct Detour {
    /// Where it is: a source, or the router.
    source: Option<String>,
    route: String,
}

impl Detour {
    fn undo(self, cluster: &Cluster) -> Result<()> {
        let at = match &self.source {
            Some(source) => cluster.source(source)?.2,
            None => &cluster.router,
        };
        // Two sources of one probe may have shared it.
        let _gone = at.ip(&["route", "del", &self.route]);
        Ok(())
    }
}

fn seconds_ms(value: &Value) -> u32 {
    let time = Duration::from_secs_f64(value.as_f64().unwrap_or(0.0).clamp(0.0, 3600.0));
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}

fn limit_of(probe: &Probe) -> Duration {
    let each = probe.timeout_ms + probe.interval_ms + u64::from(probe.answer_after_ms);
    let sockets = probe.count.max(1) * probe.from_ips.len().max(1);
    let tries = if probe.protocol == Protocol::Udp {
        3
    } else {
        1
    };
    Duration::from_millis(
        each.saturating_mul(u64::try_from(sockets).unwrap_or(1))
            .saturating_mul(tries),
    )
}
