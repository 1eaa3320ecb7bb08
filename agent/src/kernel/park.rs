//! What the programs and user space tell each other about fragments that came before the first of their datagram.

use std::path::Path;

use dataplane_common::layout::{Datagram, FragmentKey, Park};
use dataplane_common::{V4, V6};

use super::KernelError;
use super::services::open;
use super::table::Table;

/// A datagram in fragments, as the programs know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DatagramId {
    V4(FragmentKey<V4>),
    V6(FragmentKey<V6>),
}

/// The tables.
#[derive(Debug)]
pub(super) struct Parking {
    park: Table<u32, Park>,
    datagrams_v4: Table<FragmentKey<V4>, Datagram>,
    datagrams_v6: Table<FragmentKey<V6>, Datagram>,
}

impl Parking {
    pub(super) fn open(maps: &Path) -> Result<Self, KernelError> {
        Ok(Self {
            park: open(maps, "park")?,
            datagrams_v4: open(maps, "fragments_v4")?,
            datagrams_v6: open(maps, "fragments_v6")?,
        })
    }

    /// Lets the programs send fragments out of the link `ifindex`, for some seconds from `now_s` of the monotonic clock.
    pub(super) fn accept(&self, ifindex: u32, now_s: u32) -> Result<(), KernelError> {
        let park = Park {
            ifindex,
            alive_s: now_s,
        };
        self.park.put(&0, &park).map_err(|source| KernelError::Map {
            attempted: "change",
            map: self.park.name,
            source,
        })
    }

    pub(super) fn first_has_passed(
        &self,
        datagram: &DatagramId,
        now_s: u32,
    ) -> Result<bool, KernelError> {
        let (found, map) = match datagram {
            DatagramId::V4(key) => (self.datagrams_v4.get(key), self.datagrams_v4.name),
            DatagramId::V6(key) => (self.datagrams_v6.get(key), self.datagrams_v6.name),
        };
        let found = found.map_err(|source| KernelError::Map {
            attempted: "read",
            map,
            source,
        })?;
        Ok(found.is_some_and(|datagram| datagram.is_open(now_s)))
    }
}
