//! The way to a node's own API: container logs for the API server's pods/log.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use control_api::v1::LogRequest;
use control_api::v1::node_api_client::NodeApiClient;
use futures::{Stream, StreamExt};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use super::FeedTls;
use crate::client::{ObjectClient, resources};

/// Where a node's agent serves its API; kept on the Node so that a restarted control plane knows it.
pub(super) const NODE_API_ANNOTATION: &str = "weir.io/node-api-address";

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Logs could not be had.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    #[error(
        "node {node} has not reported where its agent serves logs; is weir-agent running there?"
    )]
    UnknownAddress { node: String },
    #[error("connect to the agent of node {node} at {address}: {source}")]
    Connect {
        node: String,
        address: String,
        source: tonic::transport::Error,
    },
    #[error("read logs from node {node}: {message}")]
    Refused {
        node: String,
        code: tonic::Code,
        message: String,
    },
}

/// Client of the agents' API. Cheap to clone.
#[derive(Clone)]
pub struct NodeLogs {
    client: Arc<dyn ObjectClient>,
    tls: ClientTlsConfig,
    addresses: Arc<Mutex<BTreeMap<String, String>>>,
}

impl std::fmt::Debug for NodeLogs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeLogs")
            .field("addresses", &self.addresses)
            .finish_non_exhaustive()
    }
}

impl NodeLogs {
    pub(super) fn new(client: Arc<dyn ObjectClient>, tls: &FeedTls) -> Self {
        let tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(&tls.ca_pem))
            .identity(Identity::from_pem(
                &tls.server.cert_pem,
                &tls.server.key_pem,
            ));
        Self {
            client,
            tls,
            addresses: Arc::default(),
        }
    }

    /// Notes the address that a node reported.
    pub(super) fn learn(&self, node: &str, address: &str) {
        if address.is_empty() {
            return;
        }
        let mut addresses = self
            .addresses
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        addresses.insert(node.to_owned(), address.to_owned());
    }

    async fn address(&self, node: &str) -> Result<String, LogError> {
        let known = {
            let addresses = self
                .addresses
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            addresses.get(node).cloned()
        };
        if let Some(address) = known {
            return Ok(address);
        }
        let unknown = || LogError::UnknownAddress {
            node: node.to_owned(),
        };
        let object = self
            .client
            .get(resources::NODES, "", node)
            .await
            .map_err(|_| unknown())?;
        let annotation = &object["metadata"]["annotations"][NODE_API_ANNOTATION];
        annotation.as_str().map(str::to_owned).ok_or_else(unknown)
    }

    async fn connect(&self, node: &str) -> Result<Channel, LogError> {
        let address = self.address(node).await?;
        let fail = |source| LogError::Connect {
            node: node.to_owned(),
            address: address.clone(),
            source,
        };
        Endpoint::from_shared(format!("https://{address}"))
            .map_err(fail)?
            .tls_config(self.tls.clone().domain_name(node.to_owned()))
            .map_err(fail)?
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true)
            .connect()
            .await
            .map_err(fail)
    }

    /// Streams the log of a container on `node`.
    ///
    /// # Errors
    /// [`LogError`] before the first byte; later failures end the stream with one.
    pub async fn logs(
        &self,
        node: &str,
        request: LogRequest,
    ) -> Result<impl Stream<Item = Result<Bytes, LogError>> + Send + use<>, LogError> {
        let channel = self.connect(node).await?;
        let node = node.to_owned();
        let refused = move |status: tonic::Status| LogError::Refused {
            node: node.clone(),
            code: status.code(),
            message: status.message().to_owned(),
        };
        let reply = NodeApiClient::new(channel)
            .logs(request)
            .await
            .map_err(&refused)?;
        let chunks = reply.into_inner();
        Ok(chunks.map(move |chunk| chunk.map(|c| Bytes::from(c.data)).map_err(&refused)))
    }
}
