//! Incremental internet checksums (RFC 1071, RFC 1624).

use crate::address::{Family, Port};

/// Sum of the differences between old and new words, in the form that the kernel's checksum helpers take.
#[inline(always)]
fn add(sum: u64, from: u32, to: u32) -> u64 {
    sum + (!from) as u64 + to as u64
}

/// Folds carries of 32-bit additions back in.
#[allow(
    clippy::cast_possible_truncation,
    reason = "the carries are folded in before"
)]
#[inline(always)]
pub(crate) fn fold32(sum: u64) -> u32 {
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    sum as u32
}

/// Difference that a change of both addresses makes, to the IPv4 header and to the pseudo header alike.
#[inline(always)]
#[must_use]
pub fn address_difference<A: Family>(from: (&A, &A), to: (&A, &A)) -> u32 {
    let mut sum = 0;
    let mut index = 0;
    while index < A::WORDS {
        sum = add(sum, from.0.word(index), to.0.word(index));
        sum = add(sum, from.1.word(index), to.1.word(index));
        index += 1;
    }
    fold32(sum)
}

/// Difference that a change of both ports makes.
#[inline(always)]
#[must_use]
pub fn port_difference(from: (Port, Port), to: (Port, Port)) -> u32 {
    // Each pair is one 32-bit word of the header; which half is which does not matter to the sum.
    let from = ((from.0.0 as u32) << 16) | from.1.0 as u32;
    let to = ((to.0.0 as u32) << 16) | to.1.0 as u32;
    fold32(add(0, from, to))
}

/// Difference that a change of one 16-bit word makes.
#[inline(always)]
#[must_use]
pub fn word_difference(from: u16, to: u16) -> u32 {
    (!from) as u32 + to as u32
}

/// Applies a difference to a checksum as it lies in a header (RFC 1624, equation 3).
#[allow(
    clippy::cast_possible_truncation,
    reason = "the carries are folded in before"
)]
#[inline(always)]
#[must_use]
pub fn apply(checksum: u16, difference: u32) -> u16 {
    let mut sum = (!checksum) as u32 as u64 + difference as u64;
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    !(sum as u16)
}

/// True when a transport checksum covers no more than the pseudo header: whoever sent the packet left the rest to its
/// device (the kernel's `CHECKSUM_PARTIAL`), and said so in a place that a driver's program cannot see. One finished
/// checksum in 65,535 looks the same. `length` is that of the transport header and what follows it, in bytes.
#[inline(always)]
#[must_use]
pub fn is_unfinished<A: Family>(
    checksum: u16,
    source: &A,
    destination: &A,
    protocol: u8,
    length: u16,
) -> bool {
    let mut sum = (protocol as u16).to_be() as u64 + length.to_be() as u64;
    let mut index = 0;
    while index < A::WORDS {
        sum += source.word(index) as u64 + destination.word(index) as u64;
        index += 1;
    }
    !apply(u16::MAX, fold32(sum)) == checksum
}
