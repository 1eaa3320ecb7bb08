//! Configuration files of a cluster's programs, and the list of programs for the supervisor.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::supervise::Program;
use super::{Cluster, MARK, Role, network, node, v4, v6};
use crate::image::PAUSE_IMAGE;
use crate::repo::{file_version, write_if_changed};

/// API server inside the cluster's network.
const API_PORT: u16 = 6443;
const FEED_PORT: u16 = 6444;
const CONTROL_METRICS_PORT: u16 = 9964;
/// Containerd's socket as programs inside the node see it.
pub(crate) const CONTAINERD_SOCKET: &str = "/run/containerd/containerd.sock";

pub(crate) fn control_config(cluster: &Cluster) -> PathBuf {
    cluster.dir.join("control.toml")
}

/// Writes the control plane's configuration.
pub(crate) fn write_control(cluster: &Cluster) -> Result<()> {
    let address = v4(1);
    write_toml(
        &control_config(cluster),
        &json!({
            "data_dir": cluster.dir.join("control"),
            "api_listen": [format!("{address}:{API_PORT}"), format!("[{}]:{API_PORT}", v6(1))],
            "advertise": format!("{address}:{API_PORT}"),
            "feed_listen": format!("{address}:{FEED_PORT}"),
            "metrics_listen": format!("{address}:{CONTROL_METRICS_PORT}"),
            "extra_names": ["localhost", "127.0.0.1"],
        }),
    )
}

/// Folder with a node's certificate, key and the CA.
pub(crate) fn credentials(cluster: &Cluster, index: u32) -> PathBuf {
    cluster.node_dir(index).join("pki")
}

/// Writes the configurations of a node's containerd and agent.
pub(crate) fn write_node(cluster: &Cluster, index: u32) -> Result<()> {
    let dir = cluster.node_dir(index);
    write_toml(&dir.join("containerd.toml"), &containerd(&dir))?;
    // Programs of the node find no name server but the cluster's: the nodes have no way to the outside.
    write_if_changed(&dir.join("resolv.conf"), b"", 0o644)?;
    write_toml(&dir.join("agent.toml"), &agent(cluster, index))
}

fn containerd(dir: &Path) -> Value {
    json!({
        "version": 2,
        "root": dir.join("containerd"),
        "state": "/run/containerd",
        "disabled_plugins": [
            "io.containerd.internal.v1.tracing", "io.containerd.internal.v1.opt",
            "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
            "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
        ],
        "grpc": {"address": CONTAINERD_SOCKET},
        "plugins": {"io.containerd.grpc.v1.cri": {
            "sandbox_image": PAUSE_IMAGE,
            // Lowering a score needs a capability that machines in a sandbox often lack.
            "restrict_oom_score_adj": true,
            "stream_server_address": "127.0.0.1",
            "containerd": {
                "snapshotter": "overlayfs",
                "default_runtime_name": "runc",
                "runtimes": {"runc": {
                    "runtime_type": "io.containerd.runc.v2",
                    "options": {"SystemdCgroup": false},
                }},
            },
            "cni": {"bin_dir": dir.join("cni/bin"), "conf_dir": dir.join("cni/net.d")},
        }},
    })
}

fn agent(cluster: &Cluster, index: u32) -> Value {
    let dir = cluster.node_dir(index);
    let pki = credentials(cluster, index);
    let host = Role::Node(index).host().unwrap_or_default();
    json!({
        "node_name": Role::Node(index).label(),
        "node_ips": [v4(host), v6(host)],
        "uplinks": [network::UPLINK],
        "state_dir": dir.join("state"),
        "run_dir": "/run/weir",
        "bpffs": dir.join("bpf"),
        "feed": {
            "servers": [format!("https://{}:{FEED_PORT}", v4(1))],
            "ca": pki.join("ca.crt"),
            "cert": pki.join("node.crt"),
            "key": pki.join("node.key"),
        },
        "cni": {"conf_dir": dir.join("cni/net.d")},
        // The root of the hierarchy belongs to the machine.
        "dataplane": {"cgroup": node::unified_root().join(cluster.cgroup(index))},
        "dns": {"resolv_conf": dir.join("resolv.conf")},
        "pods": {
            "cri": format!("unix://{CONTAINERD_SOCKET}"),
            "cgroup_parent": format!("/{}/pods", cluster.cgroup(index)),
            "log_dir": dir.join("log/pods"),
            "prefer_present_images": true,
        },
    })
}

fn write_toml(path: &Path, value: &Value) -> Result<()> {
    let text = toml::to_string(value).with_context(|| format!("encode {}", path.display()))?;
    write_if_changed(path, text.as_bytes(), 0o644)
}

/// The control plane's program.
pub(crate) fn control_program(cluster: &Cluster) -> Result<Program> {
    let config = control_config(cluster);
    let binary = cluster.bin().join("weir-control");
    let mut argv = vec![
        "nsenter".into(),
        format!("--net={}", cluster.netns_path(Role::Control).display()),
        "--".into(),
    ];
    argv.extend([
        binary.display().to_string(),
        "serve".into(),
        "--config".into(),
    ]);
    argv.push(config.display().to_string());
    let mut program = program(cluster, "control", argv, &[&binary, &config])?;
    program.takes_listener = true;
    Ok(program)
}

/// A node's container runtime.
pub(crate) fn containerd_program(cluster: &Cluster, index: u32) -> Result<Program> {
    let config = cluster.node_dir(index).join("containerd.toml");
    let mut argv = node::enter(cluster, index);
    argv.extend([
        "containerd".into(),
        "--config".into(),
        config.display().to_string(),
    ]);
    program(cluster, &format!("containerd-n{index}"), argv, &[&config])
}

/// A node's agent.
pub(crate) fn agent_program(cluster: &Cluster, index: u32) -> Result<Program> {
    let config = cluster.node_dir(index).join("agent.toml");
    let binary = cluster.bin().join("weir-agent");
    let mut argv = node::enter(cluster, index);
    argv.extend([
        binary.display().to_string(),
        "--config".into(),
        config.display().to_string(),
    ]);
    program(
        cluster,
        &format!("agent-n{index}"),
        argv,
        &[&binary, &config],
    )
}

fn program(
    cluster: &Cluster,
    name: &str,
    argv: Vec<String>,
    version_of: &[&Path],
) -> Result<Program> {
    // Both are written only when their content changes.
    let versions = version_of
        .iter()
        .map(|p| file_version(p))
        .collect::<Result<Vec<_>>>()?;
    let mut env = BTreeMap::from([
        (MARK.to_owned(), cluster.dir.display().to_string()),
        // Logs are files.
        ("NO_COLOR".to_owned(), "1".to_owned()),
    ]);
    if let Ok(filter) = std::env::var("RUST_LOG") {
        env.insert("RUST_LOG".into(), filter);
    }
    Ok(Program {
        argv,
        env,
        log: cluster.log(name),
        takes_listener: false,
        version: versions.join(", "),
    })
}
