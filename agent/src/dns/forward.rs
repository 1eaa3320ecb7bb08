//! Upstream servers: UDP with TCP where an answer is cut, health by failures, a small cache in front.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::Semaphore;

use super::cache::{Cache, Key};
use super::learn;
use super::message::{Request, Transport, question_end};
use super::metrics::Metrics;
use crate::compile::policy::Wanted;
use crate::policy::domains::Answer;

/// Questions in flight; more are refused.
const MAX_CONCURRENT: usize = 1000;
/// One try, while another server can still be asked.
const TRY_TIMEOUT: Duration = Duration::from_millis(800);
/// The last try.
const LAST_TRY_TIMEOUT: Duration = Duration::from_secs(2);
/// Failures in a row after which a server is asked last.
const FAILURES_UNTIL_DOWN: u32 = 2;
/// Pause between probes of a server that is down.
const PROBE_INTERVAL: Duration = Duration::from_millis(500);
/// The largest answer asked for is far smaller; some servers ignore the limit.
const RECEIVE_BYTES: usize = 4096;
/// As CoreDNS and resolv.conf users expect; more are ignored.
pub(super) const MAX_UPSTREAMS: usize = 15;

const RCODE_SERV_FAIL: u8 = 2;

/// A query for the root's name servers: every recursive server answers it.
const PROBE: [u8; 17] = [0x57, 0x45, 0x01, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 1];

/// No upstream server gave an answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum ForwardError {
    #[error("no upstream server is configured")]
    NoUpstream,
    #[error("more than {MAX_CONCURRENT} questions are in flight")]
    Busy,
    #[error("the question cannot be encoded")]
    Encode,
    #[error("no upstream server answered; the last one tried, {server}, failed: {source}")]
    Failed {
        server: SocketAddr,
        source: std::io::Error,
    },
}

#[derive(Debug)]
struct Upstream {
    address: SocketAddr,
    failures: AtomicU32,
    probing: AtomicBool,
}

impl Upstream {
    fn is_down(&self) -> bool {
        self.failures.load(Ordering::Relaxed) >= FAILURES_UNTIL_DOWN
    }
}

/// Forwards questions. The set of servers can be replaced while it runs.
#[derive(Debug)]
pub(super) struct Forwarder {
    upstreams: Mutex<Arc<[Arc<Upstream>]>>,
    next: AtomicUsize,
    permits: Semaphore,
    cache: Mutex<Cache>,
    metrics: Arc<Metrics>,
}

impl Forwarder {
    pub(super) fn new(upstreams: &[SocketAddr], metrics: Arc<Metrics>) -> Self {
        let forwarder = Self {
            upstreams: Mutex::new(Arc::new([])),
            next: AtomicUsize::new(0),
            permits: Semaphore::new(MAX_CONCURRENT),
            cache: Mutex::default(),
            metrics,
        };
        forwarder.set_upstreams(upstreams);
        forwarder
    }

    /// Replaces the servers; those that stay keep what is known of them.
    pub(super) fn set_upstreams(&self, addresses: &[SocketAddr]) {
        let mut upstreams = lock(&self.upstreams);
        let known = Arc::clone(&upstreams);
        *upstreams = addresses
            .iter()
            .take(MAX_UPSTREAMS)
            .map(|address| {
                known
                    .iter()
                    .find(|u| u.address == *address)
                    .cloned()
                    .unwrap_or_else(|| {
                        Arc::new(Upstream {
                            address: *address,
                            failures: AtomicU32::new(0),
                            probing: AtomicBool::new(false),
                        })
                    })
            })
            .collect();
    }

    pub(super) fn has_upstreams(&self) -> bool {
        !lock(&self.upstreams).is_empty()
    }

    pub(super) fn cache_entries(&self) -> usize {
        lock(&self.cache).len()
    }

    /// What the cache knows of the addresses of names that rules ask for.
    pub(super) fn remembered(&self, wanted: &Wanted) -> Vec<Answer> {
        let messages = lock(&self.cache).wanted(Instant::now(), |name| wanted.asks_for(name));
        let answers = messages.iter().filter_map(|message| learn::answer(message));
        answers.collect()
    }

    /// The upstream's message for a request, from the cache where it is fresh.
    pub(super) async fn ask(&self, request: &Request) -> Result<Vec<u8>, ForwardError> {
        let key = Key {
            name: request.name.to_lowercase().to_ascii(),
            record_type: request.record_type.into(),
            edns: request.has_edns() || !request.is_relay(),
            dnssec: request.wants_dnssec(),
            checking_disabled: request.checking_disabled(),
        };
        self.metrics.cache_requests.inc();
        if let Some(message) = lock(&self.cache).get(&key, Instant::now()) {
            self.metrics.cache_hits.inc();
            return Ok(message);
        }
        self.metrics.cache_misses.inc();
        let _permit = self.permits.try_acquire().map_err(|_| ForwardError::Busy)?;
        let query = request
            .upstream_query(rand::random())
            .ok_or(ForwardError::Encode)?;
        // A chain's rest has to be whole: its answer is put together here.
        let whole = request.transport() == Transport::Tcp || !request.is_relay();
        let message = self.ask_any(&query, whole).await?;
        lock(&self.cache).put(key, &message, Instant::now());
        Ok(message)
    }

    async fn ask_any(&self, query: &[u8], whole: bool) -> Result<Vec<u8>, ForwardError> {
        let upstreams = Arc::clone(&lock(&self.upstreams));
        if upstreams.is_empty() {
            return Err(ForwardError::NoUpstream);
        }
        let start = self.next.fetch_add(1, Ordering::Relaxed) % upstreams.len();
        let mut order: Vec<&Arc<Upstream>> = upstreams[start..]
            .iter()
            .chain(&upstreams[..start])
            .collect();
        order.sort_by_key(|upstream| upstream.is_down());
        let mut failed_answer = None;
        let mut last = (
            order[0].address,
            std::io::Error::from(std::io::ErrorKind::TimedOut),
        );
        for (tried, upstream) in order.iter().enumerate() {
            let more = order.get(tried + 1).is_some_and(|next| !next.is_down());
            let timeout = if more { TRY_TIMEOUT } else { LAST_TRY_TIMEOUT };
            let began = Instant::now();
            let answer =
                tokio::time::timeout(timeout, exchange(upstream.address, query, whole)).await;
            match answer.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into())) {
                Ok(message) => {
                    upstream.failures.store(0, Ordering::Relaxed);
                    self.metrics
                        .forwarded(upstream.address, rcode(&message), began.elapsed());
                    if rcode(&message) != RCODE_SERV_FAIL {
                        return Ok(message);
                    }
                    failed_answer = Some(message);
                }
                Err(error) => {
                    self.metrics.forward_failed(upstream.address);
                    if upstream.failures.fetch_add(1, Ordering::Relaxed) + 1 >= FAILURES_UNTIL_DOWN
                    {
                        probe_until_up(upstream);
                    }
                    last = (upstream.address, error);
                    // Servers that are down are not waited for after one that was not.
                    if tried + 1 < order.len()
                        && !more
                        && !upstream.is_down()
                        && failed_answer.is_some()
                    {
                        break;
                    }
                }
            }
        }
        failed_answer.ok_or(ForwardError::Failed {
            server: last.0,
            source: last.1,
        })
    }
}

fn rcode(message: &[u8]) -> u8 {
    message.get(3).map_or(RCODE_SERV_FAIL, |flags| flags & 0x0f)
}

/// Asks a server that is down until it answers again; at most one such task runs for a server.
fn probe_until_up(upstream: &Arc<Upstream>) {
    if upstream.probing.swap(true, Ordering::Relaxed) {
        return;
    }
    // Ends by itself when the server is no longer configured: nobody else holds it then.
    let upstream = Arc::downgrade(upstream);
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(PROBE_INTERVAL).await;
            let Some(upstream) = upstream.upgrade() else {
                return;
            };
            let answer = tokio::time::timeout(TRY_TIMEOUT, exchange_udp(upstream.address, &PROBE));
            if matches!(answer.await, Ok(Ok(_))) {
                upstream.failures.store(0, Ordering::Relaxed);
                upstream.probing.store(false, Ordering::Relaxed);
                return;
            }
        }
    });
}

async fn exchange(server: SocketAddr, query: &[u8], whole: bool) -> std::io::Result<Vec<u8>> {
    let message = exchange_udp(server, query).await?;
    let truncated = message.get(2).is_some_and(|flags| flags & 0x02 != 0);
    if truncated && whole {
        exchange_tcp(server, query).await
    } else {
        Ok(message)
    }
}

/// A socket of its own for every question: its port is as hard to guess as its id.
async fn exchange_udp(server: SocketAddr, query: &[u8]) -> std::io::Result<Vec<u8>> {
    let local: SocketAddr = if server.is_ipv4() {
        ([0, 0, 0, 0], 0).into()
    } else {
        ([0u16; 8], 0).into()
    };
    let socket = UdpSocket::bind(local).await?;
    socket.connect(server).await?;
    socket.send(query).await?;
    let mut buffer = vec![0; RECEIVE_BYTES];
    loop {
        let length = socket.recv(&mut buffer).await?;
        if answers(&buffer[..length], query) {
            buffer.truncate(length);
            return Ok(buffer);
        }
    }
}

async fn exchange_tcp(server: SocketAddr, query: &[u8]) -> std::io::Result<Vec<u8>> {
    let invalid = || std::io::Error::from(std::io::ErrorKind::InvalidData);
    let mut stream = TcpStream::connect(server).await?;
    let length = u16::try_from(query.len()).map_err(|_| invalid())?;
    let mut framed = length.to_be_bytes().to_vec();
    framed.extend_from_slice(query);
    stream.write_all(&framed).await?;
    let length = stream.read_u16().await?;
    let mut message = vec![0; length.into()];
    stream.read_exact(&mut message).await?;
    if answers(&message, query) {
        Ok(message)
    } else {
        Err(invalid())
    }
}

/// True for a response with the query's id and question.
fn answers(message: &[u8], query: &[u8]) -> bool {
    let Some(end) = question_end(query) else {
        return false;
    };
    let same_question = message
        .get(12..end)
        .zip(query.get(12..end))
        .is_some_and(|(a, b)| {
            // Lengths of labels are below 64, so ignoring case changes letters only.
            a.eq_ignore_ascii_case(b)
        });
    message.get(..2) == query.get(..2)
        && message.get(2).is_some_and(|flags| flags & 0x80 != 0)
        && same_question
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
