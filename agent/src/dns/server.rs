//! The sockets: UDP and TCP on every address of the node.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use hickory_proto::op::ResponseCode;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;

use super::DnsError;
use super::forward::{ForwardError, Forwarder};
use super::message::{self, Request, Step, Transport};
use super::metrics::Metrics;
use super::zone::Zone;
use super::{learn, upstream};
use crate::config::Config;
use crate::policy::domains::{Domains, Pending};

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

/// What every socket's task shares.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) zone: Arc<RwLock<Zone>>,
    pub(super) forwarder: Forwarder,
    pub(super) metrics: Arc<Metrics>,
    pub(super) domains: Arc<Domains>,
    pub(super) rotation: AtomicUsize,
    pub(super) connections: Arc<Semaphore>,
}

impl Server {
    pub(super) fn new(
        zone: Arc<RwLock<Zone>>,
        forwarder: Forwarder,
        metrics: Arc<Metrics>,
        domains: Arc<Domains>,
    ) -> Self {
        Self {
            zone,
            forwarder,
            metrics,
            domains,
            rotation: AtomicUsize::new(0),
            connections: Arc::new(Semaphore::new(MAX_CONNECTIONS)),
        }
    }

    /// Takes the upstream servers of the configuration, without those that are this cluster's own.
    pub(super) fn find_upstreams(&self, config: &Config) {
        let cluster_dns = self
            .zone
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .dns_addresses();
        self.forwarder
            .set_upstreams(&upstream::discover(config, &cluster_dns));
    }

    fn handle(&self, packet: &[u8], transport: Transport, client: SocketAddr) -> Step {
        self.metrics.request(transport, client);
        let rotation = self.rotation.fetch_add(1, Ordering::Relaxed);
        let recursion = self.forwarder.has_upstreams();
        let zone = self.zone.read().unwrap_or_else(PoisonError::into_inner);
        message::handle(&zone, packet, transport, recursion, rotation)
    }

    async fn ask(&self, request: &Request) -> Vec<u8> {
        let answer = self.forwarder.ask(request).await;
        self.metrics
            .cache_entries
            .set(i64::try_from(self.forwarder.cache_entries()).unwrap_or(0));
        match answer {
            Ok(message) if request.is_relay() => request.relay(message),
            Ok(message) => request.finish(Some(&message)),
            Err(ForwardError::Busy) => request.fail(ResponseCode::Refused),
            Err(error) => {
                tracing::debug!(name = %request.name, %error, "forward a DNS question");
                if request.is_relay() {
                    request.fail(ResponseCode::ServFail)
                } else {
                    request.finish(None)
                }
            }
        }
    }

    /// Has an answer learnt when rules ask for its name. What it has to wait for.
    fn learn(&self, reply: &[u8]) -> Option<Pending> {
        let wanted = self.domains.wanted();
        if wanted.is_empty() || !wanted.asks_for(&learn::asked_name(reply)?) {
            return None;
        }
        self.domains.learn(&learn::answer(reply)?)
    }

    /// Learns an answer, and waits until policies know its addresses: the client may use them at once.
    async fn learnt(&self, reply: &[u8]) {
        if let Some(pending) = self.learn(reply) {
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
            match self.handle(&buffer[..length], Transport::Udp, client) {
                Step::Reply(reply) => match self.learn(&reply) {
                    None => {
                        self.metrics.response(&reply, began.elapsed());
                        send(&socket, &reply, client).await;
                    }
                    Some(pending) => {
                        let (server, socket) = (Arc::clone(&self), Arc::clone(&socket));
                        tokio::spawn(async move {
                            server.domains.wait(pending).await;
                            server.metrics.response(&reply, began.elapsed());
                            send(&socket, &reply, client).await;
                        });
                    }
                },
                Step::Drop => {
                    self.metrics.dropped.inc();
                }
                Step::Ask(request) => {
                    let (server, socket) = (Arc::clone(&self), Arc::clone(&socket));
                    tokio::spawn(async move {
                        let reply = server.ask(&request).await;
                        server.learnt(&reply).await;
                        server.metrics.response(&reply, began.elapsed());
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
            self.metrics.response(&reply, began.elapsed());
            let length = u16::try_from(reply.len()).unwrap_or_default();
            let mut framed = length.to_be_bytes().to_vec();
            framed.extend_from_slice(&reply);
            tokio::time::timeout(WRITE_TIMEOUT, stream.write_all(&framed)).await??;
        }
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
