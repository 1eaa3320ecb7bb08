use super::*;
use crate::pods::memory::{Probes, Unhealthy};
use crate::pods::view::ContainerState::{Created, Exited, Running};

const NOW: Micros = 1_000 * SECOND_US;

fn spec(policy: RestartPolicy, init: &[&str], main: &[&str]) -> PodSpec {
    let make = |names: &[&str]| -> Vec<Container> {
        let one = |name: &&str| Container {
            name: name.trim_start_matches('+').into(),
            image: "image".into(),
            sidecar: name.starts_with('+'),
            ..Container::default()
        };
        names.iter().map(one).collect()
    };
    PodSpec {
        name: "p".into(),
        namespace: "ns".into(),
        uid: "u".into(),
        init_containers: make(init),
        containers: make(main),
        restart_policy: policy.into(),
        termination_grace_period_s: 30,
        ..PodSpec::default()
    }
}

fn sandbox(attempt: u32, ready: bool) -> SandboxView {
    SandboxView {
        id: format!("s{attempt}"),
        attempt,
        ready,
        created_us: 0,
        ips: vec!["10.0.0.1".into()],
    }
}

fn container(name: &str, attempt: u32, state: ContainerState, exit_code: i32) -> ContainerView {
    ContainerView {
        id: format!("{name}{attempt}"),
        sandbox_id: "s0".into(),
        name: name.into(),
        attempt,
        state,
        created_us: i64::from(attempt),
        started_us: NOW - 20 * SECOND_US,
        finished_us: if state == Exited { NOW - SECOND_US } else { 0 },
        exit_code,
        reason: String::new(),
        message: String::new(),
        image: "image".into(),
        image_ref: String::new(),
        spec_image: "image".into(),
        termination_log: String::new(),
        log_path: String::new(),
    }
}

/// Newest first, as the edge delivers them.
fn view(sandboxes: Vec<SandboxView>, mut containers: Vec<ContainerView>) -> PodView {
    containers.sort_by_key(|c| std::cmp::Reverse(c.created_us));
    PodView {
        sandboxes,
        containers,
        ..PodView::default()
    }
}

fn plan(spec: &PodSpec, view: &PodView) -> Plan {
    sync_pod(spec, view, &Memory::default(), NOW)
}

fn start(which: Which, attempt: u32) -> Option<Action> {
    Some(Action::StartContainer {
        container: which,
        sandbox_id: "s0".into(),
        attempt,
    })
}

const ALWAYS: RestartPolicy = RestartPolicy::RestartAlways;
const ON_FAILURE: RestartPolicy = RestartPolicy::RestartOnFailure;
const NEVER: RestartPolicy = RestartPolicy::RestartNever;

#[test]
fn a_new_pod_gets_a_sandbox_then_its_containers_one_by_one() {
    let spec = spec(ALWAYS, &[], &["a", "b"]);
    assert_eq!(
        plan(&spec, &view(vec![], vec![])).action,
        Some(Action::CreateSandbox { attempt: 0 })
    );
    let up = vec![sandbox(0, true)];
    assert_eq!(
        plan(&spec, &view(up.clone(), vec![])).action,
        start(Which::Main(0), 0)
    );
    let one = vec![container("a", 0, Running, 0)];
    assert_eq!(
        plan(&spec, &view(up.clone(), one.clone())).action,
        start(Which::Main(1), 0)
    );
    let both = [one, vec![container("b", 0, Running, 0)]].concat();
    assert_eq!(plan(&spec, &view(up, both)), Plan::default());
}

#[test]
fn sandboxes_are_replaced_when_they_cannot_be_used() {
    let spec = spec(ALWAYS, &[], &["a"]);
    let dead = view(vec![sandbox(3, false)], vec![container("a", 0, Exited, 0)]);
    assert_eq!(
        plan(&spec, &dead).action,
        Some(Action::CreateSandbox { attempt: 4 })
    );
    let still = view(vec![sandbox(0, false)], vec![container("a", 0, Running, 0)]);
    assert_eq!(
        plan(&spec, &still).action,
        Some(Action::StopPod { grace_s: 30 })
    );
    let mut bare = sandbox(0, true);
    bare.ips.clear();
    let no_address = view(vec![bare.clone()], vec![]);
    assert_eq!(
        plan(&spec, &no_address).action,
        Some(Action::StopPod { grace_s: 30 })
    );
    let host = PodSpec {
        host_network: true,
        ..spec.clone()
    };
    assert_eq!(plan(&host, &no_address).action, start(Which::Main(0), 0));
    let two = view(vec![sandbox(1, true), sandbox(0, true)], vec![]);
    assert_eq!(
        plan(&spec, &two).action,
        Some(Action::StopPod { grace_s: 30 })
    );
}

#[test]
fn a_refused_sandbox_waits_for_its_next_try() {
    let mut memory = Memory::default();
    memory.setup.not_before = Some(NOW + 5);
    let plan = sync_pod(
        &spec(ALWAYS, &[], &["a"]),
        &view(vec![], vec![]),
        &memory,
        NOW,
    );
    assert_eq!((plan.action, plan.wake_at), (None, Some(NOW + 5)));
}

#[test]
fn init_containers_run_in_order_and_sidecars_stay() {
    let spec = spec(ALWAYS, &["one", "+side", "two"], &["main"]);
    let up = || vec![sandbox(0, true)];
    let done = |name| container(name, 0, Exited, 0);
    let side = container("side", 0, Running, 0);
    let mut started = Memory::default();
    started.container("side").probes = Probes {
        container_id: "side0".into(),
        started: true,
        ..Probes::default()
    };
    let cases = [
        (vec![], start(Which::Init(0), 0)),
        (vec![container("one", 0, Running, 0)], None),
        (vec![done("one")], start(Which::Init(1), 0)),
        (vec![done("one"), side.clone()], start(Which::Init(2), 0)),
        (
            vec![done("one"), side.clone(), done("two")],
            start(Which::Main(0), 0),
        ),
        // Once main containers run, a sidecar that ended starts again beside them.
        (
            vec![
                done("one"),
                container("side", 0, Exited, 1),
                done("two"),
                container("main", 0, Running, 0),
            ],
            start(Which::Init(1), 1),
        ),
    ];
    for (containers, action) in cases {
        let plan = sync_pod(&spec, &view(up(), containers.clone()), &started, NOW);
        assert_eq!(plan.action, action, "{containers:?}");
    }
    // A sidecar whose startup probe has not passed holds the rest back.
    let waits = view(up(), vec![done("one"), side]);
    assert_eq!(
        sync_pod(&spec, &waits, &Memory::default(), NOW).action,
        None
    );
}

#[test]
fn restart_policies() {
    let up = || vec![sandbox(0, true)];
    let cases = [
        (ALWAYS, 0, start(Which::Main(0), 1), None),
        (ALWAYS, 1, start(Which::Main(0), 1), None),
        (ON_FAILURE, 1, start(Which::Main(0), 1), None),
        (
            ON_FAILURE,
            0,
            Some(Action::StopPod { grace_s: 30 }),
            Some("Succeeded"),
        ),
        (
            NEVER,
            0,
            Some(Action::StopPod { grace_s: 30 }),
            Some("Succeeded"),
        ),
        (
            NEVER,
            1,
            Some(Action::StopPod { grace_s: 30 }),
            Some("Failed"),
        ),
    ];
    for (policy, code, action, phase) in cases {
        let spec = spec(policy, &[], &["a"]);
        let plan = plan(&spec, &view(up(), vec![container("a", 0, Exited, code)]));
        assert_eq!(plan.action, action, "{policy:?} {code}");
        assert_eq!(plan.terminal.map(|t| t.phase), phase, "{policy:?} {code}");
    }
    // One container done, one still running: not the end.
    let spec = spec(NEVER, &[], &["a", "b"]);
    let mixed = vec![container("a", 0, Exited, 1), container("b", 0, Running, 0)];
    assert_eq!(plan(&spec, &view(up(), mixed)), Plan::default());
}

#[test]
fn failed_init_containers_end_or_repeat() {
    let failed = view(vec![sandbox(0, true)], vec![container("i", 0, Exited, 2)]);
    let never = plan(&spec(NEVER, &["i"], &["a"]), &failed);
    assert_eq!(never.terminal.map(|t| t.phase), Some("Failed"));
    let always = plan(&spec(ALWAYS, &["i"], &["a"]), &failed);
    assert_eq!(always.action, start(Which::Init(0), 1));
}

#[test]
fn crashes_wait_longer_each_time() {
    let spec = spec(ALWAYS, &[], &["a"]);
    let mut memory = Memory::default();
    let mut crash = Backoff::default();
    crash.next(CRASH, NOW - 20 * SECOND_US, NOW - 20 * SECOND_US);
    crash.next(CRASH, NOW - 20 * SECOND_US, NOW - 20 * SECOND_US);
    memory.container("a").crash = Some(crash);
    let crashed = view(vec![sandbox(0, true)], vec![container("a", 2, Exited, 1)]);
    let plan = sync_pod(&spec, &crashed, &memory, NOW);
    assert_eq!(plan.action, None);
    assert_eq!(plan.wake_at, Some(NOW + 19 * SECOND_US));
    assert_eq!(plan.waits[0].reason, "CrashLoopBackOff");
    assert_eq!(
        plan.waits[0].message,
        "back-off 20s restarting failed container=a pod=p_ns(u)"
    );
    let later = sync_pod(&spec, &crashed, &memory, NOW + 19 * SECOND_US);
    assert_eq!(later.action, start(Which::Main(0), 3));
    // A restarted agent derives the delay from the number of restarts.
    let adopted = sync_pod(&spec, &crashed, &Memory::default(), NOW);
    assert_eq!(adopted.wake_at, Some(NOW + 19 * SECOND_US));
    // Also for an instance that could not even start.
    let mut stillborn = crashed;
    stillborn.containers[0].started_us = 0;
    stillborn.containers[0].created_us = NOW - 2 * SECOND_US;
    let adopted = sync_pod(&spec, &stillborn, &Memory::default(), NOW);
    assert_eq!(adopted.wake_at, Some(NOW + 19 * SECOND_US));
}

#[test]
fn unhealthy_and_changed_containers_are_killed() {
    let mut spec = spec(ALWAYS, &[], &["a"]);
    let running = view(vec![sandbox(0, true)], vec![container("a", 0, Running, 0)]);
    let mut memory = Memory::default();
    memory.container("a").probes = Probes {
        container_id: "a0".into(),
        unhealthy: Some(Unhealthy {
            message: "sick".into(),
            grace_s: Some(3),
        }),
        ..Probes::default()
    };
    let kill = |grace_s, message: &str| {
        Some(Action::KillContainer {
            id: "a0".into(),
            container: Which::Main(0),
            grace_s,
            message: message.into(),
        })
    };
    assert_eq!(
        sync_pod(&spec, &running, &memory, NOW).action,
        kill(3, "sick")
    );
    // A verdict on an older instance does not count.
    memory.container("a").probes.container_id = "older".into();
    assert_eq!(sync_pod(&spec, &running, &memory, NOW).action, None);
    spec.containers[0].image = "other".into();
    let message = "Container a definition changed, will be restarted";
    assert_eq!(plan(&spec, &running).action, kill(30, message));
}

#[test]
fn leftovers_of_an_interrupted_start_are_removed() {
    let half = view(vec![sandbox(0, true)], vec![container("a", 0, Created, 0)]);
    let action = plan(&spec(ALWAYS, &[], &["a"]), &half).action;
    assert_eq!(action, Some(Action::RemoveContainer { id: "a0".into() }));
}

#[test]
fn only_the_last_two_instances_are_kept() {
    let spec = spec(ALWAYS, &[], &["a"]);
    let instances = vec![
        container("a", 0, Exited, 1),
        container("a", 1, Exited, 1),
        container("a", 2, Running, 0),
    ];
    let action = plan(&spec, &view(vec![sandbox(0, true)], instances)).action;
    assert_eq!(action, Some(Action::RemoveContainer { id: "a0".into() }));
    let two = view(
        vec![
            sandbox(0, true),
            SandboxView {
                id: "old".into(),
                ..sandbox(0, false)
            },
        ],
        vec![container("a", 2, Running, 0)],
    );
    assert_eq!(
        plan(&spec, &two).action,
        Some(Action::RemoveSandbox { id: "old".into() })
    );
}

#[test]
fn deletion_stops_then_removes_then_rests() {
    let mut spec = spec(ALWAYS, &[], &["a"]);
    spec.deleting = true;
    spec.deletion_grace_s = 7;
    let up = view(vec![sandbox(0, true)], vec![container("a", 0, Running, 0)]);
    assert_eq!(
        plan(&spec, &up).action,
        Some(Action::StopPod { grace_s: 7 })
    );
    let down = view(vec![sandbox(0, false)], vec![container("a", 0, Exited, 0)]);
    assert_eq!(plan(&spec, &down).action, Some(Action::RemovePod));
    let nothing = view(vec![], vec![]);
    assert_eq!(
        plan(&spec, &nothing).action,
        Some(Action::RemovePod),
        "folders may be left"
    );
    let gone = Memory {
        removed: true,
        ..Memory::default()
    };
    assert_eq!(sync_pod(&spec, &nothing, &gone, NOW), Plan::default());
    // Something that appears after all is removed again.
    assert_eq!(
        sync_pod(&spec, &down, &gone, NOW).action,
        Some(Action::RemovePod)
    );
    let mut refused = Memory::default();
    refused.setup.not_before = Some(NOW + 1);
    let plan = sync_pod(&spec, &up, &refused, NOW);
    assert_eq!((plan.action, plan.wake_at), (None, Some(NOW + 1)));
}

#[test]
fn a_pod_past_its_deadline_fails() {
    let spec = PodSpec {
        active_deadline_s: 10,
        ..spec(ALWAYS, &[], &["a"])
    };
    let up = view(vec![sandbox(0, true)], vec![container("a", 0, Running, 0)]);
    let mut memory = Memory {
        started_us: NOW - 4 * SECOND_US,
        ..Memory::default()
    };
    assert_eq!(
        sync_pod(&spec, &up, &memory, NOW).wake_at,
        Some(NOW + 6 * SECOND_US)
    );
    let plan = sync_pod(&spec, &up, &memory, NOW + 6 * SECOND_US);
    assert_eq!(
        plan.terminal.as_ref().map(|t| t.reason.as_str()),
        Some("DeadlineExceeded")
    );
    assert_eq!(plan.action, Some(Action::StopPod { grace_s: 30 }));
    memory.terminal = plan.terminal;
    let down = view(
        vec![sandbox(0, false)],
        vec![container("a", 0, Exited, 137)],
    );
    assert_eq!(
        sync_pod(&spec, &down, &memory, NOW + 7 * SECOND_US),
        Plan::default()
    );
}

#[test]
fn attempts_continue_from_the_last_report_when_the_runtime_forgot() {
    let status = control_api::v1::ContainerStatus {
        name: "a".into(),
        restart_count: 4,
        container_id: "containerd://x".into(),
        ..Default::default()
    };
    let reported = control_api::v1::PodStatus {
        containers: vec![status],
        ..Default::default()
    };
    let memory = Memory {
        reported: Some(reported),
        ..Memory::default()
    };
    let empty = view(vec![], vec![]);
    assert_eq!(next_attempt("a", &empty, &memory), 5);
    assert_eq!(next_attempt("b", &empty, &memory), 0);
    let known = view(vec![], vec![container("a", 7, Exited, 0)]);
    assert_eq!(next_attempt("a", &known, &memory), 8);
}

/// Whatever the runtime shows, repeated decisions reach a state in which nothing is left to do, and no step is taken
/// that the next one takes back.
mod convergence {
    use proptest::prelude::*;

    use super::*;

    fn apply(action: &Action, view: &mut PodView, spec: &PodSpec, codes: &[i32], now: Micros) {
        match action {
            Action::StopPod { .. } => {
                view.sandboxes.iter_mut().for_each(|s| s.ready = false);
                for c in view.containers.iter_mut().filter(|c| c.state != Exited) {
                    c.state = Exited;
                    c.exit_code = 137;
                }
            }
            Action::CreateSandbox { attempt } => view.sandboxes.insert(0, sandbox(*attempt, true)),
            Action::StartContainer {
                container: which,
                sandbox_id,
                attempt,
            } => {
                let name = &which.of(spec).unwrap().name;
                let mut started = container(name, *attempt, Running, 0);
                started.sandbox_id.clone_from(sandbox_id);
                if matches!(which, Which::Init(at) if !spec.init_containers[*at].sidecar) {
                    started.state = Exited;
                    started.exit_code = codes.get(*attempt as usize).copied().unwrap_or(0);
                    started.finished_us = now;
                }
                view.containers.insert(0, started);
            }
            Action::KillContainer { id, .. } => {
                for c in view.containers.iter_mut().filter(|c| c.id == *id) {
                    c.state = Exited;
                    c.exit_code = 137;
                }
            }
            Action::RemoveContainer { id } => view.containers.retain(|c| c.id != *id),
            Action::RemoveSandbox { id } => view.sandboxes.retain(|s| s.id != *id),
            Action::RemovePod => *view = PodView::default(),
        }
    }

    fn states() -> impl Strategy<Value = Vec<(u32, u8, i32)>> {
        proptest::collection::vec((0..4u32, 0..4u8, 0..2i32), 0..4)
    }

    proptest! {
        #[test]
        fn every_start_leads_to_rest(
            policy in prop_oneof![Just(ALWAYS), Just(ON_FAILURE), Just(NEVER)],
            deleting in any::<bool>(),
            ready in any::<Option<bool>>(),
            containers in states(),
            codes in proptest::collection::vec(0..2i32, 0..3),
        ) {
            let mut spec = spec(policy, &["i", "+s"], &["a", "b"]);
            spec.deleting = deleting;
            let names = ["i", "s", "a", "b"];
            let found = containers.iter().map(|(attempt, state, code)| {
                let state = match state { 0 => Created, 1 => Running, 2 => Exited, _ => ContainerState::Unknown };
                container(names[*attempt as usize % 4], *attempt, state, *code)
            });
            let mut view = view(ready.map(|r| sandbox(0, r)).into_iter().collect(), found.collect());
            let mut memory = Memory::default();
            let mut now = NOW;
            for _ in 0..60 {
                for name in ["s"] {
                    if let Some(c) = view.latest(name).cloned() {
                        memory.container(name).probes =
                            Probes { container_id: c.id, started: true, ready: true, unhealthy: None };
                    }
                }
                let plan = sync_pod(&spec, &view, &memory, now);
                if plan.terminal.is_some() {
                    memory.terminal = plan.terminal;
                }
                match (plan.action, plan.wake_at) {
                    (Some(action), _) => {
                        apply(&action, &mut view, &spec, &codes, now);
                        memory.removed |= action == Action::RemovePod;
                    }
                    (None, Some(at)) => {
                        prop_assert!(at > now);
                        now = at;
                    }
                    (None, None) => {
                        // Only an init container that still runs may hold everything up: it ends.
                        if let Some(c) =
                            view.containers.iter_mut().find(|c| c.name == "i" && c.state == Running)
                        {
                            c.state = Exited;
                            continue;
                        }
                        if deleting {
                            prop_assert!(view.is_empty());
                        } else if memory.terminal.is_some() {
                            prop_assert!(view.running().next().is_none());
                        } else {
                            let up = |n: &str| view.latest(n).is_some_and(|c| c.state == Running);
                            prop_assert!(up("a") || up("b"), "{view:?}");
                        }
                        return Ok(());
                    }
                }
            }
            prop_assert!(false, "no rest after 60 steps: {view:?}");
        }
    }
}
