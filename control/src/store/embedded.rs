//! The embedded store: redb on disk, written by one thread with group commit; reads come from memory.
//!
//! Transactions that wait while a commit's fsync runs are decided together and share the next fsync. State becomes
//! visible, and callers are answered, only after it is durable: nothing that anyone has seen is lost by a crash.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread::JoinHandle;

use async_trait::async_trait;
use tokio::sync::{mpsc, oneshot};

use super::disk::{Disk, Opener, open_file};
use super::state::State;
use super::{Committed, Event, Expect, Op, Page, Record, Store, StoreError, Watch};

/// Transactions that may wait for the writer; further callers wait before they queue.
const QUEUE: usize = 4096;
/// Most transactions that share one fsync.
const GROUP: usize = 1024;
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
    /// Why the last write failed, until one succeeds.
    failure: Mutex<Option<Arc<redb::Error>>>,
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

    fn failure(&self) -> MutexGuard<'_, Option<Arc<redb::Error>>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
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
        Self::open_with(options, open_file)
    }

    pub(super) fn open_with(options: &OpenOptions, opener: Opener) -> Result<Self, StoreError> {
        let (disk, (records, revision)) = Disk::open(&options.path, opener)?;
        let shared = Arc::new(Shared {
            state: RwLock::new(State::new(records, revision)),
            failure: Mutex::new(None),
        });
        let (queue, requests) = mpsc::channel(QUEUE);
        let writer = Writer {
            disk,
            doubtful: Vec::new(),
            shared: Arc::clone(&shared),
            now_us: options.now_us,
        };
        let writer = std::thread::Builder::new()
            .name("store-writer".into())
            .spawn(move || writer.run(requests))
            .map_err(|e| StoreError::Open {
                path: options.path.clone(),
                source: Box::new(redb::Error::Io(e)),
            })?;
        Ok(Self {
            shared,
            queue: Some(queue),
            writer: Some(writer),
        })
    }
}

#[async_trait]
impl Store for EmbeddedStore {
    async fn revision(&self) -> Result<u64, StoreError> {
        Ok(self.shared.read().revision())
    }

    async fn health(&self) -> Result<(), StoreError> {
        match &*self.shared.failure() {
            None => Ok(()),
            Some(source) => Err(StoreError::Write {
                source: Arc::clone(source),
            }),
        }
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
    disk: Disk,
    /// Changes of a failed write of which it is not known yet whether they are on the disk.
    doubtful: Vec<Event>,
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
    fn run(mut self, mut requests: mpsc::Receiver<Request>) {
        let mut group = Vec::new();
        while requests.blocking_recv_many(&mut group, GROUP) > 0 {
            self.commit_group(group.drain(..));
        }
    }

    fn commit_group(&mut self, group: impl Iterator<Item = Request>) {
        let now = (self.now_us)();
        if let Err(source) = self.settle(now) {
            return self.refuse(source, group.map(|r| r.reply));
        }
        let mut staged = Staged::default();
        let replies: Vec<Reply> = {
            let state = self.shared.read();
            group
                .map(|r| (r.reply, staged.decide(&state, r.ops, now)))
                .collect()
        };
        if let Err(source) = self.persist(staged.events, now) {
            return self.refuse(source, replies.into_iter().map(|(reply, _)| reply));
        }
        for (reply, answer) in replies {
            // A caller that went away does not need its answer.
            let _ = reply.send(answer);
        }
    }

    /// Writes and shows changes.
    fn persist(&mut self, events: Vec<Event>, now_us: i64) -> Result<(), redb::Error> {
        if events.is_empty() {
            return Ok(());
        }
        if let Err(error) = self.disk.persist(&events) {
            self.doubtful = events;
            return match self.settle(now_us) {
                Ok(true) => Ok(()),
                Ok(false) | Err(_) => Err(error),
            };
        }
        *self.shared.failure() = None;
        self.publish(events, now_us);
        Ok(())
    }

    /// Finds out about doubtful changes; those that are on the disk are shown. True when they are.
    fn settle(&mut self, now_us: i64) -> Result<bool, redb::Error> {
        if self.doubtful.is_empty() {
            return Ok(false);
        }
        let landed = self.disk.settle(&self.doubtful)?;
        let events = std::mem::take(&mut self.doubtful);
        if landed {
            self.publish(events, now_us);
        }
        Ok(landed)
    }

    fn refuse(
        &self,
        source: redb::Error,
        replies: impl Iterator<Item = oneshot::Sender<Result<Committed, StoreError>>>,
    ) {
        tracing::error!(error = %source, "the store cannot write");
        let source = Arc::new(source);
        *self.shared.failure() = Some(Arc::clone(&source));
        for reply in replies {
            let _ = reply.send(Err(StoreError::Write {
                source: Arc::clone(&source),
            }));
        }
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
