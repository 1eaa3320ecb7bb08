//! `bench service`: the same workloads over the same paths, once by plain routing, once through Weir, once through rule
//! sets of kube-proxy's shape; round after round, every peer in turn.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use clap::Args;
use tokio::runtime::Runtime;

use crate::agents::{self, Agents, Programs};
use crate::fleet::{Fleet, Place, SERVICE_PORT};
use crate::lab::{self, Cgroup, Lab, Length, NODES, Namespace};
use crate::load::client::{Seen, Workload};
use crate::ruleset;
use crate::turns::{self, Turns};
use weir_bench::report::{Bar, Machine, Report, Row, Skipped, Unit, paired_ratio};

const ENDPOINTS: usize = 10;

/// Options of `bench service`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Numbers of services, smallest first; the smallest and the largest are compared.
    #[arg(long, value_delimiter = ',', default_values_t = [10, 1_000, 10_000])]
    services: Vec<usize>,
    #[command(flatten)]
    turns: Turns,
    /// Only measurements whose name contains one of these (short_tcp, request, stream, udp, same_node, node_port, …).
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Only these peers (direct is always there).
    #[arg(long, value_delimiter = ',')]
    peers: Vec<String>,
    /// The program that loads the rules of iptables; the fastest that is there where none is named. Those of
    /// `iptables-nft-restore` are walked by nftables.
    #[arg(long)]
    iptables_restore: Option<PathBuf>,
    /// Few services, few and short rounds: to see that it works.
    #[arg(long)]
    quick: bool,
    /// Write the report as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Who does the balancing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Direct,
    Weir,
    WeirSocket,
    Iptables,
    Nftables,
}

impl Kind {
    const ALL: [Self; 5] = [
        Self::Direct,
        Self::Weir,
        Self::WeirSocket,
        Self::Iptables,
        Self::Nftables,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Weir => "weir",
            Self::WeirSocket => "weir_socket",
            Self::Iptables => "iptables",
            Self::Nftables => "nftables",
        }
    }
}

/// A peer with so many services; direct has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Peer {
    kind: Kind,
    services: usize,
}

const DIRECT: Peer = Peer {
    kind: Kind::Direct,
    services: 0,
};

impl Peer {
    /// Sockets are translated where the client runs, and an outsider runs nowhere in the cluster.
    fn takes_part_in(self, route: Route) -> bool {
        self.kind != Kind::WeirSocket || matches!(route, Route::ClusterIp(_))
    }

    fn name(self) -> String {
        if self.services == 0 {
            self.kind.name().into()
        } else {
            format!("{}/{}", self.kind.name(), self.services)
        }
    }
}

/// Where the client is and what it asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Route {
    /// A pod asks the service's address.
    ClusterIp(Place),
    /// An outsider asks the first node's port.
    NodePort(Place),
}

impl Route {
    fn name(self) -> &'static str {
        match self {
            Self::ClusterIp(Place::SameNode) => "same_node",
            Self::ClusterIp(Place::CrossNode) => "cross_node",
            Self::NodePort(Place::SameNode) => "node_port",
            Self::NodePort(Place::CrossNode) => "node_port_cross",
        }
    }

    fn place(self) -> Place {
        match self {
            Self::ClusterIp(place) | Self::NodePort(place) => place,
        }
    }
}

/// A figure of a measurement: name, unit, and where it is in what was seen.
type Figure = (&'static str, Unit, fn(&Seen) -> f64);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Measurement {
    workload: Workload,
    route: Route,
}

impl Measurement {
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for place in [Place::SameNode, Place::CrossNode] {
            for workload in [
                Workload::ShortTcp,
                Workload::Request,
                Workload::Stream,
                Workload::UdpRequest,
            ] {
                all.push(Self {
                    workload,
                    route: Route::ClusterIp(place),
                });
            }
            for workload in [Workload::ShortTcp, Workload::Request] {
                all.push(Self {
                    workload,
                    route: Route::NodePort(place),
                });
            }
        }
        all
    }

    fn name(self) -> String {
        let workload = match self.workload {
            Workload::ShortTcp => "short_tcp",
            Workload::Request => "request",
            Workload::Stream => "stream",
            Workload::UdpRequest => "udp_request",
        };
        format!("{workload}/{}", self.route.name())
    }

    fn figures(self) -> &'static [Figure] {
        match self.workload {
            Workload::ShortTcp => &[("rate", Unit::PerSecond, |seen| seen.rate)],
            Workload::Stream => &[("rate", Unit::BytesPerSecond, |seen| seen.rate)],
            Workload::Request | Workload::UdpRequest => &[
                ("rate", Unit::PerSecond, |seen| seen.rate),
                ("p50", Unit::Seconds, |seen| seen.p50_s),
                ("p99", Unit::Seconds, |seen| seen.p99_s),
            ],
        }
    }
}

/// A peer that is set up.
struct Stage {
    peer: Peer,
    lab: Lab,
    fleet: Option<Fleet>,
    _agents: Option<Agents>,
    /// Where the client has to be; removed after the agents have ended.
    cgroup: Option<Cgroup>,
}

impl Stage {
    /// Where the client of a route is, and what it asks.
    fn targets(&self, route: Route) -> (&Namespace, Vec<SocketAddrV4>) {
        let from = match route {
            Route::ClusterIp(_) => &self.lab.client.namespace,
            Route::NodePort(_) => &self.lab.underlay.outsider,
        };
        let Some(fleet) = &self.fleet else {
            return (from, self.lab.server_ports(route.place()));
        };
        let targets = fleet.targets(route.place());
        let addresses = targets.filter_map(|service| match route {
            Route::ClusterIp(_) => Some(SocketAddrV4::new(service.address, SERVICE_PORT)),
            Route::NodePort(_) => Some(SocketAddrV4::new(NODES[0], service.node_port?)),
        });
        (from, addresses.collect())
    }

    fn measure(&self, measurement: Measurement, length: Length) -> Result<Seen> {
        let (from, targets) = self.targets(measurement.route);
        let cgroup = self.cgroup.as_ref().map(Cgroup::path);
        lab::drive(from, cgroup, measurement.workload, &targets, length)
    }
}

type Samples = turns::Samples<Measurement, Peer>;

/// Runs it. Says whether every bar held.
pub(crate) fn run(mut options: Options, programs: &Programs) -> Result<bool> {
    agents::own_mounts()?;
    let machine = Machine::describe();
    if options.quick {
        options.services.truncate(1);
        options.turns.shorten();
    }
    let mut report = Report::new("service", machine);
    let runtime = Arc::new(
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?,
    );
    let stages = set_up(&options, programs, &runtime, &mut report)?;
    let samples = measure(&options, &stages, &mut report);
    drop(stages);
    tabulate(&options, &samples, &mut report);
    print(&report.table());
    if let Some(path) = &options.json {
        report.write(path)?;
    }
    Ok(report.bars.iter().all(|bar| bar.held))
}

#[allow(clippy::print_stdout, reason = "the report goes to standard output")]
pub(crate) fn print(text: &str) {
    print!("{text}");
}

fn set_up(
    options: &Options,
    programs: &Programs,
    runtime: &Arc<Runtime>,
    report: &mut Report,
) -> Result<Vec<Stage>> {
    let wanted = |kind: Kind| {
        kind == Kind::Direct
            || options.peers.is_empty()
            || options.peers.iter().any(|p| p == kind.name())
    };
    let mut stages = Vec::new();
    for kind in Kind::ALL.into_iter().filter(|kind| wanted(*kind)) {
        let sizes = if kind == Kind::Direct {
            &[0][..]
        } else {
            &options.services
        };
        for services in sizes {
            let peer = Peer {
                kind,
                services: *services,
            };
            eprintln!("setting up {}", peer.name());
            match stage(peer, programs, runtime, options) {
                Ok(stage) => stages.push(stage),
                // Without its limit there is nothing to compare with.
                Err(error) if peer == DIRECT => return Err(error),
                Err(error) => report.skipped.push(Skipped {
                    name: peer.name(),
                    reason: format!("{error:#}"),
                }),
            }
        }
    }
    Ok(stages)
}

fn stage(
    peer: Peer,
    programs: &Programs,
    runtime: &Arc<Runtime>,
    options: &Options,
) -> Result<Stage> {
    let realtime = options.turns.realtime;
    let plain = || -> Result<(Lab, Fleet)> {
        let lab = Lab::plain(realtime)?;
        let fleet = Fleet::new(peer.services, ENDPOINTS, lab.same.address, lab.far.address);
        Ok((lab, fleet))
    };
    let mut cgroup = None;
    let (lab, fleet, agents) = match peer.kind {
        Kind::Direct => (Lab::plain(realtime)?, None, None),
        Kind::Weir | Kind::WeirSocket => {
            let extra = if peer.kind == Kind::WeirSocket {
                agents::at_sockets(cgroup.insert(Cgroup::new()?).path())
            } else {
                agents::PER_PACKET.to_owned()
            };
            let (lab, agents, fleet) = agents::weir_lab(
                programs,
                runtime,
                peer.services,
                ENDPOINTS,
                &extra,
                realtime,
            )?;
            (lab, Some(fleet), Some(agents))
        }
        Kind::Iptables => {
            let (lab, fleet) = plain()?;
            for node in &lab.underlay.nodes {
                load_iptables(node, &fleet, options.iptables_restore.as_deref())?;
            }
            (lab, Some(fleet), None)
        }
        Kind::Nftables => {
            let (lab, fleet) = plain()?;
            for (node, address) in lab.underlay.nodes.iter().zip(NODES) {
                load_nftables(node, &fleet, address)?;
            }
            (lab, Some(fleet), None)
        }
    };
    Ok(Stage {
        peer,
        lab,
        fleet,
        _agents: agents,
        cgroup,
    })
}

/// The fastest `iptables-restore` that is there.
pub(crate) fn iptables_restore() -> Result<&'static str> {
    ["iptables-legacy-restore", "iptables-restore"]
        .into_iter()
        .find(|program| {
            Command::new(program)
                .arg("--version")
                .output()
                .is_ok_and(|output| output.status.success())
        })
        .context("iptables-restore is missing (Debian package iptables)")
}

/// Loads the rules by `restore`, or the fastest program that is there.
pub(crate) fn load_iptables(
    namespace: &Namespace,
    fleet: &Fleet,
    restore: Option<&Path>,
) -> Result<()> {
    let mut command = match restore {
        Some(restore) => Command::new(restore),
        None => Command::new(iptables_restore()?),
    };
    namespace.feed(&mut command, &ruleset::iptables(fleet))
}

pub(crate) fn load_nftables(namespace: &Namespace, fleet: &Fleet, node: Ipv4Addr) -> Result<()> {
    namespace
        .feed(
            Command::new("nft").args(["-f", "-"]),
            &ruleset::nftables(fleet, node),
        )
        .context("load the rules (Debian package nftables)")
}

/// Every measurement of every peer.
fn measure(options: &Options, stages: &[Stage], report: &mut Report) -> Samples {
    let chosen = |measurement: &Measurement| {
        let name = measurement.name();
        options.only.is_empty() || options.only.iter().any(|part| name.contains(part.as_str()))
    };
    let measurements: Vec<Measurement> = Measurement::all().into_iter().filter(chosen).collect();
    let stages: BTreeMap<Peer, &Stage> = stages.iter().map(|stage| (stage.peer, stage)).collect();
    let peers = |measurement: Measurement| {
        let all = stages.keys().copied();
        all.filter(|peer| peer.takes_part_in(measurement.route))
            .collect()
    };
    let run = |measurement, peer: Peer, length| stages[&peer].measure(measurement, length);
    let title =
        |measurement: Measurement, peer: Peer| format!("{} {}", measurement.name(), peer.name());
    options
        .turns
        .measure(&measurements, peers, run, title, report)
}

fn tabulate(options: &Options, samples: &Samples, report: &mut Report) {
    for measurement in Measurement::all() {
        for (name, unit, of) in measurement.figures() {
            let values = |peer: Peer| turns::values(samples, measurement, peer, *of);
            let peers = samples
                .keys()
                .filter(|(m, _)| *m == measurement)
                .map(|(_, peer)| *peer);
            for peer in peers {
                let Some(own) = values(peer) else { continue };
                let title = format!("{}/{name} {}", measurement.name(), peer.name());
                let Some(mut row) = Row::new(title, *unit, &own) else {
                    continue;
                };
                if matches!(peer.kind, Kind::Weir | Kind::WeirSocket) {
                    let others = [Kind::Iptables, Kind::Nftables].map(|kind| Peer {
                        kind,
                        services: peer.services,
                    });
                    for other in [DIRECT].into_iter().chain(others) {
                        let ratio =
                            values(other).and_then(|theirs| paired_ratio(*unit, &own, &theirs));
                        if let Some(ratio) = ratio {
                            row.vs.insert(other.kind.name().into(), ratio);
                        }
                    }
                }
                report.rows.push(row);
            }
        }
    }
    bars(options, samples, report);
}

/// The limits that the project has set itself.
fn bars(options: &Options, samples: &Samples, report: &mut Report) {
    const OF_DIRECT: f64 = 0.97;
    const GROWTH: f64 = 0.97;
    let smallest = options.services.iter().copied().min().unwrap_or(0);
    let largest = options.services.iter().copied().max().unwrap_or(0);
    let ratio = |measurement: Measurement, ours: Peer, theirs: Peer| -> Option<f64> {
        // The first figure of a measurement but for kept connections, where it is the median of an answer.
        let figures = measurement.figures();
        let (_, unit, of) = figures.get(1).or(figures.first())?;
        let values = |peer| turns::values(samples, measurement, peer, *of);
        paired_ratio(*unit, &values(ours)?, &values(theirs)?)
    };
    let mut add = |limit: f64, measurement: Measurement, ours: Peer, theirs: Peer| {
        if let Some(measured) = ratio(measurement, ours, theirs) {
            let name = format!(
                "{}: {} against {}",
                measurement.name(),
                ours.name(),
                theirs.name()
            );
            report.bars.push(Bar::at_least(name, limit, measured));
        }
    };
    for measurement in Measurement::all() {
        let short = measurement.workload == Workload::ShortTcp;
        for services in &options.services {
            let peer = |kind| Peer {
                kind,
                services: *services,
            };
            add(OF_DIRECT, measurement, peer(Kind::WeirSocket), DIRECT);
            if !short {
                add(OF_DIRECT, measurement, peer(Kind::Weir), DIRECT);
                continue;
            }
            let limits = match services {
                10 => [1.2, 1.2],
                10_000 => [5.0, 1.15],
                _ => continue,
            };
            for (limit, other) in limits.into_iter().zip([Kind::Iptables, Kind::Nftables]) {
                add(limit, measurement, peer(Kind::Weir), peer(other));
            }
        }
        if smallest != largest {
            let weir = |services| Peer {
                kind: Kind::Weir,
                services,
            };
            add(GROWTH, measurement, weir(largest), weir(smallest));
        }
    }
}
