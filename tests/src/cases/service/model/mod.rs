//! The model: runs case files without root, on an own reading of what Services mean. Pure: no I/O, no clock.
//!
//! It shares the control side with the runner on namespaces (API defaults, derived slices) and the judge, but nothing
//! with the product. What it cannot say is skipped, with the reason.

mod traffic;
mod view;
mod world;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde_json::Value;

use super::super::Outcome as CaseOutcome;
use super::judge::{self, Lookup, Record, Seen};
use super::resolve::{Names, Services};
use super::steps::{number, strings};
use crate::actor::command::{Attempt, Outcome, Reply};
use crate::actor::message::Answer;
use crate::cases::cluster::slices;
use crate::cases::cluster::spec::{self, CaseFile, PodSpec, normal_key};
use crate::cases::cluster::{Cluster, Overlay};
use traffic::{Client, Served, Traffic, Verdict};
use view::{NodeView, View};
use world::World;

/// Ports that clients get which ask for none.
const FIRST_PORT: u16 = 32_768;

/// One socket of a kept flow or a watch.
#[derive(Clone, Debug)]
struct Socket {
    source: String,
    client: Client,
    /// Its addresses, as the judge wants them.
    addresses: Vec<IpAddr>,
    own: SocketAddr,
    to: SocketAddr,
    protocol: String,
    served: Option<Served>,
    several: bool,
}

#[derive(Clone, Debug)]
struct Watch {
    body: Value,
    reuse: bool,
    sockets: Vec<Socket>,
    seen: Vec<Seen>,
}

#[derive(Debug)]
struct Model {
    world: World,
    specs: BTreeMap<String, PodSpec>,
    prefers_v6: bool,
    services: Services,
    /// Slices of the case itself; those of selectors are derived when they are needed.
    slices: BTreeMap<(String, String), Value>,
    views: BTreeMap<String, Arc<View>>,
    node_port_networks: Vec<String>,
    editions: u64,
    outage: bool,
    traffic: Traffic,
    next_port: u16,
    flows: BTreeMap<String, Vec<Socket>>,
    watches: BTreeMap<String, Watch>,
    records: BTreeMap<String, Record>,
}

/// Runs one case on the model. The seed decides every choice.
#[must_use]
pub(super) fn run(case: &CaseFile, seed: u64) -> CaseOutcome {
    if let Some(why) = unsayable(case) {
        return CaseOutcome::Skipped(format!("the model does not know {why}"));
    }
    let mut model = Model::new(case, seed);
    match model.start(case).and_then(|()| model.steps(&case.steps)) {
        Ok(()) => CaseOutcome::Passed,
        Err(e) => CaseOutcome::Failed(format!("{e:#}")),
    }
}

/// What in a case only a kernel can show.
fn unsayable(case: &CaseFile) -> Option<String> {
    if case.segments.iter().any(|s| s.path_mtu.is_some()) {
        return Some("path MTUs".into());
    }
    if case.agent.get("algorithm").is_some_and(|a| a != "random") {
        return Some("other algorithms than random choice".into());
    }
    step_unsayable(&case.steps)
}

fn step_unsayable(steps: &[Value]) -> Option<String> {
    steps.iter().find_map(|step| {
        let (kind, body) = step.as_object()?.iter().next()?;
        if kind == "repeat" {
            return step_unsayable(body["steps"].as_array()?);
        }
        if kind == "raw" {
            return Some("forged packets".into());
        }
        if !body["expect"]["wire"].is_null() {
            return Some("what is on the wire".into());
        }
        if !body["expect"]["mtu_learned"].is_null() || body["size"].is_string() {
            return Some("path MTUs".into());
        }
        let mut hard = ["fragments", "dont_fragment"].iter();
        hard.find(|k| !body[**k].is_null()).map(|k| (*k).to_owned())
    })
}

impl Names for Model {
    fn addresses_of(&self, reference: &str) -> Result<Vec<IpAddr>> {
        if let Some(name) = reference.strip_prefix("node:") {
            let node = self.world.nodes.get(name);
            return node
                .map(|n| n.ips.clone())
                .with_context(|| format!("no node {name}"));
        }
        if let Some(name) = reference.strip_prefix("ext:") {
            let external = self.world.externals.get(name);
            return external
                .map(|e| e.ips.clone())
                .with_context(|| format!("no external {name}"));
        }
        let key = normal_key(reference);
        let pod = self.world.pods.get(&key).map(|p| &p.ips);
        pod.or_else(|| self.world.gone.get(&key))
            .cloned()
            .with_context(|| format!("no address of {reference}"))
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

impl Lookup for Model {
    fn addresses(&self, reference: &str) -> Vec<IpAddr> {
        let node = reference.strip_prefix("node:");
        match node.and_then(|n| self.world.nodes.get(n)) {
            Some(node) => node.addresses(),
            None => self.addresses_of(reference).unwrap_or_default(),
        }
    }

    fn record(&self, id: &str) -> Option<Record> {
        self.records.get(id).cloned()
    }
}

fn key_of(object: &Value) -> (String, String) {
    let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
    let meta = &object["metadata"];
    (text(&meta["namespace"]), text(&meta["name"]))
}

impl Model {
    fn new(case: &CaseFile, seed: u64) -> Self {
        let list = |key: &str| case.agent.get(key).map(strings).unwrap_or_default();
        let direct = case.agent.get("nodeport_mode").is_some_and(|m| m == "dsr");
        let rng = StdRng::seed_from_u64(seed);
        Self {
            world: World::new(case),
            specs: case.pods.iter().map(|p| (p.key(), p.clone())).collect(),
            prefers_v6: case.prefers_v6(),
            services: Services::new(),
            slices: BTreeMap::new(),
            views: BTreeMap::new(),
            node_port_networks: list("nodeport_addresses"),
            editions: 0,
            outage: false,
            traffic: Traffic::new(rng, direct, list("masquerade_except")),
            next_port: FIRST_PORT,
            flows: BTreeMap::new(),
            watches: BTreeMap::new(),
            records: BTreeMap::new(),
        }
    }

    fn start(&mut self, case: &CaseFile) -> Result<()> {
        let joined = |p: &&PodSpec| {
            let node = self.world.nodes.get(&p.node);
            p.present && node.is_some_and(|n| n.joined)
        };
        for pod in case.pods.iter().filter(joined).cloned().collect::<Vec<_>>() {
            self.world.create(&pod);
        }
        for object in &case.objects {
            self.put(object)?;
        }
        self.generate(&case.generate)?;
        self.follow();
        Ok(())
    }

    fn steps(&mut self, steps: &[Value]) -> Result<()> {
        for (index, step) in steps.iter().enumerate() {
            let (kind, body) = step
                .as_object()
                .and_then(|m| m.iter().next())
                .with_context(|| format!("step {}: not a map with one key", index + 1))?;
            self.step(kind, body)
                .with_context(|| format!("step {} ({kind})", index + 1))?;
            self.watch_all()?;
        }
        Ok(())
    }

    fn step(&mut self, kind: &str, body: &Value) -> Result<()> {
        match kind {
            "probe" => self.probe(body),
            "send" => self.send(body),
            "close" => {
                let flow = body.as_str().unwrap_or_default();
                let open = self.flows.remove(flow);
                open.map(drop).with_context(|| format!("no flow {flow}"))
            }
            "watch" => self.watch(body),
            "unwatch" => self.unwatch(body),
            "http" => self.http(body),
            "wait" => {
                self.traffic.now += body.as_f64().unwrap_or(0.0);
                Ok(())
            }
            "repeat" => {
                let steps = body["steps"].as_array().cloned().unwrap_or_default();
                (0..number(&body["times"], 1)).try_for_each(|_| self.steps(&steps))
            }
            _ => {
                self.change(kind, body)?;
                self.follow();
                Ok(())
            }
        }
    }

    fn change(&mut self, kind: &str, body: &Value) -> Result<()> {
        let items = body.as_array().map(Vec::as_slice).unwrap_or_default();
        match kind {
            "apply" => items.iter().try_for_each(|object| self.put(object))?,
            "delete" => items.iter().for_each(|item| self.delete(item)),
            "generate" => self.generate(items)?,
            "create" => {
                for name in strings(body) {
                    let spec = self.specs.get(&normal_key(&name)).cloned();
                    self.world
                        .create(&spec.with_context(|| format!("no pod {name}"))?);
                }
            }
            "remove" => strings(body)
                .iter()
                .for_each(|name| self.world.remove(&normal_key(name))),
            "set" => self.set(body)?,
            "join" => {
                let node = self.world.nodes.get_mut(body.as_str().unwrap_or_default());
                let node = node.context("no such node")?;
                (node.joined, node.agent) = (true, true);
            }
            "leave" => self.world.leave(body.as_str().unwrap_or_default()),
            "stop" | "start" | "restart" => {
                let name = body["agent"].as_str().unwrap_or_default();
                let node = self.world.nodes.get_mut(name);
                node.context("no such node")?.agent = kind != "stop";
            }
            "outage" => self.outage = body["control"] == "down",
            other => bail!("unknown step {other}"),
        }
        Ok(())
    }

    /// Nodes whose agents run and reach the control side now know everything.
    fn follow(&mut self) {
        if self.outage {
            return;
        }
        let pods = self.world.pod_views();
        let derived = self
            .services
            .values()
            .flat_map(|s| slices::derive(s, &pods));
        let joined = self.world.nodes.iter().filter(|(_, n)| n.joined);
        let node = |n: &world::Node| NodeView {
            addresses: n.addresses(),
            zone: n.spec.zone.clone(),
        };
        self.editions += 1;
        let view = Arc::new(View {
            edition: self.editions,
            services: self.services.clone(),
            slices: self.slices.values().cloned().chain(derived).collect(),
            nodes: joined.map(|(name, n)| (name.clone(), node(n))).collect(),
            node_port_networks: self.node_port_networks.clone(),
        });
        for (name, node) in &self.world.nodes {
            if node.joined && node.agent {
                self.views.insert(name.clone(), Arc::clone(&view));
            } else if !node.joined {
                self.views.remove(name);
            }
        }
    }

    fn put(&mut self, object: &Value) -> Result<()> {
        let mut object = self.resolve(object)?;
        if object["kind"] == "Service" {
            slices::default_service(&mut object);
            self.services.insert(key_of(&object), object);
            return Ok(());
        }
        if object["metadata"]["namespace"].is_null() {
            object["metadata"]["namespace"] = "default".into();
        }
        self.slices.insert(key_of(&object), object);
        Ok(())
    }

    fn delete(&mut self, item: &Value) {
        let namespace = item["namespace"].as_str().unwrap_or("default");
        let pattern = item["name"].as_str().unwrap_or_default();
        let matches = |name: &(String, String)| {
            let same = match pattern.strip_suffix('*') {
                Some(prefix) => name.1.starts_with(prefix),
                None => name.1 == pattern,
            };
            name.0 == namespace && same
        };
        if item["kind"] == "Service" {
            self.services.retain(|name, _| !matches(name));
        } else {
            self.slices.retain(|name, _| !matches(name));
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
        let life = self.world.next_life();
        let pod = self.world.pods.get_mut(&key);
        let pod = pod.with_context(|| format!("no pod {key}"))?;
        let now = |key: &str, before: bool| body[key].as_bool().unwrap_or(before);
        pod.spec.ready = now("ready", pod.spec.ready);
        pod.spec.terminating = now("terminating", pod.spec.terminating);
        if !body["labels"].is_null() {
            pod.spec.labels = serde_json::from_value(body["labels"].clone())?;
        }
        if let Some(listening) = body["listening"].as_bool() {
            (pod.listening, pod.life) = (listening, life);
        }
        Ok(())
    }

    fn set_node(&mut self, name: &str, body: &Value) -> Result<()> {
        let segments = self.world.segments.clone();
        let node = self.world.nodes.get_mut(name);
        let node = node.with_context(|| format!("no node {name}"))?;
        if let Some(zone) = body["zone"].as_str() {
            node.spec.zone = (zone != "none").then(|| zone.to_owned());
        }
        if let Some(segment) = body["segment"].as_str() {
            segment.clone_into(&mut node.spec.segment);
            node.spec.ips = None;
            node.ips = spec::node_ips(&node.spec, node.number, &segments);
        }
        if !body["ips"].is_null() {
            node.ips = serde_json::from_value(body["ips"].clone())?;
        }
        if !body["also"].is_null() {
            node.spec.also = serde_json::from_value(body["also"].clone())?;
        }
        let ips = node.ips.clone();
        let mut pods = self.world.pods.values_mut();
        while let Some(pod) = pods.find(|p| p.spec.host_network && p.spec.node == name) {
            pod.ips.clone_from(&ips);
        }
        Ok(())
    }
}

/// Steps that make traffic.
impl Model {
    fn client(&self, from: &str, body: &Value, to: IpAddr) -> Result<(Client, Vec<IpAddr>)> {
        let addresses = self.addresses_of(from)?;
        let ip = spec::of_family(&addresses, to.is_ipv6());
        let ip = ip.with_context(|| format!("{from} lacks the family of {to}"))?;
        let via = body["via"].as_str().map(str::to_owned);
        let pod = self.world.pods.get(&normal_key(from));
        let node = match (from.strip_prefix("node:"), pod) {
            (Some(node), _) => Some(node.to_owned()),
            (None, Some(pod)) => Some(pod.spec.node.clone()),
            (None, None) => None,
        };
        let routed = || {
            let external = self.world.externals.get(from.strip_prefix("ext:")?)?;
            let leads = |r: &&spec::RouteSpec| spec::cidr_holds(&r.to, to);
            external
                .spec
                .routes
                .iter()
                .find(leads)
                .map(|r| r.via.clone())
        };
        let client = Client {
            ip,
            host: node.is_some() && pod.is_none_or(|p| p.spec.host_network),
            node,
            via: via.or_else(routed),
        };
        Ok((client, addresses))
    }

    /// Fresh sockets of one source towards one target.
    fn sockets(&mut self, from: &str, body: &Value, to: SocketAddr) -> Result<Vec<Socket>> {
        let (client, addresses) = self.client(from, body, to.ip())?;
        let wanted = usize::try_from(number(&body["from_ips"], 0))?;
        let owns = from
            .strip_prefix("ext:")
            .and_then(|n| self.world.externals.get(n));
        let owned = owns.map(|e| spec::owned(&e.spec.owns, to.is_ipv6(), wanted));
        let own = owned.filter(|o| !o.is_empty());
        let several = own.as_ref().is_some_and(|o| o.len() > 1);
        let count = usize::try_from(number(&body["count"], 1))?;
        let fixed = u16::try_from(number(&body["from_port"], 0))?;
        let mut sockets = Vec::new();
        for ip in own.unwrap_or_else(|| vec![client.ip]) {
            for _ in 0..count {
                self.next_port = self.next_port.checked_add(1).unwrap_or(FIRST_PORT);
                let port = if fixed == 0 { self.next_port } else { fixed };
                let client = Client {
                    ip,
                    ..client.clone()
                };
                sockets.push(Socket {
                    source: from.to_owned(),
                    client,
                    addresses: addresses.clone(),
                    own: SocketAddr::new(ip, port),
                    to,
                    protocol: body["protocol"].as_str().unwrap_or("TCP").to_owned(),
                    served: None,
                    several,
                });
            }
        }
        Ok(sockets)
    }

    /// The first request of a socket.
    fn open(&mut self, socket: &mut Socket) -> Verdict {
        if socket.protocol == "ICMP" {
            return self.echo(socket);
        }
        let verdict = self.traffic.open(
            &self.world,
            &self.views,
            &socket.client,
            socket.to,
            &socket.protocol,
        );
        socket.served.clone_from(&verdict.served);
        verdict
    }

    /// Pings of Service addresses are answered at the client's node.
    fn echo(&self, socket: &Socket) -> Verdict {
        let ip = socket.to.ip();
        let is = |s: &Value| strings(&s["spec"]["clusterIPs"]).contains(&ip.to_string());
        let there = self.services.values().any(is)
            || !matches!(self.world.at(socket.to, "TCP"), world::Found::Nobody);
        Verdict {
            outcome: if there {
                Outcome::Reply
            } else {
                Outcome::Unreachable
            },
            served: None,
        }
    }

    /// A further request on a socket.
    fn again(&mut self, socket: &mut Socket) -> Verdict {
        let lasting = socket.protocol != "UDP";
        let Some(served) = socket.served.clone() else {
            if lasting {
                return Verdict {
                    outcome: Outcome::Reset,
                    served: None,
                };
            }
            return self.open(socket);
        };
        let stays = !served.chosen
            || traffic::stays(
                &self.views,
                &self.world,
                &socket.client,
                socket.to,
                served.at,
            );
        if !lasting && !stays {
            return self.open(socket);
        }
        let outcome = match self.world.at(served.at, &socket.protocol) {
            world::Found::Server(_, life) if life == served.life || !lasting => Outcome::Reply,
            world::Found::Silent => Outcome::Timeout,
            _ if lasting => Outcome::Reset,
            _ => return self.open(socket),
        };
        Verdict {
            outcome,
            served: (outcome == Outcome::Reply).then_some(served),
        }
    }

    fn attempt(&mut self, socket: &Socket, number: usize, verdict: &Verdict) -> Attempt {
        let answer = verdict.served.as_ref().map(|s| {
            let translated = s.sees != socket.own.ip();
            let port = if translated {
                socket.own.port() ^ 1
            } else {
                socket.own.port()
            };
            Answer {
                name: s.name.clone(),
                local: s.at.to_string(),
                peer: SocketAddr::new(s.sees, port).to_string(),
            }
        });
        Attempt {
            outcome: verdict.outcome,
            answer,
            source: Some(socket.own),
            socket: number,
            took_ms: 0,
            mtu: None,
            resent: 0,
            detail: String::new(),
        }
    }

    fn seen(socket: &Socket, attempts: Vec<Attempt>) -> Seen {
        Seen {
            source: socket.source.clone(),
            addresses: socket.addresses.clone(),
            several: socket.several,
            attempts,
        }
    }

    fn probe(&mut self, body: &Value) -> Result<()> {
        let icmp = body["protocol"] == "ICMP";
        let to = body["to"].as_str().context("probe without to")?;
        let targets = self.target(to, body["family"].as_str(), icmp)?;
        let mut seen = Vec::new();
        let mut kept = Vec::new();
        for target in targets {
            for from in strings(&body["from"]) {
                let mut attempts = Vec::new();
                let mut sockets = self.sockets(&from, body, target)?;
                for (number, socket) in sockets.iter_mut().enumerate() {
                    let verdict = self.open(socket);
                    attempts.push(self.attempt(socket, number, &verdict));
                    self.pass(body, &verdict);
                }
                seen.extend(sockets.first().map(|s| Self::seen(s, attempts)));
                kept.extend(sockets);
            }
        }
        for (key, flow) in [("keep", true), ("note", false)] {
            if let Some(id) = body[key].as_str() {
                let record = judge::record(&seen, flow);
                self.records.insert(id.to_owned(), record);
            }
        }
        if let Some(id) = body["keep"].as_str() {
            // As on a kernel: a connection that was not made is no socket.
            kept.retain(|s| s.protocol == "UDP" || s.served.is_some());
            self.flows.insert(id.to_owned(), kept);
        }
        judge::check(&body["expect"], &seen, self).map_err(anyhow::Error::msg)?;
        not_seen(body, &seen)
    }

    /// The time that an attempt takes.
    fn pass(&mut self, body: &Value, verdict: &Verdict) {
        let mut ms = body["interval_ms"].as_f64().unwrap_or(0.0);
        if verdict.outcome == Outcome::Timeout {
            ms += body["timeout_ms"].as_f64().unwrap_or(1000.0);
        }
        self.traffic.now += ms / 1000.0 + body["answer_after_s"].as_f64().unwrap_or(0.0);
    }

    fn send(&mut self, body: &Value) -> Result<()> {
        let flow = body["flow"].as_str().context("send without flow")?;
        let mut sockets = self
            .flows
            .remove(flow)
            .with_context(|| format!("no flow {flow}"))?;
        let mut attempts = Vec::new();
        for _ in 0..number(&body["count"], 1) {
            for (number, socket) in sockets.iter_mut().enumerate() {
                let verdict = self.again(socket);
                attempts.push(self.attempt(socket, number, &verdict));
                self.pass(body, &verdict);
            }
        }
        let seen: Vec<Seen> = sockets
            .first()
            .map(|s| Self::seen(s, attempts))
            .into_iter()
            .collect();
        self.flows.insert(flow.to_owned(), sockets);
        judge::check(&body["expect"], &seen, self).map_err(anyhow::Error::msg)?;
        not_seen(body, &seen)
    }

    fn watch(&mut self, body: &Value) -> Result<()> {
        let id = body["id"].as_str().context("watch without id")?.to_owned();
        let watch = Watch {
            body: body.clone(),
            reuse: body["reuse"] == true,
            sockets: Vec::new(),
            seen: Vec::new(),
        };
        self.watches.insert(id, watch);
        Ok(())
    }

    /// Every watch probes once: after each step, as far as the model can tell times apart.
    fn watch_all(&mut self) -> Result<()> {
        for (id, mut watch) in std::mem::take(&mut self.watches) {
            let to = watch.body["to"].as_str().context("watch without to")?;
            let targets = self.target(to, watch.body["family"].as_str(), false)?;
            let target = *targets.first().context("watch without target")?;
            let from = strings(&watch.body["from"]);
            let from = from.first().context("watch without from")?.clone();
            let verdict = match watch.sockets.first_mut().filter(|_| watch.reuse) {
                Some(socket) => self.again(socket),
                None => {
                    watch.sockets = self.sockets(&from, &watch.body, target)?;
                    let socket = watch.sockets.first_mut().context("no socket")?;
                    self.open(socket)
                }
            };
            if let Some(socket) = watch.sockets.first() {
                let attempt = self.attempt(socket, 0, &verdict);
                watch.seen.push(Self::seen(socket, vec![attempt]));
            }
            self.watches.insert(id, watch);
        }
        Ok(())
    }

    fn unwatch(&mut self, body: &Value) -> Result<()> {
        let id = body["id"].as_str().context("unwatch without id")?;
        let watch = self.watches.remove(id);
        let watch = watch.with_context(|| format!("no watch {id}"))?;
        judge::check(&body["expect"], &watch.seen, self).map_err(anyhow::Error::msg)?;
        not_seen(body, &watch.seen)
    }

    fn http(&mut self, body: &Value) -> Result<()> {
        let to = body["to"].as_str().context("http without to")?;
        let target = *self
            .target(to, body["family"].as_str(), false)?
            .first()
            .context("no target")?;
        let node = self.world.node_at(target.ip()).map(str::to_owned);
        let answer = node.and_then(|n| traffic::health(self.views.get(&n)?, &n, target.port()));
        let reply = match answer {
            Some((status, json)) => Reply::Http {
                status,
                body: json.to_string(),
            },
            None => Reply::HttpFailed(Outcome::Refused),
        };
        judge::http(&body["expect"], &reply).map_err(anyhow::Error::msg)
    }
}

/// `not_seen_by`: in the model a server logs what it answers.
fn not_seen(body: &Value, seen: &[Seen]) -> Result<()> {
    let mut names = seen.iter().flat_map(|s| &s.attempts);
    for hidden in strings(&body["expect"]["not_seen_by"]) {
        let key = normal_key(&hidden);
        if names.any(|a| judge::backend(a).as_deref() == Some(&key)) {
            bail!("{hidden} saw the probe");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
