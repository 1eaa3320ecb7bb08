//! Traffic through Services: from pods and from the nodes' own processes, over both families and both protocols.

use std::net::SocketAddr;
use std::process::Command;

use anyhow::{Context as _, ensure};

use crate::http;
use crate::support::{Cluster, NODES, Result, eventually};

const REQUESTS: usize = 300;

/// DNS answers inside a pod: services, the API, and what does not exist.
pub(crate) fn names_resolve(cluster: &Cluster) -> Result<String> {
    let ip = cluster.cluster_ip("web", false)?;
    let script = "
nslookup web.default.svc.cluster.local && wget -qO- http://web && wget -qO- http://web.default.svc.cluster.local
nslookup kubernetes.default.svc.cluster.local
nslookup nothing.default.svc.cluster.local; echo none=$?
cat /etc/resolv.conf";
    let logs = run_pod(cluster, "names", "n2", script)?;
    ensure!(logs.contains(&ip), "the answer lacks {ip}:\n{logs}");
    ensure!(
        logs.matches("<h1>Welcome to nginx!</h1>").count() == 2,
        "no page by name:\n{logs}"
    );
    ensure!(logs.contains("10.96.0.1"), "no kubernetes Service:\n{logs}");
    ensure!(
        logs.contains("none=1"),
        "a name that does not exist resolved:\n{logs}"
    );
    ensure!(
        logs.contains("search default.svc.cluster.local"),
        "resolv.conf:\n{logs}"
    );
    Ok(String::new())
}

/// Runs a shell script in a pod of its own and returns its log.
fn run_pod(cluster: &Cluster, name: &str, node: &str, script: &str) -> Result<String> {
    let manifest = serde_json::json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node}, "restartPolicy": "Never",
            "containers": [{"name": "c", "image": "busybox", "command": ["sh", "-c", script]}],
        },
    });
    cluster.kubectl_with(&["apply", "-f", "-"], &manifest.to_string())?;
    let done = eventually("the pod's end", || {
        let pod = cluster.get(&["pod", name])?;
        let phase = pod["status"]["phase"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        ensure!(phase == "Succeeded" || phase == "Failed", "phase {phase:?}");
        Ok(phase)
    })?;
    let logs = cluster.kubectl(&["logs", name])?;
    cluster.kubectl(&["delete", "pod", name, "--grace-period=0", "--force"])?;
    ensure!(done == "Succeeded", "pod {name} {done}:\n{logs}");
    Ok(logs)
}

/// A port of the node leads to the pod that asked for it, in both families, and to nobody once the pod has gone.
pub(crate) fn host_ports(cluster: &Cluster) -> Result<String> {
    let pod = serde_json::json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "host-port"},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": "n2"}, "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "c", "image": "nginx", "imagePullPolicy": "IfNotPresent",
                "ports": [{"containerPort": 80, "hostPort": 8081}]}],
        },
    });
    cluster.kubectl_with(&["apply", "-f", "-"], &pod.to_string())?;
    let ready = [
        "wait",
        "--for=condition=Ready",
        "pod/host-port",
        "--timeout=90s",
    ];
    cluster.kubectl(&ready)?;
    let addresses: [SocketAddr; 2] = ["192.168.77.12:8081".parse()?, "[fd77::12]:8081".parse()?];
    for address in addresses {
        for (from, netns) in [
            ("the client", cluster.netns("client")),
            ("the node itself", cluster.netns("n2")),
            ("another node", cluster.netns("n1")),
            ("a pod", cluster.client_netns("n1")?),
        ] {
            let answered = http::inside(&netns, || http::fetch(address))
                .with_context(|| format!("{address} from {from}"))?;
            ensure!(answered == "host-port", "{answered} answered {from}");
        }
    }
    cluster.kubectl(&["delete", "pod", "host-port", "--now"])?;
    for address in addresses {
        eventually("the port to be nobody's", || {
            let reached = http::inside(&cluster.netns("client"), || http::fetch(address));
            ensure!(reached.is_err(), "{address} still answers");
            Ok(())
        })?;
    }
    Ok("192.168.77.12:8081 and [fd77::12]:8081".to_owned())
}

/// wget by name in a pod of every node, as a user would.
pub(crate) fn from_pods(cluster: &Cluster) -> Result<String> {
    let script = format!(
        "for i in $(seq {REQUESTS}); do wget -T 5 -qO- http://web.default.svc.cluster.local | grep Served || echo lost; done"
    );
    let results: Vec<Result<String>> = std::thread::scope(|scope| {
        let threads: Vec<_> = NODES
            .iter()
            .map(|node| {
                let script = &script;
                scope.spawn(move || {
                    let logs = run_pod(cluster, &format!("load-{node}"), node, script)?;
                    let lost = logs.lines().filter(|l| l.contains("lost")).count();
                    ensure!(lost == 0, "{lost} of {REQUESTS} requests of {node} failed");
                    let answers: Vec<String> = logs.lines().filter_map(served_by).collect();
                    ensure!(
                        answers.len() == REQUESTS,
                        "{} answers on {node}",
                        answers.len()
                    );
                    http::spread(&answers, 3).map(|s| format!("{node} {s}"))
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|t| t.join().unwrap_or_else(|_| anyhow::bail!("panic")))
            .collect()
    });
    let figures = results.into_iter().collect::<Result<Vec<_>>>()?;
    Ok(format!(
        "{REQUESTS} requests by name from a pod of each node: {}",
        figures.join(", ")
    ))
}

fn served_by(line: &str) -> Option<String> {
    Some(
        line.split_once("Served by ")?
            .1
            .split(',')
            .next()?
            .to_owned(),
    )
}

/// The node's own processes have no pod interface: they come in over the host link.
pub(crate) fn from_nodes(cluster: &Cluster) -> Result<String> {
    let address: SocketAddr = format!("{}:80", cluster.cluster_ip("web", false)?).parse()?;
    let mut figures = Vec::new();
    for node in NODES {
        let answers = http::inside(&cluster.netns(node), || fetch_many(address))
            .with_context(|| format!("from a process of {node}"))?;
        figures.push(format!("{node} {}", http::spread(&answers, 3)?));
    }
    Ok(format!(
        "{REQUESTS} requests from each node: {}",
        figures.join(", ")
    ))
}

fn fetch_many(address: SocketAddr) -> Result<Vec<String>> {
    (0..REQUESTS)
        .map(|i| http::fetch(address).with_context(|| format!("request {i}")))
        .collect()
}

pub(crate) fn dual_stack(cluster: &Cluster) -> Result<String> {
    let manifest = r#"{"apiVersion":"v1","kind":"Service","metadata":{"name":"web-dual"},
"spec":{"ipFamilyPolicy":"RequireDualStack","selector":{"app":"web"},"ports":[{"port":8080,"targetPort":80}]}}"#;
    cluster.kubectl_with(&["apply", "-f", "-"], manifest)?;
    let mut figures = Vec::new();
    for (family, v6) in [("IPv4", false), ("IPv6", true)] {
        let ip = cluster.cluster_ip("web-dual", v6)?.parse()?;
        let address = SocketAddr::new(ip, 8080);
        for (from, netns) in [
            ("pod", cluster.client_netns("n1")?),
            ("node", cluster.netns("n3")),
        ] {
            let answers = http::inside(&netns, || {
                eventually("the new Service on the node", || http::fetch(address))?;
                fetch_many(address)
            })
            .with_context(|| format!("{family} from a {from}"))?;
            figures.push(format!("{family} {from} {}", http::spread(&answers, 3)?));
        }
    }
    cluster.kubectl(&["delete", "service", "web-dual"])?;
    Ok(figures.join(", "))
}

/// Cluster DNS is a UDP and TCP Service: asked at its ClusterIPs from a pod and from a node.
pub(crate) fn udp(cluster: &Cluster) -> Result<String> {
    let web = cluster.cluster_ip("web", false)?;
    let mut asked = 0;
    for ip in ["10.96.0.10", "fd00:10:96::a"] {
        let logs = run_pod(
            cluster,
            "ask",
            "n3",
            &format!(
                "for i in $(seq 50); do nslookup web.default.svc.cluster.local {ip} || exit 1; done"
            ),
        )?;
        ensure!(
            logs.matches(&web).count() == 50,
            "{ip} answered wrongly:\n{logs}"
        );
        asked += 50;
    }
    Ok(format!(
        "{asked} questions to the DNS addresses of both families"
    ))
}

/// The dataplane is eBPF only. Where the tools to list rules are absent, so are the rules' makers.
pub(crate) fn no_foreign_rules(cluster: &Cluster) -> Result<String> {
    let mut looked = Vec::new();
    for node in NODES {
        let netns = format!("--net={}", cluster.netns(node).display());
        for tool in [
            &["nft", "list", "ruleset"][..],
            &["iptables-save"][..],
            &["ip6tables-save"][..],
        ] {
            let out = Command::new("nsenter").arg(&netns).args(tool).output()?;
            if !out.status.success() {
                continue;
            }
            let said = String::from_utf8_lossy(&out.stdout);
            let rules = said
                .lines()
                .filter(|l| l.starts_with("-A") || l.contains("chain "))
                .count();
            ensure!(
                rules == 0,
                "{} on {node} lists {rules} rules:\n{said}",
                tool[0]
            );
            looked.push(tool[0]);
        }
        let ipvs = std::fs::read_to_string("/proc/net/ip_vs").unwrap_or_default();
        ensure!(ipvs.lines().count() <= 3, "IPVS has services:\n{ipvs}");
    }
    looked.sort_unstable();
    looked.dedup();
    Ok(format!(
        "looked with: {}",
        if looked.is_empty() {
            "none installed".into()
        } else {
            looked.join(", ")
        }
    ))
}
