//! Where fragments wait, and what they are fragments of. Pure: frames and times in, frames out.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use dataplane_common::fragment::park_mark;
use dataplane_common::layout::FragmentKey;
use dataplane_common::{V4, V6};

use crate::kernel::DatagramId;

/// Frames that wait at one time; of more, the newest is dropped.
pub const MAX_FRAMES: usize = 1_024;
/// Frames of one link: nobody takes the room of all others.
pub const MAX_FRAMES_OF_LINK: usize = 256;
/// Bytes that wait at one time.
pub const MAX_BYTES: usize = 4 << 20;
/// How long a fragment waits for its first. The parts of a datagram are sent together; one that takes longer is lost.
pub const WAIT: Duration = Duration::from_secs(2);

const ETHERNET: usize = 14;

/// A fragment as the programs hand it over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// Link that it came in by.
    pub ifindex: u32,
    pub datagram: DatagramId,
}

/// What a parked frame is; `None` for anything else that may be read off the link.
#[must_use]
pub fn identify(frame: &[u8]) -> Option<Fragment> {
    let source_mac: [u8; 6] = frame.get(6..12)?.try_into().ok()?;
    let (hook, ifindex) = park_mark::read(source_mac)?;
    let packet = frame.get(ETHERNET..)?;
    let datagram = match frame.get(12..ETHERNET)? {
        [0x08, 0x00] => DatagramId::V4(ipv4(packet, hook)?),
        [0x86, 0xdd] => DatagramId::V6(ipv6(packet, hook)?),
        _ => return None,
    };
    Some(Fragment { ifindex, datagram })
}

fn ipv4(packet: &[u8], hook: u32) -> Option<FragmentKey<V4>> {
    let header: &[u8; 20] = packet.first_chunk()?;
    Some(FragmentKey {
        source: V4::new(header[12..16].try_into().ok()?),
        destination: V4::new(header[16..20].try_into().ok()?),
        identification: u16::from_ne_bytes([header[4], header[5]]).into(),
        protocol: u32::from(header[9]) | hook << 8,
    })
}

fn ipv6(packet: &[u8], hook: u32) -> Option<FragmentKey<V6>> {
    const MAX_EXTENSIONS: usize = 4;
    const FRAGMENT: u8 = 44;
    let header: &[u8; 40] = packet.first_chunk()?;
    let (mut next, mut at) = (header[6], 40);
    for _ in 0..MAX_EXTENSIONS {
        let extension: &[u8; 8] = packet.get(at..)?.first_chunk()?;
        if next == FRAGMENT {
            return Some(FragmentKey {
                source: V6::new(header[8..24].try_into().ok()?),
                destination: V6::new(header[24..40].try_into().ok()?),
                identification: u32::from_ne_bytes(extension[4..8].try_into().ok()?),
                protocol: u32::from(extension[0]) | hook << 8,
            });
        }
        next = extension[0];
        at += (usize::from(extension[1]) + 1) * 8;
    }
    None
}

#[derive(Debug)]
struct Held {
    ifindex: u32,
    datagram: DatagramId,
    frame: Vec<u8>,
    until: Instant,
}

/// Fragments that wait, oldest first.
#[derive(Debug, Default)]
pub struct Room {
    held: VecDeque<Held>,
    of_link: HashMap<u32, usize>,
    bytes: usize,
}

impl Room {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Keeps a frame; false when there is no room for it.
    pub fn keep(&mut self, fragment: Fragment, frame: &[u8], now: Instant) -> bool {
        let of_link = self.of_link.entry(fragment.ifindex).or_default();
        let full = self.held.len() >= MAX_FRAMES
            || *of_link >= MAX_FRAMES_OF_LINK
            || self.bytes + frame.len() > MAX_BYTES;
        if full {
            return false;
        }
        *of_link += 1;
        self.bytes += frame.len();
        self.held.push_back(Held {
            ifindex: fragment.ifindex,
            datagram: fragment.datagram,
            frame: frame.to_vec(),
            until: now + WAIT,
        });
        true
    }

    /// Takes out what may go on, in the order of its arrival. Each datagram is asked for once.
    pub fn release(
        &mut self,
        mut first_has_passed: impl FnMut(&DatagramId) -> bool,
    ) -> Vec<Vec<u8>> {
        let mut asked = HashMap::new();
        self.take_out(|held| {
            *asked
                .entry(held.datagram)
                .or_insert_with(|| first_has_passed(&held.datagram))
        })
        .into_iter()
        .map(|held| held.frame)
        .collect()
    }

    /// Throws away what has waited for too long; says how many.
    pub fn expire(&mut self, now: Instant) -> usize {
        self.take_out(|held| held.until <= now).len()
    }

    fn take_out(&mut self, mut wanted: impl FnMut(&Held) -> bool) -> Vec<Held> {
        let mut out = Vec::new();
        for held in std::mem::take(&mut self.held) {
            if wanted(&held) {
                out.push(held);
            } else {
                self.held.push_back(held);
            }
        }
        for held in &out {
            self.bytes -= held.frame.len();
            if let Some(count) = self.of_link.get_mut(&held.ifindex) {
                *count -= 1;
                if *count == 0 {
                    self.of_link.remove(&held.ifindex);
                }
            }
        }
        out
    }
}

#[cfg(test)]
mod tests;
