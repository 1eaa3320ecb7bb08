//! What the runner knows of a pod besides its spec and the runtime's view. [pure]

use std::collections::BTreeMap;

use control_api::v1::PodStatus;

use super::backoff::Backoff;
use super::view::Micros;

/// Why the pod as a whole ended or must end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Terminal {
    /// `Succeeded` or `Failed`.
    pub(crate) phase: &'static str,
    pub(crate) reason: String,
    pub(crate) message: String,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Memory {
    /// When this node first saw the pod.
    pub(crate) started_us: Micros,
    /// The last status reported, from before a restart too: times of transitions and last states come from it.
    pub(crate) reported: Option<PodStatus>,
    pub(crate) terminal: Option<Terminal>,
    /// Sandbox or volumes could not be made.
    pub(crate) setup: Retry,
    pub(crate) containers: BTreeMap<String, ContainerMemory>,
    /// Everything of the pod is removed from the node.
    pub(crate) removed: bool,
}

/// A failed step and when it may be tried again.
#[derive(Clone, Debug, Default)]
pub(crate) struct Retry {
    pub(crate) backoff: Backoff,
    pub(crate) not_before: Option<Micros>,
    pub(crate) failed_at: Micros,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct ContainerMemory {
    pub(crate) crash: Option<Backoff>,
    pub(crate) start: Retry,
    /// Reason and message while the container waits.
    pub(crate) waiting: Option<(String, String)>,
    pub(crate) probes: Probes,
    /// The crash that was last announced by an event, by its time.
    pub(crate) announced: Micros,
}

/// What probes and hooks said of one container instance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Probes {
    pub(crate) container_id: String,
    pub(crate) ready: bool,
    pub(crate) started: bool,
    /// Liveness or startup probe, or the post-start hook, failed for good: why the container must be restarted.
    pub(crate) unhealthy: Option<Unhealthy>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unhealthy {
    pub(crate) message: String,
    /// Overrides the pod's grace period.
    pub(crate) grace_s: Option<i64>,
}

impl Memory {
    pub(crate) fn container(&mut self, name: &str) -> &mut ContainerMemory {
        self.containers.entry(name.to_owned()).or_default()
    }

    /// What is known of this instance; nothing of an older one.
    pub(crate) fn probes(&self, name: &str, container_id: &str) -> Option<&Probes> {
        self.containers
            .get(name)
            .map(|c| &c.probes)
            .filter(|p| p.container_id == container_id)
    }

    pub(crate) fn is_ready(&self, name: &str, container_id: &str) -> bool {
        self.probes(name, container_id)
            .is_some_and(|p| p.ready && p.started)
    }

    pub(crate) fn is_started(&self, name: &str, container_id: &str) -> bool {
        self.probes(name, container_id).is_some_and(|p| p.started)
    }
}
