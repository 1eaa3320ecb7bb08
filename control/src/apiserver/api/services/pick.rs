//! Free addresses and ports.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnetwork::IpNetwork;
use rand::Rng as _;

use super::{Claims, ip_key, port_key};
use crate::apiserver::api::{Api, store_error};
use crate::status::ApiError;

/// Random tries before the whole range is looked through.
const RANDOM_TRIES: usize = 32;
/// Addresses at the start of a range that automatic choice leaves to fixed ones while it can.
const FIXED_BAND: u128 = 256;
/// Of larger ranges only so many addresses are used.
const MAX_ADDRESSES: u128 = 1 << 20;

/// Number of the last usable address, counted from the network address. IPv4 loses its broadcast address.
fn last_index(cidr: IpNetwork) -> u128 {
    match cidr {
        IpNetwork::V4(v4) => (1_u128 << (32 - u32::from(v4.prefix()))).saturating_sub(2),
        IpNetwork::V6(v6) => {
            let bits = 128 - u32::from(v6.prefix());
            1_u128.checked_shl(bits).map_or(u128::MAX, |size| size - 1)
        }
    }
}

fn nth(cidr: IpNetwork, n: u128) -> IpAddr {
    match cidr {
        IpNetwork::V4(v4) => {
            let base = u32::from(v4.network());
            IpAddr::V4(Ipv4Addr::from(
                base.wrapping_add(u32::try_from(n).unwrap_or(0)),
            ))
        }
        IpNetwork::V6(v6) => IpAddr::V6(Ipv6Addr::from(u128::from(v6.network()).wrapping_add(n))),
    }
}

/// Inside the range, and neither its network address nor its broadcast address.
pub(super) fn usable(cidr: IpNetwork, address: IpAddr) -> bool {
    cidr.contains(address) && address != nth(cidr, 0) && {
        let broadcast = match cidr {
            IpNetwork::V4(v4) => v4.prefix() < 31 && address == IpAddr::V4(v4.broadcast()),
            IpNetwork::V6(_) => false,
        };
        !broadcast
    }
}

impl Api {
    pub(super) async fn pick_ip(&self, cidr: IpNetwork) -> Result<IpAddr, ApiError> {
        let last = last_index(cidr).min(MAX_ADDRESSES);
        let band = FIXED_BAND.min(last / 16).max(1);
        for _ in 0..RANDOM_TRIES {
            let n = rand::rng().random_range(band.min(last)..=last.max(1));
            let ip = nth(cidr, n);
            if !self.is_taken(&ip_key(&ip.to_string())).await? {
                return Ok(ip);
            }
        }
        for n in (band..=last).chain(1..band) {
            let ip = nth(cidr, n);
            if !self.is_taken(&ip_key(&ip.to_string())).await? {
                return Ok(ip);
            }
        }
        Err(full(&format!("no cluster IP is free in {cidr}")))
    }

    pub(super) async fn pick_port(&self, protocol: &str, claims: &Claims) -> Result<u64, ApiError> {
        let range =
            u64::from(self.network.node_port_first)..=u64::from(self.network.node_port_last);
        for _ in 0..RANDOM_TRIES {
            let number = rand::rng().random_range(range.clone());
            if self.is_free_port(protocol, number, claims).await? {
                return Ok(number);
            }
        }
        for number in range.clone() {
            if self.is_free_port(protocol, number, claims).await? {
                return Ok(number);
            }
        }
        let (first, last) = (range.start(), range.end());
        Err(full(&format!(
            "no {protocol} node port is free in {first}-{last}"
        )))
    }

    pub(super) async fn is_free_port(
        &self,
        protocol: &str,
        number: u64,
        claims: &Claims,
    ) -> Result<bool, ApiError> {
        let key = port_key(protocol, number);
        if claims.contains_key(&key) {
            return Ok(false);
        }
        Ok(self.store.get(&key).await.map_err(store_error)?.is_none())
    }
}

fn full(message: &str) -> ApiError {
    ApiError::new(
        500,
        "InternalError",
        format!("Internal error occurred: {message}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_of_a_range_are_not_used() {
        let v4: IpNetwork = "10.96.0.0/16".parse().unwrap();
        let ip = |s: &str| s.parse::<IpAddr>().unwrap();
        assert!(!usable(v4, ip("10.96.0.0")));
        assert!(usable(v4, ip("10.96.0.1")));
        assert!(!usable(v4, ip("10.96.255.255")));
        assert!(!usable(v4, ip("192.0.2.1")));
        assert_eq!(nth(v4, last_index(v4)), ip("10.96.255.254"));
        let v6: IpNetwork = "fd00:10:96::/112".parse().unwrap();
        assert!(!usable(v6, ip("fd00:10:96::")));
        assert!(usable(v6, ip("fd00:10:96::ffff")));
    }
}
