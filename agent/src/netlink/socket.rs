//! One rtnetlink socket: requests with acknowledgement, and dumps.

use std::io;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage,
    NetlinkPayload,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

use super::NetlinkError;

/// How often a dump that the kernel calls inconsistent (state changed meanwhile) is taken again.
const DUMP_ATTEMPTS: usize = 8;

/// Bytes of the receive buffer: dumps of thousands of routes come in bursts.
const RECEIVE_BUFFER_BYTES: usize = 1024 * 1024;

/// An rtnetlink socket. It stays in the network namespace of the thread that opened it.
#[derive(Debug)]
pub struct Netlink {
    socket: Socket,
    sequence: u32,
}

impl Netlink {
    /// Opens a socket in the calling thread's network namespace.
    ///
    /// # Errors
    /// [`NetlinkError`] when the kernel refuses.
    pub fn open() -> Result<Self, NetlinkError> {
        let open = || -> io::Result<Socket> {
            let mut socket = Socket::new(NETLINK_ROUTE)?;
            socket.set_rx_buf_sz(RECEIVE_BUFFER_BYTES)?;
            socket.bind_auto()?;
            socket.connect(&SocketAddr::new(0, 0))?;
            Ok(socket)
        };
        let socket = open().map_err(|e| NetlinkError::new("open rtnetlink socket", e))?;
        Ok(Self {
            socket,
            sequence: 0,
        })
    }

    /// Sends a change and waits for the kernel's acknowledgement.
    pub(super) fn change(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.send(message, NLM_F_REQUEST | NLM_F_ACK | flags)?;
        self.receive(|_| {}).map(|_| ())
    }

    /// Sends a query for one object and returns the kernel's answer.
    pub(super) fn get(&mut self, message: RouteNetlinkMessage) -> io::Result<RouteNetlinkMessage> {
        self.send(message, NLM_F_REQUEST | NLM_F_ACK)?;
        let mut answer = None;
        self.receive(|m| answer = Some(m))?;
        answer.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// All objects of a kind, from one consistent dump.
    pub(super) fn dump(
        &mut self,
        message: &RouteNetlinkMessage,
    ) -> io::Result<Vec<RouteNetlinkMessage>> {
        for _ in 0..DUMP_ATTEMPTS {
            self.send(message.clone(), NLM_F_REQUEST | NLM_F_DUMP)?;
            let mut objects = Vec::new();
            let interrupted = self.receive(|m| objects.push(m))?;
            if !interrupted {
                return Ok(objects);
            }
        }
        Err(io::Error::other(
            "kernel state kept changing while it was listed",
        ))
    }

    fn send(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = flags;
        header.sequence_number = self.sequence;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(message));
        message.finalize();
        let mut buffer = vec![0; message.buffer_len()];
        message.serialize(&mut buffer);
        self.socket.send(&buffer, 0).map(|_| ())
    }

    /// Reads up to the acknowledgement or the end of a dump. True when the kernel flags the dump as inconsistent.
    fn receive(&mut self, mut each: impl FnMut(RouteNetlinkMessage)) -> io::Result<bool> {
        let mut interrupted = false;
        loop {
            let (buffer, _) = self.socket.recv_from_full()?;
            let mut rest = buffer.as_slice();
            while rest.len() >= HEADER_BYTES {
                let (length, sequence) = peek(rest);
                if length < HEADER_BYTES || length > rest.len() {
                    return Err(io::Error::other("truncated netlink message"));
                }
                let (one, tail) = rest.split_at(length);
                rest = tail.get(align(length) - length..).unwrap_or_default();
                // What is left of a request that was given up.
                if sequence != self.sequence {
                    continue;
                }
                // A kind of object that the decoder does not know is none of ours.
                let Ok(message) = NetlinkMessage::<RouteNetlinkMessage>::deserialize(one) else {
                    continue;
                };
                interrupted |= message.header.flags & NLM_F_DUMP_INTR != 0;
                match message.payload {
                    NetlinkPayload::InnerMessage(inner) => each(inner),
                    NetlinkPayload::Done(_) => return Ok(interrupted),
                    NetlinkPayload::Error(e) if e.code.is_none() => return Ok(interrupted),
                    NetlinkPayload::Error(e) => {
                        return Err(io::Error::from_raw_os_error(e.raw_code().saturating_abs()));
                    }
                    _ => {}
                }
            }
        }
    }
}

/// Bytes of `struct nlmsghdr`.
const HEADER_BYTES: usize = 16;

fn align(length: usize) -> usize {
    length.next_multiple_of(4)
}

/// Length and sequence number of the message that starts here; the caller has checked that a header fits.
fn peek(buffer: &[u8]) -> (usize, u32) {
    let word = |at: usize| {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&buffer[at..at + 4]);
        u32::from_ne_bytes(bytes)
    };
    (word(0) as usize, word(8))
}
