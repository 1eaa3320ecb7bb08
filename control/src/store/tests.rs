//! The store contract on the embedded implementation.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;

use redb::backends::FileBackend;
use redb::{Database, StorageBackend};

use super::{EmbeddedStore, Expect, Op, OpenOptions, Store, StoreError, topic_of};

fn open(dir: &tempfile::TempDir) -> EmbeddedStore {
    let path = dir.path().join("store.redb");
    EmbeddedStore::open(&OpenOptions { path, now_us: || 0 }).unwrap()
}

fn put(key: &str, value: &str, expect: Expect) -> Op {
    Op::Put {
        key: key.into(),
        value: Bytes::copy_from_slice(value.as_bytes()),
        expect,
    }
}

fn delete(key: &str) -> Op {
    Op::Delete {
        key: key.into(),
        expect: Expect::Any,
    }
}

async fn names(store: &EmbeddedStore, prefix: &str, at: Option<u64>) -> Vec<String> {
    let page = store.list(prefix, None, 0, at).await.unwrap();
    page.records
        .iter()
        .map(|r| format!("{}={}", r.key, String::from_utf8_lossy(&r.value)))
        .collect()
}

#[test]
fn only_the_owner_reads_the_file() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store.redb");
    std::fs::write(&path, "").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    let _store = open(&dir);
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn a_topic_is_the_first_two_segments() {
    assert_eq!(topic_of("core/pods/ns/a"), "core/pods");
    assert_eq!(topic_of("core/pods/"), "core/pods");
    assert_eq!(topic_of("core"), "core");
}

#[tokio::test]
async fn a_failed_step_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir);
    store
        .commit(vec![put("core/a/1", "x", Expect::Absent)])
        .await
        .unwrap();
    let refused = store
        .commit(vec![
            put("core/a/2", "y", Expect::Absent),
            put("core/a/1", "z", Expect::Absent),
        ])
        .await;
    assert!(matches!(
        refused,
        Err(StoreError::Conflict {
            step: 1,
            current: Some(_),
            ..
        })
    ));
    assert_eq!(names(&store, "core/a/", None).await, ["core/a/1=x"]);
    assert_eq!(store.revision().await.unwrap(), 1);
}

#[tokio::test]
async fn revisions_and_records_survive_reopening() {
    let dir = tempfile::tempdir().unwrap();
    {
        let store = open(&dir);
        store
            .commit(vec![put("core/a/1", "x", Expect::Absent)])
            .await
            .unwrap();
        store
            .commit(vec![put("core/a/2", "y", Expect::Absent)])
            .await
            .unwrap();
        store.commit(vec![delete("core/a/2")]).await.unwrap();
    }
    let store = open(&dir);
    assert_eq!(store.revision().await.unwrap(), 3);
    assert_eq!(names(&store, "core/a/", None).await, ["core/a/1=x"]);
    let old = store.watch("core/a/", 2).await;
    assert!(
        matches!(old, Err(StoreError::Compacted { .. })),
        "history does not survive"
    );
    store.watch("core/a/", 3).await.unwrap();
}

#[tokio::test]
async fn lists_of_the_past_show_the_past() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir);
    for n in 1..=3 {
        store
            .commit(vec![put(&format!("core/a/{n}"), "old", Expect::Absent)])
            .await
            .unwrap();
    }
    store.commit(vec![delete("core/a/1")]).await.unwrap();
    store
        .commit(vec![put("core/a/2", "new", Expect::Any)])
        .await
        .unwrap();
    store
        .commit(vec![put("core/a/4", "new", Expect::Absent)])
        .await
        .unwrap();
    assert_eq!(
        names(&store, "core/a/", Some(3)).await,
        ["core/a/1=old", "core/a/2=old", "core/a/3=old"]
    );
    let page = store
        .list("core/a/", Some("core/a/1"), 1, Some(3))
        .await
        .unwrap();
    assert_eq!(
        (&*page.records[0].key, page.remaining, page.revision),
        ("core/a/2", 1, 3)
    );
    store.compact(4).await.unwrap();
    let gone = store.list("core/a/", None, 0, Some(3)).await;
    assert!(matches!(gone, Err(StoreError::Compacted { .. })));
    let future = store.list("core/a/", None, 0, Some(99)).await;
    assert!(matches!(future, Err(StoreError::Future { current: 6, .. })));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_under_load_misses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(open(&dir));
    let mut watch = store.watch("core/a/", 0).await.unwrap();
    let writers: Vec<_> = (0..8)
        .map(|w| {
            let store = Arc::clone(&store);
            tokio::spawn(async move {
                for n in 0..50 {
                    let ops = vec![
                        put(&format!("core/a/{w}-{n}"), "v", Expect::Absent),
                        put(&format!("core/b/{w}-{n}"), "v", Expect::Absent),
                    ];
                    store.commit(ops).await.unwrap();
                }
            })
        })
        .collect();
    let mut seen = Vec::new();
    while seen.len() < 400 {
        seen.extend(
            watch
                .next()
                .await
                .unwrap()
                .iter()
                .map(|e| e.record.revision),
        );
    }
    for writer in writers {
        writer.await.unwrap();
    }
    assert!(
        seen.windows(2).all(|w| w[0] < w[1]),
        "in revision order, each once"
    );
    assert_eq!(watch.progress(), 800);
}

#[tokio::test]
async fn a_reader_behind_the_history_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(&dir);
    let mut watch = store.watch("core/a/", 0).await.unwrap();
    store
        .commit(vec![put("core/a/1", "x", Expect::Absent)])
        .await
        .unwrap();
    store.compact(1).await.unwrap();
    assert!(matches!(
        watch.next().await,
        Err(StoreError::Compacted { .. })
    ));
}

/// A disk that refuses to sync while [`REFUSES`] is set.
#[derive(Debug)]
struct Faulty(FileBackend);

static REFUSES: AtomicBool = AtomicBool::new(false);

impl StorageBackend for Faulty {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        if REFUSES.load(Ordering::SeqCst) {
            return Err(io::Error::from(io::ErrorKind::StorageFull));
        }
        self.0.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write(offset, data)
    }
}

fn open_faulty(path: &Path) -> Result<Database, redb::Error> {
    let mut options = std::fs::OpenOptions::new();
    let file = options
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)?;
    Ok(Database::builder().create_with_backend(Faulty(FileBackend::new(file)?))?)
}

#[tokio::test]
async fn a_disk_that_refuses_loses_no_acknowledged_write_and_heals() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store.redb");
    let options = OpenOptions { path, now_us: || 0 };
    let seen;
    {
        let store = EmbeddedStore::open_with(&options, open_faulty).unwrap();
        store
            .commit(vec![put("core/a/1", "x", Expect::Absent)])
            .await
            .unwrap();
        REFUSES.store(true, Ordering::SeqCst);
        for key in ["core/a/2", "core/a/3"] {
            let refused = store.commit(vec![put(key, "y", Expect::Absent)]).await;
            assert!(
                matches!(refused, Err(StoreError::Write { .. })),
                "{refused:?}"
            );
            assert!(store.health().await.is_err());
        }
        assert_eq!(
            names(&store, "core/a/", None).await,
            ["core/a/1=x"],
            "reads go on"
        );
        REFUSES.store(false, Ordering::SeqCst);
        store
            .commit(vec![put("core/a/4", "z", Expect::Absent)])
            .await
            .unwrap();
        store.health().await.unwrap();
        seen = names(&store, "core/a/", None).await;
        // The first refused write may have reached the disk, the second was never tried.
        assert!(seen.contains(&"core/a/1=x".into()) && seen.contains(&"core/a/4=z".into()));
        assert!(!seen.contains(&"core/a/3=y".into()));
    }
    let store = EmbeddedStore::open_with(&options, open_faulty).unwrap();
    assert_eq!(
        names(&store, "core/a/", None).await,
        seen,
        "what was shown is what is there"
    );
}
