//! The policies of a namespace in the write path: read here, decided in the room for admission.

use std::sync::Arc;

use serde_json::Value;

use super::{Api, forbidden, store_error};
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
