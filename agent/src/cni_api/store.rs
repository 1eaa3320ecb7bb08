//! Durable records and the queue of DELs that came while no agent ran: one file each.
//!
//! A file appears by rename after its bytes are on disk, so a crash leaves the old state or the new one, never half.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::record::{Key, Record};

/// Records, below the state directory.
pub(super) const RECORDS: &str = "ipam";
/// Queued DELs, below the state directory; `weir-cni` writes there.
pub(super) const DELETES: &str = "cni-deletes";
/// Records of attachments that have gone, while their addresses rest, below the state directory. Their names start with
/// the time, in milliseconds since 1970.
pub(super) const RESTING: &str = "ipam-resting";
/// Bytes of one file at most: more is not ours.
const MAX_FILE_BYTES: u64 = 64 * 1024;

/// A state file that could not be used.
#[derive(Debug, thiserror::Error)]
#[error("{action} {path}: {source}")]
pub struct StoreError {
    pub action: &'static str,
    pub path: PathBuf,
    pub source: io::Error,
}

/// Records of attachments on disk.
#[derive(Clone, Debug)]
pub struct Store {
    records: PathBuf,
    deletes: PathBuf,
    resting: PathBuf,
}

/// The record of an attachment that has gone.
#[derive(Debug)]
pub(super) struct Resting {
    pub(super) path: PathBuf,
    pub(super) since: SystemTime,
    pub(super) addresses: Vec<IpAddr>,
}

/// What was found at start.
#[derive(Debug, Default)]
pub(super) struct Loaded {
    pub(super) records: Vec<Record>,
    /// Files that are no records; they stay where they are.
    pub(super) unreadable: Vec<PathBuf>,
}

impl Store {
    /// Opens the store below a state directory, creating what is missing (mode 0700).
    ///
    /// # Errors
    /// [`StoreError`] names the directory.
    pub fn open(state_dir: &Path) -> Result<Self, StoreError> {
        let store = Self {
            records: state_dir.join(RECORDS),
            deletes: state_dir.join(DELETES),
            resting: state_dir.join(RESTING),
        };
        for path in [&store.records, &store.deletes, &store.resting] {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(path)
                .map_err(|source| StoreError {
                    action: "create",
                    path: path.clone(),
                    source,
                })?;
        }
        Ok(store)
    }

    pub(super) fn load(&self) -> Result<Loaded, StoreError> {
        let mut loaded = Loaded::default();
        self.clear_half_written()?;
        for path in files(&self.records)? {
            match read::<Record>(&path) {
                Some(record) => loaded.records.push(record),
                None => loaded.unreadable.push(path),
            }
        }
        Ok(loaded)
    }

    /// Removes what a crash left half-written. Only this process writes records, and not yet.
    fn clear_half_written(&self) -> Result<(), StoreError> {
        for path in all_files(&self.records)?.iter().filter(|p| is_hidden(p)) {
            remove_file(path)?;
        }
        Ok(())
    }

    /// Makes a record durable. When this returns, a crash cannot lose it.
    pub(super) fn put(&self, record: &Record) -> Result<(), StoreError> {
        let path = self.records.join(record.key.file_name());
        let temporary = self.records.join(format!(".{}", record.key.file_name()));
        let write = || -> io::Result<()> {
            let mut file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&temporary)?;
            file.write_all(&serde_json::to_vec(record)?)?;
            file.sync_all()?;
            fs::rename(&temporary, &path)?;
            File::open(&self.records)?.sync_all()
        };
        write().map_err(|source| {
            // Nobody may take it for given, whether it has its name by now or not. What cannot be removed belongs to no link,
            // and goes at the next start.
            let _ = fs::remove_file(&temporary);
            let _ = fs::remove_file(&path);
            StoreError {
                action: "write",
                path: path.clone(),
                source,
            }
        })
    }

    /// Removes a record; that it is gone already is fine.
    pub(super) fn remove(&self, key: &Key) -> Result<(), StoreError> {
        let path = self.records.join(key.file_name());
        // No fsync: a record that comes back after a crash holds an address until it is reconciled, no worse.
        remove_file(&path)
    }

    /// Removes a record and remembers until when its addresses rest; `None` when it was gone already.
    pub(super) fn rest(&self, key: &Key, since: SystemTime) -> Result<Option<PathBuf>, StoreError> {
        let millis = since
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_millis();
        let path = self.resting.join(format!("{millis}@{}", key.file_name()));
        // No fsync, as above: a record that comes back is that of a dead attachment.
        match fs::rename(self.records.join(key.file_name()), &path) {
            Ok(()) => Ok(Some(path)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(StoreError {
                action: "move the record of an attachment that has gone to",
                path,
                source,
            }),
        }
    }

    /// Attachments that have gone and whose addresses rested when this was last looked at, the oldest first.
    pub(super) fn resting(&self) -> Result<Vec<Resting>, StoreError> {
        let mut all = Vec::new();
        for path in files(&self.resting)? {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let millis = name
                .split_once('@')
                .and_then(|(millis, _)| millis.parse().ok());
            let since = millis.and_then(|m| UNIX_EPOCH.checked_add(Duration::from_millis(m)));
            match (since, read::<Record>(&path)) {
                (Some(since), Some(record)) => all.push(Resting {
                    since,
                    addresses: record.addresses,
                    path,
                }),
                _ => remove_file(&path)?,
            }
        }
        all.sort_by_key(|resting| resting.since);
        Ok(all)
    }

    /// DELs that came while no agent ran, with their files.
    pub(super) fn queued_deletes(&self) -> Result<Vec<(PathBuf, Option<Key>)>, StoreError> {
        Ok(files(&self.deletes)?
            .into_iter()
            .map(|path| (path.clone(), read(&path)))
            .collect())
    }

    /// Forgets a queued DEL, or an attachment whose addresses have rested.
    pub(super) fn done(&self, path: &Path) -> Result<(), StoreError> {
        remove_file(path)
    }

    /// Forgets queued DELs of this attachment, which is being made anew or is gone, and what a plugin that was killed has
    /// left of one.
    pub(super) fn cancel_delete(&self, key: &Key) -> Result<(), StoreError> {
        let whole = key.file_name();
        let half = format!(".{}.", whole.trim_end_matches(".json"));
        for path in all_files(&self.deletes)? {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if *name == whole || name.starts_with(&half) {
                remove_file(&path)?;
            }
        }
        Ok(())
    }
}

fn is_hidden(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().starts_with('.')
}

fn remove_file(path: &Path) -> Result<(), StoreError> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(StoreError {
            action: "remove",
            path: path.into(),
            source,
        }),
        _ => Ok(()),
    }
}

/// Files of a directory whose names do not start with a dot: those are still being written, or were when a crash came.
fn files(directory: &Path) -> Result<Vec<PathBuf>, StoreError> {
    let mut paths = all_files(directory)?;
    paths.retain(|path| !is_hidden(path));
    paths.sort();
    Ok(paths)
}

fn all_files(directory: &Path) -> Result<Vec<PathBuf>, StoreError> {
    let failed = |source| StoreError {
        action: "list",
        path: directory.into(),
        source,
    };
    let mut paths = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        paths.push(entry.map_err(failed)?.path());
    }
    Ok(paths)
}

fn read<T: serde::de::DeserializeOwned>(path: &Path) -> Option<T> {
    let small = fs::metadata(path).is_ok_and(|m| m.is_file() && m.len() <= MAX_FILE_BYTES);
    small
        .then(|| fs::read(path).ok())
        .flatten()
        .and_then(|b| serde_json::from_slice(&b).ok())
}

#[cfg(test)]
mod tests {
    use super::super::record::PodName;
    use super::*;

    fn record(n: u64) -> Record {
        Record {
            key: Key {
                container_id: format!("c{n}"),
                if_name: "eth0".into(),
            },
            network: "weir".into(),
            addresses: vec!["10.0.0.2".parse().unwrap()],
            netns: "/run/netns/x".into(),
            netns_cookie: None,
            sequence: n,
            pod: PodName::default(),
            port_mappings: Vec::new(),
            mac: None,
            bandwidth: None,
            delegated: false,
        }
    }

    #[test]
    fn records_survive_and_foreign_files_are_reported() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        store.put(&record(1)).unwrap();
        store.put(&record(2)).unwrap();
        store.remove(&record(2).key).unwrap();
        store.remove(&record(2).key).unwrap();
        let folder = dir.path().join(RECORDS);
        fs::write(folder.join(".c9@eth0.json"), "{\"half").unwrap();
        fs::write(folder.join("empty@eth0.json"), "").unwrap();
        fs::write(folder.join("huge@eth0.json"), vec![b' '; 100_000]).unwrap();
        let loaded = Store::open(dir.path()).unwrap().load().unwrap();
        assert_eq!(loaded.records, [record(1)]);
        assert_eq!(loaded.unreadable.len(), 2);
        assert!(!folder.join(".c9@eth0.json").exists());
    }

    #[test]
    fn attachments_that_went_are_remembered_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        for n in 1..3 {
            store.put(&record(n)).unwrap();
            let at = UNIX_EPOCH + Duration::from_secs(100 - n);
            let path = store.rest(&record(n).key, at).unwrap().unwrap();
            assert!(path.exists());
            assert!(store.rest(&record(n).key, at).unwrap().is_none());
        }
        fs::write(dir.path().join(RESTING).join("junk"), "x").unwrap();
        assert!(store.load().unwrap().records.is_empty());
        let resting = store.resting().unwrap();
        let since: Vec<_> = resting.iter().map(|r| r.since).collect();
        let secs = |s| UNIX_EPOCH + Duration::from_secs(s);
        assert_eq!(since, [secs(98), secs(99)]);
        assert_eq!(resting[0].addresses, record(2).addresses);
        store.done(&resting[0].path).unwrap();
        assert_eq!(store.resting().unwrap().len(), 1);
    }

    #[test]
    fn queued_deletes_are_what_the_plugin_writes() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let file = dir.path().join(DELETES).join("c1@eth0.json");
        fs::write(&file, r#"{"containerId":"c1","ifName":"eth0"}"#).unwrap();
        fs::write(dir.path().join(DELETES).join("x"), "junk").unwrap();
        let queued = store.queued_deletes().unwrap();
        assert_eq!(queued[0], (file, Some(record(1).key)));
        assert_eq!(queued[1].1, None);
        let folder = dir.path().join(DELETES);
        fs::write(folder.join(".c1@eth0.77"), "{").unwrap();
        fs::write(folder.join(".c10@eth0.77"), "{").unwrap();
        store.cancel_delete(&record(1).key).unwrap();
        assert_eq!(store.queued_deletes().unwrap().len(), 1);
        assert!(!folder.join(".c1@eth0.77").exists() && folder.join(".c10@eth0.77").exists());
    }
}
