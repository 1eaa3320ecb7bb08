//! The baseline standard: nothing that is known to lead out of the container.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{containers, name, named, named_as, which};
use crate::apiserver::admission::resources::items;

const CAPABILITIES: [&str; 13] = [
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_BIND_SERVICE",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
];
const SYSCTLS: [&str; 12] = [
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_wmem",
];
const SELINUX_TYPES: [&str; 5] = [
    "",
    "container_t",
    "container_init_t",
    "container_kvm_t",
    "container_engine_t",
];
const APPARMOR_ANNOTATION: &str = "container.apparmor.security.beta.kubernetes.io/";

/// Adds what a pod violates. `restricted`: that standard's stricter forms of some rules follow.
pub(super) fn check(pod: &Value, restricted: bool, found: &mut Vec<String>) {
    host_namespaces(pod, found);
    let privileged = which(pod, |c| c["securityContext"]["privileged"] == true);
    if !privileged.is_empty() {
        let who = named(privileged);
        found.push(format!(
            "privileged ({who} must not set securityContext.privileged=true)"
        ));
    }
    if !restricted {
        capabilities(pod, found);
        seccomp(pod, found);
    }
    let volumes = items(&pod["spec"], "volumes").iter();
    let paths: Vec<&str> = volumes
        .filter(|v| v["hostPath"].is_object())
        .map(name)
        .collect();
    if !paths.is_empty() {
        found.push(format!("hostPath volumes ({})", named_as("volume", paths)));
    }
    host_ports(pod, found);
    app_armor(pod, found);
    selinux(pod, found);
    proc_mount(pod, found);
    sysctls(pod, found);
    let process = |at: &Value| at["securityContext"]["windowsOptions"]["hostProcess"] == true;
    if let Some(who) = owners(pod, process) {
        found.push(format!(
            "hostProcess ({who} must not set securityContext.windowsOptions.hostProcess=true)"
        ));
    }
    probe_hosts(pod, found);
}

/// The pod and the containers for which something holds, in words.
fn owners(pod: &Value, bad: impl Fn(&Value) -> bool) -> Option<String> {
    let mut parts = Vec::new();
    if bad(&pod["spec"]) {
        parts.push("pod".to_owned());
    }
    let containers = which(pod, bad);
    if !containers.is_empty() {
        parts.push(named(containers));
    }
    (!parts.is_empty()).then(|| parts.join(" and "))
}

fn host_namespaces(pod: &Value, found: &mut Vec<String>) {
    let shared: Vec<String> = ["hostNetwork", "hostPID", "hostIPC"]
        .into_iter()
        .filter(|field| pod["spec"][field] == true)
        .map(|field| format!("{field}=true"))
        .collect();
    if !shared.is_empty() {
        found.push(format!("host namespaces ({})", shared.join(", ")));
    }
}

fn capabilities(pod: &Value, found: &mut Vec<String>) {
    let added = |c: &Value| -> BTreeSet<String> {
        let list = items(&c["securityContext"]["capabilities"], "add").iter();
        let list = list.filter_map(Value::as_str);
        list.filter(|c| !CAPABILITIES.contains(c))
            .map(str::to_owned)
            .collect()
    };
    let who = which(pod, |c| !added(c).is_empty());
    if who.is_empty() {
        return;
    }
    let what: BTreeSet<String> = containers(pod).flat_map(added).collect();
    let what: Vec<String> = what.iter().map(|c| format!("{c:?}")).collect();
    found.push(format!(
        "non-default capabilities ({} must not include {} in securityContext.capabilities.add)",
        named(who),
        what.join(", ")
    ));
}

fn seccomp(pod: &Value, found: &mut Vec<String>) {
    let open = |at: &Value| at["securityContext"]["seccompProfile"]["type"] == "Unconfined";
    if let Some(who) = owners(pod, open) {
        found.push(format!(
            "seccompProfile ({who} must not set securityContext.seccompProfile.type to \"Unconfined\")"
        ));
    }
}

fn host_ports(pod: &Value, found: &mut Vec<String>) {
    let ports = |c: &Value| -> BTreeSet<u64> {
        let ports = items(c, "ports").iter();
        let ports = ports.filter_map(|p| p["hostPort"].as_u64());
        ports.filter(|p| *p > 0).collect()
    };
    let who = which(pod, |c| !ports(c).is_empty());
    if who.is_empty() {
        return;
    }
    let verb = if who.len() == 1 { "uses" } else { "use" };
    let numbers: BTreeSet<u64> = containers(pod).flat_map(ports).collect();
    let plural = if numbers.len() == 1 { "" } else { "s" };
    let numbers: Vec<String> = numbers.iter().map(u64::to_string).collect();
    found.push(format!(
        "hostPort ({} {verb} hostPort{plural} {})",
        named(who),
        numbers.join(", ")
    ));
}

fn app_armor(pod: &Value, found: &mut Vec<String>) {
    let open = |at: &Value| at["securityContext"]["appArmorProfile"]["type"] == "Unconfined";
    let mut parts = Vec::new();
    if let Some(who) = owners(pod, open) {
        parts.push(format!(
            "{who} must not set appArmorProfile.type to \"Unconfined\""
        ));
    }
    let annotations = pod["metadata"]["annotations"].as_object();
    for (key, profile) in annotations.into_iter().flatten() {
        let profile = profile.as_str().unwrap_or_default();
        let fine = matches!(profile, "" | "runtime/default") || profile.starts_with("localhost/");
        if key.starts_with(APPARMOR_ANNOTATION) && !fine {
            parts.push(format!("annotation {key}={profile:?}"));
        }
    }
    if !parts.is_empty() {
        found.push(format!("forbidden AppArmor profile ({})", parts.join(", ")));
    }
}

fn selinux(pod: &Value, found: &mut Vec<String>) {
    let bad = |at: &Value| {
        let options = &at["securityContext"]["seLinuxOptions"];
        let text = |field: &str| options[field].as_str().unwrap_or_default();
        !SELINUX_TYPES.contains(&text("type"))
            || !text("user").is_empty()
            || !text("role").is_empty()
    };
    if let Some(who) = owners(pod, bad) {
        found.push(format!(
            "seLinuxOptions ({who} set forbidden securityContext.seLinuxOptions: user, role, or a type that is not a container's)"
        ));
    }
}

/// In a user namespace of its own, a pod may see all of its proc (KEP-4265).
fn proc_mount(pod: &Value, found: &mut Vec<String>) {
    if pod["spec"]["hostUsers"] == false {
        return;
    }
    let who = which(pod, |c| {
        let mount = c["securityContext"]["procMount"].as_str();
        !matches!(mount, None | Some("" | "Default"))
    });
    if !who.is_empty() {
        let who = named(who);
        found.push(format!(
            "procMount ({who} must not set securityContext.procMount to \"Unmasked\")"
        ));
    }
}

fn sysctls(pod: &Value, found: &mut Vec<String>) {
    let list = items(&pod["spec"]["securityContext"], "sysctls").iter();
    let bad: Vec<&str> = list.map(name).filter(|n| !SYSCTLS.contains(n)).collect();
    if !bad.is_empty() {
        found.push(format!("forbidden sysctls ({})", bad.join(", ")));
    }
}

/// A probe's host is reached from the node, past every network policy.
fn probe_hosts(pod: &Value, found: &mut Vec<String>) {
    let named_host = |handler: &Value| {
        ["httpGet", "tcpSocket"].iter().any(|kind| {
            handler[kind]["host"]
                .as_str()
                .is_some_and(|h| !h.is_empty())
        })
    };
    let who = which(pod, |c| {
        let probes = ["livenessProbe", "readinessProbe", "startupProbe"];
        let hooks = ["postStart", "preStop"];
        probes.iter().any(|p| named_host(&c[p]))
            || hooks.iter().any(|h| named_host(&c["lifecycle"][h]))
    });
    if !who.is_empty() {
        let who = named(who);
        found.push(format!(
            "probe or lifecycle host ({who} must not set a host in probes or lifecycle hooks)"
        ));
    }
}
