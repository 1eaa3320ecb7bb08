//! Steps that make traffic: probes, kept flows, watches, HTTP.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::judge::{self, Seen};
use super::resolve::Names;
use super::steps::{Ends, Open, Run, number, size_of, strings};
use super::wire::{self, Interest};
use crate::actor::command::{
    Attempt, Close, Command, Fragments, Order, Probe, Protocol, Reply, Send,
};
use crate::cases::cluster::Cluster;
use crate::cases::cluster::capture::Capture;
use crate::cases::cluster::spec;

/// A probe that expects replies and gets none this often in a row has failed.
const GIVE_UP_AFTER: usize = 10;
const UNWATCH_WITHIN: Duration = Duration::from_secs(30);
/// `dont_fragment` may ask so often.
const TRIES: u64 = 3;

impl Run {
    fn build_probe(&self, body: &Value, to: SocketAddr, from: &str) -> Result<Probe> {
        let protocol: Protocol = match &body["protocol"] {
            Value::Null => Protocol::Tcp,
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
            protocol,
            count: usize::try_from(number(&body["count"], 1))?,
            size: size_of(&body["size"], 32)?,
            from_port: u16::try_from(number(&body["from_port"], 0))?,
            from_ips: self.owned(body, from, to.is_ipv6())?,
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

    /// The first owned addresses of an external, as many as a probe wants.
    fn owned(&self, body: &Value, from: &str, v6: bool) -> Result<Vec<IpAddr>> {
        let wanted = usize::try_from(number(&body["from_ips"], 0))?;
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
        let found = spec::owned(owns, v6, wanted);
        ensure!(found.len() == wanted, "{from} owns too few addresses");
        Ok(found)
    }

    pub(super) fn probe(&mut self, body: &Value) -> Result<()> {
        let icmp = body["protocol"] == "ICMP";
        let to = body["to"].as_str().context("probe without to")?;
        let targets = self.target(to, body["family"].as_str(), icmp)?;
        let capture = match &body["expect"]["wire"] {
            Value::Null => None,
            _ => Some(Capture::start(&self.cluster.router)?),
        };
        let keep = body["keep"].as_str();
        let mut open = Open {
            sources: strings(&body["from"]),
            token: rand::random(),
            ..Open::default()
        };
        for from in keep.and_then(|k| self.forgers.get(k)).into_iter().flatten() {
            if let Ok((_, _, namespace)) = self.cluster.source(from) {
                open.captures
                    .insert(from.clone(), Capture::start(namespace)?);
            }
        }
        let done = self.probe_all(body, &targets, &mut open);
        let seen = match (done, keep) {
            (Ok(seen), Some(_)) => seen,
            (done, _) => {
                // The path belongs to the probe's sockets; those are closed.
                self.undo(&mut open);
                done?
            }
        };
        for (id, flow) in [(keep, true), (body["note"].as_str(), false)] {
            if let Some(id) = id {
                let record = judge::record(&seen, flow);
                self.records.insert(id.to_owned(), record);
            }
        }
        let token = open.token;
        if let Some(id) = keep {
            self.open.insert(id.to_owned(), open);
        }
        judge::check(&body["expect"], &seen, self).map_err(anyhow::Error::msg)?;
        if let Some(capture) = capture {
            self.wire(body, &targets, &seen, &capture)?;
        }
        self.not_seen(&body["expect"], token)
    }

    fn probe_all(
        &self,
        body: &Value,
        targets: &[SocketAddr],
        open: &mut Open,
    ) -> Result<Vec<Seen>> {
        let mut seen: Vec<Seen> = Vec::new();
        for target in targets {
            for from in open.sources.clone() {
                if let Some(node) = body["via"].as_str() {
                    let detour = self.detour(&from, target.ip(), node)?;
                    open.detours.extend(detour);
                }
                let mut probe = self.build_probe(body, *target, &from)?;
                probe.token = open.token;
                let limit = limit_of(&probe);
                let (actor, addresses, _) = self.cluster.source(&from)?;
                let several = probe.from_ips.len() > 1;
                let attempts = actor.attempts(Command::Probe(probe), limit)?;
                open.ends.extend(attempts.iter().map(|a| ends(a, *target)));
                seen.push(Seen {
                    source: from.clone(),
                    addresses: addresses.to_vec(),
                    several,
                    attempts,
                });
            }
        }
        Ok(seen)
    }

    /// Compares what the segments carried with what a probe expects of them.
    fn wire(
        &self,
        body: &Value,
        targets: &[SocketAddr],
        seen: &[Seen],
        capture: &Capture,
    ) -> Result<()> {
        let protocol: Protocol = match &body["protocol"] {
            Value::Null => Protocol::Tcp,
            other => serde_json::from_value(other.clone())?,
        };
        let v6 = targets.iter().any(SocketAddr::is_ipv6);
        let mut interest = Interest {
            protocol: protocol.number(v6),
            ends: targets.to_vec(),
            never: vec![self.cluster.control.address.ip()],
        };
        for source in seen {
            let anywhere = source.addresses.iter().map(|ip| SocketAddr::new(*ip, 0));
            match source.attempts.iter().map(|a| a.source).collect() {
                Some(exact) => interest.ends.extend::<Vec<SocketAddr>>(exact),
                None => interest.ends.extend(anywhere),
            }
            let answers = source.attempts.iter().filter_map(judge::local);
            interest.ends.extend(answers);
        }
        let frames = capture.frames();
        for wanted in body["expect"]["wire"].as_array().into_iter().flatten() {
            let name = wanted["segment"].as_str().unwrap_or_default();
            let link = self.cluster.bridge(name)?;
            let here = frames.iter().filter(|f| f.link == link);
            let here = here.map(|f| f.bytes.as_slice());
            let carried = wire::count(here, &interest, self.overlay().port);
            wire::judge(wanted, carried).map_err(anyhow::Error::msg)?;
        }
        Ok(())
    }

    pub(super) fn not_seen(&self, expect: &Value, token: u64) -> Result<()> {
        for name in strings(&expect["not_seen_by"]) {
            ensure!(!self.saw(&name, token)?, "{name} saw the probe");
        }
        Ok(())
    }

    pub(super) fn saw(&self, name: &str, token: u64) -> Result<bool> {
        let Ok((actor, _, _)) = self.cluster.source(name) else {
            return Ok(false);
        };
        Ok(matches!(
            actor.call(Command::Seen { token }, Duration::ZERO)?,
            Reply::Seen(true)
        ))
    }

    pub(super) fn send(&mut self, body: &Value) -> Result<()> {
        let flow = body["flow"].as_str().context("send without flow")?;
        let open = self
            .open
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
        let requests = u64::try_from(send.count.max(1) * open.ends.len().max(1))?;
        let limit = Duration::from_millis(send.timeout_ms.saturating_mul(requests));
        let mut seen = Vec::new();
        for from in &open.sources {
            let (actor, addresses, _) = self.cluster.source(from)?;
            let attempts = actor.attempts(Command::Send(send.clone()), limit)?;
            seen.push(Seen {
                source: from.clone(),
                addresses: addresses.to_vec(),
                several: false,
                attempts,
            });
        }
        judge::check(&body["expect"], &seen, self).map_err(anyhow::Error::msg)?;
        self.not_seen(&body["expect"], send.token)
    }

    pub(super) fn close(&mut self, flow: &str) -> Result<()> {
        let mut open = self
            .open
            .remove(flow)
            .with_context(|| format!("no flow {flow}"))?;
        for from in &open.sources {
            let close = Command::Close {
                flow: flow.to_owned(),
            };
            let (actor, _, _) = self.cluster.source(from)?;
            actor.call(close, Duration::ZERO)?;
        }
        self.undo(&mut open);
        Ok(())
    }

    pub(super) fn watch(&mut self, body: &Value) -> Result<()> {
        let id = body["id"].as_str().context("watch without id")?.to_owned();
        let to = body["to"].as_str().context("watch without to")?;
        let targets = self.target(to, body["family"].as_str(), false)?;
        let target = *targets.first().context("watch without target")?;
        let mut open = Open {
            sources: strings(&body["from"]),
            token: rand::random(),
            ..Open::default()
        };
        for from in open.sources.clone() {
            if let Some(node) = body["via"].as_str() {
                let detour = self.detour(&from, target.ip(), node)?;
                open.detours.extend(detour);
            }
            let mut probe = self.build_probe(body, target, &from)?;
            probe.token = open.token;
            let command = Command::Watch {
                id: id.clone(),
                every_ms: number(&body["every_ms"], 50),
                reuse: body["reuse"] == true,
                overlap: false,
                probe,
            };
            self.cluster
                .source(&from)?
                .0
                .call(command, Duration::ZERO)?;
        }
        self.open.insert(id, open);
        Ok(())
    }

    pub(super) fn unwatch(&mut self, body: &Value) -> Result<()> {
        let id = body["id"].as_str().context("unwatch without id")?;
        let mut open = self
            .open
            .remove(id)
            .with_context(|| format!("no watch {id}"))?;
        let mut seen = Vec::new();
        for from in &open.sources {
            let (actor, addresses, _) = self.cluster.source(from)?;
            let command = Command::Unwatch { id: id.to_owned() };
            let attempts = actor.attempts(command, UNWATCH_WITHIN)?;
            ensure!(!attempts.is_empty(), "the watch never probed");
            seen.push(Seen {
                source: from.clone(),
                addresses: addresses.to_vec(),
                several: false,
                attempts,
            });
        }
        self.undo(&mut open);
        judge::check(&body["expect"], &seen, self).map_err(anyhow::Error::msg)?;
        self.not_seen(&body["expect"], open.token)
    }

    pub(super) fn http(&mut self, body: &Value) -> Result<()> {
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
        judge::http(&body["expect"], &reply).map_err(anyhow::Error::msg)
    }

    /// Leads the path from a source to an address through a node; `None` when it begins there.
    fn detour(&self, from: &str, to: IpAddr, node: &str) -> Result<Option<Detour>> {
        let ips = self.cluster.addresses(&format!("node:{node}"))?;
        let via = spec::of_family(&ips, to.is_ipv6()).context("the node lacks this family")?;
        let (_, own, namespace) = self.cluster.source(from)?;
        if own.contains(&via) {
            return Ok(None);
        }
        let near = self.cluster.near(own, via);
        let route = format!("{to}/{}", if to.is_ipv4() { 32 } else { 128 });
        if near {
            namespace.ip(&["route", "replace", &route, "via", &via.to_string()])?;
        } else {
            self.cluster.route(&route, via)?;
        }
        Ok(Some(Detour {
            source: near.then(|| from.to_owned()),
            route,
        }))
    }

    fn undo(&self, open: &mut Open) {
        for detour in open.detours.drain(..) {
            detour.undo(&self.cluster);
        }
    }
}

/// A host route that a probe's `via` made.
#[derive(Debug)]
pub(super) struct Detour {
    /// Where it is: a source, or the router.
    source: Option<String>,
    route: String,
}

impl Detour {
    fn undo(self, cluster: &Cluster) {
        let source = self.source.as_ref().map(|s| cluster.source(s));
        let at = match source {
            Some(Ok((_, _, namespace))) => namespace,
            // The source went, and its routes with it.
            Some(Err(_)) => return,
            None => &cluster.router,
        };
        // Two sources of one probe may have shared it.
        let _gone = at.ip(&["route", "del", &self.route]);
    }
}

fn ends(attempt: &Attempt, target: SocketAddr) -> Ends {
    let server = || {
        let answer = attempt.answer.as_ref()?;
        let at = |text: &str| text.parse().ok();
        Some((answer.name.clone(), at(&answer.local)?, at(&answer.peer)?))
    };
    Ends {
        client: attempt.source.map(|own| (own, target)),
        server: server(),
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
        TRIES
    } else {
        1
    };
    Duration::from_millis(
        each.saturating_mul(u64::try_from(sockets).unwrap_or(1))
            .saturating_mul(tries),
    )
}
