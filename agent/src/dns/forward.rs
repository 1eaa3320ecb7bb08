//! Upstream servers of one directive: which is asked, which is down, how many questions are on their way.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hickory_proto::op::{Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::{Name, RecordType};
use rand::Rng as _;
use rand::seq::SliceRandom as _;
use tokio::sync::Semaphore;

use super::corefile::{Forward, Policy};
use super::exchange::{Connections, Dialer, Server, Way};
use super::metrics::Metrics;

/// Questions in flight where the configuration sets no limit; more are refused.
const MAX_CONCURRENT: usize = 10_000;
/// One try, while another server can still be asked.
const TRY_TIMEOUT: Duration = Duration::from_millis(800);
/// The last try.
const LAST_TRY_TIMEOUT: Duration = Duration::from_secs(2);
/// All tries for one question.
const ALL_TRIES: Duration = Duration::from_secs(5);
/// As CoreDNS and resolv.conf users expect; more are ignored.
pub(super) const MAX_UPSTREAMS: usize = 15;

/// No upstream server gave an answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum ForwardError {
    #[error("no upstream server is configured")]
    NoUpstream,
    #[error("more questions are in flight than max_concurrent")]
    Busy,
    #[error("every upstream server is down")]
    AllDown,
    #[error("the question cannot be encoded")]
    Encode,
    #[error("no upstream server answered; the last one tried, {server}, failed: {source}")]
    Failed {
        server: SocketAddr,
        source: std::io::Error,
    },
}

#[derive(Debug)]
pub(super) struct Upstream {
    pub(super) server: Server,
    idle: Connections,
    failures: AtomicU32,
    probing: AtomicBool,
    /// What is sent there comes back.
    loops: AtomicBool,
    /// It is known not to come back.
    leads_on: AtomicBool,
}

/// Forwards questions. The set of servers can be replaced while it runs.
#[derive(Debug)]
pub(super) struct Forwarder {
    pub(super) options: Forward,
    dialer: Dialer,
    upstreams: Mutex<Arc<[Arc<Upstream>]>>,
    next: AtomicUsize,
    permits: Semaphore,
    metrics: Arc<Metrics>,
}

impl Forwarder {
    pub(super) fn new(options: Forward, dialer: Dialer, metrics: Arc<Metrics>) -> Self {
        let permits = match options.max_concurrent {
            0 => MAX_CONCURRENT,
            limit => limit.min(Semaphore::MAX_PERMITS),
        };
        Self {
            options,
            dialer,
            upstreams: Mutex::new(Arc::new([])),
            next: AtomicUsize::new(0),
            permits: Semaphore::new(permits),
            metrics,
        }
    }

    /// Replaces the servers; those that stay keep what is known of them.
    pub(super) fn set_upstreams(&self, servers: Vec<Server>) {
        let mut upstreams = lock(&self.upstreams);
        let known = Arc::clone(&upstreams);
        let servers = servers.into_iter().take(MAX_UPSTREAMS);
        let kept = servers.map(|server| {
            let before = known.iter().find(|upstream| upstream.server == server);
            before.cloned().unwrap_or_else(|| {
                Arc::new(Upstream {
                    server,
                    idle: Connections::default(),
                    failures: AtomicU32::new(0),
                    probing: AtomicBool::new(false),
                    loops: AtomicBool::new(false),
                    leads_on: AtomicBool::new(false),
                })
            })
        });
        *upstreams = kept.collect();
    }

    pub(super) fn upstreams(&self) -> Arc<[Arc<Upstream>]> {
        Arc::clone(&lock(&self.upstreams))
    }

    /// Whether this directive is for a name.
    pub(super) fn takes(&self, name: &Name) -> bool {
        self.options.from.zone_of(name)
            && !self.options.except.iter().any(|zone| zone.zone_of(name))
    }

    /// The answer of a server to an encoded question. `tcp`: the client asks over TCP; `whole`: a cut answer is of no use.
    pub(super) async fn ask(
        &self,
        query: &[u8],
        tcp: bool,
        whole: bool,
    ) -> Result<Vec<u8>, ForwardError> {
        let Ok(_permit) = self.permits.try_acquire() else {
            self.metrics.forward_rejects.inc();
            return Err(ForwardError::Busy);
        };
        let way = match (self.options.force_tcp, tcp) {
            (true, _) => Way::Tcp,
            (false, true) if !self.options.prefer_udp => Way::Tcp,
            (false, true) => Way::UdpThenTcp,
            (false, false) if whole => Way::UdpThenTcp,
            (false, false) => Way::Udp,
        };
        let order = self.order()?;
        let end = Instant::now() + ALL_TRIES;
        let mut failed_answer = None;
        let mut last = (
            order[0].server.address,
            std::io::Error::from(std::io::ErrorKind::TimedOut),
        );
        for (tried, upstream) in order.iter().enumerate() {
            let more = order.get(tried + 1).is_some_and(|next| !self.is_down(next));
            let timeout = if more { TRY_TIMEOUT } else { LAST_TRY_TIMEOUT };
            let timeout = timeout.min(end.saturating_duration_since(Instant::now()));
            // Servers that are down are not waited for after one that has said something.
            if timeout.is_zero() || (failed_answer.is_some() && self.is_down(upstream)) {
                break;
            }
            match self.try_one(upstream, query, way, timeout).await {
                Ok(message) if self.fails_over(&message) => failed_answer = Some(message),
                Ok(message) => return Ok(message),
                Err(error) => last = (upstream.server.address, error),
            }
        }
        failed_answer.ok_or(ForwardError::Failed {
            server: last.0,
            source: last.1,
        })
    }

    fn fails_over(&self, message: &[u8]) -> bool {
        let mut codes = self.options.failover.iter();
        codes.any(|code| code.low() == rcode(message))
    }

    async fn try_one(
        &self,
        upstream: &Arc<Upstream>,
        query: &[u8],
        way: Way,
        timeout: Duration,
    ) -> std::io::Result<Vec<u8>> {
        let began = Instant::now();
        let exchange = self
            .dialer
            .exchange(&upstream.server, &upstream.idle, query, way);
        let answer = tokio::time::timeout(timeout, exchange).await;
        match answer.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into())) {
            Ok(message) => {
                upstream.failures.store(0, Ordering::Relaxed);
                let to = upstream.server.address;
                self.metrics.forwarded(to, rcode(&message), began.elapsed());
                Ok(message)
            }
            Err(error) => {
                self.metrics.forward_failed(upstream.server.address);
                upstream.failures.fetch_add(1, Ordering::Relaxed);
                if self.options.max_fails > 0 {
                    self.probe_until_up(upstream, way == Way::Tcp);
                }
                Err(error)
            }
        }
    }

    fn is_down(&self, upstream: &Upstream) -> bool {
        let failures = upstream.failures.load(Ordering::Relaxed);
        self.options.max_fails > 0 && failures >= self.options.max_fails
    }

    /// Servers in the order in which they are tried: by policy, those that are down last.
    fn order(&self) -> Result<Vec<Arc<Upstream>>, ForwardError> {
        let all = self.upstreams();
        let usable = all.iter().filter(|u| !u.loops.load(Ordering::Relaxed));
        let mut order: Vec<Arc<Upstream>> = usable.cloned().collect();
        if order.is_empty() {
            return Err(ForwardError::NoUpstream);
        }
        match self.options.policy {
            Policy::Sequential => {}
            Policy::Random => order.shuffle(&mut rand::rng()),
            Policy::RoundRobin => {
                let next = self.next.fetch_add(1, Ordering::Relaxed);
                let length = order.len();
                order.rotate_left(next % length);
            }
        }
        if order.iter().all(|upstream| self.is_down(upstream)) {
            self.metrics.health_broken.inc();
            if self.options.fail_fast {
                return Err(ForwardError::AllDown);
            }
            // Probing itself may be what fails: anybody may be up.
            order.shuffle(&mut rand::rng());
        }
        order.sort_by_key(|upstream| self.is_down(upstream));
        Ok(order)
    }

    /// Asks a server that failed until it answers again; at most one such task runs for a server.
    fn probe_until_up(&self, upstream: &Arc<Upstream>, tcp: bool) {
        if upstream.probing.swap(true, Ordering::Relaxed) {
            return;
        }
        // Ends by itself when the server is no longer configured: nobody else holds it then.
        let upstream = Arc::downgrade(upstream);
        let (dialer, metrics) = (self.dialer.clone(), Arc::clone(&self.metrics));
        let interval = self.options.health_check;
        let way = if tcp { Way::Tcp } else { Way::Udp };
        let probe = probe(
            &self.options.health_check_domain,
            self.options.health_check_recursion,
        );
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(interval).await;
                let Some(upstream) = upstream.upgrade() else {
                    return;
                };
                let exchange = dialer.exchange(&upstream.server, &upstream.idle, &probe, way);
                let answer = tokio::time::timeout(TRY_TIMEOUT, exchange).await;
                // Whatever it says: it answers.
                if matches!(answer, Ok(Ok(_))) {
                    upstream.failures.store(0, Ordering::Relaxed);
                    upstream.probing.store(false, Ordering::Relaxed);
                    return;
                }
                upstream.failures.fetch_add(1, Ordering::Relaxed);
                metrics.probe_failed(upstream.server.address);
            }
        });
    }

    /// Sends a question to one server, whatever is known of it; whether there was an answer.
    pub(super) async fn poke(&self, upstream: &Upstream, query: &[u8]) -> bool {
        let way = if self.options.force_tcp {
            Way::Tcp
        } else {
            Way::Udp
        };
        let exchange = self
            .dialer
            .exchange(&upstream.server, &upstream.idle, query, way);
        let answer = tokio::time::timeout(LAST_TRY_TIMEOUT, exchange).await;
        matches!(answer, Ok(Ok(_)))
    }
}

impl Upstream {
    /// Whether it is known that what is sent there does not come back.
    pub(super) fn leads_on(&self) -> bool {
        self.leads_on.load(Ordering::Relaxed)
    }

    /// Sets whether what is sent there comes back, and whether anything was heard at all; true when the first is news.
    pub(super) fn set_loops(&self, loops: bool, answered: bool) -> bool {
        self.leads_on.store(answered && !loops, Ordering::Relaxed);
        self.loops.swap(loops, Ordering::Relaxed) != loops
    }
}

/// A query for name servers: every recursive server answers it for the root.
fn probe(domain: &Name, recursion: bool) -> Vec<u8> {
    let mut message = Message::new(rand::rng().random(), MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = recursion;
    message.add_query(Query::query(domain.clone(), RecordType::NS));
    message.to_vec().unwrap_or_default()
}

/// The code of an answer.
pub(super) fn rcode(message: &[u8]) -> u8 {
    let failed = ResponseCode::ServFail.low();
    message.get(3).map_or(failed, |flags| flags & 0x0f)
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
