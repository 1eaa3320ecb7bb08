//! Work inside another network namespace.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use nix::sched::{CloneFlags, setns};

use super::NetlinkError;

/// Runs `work` on a thread of its own that has joined the namespace, so that no other work ever finds itself there.
///
/// # Errors
/// [`NetlinkError`] when the descriptor is not a network namespace, or what `work` returns.
pub fn inside<T, E>(netns: &File, work: impl FnOnce() -> Result<T, E> + Send) -> Result<T, E>
where
    T: Send,
    E: From<NetlinkError> + Send,
{
    std::thread::scope(|scope| {
        let joined = std::thread::Builder::new()
            .name("netns".into())
            .spawn_scoped(scope, || {
                setns(netns.as_fd(), CloneFlags::CLONE_NEWNET)
                    .map_err(|e| NetlinkError::new("join the pod's network namespace", e.into()))?;
                work()
            })
            .map_err(|e| NetlinkError::new("start a thread for the pod's network namespace", e))?;
        joined.join().unwrap_or_else(|_| {
            let source = io::Error::other("the thread inside it panicked");
            Err(NetlinkError::new("work in the pod's network namespace", source).into())
        })
    })
}

/// True when the descriptor is the network namespace of the calling thread.
///
/// # Errors
/// [`NetlinkError`] when either cannot be examined.
pub fn is_own(netns: &File) -> Result<bool, NetlinkError> {
    let identity = |file: &File| file.metadata().map(|m| (m.dev(), m.ino()));
    let own = File::open("/proc/thread-self/ns/net").and_then(|f| identity(&f));
    let other = identity(netns);
    match (own, other) {
        (Ok(own), Ok(other)) => Ok(own == other),
        (Err(e), _) | (_, Err(e)) => Err(NetlinkError::new("examine network namespace", e)),
    }
}
