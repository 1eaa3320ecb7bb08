//! DELs that no agent could take: one file each in the agent's state directory, replayed when it starts.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde_json::json;

/// Directory below the state directory; the agent reads the same name.
const DIRECTORY: &str = "cni-deletes";

/// A queued DEL on disk.
#[derive(Debug)]
pub(crate) struct Queued {
    path: PathBuf,
}

impl Queued {
    /// Writes the entry and makes it durable: after this the runtime may forget the container.
    pub(crate) fn write(
        state_dir: &Path,
        container_id: &str,
        ifname: &str,
    ) -> std::io::Result<Self> {
        let directory = state_dir.join(DIRECTORY);
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&directory)?;
        let path = directory.join(format!("{container_id}@{ifname}.json"));
        let temporary = directory.join(format!(".{container_id}@{ifname}.{}", std::process::id()));
        let body = json!({ "containerId": container_id, "ifName": ifname }).to_string();
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&temporary)?;
        file.write_all(body.as_bytes())?;
        file.sync_all()?;
        fs::rename(&temporary, &path)?;
        File::open(&directory)?.sync_all()?;
        Ok(Self { path })
    }

    /// Takes the entry back, because the agent has done the work after all.
    pub(crate) fn withdraw(self) {
        // What stays is replayed once more, which does no harm.
        let _ = fs::remove_file(self.path);
    }
}
