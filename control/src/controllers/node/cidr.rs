//! The pod networks of nodes: the first free share of each cluster network. Pure.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, Ipv6Addr};

use ipnetwork::{IpNetwork, Ipv4Network, Ipv6Network};

/// Shares looked at before a network counts as full.
const SEARCH_LIMIT: u128 = 1 << 16;

/// The first share of `network` with this prefix length that is not in `used`; `None` when all are taken.
pub(super) fn first_free(
    network: IpNetwork,
    prefix: u8,
    used: &BTreeSet<IpNetwork>,
) -> Option<IpNetwork> {
    let own = network.prefix();
    let bits: u8 = if network.is_ipv4() { 32 } else { 128 };
    if prefix < own || prefix > bits {
        return None;
    }
    let shares = 1_u128
        .checked_shl(u32::from(prefix - own))
        .unwrap_or(u128::MAX);
    (0..shares.min(SEARCH_LIMIT))
        .filter_map(|n| share(network, prefix, n))
        .find(|candidate| !used.iter().any(|taken| overlaps(*taken, *candidate)))
}

fn share(network: IpNetwork, prefix: u8, n: u128) -> Option<IpNetwork> {
    match network {
        IpNetwork::V4(net) => {
            let step = u32::from(32 - prefix);
            let offset = u32::try_from(n.checked_shl(step)?).ok()?;
            let address = u32::from(net.network()).checked_add(offset)?;
            Ipv4Network::new(Ipv4Addr::from(address), prefix)
                .ok()
                .map(IpNetwork::V4)
        }
        IpNetwork::V6(net) => {
            let offset = n.checked_shl(u32::from(128 - prefix))?;
            let address = u128::from(net.network()).checked_add(offset)?;
            Ipv6Network::new(Ipv6Addr::from(address), prefix)
                .ok()
                .map(IpNetwork::V6)
        }
    }
}

/// Of two networks that overlap, one contains the other's address.
fn overlaps(a: IpNetwork, b: IpNetwork) -> bool {
    a.contains(b.network()) || b.contains(a.network())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(text: &str) -> IpNetwork {
        text.parse().unwrap()
    }

    #[test]
    fn shares_are_given_in_order_and_gaps_are_filled() {
        let mut used = BTreeSet::new();
        for want in ["10.244.0.0/24", "10.244.1.0/24", "10.244.2.0/24"] {
            let free = first_free(net("10.244.0.0/16"), 24, &used).unwrap();
            assert_eq!(free, net(want));
            used.insert(free);
        }
        used.remove(&net("10.244.1.0/24"));
        assert_eq!(
            first_free(net("10.244.0.0/16"), 24, &used),
            Some(net("10.244.1.0/24"))
        );
    }

    #[test]
    fn both_families_and_foreign_sizes_are_respected() {
        let used = BTreeSet::from([net("fd00:10:244::/64"), net("10.244.0.0/17")]);
        let free = first_free(net("fd00:10:244::/56"), 64, &used);
        assert_eq!(free, Some(net("fd00:10:244:1::/64")));
        let free = first_free(net("10.244.0.0/16"), 24, &used);
        assert_eq!(free, Some(net("10.244.128.0/24")));
    }

    #[test]
    fn a_full_network_and_a_wrong_prefix_give_nothing() {
        let used = BTreeSet::from([net("10.0.0.0/25"), net("10.0.0.128/25")]);
        assert_eq!(first_free(net("10.0.0.0/24"), 25, &used), None);
        assert_eq!(first_free(net("10.0.0.0/24"), 16, &BTreeSet::new()), None);
    }
}
