//! Incremental checksums against sums from scratch, and the layout's fingerprint.

use proptest::prelude::*;

use crate::address::{TCP, UDP};
use crate::checksum::{address_difference, apply, is_unfinished, port_difference};
use crate::{ABI_VERSION, Port, V4, V6};

fn sum(words: &[u8]) -> u16 {
    let mut sum: u32 = words
        .chunks(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).expect("folded")
}

/// Zero and all ones are the same number in one's complement.
fn same(a: u16, b: u16) -> bool {
    a == b || (a == 0 && b == 0xffff) || (a == 0xffff && b == 0)
}

proptest! {
    #[test]
    fn a_change_of_ipv4_addresses_and_ports_keeps_the_checksum_right(
        old in any::<[u8; 12]>(), new in any::<[u8; 12]>(), rest in any::<[u8; 16]>()
    ) {
        let quad = |b: &[u8; 12], at: usize| V4::new([b[at], b[at + 1], b[at + 2], b[at + 3]]);
        let port = |b: &[u8; 12], at: usize| Port::new(u16::from_be_bytes([b[at], b[at + 1]]));
        let before = sum(&[&old[..], &rest[..]].concat());
        let addresses = address_difference((&quad(&old, 0), &quad(&old, 4)), (&quad(&new, 0), &quad(&new, 4)));
        let ports = port_difference((port(&old, 8), port(&old, 10)), (port(&new, 8), port(&new, 10)));
        // Headers hold the sum in network order; the differences are of words as they lie in memory.
        let after = u16::from_be(apply(apply(before.to_be(), addresses), ports));
        prop_assert!(same(after, sum(&[&new[..], &rest[..]].concat())));
    }

    #[test]
    fn a_change_of_ipv6_addresses_keeps_the_checksum_right(
        old in any::<[[u8; 16]; 2]>(), new in any::<[[u8; 16]; 2]>(), rest in any::<[u8; 16]>()
    ) {
        let before = sum(&[&old[0][..], &old[1], &rest].concat());
        let difference = address_difference(
            (&V6::new(old[0]), &V6::new(old[1])),
            (&V6::new(new[0]), &V6::new(new[1])),
        );
        let after = u16::from_be(apply(before.to_be(), difference));
        prop_assert!(same(after, sum(&[&new[0][..], &new[1], &rest].concat())));
    }

    /// Of a pseudo header's sum nothing is ever 0 but the sum of zeroes, which no addresses have.
    #[test]
    fn a_checksum_of_the_pseudo_header_alone_is_unfinished(
        source in any::<[u8; 16]>(), destination in any::<[u8; 16]>(), length in 8_u16..,
        tcp in any::<bool>(), short in any::<bool>(), off_by in 1_u16..,
    ) {
        let protocol = if tcp { TCP } else { UDP };
        let [high, low] = length.to_be_bytes();
        let rest = [0, protocol, high, low];
        let is_unfinished = |checksum: u16| if short {
            let quad = |a: [u8; 16]| V4::new([a[0], a[1], a[2], a[3]]);
            is_unfinished(checksum, &quad(source), &quad(destination), protocol, length)
        } else {
            is_unfinished(checksum, &V6::new(source), &V6::new(destination), protocol, length)
        };
        let bytes = if short { 4 } else { 16 };
        let pseudo = !sum(&[&source[..bytes], &destination[..bytes], &rest].concat());
        prop_assert!(is_unfinished(pseudo.to_be()));
        prop_assert!(!is_unfinished(pseudo.wrapping_add(off_by).to_be()));
    }

    #[test]
    fn addresses_keep_their_octets(v4 in any::<[u8; 4]>(), v6 in any::<[u8; 16]>()) {
        prop_assert_eq!(V4::new(v4).octets(), v4);
        prop_assert_eq!(V6::new(v6).octets(), v6);
    }
}

/// The layouts of [`ABI_VERSION`]. When this fails, a layout changed: take a new version, for [`crate::ABI_SAME_SINCE`] too,
/// then a new fingerprint.
#[test]
fn layouts_belong_to_their_abi_version() {
    use crate::layout::{
        Backend, Endpoint, Flow, FlowKey, Frontend, FrontendKey, Link, Node, SlotKey,
    };
    use core::mem::{offset_of, size_of};
    // Verdict and generation are one word, which no store may split.
    assert_eq!(offset_of!(Flow<V4>, policy) % 8, 0);
    assert_eq!(offset_of!(Flow<V6>, policy) % 8, 0);
    let fingerprint = [
        size_of::<FlowKey<V6>>(),
        offset_of!(FlowKey<V6>, protocol),
        size_of::<Flow<V6>>(),
        offset_of!(Flow<V6>, backend_id),
        offset_of!(Flow<V6>, policy),
        offset_of!(Flow<V6>, created_s),
        offset_of!(Flow<V6>, protocol),
        size_of::<FrontendKey<V6>>(),
        size_of::<Frontend>(),
        offset_of!(Frontend, affinity_s),
        size_of::<SlotKey>(),
        size_of::<Backend<V6>>(),
        offset_of!(Backend<V6>, service_id),
        size_of::<Endpoint>(),
        offset_of!(Endpoint, pod_mac),
        size_of::<Link>(),
        size_of::<Node<V6>>(),
        offset_of!(Node<V6>, uplink_ifindex),
    ];
    let expected = [
        40, 36, 88, 36, 48, 56, 76, 20, 24, 16, 8, 24, 20, 20, 8, 24, 64, 36,
    ];
    assert_eq!((ABI_VERSION, fingerprint), (4, expected));
}
