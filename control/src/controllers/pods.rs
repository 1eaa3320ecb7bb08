//! What several controllers ask about pods, how a pod is made from a template, and which pods go first. Pure.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::runtime::object::{Object, seconds_between};
use super::runtime::selector::Selector;

/// Lowers (negative) or raises the rank of a pod when one has to go.
const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";

/// Neither finished nor on its way out.
pub(crate) fn is_active(pod: &Value) -> bool {
    !is_finished(pod) && !pod.is_deleting()
}

pub(crate) fn is_finished(pod: &Value) -> bool {
    matches!(pod.text(&["status", "phase"]), "Succeeded" | "Failed")
}

pub(crate) fn is_ready(pod: &Value) -> bool {
    pod.condition("Ready")
        .is_some_and(|c| c.text(&["status"]) == "True")
}

/// Since when the pod is ready, when it is.
fn ready_since(pod: &Value) -> Option<Timestamp> {
    let condition = pod
        .condition("Ready")
        .filter(|c| c.text(&["status"]) == "True")?;
    condition.time(&["lastTransitionTime"])
}

/// Whether a pod has been ready for long enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Availability {
    Available,
    /// Ready, and available after this time if it stays so.
    In(Duration),
    No,
}

pub(crate) fn availability(pod: &Value, min_ready_s: i64, now: Timestamp) -> Availability {
    if !is_ready(pod) {
        return Availability::No;
    }
    if min_ready_s <= 0 {
        return Availability::Available;
    }
    let Some(since) = ready_since(pod) else {
        return Availability::No;
    };
    let left = min_ready_s - seconds_between(since, now);
    match u64::try_from(left) {
        Ok(left) if left > 0 => Availability::In(Duration::from_secs(left)),
        _ => Availability::Available,
    }
}

/// A pod of `template` that `reference` manages; the server completes a name that ends with "-".
pub(crate) fn from_template(
    template: &Value,
    namespace: &str,
    generate_name: &str,
    reference: Value,
) -> Value {
    let copy = |path: &[&str]| template.at(path).cloned().unwrap_or_else(|| json!({}));
    let mut metadata = Map::new();
    metadata.insert("generateName".into(), generate_name.into());
    metadata.insert("namespace".into(), namespace.into());
    metadata.insert("labels".into(), copy(&["metadata", "labels"]));
    metadata.insert("annotations".into(), copy(&["metadata", "annotations"]));
    let finalizers = template.items(&["metadata", "finalizers"]);
    if !finalizers.is_empty() {
        metadata.insert("finalizers".into(), finalizers.to_vec().into());
    }
    metadata.insert("ownerReferences".into(), json!([reference]));
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": copy(&["spec"])})
}

/// The prefix of generated pod names; long owner names are cut by the server.
pub(crate) fn name_prefix(owner: &str) -> String {
    format!("{owner}-")
}

fn phase_rank(pod: &Value) -> u8 {
    match pod.text(&["status", "phase"]) {
        "Pending" | "" => 0,
        "Unknown" => 1,
        _ => 2,
    }
}

fn deletion_cost(pod: &Value) -> i32 {
    pod.annotation(DELETION_COST)
        .and_then(|c| c.parse().ok())
        .unwrap_or(0)
}

fn restarts(pod: &Value) -> i64 {
    let statuses = pod.items(&["status", "containerStatuses"]);
    statuses
        .iter()
        .filter_map(|s| s.number(&["restartCount"]))
        .max()
        .unwrap_or(0)
}

/// Age in powers of two, so that pods of about the same age rank alike.
fn age_bucket(since: Option<Timestamp>, now: Timestamp) -> u32 {
    let seconds = since.map_or(0, |s| seconds_between(s, now).max(0));
    u64::BITS - seconds.unsigned_abs().leading_zeros()
}

/// Pods in the order in which they are given up: not running ones first, then by deletion cost, then those that share
/// their node with most others of the same owner, then the younger and the more often restarted.
pub(crate) fn deletion_order<'a>(
    pods: &'a [Arc<Value>],
    on_same_node: &HashMap<String, usize>,
    now: Timestamp,
) -> Vec<&'a Arc<Value>> {
    let crowd = |pod: &Value| {
        on_same_node
            .get(pod.text(&["spec", "nodeName"]))
            .copied()
            .unwrap_or(0)
    };
    let mut order: Vec<&Arc<Value>> = pods.iter().collect();
    order.sort_by(|a, b| {
        let assigned = |pod: &Value| !pod.text(&["spec", "nodeName"]).is_empty();
        assigned(a)
            .cmp(&assigned(b))
            .then_with(|| phase_rank(a).cmp(&phase_rank(b)))
            .then_with(|| is_ready(a).cmp(&is_ready(b)))
            .then_with(|| deletion_cost(a).cmp(&deletion_cost(b)))
            .then_with(|| crowd(b).cmp(&crowd(a)))
            .then_with(|| age_order(ready_since(a), ready_since(b), now))
            .then_with(|| restarts(b).cmp(&restarts(a)))
            .then_with(|| age_order(a.created_at(), b.created_at(), now))
            .then_with(|| a.name().cmp(b.name()))
    });
    order
}

fn age_order(a: Option<Timestamp>, b: Option<Timestamp>, now: Timestamp) -> Ordering {
    age_bucket(a, now).cmp(&age_bucket(b, now))
}

/// How many pods stand on each node.
pub(crate) fn count_by_node<'a>(pods: impl Iterator<Item = &'a Value>) -> HashMap<String, usize> {
    let mut counts = HashMap::new();
    for pod in pods {
        *counts
            .entry(pod.text(&["spec", "nodeName"]).to_owned())
            .or_insert(0) += 1;
    }
    counts
}

/// Which objects an owner has, should take, and should let go of.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    /// Managed by the owner and selected by it.
    pub(crate) owned: Vec<Arc<Value>>,
    /// Selected, and nobody's: to be adopted.
    pub(crate) adopt: Vec<Arc<Value>>,
    /// Managed, but not selected any more: to be released.
    pub(crate) release: Vec<Arc<Value>>,
}

/// Sorts candidates by owner reference and selector. An owner that is being deleted takes and releases nothing.
pub(crate) fn claim(
    owner: &Value,
    selector: &Selector,
    candidates: impl Iterator<Item = Arc<Value>>,
) -> Claims {
    let mut claims = Claims::default();
    let owner_leaves = owner.is_deleting();
    for object in candidates {
        let selected = selector.matches(object.labels());
        match object.controller() {
            Some(manager) if manager.uid == owner.uid() => {
                if selected || owner_leaves {
                    claims.owned.push(object);
                } else {
                    claims.release.push(object);
                }
            }
            Some(_) => {}
            None if selected && !owner_leaves && !object.is_deleting() && !is_finished(&object) => {
                claims.adopt.push(object);
            }
            None => {}
        }
    }
    claims
}

/// The merge patch that makes `reference` the managing owner.
pub(crate) fn adoption(object: &Value, reference: Value) -> Value {
    let mut owners = object.items(&["metadata", "ownerReferences"]).to_vec();
    owners.push(reference);
    // uid and version make the patch fail when the object was replaced or changed since it was read.
    json!({"metadata": {
        "uid": object.uid(), "resourceVersion": object.text(&["metadata", "resourceVersion"]),
        "ownerReferences": owners,
    }})
}

/// The merge patch that removes the owner of this uid.
pub(crate) fn release(object: &Value, owner_uid: &str) -> Value {
    let owners: Vec<Value> = object
        .items(&["metadata", "ownerReferences"])
        .iter()
        .filter(|o| o.text(&["uid"]) != owner_uid)
        .cloned()
        .collect();
    json!({"metadata": {
        "uid": object.uid(), "resourceVersion": object.text(&["metadata", "resourceVersion"]),
        "ownerReferences": owners,
    }})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::runtime::object::Key;

    fn keys(objects: &[Arc<Value>]) -> Vec<Key> {
        objects.iter().map(|o| o.key()).collect()
    }

    fn pod(name: &str, node: &str, phase: &str, ready: bool, cost: &str) -> Arc<Value> {
        let ready = if ready { "True" } else { "False" };
        Arc::new(json!({
            "metadata": {"name": name, "creationTimestamp": "2024-01-01T00:00:00Z",
                "annotations": {DELETION_COST: cost}},
            "spec": {"nodeName": node},
            "status": {"phase": phase, "conditions": [{"type": "Ready", "status": ready,
                "lastTransitionTime": "2024-01-01T00:00:10Z"}]},
        }))
    }

    #[test]
    fn pods_are_given_up_in_the_documented_order() {
        let pods = vec![
            pod("ready-alone", "n1", "Running", true, "0"),
            pod("ready-crowded", "n2", "Running", true, "0"),
            pod("ready-cheap", "n1", "Running", true, "-5"),
            pod("unready", "n1", "Running", false, "9"),
            pod("pending-assigned", "n1", "Pending", false, "0"),
            pod("unassigned", "", "Pending", false, "100"),
        ];
        let crowd = HashMap::from([("n1".to_owned(), 1), ("n2".to_owned(), 2)]);
        let now = "2024-01-01T01:00:00Z".parse().unwrap();
        let order: Vec<_> = deletion_order(&pods, &crowd, now)
            .iter()
            .map(|p| p.name().to_owned())
            .collect();
        let want = [
            "unassigned",
            "pending-assigned",
            "unready",
            "ready-cheap",
            "ready-crowded",
            "ready-alone",
        ];
        assert_eq!(order, want);
    }

    #[test]
    fn availability_counts_from_the_moment_of_readiness() {
        let pod = pod("p", "n1", "Running", true, "0");
        let at = |text: &str| text.parse::<Timestamp>().unwrap();
        assert_eq!(
            availability(&pod, 0, at("2024-01-01T00:00:10Z")),
            Availability::Available
        );
        assert_eq!(
            availability(&pod, 8, at("2024-01-01T00:00:13Z")),
            Availability::In(Duration::from_secs(5))
        );
        assert_eq!(
            availability(&pod, 8, at("2024-01-01T00:00:18Z")),
            Availability::Available
        );
    }

    #[test]
    fn claims_follow_owner_and_selector() {
        let owner = json!({"metadata": {"name": "r", "uid": "u"}});
        let selector = Selector::from_map(json!({"app": "a"}).as_object());
        let object = |name: &str, app: &str, owner: Option<&str>| {
            let owners: Vec<Value> = owner
                .iter()
                .map(|u| json!({"uid": u, "controller": true}))
                .collect();
            Arc::new(json!({"metadata":
                {"name": name, "labels": {"app": app}, "ownerReferences": owners}}))
        };
        let all = [
            object("mine", "a", Some("u")),
            object("drifted", "b", Some("u")),
            object("orphan", "a", None),
            object("stranger", "b", None),
            object("theirs", "a", Some("other")),
        ];
        let claims = claim(&owner, &selector, all.iter().cloned());
        assert_eq!(keys(&claims.owned), [Key::new("", "mine")]);
        assert_eq!(keys(&claims.release), [Key::new("", "drifted")]);
        assert_eq!(keys(&claims.adopt), [Key::new("", "orphan")]);

        let leaving =
            json!({"metadata": {"uid": "u", "deletionTimestamp": "2024-01-01T00:00:00Z"}});
        let claims = claim(&leaving, &selector, all.iter().cloned());
        assert_eq!(claims.owned.len(), 2);
        assert!(claims.adopt.is_empty() && claims.release.is_empty());
    }
}
