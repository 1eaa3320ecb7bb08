//! The smaller kinds: access, budgets, scaling, classes, nodes, quotas.

use ipnetwork::IpNetwork;

use super::cursor::At;
use super::metadata::label_selector;
use super::names;
use super::workloads::count_or_percent;
use crate::apiserver::admission::pod_security;
use crate::apiserver::schema::quantity::Quantity;

const RBAC_GROUP: &str = "rbac.authorization.k8s.io";
/// Larger values are for the system's own classes.
const MAX_USER_PRIORITY: i64 = 1_000_000_000;

pub(super) fn role(root: &At<'_>, namespaced: bool) {
    for rule in root.get("rules").items() {
        if rule.get("verbs").is_empty() {
            rule.get("verbs")
                .required("verbs must contain at least one value");
        }
        if !rule.get("nonResourceURLs").is_empty() {
            if namespaced {
                rule.get("nonResourceURLs")
                    .invalid("namespaced rules cannot apply to non-resource URLs");
            }
            if !rule.get("apiGroups").is_empty() || !rule.get("resources").is_empty() {
                rule.get("nonResourceURLs")
                    .invalid("rules cannot apply to both regular resources and non-resource URLs");
            }
            continue;
        }
        if rule.get("apiGroups").items().is_empty() {
            rule.get("apiGroups")
                .required("resource rules must supply at least one api group");
        }
        if rule.get("resources").is_empty() {
            rule.get("resources")
                .required("resource rules must supply at least one resource");
        }
    }
}

pub(super) fn role_binding(root: &At<'_>, namespaced: bool) {
    let reference = root.get("roleRef");
    reference.get("apiGroup").one_of(&[RBAC_GROUP]);
    let kinds: &[&str] = if namespaced {
        &["Role", "ClusterRole"]
    } else {
        &["ClusterRole"]
    };
    reference.get("kind").needed_one_of(kinds);
    let name = reference.get("name");
    if name.needed() {
        name.each_invalid(names::Rule::Segment.check(name.text()));
    }
    for subject in root.get("subjects").items() {
        subject.get("name").needed();
        match subject.get("kind").text() {
            "ServiceAccount" => {
                if !subject.get("apiGroup").is_empty() {
                    subject.get("apiGroup").not_supported(&[""]);
                }
                if !namespaced && subject.get("namespace").is_empty() {
                    subject.get("namespace").required("");
                }
            }
            "User" | "Group" => subject.get("apiGroup").one_of(&[RBAC_GROUP]),
            _ => subject
                .get("kind")
                .not_supported(&["ServiceAccount", "User", "Group"]),
        }
    }
}

pub(super) fn role_binding_update(new: &At<'_>, old: &At<'_>) {
    if new.get("roleRef").value() != old.get("roleRef").value() {
        new.get("roleRef").invalid("cannot change roleRef");
    }
}

pub(super) fn disruption_budget(root: &At<'_>) {
    let spec = root.get("spec");
    let (least, most) = (spec.get("minAvailable"), spec.get("maxUnavailable"));
    if least.exists() && most.exists() {
        spec.invalid("minAvailable and maxUnavailable cannot be both set");
    }
    count_or_percent(&least);
    count_or_percent(&most);
    label_selector(&spec.get("selector"));
    spec.get("unhealthyPodEvictionPolicy")
        .one_of(&["AlwaysAllow", "IfHealthyBudget"]);
}

pub(super) fn autoscaler(root: &At<'_>) {
    let spec = root.get("spec");
    let (least, most) = (spec.get("minReplicas"), spec.get("maxReplicas"));
    if least.int().is_some_and(|n| n < 1) {
        least.invalid("must be greater than or equal to 1");
    }
    if most.int().unwrap_or(0) < 1 {
        most.invalid("must be greater than 0");
    } else if least.int() > most.int() {
        most.invalid("must be greater than or equal to `minReplicas`");
    }
    spec.get("scaleTargetRef").get("kind").needed();
    spec.get("scaleTargetRef").get("name").needed();
}

fn network(at: &At<'_>) -> Option<IpNetwork> {
    let parsed = at
        .text()
        .contains('/')
        .then(|| at.text().parse().ok())
        .flatten();
    if parsed.is_none() {
        at.invalid("must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)");
    }
    parsed
}

pub(super) fn priority_class(root: &At<'_>) {
    let value = root.get("value");
    let system = root
        .get("metadata")
        .get("name")
        .text()
        .starts_with("system-");
    if value.int().is_some_and(|v| v > MAX_USER_PRIORITY) && !system {
        value.forbidden(&format!(
            "maximum allowed value of a user defined priority is {MAX_USER_PRIORITY}"
        ));
    }
    root.get("preemptionPolicy")
        .one_of(&["Never", "PreemptLowerPriority"]);
}

pub(super) fn priority_class_update(new: &At<'_>, old: &At<'_>) {
    for field in ["value", "preemptionPolicy"] {
        if new.get(field).value() != old.get(field).value() {
            new.get(field).forbidden("may not be changed in an update.");
        }
    }
}

pub(super) fn node(root: &At<'_>) {
    for taint in root.get("spec").get("taints").items() {
        let key = taint.get("key");
        key.each_invalid(names::qualified(key.text()));
        taint
            .get("value")
            .each_invalid(names::label_value(taint.get("value").text()));
        taint
            .get("effect")
            .needed_one_of(&["NoSchedule", "PreferNoSchedule", "NoExecute"]);
    }
    for cidr in root.get("spec").get("podCIDRs").items() {
        network(&cidr);
    }
}

pub(super) fn node_update(new: &At<'_>, old: &At<'_>) {
    let (new, old) = (new.get("spec"), old.get("spec"));
    for field in ["podCIDRs", "providerID"] {
        if !old.get(field).is_empty() && new.get(field).value() != old.get(field).value() {
            new.get(field)
                .forbidden("node updates may not change this field once it is set");
        }
    }
}

pub(super) fn lease(root: &At<'_>) {
    let spec = root.get("spec");
    let duration = spec.get("leaseDurationSeconds");
    if duration.int().is_some_and(|s| s <= 0) {
        duration.invalid("must be greater than 0");
    }
    let transitions = spec.get("leaseTransitions");
    transitions.non_negative();
}

/// A level that nobody knows would protect nothing.
pub(super) fn namespace(root: &At<'_>) {
    let labels = root.get("metadata").get("labels");
    for (label, value, detail) in root
        .value()
        .map(pod_security::bad_labels)
        .unwrap_or_default()
    {
        labels.key(&label).invalid_value(value, detail);
    }
}

pub(super) fn quota(root: &At<'_>) {
    for (name, amount) in root.get("spec").get("hard").entries() {
        for error in names::qualified(name) {
            amount.invalid_value(name, error);
        }
        if amount
            .value()
            .is_some_and(|v| Quantity::from_json(v).is_ok_and(Quantity::is_negative))
        {
            amount.invalid("must be greater than or equal to 0");
        }
    }
}

pub(super) fn limit_range(root: &At<'_>) {
    for limit in root.get("spec").get("limits").items() {
        limit.get("type").needed();
        let bound = |side: &str, name: &str| {
            let at = limit.get(side).key(name);
            at.value()
                .and_then(|v| Quantity::from_json(v).ok())
                .map(|q| (at, q))
        };
        // Each pair must not cross: the smaller side, the larger side.
        for (low, high) in [
            ("min", "max"),
            ("min", "default"),
            ("default", "max"),
            ("defaultRequest", "default"),
            ("min", "defaultRequest"),
        ] {
            for (name, _) in limit.get(low).entries() {
                if let (Some((at, small)), Some((_, large))) = (bound(low, name), bound(high, name))
                    && small > large
                {
                    at.invalid(format!(
                        "{low} value {small} is greater than {high} value {large}"
                    ));
                }
            }
        }
    }
}

pub(super) fn claim(root: &At<'_>) {
    let spec = root.get("spec");
    let modes = spec.get("accessModes");
    if modes.is_empty() {
        modes.required("at least 1 access mode is required");
    }
    for mode in modes.items() {
        mode.one_of(&[
            "ReadOnlyMany",
            "ReadWriteMany",
            "ReadWriteOnce",
            "ReadWriteOncePod",
        ]);
    }
    if !spec
        .get("resources")
        .get("requests")
        .key("storage")
        .exists()
    {
        spec.get("resources").key("storage").required("");
    }
    label_selector(&spec.get("selector"));
}

pub(super) fn storage_class(root: &At<'_>) {
    root.get("provisioner").needed();
    root.get("reclaimPolicy").one_of(&["Delete", "Retain"]);
    root.get("volumeBindingMode")
        .one_of(&["Immediate", "WaitForFirstConsumer"]);
}

pub(super) fn ingress(root: &At<'_>) {
    let spec = root.get("spec");
    if spec.get("rules").is_empty() && !spec.get("defaultBackend").exists() {
        spec.invalid("either `defaultBackend` or `rules` must be specified");
    }
    for rule in spec.get("rules").items() {
        let host = rule.get("host");
        if !host.is_empty() {
            host.each_invalid(names::subdomain(host.text().trim_start_matches("*.")));
        }
        if !rule.get("http").exists() {
            continue;
        }
        rule.get("http").get("paths").needed();
        for path in rule.get("http").get("paths").items() {
            path.get("pathType")
                .needed_one_of(&["Exact", "ImplementationSpecific", "Prefix"]);
            let text = path.get("path");
            if path.get("pathType").text() != "ImplementationSpecific"
                && !text.text().starts_with('/')
            {
                text.invalid("must be an absolute path");
            }
        }
    }
}
