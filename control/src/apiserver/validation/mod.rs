//! Validation per kind. Returns causes; an empty list means valid. Pure.
//!
//! The caller has checked that apiVersion, kind, name and namespace agree with the request. The rules, paths and texts
//! are those of the Kubernetes API, because people and tools read them.

mod config;
mod container;
mod cron;
mod cursor;
mod metadata;
mod names;
mod network_policy;
mod pod;
mod policy;
mod service;
mod workloads;

use serde_json::Value;

use super::registry::Gvk;
use crate::status::Cause;
use cursor::At;

/// A defaulted object that is about to be created, metadata included (name syntax by kind, labels, annotations,
/// ownerReferences, finalizers).
#[must_use]
pub fn validate_create(gvk: Gvk<'_>, object: &Value) -> Vec<Cause> {
    let root = At::root(object);
    metadata::create(gvk, &root.get("metadata"));
    object_rules(gvk, &root, None);
    root.into_causes()
}

/// A defaulted object that replaces `old`: everything of create plus immutable fields.
#[must_use]
pub fn validate_update(gvk: Gvk<'_>, new: &Value, old: &Value) -> Vec<Cause> {
    let root = At::root(new);
    let before = At::root(old);
    metadata::update(&root.get("metadata"), &before.get("metadata"));
    object_rules(gvk, &root, Some(&before));
    match (gvk.group, gvk.kind) {
        ("", "Pod") => pod::update(&root.get("spec"), &before.get("spec")),
        ("", "Service") => service::service_update(&root, &before),
        ("", "ConfigMap") => config::immutable(&root, &before),
        ("", "Secret") => config::secret_update(&root, &before),
        ("", "Node") => policy::node_update(&root, &before),
        ("apps", "Deployment" | "ReplicaSet" | "DaemonSet") => {
            workloads::fixed_selector(&root, &before);
        }
        ("apps", "StatefulSet") => workloads::stateful_set_update(&root, &before),
        ("batch", "Job") => workloads::job_update(&root, &before),
        ("discovery.k8s.io", "EndpointSlice") => service::endpoint_slice_update(&root, &before),
        ("rbac.authorization.k8s.io", "RoleBinding" | "ClusterRoleBinding") => {
            policy::role_binding_update(&root, &before);
        }
        ("scheduling.k8s.io", "PriorityClass") => policy::priority_class_update(&root, &before),
        _ => {}
    }
    root.into_causes()
}

/// A write to the `status` subresource.
#[must_use]
pub fn validate_status_update(gvk: Gvk<'_>, new: &Value, old: &Value) -> Vec<Cause> {
    let root = At::root(new);
    metadata::update(&root.get("metadata"), &At::root(old).get("metadata"));
    let status = root.get("status");
    if gvk.group == "apps" || (gvk.group, gvk.kind) == ("batch", "Job") {
        for counter in [
            "replicas",
            "readyReplicas",
            "availableReplicas",
            "updatedReplicas",
            "fullyLabeledReplicas",
            "observedGeneration",
            "active",
            "succeeded",
            "failed",
        ] {
            status.get(counter).non_negative();
        }
    }
    match (gvk.group, gvk.kind) {
        ("", "Service") => service::service_status(&root),
        ("policy.networking.k8s.io", "ClusterNetworkPolicy") => {
            network_policy::conditions(&status.get("conditions"));
        }
        _ => {}
    }
    if (gvk.group, gvk.kind) == ("", "Pod") {
        status
            .get("phase")
            .one_of(&["Failed", "Pending", "Running", "Succeeded", "Unknown"]);
    }
    root.into_causes()
}

/// `old` is what the object replaces, for rules that leave alone what was there before.
fn object_rules(gvk: Gvk<'_>, root: &At<'_>, old: Option<&At<'_>>) {
    match (gvk.group, gvk.kind) {
        ("", kind) => core_rules(kind, root),
        ("apps", "Deployment") => workloads::deployment(root),
        ("apps", "ReplicaSet") => workloads::replica_set(root),
        ("apps", "StatefulSet") => workloads::stateful_set(root),
        ("apps", "DaemonSet") => workloads::daemon_set(root),
        ("batch", "Job") => workloads::job(root),
        ("batch", "CronJob") => workloads::cron_job(root),
        ("discovery.k8s.io", "EndpointSlice") => service::endpoint_slice(root),
        ("coordination.k8s.io", "Lease") => policy::lease(root),
        ("rbac.authorization.k8s.io", "Role") => policy::role(root, true),
        ("rbac.authorization.k8s.io", "ClusterRole") => policy::role(root, false),
        ("rbac.authorization.k8s.io", "RoleBinding") => policy::role_binding(root, true),
        ("rbac.authorization.k8s.io", "ClusterRoleBinding") => policy::role_binding(root, false),
        ("policy", "PodDisruptionBudget") => policy::disruption_budget(root),
        ("autoscaling", "HorizontalPodAutoscaler") => policy::autoscaler(root),
        ("networking.k8s.io", "NetworkPolicy") => network_policy::network_policy(root, old),
        ("policy.networking.k8s.io", "ClusterNetworkPolicy") => {
            network_policy::cluster_network_policy(root, old);
        }
        ("networking.k8s.io", "Ingress") => policy::ingress(root),
        ("scheduling.k8s.io", "PriorityClass") => policy::priority_class(root),
        ("storage.k8s.io", "StorageClass") => policy::storage_class(root),
        _ => {}
    }
}

fn core_rules(kind: &str, root: &At<'_>) {
    match kind {
        "Pod" => pod::spec(&root.get("spec")),
        "Service" => service::service(root),
        "ConfigMap" => config::config_map(root),
        "Secret" => config::secret(root),
        "Node" => policy::node(root),
        "Namespace" => policy::namespace(root),
        "Endpoints" => service::endpoints(root),
        "ReplicationController" => workloads::replication_controller(root),
        "PodTemplate" => pod::template(&root.get("template")),
        "ResourceQuota" => policy::quota(root),
        "LimitRange" => policy::limit_range(root),
        "PersistentVolumeClaim" => policy::claim(root),
        _ => {}
    }
}

#[cfg(test)]
mod tests;
