//! The feed over real gRPC with mutual TLS on loopback, against an API in memory.

mod fake;
mod policies;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use control_api::desired::{DesiredState, Name};
use control_api::v1::node_feed_client::NodeFeedClient;
use control_api::v1::{
    Ack, Condition, EventReport, EventReports, FeedMessage, FollowRequest, Hello, NodeInfo,
    NodeReport, PodReports, PodStatus, feed_message, follow_request,
};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Streaming};

use super::{Feed, FeedTls};
use crate::client::{ObjectClient, resources};
use crate::config::Network;
use crate::pki::{Authority, CertKey, Pki, SERVER_NAME};
use fake::FakeApi;

const PATIENCE: Duration = Duration::from_secs(10);

struct Cluster {
    api: Arc<FakeApi>,
    feed: Arc<Feed>,
    address: SocketAddr,
    authority: Authority,
    admin: CertKey,
    shutdown: CancellationToken,
    _directory: tempfile::TempDir,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

async fn cluster() -> Cluster {
    let directory = tempfile::tempdir().unwrap();
    let pki = Pki::open(directory.path(), &[SERVER_NAME.into()], &[]).unwrap();
    let authority = Authority::load(directory.path()).unwrap();
    let tls = FeedTls {
        ca_pem: pki.ca_pem.clone(),
        server: pki.server.clone(),
    };
    let api = Arc::new(FakeApi::default());
    let client: Arc<dyn ObjectClient> = Arc::<FakeApi>::clone(&api);
    let feed = Feed::new(client, &tls, &Network::default());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let shutdown = CancellationToken::new();
    let (serving, stop) = (Arc::clone(&feed), shutdown.clone());
    tokio::spawn(async move { serving.serve(&tls, listener, stop).await.unwrap() });
    Cluster {
        api,
        feed,
        address,
        authority,
        admin: pki.admin,
        shutdown,
        _directory: directory,
    }
}

impl Cluster {
    async fn channel(&self, identity: &CertKey) -> Channel {
        let tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(&self.authority.ca_pem))
            .identity(Identity::from_pem(&identity.cert_pem, &identity.key_pem))
            .domain_name(SERVER_NAME);
        let endpoint = Endpoint::from_shared(format!("https://{}", self.address)).unwrap();
        endpoint.tls_config(tls).unwrap().connect().await.unwrap()
    }

    async fn node(&self, name: &str) -> NodeFeedClient<Channel> {
        let identity = self.authority.issue_node(name, &[]).unwrap();
        NodeFeedClient::new(self.channel(&identity).await)
    }

    fn service(&self, name: &str, ip: &str) -> u64 {
        self.api.put(
            resources::SERVICES,
            json!({"metadata": {"name": name, "namespace": "d"}, "spec": {"clusterIP": ip}}),
        )
    }
}

/// A node that follows: its state, and the way to acknowledge.
struct Node {
    stream: Streaming<FeedMessage>,
    requests: mpsc::Sender<FollowRequest>,
    state: DesiredState,
    feed_instance: String,
    snapshots: usize,
}

fn request(kind: follow_request::Kind) -> FollowRequest {
    FollowRequest { kind: Some(kind) }
}

fn hello(name: &str, resume: Option<&Node>) -> Hello {
    Hello {
        node_name: name.into(),
        runs_pods: true,
        resume_revision: resume.map_or(0, |n| n.state.revision),
        feed_instance: resume.map_or_else(String::new, |n| n.feed_instance.clone()),
        ..Hello::default()
    }
}

impl Node {
    async fn follow(
        client: &mut NodeFeedClient<Channel>,
        hello: Hello,
    ) -> Result<Self, tonic::Status> {
        let (requests, queue) = mpsc::channel(8);
        requests
            .send(request(follow_request::Kind::Hello(hello)))
            .await
            .unwrap();
        let stream = client
            .follow(ReceiverStream::new(queue))
            .await?
            .into_inner();
        Ok(Self {
            stream,
            requests,
            state: DesiredState::default(),
            feed_instance: String::new(),
            snapshots: 0,
        })
    }

    /// Takes messages until `done`.
    async fn until(&mut self, done: impl Fn(&DesiredState) -> bool) {
        let mut parts = Vec::new();
        while !done(&self.state) || self.snapshots + usize::from(self.state.revision > 0) == 0 {
            let message = tokio::time::timeout(PATIENCE, self.stream.message()).await;
            match message
                .expect("a message in time")
                .unwrap()
                .unwrap()
                .kind
                .unwrap()
            {
                feed_message::Kind::Snapshot(part) => {
                    let last = part.last;
                    self.feed_instance.clone_from(&part.feed_instance);
                    parts.push(part);
                    if last {
                        self.state = DesiredState::from_snapshot(parts.drain(..));
                        self.snapshots += 1;
                    }
                }
                feed_message::Kind::Delta(delta) => {
                    self.state.apply(delta);
                }
                feed_message::Kind::Heartbeat(_) => {}
            }
        }
    }

    async fn ack(&self) {
        let ack = Ack {
            revision: self.state.revision,
            error: String::new(),
        };
        self.requests
            .send(request(follow_request::Kind::Ack(ack)))
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn snapshot_deltas_and_programmed_everywhere() {
    let cluster = cluster().await;
    cluster.service("a", "10.96.0.1");
    let mut first = Node::follow(&mut cluster.node("n1").await, hello("n1", None))
        .await
        .unwrap();
    let mut second = Node::follow(&mut cluster.node("n2").await, hello("n2", None))
        .await
        .unwrap();
    first.until(|s| !s.services.is_empty()).await;
    second.until(|s| !s.services.is_empty()).await;

    let revision = cluster.service("b", "10.96.0.2");
    first.until(|s| s.services.len() == 2).await;
    second.until(|s| s.services.len() == 2).await;
    assert_eq!(first.state.revision, revision);
    first.ack().await;
    let status = cluster.feed.status();
    assert!(!status.all_applied(revision), "n2 has not acknowledged");
    second.ack().await;
    tokio::time::timeout(PATIENCE, status.wait_all_applied(revision))
        .await
        .unwrap();
    assert_eq!(status.applied("n1"), Some(revision));

    let mut registry = prometheus_client::registry::Registry::default();
    status.register(&mut registry);
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    assert!(
        text.contains(&format!(
            "weir_feed_applied_revision{{node=\"n1\"}} {revision}"
        )),
        "{text}"
    );
    drop(second);
    let mut ticks = cluster.feed.hub.ticks();
    while status.nodes()["n2"].connected {
        tokio::time::timeout(PATIENCE, ticks.changed())
            .await
            .unwrap()
            .unwrap();
    }
}

/// Service with an address that the cluster gives, as its controller leaves it.
fn balanced(address: &str) -> serde_json::Value {
    json!({"metadata": {"name": "lb", "namespace": "d", "uid": "u"}, "spec": {"type": "LoadBalancer"},
        "status": {"loadBalancer": {"ingress": [{"ip": address, "ipMode": "VIP"}]},
            "conditions": [{"type": control_feed::ADDRESSES_CONDITION, "status": "True"}]}})
}

#[tokio::test]
async fn an_address_moves_when_its_node_falls_silent_and_not_when_a_stream_breaks() {
    let cluster = cluster().await;
    for name in ["n1", "n2"] {
        let ready = json!([{"type": "Ready", "status": "True"}]);
        let node = json!({"metadata": {"name": name}, "status": {"conditions": ready}});
        cluster.api.put(resources::NODES, node);
    }
    cluster.api.put(resources::SERVICES, balanced("192.0.2.7"));
    let owner = |state: &DesiredState| Some(state.announcements.get("192.0.2.7")?.node.clone());
    let mut nodes = Vec::new();
    for name in ["n1", "n2"] {
        let mut client = cluster.node(name).await;
        let mut node = Node::follow(&mut client, hello(name, None)).await.unwrap();
        node.until(|s| owner(s).is_some()).await;
        let requests = node.requests.clone();
        let beating = tokio::spawn(async move {
            loop {
                let beat = control_api::v1::Heartbeat {
                    sent_at_us: 0,
                    next_in_ms: 200,
                };
                let beat = request(follow_request::Kind::Heartbeat(beat));
                if requests.send(beat).await.is_err() {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        });
        nodes.push((name, node, beating));
    }
    let first = owner(&nodes[0].1.state).unwrap();
    let at = usize::from(first == "n2");
    let (_, lost, beating) = nodes.remove(at);
    let (left_name, mut left, _) = nodes.remove(0);
    beating.abort();
    let silent = std::time::Instant::now();
    left.until(|s| owner(s).as_deref() == Some(left_name)).await;
    assert!(
        silent.elapsed() < Duration::from_secs(3),
        "{:?}",
        silent.elapsed()
    );
    // It comes back and has its address again: the choice depends on who is there only.
    drop(lost);
    let mut client = cluster.node(&first).await;
    let mut back = Node::follow(&mut client, hello(&first, None))
        .await
        .unwrap();
    back.until(|s| owner(s).as_deref() == Some(first.as_str()))
        .await;
    // A stream that ends and is there again within two seconds moves nothing.
    drop(back);
    tokio::time::sleep(Duration::from_millis(1000)).await;
    left.until(|s| owner(s).as_deref() == Some(first.as_str()))
        .await;
    let _back = Node::follow(&mut client, hello(&first, None))
        .await
        .unwrap();
    cluster.service("other", "10.96.0.9");
    left.until(|s| s.services.len() == 2).await;
    assert_eq!(owner(&left.state), Some(first));
}

#[tokio::test]
async fn a_node_resumes_without_a_snapshot_and_gets_its_own_pods_only() {
    let cluster = cluster().await;
    cluster.service("a", "10.96.0.1");
    let mut client = cluster.node("n1").await;
    let mut node = Node::follow(&mut client, hello("n1", None)).await.unwrap();
    node.until(|s| s.services.len() == 1).await;
    cluster.service("b", "10.96.0.2");
    node.until(|s| s.services.len() == 2).await;
    let held = node.state.clone();
    let again = hello("n1", Some(&node));
    drop(node);

    let pod = |name: &str, node: &str| json!({"metadata": {"name": name, "namespace": "d"}, "spec": {"nodeName": node}});
    cluster.api.put(resources::PODS, pod("mine", "n1"));
    cluster.api.put(resources::PODS, pod("other", "n2"));
    let last = cluster.service("c", "10.96.0.3");
    let mut node = Node::follow(&mut client, again).await.unwrap();
    node.state = held;
    node.until(|s| s.revision == last).await;
    assert_eq!(node.snapshots, 0);
    assert_eq!(node.state.services.len(), 3);
    assert_eq!(
        node.state.pods.keys().collect::<Vec<_>>(),
        [&Name::new("d", "mine")]
    );

    // A feed instance that this server never was: a snapshot.
    let stranger = Hello {
        feed_instance: "other".into(),
        ..hello("n1", Some(&node))
    };
    let mut node = Node::follow(&mut client, stranger).await.unwrap();
    node.until(|s| s.services.len() == 3).await;
    assert_eq!(node.snapshots, 1);
}

#[tokio::test]
async fn a_lost_watch_loses_nothing() {
    let cluster = cluster().await;
    cluster.service("a", "10.96.0.1");
    let mut node = Node::follow(&mut cluster.node("n1").await, hello("n1", None))
        .await
        .unwrap();
    node.until(|s| s.services.len() == 1).await;
    cluster.api.drop_watchers();
    cluster.service("b", "10.96.0.2");
    cluster
        .api
        .delete(resources::SERVICES, "d", "a", Default::default())
        .await
        .unwrap();
    node.until(|s| s.services.keys().eq([&Name::new("d", "b")]))
        .await;
}

#[tokio::test]
async fn a_node_speaks_for_itself_only() {
    let cluster = cluster().await;
    let mut client = cluster.node("n1").await;
    let refused = Node::follow(&mut client, hello("n2", None))
        .await
        .err()
        .unwrap();
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
    let report = NodeReport {
        name: "n2".into(),
        ..NodeReport::default()
    };
    assert_eq!(
        client.report_node(report).await.unwrap_err().code(),
        Code::PermissionDenied
    );
    let mut admin = NodeFeedClient::new(cluster.channel(&cluster.admin).await);
    let refused = Node::follow(&mut admin, hello("n1", None))
        .await
        .err()
        .unwrap();
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
    let reports = PodReports {
        node_name: "n1".into(),
        pods: Vec::new(),
    };
    assert_eq!(
        admin.report_pods(reports).await.unwrap_err().code(),
        Code::PermissionDenied
    );
}

fn ready(status: &str) -> Condition {
    Condition {
        r#type: "Ready".into(),
        status: status.into(),
        ..Condition::default()
    }
}

#[tokio::test]
async fn a_connection_without_a_handshake_ends() {
    use tokio::io::AsyncReadExt as _;
    let cluster = cluster().await;
    let mut silent = tokio::net::TcpStream::connect(cluster.address)
        .await
        .unwrap();
    let mut answer = Vec::new();
    let ended = tokio::time::timeout(2 * super::HANDSHAKE, silent.read_to_end(&mut answer)).await;
    assert!(
        ended.is_ok(),
        "the server keeps a connection that says nothing"
    );
}

#[tokio::test]
async fn a_lease_alone_makes_no_node() {
    let cluster = cluster().await;
    let mut client = cluster.node("n1").await;
    let lease = NodeReport {
        name: "n1".into(),
        ..NodeReport::default()
    };
    let refused = client.report_node(lease).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::NotFound, "{refused}");
    assert!(cluster.api.get(resources::NODES, "", "n1").await.is_err());
}

#[tokio::test]
async fn a_node_registers() {
    let cluster = cluster().await;
    let mut client = cluster.node("n1").await;
    let report = NodeReport {
        name: "n1".into(),
        internal_ips: vec!["192.0.2.11".into(), "2001:db8::11".into()],
        cpu_millis: 2000,
        memory_bytes: 4 << 30,
        max_pods: 110,
        conditions: vec![ready("True")],
        info: Some(NodeInfo {
            architecture: "amd64".into(),
            ..NodeInfo::default()
        }),
        node_api_address: "192.0.2.11:10250".into(),
        full: true,
        ..NodeReport::default()
    };
    let api = Arc::clone(&cluster.api);
    tokio::spawn(async move {
        // The node controller's part.
        let patch = json!({"spec": {"podCIDR": "10.244.3.0/24", "podCIDRs": ["10.244.3.0/24"]}});
        while api
            .patch(
                resources::NODES,
                "",
                "n1",
                "",
                crate::client::PatchKind::Merge,
                patch.clone(),
            )
            .await
            .is_err()
        {
            tokio::task::yield_now().await;
        }
    });
    let reply = client
        .report_node(report.clone())
        .await
        .unwrap()
        .into_inner();
    assert_eq!(reply.pod_cidrs, ["10.244.3.0/24"]);
    client.report_node(report).await.unwrap();
    let node = cluster.api.get(resources::NODES, "", "n1").await.unwrap();
    assert_eq!(node["metadata"]["labels"]["kubernetes.io/arch"], "amd64");
    assert_eq!(node["status"]["capacity"]["cpu"], "2");
    assert_eq!(
        node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"],
        10250
    );
    assert_eq!(node["status"]["addresses"][1]["address"], "2001:db8::11");
    let lease = cluster
        .api
        .get(resources::LEASES, "kube-node-lease", "n1")
        .await
        .unwrap();
    assert_eq!(lease["spec"]["holderIdentity"], "n1");
}

#[tokio::test]
async fn a_clouds_controller_initialises_a_node_and_names_its_addresses() {
    let cluster = cluster().await;
    let mut client = cluster.node("n1").await;
    let mut report = NodeReport {
        name: "n1".into(),
        internal_ips: vec!["192.0.2.11".into(), "2001:db8::11".into()],
        conditions: vec![ready("True")],
        full: true,
        external_cloud_provider: true,
        ..NodeReport::default()
    };
    client.report_node(report.clone()).await.unwrap();
    let node = cluster.api.get(resources::NODES, "", "n1").await.unwrap();
    let taint = &node["spec"]["taints"][0];
    let uninitialized = json!({"key": "node.cloudprovider.kubernetes.io/uninitialized", "value": "true", "effect": "NoSchedule"});
    assert_eq!(*taint, uninitialized);
    let provided = &node["metadata"]["annotations"]["alpha.kubernetes.io/provided-node-ip"];
    assert_eq!(*provided, "192.0.2.11,2001:db8::11");
    assert_eq!(node["status"]["addresses"][0]["address"], "192.0.2.11");

    // The cloud's part.
    let mut known = serde_json::Value::clone(&node);
    known["spec"] = json!({"providerID": "cloud://a/1", "taints": []});
    known["metadata"]["labels"]["topology.kubernetes.io/zone"] = json!("a");
    let known = cluster.api.update(resources::NODES, known).await.unwrap();
    let addresses = json!([
        {"type": "InternalIP", "address": "192.0.2.11"},
        {"type": "InternalIP", "address": "2001:db8::11"},
        {"type": "ExternalIP", "address": "203.0.113.11"},
        {"type": "Hostname", "address": "n1.cloud.example"},
    ]);
    let mut known = serde_json::Value::clone(&known);
    known["status"]["addresses"] = addresses.clone();
    cluster
        .api
        .update_status(resources::NODES, known)
        .await
        .unwrap();
    report.conditions = vec![ready("False")];
    client.report_node(report).await.unwrap();
    let node = cluster.api.get(resources::NODES, "", "n1").await.unwrap();
    assert_eq!(node["status"]["conditions"][0]["status"], "False");
    assert_eq!(node["status"]["addresses"], addresses);
    assert_eq!(
        node["spec"],
        json!({"providerID": "cloud://a/1", "taints": []})
    );
    let zone = &node["metadata"]["labels"]["topology.kubernetes.io/zone"];
    assert_eq!(*zone, "a");
}

#[tokio::test]
async fn a_node_reports_its_pods() {
    let cluster = cluster().await;
    let mut client = cluster.node("n1").await;
    let mut pod = json!({"metadata": {"name": "p", "namespace": "d"}, "spec": {"nodeName": "n1"},
        "status": {"qosClass": "Burstable", "conditions": [{"type": "PodScheduled", "status": "True",
            "lastTransitionTime": "2026-01-01T00:00:00Z"}]}});
    cluster.api.put(resources::PODS, pod.clone());
    let uid = cluster.api.get(resources::PODS, "d", "p").await.unwrap()["metadata"]["uid"].clone();
    let mut status = PodStatus {
        namespace: "d".into(),
        name: "p".into(),
        uid: uid.as_str().unwrap().into(),
        phase: "Running".into(),
        pod_ips: vec!["10.244.3.2".into()],
        conditions: vec![ready("True")],
        ..PodStatus::default()
    };
    let reports = |pods| PodReports {
        node_name: "n1".into(),
        pods,
    };
    client
        .report_pods(reports(vec![status.clone()]))
        .await
        .unwrap();
    let written = cluster.api.get(resources::PODS, "d", "p").await.unwrap();
    assert_eq!(written["status"]["podIPs"][0]["ip"], "10.244.3.2");
    assert_eq!(written["status"]["qosClass"], "Burstable");
    assert_eq!(written["status"]["conditions"].as_array().unwrap().len(), 2);

    let stranger = PodStatus {
        uid: "other".into(),
        phase: "Failed".into(),
        ..status.clone()
    };
    client.report_pods(reports(vec![stranger])).await.unwrap();
    assert_eq!(
        cluster.api.get(resources::PODS, "d", "p").await.unwrap(),
        written
    );

    status.gone = true;
    client
        .report_pods(reports(vec![status.clone()]))
        .await
        .unwrap();
    assert!(
        cluster.api.get(resources::PODS, "d", "p").await.is_ok(),
        "nobody asked for deletion"
    );
    pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    pod["metadata"]["uid"] = uid;
    cluster.api.put(resources::PODS, pod);
    client.report_pods(reports(vec![status])).await.unwrap();
    assert!(cluster.api.get(resources::PODS, "d", "p").await.is_err());
}

#[tokio::test]
async fn repeated_events_are_counted() {
    let cluster = cluster().await;
    let mut client = cluster.node("n1").await;
    let event = EventReport {
        kind: "Pod".into(),
        namespace: "d".into(),
        name: "p".into(),
        r#type: "Warning".into(),
        reason: "BackOff".into(),
        message: "é".repeat(1000),
        ..EventReport::default()
    };
    for _ in 0..2 {
        let reports = EventReports {
            node_name: "n1".into(),
            events: vec![event.clone(), event.clone()],
        };
        client.report_events(reports).await.unwrap();
    }
    let events = cluster.api.list(resources::EVENTS, "").await.unwrap().items;
    assert_eq!(events.len(), 1);
    assert_eq!(events[0]["count"], 4);
    assert_eq!(events[0]["message"].as_str().unwrap().len(), 1024);
}
