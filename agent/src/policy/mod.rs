//! Enforces policies: keeps the maps equal to what is compiled of the desired state and of the pods that are attached, and
//! can say why a packet may pass or not.
//!
//! What the rules come to is decided in `compile`, the order of writes in `plan`. Here is who asks: the apply loop, CNI
//! requests, `weirctl`.

pub mod domains;
mod drops;
mod ends;
mod explain;
mod identities;
mod line_file;
mod programs;
mod report;
mod stats;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use control_api::desired::{Changes, DesiredState, Name};
use control_api::name_map::NameMap;
use control_api::v1::{Policy, PolicyPeer};

use crate::compile::policy::{
    Compiled, Compiler, DomainAnswers, Input, Limits, LocalPod, Locals, Mode, Packet, PodState,
    Shut, Touched,
};
use crate::kernel::{Kernel, KernelError, ObservedFlow};
use crate::plan::policy::{Operation, Planner, Present};
use crate::plan::services::Led;
use domains::{AddressesInUse, DomainFile, Domains};
pub use domains::{DOMAINS_NAME, watch as watch_domains};
use drops::Recent;
pub use drops::{Drop, Drops, watch as watch_drops};
pub use explain::{DirectionReport, Explanation};
pub use identities::IDENTITIES_NAME;
use identities::IdentityFile;
pub use programs::Enforced;
use report::Question;
pub use report::{
    DiffEntry, DiffReport, LearntReport, NameReport, PolicyList, PolicyReport, ShutReport,
};
pub use stats::{DropCounters, Stats};

/// More on disk than this many times what is in use is thrown away at start.
const IDENTITIES_KEPT: usize = 20_000;

/// The maps: a seam with three occupants (real, fake, faulty).
pub trait PolicyMaps: Send + Sync {
    /// What they hold.
    ///
    /// # Errors
    /// [`KernelError`] when a map cannot be read.
    fn read(&self) -> Result<Present, KernelError>;

    /// Carries operations out, in their order.
    ///
    /// # Errors
    /// [`KernelError`] when a map refuses a change; those before it are made.
    fn write(&self, operations: &[Operation]) -> Result<(), KernelError>;
}

impl PolicyMaps for Kernel {
    fn read(&self) -> Result<Present, KernelError> {
        self.read_policies()
    }

    fn write(&self, operations: &[Operation]) -> Result<(), KernelError> {
        self.write_policies(operations)
    }
}

/// Where packets lead by the service tables: a seam like [`PolicyMaps`].
pub trait ServiceTables {
    /// Where a new flow to a destination leads. `outside`: its client is not of the cluster.
    ///
    /// # Errors
    /// That what is in the tables is not known now.
    fn lead(&self, destination: SocketAddr, protocol: u8, outside: bool) -> Result<Led, String>;
}

impl ServiceTables for Kernel {
    fn lead(&self, destination: SocketAddr, protocol: u8, outside: bool) -> Result<Led, String> {
        self.lead(destination, protocol, outside).ok_or_else(|| {
            "what the service tables hold is not known now: try again in a second".into()
        })
    }
}

/// Policies could not be put in place.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    #[error(transparent)]
    Maps(#[from] KernelError),
    #[error("keep identities in {path}: {source}")]
    Identities {
        path: std::path::PathBuf,
        source: std::io::Error,
    },
    #[error("keep learnt addresses of domain names in {path}: {source}")]
    Domains {
        path: std::path::PathBuf,
        source: std::io::Error,
    },
}

/// Opens what an earlier agent learnt of domain names.
fn take_over_domains(domains: &Domains, state_dir: &Path) -> Result<DomainFile, PolicyError> {
    let opened = DomainFile::open(state_dir, &domains::boot_id());
    let (file, records) = opened.map_err(|source| PolicyError::Domains {
        path: state_dir.join(DOMAINS_NAME),
        source,
    })?;
    domains.load(records);
    Ok(file)
}

/// A pod that is shut, and why.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShutPod {
    pub name: Name,
    pub uid: String,
    pub why: Shut,
}

/// What one apply did.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// Writes to the maps.
    pub changed: usize,
    /// Pods that were not shut before.
    pub shut: Vec<ShutPod>,
}

/// Where this agent stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// The maps hold what an earlier agent was told, and what this one knows is older.
    Keeping,
    /// What is known is enforced.
    Enforcing,
}

struct Inner {
    stage: Stage,
    compiler: Compiler,
    /// None until the maps were read, and after a plan broke off.
    planner: Option<Planner>,
    file: IdentityFile,
    policies: NameMap<Policy>,
    peers: NameMap<PolicyPeer>,
    /// As the compiler has to know them.
    locals: Locals,
    /// Pods that an earlier agent attached, while nobody spoke of policies: they go on. And those that are open since the
    /// control plane does not speak of them.
    unspoken: BTreeMap<u32, LocalPod>,
    /// As the maps hold them.
    domains: Arc<DomainAnswers>,
    domain_file: DomainFile,
    /// The control plane does not speak of policies.
    untold: bool,
    /// Pods that this agent shut while it kept what is in the maps.
    newcomers: BTreeSet<u32>,
    told: BTreeSet<u32>,
    /// Flows were judged by what is in the maps now. Not known of those that an earlier agent left.
    judged: bool,
}

/// The policies of this node.
pub struct Enforcer {
    maps: Arc<dyn PolicyMaps>,
    inner: Mutex<Inner>,
    domains: Arc<Domains>,
    /// Something was put in place.
    changed: Condvar,
    stats: Stats,
    recent: Mutex<Recent>,
}

impl std::fmt::Debug for Enforcer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Enforcer").finish_non_exhaustive()
    }
}

impl Enforcer {
    /// Takes over what is in the maps. `state` is what the node was told last, as far as it is on disk; it counts where the
    /// maps hold nothing, which is after a start of the machine.
    ///
    /// # Errors
    /// [`PolicyError`] when the maps or the identities cannot be read.
    pub fn start(
        maps: Arc<dyn PolicyMaps>,
        state_dir: &Path,
        node_name: &str,
        state: &DesiredState,
        domains: Arc<Domains>,
    ) -> Result<Self, PolicyError> {
        let domain_file = take_over_domains(&domains, state_dir)?;
        domains.ask_for(state.policies.values());
        let failed = |source| PolicyError::Identities {
            path: state_dir.join(IDENTITIES_NAME),
            source,
        };
        let (mut file, mut records) = IdentityFile::open(state_dir).map_err(failed)?;
        let present = maps.read()?;
        let stage = if present.pods().is_empty() {
            Stage::Enforcing
        } else {
            Stage::Keeping
        };
        if records.len() > IDENTITIES_KEPT {
            let last = records.iter().map(|record| record.id).max();
            records.retain(|record| present.speaks_of(record.id) || Some(record.id) == last);
            file.rewrite(&records).map_err(failed)?;
        }
        let inner = Inner {
            stage,
            compiler: Compiler::new(Mode::Enforced, Limits::default(), &records),
            planner: Some(Planner::new(present)),
            file,
            policies: state.policies.clone(),
            peers: state.policy_peers.clone(),
            locals: Locals {
                node_name: node_name.into(),
                ..Locals::default()
            },
            unspoken: BTreeMap::new(),
            domains: domains.answers(),
            domain_file,
            untold: false,
            newcomers: BTreeSet::new(),
            told: BTreeSet::new(),
            judged: false,
        };
        let enforcer = Self {
            maps,
            inner: Mutex::new(inner),
            domains,
            changed: Condvar::new(),
            stats: Stats::default(),
            recent: Mutex::default(),
        };
        enforcer.update(&mut enforcer.lock(), &Changes::everything())?;
        Ok(enforcer)
    }

    /// What a panic of a holder left is compared with the maps by the next update.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[must_use]
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Makes the maps equal to what the desired state says. A control plane that does not speak of policies changes nothing
    /// of what is known, and leaves pods open of which nothing is.
    ///
    /// # Errors
    /// [`PolicyError`]; call again, with all that changed meanwhile.
    pub fn apply(&self, state: &DesiredState, changes: &Changes) -> Result<Report, PolicyError> {
        let mut inner = self.lock();
        if !state.config.policies {
            if !inner.untold {
                inner.untold = true;
                tracing::error!(
                    "the control plane does not speak of policies: what it told before goes on, pods that it never told of are open; upgrade it"
                );
            }
            return self.open_untold(&mut inner);
        }
        inner.untold = false;
        inner.policies = state.policies.clone();
        inner.peers = state.policy_peers.clone();
        let first = inner.stage == Stage::Keeping;
        inner.stage = Stage::Enforcing;
        if first || changes.everything || !changes.policies.is_empty() {
            self.domains.ask_for(inner.policies.values());
        }
        let everything = Changes::everything();
        self.update(&mut inner, if first { &everything } else { changes })
    }

    /// True while the maps hold what an earlier agent put there, and only newer word from the control plane may change it.
    #[must_use]
    pub fn is_keeping(&self) -> bool {
        self.lock().stage == Stage::Keeping
    }

    /// Addresses of the node itself.
    pub fn set_node_addresses(&self, addresses: BTreeSet<IpAddr>) {
        self.lock().locals.node_addresses = addresses;
    }

    /// A pod's link is about to get its programs.
    ///
    /// # Errors
    /// [`PolicyError`] when the maps do not take it.
    pub fn enter(&self, ifindex: u32, pod: &LocalPod) -> Result<(), PolicyError> {
        let mut inner = self.lock();
        let known = inner.locals.pods.get(&ifindex) == Some(pod)
            || inner.unspoken.get(&ifindex) == Some(pod);
        if known && inner.planner.is_some() {
            return Ok(());
        }
        inner.unspoken.remove(&ifindex);
        inner.locals.pods.insert(ifindex, pod.clone());
        if inner.stage == Stage::Keeping {
            self.shut_unknown(&mut inner, &[ifindex])?;
        } else {
            self.update(&mut inner, &Changes::default())?;
        }
        if inner.untold {
            self.open_untold(&mut inner)?;
        }
        Ok(())
    }

    /// As [`Self::enter`], of all pods that an earlier agent attached.
    ///
    /// # Errors
    /// [`PolicyError`] when the maps do not take them.
    pub fn adopt(&self, pods: Vec<(u32, LocalPod)>) -> Result<(), PolicyError> {
        let mut inner = self.lock();
        let indexes: Vec<u32> = pods.iter().map(|(ifindex, _)| *ifindex).collect();
        if inner.stage == Stage::Keeping {
            inner.locals.pods.extend(pods);
            return self.shut_unknown(&mut inner, &indexes);
        }
        if inner.peers.is_empty() {
            // The agent before knew nothing of policies.
            for (ifindex, pod) in pods {
                let open = LocalPod {
                    name: None,
                    ..pod.clone()
                };
                inner.locals.pods.insert(ifindex, open);
                inner.unspoken.insert(ifindex, pod);
            }
        } else {
            inner.locals.pods.extend(pods);
        }
        self.update(&mut inner, &Changes::default()).map(drop)
    }

    /// A pod's link has gone.
    ///
    /// # Errors
    /// [`PolicyError`] when the maps cannot be changed.
    pub fn leave(&self, ifindex: u32) -> Result<(), PolicyError> {
        let mut inner = self.lock();
        inner.unspoken.remove(&ifindex);
        inner.newcomers.remove(&ifindex);
        if inner.locals.pods.remove(&ifindex).is_none() || inner.stage == Stage::Keeping {
            return Ok(());
        }
        self.update(&mut inner, &Changes::default()).map(drop)
    }

    /// Waits until it is known and in place what applies to a pod.
    ///
    /// # Errors
    /// What is missing, after `patience`.
    pub fn wait(&self, ifindex: u32, patience: Duration) -> Result<(), String> {
        let deadline = Instant::now() + patience;
        let mut inner = self.lock();
        loop {
            let Some(missing) = inner.missing(ifindex) else {
                return Ok(());
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(missing);
            }
            let waited = self.changed.wait_timeout(inner, left);
            inner = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Shuts pods of which the maps say nothing.
    fn shut_unknown(&self, inner: &mut Inner, pods: &[u32]) -> Result<(), PolicyError> {
        let Some(planner) = &mut inner.planner else {
            return Ok(());
        };
        let operations = planner.shut_unknown(pods);
        self.maps.write(&operations)?;
        let shut = operations.iter().filter_map(|operation| match operation {
            Operation::PutPod(ifindex, _) => Some(*ifindex),
            _ => None,
        });
        inner.newcomers.extend(shut);
        Ok(())
    }

    /// Opens pods of which the control plane never spoke, since it does not speak of any.
    fn open_untold(&self, inner: &mut Inner) -> Result<Report, PolicyError> {
        if inner.stage == Stage::Keeping {
            let newcomers = std::mem::take(&mut inner.newcomers);
            if let Some(planner) = &mut inner.planner {
                self.maps.write(&planner.open(&newcomers))?;
            }
            inner.open(newcomers);
            self.open_told(inner);
            return Ok(Report::default());
        }
        let mut report = self.update(inner, &Changes::default())?;
        let compiled = inner.compiler.compiled();
        let unknown = |ifindex: &&u32| compiled.why_shut(**ifindex) == Some(&Shut::Unknown);
        let unknown: BTreeSet<u32> = inner.locals.pods.keys().filter(unknown).copied().collect();
        if !unknown.is_empty() {
            inner.open(unknown);
            report = self.update(inner, &Changes::default())?;
        }
        self.open_told(inner);
        Ok(report)
    }

    fn open_told(&self, inner: &Inner) {
        self.stats.untold(inner.unspoken.len());
        self.changed.notify_all();
    }

    fn update(&self, inner: &mut Inner, changes: &Changes) -> Result<Report, PolicyError> {
        if inner.stage == Stage::Keeping {
            return Ok(Report::default());
        }
        if !inner.untold && !inner.peers.is_empty() {
            self.stats.untold(0);
            let spoken = std::mem::take(&mut inner.unspoken);
            inner.locals.pods.extend(spoken);
        }
        let mut learnt = self.domains.snapshot();
        self.domains
            .write_fresh(&mut learnt, &mut inner.domain_file);
        inner.domains = learnt.answers();
        let started = Instant::now();
        let input = Input {
            policies: &inner.policies,
            peers: &inner.peers,
            locals: &inner.locals,
            domains: &inner.domains,
        };
        let mut touched = inner.compiler.update(&input, changes);
        self.stats.compiled(started.elapsed());
        let fresh = inner.compiler.take_fresh_identities();
        inner
            .file
            .add(&fresh)
            .map_err(|source| PolicyError::Identities {
                path: IDENTITIES_NAME.into(),
                source,
            })?;
        let mut planner = match inner.planner.take() {
            Some(planner) => planner,
            None => {
                inner.judged = false;
                touched = Touched {
                    everything: true,
                    ..Touched::default()
                };
                Planner::new(self.maps.read()?)
            }
        };
        let mut operations = planner.plan(inner.compiler.compiled(), &touched);
        if !inner.judged && !operations.contains(&Operation::NextGeneration) {
            operations.push(Operation::NextGeneration);
        }
        // The planner is dropped on the way out: the next update starts from the maps.
        self.maps.write(&operations)?;
        inner.judged = true;
        self.domains.placed(&learnt);
        let report = Report {
            changed: operations.len(),
            shut: inner.news(),
        };
        self.stats
            .programmed(inner.compiler.compiled(), &planner, inner.policies.len());
        inner.planner = Some(planner);
        self.changed.notify_all();
        Ok(report)
    }

    /// What is known of the names that rules speak of.
    #[must_use]
    pub fn domains(&self) -> &Arc<Domains> {
        &self.domains
    }

    /// Puts in place what was learnt of domain names since.
    ///
    /// # Errors
    /// [`PolicyError`]; call again.
    pub fn place_domains(&self) -> Result<(), PolicyError> {
        self.update(&mut self.lock(), &Changes::default()).map(drop)
    }

    /// Takes away addresses of domain names whose time is over, but for those that conversations use.
    ///
    /// # Errors
    /// [`PolicyError`]; call again.
    pub fn expire_domains(&self, flows: &dyn AddressesInUse) -> Result<(), PolicyError> {
        if self.is_keeping() {
            return Ok(());
        }
        let expired = self.domains.expired();
        let gone = !expired.is_empty() && self.domains.expire(&flows.in_use(&expired)?);
        let mut inner = self.lock();
        if gone {
            self.update(&mut inner, &Changes::default())?;
        }
        let file = &mut inner.domain_file;
        let done = self.domains.tidy_file(file);
        done.map_err(|source| file.failed(source))
    }

    /// Looks at the live state.
    pub fn with<T>(&self, look: impl FnOnce(&View<'_>) -> T) -> T {
        let inner = self.lock();
        look(&View {
            compiled: inner.compiler.compiled(),
            planner: inner.planner.as_ref(),
            policies: &inner.policies,
            peers: &inner.peers,
            locals: &inner.locals,
            domains: &inner.domains,
        })
    }
}

/// What `weirctl` asks.
impl Enforcer {
    fn recent(&self) -> MutexGuard<'_, Recent> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Explains the packets from one end to a port of another: one for each pair of addresses.
    ///
    /// # Errors
    /// What in the question is not known here.
    pub fn explain(
        &self,
        state: &DesiredState,
        services: &dyn ServiceTables,
        from: &str,
        to: &str,
    ) -> Result<Vec<Explanation>, String> {
        if self.is_keeping() {
            return Err("the control plane has not told this agent any policies yet: packets are judged as the agent before it was told".into());
        }
        self.with(|view| report::explain_all(view, state, services, from, to))
    }

    /// Policies, pods that are shut, and the last drops.
    #[must_use]
    pub fn list(&self) -> PolicyList {
        let mut list = self.with(report::list);
        let recent = self.recent();
        list.drops = recent.iter().map(|(_, drops)| drops.clone()).collect();
        list.untold_drops = recent.untold();
        list
    }

    /// What staged policies would change for these flows and for the packets that were dropped last.
    #[must_use]
    pub fn diff(&self, state: &DesiredState, flows: &[ObservedFlow]) -> DiffReport {
        let flows = flows.iter().map(|flow| Packet {
            source: flow.source,
            destination: flow.destination,
            protocol: flow.protocol,
            port: flow.port,
        });
        let dropped: Vec<Packet> = self.recent().iter().map(|(packet, _)| *packet).collect();
        let mut packets: Vec<Packet> = flows.chain(dropped).collect();
        packets.sort_unstable();
        packets.dedup();
        // Compiling takes its time: changes must not wait for it.
        let question = self.with(|view| Question::new(view, packets));
        report::diff(&question, state)
    }
}

/// The live state, for whoever explains it.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    pub compiled: &'a Compiled,
    pub planner: Option<&'a Planner>,
    pub policies: &'a NameMap<Policy>,
    pub peers: &'a NameMap<PolicyPeer>,
    pub locals: &'a Locals,
    pub domains: &'a DomainAnswers,
}

impl Inner {
    /// What a pod's policies still wait for.
    fn missing(&self, ifindex: u32) -> Option<String> {
        if self.untold && self.unspoken.contains_key(&ifindex) {
            return None;
        }
        if self.stage == Stage::Keeping {
            return Some("the control plane has not told this agent any policies yet".into());
        }
        if self.planner.is_none() {
            return Some("policies cannot be put in place".into());
        }
        match self.compiler.compiled().pods.get(&ifindex) {
            Some(PodState::Shut(why @ (Shut::Unknown | Shut::Missing(_)))) => Some(why.to_string()),
            Some(_) => None,
            None => Some("the pod is not attached".into()),
        }
    }

    /// These pods are nobody's that policies could be about.
    fn open(&mut self, pods: BTreeSet<u32>) {
        for ifindex in pods {
            let Some(pod) = self.locals.pods.get_mut(&ifindex) else {
                continue;
            };
            if let Some(name) = &pod.name {
                tracing::warn!(pod = %name, "open: the control plane does not speak of policies");
                self.unspoken.insert(ifindex, pod.clone());
                pod.name = None;
            }
        }
    }

    /// Pods that are shut and were not, of those that should not be for long.
    fn news(&mut self) -> Vec<ShutPod> {
        let compiled = self.compiler.compiled();
        let mut now = BTreeSet::new();
        let mut news = Vec::new();
        for (ifindex, pod) in &self.locals.pods {
            let (Some(why), Some(name)) = (compiled.why_shut(*ifindex), &pod.name) else {
                continue;
            };
            now.insert(*ifindex);
            // New pods are ahead of what the control plane tells of them.
            if !self.told.contains(ifindex) && *why != Shut::Unknown {
                tracing::warn!(pod = %name, %why, "nothing may pass to or from a pod");
                news.push(ShutPod {
                    name: name.clone(),
                    uid: pod.uid.clone(),
                    why: why.clone(),
                });
            }
        }
        self.told = now;
        news
    }
}
