//! Clients of an actor: fresh sockets, kept sockets, and what became of each request.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use nix::libc;
use rustix::net::sockopt as options;
use socket2::{Domain, Protocol as Transport, Socket, Type};

use super::command::{Attempt, Close, Outcome, Probe, Protocol, Send, Size};
use super::message::{ANSWER_HEAD, Answer, Request};
use super::raw;

const MAX_DATAGRAM: usize = 65_507;
/// A lost SYN is sent again after a second (RFC 6298, section 2.1): answers that came earlier are not asked after.
const SENT_AGAIN_AFTER_MS: u64 = 950;
/// `dont_fragment`: the first only draws the ICMP error.
const DONT_FRAGMENT_TRIES: usize = 3;

/// A socket that a probe made.
#[derive(Debug)]
pub(super) enum Conn {
    Tcp(TcpStream),
    Udp(UdpSocket),
}

/// What a request wants to know of its answer.
#[derive(Clone, Copy, Debug)]
struct Ask {
    size: Size,
    timeout: Duration,
    request: Request,
    half_close: bool,
    dont_fragment: bool,
}

/// Runs a probe; the sockets that connected come back with the attempts.
pub(super) fn probe(probe: &Probe) -> (Vec<Attempt>, Vec<Conn>) {
    let sources: Vec<Option<IpAddr>> = if probe.from_ips.is_empty() {
        vec![None]
    } else {
        probe.from_ips.iter().copied().map(Some).collect()
    };
    if let (Some(fragments), Protocol::Udp) = (probe.fragments, probe.protocol) {
        return (raw::fragmented(probe, fragments), Vec::new());
    }
    let mut attempts = Vec::new();
    let mut kept = Vec::new();
    for source in sources {
        for _ in 0..probe.count {
            if !attempts.is_empty() && probe.interval_ms > 0 {
                std::thread::sleep(Duration::from_millis(probe.interval_ms));
            }
            let socket = attempts.len();
            let (attempt, conn) = one(probe, source);
            attempts.push(Attempt { socket, ..attempt });
            if hopeless(probe, &attempts) {
                return (attempts, kept);
            }
            if probe.keep.is_some() {
                kept.extend(conn);
            }
        }
    }
    (attempts, kept)
}

/// Nothing answers: the rest of a long probe would only take time.
fn hopeless(probe: &Probe, attempts: &[Attempt]) -> bool {
    let limit = probe.give_up_after;
    limit > 0
        && attempts.len() >= limit
        && attempts[attempts.len() - limit..]
            .iter()
            .all(|a| a.outcome != Outcome::Reply)
}

fn one(probe: &Probe, source: Option<IpAddr>) -> (Attempt, Option<Conn>) {
    let start = Instant::now();
    let timeout = Duration::from_millis(probe.timeout_ms);
    if probe.protocol == Protocol::Icmp {
        return (raw::echo(probe.to.ip(), source, timeout), None);
    }
    let mut conn = match connect(probe, source, timeout) {
        Ok(conn) => conn,
        Err(e) => return (failed(&e, start, None), None),
    };
    let ask = Ask {
        size: probe.size,
        timeout,
        request: Request {
            length: 0,
            token: probe.token,
            answer_size: probe.answer_size,
            answer_after_ms: probe.answer_after_ms,
            server_closes: probe.close == Close::Server,
        },
        half_close: probe.half_close,
        dont_fragment: probe.dont_fragment,
    };
    let attempt = exchange(&mut conn, &ask, start);
    match (probe.close, &mut conn) {
        (Close::Reset, Conn::Tcp(stream)) => {
            // Linger zero turns the close into a reset.
            let _plain_close = socket2::SockRef::from(&*stream).set_linger(Some(Duration::ZERO));
        }
        (Close::Server, Conn::Tcp(stream)) if attempt.outcome == Outcome::Reply => {
            // The server is first: its end has to arrive before this side closes.
            let _ended = stream.read(&mut [0; 1]);
        }
        _ => {}
    }
    (attempt, Some(conn))
}

/// A watch's sample on a socket of its own.
pub(super) fn sample(probe: &Probe) -> Attempt {
    let (attempt, conn) = open(probe);
    let resent = conn.map_or(0, |conn| resent(&conn, &attempt, 0));
    Attempt { resent, ..attempt }
}

/// Segments of a connection that its kernel sent again, where an answer was so late that there may be some; `known` until
/// then.
pub(super) fn resent(conn: &Conn, attempt: &Attempt, known: u32) -> u32 {
    let late = attempt.took_ms >= SENT_AGAIN_AFTER_MS;
    match (conn, source_of(conn)) {
        (Conn::Tcp(_), Some(own)) if late => told_resent(own.port()).unwrap_or(u32::MAX),
        _ => known,
    }
}

/// As `ss` prints it, summed up over connections from this port.
fn told_resent(port: u16) -> Option<u32> {
    let filter = format!("sport = :{port}");
    let output = std::process::Command::new("ss")
        .args(["--no-header", "--tcp", "--info", "--numeric", &filter])
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    let text = String::from_utf8_lossy(&output.stdout);
    let counts = text.split_whitespace().filter_map(|word| {
        word.strip_prefix("retrans:")?
            .split_once('/')?
            .1
            .parse()
            .ok()
    });
    Some(counts.fold(0, u32::saturating_add))
}

/// One more request on every kept socket, `count` times.
pub(super) fn send(conns: &mut [Conn], send: &Send) -> Vec<Attempt> {
    let ask = Ask {
        size: send.size,
        timeout: Duration::from_millis(send.timeout_ms),
        request: Request {
            length: 0,
            token: send.token,
            answer_size: send.answer_size,
            answer_after_ms: 0,
            server_closes: false,
        },
        half_close: false,
        dont_fragment: false,
    };
    let mut attempts = Vec::new();
    for _ in 0..send.count {
        for (socket, conn) in conns.iter_mut().enumerate() {
            attempts.push(Attempt {
                socket,
                ..exchange(conn, &ask, Instant::now())
            });
        }
    }
    attempts
}

/// Opens a socket as a probe would and asks once (used by a watch that keeps its socket).
pub(super) fn open(probe: &Probe) -> (Attempt, Option<Conn>) {
    one(probe, probe.from_ips.first().copied())
}

fn connect(probe: &Probe, source: Option<IpAddr>, timeout: Duration) -> std::io::Result<Conn> {
    let (kind, transport) = match probe.protocol {
        Protocol::Tcp => (Type::STREAM, Transport::TCP),
        Protocol::Sctp => (Type::STREAM, Transport::SCTP),
        _ => (Type::DGRAM, Transport::UDP),
    };
    let socket = Socket::new(Domain::for_address(probe.to), kind, Some(transport))?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    if source.is_some() || probe.from_port != 0 {
        let any: IpAddr = if probe.to.is_ipv4() {
            Ipv4Addr::UNSPECIFIED.into()
        } else {
            Ipv6Addr::UNSPECIFIED.into()
        };
        socket.bind(&SocketAddr::new(source.unwrap_or(any), probe.from_port).into())?;
    }
    if probe.dont_fragment {
        dont_fragment(&socket, probe.to.is_ipv4())?;
    }
    if matches!(probe.protocol, Protocol::Tcp | Protocol::Sctp) {
        socket.connect_timeout(&probe.to.into(), timeout)?;
        // SCTP has no such option.
        let _not_tcp = socket.set_tcp_nodelay(true);
        return Ok(Conn::Tcp(socket.into()));
    }
    socket.connect(&probe.to.into())?;
    Ok(Conn::Udp(socket.into()))
}

fn dont_fragment(socket: &Socket, v4: bool) -> std::io::Result<()> {
    if v4 {
        options::set_ip_mtu_discover(socket, options::Ipv4PathMtuDiscovery::DO)?;
    } else {
        options::set_ipv6_mtu_discover(socket, options::Ipv6PathMtuDiscovery::DO)?;
    }
    Ok(())
}

fn path_mtu(conn: &Conn) -> Option<u32> {
    let socket = match conn {
        Conn::Tcp(s) => socket2::SockRef::from(s),
        Conn::Udp(s) => socket2::SockRef::from(s),
    };
    let v4 = socket.local_addr().ok()?.is_ipv4();
    if v4 {
        options::ip_mtu(&*socket).ok()
    } else {
        options::ipv6_mtu(&*socket).ok()
    }
}

fn source_of(conn: &Conn) -> Option<SocketAddr> {
    match conn {
        Conn::Tcp(s) => s.local_addr().ok(),
        Conn::Udp(s) => s.local_addr().ok(),
    }
}

fn length(size: Size, conn: &Conn) -> usize {
    match size {
        Size::Bytes(n) => n,
        Size::Mtu(more) => {
            let mtu = usize::try_from(path_mtu(conn).unwrap_or(1500)).unwrap_or(1500);
            let v4 = source_of(conn).is_none_or(|s| s.is_ipv4());
            let headers =
                if v4 { 20 } else { 40 } + if matches!(conn, Conn::Udp(_)) { 8 } else { 20 };
            mtu.saturating_sub(headers) + more
        }
    }
}

fn exchange(conn: &mut Conn, ask: &Ask, start: Instant) -> Attempt {
    let request = Request {
        length: length(ask.size, conn),
        ..ask.request
    };
    let tries = if ask.dont_fragment {
        DONT_FRAGMENT_TRIES
    } else {
        1
    };
    let mut result = Err(std::io::Error::from(ErrorKind::TimedOut));
    for _ in 0..tries {
        result = match conn {
            Conn::Tcp(stream) => ask_stream(stream, &request, ask),
            Conn::Udp(socket) => ask_datagram(socket, &request, ask.timeout),
        };
        match &result {
            Err(e) if e.kind() == ErrorKind::TimedOut => {}
            _ => break,
        }
    }
    match result {
        Ok(answer) => Attempt {
            outcome: Outcome::Reply,
            answer: Some(answer),
            source: source_of(conn),
            socket: 0,
            took_ms: millis(start),
            mtu: path_mtu(conn),
            resent: 0,
            detail: String::new(),
        },
        Err(e) => Attempt {
            mtu: path_mtu(conn),
            ..failed(&e, start, source_of(conn))
        },
    }
}

fn ask_stream(stream: &mut TcpStream, request: &Request, ask: &Ask) -> std::io::Result<Answer> {
    let after = Duration::from_millis(request.answer_after_ms.into());
    stream.set_read_timeout(Some(ask.timeout + after))?;
    stream.set_write_timeout(Some(ask.timeout))?;
    stream.write_all(&request.encode())?;
    if ask.half_close {
        stream.shutdown(Shutdown::Write)?;
    }
    let mut bytes = vec![0; ANSWER_HEAD];
    read_all(stream, &mut bytes, 0)?;
    let length = Answer::length(&bytes).ok_or(ErrorKind::InvalidData)?;
    bytes.resize(length, 0);
    read_all(stream, &mut bytes, ANSWER_HEAD)?;
    Answer::decode(&bytes).ok_or_else(|| ErrorKind::InvalidData.into())
}

/// An end before the answer is complete tears the connection down as far as the client can tell.
fn read_all(stream: &mut TcpStream, bytes: &mut [u8], from: usize) -> std::io::Result<()> {
    stream
        .read_exact(&mut bytes[from..])
        .map_err(|e| match e.kind() {
            ErrorKind::UnexpectedEof => std::io::Error::from(ErrorKind::ConnectionReset),
            _ => e,
        })
}

fn ask_datagram(
    socket: &UdpSocket,
    request: &Request,
    timeout: Duration,
) -> std::io::Result<Answer> {
    let deadline = Instant::now() + timeout + Duration::from_millis(request.answer_after_ms.into());
    socket.send(&request.encode())?;
    let mut buffer = vec![0; MAX_DATAGRAM];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        socket.set_read_timeout(Some(left))?;
        match socket.recv(&mut buffer) {
            Ok(n) => {
                // Anything else is a late answer of another kind of peer.
                if let Some(answer) = Answer::decode(&buffer[..n]) {
                    return Ok(answer);
                }
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Err(ErrorKind::TimedOut.into()),
            Err(e) => return Err(e),
        }
    }
}

/// The attempt for an error.
pub(super) fn failed(e: &std::io::Error, start: Instant, source: Option<SocketAddr>) -> Attempt {
    let outcome = match (e.kind(), e.raw_os_error()) {
        (_, Some(libc::EMSGSIZE)) => Outcome::TooBig,
        (ErrorKind::ConnectionRefused, _) => Outcome::Refused,
        (ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted, _) => {
            Outcome::Reset
        }
        (ErrorKind::TimedOut | ErrorKind::WouldBlock, _) => Outcome::Timeout,
        _ => Outcome::Unreachable,
    };
    Attempt {
        outcome,
        answer: None,
        source,
        socket: 0,
        took_ms: millis(start),
        mtu: None,
        resent: 0,
        detail: e.to_string(),
    }
}

pub(super) fn millis(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX)
}
