//! Commands to an actor, one JSON document a line, and its replies.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use super::message::Answer;
use super::packet;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Protocol {
    #[serde(rename = "TCP")]
    Tcp,
    #[serde(rename = "UDP")]
    Udp,
    /// One-to-one style (RFC 6458): it reads and writes like a TCP stream.
    #[serde(rename = "SCTP")]
    Sctp,
    #[serde(rename = "ICMP")]
    Icmp,
}

impl Protocol {
    /// The number in IP headers.
    #[must_use]
    pub(crate) fn number(self, v6: bool) -> u8 {
        match self {
            Self::Tcp => packet::TCP,
            Self::Udp => packet::UDP,
            Self::Sctp => packet::SCTP,
            Self::Icmp if v6 => packet::ICMP_V6,
            Self::Icmp => packet::ICMP,
        }
    }

    #[must_use]
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
            Self::Icmp => "ICMP",
        }
    }
}

/// How a fresh TCP connection ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Close {
    #[default]
    Client,
    Server,
    Reset,
}

/// Bytes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Size {
    Bytes(usize),
    /// As much as one packet carries, plus this many bytes.
    Mtu(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    Forward,
    Reverse,
    Interleave,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fragments {
    /// Bytes of UDP header and payload in one fragment.
    pub size: usize,
    pub order: Order,
    pub gap_ms: u64,
}

/// One probe: `count` fresh sockets from each source address.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Probe {
    pub to: SocketAddr,
    pub protocol: Protocol,
    pub count: usize,
    pub size: Size,
    pub from_port: u16,
    /// Empty: the kernel chooses.
    pub from_ips: Vec<IpAddr>,
    pub close: Close,
    pub interval_ms: u64,
    pub timeout_ms: u64,
    pub answer_size: usize,
    pub answer_after_ms: u32,
    pub half_close: bool,
    pub dont_fragment: bool,
    pub fragments: Option<Fragments>,
    /// Keeps the sockets under this name.
    pub keep: Option<String>,
    /// Gives up after this many attempts in a row without a reply; zero never does.
    pub give_up_after: usize,
    pub token: u64,
}

/// One more request on every socket of a kept flow, `count` times.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Send {
    pub flow: String,
    pub count: usize,
    pub size: Size,
    pub timeout_ms: u64,
    pub answer_size: usize,
    pub token: u64,
}

/// A forged packet, whole from the IP header on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Forged {
    pub packet: Vec<u8>,
    /// Where its header says it goes.
    pub to: IpAddr,
    /// Sent as the payload of a UDP datagram to this address instead (a packet wrapped for an overlay).
    pub inside: Option<SocketAddr>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub enum Command {
    Listen {
        protocol: Protocol,
        port: u16,
        name: String,
    },
    /// Fails on purpose: tests see what a broken actor looks like.
    #[cfg(test)]
    Panic,
    /// Closes every server socket and every accepted connection.
    Unlisten,
    Probe(Probe),
    Send(Send),
    Close {
        flow: String,
    },
    /// Probes again and again until `Unwatch`.
    Watch {
        id: String,
        every_ms: u64,
        reuse: bool,
        /// The next begins on time, whatever those before it wait for.
        #[serde(default)]
        overlap: bool,
        probe: Probe,
    },
    /// Asks on the sockets of a kept flow again and again until `Unwatch`; nobody else can use them meanwhile.
    WatchFlow {
        id: String,
        flow: String,
        every_ms: u64,
        timeout_ms: u64,
    },
    Unwatch {
        id: String,
    },
    /// Was this token seen by a server of this actor?
    Seen {
        token: u64,
    },
    Http {
        to: SocketAddr,
        path: String,
        timeout_ms: u64,
    },
    Forge(Forged),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    Reply,
    Refused,
    Timeout,
    Unreachable,
    Reset,
    TooBig,
}

/// What one request on one socket came to.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Attempt {
    pub outcome: Outcome,
    pub answer: Option<Answer>,
    /// The client's own address and port, where it is known.
    pub source: Option<SocketAddr>,
    /// Number of the socket within the probe.
    pub socket: usize,
    pub took_ms: u64,
    /// Path MTU that the kernel then knows, bytes.
    pub mtu: Option<u32>,
    /// Segments that the kernel sent again meanwhile, of watched TCP connections: each was lost, or its acknowledgement. An
    /// answer that is late for want of a CPU has none.
    pub resent: u32,
    /// The error behind the outcome.
    pub detail: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Reply {
    Done,
    Attempts(Vec<Attempt>),
    Seen(bool),
    Http { status: u16, body: String },
    HttpFailed(Outcome),
    Failed(String),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Numbered<T> {
    pub id: u64,
    pub body: T,
}
