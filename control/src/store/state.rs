//! The visible state: current records, and per topic the recent history that watches and old lists read. Pure.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;

use tokio::sync::watch;

use super::{Event, Page, Record, StoreError, topic_of};

/// Events younger than this stay, unless a cap below is hit.
pub(super) const HISTORY_AGE_US: i64 = 150 * 1_000_000;
/// Most events kept per topic; the oldest go first and their readers must list again.
pub(super) const HISTORY_EVENTS: usize = 100_000;
/// Most bytes of values kept per topic's history.
pub(super) const HISTORY_BYTES: usize = 64 << 20;
/// Most events handed out at once.
const BATCH: usize = 256;

#[derive(Debug)]
struct Topic {
    events: VecDeque<Arc<Event>>,
    bytes: usize,
    /// Highest revision whose event may be gone: watches start at or after it.
    floor: u64,
    wake: watch::Sender<u64>,
}

impl Topic {
    fn new(floor: u64) -> Self {
        Self {
            events: VecDeque::new(),
            bytes: 0,
            floor,
            wake: watch::Sender::new(floor),
        }
    }

    fn push(&mut self, event: Arc<Event>) {
        self.bytes += event.record.value.len();
        self.events.push_back(event);
    }

    fn trim(&mut self, now_us: i64) {
        while self.events.len() > HISTORY_EVENTS
            || self.bytes > HISTORY_BYTES
            || self
                .events
                .front()
                .is_some_and(|e| e.committed_at_us < now_us - HISTORY_AGE_US)
        {
            self.drop_oldest();
        }
    }

    fn drop_oldest(&mut self) {
        if let Some(event) = self.events.pop_front() {
            self.bytes -= event.record.value.len();
            self.floor = event.record.revision;
        }
    }

    /// Index of the first event after `revision`.
    fn after(&self, revision: u64) -> usize {
        self.events
            .partition_point(|e| e.record.revision <= revision)
    }
}

#[derive(Debug)]
pub(super) struct State {
    records: BTreeMap<Arc<str>, Arc<Record>>,
    topics: HashMap<String, Topic>,
    revision: u64,
    /// History before it is gone for every topic.
    floor: u64,
}

/// What a watch found: changes in order, and up to which revision that is everything.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) events: Vec<Arc<Event>>,
    pub(super) seen: u64,
}

impl State {
    pub(super) fn new(records: BTreeMap<Arc<str>, Arc<Record>>, revision: u64) -> Self {
        Self {
            records,
            topics: HashMap::new(),
            revision,
            floor: revision,
        }
    }

    pub(super) const fn revision(&self) -> u64 {
        self.revision
    }

    pub(super) fn get(&self, key: &str) -> Option<&Arc<Record>> {
        self.records.get(key)
    }

    /// Takes a committed change in. Changes come in revision order.
    pub(super) fn apply(&mut self, event: Event) {
        let event = Arc::new(event);
        self.revision = event.record.revision;
        if event.deleted {
            self.records.remove(&event.record.key);
        } else {
            self.records
                .insert(Arc::clone(&event.record.key), Arc::clone(&event.record));
        }
        let floor = self.floor;
        let topic = topic_of(&event.record.key);
        if let Some(topic) = self.topics.get_mut(topic) {
            topic.push(event);
        } else {
            let mut fresh = Topic::new(floor);
            let name = topic.to_owned();
            fresh.push(event);
            self.topics.insert(name, fresh);
        }
    }

    /// Drops history that is too old or too much, of all topics: one that rests must not keep a burst for ever.
    pub(super) fn trim(&mut self, now_us: i64) {
        for topic in self.topics.values_mut() {
            topic.trim(now_us);
        }
    }

    /// Wakes the watches of the topics that `keys` belong to.
    pub(super) fn wake<'a>(&self, keys: impl Iterator<Item = &'a str>) {
        for key in keys {
            if let Some(topic) = self.topics.get(topic_of(key)) {
                topic.wake.send_replace(self.revision);
            }
        }
    }

    /// The bell of a prefix's topic.
    pub(super) fn bell(&mut self, prefix: &str) -> watch::Receiver<u64> {
        let floor = self.floor;
        let name = topic_of(prefix).to_owned();
        self.topics
            .entry(name)
            .or_insert_with(|| Topic::new(floor))
            .wake
            .subscribe()
    }

    /// Changes under `prefix` after `revision`.
    pub(super) fn changes(&self, prefix: &str, revision: u64) -> Result<Found, StoreError> {
        let Some(topic) = self.topics.get(topic_of(prefix)) else {
            self.check_floor(revision, self.floor)?;
            return Ok(Found {
                events: Vec::new(),
                seen: self.revision,
            });
        };
        self.check_floor(revision, topic.floor)?;
        let mut events = Vec::new();
        for event in topic.events.range(topic.after(revision)..) {
            if event.record.key.starts_with(prefix) {
                events.push(Arc::clone(event));
                if events.len() == BATCH {
                    return Ok(Found {
                        seen: event.record.revision,
                        events,
                    });
                }
            }
        }
        Ok(Found {
            events,
            seen: self.revision.max(revision),
        })
    }

    const fn check_floor(&self, requested: u64, floor: u64) -> Result<(), StoreError> {
        if requested < floor {
            return Err(StoreError::Compacted { requested, floor });
        }
        Ok(())
    }

    pub(super) fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: usize,
        at: Option<u64>,
    ) -> Result<Page, StoreError> {
        match at {
            Some(at) if at > self.revision => Err(StoreError::Future {
                requested: at,
                current: self.revision,
            }),
            Some(at) if at < self.revision => {
                let past = self.past(prefix, at)?;
                Ok(page(self.at(prefix, after, past), limit, at))
            }
            _ => Ok(page(
                self.range(prefix, after).map(Arc::clone),
                limit,
                self.revision,
            )),
        }
    }

    fn range<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&str>,
    ) -> impl Iterator<Item = &'a Arc<Record>> {
        let start = match after {
            Some(after) if after >= prefix => Bound::Excluded(after),
            _ => Bound::Included(prefix),
        };
        self.records
            .range::<str, _>((start, Bound::Unbounded))
            .take_while(move |(key, _)| key.starts_with(prefix))
            .map(|(_, record)| record)
    }

    /// What the keys that changed after `at` held at `at`.
    fn past(
        &self,
        prefix: &str,
        at: u64,
    ) -> Result<BTreeMap<Arc<str>, Option<Arc<Record>>>, StoreError> {
        let found = match self.topics.get(topic_of(prefix)) {
            Some(topic) => {
                self.check_floor(at, topic.floor)?;
                topic
            }
            None => {
                self.check_floor(at, self.floor)?;
                return Ok(BTreeMap::new());
            }
        };
        let mut past = BTreeMap::new();
        for event in found.events.range(found.after(at)..) {
            if event.record.key.starts_with(prefix) {
                past.entry(Arc::clone(&event.record.key))
                    .or_insert_with(|| event.previous.clone());
            }
        }
        Ok(past)
    }

    fn at(
        &self,
        prefix: &str,
        after: Option<&str>,
        past: BTreeMap<Arc<str>, Option<Arc<Record>>>,
    ) -> impl Iterator<Item = Arc<Record>> {
        let unchanged = self
            .range(prefix, after)
            .filter(|r| !past.contains_key(&r.key))
            .map(Arc::clone);
        let mut all: Vec<Arc<Record>> = unchanged.collect();
        let old = past
            .into_values()
            .flatten()
            .filter(|r| after.is_none_or(|a| &*r.key > a));
        all.extend(old);
        all.sort_by(|a, b| a.key.cmp(&b.key));
        all.into_iter()
    }

    pub(super) fn compact(&mut self, revision: u64) {
        let revision = revision.min(self.revision);
        self.floor = self.floor.max(revision);
        for topic in self.topics.values_mut() {
            while topic
                .events
                .front()
                .is_some_and(|e| e.record.revision <= revision)
            {
                topic.drop_oldest();
            }
            topic.floor = topic.floor.max(revision);
        }
    }
}

fn page(mut records: impl Iterator<Item = Arc<Record>>, limit: usize, revision: u64) -> Page {
    let take = if limit == 0 { usize::MAX } else { limit };
    let taken: Vec<_> = records.by_ref().take(take).collect();
    Page {
        records: taken,
        revision,
        remaining: records.count(),
    }
}
