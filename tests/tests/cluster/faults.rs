//! Programs killed without warning: traffic goes on, everything converges, no acknowledged write is lost.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use crate::flow::web_pods;
use crate::http::{self, Connection};
use crate::support::{Cluster, NODES, Result, eventually};

/// Requests, each on a new connection, while agents die: at least so many, and until all agents died so often.
const REQUESTS: usize = 10_000;
const ROUNDS_OF_KILLS: usize = 4;
/// Connections that stay open meanwhile.
const ESTABLISHED: usize = 3;
/// nginx closes a connection after 1,000 requests by default: stay below, so that no close is its own.
const REQUESTS_PER_CONNECTION: usize = 900;
/// Time between two kills of all agents: they are up again before the next.
const BETWEEN_KILLS: Duration = Duration::from_millis(1000);

pub(crate) fn agents_under_load(cluster: &Cluster) -> Result<String> {
    let address: SocketAddr = format!("{}:80", cluster.cluster_ip("web", false)?).parse()?;
    let done = AtomicBool::new(false);
    let (sent, rounds) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let netns = NODES
        .iter()
        .map(|n| cluster.client_netns(n))
        .collect::<Result<Vec<_>>>()?;
    let started = Instant::now();
    let (new, established, kills) = std::thread::scope(|scope| -> Result<_> {
        let loads: Vec<_> = netns
            .iter()
            .map(|path| {
                scope.spawn(|| http::inside(path, || new_connections(address, &sent, &rounds)))
            })
            .collect();
        let open: Vec<_> = netns
            .iter()
            .take(ESTABLISHED)
            .map(|path| scope.spawn(|| http::inside(path, || established(address, &done))))
            .collect();
        let killer = scope.spawn(|| kill_agents(cluster, &done, &rounds));
        let new = loads.into_iter().map(join).collect::<Result<Vec<usize>>>();
        done.store(true, Ordering::Relaxed);
        let established = open.into_iter().map(join).collect::<Result<Vec<usize>>>();
        let kills = join(killer)?;
        Ok((new?, established?, kills))
    })?;
    let (new, established): (usize, usize) = (new.iter().sum(), established.iter().sum());
    ensure!(new >= REQUESTS, "only {new} requests");
    ensure!(
        kills >= NODES.len() * ROUNDS_OF_KILLS,
        "only {kills} kills: agents did not come back"
    );
    eventually("agents after the kills", || {
        let ready = cluster.kubectl(&[
            "wait",
            "--for=condition=Ready",
            "nodes",
            "--all",
            "--timeout=5s",
        ])?;
        ensure!(ready.lines().count() == NODES.len(), "{ready}");
        Ok(())
    })?;
    let took = started.elapsed().as_secs_f64();
    Ok(format!(
        "{new} new connections and {established} requests on {ESTABLISHED} established ones, 0 failed, {kills} agents killed, {took:.0} s"
    ))
}

fn join<T>(thread: std::thread::ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    thread
        .join()
        .unwrap_or_else(|_| anyhow::bail!("a thread panicked"))
}

fn new_connections(address: SocketAddr, sent: &AtomicUsize, rounds: &AtomicUsize) -> Result<usize> {
    let mut own = 0;
    while sent.fetch_add(1, Ordering::Relaxed) < REQUESTS
        || rounds.load(Ordering::Relaxed) < ROUNDS_OF_KILLS
    {
        http::fetch(address).with_context(|| format!("new connection after {own} good ones"))?;
        own += 1;
    }
    Ok(own)
}

/// One connection at a time, used until shortly before the server would close it.
fn established(address: SocketAddr, done: &AtomicBool) -> Result<usize> {
    let mut total = 0;
    while !done.load(Ordering::Relaxed) {
        let mut connection = Connection::open(address)?;
        let pod = connection.request("keep-alive")?;
        for i in 1..REQUESTS_PER_CONNECTION {
            if done.load(Ordering::Relaxed) {
                break;
            }
            let again = connection
                .request("keep-alive")
                .with_context(|| format!("request {i} on an established connection"))?;
            ensure!(
                again == pod,
                "an established connection moved from {pod} to {again}"
            );
            total += 1;
            // Slow enough that one connection lives through several kills.
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    Ok(total)
}

fn kill_agents(cluster: &Cluster, done: &AtomicBool, rounds: &AtomicUsize) -> Result<usize> {
    let mut kills = 0;
    while !done.load(Ordering::Relaxed) {
        // In a round where no agent is back yet nothing is killed.
        kills += cluster.kill_programs("agent-").unwrap_or(0);
        rounds.store(kills / NODES.len(), Ordering::Relaxed);
        std::thread::sleep(BETWEEN_KILLS);
    }
    Ok(kills)
}

pub(crate) fn control_writes(cluster: &Cluster) -> Result<String> {
    const WRITERS: usize = 3;
    let done = AtomicBool::new(false);
    let (acknowledged, kills) = std::thread::scope(|scope| -> Result<_> {
        let writers: Vec<_> = (0..WRITERS)
            .map(|w| {
                scope.spawn({
                    let done = &done;
                    move || write_maps(cluster, w, done)
                })
            })
            .collect();
        let mut kills = 0;
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(1200));
            kills += cluster.kill_programs("control")?;
            eventually("the control plane", || {
                cluster.kubectl(&["get", "--raw", "/readyz"])
            })?;
        }
        std::thread::sleep(Duration::from_millis(500));
        done.store(true, Ordering::Relaxed);
        let lists = writers.into_iter().map(join).collect::<Result<Vec<_>>>()?;
        Ok((lists.concat(), kills))
    })?;
    let present = cluster.kubectl(&["get", "configmaps", "-o", "name"])?;
    let lost: Vec<&String> = acknowledged
        .iter()
        .filter(|n| !present.lines().any(|l| l.ends_with(n.as_str())))
        .collect();
    ensure!(lost.is_empty(), "acknowledged and lost: {lost:?}");
    ensure!(!acknowledged.is_empty(), "no write was acknowledged");
    cluster.kubectl(&["delete", "configmaps", "-l", "written=yes"])?;
    Ok(format!(
        "{} acknowledged writes, {kills} kills, 0 lost",
        acknowledged.len()
    ))
}

/// Creates objects until told to stop; returns the names of those that the server acknowledged.
fn write_maps(cluster: &Cluster, writer: usize, done: &AtomicBool) -> Result<Vec<String>> {
    let mut acknowledged = Vec::new();
    for i in 0.. {
        if done.load(Ordering::Relaxed) {
            break;
        }
        let name = format!("written-{writer}-{i}");
        let manifest = format!(
            r#"{{"apiVersion":"v1","kind":"ConfigMap","metadata":{{"name":"{name}","labels":{{"written":"yes"}}}}}}"#
        );
        // A request that the kill interrupts has no answer: it may or may not be there.
        if cluster
            .kubectl_with(&["create", "-f", "-", "--validate=false"], &manifest)
            .is_ok()
        {
            acknowledged.push(name);
        }
    }
    Ok(acknowledged)
}

pub(crate) fn containerd(cluster: &Cluster) -> Result<String> {
    let address: SocketAddr = format!("{}:80", cluster.cluster_ip("web", false)?).parse()?;
    let before = web_pods(cluster)?;
    cluster.kill_programs("containerd-")?;
    http::inside(&cluster.client_netns("n1")?, || {
        (0..200)
            .map(|_| http::fetch(address))
            .collect::<Result<Vec<_>>>()
    })
    .context("traffic while containerd is down")?;
    cluster.kubectl(&["scale", "deployment/web", "--replicas=6"])?;
    cluster.rolled_out("web")?;
    let after = web_pods(cluster)?;
    ensure!(
        before.iter().all(|p| after.contains(p)),
        "pods of before were replaced: {after:?}"
    );
    cluster.kubectl(&["scale", "deployment/web", "--replicas=3"])?;
    cluster.rolled_out("web")?;
    Ok("200 requests meanwhile, 3 new pods afterwards".into())
}

pub(crate) fn everything(cluster: &Cluster) -> Result<String> {
    let address: SocketAddr = format!("{}:80", cluster.cluster_ip("web", false)?).parse()?;
    let mut killed = 0;
    for prefix in ["control", "containerd-", "agent-"] {
        killed += cluster.kill_programs(prefix)?;
    }
    let started = Instant::now();
    http::inside(&cluster.client_netns("n2")?, || {
        (0..300)
            .map(|_| http::fetch(address))
            .collect::<Result<Vec<_>>>()
    })
    .context("traffic while everything is down")?;
    eventually("the control plane", || {
        cluster.kubectl(&["get", "--raw", "/readyz"])
    })?;
    cluster.kubectl(&["scale", "deployment/web", "--replicas=4"])?;
    cluster.rolled_out("web")?;
    let took = started.elapsed().as_secs_f64();
    http::inside(&cluster.client_netns("n3")?, || {
        eventually("the new replica among the answers", || {
            let answers = (0..200)
                .map(|_| http::fetch(address))
                .collect::<Result<BTreeSet<String>>>()?;
            ensure!(
                answers.len() == 4,
                "{} of 4 replicas answered",
                answers.len()
            );
            Ok(())
        })
    })?;
    cluster.kubectl(&["scale", "deployment/web", "--replicas=3"])?;
    cluster.rolled_out("web")?;
    Ok(format!(
        "{killed} programs killed, 300 requests meanwhile, a new replica after {took:.1} s"
    ))
}
