//! Pods that wait: ready by priority, backing off after a failure, or parked until something changes that can help. Pure:
//! the time is a value.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::pod::Pod;

/// Wait after the first failure; doubles with each further one.
const FIRST_BACKOFF: Duration = Duration::from_millis(50);
const LAST_BACKOFF: Duration = Duration::from_secs(10);
/// A parked pod is tried again after this time even if nothing seems to have changed.
const PARKED_LIMIT: Duration = Duration::from_secs(300);

/// What happened in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum News {
    /// A node came, or changed in what it offers or demands.
    Node,
    /// A pod left its node.
    PodGone,
    /// A pod came to a node, or changed its labels there.
    PodPlaced,
}

/// Which news can help a pod that found no node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Hopes {
    /// Some node was occupied by other pods.
    pub(super) pod_gone: bool,
    /// Some rule looks at other pods.
    pub(super) pod_placed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Active,
    Backoff(Instant),
    Parked {
        since: Instant,
        hopes: Hopes,
    },
    /// Taken and not yet answered for.
    Taken,
}

#[derive(Debug)]
struct Entry {
    pod: Arc<Pod>,
    place: Place,
    order: u64,
    attempts: u32,
    failed_at: Option<Instant>,
}

impl Entry {
    fn backoff_ends(&self) -> Option<Instant> {
        let doublings = self.attempts.saturating_sub(1).min(20);
        let wait = FIRST_BACKOFF
            .saturating_mul(1 << doublings)
            .min(LAST_BACKOFF);
        Some(self.failed_at? + wait)
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Queue {
    entries: HashMap<String, Entry>,
    active: BTreeSet<(Reverse<i64>, u64, String)>,
    backoff: BTreeSet<(Instant, String)>,
    next_order: u64,
}

impl Queue {
    /// A new pod, or a newer form of one that waits. A changed pod that was parked may fit now.
    pub(super) fn put(&mut self, pod: Arc<Pod>, now: Instant) {
        let uid = pod.uid.clone();
        let Some(entry) = self.entries.get_mut(&uid) else {
            let order = self.next_order;
            self.next_order += 1;
            let place = Place::Backoff(now);
            let entry = Entry {
                pod,
                place,
                order,
                attempts: 0,
                failed_at: None,
            };
            self.entries.insert(uid.clone(), entry);
            self.activate(&uid);
            return;
        };
        if entry.pod.revision() == pod.revision() {
            return;
        }
        let same = entry.pod.asks_same(&pod);
        let active = entry.place == Place::Active;
        if active {
            self.active
                .remove(&(Reverse(entry.pod.priority), entry.order, uid.clone()));
        }
        entry.pod = pod;
        let parked = matches!(entry.place, Place::Parked { .. });
        if active {
            self.activate(&uid);
        } else if parked && !same {
            self.release(&uid, now);
        }
    }

    pub(super) fn contains(&self, uid: &str) -> bool {
        self.entries.contains_key(uid)
    }

    pub(super) fn remove(&mut self, uid: &str) {
        let Some(entry) = self.entries.remove(uid) else {
            return;
        };
        match entry.place {
            Place::Active => {
                self.active
                    .remove(&(Reverse(entry.pod.priority), entry.order, uid.to_owned()));
            }
            Place::Backoff(at) => {
                self.backoff.remove(&(at, uid.to_owned()));
            }
            Place::Parked { .. } | Place::Taken => {}
        }
    }

    /// The next pod to try; answer with [`Self::remove`], [`Self::park`] or [`Self::retry`].
    pub(super) fn take(&mut self, now: Instant) -> Option<Arc<Pod>> {
        while let Some((at, uid)) = self.backoff.first().cloned() {
            if at > now {
                break;
            }
            self.backoff.pop_first();
            self.activate(&uid);
        }
        let (_, _, uid) = self.active.pop_first()?;
        let entry = self.entries.get_mut(&uid)?;
        entry.place = Place::Taken;
        entry.attempts += 1;
        Some(entry.pod.clone())
    }

    /// No node suits the pod: it waits for news that can help.
    pub(super) fn park(&mut self, uid: &str, hopes: Hopes, now: Instant) {
        if let Some(entry) = self.entries.get_mut(uid) {
            entry.failed_at = Some(now);
            entry.place = Place::Parked { since: now, hopes };
        }
    }

    /// Something went wrong that has nothing to do with the cluster's state.
    pub(super) fn retry(&mut self, uid: &str, now: Instant) {
        if let Some(entry) = self.entries.get_mut(uid) {
            entry.failed_at = Some(now);
            self.release(uid, now);
        }
    }

    /// Wakes the parked pods that the news can help.
    pub(super) fn wake(&mut self, news: News, now: Instant) {
        let helped: Vec<String> = self
            .entries
            .iter()
            .filter(|(_, entry)| match entry.place {
                Place::Parked { hopes, .. } => match news {
                    News::Node => true,
                    News::PodGone => hopes.pod_gone || hopes.pod_placed,
                    News::PodPlaced => hopes.pod_placed,
                },
                _ => false,
            })
            .map(|(uid, _)| uid.clone())
            .collect();
        for uid in helped {
            self.release(&uid, now);
        }
    }

    /// Wakes pods that have been parked for very long.
    pub(super) fn wake_overdue(&mut self, now: Instant) {
        let overdue: Vec<String> = self
            .entries
            .iter()
            .filter(|(_, entry)| {
                matches!(entry.place, Place::Parked { since, .. } if since + PARKED_LIMIT <= now)
            })
            .map(|(uid, _)| uid.clone())
            .collect();
        for uid in overdue {
            self.release(&uid, now);
        }
    }

    /// When [`Self::take`] can next have something because of time alone.
    pub(super) fn due(&self) -> Option<Instant> {
        self.backoff.first().map(|(at, _)| *at)
    }

    fn activate(&mut self, uid: &str) {
        if let Some(entry) = self.entries.get_mut(uid) {
            entry.place = Place::Active;
            self.active
                .insert((Reverse(entry.pod.priority), entry.order, uid.to_owned()));
        }
    }

    /// To the active pods, or to those that back off while their time is not over.
    fn release(&mut self, uid: &str, now: Instant) {
        let Some(entry) = self.entries.get_mut(uid) else {
            return;
        };
        match entry.backoff_ends().filter(|end| *end > now) {
            Some(end) => {
                entry.place = Place::Backoff(end);
                self.backoff.insert((end, uid.to_owned()));
            }
            None => self.activate(uid),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(uid: &str, priority: i64, revision: &str) -> Arc<Pod> {
        Arc::new(Pod::read(Arc::new(json!({
            "metadata": {"name": uid, "uid": uid, "resourceVersion": revision},
            "spec": {"priority": priority},
        }))))
    }

    #[test]
    fn higher_priority_first_then_the_longest_waiting() {
        let now = Instant::now();
        let mut queue = Queue::default();
        queue.put(pod("a", 0, "1"), now);
        queue.put(pod("b", 0, "1"), now);
        queue.put(pod("c", 5, "1"), now);
        let order: Vec<String> = std::iter::from_fn(|| queue.take(now))
            .map(|p| p.uid.clone())
            .collect();
        assert_eq!(order, ["c", "a", "b"]);
    }

    #[test]
    fn parked_pods_wait_for_news_that_can_help_and_for_their_backoff() {
        let now = Instant::now();
        let mut queue = Queue::default();
        queue.put(pod("a", 0, "1"), now);
        queue.take(now).unwrap();
        queue.park(
            "a",
            Hopes {
                pod_gone: true,
                pod_placed: false,
            },
            now,
        );
        queue.wake(News::PodPlaced, now);
        assert!(
            queue.take(now + LAST_BACKOFF).is_none(),
            "that news cannot help"
        );
        queue.wake(News::PodGone, now);
        assert!(queue.take(now).is_none(), "it still backs off");
        assert_eq!(queue.due(), Some(now + FIRST_BACKOFF));
        assert!(queue.take(now + FIRST_BACKOFF).is_some());
        assert!(
            queue.take(now + FIRST_BACKOFF).is_none(),
            "a taken pod is not given out twice"
        );
    }

    #[test]
    fn only_a_change_of_what_it_asks_for_wakes_a_parked_pod() {
        let now = Instant::now();
        let later = now + LAST_BACKOFF;
        let mut queue = Queue::default();
        queue.put(pod("a", 0, "1"), now);
        queue.take(now).unwrap();
        queue.park("a", Hopes::default(), now);
        queue.put(pod("a", 0, "2"), later);
        assert!(queue.take(later).is_none());
        queue.put(pod("a", 7, "3"), later);
        assert!(queue.take(later).is_some());
    }

    #[test]
    fn a_parked_pod_is_not_forgotten() {
        let now = Instant::now();
        let mut queue = Queue::default();
        queue.put(pod("a", 0, "1"), now);
        queue.take(now).unwrap();
        queue.park("a", Hopes::default(), now);
        queue.wake_overdue(now + PARKED_LIMIT);
        assert!(queue.take(now + PARKED_LIMIT).is_some());
    }
}
