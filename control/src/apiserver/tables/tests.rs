use serde_json::json;

use super::*;
use crate::apiserver::registry::Registry;

fn now() -> Timestamp {
    "2024-01-02T00:00:00Z".parse().unwrap()
}

fn row(group: &str, kind: &str, mut object: Value) -> Vec<Value> {
    object["metadata"]["creationTimestamp"] = "2024-01-01T23:59:15Z".into();
    object["metadata"]["name"] = "x".into();
    cells(Gvk::new(group, "v1", kind), &object, now())
}

#[test]
fn every_kind_has_as_many_cells_as_columns() {
    for def in Registry::builtin().iter() {
        let gvk = def.gvk();
        for object in [json!({}), json!({"metadata": 1, "spec": [], "status": "x"})] {
            assert_eq!(
                cells(gvk, &object, now()).len(),
                columns(gvk).len(),
                "{gvk:?}"
            );
        }
    }
}

#[test]
fn pods_show_the_state_of_their_containers() {
    let waiting = json!({"spec": {"nodeName": "n1", "containers": [{"name": "c"}]},
        "status": {"phase": "Pending", "containerStatuses": [{"name": "c", "restartCount": 3,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": {"finishedAt": "2024-01-01T23:58:00Z"}}}]}});
    assert_eq!(
        row("", "Pod", waiting),
        [
            "x",
            "0/1",
            "CrashLoopBackOff",
            "3 (2m ago)",
            "45s",
            "<none>",
            "n1",
            "<none>",
            "<none>"
        ]
    );
    let running = json!({"spec": {"containers": [{"name": "c"}, {"name": "d"}]},
        "status": {"phase": "Running", "podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}],
            "containerStatuses": [{"name": "c", "ready": true, "state": {"running": {}}},
                                  {"name": "d", "ready": false, "state": {"running": {}}}]}});
    assert_eq!(
        row("", "Pod", running.clone())[1..4],
        ["1/2", "Running", "0"]
    );
    assert_eq!(row("", "Pod", running.clone())[5], "10.0.0.1");
    let mut deleted = running;
    deleted["metadata"]["deletionTimestamp"] = "2024-01-02T00:00:00Z".into();
    assert_eq!(row("", "Pod", deleted)[2], "Terminating");
    let init = json!({"spec": {"initContainers": [{"name": "i"}, {"name": "j"}], "containers": [{"name": "c"}]},
        "status": {"phase": "Pending", "initContainerStatuses": [
            {"name": "i", "state": {"terminated": {"exitCode": 0}}}, {"name": "j", "state": {"running": {}}}]}});
    assert_eq!(row("", "Pod", init)[2], "Init:1/2");
    let failed = json!({"spec": {"containers": [{"name": "c"}]}, "status": {"phase": "Failed",
        "containerStatuses": [{"name": "c", "state": {"terminated": {"exitCode": 7}}}]}});
    assert_eq!(row("", "Pod", failed)[2], "ExitCode:7");
}

#[test]
fn services_nodes_and_slices() {
    let service = json!({"spec": {"type": "NodePort", "clusterIPs": ["10.96.0.5"], "selector": {"b": "2", "a": "1"},
        "ports": [{"port": 80, "nodePort": 30080, "protocol": "TCP"}, {"port": 53, "protocol": "UDP"}]}});
    assert_eq!(
        row("", "Service", service),
        [
            "x",
            "NodePort",
            "10.96.0.5",
            "<none>",
            "80:30080/TCP,53/UDP",
            "45s",
            "a=1,b=2"
        ]
    );
    let node = json!({"metadata": {"labels": {"node-role.kubernetes.io/worker": ""}}, "spec": {"unschedulable": true},
        "status": {"conditions": [{"type": "Ready", "status": "True"}], "addresses": [{"type": "InternalIP", "address": "192.0.2.1"}],
            "nodeInfo": {"kubeletVersion": "v1", "kernelVersion": "6.1", "architecture": "amd64"}}});
    assert_eq!(
        row("", "Node", node),
        [
            "x",
            "Ready,SchedulingDisabled",
            "worker",
            "45s",
            "v1",
            "192.0.2.1",
            "<none>",
            "<unknown>",
            "6.1 (amd64)",
            "<unknown>"
        ]
    );
    let slice = json!({"addressType": "IPv4", "ports": [{"port": 80}],
        "endpoints": [{"addresses": ["a"]}, {"addresses": ["b"]}, {"addresses": ["c"]}, {"addresses": ["d"]}]});
    assert_eq!(
        row("discovery.k8s.io", "EndpointSlice", slice),
        ["x", "IPv4", "80", "a,b,c + 1 more...", "45s"]
    );
}

#[test]
fn workloads_and_configuration() {
    let deployment = json!({"spec": {"replicas": 3, "selector": {"matchLabels": {"app": "x"}},
        "template": {"spec": {"containers": [{"name": "c", "image": "i"}, {"name": "d", "image": "j"}]}}},
        "status": {"readyReplicas": 2, "updatedReplicas": 3, "availableReplicas": 1}});
    let expected = json!(["x", "2/3", 3, 1, "45s", "c,d", "i,j", "app=x"]);
    assert_eq!(
        Value::Array(row("apps", "Deployment", deployment)),
        expected
    );
    let config = json!({"data": {"a": "1"}, "binaryData": {"b": "", "c": ""}});
    assert_eq!(
        Value::Array(row("", "ConfigMap", config)),
        json!(["x", 3, "45s"])
    );
    let role = row("rbac.authorization.k8s.io", "Role", json!({}));
    assert_eq!(role, ["x", "2024-01-01T23:59:15Z"]);
    let expressions = json!({"spec": {"podSelector": {"matchExpressions": [
        {"key": "b", "operator": "In", "values": ["2", "1"]}, {"key": "a", "operator": "DoesNotExist"}]}}});
    assert_eq!(
        row("networking.k8s.io", "NetworkPolicy", expressions)[1],
        "!a,b in (1,2)"
    );
    let policy = json!({"spec": {"tier": "Admin", "priority": 0}});
    assert_eq!(
        row("policy.networking.k8s.io", "ClusterNetworkPolicy", policy),
        ["x", "Admin", "0", "45s"]
    );
}

#[test]
fn events_of_both_groups_read_alike() {
    let old = json!({"type": "Normal", "reason": "Pulled", "message": "m ", "count": 4,
        "involvedObject": {"kind": "Pod", "name": "p"}, "source": {"component": "kubelet", "host": "n1"},
        "firstTimestamp": "2024-01-01T23:50:00Z", "lastTimestamp": "2024-01-01T23:59:00Z"});
    assert_eq!(
        Value::Array(row("", "Event", old)),
        json!([
            "60s",
            "Normal",
            "Pulled",
            "pod/p",
            "",
            "kubelet, n1",
            "m",
            "10m",
            4,
            "x"
        ])
    );
    let new = json!({"type": "Warning", "reason": "R", "note": "n", "regarding": {"kind": "Node", "name": "n1"},
        "reportingController": "c", "eventTime": "2024-01-01T23:59:59.000000Z"});
    assert_eq!(
        Value::Array(row("events.k8s.io", "Event", new)),
        json!(["1s", "Warning", "R", "node/n1", "", "c", "n", "1s", 1, "x"])
    );
}
