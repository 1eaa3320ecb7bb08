//! One node's machine: folders, mount namespace with a /run of its own, bpffs, cgroup, and the command that enters it.

use std::path::Path;

use anyhow::{Context as _, Result};

use super::{Cluster, Role};
use crate::run::{cmd, quiet};

/// Folders below a node's own.
const FOLDERS: [&str; 7] = [
    "run/netns",
    "containerd",
    "state",
    "cni/bin",
    "cni/net.d",
    "log/pods",
    "bpf",
];
/// Where cgroup hierarchies are mounted; v1 has one folder per controller there.
const CGROUP_ROOT: &str = "/sys/fs/cgroup";

/// Creates what is missing of a node's surroundings.
pub(crate) fn prepare(cluster: &Cluster, index: u32) -> Result<()> {
    let dir = cluster.node_dir(index);
    for folder in FOLDERS {
        let path = dir.join(folder);
        std::fs::create_dir_all(&path).with_context(|| format!("create {}", path.display()))?;
    }
    let bpffs = dir.join("bpf");
    if !is_mount_point(&bpffs)? {
        quiet(cmd("mount", ["-t", "bpf", "weir-bpf"]).arg(&bpffs)).context("mount a bpffs")?;
    }
    keep_mount_namespace(cluster, index)?;
    // Socket hooks attach to this cgroup; the runtime creates the pods' cgroups below it.
    let cgroup = unified_root().join(cluster.cgroup(index)).join("pods");
    std::fs::create_dir_all(&cgroup).with_context(|| format!("create {}", cgroup.display()))
}

/// The node's mount namespace: as the machine's, but /run is the node's own folder. It is kept by a bind mount, so it
/// lives as long as the cluster and not only as long as some process in it.
fn keep_mount_namespace(cluster: &Cluster, index: u32) -> Result<()> {
    let keep = cluster.mount_ns(index);
    if is_mount_point(&keep)? {
        return Ok(());
    }
    std::fs::write(&keep, "").with_context(|| format!("create {}", keep.display()))?;
    let run = cluster.node_dir(index).join("run");
    let mut unshare = cmd("unshare", ["--propagation", "private"]);
    unshare.arg(format!("--mount={}", keep.display()));
    unshare.args(["mount", "--bind"]).arg(&run).arg("/run");
    quiet(&mut unshare).context("make a node's mount namespace")
}

/// Prepares the folder that keeps mount namespaces: the kernel wants it on a private mount.
pub(crate) fn prepare_mount_ns_dir(cluster: &Cluster) -> Result<()> {
    let dir = cluster.mount_ns_dir();
    std::fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
    if is_mount_point(&dir)? {
        return Ok(());
    }
    quiet(
        cmd("mount", ["--bind", "--make-private"])
            .arg(&dir)
            .arg(&dir),
    )
    .context("make the folder of mount namespaces private")
}

/// The command line that runs a program inside a node.
pub(crate) fn enter(cluster: &Cluster, index: u32) -> Vec<String> {
    vec![
        "nsenter".into(),
        format!("--net={}", cluster.netns_path(Role::Node(index)).display()),
        format!("--mount={}", cluster.mount_ns(index).display()),
        "--".into(),
    ]
}

/// Root of the cgroup v2 hierarchy: the whole tree, or the `unified` part of a hybrid one.
pub(crate) fn unified_root() -> std::path::PathBuf {
    let hybrid = Path::new(CGROUP_ROOT).join("unified");
    if hybrid.is_dir() {
        hybrid
    } else {
        CGROUP_ROOT.into()
    }
}

/// Roots of all cgroup hierarchies.
pub(crate) fn cgroup_roots() -> Vec<std::path::PathBuf> {
    let mut roots = vec![std::path::PathBuf::from(CGROUP_ROOT)];
    if !Path::new(CGROUP_ROOT).join("cgroup.controllers").is_file() {
        let entries = std::fs::read_dir(CGROUP_ROOT)
            .into_iter()
            .flatten()
            .flatten();
        // `cpu -> cpu,cpuacct` and its like are links to a hierarchy that is listed anyway.
        roots.extend(
            entries
                .filter(|e| e.file_type().is_ok_and(|t| t.is_dir()))
                .map(|e| e.path()),
        );
    }
    roots
}

fn is_mount_point(path: &Path) -> Result<bool> {
    Ok(super::leftovers::mount_points()?.iter().any(|m| m == path))
}
