//! What all streams share: the index, a bounded log of encoded deltas, and how far each node has come.
//!
//! Consumers pull from the log with a cursor, so a slow one costs nothing but its place; one that falls out of the log
//! is cut and starts again from a snapshot. No stream has a queue.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use control_api::v1::{Ack, ClusterConfig, Hello};
use control_feed::{Effects, Index, Kind, Op, frame};
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::liveness::Liveness;

/// Deltas kept for consumers that lag or resume.
const LOG_ENTRIES: usize = 8192;
/// Bytes kept for the same.
const LOG_BYTES: usize = 16 << 20;
/// A node that a single change concerns with more than this gets a snapshot, which comes in parts.
const MAX_DELTA_BYTES: usize = 4 << 20;

/// One change. Objects are encoded once; the frame of a node that is concerned in a way of its own is put together
/// when it is sent.
#[derive(Debug)]
struct Entry {
    revision: u64,
    committed_at_us: i64,
    shared: Option<Bytes>,
    effects: Effects,
    size: usize,
}

/// What an entry of the log means for one node.
enum ForNode {
    Nothing,
    Frame(Bytes),
    TooMuch,
}

impl Entry {
    fn new(revision: u64, committed_at_us: i64, effects: Effects) -> Self {
        let shared = (!effects.shared.is_empty())
            .then(|| frame::delta(revision, committed_at_us, effects.shared.iter()));
        let mut seen = HashSet::new();
        let mut size = shared.as_ref().map_or(0, Bytes::len);
        for op in [&effects.per_node, &effects.per_runner]
            .into_iter()
            .flat_map(|nodes| nodes.values().flatten())
        {
            size += size_of::<Op>();
            if let Op::Upsert(bytes) = op
                && seen.insert(bytes.as_ptr())
            {
                size += bytes.len();
            }
        }
        Self {
            revision,
            committed_at_us,
            shared,
            effects,
            size,
        }
    }

    fn is_own(&self, node: &str, runs_pods: bool) -> bool {
        self.effects.per_node.contains_key(node)
            || (runs_pods && self.effects.per_runner.contains_key(node))
    }

    fn is_too_much(&self, node: &str, runs_pods: bool) -> bool {
        if self.effects.afresh.contains(node) {
            return true;
        }
        let ops = self.effects.of_node(node, runs_pods);
        let sizes = ops.map(|op| match op {
            Op::Upsert(bytes) => bytes.len(),
            Op::Remove(key) => key.namespace.len() + key.name.len(),
        });
        self.is_own(node, runs_pods) && sizes.sum::<usize>() > MAX_DELTA_BYTES
    }

    fn of_node(&self, node: &str, runs_pods: bool) -> ForNode {
        if self.is_too_much(node, runs_pods) {
            return ForNode::TooMuch;
        }
        let own = self.is_own(node, runs_pods).then(|| {
            let ops = self.effects.of_node(node, runs_pods);
            frame::delta(self.revision, self.committed_at_us, ops)
        });
        own.or_else(|| self.shared.clone())
            .map_or(ForNode::Nothing, ForNode::Frame)
    }
}

/// How far one node has come.
#[derive(Clone, Debug, Default)]
pub(super) struct NodeProgress {
    /// Which stream speaks for the node: a later one replaces an earlier one.
    session: u64,
    pub(super) connected: bool,
    /// Sequence number of the next log entry that the stream will look at.
    cursor: u64,
    /// Revision of the last change that concerned the node and was put on the stream.
    sent: u64,
    /// Revision that the node was last told of, changes that did not concern it included.
    told: u64,
    pub(super) acked: u64,
    pub(super) apply_error: String,
    cut: CancellationToken,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) snapshots: u64,
    pub(super) resumes: u64,
    pub(super) changes: u64,
    pub(super) frames: u64,
    pub(super) frame_bytes: u64,
    pub(super) fell_behind: u64,
    pub(super) silent: u64,
}

pub(super) struct Inner {
    index: Index,
    /// Kinds whose first list came, and the revision up to which each kind is known.
    progress: BTreeMap<Kind, u64>,
    /// Optional kinds that this cluster does not have.
    absent: BTreeSet<Kind>,
    synced: bool,
    pub(super) head_revision: u64,
    log: VecDeque<Entry>,
    log_bytes: usize,
    first_seq: u64,
    /// Every entry that left the log has at most this revision.
    floor_revision: u64,
    pub(super) nodes: BTreeMap<String, NodeProgress>,
    sessions: u64,
    pub(super) counters: Counters,
    liveness: Liveness,
}

/// See the module documentation.
pub(super) struct Hub {
    feed_instance: String,
    inner: Mutex<Inner>,
    /// Counts everything a waiter may be interested in: log entries, acknowledgements, progress.
    tick: watch::Sender<u64>,
    /// Cancelled to end every stream.
    stop: CancellationToken,
}

impl std::fmt::Debug for Hub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hub")
            .field("feed_instance", &self.feed_instance)
            .finish_non_exhaustive()
    }
}

/// Where a stream begins.
#[derive(Debug)]
pub(super) struct Opening {
    pub(super) session: u64,
    pub(super) cut: CancellationToken,
    pub(super) revision: u64,
    /// Present unless the stream resumes.
    pub(super) snapshot: Option<Vec<Bytes>>,
}

/// A snapshot that replaces what a stream has sent so far.
#[derive(Debug)]
pub(super) struct Renewal {
    pub(super) revision: u64,
    pub(super) snapshot: Vec<Bytes>,
}

/// What a stream finds at its cursor.
#[derive(Debug)]
pub(super) enum Next {
    Frame(Bytes),
    /// Nothing for this node up to the end of the log. `progress` is the head's revision when it lies beyond the last
    /// frame sent.
    UpToDate {
        progress: Option<u64>,
    },
    FellBehind,
    /// A change that only a snapshot can carry.
    TooMuch,
    /// Another stream speaks for the node now.
    Replaced,
}

impl Hub {
    pub(super) fn new(config: ClusterConfig, feed_instance: String) -> Self {
        let mut index = Index::new(config);
        // Streams begin with a snapshot: before the first sync there is nobody to tell of changes.
        index.set_quiet(true);
        let inner = Inner {
            index,
            progress: BTreeMap::new(),
            absent: BTreeSet::new(),
            synced: false,
            head_revision: 0,
            log: VecDeque::new(),
            log_bytes: 0,
            first_seq: 0,
            floor_revision: 0,
            nodes: BTreeMap::new(),
            sessions: 0,
            counters: Counters::default(),
            liveness: Liveness::new(Instant::now()),
        };
        Self {
            feed_instance,
            inner: Mutex::new(inner),
            tick: watch::channel(0).0,
            stop: CancellationToken::new(),
        }
    }

    pub(super) fn feed_instance(&self) -> &str {
        &self.feed_instance
    }

    /// Changes whenever the log, an acknowledgement or the progress did.
    pub(super) fn ticks(&self) -> watch::Receiver<u64> {
        self.tick.subscribe()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing in the critical sections panics half-way through an update.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        self.tick
            .send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Takes a complete list of one kind.
    pub(super) fn replace<'a>(
        &self,
        kind: Kind,
        objects: impl Iterator<Item = &'a Value>,
        revision: u64,
        now_us: i64,
    ) {
        let mut inner = self.lock();
        let effects = inner.index.replace(kind, objects, revision);
        inner.absent.remove(&kind);
        inner.advance(kind, revision);
        // Other kinds may lag behind this list: it must not claim their revisions.
        let at = inner.head_revision;
        inner.append(at, now_us, effects);
        drop(inner);
        self.wake();
    }

    /// Takes the news that the cluster does not have this kind.
    pub(super) fn absent(&self, kind: Kind, now_us: i64) {
        let mut inner = self.lock();
        let effects = inner.index.replace(kind, std::iter::empty(), 0);
        inner.absent.insert(kind);
        inner.advance(kind, 0);
        let at = inner.head_revision;
        inner.append(at, now_us, effects);
        drop(inner);
        self.wake();
    }

    /// Takes one change.
    pub(super) fn change(
        &self,
        kind: Kind,
        deleted: bool,
        object: &Value,
        revision: u64,
        committed_at_us: i64,
    ) {
        let mut inner = self.lock();
        let effects = if deleted {
            inner.index.remove(kind, object)
        } else {
            inner.index.upsert(kind, object, revision)
        };
        inner.advance(kind, revision);
        let at = inner
            .head_revision
            .max(if inner.synced { revision } else { 0 });
        inner.append(at, committed_at_us, effects);
        inner.head_revision = at;
        if kind == Kind::Node && deleted {
            // Nobody waits for a node that is no more; one that still follows stays known.
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            inner
                .nodes
                .retain(|node, progress| progress.connected || node != name);
        }
        drop(inner);
        self.wake();
    }

    /// Takes the news that nothing older than `revision` is still to come for this kind.
    pub(super) fn bookmark(&self, kind: Kind, revision: u64) {
        let mut inner = self.lock();
        let before = (inner.synced, inner.head_revision);
        inner.advance(kind, revision);
        let changed = before != (inner.synced, inner.head_revision);
        drop(inner);
        if changed {
            self.wake();
        }
    }

    pub(super) fn is_synced(&self) -> bool {
        self.lock().synced
    }

    /// Begins a stream: a resume where the log still reaches back, a snapshot otherwise.
    pub(super) fn open(&self, hello: &Hello) -> Opening {
        let mut inner = self.lock();
        inner.sessions += 1;
        let session = inner.sessions;
        // Inclusive: a change that arrived late carries the revision of the head it met.
        let older = inner
            .log
            .partition_point(|e| e.revision < hello.resume_revision);
        let mut missed = inner.log.iter().skip(older);
        let resumes = hello.feed_instance == self.feed_instance
            && hello.resume_revision > inner.floor_revision
            && hello.resume_revision <= inner.head_revision
            && !missed.any(|entry| entry.is_too_much(&hello.node_name, hello.runs_pods));
        let cursor = if resumes {
            inner.first_seq + older as u64
        } else {
            inner.next_seq()
        };
        let revision = if resumes {
            hello.resume_revision
        } else {
            inner.head_revision
        };
        let snapshot = (!resumes).then(|| inner.index.snapshot(&hello.node_name, hello.runs_pods));
        match resumes {
            true => inner.counters.resumes += 1,
            false => inner.counters.snapshots += 1,
        }
        let node = inner.nodes.entry(hello.node_name.clone()).or_default();
        node.cut.cancel();
        let acked = if resumes { node.acked } else { 0 };
        *node = NodeProgress {
            session,
            connected: true,
            cursor,
            sent: revision,
            told: revision,
            acked,
            apply_error: String::new(),
            cut: self.stop.child_token(),
        };
        let cut = node.cut.clone();
        inner.liveness.heard(&hello.node_name, Instant::now(), None);
        drop(inner);
        self.wake();
        Opening {
            session,
            cut,
            revision,
            snapshot,
        }
    }

    /// Ends every stream, now and to come.
    pub(super) fn stop(&self) {
        self.stop.cancel();
    }

    /// Ends a stream, unless another one took its place.
    pub(super) fn close(&self, node: &str, session: u64) {
        let mut inner = self.lock();
        if let Some(progress) = inner.nodes.get_mut(node)
            && progress.session == session
        {
            progress.connected = false;
            inner.liveness.closed(node, Instant::now());
        }
        drop(inner);
        self.wake();
    }

    /// Takes a sign of life. `next_in` is when the node promises the next one.
    pub(super) fn heard(&self, node: &str, session: u64, next_in: Option<Duration>) {
        let mut inner = self.lock();
        if inner.nodes.get(node).is_some_and(|p| p.session == session) {
            inner.liveness.heard(node, Instant::now(), next_in);
        }
    }

    /// Gives the addresses of nodes that fell silent to others.
    pub(super) fn check_nodes(&self, now: Instant, now_us: i64) {
        let mut inner = self.lock();
        let watched = inner.synced && inner.index.has_announcements();
        inner.liveness.watch(watched, now);
        if !watched {
            return;
        }
        let nodes: Vec<String> = inner.index.nodes().map(str::to_owned).collect();
        let lost = inner.liveness.lost(&nodes, now);
        let effects = inner.index.set_lost(lost);
        if effects.is_empty() {
            return;
        }
        let at = inner.head_revision;
        inner.append(at, now_us, effects);
        drop(inner);
        self.wake();
    }

    /// The next frame for a node, moving its cursor.
    pub(super) fn next(&self, node: &str, session: u64, runs_pods: bool) -> Next {
        let mut inner = self.lock();
        let (first_seq, next_seq) = (inner.first_seq, inner.next_seq());
        let head = inner.head_revision;
        let inner = &mut *inner;
        let Some(progress) = inner.nodes.get_mut(node).filter(|p| p.session == session) else {
            return Next::Replaced;
        };
        if progress.cursor < first_seq {
            inner.counters.fell_behind += 1;
            return Next::FellBehind;
        }
        while progress.cursor < next_seq {
            let at = usize::try_from(progress.cursor - first_seq).unwrap_or(usize::MAX);
            progress.cursor += 1;
            let Some(entry) = inner.log.get(at) else {
                break;
            };
            match entry.of_node(node, runs_pods) {
                ForNode::Nothing => {}
                ForNode::Frame(frame) => {
                    progress.sent = entry.revision;
                    progress.told = entry.revision;
                    inner.counters.frames += 1;
                    inner.counters.frame_bytes += frame.len() as u64;
                    return Next::Frame(frame);
                }
                ForNode::TooMuch => return Next::TooMuch,
            }
        }
        Next::UpToDate {
            progress: (progress.told < head).then_some(head),
        }
    }

    /// A new snapshot for a stream that is open.
    pub(super) fn renew(&self, node: &str, session: u64, runs_pods: bool) -> Option<Renewal> {
        let mut inner = self.lock();
        let (cursor, revision) = (inner.next_seq(), inner.head_revision);
        let progress = inner.nodes.get_mut(node).filter(|p| p.session == session)?;
        progress.cursor = cursor;
        progress.sent = revision;
        progress.told = revision;
        inner.counters.snapshots += 1;
        Some(Renewal {
            revision,
            snapshot: inner.index.snapshot(node, runs_pods),
        })
    }

    /// Notes that an empty delta moved the node to this revision.
    pub(super) fn moved(&self, node: &str, session: u64, revision: u64) {
        let mut inner = self.lock();
        if let Some(progress) = inner.nodes.get_mut(node).filter(|p| p.session == session) {
            progress.told = progress.told.max(revision);
        }
    }

    /// Takes a node's acknowledgement. True when it reports a failure that the one before did not.
    pub(super) fn ack(&self, node: &str, session: u64, ack: Ack) -> bool {
        let mut inner = self.lock();
        let mut news = false;
        if let Some(progress) = inner.nodes.get_mut(node).filter(|p| p.session == session) {
            progress.acked = progress.acked.max(ack.revision);
            news = !ack.error.is_empty() && progress.apply_error != ack.error;
            progress.apply_error = ack.error;
        }
        drop(inner);
        self.wake();
        news
    }
}

impl Inner {
    fn next_seq(&self) -> u64 {
        self.first_seq + self.log.len() as u64
    }

    /// Every kind is known at least up to the head.
    fn advance(&mut self, kind: Kind, revision: u64) {
        let known = self.progress.entry(kind).or_default();
        *known = revision.max(*known);
        if self.progress.len() == Kind::ALL.len() {
            let present = self
                .progress
                .iter()
                .filter(|(k, _)| !self.absent.contains(k));
            let frontier = present.map(|(_, known)| *known).min().unwrap_or_default();
            if !self.synced {
                self.synced = true;
                self.index.set_quiet(false);
                self.floor_revision = frontier.saturating_sub(1);
            }
            self.head_revision = self.head_revision.max(frontier);
        }
    }

    fn append(&mut self, revision: u64, committed_at_us: i64, effects: Effects) {
        // Before the first complete sync there is nobody to tell: streams begin with a snapshot.
        if effects.is_empty() || !self.synced {
            return;
        }
        let entry = Entry::new(revision, committed_at_us, effects);
        self.counters.changes += 1;
        self.log_bytes += entry.size;
        self.log.push_back(entry);
        while self.log.len() > LOG_ENTRIES || (self.log_bytes > LOG_BYTES && self.log.len() > 1) {
            let Some(old) = self.log.pop_front() else {
                break;
            };
            self.log_bytes -= old.size;
            self.first_seq += 1;
            self.floor_revision = old.revision;
        }
    }

    /// The revision that a node has in its kernel: changes that do not concern it count as applied.
    pub(super) fn applied(&self, node: &NodeProgress) -> u64 {
        let current = node.connected && node.cursor == self.next_seq() && node.acked >= node.sent;
        if current {
            self.head_revision
        } else {
            node.acked
        }
    }
}
