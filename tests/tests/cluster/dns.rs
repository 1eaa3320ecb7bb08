//! Cluster DNS as its ConfigMap says, asked from pods.

use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use hickory_proto::op::{Message, MessageType, OpCode, Query};
use hickory_proto::rr::{Name, RecordType};
use serde_json::json;

use crate::http;
use crate::support::{Cluster, NAME, NODES, Result, eventually};

/// What kubeadm writes, but for the TTL and for the ports that processes of a machine may have, and what users add.
const COREFILE: &str = "\
.:53 {
    errors
    kubernetes cluster.local in-addr.arpa ip6.arpa {
       pods insecure
       fallthrough in-addr.arpa ip6.arpa
       ttl 17
    }
    forward . /etc/resolv.conf {
       max_concurrent 1000
    }
    cache 30
    loop
    reload
    loadbalance
    import custom/*.override
}
import custom/*.server
";
const OVERRIDE: &str = "rewrite name shop.example web.default.svc.cluster.local";
const SERVER: &str = "corp.example {\n    hosts {\n        192.0.2.53 www.corp.example\n    }\n}\n";
const PATIENCE: Duration = Duration::from_secs(3);

pub(crate) fn serves_its_config_map(cluster: &Cluster) -> Result<String> {
    for node in NODES {
        cluster.client_pod(node)?;
    }
    let map = |name: &str, data: &serde_json::Value| {
        let metadata = json!({"name": name, "namespace": "kube-system"});
        let object =
            json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data});
        cluster.kubectl_with(&["apply", "-f", "-"], &object.to_string())
    };
    map(
        "coredns-custom",
        &json!({"a.override": OVERRIDE, "b.server": SERVER}),
    )?;
    map("coredns", &json!({"Corefile": COREFILE}))?;
    let web: SocketAddr = format!("{}:80", cluster.cluster_ip("web", false)?).parse()?;
    let web = web.ip().to_string();
    for node in NODES {
        eventually("names as the Corefile says", || {
            said(
                cluster,
                node,
                "shop.example.",
                &format!("shop.example. 17 IN A {web}"),
            )?;
            said(
                cluster,
                node,
                "www.corp.example.",
                "www.corp.example. 3600 IN A 192.0.2.53",
            )
        })?;
    }
    // A Corefile that nobody can serve changes nothing; the next good one serves.
    map(
        "coredns",
        &json!({"Corefile": COREFILE.replace("errors", "nonsense")}),
    )?;
    eventually("word of the wrong Corefile", || {
        let on = ["on", "--name", NAME, NODES[0], "--", "weirctl", "metrics"];
        let said = cluster.xtask(&on)?;
        let refused = said
            .lines()
            .find_map(|l| l.strip_prefix("coredns_reload_failed_total "));
        ensure!(refused == Some("1"), "{refused:?} refused");
        Ok(())
    })?;
    let replaced = COREFILE.replace("ttl 17", "ttl 18");
    said(cluster, NODES[0], "shop.example.", "shop.example. 17")?;
    map("coredns", &json!({"Corefile": replaced}))?;
    for node in NODES {
        eventually("the next Corefile", || {
            said(cluster, node, "shop.example.", "shop.example. 18")
        })?;
    }
    for name in ["coredns", "coredns-custom"] {
        cluster.kubectl(&["-n", "kube-system", "delete", "configmap", name])?;
    }
    for node in NODES {
        eventually("what is built in", || {
            said(
                cluster,
                node,
                "web.default.svc.cluster.local.",
                "web.default.svc.cluster.local. 30",
            )
        })?;
    }
    Ok("blocks, imports, rewrite and hosts on every node; back to what is built in".to_owned())
}

/// Asks from the client pod of a node; the first record has to begin like this.
fn said(cluster: &Cluster, node: &str, name: &str, wanted: &str) -> Result<()> {
    let server = cluster.get(&["-n", "kube-system", "service", "kube-dns"])?;
    let server = server["spec"]["clusterIP"].as_str().context("no address")?;
    let server: SocketAddr = format!("{server}:53").parse()?;
    let mut query = Message::new(7, MessageType::Query, OpCode::Query);
    query.metadata.recursion_desired = true;
    query.add_query(Query::query(Name::from_ascii(name)?, RecordType::A));
    let query = query.to_vec()?;
    let reply = http::inside(&cluster.client_netns(node)?, || {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.connect(server)?;
        socket.send(&query)?;
        let mut buffer = [0; 1500];
        let length = socket.recv(&mut buffer)?;
        Ok(Message::from_vec(&buffer[..length])?)
    })?;
    let first = reply.answers.first().map(ToString::to_string);
    let first = first.unwrap_or_else(|| reply.response_code.to_string());
    ensure!(
        first.starts_with(wanted),
        "{node} says {first}, not {wanted}"
    );
    Ok(())
}
