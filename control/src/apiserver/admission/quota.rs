//! ResourceQuotas: what a write costs under one quota, and whether that is left.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::resources::{Side, items, of_container};
use super::usage::{self, Usage};
use crate::apiserver::object;
use crate::apiserver::schema::quantity::Quantity;

/// Names of a quota that every container of a pod must then speak about itself.
const DECLARED: [(&str, Side, &str); 6] = [
    ("cpu", Side::Requests, "cpu"),
    ("memory", Side::Requests, "memory"),
    ("requests.cpu", Side::Requests, "cpu"),
    ("requests.memory", Side::Requests, "memory"),
    ("limits.cpu", Side::Limits, "cpu"),
    ("limits.memory", Side::Limits, "memory"),
];

/// A write of one object: created without `old`, removed without `new`.
#[derive(Clone, Copy, Debug)]
pub struct Write<'a> {
    pub group: &'a str,
    pub plural: &'a str,
    pub old: Option<&'a Value>,
    pub new: Option<&'a Value>,
}

impl Write<'_> {
    fn usage(&self, object: Option<&Value>, quota: &Value) -> Usage {
        object.map_or_else(Usage::new, |o| usage::of(self.group, self.plural, o, quota))
    }
}

/// The quota with the write charged to it, `None` when the write costs nothing under it.
///
/// # Errors
/// Why the write is forbidden.
pub fn charge(quota: &Value, write: Write<'_>) -> Result<Option<Value>, String> {
    let Some(hard) = quota.pointer("/spec/hard").and_then(Value::as_object) else {
        return Ok(None);
    };
    let before = write.usage(write.old, quota);
    let after = write.usage(write.new, quota);
    if let (None, Some(pod), ("", "pods")) = (write.old, write.new, (write.group, write.plural))
        && usage::in_scope(pod, quota)
        && let Some(missing) = undeclared(pod, hard)
    {
        let name = object::name(quota);
        return Err(format!("failed quota: {name}: must specify {missing}"));
    }
    let empty = Map::new();
    let known = quota.pointer("/status/used").and_then(Value::as_object);
    let known = known.unwrap_or(&empty);
    let mut changed = known.clone();
    let mut unknown = Vec::new();
    let mut exceeded = Exceeded::default();
    for (name, limit) in hard {
        let amount = |usage: &Usage| usage.get(name).copied().unwrap_or_else(Quantity::zero);
        let cost = amount(&after) - amount(&before);
        if cost.is_zero() {
            continue;
        }
        let Some(used) = known.get(name).and_then(|u| Quantity::from_json(u).ok()) else {
            if !cost.is_negative() {
                unknown.push(name.as_str());
            }
            continue;
        };
        let total = used + cost;
        if !cost.is_negative() && Quantity::from_json(limit).is_ok_and(|limit| total > limit) {
            exceeded.add(name, cost, used, limit);
        }
        let total = if total.is_negative() {
            Quantity::zero()
        } else {
            total
        };
        changed.insert(name.clone(), total.to_string().into());
    }
    if !unknown.is_empty() {
        let (name, list) = (object::name(quota), unknown.join(","));
        return Err(format!(
            "status unknown for quota: {name}, resources: {list}"
        ));
    }
    if let Some(why) = exceeded.message(object::name(quota)) {
        return Err(why);
    }
    if changed == *known {
        return Ok(None);
    }
    let mut charged = quota.clone();
    charged["status"]["used"] = json!(changed);
    Ok(Some(charged))
}

#[derive(Default)]
struct Exceeded {
    requested: BTreeMap<String, String>,
    used: BTreeMap<String, String>,
    limited: BTreeMap<String, String>,
}

impl Exceeded {
    fn add(&mut self, name: &str, cost: Quantity, used: Quantity, limit: &Value) {
        let limit = Quantity::from_json(limit).unwrap_or_else(|_| Quantity::zero());
        self.requested.insert(name.to_owned(), cost.to_string());
        self.used.insert(name.to_owned(), used.to_string());
        self.limited.insert(name.to_owned(), limit.to_string());
    }

    fn message(&self, quota: &str) -> Option<String> {
        if self.requested.is_empty() {
            return None;
        }
        let print = |amounts: &BTreeMap<String, String>| {
            let list: Vec<String> = amounts.iter().map(|(k, v)| format!("{k}={v}")).collect();
            list.join(",")
        };
        Some(format!(
            "exceeded quota: {quota}, requested: {}, used: {}, limited: {}",
            print(&self.requested),
            print(&self.used),
            print(&self.limited)
        ))
    }
}

/// Resources under quota that containers say nothing about, with those containers.
fn undeclared(pod: &Value, hard: &Map<String, Value>) -> Option<String> {
    let mut missing: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (name, side, resource) in DECLARED {
        if !hard.contains_key(name) {
            continue;
        }
        for list in ["containers", "initContainers"] {
            for container in items(&pod["spec"], list) {
                if !of_container(container, side).contains_key(resource) {
                    let container = container["name"].as_str().unwrap_or_default();
                    missing.entry(name).or_default().insert(container);
                }
            }
        }
    }
    let parts: Vec<String> = missing
        .into_iter()
        .map(|(name, containers)| {
            let containers: Vec<&str> = containers.into_iter().collect();
            format!("{name} for: {}", containers.join(","))
        })
        .collect();
    (!parts.is_empty()).then(|| parts.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quota(hard: Value, used: Value) -> Value {
        json!({"metadata": {"name": "q"}, "spec": {"hard": hard}, "status": {"hard": hard, "used": used}})
    }

    fn write<'a>(plural: &'a str, old: Option<&'a Value>, new: Option<&'a Value>) -> Write<'a> {
        Write {
            group: "",
            plural,
            old,
            new,
        }
    }

    fn pod(cpu: &str, phase: &str) -> Value {
        json!({"spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]},
            "status": {"phase": phase}})
    }

    #[test]
    fn counts_are_charged_refused_and_given_back() {
        let secret = json!({});
        let half = quota(json!({"secrets": "2"}), json!({"secrets": "1"}));
        let full = charge(&half, write("secrets", None, Some(&secret)))
            .unwrap()
            .unwrap();
        assert_eq!(full["status"]["used"]["secrets"], "2");
        let refused = charge(&full, write("secrets", None, Some(&secret))).unwrap_err();
        assert_eq!(
            refused,
            "exceeded quota: q, requested: secrets=1, used: secrets=2, limited: secrets=2"
        );
        let freed = charge(&full, write("secrets", Some(&secret), None))
            .unwrap()
            .unwrap();
        assert_eq!(freed["status"]["used"]["secrets"], "1");
        assert_eq!(
            charge(&full, write("configmaps", None, Some(&secret))),
            Ok(None)
        );
    }

    #[test]
    fn an_overfull_quota_still_lets_things_go() {
        let over = quota(
            json!({"pods": "1", "cpu": "1"}),
            json!({"pods": "3", "cpu": "3"}),
        );
        let ended = charge(
            &over,
            write(
                "pods",
                Some(&pod("1", "Running")),
                Some(&pod("1", "Failed")),
            ),
        );
        let ended = ended.unwrap().unwrap();
        assert_eq!(ended["status"]["used"], json!({"pods": "2", "cpu": "2"}));
        let gone = charge(&ended, write("pods", Some(&pod("1", "Failed")), None));
        assert_eq!(gone, Ok(None), "a finished pod was given back already");
    }

    #[test]
    fn compute_must_be_declared_and_fit() {
        let q = quota(
            json!({"requests.cpu": "1", "limits.cpu": "1"}),
            json!({"requests.cpu": "0", "limits.cpu": "0"}),
        );
        let silent = json!({"spec": {"containers": [{"name": "b"}, {"name": "a"}]}});
        assert_eq!(
            charge(&q, write("pods", None, Some(&silent))).unwrap_err(),
            "failed quota: q: must specify limits.cpu for: a,b; requests.cpu for: a,b"
        );
        let q = quota(
            json!({"requests.cpu": "1"}),
            json!({"requests.cpu": "600m"}),
        );
        assert_eq!(
            charge(&q, write("pods", None, Some(&pod("500m", "Pending")))).unwrap_err(),
            "exceeded quota: q, requested: requests.cpu=500m, used: requests.cpu=600m, limited: requests.cpu=1"
        );
    }

    #[test]
    fn nothing_is_admitted_before_the_quota_was_counted() {
        let mut fresh = quota(json!({"secrets": "2"}), json!({}));
        fresh["status"] = json!({});
        let secret = json!({});
        assert_eq!(
            charge(&fresh, write("secrets", None, Some(&secret))).unwrap_err(),
            "status unknown for quota: q, resources: secrets"
        );
        assert_eq!(
            charge(&fresh, write("secrets", Some(&secret), None)),
            Ok(None)
        );
    }
}
