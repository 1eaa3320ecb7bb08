//! Pod reports: status of pods as their node sees it, and the removal of pods whose processes are gone.

use control_api::v1::{ContainerState, ContainerStatus, PodReports, PodStatus, container_state};
use serde_json::{Map, Value, json};
use tonic::Status;

use super::node::merge_conditions;
use super::{Feed, api_status, now_us, time_text};
use crate::client::{DeleteOptions, resources};

const WRITE_ATTEMPTS: usize = 8;

impl Feed {
    /// Writes each status. One that cannot be written does not stop the others; the first failure is answered, and the
    /// node reports again.
    pub(super) async fn report_pods(&self, reports: PodReports) -> Result<(), Status> {
        let mut failure = Ok(());
        for pod in reports.pods {
            let written = self.report_pod(&reports.node_name, &pod).await;
            failure = failure.and(written);
        }
        failure
    }

    async fn report_pod(&self, node: &str, report: &PodStatus) -> Result<(), Status> {
        let now = now_us();
        for _ in 0..WRITE_ATTEMPTS {
            let pod = match self
                .client
                .get(resources::PODS, &report.namespace, &report.name)
                .await
            {
                Ok(pod) => pod,
                Err(error) if error.is_not_found() => return Ok(()),
                Err(error) => return Err(api_status("read a pod", &error)),
            };
            let known = pod["metadata"]["uid"] == *report.uid && pod["spec"]["nodeName"] == *node;
            if !known {
                return Ok(());
            }
            let status = pod_status(&pod["status"], report, now);
            if status != pod["status"] {
                let mut next = Value::clone(&pod);
                next["status"] = status;
                match self.client.update_status(resources::PODS, next).await {
                    Ok(_) => {}
                    Err(error) if error.is_conflict() => continue,
                    Err(error) if error.is_not_found() => return Ok(()),
                    Err(error) => return Err(api_status("write a pod's status", &error)),
                }
            }
            if report.gone && pod["metadata"]["deletionTimestamp"].is_string() {
                return self.remove_pod(report).await;
            }
            return Ok(());
        }
        Err(Status::aborted(format!(
            "the status of pod {}/{} changes faster than it can be written",
            report.namespace, report.name
        )))
    }

    async fn remove_pod(&self, report: &PodStatus) -> Result<(), Status> {
        let options = DeleteOptions {
            grace_period_s: Some(0),
            uid: Some(report.uid.clone()),
            ..DeleteOptions::default()
        };
        match self
            .client
            .delete(resources::PODS, &report.namespace, &report.name, options)
            .await
        {
            Ok(()) => Ok(()),
            // Gone already, or another pod has the name now.
            Err(error) if error.is_not_found() || error.is_conflict() => Ok(()),
            Err(error) => Err(api_status("remove a pod", &error)),
        }
    }
}

/// The status after a report. What nodes do not report (qosClass, nominatedNodeName, other conditions) stays.
fn pod_status(before: &Value, report: &PodStatus, now: i64) -> Value {
    let mut after = before.as_object().cloned().unwrap_or_default();
    set(&mut after, "phase", text(&report.phase));
    set(&mut after, "reason", text(&report.reason));
    set(&mut after, "message", text(&report.message));
    set(
        &mut after,
        "hostIP",
        report.host_ips.first().map(|ip| json!(ip)),
    );
    set(&mut after, "hostIPs", ip_list(&report.host_ips));
    set(
        &mut after,
        "podIP",
        report.pod_ips.first().map(|ip| json!(ip)),
    );
    set(&mut after, "podIPs", ip_list(&report.pod_ips));
    let started = (report.started_at_us > 0).then(|| json!(time_text(report.started_at_us)));
    if started.is_some() {
        set(&mut after, "startTime", started);
    }
    if !report.conditions.is_empty() {
        let conditions = merge_conditions(&before["conditions"], &report.conditions, now, false);
        after.insert("conditions".into(), conditions);
    }
    set(
        &mut after,
        "initContainerStatuses",
        container_statuses(&report.init_containers),
    );
    set(
        &mut after,
        "containerStatuses",
        container_statuses(&report.containers),
    );
    Value::Object(after)
}

fn set(map: &mut Map<String, Value>, key: &str, value: Option<Value>) {
    match value {
        Some(value) => {
            map.insert(key.into(), value);
        }
        None => {
            map.shift_remove(key);
        }
    }
}

fn text(value: &str) -> Option<Value> {
    (!value.is_empty()).then(|| json!(value))
}

fn ip_list(ips: &[String]) -> Option<Value> {
    let list: Vec<Value> = ips.iter().map(|ip| json!({"ip": ip})).collect();
    (!list.is_empty()).then_some(Value::Array(list))
}

fn container_statuses(statuses: &[ContainerStatus]) -> Option<Value> {
    let list: Vec<Value> = statuses.iter().map(container_status).collect();
    (!list.is_empty()).then_some(Value::Array(list))
}

fn container_status(status: &ContainerStatus) -> Value {
    let mut object = json!({
        "name": status.name,
        "state": container_state(status.state.as_ref()),
        "lastState": container_state(status.last_state.as_ref()),
        "ready": status.ready,
        "restartCount": status.restart_count,
        "image": status.image,
        "imageID": status.image_id,
        "started": status.started,
    });
    if !status.container_id.is_empty() {
        object["containerID"] = json!(status.container_id);
    }
    object
}

fn container_state(state: Option<&ContainerState>) -> Value {
    match state.and_then(|s| s.kind.as_ref()) {
        None => json!({}),
        Some(container_state::Kind::Waiting(waiting)) => {
            let mut inner = Map::new();
            set(&mut inner, "reason", text(&waiting.reason));
            set(&mut inner, "message", text(&waiting.message));
            json!({"waiting": inner})
        }
        Some(container_state::Kind::Running(running)) => {
            json!({"running": {"startedAt": time_text(running.started_at_us)}})
        }
        Some(container_state::Kind::Terminated(end)) => {
            let mut inner = Map::new();
            inner.insert("exitCode".into(), json!(end.exit_code));
            set(
                &mut inner,
                "signal",
                (end.signal != 0).then(|| json!(end.signal)),
            );
            set(&mut inner, "reason", text(&end.reason));
            set(&mut inner, "message", text(&end.message));
            inner.insert("startedAt".into(), json!(time_text(end.started_at_us)));
            inner.insert("finishedAt".into(), json!(time_text(end.finished_at_us)));
            set(&mut inner, "containerID", text(&end.container_id));
            json!({"terminated": inner})
        }
    }
}
