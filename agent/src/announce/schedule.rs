//! When to tell the segment: at once, and several times more, because a broadcast may be lost. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Times after taking over, milliseconds.
const REPEATS_MS: [u64; 6] = [0, 100, 500, 1000, 3000, 7000];

/// What still has to be told.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    /// Start, and how often it was told since.
    pending: BTreeMap<IpAddr, (Instant, usize)>,
    known: BTreeSet<IpAddr>,
}

impl Schedule {
    /// Takes the present addresses: new ones are told from now on, gone ones no more.
    pub(super) fn set(&mut self, addresses: &BTreeSet<IpAddr>, now: Instant) {
        for address in addresses.difference(&self.known) {
            self.pending.insert(*address, (now, 0));
        }
        self.pending
            .retain(|address, _| addresses.contains(address));
        self.known.clone_from(addresses);
    }

    /// Tells everything anew: the link was away.
    pub(super) fn again(&mut self, now: Instant) {
        self.pending = self.known.iter().map(|a| (*a, (now, 0))).collect();
    }

    /// When the next one is due.
    pub(super) fn next(&self) -> Option<Instant> {
        self.pending.values().map(|state| due(*state)).min()
    }

    /// Addresses to tell now.
    pub(super) fn take_due(&mut self, now: Instant) -> Vec<IpAddr> {
        let mut told = Vec::new();
        self.pending.retain(|address, state| {
            if due(*state) <= now {
                told.push(*address);
                state.1 += 1;
            }
            state.1 < REPEATS_MS.len()
        });
        told
    }
}

fn due((start, told): (Instant, usize)) -> Instant {
    start + Duration::from_millis(REPEATS_MS.get(told).copied().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_address_is_told_six_times_from_when_it_came() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let (a, b): (IpAddr, IpAddr) = ([192, 0, 2, 1].into(), [192, 0, 2, 2].into());
        let mut schedule = Schedule::default();
        schedule.set(&[a].into(), at(0));
        assert_eq!(schedule.next(), Some(at(0)));
        assert_eq!(schedule.take_due(at(0)), [a]);
        assert!(schedule.take_due(at(50)).is_empty());
        schedule.set(&[a, b].into(), at(60));
        assert_eq!(schedule.take_due(at(100)), [a, b]);
        schedule.set(&[b].into(), at(110));
        let mut told = 1;
        while let Some(next) = schedule.next() {
            assert_eq!(schedule.take_due(next), [b]);
            told += 1;
        }
        assert_eq!(told, REPEATS_MS.len());
        schedule.again(at(60_000));
        assert_eq!(schedule.take_due(at(60_000)), [b], "the link came back");
    }
}
