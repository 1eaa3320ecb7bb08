//! Node feed client: follows the control plane, holds the desired state of this node, and carries reports back.
//!
//! The state outlives the connection: while no server answers, subscribers keep the last state. A copy without
//! secrets lies on disk, so that a node that boots without control plane knows its services. Deciding what to do with
//! the state is not done here.

mod client;
mod disk;
mod mailbox;
mod report;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use control_api::desired::DesiredState;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

pub use mailbox::{Origin, Update, Updates};
pub use report::ReportError;

use crate::config::Config;
use mailbox::Publisher;

/// Name of the file below the state directory that holds the last state.
pub const STATE_NAME: &str = disk::FILE_NAME;

/// Why the feed client could not start. Losing a server later is not an error: the client retries.
#[derive(Debug, thiserror::Error)]
pub enum FeedError {
    #[error(
        "configuration lists no feed server: set feed.servers to at least one https://HOST:PORT"
    )]
    NoServer,
    #[error("feed server {server:?} is not a URL like https://HOST:PORT: {source}")]
    BadServer {
        server: String,
        source: tonic::transport::Error,
    },
    #[error("read {what} {path}: {source}")]
    Credentials {
        what: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
}

/// The connection as `weirctl status` and the metrics show it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FeedStatus {
    /// The server that is being followed; empty while none is.
    pub server: String,
    /// Revision of the state this node holds.
    pub held_revision: u64,
    /// Revision last acknowledged as applied.
    pub applied_revision: u64,
    /// What went wrong at the last apply; empty when nothing did.
    pub apply_error: String,
    /// True once a complete snapshot came from a server since the agent started.
    pub synced: bool,
    pub snapshots: u64,
    pub deltas: u64,
    pub disconnects: u64,
    /// Why the last connection ended or could not be made.
    pub last_error: String,
}

/// What the apply loop says it has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Applied {
    revision: u64,
    error: String,
}

/// Shared by the connection loop and every handle.
#[derive(Debug)]
struct Shared {
    node_name: String,
    publisher: Publisher,
    status: Mutex<FeedStatus>,
    applied: watch::Sender<Applied>,
    channel: watch::Sender<Option<Channel>>,
    /// Ends the connection that is open.
    moved: Notify,
}

/// The feed of this node. Cheap to clone.
#[derive(Clone, Debug)]
pub struct FeedHandle {
    shared: Arc<Shared>,
}

/// Starts to follow the control plane. The state left on disk, when there is one, is published at once with
/// [`Origin::Disk`].
///
/// # Errors
/// [`FeedError`] when the configuration names no usable server or a credential file cannot be read.
pub fn start(config: &Config, shutdown: CancellationToken) -> Result<FeedHandle, FeedError> {
    let servers = client::parse_servers(&config.feed)?;
    client::Credentials::read(&config.feed)?;
    let shared = Arc::new(Shared {
        node_name: config.node_name.clone(),
        publisher: Publisher::default(),
        status: Mutex::default(),
        applied: watch::channel(Applied::default()).0,
        channel: watch::channel(None).0,
        moved: Notify::new(),
    });
    let snapshot_path = config.state_dir.join(disk::FILE_NAME);
    if let Some(state) = disk::load(&snapshot_path) {
        shared.with_status(|s| s.held_revision = state.revision);
        shared.publisher.replace(state, Origin::Disk);
    }
    tokio::spawn(disk::keep(
        shared.publisher.subscribe(),
        snapshot_path,
        shutdown.clone(),
    ));
    let follower = client::Follower {
        shared: Arc::clone(&shared),
        servers,
        feed: config.feed.clone(),
        runs_pods: config.pods.is_some(),
    };
    tokio::spawn(follower.run(shutdown));
    Ok(FeedHandle { shared })
}

impl FeedHandle {
    /// A new subscription. Its first update is the whole state, as soon as there is one; later ones carry what changed
    /// since the subscriber last asked, however many deltas that was.
    #[must_use]
    pub fn updates(&self) -> Updates {
        self.shared.publisher.subscribe()
    }

    /// The state held now; empty before the first one came.
    #[must_use]
    pub fn state(&self) -> Arc<DesiredState> {
        self.shared.publisher.state()
    }

    /// Tells the control plane that everything up to `revision` is programmed in the kernel, or what failed.
    pub fn ack(&self, revision: u64, error: Option<String>) {
        let error = error.unwrap_or_default();
        self.shared.with_status(|s| {
            s.applied_revision = revision;
            s.apply_error.clone_from(&error);
        });
        self.shared
            .applied
            .send_replace(Applied { revision, error });
    }

    /// Makes a new connection: the one that is open began at an address that this node has no more, which nobody would
    /// notice for a long time.
    pub fn reconnect(&self) {
        self.shared.moved.notify_waiters();
    }

    /// Writes the state held now to disk, for the agent that comes next. The last changes may not be there yet.
    pub fn save(&self, state_dir: &std::path::Path) {
        if !self.status().synced {
            return;
        }
        let path = state_dir.join(disk::FILE_NAME);
        if let Err(error) = disk::write(&path, &self.state()) {
            tracing::warn!(path = %path.display(), %error, "write feed snapshot");
        }
    }

    #[must_use]
    pub fn status(&self) -> FeedStatus {
        self.shared.with_status(|s| s.clone())
    }
}

impl Shared {
    fn with_status<T>(&self, f: impl FnOnce(&mut FeedStatus) -> T) -> T {
        // A poisoned lock holds plain values that are valid whatever happened: go on with them.
        f(&mut self
            .status
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner))
    }
}
