//! The node feed server: one gRPC stream per node, reports back, and the way to a node's own API.
//!
//! Stateless but for memory: everything is rebuilt from the API, so several can run. What a node needs is decided by
//! `control-feed`; what its reports mean in Kubernetes objects is decided here.

mod events;
mod grpc;
mod hub;
mod liveness;
mod logs;
mod node;
mod pods;
mod source;
mod status;
mod stream;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use control_api::v1::ClusterConfig;
use control_feed::Kind;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Certificate, Identity, Server, ServerTlsConfig};

pub use logs::{LogError, NodeLogs};
pub use status::{FeedStatus, NodeStatus};

use crate::client::ObjectClient;
use crate::config::Network;
use crate::pki::CertKey;
use hub::Hub;

/// How long a new stream waits for the first complete list of every kind.
const SYNC_TIMEOUT: Duration = Duration::from_secs(10);
/// How often nodes are checked for signs of life.
const LIVENESS_PERIOD: Duration = Duration::from_millis(250);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// A connection without a finished TLS handshake is nobody's and ends.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Why the feed server could not run.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("listen for nodes on {address}: {source}")]
    Listen {
        address: SocketAddr,
        source: std::io::Error,
    },
    #[error("set up TLS of the node feed: {source}")]
    Tls { source: tonic::transport::Error },
    #[error("serve the node feed on {address}: {source}")]
    Serve {
        address: SocketAddr,
        source: tonic::transport::Error,
    },
}

/// Credentials, PEM: nodes are admitted with certificates of this CA. The same pair is the client certificate towards
/// the agents' own API.
#[derive(Clone, Debug)]
pub struct FeedTls {
    pub ca_pem: String,
    pub server: CertKey,
}

/// The feed before it listens: hand out [`Feed::status`] and [`Feed::logs`], then [`Feed::serve`].
pub struct Feed {
    hub: Arc<Hub>,
    client: Arc<dyn ObjectClient>,
    logs: NodeLogs,
}

impl std::fmt::Debug for Feed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Feed")
            .field("hub", &self.hub)
            .finish_non_exhaustive()
    }
}

/// Runs the feed server until shutdown.
///
/// # Errors
/// [`ServeError`] when the address cannot be had or the credentials are not usable.
pub async fn run(
    client: Arc<dyn ObjectClient>,
    tls: FeedTls,
    network: &Network,
    listen: SocketAddr,
    shutdown: CancellationToken,
) -> Result<(), ServeError> {
    Feed::new(client, &tls, network)
        .listen(&tls, listen, shutdown)
        .await
}

impl Feed {
    #[must_use]
    pub fn new(client: Arc<dyn ObjectClient>, tls: &FeedTls, network: &Network) -> Arc<Self> {
        let hub = Arc::new(Hub::new(
            cluster_config(network),
            uuid::Uuid::new_v4().to_string(),
        ));
        let logs = NodeLogs::new(Arc::clone(&client), tls);
        Arc::new(Self { hub, client, logs })
    }

    /// What the nodes have applied.
    #[must_use]
    pub fn status(&self) -> FeedStatus {
        FeedStatus {
            hub: Arc::clone(&self.hub),
        }
    }

    /// The way to the nodes' own API.
    #[must_use]
    pub fn logs(&self) -> NodeLogs {
        self.logs.clone()
    }

    /// Listens and serves until shutdown.
    ///
    /// # Errors
    /// As [`run`].
    pub async fn listen(
        self: Arc<Self>,
        tls: &FeedTls,
        address: SocketAddr,
        shutdown: CancellationToken,
    ) -> Result<(), ServeError> {
        let listener = TcpListener::bind(address)
            .await
            .map_err(|source| ServeError::Listen { address, source })?;
        self.serve(tls, listener, shutdown).await
    }

    /// Serves on a listener until shutdown.
    ///
    /// # Errors
    /// As [`run`].
    pub async fn serve(
        self: Arc<Self>,
        tls: &FeedTls,
        listener: TcpListener,
        shutdown: CancellationToken,
    ) -> Result<(), ServeError> {
        let address = listener
            .local_addr()
            .unwrap_or(SocketAddr::from(([0, 0, 0, 0], 0)));
        let mut sources = JoinSet::new();
        for kind in Kind::ALL {
            sources.spawn(source::follow(
                Arc::clone(&self.client),
                Arc::clone(&self.hub),
                kind,
            ));
        }
        sources.spawn(watch_nodes(Arc::clone(&self.hub)));
        let tls = ServerTlsConfig::new()
            .identity(Identity::from_pem(
                &tls.server.cert_pem,
                &tls.server.key_pem,
            ))
            .client_ca_root(Certificate::from_pem(&tls.ca_pem))
            .timeout(HANDSHAKE);
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        let server = Server::builder()
            .tls_config(tls)
            .map_err(|source| ServeError::Tls { source })?
            .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
            .add_service(grpc::NodeFeedService {
                feed: Arc::clone(&self),
            })
            .serve_with_incoming(incoming);
        tracing::info!(%address, "the node feed listens");
        // Streams never end by themselves, and a graceful stop would wait for them: they are cut, and nodes resume with
        // the next server.
        let result = tokio::select! {
            () = shutdown.cancelled() => Ok(()),
            served = server => served.map_err(|source| ServeError::Serve { address, source }),
        };
        self.hub.stop();
        result
    }

    /// Waits for the first complete state.
    async fn synced(&self) -> Result<(), tonic::Status> {
        let mut ticks = self.hub.ticks();
        let sync = async {
            while !self.hub.is_synced() {
                if ticks.changed().await.is_err() {
                    return;
                }
            }
        };
        tokio::time::timeout(SYNC_TIMEOUT, sync).await.map_err(|_| {
            tonic::Status::unavailable("the feed has not read the cluster yet; try again")
        })
    }
}

/// Moves the addresses of nodes that fall silent, for ever.
async fn watch_nodes(hub: Arc<Hub>) {
    let mut last = tokio::time::Instant::now();
    loop {
        tokio::time::sleep(LIVENESS_PERIOD).await;
        let now = tokio::time::Instant::now();
        // When this process stood still, the signs of life that came meanwhile have not been read yet.
        if now - last < LIVENESS_PERIOD * 3 {
            hub.check_nodes(now, now_us());
        }
        last = now;
    }
}

fn cluster_config(network: &Network) -> ClusterConfig {
    ClusterConfig {
        policies: true,
        cluster_domain: network.cluster_domain.clone(),
        dns_ips: network
            .cluster_dns()
            .iter()
            .map(ToString::to_string)
            .collect(),
        service_cidrs: network
            .service_cidrs
            .iter()
            .map(ToString::to_string)
            .collect(),
        pod_cidrs: network.pod_cidrs.iter().map(ToString::to_string).collect(),
        node_port_first: network.node_port_first.into(),
        node_port_last: network.node_port_last.into(),
        external_ips: network.allow_external_ips,
        // Namespaces and DNS are the index's.
        ..ClusterConfig::default()
    }
}

fn now_us() -> i64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

/// RFC 3339 in whole seconds, as metav1.Time is written.
fn time_text(at_us: i64) -> String {
    let at = jiff::Timestamp::from_second(at_us.div_euclid(1_000_000)).unwrap_or_default();
    at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// RFC 3339 in microseconds, as metav1.MicroTime is written.
fn micro_time_text(at_us: i64) -> String {
    let at = jiff::Timestamp::from_microsecond(at_us).unwrap_or_default();
    at.strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string()
}

fn api_status(what: &str, error: &crate::status::ApiError) -> tonic::Status {
    let message = format!("{what}: {error}");
    match error.code {
        404 => tonic::Status::not_found(message),
        409 => tonic::Status::aborted(message),
        400 | 422 => tonic::Status::invalid_argument(message),
        _ => tonic::Status::internal(message),
    }
}
