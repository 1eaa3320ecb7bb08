//! What a decision sees of a packet, and what it says.

use crate::address::{Family, Port, SCTP, TCP, UDP};
use crate::layout::FlowKey;
use crate::reason::DropReason;

/// TCP flags as they lie in the header.
pub mod tcp {
    pub const FIN: u8 = 0x01;
    pub const SYN: u8 = 0x02;
    pub const RST: u8 = 0x04;
    pub const ACK: u8 = 0x10;
}

/// The headers that decisions need.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Packet<A> {
    pub source: A,
    pub destination: A,
    /// Both ports are zero unless [`Packet::has_ports`].
    pub source_port: Port,
    pub destination_port: Port,
    pub protocol: u8,
    /// What the packet says of its connection, in the words of TCP also for SCTP; zero for other protocols.
    pub tcp_flags: u8,
    /// [`WITH_PORTS`], [`FRAGMENT`], [`LATER_FRAGMENT`] and [`ERROR`].
    pub flags: u16,
    /// Of the datagram that this is a fragment of; zero for whole ones.
    pub identification: u32,
}

/// The packet carries the ports of TCP, UDP or SCTP, or the identifier of an echo: as the source port of a request, and the
/// destination port of a reply.
pub const WITH_PORTS: u16 = 1;
/// Part of a datagram.
pub const FRAGMENT: u16 = 2;
/// Not the first part: no transport header. Its ports, if known, were carried by the first.
pub const LATER_FRAGMENT: u16 = 4;
/// An ICMP error: it quotes the packet that it is about.
pub const ERROR: u16 = 8;
/// An ICMP message by which a router tells of itself or of other ways: pods are no routers.
pub const ROUTER: u16 = 16;

impl<A: Family> Packet<A> {
    #[inline(always)]
    #[must_use]
    pub fn has_ports(&self) -> bool {
        self.flags & WITH_PORTS != 0
    }

    #[inline(always)]
    #[must_use]
    pub fn is_error(&self) -> bool {
        self.flags & ERROR != 0
    }

    #[inline(always)]
    #[must_use]
    pub fn is_tcp(&self) -> bool {
        self.protocol == TCP
    }

    #[inline(always)]
    #[must_use]
    pub fn is_udp(&self) -> bool {
        self.protocol == UDP
    }

    /// Belongs to a connection, with a beginning and an end that can be seen.
    #[inline(always)]
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.protocol == TCP || self.protocol == SCTP
    }

    /// Opens a connection (SYN without ACK, or INIT).
    #[inline(always)]
    #[must_use]
    pub fn opens(&self) -> bool {
        self.is_connected() && self.tcp_flags & (tcp::SYN | tcp::ACK) == tcp::SYN
    }

    #[inline(always)]
    #[must_use]
    pub fn key(&self) -> FlowKey<A> {
        FlowKey {
            source: self.source,
            destination: self.destination,
            source_port: self.source_port,
            destination_port: self.destination_port,
            protocol: self.protocol as u32,
        }
    }
}

/// Where a packet goes.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Action {
    /// On through the node's own stack.
    Stack,
    /// Nowhere, for [`Decision::reason`].
    Drop,
    /// Straight into a pod of this node: [`Decision::ifindex`] and the MAC addresses.
    Pod,
    /// Out by the routing table.
    Network,
    /// To a process of this node, over the host link.
    Host,
    /// Unchanged through the overlay, to the node of the flow's backend.
    Overlay,
    /// Not decided yet: no flow has this packet, see [`crate::path::open`].
    #[default]
    Open,
    /// Not decided yet: it is about a packet that it quotes, see [`crate::icmp::relate`].
    Relate,
    /// To user space until the first fragment of its datagram has passed: out of [`Decision::ifindex`].
    Park,
    /// Not decided yet: the policies have changed since its flow was judged, or deny it, see [`crate::path::settle`].
    Judge,
}

/// What translation did.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Translation {
    #[default]
    None,
    /// Client to backend.
    Forward,
    /// Backend to client.
    Reply,
}

/// A decision: where the packet goes, and which addresses and ports it has then.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Decision<A> {
    pub action: Action,
    pub reason: DropReason,
    pub translation: Translation,
    /// Only for [`Action::Pod`].
    pub ifindex: u32,
    pub source: A,
    pub destination: A,
    pub source_port: Port,
    pub destination_port: Port,
    /// Only for [`Action::Pod`] and [`Action::Host`].
    pub destination_mac: [u8; 6],
    pub source_mac: [u8; 6],
}

impl<A: Family> Decision<A> {
    /// The packet as it is, to `action`.
    #[inline(always)]
    #[must_use]
    pub fn untouched(packet: &Packet<A>, action: Action) -> Self {
        Self {
            action,
            reason: DropReason::None,
            translation: Translation::None,
            ifindex: 0,
            source: packet.source,
            destination: packet.destination,
            source_port: packet.source_port,
            destination_port: packet.destination_port,
            destination_mac: [0; 6],
            source_mac: [0; 6],
        }
    }

    #[inline(always)]
    #[must_use]
    pub fn drop(packet: &Packet<A>, reason: DropReason) -> Self {
        let mut decision = Self::untouched(packet, Action::Drop);
        decision.reason = reason;
        decision
    }
}
