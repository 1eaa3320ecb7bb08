//! The machine and its runtime, as the node's report tells them.

use std::fs;

use control_api::v1::{Condition, NodeInfo};

use super::cri::Runtime;
use super::node::NodeFacts;

/// Conditions turn at these values.
const MEMORY_PRESSURE_BYTES: i64 = 100 << 20;
const DISK_PRESSURE_FREE_PERCENT: u64 = 10;
/// So much free space is no pressure on any disk: a tenth of a large one would be.
const DISK_ENOUGH_FREE_BYTES: u64 = 5 << 30;
const PID_PRESSURE_FREE_PERCENT: u64 = 5;

/// Fields of a `NodeReport` that the pod runner knows. Transition times are left to the reporter (zero).
#[derive(Clone, Debug, Default)]
pub struct NodeReportFields {
    pub cpu_millis: i64,
    pub memory_bytes: i64,
    pub ephemeral_storage_bytes: i64,
    pub max_pods: i64,
    pub conditions: Vec<Condition>,
    pub info: NodeInfo,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Machine {
    pub(crate) cpu_millis: i64,
    pub(crate) memory_bytes: i64,
}

pub(crate) fn machine() -> Machine {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    Machine {
        cpu_millis: i64::try_from(cpus).unwrap_or(1) * 1000,
        memory_bytes: meminfo_bytes(&meminfo, "MemTotal"),
    }
}

fn meminfo_bytes(text: &str, key: &str) -> i64 {
    let line = text
        .lines()
        .find_map(|l| l.strip_prefix(key)?.strip_prefix(':'));
    let kib = line.and_then(|l| l.split_whitespace().next()?.parse::<i64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

fn os_release(text: &str) -> String {
    let line = text.lines().find_map(|l| l.strip_prefix("PRETTY_NAME="));
    line.map_or_else(|| "Linux".into(), |l| l.trim_matches('"').to_owned())
}

fn first_line(path: &str) -> String {
    fs::read_to_string(path)
        .unwrap_or_default()
        .lines()
        .next()
        .unwrap_or_default()
        .to_owned()
}

pub(crate) async fn node_report_fields(
    runtime: &dyn Runtime,
    node: &NodeFacts,
    max_pods: u32,
) -> NodeReportFields {
    let version = runtime.version().await;
    let storage = nix::sys::statvfs::statvfs(&node.pods_dir).ok();
    let fragment = storage.as_ref().map_or(0, |s| s.fragment_size());
    let total = storage.as_ref().map_or(0, |s| s.blocks() * fragment);
    let free = storage
        .as_ref()
        .map_or(0, |s| s.blocks_available() * fragment);
    let machine = machine();
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    NodeReportFields {
        cpu_millis: machine.cpu_millis,
        memory_bytes: machine.memory_bytes,
        ephemeral_storage_bytes: i64::try_from(total).unwrap_or(i64::MAX),
        max_pods: i64::from(max_pods),
        conditions: conditions(runtime, total, free).await,
        info: NodeInfo {
            kernel_version: first_line("/proc/sys/kernel/osrelease"),
            os_image: os_release(&fs::read_to_string("/etc/os-release").unwrap_or_default()),
            container_runtime_version: version
                .map(|v| format!("{}://{}", v.runtime_name, v.runtime_version))
                .unwrap_or_default(),
            agent_version: format!("v{}", env!("CARGO_PKG_VERSION")),
            architecture: architecture.into(),
            machine_id: first_line("/etc/machine-id"),
            boot_id: first_line("/proc/sys/kernel/random/boot_id"),
            system_uuid: first_line("/sys/class/dmi/id/product_uuid").to_lowercase(),
        },
    }
}

async fn conditions(runtime: &dyn Runtime, total: u64, free: u64) -> Vec<Condition> {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let low_memory = meminfo_bytes(&meminfo, "MemAvailable") < MEMORY_PRESSURE_BYTES;
    let low_disk = total > 0 && is_low_disk(total, free);
    let pressure = |kind: &str, on: bool, bad: &str, good: &str, what: &str| Condition {
        r#type: kind.into(),
        status: if on { "True" } else { "False" }.into(),
        reason: if on { bad } else { good }.into(),
        message: format!(
            "node has {} {what}",
            if on { "insufficient" } else { "sufficient" }
        ),
        last_transition_us: 0,
    };
    vec![
        pressure(
            "MemoryPressure",
            low_memory,
            "KubeletHasInsufficientMemory",
            "KubeletHasSufficientMemory",
            "memory available",
        ),
        pressure(
            "DiskPressure",
            low_disk,
            "KubeletHasDiskPressure",
            "KubeletHasNoDiskPressure",
            "disk space",
        ),
        pressure(
            "PIDPressure",
            low_pids(),
            "KubeletHasInsufficientPID",
            "KubeletHasSufficientPID",
            "PIDs available",
        ),
        ready(runtime).await,
    ]
}

fn is_low_disk(total: u64, free: u64) -> bool {
    free < (total / 100 * DISK_PRESSURE_FREE_PERCENT).min(DISK_ENOUGH_FREE_BYTES)
}

fn low_pids() -> bool {
    let number = |text: String| text.trim().parse::<u64>().ok();
    let max = number(first_line("/proc/sys/kernel/pid_max"));
    let threads_max = number(first_line("/proc/sys/kernel/threads-max"));
    // The fourth field of loadavg is running/existing tasks.
    let loadavg = first_line("/proc/loadavg");
    let used = loadavg
        .split(' ')
        .nth(3)
        .and_then(|f| f.split('/').nth(1)?.parse::<u64>().ok());
    let (Some(max), Some(used)) = (max.min(threads_max).or(max), used) else {
        return false;
    };
    max.saturating_sub(used) < max / 100 * PID_PRESSURE_FREE_PERCENT
}

/// Ready when runtime and pod network are.
async fn ready(runtime: &dyn Runtime) -> Condition {
    let mut problems = Vec::new();
    match runtime.status().await {
        Err(error) => problems.push(format!("container runtime is down: {error}")),
        Ok(status) => {
            for (kind, what) in [
                ("RuntimeReady", "container runtime"),
                ("NetworkReady", "container runtime network"),
            ] {
                let condition = status.conditions.iter().find(|c| c.r#type == kind);
                match condition {
                    Some(c) if c.status => {}
                    Some(c) => {
                        problems.push(format!("{what} not ready: {} {}", c.reason, c.message));
                    }
                    None => problems.push(format!("{what} not ready: no status reported")),
                }
            }
        }
    }
    let ok = problems.is_empty();
    Condition {
        r#type: "Ready".into(),
        status: if ok { "True" } else { "False" }.into(),
        reason: if ok {
            "KubeletReady"
        } else {
            "KubeletNotReady"
        }
        .into(),
        message: if ok {
            "weir-agent is posting ready status".into()
        } else {
            problems.join("; ")
        },
        last_transition_us: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_low_by_share_and_by_size() {
        const GIB: u64 = 1 << 30;
        assert!(is_low_disk(20 * GIB, GIB));
        assert!(!is_low_disk(20 * GIB, 3 * GIB));
        assert!(is_low_disk(250 * GIB, 4 * GIB));
        assert!(!is_low_disk(250 * GIB, 16 * GIB));
    }

    #[test]
    fn reads_proc_texts() {
        let meminfo = "MemTotal:       1024 kB\nMemAvailable:    512 kB\n";
        assert_eq!(meminfo_bytes(meminfo, "MemAvailable"), 512 << 10);
        assert_eq!(meminfo_bytes(meminfo, "Mem"), 0);
        assert_eq!(os_release("ID=x\nPRETTY_NAME=\"Some OS 1\"\n"), "Some OS 1");
        assert_eq!(os_release(""), "Linux");
    }
}
