//! Refusals against answers written from scratch.

use proptest::prelude::*;

use super::tables::TestFamily;
use super::wire::{WireFamily, message, packet, sum};
use crate::address::{TCP, UDP};
use crate::packet::{LATER_FRAGMENT, Packet, WITH_PORTS, tcp};
use crate::refuse::{Quote, Refuse, Segment, Unreachable, may_answer};
use crate::{Port, V4, V6};

fn request<A: TestFamily>(protocol: u8, ports: (u16, u16)) -> Packet<A> {
    Packet {
        source: A::pod(1),
        destination: A::service(1),
        source_port: Port::new(ports.0),
        destination_port: Port::new(ports.1),
        protocol,
        flags: WITH_PORTS,
        ..Packet::default()
    }
}

fn bytes_of<T: Copy + AsRef<[u16]>>(words: T) -> Vec<u8> {
    words
        .as_ref()
        .iter()
        .flat_map(|word| word.to_ne_bytes())
        .collect()
}

/// What differs between two nodes' headers and means nothing: identification and remaining hops.
fn without_taste<A: WireFamily>(mut bytes: Vec<u8>) -> Vec<u8> {
    if let Some(at) = A::CHECKSUM {
        bytes[4..6].fill(0);
        bytes[8] = 0;
        bytes[at..at + 2].fill(0);
    } else {
        bytes[7] = 0;
    }
    bytes
}

fn notice<A: TestFamily + WireFamily + Refuse>(
    ports: (u16, u16),
    options: &[u8],
    what: Unreachable,
) -> Result<(), TestCaseError>
where
    A::Notice: AsRef<[u16]>,
{
    let request = request::<A>(UDP, ports);
    let source = (request.source, request.source_port);
    let destination = (request.destination, request.destination_port);
    let datagram = packet(source, destination, UDP, true, b"what it asked for");
    // Options or extensions lie between the headers; what is quoted ends eight bytes after them.
    let mut quote = datagram[..A::HEADER].to_vec();
    quote.extend(options);
    quote.extend(&datagram[A::HEADER..A::HEADER + 8]);
    let words = quote
        .chunks(2)
        .map(|pair| u32::from(u16::from_ne_bytes([pair[0], pair[1]])));
    let about = Quote {
        bytes: u16::try_from(quote.len()).expect("short"),
        sum: words.sum(),
    };
    let mut got = bytes_of(A::notice(&request, what, &about));
    got.extend(&quote);
    let kind = match (what, A::CHECKSUM.is_some()) {
        (Unreachable::Port, true) => (3, 3),
        (Unreachable::Host, true) => (3, 1),
        (Unreachable::Port, false) => (1, 4),
        (Unreachable::Host, false) => (1, 3),
    };
    if let Some(at) = A::CHECKSUM {
        prop_assert_eq!(sum(&got[..A::HEADER]), 0, "header checksum at {}", at);
    }
    let wanted = message(request.destination, request.source, kind, [0; 4], &quote);
    prop_assert_eq!(without_taste::<A>(got), without_taste::<A>(wanted));
    Ok(())
}

/// The reset that a host without a listener sends.
fn reset<A: TestFamily + WireFamily + Refuse>(segment: Segment) -> Result<(), TestCaseError>
where
    A::Reset: AsRef<[u16]>,
{
    let request = Packet {
        tcp_flags: segment.flags,
        ..request::<A>(TCP, (40_000, 80))
    };
    let got = bytes_of(A::reset(&request, &segment));
    let word = |at: usize| u32::from_be_bytes(got[at..at + 4].try_into().expect("four bytes"));
    let at = A::HEADER;
    let syn_or_fin =
        u32::from(segment.flags & tcp::SYN != 0) + u32::from(segment.flags & tcp::FIN != 0);
    if segment.flags & tcp::ACK != 0 {
        prop_assert_eq!(
            (word(at + 4), got[at + 13]),
            (segment.acknowledgement, tcp::RST)
        );
    } else {
        let end = segment
            .sequence
            .wrapping_add(segment.payload)
            .wrapping_add(syn_or_fin);
        prop_assert_eq!(
            (word(at + 4), word(at + 8), got[at + 13]),
            (0, end, tcp::RST | tcp::ACK)
        );
    }
    let mut covered = request.destination.bytes();
    covered.extend(request.source.bytes());
    covered.extend([0, TCP, 0, 20]);
    covered.extend(&got[at..]);
    prop_assert_eq!(sum(&covered), 0);
    prop_assert_eq!(&got[at..at + 4], [0, 80, 0x9c, 0x40]);
    Ok(())
}

proptest! {
    #[test]
    fn a_notice_quotes_headers_of_every_length(
        ports in any::<(u16, u16)>(), options in prop::collection::vec(any::<[u8; 4]>(), 0..10), host in any::<bool>()
    ) {
        let what = if host { Unreachable::Host } else { Unreachable::Port };
        notice::<V4>(ports, &options.concat(), what)?;
        notice::<V6>(ports, &options.concat(), what)?;
    }

    #[test]
    fn a_reset_is_one_that_the_sender_accepts(
        sequence in any::<u32>(), acknowledgement in any::<u32>(), flags in any::<u8>(), payload in 0u32..65_000
    ) {
        let segment = Segment { sequence, acknowledgement, flags, payload };
        reset::<V4>(segment)?;
        reset::<V6>(segment)?;
    }
}

#[test]
fn nobody_is_told_about_later_fragments_or_groups() {
    fn check<A: TestFamily>(group: A) {
        let good = request::<A>(UDP, (1, 2));
        assert!(may_answer(&good));
        assert!(!may_answer(&Packet {
            flags: LATER_FRAGMENT,
            ..good
        }));
        assert!(!may_answer(&Packet {
            destination: group,
            ..good
        }));
        assert!(!may_answer(&Packet {
            source: group,
            ..good
        }));
        assert!(!may_answer(&Packet {
            source: A::default(),
            ..good
        }));
    }
    check(V4::new([224, 0, 0, 251]));
    check(V4::new([255, 255, 255, 255]));
    check(V6::new([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]));
}
