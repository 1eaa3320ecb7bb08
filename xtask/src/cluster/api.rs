//! The API of a cluster from outside: kubeconfig, the pinned kubectl, waiting for answers and ready nodes, and what the
//! programs said when they do not come.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::process::{Process, wait_for};
use super::supervise::{self, Files, Spec};
use super::{Cluster, config};
use crate::install;
use crate::repo::Repo;
use crate::run::{output, quiet};

/// The control plane must answer and the nodes be ready within these times.
const CONTROL_LIMIT_S: u64 = 30;
const READY_LIMIT: Duration = Duration::from_secs(90);
/// Pause before a watch that ended is opened again.
const WATCH_AGAIN: Duration = Duration::from_millis(200);
/// Lines of a program's log that a failure shows.
const LOG_TAIL: usize = 12;

/// Waits for the first answer. The listener exists before the control plane does, so one patient request is enough.
pub(super) fn wait_control(repo: &Repo, cluster: &Cluster, spec: &Spec) -> Result<()> {
    let files = Files::of(&cluster.dir);
    let limit = Duration::from_secs(CONTROL_LIMIT_S);
    // It makes its certificates first: until then there is nothing to write a kubeconfig from.
    retry(limit, || write_kubeconfig(cluster, spec))
        .with_context(|| format!("see {}", cluster.log("control").display()))?;
    let mut ask = kubectl(repo, cluster)?;
    ask.args([
        "get",
        "--raw",
        "/readyz",
        &format!("--request-timeout={CONTROL_LIMIT_S}s"),
    ]);
    retry(limit, || quiet(&mut ask)).with_context(|| {
        format!(
            "the control plane is not ready (programs in {})",
            files.state.display()
        )
    })
}

/// Tries until it works; after the limit the last error stands.
fn retry(limit: Duration, mut work: impl FnMut() -> Result<()>) -> Result<()> {
    let mut last = Ok(());
    wait_for(limit, || {
        last = work();
        last.is_ok()
    });
    last
}

/// The administrator's kubeconfig for the loopback listener, readable by its owner only.
fn write_kubeconfig(cluster: &Cluster, spec: &Spec) -> Result<()> {
    let address = spec.listen.context("no API address")?;
    let mut make = Command::new(cluster.bin().join("weir-control"));
    make.arg("kubeconfig")
        .arg("--config")
        .arg(config::control_config(cluster));
    make.arg("--server")
        .arg(format!("https://{address}"))
        .arg("--out")
        .arg(cluster.kubeconfig());
    quiet(&mut make).context("make the kubeconfig")?;
    std::fs::set_permissions(cluster.kubeconfig(), std::fs::Permissions::from_mode(0o600))
        .context("close the kubeconfig to others")
}

/// The pinned kubectl with the cluster's kubeconfig.
pub(crate) fn kubectl(repo: &Repo, cluster: &Cluster) -> Result<Command> {
    let program =
        install::kubectl(repo).context("kubectl is missing: run `cargo xtask install`")?;
    if !cluster.kubeconfig().is_file() {
        bail!(
            "there is no cluster {:?} here: run `cargo xtask up`",
            cluster.name
        );
    }
    let mut kubectl = Command::new(program);
    kubectl.env("KUBECONFIG", cluster.kubeconfig());
    Ok(kubectl)
}

/// Follows the nodes until all of them are ready.
pub(super) fn wait_ready(repo: &Repo, cluster: &Cluster, nodes: usize) -> Result<()> {
    let deadline = Instant::now() + READY_LIMIT;
    let mut ready = BTreeSet::new();
    while let Some(left) = deadline.checked_duration_since(Instant::now()) {
        // A watch may end early, for example when the control plane restarts under it.
        follow_nodes(repo, cluster, nodes, left, &mut ready)?;
        if ready.len() >= nodes {
            return Ok(());
        }
        std::thread::sleep(WATCH_AGAIN);
    }
    let waiting: Vec<String> = (1..=nodes)
        .map(|i| format!("n{i}"))
        .filter(|name| !ready.contains(name))
        .collect();
    bail!(
        "not ready after {} s: {}",
        READY_LIMIT.as_secs(),
        waiting.join(", ")
    )
}

/// The pod CIDRs of every node of the cluster, by the node's index.
pub(super) fn pod_cidrs(repo: &Repo, cluster: &Cluster) -> Result<Vec<(u32, Vec<String>)>> {
    let mut ask = kubectl(repo, cluster)?;
    ask.args(["get", "nodes", "-o"]);
    ask.arg("jsonpath={range .items[*]}{.metadata.name} {.spec.podCIDRs[*]}{\"\\n\"}{end}");
    let listed = output(&mut ask).context("read the nodes' pod CIDRs")?;
    Ok(listed.lines().filter_map(node_line).collect())
}

/// `n2 10.244.1.0/24 fd00:10:244:1::/64`
fn node_line(line: &str) -> Option<(u32, Vec<String>)> {
    let mut words = line.split_whitespace();
    let index = super::node_index(words.next()?)?;
    Some((index, words.map(str::to_owned).collect()))
}

/// One watch; `ready` holds the names of the ready nodes at its end.
fn follow_nodes(
    repo: &Repo,
    cluster: &Cluster,
    nodes: usize,
    limit: Duration,
    ready: &mut BTreeSet<String>,
) -> Result<()> {
    let mut watch = kubectl(repo, cluster)?;
    watch.args(["get", "nodes", "--watch", "--no-headers"]);
    watch.arg(format!("--request-timeout={}s", limit.as_secs().max(1)));
    watch
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut child = watch.spawn().context("start kubectl")?;
    let lines = BufReader::new(child.stdout.take().context("kubectl has no output")?).lines();
    for line in lines.map_while(Result::ok) {
        let mut words = line.split_whitespace();
        if let (Some(name), Some(status)) = (words.next(), words.next()) {
            if status.split(',').any(|s| s == "Ready") {
                ready.insert(name.to_owned());
            } else {
                ready.remove(name);
            }
        }
        if ready.len() >= nodes {
            break;
        }
    }
    // It watches until it is told to stop; one that ended by itself cannot be killed.
    let _ = child.kill();
    child.wait().context("wait for kubectl")?;
    Ok(())
}

/// What the programs said last, for the error of a failed start.
pub(super) fn diagnosis(cluster: &Cluster) -> String {
    use std::fmt::Write as _;
    let state = supervise::read_state(&Files::of(&cluster.dir));
    let mut text =
        String::from("the cluster did not come up; `cargo xtask down` removes what is there");
    for (name, running) in state {
        if running.process.is_some_and(Process::alive) && running.starts == 1 {
            continue;
        }
        let log = cluster.log(&name);
        let _ = write!(
            text,
            "\n{name}: started {} times, last end: {}; {} ends with:",
            running.starts,
            running.last_exit.as_deref().unwrap_or("none"),
            log.display()
        );
        let content = std::fs::read_to_string(&log).unwrap_or_default();
        let lines: Vec<&str> = content.lines().collect();
        for line in lines.iter().skip(lines.len().saturating_sub(LOG_TAIL)) {
            let _ = write!(text, "\n    {line}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_the_node_and_its_cidrs() {
        assert_eq!(
            node_line("n2 10.244.1.0/24 fd00:10:244:1::/64"),
            Some((
                2,
                vec!["10.244.1.0/24".to_owned(), "fd00:10:244:1::/64".to_owned()]
            ))
        );
        assert_eq!(node_line("n3 "), Some((3, Vec::new())));
        assert_eq!(node_line("other 10.0.0.0/24"), None);
        assert_eq!(node_line(""), None);
    }
}
