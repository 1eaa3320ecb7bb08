//! Tells the control plane that this node exists, what it has, and that it lives.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use control_api::v1::{Condition, NodeReport};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use weir_agent::config::{Config, Pods};
use weir_agent::feed::FeedHandle;
use weir_agent::pods::{NodeReportFields, PodRunner};

use super::Readiness;

/// The Lease is renewed this often; it lasts several times as long.
const LEASE_PERIOD: Duration = Duration::from_secs(10);
/// The whole status is sent at least this often.
const FULL_PERIOD: Duration = Duration::from_secs(300);
/// Pause after a report that failed, and between looks at a node that is not ready.
const RETRY_PERIOD: Duration = Duration::from_millis(500);

/// Reports until the agent ends: at once when the node's state changes, else every [`LEASE_PERIOD`].
pub(super) async fn run(
    config: Arc<Config>,
    pods: PodRunner,
    feed: FeedHandle,
    mut readiness: watch::Receiver<Readiness>,
    shutdown: CancellationToken,
) {
    let Some(settings) = config.pods.clone() else {
        return;
    };
    let mut conditions = Conditions::default();
    let mut told: Option<(NodeReport, tokio::time::Instant)> = None;
    let mut renewed: Option<tokio::time::Instant> = None;
    let mut failing = false;
    loop {
        let now = readiness.borrow_and_update().clone();
        let fields = pods.node_report_fields().await;
        conditions.update(&fields, &now, now_us());
        let whole = report(&config, &settings, fields, &conditions);
        let full = told
            .as_ref()
            .is_none_or(|(last, at)| *last != whole || at.elapsed() >= FULL_PERIOD);
        let due = renewed.is_none_or(|at| at.elapsed() >= LEASE_PERIOD);
        if full || due {
            let sent = if full { whole.clone() } else { lease(&config) };
            let result = feed.report_node(sent).await;
            match &result {
                Ok(_) => {
                    renewed = Some(tokio::time::Instant::now());
                    if full {
                        told = Some((whole, tokio::time::Instant::now()));
                    }
                }
                Err(e) => {
                    // The Node may be gone: the next report says all that makes it.
                    told = None;
                    if !failing {
                        tracing::warn!(error = %e, "cannot report this node; trying again");
                    }
                }
            }
            if failing && result.is_ok() {
                tracing::info!("the control plane takes reports of this node again");
            }
            failing = result.is_err();
        }
        let pause = if failing || !conditions.ready() {
            RETRY_PERIOD
        } else {
            LEASE_PERIOD
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
    fn update(&mut self, fields: &NodeReportFields, readiness: &Readiness, now_us: i64) {
        let mut list = fields.conditions.clone();
        for condition in &mut list {
            if condition.r#type == "Ready" {
                merge_readiness(condition, readiness);
            }
            let before = self.list.iter().find(|c| c.r#type == condition.r#type);
            condition.last_transition_us = before
                .filter(|c| c.status == condition.status)
                .map_or(now_us, |c| c.last_transition_us);
        }
        self.list = list;
    }

    fn ready(&self) -> bool {
        self.list
            .iter()
            .any(|c| c.r#type == "Ready" && c.status == "True")
    }
}

/// A node whose kernel holds no services yet must get no pods.
fn merge_readiness(condition: &mut Condition, readiness: &Readiness) {
    if !readiness.programmed {
        let why = if readiness.problem.is_empty() {
            "waiting for the control plane's first state"
        } else {
            &readiness.problem
        };
        let before = if condition.status == "True" {
            ""
        } else {
            condition.message.as_str()
        };
        let separator = if before.is_empty() { "" } else { "; " };
        condition.message = format!("{before}{separator}dataplane not programmed: {why}");
        condition.status = "False".into();
        condition.reason = "KubeletNotReady".into();
    } else if !readiness.problem.is_empty() {
        condition.message = format!("{}; dataplane: {}", condition.message, readiness.problem);
    }
}

fn lease(config: &Config) -> NodeReport {
    NodeReport {
        name: config.node_name.clone(),
        full: false,
        ..NodeReport::default()
    }
}

fn report(
    config: &Config,
    settings: &Pods,
    fields: NodeReportFields,
    conditions: &Conditions,
) -> NodeReport {
    let api = config
        .node_ips
        .first()
        .map(|ip| SocketAddr::new(*ip, settings.node_api_port));
    NodeReport {
        name: config.node_name.clone(),
        internal_ips: config.node_ips.iter().map(ToString::to_string).collect(),
        hostname: config.node_name.clone(),
        labels: labels(config, &fields.info.architecture),
        cpu_millis: fields.cpu_millis,
        memory_bytes: fields.memory_bytes,
        ephemeral_storage_bytes: fields.ephemeral_storage_bytes,
        max_pods: fields.max_pods,
        conditions: conditions.list.clone(),
        info: Some(fields.info),
        node_api_address: api.map(|a| a.to_string()).unwrap_or_default(),
        full: true,
        external_cloud_provider: config.external_cloud_provider,
    }
}

/// Labels that every node has, under those of the configuration.
fn labels(config: &Config, architecture: &str) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::from([
        (
            "kubernetes.io/hostname".to_owned(),
            config.node_name.clone(),
        ),
        ("kubernetes.io/os".to_owned(), "linux".to_owned()),
        ("kubernetes.io/arch".to_owned(), architecture.to_owned()),
    ]);
    labels.extend(config.labels.clone());
    labels
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

    fn fields() -> NodeReportFields {
        let condition = |kind: &str, status: &str| Condition {
            r#type: kind.into(),
            status: status.into(),
            message: "fine".into(),
            ..Condition::default()
        };
        NodeReportFields {
            conditions: vec![
                condition("MemoryPressure", "False"),
                condition("Ready", "True"),
            ],
            ..NodeReportFields::default()
        }
    }

    #[test]
    fn a_node_is_ready_once_its_kernel_is_programmed() {
        let mut conditions = Conditions::default();
        conditions.update(&fields(), &Readiness::default(), 1);
        assert!(!conditions.ready());
        assert!(conditions.list[1].message.contains("first state"));
        let programmed = Readiness {
            programmed: true,
            problem: String::new(),
        };
        conditions.update(&fields(), &programmed, 2);
        assert!(conditions.ready());
        conditions.update(&fields(), &programmed, 3);
        let times: Vec<i64> = conditions
            .list
            .iter()
            .map(|c| c.last_transition_us)
            .collect();
        assert_eq!(times, [1, 2], "a time is that of the last change of status");
    }
}
