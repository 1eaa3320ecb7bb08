//! Raw sockets of an actor: echo requests, hand-made fragments, forged packets.

use std::io::{ErrorKind, Read};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol as Transport, Socket, Type};

use super::command::{Attempt, Forged, Fragments, Order, Outcome, Probe, Size};
use super::message::{Answer, REQUEST_HEAD, Request};
use super::packet;
use super::probe::{failed, millis};

const BUFFER: usize = 1 << 16;
/// A read needs some time, or it would wait for ever.
const AT_LEAST: Duration = Duration::from_millis(1);
const ECHO_REPLY_V4: u8 = 0;
const UNREACHABLE_V4: u8 = 3;
const ECHO_REPLY_V6: u8 = 129;
const UNREACHABLE_V6: u8 = 1;

/// Sends one echo request and waits for its reply or an error about it.
pub(super) fn echo(to: IpAddr, source: Option<IpAddr>, timeout: Duration) -> Attempt {
    let start = Instant::now();
    match try_echo(to, source, timeout, start) {
        Ok(outcome) => Attempt {
            outcome,
            answer: None,
            source: source.map(|s| SocketAddr::new(s, 0)),
            socket: 0,
            took_ms: millis(start),
            mtu: None,
            resent: 0,
            detail: String::new(),
        },
        Err(e) => failed(&e, start, None),
    }
}

fn try_echo(
    to: IpAddr,
    source: Option<IpAddr>,
    timeout: Duration,
    start: Instant,
) -> std::io::Result<Outcome> {
    let v4 = to.is_ipv4();
    let (domain, transport) = if v4 {
        (Domain::IPV4, Transport::ICMPV4)
    } else {
        (Domain::IPV6, Transport::ICMPV6)
    };
    let socket = Socket::new(domain, Type::RAW, Some(transport))?;
    if let Some(source) = source {
        socket.bind(&SocketAddr::new(source, 0).into())?;
    }
    let id: u16 = rand::random();
    socket.send_to(
        &packet::echo_request(v4, id, 1),
        &SocketAddr::new(to, 0).into(),
    )?;
    let mut buffer = vec![0; BUFFER];
    loop {
        let left = timeout.saturating_sub(start.elapsed());
        if left.is_zero() {
            return Ok(Outcome::Timeout);
        }
        socket.set_read_timeout(Some(left))?;
        let length = match (&socket).read(&mut buffer) {
            Ok(length) => length,
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(Outcome::Timeout),
            Err(e) => return Err(e),
        };
        let bytes = &buffer[..length];
        let message = if v4 {
            packet::icmp_of(bytes).map(|(_, m)| m)
        } else {
            Some(bytes)
        };
        if let Some(outcome) = message.and_then(|m| judge_icmp(m, v4, id)) {
            return Ok(outcome);
        }
    }
}

fn judge_icmp(message: &[u8], v4: bool, id: u16) -> Option<Outcome> {
    let (reply, unreachable) = if v4 {
        (ECHO_REPLY_V4, UNREACHABLE_V4)
    } else {
        (ECHO_REPLY_V6, UNREACHABLE_V6)
    };
    let kind = *message.first()?;
    if kind == reply {
        return (message.get(4..6)? == id.to_be_bytes()).then_some(Outcome::Reply);
    }
    if kind == unreachable {
        // The echo request that drew the error follows the error's head and an IP header.
        let inner = 8 + if v4 {
            usize::from(message.get(8)? & 0xf) * 4
        } else {
            40
        };
        return (message.get(inner + 4..inner + 6)? == id.to_be_bytes())
            .then_some(Outcome::Unreachable);
    }
    None
}

/// Sends every datagram of a probe in hand-made fragments; answers come back to ordinary sockets.
pub(super) fn fragmented(probe: &Probe, cut: Fragments) -> Vec<Attempt> {
    let start = Instant::now();
    match try_fragmented(probe, cut, start) {
        Ok(attempts) => attempts,
        Err(e) => vec![failed(&e, start, None)],
    }
}

fn try_fragmented(probe: &Probe, cut: Fragments, start: Instant) -> std::io::Result<Vec<Attempt>> {
    let size = match probe.size {
        Size::Bytes(n) | Size::Mtu(n) => n,
    };
    let request = Request {
        length: size.max(REQUEST_HEAD),
        token: probe.token,
        answer_size: probe.answer_size,
        answer_after_ms: probe.answer_after_ms,
        server_closes: false,
    };
    let payload = request.encode();
    let wire = raw_socket(probe.to.is_ipv4())?;
    let mut sockets = Vec::new();
    let mut trains = Vec::new();
    for own in sources(probe) {
        let socket = UdpSocket::bind(own)?;
        socket.connect(probe.to)?;
        let mut train = packet::fragments(
            socket.local_addr()?,
            probe.to,
            &payload,
            cut.size,
            rand::random(),
        );
        if cut.order == Order::Reverse {
            train.reverse();
        }
        sockets.push(socket);
        trains.push(train);
    }
    for fragment in schedule(trains, cut.order) {
        wire.send_to(&fragment, &SocketAddr::new(probe.to.ip(), 0).into())?;
        std::thread::sleep(Duration::from_millis(cut.gap_ms));
    }
    // Answers wait in their sockets: one limit serves them all.
    let after = Duration::from_millis(probe.timeout_ms + u64::from(probe.answer_after_ms));
    let deadline = Instant::now() + after;
    let all = sockets.iter().enumerate();
    Ok(all
        .map(|(socket, s)| {
            let left = deadline.saturating_duration_since(Instant::now());
            Attempt {
                socket,
                ..answer_on(s, left.max(AT_LEAST), start)
            }
        })
        .collect())
}

/// Where each datagram's socket is bound.
fn sources(probe: &Probe) -> Vec<SocketAddr> {
    let one = |ip| std::iter::repeat_n(ip, probe.count);
    if probe.from_ips.is_empty() {
        return one(any(probe.to.is_ipv4(), probe.from_port)).collect();
    }
    let own = probe.from_ips.iter();
    own.flat_map(|ip| one(SocketAddr::new(*ip, probe.from_port)))
        .collect()
}

/// The order on the wire: train by train, or the fragments of all trains in turn.
fn schedule(trains: Vec<Vec<Vec<u8>>>, order: Order) -> Vec<Vec<u8>> {
    if order != Order::Interleave {
        return trains.into_iter().flatten().collect();
    }
    let longest = trains.iter().map(Vec::len).max().unwrap_or(0);
    (0..longest)
        .flat_map(|i| trains.iter().filter_map(move |t| t.get(i).cloned()))
        .collect()
}

fn answer_on(socket: &UdpSocket, timeout: Duration, start: Instant) -> Attempt {
    let mut buffer = vec![0; BUFFER];
    let received = socket
        .set_read_timeout(Some(timeout))
        .and_then(|()| socket.recv(&mut buffer));
    let source = socket.local_addr().ok();
    match received
        .and_then(|n| Answer::decode(&buffer[..n]).ok_or_else(|| ErrorKind::InvalidData.into()))
    {
        Ok(answer) => Attempt {
            outcome: Outcome::Reply,
            answer: Some(answer),
            source,
            socket: 0,
            took_ms: millis(start),
            mtu: None,
            resent: 0,
            detail: String::new(),
        },
        Err(e) => failed(&e, start, source),
    }
}

fn raw_socket(v4: bool) -> std::io::Result<Socket> {
    let domain = if v4 { Domain::IPV4 } else { Domain::IPV6 };
    // IPPROTO_RAW: the packet brings its own IP header, on both families.
    Socket::new(
        domain,
        Type::RAW,
        Some(Transport::from(nix::libc::IPPROTO_RAW)),
    )
}

/// Sends one forged packet.
pub(super) fn forge(forged: &Forged) -> std::io::Result<()> {
    if let Some(outer) = forged.inside {
        UdpSocket::bind(any(outer.is_ipv4(), 0))?.send_to(&forged.packet, outer)?;
        return Ok(());
    }
    let wire = raw_socket(forged.to.is_ipv4())?;
    wire.send_to(&forged.packet, &SocketAddr::new(forged.to, 0).into())?;
    Ok(())
}

fn any(v4: bool, port: u16) -> SocketAddr {
    if v4 {
        ([0, 0, 0, 0], port).into()
    } else {
        ([0_u16; 8], port).into()
    }
}
