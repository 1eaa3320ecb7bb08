//! A control plane for agents under test: serves the node feed from objects that the test holds, and remembers what
//! every node has acknowledged.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use control_api::v1::node_feed_server::{NodeFeed, NodeFeedServer};
use control_api::v1::{
    Delta, EventReports, EventReportsReply, FeedMessage, FollowRequest, NodeReport,
    NodeReportReply, Object, ObjectKey, PodReports, PodReportsReply, Snapshot, feed_message,
    follow_request,
};
use tokio::sync::{broadcast, mpsc, watch};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_stream::{Stream, StreamExt as _};
use tonic::transport::{Certificate, Identity, Server, ServerTlsConfig};
use tonic::{Request, Response, Status, Streaming};
use weir_control::pki::{Authority, Pki, SERVER_NAME, write_pair};
use weir_tests::topology::Namespace;

/// Port of the feed.
pub(crate) const PORT: u16 = 6444;
/// How long an agent may take to acknowledge.
const ACK_PATIENCE: Duration = Duration::from_secs(20);

/// What a node said about a revision: empty when it is programmed, or what failed.
type Acks = BTreeMap<String, (u64, String)>;

struct Shared {
    /// Objects by a name of the test's, and the revision.
    objects: Mutex<(BTreeMap<String, Object>, u64)>,
    deltas: broadcast::Sender<Delta>,
    acks: watch::Sender<Acks>,
}

/// The running feed server. It ends with the runtime that it was started on.
pub(crate) struct Control {
    shared: Arc<Shared>,
    authority: Authority,
    _dir: tempfile::TempDir,
}

impl Control {
    /// Serves on `address` inside a namespace.
    pub(crate) fn start(namespace: &Namespace, address: SocketAddr) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let pki = Pki::open(dir.path(), &[SERVER_NAME.to_owned()], &[address.ip()]).unwrap();
        let authority = Authority::load(dir.path()).unwrap();
        let shared = Arc::new(Shared {
            objects: Mutex::default(),
            deltas: broadcast::channel(256).0,
            acks: watch::channel(Acks::new()).0,
        });
        let listener = namespace
            .enter(|| {
                let listener = std::net::TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                Ok(listener)
            })
            .unwrap();
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        let tls = ServerTlsConfig::new()
            .identity(Identity::from_pem(
                &pki.server.cert_pem,
                &pki.server.key_pem,
            ))
            .client_ca_root(Certificate::from_pem(&pki.ca_pem));
        let service = NodeFeedServer::new(Service {
            shared: Arc::clone(&shared),
        });
        let server = Server::builder()
            .tls_config(tls)
            .unwrap()
            .add_service(service);
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        Self {
            shared,
            authority,
            _dir: dir,
        }
    }

    /// The `[feed]` section of an agent's configuration, with credentials written below `dir`.
    pub(crate) fn feed_section(&self, node: &str, dir: &Path, server: SocketAddr) -> String {
        let pair = self.authority.issue_node(node, &[]).unwrap();
        write_pair(dir, "node", &pair).unwrap();
        std::fs::write(dir.join("ca.crt"), &self.authority.ca_pem).unwrap();
        let path = |name: &str| dir.join(name).display().to_string();
        format!(
            "[feed]\nservers = [\"https://{server}\"]\nserver_name = \"{SERVER_NAME}\"\nca = {:?}\ncert = {:?}\nkey = {:?}\n",
            path("ca.crt"),
            path("node.crt"),
            path("node.key")
        )
    }

    /// Changes objects (by names of the test's) in one revision and returns it.
    pub(crate) fn change(
        &self,
        upserts: Vec<(&str, Object)>,
        removals: Vec<(&str, ObjectKey)>,
    ) -> u64 {
        let mut guard = self.shared.objects.lock().unwrap();
        let (objects, revision) = &mut *guard;
        *revision += 1;
        for (name, object) in &upserts {
            objects.insert((*name).to_owned(), object.clone());
        }
        for (name, _) in &removals {
            objects.remove(*name);
        }
        let delta = Delta {
            revision: *revision,
            committed_at_us: 0,
            upserts: upserts.into_iter().map(|(_, object)| object).collect(),
            removals: removals.into_iter().map(|(_, key)| key).collect(),
        };
        // Nobody follows yet, or everybody hears it: both are fine.
        let _ = self.shared.deltas.send(delta);
        *revision
    }

    /// Waits until every node has programmed the revision without an error.
    pub(crate) async fn programmed(&self, nodes: &[&str], revision: u64) {
        let mut acks = self.shared.acks.subscribe();
        let done = acks.wait_for(|acks| {
            nodes.iter().all(|node| {
                acks.get(*node)
                    .is_some_and(|(at, error)| *at >= revision && error.is_empty())
            })
        });
        let result = tokio::time::timeout(ACK_PATIENCE, done).await.map(|_| ());
        let now = self.shared.acks.borrow().clone();
        result.unwrap_or_else(|_| panic!("revision {revision} is not programmed: {now:?}"));
    }
}

struct Service {
    shared: Arc<Shared>,
}

impl Service {
    fn snapshot(&self) -> Snapshot {
        let guard = self.shared.objects.lock().unwrap();
        Snapshot {
            revision: guard.1,
            feed_instance: "test".into(),
            first: true,
            last: true,
            objects: guard.0.values().cloned().collect(),
        }
    }
}

#[tonic::async_trait]
impl NodeFeed for Service {
    type FollowStream = Pin<Box<dyn Stream<Item = Result<FeedMessage, Status>> + Send>>;

    async fn follow(
        &self,
        request: Request<Streaming<FollowRequest>>,
    ) -> Result<Response<Self::FollowStream>, Status> {
        let mut requests = request.into_inner();
        let node = match requests.next().await {
            Some(Ok(FollowRequest {
                kind: Some(follow_request::Kind::Hello(hello)),
            })) => hello.node_name,
            _ => return Err(Status::invalid_argument("the first request is Hello")),
        };
        let (sender, receiver) = mpsc::channel(16);
        // Subscribed before the snapshot is taken: a delta may come twice, never not at all.
        let mut deltas = self.shared.deltas.subscribe();
        let snapshot = self.snapshot();
        let from = snapshot.revision;
        let message = FeedMessage {
            kind: Some(feed_message::Kind::Snapshot(snapshot)),
        };
        sender.send(Ok(message)).await.unwrap();
        let shared = Arc::clone(&self.shared);
        tokio::spawn(async move {
            loop {
                let message = tokio::select! {
                    delta = deltas.recv() => match delta {
                        Ok(delta) if delta.revision > from => feed_message::Kind::Delta(delta),
                        Ok(_) => continue,
                        Err(_) => return,
                    },
                    request = requests.next() => match request {
                        Some(Ok(FollowRequest { kind: Some(follow_request::Kind::Ack(ack)) })) => {
                            shared.acks.send_modify(|acks| {
                                acks.insert(node.clone(), (ack.revision, ack.error));
                            });
                            continue;
                        }
                        Some(Ok(FollowRequest { kind: Some(follow_request::Kind::Heartbeat(h)) })) => {
                            feed_message::Kind::Heartbeat(h)
                        }
                        Some(Ok(_)) => continue,
                        _ => return,
                    },
                };
                if sender
                    .send(Ok(FeedMessage {
                        kind: Some(message),
                    }))
                    .await
                    .is_err()
                {
                    return;
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn report_node(
        &self,
        _: Request<NodeReport>,
    ) -> Result<Response<NodeReportReply>, Status> {
        Ok(Response::new(NodeReportReply::default()))
    }

    async fn report_pods(
        &self,
        _: Request<PodReports>,
    ) -> Result<Response<PodReportsReply>, Status> {
        Ok(Response::new(PodReportsReply {}))
    }

    async fn report_events(
        &self,
        _: Request<EventReports>,
    ) -> Result<Response<EventReportsReply>, Status> {
        Ok(Response::new(EventReportsReply {}))
    }
}
