use control_api::desired::Name;
use control_api::v1::{ClusterConfig, EventReport, EventReports, Hello};
use control_feed::Kind;
use serde_json::{Value, json};

use super::super::hub::{Hub, Next};
use super::{Node, cluster, hello};
use crate::client::{ObjectClient as _, resources};

fn pod(name: &str, node: &str) -> Value {
    json!({"metadata": {"name": name, "namespace": "d", "uid": name}, "spec": {"nodeName": node},
        "status": {"podIP": "10.0.0.1"}})
}

fn open_to(peer: Value) -> Value {
    json!({"metadata": {"name": "p", "namespace": "d"}, "spec": {"ingress": [{"from": [peer]}]}})
}

#[tokio::test]
async fn an_agent_that_runs_no_pods_gets_policies_all_the_same() {
    let cluster = cluster().await;
    cluster.api.put(resources::PODS, pod("mine", "n1"));
    let mut client = cluster.node("n1").await;
    let greeting = Hello {
        runs_pods: false,
        ..hello("n1", None)
    };
    let mut node = Node::follow(&mut client, greeting).await.unwrap();
    let mine = Name::new("d", "mine");
    node.until(|s| s.policy_peers.contains_key(&mine)).await;
    cluster.api.put(
        resources::NETWORK_POLICIES,
        open_to(json!({"podSelector": {}})),
    );
    node.until(|s| s.policies.len() == 1).await;
    assert_eq!(node.state.policy_peers[&mine].policies.len(), 1);
    cluster.api.put(resources::PODS, pod("peer", "n2"));
    node.until(|s| s.policy_peers.len() == 2).await;
    assert!(node.state.pods.is_empty());
}

#[tokio::test]
async fn a_change_that_is_too_much_for_a_message_makes_a_snapshot() {
    let cluster = cluster().await;
    cluster.api.put(resources::PODS, pod("mine", "n1"));
    let long = "x".repeat(4 << 10);
    for i in 0..1200 {
        let mut pod = pod(&format!("{long}-{i}"), "n2");
        pod["metadata"]["uid"] = json!(i.to_string());
        cluster.api.put(resources::PODS, pod);
    }
    let mut client = cluster.node("n1").await;
    let mut node = Node::follow(&mut client, hello("n1", None)).await.unwrap();
    node.until(|s| s.policy_peers.len() == 1).await;
    let again = hello("n1", Some(&node));
    cluster.api.put(
        resources::NETWORK_POLICIES,
        open_to(json!({"podSelector": {}})),
    );
    node.until(|s| s.policy_peers.len() == 1201).await;
    assert_eq!(node.snapshots, 2);
    // And goes on with deltas.
    cluster.api.put(resources::PODS, pod("peer", "n2"));
    node.until(|s| s.policy_peers.len() == 1202).await;
    assert_eq!(node.snapshots, 2);
    // What the node asks to resume lies before that change.
    let mut node = Node::follow(&mut client, again).await.unwrap();
    node.until(|s| s.policy_peers.len() == 1202).await;
    assert_eq!(node.snapshots, 1);
}

#[test]
fn a_cluster_without_an_optional_kind_is_complete() {
    let hub = Hub::new(ClusterConfig::default(), "i".into());
    for kind in Kind::ALL.into_iter().filter(|kind| !kind.is_optional()) {
        hub.replace(kind, std::iter::empty(), 5, 0);
    }
    assert!(!hub.is_synced());
    hub.absent(Kind::ClusterNetworkPolicy, 0);
    assert!(hub.is_synced());
    let opening = hub.open(&hello("n1", None));
    assert_eq!(opening.revision, 5);
    for kind in Kind::ALL.into_iter().filter(|kind| !kind.is_optional()) {
        hub.bookmark(kind, 9);
    }
    let next = hub.next("n1", opening.session, true);
    assert!(matches!(next, Next::UpToDate { progress: Some(9) }));
    // It comes later: what the node is told of waits for its list like for any other.
    hub.replace(Kind::ClusterNetworkPolicy, std::iter::empty(), 10, 0);
    hub.bookmark(Kind::ClusterNetworkPolicy, 11);
    for kind in Kind::ALL {
        hub.bookmark(kind, 12);
    }
    assert_eq!(hub.lock().head_revision, 12);
}

#[tokio::test]
async fn agents_record_events_on_policies() {
    let cluster = cluster().await;
    let mut client = cluster.node("n1").await;
    let event = |kind: &str, namespace: &str| EventReport {
        kind: kind.into(),
        namespace: namespace.into(),
        name: "p".into(),
        uid: format!("uid-{kind}"),
        r#type: "Warning".into(),
        reason: "PolicyTooLarge".into(),
        message: "m".into(),
        at_us: 1,
    };
    let report = EventReports {
        node_name: "n1".into(),
        events: vec![
            event("NetworkPolicy", "d"),
            event("ClusterNetworkPolicy", ""),
        ],
    };
    client.report_events(report).await.unwrap();
    let events = cluster.api.list(resources::EVENTS, "").await.unwrap();
    let involved = events.items.iter().map(|event| &event["involvedObject"]);
    let mut versions: Vec<String> = involved
        .map(|object| format!("{} {}", object["apiVersion"], object["kind"]).replace('"', ""))
        .collect();
    versions.sort();
    assert_eq!(
        versions,
        [
            "networking.k8s.io/v1 NetworkPolicy",
            "policy.networking.k8s.io/v1alpha2 ClusterNetworkPolicy"
        ]
    );
}
