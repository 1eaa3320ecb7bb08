//! Assigning pods to nodes.

use serde_json::{Value, json};

use super::update::{Target, refuse};
use super::{
    Api, WRITE_TRIES, WriteOptions, check_uid, invalid, now_text, read, stale, store_error,
};
use crate::apiserver::object::{self, map_mut, text};
use crate::status::{ApiError, Cause};
use crate::store::{Expect, Op, StoreError};

impl Api {
    /// The `binding` subresource: a pod gets its node exactly once.
    ///
    /// # Errors
    /// 404, 409 for a pod that is bound, gated or being deleted, 422 for a target that is no node.
    pub async fn bind(
        &self,
        namespace: &str,
        name: &str,
        binding: &Value,
        options: &WriteOptions,
    ) -> Result<(), ApiError> {
        let def = self.resource("", "v1", "pods")?;
        let node = text(binding, "/target/name");
        check_target(&def, name, binding)?;
        for _ in 0..WRITE_TRIES {
            let record = self.record(&def, namespace, name).await?;
            let pod = read::view(&def, &record)?;
            check_uid(&def, text(binding, "/metadata/uid"), &pod)?;
            let bound = text(&pod, "/spec/nodeName");
            if !bound.is_empty() {
                let why = format!("pod {name} is already assigned to node \"{bound}\"");
                return Err(refuse(&def, name, &why));
            }
            if !text(&pod, "/metadata/deletionTimestamp").is_empty() {
                let why = format!("pod {name} is being deleted, cannot be assigned to a host");
                return Err(refuse(&def, name, &why));
            }
            if pod["spec"]["schedulingGates"]
                .as_array()
                .is_some_and(|g| !g.is_empty())
            {
                let why = format!("pod {name} has non-empty .spec.schedulingGates");
                return Err(refuse(&def, name, &why));
            }
            let new = assigned(&pod, node, binding)?;
            if options.dry_run {
                return Ok(());
            }
            let op = Op::Put {
                key: record.key.to_string(),
                value: object::encode(&new)?,
                expect: Expect::Revision(record.revision),
            };
            match self.store.commit(vec![op]).await {
                Ok(_) => return Ok(()),
                Err(StoreError::Conflict { .. }) => {}
                Err(e) => return Err(store_error(e)),
            }
        }
        Err(stale(&def, name))
    }

    /// A pod as the target of a write.
    pub(super) const fn target<'a>(
        def: &'a crate::apiserver::registry::ResourceDef,
        namespace: &'a str,
        name: &'a str,
    ) -> Target<'a> {
        Target {
            def,
            namespace,
            name,
            sub: None,
        }
    }
}

fn check_target(
    def: &crate::apiserver::registry::ResourceDef,
    name: &str,
    binding: &Value,
) -> Result<(), ApiError> {
    let named = object::name(binding);
    if !named.is_empty() && named != name {
        return Err(ApiError::bad_request(format!(
            "the name of the binding ({named}) does not match the pod on the URL ({name})"
        )));
    }
    let mut causes = Vec::new();
    let kind = text(binding, "/target/kind");
    if !kind.is_empty() && kind != "Node" {
        causes.push(Cause {
            reason: "FieldValueNotSupported",
            message: format!("Unsupported value: {kind:?}: supported values: \"Node\""),
            field: "target.kind".into(),
        });
    }
    if text(binding, "/target/name").is_empty() {
        causes.push(Cause {
            reason: "FieldValueRequired",
            message: "Required value".into(),
            field: "target.name".into(),
        });
    }
    invalid(def.gvk(), name, causes)
}

fn assigned(pod: &Value, node: &str, binding: &Value) -> Result<Value, ApiError> {
    let mut new = pod.clone();
    map_mut(&mut new, "spec")?.insert("nodeName".into(), node.into());
    if let Some(annotations) = binding
        .pointer("/metadata/annotations")
        .and_then(Value::as_object)
    {
        let metadata = map_mut(&mut new, "metadata")?;
        let slot = metadata.entry("annotations").or_insert_with(|| json!({}));
        if let Value::Object(present) = slot {
            present.extend(annotations.iter().map(|(k, v)| (k.clone(), v.clone())));
        }
    }
    set_condition(&mut new, json!({"type": "PodScheduled", "status": "True"}))?;
    Ok(new)
}

/// Sets a condition by its type; the transition time changes with the status only.
pub(super) fn set_condition(object: &mut Value, mut condition: Value) -> Result<(), ApiError> {
    let slot = map_mut(object, "status")?
        .entry("conditions")
        .or_insert_with(|| json!([]));
    if slot.is_null() {
        *slot = json!([]);
    }
    let Value::Array(conditions) = slot else {
        return Err(ApiError::bad_request("status.conditions must be a list"));
    };
    let old = conditions
        .iter_mut()
        .find(|c| c["type"] == condition["type"]);
    let time = match &old {
        Some(old) if old["status"] == condition["status"] => old["lastTransitionTime"].clone(),
        _ => now_text().into(),
    };
    condition["lastTransitionTime"] = time;
    match old {
        Some(old) => *old = condition,
        None => conditions.push(condition),
    }
    Ok(())
}
