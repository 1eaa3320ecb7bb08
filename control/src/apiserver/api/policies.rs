//! The policies of a namespace in the write path: read here, decided in the room for admission.

use std::sync::Arc;

use serde_json::Value;

use super::{Api, WriteOptions, forbidden, store_error};
use crate::apiserver::admission::pod_security::{self, Mode};
use crate::apiserver::admission::{limits, quota};
use crate::apiserver::object;
use crate::apiserver::registry::ResourceDef;
use crate::status::ApiError;
use crate::store::{Expect, Op};

const LIMIT_RANGES: &str = "core/limitranges";
const QUOTAS: &str = "core/resourcequotas";

fn is_core(def: &ResourceDef, kind: &str) -> bool {
    def.group.is_empty() && def.kind == kind
}

impl Api {
    /// The LimitRanges that a new object must follow.
    pub(super) async fn limit_ranges(
        &self,
        def: &ResourceDef,
        namespace: &str,
    ) -> Result<Vec<Arc<Value>>, ApiError> {
        if !is_core(def, "Pod") && !is_core(def, "PersistentVolumeClaim") {
            return Ok(Vec::new());
        }
        let prefix = format!("{LIMIT_RANGES}/{namespace}/");
        let page = self.store.list(&prefix, None, 0, None).await;
        let page = page.map_err(store_error)?;
        page.records.iter().map(|r| object::decode(r)).collect()
    }

    /// The steps that charge a write to the quotas of its namespace (or give back what it frees). Each expects its
    /// quota as it was read, so that concurrent writes cannot share what is left.
    ///
    /// # Errors
    /// 403 when a quota does not allow it.
    pub(super) async fn charge_quotas(
        &self,
        def: &ResourceDef,
        namespace: &str,
        (old, new): (Option<&Value>, Option<&Value>),
    ) -> Result<Vec<Op>, ApiError> {
        let mut ops = Vec::new();
        let Some(object) = new.or(old).filter(|_| def.namespaced) else {
            return Ok(ops);
        };
        let prefix = format!("{QUOTAS}/{namespace}/");
        let page = self.store.list(&prefix, None, 0, None).await;
        let own = def.key(namespace, object::name(object));
        for record in page.map_err(store_error)?.records {
            // A quota that is written itself is not charged for that in the same step.
            if *record.key == *own {
                continue;
            }
            let write = quota::Write {
                group: &def.group,
                plural: &def.plural,
                old,
                new,
            };
            let current = object::decode(&record)?;
            let charged = quota::charge(&current, write)
                .map_err(|why| forbidden(def, object::name(object), &why))?;
            if let Some(charged) = charged {
                ops.push(Op::Put {
                    key: record.key.to_string(),
                    value: object::encode(&charged)?,
                    expect: Expect::Revision(record.revision),
                });
            }
        }
        Ok(ops)
    }

    /// Pod Security of a changed template. Of pods themselves nothing may change that it looks at.
    pub(super) async fn judge_template(
        &self,
        def: &ResourceDef,
        namespace: &str,
        (old, new): (&Value, &Value),
        options: &WriteOptions,
    ) -> Result<(), ApiError> {
        let gvk = def.gvk();
        if is_core(def, "Pod") || pod_security::pods_of(gvk, old) == pod_security::pods_of(gvk, new)
        {
            return Ok(());
        }
        let key = format!("core/namespaces/{namespace}");
        let Some(record) = self.store.get(&key).await.map_err(store_error)? else {
            return Ok(());
        };
        check_pod_security(def, &*object::decode(&record)?, new, options)
    }
}

/// Fills the defaults of LimitRanges in. True when that changed the object.
pub(super) fn fill_limits(def: &ResourceDef, object: &mut Value, ranges: &[Arc<Value>]) -> bool {
    is_core(def, "Pod") && limits::fill(object, ranges.iter().map(|r| &**r))
}

/// 403 when an object is outside of what the LimitRanges of its namespace allow.
pub(super) fn check_limits(
    def: &ResourceDef,
    object: &Value,
    ranges: &[Arc<Value>],
) -> Result<(), ApiError> {
    for range in ranges {
        let errors = if is_core(def, "Pod") {
            limits::check_pod(object, range)
        } else {
            limits::check_claim(object, range)
        };
        let why = match errors.as_slice() {
            [] => continue,
            [one] => one.clone(),
            many => format!("[{}]", many.join(", ")),
        };
        return Err(forbidden(def, object::name(object), &why));
    }
    Ok(())
}

/// Judges the pods that an object is or makes by the Pod Security labels of its namespace. Templates are only warned
/// about: what they make is refused when it is made.
pub(super) fn check_pod_security(
    def: &ResourceDef,
    namespace: &Value,
    object: &Value,
    options: &WriteOptions,
) -> Result<(), ApiError> {
    let Some(pod) = pod_security::pods_of(def.gvk(), object) else {
        return Ok(());
    };
    let judge = |mode| pod_security::violations(pod, &pod_security::policy(namespace, mode));
    if is_core(def, "Pod")
        && let Some(found) = judge(Mode::Enforce)
    {
        return Err(forbidden(
            def,
            object::name(object),
            &format!("violates {found}"),
        ));
    }
    if let Some(found) = judge(Mode::Warn) {
        options.warnings.push(format!("would violate {found}"));
    }
    if let Some(found) = judge(Mode::Audit) {
        tracing::info!(
            namespace = object::name(namespace),
            kind = &*def.kind,
            name = object::name(object),
            "would violate {found}"
        );
    }
    Ok(())
}
