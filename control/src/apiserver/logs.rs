//! The seam through which `pods/log` reaches the node that runs the pod.

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::mpsc;

use crate::status::ApiError;

/// Which lines of which container. `None` means no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogQuery {
    pub node: String,
    pub namespace: String,
    pub pod: String,
    pub pod_uid: String,
    pub container: String,
    pub follow: bool,
    pub previous: bool,
    pub timestamps: bool,
    pub tail_lines: Option<i64>,
    pub limit_bytes: Option<i64>,
    /// Microseconds since the Unix epoch.
    pub since_us: Option<i64>,
}

/// Reads logs from nodes.
#[async_trait]
pub trait NodeLogs: Send + Sync + std::fmt::Debug + 'static {
    /// Chunks in order; the channel closes at the end. Dropping the receiver stops a followed log.
    ///
    /// # Errors
    /// What the node answered, 503 when it cannot be reached.
    async fn logs(
        &self,
        query: LogQuery,
    ) -> Result<mpsc::Receiver<Result<Bytes, ApiError>>, ApiError>;
}
