//! `bench cni`: how long it takes to connect a pod; beside the reference plugins `bridge` and `ptp` with `host-local`.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use serde_json::{Value, json};

use crate::agents::{self, Agents, Programs};
use crate::fleet::Fleet;
use crate::lab::{Namespace, Underlay};
use crate::service;
use weir_bench::report::{Bar, Machine, Report, Row, Skipped, Unit, paired_ratio, quantile};

/// Where Debian has the reference plugins (package containernetworking-plugins).
const PLUGINS: &str = "/usr/lib/cni";
/// CNI_ARGS of a container that is no pod of a cluster, which would have policies to wait for.
const NO_POD: &str = "IgnoreUnknown=1";
/// ADDs at once.
const PARALLEL: usize = 20;
/// Pods on a node, and how many of the first are compared with how many of the last.
const FULL: usize = 250;
const COMPARED: usize = 50;

const ADD_LIMIT: f64 = 3.0;
const PARALLEL_LIMIT: f64 = 5.0;
/// The last pods may take so many times what the first took: a median of a few dozen varies by that much.
const FULL_LIMIT: f64 = 1.2;

const WEIR: &str = "weir";
const BRIDGE: &str = "bridge";
const PTP: &str = "ptp";

/// Options of `bench cni`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Times that the peers take turns.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// ADDs, one after the other, in each round of a peer.
    #[arg(long, default_value_t = 40)]
    adds: usize,
    /// Few rounds and pods: to see that it works.
    #[arg(long)]
    quick: bool,
    /// Write the report as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

/// A CNI plugin with its configuration.
#[derive(Clone, Debug)]
pub(crate) struct Plugin {
    pub(crate) program: PathBuf,
    pub(crate) config: Value,
}

impl Plugin {
    /// One call, as a runtime makes it; what the plugin answered, and how long it took.
    pub(crate) fn call(
        &self,
        command: &str,
        container: &str,
        netns: &str,
        arguments: &str,
    ) -> Result<(String, Duration)> {
        let started = Instant::now();
        let mut child = Command::new(&self.program)
            .env("CNI_COMMAND", command)
            .env("CNI_CONTAINERID", container)
            .env("CNI_IFNAME", "eth0")
            .env("CNI_PATH", PLUGINS)
            .env("CNI_NETNS", netns)
            .env("CNI_ARGS", arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("start {}", self.program.display()))?;
        let mut input = child.stdin.take().context("a standard input")?;
        input.write_all(self.config.to_string().as_bytes())?;
        drop(input);
        let output = child.wait_with_output()?;
        let took = started.elapsed();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let program = self.program.display();
        ensure!(
            output.status.success(),
            "{program}, {command} of {container}: {said}"
        );
        Ok((said, took))
    }

    /// A reference plugin.
    fn reference(kind: &str, folder: &Path) -> Self {
        let config = json!({
            "cniVersion": "1.0.0", "name": format!("bench-{kind}"), "type": kind,
            "bridge": "cni0", "isGateway": true,
            "ipam": {
                "type": "host-local",
                "dataDir": folder.join(kind),
                "ranges": [[{ "subnet": "10.9.0.0/22" }]],
                "routes": [{ "dst": "0.0.0.0/0" }],
            },
        });
        Self {
            program: Path::new(PLUGINS).join(kind),
            config,
        }
    }
}

/// What one peer took, in seconds.
#[derive(Clone, Debug, Default)]
struct Taken {
    add: Vec<f64>,
    del: Vec<f64>,
    parallel: f64,
}

/// Runs it. Says whether every bar held.
pub(crate) fn run(mut options: Options, programs: &Programs) -> Result<bool> {
    agents::own_mounts()?;
    if options.quick {
        options.rounds = options.rounds.min(2);
        options.adds = options.adds.min(10);
    }
    let mut report = Report::new("cni", Machine::describe());
    let runtime = Arc::new(
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?,
    );
    let underlay = Underlay::new()?;
    let nobody = Fleet {
        services: Vec::new(),
    };
    let extra = format!("{}[cni]\naddress_cool_down_s = 0\n", agents::PER_PACKET);
    let objects = nobody.objects(&agents::nodes());
    let agents = Agents::start(programs, &underlay, &runtime, objects, &extra)?;
    let folder = tempfile::tempdir()?;
    let (bridge, ptp) = (Namespace::new()?, Namespace::new()?);
    let mut peers = vec![(WEIR, &underlay.nodes[0], agents.plugin(programs, 0))];
    for (kind, node) in [(BRIDGE, &bridge), (PTP, &ptp)] {
        let plugin = Plugin::reference(kind, folder.path());
        if plugin.program.is_file() {
            peers.push((kind, node, plugin));
        } else {
            report.skipped.push(Skipped {
                name: kind.into(),
                reason: format!(
                    "{} is missing (Debian package containernetworking-plugins)",
                    plugin.program.display()
                ),
            });
        }
    }
    let pods = (0..FULL)
        .map(|_| Namespace::new())
        .collect::<Result<Vec<_>>>()?;
    let paths: Vec<String> = pods.iter().map(Namespace::path).collect();
    let mut samples: BTreeMap<&str, Vec<Taken>> = BTreeMap::new();
    for round in 0..=options.rounds {
        eprintln!("round {round} of {}", options.rounds);
        for (peer, node, plugin) in &peers {
            let taken = node.enter(|| turn(plugin, &paths, options.adds))?;
            // The first turn makes the bridge, and brings programs and libraries to memory.
            if round > 0 {
                samples.entry(peer).or_default().push(taken);
            }
        }
    }
    tabulate(&samples, &mut report);
    if options.quick {
        report.skipped.push(Skipped {
            name: format!("{FULL} pods on a node"),
            reason: "--quick".into(),
        });
    } else {
        eprintln!("{FULL} pods on a node");
        let (_, node, plugin) = &peers[0];
        fill(&node.enter(|| full(plugin, &paths))?, &mut report);
    }
    service::print(&report.table());
    if let Some(path) = &options.json {
        report.write(path)?;
    }
    Ok(report.bars.iter().all(|bar| bar.held))
}

/// A peer's turn, on its node.
fn turn(plugin: &Plugin, pods: &[String], adds: usize) -> Result<Taken> {
    let mut taken = Taken::default();
    for (number, pod) in pods.iter().cycle().take(adds).enumerate() {
        let container = format!("one-{number}");
        let seconds = |command| {
            let (_, took) = plugin.call(command, &container, pod, NO_POD)?;
            anyhow::Ok(took.as_secs_f64())
        };
        taken.add.push(seconds("ADD")?);
        taken.del.push(seconds("DEL")?);
    }
    let started = Instant::now();
    std::thread::scope(|scope| {
        let calls: Vec<_> = pods[..PARALLEL]
            .iter()
            .enumerate()
            .map(|(number, pod)| {
                scope.spawn(move || plugin.call("ADD", &format!("many-{number}"), pod, NO_POD))
            })
            .collect();
        calls.into_iter().try_for_each(|call| {
            let result = call.join();
            result.unwrap_or_else(|_| Err(anyhow::anyhow!("a call panicked")))?;
            anyhow::Ok(())
        })
    })?;
    taken.parallel = started.elapsed().as_secs_f64();
    for (number, pod) in pods[..PARALLEL].iter().enumerate() {
        plugin.call("DEL", &format!("many-{number}"), pod, NO_POD)?;
    }
    Ok(taken)
}

/// Seconds for each pod of a node that fills up.
fn full(plugin: &Plugin, pods: &[String]) -> Result<Vec<f64>> {
    let mut taken = Vec::new();
    for (number, pod) in pods.iter().enumerate() {
        let (_, took) = plugin.call("ADD", &format!("full-{number}"), pod, NO_POD)?;
        taken.push(took.as_secs_f64());
    }
    for (number, pod) in pods.iter().enumerate() {
        plugin.call("DEL", &format!("full-{number}"), pod, NO_POD)?;
    }
    Ok(taken)
}

fn fill(taken: &[f64], report: &mut Report) {
    let (first, last) = (&taken[..COMPARED], &taken[taken.len() - COMPARED..]);
    for (what, part) in [("first", first), ("last", last)] {
        let title = format!("add/{what} {COMPARED} of {FULL} pods {WEIR}");
        report.rows.extend(Row::new(title, Unit::Seconds, part));
    }
    if let (Some(first), Some(last)) = (quantile(first, 0.5), quantile(last, 0.5)) {
        let name = format!("slowdown of an ADD at {FULL} pods");
        report
            .bars
            .push(Bar::at_most(name, FULL_LIMIT, last / first));
    }
}

fn tabulate(samples: &BTreeMap<&str, Vec<Taken>>, report: &mut Report) {
    type Figure = fn(&Taken) -> f64;
    let figures: [(String, Figure, Option<f64>); 4] = [
        (
            "add/p50".into(),
            |taken| quantile(&taken.add, 0.5).unwrap_or(0.0),
            Some(ADD_LIMIT),
        ),
        (
            "add/p99".into(),
            |taken| quantile(&taken.add, 0.99).unwrap_or(0.0),
            None,
        ),
        (
            "del/p50".into(),
            |taken| quantile(&taken.del, 0.5).unwrap_or(0.0),
            None,
        ),
        (
            format!("add/{PARALLEL} at once"),
            |taken| taken.parallel,
            Some(PARALLEL_LIMIT),
        ),
    ];
    for (figure, value, limit) in figures {
        let of = |peer: &str| -> Vec<f64> {
            samples
                .get(peer)
                .map_or_else(Vec::new, |all| all.iter().map(value).collect())
        };
        let own = of(WEIR);
        for peer in [WEIR, BRIDGE, PTP] {
            let theirs = of(peer);
            let title = format!("{figure} {peer}");
            let Some(mut row) = Row::new(title, Unit::Seconds, &theirs) else {
                continue;
            };
            if peer == WEIR {
                for other in [BRIDGE, PTP] {
                    let ratio = paired_ratio(Unit::Seconds, &own, &of(other));
                    row.vs.extend(ratio.map(|ratio| (other.to_owned(), ratio)));
                    if let (Some(ratio), Some(limit)) = (ratio, limit) {
                        let name = format!("{figure} against {other}");
                        report.bars.push(Bar::at_least(name, limit, ratio));
                    }
                }
            }
            report.rows.push(row);
        }
    }
}
