//! StatefulSet: pods with an identity, made, replaced and removed in the order of their ordinals. Pure: one call is one
//! round.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::controllers::history;
use crate::controllers::pods::{self, Availability};
use crate::controllers::runtime::object::{Object, controller_reference, set, unset};

pub(super) const API_VERSION: &str = "apps/v1";
pub(super) const KIND: &str = "StatefulSet";

/// The revisions in play: that of pods made before an update, and that of the current template.
#[derive(Clone, Copy, Debug)]
pub(super) struct Revisions<'a> {
    pub(super) current: &'a Value,
    pub(super) update: &'a Value,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Action {
    /// The pod, and the claims it needs.
    Create {
        pod: Value,
        claims: Vec<Value>,
    },
    Delete(Arc<Value>),
}

/// The next round.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) actions: Vec<Action>,
    pub(super) status: Value,
    pub(super) again: Option<Duration>,
}

/// The ordinal of a pod of this set, by its name.
pub(super) fn ordinal(set: &Value, pod: &str) -> Option<i64> {
    let digits = pod.strip_prefix(set.name())?.strip_prefix('-')?;
    let number: i64 = digits.parse().ok()?;
    // "01" and "+1" are names of other pods.
    (number.to_string() == digits).then_some(number)
}

fn first(set: &Value) -> i64 {
    set.number(&["spec", "ordinals", "start"]).unwrap_or(0)
}

fn replicas(set: &Value) -> i64 {
    set.number(&["spec", "replicas"]).unwrap_or(1)
}

fn count(set: &Value, field: &str) -> i64 {
    set.number(&["status", field]).unwrap_or(0)
}

struct Round<'a> {
    set: &'a Value,
    revisions: Revisions<'a>,
    now: Timestamp,
    again: Option<Duration>,
    actions: Vec<Action>,
}

pub(super) fn plan(
    set: &Value,
    owned: &[Arc<Value>],
    revisions: Revisions<'_>,
    now: Timestamp,
) -> Plan {
    let mut round = Round {
        set,
        revisions,
        now,
        again: None,
        actions: Vec::new(),
    };
    let mut wanted: BTreeMap<i64, Option<&Arc<Value>>> = (first(set)..first(set) + replicas(set))
        .map(|n| (n, None))
        .collect();
    let mut condemned: BTreeMap<i64, &Arc<Value>> = BTreeMap::new();
    for pod in owned {
        let Some(n) = ordinal(set, pod.name()) else {
            continue;
        };
        match wanted.get_mut(&n) {
            Some(slot) => *slot = Some(pod),
            None => {
                condemned.insert(n, pod);
            }
        }
    }
    if !set.is_deleting() && round.fill(&wanted) && round.shrink(&condemned, &wanted) {
        round.update(&wanted);
    }
    let status = round.status(owned);
    Plan {
        actions: round.actions,
        status,
        again: round.again,
    }
}

impl Round<'_> {
    fn in_order(&self) -> bool {
        self.set.text(&["spec", "podManagementPolicy"]) != "Parallel"
    }

    /// Running, ready, and for long enough.
    fn is_healthy(&mut self, pod: &Value) -> bool {
        let min_ready_s = self.set.number(&["spec", "minReadySeconds"]).unwrap_or(0);
        if pod.is_deleting() || pod.text(&["status", "phase"]) != "Running" {
            return false;
        }
        match pods::availability(pod, min_ready_s, self.now) {
            Availability::Available => true,
            Availability::In(left) => {
                self.again = Some(self.again.map_or(left, |a| a.min(left)));
                false
            }
            Availability::No => false,
        }
    }

    /// Makes what is missing. False: something must happen first.
    fn fill(&mut self, wanted: &BTreeMap<i64, Option<&Arc<Value>>>) -> bool {
        let mut complete = true;
        for (n, pod) in wanted {
            match pod {
                None => {
                    let action = self.create(*n);
                    self.actions.push(action);
                    complete = false;
                }
                // A finished pod is replaced: its name must become free first.
                Some(pod) if pods::is_finished(pod) => {
                    if !pod.is_deleting() {
                        self.actions.push(Action::Delete((*pod).clone()));
                    }
                    complete = false;
                }
                Some(pod) => complete &= self.is_healthy(pod),
            }
            if !complete && self.in_order() {
                return false;
            }
        }
        // In parallel mode nothing waits for health.
        complete || !self.in_order()
    }

    /// Removes what is too much, highest ordinal first. False: something must happen first.
    fn shrink(
        &mut self,
        condemned: &BTreeMap<i64, &Arc<Value>>,
        wanted: &BTreeMap<i64, Option<&Arc<Value>>>,
    ) -> bool {
        let highest = condemned.keys().next_back().copied();
        for (n, pod) in condemned.iter().rev() {
            if pod.is_deleting() {
                if self.in_order() {
                    return false;
                }
                continue;
            }
            // An unhealthy pod in the middle may be the reason for the scaling: it does not hold up those above it.
            let healthy_below = !self.in_order()
                || Some(*n) == highest
                || wanted.values().flatten().all(|pod| self.is_healthy(pod));
            if !healthy_below {
                return false;
            }
            self.actions.push(Action::Delete((*pod).clone()));
            if self.in_order() {
                return false;
            }
        }
        condemned.is_empty()
    }

    fn partition(&self) -> Option<i64> {
        let strategy = ["spec", "updateStrategy", "type"];
        if self.set.text(&strategy) == "OnDelete" {
            return None;
        }
        let path = ["spec", "updateStrategy", "rollingUpdate", "partition"];
        Some(self.set.number(&path).unwrap_or(0))
    }

    /// Replaces one outdated pod, highest ordinal first, when those above it are healthy.
    fn update(&mut self, wanted: &BTreeMap<i64, Option<&Arc<Value>>>) {
        let Some(partition) = self.partition() else {
            return;
        };
        for (n, pod) in wanted.iter().rev() {
            if *n < first(self.set) + partition {
                return;
            }
            let Some(pod) = pod else { return };
            let outdated = pod.label(history::HASH_LABEL) != Some(self.revisions.update.name());
            if outdated && !pod.is_deleting() {
                self.actions.push(Action::Delete((*pod).clone()));
                return;
            }
            if !self.is_healthy(pod) {
                return;
            }
        }
    }

    fn create(&self, n: i64) -> Action {
        let keeps_current = match self.partition() {
            // Without rolling updates a pod is always made of the newest template.
            None => false,
            Some(0) => n < first(self.set) + count(self.set, "currentReplicas"),
            Some(partition) => n < first(self.set) + partition,
        };
        let revision = if keeps_current {
            self.revisions.current
        } else {
            self.revisions.update
        };
        let template = history::template(revision);
        let name = format!("{}-{n}", self.set.name());
        let reference = controller_reference(self.set, API_VERSION, KIND);
        let mut pod = pods::from_template(&template, self.set.namespace(), "", reference);
        unset(&mut pod, &["metadata", "generateName"]);
        set(&mut pod, &["metadata", "name"], name.clone().into());
        for (label, value) in [
            ("statefulset.kubernetes.io/pod-name", name.clone()),
            ("apps.kubernetes.io/pod-index", n.to_string()),
            (history::HASH_LABEL, revision.name().to_owned()),
        ] {
            set(&mut pod, &["metadata", "labels", label], value.into());
        }
        set(&mut pod, &["spec", "hostname"], name.into());
        let service = self.set.text(&["spec", "serviceName"]);
        if !service.is_empty() {
            set(&mut pod, &["spec", "subdomain"], service.into());
        }
        let claims = self.claims(n, &mut pod);
        Action::Create { pod, claims }
    }

    /// The claims of an ordinal; the pod's volumes of their names refer to them.
    fn claims(&self, n: i64, pod: &mut Value) -> Vec<Value> {
        let labels = self.set.at(&["spec", "selector", "matchLabels"]).cloned();
        let mut volumes = pod.items(&["spec", "volumes"]).to_vec();
        let mut claims = Vec::new();
        for template in self.set.items(&["spec", "volumeClaimTemplates"]) {
            let name = format!("{}-{}-{n}", template.name(), self.set.name());
            let mut claim = template.clone();
            unset(&mut claim, &["status"]);
            for (path, value) in [
                (["metadata", "name"], Value::from(name.clone())),
                (["metadata", "namespace"], self.set.namespace().into()),
            ] {
                set(&mut claim, &path, value);
            }
            let mut all = labels.clone().unwrap_or_else(|| json!({}));
            for (key, value) in template.labels().into_iter().flatten() {
                set(&mut all, &[key], value.clone());
            }
            set(&mut claim, &["metadata", "labels"], all);
            claims.push(claim);
            volumes.retain(|v| v.text(&["name"]) != template.name());
            volumes.push(json!({
                "name": template.name(), "persistentVolumeClaim": {"claimName": name},
            }));
        }
        if !claims.is_empty() {
            set(pod, &["spec", "volumes"], volumes.into());
        }
        claims
    }

    fn status(&mut self, owned: &[Arc<Value>]) -> Value {
        let (mut total, mut ready, mut available, mut current, mut updated) = (0, 0, 0, 0, 0);
        for pod in owned
            .iter()
            .filter(|p| ordinal(self.set, p.name()).is_some())
        {
            if pods::is_finished(pod) {
                continue;
            }
            total += 1;
            if pod.text(&["status", "phase"]) == "Running" && pods::is_ready(pod) {
                ready += 1;
                available += i64::from(self.is_healthy(pod));
            }
            if pod.is_deleting() {
                continue;
            }
            let revision = pod.label(history::HASH_LABEL);
            current += i64::from(revision == Some(self.revisions.current.name()));
            updated += i64::from(revision == Some(self.revisions.update.name()));
        }
        let mut named = self.revisions.current.name();
        let rolls = self.partition() == Some(0);
        // Everything is of the new template: it becomes the current one.
        if rolls && updated == total && ready == total && total == replicas(self.set) {
            named = self.revisions.update.name();
            current = updated;
        }
        let mut status = self
            .set
            .at(&["status"])
            .cloned()
            .unwrap_or_else(|| json!({}));
        for (field, value) in [
            ("replicas", total),
            ("readyReplicas", ready),
            ("availableReplicas", available),
            ("currentReplicas", current),
            ("updatedReplicas", updated),
        ] {
            // Two of the counts are always shown, as the API's own types do.
            if value == 0 && !["replicas", "availableReplicas"].contains(&field) {
                unset(&mut status, &[field]);
            } else {
                set(&mut status, &[field], value.into());
            }
        }
        set(&mut status, &["currentRevision"], named.into());
        set(
            &mut status,
            &["updateRevision"],
            self.revisions.update.name().into(),
        );
        set(
            &mut status,
            &["observedGeneration"],
            self.set.generation().into(),
        );
        if status.at(&["collisionCount"]).is_none() {
            set(&mut status, &["collisionCount"], 0.into());
        }
        status
    }
}
