//! The sockets: UDP and TCP on every address of the node.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use hickory_proto::op::ResponseCode;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;

use arc_swap::ArcSwap;
use hickory_proto::rr::{Name, RecordType};

use super::DnsError;
use super::block::Blocks;
use super::forward::ForwardError;
use super::learn;
use super::log::{self, Exchange};
use super::lookup::Answer;
use super::loops::Loops;
use super::message::{self, Known, MAX_UDP_BYTES, Names, Request, Step, Transport};
use super::metrics::Metrics;
use super::rewrite;
use super::upstream::Surroundings;
use super::zone::Zone;
use crate::policy::domains::Domains;

/// The largest query taken by UDP; longer ones are cut by the kernel and answered with FORMERR.
const UDP_QUERY_BYTES: usize = 4096;
/// Open TCP connections of all clients; the next ones wait to be accepted.
const MAX_CONNECTIONS: usize = 256;
/// A connection without a complete query for this long is closed (RFC 7766, 6.2.3).
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// A client that does not take its answer in this time is cut off.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
const BACKLOG: i32 = 128;
/// Room in the kernel for a burst of queries while this process does something else.
const RECEIVE_BUFFER_BYTES: usize = 1 << 20;

/// Lines a second about questions that nobody answered.
const FAILURES_LOGGED: u64 = 10;

/// What every socket's task shares.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) zone: Arc<RwLock<Zone>>,
    pub(super) blocks: ArcSwap<Blocks>,
    pub(super) loops: Arc<Loops>,
    pub(super) metrics: Arc<Metrics>,
    domains: Arc<Domains>,
    /// When a failure was logged, and how many in that second.
    failures: AtomicU64,
    began: Instant,
    pub(super) rotation: AtomicUsize,
    pub(super) connections: Arc<Semaphore>,
}

impl Server {
    pub(super) fn new(
        zone: Arc<RwLock<Zone>>,
        blocks: Arc<Blocks>,
        loops: Arc<Loops>,
        metrics: Arc<Metrics>,
        domains: Arc<Domains>,
    ) -> Self {
        Self {
            zone,
            blocks: ArcSwap::new(blocks),
            loops,
            metrics,
            domains,
            failures: AtomicU64::new(0),
            began: Instant::now(),
            rotation: AtomicUsize::new(0),
            connections: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
        }
    }

    /// Finds the upstream servers again.
    pub(super) fn find_upstreams(&self, surroundings: &Surroundings) {
        self.blocks.load().find_upstreams(surroundings);
    }

    fn handle(&self, packet: &[u8], transport: Transport, client: SocketAddr) -> Step {
        self.metrics.request(transport, client);
        let names = Here {
            blocks: &self.blocks.load(),
            zone: &self.zone.read().unwrap_or_else(PoisonError::into_inner),
            loops: &self.loops,
            rotation: self.rotation.fetch_add(1, Ordering::Relaxed),
        };
        message::handle_by(&names, packet, transport)
    }

    async fn ask(&self, request: &Request) -> Vec<u8> {
        let blocks = self.blocks.load_full();
        let Some(block) = blocks.find(request.place()) else {
            return request.fail(ResponseCode::Refused);
        };
        if let Some(rest) = block.rest_of_chain(request) {
            return request.finish(Some(&rest));
        }
        let answer = block.ask(request).await;
        self.metrics.cached(blocks.cache_entries());
        match answer {
            Ok(message) if request.is_relay() => request.relay(message),
            Ok(message) => request.finish(Some(&message)),
            Err(ForwardError::Busy) => request.fail(ResponseCode::Refused),
            Err(error) => {
                if block.config.errors && self.may_log() {
                    tracing::warn!(name = %request.name, record_type = %request.record_type, %error, "a DNS question was not answered");
                } else {
                    tracing::debug!(name = %request.name, %error, "forward a DNS question");
                }
                if request.is_relay() {
                    request.fail(ResponseCode::ServFail)
                } else {
                    request.finish(None)
                }
            }
        }
    }

    /// At most [`FAILURES_LOGGED`] times a second.
    fn may_log(&self) -> bool {
        let second = self.began.elapsed().as_secs() << 8;
        let count = |last: u64| match last & !0xff == second {
            true if last & 0xff >= FAILURES_LOGGED => None,
            true => Some(last + 1),
            false => Some(second + 1),
        };
        let (set, get) = (Ordering::Relaxed, Ordering::Relaxed);
        self.failures.fetch_update(set, get, count).is_ok()
    }

    /// Counts and logs an answer that is about to be sent.
    fn answered(&self, exchange: &Exchange<'_>) {
        self.metrics.response(exchange.reply, exchange.took);
        let blocks = self.blocks.load();
        if !blocks.logs {
            return;
        }
        let name = hickory_proto::op::Message::from_vec(exchange.query)
            .ok()
            .and_then(|query| Some(query.queries.first()?.name().clone()));
        if let Some(block) = name.and_then(|name| blocks.find(&name)) {
            for line in log::lines(&block.config.log, exchange) {
                tracing::info!(target: "dns", "{line}");
            }
        }
    }

    /// Whether rules ask for the name of an answer.
    fn teaches(&self, reply: &[u8]) -> bool {
        let wanted = self.domains.wanted();
        !wanted.is_empty() && learn::asked_name(reply).is_some_and(|name| wanted.asks_for(&name))
    }

    /// Learns an answer when rules ask for its name, and waits until policies know its addresses: the client may use them
    /// at once.
    async fn learnt(&self, reply: &[u8]) {
        if self.teaches(reply)
            && let Some(answer) = learn::answer(reply)
            && let Some(pending) = self.domains.learn(&answer)
        {
            self.domains.wait(pending).await;
        }
    }

    pub(super) async fn udp(self: Arc<Self>, socket: UdpSocket) {
        let socket = Arc::new(socket);
        let mut buffer = vec![0; UDP_QUERY_BYTES];
        loop {
            let (length, client) = match socket.recv_from(&mut buffer).await {
                Ok(received) => received,
                // An ICMP error that an earlier answer met: the socket is as good as before.
                Err(error) => {
                    tracing::debug!(%error, "receive a DNS query");
                    tokio::task::yield_now().await;
                    continue;
                }
            };
            let began = Instant::now();
            let step = self.handle(&buffer[..length], Transport::Udp, client);
            match step {
                Step::Drop => {
                    self.metrics.dropped.inc();
                }
                Step::Reply(reply) if !self.teaches(&reply) => {
                    self.answered(&Exchange {
                        client,
                        transport: Transport::Udp,
                        query: &buffer[..length],
                        reply: &reply,
                        took: began.elapsed(),
                    });
                    send(&socket, &reply, client).await;
                }
                step => {
                    let (server, socket) = (Arc::clone(&self), Arc::clone(&socket));
                    let query = buffer[..length].to_vec();
                    tokio::spawn(async move {
                        let reply = match step {
                            Step::Ask(request) => server.ask(&request).await,
                            Step::Reply(reply) => reply,
                            Step::Drop => return,
                        };
                        server.learnt(&reply).await;
                        server.answered(&Exchange {
                            client,
                            transport: Transport::Udp,
                            query: &query,
                            reply: &reply,
                            took: began.elapsed(),
                        });
                        send(&socket, &reply, client).await;
                    });
                }
            }
        }
    }

    pub(super) async fn tcp(self: Arc<Self>, listener: TcpListener) {
        loop {
            let Ok(permit) = Arc::clone(&self.connections).acquire_owned().await else {
                return;
            };
            let (stream, client) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of descriptors, most likely: give the others time to end.
                    tracing::warn!(%error, "accept a DNS connection");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let server = Arc::clone(&self);
            tokio::spawn(async move {
                let _permit = permit;
                // The client went away or stalled: its connection ends, and that is all there is to do.
                let _ = server.connection(stream, client).await;
            });
        }
    }

    async fn connection(&self, mut stream: TcpStream, client: SocketAddr) -> std::io::Result<()> {
        loop {
            let query = match tokio::time::timeout(IDLE_TIMEOUT, read_query(&mut stream)).await {
                Ok(query) => query?,
                Err(_) => return Ok(()),
            };
            let began = Instant::now();
            let reply = match self.handle(&query, Transport::Tcp, client) {
                Step::Reply(reply) => reply,
                Step::Drop => {
                    self.metrics.dropped.inc();
                    return Ok(());
                }
                Step::Ask(request) => self.ask(&request).await,
            };
            self.learnt(&reply).await;
            self.answered(&Exchange {
                client,
                transport: Transport::Tcp,
                query: &query,
                reply: &reply,
                took: began.elapsed(),
            });
            let length = u16::try_from(reply.len()).unwrap_or_default();
            let mut framed = length.to_be_bytes().to_vec();
            framed.extend_from_slice(&reply);
            tokio::time::timeout(WRITE_TIMEOUT, stream.write_all(&framed)).await??;
        }
    }
}

/// All that is known of names here, at one moment.
struct Here<'a> {
    blocks: &'a Blocks,
    zone: &'a Zone,
    loops: &'a Loops,
    rotation: usize,
}

impl Names for Here<'_> {
    fn look_up(&self, name: &Name, record_type: RecordType) -> Known {
        let block = self.blocks.find(name);
        let answer = |rcode| {
            Some(Answer {
                rcode,
                ..Answer::default()
            })
        };
        let mut known = Known {
            answer: None,
            rewritten: None,
            cap: MAX_UDP_BYTES,
        };
        if self.loops.comes_back(name, record_type) {
            known.answer = answer(ResponseCode::Refused);
            return known;
        }
        let Some(block) = block else {
            return known;
        };
        known.cap = block.config.bufsize.unwrap_or(MAX_UDP_BYTES);
        known.rewritten = rewrite::apply(&block.config.rewrites, name, record_type);
        let (name, record_type) = match &known.rewritten {
            Some(rewritten) => (&rewritten.name, rewritten.record_type),
            None => (name, record_type),
        };
        known.answer = block.hosts(name, record_type);
        if known.answer.is_none() && block.config.kubernetes.is_some() {
            known.answer = self.zone.lookup(name, record_type, self.rotation);
        }
        known
    }

    fn can_ask(&self, place: &Name, name: &Name) -> bool {
        let block = self.blocks.find(place);
        block.is_some_and(|block| block.can_ask(name))
    }
}

async fn read_query(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let length = stream.read_u16().await?;
    let mut query = vec![0; length.into()];
    stream.read_exact(&mut query).await?;
    Ok(query)
}

async fn send(socket: &UdpSocket, reply: &[u8], client: SocketAddr) {
    if let Err(error) = socket.send_to(reply, client).await {
        tracing::debug!(%client, %error, "send a DNS answer");
    }
}

/// Both sockets of one address. The address may still be missing (IPv6 is tentative at boot).
pub(super) fn bind(address: SocketAddr) -> Result<(UdpSocket, TcpListener), DnsError> {
    let fail = |source| DnsError::Bind { address, source };
    let open = |kind: Type, protocol: Protocol| -> std::io::Result<Socket> {
        let socket = Socket::new(Domain::for_address(address), kind, Some(protocol))?;
        socket.set_nonblocking(true)?;
        if address.is_ipv4() {
            socket.set_freebind_v4(true)?;
        } else {
            socket.set_freebind_v6(true)?;
            socket.set_only_v6(true)?;
        }
        Ok(socket)
    };
    let udp = || -> std::io::Result<UdpSocket> {
        let socket = open(Type::DGRAM, Protocol::UDP)?;
        socket.set_recv_buffer_size(RECEIVE_BUFFER_BYTES)?;
        socket.bind(&address.into())?;
        UdpSocket::from_std(socket.into())
    };
    let udp = udp().map_err(fail)?;
    let address = udp.local_addr().map_err(fail)?;
    let tcp = || -> std::io::Result<TcpListener> {
        let socket = open(Type::STREAM, Protocol::TCP)?;
        socket.set_reuse_address(true)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        TcpListener::from_std(socket.into())
    };
    let tcp = tcp().map_err(fail)?;
    Ok((udp, tcp))
}
