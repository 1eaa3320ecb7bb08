//! `cargo xtask test`: every tier that this machine can run, and a plain word on those that it cannot.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result};
use clap::ValueEnum;

use crate::artifacts;
use crate::install::{self, Purpose};
use crate::repo::{Repo, which};
use crate::run::shown;
use crate::{tidy, vm};

/// The tiers, in the order in which they run: the cheapest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Tier {
    /// Format, lints, sizes and forbidden imports.
    Tidy,
    /// Pure modules and property tests; needs nothing.
    Unit,
    /// eBPF programs, packet in and packet out; needs root.
    Prog,
    /// Agent, CNI and routes on network namespaces; needs root.
    Node,
    /// A whole cluster with real kubectl; needs root.
    Cluster,
    /// Every eBPF program on every supported kernel; needs QEMU.
    Vm,
}

impl Tier {
    fn name(self) -> &'static str {
        match self {
            Self::Tidy => "tidy",
            Self::Unit => "unit",
            Self::Prog => "prog",
            Self::Node => "node",
            Self::Cluster => "cluster",
            Self::Vm => "vm",
        }
    }

    /// Why this machine cannot run the tier.
    fn obstacle(self) -> Option<String> {
        let root = nix::unistd::geteuid().is_root();
        match self {
            Self::Tidy | Self::Unit => None,
            Self::Prog | Self::Node => (!root).then(|| "needs root".into()),
            Self::Cluster if !root => Some("needs root".into()),
            Self::Cluster => missing_installer(&["containerd", "runc", "ip"]),
            Self::Vm => {
                if !root && which("qemu-system-x86_64").is_none() {
                    return Some("QEMU is missing and only root can install it".into());
                }
                vm::obstacle().or_else(|| missing_installer(&["qemu-system-x86_64", "dpkg-deb"]))
            }
        }
    }
}

/// Programs that are absent on a machine where apt cannot bring them.
fn missing_installer(programs: &[&str]) -> Option<String> {
    if which("apt-get").is_some() {
        return None;
    }
    let absent: Vec<&str> = programs
        .iter()
        .copied()
        .filter(|p| which(p).is_none())
        .collect();
    (!absent.is_empty()).then(|| {
        format!(
            "{} missing and no apt-get to install them",
            absent.join(", ")
        )
    })
}

/// Test targets of the tiers that plain `cargo test` leaves out: package, target, arguments.
const SUITES: [(Tier, &str, &str, &[&str]); 6] = [
    (Tier::Prog, "weir-tests", "prog", &[]),
    (Tier::Node, "weir-tests", "node", &[]),
    (Tier::Node, "weir-tests", "traffic", &[]),
    (Tier::Node, "weir-tests", "sockets", &[]),
    (Tier::Node, "weir-agent", "pods", &["--", "--ignored"]),
    (Tier::Cluster, "weir-tests", "cluster", &[]),
];

/// Tests by result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} passed, {} failed, {} skipped",
            self.passed, self.failed, self.skipped
        )
    }
}

impl Counts {
    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// Runs the tiers (all when none is named); returns whether nothing failed.
pub(crate) fn run(repo: &Repo, asked: &[Tier]) -> Result<bool> {
    let mut tiers: Vec<Tier> = if asked.is_empty() {
        Tier::value_variants().to_vec()
    } else {
        asked.to_vec()
    };
    tiers.sort_unstable();
    tiers.dedup();
    prepare(repo, &tiers)?;
    let mut total = Counts::default();
    let mut lines = Vec::new();
    for tier in tiers {
        if let Some(reason) = tier.obstacle() {
            total.skipped += 1;
            lines.push(format!(" - {:<8} skipped: {reason}", tier.name()));
            continue;
        }
        println!("\n=== {} ===", tier.name());
        let started = Instant::now();
        let counts = match run_tier(repo, tier) {
            Ok(counts) => counts,
            Err(e) => {
                println!("tier {} failed: {e:#}", tier.name());
                Counts {
                    failed: 1,
                    ..Counts::default()
                }
            }
        };
        total.add(counts);
        lines.push(format!(
            " {} {:<8} ran: {counts} in {:.0} s",
            if counts.failed == 0 { '✓' } else { '✗' },
            tier.name(),
            started.elapsed().as_secs_f64()
        ));
    }
    println!("\n{}", lines.join("\n"));
    println!("{total}");
    Ok(total.failed == 0)
}

/// Installs what the runnable tiers need. The eBPF object comes first: the agent's build embeds it.
fn prepare(repo: &Repo, tiers: &[Tier]) -> Result<()> {
    let mut purposes = vec![Purpose::Ebpf];
    for tier in tiers {
        match tier {
            Tier::Node | Tier::Cluster if tier.obstacle().is_none() => {
                purposes.push(Purpose::Cluster);
            }
            Tier::Vm if tier.obstacle().is_none() => purposes.push(Purpose::Vm),
            _ => {}
        }
    }
    if tiers == [Tier::Tidy] {
        return Ok(());
    }
    install::ensure(repo, &purposes)?;
    artifacts::ebpf(repo).map(drop)
}

fn run_tier(repo: &Repo, tier: Tier) -> Result<Counts> {
    match tier {
        Tier::Tidy => tidy::run(repo),
        Tier::Unit => cargo_test(repo, &["--workspace"]),
        Tier::Vm => vm::run(repo, &[]),
        Tier::Prog | Tier::Node | Tier::Cluster => {
            if tier == Tier::Cluster {
                // One dev build serves the tests and the cluster that they start.
                artifacts::product(repo, artifacts::Profile::Dev)?;
            }
            let mut counts = Counts::default();
            for (_, package, target, args) in SUITES.iter().filter(|(t, ..)| *t == tier) {
                let mut all = vec!["--package", package, "--test", target];
                all.extend(*args);
                counts.add(cargo_test(repo, &all)?);
            }
            Ok(counts)
        }
    }
}

/// The cluster tier with the optimised programs, for its figures.
pub(crate) fn bench_cluster(repo: &Repo) -> Result<bool> {
    prepare(repo, &[Tier::Cluster])?;
    let mut cargo = repo.cargo();
    cargo
        .args(["test", "--package", "weir-tests", "--test", "cluster"])
        .env("WEIR_BPF_OBJECT", repo.bpf_object())
        .env("WEIR_CLUSTER_RELEASE", "1");
    let status = cargo
        .status()
        .with_context(|| format!("run {}", shown(&cargo)))?;
    Ok(status.success())
}

/// Runs cargo's tests, shows their output as it comes and adds up the results.
fn cargo_test(repo: &Repo, args: &[&str]) -> Result<Counts> {
    let mut cargo: Command = repo.cargo();
    cargo.args(["test", "--no-fail-fast"]).args(args);
    cargo.env("WEIR_BPF_OBJECT", repo.bpf_object());
    cargo.env(
        "WEIR_XTASK",
        std::env::current_exe().context("find this program")?,
    );
    cargo.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = cargo
        .spawn()
        .with_context(|| format!("start `{}`", shown(&cargo)))?;
    let output = BufReader::new(child.stdout.take().context("cargo has no output")?);
    let mut counts = Counts::default();
    for line in output.split(b'\n') {
        let line = line.context("read cargo's output")?;
        let line = String::from_utf8_lossy(&line);
        println!("{line}");
        if let Some(result) = parse_result(&line) {
            counts.add(result);
        }
    }
    let status = child.wait().context("wait for cargo")?;
    if !status.success() && counts.failed == 0 {
        // Tests that do not compile or die before their result count as one failure.
        counts.failed = 1;
    }
    Ok(counts)
}

/// `test result: ok. 12 passed; 0 failed; 1 ignored; …`
fn parse_result(line: &str) -> Option<Counts> {
    let (_, numbers) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let mut counts = Counts::default();
    for part in numbers.split(';') {
        let mut words = part.split_whitespace();
        let (Some(number), Some(what)) = (words.next(), words.next()) else {
            continue;
        };
        let Ok(number) = number.parse() else { continue };
        match what {
            "passed" => counts.passed = number,
            "failed" => counts.failed = number,
            "ignored" => counts.skipped = number,
            _ => {}
        }
    }
    Some(counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_cargo_test_are_read() {
        let line = "test result: FAILED. 12 passed; 2 failed; 1 ignored; 0 measured; 9 filtered out; finished in 0.1s";
        assert_eq!(
            parse_result(line),
            Some(Counts {
                passed: 12,
                failed: 2,
                skipped: 1
            })
        );
        assert_eq!(parse_result("running 3 tests"), None);
        assert_eq!(parse_result("test a::b ... ok"), None);
    }
}
