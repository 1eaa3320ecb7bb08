//! Pods: Kubernetes JSON to the `PodSpec` that an agent runs.

use control_api::v1::{
    Container, ContainerPort, ContainerSecurity, DnsConfig, DnsOption, EnvFrom, EnvVar, ExecAction,
    GrpcAction, Handler, HostAlias, HttpGetAction, HttpHeader, KeyRef, PodSecurity, PodSpec, Probe,
    ResourceRef, Resources, RestartPolicy, TcpSocketAction, VolumeMount, env_var, handler,
};
use serde_json::Value;

use crate::quantity;
use crate::translate::{
    flag, items, micros, name, namespace, protocol, text, text_map, texts, unsigned,
};
use crate::volume;

/// core/v1: terminationGracePeriodSeconds when unset.
const DEFAULT_GRACE_S: i64 = 30;
/// core/v1 probe defaults.
const DEFAULT_PROBE_PERIOD_S: i32 = 10;
const DEFAULT_PROBE_FAILURES: i32 = 3;

/// A pod as its node needs it; `revision` is left zero.
pub(crate) fn pod_spec(object: &Value) -> PodSpec {
    let (meta, spec) = (&object["metadata"], &object["spec"]);
    PodSpec {
        namespace: namespace(object),
        name: name(object),
        uid: text(&meta["uid"]),
        labels: text_map(&meta["labels"]),
        annotations: text_map(&meta["annotations"]),
        init_containers: items(&spec["initContainers"]).map(container).collect(),
        containers: items(&spec["containers"]).map(container).collect(),
        volumes: items(&spec["volumes"]).map(volume::volume).collect(),
        restart_policy: restart_policy(&spec["restartPolicy"]).into(),
        termination_grace_period_s: spec["terminationGracePeriodSeconds"]
            .as_i64()
            .unwrap_or(DEFAULT_GRACE_S),
        host_network: flag(&spec["hostNetwork"]),
        host_pid: flag(&spec["hostPID"]),
        host_ipc: flag(&spec["hostIPC"]),
        share_process_namespace: flag(&spec["shareProcessNamespace"]),
        hostname: text(&spec["hostname"]),
        subdomain: text(&spec["subdomain"]),
        dns_policy: spec["dnsPolicy"]
            .as_str()
            .unwrap_or("ClusterFirst")
            .to_owned(),
        dns_config: spec["dnsConfig"]
            .is_object()
            .then(|| dns_config(&spec["dnsConfig"])),
        service_account: text(&spec["serviceAccountName"]),
        active_deadline_s: spec["activeDeadlineSeconds"].as_i64().unwrap_or_default(),
        security: Some(pod_security(&spec["securityContext"])),
        host_aliases: items(&spec["hostAliases"])
            .map(|alias| HostAlias {
                ip: text(&alias["ip"]),
                hostnames: texts(&alias["hostnames"]),
            })
            .collect(),
        deleting: meta["deletionTimestamp"].is_string(),
        deletion_grace_s: meta["deletionGracePeriodSeconds"]
            .as_i64()
            .unwrap_or_default(),
        revision: 0,
        enable_service_links: spec["enableServiceLinks"].as_bool().unwrap_or(true),
        created_at_us: micros(&meta["creationTimestamp"]),
    }
}

fn restart_policy(value: &Value) -> RestartPolicy {
    match value.as_str() {
        Some("OnFailure") => RestartPolicy::RestartOnFailure,
        Some("Never") => RestartPolicy::RestartNever,
        _ => RestartPolicy::RestartAlways,
    }
}

fn dns_config(config: &Value) -> DnsConfig {
    DnsConfig {
        nameservers: texts(&config["nameservers"]),
        searches: texts(&config["searches"]),
        options: items(&config["options"])
            .map(|option| DnsOption {
                name: text(&option["name"]),
                value: text(&option["value"]),
            })
            .collect(),
    }
}

fn pod_security(context: &Value) -> PodSecurity {
    PodSecurity {
        run_as_user: context["runAsUser"].as_i64(),
        run_as_group: context["runAsGroup"].as_i64(),
        fs_group: context["fsGroup"].as_i64(),
        supplemental_groups: items(&context["supplementalGroups"])
            .filter_map(Value::as_i64)
            .collect(),
        run_as_non_root: flag(&context["runAsNonRoot"]),
        sysctls: items(&context["sysctls"])
            .map(|sysctl| (text(&sysctl["name"]), text(&sysctl["value"])))
            .collect(),
    }
}

fn container(container: &Value) -> Container {
    let image = text(&container["image"]);
    let lifecycle = &container["lifecycle"];
    Container {
        name: text(&container["name"]),
        image_pull_policy: pull_policy(&container["imagePullPolicy"], &image),
        image,
        command: texts(&container["command"]),
        args: texts(&container["args"]),
        working_dir: text(&container["workingDir"]),
        env: items(&container["env"]).map(env_var).collect(),
        env_from: items(&container["envFrom"]).map(env_from).collect(),
        ports: items(&container["ports"]).map(container_port).collect(),
        resources: Some(resources(&container["resources"])),
        volume_mounts: items(&container["volumeMounts"])
            .map(volume_mount)
            .collect(),
        liveness: probe(&container["livenessProbe"]),
        readiness: probe(&container["readinessProbe"]),
        startup: probe(&container["startupProbe"]),
        post_start: handler(&lifecycle["postStart"]),
        pre_stop: handler(&lifecycle["preStop"]),
        security: Some(container_security(&container["securityContext"])),
        stdin: flag(&container["stdin"]),
        stdin_once: flag(&container["stdinOnce"]),
        tty: flag(&container["tty"]),
        termination_message_path: container["terminationMessagePath"]
            .as_str()
            .unwrap_or("/dev/termination-log")
            .to_owned(),
        sidecar: container["restartPolicy"] == "Always",
    }
}

/// Unset means Always for `:latest` or no tag, IfNotPresent otherwise.
fn pull_policy(value: &Value, image: &str) -> String {
    if let Some(policy) = value.as_str() {
        return policy.to_owned();
    }
    let last = image.rsplit('/').next().unwrap_or(image);
    let floating = !image.contains('@') && (!last.contains(':') || last.ends_with(":latest"));
    if floating {
        "Always".into()
    } else {
        "IfNotPresent".into()
    }
}

fn env_var(variable: &Value) -> EnvVar {
    let from = &variable["valueFrom"];
    let source = if from["fieldRef"].is_object() {
        env_var::Source::FieldPath(text(&from["fieldRef"]["fieldPath"]))
    } else if from["configMapKeyRef"].is_object() {
        env_var::Source::ConfigMapKey(key_ref(&from["configMapKeyRef"]))
    } else if from["secretKeyRef"].is_object() {
        env_var::Source::SecretKey(key_ref(&from["secretKeyRef"]))
    } else if from["resourceFieldRef"].is_object() {
        env_var::Source::Resource(resource_ref(&from["resourceFieldRef"]))
    } else {
        env_var::Source::Value(text(&variable["value"]))
    };
    EnvVar {
        name: text(&variable["name"]),
        source: Some(source),
    }
}

fn key_ref(reference: &Value) -> KeyRef {
    KeyRef {
        name: text(&reference["name"]),
        key: text(&reference["key"]),
        optional: flag(&reference["optional"]),
    }
}

pub(crate) fn resource_ref(reference: &Value) -> ResourceRef {
    ResourceRef {
        container: text(&reference["containerName"]),
        resource: text(&reference["resource"]),
        divisor: text(&reference["divisor"]),
    }
}

fn env_from(source: &Value) -> EnvFrom {
    let (config_map, secret) = (&source["configMapRef"], &source["secretRef"]);
    EnvFrom {
        prefix: text(&source["prefix"]),
        config_map: text(&config_map["name"]),
        secret: text(&secret["name"]),
        optional: flag(&config_map["optional"]) || flag(&secret["optional"]),
    }
}

fn container_port(port: &Value) -> ContainerPort {
    ContainerPort {
        name: text(&port["name"]),
        protocol: protocol(&port["protocol"]).into(),
        container_port: unsigned(&port["containerPort"]),
        host_port: unsigned(&port["hostPort"]),
        host_ip: text(&port["hostIP"]),
    }
}

/// A limit without a request is the request as well (core/v1 defaulting).
fn resources(resources: &Value) -> Resources {
    let read = |list: &str, resource: &str, parse: fn(&str) -> Option<i64>| {
        quantity_text(&resources[list][resource]).and_then(|q| parse(&q))
    };
    let cpu_limit = read("limits", "cpu", quantity::millis);
    let memory_limit = read("limits", "memory", quantity::units);
    Resources {
        request_cpu_millis: read("requests", "cpu", quantity::millis)
            .or(cpu_limit)
            .unwrap_or_default(),
        request_memory_bytes: read("requests", "memory", quantity::units)
            .or(memory_limit)
            .unwrap_or_default(),
        limit_cpu_millis: cpu_limit.unwrap_or_default(),
        limit_memory_bytes: memory_limit.unwrap_or_default(),
    }
}

/// Quantities may be JSON numbers as well.
pub(crate) fn quantity_text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

fn volume_mount(mount: &Value) -> VolumeMount {
    VolumeMount {
        name: text(&mount["name"]),
        mount_path: text(&mount["mountPath"]),
        read_only: flag(&mount["readOnly"]),
        sub_path: text(&mount["subPath"]),
    }
}

fn probe(probe: &Value) -> Option<Probe> {
    let handler = handler(probe)?;
    let number = |key: &str, default: i32| {
        let set = probe[key].as_i64().and_then(|n| i32::try_from(n).ok());
        set.filter(|n| *n > 0).unwrap_or(default)
    };
    Some(Probe {
        handler: Some(handler),
        initial_delay_s: number("initialDelaySeconds", 0),
        period_s: number("periodSeconds", DEFAULT_PROBE_PERIOD_S),
        timeout_s: number("timeoutSeconds", 1),
        success_threshold: number("successThreshold", 1),
        failure_threshold: number("failureThreshold", DEFAULT_PROBE_FAILURES),
        termination_grace_period_s: probe["terminationGracePeriodSeconds"]
            .as_i64()
            .unwrap_or_default(),
    })
}

fn handler(value: &Value) -> Option<Handler> {
    let kind = if value["exec"].is_object() {
        handler::Kind::Exec(ExecAction {
            command: texts(&value["exec"]["command"]),
        })
    } else if value["httpGet"].is_object() {
        handler::Kind::HttpGet(http_get(&value["httpGet"]))
    } else if value["tcpSocket"].is_object() {
        let socket = &value["tcpSocket"];
        handler::Kind::TcpSocket(TcpSocketAction {
            host: text(&socket["host"]),
            port: port_text(&socket["port"]),
        })
    } else if value["grpc"].is_object() {
        let grpc = &value["grpc"];
        handler::Kind::Grpc(GrpcAction {
            port: unsigned(&grpc["port"]),
            service: text(&grpc["service"]),
        })
    } else if value["sleep"].is_object() {
        handler::Kind::SleepS(value["sleep"]["seconds"].as_i64().unwrap_or_default())
    } else {
        return None;
    };
    Some(Handler { kind: Some(kind) })
}

fn http_get(get: &Value) -> HttpGetAction {
    HttpGetAction {
        scheme: get["scheme"].as_str().unwrap_or("HTTP").to_owned(),
        host: text(&get["host"]),
        port: port_text(&get["port"]),
        path: get["path"]
            .as_str()
            .filter(|p| !p.is_empty())
            .unwrap_or("/")
            .to_owned(),
        headers: items(&get["httpHeaders"])
            .map(|header| HttpHeader {
                name: text(&header["name"]),
                value: text(&header["value"]),
            })
            .collect(),
    }
}

fn port_text(port: &Value) -> String {
    quantity_text(port).unwrap_or_default()
}

fn container_security(context: &Value) -> ContainerSecurity {
    let capabilities = &context["capabilities"];
    ContainerSecurity {
        run_as_user: context["runAsUser"].as_i64(),
        run_as_group: context["runAsGroup"].as_i64(),
        run_as_non_root: flag(&context["runAsNonRoot"]),
        privileged: flag(&context["privileged"]),
        read_only_root: flag(&context["readOnlyRootFilesystem"]),
        allow_privilege_escalation: context["allowPrivilegeEscalation"].as_bool(),
        add_capabilities: texts(&capabilities["add"]),
        drop_capabilities: texts(&capabilities["drop"]),
    }
}
