//! A pod's status as kubelet computes it, from spec, view and memory. [pure]

use std::net::IpAddr;

use control_api::v1::{
    Condition, Container, ContainerState as State, ContainerStatus, PodSpec, PodStatus,
    RestartPolicy, Running, Terminated, Waiting, container_state::Kind,
};

use super::memory::Memory;
use super::sync::may_restart;
use super::view::{ContainerState, ContainerView, Micros, PodView};

/// The whole status at `now`.
pub(crate) fn pod_status(
    spec: &PodSpec,
    view: &PodView,
    memory: &Memory,
    node_ips: &[IpAddr],
    now: Micros,
) -> PodStatus {
    let initialized = initialized(spec, view, memory);
    let init_containers: Vec<_> = spec
        .init_containers
        .iter()
        .map(|c| container_status(spec, c, true, initialized, view, memory))
        .collect();
    let containers: Vec<_> = spec
        .containers
        .iter()
        .map(|c| container_status(spec, c, false, initialized, view, memory))
        .collect();
    let mut status = PodStatus {
        namespace: spec.namespace.clone(),
        name: spec.name.clone(),
        uid: spec.uid.clone(),
        host_ips: node_ips.iter().map(ToString::to_string).collect(),
        pod_ips: pod_ips(spec, view, node_ips),
        started_at_us: memory.started_us,
        init_containers,
        containers,
        ..PodStatus::default()
    };
    let phase = phase(spec, &status, initialized);
    status.phase = phase.into();
    if let Some(terminal) = &memory.terminal {
        status.phase = terminal.phase.into();
        status.reason.clone_from(&terminal.reason);
        status.message.clone_from(&terminal.message);
        for container in status
            .containers
            .iter_mut()
            .chain(&mut status.init_containers)
        {
            end_waiting(container);
        }
    }
    if status.pod_ips.is_empty() {
        // A stopped pod keeps the addresses it had.
        if let Some(reported) = &memory.reported {
            status.pod_ips.clone_from(&reported.pod_ips);
        }
    }
    status.conditions = conditions(spec, view, memory, &status, initialized, now);
    status
}

/// Addresses of the pod, the family of the node's primary address first.
fn pod_ips(spec: &PodSpec, view: &PodView, node_ips: &[IpAddr]) -> Vec<String> {
    if spec.host_network {
        return node_ips.iter().map(ToString::to_string).collect();
    }
    let Some(sandbox) = view.sandboxes.first() else {
        return Vec::new();
    };
    let mut ips: Vec<IpAddr> = sandbox
        .ips
        .iter()
        .filter_map(|ip| ip.parse().ok())
        .collect();
    let v6_first = node_ips.first().is_some_and(IpAddr::is_ipv6);
    ips.sort_by_key(|ip| ip.is_ipv6() != v6_first);
    ips.iter().map(ToString::to_string).collect()
}

/// True when the init containers are done and the sidecars started, so that main containers may run.
pub(crate) fn initialized(spec: &PodSpec, view: &PodView, memory: &Memory) -> bool {
    let Some(sandbox) = view.sandboxes.first() else {
        return spec.init_containers.is_empty();
    };
    let begun = spec
        .containers
        .iter()
        .any(|c| view.latest_in(&sandbox.id, &c.name).is_some());
    begun
        || spec.init_containers.iter().all(|c| {
            view.latest_in(&sandbox.id, &c.name).is_some_and(|v| {
                if c.sidecar {
                    v.state == ContainerState::Running && memory.is_started(&c.name, &v.id)
                } else {
                    v.state == ContainerState::Exited && v.exit_code == 0
                }
            })
        })
}

fn container_status(
    spec: &PodSpec,
    container: &Container,
    init: bool,
    initialized: bool,
    view: &PodView,
    memory: &Memory,
) -> ContainerStatus {
    let mut status = ContainerStatus {
        name: container.name.clone(),
        image: container.image.clone(),
        ..ContainerStatus::default()
    };
    let reported = memory.reported.as_ref().and_then(|r| {
        r.init_containers
            .iter()
            .chain(&r.containers)
            .find(|c| c.name == container.name)
    });
    let ends = spec.deleting || memory.terminal.is_some();
    let known = memory
        .containers
        .get(&container.name)
        .and_then(|c| c.waiting.clone());
    let Some(latest) = view.latest(&container.name) else {
        let why = known.unwrap_or_else(|| default_wait(spec, init, initialized));
        status.state = Some(waiting(why));
        if let Some(reported) = reported.filter(|r| !r.container_id.is_empty()) {
            recall(&mut status, reported, ends);
        }
        return status;
    };
    status.restart_count = i32::try_from(latest.attempt).unwrap_or(i32::MAX);
    status.container_id = format!("containerd://{}", latest.id);
    status.image_id.clone_from(&latest.image_ref);
    if !latest.image.is_empty() && !latest.image.starts_with("sha256:") {
        status.image.clone_from(&latest.image);
    }
    let before = reported
        .filter(|r| r.restart_count > 0)
        .and_then(|r| r.last_state.clone());
    status.last_state = view.previous(&container.name).map(terminated).or(before);
    match latest.state {
        ContainerState::Running => {
            let running = Running {
                started_at_us: latest.started_us,
            };
            status.state = Some(State {
                kind: Some(Kind::Running(running)),
            });
            status.started = memory.is_started(&container.name, &latest.id);
            status.ready =
                memory.is_ready(&container.name, &latest.id) && (!init || container.sidecar);
        }
        ContainerState::Exited => {
            let restarts = !ends && may_restart(policy_of(spec, container, init), latest);
            status.ready = init && !container.sidecar && latest.exit_code == 0;
            exited(&mut status, latest, known.filter(|_| restarts));
        }
        ContainerState::Created | ContainerState::Unknown => {
            let why = known.unwrap_or_else(|| default_wait(spec, init, initialized));
            status.state = Some(waiting(why));
        }
    }
    status
}

/// An instance that has ended: its end is the state, or the last state while the next one is waited for.
fn exited(status: &mut ContainerStatus, latest: &ContainerView, why: Option<(String, String)>) {
    match why {
        Some(why) => {
            status.last_state = Some(terminated(latest));
            status.state = Some(waiting(why));
        }
        None => status.state = Some(terminated(latest)),
    }
}

/// The instance is gone from the runtime: what is known of it is its last report.
fn recall(status: &mut ContainerStatus, reported: &ContainerStatus, pod_ends: bool) {
    status.restart_count = reported.restart_count;
    status.container_id.clone_from(&reported.container_id);
    status.image_id.clone_from(&reported.image_id);
    status.last_state = ended_state(reported);
    if pod_ends && status.last_state.is_some() {
        status.state.clone_from(&status.last_state);
    }
}

fn policy_of(spec: &PodSpec, container: &Container, init: bool) -> RestartPolicy {
    match (init, container.sidecar) {
        (true, true) => RestartPolicy::RestartAlways,
        (true, false) if spec.restart_policy() != RestartPolicy::RestartNever => {
            RestartPolicy::RestartOnFailure
        }
        _ => spec.restart_policy(),
    }
}

fn default_wait(spec: &PodSpec, init: bool, initialized: bool) -> (String, String) {
    let initializing = !spec.init_containers.is_empty() && (init || !initialized);
    let reason = if initializing {
        "PodInitializing"
    } else {
        "ContainerCreating"
    };
    (reason.into(), String::new())
}

fn waiting((reason, message): (String, String)) -> State {
    State {
        kind: Some(Kind::Waiting(Waiting { reason, message })),
    }
}

fn terminated(view: &ContainerView) -> State {
    let default = if view.exit_code == 0 {
        "Completed"
    } else {
        "Error"
    };
    let reason = if view.reason.is_empty() {
        default.into()
    } else {
        view.reason.clone()
    };
    State {
        kind: Some(Kind::Terminated(Terminated {
            exit_code: view.exit_code,
            signal: 0,
            reason,
            message: view.message.clone(),
            started_at_us: view.started_us,
            finished_at_us: view.finished_us,
            container_id: format!("containerd://{}", view.id),
        })),
    }
}

/// The end of an instance that the runtime no longer knows.
fn ended_state(reported: &ContainerStatus) -> Option<State> {
    match reported.state.as_ref().and_then(|s| s.kind.as_ref()) {
        Some(Kind::Terminated(_)) => reported.state.clone(),
        Some(Kind::Running(running)) => Some(State {
            kind: Some(Kind::Terminated(Terminated {
                exit_code: 137,
                signal: 0,
                reason: "ContainerStatusUnknown".into(),
                message: "The container could not be located when the pod was terminated".into(),
                started_at_us: running.started_at_us,
                finished_at_us: 0,
                container_id: reported.container_id.clone(),
            })),
        }),
        _ => reported.last_state.clone(),
    }
}

/// In a pod that has ended nothing waits to start again.
fn end_waiting(status: &mut ContainerStatus) {
    let waits = matches!(
        status.state.as_ref().and_then(|s| s.kind.as_ref()),
        Some(Kind::Waiting(_))
    );
    let ended = matches!(
        status.last_state.as_ref().and_then(|s| s.kind.as_ref()),
        Some(Kind::Terminated(_))
    );
    if waits && ended {
        status.state = status.last_state.take();
    }
}

#[derive(Default)]
struct Tally {
    waiting: usize,
    running: usize,
    stopped: usize,
    failed: usize,
}

fn tally(containers: &[ContainerStatus]) -> Tally {
    let mut tally = Tally::default();
    for container in containers {
        let last = container.last_state.as_ref().and_then(|s| s.kind.as_ref());
        match container.state.as_ref().and_then(|s| s.kind.as_ref()) {
            Some(Kind::Running(_)) => tally.running += 1,
            Some(Kind::Terminated(t)) => {
                tally.stopped += 1;
                tally.failed += usize::from(t.exit_code != 0);
            }
            Some(Kind::Waiting(_)) if last.is_some() => {
                tally.stopped += 1;
                tally.failed += 1;
            }
            _ => tally.waiting += 1,
        }
    }
    tally
}

fn phase(spec: &PodSpec, status: &PodStatus, initialized: bool) -> &'static str {
    let tally = tally(&status.containers);
    if !initialized && tally.running == 0 && tally.stopped == 0 {
        let failed_for_good = spec.restart_policy() == RestartPolicy::RestartNever
            && status
                .init_containers
                .iter()
                .zip(&spec.init_containers)
                .any(|(c, s)| {
                    let state = c.state.as_ref().and_then(|s| s.kind.as_ref());
                    !s.sidecar && matches!(state, Some(Kind::Terminated(t)) if t.exit_code != 0)
                });
        return if failed_for_good { "Failed" } else { "Pending" };
    }
    if tally.waiting > 0 {
        return "Pending";
    }
    if tally.running > 0 {
        return "Running";
    }
    match spec.restart_policy() {
        RestartPolicy::RestartAlways if !spec.deleting => "Running",
        _ if tally.failed == 0 => "Succeeded",
        RestartPolicy::RestartOnFailure if !spec.deleting => "Running",
        _ => "Failed",
    }
}

fn conditions(
    spec: &PodSpec,
    view: &PodView,
    memory: &Memory,
    status: &PodStatus,
    initialized: bool,
    now: Micros,
) -> Vec<Condition> {
    let ended = matches!(status.phase.as_str(), "Succeeded" | "Failed");
    let names = |list: &[ContainerStatus], ok: fn(&ContainerStatus) -> bool| -> Vec<String> {
        list.iter()
            .filter(|c| !ok(c))
            .map(|c| c.name.clone())
            .collect()
    };
    let unready = names(&status.containers, |c| c.ready);
    let sandbox = view.usable_sandbox(spec.host_network).is_some();
    let ready = if ended {
        let reason = if status.phase == "Succeeded" {
            "PodCompleted"
        } else {
            "PodFailed"
        };
        ("False", reason, String::new())
    } else if unready.is_empty() {
        ("True", "", String::new())
    } else {
        let message = format!("containers with unready status: [{}]", unready.join(" "));
        ("False", "ContainersNotReady", message)
    };
    let init = if initialized || status.phase == "Succeeded" {
        let reason = if status.phase == "Succeeded" {
            "PodCompleted"
        } else {
            ""
        };
        ("True", reason, String::new())
    } else {
        let incomplete = names(&status.init_containers, |c| c.ready);
        let message = format!(
            "containers with incomplete status: [{}]",
            incomplete.join(" ")
        );
        ("False", "ContainersNotInitialized", message)
    };
    let flag = |on: bool| (if on { "True" } else { "False" }, "", String::new());
    [
        ("PodReadyToStartContainers", flag(sandbox)),
        ("Initialized", init),
        ("Ready", ready.clone()),
        ("ContainersReady", ready),
        ("PodScheduled", flag(true)),
    ]
    .into_iter()
    .map(|(kind, (value, reason, message))| {
        let before = memory
            .reported
            .iter()
            .flat_map(|r| &r.conditions)
            .find(|c| c.r#type == kind && c.status == value);
        Condition {
            r#type: kind.into(),
            status: value.into(),
            reason: reason.into(),
            message,
            last_transition_us: before.map_or(now, |c| c.last_transition_us),
        }
    })
    .collect()
}

#[cfg(test)]
#[path = "status_tests.rs"]
mod tests;
