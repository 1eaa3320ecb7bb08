use std::collections::BTreeMap;

use control_api::desired::{DesiredState, Name};
use control_api::v1::{
    ClusterConfig, Delta, FeedMessage, Object, Snapshot, env_var, feed_message, file_source,
    handler, volume,
};
use proptest::prelude::*;
use prost::Message;
use serde_json::{Value, json};

use crate::{Effects, Index, Kind, Op, frame};

fn config() -> ClusterConfig {
    ClusterConfig {
        cluster_domain: "cluster.local".into(),
        ..ClusterConfig::default()
    }
}

/// What a node holds after a snapshot, by way of the real frames.
fn held(index: &Index, node: &str, revision: u64) -> DesiredState {
    let objects = index.snapshot(node, true);
    let mut rest = objects.as_slice();
    let mut parts = Vec::new();
    while !rest.is_empty() {
        let (part, tail) = rest.split_at(frame::part_length(rest));
        let bytes = frame::snapshot_part(revision, "i", parts.is_empty(), tail.is_empty(), part);
        match FeedMessage::decode(bytes).unwrap().kind {
            Some(feed_message::Kind::Snapshot(snapshot)) => parts.push(snapshot),
            other => panic!("{other:?}"),
        }
        rest = tail;
    }
    assert!(parts.first().unwrap().first && parts.last().unwrap().last);
    DesiredState::from_snapshot(parts)
}

fn apply(state: &mut DesiredState, node: &str, revision: u64, effects: &Effects) {
    let bytes = frame::delta(revision, 1, effects.of_node(node, true));
    match FeedMessage::decode(bytes).unwrap().kind {
        Some(feed_message::Kind::Delta(delta)) => {
            state.apply(delta);
        }
        other => panic!("{other:?}"),
    }
}

#[derive(Clone, Debug)]
struct Step {
    kind: Kind,
    name: u8,
    node: u8,
    refers: Vec<u8>,
    variant: u8,
    delete: bool,
}

fn step() -> impl Strategy<Value = Step> {
    (
        0usize..Kind::ALL.len(),
        0u8..3,
        0u8..3,
        prop::collection::vec(0u8..3, 0..3),
        0u8..3,
        any::<bool>(),
    )
        .prop_map(|(kind, name, node, refers, variant, delete)| Step {
            kind: Kind::ALL[kind],
            name,
            node,
            refers,
            variant,
            delete,
        })
}

fn object_of(step: &Step) -> Value {
    let name = format!("o{}", step.name);
    let mut object = json!({"metadata": {"name": name, "namespace": "d",
        "labels": {"kubernetes.io/service-name": format!("s{}", step.variant)}}});
    match step.kind {
        Kind::Pod => {
            let volumes: Vec<Value> = step
                .refers
                .iter()
                .map(|r| match r % 2 {
                    0 => json!({"name": "v", "configMap": {"name": format!("o{r}")}}),
                    _ => json!({"name": "v", "secret": {"secretName": format!("o{r}")}}),
                })
                .collect();
            let node = if step.node == 0 {
                String::new()
            } else {
                format!("n{}", step.node)
            };
            object["spec"] = json!({"nodeName": node, "hostname": step.variant.to_string(),
                "volumes": volumes});
        }
        Kind::ConfigMap => object["data"] = json!({"k": step.variant.to_string()}),
        Kind::Secret => {
            object["data"] = json!({"k": (["YQ==", "Yg==", "Yw=="][usize::from(step.variant)])})
        }
        Kind::Service => object["spec"] = json!({"clusterIP": format!("10.0.0.{}", step.variant)}),
        Kind::EndpointSlice => {
            object["addressType"] = json!((["IPv4", "IPv6", "FQDN"][usize::from(step.variant)]))
        }
        Kind::Node => object["spec"] = json!({"podCIDR": format!("10.1.{}.0/24", step.variant)}),
        Kind::Namespace | Kind::NetworkPolicy | Kind::ClusterNetworkPolicy => {}
    }
    object
}

proptest! {
    /// The snapshot at R equals the snapshot at any earlier R0 plus the deltas between them, for every node, and a
    /// relist of the survivors changes nothing.
    #[test]
    fn snapshot_equals_earlier_snapshot_plus_deltas(steps in prop::collection::vec(step(), 1..60), from in 0usize..60) {
        let nodes = ["n1", "n2", "stranger"];
        let mut index = Index::new(config());
        let mut states: BTreeMap<&str, DesiredState> = BTreeMap::new();
        let mut alive: BTreeMap<(Kind, u8), Value> = BTreeMap::new();
        let from = from % steps.len();
        for (i, step) in steps.iter().enumerate() {
            let revision = i as u64 + 1;
            if i == from {
                states = nodes.iter().map(|n| (*n, held(&index, n, revision - 1))).collect();
            }
            let object = object_of(step);
            let effects = if step.delete {
                alive.remove(&(step.kind, step.name));
                index.remove(step.kind, &object)
            } else {
                alive.insert((step.kind, step.name), object.clone());
                index.upsert(step.kind, &object, revision)
            };
            for (node, state) in &mut states {
                apply(state, node, revision, &effects);
            }
        }
        let revision = steps.len() as u64;
        for (node, state) in &states {
            prop_assert_eq!(state, &held(&index, node, revision));
            prop_assert!(state.pods.values().all(|p| !p.name.is_empty()));
        }
        for kind in Kind::ALL {
            let list = alive.iter().filter(|((k, _), _)| *k == kind).map(|(_, o)| o);
            prop_assert_eq!(index.replace(kind, list, revision), Effects::default());
        }
        for kind in Kind::ALL {
            index.replace(kind, std::iter::empty(), revision);
        }
        prop_assert_eq!(index.snapshot("n1", true).len(), 1);
    }
}

#[test]
fn frames_equal_encoded_messages() {
    let objects: Vec<Object> = (0..3)
        .map(|i| {
            let node = control_api::v1::Node {
                name: format!("n{i}"),
                ..Default::default()
            };
            Object {
                kind: Some(control_api::v1::object::Kind::Node(node)),
            }
        })
        .collect();
    let encoded: Vec<bytes::Bytes> = objects.iter().map(|o| o.encode_to_vec().into()).collect();
    let snapshot = Snapshot {
        revision: 9,
        feed_instance: "x".into(),
        first: true,
        last: false,
        objects: objects.clone(),
    };
    let expected = FeedMessage {
        kind: Some(feed_message::Kind::Snapshot(snapshot)),
    };
    assert_eq!(
        frame::snapshot_part(9, "x", true, false, &encoded),
        expected.encode_to_vec()
    );

    let key = control_api::v1::ObjectKey {
        name: "gone".into(),
        ..Default::default()
    };
    let mut ops: Vec<Op> = encoded.into_iter().map(Op::Upsert).collect();
    ops.push(Op::Remove(key.clone()));
    let delta = Delta {
        revision: 10,
        committed_at_us: 7,
        upserts: objects,
        removals: vec![key],
    };
    let expected = FeedMessage {
        kind: Some(feed_message::Kind::Delta(delta)),
    };
    let framed = FeedMessage::decode(frame::delta(10, 7, ops.iter())).unwrap();
    assert_eq!(framed, expected);
}

#[test]
fn a_change_of_status_alone_costs_nothing() {
    let mut index = Index::new(config());
    let mut pod = json!({"metadata": {"name": "p", "namespace": "d"}, "spec": {"nodeName": "n1"}});
    assert!(!index.upsert(Kind::Pod, &pod, 1).is_empty());
    pod["status"] = json!({"phase": "Running"});
    assert!(index.upsert(Kind::Pod, &pod, 2).is_empty());
    let mut node = json!({"metadata": {"name": "n1"}, "status": {"conditions": [
        {"type": "Ready", "status": "True", "lastHeartbeatTime": "2026-01-01T00:00:00Z"}]}});
    assert!(!index.upsert(Kind::Node, &node, 3).is_empty());
    node["status"]["conditions"][0]["lastHeartbeatTime"] = json!("2026-01-01T00:00:10Z");
    assert!(index.upsert(Kind::Node, &node, 4).is_empty());
}

#[test]
fn a_node_gets_secrets_of_its_own_pods_only() {
    let mut index = Index::new(config());
    let secret = json!({"metadata": {"name": "s", "namespace": "d"}, "data": {"k": "djE="}});
    assert!(index.upsert(Kind::Secret, &secret, 1).is_empty());
    let pod = json!({"metadata": {"name": "p", "namespace": "d"}, "spec": {"nodeName": "n1",
        "containers": [{"name": "c", "image": "nginx", "env": [{"name": "E",
            "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}]}});
    let effects = index.upsert(Kind::Pod, &pod, 2);
    assert_eq!(effects.per_runner.keys().collect::<Vec<_>>(), ["n1"]);
    let name = Name::new("d", "s");
    assert_eq!(held(&index, "n1", 2).secrets[&name].data["k"], b"v1");
    assert!(held(&index, "n2", 2).secrets.is_empty());
    assert!(DesiredState::default().secrets.is_empty());
    let mut state = held(&index, "n1", 2);
    let effects = index.remove(Kind::Pod, &pod);
    apply(&mut state, "n1", 3, &effects);
    assert!(state.secrets.is_empty() && state.pods.is_empty());
}

#[test]
fn translates_a_whole_pod() {
    let mut index = Index::new(config());
    let pod = json!({
        "metadata": {"name": "p", "namespace": "d", "uid": "u", "labels": {"a": "b"},
            "creationTimestamp": "2026-01-01T00:00:01Z",
            "deletionTimestamp": "2026-01-01T00:01:00Z", "deletionGracePeriodSeconds": 5},
        "spec": {"nodeName": "n1", "restartPolicy": "OnFailure", "dnsPolicy": "Default",
            "securityContext": {"runAsUser": 7, "sysctls": [{"name": "net.x", "value": "1"}]},
            "initContainers": [{"name": "side", "image": "a:1", "restartPolicy": "Always"}],
            "containers": [{"name": "c", "image": "reg:5000/x", "command": ["sh"],
                "env": [{"name": "A", "value": "1"},
                    {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
                "resources": {"limits": {"cpu": "500m", "memory": "64Mi"}},
                "readinessProbe": {"httpGet": {"path": "", "port": "web"}, "periodSeconds": 2},
                "livenessProbe": {"tcpSocket": {"port": 80}},
                "ports": [{"name": "web", "containerPort": 80}],
                "securityContext": {"capabilities": {"drop": ["ALL"]}}}],
            "volumes": [{"name": "t", "projected": {"sources": [
                    {"serviceAccountToken": {"path": "token"}},
                    {"downwardAPI": {"items": [{"path": "l", "fieldRef": {"fieldPath": "metadata.labels"}}]}}]}},
                {"name": "e", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
                {"name": "odd", "nfs": {"server": "x"}}]}});
    index.upsert(Kind::Pod, &pod, 42);
    let state = held(&index, "n1", 42);
    let spec = &state.pods[&Name::new("d", "p")];
    assert!(spec.deleting && spec.deletion_grace_s == 5 && spec.revision == 42);
    assert_eq!(spec.created_at_us, 1_767_225_601_000_000);
    assert!(spec.init_containers[0].sidecar);
    assert_eq!(spec.init_containers[0].image_pull_policy, "IfNotPresent");
    let container = &spec.containers[0];
    assert_eq!(container.image_pull_policy, "Always");
    assert_eq!(
        container.env[1].source,
        Some(env_var::Source::FieldPath("status.podIP".into()))
    );
    let resources = container.resources.unwrap();
    assert_eq!(
        (resources.request_cpu_millis, resources.limit_memory_bytes),
        (500, 64 << 20)
    );
    let readiness = container.readiness.as_ref().unwrap();
    assert_eq!((readiness.period_s, readiness.failure_threshold), (2, 3));
    match &readiness.handler.as_ref().unwrap().kind {
        Some(handler::Kind::HttpGet(get)) => assert_eq!((&*get.port, &*get.path), ("web", "/")),
        other => panic!("{other:?}"),
    }
    match &spec.volumes[0].source {
        Some(volume::Source::Files(files)) => {
            assert_eq!(files.default_mode, 0o644);
            assert!(matches!(
                files.sources[0].kind,
                Some(file_source::Kind::Token(_))
            ));
        }
        other => panic!("{other:?}"),
    }
    assert!(spec.volumes[2].source.is_none());
}

#[test]
fn translates_services_and_slices() {
    let mut index = Index::new(config());
    index.upsert(
        Kind::Service,
        &json!({"metadata": {"name": "s", "namespace": "d"}, "spec": {"type": "LoadBalancer",
            "clusterIP": "10.0.0.1", "clusterIPs": ["10.0.0.1", "FD00::0:1"],
            "sessionAffinity": "ClientIP", "externalTrafficPolicy": "Local",
            "ports": [{"port": 80, "nodePort": 30080}]},
            "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}, {"hostname": "x"}]}}}),
        1,
    );
    index.upsert(
        Kind::Service,
        &json!({"metadata": {"name": "h", "namespace": "d",
                "labels": {"service.kubernetes.io/service-proxy-name": "other"}},
            "spec": {"clusterIP": "None", "clusterIPs": ["None"]}}),
        2,
    );
    index.upsert(
        Kind::EndpointSlice,
        &json!({"metadata": {"name": "s-1", "namespace": "d",
            "labels": {"kubernetes.io/service-name": "s"}}, "addressType": "IPv4",
            "ports": [{"port": 8080}], "endpoints": [{"addresses": ["10.1.0.1"],
                "conditions": {"ready": null}, "targetRef": {"kind": "Pod", "namespace": "d", "name": "p"}},
                {"addresses": ["10.1.0.2"], "conditions": {"ready": false}}]}),
        3,
    );
    let state = held(&index, "n1", 3);
    let service = &state.services[&Name::new("d", "s")];
    assert_eq!(service.cluster_ips, ["10.0.0.1", "fd00::1"]);
    assert_eq!(service.client_ip_affinity_s, 10_800);
    assert_eq!(service.load_balancer_ingress.len(), 1);
    let headless = &state.services[&Name::new("d", "h")];
    assert!(headless.headless && headless.foreign_proxy && !service.foreign_proxy);
    let slice = &state.endpoint_slices[&Name::new("d", "s-1")];
    let endpoints: Vec<_> = slice.endpoints().collect();
    assert!(endpoints[0].ready() && endpoints[0].serving());
    assert_eq!(endpoints[0].target_pod(), "d/p");
    assert!(!endpoints[1].ready() && !endpoints[1].serving());
}

#[test]
fn every_node_gets_the_configuration_of_cluster_dns() {
    let map = |name: &str, key: &str, text: &str| json!({"metadata": {"name": name, "namespace": "kube-system"}, "data": {(key): text}});
    let mut index = Index::new(config());
    let mut state = held(&index, "n1", 0);
    let mut revision = 0;
    let mut tell = |index: &mut Index, object: &Value, delete: bool| {
        revision += 1;
        let effects = match delete {
            false => index.upsert(Kind::ConfigMap, object, revision),
            true => index.remove(Kind::ConfigMap, object),
        };
        apply(&mut state, "n1", revision, &effects);
        assert_eq!(state, held(index, "n1", revision));
        state.config.dns_files.clone()
    };
    let own = map("coredns", "Corefile", ". {\n}");
    assert_eq!(
        tell(&mut index, &own, false)["/etc/coredns/Corefile"],
        b". {\n}"
    );
    let custom = map("coredns-custom", "a.server", "a {\n}");
    let files = tell(&mut index, &custom, false);
    assert_eq!(files["/etc/coredns/custom/a.server"], b"a {\n}");
    assert_eq!(files.len(), 2);
    assert_eq!(tell(&mut index, &map("other", "x", "y"), false).len(), 2);
    let huge = map("coredns-custom", "b.server", &"x".repeat(300 << 10));
    assert_eq!(tell(&mut index, &huge, false).len(), 1);
    assert_eq!(index.upsert(Kind::ConfigMap, &own, 9), Effects::default());
    assert_eq!(tell(&mut index, &own, true).len(), 0);
}
