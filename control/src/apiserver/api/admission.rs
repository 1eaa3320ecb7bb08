//! What is filled in or refused because of other objects: service accounts, priorities, default tolerations.

use serde_json::{Value, json};

use super::{Api, forbidden, store_error};
use crate::apiserver::object::{self, map_mut, text};
use crate::apiserver::registry::ResourceDef;
use crate::status::{ApiError, Cause};

/// How long a pod stays on a node that is not ready or unreachable, unless it says otherwise.
const NODE_TOLERATION_S: i64 = 300;
const SYSTEM_PRIORITIES: [(&str, i64); 2] = [
    ("system-node-critical", 2_000_001_000),
    ("system-cluster-critical", 2_000_000_000),
];

impl Api {
    pub(super) async fn admit_create(
        &self,
        def: &ResourceDef,
        object: &mut Value,
    ) -> Result<(), ApiError> {
        if def.group.is_empty() && def.kind == "Pod" {
            default_service_account(object)?;
            self.resolve_priority(def, object).await?;
            default_tolerations(object)?;
        }
        if def.group.is_empty() && def.kind == "Node" {
            taint_until_ready(object)?;
        }
        Ok(())
    }

    async fn resolve_priority(&self, def: &ResourceDef, pod: &mut Value) -> Result<(), ApiError> {
        let wanted = text(pod, "/spec/priorityClassName").to_owned();
        let class = if wanted.is_empty() {
            self.default_priority_class().await?
        } else if let Some((_, value)) = SYSTEM_PRIORITIES.iter().find(|(n, _)| *n == wanted) {
            Some((wanted, *value, "PreemptLowerPriority".to_owned()))
        } else {
            let key = format!("scheduling.k8s.io/priorityclasses/{wanted}");
            let Some(record) = self.store.get(&key).await.map_err(store_error)? else {
                let why = format!("no PriorityClass with name {wanted} was found");
                return Err(forbidden(def, object::name(pod), &why));
            };
            Some(class_of(&*object::decode(&record)?))
        };
        let (name, priority, policy) =
            class.unwrap_or((String::new(), 0, "PreemptLowerPriority".into()));
        let given = pod["spec"]["priority"].as_i64();
        if given.is_some_and(|g| g != priority) {
            let why = format!(
                "the integer value of priority ({}) must not be provided in pod spec; priority admission controller computed {priority} from the given PriorityClass name",
                given.unwrap_or_default()
            );
            return Err(forbidden(def, object::name(pod), &why));
        }
        let spec = map_mut(pod, "spec")?;
        if !name.is_empty() {
            spec.insert("priorityClassName".into(), name.into());
        }
        spec.insert("priority".into(), priority.into());
        spec.entry("preemptionPolicy")
            .or_insert_with(|| policy.into());
        Ok(())
    }

    async fn default_priority_class(&self) -> Result<Option<(String, i64, String)>, ApiError> {
        let page = self
            .store
            .list("scheduling.k8s.io/priorityclasses/", None, 0, None)
            .await;
        let mut best = None;
        for record in page.map_err(store_error)?.records {
            let class = object::decode(&record)?;
            if class["globalDefault"].as_bool() == Some(true) {
                let found = class_of(&class);
                if best.as_ref().is_none_or(|(_, value, _)| found.1 < *value) {
                    best = Some(found);
                }
            }
        }
        Ok(best)
    }
}

fn class_of(class: &Value) -> (String, i64, String) {
    let policy = match text(class, "/preemptionPolicy") {
        "" => "PreemptLowerPriority",
        other => other,
    };
    (
        object::name(class).to_owned(),
        class["value"].as_i64().unwrap_or(0),
        policy.to_owned(),
    )
}

/// No pod comes to a new node before the node controller has seen that it is ready.
fn taint_until_ready(node: &mut Value) -> Result<(), ApiError> {
    let taint = json!({"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"});
    let slot = map_mut(node, "spec")?
        .entry("taints")
        .or_insert_with(|| json!([]));
    if slot.is_null() {
        *slot = json!([]);
    }
    if let Value::Array(taints) = slot
        && !taints
            .iter()
            .any(|t| t["key"] == taint["key"] && t["effect"] == taint["effect"])
    {
        taints.push(taint);
    }
    Ok(())
}

fn default_service_account(pod: &mut Value) -> Result<(), ApiError> {
    let spec = map_mut(pod, "spec")?;
    let old = spec
        .get("serviceAccount")
        .and_then(Value::as_str)
        .unwrap_or_default()
        .to_owned();
    let name = match spec.get("serviceAccountName").and_then(Value::as_str) {
        None | Some("") if old.is_empty() => "default".to_owned(),
        None | Some("") => old,
        Some(name) => name.to_owned(),
    };
    spec.insert("serviceAccountName".into(), name.clone().into());
    spec.insert("serviceAccount".into(), name.into());
    Ok(())
}

fn default_tolerations(pod: &mut Value) -> Result<(), ApiError> {
    let spec = map_mut(pod, "spec")?;
    let slot = spec.entry("tolerations").or_insert_with(|| json!([]));
    if slot.is_null() {
        *slot = json!([]);
    }
    // Validation refuses other types.
    let Value::Array(tolerations) = slot else {
        return Ok(());
    };
    for key in [
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/unreachable",
    ] {
        let covers = |t: &Value| {
            let (k, effect) = (text(t, "/key"), text(t, "/effect"));
            (k == key || k.is_empty()) && (effect == "NoExecute" || effect.is_empty())
        };
        if !tolerations.iter().any(covers) {
            tolerations.push(
                json!({"key": key, "operator": "Exists", "effect": "NoExecute",
                "tolerationSeconds": NODE_TOLERATION_S}),
            );
        }
    }
    Ok(())
}

/// Rules between an object and the request that creates it.
pub(super) fn bound_to_request(def: &ResourceDef, object: &Value) -> Vec<Cause> {
    // Events name the object they are about: an event elsewhere would not be found.
    if def.group.is_empty() && def.kind == "Event" {
        let involved = text(object, "/involvedObject/namespace");
        let namespace = object::namespace(object);
        let fits = if involved.is_empty() {
            namespace == "default"
        } else {
            involved == namespace
        };
        if !fits {
            return vec![Cause {
                reason: "FieldValueInvalid",
                message: format!("Invalid value: \"{involved}\": does not match event.namespace"),
                field: "involvedObject.namespace".into(),
            }];
        }
    }
    Vec::new()
}
