//! `weir-bench`: measurements side by side. People use `cargo xtask bench NAME`.

mod agents;
mod cni;
mod feed;
mod fleet;
mod lab;
mod load;
mod policy;
mod program;
mod route;
mod ruleset;
mod service;
mod turns;

use std::net::SocketAddrV4;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};

use agents::Programs;
use load::client::{self, Workload};

/// Measures what the project promises, against direct paths and against what a user would have otherwise.
#[derive(Debug, Parser)]
#[command(name = "weir-bench", disable_version_flag = true)]
struct Cli {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// Traffic through services: connections, latency, throughput (root).
    Service {
        #[command(flatten)]
        programs: ProgramPaths,
        #[command(flatten)]
        options: service::Options,
    },
    /// Programming of services: cold start, one change, memory (root).
    Program {
        #[command(flatten)]
        programs: ProgramPaths,
        #[command(flatten)]
        options: program::Options,
    },
    /// What policies cost: packets, compiling, one change, memory (root).
    Policy {
        #[command(flatten)]
        programs: ProgramPaths,
        #[command(flatten)]
        options: policy::Options,
    },
    /// Pods on other nodes: traffic, and agents that learn of nodes (root).
    Route {
        #[command(flatten)]
        programs: ProgramPaths,
        #[command(flatten)]
        options: route::Options,
    },
    /// Connecting pods: one after the other, many at once, on a full node (root).
    Cni {
        #[command(flatten)]
        programs: ProgramPaths,
        #[command(flatten)]
        options: cni::Options,
    },
    /// The answering end of a measurement.
    #[command(hide = true)]
    Serve {
        #[arg(long)]
        cpu: usize,
        #[arg(long)]
        first: u16,
        #[arg(long)]
        count: u16,
    },
    /// The asking end of a measurement.
    #[command(hide = true)]
    Drive {
        #[arg(long)]
        cpu: usize,
        #[arg(long)]
        warm_up_ms: u64,
        #[arg(long)]
        time_ms: u64,
        #[arg(long, value_enum)]
        workload: Workload,
        #[arg(long)]
        cgroup: Option<PathBuf>,
        targets: Vec<SocketAddrV4>,
    },
}

#[derive(Debug, Args)]
struct ProgramPaths {
    /// The weir-agent binary.
    #[arg(long)]
    agent: PathBuf,
    /// The weir-cni binary.
    #[arg(long)]
    cni: PathBuf,
}

impl From<ProgramPaths> for Programs {
    fn from(paths: ProgramPaths) -> Self {
        Self {
            agent: paths.agent,
            cni: paths.cni,
        }
    }
}

fn main() -> ExitCode {
    match run(Cli::parse().bench) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Says whether every limit held.
fn run(bench: Bench) -> Result<bool> {
    match bench {
        Bench::Service { programs, options } => service::run(options, &programs.into()),
        Bench::Program { programs, options } => program::run(options, &programs.into()),
        Bench::Policy { programs, options } => policy::run(options, &programs.into()),
        Bench::Route { programs, options } => route::run(options, &programs.into()),
        Bench::Cni { programs, options } => cni::run(options, &programs.into()),
        Bench::Serve { cpu, first, count } => {
            load::pin(cpu)?;
            load::server::serve(first, count)?;
            Ok(true)
        }
        Bench::Drive {
            cpu,
            warm_up_ms,
            time_ms,
            workload,
            cgroup,
            targets,
        } => {
            if let Some(cgroup) = cgroup {
                lab::join_cgroup(&cgroup)?;
            }
            load::pin(cpu)?;
            let (warm_up, time) = (
                Duration::from_millis(warm_up_ms),
                Duration::from_millis(time_ms),
            );
            let seen = client::drive(workload, &targets, warm_up, time)?;
            serde_json::to_writer(std::io::stdout(), &seen)?;
            Ok(true)
        }
    }
}
