//! Pods that come and go while agents and plugins are killed.
//!
//! A short run is part of the node tier. `WEIR_CHURN_SECONDS=600` runs for ten minutes at a hundred pods a minute,
//! `WEIR_CHURN_SEED=N` repeats what a run printed.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use serde_json::{Value, json};
use weir_tests::topology::Namespace;

use super::agents::{finish, left_out};
use super::cluster::{Cluster, Member};
use super::support::{Call, NO_POD, Runtime, addresses, talk};

const SHORT: Duration = Duration::from_secs(20);
/// Between two pods: a hundred a minute, and three times as many in a short run.
const PACE: Duration = Duration::from_millis(600);
/// A runtime that gets no DEL through in this time has found a fault.
const DEL_PATIENCE: Duration = Duration::from_secs(60);
/// As the agent's configuration has it.
const COOL_DOWN: Duration = Duration::from_secs(30);

/// Who has which address, and since when nobody has.
#[derive(Default)]
struct Book {
    live: BTreeSet<IpAddr>,
    freed: BTreeMap<IpAddr, Instant>,
}

#[derive(Default)]
struct Counts {
    added: AtomicU32,
    failed: AtomicU32,
    plugins_killed: AtomicU32,
}

/// What one pod goes through.
struct Plan {
    container: String,
    kill_add: Option<Duration>,
    kill_del: Option<Duration>,
    life: Duration,
    /// The namespace goes before the DEL.
    vanishes: bool,
}

impl Plan {
    fn new(number: u32, random: &mut StdRng) -> Self {
        let mut kill = || {
            let moment = Duration::from_micros(random.random_range(0..30_000));
            (random.random_range(0..5) == 0).then_some(moment)
        };
        Self {
            container: format!("churn{number}"),
            kill_add: kill(),
            kill_del: kill(),
            life: Duration::from_millis(random.random_range(0..5_000)),
            vanishes: random.random_range(0..4) == 0,
        }
    }

    fn live(&self, runtime: &Runtime, book: &Mutex<Book>, counts: &Counts) {
        let pod = Namespace::new("pod").unwrap();
        let call = |command, netns: Option<PathBuf>, kill_after: Option<Duration>| {
            counts
                .plugins_killed
                .fetch_add(u32::from(kill_after.is_some()), Ordering::Relaxed);
            Call {
                plugin: &runtime.plugin,
                inside: None,
                folders: &[],
                command,
                container: &self.container,
                netns,
                arguments: NO_POD,
                kill_after,
            }
            .run(&runtime.config(json!({})))
        };
        let mut given = Vec::new();
        match call("ADD", Some(pod.path()), self.kill_add) {
            Ok(result) => {
                counts.added.fetch_add(1, Ordering::Relaxed);
                given = addresses(&result);
                let mut book = book.lock().unwrap();
                for address in &given {
                    assert!(book.live.insert(*address), "{address} belongs to two pods");
                    let rested = book.freed.get(address).map(Instant::elapsed);
                    assert!(
                        rested.is_none_or(|rested| rested >= COOL_DOWN),
                        "{address} after {rested:?}"
                    );
                }
            }
            // The agent was gone, or the plugin is.
            Err(error) => {
                counts.failed.fetch_add(1, Ordering::Relaxed);
                assert!(error.is_null() || error["code"] == 11, "{error}");
            }
        }
        std::thread::sleep(self.life);
        let path = pod.path();
        let mut pod = Some(pod);
        if self.vanishes {
            pod = None;
        }
        {
            let mut book = book.lock().unwrap();
            for address in &given {
                book.live.remove(address);
                book.freed.insert(*address, Instant::now());
            }
        }
        let started = Instant::now();
        let mut kill = self.kill_del;
        while let Err(error) = call("DEL", Some(path.clone()), kill.take()) {
            assert!(started.elapsed() < DEL_PATIENCE, "no DEL succeeds: {error}");
            std::thread::sleep(Duration::from_millis(100));
        }
        drop(pod);
    }
}

/// Entries of the maps that know of pods; `None` where nobody can count them.
fn entries(member: &Member) -> Option<BTreeMap<String, usize>> {
    const OF_PODS: [&str; 7] = [
        "endpoint",
        "link",
        "pod",
        "policy",
        "identit",
        "frontend",
        "namespace",
    ];
    let names: Vec<PathBuf> = member.pins();
    let maps = names.iter().filter(|pin| {
        let name = pin
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .to_lowercase();
        pin.parent().is_some_and(|p| p.ends_with("maps"))
            && OF_PODS.iter().any(|part| name.contains(part))
    });
    let count = |map: &Path| -> Option<usize> {
        let output = Command::new("bpftool")
            .args(["-j", "map", "dump", "pinned"])
            .arg(map)
            .output()
            .ok()?;
        let list: Value = serde_json::from_slice(&output.stdout).ok()?;
        Some(list.as_array()?.len())
    };
    maps.map(|map| Some((map.file_name()?.to_string_lossy().into_owned(), count(map)?)))
        .collect()
}

fn wait_until_served(member: &Member) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while let Err(error) = member.runtime.call("STATUS", "", None, Value::Null) {
        assert!(Instant::now() < deadline, "{error}\n{}", member.log());
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    entries
        .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_or_doubled_while_everything_is_killed() {
    const TEST: &str = "nothing_is_lost_or_doubled_while_everything_is_killed";
    if left_out(TEST) {
        return;
    }
    let number = |name: &str| std::env::var(name).ok().and_then(|v| v.parse::<u64>().ok());
    let time = number("WEIR_CHURN_SECONDS").map_or(SHORT, Duration::from_secs);
    let pace = if time > SHORT { PACE } else { PACE / 3 };
    let seed = number("WEIR_CHURN_SEED").unwrap_or_else(|| u64::from(std::process::id()));
    println!("WEIR_CHURN_SEED={seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let mut cluster = Cluster::start(1).await;
    let keeper = cluster.pod(0, "keeper");
    let member = &mut cluster.members[0];
    let (links, pins, before) = (
        member.namespace.links().unwrap(),
        member.pins(),
        entries(member),
    );
    let (book, counts) = (Mutex::new(Book::default()), Counts::default());
    let runtime = member.runtime.clone();
    let (mut pods, mut agents) = (0, 0);
    std::thread::scope(|scope| {
        let end = Instant::now() + time;
        while Instant::now() < end {
            let plan = Plan::new(pods, &mut random);
            let (runtime, book, counts) = (&runtime, &book, &counts);
            scope.spawn(move || plan.live(runtime, book, counts));
            pods += 1;
            if random.random_range(0..50) == 0 {
                member.kill_agent();
                std::thread::sleep(Duration::from_millis(random.random_range(0..300)));
                member.start_agent();
                agents += 1;
            }
            std::thread::sleep(pace);
        }
    });
    let count = |of: &AtomicU32| of.load(Ordering::Relaxed);
    println!(
        "{pods} pods in {} s: {} connected, {} not; {agents} agents and up to {} plugins killed",
        time.as_secs(),
        count(&counts.added),
        count(&counts.failed),
        count(&counts.plugins_killed)
    );
    assert!(count(&counts.added) > pods / 10, "{}", member.log());
    wait_until_served(member);
    assert_eq!(book.lock().unwrap().live, BTreeSet::new());
    let mut left = member.namespace.links().unwrap();
    left.sort();
    let mut expected = links;
    expected.sort();
    assert_eq!(left, expected);
    assert_eq!(
        names(&member.runtime.state_dir.join("ipam")),
        ["keeper@eth0.json"]
    );
    assert_eq!(
        names(&member.runtime.state_dir.join("cni-deletes")),
        Vec::<String>::new()
    );
    let sorted = |mut pins: Vec<PathBuf>| {
        pins.sort();
        pins
    };
    assert_eq!(sorted(member.pins()), sorted(pins));
    match before {
        Some(before) => {
            assert!(before.values().sum::<usize>() > 0, "{before:?}");
            assert_eq!(entries(member).unwrap(), before);
        }
        None => println!(
            "SKIPPED entries of maps in {TEST}: bpftool is missing (Debian package bpftool)"
        ),
    }
    assert_eq!(
        talk(&member.namespace, &keeper.namespace, keeper.ips[0]),
        member.ips[0]
    );
    finish(&mut cluster, vec![keeper]);
}
