//! POST, PUT, PATCH and DELETE of resources.

use std::sync::Arc;

use serde_json::{Value, json};

use super::call::{Call, unsupported};
use super::negotiate::Endpoint;
use super::respond::{self, Answer};
use super::{params, read};
use crate::apiserver::api::{Api, DeleteRequest, PatchRequest, Target, WriteOptions, no_such_path};
use crate::apiserver::codec::{self, Decoded, FieldValidation};
use crate::apiserver::object::{self, text};
use crate::apiserver::registry::{Gvk, ResourceDef, SubresourceDef, SubresourceKind};
use crate::client::{PatchKind, Propagation};
use crate::status::ApiError;

/// Kinds whose delete answers with the object instead of a Status.
const RETURNS_DELETED: [&str; 6] = [
    "Pod",
    "PodTemplate",
    "PersistentVolume",
    "PersistentVolumeClaim",
    "ResourceQuota",
    "ServiceAccount",
];

fn expect_kind(object: &Value, expected: Gvk<'_>) -> Result<(), ApiError> {
    let (version, kind) = (text(object, "/apiVersion"), text(object, "/kind"));
    let wanted = expected.api_version();
    if kind == expected.kind && version == wanted {
        return Ok(());
    }
    Err(ApiError::bad_request(format!(
        "{kind} in version {version:?} cannot be handled as a {}: the endpoint serves {wanted}",
        expected.kind
    )))
}

async fn decode(
    call: &mut Call,
    gvk: Gvk<'_>,
    validation: FieldValidation,
) -> Result<Decoded, ApiError> {
    let format = call.body_format()?;
    let body = call.read_body().await?;
    let decoded = codec::decode_object(format, &body, gvk, validation)?;
    expect_kind(&decoded.object, gvk)?;
    Ok(decoded)
}

fn check_namespace(def: &ResourceDef, call: &Call, object: &Value) -> Result<(), ApiError> {
    let given = object::namespace(object);
    let wanted = &call.path.namespace;
    if given.is_empty() || (def.namespaced && given == wanted) {
        return Ok(());
    }
    if !def.namespaced {
        return Err(ApiError::bad_request(format!(
            "namespace is not allowed on objects of kind {}",
            def.kind
        )));
    }
    Err(ApiError::bad_request(format!(
        "the namespace of the provided object does not match the namespace sent on the request ({given} and {wanted})"
    )))
}

pub(super) async fn create(api: &Arc<Api>, def: &ResourceDef, mut call: Call) -> Answer {
    let form = call.form(Endpoint::Object)?;
    let options = params::write_options("CreateOptions", &call.query, call.user_agent())?;
    let decoded = decode(&mut call, def.gvk(), options.validation).await?;
    check_namespace(def, &call, &decoded.object)?;
    if def.kind == "Binding" {
        let pod = object::name(&decoded.object).to_owned();
        return bind(api, &call, &pod, &decoded.object, &options).await;
    }
    let made = api
        .create(def, &call.path.namespace, decoded.object, &options)
        .await?;
    let answer = read::object_answer(def, form, &call, 201, &made)?;
    let warnings = [decoded.warnings, options.warnings.take()].concat();
    Ok(respond::warn(answer, &warnings))
}

pub(super) async fn update(
    api: &Arc<Api>,
    def: &ResourceDef,
    sub: Option<&SubresourceDef>,
    mut call: Call,
) -> Answer {
    let form = call.form(Endpoint::Object)?;
    let options = params::write_options("UpdateOptions", &call.query, call.user_agent())?;
    let gvk = body_kind(def, sub);
    let decoded = decode(&mut call, gvk, options.validation).await?;
    check_namespace(def, &call, &decoded.object)?;
    let target = target(def, sub, &call);
    if object::name(&decoded.object).is_empty() {
        return Err(ApiError::bad_request("name must be provided"));
    }
    let (object, created) = api.update(target, decoded.object, &options).await?;
    let code = if created { 201 } else { 200 };
    let answer = read::object_answer(def, form, &call, code, &object)?;
    let warnings = [decoded.warnings, options.warnings.take()].concat();
    Ok(respond::warn(answer, &warnings))
}

fn target<'a>(def: &'a ResourceDef, sub: Option<&SubresourceDef>, call: &'a Call) -> Target<'a> {
    Target {
        def,
        namespace: &call.path.namespace,
        name: &call.path.name,
        sub: sub.map(|s| s.what),
    }
}

fn body_kind<'a>(def: &'a ResourceDef, sub: Option<&'a SubresourceDef>) -> Gvk<'a> {
    sub.map_or_else(|| def.gvk(), |s| Gvk::new(&s.group, &s.version, &s.kind))
}

pub(super) async fn patch(
    api: &Arc<Api>,
    def: &ResourceDef,
    sub: Option<&SubresourceDef>,
    mut call: Call,
) -> Answer {
    let form = call.form(Endpoint::Object)?;
    let content_type = call.content_type();
    let apply = content_type.starts_with("application/apply-patch");
    let options = params::write_options("PatchOptions", &call.query, call.user_agent())?;
    params::check_apply(&call.query, apply)?;
    let body = call.read_body().await?;
    let malformed =
        |e: &dyn std::fmt::Display| ApiError::bad_request(format!("error decoding patch: {e}"));
    let json = || serde_json::from_slice::<Value>(&body).map_err(|e| malformed(&e));
    let request = match content_type.as_str() {
        "application/json-patch+json" => PatchRequest::Patch(PatchKind::Json, json()?),
        "application/merge-patch+json" => PatchRequest::Patch(PatchKind::Merge, json()?),
        "application/strategic-merge-patch+json" => {
            PatchRequest::Patch(PatchKind::StrategicMerge, json()?)
        }
        "application/apply-patch+yaml" => {
            let config = codec::parse_yaml(&body).map_err(|e| malformed(&e))?;
            expect_kind(&config, body_kind(def, sub))?;
            PatchRequest::Apply {
                config,
                force: call.query.flag("force"),
            }
        }
        _ => {
            return Err(unsupported(
                "application/json-patch+json, application/merge-patch+json, application/strategic-merge-patch+json, application/apply-patch+yaml",
            ));
        }
    };
    if let PatchRequest::Patch(PatchKind::Merge | PatchKind::StrategicMerge, body) = &request
        && !body.is_object()
    {
        return Err(malformed(&"a patch of this type must be an object"));
    }
    let target = target(def, sub, &call);
    let ((object, created), warnings) = api.patch(target, &request, &options).await?;
    let code = if created { 201 } else { 200 };
    let answer = read::object_answer(def, form, &call, code, &object)?;
    let warnings = [warnings, options.warnings.take()].concat();
    Ok(respond::warn(answer, &warnings))
}

/// DeleteOptions of the body and, where it says nothing, of the query.
async fn delete_request(call: &mut Call) -> Result<DeleteRequest, ApiError> {
    let format = call.body_format();
    let body = call.read_body().await?;
    let options = if body.is_empty() {
        json!({})
    } else {
        let gvk = Gvk::new("", "v1", "DeleteOptions");
        codec::decode_object(format?, &body, gvk, FieldValidation::Ignore)?.object
    };
    request_of(&options, call)
}

fn request_of(options: &Value, call: &Call) -> Result<DeleteRequest, ApiError> {
    let query = &call.query;
    let owned = |pointer: &str| {
        Some(text(options, pointer))
            .filter(|t| !t.is_empty())
            .map(str::to_owned)
    };
    let grace = match options["gracePeriodSeconds"].as_i64() {
        Some(grace) => Some(grace),
        None => match query.get("gracePeriodSeconds").map(str::parse) {
            None => None,
            Some(Ok(grace)) => Some(grace),
            Some(Err(_)) => {
                return Err(ApiError::bad_request("gracePeriodSeconds is not a number"));
            }
        },
    };
    let policy =
        owned("/propagationPolicy").or_else(|| query.get("propagationPolicy").map(str::to_owned));
    let orphan = options["orphanDependents"].as_bool().or_else(|| {
        query
            .get("orphanDependents")
            .map(|_| query.flag("orphanDependents"))
    });
    let propagation = match policy.as_deref() {
        Some("Background") => Some(Propagation::Background),
        Some("Foreground") => Some(Propagation::Foreground),
        Some("Orphan") => Some(Propagation::Orphan),
        Some(other) => return Err(params::bad_propagation(other)),
        None => orphan.map(|o| {
            if o {
                Propagation::Orphan
            } else {
                Propagation::Background
            }
        }),
    };
    let listed = options["dryRun"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str);
    let dry_run = params::dry_run("DeleteOptions", listed.chain(query.all("dryRun")))?;
    Ok(DeleteRequest {
        grace_period_s: grace,
        uid: owned("/preconditions/uid"),
        resource_version: owned("/preconditions/resourceVersion"),
        propagation,
        dry_run,
    })
}

pub(super) async fn delete(api: &Arc<Api>, def: &ResourceDef, mut call: Call) -> Answer {
    let form = call.form(Endpoint::Object)?;
    let request = delete_request(&mut call).await?;
    let (namespace, name) = (&call.path.namespace, &call.path.name);
    let outcome = api.delete(def, namespace, name, &request).await?;
    if !outcome.gone || (RETURNS_DELETED.contains(&&*def.kind) && def.group.is_empty()) {
        return read::object_answer(def, form, &call, 200, &outcome.object);
    }
    let details = json!({"name": name, "group": def.group, "kind": def.plural,
        "uid": outcome.object["metadata"]["uid"]});
    let details = without_empty(details);
    respond::value(200, form.media, &respond::success(details))
}

fn without_empty(mut details: Value) -> Value {
    if let Value::Object(map) = &mut details {
        map.retain(|_, v| v.as_str().is_none_or(|s| !s.is_empty()));
    }
    details
}

pub(super) async fn delete_collection(api: &Arc<Api>, def: &ResourceDef, mut call: Call) -> Answer {
    let form = call.form(Endpoint::List)?;
    let read_params = params::ReadParams::parse(def, &call.query, false)?;
    let request = delete_request(&mut call).await?;
    let listed = api
        .delete_collection(def, &call.path.namespace, &read_params.list, &request)
        .await?;
    read::list_answer(def, form, &call, &listed)
}

/// POST to a subresource.
pub(super) async fn post_subresource(
    api: &Arc<Api>,
    def: &ResourceDef,
    sub: &SubresourceDef,
    mut call: Call,
) -> Answer {
    let options = params::write_options("CreateOptions", &call.query, call.user_agent())?;
    let name = call.path.name.clone();
    let gvk = Gvk::new(&sub.group, &sub.version, &sub.kind);
    match sub.what {
        SubresourceKind::Binding => {
            let decoded = decode(&mut call, gvk, options.validation).await?;
            bind(api, &call, &name, &decoded.object, &options).await
        }
        SubresourceKind::Eviction => {
            let form = call.form(Endpoint::Object)?;
            let decoded = decode(&mut call, gvk, options.validation).await?;
            check_namespace(def, &call, &decoded.object)?;
            let named = object::name(&decoded.object);
            if !named.is_empty() && named != name {
                return Err(ApiError::bad_request(format!(
                    "name in URL does not match name in Eviction object: {name} and {named}"
                )));
            }
            let delete_options = &decoded.object["deleteOptions"];
            let mut request = request_of(delete_options, &call)?;
            request.dry_run |= options.dry_run;
            api.evict(&call.path.namespace, &name, &request, &options)
                .await?;
            respond::value(201, form.media, &success_status())
        }
        SubresourceKind::Token => {
            let form = call.form(Endpoint::Object)?;
            let decoded = decode(&mut call, gvk, options.validation).await?;
            check_namespace(def, &call, &decoded.object)?;
            let issued = api
                .issue_token(&call.path.namespace, &name, decoded.object)
                .await?;
            respond::value(201, form.media, &issued)
        }
        _ => Err(no_such_path()),
    }
}

async fn bind(
    api: &Arc<Api>,
    call: &Call,
    pod: &str,
    binding: &Value,
    options: &WriteOptions,
) -> Answer {
    let form = call.form(Endpoint::Object)?;
    api.bind(&call.path.namespace, pod, binding, options)
        .await?;
    respond::value(201, form.media, &success_status())
}

fn success_status() -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201})
}
