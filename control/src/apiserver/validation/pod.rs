//! Pods and pod templates.

use std::collections::BTreeSet;

use serde_json::Value;

use super::container::{Scope, container, host_ports};
use super::cursor::At;
use super::metadata::{annotations, label_selector, labels};
use super::names;

const RESTART_POLICIES: &[&str] = &["Always", "OnFailure", "Never"];
const DNS_POLICIES: &[&str] = &["ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"];
const EFFECTS: &[&str] = &["NoSchedule", "PreferNoSchedule", "NoExecute"];
/// What the API documentation lets change on a pod.
const UPDATABLE: &str = "`spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,\
                         `spec.tolerations` (only additions to existing tolerations),\
                         `spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)";

/// A pod template of a workload.
pub(super) fn template(template: &At<'_>) {
    labels(&template.get("metadata").get("labels"));
    annotations(&template.get("metadata").get("annotations"));
    spec(&template.get("spec"));
    if !template.get("spec").get("ephemeralContainers").is_empty() {
        template
            .get("spec")
            .get("ephemeralContainers")
            .forbidden("ephemeral containers not allowed in pod template");
    }
}

pub(super) fn spec(spec: &At<'_>) {
    let volumes = volumes(&spec.get("volumes"));
    let mut container_names = BTreeSet::new();
    let containers = spec.get("containers");
    containers.needed();
    for (list, init) in [(&containers, false), (&spec.get("initContainers"), true)] {
        for at in list.items() {
            container(
                &at,
                &Scope {
                    volumes: &volumes,
                    init,
                },
            );
            let name = at.get("name");
            if !name.is_empty() && !container_names.insert(name.text().to_owned()) {
                name.duplicate();
            }
        }
    }
    host_ports(&containers);
    spec.get("restartPolicy").needed_one_of(RESTART_POLICIES);
    spec.get("dnsPolicy").needed_one_of(DNS_POLICIES);
    if spec.get("dnsPolicy").text() == "None" && spec.get("dnsConfig").get("nameservers").is_empty()
    {
        spec.get("dnsConfig")
            .get("nameservers")
            .required("must provide at least one DNS nameserver when `dnsPolicy` is None");
    }
    spec.get("terminationGracePeriodSeconds").non_negative();
    spec.get("activeDeadlineSeconds")
        .in_range(1, i64::from(i32::MAX));
    labels(&spec.get("nodeSelector"));
    for (field, rule) in [
        ("serviceAccountName", names::Rule::Subdomain),
        ("nodeName", names::Rule::Subdomain),
        ("priorityClassName", names::Rule::Subdomain),
        ("runtimeClassName", names::Rule::Subdomain),
        ("hostname", names::Rule::Label),
        ("subdomain", names::Rule::Label),
    ] {
        let name = spec.get(field);
        if !name.is_empty() {
            name.each_invalid(rule.check(name.text()));
        }
    }
    spec.get("preemptionPolicy")
        .one_of(&["Never", "PreemptLowerPriority"]);
    spec.get("tolerations").items().iter().for_each(toleration);
    affinity(&spec.get("affinity"));
    spread(&spec.get("topologySpreadConstraints"));
    for (index, gate) in spec.get("schedulingGates").items().iter().enumerate() {
        gate.get("name")
            .each_invalid(names::qualified(gate.get("name").text()));
        let earlier = &spec.get("schedulingGates").items()[..index];
        if earlier
            .iter()
            .any(|g| g.get("name").text() == gate.get("name").text())
        {
            gate.duplicate();
        }
    }
}

/// Names of the volumes, for the mounts that refer to them.
fn volumes(list: &At<'_>) -> BTreeSet<String> {
    let mut seen = BTreeSet::new();
    for volume in list.items() {
        let name = volume.get("name");
        if name.needed() {
            name.each_invalid(names::label(name.text()));
            if !seen.insert(name.text().to_owned()) {
                name.duplicate();
            }
        }
        let sources: Vec<&str> = volume
            .value()
            .and_then(Value::as_object)
            .map(|m| {
                m.keys()
                    .map(String::as_str)
                    .filter(|k| *k != "name")
                    .collect()
            })
            .unwrap_or_default();
        if sources.is_empty() {
            volume.required("must specify a volume type");
        }
        for extra in sources.iter().skip(1) {
            volume
                .get(extra)
                .forbidden("may not specify more than 1 volume type");
        }
        volume_source(&volume);
    }
    seen
}

fn volume_source(volume: &At<'_>) {
    for (source, field) in [
        ("hostPath", "path"),
        ("secret", "secretName"),
        ("configMap", "name"),
        ("persistentVolumeClaim", "claimName"),
        ("nfs", "server"),
        ("csi", "driver"),
    ] {
        let at = volume.get(source);
        if at.exists() {
            at.get(field).needed();
        }
    }
    for source in ["secret", "configMap", "downwardAPI", "projected"] {
        let mode = volume.get(source).get("defaultMode");
        if mode.int().is_some_and(|m| !(0..=0o777).contains(&m)) {
            mode.invalid("must be a number between 0 and 0777 (octal), both inclusive");
        }
        for item in volume.get(source).get("items").items() {
            relative_path(&item.get("path"));
            if source != "downwardAPI" {
                item.get("key").needed();
            }
        }
    }
    let host_type = volume.get("hostPath").get("type");
    host_type.one_of(&[
        "BlockDevice",
        "CharDevice",
        "Directory",
        "DirectoryOrCreate",
        "File",
        "FileOrCreate",
        "Socket",
    ]);
    if volume
        .get("hostPath")
        .get("path")
        .text()
        .split('/')
        .any(|part| part == "..")
    {
        volume
            .get("hostPath")
            .get("path")
            .invalid("must not contain '..'");
    }
}

fn relative_path(path: &At<'_>) {
    if !path.needed() {
        return;
    }
    if path.text().starts_with('/') {
        path.invalid("must be a relative path");
    } else if path.text().split('/').any(|part| part == "..") {
        path.invalid("must not contain '..'");
    }
}

fn toleration(toleration: &At<'_>) {
    let key = toleration.get("key");
    let operator = toleration.get("operator");
    let value = toleration.get("value");
    if key.is_empty() {
        if operator.text() != "Exists" {
            operator.invalid("operator must be Exists when `key` is empty, which means \"match all values and all keys\"");
        }
    } else {
        key.each_invalid(names::qualified(key.text()));
    }
    match operator.text() {
        "" | "Equal" => value.each_invalid(names::label_value(value.text())),
        "Exists" if !value.is_empty() => {
            value.invalid("value must be empty when `operator` is 'Exists'")
        }
        "Exists" | "Lt" | "Gt" => {}
        _ => operator.not_supported(&["Equal", "Exists"]),
    }
    toleration.get("effect").one_of(EFFECTS);
    let seconds = toleration.get("tolerationSeconds");
    if seconds.exists() && toleration.get("effect").text() != "NoExecute" {
        toleration
            .get("effect")
            .invalid("effect must be 'NoExecute' when `tolerationSeconds` is set");
    }
}

const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";
const PREFERRED: &str = "preferredDuringSchedulingIgnoredDuringExecution";

fn affinity(affinity: &At<'_>) {
    let node = affinity.get("nodeAffinity");
    let required = node.get(REQUIRED);
    if required.exists() {
        let terms = required.get("nodeSelectorTerms");
        if terms.is_empty() {
            terms.required("must have at least one node selector term");
        }
        terms.items().iter().for_each(node_term);
    }
    for preferred in node.get(PREFERRED).items() {
        preferred.get("weight").in_range(1, 100);
        node_term(&preferred.get("preference"));
    }
    for side in ["podAffinity", "podAntiAffinity"] {
        affinity
            .get(side)
            .get(REQUIRED)
            .items()
            .iter()
            .for_each(pod_term);
        for preferred in affinity.get(side).get(PREFERRED).items() {
            preferred.get("weight").in_range(1, 100);
            pod_term(&preferred.get("podAffinityTerm"));
        }
    }
}

fn node_term(term: &At<'_>) {
    for expression in term.get("matchExpressions").items() {
        let key = expression.get("key");
        key.each_invalid(names::qualified(key.text()));
        let (operator, values) = (expression.get("operator"), expression.get("values"));
        match operator.text() {
            "In" | "NotIn" if values.is_empty() => {
                values.required("must be specified when `operator` is 'In' or 'NotIn'");
            }
            "Exists" | "DoesNotExist" if !values.is_empty() => {
                values.forbidden(
                    "may not be specified when `operator` is 'Exists' or 'DoesNotExist'",
                );
            }
            "Gt" | "Lt" if values.items().len() != 1 => {
                values.required("must be specified single value when `operator` is 'Lt' or 'Gt'");
            }
            "In" | "NotIn" | "Exists" | "DoesNotExist" | "Gt" | "Lt" => {}
            _ => operator.invalid("not a valid selector operator"),
        }
    }
    for field in term.get("matchFields").items() {
        let key = field.get("key");
        if key.text() != "metadata.name" {
            key.invalid("not a valid field selector key");
        }
        if field.get("values").items().len() != 1 {
            field.get("values").required(
                "must be only one value when `operator` is 'In' or 'NotIn' for node field selector",
            );
        }
    }
}

fn pod_term(term: &At<'_>) {
    let key = term.get("topologyKey");
    if key.is_empty() {
        key.required("can not be empty");
    } else {
        key.each_invalid(names::qualified(key.text()));
    }
    label_selector(&term.get("labelSelector"));
    label_selector(&term.get("namespaceSelector"));
}

fn spread(list: &At<'_>) {
    for constraint in list.items() {
        let skew = constraint.get("maxSkew");
        if skew.int().unwrap_or(0) <= 0 {
            skew.invalid("must be greater than zero");
        }
        let key = constraint.get("topologyKey");
        if key.is_empty() {
            key.required("can not be empty");
        } else {
            key.each_invalid(names::qualified(key.text()));
        }
        constraint
            .get("whenUnsatisfiable")
            .needed_one_of(&["DoNotSchedule", "ScheduleAnyway"]);
        label_selector(&constraint.get("labelSelector"));
    }
}

/// Of a pod that exists only a few fields may change.
pub(super) fn update(new: &At<'_>, old: &At<'_>) {
    let (Some(mut wanted), Some(before)) = (new.value().cloned(), old.value()) else {
        return;
    };
    for list in ["containers", "initContainers"] {
        let (ours, theirs) = (new.get(list).items(), old.get(list).items());
        if ours.len() != theirs.len() {
            new.get(list)
                .forbidden("pod updates may not add or remove containers");
            return;
        }
        for (index, container) in theirs.iter().enumerate() {
            let image = container.get("image").value().cloned();
            if let (Some(slot), Some(image)) =
                (wanted.pointer_mut(&format!("/{list}/{index}/image")), image)
            {
                *slot = image;
            }
        }
    }
    let Value::Object(map) = &mut wanted else {
        return;
    };
    let gated = !old.get("schedulingGates").is_empty();
    let mut freed = vec!["activeDeadlineSeconds", "tolerations", "schedulingGates"];
    if gated {
        freed.extend(["nodeSelector", "affinity"]);
    }
    if old
        .get("terminationGracePeriodSeconds")
        .int()
        .is_some_and(|s| s < 0)
    {
        freed.push("terminationGracePeriodSeconds");
    }
    for field in freed {
        match before.get(field) {
            Some(value) => map.insert(field.to_owned(), value.clone()),
            None => map.shift_remove(field),
        };
    }
    deadline(new, old);
    kept_tolerations(new, old);
    for gate in new.get("schedulingGates").items() {
        let known = old
            .get("schedulingGates")
            .items()
            .iter()
            .any(|g| g.value() == gate.value());
        if !known {
            new.get("schedulingGates")
                .forbidden("only deletion is allowed, but found new scheduling gates");
        }
    }
    if &wanted != before {
        new.forbidden(&format!(
            "pod updates may not change fields other than {UPDATABLE}"
        ));
    }
}

fn deadline(new: &At<'_>, old: &At<'_>) {
    let (ours, theirs) = (
        new.get("activeDeadlineSeconds"),
        old.get("activeDeadlineSeconds"),
    );
    match (ours.int(), theirs.int()) {
        (Some(after), Some(before)) if after > before => {
            ours.invalid("must be less than or equal to previous value");
        }
        (None, Some(_)) => ours.invalid("must not update from a positive integer to nil value"),
        _ => {}
    }
}

fn kept_tolerations(new: &At<'_>, old: &At<'_>) {
    let ours = new.get("tolerations").items();
    for before in old.get("tolerations").items() {
        let same = |t: &At<'_>| {
            ["key", "operator", "value", "effect"]
                .iter()
                .all(|f| t.get(f).text() == before.get(f).text())
        };
        if !ours.iter().any(same) {
            new.get("tolerations")
                .forbidden("existing toleration can not be modified except its tolerationSeconds");
            return;
        }
    }
}
