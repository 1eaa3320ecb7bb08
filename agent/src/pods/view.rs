//! What the runtime has of one pod, in our own terms. [pure]

use std::collections::BTreeMap;

use super::cri::v1;

/// Microseconds since the Unix epoch.
pub(crate) type Micros = i64;

pub(crate) const SECOND_US: Micros = 1_000_000;

/// Labels and annotations that the pod runner puts on sandboxes and containers. The first four are kubelet's names, so
/// that tools which look at containers by label keep working.
pub(crate) mod label {
    pub(crate) const POD_NAME: &str = "io.kubernetes.pod.name";
    pub(crate) const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
    pub(crate) const POD_UID: &str = "io.kubernetes.pod.uid";
    pub(crate) const CONTAINER_NAME: &str = "io.kubernetes.container.name";
    /// The image as the pod's spec names it: a change restarts the container.
    pub(crate) const IMAGE: &str = "io.weir.container.image";
    /// Where on the node the container writes its termination message.
    pub(crate) const TERMINATION_LOG: &str = "io.weir.container.termination-log";
    /// Where the container finds the pod's grace period when its spec is unknown (an orphan).
    pub(crate) const GRACE_PERIOD: &str = "io.weir.pod.termination-grace-period";
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ContainerState {
    /// Made but never started: left over from an interrupted start.
    Created,
    Running,
    Exited,
    Unknown,
}

impl ContainerView {
    /// When this instance was begun; one that could not start has no start time.
    pub(crate) fn begun_us(&self) -> Micros {
        self.started_us.max(self.created_us)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SandboxView {
    pub(crate) id: String,
    pub(crate) attempt: u32,
    pub(crate) ready: bool,
    pub(crate) created_us: Micros,
    /// Addresses the CNI plugin gave; empty for the host's network.
    pub(crate) ips: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ContainerView {
    pub(crate) id: String,
    pub(crate) sandbox_id: String,
    pub(crate) name: String,
    pub(crate) attempt: u32,
    pub(crate) state: ContainerState,
    pub(crate) created_us: Micros,
    pub(crate) started_us: Micros,
    pub(crate) finished_us: Micros,
    pub(crate) exit_code: i32,
    pub(crate) reason: String,
    pub(crate) message: String,
    /// As the runtime names it.
    pub(crate) image: String,
    pub(crate) image_ref: String,
    /// As the spec named it when the container was made.
    pub(crate) spec_image: String,
    pub(crate) termination_log: String,
    pub(crate) log_path: String,
}

/// One pod in the runtime: sandboxes and containers, newest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PodView {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) grace_s: Option<i64>,
    pub(crate) sandboxes: Vec<SandboxView>,
    pub(crate) containers: Vec<ContainerView>,
}

impl PodView {
    pub(crate) fn is_empty(&self) -> bool {
        self.sandboxes.is_empty() && self.containers.is_empty()
    }

    /// The newest container of this name, in whichever sandbox.
    pub(crate) fn latest(&self, name: &str) -> Option<&ContainerView> {
        self.containers.iter().find(|c| c.name == name)
    }

    /// The newest container of this name in this sandbox.
    pub(crate) fn latest_in(&self, sandbox: &str, name: &str) -> Option<&ContainerView> {
        self.containers
            .iter()
            .find(|c| c.name == name && c.sandbox_id == sandbox)
    }

    /// The container of this name before the newest.
    pub(crate) fn previous(&self, name: &str) -> Option<&ContainerView> {
        self.containers.iter().filter(|c| c.name == name).nth(1)
    }

    pub(crate) fn running(&self) -> impl Iterator<Item = &ContainerView> {
        self.containers
            .iter()
            .filter(|c| matches!(c.state, ContainerState::Running | ContainerState::Unknown))
    }

    /// The newest sandbox when it can hold containers.
    pub(crate) fn usable_sandbox(&self, host_network: bool) -> Option<&SandboxView> {
        self.sandboxes
            .first()
            .filter(|s| s.ready && (host_network || !s.ips.is_empty()))
    }

    fn sort(&mut self) {
        self.sandboxes
            .sort_by_key(|s| std::cmp::Reverse((s.attempt, s.created_us)));
        self.containers
            .sort_by_key(|c| std::cmp::Reverse((c.created_us, c.attempt)));
    }
}

/// Groups what the runtime listed by pod UID. Objects without our labels belong to somebody else and are left out.
pub(crate) fn group(
    sandboxes: Vec<(v1::PodSandbox, Vec<String>)>,
    containers: Vec<ContainerEntry>,
) -> BTreeMap<String, PodView> {
    let mut pods: BTreeMap<String, PodView> = BTreeMap::new();
    for (sandbox, ips) in sandboxes {
        let Some(uid) = sandbox.labels.get(label::POD_UID).cloned() else {
            continue;
        };
        let pod = pods.entry(uid).or_default();
        if let Some(metadata) = &sandbox.metadata {
            pod.namespace.clone_from(&metadata.namespace);
            pod.name.clone_from(&metadata.name);
        }
        pod.grace_s = sandbox
            .annotations
            .get(label::GRACE_PERIOD)
            .and_then(|g| g.parse().ok());
        let ready = sandbox.state() == v1::PodSandboxState::SandboxReady;
        pod.sandboxes.push(SandboxView {
            attempt: sandbox.metadata.map_or(0, |m| m.attempt),
            id: sandbox.id,
            ready,
            created_us: sandbox.created_at / 1000,
            ips,
        });
    }
    for entry in containers {
        let pod = pods.entry(entry.uid).or_default();
        if pod.name.is_empty() {
            pod.namespace = entry.namespace;
            pod.name = entry.pod;
        }
        pod.containers.push(entry.view);
    }
    for pod in pods.values_mut() {
        pod.sort();
    }
    pods
}

/// A container with the pod that its labels name.
#[derive(Clone, Debug)]
pub(crate) struct ContainerEntry {
    pub(crate) uid: String,
    pub(crate) namespace: String,
    pub(crate) pod: String,
    pub(crate) view: ContainerView,
}

/// Our view of a container's status; `None` without our labels.
pub(crate) fn container_entry(
    sandbox: &str,
    status: v1::ContainerStatus,
) -> Option<ContainerEntry> {
    let uid = status.labels.get(label::POD_UID)?.clone();
    let state = container_state(status.state());
    let of = |key: &str| status.labels.get(key).cloned().unwrap_or_default();
    let note = |key: &str| status.annotations.get(key).cloned().unwrap_or_default();
    let view = ContainerView {
        sandbox_id: sandbox.to_owned(),
        name: of(label::CONTAINER_NAME),
        state,
        created_us: status.created_at / 1000,
        started_us: status.started_at.max(0) / 1000,
        finished_us: status.finished_at.max(0) / 1000,
        exit_code: status.exit_code,
        spec_image: note(label::IMAGE),
        termination_log: note(label::TERMINATION_LOG),
        attempt: status.metadata.as_ref().map_or(0, |m| m.attempt),
        image: status
            .image
            .as_ref()
            .map(|i| i.image.clone())
            .unwrap_or_default(),
        id: status.id.clone(),
        reason: status.reason.clone(),
        message: status.message.clone(),
        image_ref: status.image_ref.clone(),
        log_path: status.log_path.clone(),
    };
    Some(ContainerEntry {
        uid,
        namespace: of(label::POD_NAMESPACE),
        pod: of(label::POD_NAME),
        view,
    })
}

pub(crate) fn container_state(state: v1::ContainerState) -> ContainerState {
    match state {
        v1::ContainerState::ContainerCreated => ContainerState::Created,
        v1::ContainerState::ContainerRunning => ContainerState::Running,
        v1::ContainerState::ContainerExited => ContainerState::Exited,
        v1::ContainerState::ContainerUnknown => ContainerState::Unknown,
    }
}
