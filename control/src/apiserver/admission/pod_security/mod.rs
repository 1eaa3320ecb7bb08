//! Pod Security Standards, chosen by labels of the namespace (KEP-2579). The rules are those of the newest standard; a
//! version that a label pins is accepted and shown.

mod baseline;
mod restricted;

use serde_json::Value;

use super::resources::items;
use crate::apiserver::registry::Gvk;

const PREFIX: &str = "pod-security.kubernetes.io/";
const CONTAINER_LISTS: [&str; 3] = ["initContainers", "containers", "ephemeralContainers"];

/// How strict a namespace is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    Privileged,
    Baseline,
    Restricted,
}

impl Level {
    const fn name(self) -> &'static str {
        match self {
            Self::Privileged => "privileged",
            Self::Baseline => "baseline",
            Self::Restricted => "restricted",
        }
    }

    fn parse(text: &str) -> Option<Self> {
        [Self::Privileged, Self::Baseline, Self::Restricted]
            .into_iter()
            .find(|level| level.name() == text)
    }
}

/// A level and the version of the standard, as a label asks for them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    level: Level,
    version: String,
}

/// What is done about pods that violate a policy.
#[derive(Clone, Copy, Debug)]
pub enum Mode {
    Enforce,
    Warn,
    Audit,
}

impl Mode {
    const fn name(self) -> &'static str {
        match self {
            Self::Enforce => "enforce",
            Self::Warn => "warn",
            Self::Audit => "audit",
        }
    }
}

/// The policy of a namespace. A level that cannot be read counts as the strictest.
#[must_use]
pub fn policy(namespace: &Value, mode: Mode) -> Policy {
    let labels = &namespace["metadata"]["labels"];
    let label = |suffix: &str| labels[format!("{PREFIX}{}{suffix}", mode.name())].as_str();
    let level = label("").map_or(Level::Privileged, |text| {
        Level::parse(text).unwrap_or(Level::Restricted)
    });
    let version = label("-version").unwrap_or("latest").to_owned();
    Policy { level, version }
}

/// What is wrong with the Pod Security labels of a namespace: label, value and detail.
#[must_use]
pub fn bad_labels(namespace: &Value) -> Vec<(String, String, &'static str)> {
    let mut errors = Vec::new();
    for mode in [Mode::Enforce, Mode::Warn, Mode::Audit] {
        let key = format!("{PREFIX}{}", mode.name());
        let version = format!("{key}-version");
        let labels = &namespace["metadata"]["labels"];
        if let Some(text) = labels[&key].as_str()
            && Level::parse(text).is_none()
        {
            let detail = "must be one of privileged, baseline, restricted";
            errors.push((key, text.to_owned(), detail));
        }
        if let Some(text) = labels[&version].as_str()
            && !is_version(text)
        {
            let detail = "must be \"latest\" or \"v1.x\"";
            errors.push((version, text.to_owned(), detail));
        }
    }
    errors
}

fn is_version(text: &str) -> bool {
    text == "latest"
        || text.strip_prefix("v1.").is_some_and(|minor| {
            let digits = !minor.is_empty() && minor.bytes().all(|b| b.is_ascii_digit());
            digits && (minor == "0" || !minor.starts_with('0'))
        })
}

/// Metadata and spec of the pods that an object is or makes.
#[must_use]
pub fn pods_of<'a>(gvk: Gvk<'_>, object: &'a Value) -> Option<&'a Value> {
    let template = match (gvk.group, gvk.kind) {
        ("", "Pod") => return Some(object),
        ("", "PodTemplate") => "/template",
        ("", "ReplicationController")
        | ("apps", "Deployment" | "ReplicaSet" | "StatefulSet" | "DaemonSet")
        | ("batch", "Job") => "/spec/template",
        ("batch", "CronJob") => "/spec/jobTemplate/spec/template",
        _ => return None,
    };
    object.pointer(template)
}

/// How a pod violates a policy, in one line; `None` when it does not.
#[must_use]
pub fn violations(pod: &Value, policy: &Policy) -> Option<String> {
    let mut found = Vec::new();
    if policy.level >= Level::Baseline {
        baseline::check(pod, policy.level == Level::Restricted, &mut found);
    }
    if policy.level == Level::Restricted {
        restricted::check(pod, &mut found);
    }
    let (level, version) = (policy.level.name(), &policy.version);
    (!found.is_empty()).then(|| format!("PodSecurity \"{level}:{version}\": {}", found.join(", ")))
}

/// All containers of a pod, also those that debuggers added.
fn containers(pod: &Value) -> impl Iterator<Item = &Value> {
    CONTAINER_LISTS
        .iter()
        .flat_map(|list| items(&pod["spec"], list))
}

/// `container "a"` or `containers "a", "b"`.
fn named<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    named_as("container", names)
}

fn named_as<'a>(noun: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    let list: Vec<String> = names.into_iter().map(|n| format!("{n:?}")).collect();
    let plural = if list.len() == 1 { "" } else { "s" };
    format!("{noun}{plural} {}", list.join(", "))
}

fn name(value: &Value) -> &str {
    value["name"].as_str().unwrap_or_default()
}

/// Names of the containers for which something holds.
fn which<'a>(pod: &'a Value, bad: impl Fn(&'a Value) -> bool) -> Vec<&'a str> {
    containers(pod).filter(|c| bad(c)).map(name).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(level: Level, spec: Value) -> String {
        let policy = Policy {
            level,
            version: "latest".into(),
        };
        violations(&json!({"metadata": {}, "spec": spec}), &policy).unwrap_or_default()
    }

    #[test]
    fn baseline_names_each_thing_that_leaves_the_sandbox() {
        let one = |part: Value| json!([{"name": "c", "securityContext": part}]);
        for (spec, want) in [
            (json!({"containers": [{"name": "c"}]}), ""),
            (
                json!({"hostNetwork": true, "hostPID": true}),
                "host namespaces (hostNetwork=true, hostPID=true)",
            ),
            (
                json!({"containers": one(json!({"privileged": true}))}),
                "privileged (container \"c\" must not set securityContext.privileged=true)",
            ),
            (
                json!({"containers": one(json!({"capabilities": {"add": ["CHOWN", "NET_ADMIN"]}}))}),
                "non-default capabilities (container \"c\" must not include \"NET_ADMIN\" in securityContext.capabilities.add)",
            ),
            (
                json!({"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}),
                "hostPath volumes (volume \"v\")",
            ),
            (
                json!({"initContainers": [{"name": "i", "ports": [{"hostPort": 80}]}]}),
                "hostPort (container \"i\" uses hostPort 80)",
            ),
            (
                json!({"securityContext": {"sysctls": [{"name": "kernel.msgmax"}, {"name": "net.ipv4.tcp_syncookies"}]}}),
                "forbidden sysctls (kernel.msgmax)",
            ),
            (
                json!({"containers": one(json!({"procMount": "Unmasked"}))}),
                "procMount",
            ),
            (
                json!({"containers": one(json!({"seccompProfile": {"type": "Unconfined"}}))}),
                "seccompProfile",
            ),
            (
                json!({"securityContext": {"seLinuxOptions": {"type": "spc_t"}}}),
                "seLinuxOptions",
            ),
            (
                json!({"containers": one(json!({"appArmorProfile": {"type": "Unconfined"}}))}),
                "forbidden AppArmor profile",
            ),
            (
                json!({"securityContext": {"windowsOptions": {"hostProcess": true}}}),
                "hostProcess",
            ),
            (
                json!({"containers": [{"name": "c", "livenessProbe": {"httpGet": {"host": "192.0.2.1"}}}]}),
                "probe or lifecycle host",
            ),
        ] {
            let found = check(Level::Baseline, spec.clone());
            if want.is_empty() {
                assert_eq!(found, "", "{spec}");
            } else {
                assert!(
                    found.starts_with("PodSecurity \"baseline:latest\": "),
                    "{found}"
                );
                assert!(found.contains(want), "{spec}: {found}");
            }
            assert_eq!(check(Level::Privileged, spec), "");
        }
    }

    #[test]
    fn restricted_asks_for_what_hardens() {
        let bare = check(
            Level::Restricted,
            json!({"containers": [{"name": "a"}, {"name": "b"}],
            "volumes": [{"name": "n", "nfs": {}}, {"name": "e", "emptyDir": {}}]}),
        );
        for part in [
            "allowPrivilegeEscalation != false (containers \"a\", \"b\" must set securityContext.allowPrivilegeEscalation=false)",
            "unrestricted capabilities (containers \"a\", \"b\" must set securityContext.capabilities.drop=[\"ALL\"])",
            "restricted volume types (volume \"n\" uses restricted volume type \"nfs\")",
            "runAsNonRoot != true (pod or containers \"a\", \"b\" must set securityContext.runAsNonRoot=true)",
            "seccompProfile (pod or containers \"a\", \"b\" must set securityContext.seccompProfile.type to \"RuntimeDefault\" or \"Localhost\")",
        ] {
            assert!(bare.contains(part), "{part}: {bare}");
        }
        let hardened = json!({"securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{"name": "c", "securityContext": {"allowPrivilegeEscalation": false,
                "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}}}]});
        assert_eq!(check(Level::Restricted, hardened.clone()), "");
        let mut root = hardened;
        root["containers"][0]["securityContext"]["runAsUser"] = json!(0);
        assert!(check(Level::Restricted, root).contains("runAsUser=0"));
    }

    #[test]
    fn labels_choose_and_are_checked() {
        let labelled = |labels: Value| json!({"metadata": {"labels": labels}});
        let set = labelled(json!({"pod-security.kubernetes.io/enforce": "baseline",
            "pod-security.kubernetes.io/enforce-version": "v1.30"}));
        let want = Policy {
            level: Level::Baseline,
            version: "v1.30".into(),
        };
        assert_eq!(policy(&set, Mode::Enforce), want);
        assert_eq!(policy(&set, Mode::Warn).level, Level::Privileged);
        assert!(bad_labels(&set).is_empty());
        let bad = labelled(json!({"pod-security.kubernetes.io/warn": "strange",
            "pod-security.kubernetes.io/audit-version": "v2"}));
        assert_eq!(bad_labels(&bad).len(), 2);
        assert_eq!(policy(&bad, Mode::Warn).level, Level::Restricted);
    }
}
