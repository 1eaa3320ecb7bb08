//! How large the tables are, and how that follows from the memory there is.

use std::path::{Path, PathBuf};

use dataplane_common::layout::SLOT_BLOCK;

/// How many entries each table may hold. Tables that exist keep their size until they are removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Flows per address family. Beyond it new flows are dropped and counted (`flow_table_full`).
    pub flows: u32,
    /// Service ports per address family; also clients with affinity, of which more choose freely.
    pub frontends: u32,
    /// Places of backends in services, per address family.
    pub slots: u32,
    /// Pods of this node and addresses of all nodes, per address family.
    pub endpoints: u32,
    /// Entries of Maglev tables, 256 for each service, per address family. Services beyond it choose at random.
    pub maglev_blocks: u32,
}

/// Part of the memory that flow tables full in both families may take. The buckets, a tenth of that, are there from the
/// start: a larger share would cost nodes without traffic more than all the rest of the agent.
const MEMORY_SHARE: u64 = 256;
/// A flow with its reply entry in a table of each family: 232 and 328 bytes when there is one, and the buckets, 64
/// bytes, which are there from the start (measured on Linux 6.18).
const FLOW_PAIR_BYTES: u64 = 640;
/// 65,536 connections, for 4 MiB of buckets: what a client of one address and one port may have.
const LEAST_FLOWS: u32 = 1 << 16;
const MOST_FLOWS: u32 = 1 << 20;

/// As long as no service asks for Maglev tables.
const WITHOUT_MAGLEV: u32 = 256;
/// For a thousand services, where the operator chose Maglev tables.
const WITH_MAGLEV: u32 = 262_144;

/// A family in which the node has no address. Its tables take a megabyte and a half when they are empty; pods and services
/// of the family work within them all the same.
const WITHOUT_ADDRESS: Limits = Limits {
    flows: 8_192,
    frontends: 4_096,
    slots: 16_384,
    endpoints: u32::MAX,
    maglev_blocks: WITHOUT_MAGLEV,
};

impl Default for Limits {
    fn default() -> Self {
        Self {
            flows: 262_144,
            frontends: 65_536,
            slots: 262_144,
            endpoints: 16_384,
            maglev_blocks: WITHOUT_MAGLEV,
        }
    }
}

impl Limits {
    /// Blocks for that many slots, wherever they are: each service has one that is not full.
    pub(super) fn slot_blocks(self) -> u32 {
        self.slots
            .div_ceil(SLOT_BLOCK)
            .saturating_add(self.frontends)
    }

    /// With room for Maglev tables.
    #[must_use]
    pub fn with_maglev(self) -> Self {
        Self {
            maglev_blocks: WITH_MAGLEV,
            ..self
        }
    }

    /// The limits of a family in which the node has no address.
    pub(super) fn without_address(self) -> Self {
        let least = WITHOUT_ADDRESS;
        Self {
            flows: self.flows.min(least.flows),
            frontends: self.frontends.min(least.frontends),
            slots: self.slots.min(least.slots),
            endpoints: self.endpoints.min(least.endpoints),
            maglev_blocks: self.maglev_blocks.min(least.maglev_blocks),
        }
    }

    /// For a machine, or a cgroup, with so many bytes of memory. Tables of a power of two waste no bucket.
    #[must_use]
    pub fn for_memory(bytes: u64) -> Self {
        let fit = bytes / MEMORY_SHARE / FLOW_PAIR_BYTES;
        let fit = u32::try_from(fit).unwrap_or(MOST_FLOWS).max(1);
        Self {
            flows: (1 << fit.ilog2()).clamp(LEAST_FLOWS, MOST_FLOWS),
            ..Self::default()
        }
    }

    /// For the memory that this process may use; the default where that cannot be told.
    #[must_use]
    pub fn of_this_machine() -> Self {
        memory_bytes(Path::new("/")).map_or_else(Self::default, Self::for_memory)
    }
}

/// Memory of the machine, or of the narrowest cgroup around this process: what maps hold is charged to it.
fn memory_bytes(root: &Path) -> Option<u64> {
    let read = |path: &Path| std::fs::read_to_string(root.join(path)).ok();
    let machine = read(Path::new("proc/meminfo"))?
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?
        .trim()
        .strip_suffix("kB")?
        .trim()
        .parse::<u64>()
        .ok()?
        .checked_mul(1_024)?;
    let groups = read(Path::new("proc/self/cgroup")).unwrap_or_default();
    // Files of groups without a limit say "max" or a number beyond any memory.
    let limits = groups
        .lines()
        .flat_map(limit_files)
        .filter_map(|path| read(&path)?.trim().parse::<u64>().ok());
    limits.chain([machine]).min()
}

/// Where the memory limits of a line of /proc/self/cgroup are: of the group and of all around it.
fn limit_files(line: &str) -> Vec<PathBuf> {
    let mut parts = line.splitn(3, ':');
    let (Some(_), Some(controllers), Some(group)) = (parts.next(), parts.next(), parts.next())
    else {
        return Vec::new();
    };
    let (mounts, file): (&[&str], _) = if controllers.is_empty() {
        (&["sys/fs/cgroup", "sys/fs/cgroup/unified"], "memory.max")
    } else if controllers.split(',').any(|name| name == "memory") {
        (&["sys/fs/cgroup/memory"], "memory.limit_in_bytes")
    } else {
        return Vec::new();
    };
    let group = Path::new(group.trim_start_matches('/'));
    mounts
        .iter()
        .flat_map(|mount| {
            group
                .ancestors()
                .map(move |group| Path::new(mount).join(group).join(file))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn tables_follow_the_memory() {
        for (bytes, flows) in [
            (0, 1 << 16),
            (GIB, 1 << 16),
            (8 * GIB, 1 << 16),
            (16 * GIB, 1 << 16),
            (23 * GIB, 1 << 17),
            (64 * GIB, 1 << 18),
            (128 * GIB, 1 << 19),
            (1_024 * GIB, 1 << 20),
            (u64::MAX, 1 << 20),
        ] {
            assert_eq!(Limits::for_memory(bytes).flows, flows, "{bytes} bytes");
        }
    }

    fn file(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    #[test]
    fn the_narrowest_cgroup_counts() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        assert_eq!(memory_bytes(root), None);
        file(
            root,
            "proc/meminfo",
            "MemFree: 1 kB\nMemTotal:       2048 kB\n",
        );
        assert_eq!(memory_bytes(root), Some(2_097_152));
        file(
            root,
            "proc/self/cgroup",
            "9:name=systemd:/x\n4:cpu,memory:/pods/a\n0::/pods/a/b\n",
        );
        assert_eq!(memory_bytes(root), Some(2_097_152));
        file(root, "sys/fs/cgroup/pods/a/b/memory.max", "max\n");
        file(root, "sys/fs/cgroup/pods/memory.max", "70000\n");
        assert_eq!(memory_bytes(root), Some(70_000), "of a group around it");
        file(
            root,
            "sys/fs/cgroup/memory/pods/a/memory.limit_in_bytes",
            "9223372036854771712\n",
        );
        assert_eq!(memory_bytes(root), Some(70_000));
        file(
            root,
            "sys/fs/cgroup/memory/pods/a/memory.limit_in_bytes",
            "60000\n",
        );
        assert_eq!(memory_bytes(root), Some(60_000));
    }
}
