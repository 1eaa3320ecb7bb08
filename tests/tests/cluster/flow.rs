//! The flow of the textbooks, with real kubectl.

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::http;
use crate::support::{Cluster, NAME, Result, eventually};

/// From `up` on a warm machine to the first answer through the Service.
const FIRST_ANSWER_LIMIT_S: f64 = 15.0;
/// Resident memory of an idle control plane and of an idle agent.
const IDLE_LIMIT_KB: u64 = 48 * 1024;

pub(crate) fn first_answer(cluster: &Cluster) -> Result<String> {
    cluster.kubectl(&[
        "create",
        "deployment",
        "web",
        "--image=nginx",
        "--replicas=3",
    ])?;
    cluster.kubectl(&["expose", "deployment", "web", "--port=80"])?;
    let address: SocketAddr = format!("{}:80", cluster.cluster_ip("web", false)?).parse()?;
    http::inside(&cluster.netns("n1"), || {
        eventually("the first answer of the Service", || http::fetch(address))
    })?;
    let total = cluster.started.elapsed().as_secs_f64();
    cluster.rolled_out("web")?;
    cluster.kubectl(&[
        "wait",
        "--for=condition=Available",
        "deployment/web",
        "--timeout=90s",
    ])?;
    for node in crate::support::NODES {
        cluster.client_pod(node)?;
    }
    let figures = format!("up {:.1} s, first answer after {total:.1} s", cluster.up_s);
    Ok(format!(
        "{figures}; bar {FIRST_ANSWER_LIMIT_S} s: {}",
        verdict(total <= FIRST_ANSWER_LIMIT_S)
    ))
}

/// Time and memory are told, not asserted: they depend on what else the machine does.
fn verdict(met: bool) -> &'static str {
    if met { "met" } else { "MISSED" }
}

pub(crate) fn listings(cluster: &Cluster) -> Result<String> {
    let said = cluster.kubectl(&["get", "nodes,pods,svc,endpointslices", "-o", "wide"])?;
    for column in [
        "INTERNAL-IP",
        "CONTAINER-RUNTIME",
        "RESTARTS",
        "CLUSTER-IP",
        "ENDPOINTS",
    ] {
        ensure!(said.contains(column), "no column {column}:\n{said}");
    }
    ensure!(
        said.matches(" Ready ").count() >= 3,
        "not three ready nodes:\n{said}"
    );
    let pods = cluster.get(&["pods", "-l", "app=web"])?;
    let pods = pods["items"].as_array().context("items")?;
    let mut nodes: Vec<&str> = pods
        .iter()
        .filter_map(|p| p["spec"]["nodeName"].as_str())
        .collect();
    nodes.sort_unstable();
    nodes.dedup();
    ensure!(
        pods.len() == 3 && nodes.len() == 3,
        "three replicas on {nodes:?}"
    );
    let selector = "kubernetes.io/service-name=web";
    let slices = cluster.get(&["endpointslices", "-l", selector])?;
    let ready = slices["items"]
        .as_array()
        .into_iter()
        .flatten()
        .flat_map(|s| s["endpoints"].as_array().cloned().unwrap_or_default())
        .filter(|e| e["conditions"]["ready"] == true)
        .count();
    ensure!(ready == 3, "{ready} ready endpoints of 3");
    Ok("replicas on 3 nodes".into())
}

pub(crate) fn describe_and_logs(cluster: &Cluster) -> Result<String> {
    let pod = web_pods(cluster)?.first().context("no pod")?.clone();
    for (target, word) in [
        ("deployment/web", "RollingUpdate"),
        ("service/web", "Endpoints:"),
        ("node/n1", "Allocatable"),
        (&format!("pod/{pod}"), "Container ID:"),
    ] {
        let said = cluster.kubectl(&["describe", target])?;
        ensure!(
            said.contains(word),
            "describe {target} has no {word}:\n{said}"
        );
    }
    let logs = eventually("an access in the pod's log", || {
        let logs = cluster.kubectl(&["logs", "deployment/web", "--all-pods=true"])?;
        ensure!(
            logs.contains("GET / HTTP/1.1"),
            "no access in the logs: {logs:?}"
        );
        Ok(logs)
    })?;
    Ok(format!("{} log lines", logs.lines().count()))
}

pub(crate) fn web_pods(cluster: &Cluster) -> Result<Vec<String>> {
    let pods = cluster.get(&["pods", "-l", "app=web"])?;
    let alive = |p: &&Value| p["metadata"]["deletionTimestamp"].is_null();
    Ok(pods["items"]
        .as_array()
        .context("items")?
        .iter()
        .filter(alive)
        .filter_map(|p| p["metadata"]["name"].as_str().map(str::to_owned))
        .collect())
}

fn wait_pods(cluster: &Cluster, wanted: usize) -> Result<()> {
    eventually("the wanted number of pods", || {
        let pods = cluster.get(&["pods", "-l", "app=web"])?;
        let count = pods["items"].as_array().map_or(0, Vec::len);
        ensure!(count == wanted, "{count} pods instead of {wanted}");
        Ok(())
    })
}

pub(crate) fn scale(cluster: &Cluster) -> Result<String> {
    cluster.kubectl(&["scale", "deployment/web", "--replicas=5"])?;
    cluster.rolled_out("web")?;
    wait_pods(cluster, 5)?;
    cluster.kubectl(&["scale", "deployment/web", "--replicas=2"])?;
    cluster.rolled_out("web")?;
    wait_pods(cluster, 2)?;
    // With the gone replicas programmed away, no request may reach one of them.
    let address: SocketAddr = format!("{}:80", cluster.cluster_ip("web", false)?).parse()?;
    let answers = http::inside(&cluster.netns("n2"), || {
        (0..100)
            .map(|_| http::fetch(address))
            .collect::<Result<Vec<_>>>()
    })?;
    let figures = http::spread(&answers, 2)?;
    cluster.kubectl(&["scale", "deployment/web", "--replicas=3"])?;
    cluster.rolled_out("web")?;
    Ok(format!(
        "3 to 5 to 2 to 3; 100 requests over 2 replicas: {figures}"
    ))
}

pub(crate) fn delete_pod(cluster: &Cluster) -> Result<String> {
    let before = web_pods(cluster)?;
    let gone = before.first().context("no pod")?;
    cluster.kubectl(&["delete", "pod", gone, "--timeout=60s"])?;
    cluster.rolled_out("web")?;
    let after = web_pods(cluster)?;
    ensure!(
        after.len() == 3 && !after.contains(gone),
        "after the delete of {gone}: {after:?}"
    );
    Ok(String::new())
}

pub(crate) fn apply(cluster: &Cluster) -> Result<String> {
    let manifest = |colour: &str| {
        format!(
            "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: paint\ndata:\n  colour: {colour}\n"
        )
    };
    for (colour, word) in [
        ("red", "created"),
        ("red", "unchanged"),
        ("blue", "configured"),
    ] {
        let said = cluster.kubectl_with(&["apply", "-f", "-"], &manifest(colour))?;
        ensure!(
            said.contains(word),
            "apply of {colour} said {said:?} and not {word}"
        );
    }
    let map = cluster.get(&["configmap", "paint"])?;
    ensure!(map["data"]["colour"] == "blue", "data: {}", map["data"]);
    cluster.kubectl(&["explain", "deployment.spec.replicas"])?;
    cluster.kubectl(&["delete", "configmap", "paint"])?;
    Ok(String::new())
}

pub(crate) fn get_watch(cluster: &Cluster) -> Result<String> {
    let mut child = cluster.kubectl_stream(&["get", "configmaps", "--watch", "--no-headers"])?;
    let lines = BufReader::new(child.stdout.take().context("no output")?).lines();
    cluster.kubectl(&["create", "configmap", "seen", "--from-literal=a=b"])?;
    let found = lines
        .map_while(std::result::Result::ok)
        .any(|line| line.starts_with("seen "));
    // It watches until it is told to stop.
    child.kill()?;
    child.wait()?;
    cluster.kubectl(&["delete", "configmap", "seen"])?;
    ensure!(found, "the watch ended without the new object");
    Ok(String::new())
}

pub(crate) fn idle_memory(cluster: &Cluster) -> Result<String> {
    let mut figures = Vec::new();
    let mut worst = 0;
    for (name, pid) in cluster.programs()? {
        if name.starts_with("containerd") {
            continue;
        }
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let rss = status
            .lines()
            .find_map(|l| l.strip_prefix("VmRSS:"))
            .context("VmRSS")?;
        let rss: u64 = rss.split_whitespace().next().context("VmRSS")?.parse()?;
        worst = worst.max(rss);
        figures.push(format!("{name} {} MB", rss / 1024));
    }
    let figures = figures.join(", ");
    Ok(format!(
        "{figures}; bar {} MB: {}",
        IDLE_LIMIT_KB / 1024,
        verdict(worst <= IDLE_LIMIT_KB)
    ))
}

pub(crate) fn delete_deployment(cluster: &Cluster) -> Result<String> {
    cluster.kubectl(&["delete", "deployment", "web", "--timeout=60s"])?;
    wait_pods(cluster, 0)?;
    let sets = cluster.get(&["replicasets", "-l", "app=web"])?;
    ensure!(
        sets["items"].as_array().is_some_and(Vec::is_empty),
        "a ReplicaSet is left"
    );
    Ok(String::new())
}

/// A repeated `up` changes nothing, a smaller one removes the node from machine and API.
pub(crate) fn up_again(cluster: &Cluster) -> Result<String> {
    let before = cluster.programs()?;
    cluster.xtask(&["up", "--name", NAME, "--dev", "--no-build", "--nodes", "3"])?;
    ensure!(
        cluster.programs()? == before,
        "a repeated up restarted a program"
    );
    cluster.xtask(&["up", "--name", NAME, "--dev", "--no-build", "--nodes", "2"])?;
    let nodes = cluster.kubectl(&["get", "nodes", "-o", "name"])?;
    ensure!(
        nodes.lines().count() == 2,
        "nodes after up --nodes 2: {nodes}"
    );
    ensure!(!cluster.netns("n3").exists(), "the namespace of n3 is left");
    Ok(String::new())
}
