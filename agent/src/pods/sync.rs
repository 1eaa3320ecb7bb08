//! The state machine of a pod: spec, runtime's view and memory in, the next action out. [pure]
//!
//! Level-triggered: one action at a time, decided anew after each, so that an interrupted run (a killed agent, a
//! restarted runtime) simply continues from what is there.

use control_api::v1::{Container, PodSpec, RestartPolicy};

use super::backoff::{Backoff, CRASH};
use super::memory::{Memory, Terminal};
use super::view::{ContainerState, ContainerView, Micros, PodView, SECOND_US, SandboxView};

/// Instances kept per container: the current one and the one before it (for `logs --previous` and the last state).
const KEPT_INSTANCES: usize = 2;

/// The next thing to do for a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Hooks, containers, then sandboxes.
    StopPod {
        grace_s: i64,
    },
    CreateSandbox {
        attempt: u32,
    },
    StartContainer {
        container: Which,
        sandbox_id: String,
        attempt: u32,
    },
    KillContainer {
        id: String,
        container: Which,
        grace_s: i64,
        message: String,
    },
    RemoveContainer {
        id: String,
    },
    RemoveSandbox {
        id: String,
    },
    /// Everything that is left: containers, sandboxes, network, volumes, logs, cgroup.
    RemovePod,
}

/// A container of the spec by its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    Init(usize),
    Main(usize),
}

impl Which {
    pub(crate) fn of(self, spec: &PodSpec) -> Option<&Container> {
        match self {
            Self::Init(at) => spec.init_containers.get(at),
            Self::Main(at) => spec.containers.get(at),
        }
    }
}

/// A container that waits, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wait {
    pub(crate) container: String,
    pub(crate) reason: &'static str,
    pub(crate) message: String,
    /// The crash waited for, by its time.
    pub(crate) crashed_us: Micros,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) action: Option<Action>,
    /// Decide again at this time even if nothing happens.
    pub(crate) wake_at: Option<Micros>,
    pub(crate) terminal: Option<Terminal>,
    pub(crate) waits: Vec<Wait>,
}

impl Plan {
    fn act(action: Action) -> Self {
        Self {
            action: Some(action),
            ..Self::default()
        }
    }

    fn wake(&mut self, at: Micros) {
        self.wake_at = Some(self.wake_at.map_or(at, |now| now.min(at)));
    }
}

/// Decides what comes next for this pod.
pub(crate) fn sync_pod(spec: &PodSpec, view: &PodView, memory: &Memory, now: Micros) -> Plan {
    let grace_s = spec.termination_grace_period_s;
    if spec.deleting {
        return stop_and_remove(spec.deletion_grace_s, view, memory, now);
    }
    if memory.terminal.is_some() {
        return stop(grace_s, view);
    }
    let deadline = deadline_of(spec, memory);
    let ended = finished(spec, view).or_else(|| match deadline {
        Some(at) if at <= now => Some(past_deadline()),
        _ => None,
    });
    if let Some(terminal) = ended {
        return Plan {
            terminal: Some(terminal),
            ..stop(grace_s, view)
        };
    }
    let mut plan = match view.usable_sandbox(spec.host_network) {
        Some(sandbox) if view.sandboxes.iter().filter(|s| s.ready).count() == 1 => {
            let run = Run {
                spec,
                view,
                memory,
                sandbox,
                now,
                plan: Plan::default(),
            };
            run.containers()
        }
        _ => make_sandbox(grace_s, view, memory, now),
    };
    if let Some(at) = deadline {
        plan.wake(at);
    }
    plan
}

fn deadline_of(spec: &PodSpec, memory: &Memory) -> Option<Micros> {
    (spec.active_deadline_s > 0)
        .then(|| memory.started_us + spec.active_deadline_s.saturating_mul(SECOND_US))
}

fn past_deadline() -> Terminal {
    Terminal {
        phase: "Failed",
        reason: "DeadlineExceeded".into(),
        message: "Pod was active on the node longer than the specified deadline".into(),
    }
}

fn stop(grace_s: i64, view: &PodView) -> Plan {
    let live = view.running().next().is_some() || view.sandboxes.iter().any(|s| s.ready);
    if live {
        Plan::act(Action::StopPod { grace_s })
    } else {
        Plan::default()
    }
}

fn stop_and_remove(grace_s: i64, view: &PodView, memory: &Memory, now: Micros) -> Plan {
    if view.is_empty() && memory.removed {
        return Plan::default();
    }
    // What the runtime refused to stop or remove is tried again later.
    if let Some(at) = memory.setup.not_before.filter(|at| *at > now) {
        return Plan {
            wake_at: Some(at),
            ..Plan::default()
        };
    }
    let plan = stop(grace_s, view);
    if plan.action.is_some() {
        plan
    } else {
        Plan::act(Action::RemovePod)
    }
}

fn make_sandbox(grace_s: i64, view: &PodView, memory: &Memory, now: Micros) -> Plan {
    let stop = stop(grace_s, view);
    if stop.action.is_some() {
        return stop;
    }
    if let Some(at) = memory.setup.not_before.filter(|at| *at > now) {
        return Plan {
            wake_at: Some(at),
            ..Plan::default()
        };
    }
    let attempt = view.sandboxes.first().map_or(0, |s| s.attempt + 1);
    Plan::act(Action::CreateSandbox { attempt })
}

/// The end of a pod by itself: all its containers are done and none may start again.
pub(crate) fn finished(spec: &PodSpec, view: &PodView) -> Option<Terminal> {
    let policy = spec.restart_policy();
    if policy == RestartPolicy::RestartAlways {
        return None;
    }
    let failed = |c: &ContainerView| c.state == ContainerState::Exited && c.exit_code != 0;
    let init_failed = policy == RestartPolicy::RestartNever
        && spec
            .init_containers
            .iter()
            .filter(|c| !c.sidecar)
            .any(|c| view.latest(&c.name).is_some_and(failed));
    if init_failed {
        return Some(ended("Failed"));
    }
    let mut phase = "Succeeded";
    for container in &spec.containers {
        let latest = view.latest(&container.name)?;
        if latest.state != ContainerState::Exited || may_restart(policy, latest) {
            return None;
        }
        if latest.exit_code != 0 {
            phase = "Failed";
        }
    }
    Some(ended(phase))
}

fn ended(phase: &'static str) -> Terminal {
    Terminal {
        phase,
        reason: String::new(),
        message: String::new(),
    }
}

pub(crate) fn may_restart(policy: RestartPolicy, exited: &ContainerView) -> bool {
    match policy {
        RestartPolicy::RestartAlways => true,
        RestartPolicy::RestartOnFailure => exited.exit_code != 0,
        RestartPolicy::RestartNever => false,
    }
}

/// The number that the next instance of a container gets.
pub(crate) fn next_attempt(name: &str, view: &PodView, memory: &Memory) -> u32 {
    if let Some(latest) = view.latest(name) {
        return latest.attempt + 1;
    }
    let reported = memory.reported.as_ref().and_then(|status| {
        status
            .init_containers
            .iter()
            .chain(&status.containers)
            .find(|c| c.name == name)
    });
    reported
        .filter(|c| !c.container_id.is_empty())
        .map_or(0, |c| u32::try_from(c.restart_count).unwrap_or(0) + 1)
}

/// Decisions inside a usable sandbox.
struct Run<'a> {
    spec: &'a PodSpec,
    view: &'a PodView,
    memory: &'a Memory,
    sandbox: &'a SandboxView,
    now: Micros,
    plan: Plan,
}

impl Run<'_> {
    fn containers(mut self) -> Plan {
        if self.init_containers() {
            let policy = self.spec.restart_policy();
            for (at, container) in self.spec.containers.iter().enumerate() {
                let latest = self.view.latest(&container.name);
                self.one(Which::Main(at), container, latest, policy);
            }
        }
        if self.plan.action.is_none() {
            self.plan.action = self.garbage();
        }
        self.plan
    }

    /// True when the main containers may run.
    fn init_containers(&mut self) -> bool {
        let in_sandbox = |c: &Container| self.view.latest_in(&self.sandbox.id, &c.name);
        let begun = self.spec.containers.iter().any(|c| in_sandbox(c).is_some());
        for (at, container) in self.spec.init_containers.iter().enumerate() {
            let latest = self.view.latest_in(&self.sandbox.id, &container.name);
            let which = Which::Init(at);
            if container.sidecar {
                self.one(which, container, latest, RestartPolicy::RestartAlways);
                let up = latest.is_some_and(|c| {
                    c.state == ContainerState::Running
                        && self.memory.is_started(&container.name, &c.id)
                });
                if !up && !begun {
                    return false;
                }
                continue;
            }
            let done =
                latest.is_some_and(|c| c.state == ContainerState::Exited && c.exit_code == 0);
            if done || begun {
                continue;
            }
            self.one(which, container, latest, RestartPolicy::RestartOnFailure);
            return false;
        }
        true
    }

    /// Decides for one container unless an action is chosen already.
    fn one(
        &mut self,
        which: Which,
        container: &Container,
        latest: Option<&ContainerView>,
        policy: RestartPolicy,
    ) {
        if self.plan.action.is_some() {
            return;
        }
        let Some(latest) = latest else {
            return self.start(which, container);
        };
        match latest.state {
            ContainerState::Created => {
                self.plan.action = Some(Action::RemoveContainer {
                    id: latest.id.clone(),
                });
            }
            ContainerState::Unknown => {
                let message = format!(
                    "Container {} is in an unknown state, will be restarted",
                    container.name
                );
                self.kill(which, latest, None, message);
            }
            ContainerState::Running => self.running(which, container, latest),
            ContainerState::Exited if may_restart(policy, latest) => {
                self.restart(which, container, latest);
            }
            ContainerState::Exited => {}
        }
    }

    fn running(&mut self, which: Which, container: &Container, latest: &ContainerView) {
        let unhealthy = self
            .memory
            .probes(&container.name, &latest.id)
            .and_then(|p| p.unhealthy.as_ref());
        if let Some(unhealthy) = unhealthy {
            self.kill(which, latest, unhealthy.grace_s, unhealthy.message.clone());
        } else if !latest.spec_image.is_empty() && latest.spec_image != container.image {
            let message = format!(
                "Container {} definition changed, will be restarted",
                container.name
            );
            self.kill(which, latest, None, message);
        }
    }

    fn kill(
        &mut self,
        which: Which,
        latest: &ContainerView,
        grace_s: Option<i64>,
        message: String,
    ) {
        self.plan.action = Some(Action::KillContainer {
            id: latest.id.clone(),
            container: which,
            grace_s: grace_s.unwrap_or(self.spec.termination_grace_period_s),
            message,
        });
    }

    fn restart(&mut self, which: Which, container: &Container, latest: &ContainerView) {
        let known = self
            .memory
            .containers
            .get(&container.name)
            .and_then(|c| c.crash);
        let backoff =
            known.unwrap_or_else(|| Backoff::after(CRASH, latest.attempt, latest.begun_us()));
        match backoff.until(CRASH, latest.finished_us) {
            Some(at) if at > self.now => {
                let pod = self.spec;
                self.plan.wake(at);
                self.plan.waits.push(Wait {
                    container: container.name.clone(),
                    reason: "CrashLoopBackOff",
                    message: format!(
                        "back-off {} restarting failed container={} pod={}_{}({})",
                        duration(backoff.delay_s()),
                        container.name,
                        pod.name,
                        pod.namespace,
                        pod.uid
                    ),
                    crashed_us: latest.finished_us,
                });
            }
            _ => self.start(which, container),
        }
    }

    fn start(&mut self, which: Which, container: &Container) {
        let retry = self
            .memory
            .containers
            .get(&container.name)
            .and_then(|c| c.start.not_before);
        if let Some(at) = retry.filter(|at| *at > self.now) {
            self.plan.wake(at);
            return;
        }
        self.plan.action = Some(Action::StartContainer {
            container: which,
            sandbox_id: self.sandbox.id.clone(),
            attempt: next_attempt(&container.name, self.view, self.memory),
        });
    }

    /// Instances and sandboxes that nobody asks for any more.
    fn garbage(&self) -> Option<Action> {
        let surplus = self.view.containers.iter().enumerate().find(|(at, c)| {
            let newer = self.view.containers[..*at]
                .iter()
                .filter(|o| o.name == c.name)
                .count();
            c.state == ContainerState::Exited && newer >= KEPT_INSTANCES
        });
        if let Some((_, container)) = surplus {
            return Some(Action::RemoveContainer {
                id: container.id.clone(),
            });
        }
        let old = self
            .view
            .sandboxes
            .iter()
            .skip(1)
            .find(|s| !s.ready && !self.view.containers.iter().any(|c| c.sandbox_id == s.id));
        old.map(|s| Action::RemoveSandbox { id: s.id.clone() })
    }
}

/// Seconds as Kubernetes prints them: `40s`, `1m20s`, `5m0s`.
pub(crate) fn duration(seconds: i64) -> String {
    if seconds < 60 {
        format!("{seconds}s")
    } else {
        format!("{}m{}s", seconds / 60, seconds % 60)
    }
}

#[cfg(test)]
#[path = "sync_tests.rs"]
mod tests;
