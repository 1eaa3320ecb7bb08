//! Cluster DNS of this node: names of Services and pods from desired state, other names from upstream servers.
//!
//! `zone`, `lookup`, `message`, `learn` and `cache` are pure: state and packets in, packets out. `server` and `forward` move
//! packets. Nothing here decides where the dataplane sends queries.

mod cache;
pub mod corefile;
mod forward;
mod learn;
mod lookup;
mod message;
mod metrics;
mod server;
#[cfg(test)]
mod tests;
mod upstream;
mod zone;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

pub use lookup::Answer;
pub use message::{MAX_UDP_BYTES, Request, Step, Transport, handle};
pub use metrics::DnsMetrics;
pub use zone::{Options, PodRecords, Zone};

use crate::config::Config;
use crate::feed::{Origin, Update, Updates};
use crate::policy::domains::Domains;
use forward::Forwarder;
use metrics::Metrics;
use server::Server;

/// How often resolv.conf is read again.
const UPSTREAM_REFRESH: Duration = Duration::from_secs(30);

/// Why the server could not start.
#[derive(Debug, thiserror::Error)]
pub enum DnsError {
    #[error("listen for DNS on {address}: {source}; set dns.port to a free port")]
    Bind {
        address: SocketAddr,
        source: std::io::Error,
    },
}

/// A running server. It ends at shutdown.
#[derive(Clone, Debug)]
pub struct DnsHandle {
    metrics: Arc<Metrics>,
    zone: Arc<RwLock<Zone>>,
    addresses: Vec<SocketAddr>,
}

impl DnsHandle {
    /// For the registry of the process.
    #[must_use]
    pub fn metrics(&self) -> DnsMetrics {
        DnsMetrics(Arc::clone(&self.metrics))
    }

    /// Where the server listens.
    #[must_use]
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// True once missing names are said not to exist.
    #[must_use]
    pub fn is_synced(&self) -> bool {
        self.zone
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .synced
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
    let metrics = Arc::new(Metrics::default());
    let options = Options {
        ttl_s: config.dns.ttl_s,
        pods: config.dns.pods,
        ..Options::default()
    };
    let zone = Arc::new(RwLock::new(Zone::new(options)));
    let upstreams = upstream::discover(config, &[]);
    let forwarder = Forwarder::new(&upstreams, Arc::clone(&metrics));
    let server = Arc::new(Server::new(
        Arc::clone(&zone),
        forwarder,
        Arc::clone(&metrics),
        Arc::clone(domains),
    ));
    let remembers = Arc::downgrade(&server);
    domains.set_cache(move |wanted| {
        let server = remembers.upgrade();
        server.map_or_else(Vec::new, |server| server.forwarder.remembered(wanted))
    });
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
    tasks.spawn(follow(Arc::clone(&server), updates, config.clone()));
    tasks.spawn(refresh_upstreams(Arc::clone(&server), config.clone()));
    tokio::spawn(async move {
        shutdown.cancelled().await;
        tasks.shutdown().await;
    });
    Ok(DnsHandle {
        metrics,
        zone,
        addresses,
    })
}

/// Keeps the zone current.
async fn follow(server: Arc<Server>, mut updates: Updates, config: Config) {
    loop {
        let Update {
            state,
            changes,
            origin,
            committed_at_us,
        } = updates.next().await;
        {
            let mut zone = server.zone.write().unwrap_or_else(PoisonError::into_inner);
            zone.update(&state, &changes);
            if origin == Origin::Server {
                zone.set_synced();
            }
        }
        if changes.everything || changes.config {
            // Only now is it known which addresses lead back here.
            server.find_upstreams(&config);
        }
        if let Some(committed) = committed_at_us.filter(|_| !changes.services.is_empty()) {
            server.metrics.programming.observe(seconds_since(committed));
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

/// Follows resolv.conf.
async fn refresh_upstreams(server: Arc<Server>, config: Config) {
    loop {
        tokio::time::sleep(UPSTREAM_REFRESH).await;
        server.find_upstreams(&config);
    }
}
