//! `bench policy`: what policies cost. Packets with no rule, some and many on their pods; a node's share of a large
//! cluster, compiled and programmed; a change of one pod's labels, from the object to the kernel; all beside rule sets of
//! iptables with ipset, and of nftables, for the same policies.

mod cluster;
mod large;
mod ruleset;
mod scale;
mod traffic;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use clap::Args;

use crate::agents::{self, Programs};
use crate::service;
use crate::turns::Turns;
use weir_bench::report::{Machine, Report};

/// Options of `bench policy`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Numbers of rules on a pod, beside none.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 100, 1_000])]
    rules: Vec<usize>,
    #[command(flatten)]
    turns: Turns,
    /// Changes of one pod's labels.
    #[arg(long, default_value_t = 500)]
    changes: usize,
    /// Only this part.
    #[arg(long, value_enum)]
    only: Option<Part>,
    /// Do not measure rule sets.
    #[arg(long)]
    only_weir: bool,
    /// Few rules, a small cluster, few and short rounds: to see that it works.
    #[arg(long)]
    quick: bool,
    /// Write the report as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// What packets pay.
    Traffic,
    /// Compiling, programming, changes and memory in a large cluster.
    Scale,
}

impl Options {
    /// How long an agent is left alone before its memory is looked at.
    fn settle(&self) -> Duration {
        if self.quick {
            Duration::from_secs(1)
        } else {
            Duration::from_secs(8)
        }
    }

    /// Changes after which real packets have to agree.
    fn probes(&self) -> usize {
        self.changes.min(20)
    }
}

/// Runs it. Says whether every bar held.
pub(crate) fn run(mut options: Options, programs: &Programs) -> Result<bool> {
    agents::own_mounts()?;
    if options.quick {
        options.rules = vec![100];
        options.turns.shorten();
        options.changes = options.changes.min(20);
    }
    let mut report = Report::new("policy", Machine::describe());
    let runtime = Arc::new(
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?,
    );
    if options.only != Some(Part::Scale) {
        traffic::run(&options, programs, &runtime, &mut report)?;
    }
    if options.only != Some(Part::Traffic) {
        scale::run(&options, programs, &runtime, &mut report)?;
    }
    service::print(&report.table());
    if let Some(path) = &options.json {
        report.write(path)?;
    }
    Ok(report.bars.iter().all(|bar| bar.held))
}
