//! The control plane in one process: store, API server, controllers, scheduler, node feed, metrics.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use control_api::v1::LogRequest;
use futures::StreamExt as _;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::apiserver::api::Api;
use crate::apiserver::http::{Server, TlsError};
use crate::apiserver::local::LocalClient;
use crate::apiserver::logs::{LogQuery, NodeLogs};
use crate::apiserver::tokens::Tokens;
use crate::client::ObjectClient;
use crate::config::{Config, nth_address};
use crate::controllers::{Informers, Settings};
use crate::pki::{Pki, PkiError, SERVER_NAME};
use crate::serve::{Feed, FeedTls, LogError, ServeError};
use crate::status::ApiError;
use crate::store::{EmbeddedStore, OpenOptions, Store, StoreError};

mod metrics;

/// Chunks of a log on their way from a node to a client.
const LOG_QUEUE: usize = 16;
/// A system object that somebody deletes is back after this time.
const BOOTSTRAP_PERIOD: Duration = Duration::from_secs(3);
const STORE_FILE: &str = "store.redb";

/// Why the control plane could not start or had to stop.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("create the data folder {path}: {source}")]
    DataDir {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(transparent)]
    Pki(#[from] PkiError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("make the system objects: {0}")]
    Bootstrap(ApiError),
    #[error("listen on {address} for {what}: {source}")]
    Listen {
        what: &'static str,
        address: SocketAddr,
        source: std::io::Error,
    },
    #[error("take the socket {index} that LISTEN_FDS announces: {source}")]
    Inherit {
        index: usize,
        source: std::io::Error,
    },
    #[error(
        "advertise = \"{0}\": pods and nodes cannot reach the API there; name an address of this machine's network"
    )]
    Advertise(SocketAddr),
    #[error("nowhere to serve the API: set api_listen, or pass a socket by LISTEN_FDS")]
    NoListener,
    #[error(transparent)]
    Feed(#[from] ServeError),
    #[error("a part of the control plane ended unexpectedly: {0}")]
    Part(String),
}

/// Runs until `shutdown`.
///
/// # Errors
/// [`RunError`] says which part failed on what.
pub async fn serve(config: Config, shutdown: CancellationToken) -> Result<(), RunError> {
    let advertised = config.advertise.ip();
    if advertised.is_loopback() || advertised.is_unspecified() {
        return Err(RunError::Advertise(config.advertise));
    }
    let listeners = api_listeners(&config).await?;
    create_data_dir(&config)?;
    let (names, ips) = server_names(&config);
    let pki = Pki::open(&config.data_dir, &names, &ips)?;
    let api = open_api(&config).await?;

    let feed_tls = FeedTls {
        ca_pem: pki.ca_pem.clone(),
        server: pki.server.clone(),
    };
    let feed = Feed::new(client(&api, "weir-feed"), &feed_tls, &config.network);
    api.set_node_logs(Arc::new(FeedLogs {
        feed: Arc::clone(&feed),
    }));
    let server = Arc::new(Server::new(Arc::clone(&api), &pki, shutdown.clone())?);

    let mut parts = JoinSet::new();
    for listener in listeners {
        let server = Arc::clone(&server);
        parts.spawn(async move {
            server.serve(listener).await;
            Ok(())
        });
    }
    let feed_status = feed.status();
    let (address, stop) = (config.feed_listen, shutdown.clone());
    parts.spawn(async move { Ok(feed.listen(&feed_tls, address, stop).await?) });
    let controllers = client(&api, "kube-controller-manager");
    let informers = Informers::new(Arc::clone(&controllers), shutdown.clone());
    let settings = Settings {
        network: config.network.clone(),
        ca_certificate_pem: pki.ca_pem.clone(),
    };
    let (shared, stop) = (informers.clone(), shutdown.clone());
    parts.spawn(async move {
        crate::controllers::run(controllers, shared, settings, stop).await;
        Ok(())
    });
    let (scheduler, stop) = (client(&api, "kube-scheduler"), shutdown.clone());
    parts.spawn(async move {
        crate::scheduler::run(scheduler, informers, stop).await;
        Ok(())
    });
    tend(&mut parts, &api, config.advertise, &shutdown);
    if let Some(address) = config.metrics_listen {
        let listener = listen("metrics", address).await?;
        let stop = shutdown.clone();
        let (api, server) = (Arc::clone(&api), Arc::clone(&server));
        let serve = metrics::serve(listener, api, server, feed_status, stop);
        parts.spawn(async move {
            serve.await;
            Ok(())
        });
    }
    tracing::info!("the control plane runs");
    supervise(parts, &shutdown).await
}

/// What the API needs done from time to time.
fn tend(
    parts: &mut JoinSet<Result<(), RunError>>,
    api: &Arc<Api>,
    advertise: SocketAddr,
    shutdown: &CancellationToken,
) {
    let (system, stop) = (Arc::clone(api), shutdown.clone());
    parts.spawn(async move {
        system
            .keep_bootstrapped(advertise, BOOTSTRAP_PERIOD, stop)
            .await;
        Ok(())
    });
    let (events, stop) = (Arc::clone(api), shutdown.clone());
    parts.spawn(async move {
        events.expire_events(stop).await;
        Ok(())
    });
}

/// The API on the store, with the system objects and the token key.
async fn open_api(config: &Config) -> Result<Arc<Api>, RunError> {
    let now_us = || jiff::Timestamp::now().as_microsecond();
    let path = config.data_dir.join(STORE_FILE);
    let store: Arc<dyn Store> = Arc::new(EmbeddedStore::open(&OpenOptions { path, now_us })?);
    let api = Arc::new(Api::new(store, config.network.clone()));
    api.bootstrap(config.advertise)
        .await
        .map_err(RunError::Bootstrap)?;
    api.repair_services().await.map_err(RunError::Bootstrap)?;

    let issuer = format!(
        "https://kubernetes.default.svc.{}",
        config.network.cluster_domain
    );
    api.set_tokens(Tokens::open(&config.data_dir, &issuer)?);
    Ok(api)
}

/// Every part runs until shutdown; one that ends before takes the others along.
async fn supervise(
    mut parts: JoinSet<Result<(), RunError>>,
    shutdown: &CancellationToken,
) -> Result<(), RunError> {
    let mut result = Ok(());
    while let Some(ended) = parts.join_next().await {
        let early = !shutdown.is_cancelled();
        shutdown.cancel();
        let failure = match ended {
            Ok(Ok(())) if early => Some(RunError::Part("it returned".into())),
            Ok(Ok(())) => None,
            Ok(Err(e)) => Some(e),
            Err(e) => Some(RunError::Part(e.to_string())),
        };
        if let (Some(failure), Ok(())) = (failure, &result) {
            result = Err(failure);
        }
    }
    result
}

fn client(api: &Arc<Api>, manager: &'static str) -> Arc<dyn ObjectClient> {
    Arc::new(LocalClient::new(Arc::clone(api), manager))
}

fn create_data_dir(config: &Config) -> Result<(), RunError> {
    use std::os::unix::fs::DirBuilderExt as _;
    let path = &config.data_dir;
    let mut builder = std::fs::DirBuilder::new();
    let made = builder.recursive(true).mode(0o700).create(path);
    made.map_err(|source| RunError::DataDir {
        path: path.clone(),
        source,
    })
}

/// Sockets passed by LISTEN_FDS and those of the configuration.
async fn api_listeners(config: &Config) -> Result<Vec<TcpListener>, RunError> {
    let mut listeners = Vec::new();
    let mut inherited = listenfd::ListenFd::from_env();
    for index in 0..inherited.len() {
        let fail = |source| RunError::Inherit { index, source };
        if let Some(listener) = inherited.take_tcp_listener(index).map_err(fail)? {
            listener.set_nonblocking(true).map_err(fail)?;
            listeners.push(TcpListener::from_std(listener).map_err(fail)?);
        }
    }
    for address in &config.api_listen {
        listeners.push(listen("the API", *address).await?);
    }
    for listener in &listeners {
        if let Ok(address) = listener.local_addr() {
            tracing::info!(%address, "the API listens");
        }
    }
    if listeners.is_empty() {
        Err(RunError::NoListener)
    } else {
        Ok(listeners)
    }
}

async fn listen(what: &'static str, address: SocketAddr) -> Result<TcpListener, RunError> {
    TcpListener::bind(address)
        .await
        .map_err(|source| RunError::Listen {
            what,
            address,
            source,
        })
}

/// Names and addresses of the serving certificate.
fn server_names(config: &Config) -> (Vec<String>, Vec<IpAddr>) {
    let domain = &config.network.cluster_domain;
    let mut names: Vec<String> = [SERVER_NAME, "localhost", "kubernetes", "kubernetes.default"]
        .map(str::to_owned)
        .into();
    names.push("kubernetes.default.svc".into());
    names.push(format!("kubernetes.default.svc.{domain}"));
    let mut ips: Vec<IpAddr> = vec![config.advertise.ip()];
    ips.extend([
        IpAddr::from([127, 0, 0, 1]),
        IpAddr::from(std::net::Ipv6Addr::LOCALHOST),
    ]);
    ips.extend(
        config
            .api_listen
            .iter()
            .chain([&config.feed_listen])
            .map(SocketAddr::ip),
    );
    ips.extend(
        config
            .network
            .service_cidrs
            .iter()
            .filter_map(|c| nth_address(*c, 1)),
    );
    for extra in &config.extra_names {
        match extra.parse() {
            Ok(ip) => ips.push(ip),
            Err(_) => names.push(extra.clone()),
        }
    }
    ips.retain(|ip| !ip.is_unspecified());
    ips.sort();
    ips.dedup();
    (names, ips)
}

/// `pods/log` over the agents' API.
#[derive(Debug)]
struct FeedLogs {
    feed: Arc<Feed>,
}

#[async_trait]
impl NodeLogs for FeedLogs {
    async fn logs(
        &self,
        query: LogQuery,
    ) -> Result<mpsc::Receiver<Result<Bytes, ApiError>>, ApiError> {
        let request = LogRequest {
            namespace: query.namespace,
            pod: query.pod,
            pod_uid: query.pod_uid,
            container: query.container,
            follow: query.follow,
            previous: query.previous,
            timestamps: query.timestamps,
            tail_lines: query.tail_lines.unwrap_or(-1),
            limit_bytes: query.limit_bytes.unwrap_or(-1),
            since_us: query.since_us.unwrap_or(0),
        };
        let stream = self
            .feed
            .logs()
            .logs(&query.node, request)
            .await
            .map_err(|e| log_error(&e))?;
        let (sender, receiver) = mpsc::channel(LOG_QUEUE);
        tokio::spawn(async move {
            tokio::pin!(stream);
            loop {
                let chunk = tokio::select! {
                    chunk = stream.next() => chunk,
                    () = sender.closed() => return,
                };
                let Some(chunk) = chunk else { return };
                if sender.send(chunk.map_err(|e| log_error(&e))).await.is_err() {
                    return;
                }
            }
        });
        Ok(receiver)
    }
}

fn log_error(error: &LogError) -> ApiError {
    match error {
        LogError::Refused { code, message, .. } => match code {
            tonic::Code::NotFound => ApiError::new(404, "NotFound", message.clone()),
            tonic::Code::InvalidArgument | tonic::Code::FailedPrecondition => {
                ApiError::bad_request(message.clone())
            }
            _ => ApiError::new(500, "InternalError", error.to_string()),
        },
        _ => ApiError::new(503, "ServiceUnavailable", error.to_string()),
    }
}
