//! Namespaces and links of a cluster: a switch with one port for the control plane, every node and the client.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context as _, Result, bail};

use super::{Cluster, Role, v4, v6};
use crate::run::{cmd, output};

/// The bridge inside the switch namespace.
const BRIDGE: &str = "br0";
/// Longest alias of a link (IFALIASZ less the final zero).
const MAX_ALIAS: usize = 255;
/// Uplink of every namespace behind the switch.
pub(crate) const UPLINK: &str = "eth0";

/// Creates whatever is missing of the switch and of the namespaces behind it.
pub(crate) fn build(cluster: &Cluster, roles: &[Role]) -> Result<()> {
    let present = namespaces()?;
    let mut create = String::new();
    let missing = |role: &Role| !present.contains(&cluster.netns(*role));
    if missing(&Role::Switch) {
        let _ = writeln!(create, "netns add {}", cluster.netns(Role::Switch));
    }
    let new: Vec<Role> = roles.iter().copied().filter(missing).collect();
    for role in &new {
        let _ = writeln!(create, "netns add {}", cluster.netns(*role));
    }
    batch(None, &create)?;
    let switch = cluster.netns(Role::Switch);
    if missing(&Role::Switch) {
        batch(
            Some(&switch),
            &format!(
                "link set lo up\nlink add {BRIDGE} type bridge stp_state 0 forward_delay 0\nlink set {BRIDGE} alias \"{}\" up\n",
                alias(cluster)
            ),
        )?;
    }
    let mut links = String::new();
    for role in &new {
        let (namespace, port) = (cluster.netns(*role), role.label());
        let _ = writeln!(
            links,
            "link add {UPLINK} netns {namespace} mtu 1500 type veth peer name {port} netns {switch} mtu 1500"
        );
    }
    batch(None, &links)?;
    let mut ports = String::new();
    for role in &new {
        let port = role.label();
        let _ = writeln!(ports, "link set {port} master {BRIDGE}\nlink set {port} up");
    }
    batch(Some(&switch), &ports)?;
    for role in &new {
        configure(cluster, *role)?;
    }
    Ok(())
}

/// Addresses of one namespace. Duplicate address detection would only delay the start: the addresses are ours.
fn configure(cluster: &Cluster, role: Role) -> Result<()> {
    let host = role.host().context("the switch has no address")?;
    let commands = format!(
        "link set lo up\nlink set {UPLINK} up\naddress add {}/24 dev {UPLINK}\naddress add {}/64 dev {UPLINK} nodad\n",
        v4(host),
        v6(host)
    );
    batch(Some(&cluster.netns(role)), &commands)
}

/// The bridge carries the cluster's folder, so that another checkout does not take its namespaces for its own.
fn alias(cluster: &Cluster) -> String {
    cluster
        .dir
        .to_string_lossy()
        .replace(['"', '\n'], "_")
        .chars()
        .take(MAX_ALIAS)
        .collect()
}

/// Fails when the name's namespaces belong to a cluster of another folder that still exists.
pub(crate) fn require_own(cluster: &Cluster) -> Result<()> {
    let switch = cluster.netns(Role::Switch);
    if !namespaces()?.contains(&switch) {
        return Ok(());
    }
    let said = output(&mut cmd(
        "ip",
        ["-n", &switch, "-j", "link", "show", BRIDGE],
    ));
    let links: serde_json::Value = said
        .ok()
        .and_then(|text| serde_json::from_str(&text).ok())
        .unwrap_or_default();
    match links[0]["ifalias"].as_str() {
        Some(dir) if dir != alias(cluster) && Path::new(dir).exists() => bail!(
            "a cluster {:?} runs from {dir}: add --dir {dir} for that one, or --name for another",
            cluster.name
        ),
        _ => Ok(()),
    }
}

/// Leads pod addresses from the control plane's namespace to their nodes: pods reach the API with their own addresses,
/// as on any network where the machines know the pod routes.
pub(crate) fn route_to_pods(cluster: &Cluster, cidrs: &[(u32, Vec<String>)]) -> Result<()> {
    let mut routes = String::new();
    for (index, cidrs) in cidrs {
        let host = Role::Node(*index).host().context("a node has an address")?;
        for cidr in cidrs {
            let via = if cidr.contains(':') {
                v6(host)
            } else {
                v4(host)
            };
            let _ = writeln!(routes, "route replace {cidr} via {via} dev {UPLINK}");
        }
    }
    batch(Some(&cluster.netns(Role::Control)), &routes)
}

/// Names of the machine's named network namespaces.
pub(crate) fn namespaces() -> Result<BTreeSet<String>> {
    match std::fs::read_dir("/run/netns") {
        Ok(entries) => Ok(entries
            .flatten()
            .map(|e| e.file_name().to_string_lossy().into_owned())
            .collect()),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(BTreeSet::new()),
        Err(e) => Err(e).context("list /run/netns"),
    }
}

/// Deletes namespaces of the cluster; links inside go with them.
pub(crate) fn delete(names: &[String]) -> Result<()> {
    for name in names {
        output(&mut cmd("ip", ["netns", "delete", name]))?;
    }
    Ok(())
}

/// One `ip` process for many commands.
fn batch(namespace: Option<&str>, commands: &str) -> Result<()> {
    if commands.is_empty() {
        return Ok(());
    }
    let mut ip = cmd::<&str>("ip", []);
    if let Some(namespace) = namespace {
        ip.args(["-n", namespace]);
    }
    ip.args(["-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut child = ip.spawn().context("start ip (package iproute2)")?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin
            .write_all(commands.as_bytes())
            .context("write to ip -batch")?;
    }
    let done = child.wait_with_output().context("wait for ip -batch")?;
    if !done.status.success() {
        bail!(
            "set up the network of {}: {}\n{}in:\n{commands}",
            namespace.unwrap_or("the machine"),
            done.status,
            String::from_utf8_lossy(&done.stderr)
        );
    }
    Ok(())
}
