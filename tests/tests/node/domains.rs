//! Names in policies, on a real agent with a real DNS server behind it: what a pod was told of a name it may use at once,
//! and nothing else, over a restart of the agent, and no longer than for its time.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use control_api::v1::{
    Object, Policy, PolicyAction, PolicyName, PolicyPeer, PolicyRule, PolicyRulePeer, PolicyTier,
    object, policy_rule_peer,
};
use hickory_proto::op::{Message, MessageType, OpCode, Query};
use hickory_proto::rr::{Name, RData, RecordType};
use serde_json::Value;
use weir_tests::topology::Namespace;

use super::agents::{connect_within, left_out, serve};
use super::cluster::{Cluster, Member, Pod};
use super::support::program;

const DNS_PORT: u16 = 10_053;
const SERVER_PORT: u16 = 8080;
const UPSTREAM: &str = "192.0.2.53";
const ALIASED: [&str; 2] = ["192.0.2.60", "2001:db8::60"];
const WILD: &str = "192.0.2.61";
const SHORT: &str = "192.0.2.62";
const OTHER: &str = "192.0.2.63";
/// A SYN that was dropped comes again after a second: a connection within this time has lost none.
const FIRST_PACKET: Duration = Duration::from_millis(900);
const PATIENCE: Duration = Duration::from_secs(60);

/// dnsmasq in a namespace of its own.
struct Upstream {
    child: Child,
    _namespace: Namespace,
}

impl Upstream {
    fn start(cluster: &Cluster) -> Self {
        let namespace = cluster.outsider(53);
        let child = namespace
            .command("dnsmasq")
            .args([
                "--keep-in-foreground",
                "--conf-file=/dev/null",
                "--user=root",
            ])
            .args([
                "--no-resolv",
                "--no-hosts",
                "--pid-file=",
                "--log-facility=/dev/null",
            ])
            .arg(format!("--listen-address={UPSTREAM}"))
            .arg("--bind-interfaces")
            .arg(format!(
                "--host-record=edge.example.net,{},{},1",
                ALIASED[0], ALIASED[1]
            ))
            .arg("--cname=www.example.org,edge.example.net,1")
            .arg(format!("--host-record=a.b.wild.test,{WILD},600"))
            .arg(format!("--host-record=short.wild.test,{SHORT},1"))
            .arg(format!("--host-record=other.test,{OTHER},600"))
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Self {
            child,
            _namespace: namespace,
        }
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A policy of the Admin tier: out to names, and nowhere else. And the pod that it selects.
fn objects() -> Vec<(&'static str, Object)> {
    let names = ["www.example.org", "*.Wild.test."];
    let allow = PolicyRule {
        action: PolicyAction::Allow.into(),
        peers: names
            .iter()
            .map(|name| PolicyRulePeer {
                kind: Some(policy_rule_peer::Kind::DomainName((*name).into())),
            })
            .collect(),
        any_port: true,
        ..PolicyRule::default()
    };
    let deny = PolicyRule {
        action: PolicyAction::Deny.into(),
        any_peer: true,
        any_port: true,
        ..PolicyRule::default()
    };
    let policy = Policy {
        tier: PolicyTier::Admin.into(),
        name: "names".into(),
        egress: vec![allow, deny],
        ..Policy::default()
    };
    let peer = PolicyPeer {
        namespace: "default".into(),
        name: "client".into(),
        node: "n1".into(),
        policies: vec![PolicyName {
            namespace: String::new(),
            name: "names".into(),
        }],
        ..PolicyPeer::default()
    };
    let object = |kind| Object { kind: Some(kind) };
    vec![
        ("names", object(object::Kind::Policy(policy))),
        ("client", object(object::Kind::PolicyPeer(peer))),
    ]
}

fn question(name: &str, record_type: RecordType) -> Vec<u8> {
    let mut message = Message::new(rand::random(), MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(Name::from_ascii(name).unwrap(), record_type));
    message.to_vec().unwrap()
}

fn addresses(reply: &[u8]) -> Vec<IpAddr> {
    let reply = Message::from_vec(reply).unwrap();
    let address = |data: &RData| match data {
        RData::A(a) => Some(a.0.into()),
        RData::AAAA(aaaa) => Some(aaaa.0.into()),
        _ => None,
    };
    reply
        .answers
        .iter()
        .filter_map(|r| address(&r.data))
        .collect()
}

/// Asks the node's DNS server by UDP, out of a pod.
fn ask(pod: &Pod, node: &Member, name: &str) -> Vec<IpAddr> {
    let query = question(name, RecordType::A);
    pod.namespace
        .enter(|| {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            socket.set_read_timeout(Some(Duration::from_secs(10)))?;
            socket.send_to(&query, (node.ips[0], DNS_PORT))?;
            let mut buffer = [0; 1500];
            let (length, _) = socket.recv_from(&mut buffer)?;
            Ok(addresses(&buffer[..length]))
        })
        .unwrap()
}

/// The same for AAAA, by TCP.
fn ask_by_tcp(pod: &Pod, node: &Member, name: &str) -> Vec<IpAddr> {
    let query = question(name, RecordType::AAAA);
    let length = u16::try_from(query.len()).unwrap();
    pod.namespace
        .enter(|| {
            let mut stream = TcpStream::connect((node.ips[0], DNS_PORT))?;
            stream.set_read_timeout(Some(Duration::from_secs(10)))?;
            stream.write_all(&length.to_be_bytes())?;
            stream.write_all(&query)?;
            let mut length = [0; 2];
            stream.read_exact(&mut length)?;
            let mut reply = vec![0; usize::from(u16::from_be_bytes(length))];
            stream.read_exact(&mut reply)?;
            Ok(addresses(&reply))
        })
        .unwrap()
}

fn connects(pod: &Pod, address: &str) -> bool {
    connect(pod, address).is_ok()
}

fn connect(pod: &Pod, address: &str) -> std::io::Result<TcpStream> {
    let target = SocketAddr::new(address.parse().unwrap(), SERVER_PORT);
    connect_within(&pod.namespace, target, FIRST_PACKET)
}

fn echoes(stream: &mut TcpStream) -> bool {
    let mut byte = [0];
    let asked = stream.write_all(b"?");
    while asked.is_ok() && stream.read(&mut byte).unwrap_or(0) == 1 {
        if byte[0] == b'\n' {
            return true;
        }
    }
    false
}

/// What `weirctl policy` says as JSON.
fn weirctl(node: &Member, arguments: &[&str]) -> Value {
    let output = Command::new(program("weir-agent", "weirctl"))
        .arg("--run-dir")
        .arg(node.run_dir())
        .args(["--json", "policy"])
        .args(arguments)
        .output()
        .unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| {
        panic!("weirctl: {}", String::from_utf8_lossy(&output.stderr));
    })
}

/// Waits until an address of a name is known no more.
fn forgotten(node: &Member, address: &str) {
    let began = Instant::now();
    while weirctl(node, &["list"])["names"]
        .to_string()
        .contains(address)
    {
        assert!(began.elapsed() < PATIENCE, "{address} does not end");
        std::thread::sleep(Duration::from_millis(200));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_reaches_what_dns_told_it_of_a_name_in_a_policy() {
    let test = "a_pod_reaches_what_dns_told_it_of_a_name_in_a_policy";
    if left_out(test) {
        return;
    }
    if Command::new("dnsmasq").arg("--version").output().is_err() {
        println!("SKIPPED {test}: dnsmasq is missing: run `cargo xtask install`");
        return;
    }
    let mut cluster = Cluster::start(1).await;
    let upstream = Upstream::start(&cluster);
    let servers: Vec<Namespace> = (60..64).map(|host| cluster.outsider(host)).collect();
    for (server, address) in servers.iter().zip([ALIASED[0], WILD, SHORT, OTHER]) {
        serve(server, address.parse().unwrap());
    }
    serve(&servers[0], ALIASED[1].parse().unwrap());
    let node = &mut cluster.members[0];
    node.stop_agent();
    node.reconfigure(
        "upstreams = [\"127.0.0.1:53\"]",
        &format!("upstreams = [\"{UPSTREAM}:53\"]"),
    );
    node.reconfigure("[dns]", "[policy]\nmin_domain_ttl_s = 3\n[dns]");
    node.start_agent();
    let revision = cluster.control.change(objects(), Vec::new());
    cluster.programmed(revision).await;
    let pod = cluster.cluster_pod(0, "c1", "default", "client");
    let node = &cluster.members[0];

    for address in [ALIASED[0], ALIASED[1], WILD, SHORT, OTHER] {
        assert!(!connects(&pod, address), "{address} before anybody asked");
    }
    // The name that was asked for counts, over an alias; the first packet passes.
    assert_eq!(
        ask(&pod, node, "WWW.Example.org."),
        [ALIASED[0].parse::<IpAddr>().unwrap()]
    );
    let mut live = connect(&pod, ALIASED[0]).unwrap();
    assert!(echoes(&mut live));
    assert!(!connects(&pod, ALIASED[1]), "nobody asked for AAAA");
    let v6 = ask_by_tcp(&pod, node, "www.example.org.");
    assert_eq!(v6, [ALIASED[1].parse::<IpAddr>().unwrap()]);
    assert!(connects(&pod, ALIASED[1]));
    assert_eq!(ask(&pod, node, "a.b.wild.test.").len(), 1);
    assert!(connects(&pod, WILD));
    // Names that no rule asks for resolve, and open nothing.
    assert_eq!(ask(&pod, node, "other.test.").len(), 1);
    assert_eq!(ask(&pod, node, "edge.example.net.").len(), 1);
    assert!(!connects(&pod, OTHER));
    let said = weirctl(
        node,
        &[
            "explain",
            "default/client",
            &format!("{WILD}:{SERVER_PORT}"),
        ],
    );
    assert_eq!(said[0]["names"][0], "a.b.wild.test", "{said}");
    assert_eq!(said[0]["allowed"], true);

    // What has a short life ends; a conversation goes on.
    assert_eq!(ask(&pod, node, "short.wild.test.").len(), 1);
    assert!(connects(&pod, SHORT));
    forgotten(node, SHORT);
    assert!(!connects(&pod, SHORT), "its time is over");
    assert!(echoes(&mut live), "a conversation goes on");
    assert_eq!(ask(&pod, node, "short.wild.test.").len(), 1);
    assert!(connects(&pod, SHORT), "asked for again");

    // An agent that dies and comes back opens and closes nothing.
    cluster.members[0].kill_agent();
    assert!(connects(&pod, WILD) && echoes(&mut live));
    cluster.members[0].start_agent();
    let revision = cluster.control.change(Vec::new(), Vec::new());
    cluster.programmed(revision).await;
    assert!(connects(&pod, WILD) && echoes(&mut live));
    assert!(!connects(&pod, OTHER));
    drop(upstream);

    drop(live);
    forgotten(&cluster.members[0], ALIASED[0]);
    assert!(!connects(&pod, ALIASED[0]), "nobody uses it any more");
    assert!(connects(&pod, WILD));
}
