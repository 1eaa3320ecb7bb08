//! Which addresses are taken, and which one is next. Pure: the caller keeps records durable and tells the time.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use ipnetwork::IpNetwork;

use super::record::{Key, Record};

/// Addresses at the start of a range that pods never get: the network itself and one kept for the node.
const RESERVED_FIRST: u128 = 2;

/// No free address in the ranges of a family.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) struct Exhausted {
    pub(super) ranges: Vec<IpNetwork>,
    pub(super) usable: u128,
    /// Addresses that nobody has and that still rest, and when the first of them may be given again.
    pub(super) resting: usize,
    pub(super) wait: Duration,
}

impl fmt::Display for Exhausted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranges: Vec<String> = self.ranges.iter().map(ToString::to_string).collect();
        write!(f, "no free address in pod range {}: ", ranges.join(", "))?;
        if self.resting == 0 {
            let usable = self.usable;
            return write!(
                f,
                "all {usable} are in use; delete pods or give the node a larger range"
            );
        }
        write!(
            f,
            "{} of {} were a pod's a moment ago and rest, the first for {:.1} s more (cni.address_cool_down_s); \
             try again then, or give the node a larger range",
            self.resting,
            self.usable,
            self.wait.as_secs_f64()
        )
    }
}

/// An address that was asked for cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unavailable {
    #[error("{0} is in no pod range of this node; ask for another address, or for none")]
    Foreign(IpAddr),
    #[error("{0} belongs to {1}; it is free again once that is gone")]
    Taken(IpAddr, Key),
}

/// The addresses of one node.
#[derive(Debug, Default)]
pub(super) struct Ipam {
    /// How long a freed address rests: peers may still hold state about its former owner.
    cool_down: Duration,
    taken: BTreeMap<IpAddr, Key>,
    /// When an address was freed, by the caller's clock.
    freed: BTreeMap<IpAddr, Duration>,
    /// The address given out last, per family.
    last: BTreeMap<bool, IpAddr>,
    sequence: u64,
}

impl Ipam {
    /// The state that a set of records stands for.
    pub(super) fn from_records<'a>(
        cool_down: Duration,
        records: impl IntoIterator<Item = &'a Record>,
    ) -> Self {
        let mut ipam = Self {
            cool_down,
            ..Self::default()
        };
        let mut newest: BTreeMap<bool, u64> = BTreeMap::new();
        for record in records {
            ipam.sequence = ipam.sequence.max(record.sequence);
            for address in &record.addresses {
                ipam.taken.insert(*address, record.key.clone());
                let family = newest.entry(address.is_ipv4()).or_default();
                if record.sequence >= *family {
                    *family = record.sequence;
                    ipam.last.insert(address.is_ipv4(), *address);
                }
            }
        }
        ipam
    }

    /// Lets addresses rest that an earlier agent freed `ago`, as seen at `now`.
    pub(super) fn rest(&mut self, addresses: &[IpAddr], ago: Duration, now: Duration) {
        for address in addresses {
            if ago < self.cool_down && !self.taken.contains_key(address) {
                self.freed.insert(*address, now.saturating_sub(ago));
            }
        }
    }

    /// Takes one address of every family for `key`: the next free one after the last given out.
    pub(super) fn allocate(
        &mut self,
        ranges: &[IpNetwork],
        key: &Key,
        now: Duration,
    ) -> Result<(Vec<IpAddr>, u64), Exhausted> {
        let chosen = self.choose_each(ranges, now)?;
        for address in &chosen {
            self.last.insert(address.is_ipv4(), *address);
        }
        let sequence = self.take(&chosen, key);
        Ok((chosen, sequence))
    }

    /// Gives out the very addresses that somebody asked for, resting ones too; all of them or none.
    pub(super) fn allocate_wanted(
        &mut self,
        wanted: &[IpAddr],
        ranges: &[IpNetwork],
        key: &Key,
    ) -> Result<u64, Unavailable> {
        for address in wanted {
            if !ranges.iter().any(|range| range.contains(*address)) {
                return Err(Unavailable::Foreign(*address));
            }
            if let Some(owner) = self.taken.get(address) {
                return Err(Unavailable::Taken(*address, owner.clone()));
            }
        }
        Ok(self.take(wanted, key))
    }

    /// Notes addresses that an IPAM plugin has given to the attachment.
    pub(super) fn adopt(&mut self, given: &[IpAddr], key: &Key) -> Result<u64, Unavailable> {
        match given.iter().find_map(|ip| Some((*ip, self.taken.get(ip)?))) {
            Some((address, owner)) => Err(Unavailable::Taken(address, owner.clone())),
            None => Ok(self.take(given, key)),
        }
    }

    fn take(&mut self, chosen: &[IpAddr], key: &Key) -> u64 {
        for address in chosen {
            self.taken.insert(*address, key.clone());
            self.freed.remove(address);
        }
        self.sequence += 1;
        self.sequence
    }

    /// Gives back addresses that no pod has used: they need no rest.
    pub(super) fn give_back(&mut self, key: &Key, addresses: &[IpAddr]) {
        for address in addresses {
            if self.taken.get(address) == Some(key) {
                self.taken.remove(address);
            }
        }
    }

    /// Gives the addresses back, unless another attachment has them.
    pub(super) fn release(&mut self, key: &Key, addresses: &[IpAddr], now: Duration) {
        for address in addresses {
            if self.taken.get(address) == Some(key) {
                self.taken.remove(address);
                self.freed.insert(*address, now);
            }
        }
        let cool_down = self.cool_down;
        self.freed
            .retain(|_, at| now.saturating_sub(*at) < cool_down);
    }

    /// True when every family has a free address.
    pub(super) fn has_room(&self, ranges: &[IpNetwork], now: Duration) -> Result<(), Exhausted> {
        self.choose_each(ranges, now).map(|_| ())
    }

    /// Addresses that rest, each with what is left of it.
    pub(super) fn resting(&self, now: Duration) -> Vec<(IpAddr, Duration)> {
        let left = |at: Duration| self.cool_down.saturating_sub(now.saturating_sub(at));
        let all = self.freed.iter().map(|(address, at)| (*address, left(*at)));
        all.filter(|(_, left)| !left.is_zero()).collect()
    }

    fn choose_each(&self, ranges: &[IpNetwork], now: Duration) -> Result<Vec<IpAddr>, Exhausted> {
        let families: BTreeSet<bool> = ranges.iter().map(|r| !r.is_ipv4()).collect();
        let of = |v6: bool| ranges.iter().copied().filter(move |r| r.is_ipv6() == v6);
        let chosen = families
            .into_iter()
            .map(|v6| self.choose(&of(v6).collect::<Vec<_>>(), now));
        chosen.collect()
    }

    /// The next free address of a family, from the range that gave the last one on.
    fn choose(&self, ranges: &[IpNetwork], now: Duration) -> Result<IpAddr, Exhausted> {
        let last = ranges
            .first()
            .and_then(|range| self.last.get(&range.is_ipv4()));
        let first = last
            .and_then(|last| ranges.iter().position(|range| range.contains(*last)))
            .unwrap_or(0);
        let (before, from) = ranges.split_at(first);
        let mut full = Exhausted {
            ranges: ranges.to_vec(),
            usable: 0,
            resting: 0,
            wait: self.cool_down,
        };
        for range in from.iter().chain(before) {
            let start = last.filter(|last| range.contains(**last));
            if let Some(address) = self.next_in(*range, start, now, &mut full) {
                return Ok(address);
            }
        }
        Err(full)
    }

    /// Walks one range; what keeps its addresses is added to `full`.
    fn next_in(
        &self,
        cidr: IpNetwork,
        last: Option<&IpAddr>,
        now: Duration,
        full: &mut Exhausted,
    ) -> Option<IpAddr> {
        let range = Range::of(cidr);
        let start = last.map_or(0, |last| {
            number(*last).wrapping_sub(range.first).wrapping_add(1)
        });
        full.usable = full.usable.saturating_add(range.usable);
        // Every step but the last meets an address that is taken or resting, so the walk is short even in a /64.
        for step in 0..range.usable {
            let address = range.address((start % range.usable + step) % range.usable);
            if self.taken.contains_key(&address) {
                continue;
            }
            let rested = self.freed.get(&address).map(|at| now.saturating_sub(*at));
            match rested.filter(|rested| *rested < self.cool_down) {
                Some(rested) => {
                    full.resting += 1;
                    full.wait = full.wait.min(self.cool_down.saturating_sub(rested));
                }
                None => return Some(address),
            }
        }
        None
    }
}

/// The usable part of a network.
struct Range {
    v4: bool,
    first: u128,
    usable: u128,
}

impl Range {
    fn of(cidr: IpNetwork) -> Self {
        let v4 = cidr.is_ipv4();
        let bits = if v4 { 32_u32 } else { 128 } - u32::from(cidr.prefix());
        let size = 1_u128.checked_shl(bits).unwrap_or(u128::MAX);
        let network = number(cidr.network());
        // Ranges too small to spare any address are used whole, like /31 and /32 in RFC 3021.
        let broadcast = u128::from(v4);
        let (first, usable) = if size <= RESERVED_FIRST + broadcast {
            (network, size)
        } else {
            (network + RESERVED_FIRST, size - RESERVED_FIRST - broadcast)
        };
        Self { v4, first, usable }
    }

    fn address(&self, offset: u128) -> IpAddr {
        let value = self.first + offset;
        if self.v4 {
            IpAddr::V4(u32::try_from(value).unwrap_or(u32::MAX).into())
        } else {
            IpAddr::V6(value.into())
        }
    }
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => u128::from(u32::from(v4)),
        IpAddr::V6(v6) => v6.into(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, HashMap};

    use proptest::prelude::*;

    use super::*;

    const LATER: Duration = Duration::from_secs(3600);

    fn key(n: u32) -> Key {
        Key {
            container_id: format!("c{n}"),
            if_name: "eth0".into(),
        }
    }

    const REST: Duration = Duration::from_secs(30);

    fn ipam() -> Ipam {
        Ipam::from_records(REST, [])
    }

    fn nets(texts: &[&str]) -> Vec<IpNetwork> {
        texts.iter().map(|t| t.parse().unwrap()).collect()
    }

    #[test]
    fn a_slash_29_holds_five_pods_and_says_so_when_full() {
        let cidrs = nets(&["10.0.0.0/29", "fd00::/64"]);
        let mut ipam = ipam();
        let given: BTreeSet<IpAddr> = (0..5)
            .map(|n| ipam.allocate(&cidrs, &key(n), LATER).unwrap().0[0])
            .collect();
        assert_eq!(given.len(), 5);
        assert_eq!(given.first().unwrap().to_string(), "10.0.0.2");
        let error = ipam.allocate(&cidrs, &key(9), LATER).unwrap_err();
        assert!(error.to_string().contains("10.0.0.0/29") && error.to_string().contains('5'));
        assert_eq!(ipam.has_room(&cidrs, LATER), Err(error));
        let v6 = nets(&["fd00::/64"]);
        assert_eq!(
            ipam.allocate(&v6, &key(9), LATER).unwrap().0[0].to_string(),
            "fd00::7",
            "a failed allocation takes nothing of the other range"
        );
    }

    #[test]
    fn freed_addresses_rest_before_somebody_else_gets_them() {
        let cidrs = nets(&["10.0.0.0/29"]);
        let mut ipam = ipam();
        let at = |s| Duration::from_secs(s);
        let first = ipam.allocate(&cidrs, &key(0), at(100)).unwrap().0;
        ipam.release(&key(0), &first, at(100));
        for n in 1..5 {
            assert_ne!(ipam.allocate(&cidrs, &key(n), at(101)).unwrap().0, first);
        }
        let full = ipam.allocate(&cidrs, &key(5), at(118)).unwrap_err();
        assert_eq!((full.resting, full.wait), (1, at(12)));
        assert!(full.to_string().contains("12.0 s"), "{full}");
        assert_eq!(ipam.resting(at(118)), [(first[0], at(12))]);
        // A reservation that came to nothing has used nothing.
        let second = ipam.allocate(&cidrs, &key(5), at(130)).unwrap().0;
        assert_eq!(second, first);
        ipam.give_back(&key(5), &second);
        assert_eq!(ipam.allocate(&cidrs, &key(6), at(130)).unwrap().0, first);
    }

    #[test]
    fn a_restart_does_not_end_a_rest() {
        let cidrs = nets(&["10.0.0.0/30"]);
        let at = |s| Duration::from_secs(s);
        let address: Vec<IpAddr> = vec!["10.0.0.2".parse().unwrap()];
        for (ago, free) in [(at(0), false), (at(29), false), (at(30), true)] {
            let mut ipam = ipam();
            ipam.rest(&address, ago, at(1000));
            assert_eq!(ipam.has_room(&cidrs, at(1000)).is_ok(), free, "{ago:?}");
            assert!(ipam.has_room(&cidrs, at(1030)).is_ok());
        }
    }

    #[test]
    fn a_second_range_goes_on_where_the_first_is_full() {
        let cidrs = nets(&["10.0.0.0/30", "fd00::/64", "10.9.0.0/30", "10.8.0.4/32"]);
        let mut ipam = ipam();
        let given: Vec<String> = (0..3)
            .map(|n| ipam.allocate(&cidrs, &key(n), LATER).unwrap().0)
            .inspect(|addresses| assert_eq!(addresses.len(), 2, "one of each family"))
            .map(|addresses| addresses[0].to_string())
            .collect();
        assert_eq!(given, ["10.0.0.2", "10.9.0.2", "10.8.0.4"]);
        let full = ipam.allocate(&cidrs, &key(9), LATER).unwrap_err();
        assert_eq!((full.usable, full.ranges.len()), (3, 3));
        ipam.release(&key(0), &["10.0.0.2".parse().unwrap()], LATER);
        let again = ipam.allocate(&cidrs, &key(9), 2 * LATER).unwrap().0;
        assert_eq!(again[0].to_string(), "10.0.0.2");
    }

    #[test]
    fn tiny_and_huge_ranges_work() {
        for (cidr, first) in [
            ("10.0.0.7/32", "10.0.0.7"),
            ("10.0.0.6/31", "10.0.0.6"),
            ("0.0.0.0/0", "0.0.0.2"),
            ("::/0", "::2"),
        ] {
            let given = ipam().allocate(&nets(&[cidr]), &key(0), LATER).unwrap().0;
            assert_eq!(given[0].to_string(), first);
        }
    }

    #[test]
    fn wanted_addresses_are_given_when_they_are_free_and_of_this_node() {
        let mut ipam = ipam();
        let cidrs = nets(&["10.1.0.0/24", "10.3.0.0/24", "fd00:1::/64"]);
        let ips =
            |texts: &[&str]| -> Vec<IpAddr> { texts.iter().map(|t| t.parse().unwrap()).collect() };
        let first = ips(&["10.3.0.7", "fd00:1::7"]);
        assert!(ipam.allocate_wanted(&first, &cidrs, &key(1)).is_ok());
        let taken = ipam.allocate_wanted(&ips(&["10.1.0.9", "10.3.0.7"]), &cidrs, &key(2));
        assert_eq!(taken, Err(Unavailable::Taken(first[0], key(1))));
        let foreign = ips(&["10.2.0.7"]);
        assert_eq!(
            ipam.allocate_wanted(&foreign, &cidrs, &key(2)),
            Err(Unavailable::Foreign(foreign[0]))
        );
        // Nothing of a refused request is kept, and what was freed need not rest for somebody who asks for it.
        ipam.release(&key(1), &first, Duration::ZERO);
        let again = ips(&["10.1.0.9", "10.3.0.7"]);
        assert!(ipam.allocate_wanted(&again, &cidrs, &key(2)).is_ok());
    }

    #[test]
    fn a_late_release_does_not_free_a_new_owner() {
        let cidrs = nets(&["10.0.0.7/32"]);
        let mut ipam = ipam();
        let given = ipam.allocate(&cidrs, &key(0), LATER).unwrap().0;
        ipam.release(&key(0), &given, LATER);
        let second = ipam.allocate(&cidrs, &key(1), 2 * LATER).unwrap().0;
        assert_eq!(second, given);
        ipam.release(&key(0), &given, 2 * LATER);
        assert!(ipam.allocate(&cidrs, &key(2), 4 * LATER).is_err());
    }

    #[derive(Clone, Debug)]
    enum Step {
        Add(u32),
        Del(u32),
        /// The process dies in the middle of an ADD: before or after the record became durable.
        CrashInAdd {
            n: u32,
            durable: bool,
        },
        /// The process dies in the middle of a DEL: before or after the record was removed.
        CrashInDel {
            n: u32,
            removed: bool,
        },
    }

    fn step() -> impl Strategy<Value = Step> {
        let n = 0_u32..12;
        prop_oneof![
            4 => n.clone().prop_map(Step::Add),
            3 => n.clone().prop_map(Step::Del),
            1 => (n.clone(), any::<bool>()).prop_map(|(n, durable)| Step::CrashInAdd { n, durable }),
            1 => (n, any::<bool>()).prop_map(|(n, removed)| Step::CrashInDel { n, removed }),
        ]
    }

    /// As after a start of the agent: records, and what rests by the wall clock.
    fn restarted(
        disk: &HashMap<Key, Record>,
        freed: &HashMap<IpAddr, Duration>,
        now: Duration,
    ) -> Ipam {
        let mut ipam = Ipam::from_records(REST, disk.values());
        for (address, at) in freed {
            ipam.rest(&[*address], now - *at, now);
        }
        ipam
    }

    proptest! {
        /// Whatever happens and wherever the process dies, no two attachments share an address, every address lies in
        /// its range, and none is given again before it has rested.
        #[test]
        fn no_address_is_given_twice(steps in proptest::collection::vec(step(), 1..80)) {
            let cidrs = nets(&["10.0.0.0/28", "fd00:1::/64"]);
            let mut disk: HashMap<Key, Record> = HashMap::new();
            let mut ipam = ipam();
            let mut freed: HashMap<IpAddr, Duration> = HashMap::new();
            let mut now = Duration::ZERO;
            for step in steps {
                now += Duration::from_secs(7);
                match step {
                    Step::Add(n) | Step::CrashInAdd { n, .. } => {
                        let key = key(n);
                        if disk.contains_key(&key) {
                            continue;
                        }
                        let crash = match step {
                            Step::CrashInAdd { durable, .. } => Some(durable),
                            _ => None,
                        };
                        let Ok((addresses, sequence)) = ipam.allocate(&cidrs, &key, now) else {
                            continue;
                        };
                        for address in &addresses {
                            let rested = freed.get(address).map(|at| now - *at);
                            prop_assert!(rested.is_none_or(|rested| rested >= REST), "{address} after {rested:?}");
                        }
                        if crash != Some(false) {
                            let record = Record {
                                key: key.clone(),
                                network: "weir".into(),
                                addresses,
                                netns: String::new(),
                                netns_cookie: None,
                                sequence,
                                pod: super::super::record::PodName::default(),
                                port_mappings: Vec::new(),
                                mac: None,
                                bandwidth: None,
                                delegated: false,
                            };
                            disk.insert(key, record);
                        }
                        if crash.is_some() {
                            ipam = restarted(&disk, &freed, now);
                        }
                    }
                    Step::Del(n) => {
                        if let Some(record) = disk.remove(&key(n)) {
                            freed.extend(record.addresses.iter().map(|a| (*a, now)));
                            ipam.release(&record.key, &record.addresses, now);
                        }
                    }
                    Step::CrashInDel { n, removed } => {
                        if removed && let Some(record) = disk.remove(&key(n)) {
                            freed.extend(record.addresses.iter().map(|a| (*a, now)));
                        }
                        ipam = restarted(&disk, &freed, now);
                    }
                }
                let all: Vec<IpAddr> =
                    disk.values().flat_map(|r| r.addresses.iter().copied()).collect();
                let distinct: BTreeSet<&IpAddr> = all.iter().collect();
                prop_assert_eq!(all.len(), distinct.len());
                prop_assert!(all.iter().all(|a| cidrs.iter().any(|c| c.contains(*a))));
            }
        }
    }
}
