//! The agent as a process: the order of start and end, and the loops between the rooms.

mod apply;
mod base;
pub(crate) mod cleanup;
mod node_report;
mod refusals;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use control_api::desired::Changes;
use nix::fcntl::{Flock, FlockArg};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use weir_agent::announce;
use weir_agent::cni_api::{self, Attachments, Store};
use weir_agent::config::Config;
use weir_agent::dns;
use weir_agent::feed::{self, FeedHandle};
use weir_agent::fragments;
use weir_agent::health_check::{self, HealthServer, NodeHealth};
use weir_agent::kernel::{self, Kernel, Limits, NodeIdentity, PodPrograms};
use weir_agent::netlink::{self, Netlink};
use weir_agent::observe::{self, Checks, Observe};
use weir_agent::pods;
use weir_agent::policy::domains::{AddressesInUse, Domains};
use weir_agent::policy::{self, Enforced, Enforcer, PolicyMaps};

use base::Base;

/// Held by the one agent of a node.
const LOCK_NAME: &str = "agent.lock";
/// How often a part of the flow tables is walked for flows that ended.
const FLOW_PERIOD: Duration = Duration::from_secs(1);

const CHECK_PROGRAMS: &str = "programs";
const CHECK_CNI: &str = "cni";
const CHECK_SNAPSHOT: &str = "snapshot";

/// What the node has become able to do, for its Ready condition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Readiness {
    /// The first whole state of the control plane is in the kernel.
    pub(crate) programmed: bool,
    /// What failed at the last apply; empty when nothing did.
    pub(crate) problem: String,
}

/// Runs until SIGTERM or SIGINT. Whatever ends the process, the dataplane stays as it is.
pub(crate) async fn run(config: Config) -> Result<()> {
    let config = Arc::new(config);
    private_dir(&config.state_dir)?;
    private_dir(&config.run_dir)?;
    let _lock = lock(&config.run_dir)?;
    let shutdown = CancellationToken::new();
    watch_signals(&shutdown)?;

    let observe = observe::start(&config, readiness_checks(), shutdown.clone()).await?;
    // Pods go on while an agent restarts, and they ask for names all the time: DNS waits for nothing but its state.
    let feed = feed::start(&config, shutdown.clone())?;
    observe.set_feed(feed.clone());
    let (health, node_health) = start_health_checks(&config, &feed, shutdown.clone()).await;
    let domains = learn_domains(&config, &feed, &observe);
    let dns = dns::start(&config, feed.updates(), &domains, shutdown.clone())?;
    tracing::info!(addresses = ?dns.addresses(), "cluster DNS listens");
    announce_addresses(&config, &feed, &observe, &shutdown);
    observe.set_dns(dns);
    let (kernel, base) = {
        let config = Arc::clone(&config);
        tokio::task::spawn_blocking(move || prepare(&config)).await??
    };
    observe.checks().pass(CHECK_PROGRAMS);
    let base = Arc::new(base);
    observe.set_dataplane(Arc::<Kernel>::clone(&kernel));
    let enforcer = start_policies(&config, &feed, &kernel, domains).await?;
    observe.set_policies(Arc::clone(&kernel), Arc::clone(&enforcer), feed.clone());
    watch_drops(&kernel, &enforcer, &shutdown);
    watch_domains(&kernel, &enforcer, &shutdown);
    let (attachments, cni) = {
        let (config, feed) = (Arc::clone(&config), feed.clone());
        let programs = Enforced {
            kernel: Arc::clone(&kernel),
            enforcer: Arc::clone(&enforcer),
        };
        let mtu = config.cni.mtu.unwrap_or(base.mtu());
        let base = Arc::clone(&base);
        tokio::task::spawn_blocking(move || serve_cni(&config, &feed, programs, &base, mtu))
            .await??
    };
    observe.checks().pass(CHECK_CNI);
    observe.set_attachments(Arc::clone(&attachments));
    observe.register(|registry| cni.stats().register(registry));
    let (readiness, ready) = watch::channel(Readiness::default());
    let applier = apply::Applier {
        config: Arc::clone(&config),
        feed: feed.clone(),
        kernel: Arc::clone(&kernel),
        enforcer,
        attachments,
        base,
        readiness,
        observe: observe.clone(),
        health,
        node_health,
    };
    tokio::spawn(show_readiness(observe, ready.clone()));
    let apply = tokio::spawn(applier.run(shutdown.clone()));
    tokio::spawn(fragments::run(Arc::clone(&kernel), shutdown.clone()));
    tokio::spawn(collect_flows(kernel, shutdown.clone()));
    let (saver, state_dir) = (feed.clone(), config.state_dir.clone());
    run_pods(&config, feed, ready, &shutdown)?;
    tracing::info!(node = %config.node_name, "agent is running");

    shutdown.cancelled().await;
    tracing::info!("stopping; pods and services keep working");
    tokio::task::spawn_blocking(move || cni.stop()).await?;
    apply.await.context("end the apply loop")?;
    saver.save(&state_dir);
    Ok(())
}

/// Serves DNS alone until SIGTERM or SIGINT.
pub(crate) async fn dns(corefile: &Path, feed: Option<&Config>) -> Result<()> {
    let shutdown = CancellationToken::new();
    watch_signals(&shutdown)?;
    let feed = feed.map(|config| feed::start(config, shutdown.clone()));
    let listening = |addresses: &[std::net::SocketAddr]| {
        tracing::info!(?addresses, "DNS listens");
    };
    dns::run_alone(corefile, feed.transpose()?, shutdown, listening).await?;
    Ok(())
}

/// In whole-cluster mode: runs this node's pods, and reports the node.
fn run_pods(
    config: &Arc<Config>,
    feed: FeedHandle,
    ready: watch::Receiver<Readiness>,
    shutdown: &CancellationToken,
) -> Result<()> {
    if config.pods.is_some() {
        let runner = pods::start(config, &feed, shutdown.clone())?;
        let (config, shutdown) = (Arc::clone(config), shutdown.clone());
        tokio::spawn(node_report::run(config, runner, feed, ready, shutdown));
    }
    Ok(())
}

/// Balancers go on asking while an agent restarts: they are answered from the state that the earlier agent left.
async fn start_health_checks(
    config: &Config,
    feed: &FeedHandle,
    shutdown: CancellationToken,
) -> (HealthServer, NodeHealth) {
    let node = NodeHealth::default();
    let server = HealthServer::start(node.clone(), config.observe.health_port, shutdown);
    let state = feed.state();
    let everything = Changes::everything();
    let wanted = health_check::wanted(&state, &everything, &config.node_name);
    server.set_services(true, wanted).await;
    (server, node)
}

/// Answers for load-balancer addresses, from now on: like DNS it needs nothing but its state.
fn announce_addresses(
    config: &Config,
    feed: &FeedHandle,
    observe: &Observe,
    shutdown: &CancellationToken,
) {
    // The dataplane still serves what an earlier agent programmed in this boot.
    let same_boot = config.run_dir.join(apply::APPLIED_MARK).exists();
    let announced = announce::start(
        &config.node_name,
        &config.uplinks,
        feed,
        same_boot,
        shutdown,
    );
    observe.register(|registry| announced.register(registry));
}

/// What /readyz waits for, and what it says until then.
fn readiness_checks() -> Checks {
    Checks::new(&[
        (CHECK_PROGRAMS, "the eBPF programs are not attached yet"),
        (CHECK_CNI, "the CNI socket is not open yet"),
        (
            CHECK_SNAPSHOT,
            "no complete state from the control plane is in the kernel yet",
        ),
    ])
}

async fn show_readiness(observe: Observe, mut ready: watch::Receiver<Readiness>) {
    if ready
        .wait_for(|readiness| readiness.programmed)
        .await
        .is_ok()
    {
        observe.checks().pass(CHECK_SNAPSHOT);
    }
}

/// Opens the dataplane and puts in place what every pod relies on.
fn prepare(config: &Arc<Config>) -> Result<(Arc<Kernel>, Base)> {
    if config.node_ips.is_empty() {
        bail!("configuration names no node_ips: list the InternalIPs of this node");
    }
    let identity = NodeIdentity {
        name: config.node_name.clone(),
        addresses: config.node_ips.clone(),
        dns_port: config.dns.port,
    };
    let mut limits = Limits::of_this_machine();
    if let Some(max) = config.flow_table.max_flows {
        limits.flows = max.0;
    }
    let options = config.dataplane.service_options();
    if options.maglev {
        limits = limits.with_maglev();
    }
    let kernel = Arc::new(Kernel::open(&config.bpffs, limits, identity)?);
    kernel.set_service_options(options);
    let base = Base::ensure(Arc::clone(config), Arc::clone(&kernel))?;
    translate_sockets(config, &kernel)?;
    Ok((kernel, base))
}

/// Attaches the socket hooks where the configuration and the machine allow it. Services work without them.
fn translate_sockets(config: &Config, kernel: &Kernel) -> Result<()> {
    let settings = &config.dataplane;
    if !settings.socket_translation {
        kernel.detach_sockets()?;
        tracing::info!("Services are translated per packet: socket_translation is off");
        return Ok(());
    }
    let cgroup = settings
        .cgroup
        .clone()
        .map_or_else(kernel::default_cgroup, Ok);
    match cgroup.and_then(|cgroup| kernel.attach_sockets(&cgroup).map(|()| cgroup)) {
        Ok(cgroup) => {
            tracing::info!(cgroup = %cgroup.display(), "Services are translated at the socket");
        }
        Err(reason) => {
            kernel.detach_sockets()?;
            tracing::info!(%reason, "Services are translated per packet, not at the socket");
        }
    }
    Ok(())
}

/// What DNS answers teach policies. Names that count are known from the state that the earlier agent left.
fn learn_domains(config: &Config, feed: &FeedHandle, observe: &Observe) -> Arc<Domains> {
    let domains = Domains::new(&config.policy);
    domains.ask_for(feed.state().policies.values());
    observe.register(|registry| domains.stats().register(registry));
    Arc::new(domains)
}

/// Takes over the policies that are in place; after a start of the machine, those that the node was told last.
async fn start_policies(
    config: &Arc<Config>,
    feed: &FeedHandle,
    kernel: &Arc<Kernel>,
    domains: Arc<Domains>,
) -> Result<Arc<Enforcer>> {
    let (config, state) = (Arc::clone(config), feed.state());
    let maps: Arc<dyn PolicyMaps> = Arc::<Kernel>::clone(kernel);
    let start = move || {
        let (folder, node) = (&config.state_dir, &config.node_name);
        Enforcer::start(maps, folder, node, &state, domains)
    };
    let enforcer = tokio::task::spawn_blocking(start).await?;
    Ok(Arc::new(enforcer.context("take over policies")?))
}

/// Logs packets that policies drop. Enforcement does not depend on it.
fn watch_drops(kernel: &Kernel, enforcer: &Arc<Enforcer>, shutdown: &CancellationToken) {
    let events = match kernel.drop_events() {
        Ok(events) => events,
        Err(error) => {
            tracing::error!(%error, "packets that policies drop are counted, not shown");
            return;
        }
    };
    let watching = policy::watch_drops(events, Arc::clone(enforcer), shutdown.clone());
    tokio::spawn(async move {
        if let Err(error) = watching.await {
            tracing::error!(%error, "packets that policies drop are counted, not shown");
        }
    });
}

/// Lets rules follow what DNS answers say of names.
fn watch_domains(kernel: &Arc<Kernel>, enforcer: &Arc<Enforcer>, shutdown: &CancellationToken) {
    let flows: Arc<dyn AddressesInUse> = Arc::<Kernel>::clone(kernel);
    let watching = policy::watch_domains(Arc::clone(enforcer), flows, shutdown.clone());
    tokio::spawn(watching);
}

/// Adopts the pods of this node and opens the socket for new ones.
fn serve_cni(
    config: &Config,
    feed: &FeedHandle,
    programs: Enforced,
    base: &Base,
    mtu: u32,
) -> Result<(Arc<Attachments>, cni_api::Server)> {
    let store = Store::open(&config.state_dir)?;
    let settings = cni_api::Settings {
        mtu,
        node_ips: config.node_ips.clone(),
        cool_down: Duration::from_secs(config.cni.address_cool_down_s.into()),
    };
    // Before any host port: they are on all addresses of the node.
    let surroundings = base.surroundings(&mut Netlink::open()?, &feed.state())?;
    programs.kernel.set_node_addresses(surroundings.nodes);
    let (feed, name) = (feed.clone(), config.node_name.clone());
    let pod_ranges: cni_api::PodRanges =
        Arc::new(move || cni_api::ranges::of_node(&feed.state(), &name));
    let programs: Arc<dyn PodPrograms> = Arc::new(programs);
    let attachments = Arc::new(
        Attachments::start(store, programs, settings, pod_ranges)
            .context("adopt the pods of this node")?,
    );
    let socket = config.cni_socket();
    let server = cni_api::Server::start(&socket, Arc::clone(&attachments))?;
    if let Some(conf_dir) = &config.cni.conf_dir {
        cni_api::conf::write(conf_dir, &socket, &config.state_dir)?;
    }
    Ok((attachments, server))
}

/// Walks the flow tables a little at a time.
async fn collect_flows(kernel: Arc<Kernel>, shutdown: CancellationToken) {
    let mut period = tokio::time::interval(FLOW_PERIOD);
    period.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut failing = false;
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return,
            _ = period.tick() => {}
        }
        let kernel = Arc::clone(&kernel);
        match tokio::task::spawn_blocking(move || kernel.collect_flows()).await {
            Ok(Ok(_)) => failing = false,
            Ok(Err(e)) if !failing => {
                failing = true;
                tracing::error!(error = %e, "flows that ended cannot be removed; trying again");
            }
            Ok(Err(_)) => {}
            Err(_) => return,
        }
    }
}

fn private_dir(path: &Path) -> Result<()> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .with_context(|| format!("create {}", path.display()))
}

/// Two agents on one node would undo each other's work.
fn lock(run_dir: &Path) -> Result<Flock<File>> {
    let path = run_dir.join(LOCK_NAME);
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .with_context(|| format!("open {}", path.display()))?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, e)| {
        anyhow::anyhow!(
            "lock {}: {e}; is another weir-agent running on this node?",
            path.display()
        )
    })
}

fn watch_signals(shutdown: &CancellationToken) -> Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    let shutdown = shutdown.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        shutdown.cancel();
    });
    Ok(())
}

/// Routes changed, or links: a signal that coalesces.
fn watch_network() -> Result<Arc<tokio::sync::Notify>, netlink::NetlinkError> {
    let notify = Arc::new(tokio::sync::Notify::new());
    let sender = Arc::clone(&notify);
    netlink::watch::start(move || sender.notify_one())?;
    Ok(notify)
}
