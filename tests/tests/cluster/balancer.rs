//! Addresses of balancers: given from pools, announced by one node, taken over when it is lost, and refused with reasons.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use crate::http;
use crate::support::{Cluster, LIMIT, NAME, NODES, Result, eventually};

/// From the moment that a node falls silent until a client reaches the address again.
const BAR: Duration = Duration::from_secs(3);
/// A loaded machine may take longer, but not as long as when nobody hurries.
const TOO_LONG: Duration = Duration::from_secs(9);
/// The only addresses of the pool at first.
const ADDRESSES: [&str; 2] = ["192.168.77.200", "192.168.77.201"];
/// Enough that chance alone leaves no replica with less than its share.
const REQUESTS: usize = 300;
/// A client that asks anew after so long: some backends are on the lost node, and nobody knows yet.
const ATTEMPT: Duration = Duration::from_millis(150);
const CONDITION: &str = "weir.dev/LoadBalancerAddresses";

pub(crate) fn moves_when_its_node_is_lost(cluster: &Cluster) -> Result<String> {
    set_pool(cluster, &format!("{}-{}", ADDRESSES[0], ADDRESSES[1]))?;
    let created = Instant::now();
    balanced(cluster, "edge", None)?;
    let text = eventually("an address of the Service", || address_of(cluster, "edge"))?;
    ensure!(
        ADDRESSES.contains(&text.as_str()),
        "{text} is not of the pool"
    );
    let address: SocketAddr = format!("{text}:80").parse()?;
    let outside = cluster.netns("client");
    http::inside(&outside, || {
        eventually("the first answer", || attempt(address))
    })?;
    let first_s = created.elapsed().as_secs_f64();
    let answers = http::inside(&outside, || {
        (0..REQUESTS).map(|_| http::fetch(address)).collect()
    })?;
    let answers: Vec<String> = answers;
    let spread = http::spread(&answers, 3)?;
    let node = announcer(cluster, &outside, &text)?;
    event(cluster, "edge", "AddressAnnounced")?;

    let lost = Lost::cut_off(cluster, &node)?;
    let away = http::inside(&outside, || again(address, lost.since));
    let next = announcer(cluster, &outside, &text);
    // The node comes back whatever was seen.
    lost.bring_back(cluster)?;
    let (away, next) = (away?, next?);
    ensure!(next != node, "{text} is still answered by {node}");
    ensure!(
        away <= TOO_LONG,
        "the address was away for {:.2} s; the bar is {} s",
        away.as_secs_f64(),
        BAR.as_secs()
    );
    let met = if away <= BAR { "met" } else { "missed" };
    http::inside(&outside, || {
        eventually("answers of every replica after the node came back", || {
            let answers = (0..REQUESTS)
                .map(|_| http::fetch(address))
                .collect::<Result<Vec<String>>>()?;
            http::spread(&answers, 3)
        })
    })?;
    Ok(format!(
        "first answer after {first_s:.1} s, {spread} requests; {node} lost, {next} answers after {:.2} s; bar {} s: {met}",
        away.as_secs_f64(),
        BAR.as_secs()
    ))
}

pub(crate) fn says_why_there_is_none(cluster: &Cluster) -> Result<String> {
    set_pool(cluster, ADDRESSES[0])?;
    balanced(cluster, "edge", None)?;
    let taken = eventually("an address of the first", || address_of(cluster, "edge"))?;
    // The first Service keeps what it has.
    set_pool(cluster, &taken)?;
    balanced(cluster, "second", None)?;
    has_none(cluster, "second", "PoolExhausted")?;
    balanced(cluster, "third", Some(&taken))?;
    has_none(cluster, "third", "AddressInUse")?;
    ensure!(address_of(cluster, "edge")? == taken, "the owner lost it");

    let asked = Instant::now();
    set_pool(cluster, &format!("{}-{}", ADDRESSES[0], ADDRESSES[1]))?;
    let other = eventually("an address from the larger pool", || {
        address_of(cluster, "second")
    })?;
    let given_s = asked.elapsed().as_secs_f64();
    ensure!(other != taken, "{other} is given twice");
    cluster.kubectl(&["delete", "service", "edge", "second", "third"])?;
    cluster.kubectl(&[
        "delete",
        "configmap",
        "load-balancer-pools",
        "--namespace=weir-system",
    ])?;
    Ok(format!(
        "PoolExhausted and AddressInUse by condition and Event; {other} {given_s:.1} s after the pool grew"
    ))
}

fn set_pool(cluster: &Cluster, range: &str) -> Result<()> {
    let pools = format!("- name: edge\n  ranges: [\"{range}\"]\n");
    let objects = json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "weir-system"}},
        {"apiVersion": "v1", "kind": "ConfigMap",
         "metadata": {"name": "load-balancer-pools", "namespace": "weir-system"}, "data": {"pools": pools}},
    ]});
    cluster
        .kubectl_with(&["apply", "-f", "-"], &objects.to_string())
        .map(drop)
}

/// A Service of type LoadBalancer in front of the deployment `web`, if need be with the address that it asks for.
fn balanced(cluster: &Cluster, name: &str, wanted: Option<&str>) -> Result<()> {
    let annotations = match wanted {
        Some(address) => json!({"weir.dev/load-balancer-addresses": address}),
        None => json!({}),
    };
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "annotations": annotations},
        "spec": {"type": "LoadBalancer", "selector": {"app": "web"}, "ports": [{"port": 80}]},
    });
    cluster
        .kubectl_with(&["apply", "-f", "-"], &service.to_string())
        .map(drop)
}

fn address_of(cluster: &Cluster, service: &str) -> Result<String> {
    let object = cluster.get(&["service", service])?;
    let ingress = &object["status"]["loadBalancer"]["ingress"];
    let ip = ingress[0]["ip"].as_str();
    Ok(ip
        .with_context(|| format!("{service} has no address: {}", object["status"]))?
        .to_owned())
}

/// The condition and an Event say why the Service has no address.
fn has_none(cluster: &Cluster, service: &str, reason: &str) -> Result<()> {
    eventually(&format!("the condition {reason} of {service}"), || {
        let object = cluster.get(&["service", service])?;
        let conditions = object["status"]["conditions"].as_array();
        let own = conditions
            .into_iter()
            .flatten()
            .find(|condition| condition["type"] == CONDITION);
        let own = own.with_context(|| format!("no condition {CONDITION}"))?;
        ensure!(
            own["status"] == "False" && own["reason"] == reason,
            "condition {own}"
        );
        ensure!(
            object["status"]["loadBalancer"]["ingress"].is_null(),
            "it has an address"
        );
        Ok(())
    })?;
    event(cluster, service, reason)
}

fn event(cluster: &Cluster, service: &str, reason: &str) -> Result<()> {
    let selector =
        format!("involvedObject.kind=Service,involvedObject.name={service},reason={reason}");
    eventually(&format!("the Event {reason} of {service}"), || {
        let list = cluster.get(&["events", &format!("--field-selector={selector}")])?;
        let some = list["items"]
            .as_array()
            .is_some_and(|items| !items.is_empty());
        ensure!(some, "no such Event");
        Ok(())
    })
}

fn attempt(address: SocketAddr) -> Result<String> {
    http::Connection::open_within(address, ATTEMPT)?.request("close")
}

/// Asks until there is an answer; how long it took since `cut`.
fn again(address: SocketAddr, cut: Instant) -> Result<Duration> {
    loop {
        match attempt(address) {
            Ok(_) => return Ok(cut.elapsed()),
            Err(error) if cut.elapsed() > LIMIT => {
                return Err(error).context("the address did not come back");
            }
            Err(_) => {}
        }
    }
}

/// Which node answers for the address on the client's segment.
fn announcer(cluster: &Cluster, outside: &Path, address: &str) -> Result<String> {
    let neighbours = links(&["-j", "neigh", "show", address], outside)?;
    let mac = neighbours[0]["lladdr"]
        .as_str()
        .with_context(|| format!("the client knows no neighbour {address}: {neighbours}"))?
        .to_owned();
    for node in NODES {
        let link = links(&["-j", "link", "show", "eth0"], &cluster.netns(node))?;
        if link[0]["address"] == mac.as_str() {
            return Ok(node.to_owned());
        }
    }
    anyhow::bail!("{address} is at {mac}, which is no node's")
}

/// What `ip` says inside a namespace.
fn links(args: &[&str], netns: &Path) -> Result<Value> {
    let name = netns.file_name().context("a namespace's name")?;
    let out = Command::new("ip").arg("-n").arg(name).args(args).output()?;
    ensure!(
        out.status.success(),
        "ip {args:?}: {}",
        String::from_utf8_lossy(&out.stderr)
    );
    serde_json::from_slice(&out.stdout).with_context(|| format!("read what ip {args:?} said"))
}

/// A node whose cable is pulled and whose programs are killed.
struct Lost {
    node: String,
    since: Instant,
}

impl Lost {
    fn cut_off(cluster: &Cluster, node: &str) -> Result<Self> {
        let lost = Self {
            node: node.to_owned(),
            since: Instant::now(),
        };
        lost.cable("down")?;
        // Both are started again, and reach nobody.
        cluster.kill_programs(&format!("agent-{node}"))?;
        cluster.kill_programs(&format!("containerd-{node}"))?;
        Ok(lost)
    }

    fn cable(&self, state: &str) -> Result<()> {
        let switch = format!("{NAME}-switch");
        let out = Command::new("ip")
            .args(["-n", &switch, "link", "set", &self.node, state])
            .output()?;
        ensure!(
            out.status.success(),
            "set the port of {} {state}: {}",
            self.node,
            String::from_utf8_lossy(&out.stderr)
        );
        Ok(())
    }

    fn bring_back(&self, cluster: &Cluster) -> Result<()> {
        self.cable("up")?;
        eventually("the node that was lost", || {
            cluster.kubectl(&[
                "wait",
                "--for=condition=Ready",
                &format!("node/{}", self.node),
                "--timeout=5s",
            ])
        })?;
        cluster.rolled_out("web")
    }
}
