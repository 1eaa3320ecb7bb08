//! Objects through defaulting, allocation, validation and revisions into the store: the one code path behind HTTP and
//! [`LocalClient`](super::local::LocalClient).

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use arc_swap::ArcSwap;
use jiff::Timestamp;
use serde_json::Value;

use super::codec::FieldValidation;
use super::logs::NodeLogs;
use super::object;
use super::registry::{Gvk, Registry, ResourceDef};
use super::tokens::Tokens;
use crate::config::Network;
use crate::status::{ApiError, Cause};
use crate::store::{Record, Store, StoreError, Watch};

mod admission;
mod bootstrap;
mod convert;
mod create;
mod delete;
mod eviction;
mod expiry;
mod pods;
mod policies;
mod read;
mod scale;
mod services;
mod strategy;
#[cfg(test)]
mod tests;
mod tokens;
mod update;

pub use delete::{DeleteOutcome, DeleteRequest};
pub use read::{ListQuery, Listed};
pub(crate) use read::{matches as read_matches, serves_stored, view as read_view};
pub use tokens::TokenUser;
pub use update::{PatchRequest, Target};

/// Most tries of a write that other writers overtake. Each failed try means that another write went through.
const WRITE_TRIES: usize = 500;

/// Options of a write.
#[derive(Clone, Debug)]
pub struct WriteOptions {
    pub dry_run: bool,
    /// Field manager.
    pub manager: String,
    pub validation: FieldValidation,
    /// What the client is told beside the answer.
    pub warnings: Warnings,
}

/// Warnings of one write, shared between all who take part in it.
#[derive(Clone, Debug, Default)]
pub struct Warnings(Arc<Mutex<Vec<String>>>);

impl Warnings {
    /// Adds a warning; a write that is tried again says it once.
    fn push(&self, warning: String) {
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !list.contains(&warning) {
            list.push(warning);
        }
    }

    /// Takes all warnings.
    #[must_use]
    pub fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The API without its transport.
#[derive(Debug)]
pub struct Api {
    store: Arc<dyn Store>,
    registry: ArcSwap<Registry>,
    network: Network,
    logs: OnceLock<Arc<dyn NodeLogs>>,
    tokens: OnceLock<Tokens>,
}

impl Api {
    #[must_use]
    pub fn new(store: Arc<dyn Store>, network: Network) -> Self {
        let registry = ArcSwap::from_pointee(Registry::builtin());
        Self {
            store,
            registry,
            network,
            logs: OnceLock::new(),
            tokens: OnceLock::new(),
        }
    }

    /// Connects `pods/log` to the nodes. The first call counts.
    pub fn set_node_logs(&self, logs: Arc<dyn NodeLogs>) {
        let _ = self.logs.set(logs);
    }

    #[must_use]
    pub fn node_logs(&self) -> Option<&Arc<dyn NodeLogs>> {
        self.logs.get()
    }

    #[must_use]
    pub fn registry(&self) -> Arc<Registry> {
        self.registry.load_full()
    }

    #[must_use]
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    #[must_use]
    pub const fn network(&self) -> &Network {
        &self.network
    }

    /// A built-in resource.
    ///
    /// # Errors
    /// 404 when it is not served.
    pub fn resource(
        &self,
        group: &str,
        version: &str,
        plural: &str,
    ) -> Result<Arc<ResourceDef>, ApiError> {
        self.registry
            .load()
            .find(group, version, plural)
            .cloned()
            .ok_or_else(no_such_path)
    }

    /// Follows an object's resource (one namespace, or all when it is empty) strictly after `revision`.
    ///
    /// # Errors
    /// 410 when that part of history is gone.
    pub async fn watch(
        &self,
        def: &ResourceDef,
        namespace: &str,
        revision: u64,
    ) -> Result<Box<dyn Watch>, ApiError> {
        self.store
            .watch(&def.prefix(namespace), revision)
            .await
            .map_err(store_error)
    }

    /// The store's revision.
    ///
    /// # Errors
    /// 503 and 500 when the store does not answer.
    pub async fn revision(&self) -> Result<u64, ApiError> {
        self.store.revision().await.map_err(store_error)
    }

    /// Whether the store takes writes.
    ///
    /// # Errors
    /// 500 with what the last write failed on.
    pub async fn health(&self) -> Result<(), ApiError> {
        self.store.health().await.map_err(store_error)
    }

    /// Forgets history up to now: older watches and pages get 410.
    ///
    /// # Errors
    /// As the store's.
    pub async fn compact(&self) -> Result<u64, ApiError> {
        let revision = self.revision().await?;
        self.store.compact(revision).await.map_err(store_error)?;
        Ok(revision)
    }

    /// 504 of a revision that was not reached in time.
    pub(super) fn future(&self, requested: u64, current: u64) -> ApiError {
        store_error(StoreError::Future { requested, current })
    }

    /// The Scale of an object.
    ///
    /// # Errors
    /// 404.
    pub async fn get_scale(
        &self,
        def: &ResourceDef,
        namespace: &str,
        name: &str,
    ) -> Result<Value, ApiError> {
        Ok(scale::of(def, &*self.get(def, namespace, name).await?))
    }

    async fn record(
        &self,
        def: &ResourceDef,
        ns: &str,
        name: &str,
    ) -> Result<Arc<Record>, ApiError> {
        let found = self
            .store
            .get(&def.key(ns, name))
            .await
            .map_err(store_error)?;
        found.ok_or_else(|| not_found(def, name))
    }
}

/// 404 of a path that nothing serves.
#[must_use]
pub fn no_such_path() -> ApiError {
    ApiError::new(
        404,
        "NotFound",
        "the server could not find the requested resource",
    )
}

fn not_found(def: &ResourceDef, name: &str) -> ApiError {
    ApiError::not_found(&def.group, &def.plural, name)
}

fn conflict(def: &ResourceDef, name: &str, why: &str) -> ApiError {
    ApiError::conflict(&def.group, &def.plural, name, why)
}

fn stale(def: &ResourceDef, name: &str) -> ApiError {
    let why = "the object has been modified; please apply your changes to the latest version and try again";
    conflict(def, name, why)
}

fn invalid(gvk: Gvk<'_>, name: &str, causes: Vec<Cause>) -> Result<(), ApiError> {
    if causes.is_empty() {
        return Ok(());
    }
    Err(ApiError::invalid(gvk.group, gvk.kind, name, causes))
}

/// 403 in the shape that clients print.
fn forbidden(def: &ResourceDef, name: &str, why: &str) -> ApiError {
    let resource = if def.group.is_empty() {
        def.plural.to_string()
    } else {
        format!("{}.{}", def.plural, def.group)
    };
    let message = format!("{resource} \"{name}\" is forbidden: {why}");
    let mut error = ApiError::new(403, "Forbidden", message);
    error.details.name = name.into();
    error.details.group = def.group.to_string();
    error.details.kind = def.plural.to_string();
    error
}

/// What a failure of the store means to a client.
pub(super) fn store_error(error: StoreError) -> ApiError {
    match error {
        StoreError::Compacted { requested, floor } => ApiError::new(
            410,
            "Expired",
            format!("too old resource version: {requested} ({floor})"),
        ),
        StoreError::Future { requested, current } => {
            let message = format!("Too large resource version: {requested}, current: {current}");
            let mut e = ApiError::new(504, "Timeout", message);
            e.details.retry_after_s = 1;
            e.details.causes.push(Cause {
                reason: "ResourceVersionTooLarge",
                message: "Too large resource version".into(),
                field: String::new(),
            });
            e
        }
        StoreError::Closed => ApiError::new(503, "ServiceUnavailable", "the server is stopping"),
        other => ApiError::new(
            500,
            "InternalError",
            format!("Internal error occurred: {other}"),
        ),
    }
}

fn now() -> Timestamp {
    Timestamp::now()
}

fn now_text() -> String {
    object::rfc3339(now())
}

/// 409 when the body names another uid than the stored object has.
fn check_uid(def: &ResourceDef, wanted: &str, stored: &Value) -> Result<(), ApiError> {
    let uid = object::text(stored, "/metadata/uid");
    if wanted.is_empty() || wanted == uid {
        return Ok(());
    }
    let why =
        format!("Precondition failed: UID in precondition: {wanted}, UID in object meta: {uid}");
    Err(conflict(def, object::name(stored), &why))
}
