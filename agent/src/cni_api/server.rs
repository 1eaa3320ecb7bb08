//! The unix socket: one request per connection, a thread each.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

use super::service::Attachments;
use super::stats::Stats;
use super::wire::{self, Command};

/// Requests served at once; more wait in the socket's backlog.
const MAX_CONNECTIONS: usize = 32;
/// How long a client may take to send its request or to take its reply.
const CLIENT_PATIENCE: Duration = Duration::from_secs(5);
/// How long a stop waits for requests at work.
const STOP_PATIENCE: Duration = Duration::from_secs(10);

/// The CNI socket could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("{action} CNI socket {path}: {source}")]
pub struct ServerError {
    pub action: &'static str,
    pub path: PathBuf,
    pub source: io::Error,
}

#[derive(Debug, Default)]
struct Shared {
    stopping: AtomicBool,
    active: Mutex<usize>,
    changed: Condvar,
    stats: Stats,
}

impl Shared {
    /// Waits for a free place, takes it, and gives it back when dropped.
    fn enter(self: &Arc<Self>) -> Place {
        let active = self.active.lock().unwrap_or_else(PoisonError::into_inner);
        let mut active = self
            .changed
            .wait_while(active, |n| *n >= MAX_CONNECTIONS)
            .unwrap_or_else(PoisonError::into_inner);
        *active += 1;
        Place {
            shared: Arc::clone(self),
        }
    }
}

struct Place {
    shared: Arc<Shared>,
}

impl Drop for Place {
    fn drop(&mut self) {
        *self
            .shared
            .active
            .lock()
            .unwrap_or_else(PoisonError::into_inner) -= 1;
        self.shared.changed.notify_all();
    }
}

/// The running server. It serves until [`Server::stop`] or the end of the process.
#[derive(Debug)]
pub struct Server {
    path: PathBuf,
    shared: Arc<Shared>,
}

impl Server {
    /// Listens on the socket, which root alone may open.
    ///
    /// # Errors
    /// [`ServerError`] names the path.
    pub fn start(path: &Path, attachments: Arc<Attachments>) -> Result<Self, ServerError> {
        let failed = |action| {
            move |source| ServerError {
                action,
                path: path.into(),
                source,
            }
        };
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(failed("create the folder of"))?;
        }
        // Under its name the socket is only ever seen with its final mode.
        let fresh = path.with_extension("new");
        let _ = fs::remove_file(&fresh);
        let listener = UnixListener::bind(&fresh).map_err(failed("bind"))?;
        fs::set_permissions(&fresh, fs::Permissions::from_mode(0o600))
            .map_err(failed("set the mode of"))?;
        fs::rename(&fresh, path).map_err(failed("publish"))?;
        let shared = Arc::new(Shared::default());
        let server = Self {
            path: path.into(),
            shared: Arc::clone(&shared),
        };
        std::thread::Builder::new()
            .name("cni-accept".into())
            .spawn(move || accept(&listener, &shared, &attachments))
            .map_err(failed("start the thread of"))?;
        Ok(server)
    }

    /// Counters of the requests served.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.shared.stats.clone()
    }

    /// Takes no more requests and waits, within limits, for those at work.
    pub fn stop(&self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        // Wakes the accepting thread; nobody needs to be there.
        let _ = UnixStream::connect(&self.path);
        let _ = fs::remove_file(&self.path);
        let active = self
            .shared
            .active
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let _ = self
            .shared
            .changed
            .wait_timeout_while(active, STOP_PATIENCE, |n| *n > 0);
    }
}

fn accept(listener: &UnixListener, shared: &Arc<Shared>, attachments: &Arc<Attachments>) {
    loop {
        let place = shared.enter();
        let stream = listener.accept();
        if shared.stopping.load(Ordering::SeqCst) {
            return;
        }
        let stream = match stream {
            Ok((stream, _)) => stream,
            Err(e) => {
                tracing::warn!(error = %e, "accept on the CNI socket failed");
                // Out of descriptors, most likely: some come back as requests end.
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
        };
        let attachments = Arc::clone(attachments);
        let stats = shared.stats.clone();
        let spawned = std::thread::Builder::new()
            .name("cni-request".into())
            .spawn(move || {
                serve(stream, &attachments, &stats);
                drop(place);
            });
        if let Err(e) = spawned {
            tracing::warn!(error = %e, "no thread for a CNI request; the client is turned away");
        }
    }
}

fn serve(mut stream: UnixStream, attachments: &Attachments, stats: &Stats) {
    // The socket's mode keeps others out; this keeps out descriptors that were handed on.
    if getsockopt(&stream, PeerCredentials).map_or(true, |c| c.uid() != 0) {
        return;
    }
    let patience = Some(CLIENT_PATIENCE);
    if stream
        .set_read_timeout(patience)
        .and_then(|()| stream.set_write_timeout(patience))
        .is_err()
    {
        return;
    }
    let (request, netns) = match wire::read_request(&mut stream) {
        Ok(read) => read,
        Err(e) => {
            let _ = wire::write_reply(&mut stream, &Err(e));
            return;
        }
    };
    let began = Instant::now();
    let outcome = attachments.handle(&request, netns.as_ref());
    let code = outcome.as_ref().map_or_else(|e| e.code.number(), |_| 0);
    stats.record(request.command, code, began.elapsed());
    if let Err(e) = &outcome {
        tracing::warn!(command = ?request.command, container = %request.container_id,
            code = e.code.number(), error = %e, details = %e.details, "CNI request failed");
    }
    let told = wire::write_reply(&mut stream, &outcome);
    if told.is_err() && request.command == Command::Add && outcome.is_ok() {
        // The runtime never heard of it and may never call DEL.
        tracing::warn!(container = %request.container_id, "the caller of a CNI ADD is gone; undone");
        if let Err(e) = request.key().and_then(|key| attachments.delete(&key)) {
            tracing::error!(container = %request.container_id, error = %e, "undo of the ADD failed");
        }
    }
}
