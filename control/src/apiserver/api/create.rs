//! Creating objects.

use std::sync::Arc;

use rand::Rng as _;
use serde_json::Value;

use super::services::Allocation;
use super::{
    Api, WRITE_TRIES, WriteOptions, admission, convert, forbidden, invalid, now_text, policies,
    read, store_error, strategy,
};
use crate::apiserver::object::{self, map_mut, text};
use crate::apiserver::registry::ResourceDef;
use crate::apiserver::{defaults, patch, validation};
use crate::status::{ApiError, Cause};
use crate::store::{Expect, Op, StoreError};

/// Characters appended to generateName.
const SUFFIX_CHARS: usize = 5;
/// Without vowels and look-alikes, so that no words appear.
const SUFFIX_ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
/// Longest generated name; longer prefixes are cut.
const GENERATED_NAME_CHARS: usize = 63;
/// Names tried for one generateName.
const NAME_TRIES: usize = 8;

impl Api {
    /// Creates an object in the resource's version; the caller has checked apiVersion and kind.
    ///
    /// # Errors
    /// 400, 403 (namespace ends), 404 (no namespace), 409 (exists), 422.
    pub async fn create(
        &self,
        def: &ResourceDef,
        namespace: &str,
        object: Value,
        options: &WriteOptions,
    ) -> Result<Arc<Value>, ApiError> {
        let prefix = text(&object, "/metadata/generateName");
        if !object::name(&object).is_empty() || prefix.is_empty() {
            return self
                .create_named(def, namespace, object, options, None)
                .await;
        }
        let prefix: String = prefix
            .chars()
            .take(GENERATED_NAME_CHARS - SUFFIX_CHARS)
            .collect();
        let mut tries = 0;
        loop {
            let mut candidate = object.clone();
            let name = format!("{prefix}{}", random_suffix());
            map_mut(&mut candidate, "metadata")?.insert("name".into(), name.into());
            let made = self
                .create_named(def, namespace, candidate, options, None)
                .await;
            tries += 1;
            match made {
                Err(e) if e.is_already_exists() && tries < NAME_TRIES => {}
                made => return made,
            }
        }
    }

    /// `owned` carries managedFields computed already (server-side apply); otherwise the manager is tracked here.
    pub(super) async fn create_named(
        &self,
        def: &ResourceDef,
        namespace: &str,
        object: Value,
        options: &WriteOptions,
        owned: Option<()>,
    ) -> Result<Arc<Value>, ApiError> {
        let uid = uuid::Uuid::new_v4().to_string();
        for _ in 0..WRITE_TRIES {
            let mut draft = object.clone();
            let (mut ops, home) = self.namespace_check(def, namespace, &draft).await?;
            let allocation = self.prepare(def, namespace, &mut draft, &uid).await?;
            policies::check_pod_security(def, &home, &draft, options)?;
            let charges = self
                .charge_quotas(def, namespace, (None, Some(&draft)))
                .await?;
            if owned.is_none() {
                let now = now_text();
                patch::track_update(def.gvk(), None, &mut draft, &options.manager, "", &now);
            }
            let name = object::name(&draft).to_owned();
            let key = def.key(namespace, &name);
            if options.dry_run {
                if self.store.get(&key).await.map_err(store_error)?.is_some() {
                    return Err(ApiError::already_exists(&def.group, &def.plural, &name));
                }
                return Ok(Arc::new(draft));
            }
            let stored = convert::to_stored(def, draft);
            let at = ops.len();
            let value = object::encode(&stored)?;
            ops.push(Op::Put {
                key: key.clone(),
                value,
                expect: Expect::Absent,
            });
            ops.extend(allocation.ops);
            ops.extend(charges);
            match self.store.commit(ops).await {
                Ok(committed) => {
                    let record = committed.records.into_iter().nth(at).flatten();
                    let record = record.ok_or_else(|| store_error(StoreError::Closed))?;
                    return read::view(def, &record);
                }
                Err(StoreError::Conflict { key: met, .. }) if met == key => {
                    return Err(ApiError::already_exists(&def.group, &def.plural, &name));
                }
                // The namespace or a quota changed, or somebody else took an address: decide again.
                Err(StoreError::Conflict { .. }) => {}
                Err(e) => return Err(store_error(e)),
            }
        }
        Err(ApiError::new(
            409,
            "Conflict",
            "other writers were faster each time; try again",
        ))
    }

    async fn prepare(
        &self,
        def: &ResourceDef,
        namespace: &str,
        draft: &mut Value,
        uid: &str,
    ) -> Result<Allocation, ApiError> {
        if def.namespaced {
            map_mut(draft, "metadata")?.insert("namespace".into(), namespace.into());
        } else {
            map_mut(draft, "metadata")?.shift_remove("namespace");
        }
        strategy::prepare_create(def, draft, uid, &now_text())?;
        // Before defaulting: whether a field was given matters to admission.
        self.admit_create(def, draft).await?;
        defaults::apply_defaults(def.gvk(), draft, None);
        let ranges = self.limit_ranges(def, namespace).await?;
        if policies::fill_limits(def, draft, &ranges) {
            // The quality of service follows from what was filled in.
            map_mut(draft, "status")?.shift_remove("qosClass");
            defaults::apply_defaults(def.gvk(), draft, None);
        }
        let name = object::name(draft).to_owned();
        if name.is_empty() {
            let message = "Required value: name or generateName is required".to_owned();
            let field = "metadata.name".to_owned();
            let cause = Cause {
                reason: "FieldValueRequired",
                message,
                field,
            };
            invalid(def.gvk(), &name, vec![cause])?;
        }
        let mut causes = validation::validate_create(def.gvk(), draft);
        causes.extend(admission::bound_to_request(def, draft));
        invalid(def.gvk(), &name, causes)?;
        policies::check_limits(def, draft, &ranges)?;
        if def.group.is_empty() && def.kind == "Service" {
            return self.allocate(draft, None).await;
        }
        Ok(Allocation::default())
    }

    /// The namespace, which exists and is not ending, also at the moment of the commit.
    async fn namespace_check(
        &self,
        def: &ResourceDef,
        namespace: &str,
        object: &Value,
    ) -> Result<(Vec<Op>, Arc<Value>), ApiError> {
        if !def.namespaced {
            return Ok((Vec::new(), Arc::new(Value::Null)));
        }
        let key = format!("core/namespaces/{namespace}");
        let Some(record) = self.store.get(&key).await.map_err(store_error)? else {
            return Err(ApiError::not_found("", "namespaces", namespace));
        };
        let found = object::decode(&record)?;
        if text(&found, "/metadata/deletionTimestamp").is_empty() {
            let check = Op::Check {
                key,
                expect: Expect::Revision(record.revision),
            };
            return Ok((vec![check], found));
        }
        let why = format!(
            "unable to create new content in namespace {namespace} because it is being terminated"
        );
        let mut error = forbidden(def, object::name(object), &why);
        error.details.causes.push(Cause {
            reason: "NamespaceTerminating",
            message: format!("namespace {namespace} is being terminated"),
            field: "metadata.namespace".into(),
        });
        Err(error)
    }
}

fn random_suffix() -> String {
    let mut rng = rand::rng();
    (0..SUFFIX_CHARS)
        .map(|_| char::from(SUFFIX_ALPHABET[rng.random_range(0..SUFFIX_ALPHABET.len())]))
        .collect()
}
