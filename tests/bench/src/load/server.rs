//! The answering end: TCP and UDP on several ports of every address, one thread.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};

use super::SINK;

/// After this long without traffic the server sleeps until there is some.
const BUSY: Duration = Duration::from_millis(20);
/// Connections at one time; the next one is closed at once.
const MAX_CONNECTIONS: usize = 1_024;
const BACKLOG: i32 = 1_024;
const BUFFER: usize = 256 << 10;
const EVENTS: usize = 64;

/// What an event is about: the high half of its data; the low half is an index.
const LISTENER: u64 = 1 << 32;
const SOCKET: u64 = 2 << 32;
const CONNECTION: u64 = 3 << 32;
const OWNER: u64 = 4 << 32;

struct Connection {
    stream: TcpStream,
    /// `None` until the first byte says which.
    sink: Option<bool>,
}

struct Server {
    epoll: OwnedFd,
    listeners: Vec<TcpListener>,
    sockets: Vec<UdpSocket>,
    connections: Vec<Option<Connection>>,
    free: Vec<usize>,
    buffer: Vec<u8>,
}

/// Serves `count` ports from `first` on until standard input ends. Says `ready` once it listens.
#[allow(clippy::print_stdout, reason = "whoever started it waits for the word")]
pub(crate) fn serve(first: u16, count: u16) -> Result<()> {
    let mut server = Server::new(first, count)?;
    println!("ready");
    let mut events: Vec<Event> = Vec::with_capacity(EVENTS);
    let mut last = Instant::now();
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    loop {
        let timeout = (last.elapsed() < BUSY).then_some(&now);
        events.clear();
        match epoll::wait(
            &server.epoll,
            rustix::buffer::spare_capacity(&mut events),
            timeout,
        ) {
            Ok(0) | Err(rustix::io::Errno::INTR) => continue,
            Ok(_) => {}
            Err(error) => return Err(error).context("wait for traffic"),
        }
        last = Instant::now();
        for event in &events {
            let data = event.data.u64();
            let index = usize::try_from(data & u64::from(u32::MAX))?;
            match data & !u64::from(u32::MAX) {
                LISTENER => server.accept(index),
                SOCKET => server.answer(index),
                CONNECTION => server.talk(index),
                _ => return Ok(()),
            }
        }
    }
}

impl Server {
    fn new(first: u16, count: u16) -> Result<Self> {
        let mut server = Self {
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
            listeners: Vec::new(),
            sockets: Vec::new(),
            connections: Vec::new(),
            free: Vec::new(),
            buffer: vec![0; BUFFER],
        };
        for port in first..first + count {
            let address = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
            let listener = listen(address).with_context(|| format!("listen on {address}"))?;
            let data = LISTENER | server.listeners.len() as u64;
            epoll::add(
                &server.epoll,
                &listener,
                EventData::new_u64(data),
                EventFlags::IN,
            )?;
            server.listeners.push(listener);
            let socket = UdpSocket::bind(address).with_context(|| format!("bind {address}"))?;
            socket.set_nonblocking(true)?;
            let data = SOCKET | server.sockets.len() as u64;
            epoll::add(
                &server.epoll,
                &socket,
                EventData::new_u64(data),
                EventFlags::IN,
            )?;
            server.sockets.push(socket);
        }
        let owner = std::io::stdin();
        epoll::add(
            &server.epoll,
            owner,
            EventData::new_u64(OWNER),
            EventFlags::IN,
        )?;
        Ok(server)
    }

    fn accept(&mut self, index: usize) {
        while let Some(Ok((stream, _))) = self.listeners.get(index).map(TcpListener::accept) {
            let place = match self.free.pop() {
                Some(place) => place,
                None if self.connections.len() < MAX_CONNECTIONS => {
                    self.connections.push(None);
                    self.connections.len() - 1
                }
                None => continue,
            };
            let data = EventData::new_u64(CONNECTION | place as u64);
            // A connection that ended already is the client's to report.
            if stream.set_nonblocking(true).is_ok()
                && epoll::add(&self.epoll, &stream, data, EventFlags::IN).is_ok()
            {
                self.connections[place] = Some(Connection { stream, sink: None });
            } else {
                self.free.push(place);
            }
        }
    }

    fn answer(&mut self, index: usize) {
        let Some(socket) = self.sockets.get(index) else {
            return;
        };
        while let Ok((length, peer)) = socket.recv_from(&mut self.buffer) {
            // A client that is gone is no concern of the server.
            let _ = socket.send_to(&self.buffer[..length], peer);
        }
    }

    /// One read, and its answer; what is left comes with the next event.
    fn talk(&mut self, place: usize) {
        let Some(Some(connection)) = self.connections.get_mut(place) else {
            return;
        };
        let keep = match connection.stream.read(&mut self.buffer) {
            Ok(0) => false,
            Ok(length) => {
                let sink = *connection
                    .sink
                    .get_or_insert_with(|| self.buffer[0] == SINK);
                sink || connection.stream.write_all(&self.buffer[..length]).is_ok()
            }
            Err(error) => error.kind() == ErrorKind::WouldBlock,
        };
        if !keep {
            self.connections[place] = None;
            self.free.push(place);
        }
    }
}

fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}
