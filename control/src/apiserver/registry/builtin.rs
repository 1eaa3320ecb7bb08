//! The built-in resources, in discovery's order.

use super::{ALL_VERBS, FieldLabels, ResourceDef, SubresourceDef, SubresourceKind, Text, Verb};

const CREATE: &[Verb] = &[Verb::Create];
const GET: &[Verb] = &[Verb::Get];
const UPDATE: &[Verb] = &[Verb::Update];
const GET_PATCH_UPDATE: &[Verb] = &[Verb::Get, Verb::Patch, Verb::Update];

const POD_FIELDS: FieldLabels = &[
    ("spec.nodeName", "spec.nodeName"),
    ("spec.restartPolicy", "spec.restartPolicy"),
    ("spec.schedulerName", "spec.schedulerName"),
    ("spec.serviceAccountName", "spec.serviceAccountName"),
    ("spec.hostNetwork", "spec.hostNetwork"),
    ("status.phase", "status.phase"),
    ("status.podIP", "status.podIP"),
    ("status.nominatedNodeName", "status.nominatedNodeName"),
];
const EVENT_FIELDS: FieldLabels = &[
    ("involvedObject.kind", "involvedObject.kind"),
    ("involvedObject.namespace", "involvedObject.namespace"),
    ("involvedObject.name", "involvedObject.name"),
    ("involvedObject.uid", "involvedObject.uid"),
    ("involvedObject.apiVersion", "involvedObject.apiVersion"),
    (
        "involvedObject.resourceVersion",
        "involvedObject.resourceVersion",
    ),
    ("involvedObject.fieldPath", "involvedObject.fieldPath"),
    ("reason", "reason"),
    ("reportingComponent", "reportingComponent"),
    ("source", "source.component"),
    ("type", "type"),
];
const EVENT_V1_FIELDS: FieldLabels = &[
    ("regarding.kind", "regarding.kind"),
    ("regarding.namespace", "regarding.namespace"),
    ("regarding.name", "regarding.name"),
    ("regarding.uid", "regarding.uid"),
    ("regarding.apiVersion", "regarding.apiVersion"),
    ("regarding.resourceVersion", "regarding.resourceVersion"),
    ("regarding.fieldPath", "regarding.fieldPath"),
    ("reason", "reason"),
    ("reportingController", "reportingController"),
    ("type", "type"),
];

/// A namespaced resource with every verb, stored in its own version.
fn namespaced(
    group: &'static str,
    version: &'static str,
    kind: &'static str,
    plural: &'static str,
) -> ResourceDef {
    let storage = if group.is_empty() {
        format!("core/{plural}")
    } else {
        format!("{group}/{plural}")
    };
    let storage_version = super::join_group_version(group, version);
    ResourceDef {
        group: group.into(),
        version: version.into(),
        kind: kind.into(),
        plural: plural.into(),
        singular: kind.to_ascii_lowercase().into(),
        short_names: Vec::new(),
        categories: Vec::new(),
        namespaced: true,
        verbs: ALL_VERBS,
        subresources: Vec::new(),
        storage: storage.into(),
        storage_version: storage_version.into(),
        has_generation: false,
        create_on_update: false,
        field_labels: &[],
    }
}

fn cluster(
    group: &'static str,
    version: &'static str,
    kind: &'static str,
    plural: &'static str,
) -> ResourceDef {
    ResourceDef {
        namespaced: false,
        ..namespaced(group, version, kind, plural)
    }
}

impl ResourceDef {
    fn short(mut self, names: &[&'static str]) -> Self {
        self.short_names = names.iter().map(|n| Text::Borrowed(n)).collect();
        self
    }

    fn all(mut self) -> Self {
        self.categories.push("all".into());
        self
    }

    fn sub_as(
        mut self,
        name: &'static str,
        what: SubresourceKind,
        gvk: (&'static str, &'static str, &'static str),
        verbs: &'static [Verb],
    ) -> Self {
        let (group, version, kind) = gvk;
        self.subresources.push(SubresourceDef {
            name,
            what,
            group: group.into(),
            version: version.into(),
            kind: kind.into(),
            verbs,
        });
        self
    }

    /// A subresource whose bodies are the parent's kind.
    fn sub(mut self, name: &'static str, what: SubresourceKind, verbs: &'static [Verb]) -> Self {
        let def = SubresourceDef {
            name,
            what,
            group: self.group.clone(),
            version: self.version.clone(),
            kind: self.kind.clone(),
            verbs,
        };
        self.subresources.push(def);
        self
    }

    fn status(self) -> Self {
        self.sub("status", SubresourceKind::Status, GET_PATCH_UPDATE)
    }

    fn scale(self) -> Self {
        let scale = ("autoscaling", "v1", "Scale");
        self.sub_as("scale", SubresourceKind::Scale, scale, GET_PATCH_UPDATE)
    }

    fn generation(mut self) -> Self {
        self.has_generation = true;
        self
    }

    fn upsert(mut self) -> Self {
        self.create_on_update = true;
        self
    }

    fn fields(mut self, labels: FieldLabels) -> Self {
        self.field_labels = labels;
        self
    }

    fn stored_as(mut self, storage: &'static str, version: &'static str) -> Self {
        self.storage = storage.into();
        self.storage_version = version.into();
        self
    }
}

pub(super) fn resources() -> Vec<ResourceDef> {
    [
        core(),
        apps(),
        reviews(),
        batch(),
        networking(),
        policy_and_scaling(),
        rbac(),
        cluster_wide(),
    ]
    .concat()
}

fn pod() -> ResourceDef {
    namespaced("", "v1", "Pod", "pods")
        .short(&["po"])
        .all()
        .generation()
        .fields(POD_FIELDS)
        .sub_as(
            "binding",
            SubresourceKind::Binding,
            ("", "v1", "Binding"),
            CREATE,
        )
        .sub_as(
            "eviction",
            SubresourceKind::Eviction,
            ("policy", "v1", "Eviction"),
            CREATE,
        )
        .sub("log", SubresourceKind::Log, GET)
        .status()
}

fn core() -> Vec<ResourceDef> {
    let token = ("authentication.k8s.io", "v1", "TokenRequest");
    let mut binding = namespaced("", "v1", "Binding", "bindings");
    binding.verbs = CREATE;
    vec![
        binding,
        namespaced("", "v1", "ConfigMap", "configmaps").short(&["cm"]),
        namespaced("", "v1", "Endpoints", "endpoints")
            .short(&["ep"])
            .upsert(),
        namespaced("", "v1", "Event", "events")
            .short(&["ev"])
            .upsert()
            .fields(EVENT_FIELDS),
        namespaced("", "v1", "LimitRange", "limitranges")
            .short(&["limits"])
            .upsert(),
        cluster("", "v1", "Namespace", "namespaces")
            .short(&["ns"])
            .sub("finalize", SubresourceKind::Finalize, UPDATE)
            .status()
            .fields(&[("status.phase", "status.phase")]),
        cluster("", "v1", "Node", "nodes")
            .short(&["no"])
            .status()
            .fields(&[("spec.unschedulable", "spec.unschedulable")]),
        namespaced("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims")
            .short(&["pvc"])
            .status(),
        cluster("", "v1", "PersistentVolume", "persistentvolumes")
            .short(&["pv"])
            .status(),
        pod(),
        namespaced("", "v1", "PodTemplate", "podtemplates").generation(),
        namespaced("", "v1", "ReplicationController", "replicationcontrollers")
            .short(&["rc"])
            .all()
            .generation()
            .fields(&[("status.replicas", "status.replicas")])
            .scale()
            .status(),
        namespaced("", "v1", "ResourceQuota", "resourcequotas")
            .short(&["quota"])
            .status(),
        namespaced("", "v1", "Secret", "secrets").fields(&[("type", "type")]),
        namespaced("", "v1", "ServiceAccount", "serviceaccounts")
            .short(&["sa"])
            .sub_as("token", SubresourceKind::Token, token, CREATE),
        namespaced("", "v1", "Service", "services")
            .short(&["svc"])
            .all()
            .status()
            .fields(&[
                ("spec.clusterIP", "spec.clusterIP"),
                ("spec.type", "spec.type"),
            ]),
    ]
}

fn apps() -> Vec<ResourceDef> {
    let app = |kind, plural, short| {
        namespaced("apps", "v1", kind, plural)
            .short(&[short])
            .all()
            .generation()
    };
    vec![
        namespaced("apps", "v1", "ControllerRevision", "controllerrevisions"),
        app("DaemonSet", "daemonsets", "ds").status(),
        app("Deployment", "deployments", "deploy").scale().status(),
        app("ReplicaSet", "replicasets", "rs")
            .scale()
            .status()
            .fields(&[("status.replicas", "status.replicas")]),
        app("StatefulSet", "statefulsets", "sts").scale().status(),
        namespaced("events.k8s.io", "v1", "Event", "events")
            .short(&["ev"])
            .upsert()
            .fields(EVENT_V1_FIELDS)
            .stored_as("core/events", "v1"),
    ]
}

fn batch() -> Vec<ResourceDef> {
    vec![
        namespaced("batch", "v1", "CronJob", "cronjobs")
            .short(&["cj"])
            .all()
            .generation()
            .status(),
        namespaced("batch", "v1", "Job", "jobs")
            .all()
            .generation()
            .status()
            .fields(&[("status.successful", "status.succeeded")]),
        cluster(
            "certificates.k8s.io",
            "v1",
            "CertificateSigningRequest",
            "certificatesigningrequests",
        )
        .short(&["csr"])
        .sub("approval", SubresourceKind::Approval, GET_PATCH_UPDATE)
        .status()
        .fields(&[("spec.signerName", "spec.signerName")]),
        namespaced("coordination.k8s.io", "v1", "Lease", "leases").upsert(),
        namespaced("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices").generation(),
    ]
}

fn networking() -> Vec<ResourceDef> {
    vec![
        cluster("networking.k8s.io", "v1", "IngressClass", "ingressclasses").generation(),
        namespaced("networking.k8s.io", "v1", "Ingress", "ingresses")
            .short(&["ing"])
            .generation()
            .status(),
        cluster("networking.k8s.io", "v1", "IPAddress", "ipaddresses")
            .short(&["ip"])
            .fields(&[("spec.parentRef.name", "spec.parentRef.name")]),
        namespaced(
            "networking.k8s.io",
            "v1",
            "NetworkPolicy",
            "networkpolicies",
        )
        .short(&["netpol"])
        .generation(),
        cluster("networking.k8s.io", "v1", "ServiceCIDR", "servicecidrs").status(),
        cluster("node.k8s.io", "v1", "RuntimeClass", "runtimeclasses"),
    ]
}

fn policy_and_scaling() -> Vec<ResourceDef> {
    let scaler = |version| {
        namespaced(
            "autoscaling",
            version,
            "HorizontalPodAutoscaler",
            "horizontalpodautoscalers",
        )
        .short(&["hpa"])
        .all()
        .status()
        .stored_as("autoscaling/horizontalpodautoscalers", "autoscaling/v2")
    };
    vec![
        scaler("v2"),
        scaler("v1"),
        namespaced(
            "policy",
            "v1",
            "PodDisruptionBudget",
            "poddisruptionbudgets",
        )
        .short(&["pdb"])
        .generation()
        .status(),
        cluster(
            "policy.networking.k8s.io",
            "v1alpha2",
            "ClusterNetworkPolicy",
            "clusternetworkpolicies",
        )
        .short(&["cnp"])
        .generation()
        .status(),
    ]
}

fn rbac() -> Vec<ResourceDef> {
    const GROUP: &str = "rbac.authorization.k8s.io";
    vec![
        cluster(GROUP, "v1", "ClusterRoleBinding", "clusterrolebindings"),
        cluster(GROUP, "v1", "ClusterRole", "clusterroles"),
        namespaced(GROUP, "v1", "RoleBinding", "rolebindings"),
        namespaced(GROUP, "v1", "Role", "roles"),
    ]
}

fn cluster_wide() -> Vec<ResourceDef> {
    vec![
        cluster(
            "scheduling.k8s.io",
            "v1",
            "PriorityClass",
            "priorityclasses",
        )
        .short(&["pc"])
        .generation(),
        cluster("storage.k8s.io", "v1", "CSIDriver", "csidrivers"),
        cluster("storage.k8s.io", "v1", "CSINode", "csinodes"),
        namespaced(
            "storage.k8s.io",
            "v1",
            "CSIStorageCapacity",
            "csistoragecapacities",
        ),
        cluster("storage.k8s.io", "v1", "StorageClass", "storageclasses").short(&["sc"]),
        cluster(
            "storage.k8s.io",
            "v1",
            "VolumeAttachment",
            "volumeattachments",
        )
        .status(),
    ]
}

/// Questions that are answered and not stored.
fn reviews() -> Vec<ResourceDef> {
    let review = |def: ResourceDef| ResourceDef {
        verbs: CREATE,
        ..def
    };
    let authorization = |kind, plural| review(cluster("authorization.k8s.io", "v1", kind, plural));
    vec![
        review(cluster(
            "authentication.k8s.io",
            "v1",
            "SelfSubjectReview",
            "selfsubjectreviews",
        )),
        review(cluster(
            "authentication.k8s.io",
            "v1",
            "TokenReview",
            "tokenreviews",
        )),
        review(namespaced(
            "authorization.k8s.io",
            "v1",
            "LocalSubjectAccessReview",
            "localsubjectaccessreviews",
        )),
        authorization("SelfSubjectAccessReview", "selfsubjectaccessreviews"),
        authorization("SelfSubjectRulesReview", "selfsubjectrulesreviews"),
        authorization("SubjectAccessReview", "subjectaccessreviews"),
    ]
}
