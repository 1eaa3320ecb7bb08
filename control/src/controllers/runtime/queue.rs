//! A work queue of keys: each key is in it once, is worked on by one worker at a time, and comes back with growing
//! delay after failures.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::hash::Hash;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// Delay after the first failure; doubles with each further one.
const FIRST_RETRY: Duration = Duration::from_millis(5);
/// No retry waits longer.
const LAST_RETRY: Duration = Duration::from_secs(60);

/// The queue's state, free of clocks and tasks.
#[derive(Debug)]
struct State<K> {
    ready: VecDeque<K>,
    /// Keys that want work: ready ones, and those that became dirty while being worked on.
    dirty: HashSet<K>,
    working: HashSet<K>,
    due: BTreeSet<(Instant, K)>,
    due_by_key: HashMap<K, Instant>,
    failures: HashMap<K, u32>,
}

impl<K: Clone + Eq + Hash + Ord> State<K> {
    fn new() -> Self {
        Self {
            ready: VecDeque::new(),
            dirty: HashSet::new(),
            working: HashSet::new(),
            due: BTreeSet::new(),
            due_by_key: HashMap::new(),
            failures: HashMap::new(),
        }
    }

    fn add(&mut self, key: K) {
        if !self.dirty.insert(key.clone()) || self.working.contains(&key) {
            return;
        }
        self.ready.push_back(key);
    }

    /// Keeps the earlier of two due times of one key.
    fn add_at(&mut self, key: K, at: Instant) {
        if let Some(old) = self.due_by_key.get(&key).copied() {
            if old <= at {
                return;
            }
            self.due.remove(&(old, key.clone()));
        }
        self.due_by_key.insert(key.clone(), at);
        self.due.insert((at, key));
    }

    fn retry_delay(&mut self, key: &K) -> Duration {
        let failures = self.failures.entry(key.clone()).or_insert(0);
        let delay = FIRST_RETRY.saturating_mul(1_u32 << (*failures).min(20));
        *failures += 1;
        delay.min(LAST_RETRY)
    }

    /// The next key to work on, after what is due by `now` has become ready.
    fn take(&mut self, now: Instant) -> Option<K> {
        while let Some((at, key)) = self.due.first().cloned() {
            if at > now {
                break;
            }
            self.due.pop_first();
            self.due_by_key.remove(&key);
            self.add(key);
        }
        let key = self.ready.pop_front()?;
        self.dirty.remove(&key);
        self.working.insert(key.clone());
        Some(key)
    }

    /// True when the key became dirty meanwhile and is ready again.
    fn done(&mut self, key: &K) -> bool {
        self.working.remove(key);
        let again = self.dirty.contains(key);
        if again {
            self.ready.push_back(key.clone());
        }
        again
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Queue<K> {
    state: Mutex<State<K>>,
    wake: Notify,
}

impl<K: Clone + Eq + Hash + Ord> Queue<K> {
    pub(crate) fn new() -> Self {
        Self {
            state: Mutex::new(State::new()),
            wake: Notify::new(),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State<K>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, key: K) {
        self.lock().add(key);
        self.wake.notify_one();
    }

    pub(crate) fn add_after(&self, key: K, delay: Duration) {
        self.lock().add_at(key, Instant::now() + delay);
        self.wake.notify_one();
    }

    /// Adds after the delay that the key's failures in a row ask for.
    pub(crate) fn retry(&self, key: K) -> Duration {
        let mut state = self.lock();
        let delay = state.retry_delay(&key);
        state.add_at(key, Instant::now() + delay);
        drop(state);
        self.wake.notify_one();
        delay
    }

    /// The key succeeded: its next failure starts with the shortest delay.
    pub(crate) fn forget(&self, key: &K) {
        self.lock().failures.remove(key);
    }

    /// Waits for a key. Every key taken must be given back with [`Self::done`].
    pub(crate) async fn next(&self) -> K {
        loop {
            let notified = self.wake.notified();
            let (key, due, more) = {
                let mut state = self.lock();
                let key = state.take(Instant::now());
                (
                    key,
                    state.due.first().map(|(at, _)| *at),
                    !state.ready.is_empty(),
                )
            };
            if let Some(key) = key {
                if more {
                    // One notification may stand for several keys: pass it on.
                    self.wake.notify_one();
                }
                return key;
            }
            match due {
                Some(at) => tokio::select! {
                    () = notified => {}
                    () = tokio::time::sleep_until(at) => {}
                },
                None => notified.await,
            }
        }
    }

    pub(crate) fn done(&self, key: &K) {
        if self.lock().done(key) {
            self.wake.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_worked_on_once_at_a_time_and_never_lost() {
        let now = Instant::now();
        let mut state = State::new();
        state.add("a");
        state.add("a");
        assert_eq!(state.take(now), Some("a"));
        assert_eq!(state.take(now), None, "two adds are one unit of work");
        state.add("a");
        assert_eq!(
            state.take(now),
            None,
            "a key in work is not given out again"
        );
        assert!(state.done(&"a"));
        assert_eq!(
            state.take(now),
            Some("a"),
            "what changed meanwhile is worked on afterwards"
        );
        assert!(!state.done(&"a"));
        assert_eq!(state.take(now), None);
    }

    #[test]
    fn delayed_keys_keep_the_earliest_time() {
        let now = Instant::now();
        let mut state = State::new();
        state.add_at("a", now + Duration::from_secs(10));
        state.add_at("a", now + Duration::from_secs(2));
        state.add_at("a", now + Duration::from_secs(5));
        assert_eq!(state.take(now + Duration::from_secs(1)), None);
        assert_eq!(state.take(now + Duration::from_secs(2)), Some("a"));
        state.done(&"a");
        assert_eq!(state.take(now + Duration::from_secs(60)), None);
    }

    #[test]
    fn failures_in_a_row_double_the_delay_up_to_a_limit() {
        let mut state = State::new();
        assert_eq!(state.retry_delay(&"a"), FIRST_RETRY);
        assert_eq!(state.retry_delay(&"a"), FIRST_RETRY * 2);
        assert_eq!(state.retry_delay(&"b"), FIRST_RETRY);
        for _ in 0..40 {
            state.retry_delay(&"a");
        }
        assert_eq!(state.retry_delay(&"a"), LAST_RETRY);
    }

    #[tokio::test]
    async fn many_workers_drain_many_keys() {
        let queue = std::sync::Arc::new(Queue::new());
        let mut workers = tokio::task::JoinSet::new();
        let done = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        for _ in 0..4 {
            let (queue, done) = (queue.clone(), done.clone());
            workers.spawn(async move {
                while done.load(std::sync::atomic::Ordering::SeqCst) < 100 {
                    let key: u32 = tokio::select! {
                        key = queue.next() => key,
                        () = tokio::time::sleep(Duration::from_millis(20)) => continue,
                    };
                    tokio::task::yield_now().await;
                    done.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                    queue.done(&key);
                }
            });
        }
        for key in 0..100 {
            queue.add(key);
        }
        while let Some(result) = workers.join_next().await {
            result.unwrap();
        }
    }
}
