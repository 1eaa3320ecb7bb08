//! Answers of upstream servers, kept for their time to live. Time comes from outside. [pure]

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::message::question_end;

/// Bounds of the cache; when either is reached, entries nearest to their end make room.
const MAX_ENTRIES: usize = 4096;
const MAX_BYTES: usize = 2 << 20;
/// Longest time that an answer is kept, whatever its TTL.
const MAX_POSITIVE: Duration = Duration::from_secs(3600);
const MAX_NEGATIVE: Duration = Duration::from_secs(1800);
/// Share of entries dropped when the cache is full, so that making room is rare.
const EVICT_DIVISOR: usize = 8;

const TYPE_SOA: u16 = 6;
const TYPE_OPT: u16 = 41;
const RCODE_NO_ERROR: u8 = 0;
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

#[derive(Debug)]
struct Entry {
    message: Vec<u8>,
    /// Where the TTLs lie in the message.
    ttl_offsets: Vec<u16>,
    stored: Instant,
    expires: Instant,
}

#[derive(Debug, Default)]
pub(super) struct Cache {
    entries: HashMap<Key, Entry>,
    bytes: usize,
}

impl Cache {
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// A live answer, its TTLs less by its age.
    pub(super) fn get(&mut self, key: &Key, now: Instant) -> Option<Vec<u8>> {
        let entry = self.entries.get(key)?;
        if entry.expires <= now {
            self.remove(&key.clone());
            return None;
        }
        let age = now.saturating_duration_since(entry.stored).as_secs();
        let age = u32::try_from(age).unwrap_or(u32::MAX);
        let mut message = entry.message.clone();
        for offset in &entry.ttl_offsets {
            let at = usize::from(*offset);
            if let Some(ttl) = read_u32(&message, at) {
                message[at..at + 4].copy_from_slice(&ttl.saturating_sub(age).to_be_bytes());
            }
        }
        Some(message)
    }

    /// Live answers about names that somebody wants, their TTLs less by their age.
    pub(super) fn wanted(&mut self, now: Instant, wants: impl Fn(&str) -> bool) -> Vec<Vec<u8>> {
        let keys = self.entries.keys();
        let keys: Vec<Key> = keys
            .filter(|key| wants(key.name.trim_end_matches('.')))
            .cloned()
            .collect();
        keys.iter().filter_map(|key| self.get(key, now)).collect()
    }

    /// Keeps an answer when it may be kept.
    pub(super) fn put(&mut self, key: Key, message: &[u8], now: Instant) {
        let Some(facts) = Facts::read(message) else {
            return;
        };
        let Some(lifetime) = facts.lifetime() else {
            return;
        };
        self.remove(&key);
        if self.entries.len() >= MAX_ENTRIES || self.bytes + message.len() > MAX_BYTES {
            self.make_room();
        }
        self.bytes += message.len();
        let entry = Entry {
            message: message.to_vec(),
            ttl_offsets: facts.ttl_offsets,
            stored: now,
            expires: now + lifetime,
        };
        self.entries.insert(key, entry);
    }

    fn remove(&mut self, key: &Key) {
        if let Some(entry) = self.entries.remove(key) {
            self.bytes -= entry.message.len();
        }
    }

    fn make_room(&mut self) {
        let mut ends: Vec<Instant> = self.entries.values().map(|e| e.expires).collect();
        let count = (ends.len() / EVICT_DIVISOR).max(1).min(ends.len());
        if count == 0 {
            return;
        }
        let (_, limit, _) = ends.select_nth_unstable(count - 1);
        let limit = *limit;
        let bytes = &mut self.bytes;
        self.entries.retain(|_, entry| {
            let keep = entry.expires > limit;
            if !keep {
                *bytes -= entry.message.len();
            }
            keep
        });
    }
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

    fn lifetime(&self) -> Option<Duration> {
        if self.truncated {
            return None;
        }
        let lifetime = match self.rcode {
            RCODE_NO_ERROR if self.answers > 0 => {
                Duration::from_secs(self.smallest_ttl_s.into()).min(MAX_POSITIVE)
            }
            RCODE_NO_ERROR | RCODE_NX_DOMAIN => {
                Duration::from_secs(self.negative_ttl_s?.into()).min(MAX_NEGATIVE)
            }
            _ => return None,
        };
        (!lifetime.is_zero()).then_some(lifetime)
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
