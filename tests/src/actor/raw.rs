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
    for _ in 0..probe.count {
        let any: SocketAddr = if probe.to.is_ipv4() {
            ([0, 0, 0, 0], 0).into()
        } else {
            ([0_u16; 8], 0).into()
        };
        let socket = UdpSocket::bind(any)?;
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
    let wait = Duration::from_millis(probe.timeout_ms);
    let all = sockets.iter().enumerate();
    Ok(all
        .map(|(socket, s)| Attempt {
            socket,
            ..answer_on(s, wait, start)
        })
        .collect())
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

/// Sends one forged UDP packet that carries a token.
pub(super) fn forge(forged: &Forged) -> std::io::Result<()> {
    let request = Request {
        length: REQUEST_HEAD,
        token: forged.token,
        answer_size: 0,
        answer_after_ms: 0,
        server_closes: false,
    };
    let bytes = packet::udp_packet(forged.src, forged.dst, &request.encode());
    if let Some((outer, vni)) = forged.inside {
        let any: SocketAddr = if outer.is_ipv4() {
            ([0, 0, 0, 0], 0).into()
        } else {
            ([0_u16; 8], 0).into()
        };
        UdpSocket::bind(any)?.send_to(&packet::vxlan(&bytes, vni), outer)?;
        return Ok(());
    }
    let wire = raw_socket(forged.dst.is_ipv4())?;
    wire.send_to(&bytes, &SocketAddr::new(forged.dst.ip(), 0).into())?;
    Ok(())
}
