//! Finds everything of a cluster that exists on this machine, by names and marks and not by records: what `down`
//! removes, and how it proves that nothing is left.

use std::collections::BTreeSet;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use super::process::{self, Process};
use super::{Cluster, MARK, Role, network, node};
use crate::run::{cmd, output};

/// Route protocol number of the agent.
const ROUTE_PROTOCOL: &str = "87";

/// All that is there of one cluster.
#[derive(Debug, Default)]
pub(crate) struct Leftovers {
    pub(crate) processes: Vec<Process>,
    pub(crate) namespaces: Vec<String>,
    /// Deepest first.
    pub(crate) mounts: Vec<PathBuf>,
    /// Deepest first.
    pub(crate) cgroups: Vec<PathBuf>,
    /// Routes of the agent's protocol in the machine's own tables: there must never be one.
    pub(crate) routes: Vec<String>,
    pub(crate) dir: Option<PathBuf>,
}

impl Leftovers {
    pub(crate) fn find(cluster: &Cluster) -> Result<Self> {
        let namespaces: Vec<String> = network::namespaces()?
            .into_iter()
            .filter(|n| cluster.owns_name(n))
            .collect();
        let mut mounts: Vec<PathBuf> = mount_points()?
            .into_iter()
            .filter(|m| m.starts_with(&cluster.dir))
            .collect();
        mounts.sort();
        mounts.reverse();
        Ok(Self {
            processes: processes(cluster, &namespaces),
            namespaces,
            mounts,
            cgroups: cgroups(cluster),
            routes: routes()?,
            dir: cluster.dir.exists().then(|| cluster.dir.clone()),
        })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.processes.is_empty()
            && self.namespaces.is_empty()
            && self.mounts.is_empty()
            && self.cgroups.is_empty()
            && self.routes.is_empty()
            && self.dir.is_none()
    }
}

/// Processes in the cluster's namespaces or cgroups, or that carry its mark; never this one or those above it.
pub(crate) fn processes(cluster: &Cluster, namespaces: &[String]) -> Vec<Process> {
    let kept = std::fs::read_dir(cluster.mount_ns_dir())
        .into_iter()
        .flatten()
        .flatten();
    let paths = namespaces
        .iter()
        .map(|n| Path::new("/run/netns").join(n))
        // A file that no namespace is mounted on lies on the disk and matches no process.
        .chain(kept.map(|e| e.path()));
    let mark = format!("{MARK}={}", cluster.dir.display());
    let inodes = inodes(paths);
    matching(|at| {
        in_namespace(at, &inodes)
            || std::fs::read_to_string(at.join("cgroup"))
                .is_ok_and(|c| in_cgroup(&c, |top| cluster.owns_name(top)))
            || std::fs::read(at.join("environ"))
                .is_ok_and(|e| e.split(|b| *b == 0).any(|v| v == mark.as_bytes()))
    })
}

/// Processes of one node.
pub(crate) fn processes_of_node(cluster: &Cluster, index: u32) -> Vec<Process> {
    let inodes = inodes([
        cluster.netns_path(Role::Node(index)),
        cluster.mount_ns(index),
    ]);
    let cgroup = cluster.cgroup(index);
    matching(|at| {
        in_namespace(at, &inodes)
            || std::fs::read_to_string(at.join("cgroup"))
                .is_ok_and(|c| in_cgroup(&c, |top| top == cgroup))
    })
}

fn matching(ours: impl Fn(&Path) -> bool) -> Vec<Process> {
    let spared = ancestors();
    let at = |p: &Process| PathBuf::from(format!("/proc/{}", p.pid));
    process::all()
        .into_iter()
        .filter(|p| !spared.contains(&p.pid) && ours(&at(p)))
        .collect()
}

type Inode = (u64, u64);

fn inode(path: &Path) -> Option<Inode> {
    path.metadata().ok().map(|m| (m.dev(), m.ino()))
}

fn inodes(paths: impl IntoIterator<Item = PathBuf>) -> BTreeSet<Inode> {
    paths.into_iter().filter_map(|p| inode(&p)).collect()
}

fn in_namespace(process: &Path, namespaces: &BTreeSet<Inode>) -> bool {
    ["ns/net", "ns/mnt"]
        .iter()
        .any(|ns| inode(&process.join(ns)).is_some_and(|i| namespaces.contains(&i)))
}

/// Whether /proc/PID/cgroup names, in any hierarchy, a cgroup below a top one that is ours.
fn in_cgroup(cgroup: &str, ours: impl Fn(&str) -> bool) -> bool {
    cgroup.lines().any(|line| {
        let path = line.splitn(3, ':').nth(2).unwrap_or_default();
        path.trim_start_matches('/')
            .split('/')
            .next()
            .is_some_and(&ours)
    })
}

/// This process and the ones above it: the shell or test that asked for the search.
fn ancestors() -> BTreeSet<i32> {
    let mut found = BTreeSet::new();
    let mut pid = i32::try_from(std::process::id()).unwrap_or_default();
    while pid > 1 && found.insert(pid) {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let parent = stat
            .rsplit_once(") ")
            .and_then(|(_, rest)| rest.split(' ').nth(1));
        pid = parent.and_then(|p| p.parse().ok()).unwrap_or_default();
    }
    found
}

/// Mount points of this process's mount namespace.
pub(crate) fn mount_points() -> Result<Vec<PathBuf>> {
    let text = std::fs::read("/proc/self/mountinfo").context("read /proc/self/mountinfo")?;
    Ok(text
        .split(|b| *b == b'\n')
        .filter_map(|line| line.split(|b| *b == b' ').nth(4))
        .map(unescape)
        .collect())
}

/// Space, tab, newline and backslash are written as octal escapes (proc(5)).
fn unescape(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        let octal = (*first == b'\\')
            .then(|| tail.get(..3))
            .flatten()
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        rest = match octal {
            Some(byte) => {
                bytes.push(byte);
                &tail[3..]
            }
            None => {
                bytes.push(*first);
                tail
            }
        };
    }
    PathBuf::from(std::ffi::OsString::from_vec(bytes))
}

fn cgroups(cluster: &Cluster) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for root in node::cgroup_roots() {
        let entries = std::fs::read_dir(root).into_iter().flatten().flatten();
        for entry in entries {
            if cluster.owns_name(&entry.file_name().to_string_lossy()) {
                folders_below(&entry.path(), &mut found);
            }
        }
    }
    found
}

/// The folder and all below it, deepest first.
fn folders_below(dir: &Path, into: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            folders_below(&entry.path(), into);
        }
    }
    into.push(dir.to_path_buf());
}

fn routes() -> Result<Vec<String>> {
    let mut found = Vec::new();
    for family in ["-4", "-6"] {
        let args = [
            family,
            "route",
            "show",
            "table",
            "all",
            "proto",
            ROUTE_PROTOCOL,
        ];
        found.extend(output(&mut cmd("ip", args))?.lines().map(str::to_owned));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt as _;

    use super::*;

    /// As the kernel writes a path to mountinfo.
    fn escaped(path: &Path) -> Vec<u8> {
        path.as_os_str()
            .as_bytes()
            .iter()
            .fold(Vec::new(), |mut out, byte| {
                if b" \t\n\\".contains(byte) {
                    out.extend(format!("\\{byte:03o}").bytes());
                } else {
                    out.push(*byte);
                }
                out
            })
    }

    #[test]
    fn mount_points_with_blanks_are_read_back() {
        for path in ["/a b/c", "/tab\there", "/back\\slash", "/plain"] {
            assert_eq!(unescape(&escaped(Path::new(path))), Path::new(path));
        }
    }

    #[test]
    fn cgroups_of_both_versions_are_recognised() {
        let cluster = Cluster {
            name: "weir".into(),
            dir: "/x".into(),
        };
        let ours = |text: &str| in_cgroup(text, |top| cluster.owns_name(top));
        assert!(ours("4:memory:/weir-n1/pods/abc\n0::/\n"));
        assert!(ours("0::/weir-n12/pods\n"));
        assert!(!ours("0::/user.slice/weir-n1\n"));
        assert!(!ours("4:memory:/\n0::/\n"));
    }

    #[test]
    fn this_process_is_spared() {
        assert!(ancestors().contains(&i32::try_from(std::process::id()).unwrap()));
    }
}
