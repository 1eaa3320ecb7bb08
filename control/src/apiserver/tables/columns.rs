//! The columns of each kind, as data.

use super::Column;
use crate::apiserver::registry::Gvk;

/// A text column that is always shown.
const fn text(name: &'static str) -> Column {
    Column {
        name,
        kind: "string",
        format: "",
        description: "",
        priority: 0,
    }
}

/// A text column of `-o wide`.
const fn wide(name: &'static str) -> Column {
    Column {
        name,
        kind: "string",
        format: "",
        description: "",
        priority: 1,
    }
}

const fn integer(name: &'static str) -> Column {
    Column {
        name,
        kind: "integer",
        format: "",
        description: "",
        priority: 0,
    }
}

const fn boolean(name: &'static str) -> Column {
    Column {
        name,
        kind: "boolean",
        format: "",
        description: "",
        priority: 0,
    }
}

const NAME: Column = Column {
    name: "Name",
    kind: "string",
    format: "name",
    description: "Name of the object, unique among objects of its kind in its namespace",
    priority: 0,
};
const AGE: Column = Column {
    name: "Age",
    kind: "string",
    format: "",
    description: "Time since the object was created",
    priority: 0,
};
const CREATED: Column = Column {
    name: "Created At",
    kind: "date",
    format: "",
    description: "Time at which the object was created",
    priority: 0,
};
const CONTAINERS: Column = wide("Containers");
const IMAGES: Column = wide("Images");
const SELECTOR: Column = wide("Selector");

pub(super) fn of(gvk: Gvk<'_>) -> Vec<Column> {
    match (gvk.group, gvk.kind) {
        ("", kind) => core(kind),
        ("apps" | "batch", kind) => workloads(kind),
        ("discovery.k8s.io" | "networking.k8s.io" | "policy.networking.k8s.io", kind) => {
            network(kind)
        }
        (group, kind) => others(group, kind),
    }
    .unwrap_or_else(|| vec![NAME, CREATED])
}

fn core(kind: &str) -> Option<Vec<Column>> {
    Some(match kind {
        "Pod" => vec![
            NAME,
            text("Ready"),
            text("Status"),
            text("Restarts"),
            AGE,
            wide("IP"),
            wide("Node"),
            wide("Nominated Node"),
            wide("Readiness Gates"),
        ],
        "Service" => {
            vec![
                NAME,
                text("Type"),
                text("Cluster-IP"),
                text("External-IP"),
                text("Port(s)"),
                AGE,
                SELECTOR,
            ]
        }
        "Node" => vec![
            NAME,
            text("Status"),
            text("Roles"),
            AGE,
            text("Version"),
            wide("Internal-IP"),
            wide("External-IP"),
            wide("OS-Image"),
            wide("Kernel-Version"),
            wide("Container-Runtime"),
        ],
        "Event" => event(),
        "Namespace" => vec![NAME, text("Status"), AGE],
        "ConfigMap" => vec![NAME, text("Data"), AGE],
        "Secret" => vec![NAME, text("Type"), text("Data"), AGE],
        "ServiceAccount" => vec![NAME, AGE],
        "Endpoints" => vec![NAME, text("Endpoints"), AGE],
        "ResourceQuota" => vec![NAME, text("Request"), text("Limit"), AGE],
        "ReplicationController" => return workloads("ReplicaSet"),
        "PodTemplate" => vec![NAME, text("Containers"), text("Images"), text("Pod Labels")],
        "PersistentVolume" => vec![
            NAME,
            text("Capacity"),
            text("Access Modes"),
            text("Reclaim Policy"),
            text("Status"),
            text("Claim"),
            text("StorageClass"),
            text("VolumeAttributesClass"),
            text("Reason"),
            AGE,
            wide("VolumeMode"),
        ],
        "PersistentVolumeClaim" => vec![
            NAME,
            text("Status"),
            text("Volume"),
            text("Capacity"),
            text("Access Modes"),
            text("StorageClass"),
            text("VolumeAttributesClass"),
            AGE,
            wide("VolumeMode"),
        ],
        _ => return None,
    })
}

fn event() -> Vec<Column> {
    vec![
        text("Last Seen"),
        text("Type"),
        text("Reason"),
        text("Object"),
        wide("Subobject"),
        wide("Source"),
        text("Message"),
        wide("First Seen"),
        wide("Count"),
        Column {
            priority: 1,
            ..NAME
        },
    ]
}

fn workloads(kind: &str) -> Option<Vec<Column>> {
    let mut columns = match kind {
        "Deployment" => vec![
            NAME,
            text("Ready"),
            text("Up-to-date"),
            text("Available"),
            AGE,
        ],
        "ReplicaSet" => vec![
            NAME,
            integer("Desired"),
            integer("Current"),
            integer("Ready"),
            AGE,
        ],
        "StatefulSet" => vec![NAME, text("Ready"), AGE],
        "DaemonSet" => vec![
            NAME,
            integer("Desired"),
            integer("Current"),
            integer("Ready"),
            integer("Up-to-date"),
            integer("Available"),
            text("Node Selector"),
            AGE,
        ],
        "Job" => vec![
            NAME,
            text("Status"),
            text("Completions"),
            text("Duration"),
            AGE,
        ],
        "CronJob" => vec![
            NAME,
            text("Schedule"),
            text("Timezone"),
            boolean("Suspend"),
            integer("Active"),
            text("Last Schedule"),
            AGE,
        ],
        "ControllerRevision" => return Some(vec![NAME, text("Controller"), text("Revision"), AGE]),
        _ => return None,
    };
    columns.extend([CONTAINERS, IMAGES]);
    if kind != "StatefulSet" {
        columns.push(SELECTOR);
    }
    Some(columns)
}

fn network(kind: &str) -> Option<Vec<Column>> {
    Some(match kind {
        "EndpointSlice" => vec![
            NAME,
            text("AddressType"),
            text("Ports"),
            text("Endpoints"),
            AGE,
        ],
        "Ingress" => vec![
            NAME,
            text("Class"),
            text("Hosts"),
            text("Address"),
            text("Ports"),
            AGE,
        ],
        "IngressClass" => vec![NAME, text("Controller"), text("Parameters"), AGE],
        "NetworkPolicy" => vec![NAME, text("Pod-Selector"), AGE],
        "ClusterNetworkPolicy" => vec![NAME, text("Tier"), text("Priority"), AGE],
        "IPAddress" => vec![NAME, text("ParentRef"), AGE],
        "ServiceCIDR" => vec![NAME, text("CIDRs"), AGE],
        _ => return None,
    })
}

fn others(group: &str, kind: &str) -> Option<Vec<Column>> {
    Some(match (group, kind) {
        ("events.k8s.io", "Event") => event(),
        ("coordination.k8s.io", "Lease") => vec![NAME, text("Holder"), AGE],
        ("autoscaling", "Scale") => vec![NAME, integer("Desired"), integer("Available"), AGE],
        ("autoscaling", "HorizontalPodAutoscaler") => vec![
            NAME,
            text("Reference"),
            text("Targets"),
            text("MinPods"),
            text("MaxPods"),
            text("Replicas"),
            AGE,
        ],
        ("policy", "PodDisruptionBudget") => vec![
            NAME,
            text("Min Available"),
            text("Max Unavailable"),
            integer("Allowed Disruptions"),
            AGE,
        ],
        ("rbac.authorization.k8s.io", "RoleBinding" | "ClusterRoleBinding") => {
            vec![
                NAME,
                text("Role"),
                AGE,
                wide("Users"),
                wide("Groups"),
                wide("ServiceAccounts"),
            ]
        }
        ("certificates.k8s.io", "CertificateSigningRequest") => vec![
            NAME,
            AGE,
            text("SignerName"),
            text("Requestor"),
            text("RequestedDuration"),
            text("Condition"),
        ],
        ("scheduling.k8s.io", "PriorityClass") => vec![
            NAME,
            integer("Value"),
            boolean("Global-Default"),
            AGE,
            Column {
                priority: 1,
                ..text("PreemptionPolicy")
            },
        ],
        ("node.k8s.io", "RuntimeClass") => vec![NAME, text("Handler"), AGE],
        ("storage.k8s.io", "StorageClass") => vec![
            NAME,
            text("Provisioner"),
            text("ReclaimPolicy"),
            text("VolumeBindingMode"),
            boolean("AllowVolumeExpansion"),
            AGE,
        ],
        ("storage.k8s.io", "CSINode") => vec![NAME, integer("Drivers"), AGE],
        ("storage.k8s.io", "VolumeAttachment") => {
            vec![
                NAME,
                text("Attacher"),
                text("PV"),
                text("Node"),
                boolean("Attached"),
                AGE,
            ]
        }
        _ => return None,
    })
}
