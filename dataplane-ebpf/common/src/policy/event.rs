//! What user space is told of packets that policies drop: some of them, with how many more there were.

use crate::address::{Port, V4, V6};
use crate::limit::{Bucket, Rate};
use crate::policy::{Ends, Verdict};

/// Events of one CPU; the rest is only counted.
pub const EVENTS: Rate = Rate {
    per_s: 50,
    burst: 50,
};

/// Bytes of the ring of events.
pub const RING_BYTES: u32 = 65_536;

/// A packet that a policy dropped, as it would have been after service translation.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct DropEvent {
    /// Number of the [`crate::reason::DropReason`].
    pub reason: u32,
    /// See [`crate::policy::verdict`]: which side denied, and by which rule.
    pub verdict: u32,
    /// Link of the pod whose policy denied. Zero when the packet's flow was denied before: the verdict's side says at
    /// which end the pod is.
    pub ifindex: u32,
    /// [`crate::layout::PolicyState::generation`] when the packet was judged.
    pub generation: u32,
    /// As the client wrote it. An IPv4 address lies in the first word.
    pub source: [u32; 4],
    pub destination: [u32; 4],
    /// Zero for protocols without ports.
    pub source_port: Port,
    pub destination_port: Port,
    pub protocol: u8,
    /// 4 or 6.
    pub family: u8,
    pub reserved: u16,
    /// Packets that policies dropped on this CPU since its last event, and that had none.
    pub missed: u32,
}

const _: () = assert!(size_of::<DropEvent>() == 60 && align_of::<DropEvent>() == 4);

/// What one CPU knows of its events.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Sampler {
    bucket: Bucket,
    missed: u32,
}

impl Sampler {
    /// Asks for an event. False when there were enough for now, and this packet is only counted.
    #[inline(always)]
    pub fn take(&mut self, now_ms: u32) -> bool {
        let granted = self.bucket.take_of(EVENTS, now_ms);
        if !granted {
            self.missed = self.missed.saturating_add(1);
        }
        granted
    }

    /// Packets without an event since the last; begins to count anew.
    #[inline(always)]
    pub fn report_missed(&mut self) -> u32 {
        let missed = self.missed;
        self.missed = 0;
        missed
    }

    /// An event that was asked for and found no room in the ring.
    #[inline(always)]
    pub fn lost(&mut self) {
        self.missed = self.missed.saturating_add(1);
    }
}

/// Families whose addresses fit an event.
pub trait Told: Sized {
    const FAMILY: u8;

    fn words(&self) -> [u32; 4];
}

impl Told for V4 {
    const FAMILY: u8 = 4;

    #[inline(always)]
    fn words(&self) -> [u32; 4] {
        [self.0, 0, 0, 0]
    }
}

impl Told for V6 {
    const FAMILY: u8 = 6;

    #[inline(always)]
    fn words(&self) -> [u32; 4] {
        self.0
    }
}

impl DropEvent {
    /// Reads an event off the ring; `None` for bytes that are none.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut at = 0;
        let mut take = || {
            let word: [u8; 4] = bytes.get(at..at + 4)?.try_into().ok()?;
            at += 4;
            Some(u32::from_ne_bytes(word))
        };
        let (reason, verdict, ifindex, generation) = (take()?, take()?, take()?, take()?);
        let source = [take()?, take()?, take()?, take()?];
        let destination = [take()?, take()?, take()?, take()?];
        let [a, b, c, d] = take()?.to_ne_bytes();
        let [protocol, family, e, f] = take()?.to_ne_bytes();
        Some(Self {
            reason,
            verdict,
            ifindex,
            generation,
            source,
            destination,
            source_port: Port(u16::from_ne_bytes([a, b])),
            destination_port: Port(u16::from_ne_bytes([c, d])),
            protocol,
            family,
            reserved: u16::from_ne_bytes([e, f]),
            missed: take()?,
        })
    }

    /// Says of a packet what its verdict says. `source_port` as the client wrote it.
    #[inline(always)]
    #[must_use]
    pub fn new<A: Told>(
        ends: &Ends<A>,
        source_port: Port,
        verdict: &Verdict,
        generation: u32,
        missed: u32,
    ) -> Self {
        Self {
            reason: verdict.reason as u32,
            verdict: verdict.word,
            ifindex: verdict.ifindex,
            generation,
            source: ends.source.words(),
            destination: ends.destination.words(),
            source_port,
            destination_port: ends.port,
            protocol: ends.protocol,
            family: A::FAMILY,
            reserved: 0,
            missed,
        }
    }
}
