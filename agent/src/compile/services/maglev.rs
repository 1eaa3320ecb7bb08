//! Maglev hashing (Eisenbud et al., «Maglev: A Fast and Reliable Software Network Load Balancer», NSDI 2016, section
//! 3.4): a table in which every backend has nearly the same number of places, the same on every node, and little of
//! which changes when a backend comes or goes.
//!
//! Each backend has its own order of all places, which follows from its address and port alone. Backends take turns;
//! each takes the first place of its order that is still free.

use std::net::IpAddr;

/// Address and port: what a backend is on every node alike.
pub type Key = (IpAddr, u16);

/// The place in `backends` that each slot leads to; empty when there are no backends, or more than slots. `size` is
/// prime, so that every step width reaches all slots. `backends` are sorted and each is there once.
#[must_use]
pub fn table(backends: &[Key], size: u32) -> Vec<u32> {
    if backends.is_empty() || backends.len() > size as usize {
        return Vec::new();
    }
    const FREE: u32 = u32::MAX;
    let mut orders: Vec<Order> = backends.iter().map(|key| Order::of(key, size)).collect();
    let mut table = vec![FREE; size as usize];
    let mut filled = 0;
    loop {
        for (backend, order) in (0u32..).zip(&mut orders) {
            let slot = loop {
                let slot = order.next(size);
                if table[slot as usize] == FREE {
                    break slot;
                }
            };
            table[slot as usize] = backend;
            filled += 1;
            if filled == size {
                return table;
            }
        }
    }
}

/// A walk over all slots.
struct Order {
    at: u32,
    step: u32,
}

impl Order {
    fn of(key: &Key, size: u32) -> Self {
        let size = u64::from(size);
        let (first, second) = hashes(key);
        let small = |value: u64| u32::try_from(value).unwrap_or_default();
        Self {
            at: small(first % size),
            step: small(second % (size - 1)) + 1,
        }
    }

    fn next(&mut self, size: u32) -> u32 {
        let slot = self.at;
        // Both are smaller than the size, which is far below the half of u32.
        self.at = (self.at + self.step) % size;
        slot
    }
}

/// Two independent hashes. Part of the contract between nodes of different versions: never change them.
fn hashes((address, port): &Key) -> (u64, u64) {
    let wide = match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => *v6,
    };
    let bits = wide.to_bits();
    let half = |bits: u128| u64::try_from(bits & u128::from(u64::MAX)).unwrap_or_default();
    let (high, low) = (half(bits >> 64), half(bits));
    let mixed = mix(mix(high ^ SEEDS[0]) ^ low);
    let mixed = mix(mixed ^ u64::from(*port));
    (mix(mixed ^ SEEDS[1]), mix(mixed ^ SEEDS[2]))
}

/// Digits of pi.
const SEEDS: [u64; 3] = [
    0x243f_6a88_85a3_08d3,
    0x1319_8a2e_0370_7344,
    0xa409_3822_299f_31d0,
];

/// The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every bit of the input reaches every bit of the result.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const SIZE: u32 = 4093;

    fn counts(table: &[u32], backends: usize) -> Vec<usize> {
        let mut counts = vec![0; backends];
        for backend in table {
            counts[*backend as usize] += 1;
        }
        counts
    }

    fn keys(limit: usize) -> impl Strategy<Value = Vec<Key>> {
        prop::collection::btree_set((any::<u32>(), 1u16..), 1..limit).prop_map(|set| {
            set.into_iter()
                .map(|(address, port)| (IpAddr::from(address.to_be_bytes()), port))
                .collect::<BTreeSet<_>>()
                .into_iter()
                .collect()
        })
    }

    #[test]
    fn no_backends_and_too_many_have_no_table() {
        let many: Vec<Key> = (0..SIZE + 1)
            .map(|n| (IpAddr::from(n.to_be_bytes()), 80))
            .collect();
        assert!(table(&[], SIZE).is_empty());
        assert!(table(&many, SIZE).is_empty());
        assert_eq!(table(&many[1..], SIZE).len(), SIZE as usize);
    }

    /// Nodes of different versions must agree: this table is part of the contract.
    #[test]
    fn the_table_of_known_backends_stays() {
        let backends: Vec<Key> = (1..4u8)
            .map(|n| (IpAddr::from([10, 244, 0, n]), 8080))
            .collect();
        assert_eq!(table(&backends, 13), KNOWN,);
    }

    const KNOWN: [u32; 13] = [0, 1, 1, 2, 0, 2, 1, 2, 0, 2, 1, 0, 0];

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Turns are equal, so no backend has more than one place more than another.
        #[test]
        fn places_are_balanced(backends in keys(200)) {
            let counts = counts(&table(&backends, SIZE), backends.len());
            let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
            prop_assert!(most - least <= 1, "{least} to {most}");
        }

        /// Without one backend: its own places must move, and of the others' few do. The paper measures below two
        /// per cent for tables a hundred times as large as the number of backends; the bound here is generous.
        #[test]
        fn little_changes_when_a_backend_goes(backends in keys(40), gone in any::<prop::sample::Index>()) {
            prop_assume!(backends.len() > 1);
            let gone = gone.index(backends.len());
            let mut left = backends.clone();
            left.remove(gone);
            let (before, after) = (table(&backends, SIZE), table(&left, SIZE));
            let moved = before
                .iter()
                .zip(&after)
                .filter(|(old, new)| {
                    let old = **old as usize;
                    old != gone && backends[old] != left[**new as usize]
                })
                .count();
            prop_assert!(moved <= SIZE as usize / 10, "{moved} of {SIZE} places moved without need");
        }
    }
}
