//! Reading: single objects and lists with selectors, pages and versions.

use std::sync::Arc;

use serde_json::Value;

use super::{Api, convert, no_such_path, store_error};
use crate::apiserver::object::{self, Head};
use crate::apiserver::registry::ResourceDef;
use crate::apiserver::selector::{FieldSelector, LabelSelector};
use crate::status::ApiError;
use crate::store::Record;

/// What to list.
#[derive(Clone, Debug, Default)]
pub struct ListQuery {
    pub labels: LabelSelector,
    pub fields: FieldSelector,
    /// 0 means all.
    pub limit: usize,
    /// Last key of the page before.
    pub after: Option<String>,
    /// The exact revision to show; the present when `None`.
    pub at: Option<u64>,
}

/// A list, or a page of one.
#[derive(Debug)]
pub struct Listed {
    pub records: Vec<Arc<Record>>,
    pub revision: u64,
    /// Key after which the next page begins.
    pub next: Option<String>,
    /// Exact, and present only without selectors.
    pub remaining: Option<usize>,
}

/// Records fetched at once when a selector may drop most of them.
const SCAN: usize = 500;

impl Api {
    /// One object in the resource's version.
    ///
    /// # Errors
    /// 404.
    pub async fn get(
        &self,
        def: &ResourceDef,
        namespace: &str,
        name: &str,
    ) -> Result<Arc<Value>, ApiError> {
        let record = self.record(def, namespace, name).await?;
        view(def, &record)
    }

    /// The record of one object.
    ///
    /// # Errors
    /// 404.
    pub async fn get_record(
        &self,
        def: &ResourceDef,
        namespace: &str,
        name: &str,
    ) -> Result<Arc<Record>, ApiError> {
        if name.is_empty() {
            return Err(no_such_path());
        }
        self.record(def, namespace, name).await
    }

    /// Lists objects of one namespace, or of all when it is empty.
    ///
    /// # Errors
    /// 410 when the wanted revision is gone, 504 when it lies ahead.
    pub async fn list(
        &self,
        def: &ResourceDef,
        namespace: &str,
        query: &ListQuery,
    ) -> Result<Listed, ApiError> {
        let prefix = def.prefix(namespace);
        if query.labels.is_everything() && query.fields.is_everything() {
            return self.list_plain(&prefix, query).await;
        }
        let mut at = query.at;
        let mut after = query.after.clone();
        let mut kept = Vec::new();
        loop {
            let limit = if query.limit == 0 { 0 } else { SCAN };
            let page = self.store.list(&prefix, after.as_deref(), limit, at).await;
            let page = page.map_err(store_error)?;
            at = Some(page.revision);
            after = page.records.last().map(|r| r.key.to_string());
            for record in page.records {
                if !matches(def, query, &record)? {
                    continue;
                }
                if query.limit > 0 && kept.len() == query.limit {
                    let next = kept.last().map(|r: &Arc<Record>| r.key.to_string());
                    return Ok(Listed {
                        records: kept,
                        revision: page.revision,
                        next,
                        remaining: None,
                    });
                }
                kept.push(record);
            }
            if page.remaining == 0 {
                let revision = page.revision;
                return Ok(Listed {
                    records: kept,
                    revision,
                    next: None,
                    remaining: None,
                });
            }
        }
    }

    async fn list_plain(&self, prefix: &str, query: &ListQuery) -> Result<Listed, ApiError> {
        let page = self
            .store
            .list(prefix, query.after.as_deref(), query.limit, query.at)
            .await
            .map_err(store_error)?;
        let more = page.remaining > 0;
        let next = page
            .records
            .last()
            .filter(|_| more)
            .map(|r| r.key.to_string());
        let remaining = more.then_some(page.remaining);
        Ok(Listed {
            records: page.records,
            revision: page.revision,
            next,
            remaining,
        })
    }
}

/// Whether a record is selected.
pub(crate) fn matches(
    def: &ResourceDef,
    query: &ListQuery,
    record: &Record,
) -> Result<bool, ApiError> {
    if !query.labels.is_everything() {
        let head: Head = serde_json::from_slice(&record.value).map_err(|e| {
            ApiError::new(
                500,
                "InternalError",
                format!("stored object {}: {e}", record.key),
            )
        })?;
        let labels = head.metadata.labels.unwrap_or_default();
        if !query
            .labels
            .matches(|key| labels.get(key).and_then(Value::as_str))
        {
            return Ok(false);
        }
    }
    Ok(query.fields.is_everything() || query.fields.matches(&*view(def, record)?))
}

/// The object of a record in the version of `def`.
pub(crate) fn view(def: &ResourceDef, record: &Record) -> Result<Arc<Value>, ApiError> {
    let stored = object::decode(record)?;
    if convert::is_stored_version(def) {
        return Ok(stored);
    }
    Ok(Arc::new(convert::from_stored(def, &stored)))
}

/// Whether the stored JSON is the served JSON.
pub(crate) fn serves_stored(def: &ResourceDef) -> bool {
    convert::is_stored_version(def)
}
