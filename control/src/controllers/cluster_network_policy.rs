//! Says in the status of every ClusterNetworkPolicy whether it is understood. What nodes make of it is theirs to tell: Events of
//! pods that they shut, and `weirctl policy`.
//!
//! The API (policy.networking.k8s.io/v1alpha2) leaves types and reasons of conditions to implementations.

use std::sync::Arc;

use control_feed::{is_staged, unknown_parts, unknown_staged};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::runtime::informer::Store;
use super::runtime::object::{Key, Object, set, set_condition};
use super::runtime::session::{Context, Session};
use super::runtime::worker::{Again, Controller, KeyQueue, enqueue_changes, tolerate_change};
use super::staged_policy::not_staged;
use crate::client::resources;
use crate::status::ApiError;

const CONDITION: &str = "Accepted";
/// More parts are counted, not listed: the message of a condition has 32,768 characters at most.
const MAX_LISTED: usize = 20;

#[derive(Debug)]
pub(super) struct ClusterNetworkPolicies {
    policies: Arc<Store>,
}

impl ClusterNetworkPolicies {
    pub(super) fn new(context: &Context, queue: &KeyQueue) -> Self {
        enqueue_changes(context, resources::CLUSTER_NETWORK_POLICIES, queue);
        Self {
            policies: context.informers.store(resources::CLUSTER_NETWORK_POLICIES),
        }
    }
}

impl Controller for ClusterNetworkPolicies {
    const NAME: &'static str = "clusternetworkpolicy";
    const WORKERS: usize = 1;

    async fn reconcile(&self, key: &Key, session: &Session<'_>) -> Result<Again, ApiError> {
        let Some(policy) = self.policies.get(key).filter(|p| !p.is_deleting()) else {
            return Ok(None);
        };
        let status = status(&policy, Timestamp::now());
        if policy.at(&["status"]) != Some(&status) {
            let r = resources::CLUSTER_NETWORK_POLICIES;
            tolerate_change(session.replace_status(r, &policy, status).await)?;
        }
        Ok(None)
    }
}

/// The status that a policy should have; conditions of others stay.
fn status(policy: &Value, now: Timestamp) -> Value {
    let mut status = policy.at(&["status"]).cloned().unwrap_or_else(|| json!({}));
    let (state, reason, message) = verdict(policy);
    set_condition(&mut status, CONDITION, state, reason, &message, now);
    let mut conditions = status.items(&["conditions"]).to_vec();
    for condition in &mut conditions {
        if condition.text(&["type"]) == CONDITION {
            let generation = policy.generation();
            set(condition, &["observedGeneration"], generation.into());
        }
    }
    set(&mut status, &["conditions"], Value::Array(conditions));
    status
}

fn verdict(policy: &Value) -> (&'static str, &'static str, String) {
    let unknown = unknown_parts(policy);
    if !unknown.is_empty() {
        let listed = unknown.iter().take(MAX_LISTED);
        let mut parts = listed.cloned().collect::<Vec<_>>().join(", ");
        if unknown.len() > MAX_LISTED {
            parts.push_str(&format!(" and {} more", unknown.len() - MAX_LISTED));
        }
        let message = format!(
            "of a kind that is not known here: {parts}. Rules with such parts match nothing when they accept, and deny everything when not; an unknown subject selects nobody"
        );
        return ("False", "UnknownParts", message);
    }
    if is_staged(policy) {
        let message = "staged: nodes report what it would change and change nothing";
        return ("True", "Staged", message.into());
    }
    let mut message = "all of it is enforced".to_owned();
    if let Some(value) = unknown_staged(policy) {
        message.push_str(&format!(": {}", not_staged(value)));
    }
    ("True", "Accepted", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    fn policy(peer: Value) -> Value {
        json!({
            "metadata": {"name": "p", "generation": 3},
            "spec": {"tier": "Admin", "priority": 1, "subject": {"namespaces": {}},
                "egress": [{"action": "Accept", "to": [peer]}]},
        })
    }

    #[test]
    fn a_status_is_written_once_and_keeps_what_others_wrote() {
        let mut policy = policy(json!({"domainNames": ["a.example"]}));
        let other = json!({"type": "Other", "status": "True"});
        policy["status"] = json!({"conditions": [other]});
        let first = status(&policy, at("2024-01-01T00:00:00Z"));
        assert_eq!(first["conditions"][0], other);
        let condition = &first["conditions"][1];
        assert_eq!(condition["reason"], "Accepted");
        assert_eq!(condition["status"], "True");
        assert_eq!(condition["observedGeneration"], 3);
        policy["status"] = first.clone();
        assert_eq!(status(&policy, at("2024-01-02T00:00:00Z")), first);

        // A change that is as good as before: the generation follows, the time of the transition stays.
        policy["metadata"]["generation"] = json!(4);
        policy["metadata"]["annotations"] = json!({"weir.dev/staged": "true"});
        let staged = status(&policy, at("2024-01-03T00:00:00Z"));
        assert_eq!(staged["conditions"][1]["reason"], "Staged");
        assert_eq!(staged["conditions"][1]["observedGeneration"], 4);
        assert_eq!(
            staged["conditions"][1]["lastTransitionTime"],
            "2024-01-01T00:00:00Z"
        );
    }

    #[test]
    fn a_policy_that_is_not_staged_for_its_spelling_says_so() {
        let mut policy = policy(json!({"networks": ["10.0.0.0/8"]}));
        policy["metadata"]["annotations"] = json!({"weir.dev/staged": "True"});
        let (state, reason, message) = verdict(&policy);
        assert_eq!((state, reason), ("True", "Accepted"));
        assert!(message.contains("\"True\""), "{message}");
        policy["metadata"]["annotations"] = json!({"weir.dev/staged": "false"});
        assert_eq!(verdict(&policy).2, "all of it is enforced");
    }

    #[test]
    fn what_is_not_known_is_named() {
        let (state, reason, message) = verdict(&policy(json!({"clouds": ["c1"]})));
        assert_eq!((state, reason), ("False", "UnknownParts"));
        assert!(message.contains("spec.egress[0].to[0]"), "{message}");
    }
}
