//! Packets as bytes, every checksum from scratch: what the incremental ones are compared with.

use crate::address::{ICMP, ICMPV6, Port, TCP, UDP};
use crate::{Family, V4, V6};

/// The sum of RFC 1071, complemented.
pub(super) fn sum(bytes: &[u8]) -> u16 {
    let mut sum: u32 = bytes
        .chunks(2)
        .map(|pair| {
            u32::from(u16::from_be_bytes([
                pair[0],
                pair.get(1).copied().unwrap_or(0),
            ]))
        })
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).expect("folded")
}

/// Families whose headers can be written.
pub(super) trait WireFamily: Family {
    /// Bytes of the header.
    const HEADER: usize;
    /// Offset of the source address in it; the destination follows.
    const SOURCE: usize;
    /// Offset of its own checksum.
    const CHECKSUM: Option<usize>;
    const ICMP: u8;

    fn bytes(&self) -> Vec<u8>;
    fn header(source: Self, destination: Self, protocol: u8, payload: usize) -> Vec<u8>;
}

fn length(bytes: usize) -> [u8; 2] {
    u16::try_from(bytes).expect("short").to_be_bytes()
}

impl WireFamily for V4 {
    const HEADER: usize = 20;
    const SOURCE: usize = 12;
    const CHECKSUM: Option<usize> = Some(10);
    const ICMP: u8 = ICMP;

    fn bytes(&self) -> Vec<u8> {
        self.octets().to_vec()
    }

    fn header(source: Self, destination: Self, protocol: u8, payload: usize) -> Vec<u8> {
        let mut bytes = vec![0x45, 0, 0, 0, 0xab, 0xcd, 0x40, 0, 61, protocol, 0, 0];
        bytes[2..4].copy_from_slice(&length(20 + payload));
        bytes.extend(source.bytes());
        bytes.extend(destination.bytes());
        let checksum = sum(&bytes);
        bytes[10..12].copy_from_slice(&checksum.to_be_bytes());
        bytes
    }
}

impl WireFamily for V6 {
    const HEADER: usize = 40;
    const SOURCE: usize = 8;
    const CHECKSUM: Option<usize> = None;
    const ICMP: u8 = ICMPV6;

    fn bytes(&self) -> Vec<u8> {
        self.octets().to_vec()
    }

    fn header(source: Self, destination: Self, protocol: u8, payload: usize) -> Vec<u8> {
        let mut bytes = vec![0x60, 0, 0, 0];
        bytes.extend(length(payload));
        bytes.extend([protocol, 61]);
        bytes.extend(source.bytes());
        bytes.extend(destination.bytes());
        bytes
    }
}

/// A transport segment with its checksum over the pseudo header, at `at`.
fn seal<A: WireFamily>(source: A, destination: A, protocol: u8, at: usize, segment: &mut [u8]) {
    let mut covered = Vec::new();
    if protocol != ICMP {
        covered.extend(source.bytes());
        covered.extend(destination.bytes());
        covered.extend([0, protocol]);
        covered.extend(length(segment.len()));
    }
    covered.extend(&*segment);
    let mut checksum = sum(&covered);
    if protocol == UDP && checksum == 0 {
        checksum = 0xffff;
    }
    segment[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
}

/// A packet of TCP or UDP; of any other protocol, with ports and no checksum. `sealed` says that a datagram has one.
pub(super) fn packet<A: WireFamily>(
    (source, source_port): (A, Port),
    (destination, destination_port): (A, Port),
    protocol: u8,
    sealed: bool,
    payload: &[u8],
) -> Vec<u8> {
    let mut segment = Vec::new();
    segment.extend(source_port.number().to_be_bytes());
    segment.extend(destination_port.number().to_be_bytes());
    let checksum = if protocol == TCP {
        segment.extend([0, 0, 0, 7, 0, 0, 0, 9, 0x50, 0x10, 0xff, 0xff, 0, 0, 0, 0]);
        Some(16)
    } else if protocol == UDP {
        segment.extend(length(8 + payload.len()));
        segment.extend([0, 0]);
        sealed.then_some(6)
    } else {
        None
    };
    segment.extend(payload);
    if let Some(at) = checksum {
        seal(source, destination, protocol, at, &mut segment);
    }
    let mut bytes = A::header(source, destination, protocol, segment.len());
    bytes.extend(segment);
    bytes
}

/// An ICMP message with its checksum.
pub(super) fn message<A: WireFamily>(
    source: A,
    destination: A,
    (kind, code): (u8, u8),
    rest: [u8; 4],
    body: &[u8],
) -> Vec<u8> {
    let mut segment = vec![kind, code, 0, 0];
    segment.extend(rest);
    segment.extend(body);
    seal(source, destination, A::ICMP, 2, &mut segment);
    let mut bytes = A::header(source, destination, A::ICMP, segment.len());
    bytes.extend(segment);
    bytes
}
