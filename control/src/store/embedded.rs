//! The embedded store: redb on disk, written by one thread with group commit; reads come from memory.
//!
//! Transactions that wait while a commit's fsync runs are decided together and share the next fsync. State becomes
//! visible, and callers are answered, only after it is durable: nothing that anyone has seen is lost by a crash.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread::JoinHandle;

use async_trait::async_trait;
use bytes::Bytes;
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use tokio::sync::{mpsc, oneshot};

use super::state::State;
use super::{Committed, Event, Expect, Op, Page, Record, Store, StoreError, Watch};

/// Key to 8 bytes of revision (little endian) followed by the value.
const RECORDS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("records");
const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");
const FORMAT: u64 = 1;
/// Transactions that may wait for the writer; further callers wait before they queue.
const QUEUE: usize = 4096;
/// Most transactions that share one fsync.
const GROUP: usize = 1024;
/// The page cache of redb: small, because reads are served from memory.
const CACHE_BYTES: usize = 4 << 20;

/// The file is made smaller at start when it is larger than this plus so many times its content.
const SHRINK_ABOVE: u64 = 32 << 20;
const SHRINK_FACTOR: u64 = 4;

/// Where the store lives and the clock for commit times (microseconds since the Unix epoch).
#[derive(Debug)]
pub struct OpenOptions {
    pub path: PathBuf,
    pub now_us: fn() -> i64,
}

/// A store in one redb file. Dropping it writes what is queued and closes the file.
#[derive(Debug)]
pub struct EmbeddedStore {
    shared: Arc<Shared>,
    /// `None` only while it is dropped.
    queue: Option<mpsc::Sender<Request>>,
    writer: Option<JoinHandle<()>>,
}

impl Drop for EmbeddedStore {
    fn drop(&mut self) {
        self.queue = None;
        if let Some(writer) = self.writer.take()
            && writer.join().is_err()
        {
            tracing::error!("the store's writer had failed");
        }
    }
}

#[derive(Debug)]
struct Shared {
    state: RwLock<State>,
}

#[derive(Debug)]
struct Request {
    ops: Vec<Op>,
    reply: oneshot::Sender<Result<Committed, StoreError>>,
}

impl Shared {
    fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl EmbeddedStore {
    /// Opens or creates the file and starts the writer thread.
    ///
    /// # Errors
    /// `Open` with the path when the file cannot be opened or read, `Format` when another version wrote it.
    pub fn open(options: &OpenOptions) -> Result<Self, StoreError> {
        let failed = |e: redb::Error| StoreError::Open {
            path: options.path.clone(),
            source: Box::new(e),
        };
        let mut database = Database::builder()
            .set_cache_size(CACHE_BYTES)
            .create(&options.path)
            .map_err(|e| failed(e.into()))?;
        prepare(&database, &options.path)?;
        let (records, revision) = load(&database).map_err(failed)?;
        shrink(&mut database, &options.path, &records);
        let shared = Arc::new(Shared {
            state: RwLock::new(State::new(records, revision)),
        });
        let (queue, requests) = mpsc::channel(QUEUE);
        let writer = Writer {
            database,
            shared: Arc::clone(&shared),
            now_us: options.now_us,
        };
        let writer = std::thread::Builder::new()
            .name("store-writer".into())
            .spawn(move || writer.run(requests))
            .map_err(|e| failed(redb::Error::Io(e)))?;
        Ok(Self {
            shared,
            queue: Some(queue),
            writer: Some(writer),
        })
    }
}

fn prepare(database: &Database, path: &Path) -> Result<(), StoreError> {
    let open = |e: redb::Error| StoreError::Open {
        path: path.into(),
        source: Box::new(e),
    };
    let transaction = database.begin_write().map_err(|e| open(e.into()))?;
    let found = {
        transaction
            .open_table(RECORDS)
            .map_err(|e| open(e.into()))?;
        let mut meta = transaction.open_table(META).map_err(|e| open(e.into()))?;
        let found = meta
            .get("format")
            .map_err(|e| open(e.into()))?
            .map(|v| v.value());
        if found.is_none() {
            meta.insert("format", FORMAT).map_err(|e| open(e.into()))?;
        }
        found
    };
    if let Some(found) = found.filter(|f| *f != FORMAT) {
        return Err(StoreError::Format {
            path: path.into(),
            found,
            supported: FORMAT,
        });
    }
    transaction.commit().map_err(|e| open(e.into()))
}

/// Gives disk space back when most of the file is free. A file that cannot be made smaller works as it is.
fn shrink(database: &mut Database, path: &Path, records: &BTreeMap<Arc<str>, Arc<Record>>) {
    let live: usize = records
        .iter()
        .map(|(key, r)| key.len() + r.value.len())
        .sum();
    let size = std::fs::metadata(path).map_or(0, |m| m.len());
    if size <= SHRINK_ABOVE + SHRINK_FACTOR * u64::try_from(live).unwrap_or(u64::MAX / 8) {
        return;
    }
    match database.compact() {
        Ok(_) => {
            tracing::info!(path = %path.display(), before_bytes = size, "the store's file was compacted")
        }
        Err(error) => tracing::warn!(path = %path.display(), %error, "compact the store's file"),
    }
}

type Loaded = (BTreeMap<Arc<str>, Arc<Record>>, u64);

fn load(database: &Database) -> Result<Loaded, redb::Error> {
    let transaction = database.begin_read()?;
    let revision = transaction
        .open_table(META)?
        .get("revision")?
        .map_or(0, |v| v.value());
    let mut records = BTreeMap::new();
    for entry in transaction.open_table(RECORDS)?.iter()? {
        let (key, stored) = entry?;
        let Some((head, value)) = stored.value().split_first_chunk::<8>() else {
            return Err(redb::Error::Corrupted(format!(
                "record {} is too short",
                key.value()
            )));
        };
        let key: Arc<str> = key.value().into();
        let value = Bytes::copy_from_slice(value);
        let record = Record::new(Arc::clone(&key), value, u64::from_le_bytes(*head));
        records.insert(key, Arc::new(record));
    }
    Ok((records, revision))
}

#[async_trait]
impl Store for EmbeddedStore {
    async fn revision(&self) -> Result<u64, StoreError> {
        Ok(self.shared.read().revision())
    }

    async fn get(&self, key: &str) -> Result<Option<Arc<Record>>, StoreError> {
        Ok(self.shared.read().get(key).cloned())
    }

    async fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: usize,
        at: Option<u64>,
    ) -> Result<Page, StoreError> {
        self.shared.read().list(prefix, after, limit, at)
    }

    async fn commit(&self, ops: Vec<Op>) -> Result<Committed, StoreError> {
        let (reply, answer) = oneshot::channel();
        self.queue
            .as_ref()
            .ok_or(StoreError::Closed)?
            .send(Request { ops, reply })
            .await
            .map_err(|_| StoreError::Closed)?;
        answer.await.map_err(|_| StoreError::Closed)?
    }

    async fn watch(&self, prefix: &str, revision: u64) -> Result<Box<dyn Watch>, StoreError> {
        let bell = {
            let mut state = self.shared.write();
            let bell = state.bell(prefix);
            state.changes(prefix, revision)?;
            bell
        };
        Ok(Box::new(EmbeddedWatch {
            shared: Arc::clone(&self.shared),
            prefix: prefix.to_owned(),
            seen: revision,
            bell,
        }))
    }

    async fn compact(&self, revision: u64) -> Result<(), StoreError> {
        self.shared.write().compact(revision);
        Ok(())
    }
}

#[derive(Debug)]
struct EmbeddedWatch {
    shared: Arc<Shared>,
    prefix: String,
    /// Every change up to here has been returned.
    seen: u64,
    bell: tokio::sync::watch::Receiver<u64>,
}

#[async_trait]
impl Watch for EmbeddedWatch {
    async fn next(&mut self) -> Result<Vec<Arc<Event>>, StoreError> {
        loop {
            self.bell.borrow_and_update();
            let found = self.shared.read().changes(&self.prefix, self.seen)?;
            self.seen = found.seen;
            if !found.events.is_empty() {
                return Ok(found.events);
            }
            self.bell.changed().await.map_err(|_| StoreError::Closed)?;
        }
    }

    fn progress(&self) -> u64 {
        match self.shared.read().changes(&self.prefix, self.seen) {
            Ok(found) if found.events.is_empty() => found.seen,
            _ => self.seen,
        }
    }
}

struct Writer {
    database: Database,
    shared: Arc<Shared>,
    now_us: fn() -> i64,
}

/// Decided but not yet durable: changes on top of the visible state.
#[derive(Default)]
struct Staged {
    overlay: HashMap<Arc<str>, Option<Arc<Record>>>,
    events: Vec<Event>,
}

type Reply = (
    oneshot::Sender<Result<Committed, StoreError>>,
    Result<Committed, StoreError>,
);

impl Writer {
    fn run(self, mut requests: mpsc::Receiver<Request>) {
        let mut group = Vec::new();
        while requests.blocking_recv_many(&mut group, GROUP) > 0 {
            self.commit_group(group.drain(..));
        }
    }

    fn commit_group(&self, group: impl Iterator<Item = Request>) {
        let now = (self.now_us)();
        let mut staged = Staged::default();
        let replies: Vec<Reply> = {
            let state = self.shared.read();
            group
                .map(|r| (r.reply, staged.decide(&state, r.ops, now)))
                .collect()
        };
        let failure = if staged.events.is_empty() {
            None
        } else {
            self.persist(&staged.events).err().map(Arc::new)
        };
        if let Some(source) = failure {
            tracing::error!(error = %source, "the store cannot write");
            for (reply, _) in replies {
                // A caller that went away does not need its answer.
                let _ = reply.send(Err(StoreError::Write {
                    source: Arc::clone(&source),
                }));
            }
            return;
        }
        self.publish(staged.events, now);
        for (reply, answer) in replies {
            let _ = reply.send(answer);
        }
    }

    fn persist(&self, events: &[Event]) -> Result<(), redb::Error> {
        let transaction = self.database.begin_write()?;
        {
            let mut records = transaction.open_table(RECORDS)?;
            let mut buffer = Vec::new();
            for event in events {
                let record = &event.record;
                if event.deleted {
                    records.remove(&*record.key)?;
                } else {
                    buffer.clear();
                    buffer.extend_from_slice(&record.revision.to_le_bytes());
                    buffer.extend_from_slice(&record.value);
                    records.insert(&*record.key, buffer.as_slice())?;
                }
            }
            if let Some(last) = events.last() {
                transaction
                    .open_table(META)?
                    .insert("revision", last.record.revision)?;
            }
        }
        transaction.commit()?;
        Ok(())
    }

    fn publish(&self, events: Vec<Event>, now_us: i64) {
        if events.is_empty() {
            return;
        }
        let mut state = self.shared.write();
        let keys: Vec<Arc<str>> = events.iter().map(|e| Arc::clone(&e.record.key)).collect();
        for event in events {
            state.apply(event);
        }
        state.trim(now_us);
        state.wake(keys.iter().map(|k| &**k));
    }
}

impl Staged {
    fn current(&self, state: &State, key: &str) -> Option<Arc<Record>> {
        match self.overlay.get(key) {
            Some(staged) => staged.clone(),
            None => state.get(key).cloned(),
        }
    }

    fn decide(&mut self, state: &State, ops: Vec<Op>, now: i64) -> Result<Committed, StoreError> {
        for (step, op) in ops.iter().enumerate() {
            let current = self.current(state, op.key());
            let met = match op.expect() {
                Expect::Any => true,
                Expect::Absent => current.is_none(),
                Expect::Revision(r) => current.as_ref().is_some_and(|c| c.revision == r),
            };
            if !met {
                return Err(StoreError::Conflict {
                    step,
                    key: op.key().to_owned(),
                    current,
                });
            }
        }
        Ok(Committed {
            records: ops
                .into_iter()
                .map(|op| self.stage(state, op, now))
                .collect(),
        })
    }

    fn stage(&mut self, state: &State, op: Op, now: i64) -> Option<Arc<Record>> {
        let (key, value) = match op {
            Op::Put { key, value, .. } => (key, Some(value)),
            Op::Delete { key, .. } => (key, None),
            Op::Check { .. } => return None,
        };
        let previous = self.current(state, &key);
        let deleted = value.is_none();
        let value = match (value, &previous) {
            (Some(value), _) => value,
            (None, Some(previous)) => previous.value.clone(),
            (None, None) => return None,
        };
        let revision = self
            .events
            .last()
            .map_or_else(|| state.revision(), |e| e.record.revision)
            + 1;
        let key: Arc<str> = previous
            .as_ref()
            .map_or_else(|| key.into(), |p| Arc::clone(&p.key));
        let record = Arc::new(Record::new(Arc::clone(&key), value, revision));
        self.overlay
            .insert(key, (!deleted).then(|| Arc::clone(&record)));
        let event = Event {
            record: Arc::clone(&record),
            previous,
            deleted,
            committed_at_us: now,
        };
        self.events.push(event);
        Some(record)
    }
}
