//! SCTP (RFC 9260): what a packet's first chunk says about its association, and the checksum after a change of ports.
//!
//! The checksum is a CRC32c over the whole packet, without a pseudo header: addresses do not enter it, ports do. It is
//! linear, so a change of the first four bytes changes it by the CRC of the difference alone, moved by the length of
//! the packet. That takes two multiplications of polynomials, whatever the length.

use crate::address::{Family, Port, SCTP};
use crate::packet::{Decision, FRAGMENT, Packet, tcp};

/// The common header: ports, verification tag, checksum.
pub const HEADER_BYTES: u32 = 12;
/// Offset of the checksum in it. Least significant byte first, unlike everything else in the header.
pub const CHECKSUM_OFFSET: u32 = 8;

/// Chunk types of RFC 9260, section 3.2.
pub mod chunk {
    pub const INIT: u8 = 1;
    pub const INIT_ACK: u8 = 2;
    pub const ABORT: u8 = 6;
    pub const SHUTDOWN: u8 = 7;
    pub const SHUTDOWN_ACK: u8 = 8;
    pub const SHUTDOWN_COMPLETE: u8 = 14;
}

/// True for a part of a packet that a decision gives other ports. None of the parts holds all that the checksum covers,
/// so that none of them may go on.
#[inline(always)]
#[must_use]
pub fn is_torn<A: Family>(packet: &Packet<A>, decision: &Decision<A>) -> bool {
    packet.protocol == SCTP
        && packet.flags & FRAGMENT != 0
        && (packet.source_port != decision.source_port
            || packet.destination_port != decision.destination_port)
}

/// What the first chunk of a packet says, in the words that TCP has for it, so that the life of a flow is one. INIT,
/// INIT ACK and SHUTDOWN COMPLETE are never bundled with others (RFC 9260, section 6.10); a SHUTDOWN that comes after
/// another chunk is seen in the answer to it.
#[inline(always)]
#[must_use]
pub const fn flags(chunk: u8) -> u8 {
    match chunk {
        chunk::INIT => tcp::SYN,
        chunk::INIT_ACK => tcp::SYN | tcp::ACK,
        chunk::ABORT => tcp::RST,
        chunk::SHUTDOWN | chunk::SHUTDOWN_ACK | chunk::SHUTDOWN_COMPLETE => tcp::FIN | tcp::ACK,
        _ => tcp::ACK,
    }
}

/// The polynomial of CRC32c without its highest term, lowest power in the highest bit.
const POLYNOMIAL: u32 = 0x82f6_3b78;
/// The number one in that notation.
const ONE: u32 = 0x8000_0000;

/// x^(8 * index), for lengths in bytes below 256, and in units of 256 bytes.
static SHIFT_BYTES: [u32; 256] = powers(1);
static SHIFT_PAGES: [u32; 256] = powers(256);

const fn powers(bytes: u32) -> [u32; 256] {
    // x^8, then as many times itself as there are bytes.
    let x8 = ONE >> 8;
    let mut step = ONE;
    let mut count = 0;
    while count < bytes {
        step = multiply(step, x8);
        count += 1;
    }
    let mut table = [ONE; 256];
    let mut index = 1;
    while index < 256 {
        table[index] = multiply(table[index - 1], step);
        index += 1;
    }
    table
}

/// The product of two polynomials modulo that of CRC32c. No branch depends on the values.
#[inline(always)]
pub const fn multiply(a: u32, b: u32) -> u32 {
    let (mut product, mut a, mut b) = (0, a, b);
    let mut bit = 0;
    while bit < 32 {
        product ^= b & 0u32.wrapping_sub(a >> 31);
        a <<= 1;
        b = (b >> 1) ^ (POLYNOMIAL & 0u32.wrapping_sub(b & 1));
        bit += 1;
    }
    product
}

/// The checksum, as it lies in the header, after a change of both ports (source, destination) in a packet of `bytes`
/// bytes, common header included and counted modulo 65,536.
///
/// Zero means that the device computes it when the packet leaves, and stays. A computed sum of zero cannot be told from
/// that; one packet in four thousand million has one.
#[inline(always)]
#[must_use]
pub fn checksum(old: u32, bytes: u32, from: (Port, Port), to: (Port, Port)) -> u32 {
    checksum_by(multiply, old, bytes, from, to)
}

/// As [`checksum`], with [`multiply`] or a function that does the same.
#[inline(always)]
#[must_use]
pub fn checksum_by(
    multiply: impl Fn(u32, u32) -> u32,
    old: u32,
    bytes: u32,
    from: (Port, Port),
    to: (Port, Port),
) -> u32 {
    if old == 0 {
        return 0;
    }
    let source = (from.0.0 ^ to.0.0).to_ne_bytes();
    let destination = (from.1.0 ^ to.1.0).to_ne_bytes();
    let difference = u32::from_le_bytes([source[0], source[1], destination[0], destination[1]]);
    let moved = multiply(difference, SHIFT_BYTES[(bytes & 0xff) as usize]);
    let moved = multiply(moved, SHIFT_PAGES[((bytes >> 8) & 0xff) as usize]);
    old ^ moved.to_le()
}
