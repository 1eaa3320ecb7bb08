use serde_json::json;

use super::*;

fn case(steps: &Value) -> CaseFile {
    let service = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": {
        "type": "NodePort", "externalTrafficPolicy": "Local", "clusterIP": "10.96.0.10", "selector": {"app": "web"},
        "ports": [{"port": 80, "targetPort": 8080, "nodePort": 30080}]}});
    let web = |name: &str, node: &str| json!({"name": name, "node": node, "labels": {"app": "web"}, "listen": [{"port": 8080}]});
    serde_json::from_value(json!({
        "nodes": [{"name": "n1"}, {"name": "n2"}, {"name": "n3"}],
        "external": [{"name": "e"}],
        "pods": [{"name": "c"}, web("w1", "n1"), web("w2", "n2")],
        "objects": [service],
        "steps": steps,
    }))
    .unwrap()
}

#[test]
fn policies_readiness_and_flows() {
    let steps = json!([
        {"probe": {"from": "c", "to": "svc:web:80", "count": 40,
            "expect": {"backends": ["w1", "w2"], "spread": {"each_at_least": 5}, "source_seen": "client"}}},
        {"probe": {"from": "ext:e", "to": "node:n2:30080", "keep": "k",
            "expect": {"backends": ["w2"], "source_seen": "client"}}},
        {"probe": {"from": "ext:e", "to": "node:n3:30080", "expect": {"outcome": "timeout"}}},
        {"probe": {"from": "c", "to": "node:n3:30080", "count": 40,
            "expect": {"backends": ["w1", "w2"], "spread": {"each_at_least": 5}}}},
        {"probe": {"from": "c", "to": "svc:web:81", "expect": {"outcome": "refused"}}},
        {"set": {"pod": "w2", "ready": false}},
        {"probe": {"from": "c", "to": "svc:web:80", "count": 20, "expect": {"backends": ["w1"]}}},
        {"send": {"flow": "k", "expect": {"same_backend_as": "k"}}},
        {"remove": "w2"},
        {"send": {"flow": "k", "expect": {"outcome": "reset"}}},
    ]);
    assert_eq!(run(&case(&steps), 1), CaseOutcome::Passed);
}

#[test]
fn a_wrong_expectation_fails_and_a_foreign_one_is_skipped() {
    let wrong = json!([{"probe": {"from": "c", "to": "svc:web:80", "count": 40, "expect": {"backends": ["w1"]}}}]);
    assert!(matches!(run(&case(&wrong), 1), CaseOutcome::Failed(_)));
    let foreign = json!([{"raw": {"from": "c", "packet": {}}}]);
    assert!(matches!(run(&case(&foreign), 1), CaseOutcome::Skipped(_)));
}
