//! What pods of this node were told of the names that rules speak of.
//!
//! The DNS server hands every answer to [`Domains::learn`] before it sends it, and waits until the maps hold its addresses;
//! the [`Enforcer`](super::Enforcer) puts them there. An address is believed for the answer's time to live, and for as long
//! as conversations use it. What limits refuse, and what is not in place in time, is handed out all the same: names are
//! never withheld, and rules do not match an address before it is in the maps.

mod file;
mod stats;
#[cfg(test)]
mod tests;
mod watch;

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use control_api::v1::Policy;
use tokio::sync::{Notify, watch as channel};

use crate::compile::policy::{DomainAnswers, Wanted};
pub use file::DOMAINS_NAME;
pub(super) use file::DomainFile;
use file::Record;
pub use stats::DomainStats;
pub use watch::{AddressesInUse, watch};

/// An answer waits so long for the maps. Resolvers ask again after five seconds.
const PATIENCE: Duration = Duration::from_secs(2);
/// An answer that says more is believed for this long (RFC 8767, section 4).
const MOST_TTL_S: u32 = 604_800;
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// An answer with addresses.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Answer {
    /// What was asked for: lower case, without a closing dot.
    pub name: String,
    /// Those to which the answer leads from the name, over aliases.
    pub addresses: Vec<IpAddr>,
    /// The smallest on the way, in seconds.
    pub ttl_s: u32,
}

/// Addresses that are not in the maps yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pending(u64);

/// Answers that the DNS server remembers, of names that are wanted.
type Cache = Box<dyn Fn(&Wanted) -> Vec<Answer> + Send + Sync>;

/// Between the DNS server and whoever enforces policies.
pub struct Domains {
    least_ttl_s: u32,
    wanted: ArcSwap<Wanted>,
    known: Mutex<Known>,
    /// The version that the maps hold.
    placed: channel::Sender<u64>,
    /// Something is to be placed.
    work: Notify,
    cache: OnceLock<Cache>,
    stats: DomainStats,
}

#[derive(Debug, Default)]
struct Known {
    answers: Arc<DomainAnswers>,
    /// Counts new addresses.
    version: u64,
    /// Names with addresses that are not in the maps yet, and the version that has the last of them.
    unplaced: HashMap<String, u64>,
    /// Addresses that are not on disk yet.
    fresh: Vec<Record>,
    /// What is on disk says more, or less.
    stale: bool,
    /// Limits were spoken of in the log.
    complained: bool,
}

/// What is to be put in place.
#[derive(Debug)]
pub(super) struct Snapshot {
    answers: Arc<DomainAnswers>,
    version: u64,
    fresh: Vec<Record>,
}

impl Snapshot {
    pub(super) fn answers(&self) -> Arc<DomainAnswers> {
        Arc::clone(&self.answers)
    }
}

impl std::fmt::Debug for Domains {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Domains").finish_non_exhaustive()
    }
}

impl Default for Domains {
    fn default() -> Self {
        Self::new(&crate::config::Policy::default())
    }
}

impl Domains {
    /// Nothing wanted, nothing known.
    #[must_use]
    pub fn new(config: &crate::config::Policy) -> Self {
        Self {
            least_ttl_s: config.min_domain_ttl_s,
            wanted: ArcSwap::default(),
            known: Mutex::default(),
            placed: channel::Sender::new(0),
            work: Notify::new(),
            cache: OnceLock::new(),
            stats: DomainStats::default(),
        }
    }

    #[must_use]
    pub fn stats(&self) -> &DomainStats {
        &self.stats
    }

    /// What holds behind this lock is valid after any panic of a holder.
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the answers that the DNS server remembers count for rules that come later.
    pub fn set_cache(&self, cache: impl Fn(&Wanted) -> Vec<Answer> + Send + Sync + 'static) {
        let _only_once = self.cache.set(Box::new(cache));
    }

    /// The names that rules ask for now.
    #[must_use]
    pub fn wanted(&self) -> Arc<Wanted> {
        self.wanted.load_full()
    }

    /// Takes what policies ask for, and learns what the DNS server remembers of it.
    pub fn ask_for<'a>(&self, policies: impl IntoIterator<Item = &'a Policy>) {
        let wanted = Wanted::of(policies);
        if **self.wanted.load() == wanted {
            return;
        }
        // First: an answer that comes in meanwhile is either remembered by then, or learnt on its way out.
        self.wanted.store(Arc::new(wanted));
        let Some(cache) = self.cache.get() else {
            return;
        };
        for answer in cache(&self.wanted.load()) {
            self.learn(&answer);
        }
    }

    /// Learns an answer to a name that rules ask for. When the maps do not hold all of it yet, what to wait for.
    pub fn learn(&self, answer: &Answer) -> Option<Pending> {
        if !self.wanted.load().asks_for(&answer.name) {
            return None;
        }
        let until_us = now_us().saturating_add(self.lifetime_us(answer.ttl_s));
        let mut known = self.known();
        let lesson =
            Arc::make_mut(&mut known.answers).learn(&answer.name, &answer.addresses, until_us);
        known.stale |= lesson.extended;
        if let Some(limit) = lesson.limit {
            self.stats.refused(limit, lesson.refused);
            if !std::mem::replace(&mut known.complained, true) {
                tracing::warn!(name = %answer.name, refused = lesson.refused, %limit,
                    "addresses of a domain name do not fit: rules do not match them until others end");
            }
        }
        if !lesson.new.is_empty() {
            known.version += 1;
            let version = known.version;
            known.unplaced.insert(answer.name.clone(), version);
            known
                .fresh
                .extend(lesson.new.into_iter().map(|address| Record {
                    name: answer.name.clone(),
                    address,
                    until_us,
                }));
            self.work.notify_one();
        }
        known.unplaced.get(&answer.name).copied().map(Pending)
    }

    /// Waits until the maps hold what was learnt, but not for long.
    pub async fn wait(&self, pending: Pending) {
        self.wait_at_most(pending, PATIENCE).await;
    }

    async fn wait_at_most(&self, pending: Pending, patience: Duration) {
        let began = Instant::now();
        let mut placed = self.placed.subscribe();
        let held = placed.wait_for(|version| *version >= pending.0);
        match tokio::time::timeout(patience, held).await {
            Ok(_) => self.stats.waited(began.elapsed()),
            Err(_) => {
                self.stats.late();
                tracing::debug!(
                    "an answer goes out although policies do not know its addresses yet"
                );
            }
        }
    }

    fn lifetime_us(&self, ttl_s: u32) -> i64 {
        let seconds = ttl_s.min(MOST_TTL_S).max(self.least_ttl_s);
        i64::from(seconds) * 1_000_000
    }

    /// Takes what an earlier agent of this boot had learnt; the maps hold it. It may have been told of a longer life than it
    /// wrote down, so each address stays for a while.
    pub(super) fn load(&self, records: Vec<Record>) {
        let least_us = now_us().saturating_add(self.lifetime_us(0));
        let mut known = self.known();
        let answers = Arc::make_mut(&mut known.answers);
        for record in records {
            let until_us = record.until_us.max(least_us);
            answers.learn(&record.name, &[record.address], until_us);
        }
    }

    /// All that is known.
    pub(super) fn answers(&self) -> Arc<DomainAnswers> {
        Arc::clone(&self.known().answers)
    }

    /// What is to be put in place next.
    pub(super) fn snapshot(&self) -> Snapshot {
        let mut known = self.known();
        Snapshot {
            answers: Arc::clone(&known.answers),
            version: known.version,
            fresh: std::mem::take(&mut known.fresh),
        }
    }

    /// Writes down what is not on disk yet, before it is used. A disk that takes nothing keeps no policy from being enforced:
    /// what is missing there is written again later, and if the agent ends before, names have to be asked for again.
    pub(super) fn write_fresh(&self, snapshot: &mut Snapshot, file: &mut DomainFile) {
        let fresh = std::mem::take(&mut snapshot.fresh);
        if let Err(source) = file.add(&fresh) {
            let mut known = self.known();
            if !std::mem::replace(&mut known.stale, true) {
                let error = file.failed(source);
                tracing::error!(%error, "addresses of domain names do not outlive this agent; trying again");
            }
        }
    }

    /// The maps hold a snapshot.
    pub(super) fn placed(&self, snapshot: &Snapshot) {
        let mut known = self.known();
        known.unplaced.retain(|_, at| *at > snapshot.version);
        self.stats
            .known(known.answers.name_count(), known.answers.address_count());
        drop(known);
        self.placed.send_if_modified(|placed| {
            let more = snapshot.version > *placed;
            *placed = snapshot.version.max(*placed);
            more
        });
    }

    /// Addresses whose time is over.
    pub(super) fn expired(&self) -> HashSet<IpAddr> {
        self.known().answers.expired(now_us()).collect()
    }

    /// Forgets what is over and not among `in_use`. True when the maps hold too much now.
    pub(super) fn expire(&self, in_use: &HashSet<IpAddr>) -> bool {
        let (now_us, wanted) = (now_us(), self.wanted.load());
        let mut known = self.known();
        if !known.answers.has_expired(now_us) {
            return false;
        }
        // Names that no rule asks for any more are kept for their time, should a policy come back, but not longer.
        let stays =
            |name: &str, address: IpAddr| in_use.contains(&address) && wanted.asks_for(name);
        let gone = Arc::make_mut(&mut known.answers).expire(now_us, stays);
        known.stale |= gone;
        known.complained &= !gone;
        gone
    }

    /// Brings the file up to date when it says something else.
    pub(super) fn tidy_file(&self, file: &mut DomainFile) -> std::io::Result<()> {
        let answers = {
            let mut known = self.known();
            if !std::mem::take(&mut known.stale) {
                return Ok(());
            }
            Arc::clone(&known.answers)
        };
        let done = file.rewrite(&answers);
        if done.is_err() {
            self.known().stale = true;
        }
        done
    }
}

/// Microseconds since the machine started, time asleep included.
#[must_use]
pub(super) fn now_us() -> i64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME);
    now.map_or(0, |now| {
        let seconds = now.tv_sec().saturating_mul(1_000_000);
        seconds.saturating_add(now.tv_nsec() / 1_000)
    })
}

/// Which start of the machine this is; empty where the kernel does not say.
pub(super) fn boot_id() -> String {
    let text = std::fs::read_to_string(BOOT_ID).unwrap_or_default();
    text.trim().to_owned()
}
