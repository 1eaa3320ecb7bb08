//! Ordered, watchable key-value store: the trait and its embedded implementation (redb).
//!
//! Keys are text of at least three segments, `GROUP/PLURAL/...`; the first two name the key's topic, which is the unit
//! of watching. Values are opaque bytes. One revision counts over all keys and grows by one per changed key, so a
//! revision names exactly one change. What objects mean belongs to the API server, not here.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use async_trait::async_trait;
use bytes::Bytes;
use serde_json::Value;

mod disk;
mod embedded;
mod state;

pub use embedded::{EmbeddedStore, OpenOptions};

/// One key's value at a revision.
#[derive(Debug)]
pub struct Record {
    pub key: Arc<str>,
    pub value: Bytes,
    /// Revision of the change that wrote this value; of the deletion in a deletion's event.
    pub revision: u64,
    /// The decoded form while somebody holds it, so that all readers in the process share one copy.
    memo: Mutex<Weak<Value>>,
}

impl Record {
    #[must_use]
    pub fn new(key: Arc<str>, value: Bytes, revision: u64) -> Self {
        Self {
            key,
            value,
            revision,
            memo: Mutex::new(Weak::new()),
        }
    }

    /// The shared decoded form, made by `decode` when nobody holds one.
    ///
    /// # Errors
    /// Whatever `decode` fails with.
    pub fn decoded<E>(
        &self,
        decode: impl FnOnce(&Self) -> Result<Value, E>,
    ) -> Result<Arc<Value>, E> {
        let mut memo = self.memo.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(value) = memo.upgrade() {
            return Ok(value);
        }
        let value = Arc::new(decode(self)?);
        *memo = Arc::downgrade(&value);
        Ok(value)
    }
}

/// One change of one key.
#[derive(Debug)]
pub struct Event {
    /// The new state; for a deletion the last value under the deletion's revision.
    pub record: Arc<Record>,
    pub previous: Option<Arc<Record>>,
    pub deleted: bool,
    /// Microseconds since the Unix epoch.
    pub committed_at_us: i64,
}

/// What a key must be for a transaction to go through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    Any,
    Absent,
    Revision(u64),
}

/// One step of a transaction.
#[derive(Clone, Debug)]
pub enum Op {
    Put {
        key: String,
        value: Bytes,
        expect: Expect,
    },
    /// Deleting an absent key changes nothing.
    Delete { key: String, expect: Expect },
    /// Changes nothing.
    Check { key: String, expect: Expect },
}

impl Op {
    #[must_use]
    pub fn key(&self) -> &str {
        match self {
            Self::Put { key, .. } | Self::Delete { key, .. } | Self::Check { key, .. } => key,
        }
    }

    #[must_use]
    pub const fn expect(&self) -> Expect {
        match self {
            Self::Put { expect, .. } | Self::Delete { expect, .. } | Self::Check { expect, .. } => {
                *expect
            }
        }
    }
}

/// A committed transaction: one record per step (`None` for checks and for deletes of absent keys).
#[derive(Debug)]
pub struct Committed {
    pub records: Vec<Option<Arc<Record>>>,
}

/// Part of a list.
#[derive(Debug)]
pub struct Page {
    pub records: Vec<Arc<Record>>,
    /// Revision that the list shows.
    pub revision: u64,
    /// Keys after this page under the same prefix.
    pub remaining: usize,
}

/// Why the store refused.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Step `step` of a transaction met another state than it expects.
    #[error("key {key} is not as expected by the transaction")]
    Conflict {
        step: usize,
        key: String,
        current: Option<Arc<Record>>,
    },
    #[error("revision {requested} is compacted; history begins at {floor}")]
    Compacted { requested: u64, floor: u64 },
    #[error("revision {requested} is not reached yet; the store is at {current}")]
    Future { requested: u64, current: u64 },
    #[error("open the store {path}: {source}")]
    Open {
        path: std::path::PathBuf,
        source: Box<redb::Error>,
    },
    #[error("the store {path} holds format {found}; this version reads format {supported}")]
    Format {
        path: std::path::PathBuf,
        found: u64,
        supported: u64,
    },
    #[error("write to the store: {source}")]
    Write { source: Arc<redb::Error> },
    #[error("the store is closed")]
    Closed,
}

/// A consistent, durable key space. Every answer of [`Store::commit`] is durable.
#[async_trait]
pub trait Store: Send + Sync + std::fmt::Debug + 'static {
    /// The last committed revision.
    async fn revision(&self) -> Result<u64, StoreError>;

    /// Whether the last write went through.
    async fn health(&self) -> Result<(), StoreError>;

    async fn get(&self, key: &str) -> Result<Option<Arc<Record>>, StoreError>;

    /// Records under `prefix` in key order, after the key `after`, at most `limit` (0 = all), as of revision `at` (the
    /// present when `None`).
    async fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: usize,
        at: Option<u64>,
    ) -> Result<Page, StoreError>;

    /// Applies all steps or none.
    async fn commit(&self, ops: Vec<Op>) -> Result<Committed, StoreError>;

    /// Follows changes under `prefix` (within one topic) strictly after `revision`.
    async fn watch(&self, prefix: &str, revision: u64) -> Result<Box<dyn Watch>, StoreError>;

    /// Forgets history up to and including `revision`.
    async fn compact(&self, revision: u64) -> Result<(), StoreError>;
}

/// A watch: pulled, so that a slow reader costs a cursor and no queue.
#[async_trait]
pub trait Watch: Send + Sync + std::fmt::Debug {
    /// Waits for the next changes, in revision order. Cancel-safe.
    ///
    /// # Errors
    /// `Compacted` when the reader fell behind the kept history, `Closed` when the store stops.
    async fn next(&mut self) -> Result<Vec<Arc<Event>>, StoreError>;

    /// A revision up to which every change has been returned by `next`, as new as possible.
    fn progress(&self) -> u64;
}

/// The topic of a key or prefix: its first two segments.
fn topic_of(key: &str) -> &str {
    let mut slashes = key.match_indices('/');
    slashes.next();
    slashes.next().map_or(key, |(at, _)| &key[..at])
}

#[cfg(test)]
mod tests;
