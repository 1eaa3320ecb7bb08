//! Answers of upstream servers, kept for their time to live. Time comes from outside. [pure]

use std::collections::HashMap;
use std::time::{Duration, Instant};

use hickory_proto::rr::Name;

use super::corefile::{self, CacheClass};
use super::message::question_end;

/// Bytes of all answers; as with too many of them, those nearest to their end make room.
const MAX_BYTES: usize = 4 << 20;
/// Share of entries dropped when the cache is full, so that making room is rare.
const EVICT_DIVISOR: usize = 8;
/// TTL of an answer that is over (RFC 8767, 4).
const STALE_TTL_S: u32 = 30;
/// The least time before its end in which a popular answer is asked for again.
const MIN_PREFETCH: Duration = Duration::from_secs(1);

const TYPE_SOA: u16 = 6;
const TYPE_OPT: u16 = 41;
const RCODE_NO_ERROR: u8 = 0;
const RCODE_SERV_FAIL: u8 = 2;
const RCODE_NX_DOMAIN: u8 = 3;

/// What makes two questions the same: an answer differs by each of these.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    /// Lower case, as text.
    pub(super) name: String,
    pub(super) record_type: u16,
    pub(super) edns: bool,
    pub(super) dnssec: bool,
    pub(super) checking_disabled: bool,
}

/// What an answer is, for the bounds of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Success,
    Denial,
    Failure,
}

#[derive(Debug)]
struct Entry {
    /// With TTLs within the bounds.
    message: Vec<u8>,
    /// Where the TTLs lie in the message.
    ttl_offsets: Vec<u16>,
    class: Class,
    stored: Instant,
    expires: Instant,
    /// Questions without a longer pause than counts as popular, and the last one.
    questions: u32,
    asked: Instant,
    /// Somebody asks upstream already.
    refreshing: bool,
}

impl Entry {
    /// The message with its TTLs less by its age, or for an answer that is over.
    fn aged(&self, now: Instant, keep_ttl: bool) -> Vec<u8> {
        let age = now.saturating_duration_since(self.stored).as_secs();
        let age = u32::try_from(age).unwrap_or(u32::MAX);
        let mut message = self.message.clone();
        for offset in &self.ttl_offsets {
            let at = usize::from(*offset);
            if let Some(ttl) = read_u32(&message, at) {
                let ttl = match () {
                    () if self.expires <= now => STALE_TTL_S,
                    () if keep_ttl => ttl,
                    () => ttl.saturating_sub(age),
                };
                message[at..at + 4].copy_from_slice(&ttl.to_be_bytes());
            }
        }
        message
    }
}

/// An answer that was kept.
#[derive(Debug)]
pub(super) struct Hit {
    pub(super) message: Vec<u8>,
    /// Its time is over.
    pub(super) stale: bool,
    /// Upstream is to be asked again; said once until there is another answer.
    pub(super) refresh: bool,
}

#[derive(Debug)]
pub(super) struct Cache {
    settings: corefile::Cache,
    entries: HashMap<Key, Entry>,
    successes: usize,
    bytes: usize,
}

impl Cache {
    pub(super) fn new(settings: corefile::Cache) -> Self {
        Self {
            settings,
            entries: HashMap::new(),
            successes: 0,
            bytes: 0,
        }
    }

    pub(super) fn settings(&self) -> &corefile::Cache {
        &self.settings
    }

    /// Answers that are kept, and of them those that are no denials.
    pub(super) fn len(&self) -> (usize, usize) {
        (self.entries.len(), self.successes)
    }

    /// Whether names like this are looked up here at all.
    pub(super) fn keeps(&self, name: &Name) -> bool {
        self.settings.zones.is_empty() || within(&self.settings.zones, name)
    }

    /// A kept answer, its TTLs less by its age. One that is over comes as long as the settings want that.
    pub(super) fn get(&mut self, key: &Key, now: Instant) -> Option<Hit> {
        let stale_for = self.settings.serve_stale.map(|stale| stale.longest);
        let (prefetch, keep_ttl) = (self.settings.prefetch, self.settings.keep_ttl);
        let entry = self.entries.get_mut(key)?;
        let stale = entry.expires <= now;
        let gone = entry.expires + stale_for.unwrap_or_default() <= now;
        if gone || (stale && entry.class == Class::Failure) {
            self.remove(key);
            return None;
        }
        let mut due = stale;
        if let Some(prefetch) = prefetch {
            let quiet = now.saturating_duration_since(entry.asked) > prefetch.pause;
            entry.questions = if quiet {
                1
            } else {
                entry.questions.saturating_add(1)
            };
            let whole = entry.expires.saturating_duration_since(entry.stored);
            let near = (whole * prefetch.percentage / 100).max(MIN_PREFETCH);
            let left = entry.expires.saturating_duration_since(now);
            due |= entry.questions >= prefetch.amount && left <= near;
        }
        entry.asked = now;
        let refresh = due && !entry.refreshing;
        entry.refreshing |= due;
        let message = entry.aged(now, keep_ttl);
        Some(Hit {
            message,
            stale,
            refresh,
        })
    }

    /// Live answers about names that somebody wants, their TTLs less by their age. Nothing is asked again because of it.
    pub(super) fn wanted(&self, now: Instant, wants: impl Fn(&str) -> bool) -> Vec<Vec<u8>> {
        let live = self.entries.iter().filter(|(_, e)| e.expires > now);
        live.filter(|(key, _)| wants(key.name.trim_end_matches('.')))
            .map(|(_, entry)| entry.aged(now, false))
            .collect()
    }

    /// Upstream was asked in vain: the next question asks again.
    pub(super) fn refresh_failed(&mut self, key: &Key) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.refreshing = false;
        }
    }

    /// Keeps an answer when it may be kept, and brings its TTLs within the bounds.
    pub(super) fn put(&mut self, key: Key, name: &Name, message: &mut [u8], now: Instant) {
        let Some(facts) = Facts::read(message) else {
            return;
        };
        let Some((class, own)) = facts.kind() else {
            return;
        };
        let settings = &self.settings;
        let (bounds, without): (CacheClass, &[Name]) = match class {
            Class::Success => (settings.success, &settings.without_success),
            Class::Denial => (settings.denial, &settings.without_denial),
            Class::Failure => {
                let bounds = CacheClass {
                    most: settings.servfail,
                    least: Duration::ZERO,
                    ..settings.denial
                };
                (bounds, &[])
            }
        };
        if within(without, name) {
            return;
        }
        let bounded = |seconds: u32| {
            let seconds = Duration::from_secs(seconds.into());
            // The longest time wins over the shortest one, as one number sets it for all.
            seconds.max(bounds.least).min(bounds.most)
        };
        for offset in &facts.ttl_offsets {
            let at = usize::from(*offset);
            if let Some(ttl) = read_u32(message, at) {
                let ttl = u32::try_from(bounded(ttl).as_secs()).unwrap_or(u32::MAX);
                message[at..at + 4].copy_from_slice(&ttl.to_be_bytes());
            }
        }
        let lifetime = bounded(own);
        if lifetime.is_zero() {
            return;
        }
        let before = self.remove(&key);
        self.make_room(class, bounds.capacity, message.len());
        self.bytes += message.len();
        self.successes += usize::from(class == Class::Success);
        let entry = Entry {
            message: message.to_vec(),
            ttl_offsets: facts.ttl_offsets,
            class,
            stored: now,
            expires: now + lifetime,
            questions: before.as_ref().map_or(1, |entry| entry.questions),
            asked: before.map_or(now, |entry| entry.asked),
            refreshing: false,
        };
        self.entries.insert(key, entry);
    }

    fn remove(&mut self, key: &Key) -> Option<Entry> {
        let entry = self.entries.remove(key)?;
        self.bytes -= entry.message.len();
        self.successes -= usize::from(entry.class == Class::Success);
        Some(entry)
    }

    /// Denials and failures share their room; successes have their own.
    fn make_room(&mut self, class: Class, capacity: usize, bytes: usize) {
        let of_kind = |entry: &Entry| (entry.class == Class::Success) == (class == Class::Success);
        let count = match class {
            Class::Success => self.successes,
            _ => self.entries.len() - self.successes,
        };
        let full = count >= capacity;
        if !full && self.bytes + bytes <= MAX_BYTES {
            return;
        }
        // Too many bytes are everybody's.
        let candidate = |entry: &Entry| !full || of_kind(entry);
        let entries = self.entries.values().filter(|entry| candidate(entry));
        let mut ends: Vec<Instant> = entries.map(|entry| entry.expires).collect();
        let count = (ends.len() / EVICT_DIVISOR).max(1).min(ends.len());
        if count == 0 {
            return;
        }
        let (_, limit, _) = ends.select_nth_unstable(count - 1);
        let limit = *limit;
        let (bytes, successes) = (&mut self.bytes, &mut self.successes);
        self.entries.retain(|_, entry| {
            let keep = !candidate(entry) || entry.expires > limit;
            if !keep {
                *bytes -= entry.message.len();
                *successes -= usize::from(entry.class == Class::Success);
            }
            keep
        });
    }
}

fn within(zones: &[Name], name: &Name) -> bool {
    zones.iter().any(|zone| zone.zone_of(name))
}

/// What decides how long a message may be kept.
struct Facts {
    rcode: u8,
    truncated: bool,
    answers: u16,
    ttl_offsets: Vec<u16>,
    smallest_ttl_s: u32,
    /// RFC 2308: the smaller of the SOA's TTL and its minimum field.
    negative_ttl_s: Option<u32>,
}

impl Facts {
    fn read(message: &[u8]) -> Option<Self> {
        let answers = read_u16(message, 6)?;
        let records = u32::from(answers)
            + u32::from(read_u16(message, 8)?)
            + u32::from(read_u16(message, 10)?);
        let mut facts = Self {
            rcode: message.get(3)? & 0x0f,
            truncated: message.get(2)? & 0x02 != 0,
            answers,
            ttl_offsets: Vec::new(),
            smallest_ttl_s: u32::MAX,
            negative_ttl_s: None,
        };
        let mut at = question_end(message)?;
        for _ in 0..records {
            at = skip_name(message, at)?;
            let record_type = read_u16(message, at)?;
            let ttl = read_u32(message, at + 4)?;
            let data = at + 10;
            let end = data + usize::from(read_u16(message, at + 8)?);
            message.get(data..end)?;
            if record_type != TYPE_OPT {
                facts.ttl_offsets.push(u16::try_from(at + 4).ok()?);
                facts.smallest_ttl_s = facts.smallest_ttl_s.min(ttl);
            }
            if record_type == TYPE_SOA {
                let minimum = read_u32(message, end.checked_sub(4)?)?;
                facts.negative_ttl_s = Some(ttl.min(minimum));
            }
            at = end;
        }
        Some(facts)
    }

    /// What it is, and how many seconds it may be kept; none for what may not be kept at all.
    fn kind(&self) -> Option<(Class, u32)> {
        if self.truncated {
            return None;
        }
        match self.rcode {
            RCODE_NO_ERROR if self.answers > 0 => Some((Class::Success, self.smallest_ttl_s)),
            RCODE_NO_ERROR | RCODE_NX_DOMAIN => Some((Class::Denial, self.negative_ttl_s?)),
            // The time is all that the settings allow.
            RCODE_SERV_FAIL => Some((Class::Failure, u32::MAX)),
            _ => None,
        }
    }
}

fn skip_name(message: &[u8], mut at: usize) -> Option<usize> {
    loop {
        match *message.get(at)? {
            0 => return Some(at + 1),
            length if length & 0xc0 == 0xc0 => return Some(at + 2),
            length if length & 0xc0 != 0 => return None,
            length => at += 1 + usize::from(length),
        }
    }
}

fn read_u16(message: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(
        message.get(at..at.checked_add(2)?)?.try_into().ok()?,
    ))
}

fn read_u32(message: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(
        message.get(at..at.checked_add(4)?)?.try_into().ok()?,
    ))
}
