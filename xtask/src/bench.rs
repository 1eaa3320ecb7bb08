//! `cargo xtask bench`: builds optimised programs and has them measured.

use std::ffi::OsString;
use std::process::Command;

use anyhow::{Context as _, Result};
use clap::Subcommand;

use crate::install::{self, Purpose};
use crate::repo::Repo;
use crate::{artifacts, cluster, test};

/// What is measured.
#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// The cluster tier on release programs: time to the first answer, spread, losses while agents die, idle memory.
    Cluster,
    /// Traffic through services beside direct paths, iptables and nftables (root).
    #[command(disable_help_flag = true)]
    Service(Options),
    /// Programming of services, one change, memory; beside iptables-restore and nft (root).
    #[command(disable_help_flag = true)]
    Program(Options),
    /// What policies cost, packets and programming; beside rules of iptables with ipset, and of nftables (root).
    #[command(disable_help_flag = true)]
    Policy(Options),
    /// Pods on other nodes beside plain routing; an agent that learns of thousands of nodes, and of one (root).
    #[command(disable_help_flag = true)]
    Route(Options),
    /// Connecting pods, beside the reference plugins bridge and ptp with host-local (root).
    #[command(disable_help_flag = true)]
    Cni(Options),
    /// What a packet costs on each path, by test runs of the programs (root).
    #[command(disable_help_flag = true)]
    Packet(Options),
}

/// Handed on to `weir-bench`, which explains them with `--help`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    options: Vec<OsString>,
}

/// Runs it; says whether every limit held.
pub(crate) fn run(repo: &Repo, what: &Bench) -> Result<bool> {
    match what {
        Bench::Cluster => test::bench_cluster(repo),
        Bench::Service(options) => measure(repo, "service", options),
        Bench::Program(options) => measure(repo, "program", options),
        Bench::Policy(options) => measure(repo, "policy", options),
        Bench::Route(options) => measure(repo, "route", options),
        Bench::Cni(options) => measure(repo, "cni", options),
        Bench::Packet(options) => packets(repo, options),
    }
}

/// The programs of the kernel are the same in every profile, and nothing else counts here.
fn packets(repo: &Repo, options: &Options) -> Result<bool> {
    cluster::require_root("bench")?;
    install::ensure(repo, &[Purpose::Ebpf])?;
    artifacts::ebpf(repo)?;
    let program = artifacts::dev_program(repo, "weir-tests", "weir_packets")?;
    let status = Command::new(program)
        .args(&options.options)
        .status()
        .context("run weir_packets")?;
    Ok(status.success())
}

fn measure(repo: &Repo, name: &str, options: &Options) -> Result<bool> {
    cluster::require_root("bench")?;
    install::ensure(repo, &[Purpose::Ebpf, Purpose::Bench])?;
    artifacts::ebpf(repo)?;
    let programs = artifacts::bench_programs(repo)?;
    let status = Command::new(programs.join("weir-bench"))
        .arg(name)
        .arg("--agent")
        .arg(programs.join("weir-agent"))
        .arg("--cni")
        .arg(programs.join("weir-cni"))
        .args(&options.options)
        .status()
        .context("run weir-bench")?;
    Ok(status.success())
}
