//! Tells the control plane that this node exists, what it has, and that it lives.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use control_api::v1::{Condition, NodeInfo, NodeReport};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use weir_agent::config::Config;
use weir_agent::feed::FeedHandle;

use super::Readiness;

/// The Lease is renewed this often; it lasts several times as long.
const LEASE_PERIOD: Duration = Duration::from_secs(10);
/// The whole status is sent at least this often.
const FULL_PERIOD: Duration = Duration::from_secs(300);
/// Pause after a report that failed.
const RETRY_PERIOD: Duration = Duration::from_secs(1);

/// Reports until the agent ends: at once when readiness changes, else every [`LEASE_PERIOD`].
pub(super) async fn run(
    config: Arc<Config>,
    feed: FeedHandle,
    mut readiness: watch::Receiver<Readiness>,
    shutdown: CancellationToken,
) {
    let mut conditions = Conditions::default();
    let mut last_full: Option<tokio::time::Instant> = None;
    let mut failing = false;
    loop {
        let changed = conditions.update(&readiness.borrow_and_update().clone());
        let full = changed || last_full.is_none_or(|at| at.elapsed() >= FULL_PERIOD);
        let report = report(&config, &conditions, full);
        let pause = match feed.report_node(report).await {
            Ok(_) => {
                if full {
                    last_full = Some(tokio::time::Instant::now());
                }
                if std::mem::take(&mut failing) {
                    tracing::info!("the control plane takes reports of this node again");
                }
                LEASE_PERIOD
            }
            Err(e) => {
                // What was to be told has not been told.
                last_full = if full { None } else { last_full };
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!(error = %e, "cannot report this node; trying again");
                }
                RETRY_PERIOD
            }
        };
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
            Ok(()) = readiness.changed() => {}
        }
    }
}

/// Conditions with the time at which each last changed.
#[derive(Debug, Default)]
struct Conditions {
    list: Vec<Condition>,
}

impl Conditions {
    /// True when a status, reason or message changed.
    fn update(&mut self, readiness: &Readiness) -> bool {
        let (status, reason, message) = if !readiness.programmed {
            (
                "False",
                "NetworkNotProgrammed",
                "the agent waits for the control plane's first state",
            )
        } else if readiness.problem.is_empty() {
            ("True", "AgentReady", "the agent is ready")
        } else {
            ("True", "AgentReady", readiness.problem.as_str())
        };
        let wanted = [
            (
                "MemoryPressure",
                "False",
                "AgentHasSufficientMemory",
                "enough memory is free",
            ),
            (
                "DiskPressure",
                "False",
                "AgentHasNoDiskPressure",
                "enough disk space is free",
            ),
            (
                "PIDPressure",
                "False",
                "AgentHasSufficientPID",
                "enough process ids are free",
            ),
            ("Ready", status, reason, message),
        ];
        let mut changed = self.list.len() != wanted.len();
        let now = now_us();
        self.list = wanted
            .iter()
            .map(|(kind, status, reason, message)| {
                let before = self.list.iter().find(|c| c.r#type == *kind);
                let same = before.is_some_and(|c| c.status == *status);
                changed |= before.is_none_or(|c| {
                    c.status != *status || c.reason != *reason || c.message != *message
                });
                Condition {
                    r#type: (*kind).into(),
                    status: (*status).into(),
                    reason: (*reason).into(),
                    message: (*message).into(),
                    last_transition_us: before
                        .filter(|_| same)
                        .map_or(now, |c| c.last_transition_us),
                }
            })
            .collect();
        changed
    }
}

fn report(config: &Config, conditions: &Conditions, full: bool) -> NodeReport {
    let mut report = NodeReport {
        name: config.node_name.clone(),
        full,
        ..NodeReport::default()
    };
    if !full {
        return report;
    }
    let pods = config.pods.as_ref();
    report.internal_ips = config.node_ips.iter().map(ToString::to_string).collect();
    report.hostname = config.node_name.clone();
    report.labels = labels(config);
    report.cpu_millis = std::thread::available_parallelism()
        .ok()
        .and_then(|n| i64::try_from(n.get()).ok())
        .unwrap_or(1)
        * 1000;
    report.memory_bytes = memory_bytes();
    report.ephemeral_storage_bytes = storage_bytes(&config.state_dir);
    report.max_pods = pods.map_or(0, |p| i64::from(p.max_pods));
    report.conditions = conditions.list.clone();
    report.info = Some(info());
    if let (Some(pods), Some(ip)) = (pods, config.node_ips.first()) {
        report.node_api_address = std::net::SocketAddr::new(*ip, pods.node_api_port).to_string();
    }
    report
}

/// Labels that every node has, under those of the configuration.
fn labels(config: &Config) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::from([
        (
            "kubernetes.io/hostname".to_owned(),
            config.node_name.clone(),
        ),
        ("kubernetes.io/os".to_owned(), "linux".to_owned()),
        ("kubernetes.io/arch".to_owned(), architecture().to_owned()),
    ]);
    labels.extend(config.labels.clone());
    labels
}

/// Go's names, which Kubernetes uses.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn info() -> NodeInfo {
    let read = |path: &str| {
        std::fs::read_to_string(path)
            .map(|t| t.trim().to_owned())
            .unwrap_or_default()
    };
    let machine_id = read("/etc/machine-id");
    let uuid = read("/sys/class/dmi/id/product_uuid");
    NodeInfo {
        kernel_version: read("/proc/sys/kernel/osrelease"),
        os_image: os_image(&read("/etc/os-release")),
        container_runtime_version: String::new(),
        agent_version: env!("CARGO_PKG_VERSION").into(),
        architecture: architecture().into(),
        system_uuid: if uuid.is_empty() {
            machine_id.clone()
        } else {
            uuid
        },
        machine_id,
        boot_id: read("/proc/sys/kernel/random/boot_id"),
    }
}

fn os_image(os_release: &str) -> String {
    os_release
        .lines()
        .find_map(|line| line.strip_prefix("PRETTY_NAME="))
        .map_or_else(
            || "Linux".to_owned(),
            |name| name.trim_matches('"').to_owned(),
        )
}

fn memory_bytes() -> i64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    text.lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))
        .and_then(|rest| rest.split_whitespace().next())
        .and_then(|kib| kib.parse::<i64>().ok())
        .map_or(0, |kib| kib.saturating_mul(1024))
}

fn storage_bytes(path: &Path) -> i64 {
    nix::sys::statvfs::statvfs(path).map_or(0, |fs| {
        i64::try_from(u128::from(fs.blocks()) * u128::from(fs.fragment_size())).unwrap_or(i64::MAX)
    })
}

fn now_us() -> i64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_keep_their_time_until_their_status_changes() {
        let mut conditions = Conditions::default();
        assert!(conditions.update(&Readiness::default()));
        assert!(!conditions.update(&Readiness::default()));
        let first = conditions.list.clone();
        assert_eq!(first[3].status, "False");
        let ready = Readiness {
            programmed: true,
            problem: String::new(),
        };
        assert!(conditions.update(&ready));
        assert_eq!(conditions.list[3].status, "True");
        assert_eq!(conditions.list[0], first[0]);
    }

    #[test]
    fn the_name_of_the_system_is_found() {
        assert_eq!(
            os_image("ID=debian\nPRETTY_NAME=\"Debian GNU/Linux 12\"\n"),
            "Debian GNU/Linux 12"
        );
        assert_eq!(os_image(""), "Linux");
    }
}
