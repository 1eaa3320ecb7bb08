//! The asking end: one workload against some addresses in turn, for a bounded time.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use clap::ValueEnum;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};

use super::{ECHO, MESSAGE, SINK};
use weir_bench::report::quantile;

/// What the client does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Workload {
    /// Connect, ask once, get the answer, close; some at a time.
    ShortTcp,
    /// One kept connection, one request at a time.
    Request,
    /// One connection that only sends.
    Stream,
    /// One connected UDP socket, one datagram at a time.
    UdpRequest,
}

/// What was seen after the warm-up. Times in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Seen {
    /// Connections, answers or bytes per second.
    pub(crate) rate: f64,
    /// Of one answer; zero where answers are not timed one by one.
    pub(crate) p50_s: f64,
    pub(crate) p99_s: f64,
}

impl Seen {
    /// The better figure of each kind.
    pub(crate) fn better(&self, other: &Self) -> Self {
        Self {
            rate: self.rate.max(other.rate),
            p50_s: self.p50_s.min(other.p50_s),
            p99_s: self.p99_s.min(other.p99_s),
        }
    }
}

/// Connections under way at one time.
const AT_ONCE: usize = 16;
/// Nothing takes longer than this on a path that works.
const PATIENCE: Duration = Duration::from_secs(1);
const CHUNK: usize = 128 << 10;
/// Answers timed at most.
const MAX_SAMPLES: usize = 1 << 20;

/// Runs a workload for `warm_up` uncounted, then for `time`.
///
/// # Errors
/// When anything fails to connect or to answer: a path under measurement loses nothing.
pub(crate) fn drive(
    workload: Workload,
    targets: &[SocketAddrV4],
    warm_up: Duration,
    time: Duration,
) -> Result<Seen> {
    ensure!(!targets.is_empty(), "no target was named");
    match workload {
        Workload::ShortTcp => short_tcp(targets, warm_up, time),
        Workload::Request => {
            let mut stream = connect(targets[0])?;
            stream.set_nonblocking(true)?;
            timed(warm_up, time, |message| ask(&mut stream, message))
        }
        Workload::Stream => send(connect(targets[0])?, warm_up, time),
        Workload::UdpRequest => {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            socket.connect(targets[0])?;
            socket.set_nonblocking(true)?;
            timed(warm_up, time, |message| exchange(&socket, message))
        }
    }
}

fn connect(target: SocketAddrV4) -> Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&target.into(), PATIENCE)
        .with_context(|| format!("connect to {target}"))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Asks again and again, and times each answer.
fn timed(
    warm_up: Duration,
    time: Duration,
    mut ask: impl FnMut(&mut [u8; MESSAGE]) -> Result<()>,
) -> Result<Seen> {
    let mut message = [ECHO; MESSAGE];
    let start = Instant::now();
    while start.elapsed() < warm_up {
        ask(&mut message)?;
    }
    let mut samples = Vec::with_capacity(MAX_SAMPLES.min(1 << 16));
    let start = Instant::now();
    let mut before = start;
    while before - start < time && samples.len() < MAX_SAMPLES {
        ask(&mut message)?;
        let now = Instant::now();
        samples.push((now - before).as_secs_f64());
        before = now;
    }
    let count = f64::from(u32::try_from(samples.len())?);
    Ok(Seen {
        rate: count / (before - start).as_secs_f64(),
        p50_s: quantile(&samples, 0.5).unwrap_or(0.0),
        p99_s: quantile(&samples, 0.99).unwrap_or(0.0),
    })
}

fn ask(stream: &mut TcpStream, message: &mut [u8; MESSAGE]) -> Result<()> {
    stream.write_all(message).context("send a request")?;
    let mut have = 0;
    let sent = Instant::now();
    while have < MESSAGE {
        match stream.read(&mut message[have..]) {
            Ok(0) => bail!("the server closed the connection"),
            Ok(length) => have += length,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                ensure!(sent.elapsed() < PATIENCE, "no answer within {PATIENCE:?}");
            }
            Err(error) => return Err(error).context("receive an answer"),
        }
    }
    Ok(())
}

fn exchange(socket: &UdpSocket, message: &mut [u8; MESSAGE]) -> Result<()> {
    socket.send(message).context("send a datagram")?;
    let sent = Instant::now();
    loop {
        match socket.recv(message) {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                ensure!(sent.elapsed() < PATIENCE, "no answer within {PATIENCE:?}");
            }
            Err(error) => return Err(error).context("receive a datagram"),
        }
    }
}

fn send(mut stream: TcpStream, warm_up: Duration, time: Duration) -> Result<Seen> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let chunk = vec![SINK; CHUNK];
    let start = Instant::now();
    while start.elapsed() < warm_up {
        stream.write_all(&chunk).context("send")?;
    }
    let start = Instant::now();
    let mut chunks = 0u32;
    while start.elapsed() < time {
        stream.write_all(&chunk).context("send")?;
        chunks += 1;
    }
    let bytes = f64::from(chunks) * f64::from(u32::try_from(CHUNK)?);
    Ok(Seen {
        rate: bytes / start.elapsed().as_secs_f64(),
        ..Seen::default()
    })
}

/// One connection of many short ones.
struct Short {
    socket: Socket,
    asked: bool,
}

struct ShortClient<'a> {
    epoll: OwnedFd,
    targets: &'a [SocketAddrV4],
    next: usize,
    done: u32,
}

fn short_tcp(targets: &[SocketAddrV4], warm_up: Duration, time: Duration) -> Result<Seen> {
    let mut client = ShortClient {
        epoll: epoll::create(CreateFlags::CLOEXEC)?,
        targets,
        next: 0,
        done: 0,
    };
    let mut connections: Vec<Short> = (0..AT_ONCE)
        .map(|place| client.open(place))
        .collect::<Result<_>>()?;
    let start = Instant::now();
    while start.elapsed() < warm_up {
        client.step(&mut connections)?;
    }
    client.done = 0;
    let start = Instant::now();
    while start.elapsed() < time {
        client.step(&mut connections)?;
    }
    Ok(Seen {
        rate: f64::from(client.done) / start.elapsed().as_secs_f64(),
        ..Seen::default()
    })
}

impl ShortClient<'_> {
    fn open(&mut self, place: usize) -> Result<Short> {
        let target = self.targets[self.next % self.targets.len()];
        self.next += 1;
        let socket = Socket::new(Domain::IPV4, Type::STREAM.nonblocking().cloexec(), None)?;
        match socket.connect(&target.into()) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(EINPROGRESS) => {}
            Err(error) => return Err(error).with_context(|| format!("connect to {target}")),
        }
        epoll::add(
            &self.epoll,
            &socket,
            EventData::new_u64(place as u64),
            EventFlags::OUT,
        )?;
        Ok(Short {
            socket,
            asked: false,
        })
    }

    fn step(&mut self, connections: &mut [Short]) -> Result<()> {
        let mut events: [std::mem::MaybeUninit<Event>; AT_ONCE] =
            [const { std::mem::MaybeUninit::uninit() }; AT_ONCE];
        let at_once = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let asked = Instant::now();
        // Waiting would put the CPU to sleep, and waking it costs more than a packet.
        let events = loop {
            let (ready, _) = epoll::wait(&self.epoll, &mut events, Some(&at_once))?;
            if !ready.is_empty() {
                break ready.to_vec();
            }
            ensure!(
                asked.elapsed() < PATIENCE,
                "no connection came or answered within {PATIENCE:?}"
            );
        };
        for event in events {
            let place = usize::try_from(event.data.u64())?;
            let connection = &mut connections[place];
            if connection.asked {
                let mut answer = [0; MESSAGE];
                let length = (&connection.socket)
                    .read(&mut answer)
                    .context("receive an answer")?;
                ensure!(length == MESSAGE, "an answer of {length} bytes");
                self.done += 1;
                connections[place] = self.open(place)?;
            } else {
                (&connection.socket)
                    .write_all(&[ECHO; MESSAGE])
                    .context("send a request")?;
                connection.asked = true;
                epoll::modify(
                    &self.epoll,
                    &connection.socket,
                    EventData::new_u64(place as u64),
                    EventFlags::IN,
                )?;
            }
        }
        Ok(())
    }
}

/// A connection that is on its way: `EINPROGRESS` of Linux.
const EINPROGRESS: i32 = 115;
