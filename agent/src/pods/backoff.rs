//! Growing delays between tries that fail. [pure]

use super::view::{Micros, SECOND_US};

/// First and longest delay before a crashed container starts again, and before a failed pull is tried again.
pub(crate) const CRASH: Policy = Policy {
    first: 10 * SECOND_US,
    longest: 300 * SECOND_US,
    forget: 600 * SECOND_US,
};
/// Sandboxes and container starts that the runtime or the node refused.
pub(crate) const START: Policy = Policy {
    first: SECOND_US,
    longest: 15 * SECOND_US,
    forget: 300 * SECOND_US,
};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Policy {
    pub(crate) first: Micros,
    pub(crate) longest: Micros,
    /// After this long without a try the next one counts as the first.
    pub(crate) forget: Micros,
}

/// The delay in force and when it was set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Backoff {
    delay: Micros,
    set_at: Micros,
}

impl Backoff {
    /// The state that `tries` earlier restarts would have left, the last of them at `last_try`.
    pub(crate) fn after(policy: Policy, tries: u32, last_try: Micros) -> Self {
        let mut delay = 0;
        for _ in 0..tries.min(u32::BITS) {
            delay = grow(policy, delay);
        }
        Self {
            delay,
            set_at: last_try,
        }
    }

    /// When a failure at `failed_at` may be tried again; `None` when at once.
    pub(crate) fn until(&self, policy: Policy, failed_at: Micros) -> Option<Micros> {
        (self.delay > 0 && failed_at - self.set_at <= policy.forget)
            .then_some(failed_at + self.delay)
    }

    /// Records a try at `now` that follows a failure at `failed_at`: the delay doubles, or starts over.
    pub(crate) fn next(&mut self, policy: Policy, failed_at: Micros, now: Micros) {
        let expired = self.delay == 0 || failed_at - self.set_at > policy.forget;
        self.delay = if expired {
            policy.first
        } else {
            grow(policy, self.delay)
        };
        self.set_at = now;
    }

    pub(crate) fn delay_s(&self) -> i64 {
        self.delay / SECOND_US
    }
}

fn grow(policy: Policy, delay: Micros) -> Micros {
    if delay == 0 {
        policy.first
    } else {
        (delay * 2).min(policy.longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_from_ten_seconds_to_five_minutes() {
        let mut backoff = Backoff::default();
        let mut now = 0;
        assert_eq!(
            backoff.until(CRASH, now),
            None,
            "the first crash restarts at once"
        );
        let mut delays = Vec::new();
        for _ in 0..8 {
            backoff.next(CRASH, now, now);
            now = backoff.until(CRASH, now).unwrap();
            delays.push(backoff.delay_s());
        }
        assert_eq!(delays, [10, 20, 40, 80, 160, 300, 300, 300]);
    }

    #[test]
    fn ten_quiet_minutes_start_over() {
        let mut backoff = Backoff::default();
        backoff.next(CRASH, 0, 0);
        backoff.next(CRASH, 0, 0);
        let later = CRASH.forget + 1;
        assert_eq!(backoff.until(CRASH, later), None);
        backoff.next(CRASH, later, later);
        assert_eq!(backoff.delay_s(), 10);
    }

    #[test]
    fn adopts_what_earlier_restarts_left() {
        let adopted = Backoff::after(CRASH, 3, 50);
        assert_eq!(adopted.delay_s(), 40);
        assert_eq!(adopted.until(CRASH, 60), Some(60 + 40 * SECOND_US));
        assert_eq!(Backoff::after(CRASH, 0, 50).until(CRASH, 60), None);
    }
}
