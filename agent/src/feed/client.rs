//! The connection: servers in order, back-off, snapshot assembly, acknowledgements and heartbeats.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use control_api::desired::DesiredState;
use control_api::v1::node_feed_client::NodeFeedClient;
use control_api::v1::{
    Ack, FeedMessage, FollowRequest, Heartbeat, Hello, Snapshot, feed_message, follow_request,
};
use rand::Rng;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Streaming;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use super::{Applied, FeedError, Origin, Shared};
use crate::config::Feed;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// The server sends a heartbeat at least every 5 s: silence for this long means that the connection is dead.
const SILENCE_LIMIT: Duration = Duration::from_secs(20);
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);
/// While there are addresses that move when their node is lost: the control plane calls a node lost after four of
/// these.
const QUICK_HEARTBEAT_INTERVAL: Duration = Duration::from_millis(500);
const BACKOFF_FIRST: Duration = Duration::from_millis(100);
const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// Requests that may wait for the network; acknowledgements are coalesced before they get here.
const REQUEST_QUEUE: usize = 16;
/// Largest message accepted. The server cuts snapshots far below it; one object is at most 1.5 MiB in the API.
const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// PEM files, read anew for every connection so that rotated certificates are picked up.
pub(super) struct Credentials {
    tls: ClientTlsConfig,
}

impl Credentials {
    pub(super) fn read(feed: &Feed) -> Result<Self, FeedError> {
        let read = |what, path: &std::path::Path| {
            std::fs::read(path).map_err(|source| FeedError::Credentials {
                what,
                path: path.into(),
                source,
            })
        };
        let ca = Certificate::from_pem(read("feed CA", &feed.ca)?);
        let identity = Identity::from_pem(
            read("feed client certificate", &feed.cert)?,
            read("feed client key", &feed.key)?,
        );
        let tls = ClientTlsConfig::new()
            .ca_certificate(ca)
            .identity(identity)
            .domain_name(feed.server_name.clone());
        Ok(Self { tls })
    }
}

pub(super) fn parse_servers(feed: &Feed) -> Result<Vec<Endpoint>, FeedError> {
    if feed.servers.is_empty() {
        return Err(FeedError::NoServer);
    }
    feed.servers
        .iter()
        .map(|server| {
            Endpoint::from_shared(server.clone()).map_err(|source| FeedError::BadServer {
                server: server.clone(),
                source,
            })
        })
        .collect()
}

pub(super) struct Follower {
    pub(super) shared: Arc<Shared>,
    pub(super) servers: Vec<Endpoint>,
    pub(super) feed: Feed,
    pub(super) runs_pods: bool,
}

/// What a resume needs: instance and revision of the state that a server gave us in this process.
#[derive(Default)]
struct Position {
    feed_instance: String,
    revision: u64,
}

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
enum Lost {
    #[error("{0}")]
    Credentials(#[from] FeedError),
    #[error("connect: {0}")]
    Connect(String),
    #[error("the server closed the stream")]
    Closed,
    #[error("the server answered {:?}: {}", .0.code(), .0.message())]
    Refused(Box<tonic::Status>),
    #[error("an address of this node has gone")]
    Moved,
    #[error("no message within {} s", SILENCE_LIMIT.as_secs())]
    Silent,
}

impl From<tonic::Status> for Lost {
    fn from(status: tonic::Status) -> Self {
        Self::Refused(Box::new(status))
    }
}

impl Follower {
    pub(super) async fn run(self, shutdown: CancellationToken) {
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = self.follow_forever() => {}
        }
        self.shared.channel.send_replace(None);
    }

    async fn follow_forever(&self) {
        let mut position = Position::default();
        let mut backoff = BACKOFF_FIRST;
        loop {
            for server in &self.servers {
                let uri = server.uri().to_string();
                let messages_before = self.messages_seen();
                let lost = match self.follow_one(server, &uri, &mut position).await {
                    Err(lost) => lost.to_string(),
                    Ok(never) => match never {},
                };
                if self.messages_seen() != messages_before {
                    backoff = BACKOFF_FIRST;
                }
                self.shared.channel.send_replace(None);
                let repeated = self.shared.with_status(|status| {
                    status.disconnects += u64::from(!status.server.is_empty());
                    status.server.clear();
                    std::mem::replace(&mut status.last_error, lost.clone()) == lost
                });
                if !repeated {
                    tracing::warn!(server = uri, reason = lost, "lost the node feed; retrying");
                }
            }
            // Nodes that lost the same server must not come back in step.
            let jitter = rand::rng().random_range(0.5..1.0);
            tokio::time::sleep(backoff.mul_f64(jitter)).await;
            backoff = (backoff * 2).min(BACKOFF_MAX);
        }
    }

    fn messages_seen(&self) -> u64 {
        self.shared
            .with_status(|status| status.snapshots + status.deltas)
    }

    async fn connect(&self, server: &Endpoint) -> Result<Channel, Lost> {
        let tls = Credentials::read(&self.feed)?.tls;
        server
            .clone()
            .tls_config(tls)
            .map_err(|e| Lost::Connect(chain(&e)))?
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(HEARTBEAT_INTERVAL)
            .keep_alive_timeout(SILENCE_LIMIT)
            .connect()
            .await
            .map_err(|e| Lost::Connect(chain(&e)))
    }

    async fn follow_one(
        &self,
        server: &Endpoint,
        uri: &str,
        position: &mut Position,
    ) -> Result<std::convert::Infallible, Lost> {
        let channel = self.connect(server).await?;
        let (requests, queue) = mpsc::channel(REQUEST_QUEUE);
        let hello = follow_request::Kind::Hello(Hello {
            node_name: self.shared.node_name.clone(),
            resume_revision: position.revision,
            feed_instance: position.feed_instance.clone(),
            runs_pods: self.runs_pods,
            agent_version: env!("CARGO_PKG_VERSION").into(),
        });
        requests
            .try_send(FollowRequest { kind: Some(hello) })
            .map_err(|_| Lost::Closed)?;
        let mut client =
            NodeFeedClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES);
        let stream = tokio::time::timeout(SILENCE_LIMIT, client.follow(ReceiverStream::new(queue)))
            .await
            .map_err(|_| Lost::Silent)??
            .into_inner();
        self.shared.channel.send_replace(Some(channel));
        self.shared.with_status(|status| {
            status.server = uri.to_owned();
            status.last_error.clear();
        });
        tracing::info!(server = uri, "following the node feed");
        self.pump(stream, requests, position).await
    }

    async fn pump(
        &self,
        mut stream: Streaming<FeedMessage>,
        requests: mpsc::Sender<FollowRequest>,
        position: &mut Position,
    ) -> Result<std::convert::Infallible, Lost> {
        let mut applied = self.shared.applied.subscribe();
        // An acknowledgement given before this connection is news to this server.
        applied.mark_changed();
        let mut beat_at = Instant::now();
        let mut parts = DesiredState::default();
        let mut deadline = Instant::now() + SILENCE_LIMIT;
        loop {
            tokio::select! {
                message = stream.message() => {
                    deadline = Instant::now() + SILENCE_LIMIT;
                    self.take(message?.ok_or(Lost::Closed)?, &mut parts, position);
                    beat_at = beat_at.min(Instant::now() + self.heartbeat_interval());
                }
                permit = ready_ack(&mut applied, &requests) => {
                    let permit = permit?;
                    let Applied { revision, error } = applied.borrow_and_update().clone();
                    if revision > 0 {
                        permit.send(request(follow_request::Kind::Ack(Ack { revision, error })));
                    }
                }
                () = tokio::time::sleep_until(beat_at) => {
                    let interval = self.heartbeat_interval();
                    beat_at = Instant::now() + interval;
                    let beat = Heartbeat {
                        sent_at_us: now_us(),
                        next_in_ms: u32::try_from(interval.as_millis()).unwrap_or(u32::MAX),
                    };
                    // A full queue means that the network is behind already: a heartbeat would say nothing new.
                    let _ = requests.try_send(request(follow_request::Kind::Heartbeat(beat)));
                }
                () = self.shared.moved.notified() => return Err(Lost::Moved),
                () = tokio::time::sleep_until(deadline) => return Err(Lost::Silent),
            }
        }
    }

    fn heartbeat_interval(&self) -> Duration {
        if self.shared.publisher.has_announcements() {
            QUICK_HEARTBEAT_INTERVAL
        } else {
            HEARTBEAT_INTERVAL
        }
    }

    fn take(&self, message: FeedMessage, parts: &mut DesiredState, position: &mut Position) {
        match message.kind {
            Some(feed_message::Kind::Snapshot(part)) => self.take_part(part, parts, position),
            Some(feed_message::Kind::Delta(delta)) => {
                position.revision = delta.revision;
                self.shared.with_status(|status| {
                    status.deltas += 1;
                    status.held_revision = delta.revision;
                });
                self.shared.publisher.apply(delta);
            }
            Some(feed_message::Kind::Heartbeat(_)) | None => {}
        }
    }

    fn take_part(&self, part: Snapshot, parts: &mut DesiredState, position: &mut Position) {
        if part.first {
            *parts = DesiredState::default();
        }
        let (last, revision, feed_instance) =
            (part.last, part.revision, part.feed_instance.clone());
        parts.add_part(part);
        if !last {
            return;
        }
        let state = std::mem::take(parts);
        *position = Position {
            feed_instance,
            revision,
        };
        self.shared.with_status(|status| {
            status.snapshots += 1;
            status.held_revision = revision;
            status.synced = true;
        });
        self.shared.publisher.replace(state, Origin::Server);
    }
}

fn request(kind: follow_request::Kind) -> FollowRequest {
    FollowRequest { kind: Some(kind) }
}

/// Waits until there is something to acknowledge and room to send it.
async fn ready_ack<'a>(
    applied: &mut watch::Receiver<Applied>,
    requests: &'a mpsc::Sender<FollowRequest>,
) -> Result<mpsc::Permit<'a, FollowRequest>, Lost> {
    applied.changed().await.map_err(|_| Lost::Closed)?;
    // Still unsent: a select that drops this future while it waits for room must not lose it.
    applied.mark_changed();
    requests.reserve().await.map_err(|_| Lost::Closed)
}

fn now_us() -> i64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

/// An error with its causes: tonic's own text stops at «transport error».
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
