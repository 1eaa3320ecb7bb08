//! Answers to packets that nobody takes: a reset for TCP (RFC 9293, section 3.10.7.1), an unreachable message for the
//! rest (RFC 792, RFC 4443). Clients then fail at once instead of waiting. Packets that must not be answered are not
//! (RFC 1122, section 3.2.2; RFC 4443, section 2.4).
//!
//! Headers are built as 16-bit words as they lie in memory, which is all that their checksums need.

use crate::address::{Family, ICMP, ICMPV6, TCP, V4, V6};
use crate::packet::{LATER_FRAGMENT, Packet, tcp};

const HOPS: u16 = 64;

/// What of a TCP segment its reset depends on.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Host order.
    pub sequence: u32,
    pub acknowledgement: u32,
    pub flags: u8,
    /// Bytes after the TCP header.
    pub payload: u32,
}

/// What is unreachable.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unreachable {
    /// Nobody listens at the port.
    Port,
    /// Nobody has the address.
    Host,
}

/// What a message quotes of the packet that it is about: headers and eight bytes of what follows.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Quote {
    /// A multiple of two.
    pub bytes: u16,
    /// Sum of its 16-bit words as they lie in memory, or any number that is the same modulo 65,535.
    pub sum: u32,
}

/// Longest quote, in bytes: 60 bytes of IPv4 header, or 40 of IPv6 and 112 of extensions, and eight more. Packets with
/// more headers are dropped in silence.
pub const MAX_QUOTE: u32 = 160;

/// Families in which refusals can be written.
pub trait Refuse: Family {
    /// IP header and TCP header.
    type Reset: Copy;
    /// IP header and ICMP header, for in front of the quote.
    type Notice: Copy;

    fn reset(packet: &Packet<Self>, segment: &Segment) -> Self::Reset;
    fn notice(packet: &Packet<Self>, what: Unreachable, quote: &Quote) -> Self::Notice;
}

/// True when the packet may be answered at all: its source is one host, its destination too, and it has the headers
/// that the answer is about. Errors and resets are for the caller to exclude: they are told by the transport header.
#[inline(always)]
#[must_use]
pub fn may_answer<A: Family>(packet: &Packet<A>) -> bool {
    packet.flags & LATER_FRAGMENT == 0
        && !packet.source.is_link_scope()
        && !packet.destination.is_link_scope()
}

/// Folds a sum of words and complements it.
#[allow(
    clippy::cast_possible_truncation,
    reason = "the carries are folded in before"
)]
#[inline(always)]
fn finish(sum: u32) -> u16 {
    !(fold(sum) as u16)
}

/// The carries of a sum of 16-bit words, folded back in.
#[inline(always)]
fn fold(sum: u32) -> u32 {
    let sum = (sum & 0xffff) + (sum >> 16);
    (sum & 0xffff) + (sum >> 16)
}

#[inline(always)]
fn sum_words(words: &[u16], from: usize, to: usize) -> u32 {
    let mut sum = 0;
    let mut index = from;
    while index < to {
        sum += words[index] as u32;
        index += 1;
    }
    sum
}

/// Both addresses' words, source first, into `words` at `at`; an answer goes from the destination to the source.
#[inline(always)]
fn put_addresses<A: Family>(words: &mut [u16], at: usize, packet: &Packet<A>) {
    let mut index = 0;
    while index < A::WORDS {
        let (source, destination) = (packet.destination.word(index), packet.source.word(index));
        let (source, destination) = (source.to_ne_bytes(), destination.to_ne_bytes());
        let (from, to) = (at + index * 2, at + (A::WORDS + index) * 2);
        words[from] = u16::from_ne_bytes([source[0], source[1]]);
        words[from + 1] = u16::from_ne_bytes([source[2], source[3]]);
        words[to] = u16::from_ne_bytes([destination[0], destination[1]]);
        words[to + 1] = u16::from_ne_bytes([destination[2], destination[3]]);
        index += 1;
    }
}

#[allow(
    clippy::cast_possible_truncation,
    reason = "both halves of a word are written"
)]
/// Writes the reset's TCP header at `at`, its checksum from the addresses' words that begin at `addresses`.
#[inline(always)]
fn put_tcp<A: Family>(
    words: &mut [u16],
    at: usize,
    addresses: usize,
    packet: &Packet<A>,
    segment: &Segment,
) {
    const HEADER_BYTES: u16 = 20;
    let (sequence, acknowledgement, flags) = if segment.flags & tcp::ACK != 0 {
        (segment.acknowledgement, 0, tcp::RST)
    } else {
        let mut length = segment.payload;
        length += (segment.flags & tcp::SYN != 0) as u32;
        length += (segment.flags & tcp::FIN != 0) as u32;
        (
            0,
            segment.sequence.wrapping_add(length),
            tcp::RST | tcp::ACK,
        )
    };
    words[at] = packet.destination_port.0;
    words[at + 1] = packet.source_port.0;
    words[at + 2] = ((sequence >> 16) as u16).to_be();
    words[at + 3] = (sequence as u16).to_be();
    words[at + 4] = ((acknowledgement >> 16) as u16).to_be();
    words[at + 5] = (acknowledgement as u16).to_be();
    words[at + 6] = (0x5000 | flags as u16).to_be();
    words[at + 7] = 0;
    words[at + 8] = 0;
    words[at + 9] = 0;
    let pseudo = sum_words(words, addresses, addresses + A::WORDS * 4)
        + (TCP as u16).to_be() as u32
        + HEADER_BYTES.to_be() as u32;
    words[at + 8] = finish(pseudo + sum_words(words, at, at + 10));
}

#[inline(always)]
fn put_ipv4(words: &mut [u16], packet: &Packet<V4>, bytes: u16, protocol: u8) {
    const DO_NOT_FRAGMENT: u16 = 0x4000;
    words[0] = 0x4500u16.to_be();
    words[1] = bytes.to_be();
    words[2] = 0;
    words[3] = DO_NOT_FRAGMENT.to_be();
    words[4] = ((HOPS << 8) | protocol as u16).to_be();
    words[5] = 0;
    put_addresses(words, 6, packet);
    words[5] = finish(sum_words(words, 0, 10));
}

#[inline(always)]
fn put_ipv6(words: &mut [u16], packet: &Packet<V6>, payload: u16, protocol: u8) {
    words[0] = 0x6000u16.to_be();
    words[1] = 0;
    words[2] = payload.to_be();
    words[3] = (((protocol as u16) << 8) | HOPS).to_be();
    put_addresses(words, 4, packet);
}

impl Refuse for V4 {
    type Reset = [u16; 20];
    type Notice = [u16; 14];

    #[inline(always)]
    fn reset(packet: &Packet<Self>, segment: &Segment) -> Self::Reset {
        let mut words = [0; 20];
        put_ipv4(&mut words, packet, 40, TCP);
        put_tcp(&mut words, 10, 6, packet, segment);
        words
    }

    #[inline(always)]
    fn notice(packet: &Packet<Self>, what: Unreachable, quote: &Quote) -> Self::Notice {
        const HEADERS: u16 = 28;
        let type_and_code: u16 = match what {
            Unreachable::Port => 0x0303,
            Unreachable::Host => 0x0301,
        };
        let mut words = [0; 14];
        put_ipv4(&mut words, packet, HEADERS + quote.bytes, ICMP);
        words[10] = type_and_code.to_be();
        words[11] = finish(sum_words(&words, 10, 14) + fold(quote.sum));
        words
    }
}

impl Refuse for V6 {
    type Reset = [u16; 30];
    type Notice = [u16; 24];

    #[inline(always)]
    fn reset(packet: &Packet<Self>, segment: &Segment) -> Self::Reset {
        let mut words = [0; 30];
        put_ipv6(&mut words, packet, 20, TCP);
        put_tcp(&mut words, 20, 4, packet, segment);
        words
    }

    #[inline(always)]
    fn notice(packet: &Packet<Self>, what: Unreachable, quote: &Quote) -> Self::Notice {
        const HEADER: u16 = 8;
        let type_and_code: u16 = match what {
            Unreachable::Port => 0x0104,
            Unreachable::Host => 0x0103,
        };
        let icmp_bytes = HEADER + quote.bytes;
        let mut words = [0; 24];
        put_ipv6(&mut words, packet, icmp_bytes, ICMPV6);
        words[20] = type_and_code.to_be();
        let pseudo =
            sum_words(&words, 4, 20) + (ICMPV6 as u16).to_be() as u32 + icmp_bytes.to_be() as u32;
        words[21] = finish(pseudo + sum_words(&words, 20, 24) + fold(quote.sum));
        words
    }
}
