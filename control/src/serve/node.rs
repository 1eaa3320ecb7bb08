//! Node reports: the Node object, its status, and its Lease.

use std::sync::Arc;
use std::time::Duration;

use control_api::v1::{Condition, NodeReport, NodeReportReply};
use serde_json::{Map, Value, json};
use tonic::Status;

use super::logs::NODE_API_ANNOTATION;
use super::{Feed, api_status, micro_time_text, now_us, time_text};
use crate::client::{PatchKind, resources};

/// As kubelet's default; nodes renew four times in it.
const LEASE_DURATION_S: i32 = 40;
const LEASE_NAMESPACE: &str = "kube-node-lease";
/// How long the first report waits for the node controller to give the node its pod CIDRs.
const POD_CIDR_WAIT: Duration = Duration::from_secs(2);
/// A status that says nothing new is written again after this time only: the Lease carries the heartbeat.
const STATUS_REFRESH_US: i64 = 300 * 1_000_000;
const WRITE_ATTEMPTS: usize = 5;

/// The Kubernetes version whose node API this agent speaks.
const KUBERNETES_VERSION: &str = "v1.36.4";

/// Keeps pods away until a cloud's controller has initialised the node, and asks it to (KEP-2392).
const UNINITIALIZED_TAINT: &str = "node.cloudprovider.kubernetes.io/uninitialized";
/// The addresses that a cloud's controller must confirm.
const PROVIDED_ADDRESS_ANNOTATION: &str = "alpha.kubernetes.io/provided-node-ip";

impl Feed {
    pub(super) async fn report_node(&self, report: NodeReport) -> Result<NodeReportReply, Status> {
        let now = now_us();
        let node = match self.client.get(resources::NODES, "", &report.name).await {
            Ok(node) => node,
            Err(error) if error.is_not_found() && report.full => self.register(&report).await?,
            // A Lease alone cannot make a Node: it would stand without addresses and conditions.
            Err(error) if error.is_not_found() => {
                return Err(Status::not_found(format!(
                    "there is no Node {:?}: report it in full",
                    report.name
                )));
            }
            Err(error) => return Err(api_status("read the Node", &error)),
        };
        self.logs.learn(&report.name, &report.node_api_address);
        if report.full {
            self.refresh_metadata(&node, &report).await?;
            self.refresh_status(&report, now).await?;
        }
        self.renew_lease(&node, &report.name, now).await?;
        let pod_cidrs = self.pod_cidrs(&report.name, &node).await?;
        Ok(NodeReportReply {
            pod_cidrs,
            lease_duration_s: LEASE_DURATION_S,
        })
    }

    async fn register(&self, report: &NodeReport) -> Result<Arc<Value>, Status> {
        let mut node = json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {
                "name": report.name,
                "labels": labels(report),
                "annotations": annotations(report),
            },
        });
        if report.external_cloud_provider {
            node["spec"]["taints"] = json!([
                {"key": UNINITIALIZED_TAINT, "value": "true", "effect": "NoSchedule"}
            ]);
        }
        match self.client.create(resources::NODES, "", node).await {
            Ok(node) => {
                tracing::info!(node = report.name, "registered a node");
                Ok(node)
            }
            // Another report of the same node was faster.
            Err(error) if error.is_already_exists() => self
                .client
                .get(resources::NODES, "", &report.name)
                .await
                .map_err(|error| api_status("read the Node", &error)),
            Err(error) => Err(api_status("create the Node", &error)),
        }
    }

    /// Labels and annotations that the agent owns; others on the object stay.
    async fn refresh_metadata(&self, node: &Value, report: &NodeReport) -> Result<(), Status> {
        let missing = |wanted: Map<String, Value>, present: &Value| -> Map<String, Value> {
            wanted
                .into_iter()
                .filter(|(key, value)| present.get(key) != Some(value))
                .collect()
        };
        let metadata = &node["metadata"];
        let labels = missing(labels(report), &metadata["labels"]);
        let annotations = missing(annotations(report), &metadata["annotations"]);
        if labels.is_empty() && annotations.is_empty() {
            return Ok(());
        }
        let patch = json!({"metadata": {"labels": labels, "annotations": annotations}});
        self.client
            .patch(
                resources::NODES,
                "",
                &report.name,
                "",
                PatchKind::Merge,
                patch,
            )
            .await
            .map_err(|error| api_status("label the Node", &error))?;
        Ok(())
    }

    async fn refresh_status(&self, report: &NodeReport, now: i64) -> Result<(), Status> {
        for _ in 0..WRITE_ATTEMPTS {
            let node = self
                .client
                .get(resources::NODES, "", &report.name)
                .await
                .map_err(|error| api_status("read the Node", &error))?;
            let Some(status) = node_status(&node["status"], report, now) else {
                return Ok(());
            };
            let mut next = Value::clone(&node);
            next["status"] = status;
            match self.client.update_status(resources::NODES, next).await {
                Ok(_) => return Ok(()),
                Err(error) if error.is_conflict() => {}
                Err(error) => return Err(api_status("write the Node's status", &error)),
            }
        }
        Err(Status::aborted(
            "the Node's status changes faster than it can be written",
        ))
    }

    async fn renew_lease(&self, node: &Value, name: &str, now: i64) -> Result<(), Status> {
        let spec = json!({
            "holderIdentity": name,
            "leaseDurationSeconds": LEASE_DURATION_S,
            "renewTime": micro_time_text(now),
        });
        let patch = json!({"spec": spec});
        let renewed = self
            .client
            .patch(
                resources::LEASES,
                LEASE_NAMESPACE,
                name,
                "",
                PatchKind::Merge,
                patch,
            )
            .await;
        match renewed {
            Ok(_) => return Ok(()),
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(api_status("renew the node's Lease", &error)),
        }
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {"name": name, "namespace": LEASE_NAMESPACE, "ownerReferences": [{
                "apiVersion": "v1", "kind": "Node", "name": name, "uid": node["metadata"]["uid"],
            }]},
            "spec": spec,
        });
        match self
            .client
            .create(resources::LEASES, LEASE_NAMESPACE, lease)
            .await
        {
            Ok(_) => Ok(()),
            Err(error) if error.is_already_exists() => Ok(()),
            Err(error) => Err(api_status("create the node's Lease", &error)),
        }
    }

    /// The node's pod CIDRs; waits a little for a new node to be given some.
    async fn pod_cidrs(&self, name: &str, node: &Value) -> Result<Vec<String>, Status> {
        let given = pod_cidrs(node);
        if !given.is_empty() {
            return Ok(given);
        }
        let deadline = tokio::time::Instant::now() + POD_CIDR_WAIT;
        let mut ticks = self.hub.ticks();
        loop {
            let node = self
                .client
                .get(resources::NODES, "", name)
                .await
                .map_err(|error| api_status("read the Node", &error))?;
            let given = pod_cidrs(&node);
            let over = tokio::time::timeout_at(deadline, ticks.changed())
                .await
                .is_err();
            if over || !given.is_empty() {
                return Ok(given);
            }
        }
    }
}

fn pod_cidrs(node: &Value) -> Vec<String> {
    let listed = node["spec"]["podCIDRs"].as_array().into_iter().flatten();
    let texts: Vec<String> = listed
        .filter_map(Value::as_str)
        .map(str::to_owned)
        .collect();
    if texts.is_empty() {
        return node["spec"]["podCIDR"]
            .as_str()
            .map(str::to_owned)
            .into_iter()
            .collect();
    }
    texts
}

fn labels(report: &NodeReport) -> Map<String, Value> {
    let architecture = report
        .info
        .as_ref()
        .map_or("", |info| info.architecture.as_str());
    let mut labels: Map<String, Value> = report
        .labels
        .iter()
        .map(|(key, value)| (key.clone(), json!(value)))
        .collect();
    for (key, value) in [
        ("kubernetes.io/hostname", hostname(report)),
        ("kubernetes.io/os", "linux"),
        ("kubernetes.io/arch", architecture),
        ("beta.kubernetes.io/os", "linux"),
        ("beta.kubernetes.io/arch", architecture),
    ] {
        if !value.is_empty() {
            labels.entry(key).or_insert_with(|| json!(value));
        }
    }
    labels
}

fn annotations(report: &NodeReport) -> Map<String, Value> {
    let mut annotations = Map::new();
    if !report.node_api_address.is_empty() {
        let address = json!(report.node_api_address);
        annotations.insert(NODE_API_ANNOTATION.to_owned(), address);
    }
    if report.external_cloud_provider {
        let addresses = json!(report.internal_ips.join(","));
        annotations.insert(PROVIDED_ADDRESS_ANNOTATION.to_owned(), addresses);
    }
    annotations
}

/// The status after this report; `None` when it would say nothing new.
fn node_status(before: &Value, report: &NodeReport, now: i64) -> Option<Value> {
    let mut after = before.as_object().cloned().unwrap_or_default();
    let info = report.info.clone().unwrap_or_default();
    let resources = capacity(report);
    after.insert("capacity".into(), resources.clone());
    after.insert("allocatable".into(), resources);
    // Those that a cloud has confirmed are the cloud's to change.
    if !report.external_cloud_provider || !before["addresses"].is_array() {
        after.insert("addresses".into(), addresses(report));
    }
    let port = report
        .node_api_address
        .rsplit_once(':')
        .and_then(|(_, p)| p.parse::<u16>().ok());
    if let Some(port) = port {
        after.insert(
            "daemonEndpoints".into(),
            json!({"kubeletEndpoint": {"Port": port}}),
        );
    }
    after.insert(
        "nodeInfo".into(),
        json!({
            "machineID": info.machine_id,
            "systemUUID": info.system_uuid,
            "bootID": info.boot_id,
            "kernelVersion": info.kernel_version,
            "osImage": info.os_image,
            "containerRuntimeVersion": info.container_runtime_version,
            "kubeletVersion": format!("{KUBERNETES_VERSION}+weir-{}", info.agent_version.trim_start_matches('v')),
            "kubeProxyVersion": "",
            "operatingSystem": "linux",
            "architecture": info.architecture,
        }),
    );
    let old_conditions = &before["conditions"];
    let conditions = merge_conditions(old_conditions, &report.conditions, now, true);
    let fresh = heartbeat_is_fresh(old_conditions, now);
    if fresh && same_but_heartbeats(old_conditions, &conditions) {
        // Compare the rest as it was, heartbeats included.
        after.insert("conditions".into(), old_conditions.clone());
        let after = Value::Object(after);
        return (after != *before).then_some(after);
    }
    after.insert("conditions".into(), conditions);
    Some(Value::Object(after))
}

fn addresses(report: &NodeReport) -> Value {
    let internal = report.internal_ips.iter();
    let internal = internal.map(|ip| json!({"type": "InternalIP", "address": ip}));
    let hostname = json!({"type": "Hostname", "address": hostname(report)});
    internal.chain([hostname]).collect()
}

fn hostname(report: &NodeReport) -> &str {
    if report.hostname.is_empty() {
        &report.name
    } else {
        &report.hostname
    }
}

fn capacity(report: &NodeReport) -> Value {
    let cpu = if report.cpu_millis % 1000 == 0 {
        (report.cpu_millis / 1000).to_string()
    } else {
        format!("{}m", report.cpu_millis)
    };
    json!({
        "cpu": cpu,
        "memory": format!("{}Ki", report.memory_bytes / 1024),
        "ephemeral-storage": format!("{}Ki", report.ephemeral_storage_bytes / 1024),
        "pods": report.max_pods.to_string(),
    })
}

/// Conditions after a report: those it names are replaced, others stay. A transition time moves with the status only.
pub(super) fn merge_conditions(
    before: &Value,
    reported: &[Condition],
    now: i64,
    heartbeats: bool,
) -> Value {
    let old = before.as_array().cloned().unwrap_or_default();
    let mut merged = old.clone();
    for condition in reported {
        let previous = old.iter().find(|c| c["type"] == *condition.r#type);
        let transition = match previous {
            Some(c) if c["status"] == *condition.status && c["lastTransitionTime"].is_string() => {
                c["lastTransitionTime"].clone()
            }
            _ if condition.last_transition_us > 0 => json!(time_text(condition.last_transition_us)),
            _ => json!(time_text(now)),
        };
        let mut next = json!({"type": condition.r#type, "status": condition.status});
        if heartbeats {
            next["lastHeartbeatTime"] = json!(time_text(now));
        }
        next["lastTransitionTime"] = transition;
        for (key, text) in [
            ("reason", &condition.reason),
            ("message", &condition.message),
        ] {
            if !text.is_empty() {
                next[key] = json!(text);
            }
        }
        if !heartbeats && let Some(generation) = previous.and_then(|c| c.get("observedGeneration"))
        {
            next["observedGeneration"] = generation.clone();
        }
        match merged.iter_mut().find(|c| c["type"] == *condition.r#type) {
            Some(slot) => *slot = next,
            None => merged.push(next),
        }
    }
    Value::Array(merged)
}

fn heartbeat_is_fresh(conditions: &Value, now: i64) -> bool {
    let times = conditions
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|condition| {
            condition["lastHeartbeatTime"]
                .as_str()?
                .parse::<jiff::Timestamp>()
                .ok()
        });
    let newest = times.map(|t| t.as_microsecond()).max();
    newest.is_some_and(|newest| now - newest < STATUS_REFRESH_US)
}

fn same_but_heartbeats(a: &Value, b: &Value) -> bool {
    let strip = |conditions: &Value| {
        let mut list = conditions.as_array().cloned().unwrap_or_default();
        for condition in &mut list {
            if let Some(fields) = condition.as_object_mut() {
                fields.remove("lastHeartbeatTime");
            }
        }
        list
    };
    strip(a) == strip(b)
}
