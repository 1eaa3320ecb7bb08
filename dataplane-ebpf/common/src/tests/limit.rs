//! The token bucket against counting.

use proptest::prelude::*;

use crate::limit::{Bucket, MESSAGES_BURST, MESSAGES_PER_S};

#[test]
fn a_burst_passes_and_what_exceeds_it_does_not() {
    let mut bucket = Bucket::default();
    let granted = (0..1_000).filter(|_| bucket.take(7)).count();
    assert_eq!(granted, MESSAGES_BURST as usize);
    assert!(!bucket.take(7));
    assert!(bucket.take(8));
}

proptest! {
    /// In any window the grants are at most a burst and what the time brings, whatever the arrivals.
    #[test]
    fn no_window_holds_more_than_a_burst_and_its_time(gaps in prop::collection::vec(0u32..30, 1..2_000)) {
        let mut bucket = Bucket::default();
        let mut now = u32::MAX - 10_000;
        let mut granted = Vec::new();
        let mut tokens = u64::from(MESSAGES_BURST) * 1_000;
        for gap in gaps {
            now = now.wrapping_add(gap);
            // The model: a counter that only an add and a cap touch.
            tokens = (tokens + u64::from(gap) * u64::from(MESSAGES_PER_S)).min(u64::from(MESSAGES_BURST) * 1_000);
            let expected = tokens >= 1_000;
            if expected {
                tokens -= 1_000;
            }
            let got = bucket.take(now);
            prop_assert_eq!(got, expected);
            granted.push((now, got));
        }
        let count = granted.iter().filter(|(_, got)| *got).count();
        let first = granted.first().map_or(0, |(at, _)| *at);
        let span_ms = now.wrapping_sub(first);
        prop_assert!(count as u64 <= u64::from(MESSAGES_BURST) + u64::from(span_ms) * u64::from(MESSAGES_PER_S) / 1_000 + 1);
    }
}
