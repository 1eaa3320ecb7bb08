//! The apply loop: desired state in, kernel tables and routes made equal to it, revision acknowledged.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use control_api::desired::{Changes, DesiredState};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use weir_agent::cni_api::Attachments;
use weir_agent::compile::node_addresses::NodeAddresses;
use weir_agent::compile::peers::{self, Tunnels};
use weir_agent::compile::routes::{self, Compiled, Input, Problem};
use weir_agent::config::{Config, NodePortMode};
use weir_agent::feed::{FeedHandle, Origin, Update};
use weir_agent::health_check::{self, HealthServer, Listen, NodeHealth};
use weir_agent::kernel::{self, Kernel};
use weir_agent::netlink::link::Link;
use weir_agent::netlink::{Netlink, NetlinkError, sync};
use weir_agent::observe::Observe;
use weir_agent::policy::Enforcer;

use super::Readiness;
use super::base::{self, Base};
use super::refusals;

/// Changes of links and routes come in bursts; routes are compared once they are over.
const NETWORK_DEBOUNCE: Duration = Duration::from_millis(100);
/// Routes are compared this often even if nobody reports a change.
const ROUTE_PERIOD: Duration = Duration::from_secs(30);
/// First and longest pause before a failed apply is tried again.
const RETRY_FIRST: Duration = Duration::from_millis(250);
const RETRY_LONGEST: Duration = Duration::from_secs(10);
/// Present in the run directory, which a reboot empties, once services were programmed.
pub(super) const APPLIED_MARK: &str = "applied";

/// Owns the way from desired state to kernel.
pub(super) struct Applier {
    pub(super) config: Arc<Config>,
    pub(super) feed: FeedHandle,
    pub(super) kernel: Arc<Kernel>,
    pub(super) enforcer: Arc<Enforcer>,
    pub(super) attachments: Arc<Attachments>,
    pub(super) base: Arc<Base>,
    pub(super) readiness: watch::Sender<Readiness>,
    pub(super) observe: Observe,
    pub(super) health: HealthServer,
    pub(super) node_health: NodeHealth,
}

/// What is known between two passes.
struct Progress {
    /// Of the last update. The state itself is asked for when it is needed: as long as somebody holds it, every delta has
    /// to copy the whole. It may be newer than what `pending` tells, whose changes then come with the next update.
    revision: u64,
    origin: Origin,
    /// What the kernel tables have not been compared with yet; `None` when they are up to date.
    pending: Option<Changes>,
    /// The same of policies.
    policies_pending: Option<Changes>,
    /// Links, nodes or routes changed since routes were last compared without an error.
    routes_pending: bool,
    committed_at_us: Option<i64>,
    retry_after: Duration,
    retry_at: Option<tokio::time::Instant>,
    problems: BTreeSet<String>,
    /// Those of the node when routes were last compared.
    addresses: BTreeSet<IpAddr>,
    /// Revision and problem last acknowledged.
    told: Option<(u64, String)>,
}

/// What one pass over the routes found.
struct RoutePass {
    /// Of the node.
    addresses: BTreeSet<IpAddr>,
    errors: Vec<NetlinkError>,
    problems: Vec<Problem>,
}

impl Applier {
    pub(super) async fn run(self, shutdown: CancellationToken) {
        let network = match super::watch_network() {
            Ok(notify) => notify,
            Err(e) => {
                tracing::error!(error = %e, "route changes by others are noticed by periodic comparison only");
                Arc::default()
            }
        };
        let mut updates = self.feed.updates();
        let mut periodic = tokio::time::interval(ROUTE_PERIOD);
        let mut settled_at: Option<tokio::time::Instant> = None;
        let mut progress: Option<Progress> = None;
        loop {
            let retry_at = progress.as_ref().and_then(|p| p.retry_at);
            let mut network_changed = false;
            tokio::select! {
                () = shutdown.cancelled() => return,
                update = updates.next() => progress = Some(merge(progress, update)),
                // Services do not wait while links come and go.
                () = network.notified(), if settled_at.is_none() => {
                    settled_at = Some(tokio::time::Instant::now() + NETWORK_DEBOUNCE);
                    continue;
                }
                () = sleep_until(settled_at) => {
                    settled_at = None;
                    network_changed = true;
                }
                _ = periodic.tick() => network_changed = true,
                () = sleep_until(retry_at) => {}
            }
            if let Some(progress) = &mut progress {
                progress.routes_pending |= network_changed;
                self.pass(progress).await;
            }
        }
    }

    /// Addresses, then services: some of them depend on who has which address. Routes last: one may lead to an address
    /// that only services make sense of.
    async fn pass(&self, progress: &mut Progress) {
        let mut route_errors = if progress.routes_pending {
            self.apply_surroundings(progress).await
        } else {
            Vec::new()
        };
        // Before services: what may not pass must not be led anywhere.
        route_errors.extend(self.apply_policies(progress).await);
        let mut failures = self.apply_services(progress).await;
        let fatal = failures.is_err() || progress.policies_pending.is_some();
        if progress.routes_pending {
            route_errors.extend(self.apply_routes(progress).await);
        }
        if !fatal && route_errors.is_empty() {
            route_errors.extend(self.take_over(progress).await);
        }
        progress.routes_pending = !route_errors.is_empty();
        let list = failures
            .as_mut()
            .map_or_else(|e| vec![std::mem::take(e)], std::mem::take);
        let problem = list
            .into_iter()
            .chain(route_errors)
            .collect::<Vec<_>>()
            .join("; ");
        if fatal || !problem.is_empty() {
            progress.retry_at = Some(tokio::time::Instant::now() + progress.retry_after);
            progress.retry_after = (progress.retry_after * 2).min(RETRY_LONGEST);
        } else {
            progress.retry_at = None;
            progress.retry_after = RETRY_FIRST;
        }
        if progress.origin == Origin::Server {
            let told = (progress.revision, problem.clone());
            if progress.told.as_ref() != Some(&told) {
                self.feed
                    .ack(told.0, (!problem.is_empty()).then(|| problem.clone()));
                progress.told = Some(told);
            }
        }
        self.readiness.send_if_modified(|now| {
            let next = Readiness {
                programmed: now.programmed || (progress.origin == Origin::Server && !fatal),
                problem,
            };
            let changed = *now != next;
            *now = next;
            changed
        });
    }

    /// Makes what the dataplane knows of addresses equal to what is. Errors come with those of routes.
    async fn apply_surroundings(&self, progress: &mut Progress) -> Vec<String> {
        let (base, state) = (Arc::clone(&self.base), self.feed.state());
        let kernel = Arc::clone(&self.kernel);
        let work = tokio::task::spawn_blocking(move || {
            let addresses = base.set_surroundings(&mut Netlink::open()?, &state)?;
            let changed = kernel.set_node_addresses(addresses.clone());
            anyhow::Ok((addresses, changed))
        });
        match work.await {
            Ok(Ok((addresses, changed))) => {
                let own = addresses.own().map(|(address, _)| address);
                self.enforcer.set_node_addresses(own.collect());
                if changed {
                    // Host ports, balancer and external addresses follow from addresses of nodes.
                    progress.pending.get_or_insert_default();
                    self.health.set_listen(self.listen(&addresses)).await;
                }
                Vec::new()
            }
            Ok(Err(e)) => vec![crate::describe(&e)],
            Err(e) => vec![format!("compare addresses: {e}")],
        }
    }

    /// Health checks are where node ports are.
    fn listen(&self, addresses: &NodeAddresses) -> Listen {
        if self.config.dataplane.node_port_addresses.is_empty() {
            return Listen::Everywhere;
        }
        let serving = addresses.own().filter(|(_, serves)| *serves);
        Listen::On(serving.map(|(address, _)| address).collect())
    }

    /// Why policies could not be put in place, where they could not.
    async fn apply_policies(&self, progress: &mut Progress) -> Option<String> {
        let changes = progress.policies_pending.take()?;
        if progress.origin == Origin::Disk {
            // The maps hold what this run of the machine was told; after its start, they were filled from the disk already.
            return None;
        }
        let (enforcer, state) = (Arc::clone(&self.enforcer), self.feed.state());
        let work = tokio::task::spawn_blocking(move || {
            let started = Instant::now();
            let done = enforcer.apply(&state, &changes);
            (done, started.elapsed(), state)
        });
        let problem = match work.await {
            Ok((Ok(report), took, state)) => {
                tracing::debug!(
                    changed = report.changed,
                    took_us = took.as_micros(),
                    "policies applied"
                );
                refusals::tell_shut(&self.feed, &state, &report.shut);
                return None;
            }
            Ok((Err(e), ..)) => format!("apply policies: {e}"),
            Err(e) => format!("apply policies: {e}"),
        };
        tracing::error!(revision = progress.revision, %problem, "trying again");
        progress.policies_pending = Some(Changes::everything());
        Some(problem)
    }

    /// Services that do not fit in the kernel's tables, or why none could be programmed.
    async fn apply_services(&self, progress: &mut Progress) -> Result<Vec<String>, String> {
        let Some(changes) = progress.pending.take() else {
            return Ok(Vec::new());
        };
        let state = self.feed.state();
        let own = state.nodes.get(&self.config.node_name);
        self.node_health
            .set_leaving(own.is_some_and(|node| node.leaving));
        let health = health_check::wanted(&state, &changes, &self.config.node_name);
        if progress.origin == Origin::Disk && self.mark().exists() {
            // The kernel holds what this run of the machine was told, which is newer than the copy on disk.
            self.health.set_services(changes.everything, health).await;
            return Ok(Vec::new());
        }
        self.node_health.pending();
        let started = Instant::now();
        let kernel = Arc::clone(&self.kernel);
        let work = tokio::task::spawn_blocking(move || {
            let result = kernel.apply(&state, &changes);
            if changes.everything {
                kernel::give_back_memory();
            }
            (result, changes, state)
        });
        let (result, changes, state) = match work.await {
            Ok(done) => done,
            Err(e) => {
                progress.pending = Some(Changes::everything());
                return Err(format!("apply services: {e}"));
            }
        };
        match result {
            Ok(report) => {
                self.observe
                    .applied(progress.committed_at_us, started.elapsed(), report.changed);
                tracing::debug!(
                    revision = progress.revision,
                    changed = report.changed,
                    everything = changes.everything,
                    took_us = started.elapsed().as_micros(),
                    committed_at_us = progress.committed_at_us,
                    "services applied"
                );
                let mark = self.mark();
                // Once: a change must not wait for a disk.
                if !mark.exists()
                    && let Err(e) = std::fs::write(&mark, b"")
                {
                    tracing::warn!(path = %mark.display(), error = %e, "cannot write the mark");
                }
                progress.committed_at_us = None;
                progress.routes_pending |= report.addresses_changed;
                refusals::tell(&self.feed, &state, &report.news);
                self.health.set_services(changes.everything, health).await;
                self.node_health.programmed();
                if !report.retry {
                    return Ok(Vec::new());
                }
                progress.pending = Some(Changes::everything());
                Ok(report
                    .failed
                    .into_iter()
                    .map(|(port, why)| format!("{port}: {why}"))
                    .collect())
            }
            Err(e) => {
                progress.pending = Some(Changes::everything());
                tracing::error!(revision = progress.revision, error = %e, "apply services; trying again");
                Err(e.to_string())
            }
        }
    }

    async fn apply_routes(&self, progress: &mut Progress) -> Vec<String> {
        let (config, attachments) = (Arc::clone(&self.config), Arc::clone(&self.attachments));
        let (state, origin) = (self.feed.state(), progress.origin);
        let (base, kernel) = (Arc::clone(&self.base), Arc::clone(&self.kernel));
        let work = tokio::task::spawn_blocking(move || {
            let service_addresses = kernel.service_addresses();
            route_pass(
                &config,
                &attachments,
                &state,
                origin,
                &base,
                &service_addresses,
            )
        });
        let pass = match work.await {
            Ok(Ok(pass)) => pass,
            Ok(Err(e)) => return vec![crate::describe(&e)],
            Err(e) => return vec![format!("compare routes: {e}")],
        };
        let problems: BTreeSet<String> = pass.problems.iter().map(ToString::to_string).collect();
        for problem in problems.difference(&progress.problems) {
            tracing::warn!(%problem, "no route");
        }
        progress.problems = problems;
        if !progress.addresses.is_subset(&pass.addresses) {
            self.feed.reconnect();
        }
        progress.addresses = pass.addresses;
        pass.errors.iter().map(ToString::to_string).collect()
    }

    /// Puts this agent's programs in the place of those of another version, if there are any: the tables are filled. The
    /// copy on disk does not do: it may be older than what those enforce.
    async fn take_over(&self, progress: &Progress) -> Option<String> {
        if progress.origin == Origin::Disk || !self.kernel.is_taking_over() {
            return None;
        }
        let (config, kernel, base) = (
            Arc::clone(&self.config),
            Arc::clone(&self.kernel),
            Arc::clone(&self.base),
        );
        let work = tokio::task::spawn_blocking(move || {
            kernel.take_over()?;
            base.restore_all()?;
            super::translate_sockets(&config, &kernel)
        });
        match work.await {
            Ok(Ok(())) => {
                tracing::info!("took over from the programs of another version");
                None
            }
            Ok(Err(e)) => Some(crate::describe(&e)),
            Err(e) => Some(format!("take over: {e}")),
        }
    }

    fn mark(&self) -> PathBuf {
        self.config.run_dir.join(APPLIED_MARK)
    }
}

fn merge(progress: Option<Progress>, update: Update) -> Progress {
    let Update {
        state,
        changes,
        origin,
        committed_at_us,
    } = update;
    let Some(old) = progress else {
        // The first comparison is of everything: nobody knows what an earlier agent had done.
        return Progress {
            revision: state.revision,
            origin,
            pending: Some(Changes::everything()),
            policies_pending: Some(Changes::everything()),
            routes_pending: true,
            committed_at_us,
            retry_after: RETRY_FIRST,
            retry_at: None,
            problems: BTreeSet::new(),
            addresses: BTreeSet::new(),
            told: None,
        };
    };
    let routes_pending = old.routes_pending
        || old.origin != origin
        || changes.everything
        || changes.config
        || !changes.nodes.is_empty();
    let mut pending = old.pending.unwrap_or_default();
    let mut policies_pending = old.policies_pending.unwrap_or_default();
    if old.origin == origin {
        policies_pending.merge(changes.clone());
        pending.merge(changes);
    } else {
        policies_pending = Changes::everything();
        pending = Changes::everything();
    }
    Progress {
        revision: state.revision,
        origin,
        pending: Some(pending),
        policies_pending: Some(policies_pending),
        routes_pending,
        committed_at_us: old.committed_at_us.or(committed_at_us),
        retry_at: None,
        ..old
    }
}

async fn sleep_until(at: Option<tokio::time::Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

fn route_pass(
    config: &Config,
    attachments: &Attachments,
    state: &DesiredState,
    origin: Origin,
    base: &Base,
    service_addresses: &[IpAddr],
) -> anyhow::Result<RoutePass> {
    let mut netlink = Netlink::open()?;
    let links = base.restore(&mut netlink)?;
    let present = netlink.links()?;
    let addresses = base::addresses(&mut netlink)?;
    let node_ips = own_addresses(config, state, &addresses);
    let reach = sync::reach_of(
        &mut netlink,
        &peers::addresses(&config.node_name, &state.nodes),
        &present,
    )?;
    let pods = attachments.local_pods(&present);
    let Compiled {
        routes: wanted,
        tunnels,
        problems,
    } = routes::routes(&Input {
        node_name: &config.node_name,
        node_ips: &node_ips,
        nodes: &state.nodes,
        service_cidrs: &state.config.service_cidrs,
        service_addresses,
        host_link: links.host_link,
        overlay_link: links.overlay,
        pods: &pods,
        reach: &reach,
    });
    // Before the first packet that needs the room.
    adapt_mtu(
        config,
        attachments,
        base,
        &mut netlink,
        &present,
        links.uplink_mtu,
        &tunnels,
    )?;
    // An old copy of the state must not take routes away.
    let removals = match origin {
        Origin::Server => sync::Removals::Make,
        Origin::Disk => sync::Removals::Skip,
    };
    let done = sync::sync(&mut netlink, &wanted, removals)?;
    if done.changed > 0 {
        tracing::info!(
            changed = done.changed,
            routes = wanted.len(),
            "routes changed"
        );
    }
    for e in &done.errors {
        tracing::warn!(error = %e, "a route could not be changed; trying again");
    }
    Ok(RoutePass {
        addresses,
        errors: done.errors,
        problems,
    })
}

/// The addresses of this node as its Node object has them now, those of the configuration until the object is
/// known. Addresses that no link has are left out: the kernel would refuse them as sources.
fn own_addresses(config: &Config, state: &DesiredState, present: &BTreeSet<IpAddr>) -> Vec<IpAddr> {
    let told: Vec<IpAddr> = state
        .nodes
        .get(&config.node_name)
        .into_iter()
        .flat_map(|node| &node.internal_ips)
        .filter_map(|ip| ip.parse().ok())
        .collect();
    let known = if told.is_empty() {
        &config.node_ips
    } else {
        &told
    };
    known
        .iter()
        .copied()
        .filter(|ip| present.contains(ip))
        .collect()
}

/// Keeps pods and host link at the MTU that every path takes.
fn adapt_mtu(
    config: &Config,
    attachments: &Attachments,
    base: &Base,
    netlink: &mut Netlink,
    links: &[Link],
    uplink_mtu: u32,
    tunnels: &Tunnels,
) -> anyhow::Result<()> {
    let direct_return = config.dataplane.node_port_mode == NodePortMode::Dsr;
    let fits = peers::pod_mtu(uplink_mtu, tunnels, direct_return);
    let mtu = config.cni.mtu.unwrap_or(fits);
    let changed = attachments.set_mtu(netlink, links, mtu);
    if base.set_mtu(netlink, fits)? || changed > 0 {
        tracing::info!(mtu, pods = changed, "MTU changed");
    }
    Ok(())
}
