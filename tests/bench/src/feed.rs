//! A control plane for agents under measurement: serves the node feed and notes when each revision was acknowledged.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use control_api::v1::node_feed_server::{NodeFeed, NodeFeedServer};
use control_api::v1::{
    Delta, EventReports, EventReportsReply, FeedMessage, FollowRequest, NodeReport,
    NodeReportReply, Object, ObjectKey, PodReports, PodReportsReply, Snapshot, feed_message,
    follow_request,
};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
};
use tokio::runtime::Runtime;
use tokio::sync::{broadcast, mpsc, watch};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_stream::{Stream, StreamExt as _};
use tonic::transport::{Certificate, Identity, Server, ServerTlsConfig};
use tonic::{Request, Response, Status, Streaming};

use crate::lab::Namespace;

/// Where an agent finds its feed: on its own loopback.
pub(crate) const ADDRESS: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 6_444);
const SERVER_NAME: &str = "weir-control";
/// Objects of one part of a snapshot; the real server cuts by bytes.
const PART_OBJECTS: usize = 2_000;

/// Revision, error and time of the last acknowledgement of each node.
type Acks = BTreeMap<String, (u64, String, Instant)>;

/// What nodes are told after their first snapshot.
#[derive(Clone)]
struct News {
    /// `None` for all of them.
    node: Option<String>,
    messages: Vec<feed_message::Kind>,
}

struct Shared {
    revision: Mutex<u64>,
    objects: Vec<Object>,
    news: broadcast::Sender<News>,
    acks: watch::Sender<Acks>,
}

/// The feed of one lab's nodes. All of them begin with the same.
pub(crate) struct Feed {
    shared: Arc<Shared>,
    authority: Authority,
    runtime: Arc<Runtime>,
}

impl Feed {
    pub(crate) fn new(runtime: Arc<Runtime>, objects: Vec<Object>) -> Result<Self> {
        Ok(Self {
            shared: Arc::new(Shared {
                revision: Mutex::new(1),
                objects,
                news: broadcast::channel(256).0,
                acks: watch::channel(Acks::new()).0,
            }),
            authority: Authority::new()?,
            runtime,
        })
    }

    /// Serves on a node's loopback, writes the node's credentials to `folder` and returns the `[feed]` section of its
    /// agent's configuration.
    pub(crate) fn serve(&self, namespace: &Namespace, node: &str, folder: &Path) -> Result<String> {
        let listener = namespace.enter(|| {
            let listener = TcpListener::bind(ADDRESS).context("listen for the agent")?;
            listener.set_nonblocking(true)?;
            Ok(listener)
        })?;
        let (cert, key) = self.authority.issue(SERVER_NAME)?;
        let tls = ServerTlsConfig::new()
            .identity(Identity::from_pem(cert, key))
            .client_ca_root(Certificate::from_pem(&self.authority.ca_pem));
        let service = NodeFeedServer::new(Service {
            shared: Arc::clone(&self.shared),
        });
        let mut server = Server::builder()
            .tcp_nodelay(true)
            .tls_config(tls)
            .context("set up TLS")?;
        let _inside = self.runtime.enter();
        let incoming = TcpListenerStream::new(tokio::net::TcpListener::from_std(listener)?);
        self.runtime
            .spawn(server.add_service(service).serve_with_incoming(incoming));
        let (cert, key) = self.authority.issue(&format!("system:node:{node}"))?;
        let mut section =
            format!("[feed]\nservers = [\"https://{ADDRESS}\"]\nserver_name = \"{SERVER_NAME}\"\n");
        for (name, text) in [
            ("ca", &self.authority.ca_pem),
            ("cert", &cert),
            ("key", &key),
        ] {
            let path = folder.join(format!("{name}.pem"));
            std::fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
            section.push_str(&format!("{name} = {:?}\n", path.display().to_string()));
        }
        Ok(section)
    }

    /// Sends a change to all nodes and returns its revision and when it was sent.
    pub(crate) fn change(&self, upserts: Vec<Object>) -> (u64, Instant) {
        self.tell(None, upserts, Vec::new())
    }

    /// Sends a change to a node, or to all of them.
    pub(crate) fn tell(
        &self,
        node: Option<&str>,
        upserts: Vec<Object>,
        removals: Vec<ObjectKey>,
    ) -> (u64, Instant) {
        self.send(node, |revision| {
            let delta = Delta {
                revision,
                upserts,
                removals,
                ..Delta::default()
            };
            vec![feed_message::Kind::Delta(delta)]
        })
    }

    /// Sends a whole new state to a node.
    pub(crate) fn renew(&self, node: &str, objects: &[Object]) -> (u64, Instant) {
        self.send(Some(node), |revision| {
            let parts = snapshot(objects, revision).into_iter();
            parts.map(feed_message::Kind::Snapshot).collect()
        })
    }

    fn send(
        &self,
        node: Option<&str>,
        messages: impl FnOnce(u64) -> Vec<feed_message::Kind>,
    ) -> (u64, Instant) {
        let mut revision = self
            .shared
            .revision
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *revision += 1;
        let news = News {
            node: node.map(str::to_owned),
            messages: messages(*revision),
        };
        let sent = Instant::now();
        // Nobody may follow at this moment: then nobody acknowledges, and that is noticed.
        let _ = self.shared.news.send(news);
        (*revision, sent)
    }

    /// Waits until these nodes have the revision in their kernels; when the last of them said so.
    pub(crate) fn applied(
        &self,
        nodes: &[&str],
        revision: u64,
        within: Duration,
    ) -> Result<Instant> {
        let mut acks = self.shared.acks.subscribe();
        let all = acks.wait_for(|acks| {
            nodes
                .iter()
                .all(|node| acks.get(*node).is_some_and(|(at, ..)| *at >= revision))
        });
        let waited = self.runtime.block_on(async {
            tokio::time::timeout(within, all)
                .await
                .map(|acks| acks.map(|acks| acks.clone()))
        });
        let acks = waited.with_context(|| {
            format!("revision {revision} is not programmed within {within:?}")
        })??;
        let mut last = None;
        for (node, (_, error, at)) in &acks {
            ensure!(error.is_empty(), "node {node} could not apply: {error}");
            last = last.max(Some(*at));
        }
        last.context("no node was named")
    }
}

struct Service {
    shared: Arc<Shared>,
}

fn snapshot(objects: &[Object], revision: u64) -> Vec<Snapshot> {
    let parts: Vec<_> = objects.chunks(PART_OBJECTS).collect();
    let last = parts.len().saturating_sub(1);
    parts
        .into_iter()
        .enumerate()
        .map(|(index, objects)| Snapshot {
            revision,
            feed_instance: "bench".into(),
            first: index == 0,
            last: index == last,
            objects: objects.to_vec(),
        })
        .collect()
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
        let mut news = self.shared.news.subscribe();
        let parts = snapshot(&self.shared.objects, 1);
        let shared = Arc::clone(&self.shared);
        tokio::spawn(async move {
            for part in parts {
                let kind = Some(feed_message::Kind::Snapshot(part));
                if sender.send(Ok(FeedMessage { kind })).await.is_err() {
                    return;
                }
            }
            loop {
                let kinds = tokio::select! {
                    news = news.recv() => match news {
                        Ok(news) if news.node.as_ref().is_none_or(|of| *of == node) => news.messages,
                        Ok(_) => continue,
                        Err(_) => return,
                    },
                    request = requests.next() => match request {
                        Some(Ok(FollowRequest { kind: Some(follow_request::Kind::Ack(ack)) })) => {
                            let now = Instant::now();
                            shared.acks.send_modify(|acks| {
                                acks.insert(node.clone(), (ack.revision, ack.error, now));
                            });
                            continue;
                        }
                        Some(Ok(FollowRequest { kind: Some(follow_request::Kind::Heartbeat(heartbeat)) })) => {
                            vec![feed_message::Kind::Heartbeat(heartbeat)]
                        }
                        Some(Ok(_)) => continue,
                        _ => return,
                    },
                };
                for kind in kinds {
                    let kind = Some(kind);
                    if sender.send(Ok(FeedMessage { kind })).await.is_err() {
                        return;
                    }
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

/// A certificate authority of this run.
struct Authority {
    ca_pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Result<Self> {
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, "weir-bench");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate()?;
        let ca_pem = params.self_signed(&key)?.pem();
        Ok(Self {
            ca_pem,
            issuer: Issuer::new(params, key),
        })
    }

    /// Certificate and key, good for both ends of a connection.
    fn issue(&self, name: &str) -> Result<(String, String)> {
        let mut params = CertificateParams::new(vec![SERVER_NAME.to_owned()])?;
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let key = KeyPair::generate()?;
        let cert = params.signed_by(&key, &self.issuer)?;
        Ok((cert.pem(), key.serialize_pem()))
    }
}
