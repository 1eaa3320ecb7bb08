//! A local cluster: nodes that are network and mount namespaces of this machine, joined by a virtual switch.
//!
//! Every node sees its own /run, bpffs and network, so that programs run with the paths of a real machine. Everything
//! that exists outside DIR carries the cluster's name, so `down` finds it without any record of what `up` did.

pub(crate) mod api;
pub(crate) mod config;
pub(crate) mod down;
pub(crate) mod leftovers;
pub(crate) mod network;
pub(crate) mod node;
pub(crate) mod on;
pub(crate) mod process;
pub(crate) mod status;
pub(crate) mod supervise;
pub(crate) mod up;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use crate::repo::Repo;

/// Most nodes of one local cluster: their addresses are .11 and up, below the client's .100.
pub(crate) const MAX_NODES: u32 = 64;
/// Environment variable that marks every process of a cluster; its value is the cluster's folder.
pub(crate) const MARK: &str = "WEIR_CLUSTER_DIR";
/// A folder is only ever deleted when this file says that it is a cluster's.
const MARKER_FILE: &str = ".weir-cluster";
/// Namespace names must leave room for the roles behind the prefix.
const MAX_NAME_LEN: usize = 20;

/// Name and folder of one cluster.
#[derive(Clone, Debug)]
pub(crate) struct Cluster {
    /// Prefix of its namespaces and cgroups.
    pub(crate) name: String,
    pub(crate) dir: PathBuf,
}

/// What a namespace is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Switch,
    Control,
    Client,
    Node(u32),
}

impl Role {
    /// Last part of the namespace's name, and the name of its port on the switch.
    pub(crate) fn label(self) -> String {
        match self {
            Self::Switch => "switch".into(),
            Self::Control => "control".into(),
            Self::Client => "client".into(),
            Self::Node(i) => format!("n{i}"),
        }
    }

    /// Host part of its underlay addresses; the switch has none.
    pub(crate) fn host(self) -> Option<u32> {
        match self {
            Self::Switch => None,
            Self::Control => Some(1),
            Self::Client => Some(100),
            Self::Node(i) => Some(10 + i),
        }
    }
}

/// IPv4 underlay address.
pub(crate) fn v4(host: u32) -> String {
    format!("192.168.77.{host}")
}

/// IPv6 underlay address; the host part is written in decimal digits so that both families look alike.
pub(crate) fn v6(host: u32) -> String {
    format!("fd77::{host}")
}

impl Cluster {
    pub(crate) fn new(repo: &Repo, name: &str, dir: Option<&Path>) -> Result<Self> {
        let valid = !name.is_empty()
            && name.len() <= MAX_NAME_LEN
            && name
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
        if !valid {
            bail!("cluster name {name:?}: use 1 to {MAX_NAME_LEN} lower-case letters and digits");
        }
        let dir = match dir {
            Some(dir) => std::path::absolute(dir).context("make --dir absolute")?,
            None if name == "weir" => repo.target().join("cluster"),
            None => repo.target().join(format!("cluster-{name}")),
        };
        Ok(Self {
            name: name.into(),
            dir,
        })
    }

    pub(crate) fn netns(&self, role: Role) -> String {
        format!("{}-{}", self.name, role.label())
    }

    pub(crate) fn netns_path(&self, role: Role) -> PathBuf {
        Path::new("/run/netns").join(self.netns(role))
    }

    pub(crate) fn node_dir(&self, index: u32) -> PathBuf {
        self.dir.join(format!("nodes/n{index}"))
    }

    /// Where a node's mount namespace is kept alive.
    pub(crate) fn mount_ns(&self, index: u32) -> PathBuf {
        self.mount_ns_dir().join(format!("n{index}"))
    }

    pub(crate) fn mount_ns_dir(&self) -> PathBuf {
        self.dir.join("mount-ns")
    }

    /// Cgroup of a node, below the root of every hierarchy.
    pub(crate) fn cgroup(&self, index: u32) -> String {
        format!("{}-n{index}", self.name)
    }

    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.dir.join("kubeconfig")
    }

    pub(crate) fn bin(&self) -> PathBuf {
        self.dir.join("bin")
    }

    pub(crate) fn log(&self, process: &str) -> PathBuf {
        self.dir.join(format!("logs/{process}.log"))
    }

    /// Takes the folder over for this cluster, creating it when needed.
    pub(crate) fn claim_dir(&self) -> Result<()> {
        use std::os::unix::fs::DirBuilderExt as _;
        let marker = self.dir.join(MARKER_FILE);
        if let Some(owner) = self.owner()? {
            if owner != self.name {
                bail!(
                    "{} belongs to the cluster {owner:?}: give another --dir",
                    self.dir.display()
                );
            }
            return Ok(());
        }
        let empty = match std::fs::read_dir(&self.dir) {
            Ok(mut entries) => entries.next().is_none(),
            Err(_) => true,
        };
        if !empty {
            bail!(
                "{} is not empty and no cluster's folder: give another --dir",
                self.dir.display()
            );
        }
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(&self.dir)
            .with_context(|| format!("create {}", self.dir.display()))?;
        std::fs::write(&marker, format!("{}\n", self.name))
            .with_context(|| format!("write {}", marker.display()))
    }

    /// Name of the cluster that the folder belongs to, if it is a cluster's folder.
    pub(crate) fn owner(&self) -> Result<Option<String>> {
        let marker = self.dir.join(MARKER_FILE);
        match std::fs::read_to_string(&marker) {
            Ok(name) => Ok(Some(name.trim().to_owned())),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e).with_context(|| format!("read {}", marker.display())),
        }
    }

    /// Whether the name is one of this cluster's namespaces or cgroups.
    pub(crate) fn owns_name(&self, name: &str) -> bool {
        let Some(label) = name
            .strip_prefix(&self.name)
            .and_then(|rest| rest.strip_prefix('-'))
        else {
            return false;
        };
        matches!(label, "switch" | "control" | "client") || node_index(label).is_some()
    }

    /// Indices of the nodes that exist, by their folders.
    pub(crate) fn present_nodes(&self) -> Vec<u32> {
        let Ok(entries) = std::fs::read_dir(self.dir.join("nodes")) else {
            return Vec::new();
        };
        let mut found: Vec<u32> = entries
            .flatten()
            .filter_map(|e| node_index(&e.file_name().to_string_lossy()))
            .collect();
        found.sort_unstable();
        found
    }
}

/// `n7` -> 7.
pub(crate) fn node_index(label: &str) -> Option<u32> {
    let digits = label.strip_prefix('n')?;
    digits.parse().ok().filter(|i| digits == u32::to_string(i))
}

/// `up`, `down` and the rest need root: namespaces, mounts and BPF do.
pub(crate) fn require_root(task: &str) -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!("`cargo xtask {task}` makes namespaces, mounts and BPF programs: run it as root");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster() -> Cluster {
        Cluster {
            name: "weir".into(),
            dir: "/x".into(),
        }
    }

    #[test]
    fn only_its_own_names_belong_to_a_cluster() {
        for yes in [
            "weir-n1",
            "weir-n12",
            "weir-switch",
            "weir-control",
            "weir-client",
        ] {
            assert!(cluster().owns_name(yes), "{yes}");
        }
        for no in [
            "weir-n",
            "weir-n01",
            "weir-nx",
            "weirtest-n1",
            "weir",
            "weir-other",
            "n1",
        ] {
            assert!(!cluster().owns_name(no), "{no}");
        }
    }

    #[test]
    fn a_foreign_folder_is_never_claimed() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("precious"), "x").unwrap();
        let mut cluster = Cluster {
            name: "weir".into(),
            dir: dir.path().into(),
        };
        assert!(cluster.claim_dir().is_err());
        cluster.dir = dir.path().join("new");
        cluster.claim_dir().unwrap();
        cluster.claim_dir().unwrap();
        cluster.name = "other".into();
        assert!(cluster.claim_dir().is_err());
    }
}
