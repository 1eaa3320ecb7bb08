//! Datagrams in fragments. Only the first fragment has ports; the others learn them from a table. One that overtakes its
//! first is parked by user space and comes again when the first has passed (`agent/src/fragments`).
//!
//! Identifications of 16 bits come again soon, so an entry must not outlive its datagram: it counts the bytes that have
//! passed, and is complete with the last of them.

use crate::address::{Family, Port};
use crate::layout::{Datagram, FragmentKey};
use crate::packet::{Packet, WITH_PORTS};
use crate::tables::Tables;

/// Seconds after which the rest of a datagram is not waited for, as in the kernel (`net.ipv4.ipfrag_time`; RFC 8200,
/// section 4.5, allows 60).
pub const LIFE_S: u32 = 30;

/// Seconds after a sign of life of the program that parks fragments during which it gets them.
pub const PARK_ALIVE_S: u32 = 3;

/// Which part of its datagram a fragment carries.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Extent {
    /// Bytes before it.
    pub offset: u32,
    pub bytes: u32,
    /// One unless it is the last.
    pub more: u32,
}

impl Datagram {
    /// True while fragments of this datagram may still come, at `now_s`.
    #[inline(always)]
    #[must_use]
    pub fn is_open(&self, now_s: u32) -> bool {
        self.complete == 0 && now_s.saturating_sub(self.seen_s) <= LIFE_S
    }

    /// Counts a fragment.
    #[inline(always)]
    fn add(&mut self, extent: &Extent) {
        self.bytes = self.bytes.wrapping_add(extent.bytes);
        if extent.more == 0 {
            self.total = extent.offset.wrapping_add(extent.bytes);
        }
        if self.bytes == self.total {
            self.complete = 1;
        }
    }
}

/// Gives a later fragment the ports that its first had, and remembers those of a first. To be called once for each packet,
/// before the decision; `hook` is the hook's number, because a packet that stays as it is passes two of them.
#[inline(always)]
pub fn complete<A: Family, T: Tables<A>>(
    tables: &mut T,
    hook: u32,
    packet: &mut Packet<A>,
    extent: &Extent,
) {
    let key = key_of(hook, packet);
    let now_s = tables.now_s();
    if packet.has_ports() {
        let mut first = Datagram {
            source_port: packet.source_port,
            destination_port: packet.destination_port,
            bytes: 0,
            total: 0,
            seen_s: now_s,
            complete: 0,
        };
        first.add(extent);
        tables.set_datagram(&key, &first);
        return;
    }
    let mut ports = (Port(0), Port(0));
    let mut known = false;
    if let Some(datagram) = tables.datagram(&key)
        && datagram.is_open(now_s)
    {
        datagram.add(extent);
        ports = (datagram.source_port, datagram.destination_port);
        known = true;
    }
    if known {
        packet.source_port = ports.0;
        packet.destination_port = ports.1;
        packet.flags |= WITH_PORTS;
    }
}

#[inline(always)]
fn key_of<A: Family>(hook: u32, packet: &Packet<A>) -> FragmentKey<A> {
    FragmentKey {
        source: packet.source,
        destination: packet.destination,
        identification: packet.identification,
        protocol: packet.protocol as u32 | hook << 8,
    }
}

/// How a parked frame says where it was met: in place of its source's Ethernet address, which nobody needs again.
pub mod park_mark {
    /// Locally administered.
    const FIRST: u8 = 0x02;

    /// The kernel's mark on fragments that were let in before they were parked. Nothing on the wire sets it.
    pub const TAKEN_BACK: u32 = 0x5745_4952;

    #[inline(always)]
    #[must_use]
    pub const fn write(hook: u32, ifindex: u32) -> [u8; 6] {
        let [a, b, c, d] = ifindex.to_be_bytes();
        [FIRST, hook.to_le_bytes()[0], a, b, c, d]
    }

    /// Hook and link; `None` for an address that is no mark.
    #[inline(always)]
    #[must_use]
    pub const fn read(mark: [u8; 6]) -> Option<(u32, u32)> {
        let [first, hook, a, b, c, d] = mark;
        let ifindex = u32::from_be_bytes([a, b, c, d]);
        if first != FIRST || ifindex == 0 {
            return None;
        }
        Some((hook as u32, ifindex))
    }
}
