use std::collections::BTreeMap;
use std::sync::Mutex;

use async_trait::async_trait;
use control_api::desired::DesiredState;
use control_api::v1::{EventReport, ExecAction, Handler, Probe, handler};

use super::*;
use crate::pods::fake::Fake;
use crate::pods::list::Lister;
use crate::pods::logs::rotate;
use crate::pods::node::NodeFacts;
use crate::pods::report::{ControlPlane, Outbox, ReportFailure};

const PATIENCE: Duration = Duration::from_secs(20);

/// A control plane that keeps what it is told, and refuses on request.
#[derive(Debug, Default)]
struct Control {
    pods: watch::Sender<BTreeMap<String, Vec<PodStatus>>>,
    events: Mutex<Vec<EventReport>>,
    away: Mutex<bool>,
}

#[async_trait]
impl ControlPlane for Control {
    fn state(&self) -> Arc<DesiredState> {
        Arc::default()
    }

    async fn report_pods(&self, pods: Vec<PodStatus>) -> Result<(), ReportFailure> {
        if *self.away.lock().unwrap() {
            return Err("away".into());
        }
        self.pods.send_modify(|known| {
            for status in pods {
                known.entry(status.name.clone()).or_default().push(status);
            }
        });
        Ok(())
    }

    async fn report_events(&self, events: Vec<EventReport>) -> Result<(), ReportFailure> {
        self.events.lock().unwrap().extend(events);
        Ok(())
    }
}

impl Control {
    async fn wait(&self, pod: &str, fits: impl Fn(&PodStatus) -> bool) -> PodStatus {
        let mut pods = self.pods.subscribe();
        let found = pods.wait_for(|p| p.get(pod).and_then(|l| l.last()).is_some_and(&fits));
        let found = tokio::time::timeout(PATIENCE, found).await;
        let seen = || format!("{:#?}", self.pods.borrow().get(pod));
        let pods = found
            .unwrap_or_else(|_| panic!("last reports: {}", seen()))
            .unwrap();
        pods[pod].last().unwrap().clone()
    }
}

impl Control {
    async fn wait_reports(&self, pod: &str, count: usize) {
        let mut pods = self.pods.subscribe();
        let enough = pods.wait_for(|p| p.get(pod).is_some_and(|l| l.len() >= count));
        drop(
            tokio::time::timeout(PATIENCE, enough)
                .await
                .unwrap()
                .unwrap(),
        );
    }
}

struct Bench {
    fake: Arc<Fake>,
    control: Arc<Control>,
    shared: Arc<Shared>,
    _dir: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (fake, control) = (Fake::new(), Arc::new(Control::default()));
        let node = NodeFacts {
            name: "n1".into(),
            ips: vec!["192.0.2.1".parse().unwrap()],
            pods_dir: dir.path().join("pods"),
            log_dir: dir.path().join("logs"),
            cgroup_parent: "/weir-no-such-cgroup".into(),
            ..NodeFacts::default()
        };
        let outbox = Arc::new(Outbox::default());
        tokio::spawn(Arc::clone(&outbox).run(Arc::clone(&control) as _));
        let shared = Arc::new(Shared {
            lister: Lister::new(Arc::clone(&fake) as _),
            runtime: Arc::clone(&fake) as _,
            node,
            control: Arc::clone(&control) as _,
            outbox,
        });
        Self {
            fake,
            control,
            shared,
            _dir: dir,
        }
    }

    fn run(&self, spec: &PodSpec) -> Handle {
        Worker::spawn(Arc::clone(&self.shared), Arc::new(spec.clone()), true)
    }
}

fn pod() -> PodSpec {
    let main = Container {
        name: "main".into(),
        image: "image".into(),
        image_pull_policy: "IfNotPresent".into(),
        ..Container::default()
    };
    PodSpec {
        namespace: "ns".into(),
        name: "p".into(),
        uid: "u".into(),
        containers: vec![main],
        termination_grace_period_s: 3,
        ..PodSpec::default()
    }
}

fn ready(status: &PodStatus) -> bool {
    status
        .conditions
        .iter()
        .any(|c| c.r#type == "Ready" && c.status == "True")
}

fn deleted(grace_s: i64) -> Input {
    Input::Spec(Arc::new(PodSpec {
        deleting: true,
        deletion_grace_s: grace_s,
        ..pod()
    }))
}

#[tokio::test]
async fn a_pod_lives_and_dies() {
    let bench = Bench::new();
    let worker = bench.run(&pod());
    let status = bench.control.wait("p", ready).await;
    assert_eq!(
        (status.phase.as_str(), status.pod_ips.len()),
        ("Running", 1)
    );
    worker.inbox.send(deleted(2)).await.unwrap();
    bench.control.wait("p", |s| s.gone).await;
    {
        let state = bench.fake.state();
        assert!(state.sandboxes.is_empty() && state.containers.is_empty());
        let stops = |c: &String| c.starts_with("stop_container main") && c.ends_with(" 2");
        assert!(state.calls.iter().any(stops), "{:?}", state.calls);
    }
    assert!(!bench.shared.node.pod_dir("u").exists());
    worker.inbox.send(Input::Removed).await.unwrap();
    tokio::time::timeout(PATIENCE, worker.inbox.closed())
        .await
        .unwrap();
}

#[tokio::test]
async fn a_second_worker_adopts_what_is_there() {
    let bench = Bench::new();
    let first = bench.run(&pod());
    let before = bench.control.wait("p", ready).await;
    drop(first);
    let reports = bench.control.pods.borrow()["p"].len();
    let second = bench.run(&pod());
    bench.control.wait_reports("p", reports + 1).await;
    assert_eq!(
        bench.control.pods.borrow()["p"][reports],
        before,
        "it may not have arrived"
    );
    // The end of the container is noticed by the second worker.
    bench.fake.exit("main", 1);
    second.inbox.send(Input::Dirty).await.unwrap();
    let after = bench
        .control
        .wait("p", |s| s.containers[0].restart_count == 1 && ready(s))
        .await;
    assert_ne!(
        after.containers[0].container_id,
        before.containers[0].container_id
    );
    assert_eq!(bench.fake.count("run_sandbox"), 1);
}

#[tokio::test]
async fn an_agent_that_starts_without_runtime_says_nothing_of_its_pods() {
    let bench = Bench::new();
    let first = bench.run(&pod());
    let before = bench.control.wait("p", ready).await;
    drop(first);
    bench
        .fake
        .state()
        .refuse
        .insert("*", "connection refused".into());
    let asked = bench.fake.count("list_sandboxes");
    let _second = bench.run(&pod());
    while bench.fake.count("list_sandboxes") < asked + 2 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    bench.fake.state().refuse.clear();
    let reports = bench.control.pods.borrow()["p"].len();
    bench.control.wait_reports("p", reports + 1).await;
    let all = bench.control.pods.borrow()["p"].clone();
    assert!(
        all.iter()
            .skip_while(|s| **s != before)
            .all(|s| *s == before),
        "{all:#?}"
    );
}

#[tokio::test]
async fn what_the_runtime_refuses_is_tried_again() {
    let bench = Bench::new();
    bench
        .fake
        .state()
        .refuse
        .insert("run_sandbox", "no address left".into());
    let _worker = bench.run(&pod());
    bench.control.wait("p", |s| s.phase == "Pending").await;
    while bench.fake.count("run_sandbox") < 1 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    bench.fake.state().refuse.clear();
    bench.control.wait("p", ready).await;
    let events = bench.control.events.lock().unwrap().clone();
    let failure = events
        .iter()
        .find(|e| e.reason == "FailedCreatePodSandBox")
        .unwrap();
    assert_eq!(
        failure.message,
        "Failed to create pod sandbox: no address left"
    );
    assert_eq!(failure.r#type, "Warning");
}

#[tokio::test]
async fn nothing_is_done_or_said_while_the_runtime_is_away() {
    let bench = Bench::new();
    let worker = bench.run(&pod());
    bench.control.wait("p", ready).await;
    let reports = bench.control.pods.borrow()["p"].len();
    bench
        .fake
        .state()
        .refuse
        .insert("*", "connection refused".into());
    let asked = bench.fake.count("list_sandboxes");
    worker.inbox.send(Input::Dirty).await.unwrap();
    while bench.fake.count("list_sandboxes") < asked + 2 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(bench.control.pods.borrow()["p"].len(), reports);
    assert_eq!(bench.fake.count("run_sandbox"), 1);
    bench.fake.state().refuse.clear();
    bench.fake.exit("main", 1);
    bench
        .control
        .wait("p", |s| s.containers[0].restart_count == 1)
        .await;
}

#[tokio::test]
async fn statuses_wait_for_the_control_plane_and_only_the_last_is_sent() {
    let bench = Bench::new();
    *bench.control.away.lock().unwrap() = true;
    let worker = bench.run(&pod());
    while bench.fake.count("start_container") < 1 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    worker.inbox.send(deleted(0)).await.unwrap();
    while bench.fake.count("remove_sandbox") < 1 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    *bench.control.away.lock().unwrap() = false;
    bench.control.wait("p", |s| s.gone).await;
    assert!(
        bench.control.pods.borrow()["p"].len() <= 2,
        "older statuses are not sent"
    );
}

#[tokio::test]
async fn readiness_is_reported_as_it_turns() {
    let bench = Bench::new();
    let mut spec = pod();
    let command = vec!["check".to_owned()];
    let exec = handler::Kind::Exec(ExecAction { command });
    spec.containers[0].readiness = Some(Probe {
        handler: Some(Handler { kind: Some(exec) }),
        period_s: 1,
        timeout_s: 1,
        success_threshold: 1,
        failure_threshold: 1,
        ..Probe::default()
    });
    bench.fake.state().commands.insert("check".into(), 1);
    let _worker = bench.run(&spec);
    let status = bench.control.wait("p", |s| s.phase == "Running").await;
    assert!(!ready(&status));
    bench.fake.state().commands.clear();
    bench.control.wait("p", ready).await;
    bench.fake.state().commands.insert("check".into(), 1);
    bench.control.wait("p", |s| !ready(s)).await;
}

#[tokio::test]
async fn a_failed_post_start_hook_restarts_the_container() {
    let bench = Bench::new();
    let mut spec = pod();
    let command = vec!["hook".to_owned()];
    let exec = handler::Kind::Exec(ExecAction { command });
    spec.containers[0].post_start = Some(Handler { kind: Some(exec) });
    bench.fake.state().commands.insert("hook".into(), 1);
    let _worker = bench.run(&spec);
    bench
        .control
        .wait("p", |s| s.containers[0].restart_count == 1)
        .await;
    let events = bench.control.events.lock().unwrap().clone();
    assert!(events.iter().any(|e| e.reason == "FailedPostStartHook"));
}

#[tokio::test]
async fn logs_rotate_and_keep_their_name_when_the_runtime_refuses() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("0.log");
    let fake = Fake::new();
    let files = || std::fs::read_dir(dir.path()).unwrap().count();
    std::fs::write(&path, "0123456789").unwrap();
    assert!(!rotate::rotate(fake.as_ref(), "c", &path, 10).await.unwrap());
    fake.state().refuse.insert("reopen_log", "no".into());
    assert!(rotate::rotate(fake.as_ref(), "c", &path, 9).await.is_err());
    assert!(path.exists());
    fake.state().refuse.clear();
    for _ in 0..rotate::MAX_LOG_FILES + 2 {
        std::fs::write(&path, "0123456789").unwrap();
        assert!(rotate::rotate(fake.as_ref(), "c", &path, 9).await.unwrap());
    }
    std::fs::write(&path, "").unwrap();
    assert_eq!(files(), rotate::MAX_LOG_FILES);
    rotate::remove(&path);
    assert_eq!(files(), 0);
}
