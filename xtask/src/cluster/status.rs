//! What runs of a cluster, and where its logs are.

use anyhow::Result;

use super::process::Process;
use super::supervise::{self, Files};
use super::{Cluster, api};
use crate::repo::Repo;
use crate::run::output;

/// `cargo xtask status`. Returns whether all is well.
pub(crate) fn status(repo: &Repo, cluster: &Cluster) -> Result<bool> {
    if cluster.owner()?.is_none() {
        println!(
            "There is no cluster {:?}: `cargo xtask up` starts one.",
            cluster.name
        );
        return Ok(false);
    }
    let files = Files::of(&cluster.dir);
    let supervised = Process::load(&files.pid).is_some_and(Process::alive);
    if !supervised {
        println!(" ! the supervisor does not run: `cargo xtask up` starts it again");
    }
    let state = supervise::read_state(&files);
    println!(
        "{:<16} {:>8} {:>8} {:>10} {:>7}  LOG",
        "PROGRAM", "PID", "UP", "MEMORY", "STARTS"
    );
    let mut well = supervised;
    for (name, running) in &state {
        let alive = running.process.filter(|p| p.alive());
        well &= alive.is_some();
        let (pid, up, memory) = match alive {
            Some(p) => (
                p.pid.to_string(),
                p.age_s().map(|s| format!("{s}s")).unwrap_or_default(),
                p.rss_kb()
                    .map(|kb| format!("{} MB", kb / 1024))
                    .unwrap_or_default(),
            ),
            None => (
                "-".into(),
                running.last_exit.clone().unwrap_or_default(),
                String::new(),
            ),
        };
        let log = cluster.log(name);
        println!(
            "{name:<16} {pid:>8} {up:>8} {memory:>10} {:>7}  {}",
            running.starts,
            log.display()
        );
    }
    if !supervised {
        return Ok(false);
    }
    match output(api::kubectl(repo, cluster)?.args(["get", "nodes", "-o", "wide"])) {
        Ok(nodes) => {
            println!("\n{nodes}");
            well &= !nodes.contains("NotReady");
        }
        Err(e) => {
            println!("\n ! the API server does not answer: {e:#}");
            well = false;
        }
    }
    println!("kubeconfig: {}", cluster.kubeconfig().display());
    Ok(well)
}
