//! Removes a cluster, or one node of it, and proves that nothing is left.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::Signal;

use super::leftovers::{self, Leftovers};
use super::process::{Process, wait_for};
use super::supervise::Files;
use super::{Cluster, network};

/// The supervisor stops its programs within this time, or is killed with them.
const SUPERVISOR_GRACE: Duration = Duration::from_secs(8);
/// Killed processes must be gone, and their cgroups empty, within this time.
const KILL_LIMIT: Duration = Duration::from_secs(15);

/// What was removed.
#[derive(Debug, Default)]
struct Removed {
    processes: usize,
    mounts: usize,
    namespaces: usize,
    cgroups: usize,
    pins: usize,
    files: usize,
}

/// `cargo xtask down`.
pub(crate) fn down(cluster: &Cluster) -> Result<()> {
    if let Some(owner) = cluster.owner()?
        && owner != cluster.name
    {
        bail!(
            "{} belongs to the cluster {owner:?}, not {:?}",
            cluster.dir.display(),
            cluster.name
        );
    }
    network::require_own(cluster)?;
    let found = Leftovers::find(cluster)?;
    if found.is_empty() {
        println!(
            "There is no cluster {:?} on this machine. clean",
            cluster.name
        );
        return Ok(());
    }
    let mut removed = Removed::default();
    removed.processes += stop_supervisor(cluster);
    removed.processes += kill_processes(cluster)?;
    removed.pins = remove_pins(cluster);
    removed.mounts = unmount(&Leftovers::find(cluster)?.mounts)?;
    removed.namespaces = found.namespaces.len();
    network::delete(&found.namespaces)?;
    removed.cgroups = remove_cgroups(&Leftovers::find(cluster)?)?;
    removed.files = remove_dir(cluster)?;
    let left = Leftovers::find(cluster)?;
    if !left.is_empty() {
        bail!("something of the cluster is left: {}", describe(&left));
    }
    println!(
        " removed {} processes, {} namespaces with their links and routes, {} mounts, {} pins, {} cgroups, {} files",
        removed.processes,
        removed.namespaces,
        removed.mounts,
        removed.pins,
        removed.cgroups,
        removed.files
    );
    println!(" looked again for each kind: clean");
    Ok(())
}

/// Removes one node's processes and surroundings; the supervisor no longer runs its programs by then.
pub(crate) fn remove_node(cluster: &Cluster, index: u32) -> Result<()> {
    let namespace = cluster.netns(super::Role::Node(index));
    let single = |found: Leftovers| -> Leftovers {
        let (dir, cgroup) = (cluster.node_dir(index), cluster.cgroup(index));
        Leftovers {
            mounts: found
                .mounts
                .into_iter()
                .filter(|m| m.starts_with(&dir) || *m == cluster.mount_ns(index))
                .collect(),
            cgroups: found
                .cgroups
                .into_iter()
                .filter(|c| {
                    c.components()
                        .any(|part| part.as_os_str() == cgroup.as_str())
                })
                .collect(),
            ..Leftovers::default()
        }
    };
    let gone = wait_for(KILL_LIMIT, || {
        let processes = leftovers::processes_of_node(cluster, index);
        for process in &processes {
            process.signal(Signal::SIGKILL);
        }
        processes.is_empty()
    });
    if !gone {
        bail!("processes of {namespace} do not end");
    }
    remove_tree(&cluster.node_dir(index).join("bpf"));
    let found = single(Leftovers::find(cluster)?);
    unmount(&found.mounts)?;
    if network::namespaces()?.contains(&namespace) {
        network::delete(&[namespace])?;
    }
    remove_cgroups(&found)?;
    std::fs::remove_file(cluster.mount_ns(index)).context("remove the mount namespace's file")?;
    let dir = cluster.node_dir(index);
    std::fs::remove_dir_all(&dir).with_context(|| format!("remove {}", dir.display()))
}

/// Asks the supervisor to stop everything. Returns the number of processes that ended so.
fn stop_supervisor(cluster: &Cluster) -> usize {
    let files = Files::of(&cluster.dir);
    let Some(supervisor) = Process::load(&files.pid).filter(|p| p.alive()) else {
        return 0;
    };
    let programs = super::supervise::read_state(&files);
    supervisor.signal(Signal::SIGTERM);
    if !supervisor.wait_gone(SUPERVISOR_GRACE) {
        supervisor.signal(Signal::SIGKILL);
        supervisor.wait_gone(KILL_LIMIT);
    }
    1 + programs
        .values()
        .filter(|r| r.process.is_some_and(|p| !p.alive()))
        .count()
}

/// Kills all that is left until a look finds nothing: a dying shim may start one more process.
fn kill_processes(cluster: &Cluster) -> Result<usize> {
    let mut killed = std::collections::BTreeSet::new();
    let mut last = Vec::new();
    let gone = wait_for(KILL_LIMIT, || {
        let namespaces = Leftovers::find(cluster)
            .map(|l| l.namespaces)
            .unwrap_or_default();
        last = leftovers::processes(cluster, &namespaces);
        for process in &last {
            killed.insert(process.pid);
            process.signal(Signal::SIGKILL);
        }
        last.is_empty()
    });
    if !gone {
        let names: Vec<String> = last
            .iter()
            .map(|p| format!("{} ({})", p.pid, p.command_line()))
            .collect();
        bail!("these processes do not end: {}", names.join(", "));
    }
    Ok(killed.len())
}

/// Unpins every BPF object. Unmounting alone would keep them when another mount namespace still holds the bpffs.
fn remove_pins(cluster: &Cluster) -> usize {
    cluster
        .present_nodes()
        .into_iter()
        .map(|index| remove_tree(&cluster.node_dir(index).join("bpf")))
        .sum()
}

/// Removes all below a folder and returns the number of files; what cannot be removed shows up in the proof.
fn remove_tree(dir: &Path) -> usize {
    let mut count = 0;
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            count += remove_tree(&path);
            let _ = std::fs::remove_dir(&path);
        } else if std::fs::remove_file(&path).is_ok() {
            count += 1;
        }
    }
    count
}

fn unmount(mounts: &[std::path::PathBuf]) -> Result<usize> {
    for mount in mounts {
        umount2(mount, MntFlags::MNT_DETACH)
            .with_context(|| format!("unmount {}", mount.display()))?;
    }
    Ok(mounts.len())
}

fn remove_cgroups(found: &Leftovers) -> Result<usize> {
    for cgroup in &found.cgroups {
        // A cgroup is busy until the kernel has let go of the last killed process.
        let mut last = None;
        let gone = wait_for(KILL_LIMIT, || match std::fs::remove_dir(cgroup) {
            Ok(()) => true,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => true,
            Err(e) => {
                last = Some(e);
                false
            }
        });
        if let (false, Some(e)) = (gone, last) {
            return Err(e).with_context(|| format!("remove cgroup {}", cgroup.display()));
        }
    }
    Ok(found.cgroups.len())
}

fn remove_dir(cluster: &Cluster) -> Result<usize> {
    if !cluster.dir.exists() {
        return Ok(0);
    }
    if cluster.owner()?.is_none() {
        bail!(
            "{} is no cluster's folder: it is left as it is",
            cluster.dir.display()
        );
    }
    let files = count_files(&cluster.dir);
    std::fs::remove_dir_all(&cluster.dir)
        .with_context(|| format!("remove {}", cluster.dir.display()))?;
    Ok(files)
}

fn count_files(dir: &Path) -> usize {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .map(|e| {
            if e.file_type().is_ok_and(|t| t.is_dir()) {
                count_files(&e.path())
            } else {
                1
            }
        })
        .sum()
}

fn describe(left: &Leftovers) -> String {
    let mut lines = Vec::new();
    lines.extend(
        left.processes
            .iter()
            .map(|p| format!("process {} {}", p.pid, p.command_line())),
    );
    lines.extend(left.namespaces.iter().map(|n| format!("namespace {n}")));
    lines.extend(left.mounts.iter().map(|m| format!("mount {}", m.display())));
    lines.extend(
        left.cgroups
            .iter()
            .map(|c| format!("cgroup {}", c.display())),
    );
    lines.extend(left.routes.iter().map(|r| format!("route {r}")));
    lines.extend(left.dir.iter().map(|d| format!("folder {}", d.display())));
    lines.join("\n  ")
}
