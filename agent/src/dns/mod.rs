//! DNS of this node: names of Services and pods from desired state, other names as a Corefile says.
//!
//! `corefile`, `zone`, `lookup`, `message`, `hosts`, `rewrite`, `log`, `learn` and `cache` are pure: state and packets in, packets
//! out. `server`, `block`, `forward` and `exchange` move packets, `runtime` puts configurations to work, `alone` is the
//! program without a node. Nothing here decides where the dataplane sends queries.

mod alone;
mod block;
mod cache;
pub mod corefile;
mod endpoints;
mod exchange;
mod forward;
mod hosts;
mod learn;
mod log;
mod lookup;
mod loops;
mod message;
mod metrics;
mod rewrite;
mod runtime;
mod server;
#[cfg(test)]
mod tests;
mod tls;
mod upstream;
mod zone;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use control_api::desired::DesiredState;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub use alone::{AloneError, check, run as run_alone};
pub use lookup::Answer;
pub use message::{MAX_UDP_BYTES, Request, Step, Transport, handle};
pub use metrics::DnsMetrics;
pub use zone::{Options, PodRecords, Zone};

use crate::config::{self, Config};
use crate::feed::{Origin, Update, Updates};
use crate::policy::domains::Domains;
use corefile::{Corefile, CorefileError, Mounted};
use forward::lock;
use runtime::Runtime;
use upstream::Surroundings;

/// Where CoreDNS finds its configuration, and where the feed puts the keys of the ConfigMap.
const COREFILE: &str = "/etc/coredns/Corefile";
const DNS_PORT: u16 = 53;

/// What serves while the cluster has no Corefile; the cluster's names come on top.
const BUILT_IN: &str = "\
.:53 {
    errors
    forward . /etc/resolv.conf {
        policy round_robin
        max_concurrent 1000
        failover SERVFAIL
    }
    cache {
        success 4096 3600 0
        denial 4096 1800 0
        servfail 0
    }
    loop
}
";

/// Why the server could not start.
#[derive(Debug, thiserror::Error)]
pub enum DnsError {
    #[error("listen for DNS on {address}: {source}; set dns.port to a free port")]
    Bind {
        address: SocketAddr,
        source: std::io::Error,
    },
    #[error("the built-in configuration of DNS: {0}")]
    BuiltIn(CorefileError),
}

/// A running server. It ends at shutdown.
#[derive(Clone, Debug)]
pub struct DnsHandle {
    runtime: Arc<Runtime>,
    addresses: Vec<SocketAddr>,
    configuration: Arc<Mutex<Configuration>>,
}

/// Which configuration serves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Configuration {
    /// It is the cluster's Corefile; otherwise the one that is built in.
    pub from_cluster: bool,
    /// Why a newer one does not serve.
    pub error: Option<String>,
}

impl DnsHandle {
    /// For the registry of the process.
    #[must_use]
    pub fn metrics(&self) -> DnsMetrics {
        DnsMetrics(Arc::clone(&self.runtime.metrics))
    }

    /// Where the server listens.
    #[must_use]
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// True once missing names are said not to exist.
    #[must_use]
    pub fn is_synced(&self) -> bool {
        let zone = &self.runtime.zone;
        zone.read().unwrap_or_else(PoisonError::into_inner).synced
    }

    #[must_use]
    pub fn configuration(&self) -> Configuration {
        lock(&self.configuration).clone()
    }
}

/// Starts to serve on every node address and loopback. `domains` learns of every answer before it is sent.
///
/// # Errors
/// [`DnsError`] when an address cannot be bound. Loopback is served where it exists.
pub fn start(
    config: &Config,
    updates: Updates,
    domains: &Arc<Domains>,
    shutdown: CancellationToken,
) -> Result<DnsHandle, DnsError> {
    let port = config.dns.port;
    let surroundings = Surroundings {
        resolv_conf: Some(config.dns.resolv_conf.clone()),
        upstreams: config.dns.upstreams.clone(),
        own_addresses: config.node_ips.clone(),
        own_ports: vec![port],
        cluster_dns: Vec::new(),
    };
    let runtime = Runtime::new(surroundings, Options::default(), Arc::clone(domains));
    let runtime = Arc::new(runtime);
    let remembers = Arc::downgrade(&runtime);
    domains.set_cache(move |wanted| {
        let runtime = remembers.upgrade();
        runtime.map_or_else(Vec::new, |runtime| runtime.remembered(wanted))
    });
    let built_in = built_in(&config.dns).map_err(DnsError::BuiltIn)?;
    let taken = runtime.take(built_in, Arc::new(Mounted::default()), None);
    taken.map_err(DnsError::BuiltIn)?;
    let server = runtime.server(DNS_PORT);
    let mut tasks = JoinSet::new();
    let mut addresses = Vec::new();
    for ip in &config.node_ips {
        let (udp, tcp) = server::bind(SocketAddr::new(*ip, port))?;
        addresses.extend(udp.local_addr().ok());
        tasks.spawn(Arc::clone(&server).udp(udp));
        tasks.spawn(Arc::clone(&server).tcp(tcp));
    }
    for ip in [
        IpAddr::from(Ipv4Addr::LOCALHOST),
        IpAddr::from(Ipv6Addr::LOCALHOST),
    ] {
        if config.node_ips.contains(&ip) {
            continue;
        }
        // A convenience for people on the node: a node without it serves its pods all the same.
        match server::bind(SocketAddr::new(ip, port)) {
            Ok((udp, tcp)) => {
                addresses.extend(udp.local_addr().ok());
                tasks.spawn(Arc::clone(&server).udp(udp));
                tasks.spawn(Arc::clone(&server).tcp(tcp));
            }
            Err(error) => tracing::info!(%error, "DNS is not served on loopback"),
        }
    }
    let handle = DnsHandle {
        runtime: Arc::clone(&runtime),
        addresses,
        configuration: Arc::default(),
    };
    tasks.spawn(follow(handle.clone(), updates, config.dns.clone()));
    tasks.spawn(runtime.keep_up());
    tokio::spawn(async move {
        shutdown.cancelled().await;
        tasks.shutdown().await;
    });
    Ok(handle)
}

/// The configuration of a cluster without a Corefile.
fn built_in(config: &config::Dns) -> Result<Corefile, CorefileError> {
    let mut corefile = Corefile::parse(BUILT_IN, "built-in", &Mounted::default())?;
    for block in &mut corefile.blocks {
        block.kubernetes = Some(corefile::Kubernetes {
            place: block.place.clone(),
            // Those of the feed's configuration.
            zones: Vec::new(),
            pods: config.pods,
            fallthrough: Vec::new(),
            ttl_s: config.ttl_s,
            endpoint_pod_names: false,
            no_endpoints: false,
            ignore_empty_service: false,
            namespaces: Vec::new(),
        });
    }
    Ok(corefile)
}

/// Reads the cluster's Corefile; none when it has none.
fn from_cluster(files: &Mounted) -> Option<Result<Corefile, CorefileError>> {
    let text = files.0.get(COREFILE)?;
    let fits = |corefile: Corefile| {
        for block in &corefile.blocks {
            let other = block.keys.iter().find(|key| key.port != DNS_PORT);
            if let Some(key) = other {
                return Err(block.place.error(format!(
                    "nodes serve DNS on the cluster's address alone, port {DNS_PORT}, and not on port {}",
                    key.port
                )));
            }
            if !block.bind.is_empty() {
                let why = "nodes serve DNS on the cluster's address: bind has no meaning here";
                return Err(block.place.error(why));
            }
        }
        Ok(corefile)
    };
    Some(Corefile::parse(text, COREFILE, files).and_then(fits))
}

/// Keeps the zone and the configuration current.
async fn follow(handle: DnsHandle, mut updates: Updates, config: config::Dns) {
    let runtime = &handle.runtime;
    let mut mounted = Mounted::default();
    loop {
        let Update {
            state,
            changes,
            origin,
            committed_at_us,
        } = updates.next().await;
        {
            let mut zone = runtime.zone.write().unwrap_or_else(PoisonError::into_inner);
            zone.update(&state, &changes);
            if origin == Origin::Server {
                zone.set_synced();
            }
        }
        if changes.everything || changes.config {
            let files = mounted_files(&state.config.dns_files);
            if files != mounted {
                handle.configure(&files, &config, &state);
                mounted = files;
            }
            let cluster_dns = state.config.dns_ips.iter();
            let cluster_dns = cluster_dns.filter_map(|ip| ip.parse().ok()).collect();
            // Only now is it known which addresses lead back here.
            runtime.surrounded(|surroundings| surroundings.cluster_dns = cluster_dns);
        }
        if let Some(committed) = committed_at_us.filter(|_| !changes.services.is_empty()) {
            runtime
                .metrics
                .programming
                .observe(seconds_since(committed));
        }
    }
}

fn mounted_files(files: &std::collections::BTreeMap<String, Vec<u8>>) -> Mounted {
    let text = |bytes: &Vec<u8>| String::from_utf8_lossy(bytes).into_owned();
    let files = files
        .iter()
        .map(|(path, bytes)| (path.clone(), text(bytes)));
    Mounted(files.collect())
}

impl DnsHandle {
    /// Takes what the cluster says; what is wrong with it is said once, and what served before goes on.
    fn configure(&self, files: &Mounted, config: &config::Dns, state: &DesiredState) {
        let from_cluster = from_cluster(files);
        let is_cluster = from_cluster.is_some();
        let corefile = from_cluster.unwrap_or_else(|| built_in(config));
        let files = Arc::new(files.clone());
        let taken = corefile.and_then(|corefile| self.runtime.take(corefile, files, Some(state)));
        let mut configuration = lock(&self.configuration);
        match taken {
            Ok(()) => {
                tracing::info!(from_cluster = is_cluster, "DNS has another configuration");
                *configuration = Configuration {
                    from_cluster: is_cluster,
                    error: None,
                };
            }
            Err(error) => {
                tracing::error!(%error, "DNS keeps its configuration: the cluster's Corefile is wrong");
                self.runtime.metrics.reload_failed.inc();
                configuration.error = Some(error.to_string());
            }
        }
    }
}

fn seconds_since(at_us: i64) -> f64 {
    let at = UNIX_EPOCH + Duration::from_micros(at_us.unsigned_abs());
    SystemTime::now()
        .duration_since(at)
        .unwrap_or_default()
        .as_secs_f64()
}
