//! A store whose process is killed while it writes has every write that was acknowledged.
#![allow(clippy::unwrap_used, reason = "a test may stop at any surprise")]

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use bytes::Bytes;
use weir_control::store::{EmbeddedStore, Expect, Op, OpenOptions, Store};

const STORE_PATH: &str = "WEIR_TEST_STORE_PATH";
const ROUNDS: usize = 4;
const WRITERS: usize = 8;

fn open(path: &Path) -> EmbeddedStore {
    EmbeddedStore::open(&OpenOptions {
        path: path.into(),
        now_us: || 0,
    })
    .unwrap()
}

/// The child's part: writes until it is killed and prints what was acknowledged.
#[test]
#[ignore = "run by acknowledged_writes_survive_kill"]
fn child_writes_until_killed() {
    let Some(path) = std::env::var_os(STORE_PATH) else {
        return;
    };
    let store = Arc::new(open(Path::new(&path)));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .build()
        .unwrap();
    let run = std::process::id();
    runtime.block_on(async move {
        let writers = (0..WRITERS).map(|w| tokio::spawn(write(Arc::clone(&store), run, w)));
        futures::future::join_all(writers).await;
    });
}

async fn write(store: Arc<EmbeddedStore>, run: u32, writer: usize) {
    for n in 0_u64.. {
        let key = format!("core/k/{run}-{writer}-{n}");
        // Every third key is overwritten once, so that updates are covered as well.
        let value = Bytes::from(vec![b'x'; 700]);
        let put = |expect| Op::Put {
            key: key.clone(),
            value: value.clone(),
            expect,
        };
        let mut committed = store.commit(vec![put(Expect::Absent)]).await.unwrap();
        if n % 3 == 0 {
            committed = store.commit(vec![put(Expect::Any)]).await.unwrap();
        }
        let revision = committed.records[0].as_ref().unwrap().revision;
        let line = format!("{key} {revision}\n");
        std::io::stdout().write_all(line.as_bytes()).unwrap();
    }
}

fn spawn_child(path: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "child_writes_until_killed",
            "--ignored",
            "--nocapture",
        ])
        .env(STORE_PATH, path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Lets the child acknowledge `count` writes, kills it, and adds all that it acknowledged.
fn kill_after(path: &Path, count: usize, acknowledged: &mut BTreeMap<String, u64>) {
    let mut child = spawn_child(path);
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut seen = 0;
    for line in lines.map_while(Result::ok) {
        let Some((key, revision)) = line.rsplit_once(' ') else {
            continue;
        };
        let (Some(at), Ok(revision)) = (key.find("core/k/"), revision.parse()) else {
            continue;
        };
        acknowledged.insert(key[at..].to_owned(), revision);
        seen += 1;
        if seen == count {
            child.kill().unwrap();
        }
    }
    child.wait().unwrap();
    assert!(seen >= count, "the child wrote {seen} of {count}");
}

#[test]
fn acknowledged_writes_survive_kill() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store.redb");
    let mut acknowledged = BTreeMap::new();
    for round in 0..ROUNDS {
        kill_after(&path, 40 + 97 * round, &mut acknowledged);
        let store = open(&path);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        let highest = runtime.block_on(async {
            for (key, revision) in &acknowledged {
                let record = store.get(key).await.unwrap();
                let record = record.unwrap_or_else(|| panic!("{key} was acknowledged and is gone"));
                assert!(record.revision >= *revision, "{key} went back in time");
            }
            store.revision().await.unwrap()
        });
        assert!(highest >= *acknowledged.values().max().unwrap());
    }
}
