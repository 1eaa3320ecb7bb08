//! Server-side apply and the ownership of fields. The rules are those of the API documentation ("Server-Side Apply") and
//! KEP-555; pruning and comparison follow the published behaviour of structured-merge-diff.

mod fieldset;
mod managers;
mod typed;

use serde_json::{Map, Value};

use super::Apply;
use crate::apiserver::registry::Gvk;
use crate::apiserver::schema::normalize::normalize_keeping_empty;
use crate::apiserver::schema::schema;
use crate::status::{ApiError, Cause};
use fieldset::Set;
use managers::{Manager, Managers, Operation, is_reset, owned};
use typed::{Comparison, Shape};

/// Stands for everything that was written before the first apply.
const BEFORE_FIRST_APPLY: &str = "before-first-apply";
/// The manager whose first apply takes over what client-side apply wrote.
const KUBECTL: &str = "kubectl";
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// See [`super::server_side_apply`].
pub(super) fn server_side_apply(request: &Apply<'_>) -> Result<Value, ApiError> {
    let config = checked_config(request)?;
    let empty = empty_object(request.gvk);
    let live = request
        .live
        .map_or_else(|| empty.clone(), without_managed_fields);
    let before = request.live.map(Managers::of).unwrap_or_default();
    let mut managers = before.clone();
    let shape = shape_of(request.gvk);
    if request.live.is_some() && managers.0.is_empty() {
        let everything = Comparison::of(shape, &empty, &live);
        managers.put(Manager {
            name: BEFORE_FIRST_APPLY.into(),
            set: owned(&everything.added.union(&everything.modified), ""),
            ..updater(request.gvk, BEFORE_FIRST_APPLY, "", request.now)
        });
    }
    let applied = Applied {
        request,
        shape,
        live: &live,
        config: &config,
    };
    let (mut object, managers) = match applied.run(&managers, request.force) {
        Err(conflicts) if request.manager == KUBECTL && !request.force => {
            let allowed = last_applied_fields(shape, &live);
            let left = conflicts.without(&allowed);
            if left.0.is_empty() {
                applied.run(&managers, true)
            } else {
                Err(left)
            }
        }
        outcome => outcome,
    }
    .map_err(|conflicts| conflicts.into_error())?;
    refresh_last_applied(request, &mut object);
    if managers == before {
        keep_managed_fields(&mut object, request.live);
    } else {
        managers.write(&mut object);
    }
    Ok(object)
}

/// The configuration in normal form, if it can be applied.
fn checked_config(request: &Apply<'_>) -> Result<Value, ApiError> {
    let mut config = request.config.clone();
    let gvk = request.gvk;
    let text = |key: &str| config.get(key).and_then(Value::as_str).unwrap_or_default();
    if (text("apiVersion"), text("kind")) != (gvk.api_version().as_str(), gvk.kind) {
        return Err(ApiError::bad_request(format!(
            "apply needs apiVersion {} and kind {} in the body, found {:?} and {:?}",
            gvk.api_version(),
            gvk.kind,
            text("apiVersion"),
            text("kind")
        )));
    }
    if config
        .pointer("/metadata/managedFields")
        .is_some_and(|v| !v.is_null())
    {
        return Err(ApiError::bad_request("metadata.managedFields must be nil"));
    }
    let name = config
        .pointer("/metadata/name")
        .and_then(Value::as_str)
        .unwrap_or_default()
        .to_owned();
    let failed = |why: &str| {
        ApiError::bad_request(format!(
            "failed to create typed patch object ({name}; {}, Kind={}): {why}",
            gvk.api_version(),
            gvk.kind
        ))
    };
    if let Some(t) = schema().kind(gvk.group, gvk.version, gvk.kind) {
        let unknown =
            normalize_keeping_empty(t, &mut config).map_err(|e| failed(&e.to_string()))?;
        if let Some(first) = unknown.first() {
            return Err(failed(&format!(".{first}: field not declared in schema")));
        }
    }
    if let Some(duplicate) = typed::duplicates(shape_of(gvk), &config, "") {
        return Err(failed(&duplicate));
    }
    if let Value::Object(map) = &mut config {
        // Each door writes its own part of the object.
        if request.subresource == "status" {
            map.retain(|key, _| {
                matches!(key.as_str(), "apiVersion" | "kind" | "metadata" | "status")
            });
            let metadata = Map::from_iter([("name".to_owned(), Value::String(name))]);
            map.insert("metadata".into(), Value::Object(metadata));
        } else {
            map.shift_remove("status");
        }
    }
    Ok(config)
}

fn shape_of(gvk: Gvk<'_>) -> Shape {
    Shape::of_kind(schema().kind(gvk.group, gvk.version, gvk.kind))
}

fn empty_object(gvk: Gvk<'_>) -> Value {
    serde_json::json!({"apiVersion": gvk.api_version(), "kind": gvk.kind, "metadata": {}})
}

fn without_managed_fields(object: &Value) -> Value {
    let mut object = object.clone();
    if let Some(Value::Object(metadata)) = object.get_mut("metadata") {
        metadata.shift_remove("managedFields");
    }
    object
}

/// Managed fields that did not change stay as they are stored, to the letter.
fn keep_managed_fields(object: &mut Value, stored: Option<&Value>) {
    let before = stored.and_then(|o| o.pointer("/metadata/managedFields"));
    if let (Some(Value::Object(metadata)), Some(fields)) = (object.get_mut("metadata"), before) {
        metadata.insert("managedFields".into(), fields.clone());
    }
}

fn updater(gvk: Gvk<'_>, name: &str, subresource: &str, now: &str) -> Manager {
    Manager {
        name: name.into(),
        operation: Operation::Update,
        api_version: gvk.api_version(),
        subresource: subresource.into(),
        time: now.into(),
        set: Set::default(),
    }
}

struct Applied<'a> {
    request: &'a Apply<'a>,
    shape: Shape,
    live: &'a Value,
    config: &'a Value,
}

impl Applied<'_> {
    fn run(&self, managers: &Managers, force: bool) -> Result<(Value, Managers), Conflicts> {
        let request = self.request;
        let me = Manager {
            operation: Operation::Apply,
            set: owned(&typed::fields(self.shape, self.config), request.subresource),
            ..updater(
                request.gvk,
                request.manager,
                request.subresource,
                request.now,
            )
        };
        let last = managers.find(&me).cloned();
        let mut after = managers.clone();
        after.put(me.clone());
        let merged = typed::merge(self.shape, Some(self.live), self.config);
        let object = match &last {
            Some(last) => self.prune(&merged, &after.union(), &last.set),
            None => merged,
        };
        let comparison = Comparison::of(self.shape, self.live, &object);
        let changed = comparison.modified.union(&comparison.added);
        let mut conflicts = Conflicts::default();
        for other in managers.0.iter().filter(|m| last.as_ref() != Some(*m)) {
            let contested = other.set.intersection(&changed);
            if !contested.is_empty() {
                conflicts.0.push((other.clone(), contested));
            }
        }
        if !force && !conflicts.0.is_empty() {
            return Err(conflicts);
        }
        after.take(&comparison.removed);
        for (_, contested) in &conflicts.0 {
            after.take(contested);
        }
        let time = match &last {
            Some(last) if comparison.is_same() && last.set == me.set => last.time.clone(),
            _ => request.now.to_owned(),
        };
        let api_version = request.gvk.api_version();
        after.put(Manager {
            time,
            api_version,
            ..me
        });
        // The order of entries is no change.
        if after.0.len() == managers.0.len() && after.0.iter().all(|m| managers.0.contains(m)) {
            after = managers.clone();
        }
        Ok((object, after))
    }

    /// Removes what this manager applied last time, does not apply now, and nobody else owns.
    fn prune(&self, merged: &Value, managed: &Set, last: &Set) -> Value {
        let named = |set: &Set| typed::with_named_fields(self.shape, set);
        let fields = |value: &Value| named(&typed::fields(self.shape, value));
        let all = fields(merged);
        let pruned = typed::remove(self.shape, merged, last);
        let kept = fields(&pruned).union(&named(managed));
        let pruned = typed::remove(self.shape, merged, &all.difference(&kept));
        let gone = all.difference(&fields(&pruned)).intersection(&named(last));
        typed::remove(self.shape, merged, &gone)
    }
}

/// Fields that others own and this apply would change.
#[derive(Debug, Default)]
struct Conflicts(Vec<(Manager, Set)>);

impl Conflicts {
    fn without(self, allowed: &Set) -> Self {
        let left = self
            .0
            .into_iter()
            .map(|(manager, set)| (manager, set.difference(allowed)));
        Self(left.filter(|(_, set)| !set.is_empty()).collect())
    }

    fn into_error(mut self) -> ApiError {
        self.0.sort_by_key(|(manager, _)| manager.describe());
        let causes: Vec<Cause> = self
            .0
            .iter()
            .flat_map(|(manager, set)| {
                set.paths().into_iter().map(|field| Cause {
                    reason: "FieldManagerConflict",
                    message: format!("conflict with {}", manager.describe()),
                    field,
                })
            })
            .collect();
        let message = match causes.as_slice() {
            [one] => format!(
                "Apply failed with 1 conflict: {}: {}",
                one.message, one.field
            ),
            _ => {
                let mut lines = Vec::new();
                for (manager, set) in &self.0 {
                    lines.push(format!("conflicts with {}:", manager.describe()));
                    lines.extend(set.paths().into_iter().map(|path| format!("- {path}")));
                }
                format!(
                    "Apply failed with {} conflicts: {}",
                    causes.len(),
                    lines.join("\n")
                )
            }
        };
        let mut error = ApiError::new(409, "Conflict", message);
        error.details.causes = causes;
        error
    }
}

/// What client-side apply last wrote and nobody changed since: kubectl may take that over without force.
fn last_applied_fields(shape: Shape, live: &Value) -> Set {
    let annotation = live
        .pointer("/metadata/annotations")
        .and_then(|a| a.get(LAST_APPLIED));
    let Some(Ok(last)) = annotation
        .and_then(Value::as_str)
        .map(serde_json::from_str::<Value>)
    else {
        return Set::default();
    };
    let differences = Comparison::of(shape, &last, live);
    typed::fields(shape, &last)
        .difference(&differences.modified)
        .difference(&differences.added)
        .difference(&differences.removed)
}

/// An object that client-side apply knows is kept readable for it.
fn refresh_last_applied(request: &Apply<'_>, object: &mut Value) {
    let known = |o: &Value| {
        o.pointer("/metadata/annotations")
            .is_some_and(|a| a.get(LAST_APPLIED).is_some())
    };
    if request.manager != KUBECTL || !request.live.is_some_and(known) {
        return;
    }
    if let Some(Value::Object(annotations)) = object.pointer_mut("/metadata/annotations") {
        annotations.insert(LAST_APPLIED.into(), format!("{}\n", request.config).into());
    }
}

/// See [`super::track_update`].
pub(super) fn track_update(
    gvk: Gvk<'_>,
    old: Option<&Value>,
    new: &mut Value,
    manager: &str,
    subresource: &str,
    now: &str,
) {
    if subresource.is_empty() && is_reset(new) {
        Managers::default().write(new);
        return;
    }
    let stored = old.map(Managers::of).unwrap_or_default();
    let sent = Managers::of(new);
    let mut managers = if subresource.is_empty() && !sent.0.is_empty() {
        sent
    } else {
        stored.clone()
    };
    // Ownership begins with the creation of an object or with its first apply.
    if managers.0.is_empty() && old.is_some() {
        Managers::default().write(new);
        return;
    }
    let before = old.map_or_else(|| empty_object(gvk), without_managed_fields);
    let comparison = Comparison::of(shape_of(gvk), &before, &without_managed_fields(new));
    let changed = owned(&comparison.added.union(&comparison.modified), subresource);
    let me = updater(gvk, manager, subresource, now);
    let mine = managers
        .find(&me)
        .map(|m| m.set.clone())
        .unwrap_or_default();
    managers.take(&comparison.removed);
    if !changed.is_empty() {
        managers.take(&changed);
        let set = mine.difference(&comparison.removed).union(&changed);
        managers.put(Manager { set, ..me });
    }
    if managers == stored {
        keep_managed_fields(new, old);
    } else {
        managers.write(new);
    }
}

#[cfg(test)]
mod tests;
