//! Which nodes are lost, for moving addresses: seconds matter here, where a Lease of 40 s would do for pods. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

/// A node is lost when it has broken its promise of a next sign of life this many times in a row.
const BROKEN_PROMISES: u32 = 4;
/// A node that promises nothing: as long as its stream may be silent.
const UNPROMISED: Duration = Duration::from_secs(20);
/// A stream that ends may be an agent that restarts, and its node keeps forwarding meanwhile.
const AFTER_END: Duration = Duration::from_secs(2);
/// Nodes have this time to come back to a control plane that was away.
const AFTER_START: Duration = Duration::from_secs(10);

/// Nodes that are told of the first address promise their signs of life at shorter intervals from then on. What they
/// promised before counts no longer than this.
const AFTER_FIRST_ADDRESS: Duration = Duration::from_secs(2);

/// When each node was heard of, and until when that counts.
#[derive(Debug)]
pub(super) struct Liveness {
    started: Instant,
    /// There are addresses that nodes answer for.
    watched: bool,
    until: BTreeMap<String, Instant>,
}

impl Liveness {
    pub(super) fn new(started: Instant) -> Self {
        Self {
            started,
            watched: false,
            until: BTreeMap::new(),
        }
    }

    /// A sign of life; `next_in` is the promise of the next one.
    pub(super) fn heard(&mut self, node: &str, now: Instant, next_in: Option<Duration>) {
        let within = next_in.map_or(UNPROMISED, |next_in| next_in * BROKEN_PROMISES);
        self.until
            .insert(node.to_owned(), now + within.min(UNPROMISED));
    }

    /// Whether there are addresses to move.
    pub(super) fn watch(&mut self, watched: bool, now: Instant) {
        if watched && !self.watched {
            for until in self.until.values_mut() {
                *until = (*until).min(now + AFTER_FIRST_ADDRESS);
            }
        }
        self.watched = watched;
    }

    /// The node's stream ended.
    pub(super) fn closed(&mut self, node: &str, now: Instant) {
        if let Some(until) = self.until.get_mut(node) {
            *until = (*until).min(now + AFTER_END);
        }
    }

    /// Those of `nodes` that count as lost. What is known of other nodes is forgotten.
    pub(super) fn lost(&mut self, nodes: &[String], now: Instant) -> BTreeSet<String> {
        let fresh = now < self.started + AFTER_START;
        self.until
            .retain(|name, until| *until > now || nodes.binary_search(name).is_ok());
        let is_lost = |name: &&String| match self.until.get(*name) {
            Some(until) => *until <= now,
            None => !fresh,
        };
        nodes.iter().filter(is_lost).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_promised_before_the_first_address_counts_for_two_seconds() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let nodes = ["quiet".to_owned(), "well".to_owned()];
        let mut liveness = Liveness::new(start);
        for node in &nodes {
            liveness.heard(node, at(0), Some(Duration::from_secs(5)));
        }
        liveness.watch(false, at(100));
        liveness.watch(true, at(1_000));
        liveness.heard("well", at(1_500), Some(Duration::from_millis(500)));
        liveness.watch(true, at(2_900));
        assert_eq!(liveness.lost(&nodes, at(2_999)), BTreeSet::new());
        let lost = liveness.lost(&nodes, at(3_000));
        assert_eq!(lost, BTreeSet::from(["quiet".to_owned()]));
    }

    #[test]
    fn promises_ends_and_starts_have_their_times() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let nodes: Vec<String> = ["kept", "quiet", "slow", "unseen"]
            .map(str::to_owned)
            .into();
        let mut liveness = Liveness::new(start);
        liveness.heard("quiet", at(0), Some(Duration::from_millis(500)));
        liveness.heard("slow", at(0), None);
        liveness.heard("kept", at(0), Some(Duration::from_millis(500)));
        liveness.heard("kept", at(1900), Some(Duration::from_millis(500)));
        assert_eq!(liveness.lost(&nodes, at(1999)), BTreeSet::new());
        let lost = |list: &[&str]| {
            list.iter()
                .map(|n| (*n).to_owned())
                .collect::<BTreeSet<_>>()
        };
        assert_eq!(liveness.lost(&nodes, at(2000)), lost(&["quiet"]));
        assert_eq!(liveness.lost(&nodes, at(3900)), lost(&["kept", "quiet"]));
        assert_eq!(
            liveness.lost(&nodes, at(10_000)),
            lost(&["kept", "quiet", "unseen"])
        );
        liveness.closed("slow", at(10_000));
        assert!(!liveness.lost(&nodes, at(11_999)).contains("slow"));
        assert!(liveness.lost(&nodes, at(12_000)).contains("slow"));
        liveness.heard("slow", at(12_500), None);
        assert!(!liveness.lost(&nodes, at(32_499)).contains("slow"));
        assert_eq!(liveness.lost(&[], at(60_000)), BTreeSet::new());
        assert!(liveness.until.is_empty());
    }
}
