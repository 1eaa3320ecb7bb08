//! Deleting: preconditions, grace periods, finalizers and propagation.

use std::sync::Arc;

use jiff::SignedDuration;
use serde_json::{Value, json};

use super::{
    Api, ListQuery, WRITE_TRIES, check_uid, conflict, convert, forbidden, now, read, services,
    stale, store_error, strategy,
};
use crate::apiserver::object::{self, map_mut, rfc3339, text};
use crate::apiserver::registry::ResourceDef;
use crate::client::Propagation;
use crate::status::ApiError;
use crate::store::{Expect, Op, StoreError};

/// Finalizer of a foreground deletion: dependents go first.
const FOREGROUND: &str = "foregroundDeletion";
/// Finalizer of an orphaning deletion: dependents lose their reference first.
const ORPHAN: &str = "orphan";
/// Namespaces that the cluster needs.
const KEPT_NAMESPACES: [&str; 3] = ["default", "kube-system", "kube-public"];
/// Seconds that a pod gets when neither it nor the request says.
const POD_GRACE_S: i64 = 30;

/// Options of a delete.
#[derive(Clone, Debug, Default)]
pub struct DeleteRequest {
    pub grace_period_s: Option<i64>,
    pub uid: Option<String>,
    pub resource_version: Option<String>,
    pub propagation: Option<Propagation>,
    pub dry_run: bool,
}

/// What a delete left.
#[derive(Clone, Debug)]
pub struct DeleteOutcome {
    pub object: Arc<Value>,
    /// False when the object waits for its finalizers or its grace period.
    pub gone: bool,
}

/// What a delete decides about one version of an object.
enum Decision {
    Remove,
    /// The object with its deletion marked.
    Mark(Value),
    /// Deletion is marked already.
    Nothing,
}

impl Api {
    /// Deletes an object, or marks it and leaves the rest to its node and its finalizers.
    ///
    /// # Errors
    /// 403, 404, 409 for failed preconditions.
    pub async fn delete(
        &self,
        def: &ResourceDef,
        namespace: &str,
        name: &str,
        request: &DeleteRequest,
    ) -> Result<DeleteOutcome, ApiError> {
        if def.group.is_empty() && def.kind == "Namespace" && KEPT_NAMESPACES.contains(&name) {
            return Err(forbidden(def, name, "this namespace may not be deleted"));
        }
        for _ in 0..WRITE_TRIES {
            let record = self.record(def, namespace, name).await?;
            let old = read::view(def, &record)?;
            check_preconditions(def, request, &old)?;
            self.check_address_is_free(def, &old).await?;
            let expect = Expect::Revision(record.revision);
            let key = record.key.to_string();
            let (ops, object, gone) = match decide(def, request, &old)? {
                Decision::Nothing => {
                    return Ok(DeleteOutcome {
                        object: old,
                        gone: false,
                    });
                }
                Decision::Remove => {
                    let mut ops = vec![Op::Delete { key, expect }];
                    ops.extend(services::release(def, &old));
                    ops.extend(
                        self.charge_quotas(def, namespace, (Some(&old), None))
                            .await?,
                    );
                    (ops, Arc::clone(&old), true)
                }
                Decision::Mark(new) => {
                    let value = object::encode(&convert::to_stored(def, new.clone()))?;
                    (vec![Op::Put { key, value, expect }], Arc::new(new), false)
                }
            };
            if request.dry_run {
                return Ok(DeleteOutcome { object, gone });
            }
            match self.store.commit(ops).await {
                Ok(committed) => {
                    let record = committed.records.into_iter().next().flatten();
                    let object = match record {
                        Some(record) => read::view(def, &record)?,
                        None => object,
                    };
                    return Ok(DeleteOutcome { object, gone });
                }
                Err(StoreError::Conflict { .. }) => {}
                Err(e) => return Err(store_error(e)),
            }
        }
        Err(stale(def, name))
    }

    /// An IPAddress is the claim of its Service: without it the address would be given out twice.
    async fn check_address_is_free(&self, def: &ResourceDef, old: &Value) -> Result<(), ApiError> {
        if def.kind != "IPAddress" || text(old, "/spec/parentRef/resource") != "services" {
            return Ok(());
        }
        let (namespace, name) = (
            text(old, "/spec/parentRef/namespace"),
            text(old, "/spec/parentRef/name"),
        );
        let key = format!("core/services/{namespace}/{name}");
        let Some(record) = self.store.get(&key).await.map_err(store_error)? else {
            return Ok(());
        };
        let address = object::name(old);
        let service = object::decode(&record)?;
        let held = service["spec"]["clusterIPs"].as_array();
        if held.is_some_and(|ips| ips.iter().any(|ip| ip == address)) {
            let why = format!("it is the cluster IP of the Service {namespace}/{name}");
            return Err(forbidden(def, address, &why));
        }
        Ok(())
    }

    /// Deletes what a list query selects and returns what was selected.
    ///
    /// # Errors
    /// The first failure other than an object being gone already.
    pub async fn delete_collection(
        &self,
        def: &ResourceDef,
        namespace: &str,
        query: &ListQuery,
        request: &DeleteRequest,
    ) -> Result<read::Listed, ApiError> {
        let listed = self.list(def, namespace, query).await?;
        for record in &listed.records {
            let object = read::view(def, record)?;
            let (ns, name) = (object::namespace(&object), object::name(&object));
            match self.delete(def, ns, name, request).await {
                Err(e) if e.is_not_found() => {}
                Err(e) => return Err(e),
                Ok(_) => {}
            }
        }
        Ok(listed)
    }
}

fn check_preconditions(
    def: &ResourceDef,
    request: &DeleteRequest,
    old: &Value,
) -> Result<(), ApiError> {
    check_uid(def, request.uid.as_deref().unwrap_or_default(), old)?;
    let version = text(old, "/metadata/resourceVersion");
    if let Some(wanted) = request
        .resource_version
        .as_deref()
        .filter(|w| *w != version)
    {
        let why = format!(
            "Precondition failed: ResourceVersion in precondition: {wanted}, ResourceVersion in object meta: {version}"
        );
        return Err(conflict(def, object::name(old), &why));
    }
    Ok(())
}

fn decide(def: &ResourceDef, request: &DeleteRequest, old: &Value) -> Result<Decision, ApiError> {
    let is = |kind: &str| def.group.is_empty() && def.kind == kind;
    let grace = if is("Pod") {
        pod_grace(request, old)
    } else {
        0
    };
    let mut new = old.clone();
    let finalizers = finalizers_after(request, old);
    let metadata = map_mut(&mut new, "metadata")?;
    let list = (!finalizers.is_empty()).then(|| json!(finalizers));
    object::put(metadata, "finalizers", list);
    let marked = !text(old, "/metadata/deletionTimestamp").is_empty();
    let grace_before = old["metadata"]["deletionGracePeriodSeconds"].as_i64();
    // A grace period can only become shorter.
    if !marked || (is("Pod") && grace < grace_before.unwrap_or(0)) {
        let at = now().saturating_add(SignedDuration::from_secs(grace));
        let at = at.unwrap_or_else(|_| now());
        metadata.insert("deletionTimestamp".into(), rfc3339(at).into());
        metadata.insert("deletionGracePeriodSeconds".into(), grace.into());
        if let Some(generation) = old["metadata"]["generation"].as_i64().filter(|_| !marked) {
            metadata.insert("generation".into(), (generation + 1).into());
        }
    }
    if is("Namespace") {
        map_mut(&mut new, "status")?.insert("phase".into(), "Terminating".into());
    }
    if strategy::is_finished(def, &new) {
        return Ok(Decision::Remove);
    }
    Ok(if new == *old {
        Decision::Nothing
    } else {
        Decision::Mark(new)
    })
}

/// Nothing has to be stopped for a pod that no node runs or that has ended.
fn pod_grace(request: &DeleteRequest, pod: &Value) -> i64 {
    let phase = text(pod, "/status/phase");
    if text(pod, "/spec/nodeName").is_empty() || phase == "Succeeded" || phase == "Failed" {
        return 0;
    }
    let own = pod["spec"]["terminationGracePeriodSeconds"].as_i64();
    request.grace_period_s.or(own).unwrap_or(POD_GRACE_S).max(0)
}

fn finalizers_after(request: &DeleteRequest, old: &Value) -> Vec<String> {
    let list = old["metadata"]["finalizers"].as_array();
    let mut finalizers: Vec<String> = list
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .map(str::to_owned)
        .collect();
    let wanted = match request.propagation {
        Some(Propagation::Foreground) => Some(FOREGROUND),
        Some(Propagation::Orphan) => Some(ORPHAN),
        Some(Propagation::Background) => None,
        // The choice of an earlier delete stands.
        None => return finalizers,
    };
    finalizers.retain(|f| (f != FOREGROUND && f != ORPHAN) || Some(f.as_str()) == wanted);
    if let Some(wanted) = wanted
        && !finalizers.iter().any(|f| f == wanted)
    {
        finalizers.push(wanted.to_owned());
    }
    finalizers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apiserver::registry::Registry;

    fn pod(node: &str) -> Value {
        json!({"metadata": {"name": "p"}, "spec": {"nodeName": node, "terminationGracePeriodSeconds": 7},
            "status": {"phase": "Running"}})
    }

    fn decide_pod(request: &DeleteRequest, pod: &Value) -> Decision {
        decide(
            Registry::builtin().find("", "v1", "pods").unwrap(),
            request,
            pod,
        )
        .unwrap()
    }

    #[test]
    fn a_bound_pod_gets_its_grace_period_once() {
        let Decision::Mark(marked) = decide_pod(&DeleteRequest::default(), &pod("n1")) else {
            panic!("a bound pod is marked");
        };
        assert_eq!(marked["metadata"]["deletionGracePeriodSeconds"], 7);
        let again = decide_pod(&DeleteRequest::default(), &marked);
        assert!(matches!(again, Decision::Nothing));
        let shorter = DeleteRequest {
            grace_period_s: Some(2),
            ..DeleteRequest::default()
        };
        let Decision::Mark(shorter) = decide_pod(&shorter, &marked) else {
            panic!("shortened")
        };
        assert_eq!(shorter["metadata"]["deletionGracePeriodSeconds"], 2);
        let force = DeleteRequest {
            grace_period_s: Some(0),
            ..DeleteRequest::default()
        };
        assert!(matches!(decide_pod(&force, &marked), Decision::Remove));
    }

    #[test]
    fn an_unbound_pod_goes_at_once_unless_held() {
        assert!(matches!(
            decide_pod(&DeleteRequest::default(), &pod("")),
            Decision::Remove
        ));
        let foreground = DeleteRequest {
            propagation: Some(Propagation::Foreground),
            ..DeleteRequest::default()
        };
        let Decision::Mark(held) = decide_pod(&foreground, &pod("")) else {
            panic!("held")
        };
        assert_eq!(held["metadata"]["finalizers"], json!([FOREGROUND]));
        let background = DeleteRequest {
            propagation: Some(Propagation::Background),
            ..DeleteRequest::default()
        };
        assert!(matches!(decide_pod(&background, &held), Decision::Remove));
    }
}
