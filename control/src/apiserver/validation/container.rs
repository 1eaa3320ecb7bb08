//! Containers of pods.

use std::collections::BTreeSet;

use super::cursor::At;
use super::names;
use crate::apiserver::schema::quantity::Quantity;

pub(super) const PROTOCOLS: &[&str] = &["SCTP", "TCP", "UDP"];
const PULL_POLICIES: &[&str] = &["Always", "IfNotPresent", "Never"];
const MESSAGE_POLICIES: &[&str] = &["FallbackToLogsOnError", "File"];
const HANDLERS: &[&str] = &["exec", "httpGet", "tcpSocket", "grpc", "sleep"];

/// What surrounds a container.
pub(super) struct Scope<'a> {
    pub(super) volumes: &'a BTreeSet<String>,
    pub(super) init: bool,
}

pub(super) fn container(at: &At<'_>, scope: &Scope<'_>) {
    let name = at.get("name");
    if name.needed() {
        name.each_invalid(names::label(name.text()));
    }
    at.get("image").needed();
    at.get("imagePullPolicy").needed_one_of(PULL_POLICIES);
    at.get("terminationMessagePolicy")
        .needed_one_of(MESSAGE_POLICIES);
    ports(&at.get("ports"));
    environment(at);
    mounts(&at.get("volumeMounts"), scope.volumes);
    resources(&at.get("resources"));
    let sidecar = at.get("restartPolicy").text() == "Always";
    if scope.init {
        at.get("restartPolicy")
            .one_of(&["Always", "OnFailure", "Never"]);
    }
    for probe_name in ["livenessProbe", "readinessProbe", "startupProbe"] {
        let found = at.get(probe_name);
        if !found.exists() {
            continue;
        }
        if scope.init && !sidecar {
            found.forbidden("may not be set for init containers without restartPolicy=Always");
        }
        probe(&found);
        let success = found.get("successThreshold");
        if probe_name != "readinessProbe" && success.int().is_some_and(|n| n != 1) {
            success.invalid("must be 1");
        }
    }
    for hook in ["postStart", "preStop"] {
        let found = at.get("lifecycle").get(hook);
        if found.exists() {
            handler(&found);
        }
    }
}

fn ports(list: &At<'_>) {
    let mut seen = BTreeSet::new();
    for port in list.items() {
        let name = port.get("name");
        if !name.is_empty() {
            let errors = names::port_name(name.text());
            if errors.is_empty() && !seen.insert(name.text()) {
                name.duplicate();
            }
            name.each_invalid(errors);
        }
        let number = port.get("containerPort");
        if number.int().unwrap_or(0) == 0 {
            number.required("");
        } else {
            number.port();
        }
        if port.get("hostPort").int() != Some(0) {
            port.get("hostPort").port();
        }
        port.get("protocol").needed_one_of(PROTOCOLS);
    }
}

/// Two containers of a pod cannot claim one port of the node.
pub(super) fn host_ports(containers: &At<'_>) {
    let mut seen = BTreeSet::new();
    for port in containers
        .items()
        .iter()
        .flat_map(|c| c.get("ports").items())
    {
        let number = port.get("hostPort").int().unwrap_or(0);
        let key = (
            number,
            port.get("protocol").text(),
            port.get("hostIP").text(),
        );
        if number != 0 && !seen.insert(key) {
            port.get("hostPort").duplicate();
        }
    }
}

fn environment(container: &At<'_>) {
    for variable in container.get("env").items() {
        let name = variable.get("name");
        if name.needed() {
            name.each_invalid(names::environment_name(name.text()));
        }
        let from = variable.get("valueFrom");
        if !from.exists() {
            continue;
        }
        let sources = [
            "fieldRef",
            "resourceFieldRef",
            "configMapKeyRef",
            "secretKeyRef",
            "fileKeyRef",
        ];
        match sources.iter().filter(|s| from.get(s).exists()).count() {
            0 => from.invalid("must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef` or `fileKeyRef`"),
            1 if !variable.get("value").is_empty() => {
                from.invalid("may not be specified when `value` is not empty");
            }
            1 => {}
            _ => from.invalid("may not have more than one field specified at a time"),
        }
        for source in ["configMapKeyRef", "secretKeyRef"] {
            if from.get(source).exists() {
                from.get(source).get("name").needed();
                from.get(source).get("key").needed();
            }
        }
        if from.get("fieldRef").exists() {
            from.get("fieldRef").get("fieldPath").needed();
        }
    }
    for source in container.get("envFrom").items() {
        let kinds = ["configMapRef", "secretRef"];
        match kinds.iter().filter(|k| source.get(k).exists()).count() {
            0 => source.invalid("must specify one of: `configMapRef` or `secretRef`"),
            1 => {}
            _ => source.invalid("may not have more than one field specified at a time"),
        }
    }
}

fn mounts(list: &At<'_>, volumes: &BTreeSet<String>) {
    let mut paths = BTreeSet::new();
    for mount in list.items() {
        let name = mount.get("name");
        if name.needed() && !volumes.contains(name.text()) {
            name.not_found();
        }
        let path = mount.get("mountPath");
        if path.needed() && !paths.insert(path.text()) {
            path.invalid("must be unique");
        }
        for field in ["subPath", "subPathExpr"] {
            let sub = mount.get(field);
            if sub.text().starts_with('/') {
                sub.invalid("must be a relative path");
            } else if sub.text().split('/').any(|part| part == "..") {
                sub.invalid("must not contain '..'");
            }
        }
    }
}

fn resources(resources: &At<'_>) {
    let (limits, requests) = (resources.get("limits"), resources.get("requests"));
    for side in [&limits, &requests] {
        for (name, at) in side.entries() {
            resource_name(name, &at);
            amount(name, &at);
        }
    }
    for (name, request) in requests.entries() {
        let limit = limits.key(name);
        let parsed = |at: &At<'_>| at.value().and_then(|v| Quantity::from_json(v).ok());
        // Extended resources and huge pages cannot be overcommitted.
        let whole = name.starts_with("hugepages-") || is_extended(name);
        match (parsed(&request), parsed(&limit)) {
            (Some(wanted), Some(most)) if whole && wanted != most => requests.invalid_value(
                wanted.to_string(),
                format!("must be equal to {name} limit of {most}"),
            ),
            (Some(wanted), Some(most)) if wanted > most => requests.invalid_value(
                wanted.to_string(),
                format!("must be less than or equal to {name} limit of {most}"),
            ),
            (Some(_), None) if whole => {
                limits.required("Limit must be set for non overcommitable resources");
            }
            _ => {}
        }
    }
}

fn is_extended(name: &str) -> bool {
    name.contains('/')
        && !name
            .split('/')
            .next()
            .is_some_and(|p| p.ends_with("kubernetes.io"))
}

fn resource_name(name: &str, at: &At<'_>) {
    for error in names::qualified(name) {
        at.invalid_value(name, error);
    }
    let known = ["cpu", "memory", "ephemeral-storage", "storage"].contains(&name)
        || name.starts_with("hugepages-");
    if !name.contains('/') && !known && names::qualified(name).is_empty() {
        at.invalid_value(name, "must be a standard resource for containers");
    }
}

fn amount(name: &str, at: &At<'_>) {
    let Some(quantity) = at.value().and_then(|v| Quantity::from_json(v).ok()) else {
        return;
    };
    if quantity.is_negative() {
        at.invalid("must be greater than or equal to 0");
    } else if is_extended(name) && !quantity.is_integer() {
        at.invalid("must be an integer");
    }
}

fn probe(probe: &At<'_>) {
    handler(probe);
    for field in [
        "initialDelaySeconds",
        "timeoutSeconds",
        "periodSeconds",
        "successThreshold",
        "failureThreshold",
    ] {
        probe.get(field).non_negative();
    }
    let grace = probe.get("terminationGracePeriodSeconds");
    if grace.int().is_some_and(|s| s <= 0) {
        grace.invalid("must be greater than 0");
    }
}

fn handler(at: &At<'_>) {
    let found: Vec<&&str> = HANDLERS.iter().filter(|h| at.get(h).exists()).collect();
    match found.as_slice() {
        [] => at.required("must specify a handler type"),
        [_] => {}
        [_, rest @ ..] => {
            for extra in rest {
                at.get(extra)
                    .forbidden("may not specify more than 1 handler type");
            }
        }
    }
    let exec = at.get("exec");
    if exec.exists() && exec.get("command").is_empty() {
        exec.get("command").required("");
    }
    let http = at.get("httpGet");
    if http.exists() {
        http.get("path").needed();
        port_or_name(&http.get("port"));
        http.get("scheme").needed_one_of(&["HTTP", "HTTPS"]);
    }
    if at.get("tcpSocket").exists() {
        port_or_name(&at.get("tcpSocket").get("port"));
    }
    if at.get("grpc").exists() {
        at.get("grpc").get("port").port();
    }
}

/// A port by number or by the name of a container port.
pub(super) fn port_or_name(port: &At<'_>) {
    match port.int() {
        Some(_) => port.port(),
        None if port.value().is_some_and(serde_json::Value::is_string) => {
            port.each_invalid(names::port_name(port.text()));
        }
        None => port.required(""),
    }
}
