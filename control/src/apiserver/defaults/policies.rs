//! Network policies, roles, autoscalers, limits, webhooks, definitions.

use serde_json::{Map, Value, json};

use super::{items, member, set, set_in, text};

const RBAC_GROUP: &str = "rbac.authorization.k8s.io";
/// Average cpu use, in percent of the request, that an autoscaler without metrics aims at.
const CPU_UTILIZATION: i64 = 80;
const WEBHOOK_TIMEOUT_SECONDS: i64 = 10;

/// Defaults of structs that stand in several kinds.
pub(super) fn of_type(name: &str, object: &mut Map<String, Value>) {
    match name {
        "RoleRef" => set(object, "apiGroup", RBAC_GROUP),
        "Subject" if matches!(text(object, "kind"), "User" | "Group") => {
            set(object, "apiGroup", RBAC_GROUP);
        }
        "LimitRangeItem" if text(object, "type") == "Container" => limit_range_item(object),
        "IngressClassParametersReference" => set(object, "scope", "Cluster"),
        "ValidatingWebhook" | "MutatingWebhook" => {
            set(object, "failurePolicy", "Fail");
            set(object, "matchPolicy", "Equivalent");
            set(object, "namespaceSelector", json!({}));
            set(object, "objectSelector", json!({}));
            set(object, "timeoutSeconds", WEBHOOK_TIMEOUT_SECONDS);
            if name == "MutatingWebhook" {
                set(object, "reinvocationPolicy", "Never");
            }
        }
        "RuleWithOperations" | "NamedRuleWithOperations" => set(object, "scope", "*"),
        "ValidatingAdmissionPolicySpec" => set(object, "failurePolicy", "Fail"),
        "MatchResources" => {
            set(object, "matchPolicy", "Equivalent");
            set(object, "namespaceSelector", json!({}));
            set(object, "objectSelector", json!({}));
        }
        "CSIDriverSpec" => {
            set(object, "attachRequired", true);
            set(object, "podInfoOnMount", false);
            set(object, "storageCapacity", false);
            set(object, "fsGroupPolicy", "ReadWriteOnceWithFSType");
            set(object, "volumeLifecycleModes", json!(["Persistent"]));
            set(object, "requiresRepublish", false);
        }
        _ => {}
    }
}

/// Defaults follow from bounds: the default limit is the maximum, the default request the default limit, else the
/// minimum.
fn limit_range_item(item: &mut Map<String, Value>) {
    for (target, source) in [
        ("default", "max"),
        ("defaultRequest", "default"),
        ("defaultRequest", "min"),
    ] {
        let Some(amounts) = item.get(source).and_then(Value::as_object).cloned() else {
            continue;
        };
        for (name, amount) in amounts {
            set_in(item, target, &name, amount);
        }
    }
}

pub(super) fn network_policy(object: &mut Map<String, Value>) {
    let spec = member(object, "spec");
    let has_egress = spec
        .get("egress")
        .and_then(Value::as_array)
        .is_some_and(|rules| !rules.is_empty());
    let types = if has_egress {
        json!(["Ingress", "Egress"])
    } else {
        json!(["Ingress"])
    };
    set(spec, "policyTypes", types);
}

pub(super) fn autoscaler(version: &str, object: &mut Map<String, Value>) {
    let spec = member(object, "spec");
    set(spec, "minReplicas", 1);
    if version == "v1" {
        return;
    }
    set(
        spec,
        "metrics",
        json!([{"type": "Resource", "resource": {
            "name": "cpu", "target": {"type": "Utilization", "averageUtilization": CPU_UTILIZATION}}}]),
    );
    if let Some(behavior) = spec.get_mut("behavior").and_then(Value::as_object_mut) {
        let up = member(behavior, "scaleUp");
        set(up, "stabilizationWindowSeconds", 0);
        set(up, "selectPolicy", "Max");
        set(
            up,
            "policies",
            json!([{"type": "Pods", "value": 4, "periodSeconds": 15},
                   {"type": "Percent", "value": 100, "periodSeconds": 15}]),
        );
        let down = member(behavior, "scaleDown");
        set(down, "selectPolicy", "Max");
        set(
            down,
            "policies",
            json!([{"type": "Percent", "value": 100, "periodSeconds": 15}]),
        );
    }
}

/// Names of a custom resource that follow from its kind.
pub(super) fn definition(object: &mut Map<String, Value>) {
    let spec = member(object, "spec");
    set_in(spec, "conversion", "strategy", "None");
    let names = member(spec, "names");
    let kind = text(names, "kind").to_owned();
    if !kind.is_empty() {
        set(names, "singular", kind.to_lowercase());
        set(names, "listKind", format!("{kind}List"));
    }
    for version in items(spec, "versions") {
        for column in items(version, "additionalPrinterColumns") {
            set(column, "priority", 0);
        }
    }
}
