//! Servers of an actor: every listed port answers on both families.

use std::collections::HashSet;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::net::{
    IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket,
};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, SockaddrIn, SockaddrIn6, recvmsg, sendmsg,
    setsockopt, sockopt,
};
use socket2::{Domain, Protocol as Transport, Socket, Type};

use super::command::Protocol;
use super::lock;
use super::message::{Answer, REQUEST_HEAD, Request};

/// How often blocked servers look whether they are to end.
const LOOK_EVERY: Duration = Duration::from_millis(50);
const BACKLOG: i32 = 4096;
const BUFFER: usize = 1 << 16;

/// Tokens that the servers of one actor have seen.
#[derive(Debug, Default)]
pub(super) struct Seen(Mutex<HashSet<u64>>);

impl Seen {
    pub(super) fn insert(&self, token: u64) {
        lock(&self.0).insert(token);
    }

    pub(super) fn contains(&self, token: u64) -> bool {
        lock(&self.0).contains(&token)
    }
}

/// Everything that listens, until it is dropped.
#[derive(Debug, Default)]
pub(super) struct Servers {
    ended: Arc<AtomicBool>,
    connections: Arc<Mutex<Vec<TcpStream>>>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Servers {
    /// Opens one port on both families; returns when it listens.
    pub(super) fn listen(
        &mut self,
        protocol: Protocol,
        port: u16,
        name: &str,
        seen: &Arc<Seen>,
    ) -> std::io::Result<()> {
        for wildcard in [
            IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        ] {
            let address = SocketAddr::new(wildcard, port);
            let server = Server {
                name: name.to_owned(),
                seen: Arc::clone(seen),
                ended: Arc::clone(&self.ended),
            };
            match protocol {
                Protocol::Tcp | Protocol::Sctp => {
                    let listener = stream(address, protocol)?;
                    let connections = Arc::clone(&self.connections);
                    self.threads.push(std::thread::spawn(move || {
                        server.accept(&listener, &connections)
                    }));
                }
                Protocol::Udp => {
                    let socket = udp(address)?;
                    self.threads
                        .push(std::thread::spawn(move || server.datagrams(&socket, port)));
                }
                Protocol::Icmp => return Err(std::io::Error::other("nothing listens for ICMP")),
            }
        }
        Ok(())
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        for connection in lock(&self.connections).drain(..) {
            // It may have ended on its own.
            let _ended = connection.shutdown(Shutdown::Both);
        }
        for thread in self.threads.drain(..) {
            let _ended = thread.join();
        }
    }
}

fn bound(address: SocketAddr, kind: Type, transport: Transport) -> std::io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), kind, Some(transport))?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

fn stream(address: SocketAddr, protocol: Protocol) -> std::io::Result<TcpListener> {
    let transport = if protocol == Protocol::Sctp {
        Transport::SCTP
    } else {
        Transport::TCP
    };
    let socket = bound(address, Type::STREAM, transport)?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

fn udp(address: SocketAddr) -> std::io::Result<UdpSocket> {
    let socket = bound(address, Type::DGRAM, Transport::UDP)?;
    socket.set_read_timeout(Some(LOOK_EVERY))?;
    if address.is_ipv4() {
        setsockopt(&socket, sockopt::Ipv4PacketInfo, &true)?;
    } else {
        setsockopt(&socket, sockopt::Ipv6RecvPacketInfo, &true)?;
    }
    Ok(socket.into())
}

#[derive(Clone)]
struct Server {
    name: String,
    seen: Arc<Seen>,
    ended: Arc<AtomicBool>,
}

impl Server {
    fn ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    fn accept(&self, listener: &TcpListener, connections: &Mutex<Vec<TcpStream>>) {
        let wait = [nix::poll::PollFlags::POLLIN];
        while !self.ended() {
            let mut fds =
                wait.map(|w| nix::poll::PollFd::new(std::os::fd::AsFd::as_fd(listener), w));
            let timeout = nix::poll::PollTimeout::from(50_u8);
            let _ready = nix::poll::poll(&mut fds, timeout);
            while let Ok((stream, peer)) = listener.accept() {
                let server = self.clone();
                if let Ok(copy) = stream.try_clone() {
                    lock(connections).push(copy);
                }
                std::thread::spawn(move || {
                    // A client that goes away ends its connection; there is nobody to tell.
                    let _ended = server.connection(stream, peer);
                });
            }
        }
    }

    fn connection(&self, mut stream: TcpStream, peer: SocketAddr) -> std::io::Result<()> {
        stream.set_nonblocking(false)?;
        // SCTP has no such option.
        let _not_tcp = stream.set_nodelay(true);
        let local = stream.local_addr()?;
        let mut head = [0; REQUEST_HEAD];
        loop {
            stream.read_exact(&mut head)?;
            let request = Request::decode(&head).ok_or(std::io::ErrorKind::InvalidData)?;
            self.seen.insert(request.token);
            let rest = u64::try_from(request.length - REQUEST_HEAD).unwrap_or(0);
            std::io::copy(&mut (&mut stream).take(rest), &mut std::io::sink())?;
            std::thread::sleep(Duration::from_millis(request.answer_after_ms.into()));
            stream.write_all(&self.answer(local, peer).encode(&request))?;
            if request.server_closes {
                return stream.shutdown(Shutdown::Both);
            }
        }
    }

    fn answer(&self, local: SocketAddr, peer: SocketAddr) -> Answer {
        Answer {
            name: self.name.clone(),
            local: local.to_string(),
            peer: peer.to_string(),
        }
    }

    fn datagrams(&self, socket: &UdpSocket, port: u16) {
        let mut buffer = vec![0; BUFFER];
        while !self.ended() {
            let Some((length, peer, local)) = receive(socket, &mut buffer) else {
                continue;
            };
            let Some(request) = Request::decode(&buffer[..length]) else {
                continue;
            };
            self.seen.insert(request.token);
            let answer = self
                .answer(SocketAddr::new(local, port), peer)
                .encode(&request);
            if request.answer_after_ms == 0 {
                send_from(socket, local, peer, &answer);
            } else if let Ok(copy) = socket.try_clone() {
                std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_millis(request.answer_after_ms.into()));
                    send_from(&copy, local, peer, &answer);
                });
            }
        }
    }
}

/// A datagram with its sender and the address it was sent to.
fn receive(socket: &UdpSocket, buffer: &mut [u8]) -> Option<(usize, SocketAddr, IpAddr)> {
    let v4 = socket.local_addr().ok()?.is_ipv4();
    let fd = socket.as_raw_fd();
    let mut control = nix::cmsg_space!(nix::libc::in6_pktinfo, nix::libc::in_pktinfo);
    let mut slices = [IoSliceMut::new(buffer)];
    if v4 {
        let message =
            recvmsg::<SockaddrIn>(fd, &mut slices, Some(&mut control), MsgFlags::empty()).ok()?;
        let peer = message.address?;
        let to = message.cmsgs().ok()?.find_map(|c| match c {
            ControlMessageOwned::Ipv4PacketInfo(info) => {
                Some(Ipv4Addr::from(u32::from_be(info.ipi_addr.s_addr)))
            }
            _ => None,
        })?;
        Some((
            message.bytes,
            SocketAddr::new(peer.ip().into(), peer.port()),
            to.into(),
        ))
    } else {
        let message =
            recvmsg::<SockaddrIn6>(fd, &mut slices, Some(&mut control), MsgFlags::empty()).ok()?;
        let peer = message.address?;
        let to = message.cmsgs().ok()?.find_map(|c| match c {
            ControlMessageOwned::Ipv6PacketInfo(info) => {
                Some(Ipv6Addr::from(info.ipi6_addr.s6_addr))
            }
            _ => None,
        })?;
        Some((
            message.bytes,
            SocketAddr::new(peer.ip().into(), peer.port()),
            to.into(),
        ))
    }
}

/// Answers from the very address that was asked. A failure looks to the client like a lost datagram.
fn send_from(socket: &UdpSocket, local: IpAddr, peer: SocketAddr, bytes: &[u8]) {
    let slices = [IoSlice::new(bytes)];
    let fd = socket.as_raw_fd();
    match (local, peer) {
        (IpAddr::V4(local), SocketAddr::V4(peer)) => {
            let info = nix::libc::in_pktinfo {
                ipi_ifindex: 0,
                ipi_spec_dst: nix::libc::in_addr {
                    s_addr: u32::from(local).to_be(),
                },
                ipi_addr: nix::libc::in_addr { s_addr: 0 },
            };
            let control = [ControlMessage::Ipv4PacketInfo(&info)];
            let _lost = sendmsg(
                fd,
                &slices,
                &control,
                MsgFlags::empty(),
                Some(&SockaddrIn::from(peer)),
            );
        }
        (IpAddr::V6(local), SocketAddr::V6(peer)) => {
            let info = nix::libc::in6_pktinfo {
                ipi6_ifindex: 0,
                ipi6_addr: nix::libc::in6_addr {
                    s6_addr: local.octets(),
                },
            };
            let control = [ControlMessage::Ipv6PacketInfo(&info)];
            let _lost = sendmsg(
                fd,
                &slices,
                &control,
                MsgFlags::empty(),
                Some(&SockaddrIn6::from(peer)),
            );
        }
        _ => {}
    }
}
