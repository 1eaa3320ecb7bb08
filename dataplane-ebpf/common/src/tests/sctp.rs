//! The incremental CRC32c against one from scratch, and chunks against the life of an association.

use proptest::prelude::*;

use crate::Port;
use crate::packet::tcp;
use crate::sctp::{checksum, chunk, flags};

/// CRC32c by definition: a bit at a time, inverted at both ends.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            let carry = crc & 1 == 1;
            crc >>= 1;
            if carry {
                crc ^= 0x82f6_3b78;
            }
        }
    }
    !crc
}

/// A packet with its checksum, least significant byte first.
fn packet(ports: (u16, u16), rest: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(ports.0.to_be_bytes());
    bytes.extend(ports.1.to_be_bytes());
    bytes.extend([0xde, 0xad, 0xbe, 0xef]);
    bytes.extend([0; 4]);
    bytes.extend(rest);
    let sum = crc32c(&bytes);
    bytes[8..12].copy_from_slice(&sum.to_le_bytes());
    bytes
}

fn stored(packet: &[u8]) -> u32 {
    u32::from_ne_bytes([packet[8], packet[9], packet[10], packet[11]])
}

#[test]
fn the_naive_sum_is_the_one_of_the_standard() {
    // RFC 3720, appendix B.4: 32 bytes of zeroes, and of ones.
    assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
    assert_eq!(crc32c(b"123456789"), 0xe306_9283);
}

proptest! {
    #[test]
    fn a_change_of_ports_keeps_the_checksum_right(
        from in any::<(u16, u16)>(), to in any::<(u16, u16)>(),
        rest in prop::collection::vec(any::<u8>(), 0..3_000),
    ) {
        let (before, after) = (packet(from, &rest), packet(to, &rest));
        prop_assume!(stored(&before) != 0);
        let port = |ports: (u16, u16)| (Port::new(ports.0), Port::new(ports.1));
        let bytes = u32::try_from(before.len()).expect("short");
        prop_assert_eq!(checksum(stored(&before), bytes, port(from), port(to)), stored(&after));
    }

    #[test]
    fn a_sum_that_the_device_computes_stays_zero(
        from in any::<(u16, u16)>(), to in any::<(u16, u16)>(), bytes in any::<u32>()
    ) {
        let port = |ports: (u16, u16)| (Port::new(ports.0), Port::new(ports.1));
        prop_assert_eq!(checksum(0, bytes, port(from), port(to)), 0);
    }
}

#[test]
fn the_longest_packet_is_as_right_as_the_shortest() {
    for rest in [0, 1, 243, 244, 245, 65_000, 65_523] {
        let rest = vec![0x5a; rest];
        let (before, after) = (packet((40_000, 80), &rest), packet((61_001, 8080), &rest));
        let bytes = u32::try_from(before.len()).expect("short");
        let from = (Port::new(40_000), Port::new(80));
        let to = (Port::new(61_001), Port::new(8080));
        assert_eq!(checksum(stored(&before), bytes, from, to), stored(&after));
    }
}

#[test]
fn chunks_open_and_end_an_association() {
    const DATA: u8 = 0;
    const COOKIE_ECHO: u8 = 10;
    assert_eq!(flags(chunk::INIT), tcp::SYN);
    assert_eq!(flags(chunk::INIT_ACK), tcp::SYN | tcp::ACK);
    for kind in [DATA, COOKIE_ECHO, 255] {
        assert_eq!(flags(kind), tcp::ACK);
    }
    assert_eq!(flags(chunk::ABORT), tcp::RST);
    for kind in [
        chunk::SHUTDOWN,
        chunk::SHUTDOWN_ACK,
        chunk::SHUTDOWN_COMPLETE,
    ] {
        assert_eq!(flags(kind) & tcp::FIN, tcp::FIN);
    }
}
