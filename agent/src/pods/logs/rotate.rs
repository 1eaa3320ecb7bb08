//! Keeps container logs small: a file that has grown too large is renamed, and the runtime opens a new one.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::super::cri::Runtime;
use super::super::list::Lister;
use super::super::shared::now_us;

/// A log file is renamed beyond this size.
pub(crate) const MAX_LOG_BYTES: u64 = 10 << 20;
/// Files kept per container instance, the current one included.
pub(crate) const MAX_LOG_FILES: usize = 5;
/// How often sizes are looked at.
const PERIOD: Duration = Duration::from_secs(10);

/// Rotates the logs of running containers for ever.
pub(crate) async fn run(runtime: &dyn Runtime, lister: &Lister) {
    loop {
        tokio::time::sleep(PERIOD).await;
        for (id, path) in lister.running_logs() {
            let path = PathBuf::from(path);
            if let Err(error) = rotate(runtime, &id, &path, MAX_LOG_BYTES).await {
                tracing::warn!(container = %id, log = %path.display(), %error, "log not rotated");
            }
        }
    }
}

/// Why a log could not be rotated; it goes on growing until the next try.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RotateError {
    #[error("{action} {path}: {source}")]
    Io {
        action: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(transparent)]
    Reopen(#[from] super::super::cri::CriError),
}

pub(crate) async fn rotate(
    runtime: &dyn Runtime,
    id: &str,
    path: &Path,
    max_bytes: u64,
) -> Result<bool, RotateError> {
    if fs::metadata(path).map_or(0, |m| m.len()) <= max_bytes {
        return Ok(false);
    }
    let failed = |action, path: &Path| {
        let path = path.to_owned();
        move |source| RotateError::Io {
            action,
            path,
            source,
        }
    };
    let mut name = path.as_os_str().to_owned();
    // Fixed width: the names sort by age.
    name.push(format!(".{:016}", now_us()));
    let old = PathBuf::from(name);
    fs::rename(path, &old).map_err(failed("rename", path))?;
    if let Err(error) = runtime.reopen_log(id).await {
        // The runtime still writes to the old file: give it its name back.
        fs::rename(&old, path).map_err(failed("rename back", &old))?;
        return Err(error.into());
    }
    let rotated = rotated(path);
    let surplus = rotated.len().saturating_sub(MAX_LOG_FILES - 1);
    for old in &rotated[..surplus] {
        fs::remove_file(old).map_err(failed("remove", old))?;
    }
    Ok(true)
}

/// Renamed files of this log, the oldest first.
fn rotated(path: &Path) -> Vec<PathBuf> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name().and_then(|n| n.to_str()))
    else {
        return Vec::new();
    };
    let prefix = format!("{name}.");
    let mut files: Vec<PathBuf> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|e| {
            e.file_name()
                .to_str()
                .is_some_and(|n| n.starts_with(&prefix))
        })
        .map(|e| e.path())
        .collect();
    files.sort();
    files
}

/// Removes all files of a container instance's log; absence is fine.
pub(crate) fn remove(path: &Path) {
    for file in rotated(path).iter().map(PathBuf::as_path).chain([path]) {
        if let Err(error) = fs::remove_file(file)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::debug!(log = %file.display(), %error, "log not removed");
        }
    }
}
