//! The maps of backends and of their places in services, as if every backend and every place had an entry of its own.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use dataplane_common::layout::{Backend, SLOT_BLOCK, SlotBlock, SlotKey};

use super::table::{Plain, Table};

/// Places of backends. The agent alone writes them.
#[derive(Debug)]
pub(super) struct Slots(Table<SlotKey, SlotBlock>);

impl Slots {
    pub(super) fn open(directory: &Path, name: &'static str) -> io::Result<Self> {
        Table::open(directory, name).map(Self)
    }

    pub(super) fn name(&self) -> &'static str {
        self.0.name
    }

    /// Fills places, all those of a block by one change of the map. `fresh` says that none is taken.
    pub(super) fn put_all(&self, slots: &[(SlotKey, u32)], fresh: bool) -> io::Result<()> {
        let mut blocks: BTreeMap<SlotKey, SlotBlock> = BTreeMap::new();
        for (slot, id) in slots {
            let key = slot.block();
            let block = match blocks.get_mut(&key) {
                Some(block) => block,
                None => {
                    let present = if fresh { None } else { self.0.get(&key)? };
                    let present = present.unwrap_or_default();
                    blocks.entry(key).or_insert(present)
                }
            };
            block.backends[slot.within()] = *id;
        }
        let (keys, values): (Vec<_>, Vec<_>) = blocks.into_iter().unzip();
        self.0.put_all(&keys, &values)
    }

    /// True when there was something to remove.
    pub(super) fn remove(&self, slot: &SlotKey) -> io::Result<bool> {
        let key = slot.block();
        let Some(mut block) = self.0.get(&key)? else {
            return Ok(false);
        };
        let before = std::mem::take(&mut block.backends[slot.within()]);
        if block == SlotBlock::default() {
            self.0.remove(&key)?;
        } else {
            self.0.put(&key, &block)?;
        }
        Ok(before != 0)
    }

    /// Every place that is taken.
    pub(super) fn entries(&self) -> io::Result<Vec<(SlotKey, u32)>> {
        let blocks = self.0.entries()?;
        let slots = blocks.into_iter().flat_map(|(key, block)| {
            let first = key.index.saturating_mul(SLOT_BLOCK);
            let slot = move |within| SlotKey {
                index: first.saturating_add(within),
                ..key
            };
            (0..).map(slot).zip(block.backends)
        });
        Ok(slots.filter(|(_, id)| *id != 0).collect())
    }
}

/// Backends by id.
#[derive(Debug)]
pub(super) struct Backends<A>(Table<u32, Backend<A>>);

impl<A: Default> Backends<A>
where
    Backend<A>: Plain,
{
    pub(super) fn open(directory: &Path, name: &'static str) -> io::Result<Self> {
        Table::open(directory, name).map(Self)
    }

    pub(super) fn name(&self) -> &'static str {
        self.0.name
    }

    pub(super) fn put_all(&self, ids: &[u32], backends: &[Backend<A>]) -> io::Result<()> {
        self.0.put_all(ids, backends)
    }

    pub(super) fn remove(&self, id: u32) -> io::Result<()> {
        self.0.put(&id, &Backend::default())
    }

    /// Every backend that there is.
    pub(super) fn entries(&self) -> io::Result<Vec<(u32, Backend<A>)>> {
        let mut all = self.0.entries()?;
        all.retain(|(_, backend)| backend.service_id != 0);
        Ok(all)
    }
}
