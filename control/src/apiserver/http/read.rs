//! GET and LIST of resources, as objects, tables or metadata only.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::call::Call;
use super::negotiate::{Endpoint, Form, Media, Transform};
use super::params::{self, Match, ReadParams};
use super::respond::{self, Answer};
use crate::apiserver::api::{Api, Listed, read_view, serves_stored};
use crate::apiserver::object;
use crate::apiserver::registry::{ResourceDef, SubresourceDef, SubresourceKind};
use crate::apiserver::tables;
use crate::status::ApiError;
use crate::store::Record;

/// How long a read waits for a revision that the store has not reached.
const FUTURE_WAIT: Duration = Duration::from_secs(3);
const FUTURE_POLL: Duration = Duration::from_millis(50);

/// What a table's rows carry of their objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Include {
    None,
    Metadata,
    Object,
}

impl Include {
    fn of(call: &Call) -> Result<Self, ApiError> {
        match call.query.get("includeObject") {
            None | Some("Metadata") => Ok(Self::Metadata),
            Some("None") => Ok(Self::None),
            Some("Object") => Ok(Self::Object),
            Some(other) => Err(ApiError::bad_request(format!(
                "unrecognized includeObject value: {other:?}; use None, Metadata or Object"
            ))),
        }
    }
}

pub(super) async fn get(api: &Arc<Api>, def: &ResourceDef, call: Call) -> Answer {
    let form = call.form(Endpoint::Object)?;
    let record = api
        .get_record(def, &call.path.namespace, &call.path.name)
        .await?;
    wait_for(api, &call).await?;
    if form == Form::default() && serves_stored(def) {
        let mut body = Vec::with_capacity(record.value.len() + 32);
        object::write_json(&record, &mut body);
        return Ok(respond::bytes(200, form.media.content_type(), body));
    }
    object_answer(def, form, &call, 200, &*read_view(def, &record)?)
}

/// GET of a subresource.
pub(super) async fn get_subresource(
    api: &Arc<Api>,
    def: &ResourceDef,
    sub: &SubresourceDef,
    call: Call,
) -> Answer {
    let form = call.form(Endpoint::Object)?;
    let (namespace, name) = (&call.path.namespace, &call.path.name);
    let object = match sub.what {
        SubresourceKind::Scale => Arc::new(api.get_scale(def, namespace, name).await?),
        _ => api.get(def, namespace, name).await?,
    };
    object_answer(def, form, &call, 200, &object)
}

async fn wait_for(api: &Arc<Api>, call: &Call) -> Result<(), ApiError> {
    match call.query.get("resourceVersion").map(str::parse::<u64>) {
        None => Ok(()),
        Some(Ok(revision)) => reach(api, revision).await,
        Some(Err(_)) => Err(ApiError::bad_request("resourceVersion is not a number")),
    }
}

/// Waits for the store to reach a revision that a client has seen elsewhere.
pub(super) async fn reach(api: &Arc<Api>, revision: u64) -> Result<(), ApiError> {
    let deadline = tokio::time::Instant::now() + FUTURE_WAIT;
    loop {
        let current = api.revision().await?;
        if current >= revision {
            return Ok(());
        }
        if tokio::time::Instant::now() >= deadline {
            return Err(api.future(revision, current));
        }
        tokio::time::sleep(FUTURE_POLL).await;
    }
}

pub(super) async fn list(api: &Arc<Api>, def: &ResourceDef, call: Call) -> Answer {
    let form = call.form(Endpoint::List)?;
    let mut read = ReadParams::parse(def, &call.query, false)?;
    if let Some(revision) = read.revision {
        reach(api, revision).await?;
    }
    if read.matching == Some(Match::NotOlderThan) {
        read.list.at = None;
    }
    match api.list(def, &call.path.namespace, &read.list).await {
        Ok(listed) => list_answer(def, form, &call, &listed),
        Err(e) if e.code == 410 && read.list.after.is_some() && !read.inconsistent => {
            Ok(expired(form.media, &read))
        }
        Err(e) => Err(e),
    }
}

/// 410 with a token that goes on at the present.
fn expired(media: Media, read: &ReadParams) -> http::Response<axum::body::Body> {
    let message = "The provided continue parameter is too old to display a consistent list result. You can start a new list without the continue parameter, or use the continue token in this response to retrieve the remainder of the results. Continuing with the provided token results in an inconsistent list - objects that were created, modified, or deleted between the time the first chunk was returned and now may show up in the list.";
    let mut status = ApiError::new(410, "Expired", message).to_status();
    let key = read.list.after.as_deref().unwrap_or_default();
    status["metadata"] = json!({"continue": params::write_token(None, key)});
    respond::status(media, 410, &status, 0)
}

/// One object in the agreed form.
pub(super) fn object_answer(
    def: &ResourceDef,
    form: Form,
    call: &Call,
    code: u16,
    object: &Value,
) -> Answer {
    match form.transform {
        Transform::Table { beta } => {
            let include = Include::of(call)?;
            let metadata = json!({"resourceVersion": object["metadata"]["resourceVersion"]});
            let rows = vec![row(def, object, include, Timestamp::now())];
            respond::value(code, form.media, &table(def, beta, metadata, rows))
        }
        Transform::Partial => respond::value(code, form.media, &partial(object)),
        _ => respond::value(code, form.media, object),
    }
}

/// A list in the agreed form.
pub(super) fn list_answer(def: &ResourceDef, form: Form, call: &Call, listed: &Listed) -> Answer {
    let metadata = list_metadata(listed);
    let views = || listed.records.iter().map(|r| read_view(def, r));
    match form.transform {
        Transform::Table { beta } => {
            let (include, now) = (Include::of(call)?, Timestamp::now());
            let rows = views().map(|o| o.map(|o| row(def, &o, include, now)));
            let rows = rows.collect::<Result<Vec<_>, _>>()?;
            respond::value(200, form.media, &table(def, beta, metadata, rows))
        }
        Transform::PartialList => {
            let items = views()
                .map(|o| o.map(|o| partial(&o)))
                .collect::<Result<Vec<_>, _>>()?;
            let list = json!({"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1",
                "metadata": metadata, "items": items});
            respond::value(200, form.media, &list)
        }
        _ if form.media == Media::Json && serves_stored(def) => {
            let body = list_bytes(def, &metadata, &listed.records);
            Ok(respond::bytes(200, form.media.content_type(), body))
        }
        _ => {
            let items = views()
                .map(|o| o.map(|o| Value::clone(&o)))
                .collect::<Result<Vec<_>, _>>()?;
            let list = json!({"kind": format!("{}List", def.kind), "apiVersion": def.api_version(),
                "metadata": metadata, "items": items});
            respond::value(200, form.media, &list)
        }
    }
}

/// A list made of the stored bytes, without decoding them.
fn list_bytes(def: &ResourceDef, metadata: &Value, records: &[Arc<Record>]) -> Vec<u8> {
    let size: usize = records.iter().map(|r| r.value.len() + 40).sum();
    let mut body = Vec::with_capacity(size + 256);
    let head = format!(
        "{{\"kind\":\"{}List\",\"apiVersion\":\"{}\",\"metadata\":{metadata},\"items\":[",
        def.kind,
        def.api_version()
    );
    body.extend_from_slice(head.as_bytes());
    for (n, record) in records.iter().enumerate() {
        if n > 0 {
            body.push(b',');
        }
        object::write_json(record, &mut body);
    }
    body.extend_from_slice(b"]}");
    body
}

fn list_metadata(listed: &Listed) -> Value {
    let mut metadata = Map::new();
    metadata.insert("resourceVersion".into(), listed.revision.to_string().into());
    if let Some(key) = &listed.next {
        let token = params::write_token(Some(listed.revision), key);
        metadata.insert("continue".into(), token.into());
    }
    if let Some(remaining) = listed.remaining {
        metadata.insert("remainingItemCount".into(), remaining.into());
    }
    Value::Object(metadata)
}

/// An object's metadata and nothing else.
pub(super) fn partial(object: &Value) -> Value {
    json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1",
        "metadata": object["metadata"]})
}

fn row(def: &ResourceDef, object: &Value, include: Include, now: Timestamp) -> Value {
    let cells = tables::cells(def.gvk(), object, now);
    match include {
        Include::None => json!({"cells": cells}),
        Include::Metadata => json!({"cells": cells, "object": partial(object)}),
        Include::Object => json!({"cells": cells, "object": object}),
    }
}

fn table(def: &ResourceDef, beta: bool, metadata: Value, rows: Vec<Value>) -> Value {
    let columns: Vec<Value> = tables::columns(def.gvk())
        .into_iter()
        .map(|c| {
            json!({"name": c.name, "type": c.kind, "format": c.format,
                "description": c.description, "priority": c.priority})
        })
        .collect();
    let version = if beta {
        "meta.k8s.io/v1beta1"
    } else {
        "meta.k8s.io/v1"
    };
    json!({"kind": "Table", "apiVersion": version, "metadata": metadata,
        "columnDefinitions": columns, "rows": rows})
}

/// How the objects of a watch's events are written.
#[derive(Clone, Copy, Debug)]
pub(super) struct EventForm {
    form: Form,
    include: Include,
}

impl EventForm {
    pub(super) fn of(call: &Call, form: Form) -> Result<Self, ApiError> {
        Ok(Self {
            form,
            include: Include::of(call)?,
        })
    }

    /// The stored bytes can be sent as they are.
    pub(super) fn is_plain(self) -> bool {
        self.form == Form::default()
    }

    pub(super) const fn media(self) -> Media {
        self.form.media
    }

    pub(super) fn object(self, def: &ResourceDef, object: &Value) -> Value {
        match self.form.transform {
            Transform::Table { beta } => {
                let metadata = json!({"resourceVersion": object["metadata"]["resourceVersion"]});
                let rows = vec![row(def, object, self.include, Timestamp::now())];
                table(def, beta, metadata, rows)
            }
            Transform::Partial => partial(object),
            _ => object.clone(),
        }
    }

    pub(super) fn bookmark(self, def: &ResourceDef, metadata: Value) -> Value {
        match self.form.transform {
            Transform::Table { beta } => table(def, beta, metadata, Vec::new()),
            Transform::Partial => partial(&json!({"metadata": metadata})),
            _ => json!({"kind": def.kind, "apiVersion": def.api_version(), "metadata": metadata}),
        }
    }
}
