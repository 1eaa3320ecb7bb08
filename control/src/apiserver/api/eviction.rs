//! The `eviction` subresource: a delete that disruption budgets may refuse.

use serde_json::{Value, json};

use super::pods::set_condition;
use super::{Api, DeleteRequest, ListQuery, WriteOptions, now_text, read};
use crate::apiserver::object::{self, map_mut, text};
use crate::apiserver::registry::{ResourceDef, SubresourceKind};
use crate::apiserver::selector::LabelSelector;
use crate::status::{ApiError, Cause};

/// Seconds after which a refused client may ask again.
const RETRY_AFTER_S: u32 = 10;

impl Api {
    /// Evicts a pod.
    ///
    /// # Errors
    /// 404, 429 when a disruption budget allows no more, 500 when several budgets select the pod.
    pub async fn evict(
        &self,
        namespace: &str,
        name: &str,
        request: &DeleteRequest,
        options: &WriteOptions,
    ) -> Result<(), ApiError> {
        let def = self.resource("", "v1", "pods")?;
        let pod = self.get(&def, namespace, name).await?;
        if needs_budget(&pod) {
            self.charge_budget(namespace, &pod, options).await?;
            if !request.dry_run {
                let target = Self::target(&def, namespace, name);
                let status = super::Target {
                    sub: Some(SubresourceKind::Status),
                    ..target
                };
                let mark = json!({"type": "DisruptionTarget", "status": "True",
                    "reason": "EvictionByEvictionAPI", "message": "Eviction API: evicting"});
                let edit = |pod: &Value| {
                    let mut pod = pod.clone();
                    set_condition(&mut pod, mark.clone())?;
                    Ok((pod, ()))
                };
                self.change(status, options, true, edit).await?;
            }
        }
        self.delete(&def, namespace, name, request)
            .await
            .map(|_| ())
    }

    async fn charge_budget(
        &self,
        namespace: &str,
        pod: &Value,
        options: &WriteOptions,
    ) -> Result<(), ApiError> {
        let def = self.resource("policy", "v1", "poddisruptionbudgets")?;
        let listed = self.list(&def, namespace, &ListQuery::default()).await?;
        let mut budgets = Vec::new();
        for record in listed.records {
            let budget = read::view(&def, &record)?;
            let selector = LabelSelector::from_object(&budget["spec"]["selector"]);
            if selector.is_some_and(|s| s.matches_object(pod)) {
                budgets.push(budget);
            }
        }
        match budgets.as_slice() {
            [] => Ok(()),
            [budget] => self.charge(&def, namespace, budget, pod, options).await,
            _ => Err(ApiError::new(
                500,
                "InternalError",
                "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.",
            )),
        }
    }

    async fn charge(
        &self,
        def: &ResourceDef,
        namespace: &str,
        budget: &Value,
        pod: &Value,
        options: &WriteOptions,
    ) -> Result<(), ApiError> {
        let name = object::name(budget);
        let target = super::Target {
            sub: Some(SubresourceKind::Status),
            ..Self::target(def, namespace, name)
        };
        let edit = |budget: &Value| {
            let mut budget = budget.clone();
            let allowed = budget["status"]["disruptionsAllowed"].as_i64().unwrap_or(0);
            check_budget(name, &budget, allowed)?;
            let status = map_mut(&mut budget, "status")?;
            status.insert("disruptionsAllowed".into(), (allowed - 1).into());
            let slot = status.entry("disruptedPods").or_insert_with(|| json!({}));
            if let Value::Object(disrupted) = slot {
                disrupted.insert(object::name(pod).to_owned(), now_text().into());
            }
            Ok((budget, ()))
        };
        self.change(target, options, true, edit).await.map(|_| ())
    }
}

/// Pods that do not count for their budget anyway go without asking it.
fn needs_budget(pod: &Value) -> bool {
    let phase = text(pod, "/status/phase");
    !matches!(phase, "Succeeded" | "Failed" | "Pending")
        && text(pod, "/metadata/deletionTimestamp").is_empty()
}

fn check_budget(name: &str, budget: &Value, allowed: i64) -> Result<(), ApiError> {
    let observed = budget["status"]["observedGeneration"].as_i64().unwrap_or(0);
    let generation = budget["metadata"]["generation"].as_i64().unwrap_or(0);
    let refuse = |message: String| {
        let text = "Cannot evict pod as it would violate the pod's disruption budget.";
        let mut error = ApiError::new(429, "TooManyRequests", text);
        error.details.causes.push(Cause {
            reason: "DisruptionBudget",
            message,
            field: String::new(),
        });
        error
    };
    if observed < generation {
        let message =
            format!("The disruption budget {name} is still being processed by the server.");
        let mut error = refuse(message);
        error.details.retry_after_s = RETRY_AFTER_S;
        return Err(error);
    }
    if allowed <= 0 {
        let desired = budget["status"]["desiredHealthy"].as_i64().unwrap_or(0);
        let current = budget["status"]["currentHealthy"].as_i64().unwrap_or(0);
        return Err(refuse(format!(
            "The disruption budget {name} needs {desired} healthy pods and has {current} currently"
        )));
    }
    Ok(())
}
