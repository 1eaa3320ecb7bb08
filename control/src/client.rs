//! The door through which scheduler, controllers and the feed server use the API from inside the process.
//!
//! The same code path as HTTP: defaulting, validation, admission and revisions apply. Objects are JSON values in the
//! stored version of their resource.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value;
use tokio::sync::mpsc;

use crate::status::ApiError;

/// A resource by group, version and plural name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Resource {
    pub group: &'static str,
    pub version: &'static str,
    pub plural: &'static str,
}

/// The resources that code inside the control plane names.
pub mod resources {
    use super::Resource;

    const fn core(plural: &'static str) -> Resource {
        Resource {
            group: "",
            version: "v1",
            plural,
        }
    }
    const fn in_group(group: &'static str, plural: &'static str) -> Resource {
        Resource {
            group,
            version: "v1",
            plural,
        }
    }
    pub const PODS: Resource = core("pods");
    pub const NODES: Resource = core("nodes");
    pub const SERVICES: Resource = core("services");
    pub const NAMESPACES: Resource = core("namespaces");
    pub const CONFIG_MAPS: Resource = core("configmaps");
    pub const SECRETS: Resource = core("secrets");
    pub const EVENTS: Resource = core("events");
    pub const SERVICE_ACCOUNTS: Resource = core("serviceaccounts");
    pub const ENDPOINTS: Resource = core("endpoints");
    pub const DEPLOYMENTS: Resource = in_group("apps", "deployments");
    pub const REPLICA_SETS: Resource = in_group("apps", "replicasets");
    pub const ENDPOINT_SLICES: Resource = in_group("discovery.k8s.io", "endpointslices");
    pub const NETWORK_POLICIES: Resource = in_group("networking.k8s.io", "networkpolicies");
    pub const CLUSTER_NETWORK_POLICIES: Resource = Resource {
        group: "policy.networking.k8s.io",
        version: "v1alpha2",
        plural: "clusternetworkpolicies",
    };
    pub const LEASES: Resource = in_group("coordination.k8s.io", "leases");
    pub const PERSISTENT_VOLUME_CLAIMS: Resource = core("persistentvolumeclaims");
    pub const REPLICATION_CONTROLLERS: Resource = core("replicationcontrollers");
    pub const RESOURCE_QUOTAS: Resource = core("resourcequotas");
    pub const CONTROLLER_REVISIONS: Resource = in_group("apps", "controllerrevisions");
    pub const STATEFUL_SETS: Resource = in_group("apps", "statefulsets");
    pub const DAEMON_SETS: Resource = in_group("apps", "daemonsets");
    pub const JOBS: Resource = in_group("batch", "jobs");
    pub const CRON_JOBS: Resource = in_group("batch", "cronjobs");
    pub const POD_DISRUPTION_BUDGETS: Resource = in_group("policy", "poddisruptionbudgets");
    pub const PRIORITY_CLASSES: Resource = in_group("scheduling.k8s.io", "priorityclasses");

    const fn entry(
        resource: Resource,
        kind: &'static str,
        namespaced: bool,
    ) -> super::CatalogEntry {
        super::CatalogEntry {
            resource,
            kind,
            namespaced,
        }
    }

    /// What a client without a registry of its own offers to the controllers that walk every resource.
    pub const BUILT_IN: &[super::CatalogEntry] = &[
        entry(PODS, "Pod", true),
        entry(NODES, "Node", false),
        entry(SERVICES, "Service", true),
        entry(NAMESPACES, "Namespace", false),
        entry(CONFIG_MAPS, "ConfigMap", true),
        entry(SECRETS, "Secret", true),
        entry(EVENTS, "Event", true),
        entry(SERVICE_ACCOUNTS, "ServiceAccount", true),
        entry(ENDPOINTS, "Endpoints", true),
        entry(DEPLOYMENTS, "Deployment", true),
        entry(REPLICA_SETS, "ReplicaSet", true),
        entry(ENDPOINT_SLICES, "EndpointSlice", true),
        entry(LEASES, "Lease", true),
    ];
}

/// One stored resource as discovery knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CatalogEntry {
    pub resource: Resource,
    pub kind: &'static str,
    pub namespaced: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    Added,
    Modified,
    Deleted,
    /// Carries only a revision: nothing older is still to come.
    Bookmark,
}

/// One change of one object. A deleted object is its last state, with the revision of the deletion.
#[derive(Clone, Debug)]
pub struct WatchEvent {
    pub kind: EventKind,
    pub object: Arc<Value>,
    pub revision: u64,
    /// When the store committed it, microseconds since the Unix epoch.
    pub committed_at_us: i64,
}

/// A consistent list and the revision it was taken at.
#[derive(Clone, Debug)]
pub struct List {
    pub items: Vec<Arc<Value>>,
    pub revision: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PatchKind {
    Json,
    Merge,
    StrategicMerge,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Propagation {
    Background,
    Foreground,
    Orphan,
}

/// Options of a delete. `None` leaves the choice to the resource's default.
#[derive(Clone, Debug, Default)]
pub struct DeleteOptions {
    /// Seconds; 0 deletes at once.
    pub grace_period_s: Option<i64>,
    pub uid: Option<String>,
    pub resource_version: Option<String>,
    pub propagation: Option<Propagation>,
}

/// In-process access to the API.
#[async_trait]
pub trait ObjectClient: Send + Sync + 'static {
    async fn get(&self, r: Resource, namespace: &str, name: &str) -> Result<Arc<Value>, ApiError>;

    /// All objects; an empty namespace means every namespace.
    async fn list(&self, r: Resource, namespace: &str) -> Result<List, ApiError>;

    /// Changes strictly after `revision`, gap-free. The channel closes when the watcher falls too far behind or the
    /// revision is compacted (list again); a 410 answer says so at once.
    async fn watch(
        &self,
        r: Resource,
        revision: u64,
    ) -> Result<mpsc::Receiver<WatchEvent>, ApiError>;

    async fn create(
        &self,
        r: Resource,
        namespace: &str,
        object: Value,
    ) -> Result<Arc<Value>, ApiError>;

    /// Replaces the object; a resourceVersion in it must be current (409 otherwise).
    async fn update(&self, r: Resource, object: Value) -> Result<Arc<Value>, ApiError>;

    /// Replaces `status` only.
    async fn update_status(&self, r: Resource, object: Value) -> Result<Arc<Value>, ApiError>;

    /// `subresource` is empty or, for example, "status". For namespaces "finalize" writes `spec.finalizers` only, and
    /// removes a terminating namespace whose last finalizer went.
    async fn patch(
        &self,
        r: Resource,
        namespace: &str,
        name: &str,
        subresource: &str,
        kind: PatchKind,
        patch: Value,
    ) -> Result<Arc<Value>, ApiError>;

    async fn delete(
        &self,
        r: Resource,
        namespace: &str,
        name: &str,
        options: DeleteOptions,
    ) -> Result<(), ApiError>;

    /// Every stored resource in its storage version, custom ones included; the garbage collector and the namespace
    /// controller walk it.
    fn catalog(&self) -> Vec<CatalogEntry> {
        resources::BUILT_IN.to_vec()
    }

    /// Assigns a pod to a node (the `binding` subresource).
    async fn bind(&self, namespace: &str, pod: &str, node: &str) -> Result<(), ApiError>;
}
