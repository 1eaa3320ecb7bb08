use super::*;
use crate::pods::memory::{Probes, Terminal};
use crate::pods::view::{
    ContainerState::{Exited, Running},
    SandboxView,
};

const NOW: Micros = 77;

fn spec(policy: RestartPolicy) -> PodSpec {
    let named = |name: &str| Container {
        name: name.into(),
        image: "img".into(),
        ..Container::default()
    };
    PodSpec {
        name: "p".into(),
        restart_policy: policy.into(),
        containers: vec![named("a"), named("b")],
        ..PodSpec::default()
    }
}

fn view(containers: &[(&str, u32, ContainerState, i32)]) -> PodView {
    let sandbox = SandboxView {
        id: "s".into(),
        attempt: 0,
        ready: true,
        created_us: 0,
        ips: vec!["fd00::5".into(), "10.0.0.5".into()],
    };
    let containers = containers
        .iter()
        .map(|(name, attempt, state, exit_code)| ContainerView {
            id: format!("{name}{attempt}"),
            sandbox_id: "s".into(),
            name: (*name).into(),
            attempt: *attempt,
            state: *state,
            created_us: 0,
            started_us: 1,
            finished_us: 2,
            exit_code: *exit_code,
            reason: String::new(),
            message: String::new(),
            image: "docker.io/library/img:latest".into(),
            image_ref: "sha256:1".into(),
            spec_image: "img".into(),
            termination_log: String::new(),
            log_path: String::new(),
        });
    PodView {
        sandboxes: vec![sandbox],
        containers: containers.collect(),
        ..PodView::default()
    }
}

fn healthy(names: &[&str]) -> Memory {
    let mut memory = Memory::default();
    for id in names {
        memory.container(&id[..1]).probes = Probes {
            container_id: (*id).into(),
            ready: true,
            started: true,
            unhealthy: None,
        };
    }
    memory
}

fn status(spec: &PodSpec, view: &PodView, memory: &Memory) -> PodStatus {
    pod_status(spec, view, memory, &["192.168.0.1".parse().unwrap()], NOW)
}

fn condition<'a>(status: &'a PodStatus, kind: &str) -> &'a Condition {
    status.conditions.iter().find(|c| c.r#type == kind).unwrap()
}

fn waiting_reason(status: &ContainerStatus) -> &str {
    match status.state.as_ref().and_then(|s| s.kind.as_ref()) {
        Some(Kind::Waiting(waiting)) => &waiting.reason,
        other => panic!("not waiting: {other:?}"),
    }
}

#[test]
fn phases() {
    use RestartPolicy::{
        RestartAlways as Always, RestartNever as Never, RestartOnFailure as OnFailure,
    };
    let (run, ok, bad) = ((Running, 0), (Exited, 0), (Exited, 1));
    let cases = [
        (Always, None, None, "Pending"),
        (Always, Some(run), None, "Pending"),
        (Always, Some(run), Some(run), "Running"),
        (Always, Some(run), Some(bad), "Running"),
        (Always, Some(ok), Some(ok), "Running"),
        (OnFailure, Some(ok), Some(ok), "Succeeded"),
        (OnFailure, Some(bad), Some(ok), "Running"),
        (Never, Some(bad), Some(run), "Running"),
        (Never, Some(bad), Some(ok), "Failed"),
        (Never, Some(ok), Some(ok), "Succeeded"),
    ];
    for (policy, a, b, phase) in cases {
        let mut list = Vec::new();
        list.extend(a.map(|(state, code)| ("a", 0, state, code)));
        list.extend(b.map(|(state, code)| ("b", 0, state, code)));
        let status = status(&spec(policy), &view(&list), &Memory::default());
        assert_eq!(status.phase, phase, "{policy:?} {a:?} {b:?}");
    }
}

#[test]
fn a_ready_pod_says_so_and_keeps_the_times_of_its_transitions() {
    let spec = spec(RestartPolicy::RestartAlways);
    let view = view(&[("a", 0, Running, 0), ("b", 3, Running, 0)]);
    let mut memory = healthy(&["a0", "b3"]);
    let first = status(&spec, &view, &memory);
    assert_eq!(condition(&first, "Ready").status, "True");
    assert_eq!(condition(&first, "Ready").last_transition_us, NOW);
    assert_eq!(
        first.pod_ips,
        ["10.0.0.5", "fd00::5"],
        "the family of the node's address first"
    );
    let b = &first.containers[1];
    assert!(b.ready && b.started);
    assert_eq!(
        (b.restart_count, b.container_id.as_str()),
        (3, "containerd://b3")
    );
    assert_eq!(b.image, "docker.io/library/img:latest");

    memory.reported = Some(first.clone());
    let later = pod_status(
        &spec,
        &view,
        &memory,
        &["192.168.0.1".parse().unwrap()],
        NOW + 9,
    );
    assert_eq!(later, first, "nothing changed: nothing to report");

    memory.container("b").probes.ready = false;
    let unready = pod_status(&spec, &view, &memory, &[], NOW + 9);
    let ready = condition(&unready, "Ready");
    assert_eq!(
        (ready.status.as_str(), ready.last_transition_us),
        ("False", NOW + 9)
    );
    assert_eq!(ready.message, "containers with unready status: [b]");
    assert_eq!(condition(&unready, "Initialized").last_transition_us, NOW);
}

#[test]
fn crashed_containers_wait_with_their_last_state() {
    let spec = spec(RestartPolicy::RestartAlways);
    let view = view(&[
        ("a", 1, Exited, 3),
        ("a", 0, Exited, 2),
        ("b", 0, Running, 0),
    ]);
    let mut memory = healthy(&["b0"]);
    let exit = |state: &Option<State>| match state.as_ref().and_then(|s| s.kind.as_ref()) {
        Some(Kind::Terminated(t)) => t.exit_code,
        other => panic!("not terminated: {other:?}"),
    };
    let before = &status(&spec, &view, &memory).containers[0];
    assert_eq!((exit(&before.state), exit(&before.last_state)), (3, 2));
    memory.container("a").waiting = Some(("CrashLoopBackOff".into(), "m".into()));
    let during = &status(&spec, &view, &memory).containers[0];
    assert_eq!(waiting_reason(during), "CrashLoopBackOff");
    assert_eq!(exit(&during.last_state), 3);
    memory.terminal = Some(Terminal {
        phase: "Failed",
        reason: "Evicted".into(),
        message: String::new(),
    });
    let after = status(&spec, &view, &memory);
    assert_eq!(
        exit(&after.containers[0].state),
        3,
        "nothing waits in a pod that ended"
    );
    assert_eq!(
        (after.phase.as_str(), after.reason.as_str()),
        ("Failed", "Evicted")
    );
    assert_eq!(condition(&after, "Ready").reason, "PodFailed");
}

#[test]
fn init_containers_hold_the_pod_pending() {
    let mut spec = spec(RestartPolicy::RestartAlways);
    spec.init_containers = vec![Container {
        name: "i".into(),
        ..Container::default()
    }];
    let during = status(&spec, &view(&[("i", 0, Running, 0)]), &Memory::default());
    assert_eq!(during.phase, "Pending");
    assert_eq!(
        condition(&during, "Initialized").message,
        "containers with incomplete status: [i]"
    );
    assert_eq!(waiting_reason(&during.containers[0]), "PodInitializing");
    let after = status(&spec, &view(&[("i", 0, Exited, 0)]), &Memory::default());
    assert_eq!(condition(&after, "Initialized").status, "True");
    assert_eq!(waiting_reason(&after.containers[0]), "ContainerCreating");
    assert!(after.init_containers[0].ready);
    spec.restart_policy = RestartPolicy::RestartNever.into();
    let failed = status(&spec, &view(&[("i", 0, Exited, 1)]), &Memory::default());
    assert_eq!(failed.phase, "Failed");
}

#[test]
fn an_instance_that_the_runtime_forgot_is_not_forgotten() {
    let spec = PodSpec {
        deleting: true,
        ..spec(RestartPolicy::RestartAlways)
    };
    let mut memory = healthy(&["a0", "b0"]);
    memory.reported = Some(status(
        &spec,
        &view(&[("a", 0, Running, 0), ("b", 0, Running, 0)]),
        &memory,
    ));
    let lost = status(&spec, &PodView::default(), &memory);
    let Some(Kind::Terminated(end)) = lost.containers[0]
        .state
        .as_ref()
        .and_then(|s| s.kind.clone())
    else {
        panic!("{lost:?}");
    };
    assert_eq!(
        (end.exit_code, end.reason.as_str()),
        (137, "ContainerStatusUnknown")
    );
    assert_eq!(lost.pod_ips, ["10.0.0.5", "fd00::5"]);
}
