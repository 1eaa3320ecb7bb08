//! The last state on disk, without secrets: what a node knows when it boots and no control plane answers.

use std::io::{BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use control_api::desired::DesiredState;
use control_api::v1::{FileSource, Object, PodSpec, Snapshot, Volume, file_source, object, volume};
use prost::Message;
use tokio_util::sync::CancellationToken;

use super::{Origin, Updates};

pub(super) const FILE_NAME: &str = "feed.snapshot";

/// At most one write in this time: a busy cluster must not wear out the disk.
const WRITE_INTERVAL: Duration = Duration::from_secs(5);

/// Written to the file at once.
const BUFFER_BYTES: usize = 64 << 10;

/// A larger file is not ours.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// Reads the state of an earlier run. An unreadable or broken file is the same as none: the feed will bring a new one.
pub(super) fn load(path: &Path) -> Option<DesiredState> {
    let length = std::fs::metadata(path).ok()?.len();
    if length > MAX_FILE_BYTES {
        tracing::warn!(path = %path.display(), length, "ignored an oversized feed snapshot");
        return None;
    }
    let bytes = std::fs::read(path)
        .inspect_err(|error| tracing::warn!(path = %path.display(), %error, "read feed snapshot"))
        .ok()?;
    match Snapshot::decode(bytes.as_slice()) {
        Ok(snapshot) if snapshot.last => Some(DesiredState::from_snapshot([snapshot])),
        Ok(_) => None,
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "ignored a broken feed snapshot");
            None
        }
    }
}

/// Writes every state that a server sent, at most once per interval, until shutdown.
pub(super) async fn keep(mut updates: Updates, path: PathBuf, shutdown: CancellationToken) {
    loop {
        let update = tokio::select! {
            () = shutdown.cancelled() => return,
            update = updates.next() => update,
        };
        if update.origin == Origin::Server && !update.changes.is_empty() {
            let target = path.clone();
            let written = tokio::task::spawn_blocking(move || write(&target, &update.state)).await;
            if let Ok(Err(error)) = written {
                tracing::warn!(path = %path.display(), %error, "write feed snapshot");
            }
        }
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(WRITE_INTERVAL) => {}
        }
    }
}

/// One snapshot of everything but secrets and tokens, in parts: a message may be cut between its fields, and a whole
/// copy of a large state would cost more memory than the state itself. What marks it complete comes last.
pub(super) fn encode(state: &DesiredState, to: &mut impl Write) -> std::io::Result<()> {
    let kinds = std::iter::once(object::Kind::Config(state.config.clone()))
        .chain(state.nodes.values().cloned().map(object::Kind::Node))
        .chain(state.services.values().cloned().map(object::Kind::Service))
        .chain(
            state
                .endpoint_slices
                .iter()
                .map(|(name, slice)| slice.to_message(&name.namespace, &name.name))
                .map(object::Kind::EndpointSlice),
        )
        .chain(
            state
                .pods
                .values()
                .map(|pod| object::Kind::Pod(without_tokens(pod))),
        )
        .chain(
            state
                .config_maps
                .values()
                .cloned()
                .map(object::Kind::ConfigMap),
        )
        .chain(
            state
                .announcements
                .values()
                .cloned()
                .map(object::Kind::Announcement),
        )
        .chain(state.policies.values().cloned().map(object::Kind::Policy))
        .chain(
            state
                .policy_peers
                .values()
                .cloned()
                .map(object::Kind::PolicyPeer),
        );
    let mut bytes = Vec::new();
    for kind in kinds {
        let part = Snapshot {
            objects: vec![Object { kind: Some(kind) }],
            ..Snapshot::default()
        };
        bytes.clear();
        // A vector grows: there is always room.
        let _infallible = part.encode(&mut bytes);
        to.write_all(&bytes)?;
    }
    let end = Snapshot {
        revision: state.revision,
        feed_instance: String::new(),
        first: true,
        last: true,
        objects: Vec::new(),
    };
    to.write_all(&end.encode_to_vec())
}

fn without_tokens(pod: &PodSpec) -> PodSpec {
    let mut pod = pod.clone();
    for volume in &mut pod.volumes {
        let Volume {
            source: Some(volume::Source::Files(files)),
            ..
        } = volume
        else {
            continue;
        };
        for source in &mut files.sources {
            if let FileSource {
                kind: Some(file_source::Kind::Token(token)),
            } = source
            {
                token.token.clear();
            }
        }
    }
    pod
}

/// A crash leaves the old file or the new one, never a part.
pub(super) fn write(path: &Path, state: &DesiredState) -> std::io::Result<()> {
    let temporary = path.with_extension("snapshot.new");
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    let file = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&temporary)?;
    let mut buffer = BufWriter::with_capacity(BUFFER_BYTES, file);
    encode(state, &mut buffer)?;
    buffer.into_inner()?.sync_all()?;
    std::fs::rename(&temporary, path)
}
