//! ICMP errors and echo. An error quotes a packet as it was on the wire, after translation: whoever gets the error knows
//! the packet as it was before (RFC 5508, sections 4 and 5). So the quote is translated back, and the error's own
//! addresses with it, by the flow that the quoted packet belongs to.
//!
//! Checksums are moved by differences alone. Every change inside the message is balanced within the packet, so a sum
//! over the whole of it that a device gave stays right.

use crate::address::{Family, ICMP, ICMPV6, Port, UDP, V4, V6};
use crate::checksum::{self, address_difference, port_difference, word_difference};
use crate::layout::{FlowKey, FrontendKey};
use crate::packet::{Packet, Translation};
use crate::tables::Tables;

/// What errors and echo are called in a family.
pub trait Messages: Family {
    const PROTOCOL: u8;
    const ECHO_REQUEST: u8;
    const ECHO_REPLY: u8;
    /// The message's checksum covers the addresses too.
    const PSEUDO_HEADER: bool;

    /// An error about a packet that is quoted in it. Redirects are none: they are about a link (RFC 5508, section 7.3).
    fn is_error(kind: u8) -> bool;

    /// Advertisements and redirects of routers.
    fn is_of_router(kind: u8) -> bool;
}

impl Messages for V4 {
    const PROTOCOL: u8 = ICMP;
    const ECHO_REQUEST: u8 = 8;
    const ECHO_REPLY: u8 = 0;
    const PSEUDO_HEADER: bool = false;

    #[inline(always)]
    fn is_error(kind: u8) -> bool {
        const DESTINATION_UNREACHABLE: u8 = 3;
        const SOURCE_QUENCH: u8 = 4;
        const TIME_EXCEEDED: u8 = 11;
        const PARAMETER_PROBLEM: u8 = 12;
        matches!(
            kind,
            DESTINATION_UNREACHABLE | SOURCE_QUENCH | TIME_EXCEEDED | PARAMETER_PROBLEM
        )
    }

    #[inline(always)]
    fn is_of_router(kind: u8) -> bool {
        const REDIRECT: u8 = 5;
        const ADVERTISEMENT: u8 = 9;
        matches!(kind, REDIRECT | ADVERTISEMENT)
    }
}

impl Messages for V6 {
    const PROTOCOL: u8 = ICMPV6;
    const ECHO_REQUEST: u8 = 128;
    const ECHO_REPLY: u8 = 129;
    const PSEUDO_HEADER: bool = true;

    #[inline(always)]
    fn is_error(kind: u8) -> bool {
        const DESTINATION_UNREACHABLE: u8 = 1;
        const PARAMETER_PROBLEM: u8 = 4;
        (DESTINATION_UNREACHABLE..=PARAMETER_PROBLEM).contains(&kind)
    }

    #[inline(always)]
    fn is_of_router(kind: u8) -> bool {
        const ADVERTISEMENT: u8 = 134;
        const REDIRECT: u8 = 137;
        matches!(kind, ADVERTISEMENT | REDIRECT)
    }
}

/// The flow that an error is about, as whoever gets the error knows it.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Related<A> {
    /// `Reply`: to the client, about a packet that it sent. `Forward`: to the backend, about an answer. `None`: the
    /// quoted packet belongs to no flow, and everything here is as it was.
    pub translation: Translation,
    /// One when anything differs from what it was.
    pub changes: u32,
    /// Of the error itself.
    pub source: A,
    pub destination: A,
    /// Of the packet that it quotes.
    pub quoted_source: A,
    pub quoted_destination: A,
    pub quoted_source_port: Port,
    pub quoted_destination_port: Port,
    /// One when the policies have to be asked about the flow: see [`crate::path::settle`].
    pub unsettled: u32,
    /// Key of the flow.
    pub flow: FlowKey<A>,
}

/// Finds the flow that an error is about. `message` is the error, `quoted` the packet in it. Errors never keep a flow
/// alive nor end it (RFC 5508, REQ-4): anybody can send them.
#[inline(always)]
pub fn relate<A: Family, T: Tables<A>>(
    tables: &mut T,
    message: &Packet<A>,
    quoted: &Packet<A>,
) -> Related<A> {
    let mut related = Related {
        translation: Translation::None,
        changes: 0,
        source: message.source,
        destination: message.destination,
        quoted_source: quoted.source,
        quoted_destination: quoted.destination,
        quoted_source_port: quoted.source_port,
        quoted_destination_port: quoted.destination_port,
        unsettled: 0,
        flow: quoted.key(),
    };
    let generation = tables.policy_generation();
    // An error goes to the sender of what it is about.
    if !quoted.has_ports() || quoted.source != message.destination {
        return related;
    }
    let answer = quoted.key().reversed();
    if let Some(original) = tables.reply(&answer) {
        let original = *original;
        let (whole, settled) = match tables.flow(&original) {
            Some(flow) => (flow.reply_key() == answer, flow.is_settled(generation)),
            None => (false, false),
        };
        if whole {
            related.be(Translation::Reply, message, quoted, &original);
            related.unsettled = !settled as u32;
            related.flow = original;
            return related;
        }
    }
    if let Some(flow) = tables.flow(&answer) {
        let to_client = flow.reply_key();
        related.unsettled = !flow.is_settled(generation) as u32;
        related.flow = answer;
        related.be(Translation::Forward, message, quoted, &to_client);
    }
    related
}

impl<A: Family> Related<A> {
    /// The quoted packet was `known` to its sender. An error of the quoted packet's own destination comes, for its
    /// sender, from the address that the sender wrote; one of a router on the way keeps its source.
    #[inline(always)]
    fn be(
        &mut self,
        translation: Translation,
        message: &Packet<A>,
        quoted: &Packet<A>,
        known: &FlowKey<A>,
    ) {
        self.translation = translation;
        self.quoted_source = known.source;
        self.quoted_destination = known.destination;
        self.quoted_source_port = known.source_port;
        self.quoted_destination_port = known.destination_port;
        self.destination = known.source;
        if message.source == quoted.destination {
            self.source = known.destination;
        }
        self.changes = (quoted.key() != *known) as u32;
    }
}

/// Checksums as they lie in the error: of the message, and of the headers that it quotes.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Checksums {
    pub message: u16,
    /// IPv4 only.
    pub quoted_header: u16,
    /// Not [`NO_CHECKSUM`] only.
    pub quoted_transport: u16,
    pub flags: u16,
}

/// The quote ends before the transport's checksum, or there is none: eight bytes of TCP have none, SCTP's cannot be
/// changed without the rest of the packet, a datagram may go without.
pub const NO_CHECKSUM: u16 = 1;
/// The quoted packet is an ICMP message without a pseudo header: only its identifier is covered.
pub const WITHOUT_ADDRESSES: u16 = 2;

/// The checksums after the translation of `related`.
#[inline(always)]
#[must_use]
pub fn move_checksums<A: Messages>(
    old: Checksums,
    message: &Packet<A>,
    quoted: &Packet<A>,
    related: &Related<A>,
) -> Checksums {
    let mut new = old;
    let addresses = address_difference(
        (&quoted.source, &quoted.destination),
        (&related.quoted_source, &related.quoted_destination),
    );
    let ports = port_difference(
        (quoted.source_port, quoted.destination_port),
        (related.quoted_source_port, related.quoted_destination_port),
    );
    let mut sum = addresses as u64 + ports as u64;
    if A::WORDS == 1 {
        new.quoted_header = checksum::apply(old.quoted_header, addresses);
        sum += word_difference(old.quoted_header, new.quoted_header) as u64;
    }
    if old.flags & NO_CHECKSUM == 0 {
        let mut transport = checksum::apply(old.quoted_transport, ports);
        if old.flags & WITHOUT_ADDRESSES == 0 {
            transport = checksum::apply(transport, addresses);
        }
        if quoted.protocol == UDP && transport == 0 {
            // Zero would say that there is none.
            transport = 0xffff;
        }
        new.quoted_transport = transport;
        sum += word_difference(old.quoted_transport, transport) as u64;
    }
    if A::PSEUDO_HEADER {
        let outer = address_difference(
            (&message.source, &message.destination),
            (&related.source, &related.destination),
        );
        sum += outer as u64;
    }
    new.message = checksum::apply(old.message, checksum::fold32(sum));
    new
}

/// True when the address is one of a service, which no host has: the node answers its echo requests.
#[inline(always)]
pub fn is_virtual<A: Family, T: Tables<A>>(tables: &mut T, address: A) -> bool {
    let key = FrontendKey {
        address,
        port: Port(0),
        protocol: 0,
        scope: 0,
    };
    tables.frontend(&key).is_some()
}

/// The checksum of the reply to an echo request: type and code change, and the addresses only change places.
#[inline(always)]
#[must_use]
pub fn echo_checksum<A: Messages>(old: u16) -> u16 {
    let word = |kind: u8| u16::from_ne_bytes([kind, 0]);
    checksum::apply(
        old,
        word_difference(word(A::ECHO_REQUEST), word(A::ECHO_REPLY)),
    )
}
