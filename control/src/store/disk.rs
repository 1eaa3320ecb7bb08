//! The file: redb's tables, what is read from it at start, what one group of changes writes.

use std::collections::BTreeMap;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use redb::backends::FileBackend;
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};

use super::{Event, Record, StoreError};

/// Key to 8 bytes of revision (little endian) followed by the value.
const RECORDS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("records");
const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");
const FORMAT: u64 = 1;
/// The file holds Secrets.
const OWNER_ONLY: u32 = 0o600;
/// The page cache of redb: small, because reads are served from memory.
const CACHE_BYTES: usize = 4 << 20;
/// The file is made smaller at start when it is larger than this plus so many times its content.
const SHRINK_ABOVE: u64 = 32 << 20;
const SHRINK_FACTOR: u64 = 4;

/// Opens or creates a database.
pub(super) type Opener = fn(&Path) -> Result<Database, redb::Error>;

pub(super) fn open_file(path: &Path) -> Result<Database, redb::Error> {
    let mut options = std::fs::OpenOptions::new();
    options
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(OWNER_ONLY);
    let file = options.open(path)?;
    file.set_permissions(std::fs::Permissions::from_mode(OWNER_ONLY))?;
    Ok(Database::builder()
        .set_cache_size(CACHE_BYTES)
        .create_with_backend(FileBackend::new(file)?)?)
}

/// The database, closed and opened again around a failed write: what such a write left is known only after reading.
pub(super) struct Disk {
    path: PathBuf,
    opener: Opener,
    database: Option<Database>,
}

impl Disk {
    pub(super) fn open(path: &Path, opener: Opener) -> Result<(Self, Loaded), StoreError> {
        let failed = |e: redb::Error| StoreError::Open {
            path: path.into(),
            source: Box::new(e),
        };
        let mut database = opener(path).map_err(failed)?;
        prepare(&database, path)?;
        let loaded = load(&database).map_err(failed)?;
        shrink(&mut database, path, &loaded.0);
        Ok((
            Self {
                path: path.into(),
                opener,
                database: Some(database),
            },
            loaded,
        ))
    }

    /// Makes changes durable, all or none. After an error [`Disk::settle`] tells which.
    pub(super) fn persist(&mut self, events: &[Event]) -> Result<(), redb::Error> {
        let Some(database) = &self.database else {
            return Err(redb::Error::DatabaseClosed);
        };
        let written = write(database, events);
        if written.is_err() {
            self.database = None;
        }
        written
    }

    /// Opens the file again after a failed write and tells whether the changes are there: the failure may have come
    /// after the point of no return.
    pub(super) fn settle(&mut self, events: &[Event]) -> Result<bool, redb::Error> {
        let (Some(first), Some(last)) = (events.first(), events.last()) else {
            return Ok(false);
        };
        let database = (self.opener)(&self.path)?;
        let found = stored_revision(&database)?;
        let landed = found == last.record.revision;
        if !landed && found != first.record.revision - 1 {
            return Err(redb::Error::Corrupted(format!(
                "{} is at revision {found}, which nobody wrote; restart to read it anew",
                self.path.display()
            )));
        }
        self.database = Some(database);
        Ok(landed)
    }
}

fn stored_revision(database: &Database) -> Result<u64, redb::Error> {
    let transaction = database.begin_read()?;
    Ok(transaction
        .open_table(META)?
        .get("revision")?
        .map_or(0, |v| v.value()))
}

fn prepare(database: &Database, path: &Path) -> Result<(), StoreError> {
    let open = |e: redb::Error| StoreError::Open {
        path: path.into(),
        source: Box::new(e),
    };
    let transaction = database.begin_write().map_err(|e| open(e.into()))?;
    let found = {
        transaction
            .open_table(RECORDS)
            .map_err(|e| open(e.into()))?;
        let mut meta = transaction.open_table(META).map_err(|e| open(e.into()))?;
        let found = meta
            .get("format")
            .map_err(|e| open(e.into()))?
            .map(|v| v.value());
        if found.is_none() {
            meta.insert("format", FORMAT).map_err(|e| open(e.into()))?;
        }
        found
    };
    if let Some(found) = found.filter(|f| *f != FORMAT) {
        return Err(StoreError::Format {
            path: path.into(),
            found,
            supported: FORMAT,
        });
    }
    transaction.commit().map_err(|e| open(e.into()))
}

/// Gives disk space back when most of the file is free. A file that cannot be made smaller works as it is.
fn shrink(database: &mut Database, path: &Path, records: &BTreeMap<Arc<str>, Arc<Record>>) {
    let live: usize = records
        .iter()
        .map(|(key, r)| key.len() + r.value.len())
        .sum();
    let size = std::fs::metadata(path).map_or(0, |m| m.len());
    if size <= SHRINK_ABOVE + SHRINK_FACTOR * u64::try_from(live).unwrap_or(u64::MAX / 8) {
        return;
    }
    match database.compact() {
        Ok(_) => {
            tracing::info!(path = %path.display(), before_bytes = size, "the store's file was compacted")
        }
        Err(error) => tracing::warn!(path = %path.display(), %error, "compact the store's file"),
    }
}

/// All records and the last revision.
pub(super) type Loaded = (BTreeMap<Arc<str>, Arc<Record>>, u64);

fn load(database: &Database) -> Result<Loaded, redb::Error> {
    let transaction = database.begin_read()?;
    let revision = transaction
        .open_table(META)?
        .get("revision")?
        .map_or(0, |v| v.value());
    let mut records = BTreeMap::new();
    for entry in transaction.open_table(RECORDS)?.iter()? {
        let (key, stored) = entry?;
        let Some((head, value)) = stored.value().split_first_chunk::<8>() else {
            return Err(redb::Error::Corrupted(format!(
                "record {} is too short",
                key.value()
            )));
        };
        let key: Arc<str> = key.value().into();
        let value = Bytes::copy_from_slice(value);
        let record = Record::new(Arc::clone(&key), value, u64::from_le_bytes(*head));
        records.insert(key, Arc::new(record));
    }
    Ok((records, revision))
}

fn write(database: &Database, events: &[Event]) -> Result<(), redb::Error> {
    let transaction = database.begin_write()?;
    {
        let mut records = transaction.open_table(RECORDS)?;
        let mut buffer = Vec::new();
        for event in events {
            let record = &event.record;
            if event.deleted {
                records.remove(&*record.key)?;
            } else {
                buffer.clear();
                buffer.extend_from_slice(&record.revision.to_le_bytes());
                buffer.extend_from_slice(&record.value);
                records.insert(&*record.key, buffer.as_slice())?;
            }
        }
        if let Some(last) = events.last() {
            transaction
                .open_table(META)?
                .insert("revision", last.record.revision)?;
        }
    }
    transaction.commit()?;
    Ok(())
}
