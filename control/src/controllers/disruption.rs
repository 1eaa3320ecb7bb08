//! How many pods of each PodDisruptionBudget may be evicted now.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::deployment::sets::resolve_percent;
use super::pods::{is_finished, is_ready};
use super::runtime::informer::Store;
use super::runtime::object::{Key, Object, seconds_between, set, set_condition};
use super::runtime::selector::Selector;
use super::runtime::session::{Context, Session};
use super::runtime::worker::{Again, Controller, KeyQueue, enqueue_changes, tolerate_change};
use crate::client::resources;
use crate::status::ApiError;

/// An eviction that was allowed and has not led to a deletion by then never will.
const EVICTION_LIMIT_S: i64 = 120;

#[derive(Debug)]
pub(super) struct Budgets {
    budgets: Arc<Store>,
    pods: Arc<Store>,
    owners: [(&'static str, Arc<Store>); 3],
}

impl Budgets {
    pub(super) fn new(context: &Context, queue: &KeyQueue) -> Self {
        let budgets = context.informers.store(resources::POD_DISRUPTION_BUDGETS);
        enqueue_changes(context, resources::POD_DISRUPTION_BUDGETS, queue);
        let pods = context.informers.store(resources::PODS);
        let (by_pod, lookup) = (queue.clone(), budgets.clone());
        pods.subscribe(move |change| {
            let state = |pod: &Arc<Value>| (is_ready(pod), pod.is_deleting(), is_finished(pod));
            if let (Some(old), Some(new)) = (&change.old, &change.new)
                && state(old) == state(new)
                && old.labels() == new.labels()
            {
                return;
            }
            for budget in lookup.in_namespace(change.object().namespace()) {
                let selector = selector(&budget);
                if change
                    .old
                    .iter()
                    .chain(&change.new)
                    .any(|p| selector.matches(p.labels()))
                {
                    by_pod.add(budget.key());
                }
            }
        });
        let owners = [
            ("ReplicaSet", resources::REPLICA_SETS),
            ("StatefulSet", resources::STATEFUL_SETS),
            ("Deployment", resources::DEPLOYMENTS),
        ]
        .map(|(kind, resource)| (kind, context.informers.store(resource)));
        // The wanted number of an owner changes what percentages and maxUnavailable mean.
        for (_, store) in &owners {
            let (queue, lookup) = (queue.clone(), budgets.clone());
            store.subscribe(move |change| {
                let size = ["spec", "replicas"];
                let before = change.old.as_ref().and_then(|o| o.number(&size));
                if before == change.new.as_ref().and_then(|o| o.number(&size)) {
                    return;
                }
                for budget in lookup.in_namespace(change.object().namespace()) {
                    queue.add(budget.key());
                }
            });
        }
        Self {
            budgets,
            pods,
            owners,
        }
    }

    fn owner(&self, kind: &str, namespace: &str, name: &str) -> Option<Arc<Value>> {
        let (_, store) = self.owners.iter().find(|(k, _)| *k == kind)?;
        store.get(&Key::new(namespace, name))
    }

    /// The size that the owners of the pods want, each owner once. `Err` names an owner that has no size.
    fn wanted(&self, pods: &[Arc<Value>]) -> Result<i64, String> {
        let mut owners: Map<String, Value> = Map::new();
        for pod in pods {
            let Some(owner) = pod.controller() else {
                return Err(format!("pod {} has no controller", pod.name()));
            };
            let mut found = self.owner(owner.kind, pod.namespace(), owner.name);
            if let Some(above) = found.as_ref().and_then(|o| {
                let above = o.controller()?;
                self.owner(above.kind, pod.namespace(), above.name)
            }) {
                found = Some(above);
            }
            let Some(found) = found else {
                return Err(format!(
                    "{} {} does not have a scale",
                    owner.kind, owner.name
                ));
            };
            let size = found.number(&["spec", "replicas"]).unwrap_or(1);
            owners.insert(found.uid().to_owned(), size.into());
        }
        Ok(owners.values().filter_map(Value::as_i64).sum())
    }
}

fn selector(budget: &Value) -> Selector {
    Selector::from_label_selector(budget.at(&["spec", "selector"]))
}

/// Pods expected, and pods that must stay healthy.
fn demands(
    budget: &Value,
    count: i64,
    wanted: impl FnOnce() -> Result<i64, String>,
) -> Result<(i64, i64), String> {
    if let Some(most) = budget.at(&["spec", "maxUnavailable"]) {
        let expected = wanted()?;
        let most = resolve_percent(Some(most), expected, true).unwrap_or(0);
        return Ok((expected, (expected - most).max(0)));
    }
    match budget.at(&["spec", "minAvailable"]) {
        Some(Value::String(percent)) => {
            let expected = wanted()?;
            let least = resolve_percent(Some(&Value::String(percent.clone())), expected, true);
            Ok((expected, least.unwrap_or(0)))
        }
        Some(number) => Ok((count, number.as_i64().unwrap_or(0))),
        None => Ok((count, 1)),
    }
}

/// Evictions that were allowed and whose pods are not on their way out yet, and when the next of them is given up.
fn open_evictions(
    budget: &Value,
    pods: &[Arc<Value>],
    now: Timestamp,
) -> (Map<String, Value>, Option<Duration>) {
    let mut open = Map::new();
    let mut again: Option<Duration> = None;
    for (name, at) in budget
        .fields(&["status", "disruptedPods"])
        .into_iter()
        .flatten()
    {
        let Some(time) = at.as_str().and_then(|t| t.parse::<Timestamp>().ok()) else {
            continue;
        };
        let left = EVICTION_LIMIT_S - seconds_between(time, now);
        let leaves = pods
            .iter()
            .find(|p| p.name() == name)
            .is_none_or(|p| p.is_deleting());
        if left > 0 && !leaves {
            let left = Duration::from_secs(left.unsigned_abs());
            again = Some(again.map_or(left, |a| a.min(left)));
            open.insert(name.clone(), at.clone());
        }
    }
    (open, again)
}

impl Controller for Budgets {
    const NAME: &'static str = "disruption";
    const WORKERS: usize = 2;

    async fn reconcile(&self, key: &Key, session: &Session<'_>) -> Result<Again, ApiError> {
        let Some(budget) = self.budgets.get(key).filter(|b| !b.is_deleting()) else {
            return Ok(None);
        };
        let selector = selector(&budget);
        let mut pods = self.pods.in_namespace(&key.namespace);
        pods.retain(|pod| selector.matches(pod.labels()) && !is_finished(pod));
        let now = Timestamp::now();
        let (open, again) = open_evictions(&budget, &pods, now);
        let healthy = pods
            .iter()
            .filter(|p| is_ready(p) && !p.is_deleting() && !open.contains_key(p.name()))
            .count();
        let healthy = i64::try_from(healthy).unwrap_or(i64::MAX);
        let count = i64::try_from(pods.len()).unwrap_or(i64::MAX);
        let mut status = budget.at(&["status"]).cloned().unwrap_or_else(|| json!({}));
        let kind = "DisruptionAllowed";
        let allowed = match demands(&budget, count, || self.wanted(&pods)) {
            Ok((expected, desired)) => {
                let allowed = if expected > 0 {
                    (healthy - desired).max(0)
                } else {
                    0
                };
                set(&mut status, &["expectedPods"], expected.into());
                set(&mut status, &["desiredHealthy"], desired.into());
                let (state, reason) = if allowed > 0 {
                    ("True", "SufficientPods")
                } else {
                    ("False", "InsufficientPods")
                };
                set_condition(&mut status, kind, state, reason, "", now);
                allowed
            }
            Err(why) => {
                set_condition(&mut status, kind, "False", "SyncFailed", &why, now);
                0
            }
        };
        set(&mut status, &["currentHealthy"], healthy.into());
        set(&mut status, &["disruptionsAllowed"], allowed.into());
        set(
            &mut status,
            &["observedGeneration"],
            budget.generation().into(),
        );
        if open.is_empty() {
            super::runtime::object::unset(&mut status, &["disruptedPods"]);
        } else {
            set(&mut status, &["disruptedPods"], Value::Object(open));
        }
        if budget.at(&["status"]) != Some(&status) {
            let r = resources::POD_DISRUPTION_BUDGETS;
            tolerate_change(session.replace_status(r, &budget, status).await)?;
        }
        Ok(again)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_are_read_as_documented() {
        let budget = |field: &str, value: Value| json!({"spec": {field: value}});
        let of = |budget: Value, count: i64, wanted: i64| demands(&budget, count, || Ok(wanted));
        assert_eq!(of(budget("minAvailable", json!(2)), 3, 9), Ok((3, 2)));
        assert_eq!(of(budget("minAvailable", json!("50%")), 3, 5), Ok((5, 3)));
        assert_eq!(of(budget("maxUnavailable", json!(1)), 3, 4), Ok((4, 3)));
        assert_eq!(of(budget("maxUnavailable", json!("30%")), 3, 4), Ok((4, 2)));
        assert_eq!(of(json!({"spec": {}}), 3, 4), Ok((3, 1)));
    }

    #[test]
    fn an_allowed_eviction_counts_until_its_pod_leaves_or_too_much_time_passes() {
        let budget = json!({"status": {"disruptedPods": {
            "a": "2024-01-01T00:00:00Z", "b": "2024-01-01T00:00:00Z", "gone": "2024-01-01T00:00:00Z"}}});
        let pods = [
            Arc::new(json!({"metadata": {"name": "a"}})),
            Arc::new(
                json!({"metadata": {"name": "b", "deletionTimestamp": "2024-01-01T00:00:01Z"}}),
            ),
        ];
        let at = |text: &str| text.parse::<Timestamp>().unwrap();
        let (open, again) = open_evictions(&budget, &pods, at("2024-01-01T00:00:20Z"));
        assert_eq!(open.keys().collect::<Vec<_>>(), ["a"]);
        assert_eq!(again, Some(Duration::from_secs(100)));
        let (open, _) = open_evictions(&budget, &pods, at("2024-01-01T00:02:00Z"));
        assert!(open.is_empty());
    }
}
