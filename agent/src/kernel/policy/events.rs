//! The ring in which programs tell of packets that policies dropped.

use std::path::Path;

use aya::maps::{Map, MapData, RingBuf};
use dataplane_common::Port;
use dataplane_common::policy::event::DropEvent;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::kernel::KernelError;

const NAME: &str = "drop_events";

/// Reads the ring as it fills.
pub struct DropEvents {
    ring: AsyncFd<RingBuf<MapData>>,
}

impl std::fmt::Debug for DropEvents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DropEvents").finish_non_exhaustive()
    }
}

impl DropEvents {
    /// Within a runtime.
    pub(in crate::kernel) fn open(maps: &Path) -> Result<Self, KernelError> {
        let failed = |source| KernelError::Map {
            attempted: "open",
            map: NAME,
            source,
        };
        let other = |source: aya::maps::MapError| failed(std::io::Error::other(source));
        let data = MapData::from_pin(maps.join(NAME)).map_err(other)?;
        let ring = RingBuf::try_from(Map::RingBuf(data)).map_err(other)?;
        // SAFETY: the ring owns its descriptor, and is neither replaced nor closed before `AsyncFd` is dropped.
        let ring = unsafe { AsyncFd::register_with_interest(ring, Interest::READABLE) };
        let ring = ring.map_err(|error| failed(error.into()))?;
        Ok(Self { ring })
    }

    /// The next event, when it comes. May be dropped without a loss.
    ///
    /// # Errors
    /// When the ring cannot be waited for.
    pub async fn next(&mut self) -> std::io::Result<DropEvent> {
        loop {
            let mut ready = self.ring.readable_mut().await?;
            while let Some(item) = ready.get_inner_mut().next() {
                if let Some(event) = read(&item) {
                    return Ok(event);
                }
            }
            ready.clear_ready();
        }
    }
}

/// The fields in their order; none if it is not as long as an event.
fn read(bytes: &[u8]) -> Option<DropEvent> {
    let word = |place: usize| {
        let bytes = bytes.get(place * 4..place * 4 + 4)?;
        Some(u32::from_ne_bytes(bytes.try_into().ok()?))
    };
    let words = |place: usize| {
        Some([
            word(place)?,
            word(place + 1)?,
            word(place + 2)?,
            word(place + 3)?,
        ])
    };
    let port = |at: usize| {
        let bytes = bytes.get(at..at + 2)?;
        Some(Port(u16::from_ne_bytes(bytes.try_into().ok()?)))
    };
    if bytes.len() < size_of::<DropEvent>() {
        return None;
    }
    Some(DropEvent {
        reason: word(0)?,
        verdict: word(1)?,
        ifindex: word(2)?,
        generation: word(3)?,
        source: words(4)?,
        destination: words(8)?,
        source_port: port(48)?,
        destination_port: port(50)?,
        protocol: *bytes.get(52)?,
        family: *bytes.get(53)?,
        reserved: 0,
        missed: word(14)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_read_as_it_was_written() {
        let mut bytes = Vec::new();
        for word in [3u32, 0x8000_0001, 7, 9, 1, 2, 3, 4, 5, 6, 7, 8] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(Port::new(40_000).0.to_ne_bytes());
        bytes.extend(Port::new(80).0.to_ne_bytes());
        bytes.extend([6, 4, 0, 0]);
        bytes.extend(12u32.to_ne_bytes());
        let event = read(&bytes).unwrap();
        assert_eq!((event.reason, event.ifindex, event.missed), (3, 7, 12));
        assert_eq!(
            (event.source, event.destination),
            ([1, 2, 3, 4], [5, 6, 7, 8])
        );
        assert_eq!(
            (event.source_port.number(), event.destination_port.number()),
            (40_000, 80)
        );
        assert_eq!((event.protocol, event.family), (6, 4));
        assert_eq!(read(&bytes[1..]), None);
    }
}
