//! Replacing and patching objects: one loop that reads, changes and writes by revision.

use std::sync::Arc;

use serde_json::Value;

use super::services::Allocation;
use super::{
    Api, WRITE_TRIES, WriteOptions, check_uid, conflict, convert, invalid, now_text, read, scale,
    stale, store_error, strategy,
};
use crate::apiserver::object::{self, map_mut, text};
use crate::apiserver::patch::Apply;
use crate::apiserver::registry::{Gvk, ResourceDef, SubresourceKind};
use crate::apiserver::{codec, defaults, patch, validation};
use crate::client::PatchKind;
use crate::status::ApiError;
use crate::store::{Expect, Op, Record, StoreError};

/// The object (and subresource) that a write is for.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    pub def: &'a ResourceDef,
    pub namespace: &'a str,
    pub name: &'a str,
    /// `None` for the main resource.
    pub sub: Option<SubresourceKind>,
}

impl Target<'_> {
    /// Name of the subresource as managedFields record it.
    const fn sub_name(&self) -> &'static str {
        match self.sub {
            Some(SubresourceKind::Status) => "status",
            Some(SubresourceKind::Scale) => "scale",
            Some(SubresourceKind::Finalize) => "finalize",
            Some(SubresourceKind::Approval) => "approval",
            _ => "",
        }
    }
}

/// A patch body by its type.
#[derive(Clone, Debug)]
pub enum PatchRequest {
    Patch(PatchKind, Value),
    Apply { config: Value, force: bool },
}

/// A changed object and whether the write created it.
pub(crate) type Written = (Arc<Value>, bool);

impl Api {
    /// Replaces an object (or what the subresource covers of it).
    ///
    /// # Errors
    /// 400, 404, 409 for a stale resourceVersion or another uid, 422.
    pub async fn update(
        &self,
        target: Target<'_>,
        new: Value,
        options: &WriteOptions,
    ) -> Result<Written, ApiError> {
        check_identity(target, &new)?;
        let changed = self
            .change(target, options, true, |_| Ok((new.clone(), ())))
            .await;
        match changed {
            Err(e) if e.is_not_found() && target.sub.is_none() && target.def.create_on_update => {
                let Target {
                    def,
                    namespace,
                    name,
                    ..
                } = target;
                let mut new = new;
                if !text(&new, "/metadata/resourceVersion").is_empty() {
                    return Err(stale(def, name));
                }
                map_mut(&mut new, "metadata")?.insert("name".into(), name.into());
                Ok((self.create(def, namespace, new, options).await?, true))
            }
            changed => changed.map(|(object, _)| (object, false)),
        }
    }

    /// Patches an object. Returns it with the warnings that its fields earned.
    ///
    /// # Errors
    /// 400, 404, 409, 415, 422.
    pub async fn patch(
        &self,
        target: Target<'_>,
        request: &PatchRequest,
        options: &WriteOptions,
    ) -> Result<(Written, Vec<String>), ApiError> {
        let gvk = body_kind(target);
        let (kind, body) = match request {
            PatchRequest::Patch(kind, body) => (*kind, body),
            PatchRequest::Apply { config, force } => {
                return self.apply(target, config, *force, options).await;
            }
        };
        let patched = self
            .change(target, options, true, |current| {
                let mut object = current.clone();
                match kind {
                    PatchKind::Json => patch::apply_json_patch(&mut object, body)?,
                    PatchKind::Merge => patch::apply_merge_patch(&mut object, body),
                    PatchKind::StrategicMerge => {
                        patch::apply_strategic_merge(gvk, &mut object, body)?;
                    }
                }
                let warnings = codec::check_fields(gvk, &mut object, options.validation)?;
                check_identity(target, &object)?;
                Ok((object, warnings))
            })
            .await?;
        Ok(((patched.0, false), patched.1))
    }

    async fn apply(
        &self,
        target: Target<'_>,
        config: &Value,
        force: bool,
        options: &WriteOptions,
    ) -> Result<(Written, Vec<String>), ApiError> {
        check_identity(target, config)?;
        let gvk = body_kind(target);
        let now = now_text();
        let run = |live: Option<&Value>| {
            let mut object = patch::server_side_apply(&Apply {
                gvk,
                live,
                config,
                manager: &options.manager,
                force,
                subresource: target.sub_name(),
                now: &now,
            })?;
            let warnings = codec::check_fields(gvk, &mut object, options.validation)?;
            Ok::<_, ApiError>((object, warnings))
        };
        let changed = self
            .change(target, options, false, |current| run(Some(current)))
            .await;
        match changed {
            Err(e) if e.is_not_found() && target.sub.is_none() => {
                let (mut object, warnings) = run(None)?;
                let Target {
                    def,
                    namespace,
                    name,
                    ..
                } = target;
                map_mut(&mut object, "metadata")?.insert("name".into(), name.into());
                let made = self
                    .create_named(def, namespace, object, options, Some(()))
                    .await?;
                Ok(((made, true), warnings))
            }
            changed => changed.map(|(object, warnings)| ((object, false), warnings)),
        }
    }

    /// Reads, lets `edit` change, and writes; again from the start when another writer was faster, unless the edit
    /// insists on the version that it names. `track` records the manager of the change.
    pub(super) async fn change<T>(
        &self,
        target: Target<'_>,
        options: &WriteOptions,
        track: bool,
        edit: impl Fn(&Value) -> Result<(Value, T), ApiError>,
    ) -> Result<(Arc<Value>, T), ApiError> {
        let Target {
            def,
            namespace,
            name,
            ..
        } = target;
        for _ in 0..WRITE_TRIES {
            let record = self.record(def, namespace, name).await?;
            let old = read::view(def, &record)?;
            let seen = if target.sub == Some(SubresourceKind::Scale) {
                scale::of(def, &old)
            } else {
                Value::clone(&old)
            };
            let (new, extra) = edit(&seen)?;
            check_version(def, &new, &old)?;
            check_uid(def, text(&new, "/metadata/uid"), &old)?;
            let (new, allocation) = self.merge(target, new, &old).await?;
            let new = finish(target, new, &old, options, track)?;
            if new == *old {
                return Ok((answer(target, &old), extra));
            }
            // What is removed with its last finalizer holds and counts for nothing any more.
            let kept = (!strategy::is_finished(def, &new)).then_some(&new);
            let mut ops = kept.map_or_else(Vec::new, |_| allocation.ops);
            ops.extend(
                self.charge_quotas(def, namespace, (Some(&old), kept))
                    .await?,
            );
            if target.sub.is_none() {
                self.judge_template(def, namespace, (&old, &new), options)
                    .await?;
            }
            if options.dry_run {
                return Ok((answer(target, &Arc::new(new)), extra));
            }
            match self.write(def, &record, new, ops).await? {
                Some(written) => return Ok((answer(target, &written), extra)),
                None => continue,
            }
        }
        Err(stale(def, name))
    }

    /// The whole new object, from what the edit may change.
    async fn merge(
        &self,
        target: Target<'_>,
        mut new: Value,
        old: &Value,
    ) -> Result<(Value, Allocation), ApiError> {
        let def = target.def;
        let is_service = def.group.is_empty() && def.kind == "Service";
        match target.sub {
            None => {}
            Some(SubresourceKind::Scale) => new = scale::apply(&new, old)?,
            Some(SubresourceKind::Finalize) => {
                let mut result = old.clone();
                let finalizers = new.pointer("/spec/finalizers").cloned();
                object::put(map_mut(&mut result, "spec")?, "finalizers", finalizers);
                return Ok((result, Allocation::default()));
            }
            Some(_) => {
                let mut result = strategy::only_status(&new, old)?;
                if is_service {
                    defaults::apply_defaults(def.gvk(), &mut result, Some(old));
                }
                return Ok((result, Allocation::default()));
            }
        }
        strategy::prepare_update(def, &mut new, old)?;
        if is_service {
            super::services::carry_over(&mut new, old)?;
        }
        defaults::apply_defaults(def.gvk(), &mut new, Some(old));
        let allocation = if is_service {
            self.allocate(&mut new, Some(old)).await?
        } else {
            Allocation::default()
        };
        strategy::bump_generation(def, &mut new, old);
        Ok((new, allocation))
    }

    /// Writes `new` over `record` together with `more`. `None`: somebody else was faster.
    async fn write(
        &self,
        def: &ResourceDef,
        record: &Record,
        new: Value,
        more: Vec<Op>,
    ) -> Result<Option<Arc<Value>>, ApiError> {
        let expect = Expect::Revision(record.revision);
        let key = record.key.to_string();
        let finished = strategy::is_finished(def, &new);
        let mut ops = Vec::new();
        if finished {
            ops.push(Op::Delete { key, expect });
            ops.extend(super::services::release(def, &new));
        } else {
            let value = object::encode(&convert::to_stored(def, new.clone()))?;
            ops.push(Op::Put { key, value, expect });
        }
        ops.extend(more);
        match self.store.commit(ops).await {
            Ok(_) if finished => Ok(Some(Arc::new(new))),
            Ok(committed) => match committed.records.into_iter().next().flatten() {
                Some(record) => read::view(def, &record).map(Some),
                None => Ok(None),
            },
            Err(StoreError::Conflict { .. }) => Ok(None),
            Err(e) => Err(store_error(e)),
        }
    }
}

fn finish(
    target: Target<'_>,
    mut new: Value,
    old: &Value,
    options: &WriteOptions,
    track: bool,
) -> Result<Value, ApiError> {
    let gvk = target.def.gvk();
    let mut causes = match target.sub {
        None | Some(SubresourceKind::Scale) => validation::validate_update(gvk, &new, old),
        Some(SubresourceKind::Status) => validation::validate_status_update(gvk, &new, old),
        Some(_) => Vec::new(),
    };
    causes.extend(strategy::check_finalizers(&new, old));
    invalid(gvk, target.name, causes)?;
    if track {
        let now = now_text();
        let manager = &options.manager;
        patch::track_update(gvk, Some(old), &mut new, manager, target.sub_name(), &now);
    }
    Ok(new)
}

fn answer(target: Target<'_>, object: &Arc<Value>) -> Arc<Value> {
    if target.sub == Some(SubresourceKind::Scale) {
        Arc::new(scale::of(target.def, object))
    } else {
        Arc::clone(object)
    }
}

fn body_kind<'a>(target: Target<'a>) -> Gvk<'a> {
    if target.sub == Some(SubresourceKind::Scale) {
        Gvk::new("autoscaling", "v1", "Scale")
    } else {
        target.def.gvk()
    }
}

fn check_version(def: &ResourceDef, new: &Value, old: &Value) -> Result<(), ApiError> {
    let wanted = text(new, "/metadata/resourceVersion");
    if wanted.is_empty() || wanted == text(old, "/metadata/resourceVersion") {
        return Ok(());
    }
    Err(stale(def, object::name(old)))
}

/// The body names the object of the URL.
fn check_identity(target: Target<'_>, object: &Value) -> Result<(), ApiError> {
    let name = object::name(object);
    if !name.is_empty() && name != target.name {
        return Err(ApiError::bad_request(format!(
            "the name of the object ({name}) does not match the name on the URL ({})",
            target.name
        )));
    }
    let namespace = object::namespace(object);
    if target.def.namespaced && !namespace.is_empty() && namespace != target.namespace {
        return Err(ApiError::bad_request(format!(
            "the namespace of the provided object does not match the namespace sent on the request ({namespace} and {})",
            target.namespace
        )));
    }
    Ok(())
}

/// 409 in the words of a resource, for the rooms beside this one.
pub(super) fn refuse(def: &ResourceDef, name: &str, why: &str) -> ApiError {
    conflict(def, name, why)
}
