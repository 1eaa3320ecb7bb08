//! Answers to packets for service ports that nobody serves: a reset for TCP (RFC 9293, section 3.10.7.1), a port
//! unreachable message for the rest (RFC 792, RFC 4443). Clients then fail at once instead of waiting.
//!
//! Headers are built as 16-bit words as they lie in memory, which is all that their checksums need.

use crate::address::{Family, ICMP, ICMPV6, TCP, V4, V6};
use crate::packet::{Packet, tcp};

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

/// The IP header and the first eight bytes after it, as words: what a message about a packet quotes of it.
pub trait Refuse: Family {
    /// IP header and TCP header.
    type Reset: Copy;
    /// IP header and ICMP header, for in front of the quote.
    type Notice: Copy;
    type Quote: Copy;

    fn reset(packet: &Packet<Self>, segment: &Segment) -> Self::Reset;
    fn notice(packet: &Packet<Self>, quote: &Self::Quote) -> Self::Notice;
}

/// Folds a sum of words and complements it.
#[allow(
    clippy::cast_possible_truncation,
    reason = "the carries are folded in before"
)]
#[inline(always)]
fn finish(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    !(sum as u16)
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
    type Quote = [u16; 14];

    #[inline(always)]
    fn reset(packet: &Packet<Self>, segment: &Segment) -> Self::Reset {
        let mut words = [0; 20];
        put_ipv4(&mut words, packet, 40, TCP);
        put_tcp(&mut words, 10, 6, packet, segment);
        words
    }

    #[inline(always)]
    fn notice(packet: &Packet<Self>, quote: &Self::Quote) -> Self::Notice {
        /// Destination unreachable, port unreachable.
        const TYPE_AND_CODE: u16 = 0x0303;
        let mut words = [0; 14];
        put_ipv4(&mut words, packet, 56, ICMP);
        words[10] = TYPE_AND_CODE.to_be();
        words[11] = finish(sum_words(&words, 10, 14) + sum_words(quote, 0, 14));
        words
    }
}

impl Refuse for V6 {
    type Reset = [u16; 30];
    type Notice = [u16; 24];
    type Quote = [u16; 24];

    #[inline(always)]
    fn reset(packet: &Packet<Self>, segment: &Segment) -> Self::Reset {
        let mut words = [0; 30];
        put_ipv6(&mut words, packet, 20, TCP);
        put_tcp(&mut words, 20, 4, packet, segment);
        words
    }

    #[inline(always)]
    fn notice(packet: &Packet<Self>, quote: &Self::Quote) -> Self::Notice {
        /// Destination unreachable, port unreachable.
        const TYPE_AND_CODE: u16 = 0x0104;
        const ICMP_BYTES: u16 = 56;
        let mut words = [0; 24];
        put_ipv6(&mut words, packet, ICMP_BYTES, ICMPV6);
        words[20] = TYPE_AND_CODE.to_be();
        let pseudo =
            sum_words(&words, 4, 20) + (ICMPV6 as u16).to_be() as u32 + ICMP_BYTES.to_be() as u32;
        words[21] = finish(pseudo + sum_words(&words, 20, 24) + sum_words(quote, 0, 24));
        words
    }
}
