//! The node API: what the API server asks of this node's pods. mTLS with the node's certificate.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use control_api::v1::node_api_server::{NodeApi, NodeApiServer};
use control_api::v1::{LogChunk, LogRequest};
use futures::{Stream, StreamExt};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Certificate, CertificateDer, Identity, Server, ServerTlsConfig};
use tonic::{Request, Response, Status};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::logs::line::Wanted;
use super::logs::read;
use super::shared::Shared;
use super::view::{ContainerState, ContainerView};
use crate::config::Config;

/// Who may ask: the control plane, by common name, or an administrator, by organization.
const CONTROL_NAME: &str = "weir-control";
const ADMIN_GROUP: &str = "system:masters";

/// Pieces of a log that wait for a slow reader.
const PENDING_CHUNKS: usize = 8;
/// The address may not be on the node yet.
const BIND_RETRY: Duration = Duration::from_secs(1);

/// The node API could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum NodeApiError {
    #[error("read {path} for the node API: {source}")]
    Credentials {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("set up TLS of the node API: {0}")]
    Tls(#[from] tonic::transport::Error),
    #[error("node_ips is empty: the node API has no address to listen on")]
    NoAddress,
}

/// Serves until `shutdown`.
///
/// # Errors
/// [`NodeApiError`] when credentials or address are missing; an address that is not there yet is waited for.
pub(crate) fn start(
    config: &Config,
    port: u16,
    shared: Arc<Shared>,
    shutdown: CancellationToken,
) -> Result<(), NodeApiError> {
    let ip = *config.node_ips.first().ok_or(NodeApiError::NoAddress)?;
    let read = |path: &PathBuf| {
        std::fs::read(path).map_err(|source| NodeApiError::Credentials {
            path: path.clone(),
            source,
        })
    };
    let feed = &config.feed;
    let tls = ServerTlsConfig::new()
        .identity(Identity::from_pem(read(&feed.cert)?, read(&feed.key)?))
        .client_ca_root(Certificate::from_pem(read(&feed.ca)?));
    let mut server = Server::builder().tls_config(tls)?;
    let router = server.add_service(NodeApiServer::new(Service { shared }));
    let address = SocketAddr::new(ip, port);
    tokio::spawn(async move {
        let listener = tokio::select! {
            listener = bind(address) => listener,
            () = shutdown.cancelled() => return,
        };
        let incoming = TcpListenerStream::new(listener);
        let served = router
            .serve_with_incoming_shutdown(incoming, shutdown.cancelled_owned())
            .await;
        if let Err(error) = served {
            tracing::error!(%address, %error, "node API ended");
        }
    });
    Ok(())
}

async fn bind(address: SocketAddr) -> TcpListener {
    let mut told = false;
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return listener,
            Err(error) if !told => {
                tracing::warn!(%address, %error, "node API cannot listen, will keep trying");
                told = true;
            }
            Err(_) => {}
        }
        tokio::time::sleep(BIND_RETRY).await;
    }
}

struct Service {
    shared: Arc<Shared>,
}

type Chunks = Pin<Box<dyn Stream<Item = Result<LogChunk, Status>> + Send>>;

#[tonic::async_trait]
impl NodeApi for Service {
    type LogsStream = Chunks;

    async fn logs(&self, request: Request<LogRequest>) -> Result<Response<Chunks>, Status> {
        authorize(request.peer_certs().as_deref())?;
        let chunks = logs(Arc::clone(&self.shared), request.into_inner()).await?;
        Ok(Response::new(chunks))
    }
}

/// The certificate's issuer is checked by TLS; here it matters who it names.
fn authorize(certificates: Option<&Vec<CertificateDer<'static>>>) -> Result<(), Status> {
    let denied = || {
        Status::permission_denied(format!(
            "the node API answers certificates of {CONTROL_NAME} or {ADMIN_GROUP} only"
        ))
    };
    let first = certificates.and_then(|c| c.first()).ok_or_else(denied)?;
    let (_, certificate) = X509Certificate::from_der(first).map_err(|_| denied())?;
    let subject = certificate.subject();
    let control = subject
        .iter_common_name()
        .any(|n| n.as_str() == Ok(CONTROL_NAME));
    let admin = subject
        .iter_organization()
        .any(|o| o.as_str() == Ok(ADMIN_GROUP));
    if control || admin {
        Ok(())
    } else {
        Err(denied())
    }
}

async fn logs(shared: Arc<Shared>, asked: LogRequest) -> Result<Chunks, Status> {
    let container = find(&shared, &asked).await?;
    let positive = |value: i64| u64::try_from(value).ok();
    let request = read::Request {
        path: PathBuf::from(&container.log_path),
        wanted: Wanted {
            timestamps: asked.timestamps,
            since_us: asked.since_us,
            left: positive(asked.limit_bytes),
        },
        tail: positive(asked.tail_lines),
        follow: asked.follow && !asked.previous,
    };
    let (to, from) = mpsc::channel(PENDING_CHUNKS);
    let id = container.id.clone();
    let path = container.log_path;
    let sending = tokio::spawn(async move {
        let is_running = || is_running(&shared, &id);
        read::send(request, is_running, &to).await
    });
    // The first failure (no such file) and any later one end the stream with a status.
    let end = futures::stream::once(async move {
        match sending.await {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(Err(Status::not_found(format!("read log {path}: {error}")))),
            Err(_) => Some(Err(Status::internal("the log reader stopped"))),
        }
    })
    .filter_map(std::future::ready);
    let chunks = ReceiverStream::new(from).map(|data| Ok(LogChunk { data }));
    Ok(Box::pin(chunks.chain(end)))
}

async fn is_running(shared: &Shared, id: &str) -> bool {
    match shared.runtime.container_status(id).await {
        Ok(status) => status.state() == super::cri::v1::ContainerState::ContainerRunning,
        Err(error) if error.is_not_found() => false,
        // The runtime is away: its containers go on.
        Err(_) => true,
    }
}

/// The instance whose log is asked for.
async fn find(shared: &Shared, asked: &LogRequest) -> Result<ContainerView, Status> {
    let (pod, name) = (&asked.pod, &asked.container);
    let view = shared
        .lister
        .pod(&asked.pod_uid)
        .await
        .map_err(|error| Status::unavailable(format!("logs of pod {pod}: {error}")))?;
    let found = if asked.previous {
        view.previous(name)
    } else {
        view.latest(name)
    };
    match found {
        Some(container) if container.state != ContainerState::Created => Ok(container.clone()),
        _ if asked.previous => Err(Status::failed_precondition(format!(
            "previous terminated container {name:?} in pod {pod:?} not found"
        ))),
        _ => Err(Status::failed_precondition(format!(
            "container {name:?} in pod {pod:?} is waiting to start"
        ))),
    }
}
