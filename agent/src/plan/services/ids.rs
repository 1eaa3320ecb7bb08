//! Ids given out and given back.

use std::collections::{BTreeSet, VecDeque};

/// Ids from one to a limit. Zero is never used. An id that was given back in a plan is not given out in the same plan:
/// its end is carried out last, and would hit the new holder.
#[derive(Debug, Default)]
pub(super) struct Ids {
    next: u32,
    free: VecDeque<u32>,
    resting: Vec<u32>,
    limit: u32,
}

impl Ids {
    /// `used` are in the maps. Those at or above the limit stay until they are given back, and are then forgotten.
    pub(super) fn new(used: &BTreeSet<u32>, limit: u32) -> Self {
        let below = used.range(..limit).next_back();
        let next = below.map_or(1, |last| last + 1);
        Self {
            next,
            free: (1..next).filter(|id| !used.contains(id)).collect(),
            resting: Vec::new(),
            limit,
        }
    }

    /// Never used ids first: the longer an id rests, the better.
    pub(super) fn take(&mut self) -> Option<u32> {
        if self.next < self.limit {
            self.next += 1;
            return Some(self.next - 1);
        }
        self.free.pop_front()
    }

    pub(super) fn give_back(&mut self, id: u32) {
        if id < self.limit {
            self.resting.push(id);
        }
    }

    /// The plan is complete: what it gave back may be used by the next one.
    pub(super) fn settle(&mut self) {
        self.free.extend(self.resting.drain(..));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_used_again_last_and_never_in_the_same_plan() {
        let mut ids = Ids::new(&BTreeSet::from([2]), 4);
        assert_eq!(ids.take(), Some(3));
        ids.give_back(3);
        assert_eq!(ids.take(), Some(1));
        assert_eq!(ids.take(), None, "3 rests until the plan is complete");
        ids.settle();
        assert_eq!(ids.take(), Some(3));
        assert_eq!(ids.take(), None);
    }

    #[test]
    fn an_id_beyond_the_limit_costs_nothing_and_is_forgotten() {
        let mut ids = Ids::new(&BTreeSet::from([1, u32::MAX]), 3);
        assert_eq!(ids.take(), Some(2));
        ids.give_back(u32::MAX);
        ids.settle();
        assert_eq!(ids.take(), None);
    }
}
