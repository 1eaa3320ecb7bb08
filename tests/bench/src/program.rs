//! `bench program`: how long a node's agent takes to program many services, and one change among them, and how much
//! memory that needs; beside `iptables-restore` and `nft -f` of the same services.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use control_api::v1::object;
use tokio::runtime::Runtime;

use crate::agents::{self, Agent, Programs};
use crate::feed::Feed;
use crate::fleet::{self, Fleet};
use crate::lab::{NODES, Namespace, Underlay};
use crate::{ruleset, service};
use weir_bench::report::{Bar, Machine, Report, Row, Skipped, Unit, paired_ratio, quantile};

const ENDPOINTS: usize = 10;
const NODE: &str = "n1";
/// How long an agent may take to apply anything.
const PATIENCE: Duration = Duration::from_secs(120);
/// Between two changes: longer than applying one takes, so that they are not merged.
const PAUSE: Duration = Duration::from_millis(10);
/// After a start the agent writes its state to disk; what it needed for that is given back by then.
const SETTLE: Duration = Duration::from_secs(8);

const COLD_LIMIT_S: f64 = 1.0;
const CHANGE_LIMIT_S: f64 = 0.005;
const LARGE: usize = 10_000;
const LARGE_LIMIT_BYTES: f64 = 150e6;
const SMALL: usize = 10;
const SMALL_LIMIT_BYTES: f64 = 40e6;

/// Options of `bench program`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Numbers of services, with ten endpoints each.
    #[arg(long, value_delimiter = ',', default_values_t = [SMALL, LARGE])]
    services: Vec<usize>,
    /// Starts of each peer.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Changes of one endpoint, after each start of the agent.
    #[arg(long, default_value_t = 100)]
    changes: usize,
    /// Do not measure rule sets.
    #[arg(long)]
    only_weir: bool,
    /// Few services and rounds: to see that it works.
    #[arg(long)]
    quick: bool,
    /// Write the report as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Figure {
    ColdStart,
    ColdStartCpu,
    ChangeP50,
    ChangeP99,
    Resident,
    Maps,
    Memory,
}

impl Figure {
    const ALL: [Self; 7] = [
        Self::ColdStart,
        Self::ColdStartCpu,
        Self::ChangeP50,
        Self::ChangeP99,
        Self::Resident,
        Self::Maps,
        Self::Memory,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::ColdStart => "cold_start",
            Self::ColdStartCpu => "cold_start_cpu",
            Self::ChangeP50 => "one_change/p50",
            Self::ChangeP99 => "one_change/p99",
            Self::Resident => "resident",
            Self::Maps => "maps",
            Self::Memory => "resident_and_maps",
        }
    }

    fn unit(self) -> Unit {
        match self {
            Self::ColdStart | Self::ColdStartCpu | Self::ChangeP50 | Self::ChangeP99 => {
                Unit::Seconds
            }
            Self::Resident | Self::Maps | Self::Memory => Unit::Bytes,
        }
    }
}

const WEIR: &str = "weir";
const IPTABLES: &str = "iptables";
const NFTABLES: &str = "nftables";

/// By figure, number of services and peer: one sample per round.
type Samples = BTreeMap<(usize, Figure, &'static str), Vec<f64>>;

/// Runs it. Says whether every bar held.
pub(crate) fn run(mut options: Options, programs: &Programs) -> Result<bool> {
    agents::own_mounts()?;
    if options.quick {
        options.services = vec![SMALL, 1_000];
        options.rounds = options.rounds.min(2);
        options.changes = options.changes.min(20);
    }
    let mut report = Report::new("program", Machine::describe());
    let runtime = Arc::new(
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?,
    );
    let mut samples = Samples::new();
    for services in &options.services {
        let fleet = Fleet::new(
            *services,
            ENDPOINTS,
            [10, 244, 1, 3].into(),
            [10, 244, 2, 3].into(),
        );
        for round in 0..options.rounds {
            eprintln!(
                "{services} services, round {} of {}",
                round + 1,
                options.rounds
            );
            weir_round(&options, programs, &runtime, &fleet, &mut samples)?;
            if options.only_weir {
                continue;
            }
            for peer in [IPTABLES, NFTABLES] {
                if let Err(error) = rules_round(&options, peer, &fleet, &mut samples) {
                    report.skipped.push(Skipped {
                        name: format!("{peer}/{services}"),
                        reason: format!("{error:#}"),
                    });
                }
            }
        }
    }
    tabulate(&options, &samples, &mut report);
    service::print(&report.table());
    if let Some(path) = &options.json {
        report.write(path)?;
    }
    Ok(report.bars.iter().all(|bar| bar.held))
}

fn weir_round(
    options: &Options,
    programs: &Programs,
    runtime: &Arc<Runtime>,
    fleet: &Fleet,
    samples: &mut Samples,
) -> Result<()> {
    let underlay = Underlay::new()?;
    let feed = Feed::new(Arc::clone(runtime), fleet.objects(&agents::nodes()))?;
    let started = Instant::now();
    let agent = Agent::start(programs, &underlay.nodes[0], 0, &feed, agents::PER_PACKET)?;
    let done = feed
        .applied(&[NODE], 1, PATIENCE)
        .with_context(|| agent.log())?;
    let cpu = cpu_seconds(agent.pid())?;
    let mut add = |figure, value| {
        samples
            .entry((fleet.services.len(), figure, WEIR))
            .or_default()
            .push(value);
    };
    add(Figure::ColdStart, (done - started).as_secs_f64());
    add(Figure::ColdStartCpu, cpu);
    std::thread::sleep(SETTLE);
    let changes = changes(options, &feed, fleet)?;
    add(Figure::ChangeP50, quantile(&changes, 0.5).unwrap_or(0.0));
    add(Figure::ChangeP99, quantile(&changes, 0.99).unwrap_or(0.0));
    let memory = Memory::of(agent.pid())?;
    add(Figure::Resident, memory.resident_bytes);
    add(Figure::Maps, memory.map_bytes);
    add(Figure::Memory, memory.resident_bytes + memory.map_bytes);
    Ok(())
}

/// Takes an endpoint out of one service after another, and puts it back; seconds from the feed to the acknowledgement.
fn changes(options: &Options, feed: &Feed, fleet: &Fleet) -> Result<Vec<f64>> {
    let mut taken = Vec::new();
    for change in 0..options.changes {
        // Every other change undoes the one before.
        let mut service = fleet.services[(change / 2 * 7_919) % fleet.services.len()].clone();
        let backend = service.backends.pop();
        if change % 2 == 1 {
            service.backends.extend(backend);
        }
        // A service with all ports of one pod has a slice for each of them.
        let slices = fleet::slices(&service);
        let slice = slices.into_iter().next_back().context("a slice")?;
        let (revision, sent) =
            feed.change(vec![fleet::into_object(object::Kind::EndpointSlice(slice))]);
        let done = feed.applied(&[NODE], revision, PATIENCE)?;
        taken.push((done - sent).as_secs_f64());
        std::thread::sleep(PAUSE);
    }
    Ok(taken)
}

fn rules_round(
    options: &Options,
    peer: &'static str,
    fleet: &Fleet,
    samples: &mut Samples,
) -> Result<()> {
    let namespace = Namespace::new()?;
    let started = Instant::now();
    match peer {
        IPTABLES => service::load_iptables(&namespace, fleet, None)?,
        _ => service::load_nftables(&namespace, fleet, NODES[0])?,
    }
    let mut add = |figure, value| {
        samples
            .entry((fleet.services.len(), figure, peer))
            .or_default()
            .push(value);
    };
    add(Figure::ColdStart, started.elapsed().as_secs_f64());
    let mut taken = Vec::new();
    // A change costs these peers up to seconds: a few are enough for their median.
    for change in 0..options.changes.min(10) {
        let index = (change / 2 * 7_919) % fleet.services.len();
        let mut changed = fleet.clone();
        if change % 2 == 0 {
            changed.services[index].backends.pop();
        }
        let started = Instant::now();
        match peer {
            IPTABLES => namespace.feed(
                Command::new(service::iptables_restore()?).arg("--noflush"),
                &ruleset::iptables_change(&changed, index),
            )?,
            _ => namespace.feed(
                Command::new("nft").args(["-f", "-"]),
                &ruleset::nftables_change(&changed, index),
            )?,
        }
        taken.push(started.elapsed().as_secs_f64());
    }
    add(Figure::ChangeP50, quantile(&taken, 0.5).unwrap_or(0.0));
    add(Figure::ChangeP99, quantile(&taken, 0.99).unwrap_or(0.0));
    Ok(())
}

/// Processor time that a process has used, in itself and in the kernel: what other work on the machine changes least.
fn cpu_seconds(pid: u32) -> Result<f64> {
    /// Places of utime and stime after the program's name, which may hold blanks (proc(5)).
    const TIMES: std::ops::RangeInclusive<usize> = 11..=12;
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, fields) = text.rsplit_once(')').context("a program name in stat")?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let times = fields.get(TIMES).context("processor times in stat")?;
    let ticks: f64 = times
        .iter()
        .filter_map(|time| time.parse::<f64>().ok())
        .sum();
    let per_second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?.unwrap_or(100);
    Ok(ticks / per_second as f64)
}

/// What an agent holds.
pub(crate) struct Memory {
    pub(crate) resident_bytes: f64,
    pub(crate) map_bytes: f64,
}

impl Memory {
    /// Resident set of a process, and the memory of every eBPF map that it has open, each counted once.
    pub(crate) fn of(pid: u32) -> Result<Self> {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let resident = field(&status, "VmRSS:").context("a resident set size")? * 1024.0;
        let mut maps = BTreeMap::new();
        for entry in std::fs::read_dir(format!("/proc/{pid}/fdinfo"))? {
            // Descriptors come and go.
            let Ok(text) = std::fs::read_to_string(entry?.path()) else {
                continue;
            };
            if let (Some(bytes), Some(id)) = (field(&text, "memlock:"), field(&text, "map_id:")) {
                maps.insert(id.to_bits(), bytes);
            }
        }
        ensure!(!maps.is_empty(), "process {pid} has no eBPF map open");
        Ok(Self {
            resident_bytes: resident,
            map_bytes: maps.values().sum(),
        })
    }
}

fn field(text: &str, name: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

fn tabulate(options: &Options, samples: &Samples, report: &mut Report) {
    for figure in Figure::ALL {
        for services in &options.services {
            for peer in [WEIR, IPTABLES, NFTABLES] {
                let Some(own) = samples.get(&(*services, figure, peer)) else {
                    continue;
                };
                let title = format!("{} {peer}/{services}", figure.name());
                let Some(mut row) = Row::new(title, figure.unit(), own) else {
                    continue;
                };
                if peer == WEIR {
                    for other in [IPTABLES, NFTABLES] {
                        let theirs = samples.get(&(*services, figure, other));
                        let ratio =
                            theirs.and_then(|theirs| paired_ratio(figure.unit(), own, theirs));
                        row.vs.extend(ratio.map(|ratio| (other.to_owned(), ratio)));
                    }
                }
                report.bars.extend(bar(figure, *services, peer, row.value));
                report.rows.push(row);
            }
        }
    }
}

/// The limit of a figure, where there is one.
fn bar(figure: Figure, services: usize, peer: &str, measured: f64) -> Option<Bar> {
    let limit = match (figure, services) {
        (Figure::ColdStart, LARGE) => COLD_LIMIT_S,
        (Figure::ChangeP99, LARGE) => CHANGE_LIMIT_S,
        (Figure::Memory, LARGE) => LARGE_LIMIT_BYTES,
        (Figure::Memory, SMALL) => SMALL_LIMIT_BYTES,
        _ => return None,
    };
    let name = format!("{} with {services} services", figure.name());
    (peer == WEIR).then(|| Bar::at_most(name, limit, measured))
}
