//! What pods and Services count for in a ResourceQuota. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::controllers::pods::is_finished;
use crate::controllers::runtime::object::Object;
use crate::controllers::runtime::quantity::{format_bytes, format_milli, parse_milli};

/// Amounts in thousandths, by the name under which a quota limits them.
pub(super) type Usage = BTreeMap<String, i128>;

fn text_of(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn amount(container: &Value, part: &str, resource: &str) -> i128 {
    let value = container.at(&["resources", part, resource]);
    value.and_then(|v| parse_milli(&text_of(v))).unwrap_or(0)
}

fn names(pod: &Value, part: &str) -> Vec<String> {
    let mut names: Vec<String> = ["containers", "initContainers"]
        .iter()
        .flat_map(|field| pod.items(&["spec", field]))
        .filter_map(|c| c.fields(&["resources", part]))
        .flat_map(|m| m.keys().cloned().collect::<Vec<_>>())
        .collect();
    names.sort();
    names.dedup();
    names
}

/// The larger of all containers together and the most demanding init step.
fn pod_amount(pod: &Value, part: &str, resource: &str) -> i128 {
    let sidecar = |c: &&Value| c.text(&["restartPolicy"]) == "Always";
    let init = pod.items(&["spec", "initContainers"]);
    let sidecars: i128 = init
        .iter()
        .filter(sidecar)
        .map(|c| amount(c, part, resource))
        .sum();
    let main: i128 = pod
        .items(&["spec", "containers"])
        .iter()
        .map(|c| amount(c, part, resource))
        .sum();
    let peak = init
        .iter()
        .filter(|c| !sidecar(c))
        .map(|c| amount(c, part, resource))
        .max();
    (main + sidecars).max(peak.unwrap_or(0))
}

/// Whether the pod falls under all scopes of the quota.
fn in_scope(pod: &Value, quota: &Value) -> bool {
    let best_effort = pod.text(&["status", "qosClass"]) == "BestEffort";
    let limited = pod.number(&["spec", "activeDeadlineSeconds"]).is_some();
    let by_name = |scope: &str| match scope {
        "BestEffort" => best_effort,
        "NotBestEffort" => !best_effort,
        "Terminating" => limited,
        "NotTerminating" => !limited,
        _ => true,
    };
    let scopes = quota
        .items(&["spec", "scopes"])
        .iter()
        .filter_map(Value::as_str);
    let selectors = quota.items(&["spec", "scopeSelector", "matchExpressions"]);
    scopes.into_iter().all(by_name)
        && selectors.iter().all(|s| match s.text(&["scopeName"]) {
            "PriorityClass" => {
                let class = pod.text(&["spec", "priorityClassName"]);
                let named = s
                    .items(&["values"])
                    .iter()
                    .any(|v| v.as_str() == Some(class));
                match s.text(&["operator"]) {
                    "In" => named,
                    "NotIn" => !named,
                    "Exists" => !class.is_empty(),
                    "DoesNotExist" => class.is_empty(),
                    _ => false,
                }
            }
            scope => by_name(scope),
        })
}

/// Everything that the pods of the namespace use under this quota. Finished pods use nothing.
pub(super) fn of_pods(pods: &[Arc<Value>], quota: &Value) -> Usage {
    let mut usage = Usage::new();
    let mut add = |name: String, value: i128| {
        let slot = usage.entry(name).or_insert(0);
        *slot = slot.saturating_add(value);
    };
    for pod in pods
        .iter()
        .filter(|p| !is_finished(p) && in_scope(p, quota))
    {
        add("pods".into(), 1000);
        for (part, prefix) in [("requests", "requests."), ("limits", "limits.")] {
            for resource in names(pod, part) {
                let value = pod_amount(pod, part, &resource);
                if part == "requests"
                    && ["cpu", "memory", "ephemeral-storage"].contains(&resource.as_str())
                {
                    add(resource.clone(), value);
                }
                add(format!("{prefix}{resource}"), value);
            }
        }
    }
    usage
}

pub(super) fn of_services(services: &[Arc<Value>]) -> Usage {
    let mut usage = Usage::new();
    let count = |n: usize| i128::try_from(n).unwrap_or(i128::MAX).saturating_mul(1000);
    let is = |s: &Value, kind: &str| s.text(&["spec", "type"]) == kind;
    let balancers = services.iter().filter(|s| is(s, "LoadBalancer"));
    let ports = services
        .iter()
        .filter(|s| is(s, "NodePort") || is(s, "LoadBalancer"))
        .flat_map(|s| s.items(&["spec", "ports"]))
        .filter(|p| p.number(&["nodePort"]).unwrap_or(0) > 0);
    usage.insert("services".into(), count(services.len()));
    usage.insert("services.loadbalancers".into(), count(balancers.count()));
    usage.insert("services.nodeports".into(), count(ports.count()));
    usage
}

/// `status.used` for exactly the names that the quota limits.
pub(super) fn used(hard: &Map<String, Value>, usage: &Usage) -> Map<String, Value> {
    let write = |name: &str, milli: i128| {
        if name.contains("memory") || name.contains("storage") {
            format_bytes(milli)
        } else {
            format_milli(milli)
        }
    };
    hard.keys()
        .map(|name| {
            let milli = usage.get(name).copied().unwrap_or(0);
            (name.clone(), write(name, milli).into())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn pods_count_by_scope_and_resource() {
        let pod = |phase: &str, qos: &str, cpu: &str| {
            Arc::new(json!({
                "spec": {"containers": [{"resources": {"requests": {"cpu": cpu, "memory": "1Gi"}}}],
                    "initContainers": [{"resources": {"requests": {"cpu": "700m"}}}]},
                "status": {"phase": phase, "qosClass": qos},
            }))
        };
        let pods = [
            pod("Running", "Burstable", "500m"),
            pod("Pending", "BestEffort", "1"),
            pod("Succeeded", "Burstable", "5"),
        ];
        let hard = json!({"pods": "5", "cpu": "4", "requests.memory": "8Gi", "secrets": "2"});
        let hard = hard.as_object().unwrap();
        let all = used(hard, &of_pods(&pods, &json!({})));
        assert_eq!(
            Value::Object(all),
            json!({"pods": "2", "cpu": "1700m", "requests.memory": "2Gi", "secrets": "0"})
        );
        let scoped = json!({"spec": {"scopes": ["NotBestEffort"]}});
        let some = used(hard, &of_pods(&pods, &scoped));
        assert_eq!((&some["pods"], &some["cpu"]), (&json!("1"), &json!("700m")));
    }

    #[test]
    fn node_ports_are_counted_one_by_one() {
        let services = [
            Arc::new(
                json!({"spec": {"type": "NodePort", "ports": [{"nodePort": 30001}, {"nodePort": 30002}]}}),
            ),
            Arc::new(json!({"spec": {"type": "ClusterIP", "ports": [{"port": 1}]}})),
        ];
        let usage = of_services(&services);
        assert_eq!(
            (usage["services"], usage["services.nodeports"]),
            (2000, 2000)
        );
    }
}
