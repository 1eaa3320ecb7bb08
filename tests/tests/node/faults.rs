//! Every step of an ADD fails once: system calls of the agent are made to fail, one after the other, by strace.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use weir_tests::topology::Namespace;

use super::agents::{finish, left_out};
use super::cluster::{Cluster, Member};

/// System calls that an ADD consists of, and how many of each at least must have failed one.
const CALLS: [(&str, u32); 5] = [
    // Netlink.
    ("sendto", 8),
    ("bpf", 2),
    // The record.
    ("fsync", 1),
    ("rename", 1),
    // The way into the pod's namespace.
    ("setns", 1),
];
/// A call is through when so many ADDs in a row succeed although the next one of that kind fails.
const UNHARMED: u32 = 3;
const PATIENCE: Duration = Duration::from_secs(20);

/// strace, holding the agent; let go when dropped.
struct Fault(Child);

impl Fault {
    /// The n-th call of each thread fails.
    fn inject(member: &Member, call: &str, n: u32) -> Self {
        let pid = member.agent_pid();
        let child = Command::new("strace")
            .args(["-f", "-qqq", "-o", "/dev/null"])
            .args(["-e", &format!("trace={call}")])
            .args(["-e", &format!("inject={call}:error=ENOBUFS:when={n}")])
            .args(["-p", &pid.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let fault = Self(child);
        let started = Instant::now();
        while !held(pid) {
            assert!(
                started.elapsed() < PATIENCE,
                "strace does not get hold of the agent"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        fault
    }
}

impl Drop for Fault {
    fn drop(&mut self) {
        // SIGTERM: strace lets go of the agent before it ends.
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.0.id()).unwrap());
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        let _ = self.0.wait();
    }
}

/// True when every thread of the process has a tracer.
fn held(pid: u32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    tasks.flatten().all(|task| {
        let status = std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
        // A thread that has ended meanwhile has none.
        status.is_empty() || !status.contains("TracerPid:\t0\n")
    })
}

/// Why strace cannot be used, if so.
fn no_strace() -> Option<&'static str> {
    let traced = Command::new("strace")
        .args([
            "-qqq",
            "-o",
            "/dev/null",
            "-e",
            "inject=fsync:error=EIO:when=1",
            "true",
        ])
        .stderr(Stdio::null())
        .status();
    match traced {
        Err(_) => Some("needs strace (Debian package strace)"),
        Ok(status) if !status.success() => Some("strace may not trace here"),
        Ok(_) => None,
    }
}

fn records(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    entries
        .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_fails_an_add_leaves_nothing() {
    const TEST: &str = "whatever_fails_an_add_leaves_nothing";
    if left_out(TEST) {
        return;
    }
    if let Some(why) = no_strace() {
        println!("SKIPPED {TEST}: {why}");
        return;
    }
    let mut cluster = Cluster::start(1).await;
    let keeper = cluster.pod(0, "keeper");
    let member = &cluster.members[0];
    let links = member.namespace.links().unwrap();
    for (call, least) in CALLS {
        let (mut n, mut failed, mut unharmed) = (0, 0, 0);
        while unharmed < UNHARMED {
            n += 1;
            let pod = Namespace::new("pod").unwrap();
            let fault = Fault::inject(member, call, n);
            let outcome = member.runtime.add("c1", &pod);
            drop(fault);
            match outcome {
                Ok(_) => {
                    unharmed += 1;
                    member.runtime.del("c1").unwrap();
                }
                Err(error) => {
                    (failed, unharmed) = (failed + 1, 0);
                    let code = error["code"].as_u64().unwrap();
                    assert!([4, 5, 8, 11, 101].contains(&code), "{call} {n}: {error}");
                }
            }
            let what = format!("{call} {n}");
            assert_eq!(pod.links().unwrap(), Vec::<String>::new(), "{what}");
            assert_eq!(
                member.namespace.links().unwrap(),
                links,
                "{what}: {}",
                member.log()
            );
            let state = &member.runtime.state_dir;
            assert_eq!(records(&state.join("ipam")), ["keeper@eth0.json"], "{what}");
        }
        println!("{failed} ADDs failed with {call}, up to the {n}th of a thread");
        assert!(failed >= least, "{call}: {failed}");
    }
    // The agent lives, and works.
    let pod = Namespace::new("pod").unwrap();
    member.runtime.add("c2", &pod).unwrap();
    member.runtime.del("c2").unwrap();
    finish(&mut cluster, vec![keeper]);
}
