//! The pod runner against a real containerd. Needs root, containerd, runc and the CNI plugins:
//! `cargo test -p weir-agent --test pods -- --ignored`.

#![allow(clippy::unwrap_used, clippy::too_many_lines, reason = "tests")]

mod image;
mod node;
mod pki;

use std::time::{Duration, Instant};

use control_api::v1::{
    Container, EmptyDir, EnvVar, ExecAction, FileSet, FileSource, Handler, HttpGetAction, KeyRef,
    KeyedSource, PodSpec, PodStatus, Probe, RestartPolicy, Volume, VolumeMount,
    container_state::Kind, env_var::Source, file_source, handler, volume,
};

use control_api::v1::LogRequest;
use control_api::v1::node_api_client::NodeApiClient;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

use image::IMAGE;
use node::Node;

fn container(name: &str, script: &str) -> Container {
    Container {
        name: name.into(),
        image: IMAGE.into(),
        image_pull_policy: "IfNotPresent".into(),
        command: vec!["/bin/sh".into(), "-c".into(), script.into()],
        ..Container::default()
    }
}

fn pod(name: &str, containers: Vec<Container>) -> PodSpec {
    PodSpec {
        namespace: "default".into(),
        name: name.into(),
        uid: format!("uid-{name}"),
        containers,
        termination_grace_period_s: 5,
        dns_policy: "ClusterFirst".into(),
        ..PodSpec::default()
    }
}

fn condition<'a>(status: &'a PodStatus, kind: &str) -> &'a str {
    status
        .conditions
        .iter()
        .find(|c| c.r#type == kind)
        .map_or("", |c| c.status.as_str())
}

fn ready(status: &PodStatus) -> bool {
    condition(status, "Ready") == "True"
}

fn waiting(status: &PodStatus) -> &str {
    match status
        .containers
        .first()
        .and_then(|c| c.state.as_ref()?.kind.as_ref())
    {
        Some(Kind::Waiting(waiting)) => &waiting.reason,
        _ => "",
    }
}

fn exec_probe(command: &[&str]) -> Probe {
    let command = command.iter().map(|c| (*c).to_owned()).collect();
    Probe {
        handler: Some(Handler {
            kind: Some(handler::Kind::Exec(ExecAction { command })),
        }),
        period_s: 1,
        timeout_s: 2,
        success_threshold: 1,
        failure_threshold: 1,
        ..Probe::default()
    }
}

fn http_probe(port: u16) -> Probe {
    let action = HttpGetAction {
        port: port.to_string(),
        path: "/".into(),
        ..HttpGetAction::default()
    };
    Probe {
        handler: Some(Handler {
            kind: Some(handler::Kind::HttpGet(action)),
        }),
        period_s: 10,
        ..exec_probe(&[])
    }
}

const SERVE: &str = "echo ok > /tmp/index.html; exec httpd -f -p 8080 -h /tmp";

#[test]
#[ignore = "needs root and containerd"]
fn three_pods_are_ready_fast_and_leave_nothing() {
    let node = Node::start("fast");
    let web = |n: usize| {
        let mut web = container("web", SERVE);
        web.readiness = Some(http_probe(8080));
        pod(&format!("web-{n}"), vec![web])
    };
    let begun = Instant::now();
    node.apply_all((0..3).map(web).collect());
    for n in 0..3 {
        let status = node.wait(&format!("web-{n}"), "ready", ready);
        assert_eq!(status.phase, "Running");
        assert_eq!(status.pod_ips.len(), 1, "{status:?}");
    }
    let took = begun.elapsed();
    println!("three pods ready after {} ms", took.as_millis());
    assert!(took < Duration::from_secs(10), "three pods took {took:?}");
    for reason in ["Pulled", "Created", "Started"] {
        node.eventually(reason, || node.control.told("web-0", reason));
    }
    let fields = node.block_on(node.runner().node_report_fields());
    assert!(
        fields
            .info
            .container_runtime_version
            .starts_with("containerd://1."),
        "{fields:?}"
    );
    let begun = Instant::now();
    for n in 0..3 {
        node.delete(&format!("web-{n}"), 1);
    }
    for n in 0..3 {
        node.wait(&format!("web-{n}"), "gone", |s| s.gone);
    }
    println!("three pods gone after {} ms", begun.elapsed().as_millis());
    assert_eq!(node.containers(), Vec::<String>::new());
    assert_eq!(node.leftovers(), Vec::<String>::new());
    node.eventually("the kill is told", || node.control.told("web-0", "Killing"));
}

#[test]
#[ignore = "needs root and containerd"]
fn environment_files_and_names_reach_the_container() {
    let node = Node::start("env");
    node.config_map("conf", &[("color", "blue"), ("size", "9")]);
    let script = "echo $COLOR $GREETING; cat /etc/resolv.conf /etc/hosts; cat /conf/color; echo; stat -f -c %T /secret; \
                  echo -n bye > /dev/termination-log; ls -l /scratch; while [ $(cat /conf/color) = blue ]; do sleep 0.1; done; echo changed";
    let mut main = container("main", script);
    let key = KeyRef {
        name: "conf".into(),
        key: "color".into(),
        optional: false,
    };
    main.env = vec![
        EnvVar {
            name: "COLOR".into(),
            source: Some(Source::ConfigMapKey(key)),
        },
        EnvVar {
            name: "GREETING".into(),
            source: Some(Source::Value("hello-$(COLOR)".into())),
        },
    ];
    let mount = |name: &str, path: &str| VolumeMount {
        name: name.into(),
        mount_path: path.into(),
        ..VolumeMount::default()
    };
    main.volume_mounts = vec![
        mount("conf", "/conf"),
        mount("secret", "/secret"),
        mount("scratch", "/scratch"),
    ];
    let source = KeyedSource {
        name: "conf".into(),
        ..KeyedSource::default()
    };
    let files = |kind| {
        volume::Source::Files(FileSet {
            default_mode: 0o644,
            sources: vec![FileSource { kind: Some(kind) }],
        })
    };
    let mut spec = pod("env", vec![main]);
    spec.restart_policy = RestartPolicy::RestartNever.into();
    spec.volumes = vec![
        Volume {
            name: "conf".into(),
            source: Some(files(file_source::Kind::ConfigMap(source.clone()))),
        },
        Volume {
            name: "secret".into(),
            source: Some(files(file_source::Kind::Secret(source))),
        },
        Volume {
            name: "scratch".into(),
            source: Some(volume::Source::EmptyDir(EmptyDir {
                medium: "Memory".into(),
                size_limit_bytes: 1 << 20,
            })),
        },
    ];
    node.apply(spec);
    node.wait("env", "running", |s| s.phase == "Running");
    node.eventually("output", || {
        node.log("uid-env", "env", "main", 0).contains("tmpfs")
    });
    node.config_map("conf", &[("color", "red")]);
    let status = node.wait("env", "done", |s| s.phase == "Succeeded");
    let log = node.log("uid-env", "env", "main", 0);
    for text in [
        "blue hello-blue",
        "nameserver 10.96.0.10",
        "search default.svc.cluster.local svc.cluster.local cluster.local",
        "options ndots:5",
        &format!("{}\tenv", status.pod_ips[0]),
        "tmpfs",
        "changed",
    ] {
        assert!(log.contains(text), "{text:?} in:\n{log}");
    }
    let Some(Kind::Terminated(end)) = status.containers[0]
        .state
        .as_ref()
        .and_then(|s| s.kind.clone())
    else {
        panic!("not terminated: {status:?}");
    };
    assert_eq!(
        (end.exit_code, end.reason.as_str(), end.message.as_str()),
        (0, "Completed", "bye")
    );
    assert_eq!(condition(&status, "Ready"), "False");
    node.delete("env", 1);
    node.wait("env", "gone", |s| s.gone);
    assert_eq!(node.leftovers(), Vec::<String>::new());
}

#[test]
#[ignore = "needs root and containerd"]
fn crashes_back_off() {
    let node = Node::start("crash");
    node.apply(pod("crash", vec![container("main", "exit 3")]));
    let status = node.wait("crash", "backing off", |s| waiting(s) == "CrashLoopBackOff");
    assert_eq!(status.phase, "Running");
    assert_eq!(status.containers[0].restart_count, 1);
    let last = status.containers[0]
        .last_state
        .as_ref()
        .and_then(|s| s.kind.clone());
    let Some(Kind::Terminated(last)) = last else {
        panic!("no last state: {status:?}")
    };
    assert_eq!((last.exit_code, last.reason.as_str()), (3, "Error"));
    node.eventually("the back-off is told", || {
        node.control.told("crash", "BackOff")
    });
    let begun = Instant::now();
    node.wait("crash", "restarted", |s| s.containers[0].restart_count == 2);
    let took = begun.elapsed();
    assert!(
        (8..14).contains(&took.as_secs()),
        "the second restart came after {took:?}"
    );
}

#[test]
#[ignore = "needs root and containerd"]
fn readiness_follows_its_probe_and_liveness_restarts() {
    let node = Node::start("probes");
    let mut main = container(
        "main",
        "sleep 1; touch /tmp/ready; sleep 3; rm /tmp/ready; sleep 100",
    );
    main.readiness = Some(exec_probe(&["/bin/test", "-f", "/tmp/ready"]));
    let mut sick = container("main", "touch /tmp/live; sleep 2; rm /tmp/live; sleep 100");
    sick.liveness = Some(exec_probe(&["/bin/test", "-f", "/tmp/live"]));
    let mut brief = pod("sick", vec![sick]);
    brief.termination_grace_period_s = 1;
    node.apply_all(vec![pod("probed", vec![main]), brief]);
    let status = node.wait("probed", "running", |s| s.phase == "Running");
    assert!(!ready(&status));
    node.wait("probed", "ready", ready);
    let status = node.wait("probed", "unready again", |s| !ready(s));
    assert_eq!(status.containers[0].restart_count, 0);
    node.eventually("the failure is told", || {
        node.control.told("probed", "Unhealthy")
    });
    node.wait("sick", "restarted", |s| s.containers[0].restart_count == 1);
    let messages = node.control.messages("sick");
    assert!(
        messages
            .iter()
            .any(|m| m == "Container main failed liveness probe, will be restarted"),
        "{messages:?}"
    );
}

#[test]
#[ignore = "needs root and containerd"]
fn init_containers_sidecars_and_jobs_run_in_order() {
    let node = Node::start("init");
    let mut spec = pod("job", vec![container("main", "cat /shared/log; echo main")]);
    let mount = VolumeMount {
        name: "work".into(),
        mount_path: "/shared".into(),
        ..VolumeMount::default()
    };
    let first = container("first", "echo first >> /shared/log");
    let mut side = container(
        "side",
        "echo side >> /shared/log; trap 'exit 0' TERM; while true; do sleep 0.1; done",
    );
    side.sidecar = true;
    side.startup = Some(exec_probe(&["/bin/test", "-f", "/shared/log"]));
    let second = container("second", "echo second >> /shared/log");
    spec.init_containers = vec![first, side, second];
    for container in spec.init_containers.iter_mut().chain(&mut spec.containers) {
        container.volume_mounts = vec![mount.clone()];
    }
    spec.volumes = vec![Volume {
        name: "work".into(),
        source: Some(volume::Source::EmptyDir(EmptyDir::default())),
    }];
    spec.restart_policy = RestartPolicy::RestartOnFailure.into();
    node.apply(spec);
    let mut failing = pod("fail", vec![container("main", "exit 7")]);
    failing.restart_policy = RestartPolicy::RestartNever.into();
    node.apply(failing);
    let mut late = pod("late", vec![container("main", "sleep 100")]);
    late.active_deadline_s = 2;
    late.termination_grace_period_s = 1;
    node.apply(late);
    let status = node.wait("job", "done", |s| s.phase == "Succeeded");
    assert_eq!(
        node.log("uid-job", "job", "main", 0),
        "first\nside\nsecond\nmain\n"
    );
    assert!(
        status.init_containers.iter().all(|c| c.restart_count == 0),
        "{status:?}"
    );
    node.eventually("the sidecar is stopped", || {
        let side = node.status("job").init_containers[1].state.clone();
        matches!(side.and_then(|s| s.kind), Some(Kind::Terminated(_)))
    });
    let failed = node.wait("fail", "failed", |s| s.phase == "Failed");
    assert_eq!(failed.containers[0].restart_count, 0);
    let late = node.wait("late", "past its deadline", |s| s.phase == "Failed");
    assert_eq!(late.reason, "DeadlineExceeded");
}

#[test]
#[ignore = "needs root and containerd"]
fn missing_images_and_objects_wait_and_recover() {
    let node = Node::start("missing");
    let mut main = container("main", "sleep 100");
    main.image = "podtest.invalid/none:1".into();
    let mut never = container("main", "sleep 100");
    never.image = "podtest.invalid/none:1".into();
    never.image_pull_policy = "Never".into();
    let mut keyed = container("main", "sleep 100");
    let key = KeyRef {
        name: "later".into(),
        key: "a".into(),
        optional: false,
    };
    keyed.env = vec![EnvVar {
        name: "A".into(),
        source: Some(Source::ConfigMapKey(key)),
    }];
    node.apply_all(vec![
        pod("pull", vec![main]),
        pod("never", vec![never]),
        pod("keyed", vec![keyed]),
    ]);
    node.wait("pull", "failing to pull", |s| waiting(s) == "ErrImagePull");
    let status = node.wait("pull", "backing off", |s| waiting(s) == "ImagePullBackOff");
    assert_eq!(status.phase, "Pending");
    node.wait("never", "refused", |s| waiting(s) == "ErrImageNeverPull");
    node.wait("keyed", "misconfigured", |s| {
        waiting(s) == "CreateContainerConfigError"
    });
    node.config_map("later", &[("a", "1")]);
    node.wait("keyed", "ready", ready);
    // A pod that never ran goes as well.
    node.delete("pull", 30);
    node.wait("pull", "gone", |s| s.gone);
}

#[test]
#[ignore = "needs root and containerd"]
fn a_killed_agent_adopts_its_pods() {
    let mut node = Node::start("adopt");
    let mut web = container("web", SERVE);
    web.readiness = Some(http_probe(8080));
    node.apply_all(vec![
        pod("stay", vec![web.clone()]),
        pod("leave", vec![web]),
    ]);
    let before = node.wait("stay", "ready", ready);
    node.wait("leave", "ready", ready);
    let reports = node.control.reports("stay");
    node.kill_agent();
    node.forget("leave");
    node.start_agent();
    node.eventually("the unlisted pod is removed", || {
        node.containers().len() == 2
    });
    node.eventually("no folder is left of it", || {
        !node.path("agent/pods/uid-leave").exists()
    });
    assert_eq!(
        node.status("stay"),
        before,
        "nothing changed for the pod that stays"
    );
    let after = node.control.reports("stay");
    assert!(
        after <= reports + 1,
        "said once more, for what may have been lost: {after}"
    );
    node.delete("stay", 1);
    node.wait("stay", "gone", |s| s.gone);
    assert_eq!(node.containers(), Vec::<String>::new());
}

#[test]
#[ignore = "needs root and containerd"]
fn a_killed_containerd_is_survived() {
    let mut node = Node::start("runtime");
    let mut web = container("web", SERVE);
    web.readiness = Some(http_probe(8080));
    node.apply(pod("web", vec![web]));
    let before = node.wait("web", "ready", ready);
    node.kill_containerd();
    let fields = node.block_on(node.runner().node_report_fields());
    let state = fields
        .conditions
        .iter()
        .find(|c| c.r#type == "Ready")
        .unwrap();
    assert_eq!(
        (state.status.as_str(), state.reason.as_str()),
        ("False", "KubeletNotReady")
    );
    node.apply(pod("after", vec![container("main", "sleep 100")]));
    node.start_containerd();
    node.wait("after", "ready", ready);
    let after = node.status("web");
    assert_eq!(
        after.containers[0].container_id,
        before.containers[0].container_id
    );
    assert!(ready(&after));
    node.delete("web", 1);
    node.wait("web", "gone", |s| s.gone);
}

#[test]
#[ignore = "needs root and containerd"]
fn termination_is_graceful_and_can_be_hastened() {
    let node = Node::start("grace");
    let polite = "trap 'echo got term; exit 0' TERM; while true; do sleep 0.1; done";
    let stubborn = "trap '' TERM; while true; do sleep 0.1; done";
    node.apply_all(vec![
        pod("polite", vec![container("main", polite)]),
        pod("stubborn", vec![container("main", stubborn)]),
    ]);
    node.wait("polite", "ready", ready);
    node.wait("stubborn", "ready", ready);
    let begun = Instant::now();
    node.delete("polite", 30);
    node.wait("polite", "gone", |s| s.gone);
    assert!(
        begun.elapsed() < Duration::from_secs(5),
        "{:?}",
        begun.elapsed()
    );
    let begun = Instant::now();
    node.delete("stubborn", 600);
    node.eventually("the kill began", || {
        node.control.told("stubborn", "Killing")
    });
    node.delete("stubborn", 1);
    node.wait("stubborn", "gone", |s| s.gone);
    assert!(
        begun.elapsed() < Duration::from_secs(10),
        "{:?}",
        begun.elapsed()
    );
}

/// What the node API answers, or its refusal.
fn logs(
    node: &Node,
    pki: &pki::Pki,
    client: &pki::Pair,
    request: LogRequest,
) -> Result<String, tonic::Status> {
    node.block_on(async {
        let tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(&pki.ca))
            .identity(Identity::from_pem(&client.cert, &client.key))
            .domain_name("podtest");
        let endpoint = Endpoint::from_static("https://127.0.0.1:10250")
            .tls_config(tls)
            .unwrap();
        let channel = endpoint.connect_lazy();
        let mut stream = NodeApiClient::new(channel)
            .logs(request)
            .await?
            .into_inner();
        let mut text = Vec::new();
        while let Some(chunk) = stream.message().await? {
            text.extend(chunk.data);
        }
        Ok(String::from_utf8(text).unwrap())
    })
}

#[test]
#[ignore = "needs root and containerd"]
fn the_node_api_serves_logs_to_the_control_plane_only() {
    let pki = pki::Pki::new();
    let node = Node::start("logs");
    let server = pki.issue("system:node:podtest", "system:nodes");
    for (name, text) in [
        ("ca", &pki.ca),
        ("cert", &server.cert),
        ("key", &server.key),
    ] {
        std::fs::write(node.path(name), text).unwrap();
    }
    let mut config = weir_agent::config::Config::load(&node.path("agent.toml")).unwrap();
    config.feed.ca = node.path("ca");
    config.feed.cert = node.path("cert");
    config.feed.key = node.path("key");
    node.block_on(async {
        node.runner()
            .serve_node_api(&config, tokio_util::sync::CancellationToken::new())
            .unwrap();
    });
    let script = "for i in $(seq 1 2000); do echo line $i; done; echo oops; [ -f /keep/once ] || { touch /keep/once; exit 1; }; \
                  while [ ! -f /keep/end ]; do sleep 0.1; done; echo last";
    let mut main = container("main", script);
    main.volume_mounts = vec![VolumeMount {
        name: "keep".into(),
        mount_path: "/keep".into(),
        ..VolumeMount::default()
    }];
    let mut spec = pod("log", vec![main]);
    spec.restart_policy = RestartPolicy::RestartOnFailure.into();
    spec.volumes = vec![Volume {
        name: "keep".into(),
        source: Some(volume::Source::EmptyDir(EmptyDir::default())),
    }];
    node.apply(spec);
    node.wait("log", "restarted", |s| {
        s.containers[0].restart_count == 1 && s.containers[0].ready
    });
    let control = pki.issue("weir-control", "");
    let request = LogRequest {
        namespace: "default".into(),
        pod: "log".into(),
        pod_uid: "uid-log".into(),
        container: "main".into(),
        tail_lines: -1,
        limit_bytes: -1,
        ..LogRequest::default()
    };
    let previous = LogRequest {
        previous: true,
        tail_lines: 2,
        ..request.clone()
    };
    assert_eq!(
        logs(&node, &pki, &control, previous).unwrap(),
        "line 2000\noops\n"
    );
    let limited = LogRequest {
        limit_bytes: 10,
        ..request.clone()
    };
    assert_eq!(logs(&node, &pki, &control, limited).unwrap(), "line 1\nlin");
    let end = node.path("agent/pods/uid-log/volumes/empty-dir/keep/end");
    let follow = LogRequest {
        follow: true,
        tail_lines: 1,
        ..request.clone()
    };
    let waiter = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(500));
        std::fs::write(end, "").unwrap();
    });
    let admin = pki.issue("someone", "system:masters");
    let followed = logs(&node, &pki, &admin, follow).unwrap();
    assert!(
        followed.ends_with("last\n") && followed.len() < 30,
        "{followed:?}"
    );
    waiter.join().unwrap();

    let stranger = pki.issue("system:node:other", "system:nodes");
    let refused = logs(&node, &pki, &stranger, request.clone()).unwrap_err();
    assert_eq!(refused.code(), tonic::Code::PermissionDenied);
    let foreign = pki::Pki::new().issue("weir-control", "");
    assert!(
        logs(&node, &pki, &foreign, request.clone()).is_err(),
        "a certificate of another CA"
    );
    let unknown = LogRequest {
        container: "none".into(),
        ..request
    };
    let refused = logs(&node, &pki, &control, unknown).unwrap_err();
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
}
