//! One node's stream: snapshot parts, deltas, heartbeats; acknowledgements the other way.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use control_api::v1::{FollowRequest, Hello, follow_request};
use control_feed::frame;
use futures::Stream;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Status, Streaming};

use super::hub::{Hub, Next, Opening};
use super::now_us;

/// The client expects a message within four of these.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);
/// A client sends heartbeats as well: one that is silent for this long is gone or stuck.
const SILENCE_LIMIT: Duration = Duration::from_secs(20);
/// The first request must come within this time.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// Reads the Hello that opens a stream.
pub(super) async fn hello(requests: &mut Streaming<FollowRequest>) -> Result<Hello, Status> {
    let first = tokio::time::timeout(HELLO_TIMEOUT, requests.message())
        .await
        .map_err(|_| Status::deadline_exceeded("no Hello came; send it as the first request"))??;
    match first.and_then(|request| request.kind) {
        Some(follow_request::Kind::Hello(hello)) => Ok(hello),
        _ => Err(Status::invalid_argument(
            "the first request of Follow must be Hello",
        )),
    }
}

/// Opens the stream of an admitted node.
pub(super) fn follow(
    hub: Arc<Hub>,
    hello: &Hello,
    requests: Streaming<FollowRequest>,
) -> impl Stream<Item = Result<Bytes, Status>> + Send + 'static {
    let opening = hub.open(hello);
    let ended = opening.cut.child_token();
    let session = Session {
        hub: Arc::clone(&hub),
        node: hello.node_name.clone(),
        id: opening.session,
    };
    tokio::spawn(read(
        Arc::clone(&hub),
        session.node.clone(),
        session.id,
        requests,
        ended.clone(),
    ));
    let follower = Follower {
        ticks: hub.ticks(),
        phase: Phase::new(opening),
        runs_pods: hello.runs_pods,
        heartbeat: Instant::now() + HEARTBEAT_INTERVAL,
        _reader: ended.clone().drop_guard(),
        ended,
        session,
    };
    futures::stream::unfold(Some(follower), |follower| async move {
        let mut follower = follower?;
        let item = follower.next().await?;
        let rest = item.is_ok().then_some(follower);
        Some((item, rest))
    })
}

/// Marks the node as gone when the stream is dropped, however that happens.
struct Session {
    hub: Arc<Hub>,
    node: String,
    id: u64,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.hub.close(&self.node, self.id);
    }
}

enum Phase {
    Snapshot {
        objects: Vec<Bytes>,
        sent: usize,
        revision: u64,
    },
    Deltas,
}

impl Phase {
    fn new(opening: Opening) -> Self {
        match opening.snapshot {
            Some(objects) => Self::Snapshot {
                objects,
                sent: 0,
                revision: opening.revision,
            },
            None => Self::Deltas,
        }
    }
}

struct Follower {
    session: Session,
    ticks: watch::Receiver<u64>,
    phase: Phase,
    runs_pods: bool,
    heartbeat: Instant,
    ended: CancellationToken,
    _reader: DropGuard,
}

impl Follower {
    /// The next frame; `None` ends the stream.
    async fn next(&mut self) -> Option<Result<Bytes, Status>> {
        if let Some(part) = self.next_part() {
            return Some(Ok(part));
        }
        let hub = Arc::clone(&self.session.hub);
        loop {
            self.ticks.mark_unchanged();
            let progress = match hub.next(&self.session.node, self.session.id, self.runs_pods) {
                Next::Frame(frame) => return Some(Ok(frame)),
                Next::UpToDate { progress } => progress,
                Next::FellBehind => {
                    return Some(Err(Status::aborted(
                        "the node fell behind the feed; connect again for a snapshot",
                    )));
                }
                Next::TooMuch => {
                    let (node, id) = (&self.session.node, self.session.id);
                    let Some(renewal) = hub.renew(node, id, self.runs_pods) else {
                        return Some(Err(taken_over()));
                    };
                    self.phase = Phase::Snapshot {
                        objects: renewal.snapshot,
                        sent: 0,
                        revision: renewal.revision,
                    };
                    return self.next_part().map(Ok);
                }
                Next::Replaced => return Some(Err(taken_over())),
            };
            tokio::select! {
                () = self.ended.cancelled() => return None,
                changed = self.ticks.changed() => changed.ok()?,
                () = tokio::time::sleep_until(self.heartbeat) => {
                    self.heartbeat = Instant::now() + HEARTBEAT_INTERVAL;
                    return Some(Ok(self.beat(progress)));
                }
            }
        }
    }

    /// A sign of life; where changes passed that did not concern the node, one that moves its revision.
    fn beat(&self, progress: Option<u64>) -> Bytes {
        let Some(revision) = progress else {
            return frame::heartbeat(now_us());
        };
        self.session
            .hub
            .moved(&self.session.node, self.session.id, revision);
        frame::delta(revision, 0, std::iter::empty())
    }

    fn next_part(&mut self) -> Option<Bytes> {
        let Phase::Snapshot {
            objects,
            sent,
            revision,
        } = &mut self.phase
        else {
            return None;
        };
        let rest = &objects[*sent..];
        let (part, tail) = rest.split_at(frame::part_length(rest));
        let instance = self.session.hub.feed_instance();
        let bytes = frame::snapshot_part(*revision, instance, *sent == 0, tail.is_empty(), part);
        *sent += part.len();
        if tail.is_empty() {
            self.phase = Phase::Deltas;
        }
        Some(bytes)
    }
}

fn taken_over() -> Status {
    Status::aborted("another stream of this node took over")
}

/// Takes acknowledgements until the client ends, falls silent, or the stream is dropped.
async fn read(
    hub: Arc<Hub>,
    node: String,
    session: u64,
    mut requests: Streaming<FollowRequest>,
    ended: CancellationToken,
) {
    loop {
        let message = tokio::select! {
            () = ended.cancelled() => return,
            message = tokio::time::timeout(SILENCE_LIMIT, requests.message()) => message,
        };
        match message {
            Ok(Ok(Some(request))) => match request.kind {
                Some(follow_request::Kind::Ack(ack)) => {
                    let (revision, error) = (ack.revision, ack.error.clone());
                    if hub.ack(&node, session, ack) {
                        tracing::warn!(node, revision, error, "the node could not apply the feed");
                    }
                }
                Some(follow_request::Kind::Heartbeat(beat)) => {
                    let next_in = Duration::from_millis(beat.next_in_ms.into());
                    hub.heard(&node, session, (!next_in.is_zero()).then_some(next_in));
                }
                Some(follow_request::Kind::Hello(_)) | None => {}
            },
            Ok(Ok(None) | Err(_)) => break,
            Err(_) => {
                hub.lock().counters.silent += 1;
                tracing::warn!(node, "cut a silent node feed");
                break;
            }
        }
    }
    ended.cancel();
}
