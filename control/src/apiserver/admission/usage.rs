//! What objects count for in a ResourceQuota.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::resources::{Side, amounts, items, of_pod};
use crate::apiserver::object::text;
use crate::apiserver::schema::quantity::Quantity;

/// Amounts by the name under which a quota limits them.
pub type Usage = BTreeMap<String, Quantity>;

/// Core resources that a quota limits by their bare plural, beside `count/PLURAL`.
const PLAIN_COUNTS: [&str; 6] = [
    "secrets",
    "configmaps",
    "persistentvolumeclaims",
    "replicationcontrollers",
    "resourcequotas",
    "services",
];
/// Requests that a quota also limits without the `requests.` in front.
const BARE_REQUESTS: [&str; 3] = ["cpu", "memory", "ephemeral-storage"];
const BY_STORAGE_CLASS: &str = ".storageclass.storage.k8s.io/";

/// Group and plural of the resource whose objects a name of `spec.hard` counts.
#[must_use]
pub fn counted(name: &str) -> (&str, &str) {
    if let Some(full) = name.strip_prefix("count/") {
        let (plural, group) = full.split_once('.').unwrap_or((full, ""));
        return (group, plural);
    }
    if PLAIN_COUNTS.contains(&name) {
        return ("", name);
    }
    if name == "requests.storage" || name.contains(BY_STORAGE_CLASS) {
        return ("", "persistentvolumeclaims");
    }
    if name.starts_with("services.") {
        return ("", "services");
    }
    ("", "pods")
}

/// What one object of a resource counts for under this quota.
#[must_use]
pub fn of(group: &str, plural: &str, object: &Value, quota: &Value) -> Usage {
    let mut usage = Usage::new();
    let core = group.is_empty();
    let is_pod = core && plural == "pods";
    if is_pod {
        if !in_scope(object, quota) {
            return usage;
        }
    } else if is_scoped(quota) {
        return usage;
    }
    let one = Quantity::whole(1);
    let full = if core {
        format!("count/{plural}")
    } else {
        format!("count/{plural}.{group}")
    };
    usage.insert(full, one);
    if core && PLAIN_COUNTS.contains(&plural) {
        usage.insert(plural.to_owned(), one);
    }
    match plural {
        "pods" if core => pod(object, &mut usage),
        "services" if core => service(object, &mut usage),
        "persistentvolumeclaims" if core => claim(object, &mut usage),
        _ => {}
    }
    usage
}

/// Adds up.
pub fn add(total: &mut Usage, part: Usage) {
    for (name, amount) in part {
        let slot = total.entry(name).or_insert_with(Quantity::zero);
        *slot = *slot + amount;
    }
}

/// `status.used` for exactly the names that the quota limits.
#[must_use]
pub fn used(hard: &Map<String, Value>, usage: &Usage) -> Map<String, Value> {
    let amount = |name: &String| usage.get(name).copied().unwrap_or_else(Quantity::zero);
    hard.keys()
        .map(|name| (name.clone(), amount(name).to_string().into()))
        .collect()
}

/// A finished pod uses nothing of its node any more.
fn is_finished(pod: &Value) -> bool {
    matches!(text(pod, "/status/phase"), "Succeeded" | "Failed")
}

fn pod(pod: &Value, usage: &mut Usage) {
    if is_finished(pod) {
        return;
    }
    usage.insert("pods".into(), Quantity::whole(1));
    for (name, amount) in of_pod(pod, Side::Requests) {
        if BARE_REQUESTS.contains(&name.as_str()) || name.starts_with("hugepages-") {
            usage.insert(name.clone(), amount);
        }
        usage.insert(format!("requests.{name}"), amount);
    }
    for (name, amount) in of_pod(pod, Side::Limits) {
        usage.insert(format!("limits.{name}"), amount);
    }
}

fn service(service: &Value, usage: &mut Usage) {
    let kind = text(service, "/spec/type");
    let ports = items(&service["spec"], "ports").iter();
    let ports = ports.filter(|p| p["nodePort"].as_u64().unwrap_or(0) > 0);
    if matches!(kind, "NodePort" | "LoadBalancer") {
        let ports = i64::try_from(ports.count()).unwrap_or(i64::MAX);
        usage.insert("services.nodeports".into(), Quantity::whole(ports));
    }
    if kind == "LoadBalancer" {
        usage.insert("services.loadbalancers".into(), Quantity::whole(1));
    }
}

fn claim(claim: &Value, usage: &mut Usage) {
    let class = text(claim, "/spec/storageClassName");
    let requests = amounts(claim.pointer("/spec/resources/requests"));
    if let Some(storage) = requests.get("storage") {
        usage.insert("requests.storage".into(), *storage);
        if !class.is_empty() {
            usage.insert(
                format!("{class}{BY_STORAGE_CLASS}requests.storage"),
                *storage,
            );
        }
    }
    if !class.is_empty() {
        let name = format!("{class}{BY_STORAGE_CLASS}persistentvolumeclaims");
        usage.insert(name, Quantity::whole(1));
    }
}

fn is_scoped(quota: &Value) -> bool {
    !items(&quota["spec"], "scopes").is_empty()
        || quota
            .pointer("/spec/scopeSelector/matchExpressions")
            .and_then(Value::as_array)
            .is_some_and(|s| !s.is_empty())
}

/// Whether a pod falls under all scopes of a quota.
#[must_use]
pub fn in_scope(pod: &Value, quota: &Value) -> bool {
    let best_effort = text(pod, "/status/qosClass") == "BestEffort";
    let limited = pod["spec"]["activeDeadlineSeconds"].is_number();
    let by_name = |scope: &str| match scope {
        "BestEffort" => best_effort,
        "NotBestEffort" => !best_effort,
        "Terminating" => limited,
        "NotTerminating" => !limited,
        "CrossNamespacePodAffinity" => looks_into_other_namespaces(pod),
        _ => true,
    };
    let by_class = |s: &Value| {
        let class = text(pod, "/spec/priorityClassName");
        let named = items(s, "values").iter().any(|v| v == class);
        match text(s, "/operator") {
            "In" => named,
            "NotIn" => !named,
            "Exists" => !class.is_empty(),
            "DoesNotExist" => class.is_empty(),
            _ => false,
        }
    };
    let mut scopes = items(&quota["spec"], "scopes").iter();
    let selectors = quota.pointer("/spec/scopeSelector/matchExpressions");
    let mut selectors = selectors.and_then(Value::as_array).into_iter().flatten();
    scopes.all(|s| by_name(s.as_str().unwrap_or_default()))
        && selectors.all(|s| match text(s, "/scopeName") {
            "PriorityClass" => by_class(s),
            scope => by_name(scope),
        })
}

fn looks_into_other_namespaces(pod: &Value) -> bool {
    ["podAffinity", "podAntiAffinity"].iter().any(|kind| {
        let affinity = &pod["spec"]["affinity"][kind];
        let required = items(affinity, "requiredDuringSchedulingIgnoredDuringExecution").iter();
        let preferred = items(affinity, "preferredDuringSchedulingIgnoredDuringExecution").iter();
        required
            .chain(preferred.map(|p| &p["podAffinityTerm"]))
            .any(|t| !items(t, "namespaces").is_empty() || t["namespaceSelector"].is_object())
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn total(plural: &str, objects: &[Value], quota: &Value) -> Usage {
        let mut usage = Usage::new();
        for object in objects {
            add(&mut usage, of("", plural, object, quota));
        }
        usage
    }

    #[test]
    fn pods_count_by_scope_and_resource() {
        let pod = |phase: &str, qos: &str, cpu: &str| {
            json!({
                "spec": {"containers": [{"resources": {"requests": {"cpu": cpu, "memory": "1Gi"}}}],
                    "initContainers": [{"resources": {"requests": {"cpu": "700m"}}}]},
                "status": {"phase": phase, "qosClass": qos},
            })
        };
        let pods = [
            pod("Running", "Burstable", "500m"),
            pod("Pending", "BestEffort", "1"),
            pod("Succeeded", "Burstable", "5"),
        ];
        let hard = json!({"pods": "5", "cpu": "4", "requests.memory": "8Gi", "secrets": "2", "count/pods": "9"});
        let hard = hard.as_object().unwrap();
        let all = used(hard, &total("pods", &pods, &json!({})));
        assert_eq!(
            Value::Object(all),
            json!({"pods": "2", "cpu": "1700m", "requests.memory": "2Gi", "secrets": "0", "count/pods": "3"})
        );
        let scoped = json!({"spec": {"scopes": ["NotBestEffort"]}});
        let some = used(hard, &total("pods", &pods, &scoped));
        assert_eq!((&some["pods"], &some["cpu"]), (&json!("1"), &json!("700m")));
    }

    #[test]
    fn node_ports_are_counted_one_by_one() {
        let services = [
            json!({"spec": {"type": "NodePort", "ports": [{"nodePort": 30001}, {"nodePort": 30002}]}}),
            json!({"spec": {"type": "ClusterIP", "ports": [{"port": 1}]}}),
        ];
        let usage = total("services", &services, &json!({}));
        let amount = |name: &str| usage[name].to_string();
        assert_eq!(
            (amount("services"), amount("services.nodeports")),
            ("2".into(), "2".into())
        );
    }

    #[test]
    fn claims_count_by_storage_class() {
        let claim = json!({"spec": {"storageClassName": "fast", "resources": {"requests": {"storage": "2Gi"}}}});
        let usage = of("", "persistentvolumeclaims", &claim, &json!({}));
        let class = "fast.storageclass.storage.k8s.io/requests.storage";
        assert_eq!(
            (usage["requests.storage"], usage[class]),
            (usage[class], usage["requests.storage"])
        );
        assert_eq!(usage[class].to_string(), "2Gi");
    }

    #[test]
    fn every_name_has_its_resource() {
        for (name, want) in [
            ("count/deployments.apps", ("apps", "deployments")),
            ("count/secrets", ("", "secrets")),
            ("services.nodeports", ("", "services")),
            ("requests.storage", ("", "persistentvolumeclaims")),
            (
                "gold.storageclass.storage.k8s.io/persistentvolumeclaims",
                ("", "persistentvolumeclaims"),
            ),
            ("requests.cpu", ("", "pods")),
            ("pods", ("", "pods")),
        ] {
            assert_eq!(counted(name), want, "{name}");
        }
    }
}
