//! Source ports that translation may give.

use crate::layout::Node;

/// First port of Linux' default range for clients (`ip_local_port_range`), and the first above it.
const LOCAL_FIRST: u32 = 32_768;
const LOCAL_END: u32 = 61_000;
/// Below are the ports of well-known services.
const FIRST: u32 = 1_024;
const END: u32 = 65_536;

/// Ports in the order of their use.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tier {
    /// No process of the node chooses them for its own connections.
    Preferred = 0,
    /// The range that the node's processes choose from.
    Shared = 1,
}

impl Tier {
    pub const ALL: [Self; 2] = [Self::Preferred, Self::Shared];
}

/// Ports are given in blocks of so many, so that what lies where is found out once for a block.
pub const BLOCK: u32 = 4;

/// The NodePort range, which no source is given: a reply to such a port would be taken for a new connection. Widened
/// to whole blocks.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Ports {
    first: u32,
    /// First port behind the range.
    end: u32,
}

impl Ports {
    #[inline(always)]
    #[must_use]
    pub fn of<A>(node: &Node<A>) -> Self {
        Self::without(node.node_port_first, node.node_port_last)
    }

    /// Every port but those from `first` to `last`; zeroes leave out none.
    #[inline(always)]
    #[must_use]
    pub fn without(first: u16, last: u16) -> Self {
        Self {
            first: first as u32 / BLOCK * BLOCK,
            end: if last == 0 {
                0
            } else {
                last as u32 / BLOCK * BLOCK + BLOCK
            },
        }
    }

    /// How many blocks a tier has.
    #[inline(always)]
    #[must_use]
    pub fn blocks(self, tier: Tier) -> u32 {
        let ports = match tier {
            Tier::Preferred => self.size(FIRST, LOCAL_FIRST) + self.size(LOCAL_END, END),
            Tier::Shared => self.size(LOCAL_FIRST, LOCAL_END),
        };
        ports / BLOCK
    }

    /// First port of a block of a tier; numbers behind the last begin anew. Zero when the tier has none.
    #[inline(always)]
    #[must_use]
    pub fn block(self, tier: Tier, number: u32) -> u32 {
        let blocks = self.blocks(tier);
        if blocks == 0 {
            return 0;
        }
        let place = number % blocks * BLOCK;
        match tier {
            Tier::Shared => self.nth(LOCAL_FIRST, LOCAL_END, place),
            Tier::Preferred => {
                let low = self.size(FIRST, LOCAL_FIRST);
                if place < low {
                    self.nth(FIRST, LOCAL_FIRST, place)
                } else {
                    self.nth(LOCAL_END, END, place - low)
                }
            }
        }
    }

    /// Ports from `first` up to `end` that are left out: where they begin, and how many.
    #[inline(always)]
    fn hole(self, first: u32, end: u32) -> (u32, u32) {
        let from = if self.first > first {
            self.first
        } else {
            first
        };
        let to = if self.end < end { self.end } else { end };
        if from < to {
            (from, to - from)
        } else {
            (end, 0)
        }
    }

    #[inline(always)]
    fn size(self, first: u32, end: u32) -> u32 {
        end - first - self.hole(first, end).1
    }

    #[inline(always)]
    fn nth(self, first: u32, end: u32, place: u32) -> u32 {
        let (from, missing) = self.hole(first, end);
        let port = first + place;
        if port < from { port } else { port + missing }
    }
}
