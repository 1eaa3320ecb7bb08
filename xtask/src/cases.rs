//! `cargo xtask cases`: builds what a kind of cases needs and hands the folder to the runner (`weir-cases`).

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::{Args, ValueEnum};

use crate::artifacts::{self, Profile};
use crate::install::{self, Purpose};
use crate::repo::Repo;

/// A folder of case files and how to run it.
#[derive(Debug, Args)]
pub(crate) struct Cases {
    #[arg(value_enum)]
    kind: Kind,
    /// Folder of case files.
    dir: PathBuf,
    /// Run only cases whose name contains this.
    #[arg(long)]
    only: Option<String>,
    /// Also run cases that take half a minute or more.
    #[arg(long)]
    slow: bool,
    /// API, Service or policy cases run at once; the runner has a default for each.
    #[arg(long)]
    jobs: Option<usize>,
    /// Service and policy cases: run on the model, without root, instead of agents and namespaces.
    #[arg(long, conflicts_with = "kernel")]
    model: bool,
    /// Service and policy cases: run on agents and namespaces (root); the default (of policy cases for root).
    #[arg(long)]
    kernel: bool,
    /// Service and policy cases: also write the results to this file, as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Service cases: translate at the socket what pods and nodes send, instead of each packet.
    #[arg(long)]
    sockets: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// kubectl and raw HTTP against a control plane that is started for the run.
    Api,
    /// Questions put to the zone and message code of the agent.
    Dns,
    /// NetworkPolicy and ClusterNetworkPolicy: on agents and namespaces (root), or on the model.
    Policy,
    /// Agents, CNI plugin and sockets on network namespaces (root).
    Service,
}

/// Runs the folder; says whether every case that ran passed.
pub(crate) fn run(repo: &Repo, cases: &Cases) -> Result<bool> {
    let dir = std::fs::canonicalize(&cases.dir)
        .with_context(|| format!("find the case folder {}", cases.dir.display()))?;
    install::ensure(repo, &[Purpose::Ebpf, Purpose::Cluster])?;
    artifacts::ebpf(repo)?;
    let programs = artifacts::product(repo, Profile::Dev)?;
    let runner = artifacts::dev_program(repo, "weir-tests", "weir-cases")?;
    let mut command = std::process::Command::new(&runner);
    match cases.kind {
        Kind::Api => {
            let kubectl =
                install::kubectl(repo).context("kubectl is missing: run `cargo xtask install`")?;
            command.arg("api").arg(&dir);
            command.arg("--kubectl").arg(kubectl);
            command.arg("--control").arg(programs.join("weir-control"));
        }
        Kind::Dns => {
            command.arg("dns").arg(&dir);
        }
        Kind::Policy => {
            command.arg("policy").arg(&dir);
            command.arg("--agent").arg(programs.join("weir-agent"));
            command.arg("--cni").arg(programs.join("weir-cni"));
            if cases.model {
                command.arg("--model");
            }
            if cases.kernel {
                command.arg("--kernel");
            }
            if let Some(json) = &cases.json {
                command.arg("--json").arg(json);
            }
        }
        Kind::Service => {
            command.arg("service").arg(&dir);
            if cases.model {
                command.arg("--model");
            } else {
                command.arg("--agent").arg(programs.join("weir-agent"));
                command.arg("--cni").arg(programs.join("weir-cni"));
            }
            if let Some(json) = &cases.json {
                command.arg("--json").arg(json);
            }
            if cases.sockets {
                command.arg("--sockets");
            }
        }
    }
    if let Some(only) = &cases.only {
        command.args(["--only", only]);
    }
    if cases.slow && !matches!(cases.kind, Kind::Dns | Kind::Policy) {
        command.arg("--slow");
    }
    if let Some(jobs) = cases.jobs.filter(|_| cases.kind != Kind::Dns) {
        command.args(["--jobs", &jobs.to_string()]);
    }
    let status = command
        .status()
        .with_context(|| format!("run {}", runner.display()))?;
    Ok(status.success())
}
