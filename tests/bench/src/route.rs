//! `bench route`: pods on other nodes, reached by routes alone. How fast one pod reaches another across nodes beside plain
//! routing of the same shape, and how long an agent takes to know many nodes, and one that changes among them.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;
use control_api::v1::{Node, Object, object};
use tokio::runtime::Runtime;
use weir_bench::report::{Bar, Machine, Report, Row, Unit, paired_ratio, quantile};

use crate::agents::{self, Agent, Programs};
use crate::feed::Feed;
use crate::fleet::{self, Fleet, SERVER_PORT};
use crate::lab::{self, Lab, SERVER_PORTS, Underlay};
use crate::load::client::{Seen, Workload};
use crate::service;
use crate::turns::{self, Turns};

const NODE: &str = "n1";
/// How long an agent may take to apply anything.
const PATIENCE: Duration = Duration::from_secs(120);
/// Between two changes: longer than applying one takes, so that they are not merged.
const PAUSE: Duration = Duration::from_millis(20);
/// After so many routes the agent looks once more at what it has been told that it changed itself.
const SETTLE: Duration = Duration::from_secs(2);
/// First address of peers, all of them on the segment of the node, and their pods' ranges.
const FIRST_PEER: u32 = u32::from_be_bytes([198, 18, 0, 2]);
const SEGMENT: &str = "198.18.0.1/15";
const FIRST_RANGE: u32 = u32::from_be_bytes([10, 128, 0, 0]);

const OF_PLAIN: f64 = 0.97;
const COLD_LIMIT_S: f64 = 1.0;
const CHANGE_LIMIT_S: f64 = 0.005;
const PLAIN: &str = "direct";
const WEIR: &str = "weir";

/// Options of `bench route`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Nodes that an agent gets to know at once.
    #[arg(long, default_value_t = 5_000)]
    nodes: u32,
    #[command(flatten)]
    turns: Turns,
    /// Changes of one node, in each round.
    #[arg(long, default_value_t = 50)]
    changes: u32,
    /// Few nodes and rounds: to see that it works.
    #[arg(long)]
    quick: bool,
    /// Write the report as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Runs it. Says whether every bar held.
pub(crate) fn run(mut options: Options, programs: &Programs) -> Result<bool> {
    agents::own_mounts()?;
    if options.quick {
        options.nodes = options.nodes.min(500);
        options.turns.shorten();
        options.changes = options.changes.min(10);
    }
    let mut report = Report::new("route", Machine::describe());
    let runtime = Arc::new(
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?,
    );
    traffic(&options, programs, &runtime, &mut report)?;
    nodes(&options, programs, &runtime, &mut report)?;
    service::print(&report.table());
    if let Some(path) = &options.json {
        report.write(path)?;
    }
    Ok(report.bars.iter().all(|bar| bar.held))
}

/// A figure of a workload: name, unit, and where it is in what was seen.
type Figure = (&'static str, Workload, Unit, fn(&Seen) -> f64);

const FIGURES: [Figure; 3] = [
    ("stream", Workload::Stream, Unit::BytesPerSecond, |seen| {
        seen.rate
    }),
    ("request/p50", Workload::Request, Unit::Seconds, |seen| {
        seen.p50_s
    }),
    ("short_tcp", Workload::ShortTcp, Unit::PerSecond, |seen| {
        seen.rate
    }),
];

/// From a pod to one on the other node, by its own address.
fn traffic(
    options: &Options,
    programs: &Programs,
    runtime: &Arc<Runtime>,
    report: &mut Report,
) -> Result<()> {
    let realtime = options.turns.realtime;
    let (weir, _agents, _) =
        agents::weir_lab(programs, runtime, 0, 0, agents::PER_PACKET, realtime)?;
    let plain = Lab::plain(realtime)?;
    let samples = options.turns.measure(
        &FIGURES.map(|(_, workload, ..)| workload),
        |_| vec![PLAIN, WEIR],
        |workload, peer, length| {
            let lab = if peer == WEIR { &weir } else { &plain };
            let target = |port| SocketAddrV4::new(lab.far.address, SERVER_PORT + port);
            let targets: Vec<_> = (0..SERVER_PORTS).map(target).collect();
            lab::drive(&lab.client.namespace, None, workload, &targets, length)
        },
        |workload, peer| format!("cross_node/{workload:?} {peer}"),
        report,
    );
    for (name, workload, unit, of) in FIGURES {
        let of = |peer| turns::values(&samples, workload, peer, of).unwrap_or_default();
        for peer in [PLAIN, WEIR] {
            let title = format!("cross_node/{name} {peer}");
            let Some(mut row) = Row::new(title, unit, &of(peer)) else {
                continue;
            };
            let ratio = paired_ratio(unit, &of(peer), &of(PLAIN));
            if let Some(ratio) = ratio.filter(|_| peer == WEIR) {
                row.vs.insert(PLAIN.to_owned(), ratio);
                let bar = format!("cross_node/{name}: {WEIR} against {PLAIN}");
                report.bars.push(Bar::at_least(bar, OF_PLAIN, ratio));
            }
            report.rows.push(row);
        }
    }
    Ok(())
}

/// Seconds from the feed to the acknowledgement: all nodes at once, then one after another that gets another range.
fn nodes(
    options: &Options,
    programs: &Programs,
    runtime: &Arc<Runtime>,
    report: &mut Report,
) -> Result<()> {
    let (mut cold, mut median, mut worst) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..options.turns.rounds {
        eprintln!("nodes, round {} of {}", round + 1, options.turns.rounds);
        let underlay = Underlay::new()?;
        let segment = format!("address add {SEGMENT} dev eth0");
        underlay.nodes[0].feed(Command::new("ip").args(["-batch", "-"]), &segment)?;
        let none = Fleet {
            services: Vec::new(),
        };
        let feed = Feed::new(Arc::clone(runtime), none.objects(&agents::nodes()))?;
        let agent = Agent::start(programs, &underlay.nodes[0], 0, &feed, agents::PER_PACKET)?;
        let applied = |revision| {
            feed.applied(&[NODE], revision, PATIENCE)
                .with_context(|| agent.log())
        };
        applied(1)?;
        let all = (0..options.nodes).map(|number| peer(number, number));
        let (revision, sent) = feed.change(all.collect());
        cold.push((applied(revision)? - sent).as_secs_f64());
        std::thread::sleep(SETTLE);
        let mut taken = Vec::new();
        for change in 0..options.changes {
            let number = change.wrapping_mul(7_919) % options.nodes;
            // A range that nobody else has.
            let (revision, sent) = feed.change(vec![peer(number, options.nodes + change)]);
            taken.push((applied(revision)? - sent).as_secs_f64());
            std::thread::sleep(PAUSE);
        }
        median.extend(quantile(&taken, 0.5));
        worst.extend(quantile(&taken, 0.99));
    }
    let count = options.nodes;
    for (name, values, limit) in [
        ("cold", &cold, COLD_LIMIT_S),
        ("one_change/p50", &median, CHANGE_LIMIT_S),
        ("one_change/p99", &worst, f64::INFINITY),
    ] {
        let title = format!("nodes/{name} {WEIR}/{count}");
        let Some(row) = Row::new(title, Unit::Seconds, values) else {
            continue;
        };
        if limit.is_finite() {
            let bar = format!("nodes/{name} with {count} nodes");
            report.bars.push(Bar::at_most(bar, limit, row.value));
        }
        report.rows.push(row);
    }
    Ok(())
}

/// Node `number`, with the pods of range `range`.
fn peer(number: u32, range: u32) -> Object {
    let pods = Ipv4Addr::from(FIRST_RANGE + (range << 8));
    fleet::into_object(object::Kind::Node(Node {
        name: format!("peer-{number}"),
        internal_ips: vec![Ipv4Addr::from(FIRST_PEER + number).to_string()],
        pod_cidrs: vec![format!("{pods}/24")],
        ready: true,
        ..Node::default()
    }))
}
