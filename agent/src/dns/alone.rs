//! DNS without a node: a server that does what one Corefile says, as `coredns -conf` does.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use rand::Rng as _;
use tokio::task::{AbortHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use super::corefile::{Corefile, CorefileError, Sources, matches};
use super::runtime::Runtime;
use super::server;
use super::upstream::Surroundings;
use super::{DnsError, Options};
use crate::feed::{FeedHandle, Origin};

/// A file that a Corefile refers to is no larger.
const MAX_FILE_BYTES: u64 = 8 << 20;

/// Why the program cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum AloneError {
    #[error("read the Corefile {path}: {source}")]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(transparent)]
    Corefile(#[from] CorefileError),
    #[error("{0}; give the agent's configuration with its section [feed]: --feed FILE")]
    NoFeed(CorefileError),
    #[error(transparent)]
    Listen(#[from] DnsError),
}

/// The files of this machine.
#[derive(Clone, Copy, Debug)]
struct Disk;

impl Sources for Disk {
    fn read(&self, path: &str) -> Result<String, String> {
        let fail = |error: std::io::Error| format!("read {path}: {error}");
        if std::fs::metadata(path).map_err(fail)?.len() > MAX_FILE_BYTES {
            return Err(format!("{path} has more than {MAX_FILE_BYTES} bytes"));
        }
        std::fs::read_to_string(path).map_err(fail)
    }

    fn matching(&self, pattern: &str) -> Vec<String> {
        let folder = Path::new(pattern).parent().unwrap_or(Path::new("."));
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let paths = entries.filter_map(|entry| entry.path().into_os_string().into_string().ok());
        // What is mounted from a ConfigMap has folders beside its keys.
        let found = paths.filter(|path| matches(pattern, path) && !Path::new(path).is_dir());
        found.collect::<BTreeSet<_>>().into_iter().collect()
    }

    fn variable(&self, name: &str) -> Result<String, String> {
        Ok(std::env::var(name).unwrap_or_default())
    }
}

fn load(path: &Path) -> Result<Corefile, AloneError> {
    let text = std::fs::read_to_string(path).map_err(|source| AloneError::Read {
        path: path.into(),
        source,
    })?;
    let corefile = Corefile::parse(&text, &path.to_string_lossy(), &Disk)?;
    // Sockets belong to a port, not to a block.
    for block in &corefile.blocks {
        let ports = |key: &super::corefile::Key| block.keys.iter().any(|own| own.port == key.port);
        let shares = |other: &&super::corefile::ServerBlock| other.keys.iter().any(ports);
        let other = corefile.blocks.iter().filter(shares);
        if other.into_iter().any(|other| other.bind != block.bind) {
            let why = "blocks of one port listen on the same addresses: give each the same bind";
            return Err(block.place.error(why).into());
        }
    }
    Ok(corefile)
}

/// Reads a Corefile and whatever it imports; how many server blocks it has.
///
/// # Errors
/// [`AloneError`] for the first thing that is wrong, with file and line.
pub fn check(path: &Path) -> Result<usize, AloneError> {
    Ok(load(path)?.blocks.len())
}

/// Serves until `shutdown`, and as long after it as the longest lameduck says. `listening` is called once questions are
/// answered.
///
/// # Errors
/// [`AloneError`] when the first configuration cannot serve. Later ones that are wrong are logged, and not taken.
pub async fn run(
    path: &Path,
    feed: Option<FeedHandle>,
    shutdown: CancellationToken,
    listening: impl FnOnce(&[SocketAddr]),
) -> Result<(), AloneError> {
    let corefile = load(path)?;
    let runtime = Arc::new(Runtime::new(
        Surroundings::default(),
        Options::default(),
        Arc::default(),
    ));
    let mut listeners = Listeners::default();
    take(&runtime, &mut listeners, corefile, feed.as_ref())?;
    listening(&listeners.addresses());
    let mut tasks = JoinSet::new();
    tasks.spawn(Arc::clone(&runtime).keep_up());
    if let Some(feed) = &feed {
        tasks.spawn(follow(Arc::clone(&runtime), feed.clone()));
    }
    let mut said = None;
    while let Some(pause) = next_look(&runtime) {
        tokio::select! {
            () = shutdown.cancelled() => break,
            () = tokio::time::sleep(pause) => {}
        }
        let found = load(path);
        if found.as_ref().ok() == runtime.corefile().as_ref() {
            said = None;
            continue;
        }
        let taken = found.and_then(|new| take(&runtime, &mut listeners, new, feed.as_ref()));
        match taken {
            Ok(()) => {
                said = None;
                tracing::info!(path = %path.display(), "DNS has another configuration");
            }
            Err(error) => {
                let error = error.to_string();
                if said.as_ref() != Some(&error) {
                    runtime.metrics.reload_failed.inc();
                    tracing::error!(%error, "DNS keeps its configuration: the new Corefile is wrong");
                }
                said = Some(error);
            }
        }
    }
    shutdown.cancelled().await;
    runtime.status.set_ending();
    tokio::time::sleep(lameduck(&runtime)).await;
    Ok(())
}

/// None: the configuration never changes.
fn next_look(runtime: &Runtime) -> Option<Duration> {
    let corefile = runtime.corefile()?;
    let reload = corefile.blocks.iter().find_map(|block| block.reload)?;
    let jitter = rand::rng().random_range(0.0..=1.0);
    Some(reload.interval + reload.jitter.mul_f64(jitter))
}

fn lameduck(runtime: &Runtime) -> Duration {
    let corefile = runtime.corefile();
    let blocks = corefile.iter().flat_map(|corefile| &corefile.blocks);
    let times = blocks.filter_map(|block| Some(block.health.as_ref()?.lameduck));
    times.max().unwrap_or_default()
}

/// Listens where a configuration wants it, and serves it.
fn take(
    runtime: &Arc<Runtime>,
    listeners: &mut Listeners,
    corefile: Corefile,
    feed: Option<&FeedHandle>,
) -> Result<(), AloneError> {
    let kubernetes = corefile.blocks.iter().find_map(|b| b.kubernetes.as_ref());
    if let (Some(kubernetes), None) = (kubernetes, feed) {
        let why = "kubernetes needs the node feed of a control plane";
        return Err(AloneError::NoFeed(kubernetes.place.error(why)));
    }
    let addresses = addresses(&corefile);
    let fresh = listeners.bind(&addresses)?;
    let state = feed.map(FeedHandle::state);
    runtime.take(corefile, Arc::new(Disk), state.as_deref())?;
    listeners.serve(fresh, runtime);
    listeners.keep(&addresses);
    runtime.surrounded(|surroundings| {
        surroundings.own_addresses = addresses.keys().map(SocketAddr::ip).collect();
        surroundings.own_ports = addresses.values().copied().collect();
    });
    Ok(())
}

/// Where a configuration listens, and for which of its ports. Without a bind: on all addresses of both families.
fn addresses(corefile: &Corefile) -> BTreeMap<SocketAddr, u16> {
    let mut addresses = BTreeMap::new();
    for block in &corefile.blocks {
        for key in &block.keys {
            let all = [
                IpAddr::from(Ipv4Addr::UNSPECIFIED),
                IpAddr::from(Ipv6Addr::UNSPECIFIED),
            ];
            let bind: &[IpAddr] = if block.bind.is_empty() {
                &all
            } else {
                &block.bind
            };
            addresses.extend(
                bind.iter()
                    .map(|ip| (SocketAddr::new(*ip, key.port), key.port)),
            );
        }
    }
    addresses
}

type Sockets = (
    SocketAddr,
    tokio::net::UdpSocket,
    tokio::net::TcpListener,
    u16,
);

/// The sockets that are open.
#[derive(Debug, Default)]
struct Listeners(BTreeMap<SocketAddr, (SocketAddr, [AbortHandle; 2])>);

impl Listeners {
    fn addresses(&self) -> Vec<SocketAddr> {
        self.0.values().map(|(address, _)| *address).collect()
    }

    /// Opens what is not open yet. A machine may have no IPv6 at all.
    fn bind(&self, wanted: &BTreeMap<SocketAddr, u16>) -> Result<Vec<Sockets>, DnsError> {
        let mut fresh = Vec::new();
        for (address, port) in wanted.iter().filter(|(a, _)| !self.0.contains_key(a)) {
            match server::bind(*address) {
                Ok((udp, tcp)) => fresh.push((*address, udp, tcp, *port)),
                Err(error) if address.ip() == IpAddr::from(Ipv6Addr::UNSPECIFIED) => {
                    tracing::info!(%error, "DNS is served over IPv4 alone");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(fresh)
    }

    fn serve(&mut self, fresh: Vec<Sockets>, runtime: &Runtime) {
        for (address, udp, tcp, port) in fresh {
            let server = runtime.server(port);
            let bound = udp.local_addr().unwrap_or(address);
            let tasks = [
                tokio::spawn(Arc::clone(&server).udp(udp)).abort_handle(),
                tokio::spawn(server.tcp(tcp)).abort_handle(),
            ];
            self.0.insert(address, (bound, tasks));
        }
    }

    fn keep(&mut self, wanted: &BTreeMap<SocketAddr, u16>) {
        self.0.retain(|address, (_, tasks)| {
            let keep = wanted.contains_key(address);
            if !keep {
                tasks.iter().for_each(AbortHandle::abort);
            }
            keep
        });
    }
}

impl Drop for Listeners {
    fn drop(&mut self) {
        self.keep(&BTreeMap::new());
    }
}

/// Keeps the cluster's zone current.
async fn follow(runtime: Arc<Runtime>, feed: FeedHandle) {
    let mut updates = feed.updates();
    loop {
        let update = updates.next().await;
        let mut zone = runtime.zone.write().unwrap_or_else(PoisonError::into_inner);
        zone.update(&update.state, &update.changes);
        if update.origin == Origin::Server {
            zone.set_synced();
        }
    }
}
