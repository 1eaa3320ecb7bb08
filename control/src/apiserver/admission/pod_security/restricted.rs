//! The restricted standard: what hardening asks of every pod, on top of the baseline.

use serde_json::Value;

use super::{containers, name, named, which};
use crate::apiserver::admission::resources::items;

const VOLUME_TYPES: [&str; 8] = [
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
];

/// Adds what a pod violates beyond the baseline.
pub(super) fn check(pod: &Value, found: &mut Vec<String>) {
    // These have no meaning for Windows containers.
    let windows = pod["spec"]["os"]["name"] == "windows";
    if !windows {
        let may_escalate = which(pod, |c| {
            c["securityContext"]["allowPrivilegeEscalation"] != false
        });
        if !may_escalate.is_empty() {
            found.push(format!(
                "allowPrivilegeEscalation != false ({} must set securityContext.allowPrivilegeEscalation=false)",
                named(may_escalate)
            ));
        }
        capabilities(pod, found);
    }
    volumes(pod, found);
    non_root(pod, found);
    if !windows {
        seccomp(pod, found);
    }
}

fn capabilities(pod: &Value, found: &mut Vec<String>) {
    let list = |c: &Value, side: &str| -> Vec<String> {
        let list = items(&c["securityContext"]["capabilities"], side).iter();
        list.filter_map(Value::as_str).map(str::to_owned).collect()
    };
    let keep = which(pod, |c| !list(c, "drop").iter().any(|d| d == "ALL"));
    let extra = |c: &Value| list(c, "add").iter().any(|a| a != "NET_BIND_SERVICE");
    let adding = which(pod, extra);
    let mut parts = Vec::new();
    if !keep.is_empty() {
        let who = named(keep);
        parts.push(format!(
            "{who} must set securityContext.capabilities.drop=[\"ALL\"]"
        ));
    }
    if !adding.is_empty() {
        let mut what: Vec<String> = containers(pod).flat_map(|c| list(c, "add")).collect();
        what.retain(|a| a != "NET_BIND_SERVICE");
        what.sort();
        what.dedup();
        let what: Vec<String> = what.iter().map(|c| format!("{c:?}")).collect();
        parts.push(format!(
            "{} must not include {} in securityContext.capabilities.add",
            named(adding),
            what.join(", ")
        ));
    }
    if !parts.is_empty() {
        found.push(format!("unrestricted capabilities ({})", parts.join("; ")));
    }
}

fn volumes(pod: &Value, found: &mut Vec<String>) {
    let mut parts = Vec::new();
    for volume in items(&pod["spec"], "volumes") {
        let sources = volume.as_object().into_iter().flatten();
        for (source, _) in sources.filter(|(k, v)| *k != "name" && !v.is_null()) {
            // The baseline speaks about hostPath already.
            if !VOLUME_TYPES.contains(&source.as_str()) && source != "hostPath" {
                let volume = name(volume);
                parts.push(format!(
                    "volume {volume:?} uses restricted volume type {source:?}"
                ));
            }
        }
    }
    if !parts.is_empty() {
        found.push(format!("restricted volume types ({})", parts.join(", ")));
    }
}

fn non_root(pod: &Value, found: &mut Vec<String>) {
    let own = |c: &Value| c["securityContext"]["runAsNonRoot"].as_bool();
    let default = own(&pod["spec"]);
    let unset = which(pod, |c| own(c).or(default) != Some(true));
    if !unset.is_empty() {
        let who = named(unset);
        let pod = if default == Some(false) {
            "pod and"
        } else {
            "pod or"
        };
        found.push(format!(
            "runAsNonRoot != true ({pod} {who} must set securityContext.runAsNonRoot=true)"
        ));
    }
    let is_root = |at: &Value| at["securityContext"]["runAsUser"] == 0;
    let mut parts = Vec::new();
    if is_root(&pod["spec"]) {
        parts.push("pod must not set runAsUser=0".to_owned());
    }
    let who = which(pod, is_root);
    if !who.is_empty() {
        parts.push(format!("{} must not set runAsUser=0", named(who)));
    }
    if !parts.is_empty() {
        found.push(format!("runAsUser=0 ({})", parts.join(" and ")));
    }
}

fn seccomp(pod: &Value, found: &mut Vec<String>) {
    let profile = |at: &Value| {
        let profile = at["securityContext"]["seccompProfile"]["type"].as_str();
        profile.map(|p| matches!(p, "RuntimeDefault" | "Localhost"))
    };
    let default = profile(&pod["spec"]);
    let unset = which(pod, |c| profile(c).or(default) != Some(true));
    if !unset.is_empty() {
        let who = named(unset);
        let pod = if default == Some(false) {
            "pod and"
        } else {
            "pod or"
        };
        found.push(format!(
            "seccompProfile ({pod} {who} must set securityContext.seccompProfile.type to \"RuntimeDefault\" or \"Localhost\")"
        ));
    }
}
