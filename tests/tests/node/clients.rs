//! Real clients of the plugin: `ctr run --cni`, podman in CNI mode, and libcni's `cnitool`. (containerd's CRI is in the
//! agent's pod tests and the cluster tier.)

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use weir_agent::cni_api::conf;
use weir_tests::topology::Namespace;

use super::cni::{BOTH, Node};
use super::support::{addresses, skipped};

/// Debian's plugins: ctr wants `loopback`.
const PLUGINS: &str = "/usr/lib/cni";

fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
}

/// Says why a test is left out, or `false` when all programs are there.
fn left_out(test: &str, programs: &[(&str, &str)]) -> bool {
    if skipped(test) {
        return true;
    }
    for (program, package) in programs {
        if on_path(program).is_none() {
            println!("SKIPPED {test}: {program} is not on PATH ({package})");
            return true;
        }
    }
    false
}

/// What clients find on a node: the configuration list, plugins, and a root file system with busybox.
struct Files {
    conf: PathBuf,
    bin: PathBuf,
    root: PathBuf,
}

impl Files {
    fn of(node: &Node) -> Self {
        let path = |name: &str| node.dir.path().join(name);
        let files = Self {
            conf: path("net.d"),
            bin: path("bin"),
            root: path("root"),
        };
        conf::write(&files.conf, &node.runtime.socket, node.dir.path()).unwrap();
        conf::install_plugin(&node.runtime.plugin, &files.bin).unwrap();
        let loopback = Path::new(PLUGINS).join("loopback");
        if loopback.is_file() {
            std::fs::copy(loopback, files.bin.join("loopback")).unwrap();
        }
        for folder in ["bin", "etc", "proc", "sys", "dev", "run"] {
            std::fs::create_dir_all(files.root.join(folder)).unwrap();
        }
        if let Some(busybox) = on_path("busybox") {
            std::fs::copy(busybox, files.root.join("bin/busybox")).unwrap();
        }
        files
    }
}

/// Runs a program in the node's network namespace and returns what it did.
fn output(node: &Node, program: &str, arguments: &[&str]) -> Output {
    node.namespace.output(program, arguments).unwrap()
}

fn said(output: &Output) -> String {
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn the_reference_client_gets_along_with_us() {
    const TEST: &str = "the_reference_client_gets_along_with_us";
    if left_out(
        TEST,
        &[("cnitool", "Go module containernetworking/cni/cnitool")],
    ) {
        return;
    }
    let node = Node::start(&BOTH);
    let files = Files::of(&node);
    let pod = Namespace::new("pod").unwrap();
    let call = |command: &str| {
        let output = Command::new("cnitool")
            .env("NETCONFPATH", &files.conf)
            .env("CNI_PATH", &files.bin)
            .args([command, "weir"])
            .arg(pod.path())
            .output()
            .unwrap();
        said(&output)
    };
    call("status");
    let result: Value = serde_json::from_str(&call("add")).unwrap();
    assert_eq!(addresses(&result).len(), 2);
    call("check");
    call("del");
    call("del");
    node.assert_empty();
}

/// A containerd of its own.
struct Containerd(Child);

impl Drop for Containerd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn ctr_connects_a_container() {
    const TEST: &str = "ctr_connects_a_container";
    let programs = [
        ("containerd", "Debian package containerd"),
        ("ctr", "Debian package containerd"),
        ("runc", "Debian package runc"),
        ("busybox", "Debian package busybox-static"),
        ("unshare", "Debian package util-linux"),
    ];
    if left_out(TEST, &programs) {
        return;
    }
    if !Path::new(PLUGINS).join("loopback").is_file() {
        println!("SKIPPED {TEST}: {PLUGINS} is empty (Debian package containernetworking-plugins)");
        return;
    }
    let node = Node::start(&BOTH);
    let files = Files::of(&node);
    let path = |name: &str| node.dir.path().join(name);
    let config = format!(
        "version = 2\nroot = {:?}\nstate = {:?}\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n\
         [grpc]\naddress = {:?}\n[ttrpc]\naddress = {:?}\n",
        path("containerd"),
        path("state"),
        path("c.sock"),
        path("t.sock"),
    );
    std::fs::write(path("containerd.toml"), config).unwrap();
    let log = std::fs::File::create(path("containerd.log")).unwrap();
    let child = Command::new("containerd")
        .arg("--config")
        .arg(path("containerd.toml"))
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap();
    let containerd = Containerd(child);
    let deadline = Instant::now() + Duration::from_secs(30);
    while std::os::unix::net::UnixStream::connect(path("c.sock")).is_err() {
        let log = std::fs::read_to_string(path("containerd.log")).unwrap();
        assert!(
            Instant::now() < deadline,
            "containerd does not start: {log}"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    // ctr looks in the usual places only: it gets ours there, in mounts of its own.
    std::fs::create_dir_all("/etc/cni/net.d").unwrap();
    std::fs::create_dir_all("/opt/cni/bin").unwrap();
    let script = format!(
        "mount --bind {} /etc/cni/net.d && mount --bind {} /opt/cni/bin && exec ctr --address {} run --rm --cni \
         --rootfs {} weir-ctr /bin/busybox ip -o address show dev eth0",
        files.conf.display(),
        files.bin.display(),
        path("c.sock").display(),
        files.root.display(),
    );
    let shown = said(&output(&node, "unshare", &["--mount", "sh", "-c", &script]));
    assert!(
        shown.contains("10.244.1.") && shown.contains("fd00:10:244:1::"),
        "{shown}"
    );
    drop(containerd);
    node.assert_empty();
}

#[test]
fn podman_connects_a_container() {
    const TEST: &str = "podman_connects_a_container";
    let programs = [
        ("podman", "Debian package podman"),
        ("runc", "Debian package runc"),
        ("busybox", "Debian package busybox-static"),
    ];
    if left_out(TEST, &programs) {
        return;
    }
    let node = Node::start(&BOTH);
    let files = Files::of(&node);
    let path = |name: &str| node.dir.path().join(name).display().to_string();
    let config = format!(
        "[network]\nnetwork_backend = \"cni\"\ncni_plugin_dirs = [{:?}]\nnetwork_config_dir = {:?}\n\
         [engine]\nruntime = \"runc\"\ncgroup_manager = \"cgroupfs\"\nevents_logger = \"none\"\n",
        files.bin, files.conf,
    );
    std::fs::write(path("containers.conf"), config).unwrap();
    let podman = |arguments: &[&str]| {
        let config = format!("CONTAINERS_CONF={}", path("containers.conf"));
        let (root, run, temporary) = (path("podman"), path("podman-run"), path("podman-tmp"));
        let mut all = vec![config.as_str(), "podman", "--storage-driver", "vfs"];
        all.extend([
            "--root",
            root.as_str(),
            "--runroot",
            run.as_str(),
            "--tmpdir",
            temporary.as_str(),
        ]);
        all.extend(arguments);
        output(&node, "env", &all)
    };
    let backend = podman(&["info", "--format", "{{.Host.NetworkBackend}}"]);
    let backend = String::from_utf8_lossy(&backend.stdout).trim().to_owned();
    if backend != "cni" {
        println!(
            "SKIPPED {TEST}: this podman has no CNI mode (its network backend is {backend:?})"
        );
        return;
    }
    let rootfs = files.root.display().to_string();
    // Below what podman takes for the least that there is: raising limits is not always allowed.
    let limits = ["nofile=1024:1024", "nproc=1024:1024"];
    let run = [
        "run",
        "--rm",
        "--ulimit",
        limits[0],
        "--ulimit",
        limits[1],
        "--network",
        "weir",
        "--rootfs",
        &rootfs,
    ];
    let mut run = run.to_vec();
    run.extend(["/bin/busybox", "ip", "-o", "address", "show", "dev", "eth0"]);
    let shown = said(&podman(&run));
    assert!(
        shown.contains("10.244.1.") && shown.contains("fd00:10:244:1::"),
        "{shown}"
    );
    node.assert_empty();
}
