//! The configuration at work: takes a new one as a whole or not at all, and follows what it refers to.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use control_api::desired::{Changes, DesiredState};

use super::block::{self, Blocks};
use super::corefile::{Corefile, CorefileError, Sources};
use super::endpoints::{Endpoints, Page, Status};
use super::forward::lock;
use super::loops::Loops;
use super::metrics::Metrics;
use super::server::Server;
use super::upstream::Surroundings;
use super::zone::{Options, Zone};
use crate::compile::policy::Wanted;
use crate::policy::domains::{Answer, Domains};

/// How often resolv.conf is read again, and loops are looked for.
const UPSTREAM_REFRESH: Duration = Duration::from_secs(30);
/// How often hosts files are looked at unless the configuration says otherwise.
const HOSTS_REFRESH: Duration = Duration::from_secs(5);

pub(super) type Files = Arc<dyn Sources + Send + Sync>;

/// What serves names, by the port that the configuration names.
#[derive(Debug)]
pub(super) struct Runtime {
    pub(super) metrics: Arc<Metrics>,
    pub(super) zone: Arc<RwLock<Zone>>,
    pub(super) status: Arc<Status>,
    loops: Arc<Loops>,
    domains: Arc<Domains>,
    surroundings: Mutex<Surroundings>,
    servers: Mutex<BTreeMap<u16, Arc<Server>>>,
    live: Mutex<Option<Live>>,
    endpoints: Endpoints,
}

/// The configuration that serves.
struct Live {
    corefile: Corefile,
    files: Files,
}

impl std::fmt::Debug for Live {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Live").field(&self.corefile).finish()
    }
}

impl Runtime {
    /// `domains` learns of every answer before it is sent.
    pub(super) fn new(surroundings: Surroundings, options: Options, domains: Arc<Domains>) -> Self {
        let metrics = Arc::new(Metrics::default());
        let zone = Arc::new(RwLock::new(Zone::new(options)));
        let status = Arc::new(Status::new(Arc::clone(&metrics), Arc::clone(&zone)));
        Self {
            endpoints: Endpoints::new(Arc::clone(&status)),
            metrics,
            zone,
            status,
            loops: Arc::default(),
            domains,
            surroundings: Mutex::new(surroundings),
            servers: Mutex::default(),
            live: Mutex::default(),
        }
    }

    /// Serves a configuration from now on. `state`: what the cluster's zone is made of, where there is a feed.
    ///
    /// # Errors
    /// [`CorefileError`]; what served before goes on.
    pub(super) fn take(
        &self,
        corefile: Corefile,
        files: Files,
        state: Option<&DesiredState>,
    ) -> Result<(), CorefileError> {
        let surroundings = lock(&self.surroundings).clone();
        let ports = Blocks::build(&corefile, &*files, &surroundings, &self.metrics)?;
        let kubernetes = block::kubernetes(&corefile)?;
        self.status.set_kubernetes(kubernetes.is_some());
        if let Some(kubernetes) = kubernetes {
            let options = block::zone_options(kubernetes);
            let mut zone = self.zone.write().unwrap_or_else(PoisonError::into_inner);
            if zone.options != options {
                zone.set_options(options);
                zone.update(
                    state.unwrap_or(&DesiredState::default()),
                    &Changes::everything(),
                );
            }
        }
        {
            let mut servers = lock(&self.servers);
            for (port, server) in &*servers {
                if !ports.contains_key(port) {
                    server.blocks.store(Arc::default());
                }
            }
            for (port, blocks) in ports {
                let server = self.entry(&mut servers, port);
                server.blocks.store(Arc::new(blocks));
            }
        }
        self.endpoints.open(&pages(&corefile));
        *lock(&self.live) = Some(Live { corefile, files });
        Ok(())
    }

    /// The configuration that serves.
    pub(super) fn corefile(&self) -> Option<Corefile> {
        lock(&self.live).as_ref().map(|live| live.corefile.clone())
    }

    /// The server of a port; one that knows no name where the configuration has none.
    pub(super) fn server(&self, port: u16) -> Arc<Server> {
        self.entry(&mut lock(&self.servers), port)
    }

    fn entry(&self, servers: &mut BTreeMap<u16, Arc<Server>>, port: u16) -> Arc<Server> {
        let server = servers.entry(port).or_insert_with(|| {
            let (zone, loops) = (Arc::clone(&self.zone), Arc::clone(&self.loops));
            let metrics = Arc::clone(&self.metrics);
            let domains = Arc::clone(&self.domains);
            Arc::new(Server::new(zone, Arc::default(), loops, metrics, domains))
        });
        Arc::clone(server)
    }

    /// What caches know of the addresses of names that rules ask for.
    pub(super) fn remembered(&self, wanted: &Wanted) -> Vec<Answer> {
        let servers = self.servers();
        let blocks = servers.iter().map(|server| server.blocks.load());
        blocks
            .flat_map(|blocks| blocks.remembered(wanted))
            .collect()
    }

    fn servers(&self) -> Vec<Arc<Server>> {
        lock(&self.servers).values().cloned().collect()
    }

    /// Which addresses lead back here is known anew.
    pub(super) fn surrounded(&self, change: impl FnOnce(&mut Surroundings)) {
        change(&mut lock(&self.surroundings));
        self.find_upstreams();
    }

    fn find_upstreams(&self) {
        let surroundings = lock(&self.surroundings).clone();
        for server in self.servers() {
            server.find_upstreams(&surroundings);
        }
    }

    /// Follows resolv.conf, hosts files and loops, and opens what could not be opened before.
    pub(super) async fn keep_up(self: Arc<Self>) {
        let mut refreshed = Instant::now();
        self.look_for_loops().await;
        loop {
            tokio::time::sleep(self.hosts_interval()).await;
            self.read_hosts();
            if refreshed.elapsed() >= UPSTREAM_REFRESH {
                refreshed = Instant::now();
                self.find_upstreams();
                self.look_for_loops().await;
                if let Some(corefile) = self.corefile() {
                    self.endpoints.open(&pages(&corefile));
                }
            }
        }
    }

    pub(super) async fn look_for_loops(&self) {
        let mut found = 0;
        for server in self.servers() {
            found += self.loops.look(&server.blocks.load_full()).await;
        }
        self.metrics.loops.set(found);
    }

    fn hosts_interval(&self) -> Duration {
        let live = lock(&self.live);
        let blocks = live.iter().flat_map(|live| &live.corefile.blocks);
        let hosts = blocks.filter_map(|block| block.hosts.as_ref());
        let intervals = hosts.map(|hosts| hosts.reload).filter(|i| !i.is_zero());
        intervals
            .fold(HOSTS_REFRESH, Duration::min)
            .max(MIN_REFRESH)
    }

    fn read_hosts(&self) {
        let Some(files) = lock(&self.live)
            .as_ref()
            .map(|live| Arc::clone(&live.files))
        else {
            return;
        };
        for server in self.servers() {
            for block in &server.blocks.load().all {
                let hosts = block.config.hosts.as_ref();
                if hosts.is_some_and(|hosts| !hosts.reload.is_zero())
                    && let Err(error) = block.read_hosts(&*files)
                {
                    tracing::debug!(%error, "read a hosts file again");
                }
            }
        }
    }
}

/// The shortest pause between two looks at files.
const MIN_REFRESH: Duration = Duration::from_secs(1);

/// What is served over HTTP, and where.
fn pages(corefile: &Corefile) -> BTreeMap<SocketAddr, Vec<Page>> {
    let mut pages: BTreeMap<SocketAddr, Vec<Page>> = BTreeMap::new();
    for block in &corefile.blocks {
        let health = block.health.as_ref().map(|health| health.address);
        let wanted = [
            (health, Page::Health),
            (block.ready, Page::Ready),
            (block.prometheus, Page::Metrics),
        ];
        for (address, page) in wanted {
            let Some(address) = address else { continue };
            let on = pages.entry(address).or_default();
            if !on.contains(&page) {
                on.push(page);
            }
        }
    }
    pages
}
