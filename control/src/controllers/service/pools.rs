//! Address pools as an operator writes them. Pure.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnetwork::IpNetwork;
use serde::Deserialize;
use serde_json::Value;

use crate::controllers::runtime::selector::Selector;

/// More pools than this are refused.
const POOL_LIMIT: usize = 1000;

/// Why pools could not be read. The message names the pool and what to change.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct PoolError(String);

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Written {
    name: String,
    /// `CIDR` or `FIRST-LAST`.
    ranges: Vec<String>,
    #[serde(default = "yes")]
    auto_assign: bool,
    /// A label selector over Services; every Service when it is left out.
    service_selector: Option<Value>,
    /// Leaves out addresses that some clients take for a network or broadcast address: the ends of a CIDR, and IPv4
    /// addresses that end in .0 or .255.
    #[serde(default, rename = "avoidBuggyIPs")]
    avoid_buggy_ips: bool,
}

fn yes() -> bool {
    true
}

/// Addresses from first to last, both included, of one family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    first: u128,
    last: u128,
    v4: bool,
}

/// A pool of addresses.
#[derive(Debug)]
pub(super) struct Pool {
    pub(super) name: String,
    pub(super) auto_assign: bool,
    ranges: Vec<Range>,
    selector: Option<Selector>,
    avoid_buggy_ips: bool,
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => u128::from(u32::from(v4)),
        IpAddr::V6(v6) => u128::from(v6),
    }
}

impl Range {
    fn new(first: IpAddr, last: IpAddr) -> Option<Self> {
        let (from, to) = (number(first), number(last));
        (first.is_ipv4() == last.is_ipv4() && from <= to).then_some(Self {
            first: from,
            last: to,
            v4: first.is_ipv4(),
        })
    }

    fn of(net: IpNetwork) -> Option<Self> {
        Self::new(net.network(), net.broadcast())
    }

    fn overlaps(self, other: Self) -> bool {
        self.v4 == other.v4 && self.first <= other.last && other.first <= self.last
    }

    fn address(self, n: u128) -> IpAddr {
        if self.v4 {
            Ipv4Addr::from(u32::try_from(n).unwrap_or(u32::MAX)).into()
        } else {
            Ipv6Addr::from(n).into()
        }
    }
}

impl Pool {
    /// Whether a Service may have addresses of this pool.
    pub(super) fn serves(&self, service_labels: Option<&serde_json::Map<String, Value>>) -> bool {
        let selector = self.selector.as_ref();
        selector.is_none_or(|selector| selector.matches(service_labels))
    }

    pub(super) fn contains(&self, address: IpAddr) -> bool {
        let n = number(address);
        let inside = |r: &Range| r.v4 == address.is_ipv4() && (r.first..=r.last).contains(&n);
        self.ranges.iter().any(inside) && self.is_usable(n, address.is_ipv4())
    }

    fn is_usable(&self, n: u128, v4: bool) -> bool {
        !(self.avoid_buggy_ips && v4 && matches!(n & 0xff, 0 | 0xff))
    }

    /// The first address of a family for which `is_free` holds. It is asked for a contiguous run of addresses that are
    /// taken, and one more.
    pub(super) fn first_free(&self, v4: bool, is_free: impl Fn(IpAddr) -> bool) -> Option<IpAddr> {
        for range in self.ranges.iter().filter(|range| range.v4 == v4) {
            let mut n = range.first;
            loop {
                let address = range.address(n);
                if self.is_usable(n, v4) && is_free(address) {
                    return Some(address);
                }
                if n == range.last {
                    break;
                }
                n += 1;
            }
        }
        None
    }
}

/// Reads a list of pools, YAML or JSON. `reserved` are ranges of the cluster, by what they are for.
///
/// # Errors
/// [`PoolError`] for text that is no list of pools, unknown keys, ranges that are none, overlap, or belong to the
/// cluster.
pub(super) fn parse(text: &str, reserved: &[(IpNetwork, &str)]) -> Result<Vec<Pool>, PoolError> {
    let written: Vec<Written> = serde_yaml_ng::from_str(text)
        .map_err(|e| PoolError(format!("not a list of pools: {e}")))?;
    if written.len() > POOL_LIMIT {
        let count = written.len();
        return Err(PoolError(format!(
            "{count} pools are more than {POOL_LIMIT}"
        )));
    }
    let mut pools: Vec<Pool> = Vec::new();
    for pool in written {
        let pool = read(pool, reserved)?;
        for other in &pools {
            if other.name == pool.name {
                return Err(PoolError(format!("two pools are named {}", pool.name)));
            }
            let both = |r: &Range| other.ranges.iter().any(|o| o.overlaps(*r));
            if pool.ranges.iter().any(both) {
                let why = format!("pools {} and {} overlap", other.name, pool.name);
                return Err(PoolError(why));
            }
        }
        pools.push(pool);
    }
    Ok(pools)
}

fn read(written: Written, reserved: &[(IpNetwork, &str)]) -> Result<Pool, PoolError> {
    let name = written.name;
    if name.is_empty() {
        return Err(PoolError("a pool has no name".into()));
    }
    let mut ranges = Vec::new();
    for text in &written.ranges {
        let range = read_range(text, written.avoid_buggy_ips).ok_or_else(|| {
            PoolError(format!(
                "pool {name}: {text:?} is neither CIDR nor FIRST-LAST of one family"
            ))
        })?;
        let taken = reserved
            .iter()
            .find(|(net, _)| Range::of(*net).is_some_and(|r| r.overlaps(range)));
        if let Some((net, what)) = taken {
            return Err(PoolError(format!(
                "pool {name}: {text} overlaps {net}, which is for {what}"
            )));
        }
        if !is_unicast(range) {
            return Err(PoolError(format!(
                "pool {name}: {text} holds addresses that no client can reach"
            )));
        }
        ranges.push(range);
    }
    let selector = match written.service_selector {
        None => None,
        Some(selector) if selector.is_object() => {
            Some(Selector::from_label_selector(Some(&selector)))
        }
        Some(_) => {
            return Err(PoolError(format!(
                "pool {name}: serviceSelector is no label selector"
            )));
        }
    };
    Ok(Pool {
        name,
        auto_assign: written.auto_assign,
        ranges,
        selector,
        avoid_buggy_ips: written.avoid_buggy_ips,
    })
}

fn read_range(text: &str, inner_only: bool) -> Option<Range> {
    let text = text.trim();
    if let Some((first, last)) = text.split_once('-') {
        return Range::new(first.trim().parse().ok()?, last.trim().parse().ok()?);
    }
    if !text.contains('/') {
        let address = text.parse().ok()?;
        return Range::new(address, address);
    }
    let net: IpNetwork = text.parse().ok()?;
    let mut range = Range::of(net)?;
    if inner_only && net.is_ipv4() && net.prefix() < 31 {
        range.first += 1;
        range.last -= 1;
    }
    Some(range)
}

/// No loopback, link-local, multicast or unspecified address at either end.
fn is_unicast(range: Range) -> bool {
    [range.first, range.last]
        .into_iter()
        .all(|n| match range.address(n) {
            IpAddr::V4(v4) => {
                !(v4.is_loopback()
                    || v4.is_link_local()
                    || v4.is_multicast()
                    || v4.is_unspecified()
                    || v4.is_broadcast())
            }
            IpAddr::V6(v6) => {
                !(v6.is_loopback()
                    || v6.is_unicast_link_local()
                    || v6.is_multicast()
                    || v6.is_unspecified())
            }
        })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const POOLS: &str = "
- name: edge
  ranges: [192.0.2.0/29, 198.51.100.7-198.51.100.9, '2001:db8::/64']
  avoidBuggyIPs: true
- name: asked
  ranges: [203.0.113.5]
  autoAssign: false
  serviceSelector: {matchLabels: {team: a}}
";

    #[test]
    fn ranges_in_three_forms() {
        let pools = parse(POOLS, &[]).unwrap();
        let [edge, asked] = pools.as_slice() else {
            panic!()
        };
        let ip = |s: &str| s.parse::<IpAddr>().unwrap();
        for (address, inside) in [
            ("192.0.2.0", false),
            ("192.0.2.1", true),
            ("192.0.2.6", true),
            ("192.0.2.7", false),
            ("198.51.100.6", false),
            ("198.51.100.9", true),
            ("2001:db8::", true),
            ("2001:db8:0:1::", false),
        ] {
            assert_eq!(edge.contains(ip(address)), inside, "{address}");
        }
        let taken = [ip("192.0.2.1"), ip("192.0.2.2")];
        assert_eq!(
            edge.first_free(true, |a| !taken.contains(&a)),
            Some(ip("192.0.2.3"))
        );
        assert_eq!(edge.first_free(true, |_| false), None);
        assert_eq!(asked.first_free(true, |_| true), Some(ip("203.0.113.5")));
        assert_eq!(asked.first_free(false, |_| true), None);
        let labels = json!({"team": "a"});
        assert!(asked.serves(labels.as_object()));
        assert!(!asked.serves(None));
        assert!(edge.serves(None) && edge.auto_assign && !asked.auto_assign);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let reserved = [("10.96.0.0/16".parse().unwrap(), "cluster IPs")];
        for (text, why) in [
            ("nothing", "not a list"),
            ("- {name: a, range: []}", "unknown field `range`"),
            ("- {name: '', ranges: []}", "has no name"),
            ("- {name: a, ranges: [ten]}", "neither CIDR nor FIRST-LAST"),
            (
                "- {name: a, ranges: [192.0.2.9-192.0.2.1]}",
                "neither CIDR nor FIRST-LAST",
            ),
            (
                "- {name: a, ranges: ['192.0.2.9-2001:db8::1']}",
                "neither CIDR nor FIRST-LAST",
            ),
            ("- {name: a, ranges: [10.96.4.0/24]}", "for cluster IPs"),
            ("- {name: a, ranges: [127.0.0.0/30]}", "no client can reach"),
            (
                "[{name: a, ranges: [192.0.2.0/24]}, {name: b, ranges: [192.0.2.9]}]",
                "a and b overlap",
            ),
            (
                "[{name: a, ranges: []}, {name: a, ranges: []}]",
                "two pools are named a",
            ),
        ] {
            let error = parse(text, &reserved).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
        assert!(parse("[]", &reserved).unwrap().is_empty());
    }
}
