//! What `weirctl` says of policies on real agents: packets that Services lead on, pods of other nodes, and the drops of
//! conversations that a change of policies has cut.

use std::io::Write as _;
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use control_api::v1::{
    Object, Policy, PolicyAction, PolicyName, PolicyPeer, PolicyRule, PolicyTier, object,
};
use serde_json::Value;

use super::agents::{connect_within, left_out, serve};
use super::cluster::{Cluster, Member, Pod, SERVICE_V4, SERVICE_V6};
use super::support::program;

const SERVER_PORT: u16 = 8080;
const PATIENCE: Duration = Duration::from_secs(60);

fn peer(name: &'static str, policies: &[(&str, &str)]) -> (&'static str, Object) {
    let policies = policies.iter().map(|(namespace, name)| PolicyName {
        namespace: (*namespace).into(),
        name: (*name).into(),
    });
    let peer = PolicyPeer {
        namespace: "default".into(),
        name: name.into(),
        node: "n1".into(),
        policies: policies.collect(),
        ..PolicyPeer::default()
    };
    let kind = Some(object::Kind::PolicyPeer(peer));
    (name, Object { kind })
}

/// A NetworkPolicy that lets nobody in.
fn closed() -> (&'static str, Object) {
    let policy = Policy {
        tier: PolicyTier::NetworkPolicy.into(),
        namespace: "default".into(),
        name: "closed".into(),
        isolates_ingress: true,
        ..Policy::default()
    };
    let kind = Some(object::Kind::Policy(policy));
    ("closed", Object { kind })
}

/// A ClusterNetworkPolicy that lets nobody out.
fn no_way() -> (&'static str, Object) {
    let deny = PolicyRule {
        action: PolicyAction::Deny.into(),
        any_peer: true,
        any_port: true,
        ..PolicyRule::default()
    };
    let policy = Policy {
        tier: PolicyTier::Admin.into(),
        name: "no-way".into(),
        egress: vec![deny],
        ..Policy::default()
    };
    let kind = Some(object::Kind::Policy(policy));
    ("no-way", Object { kind })
}

/// Exit code, what is said, and what is said of errors.
fn weirctl(node: &Member, arguments: &[&str]) -> (i32, String, String) {
    let output = Command::new(program("weir-agent", "weirctl"))
        .arg("--run-dir")
        .arg(node.run_dir())
        .args(arguments)
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let code = output.status.code().unwrap();
    (code, text(&output.stdout), text(&output.stderr))
}

fn explain(node: &Member, to: &str) -> (i32, Vec<Value>) {
    let (code, said, error) = weirctl(node, &["--json", "policy", "explain", "default/client", to]);
    let said = serde_json::from_str(&said);
    (code, said.unwrap_or_else(|_| panic!("{to}: {error}")))
}

/// Waits for drops of both families that were seen again, in a direction of a pod.
fn dropped(node: &Member, server: &Pod, direction: &str) -> Vec<Value> {
    let began = Instant::now();
    loop {
        let (_, said, error) = weirctl(node, &["--json", "policy", "list"]);
        let list: Value = serde_json::from_str(&said).unwrap_or_else(|_| panic!("{error}"));
        let drops = list["drops"].as_array().unwrap().iter();
        let found: Vec<Value> = drops
            .filter(|drop| drop["direction"] == direction && drop["count"].as_u64() >= Some(3))
            .cloned()
            .collect();
        let to = |ip: &std::net::IpAddr| found.iter().any(|drop| drop["to"] == ip.to_string());
        if server.ips.iter().all(to) {
            return found;
        }
        assert!(began.elapsed() < PATIENCE, "drops of {direction}: {list}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn weirctl_explains_what_services_lead_on_and_names_what_cut_a_conversation() {
    if left_out("weirctl_explains_what_services_lead_on_and_names_what_cut_a_conversation") {
        return;
    }
    let cluster = Cluster::start(2).await;
    let pods = vec![peer("client", &[]), peer("server", &[])];
    cluster
        .programmed(cluster.control.change(pods, Vec::new()))
        .await;
    let client = cluster.cluster_pod(0, "c", "default", "client");
    let server = cluster.cluster_pod(0, "s", "default", "server");
    let far = cluster.pod(1, "f");
    for ip in &server.ips {
        serve(&server.namespace, *ip);
    }
    cluster.serve(&[&server, &far], SERVER_PORT).await;
    let node = &cluster.members[0];

    for to in [format!("{SERVICE_V4}:80"), format!("[{SERVICE_V6}]:80")] {
        let (code, said) = explain(node, &to);
        assert_eq!((code, said.len()), (3, 2), "{to}: {said:?}");
        for one in &said {
            let here = one["to"].as_str().unwrap().starts_with("default/server");
            assert_eq!(one["allowed"], true);
            assert_eq!(one["undecided"].is_null(), here, "{one}");
            let through = one["through"].as_str().unwrap();
            assert!(through.starts_with("service default/web"), "{through}");
        }
    }
    let (code, said) = explain(node, "svc/default/web:80");
    assert_eq!((code, said.len()), (3, 4), "{said:?}");
    let (code, said) = explain(node, "default/server/icmp");
    assert_eq!((code, said.len()), (0, 2), "{said:?}");
    let far_icmp = format!("{}/icmp", far.ips[0]);
    let (code, text, _) = weirctl(node, &["policy", "explain", "default/client", &far_icmp]);
    assert!(
        code == 3 && text.starts_with("ALLOWED BY THIS NODE"),
        "{text}"
    );
    assert!(text.contains("node n2 decides ingress"), "{text}");
    let (code, _, error) = weirctl(node, &["policy", "explain", "default/client", "a/b/c:80"]);
    assert!(code == 1 && !error.contains("404"), "{error}");
    let (code, _, error) = weirctl(node, &["services", "nosuch"]);
    assert!(code == 1 && error.contains("nosuch"), "{error}");

    let connect = |ip: &std::net::IpAddr| -> TcpStream {
        let target = SocketAddr::new(*ip, SERVER_PORT);
        connect_within(&client.namespace, target, PATIENCE).unwrap()
    };
    let mut live: Vec<TcpStream> = server.ips.iter().map(connect).collect();
    let objects = vec![closed(), peer("server", &[("default", "closed")])];
    cluster
        .programmed(cluster.control.change(objects, Vec::new()))
        .await;
    for stream in &mut live {
        stream.write_all(b"?").unwrap();
    }
    for drop in dropped(node, &server, "ingress") {
        assert_eq!(drop["pod"], "default/server", "{drop}");
        assert_eq!(
            drop["why"], "no rule allows it; isolated by NetworkPolicy default/closed",
            "{drop}"
        );
        let last = drop["last"].as_str().unwrap();
        assert!(last.ends_with('Z') && last.contains('T'), "{drop}");
    }
    let objects = vec![no_way(), peer("client", &[("", "no-way")])];
    cluster
        .programmed(cluster.control.change(objects, Vec::new()))
        .await;
    for drop in dropped(node, &server, "egress") {
        assert_eq!(drop["pod"], "default/client", "{drop}");
        let why = drop["why"].as_str().unwrap();
        assert!(
            why.starts_with("ClusterNetworkPolicy no-way egress rule 1"),
            "{drop}"
        );
    }
    let (code, said) = explain(node, &format!("{SERVICE_V4}:80"));
    assert!(
        code == 1 && said.iter().all(|one| one["allowed"] == false),
        "{said:?}"
    );
}
