//! The service maps of one family: entries from and to what is planned.

use std::io;
use std::path::Path;

use dataplane_common::Port;
use dataplane_common::layout::{
    ALGORITHM_MAGLEV, ALGORITHM_RANDOM, BACKEND_LOCAL, Backend, FRONTEND_DROP_EMPTY, FRONTEND_DSR,
    FRONTEND_EXTERNAL_SCOPE, FRONTEND_KEEP_SOURCE, FRONTEND_RANGES, Frontend as FrontendValue,
    FrontendKey, MAGLEV_BLOCK, MaglevBlock, MaglevKey, SCOPE_ALL, SCOPE_EXTERNAL, SlotKey,
    SourceRangeKey, backend_state,
};
use ipnetwork::IpNetwork;

use super::{Wire, entries, failed, open};
use crate::compile::services::{Family, Frontend, FrontendOptions, Scope};
use crate::kernel::KernelError;
use crate::kernel::places::{Backends, Slots};
use crate::kernel::table::{Plain, Table};
use crate::plan::services::{
    BLOCK_SLOTS, BackendUse, FrontendEntry, Operation, Present, PresentBackend, Room,
};

const _: () = assert!(
    BLOCK_SLOTS == MAGLEV_BLOCK as usize,
    "planned blocks are entries"
);

/// Bits of the service id in front of the address.
const SERVICE_BITS: u32 = u32::BITS;

/// Names of the maps.
pub(super) struct Names {
    frontends: &'static str,
    slots: &'static str,
    backends: &'static str,
    states: &'static str,
    sources: &'static str,
    maglev: &'static str,
}

pub(super) const NAMES_V4: Names = Names {
    frontends: "frontends_v4",
    slots: "slots_v4",
    backends: "backends_v4",
    states: "states_v4",
    sources: "sources_v4",
    maglev: "maglev_v4",
};

pub(super) const NAMES_V6: Names = Names {
    frontends: "frontends_v6",
    slots: "slots_v6",
    backends: "backends_v6",
    states: "states_v6",
    sources: "sources_v6",
    maglev: "maglev_v6",
};

#[derive(Debug)]
pub(super) struct FamilyTables<A> {
    pub(super) frontends: Table<FrontendKey<A>, FrontendValue>,
    pub(super) slots: Slots,
    pub(super) backends: Backends<A>,
    pub(super) states: Table<u32, u32>,
    sources: Table<SourceRangeKey<A>, u32>,
    maglev: Table<MaglevKey, MaglevBlock>,
}

impl<A: Wire + 'static> FamilyTables<A>
where
    FrontendKey<A>: Plain,
    Backend<A>: Plain,
    SourceRangeKey<A>: Plain,
{
    pub(super) fn open(maps: &Path, names: &Names) -> Result<Self, KernelError> {
        Ok(Self {
            frontends: open(maps, names.frontends)?,
            slots: Slots::open(maps, names.slots).map_err(failed("open", names.slots))?,
            backends: Backends::open(maps, names.backends)
                .map_err(failed("open", names.backends))?,
            states: open(maps, names.states)?,
            sources: open(maps, names.sources)?,
            maglev: open(maps, names.maglev)?,
        })
    }

    pub(super) fn room(&self) -> Room {
        Room {
            frontends: self.frontends.max_entries as usize,
            backends: self.states.max_entries,
            sources: self.sources.max_entries as usize,
            blocks: self.maglev.max_entries as usize,
        }
    }

    /// Carries out an operation; those that [`Self::add`] carries out together are not known here.
    pub(super) fn carry_out(&self, operation: &Operation) -> Result<(), KernelError> {
        let (map, result) = match operation {
            Operation::SetUse { id, .. } => {
                let change = |word| backend_state::with_kind(word, backend_state::DRAINING);
                (self.states.name, self.set_state(*id, change))
            }
            // The state first: from that moment every flow of this backend is recognised as gone.
            Operation::EndBackend { id, .. } => {
                let ended = self.set_state(*id, backend_state::ended);
                let removed = ended.and_then(|()| self.backends.remove(*id));
                (self.backends.name(), removed)
            }
            Operation::RemoveSlot {
                service_id, index, ..
            } => {
                let key = SlotKey {
                    service_id: *service_id,
                    index: *index,
                };
                (self.slots.name(), self.slots.remove(&key).map(drop))
            }
            Operation::RemoveFrontend { frontend } => {
                let remove = |key| self.frontends.remove(&key).map(drop);
                (
                    self.frontends.name,
                    frontend_key(frontend).map_or(Ok(()), remove),
                )
            }
            Operation::PutSource {
                service_id,
                network,
            } => {
                let put = |key| self.sources.put(&key, &1);
                (
                    self.sources.name,
                    source_key(*service_id, network).map_or(Ok(()), put),
                )
            }
            Operation::RemoveSource {
                service_id,
                network,
            } => {
                let remove = |key| self.sources.remove(&key).map(drop);
                (
                    self.sources.name,
                    source_key(*service_id, network).map_or(Ok(()), remove),
                )
            }
            Operation::PutBlock { .. } | Operation::RemoveBlock { .. } => {
                (self.maglev.name, self.change_block(operation))
            }
            Operation::PutBackend { .. }
            | Operation::PutSlot { .. }
            | Operation::PutFrontend { .. } => return Ok(()),
        };
        result.map_err(failed("change", map))
    }

    fn change_block(&self, operation: &Operation) -> io::Result<()> {
        match operation {
            Operation::PutBlock {
                service_id,
                block,
                backend_ids,
                ..
            } => {
                let mut backends = [0; BLOCK_SLOTS];
                for (slot, id) in backends.iter_mut().zip(backend_ids) {
                    *slot = *id;
                }
                let (service_id, block) = (*service_id, *block);
                let key = MaglevKey { service_id, block };
                self.maglev.put(&key, &MaglevBlock { backends })
            }
            Operation::RemoveBlock {
                service_id, block, ..
            } => {
                let (service_id, block) = (*service_id, *block);
                self.maglev
                    .remove(&MaglevKey { service_id, block })
                    .map(drop)
            }
            _ => Ok(()),
        }
    }

    fn set_state(&self, id: u32, change: impl Fn(u32) -> u32) -> io::Result<()> {
        let word = self.states.get(&id)?.unwrap_or(0);
        self.states.put(&id, &change(word))
    }

    pub(super) fn read(&self, family: Family, present: &mut Present) -> Result<(), KernelError> {
        let backends = self.backends.entries();
        for (id, backend) in backends.map_err(failed("read", self.backends.name()))? {
            let word = self.states.get(&id).ok().flatten().unwrap_or(0);
            let usage = if backend_state::kind(word) == backend_state::ACTIVE {
                BackendUse::Active
            } else {
                BackendUse::Draining
            };
            let backend = PresentBackend {
                address: backend.address.to_address(),
                port: backend.port.number(),
                local: backend.flags & BACKEND_LOCAL != 0,
                service_id: backend.service_id,
                usage,
            };
            present.backends.insert((family, id), backend);
        }
        let slots = self.slots.entries();
        for (key, id) in slots.map_err(failed("read", self.slots.name()))? {
            present
                .slots
                .insert((family, key.service_id, key.index), id);
        }
        for (key, value) in entries(&self.frontends)? {
            let frontend = Frontend {
                address: key.address.to_address(),
                port: key.port.number(),
                protocol: key.protocol,
                scope: if key.scope == SCOPE_ALL {
                    Scope::All
                } else {
                    Scope::External
                },
            };
            present.frontends.insert(frontend, frontend_entry(&value));
        }
        for (key, _) in entries(&self.sources)? {
            let bits = key.prefix_bits.saturating_sub(SERVICE_BITS);
            let bits = u8::try_from(bits).unwrap_or(u8::MAX);
            if let Ok(network) = IpNetwork::new(key.address.to_address(), bits) {
                present.sources.insert((family, key.service_id, network));
            }
        }
        for (key, _) in entries(&self.maglev)? {
            present.blocks.insert((family, key.service_id, key.block));
        }
        Ok(())
    }
}

/// Each option with its flag.
fn flags(options: &mut FrontendOptions) -> [(&mut bool, u32); 5] {
    [
        (&mut options.external_scope, FRONTEND_EXTERNAL_SCOPE),
        (&mut options.keep_source, FRONTEND_KEEP_SOURCE),
        (&mut options.drop_empty, FRONTEND_DROP_EMPTY),
        (&mut options.ranges, FRONTEND_RANGES),
        (&mut options.dsr, FRONTEND_DSR),
    ]
}

pub(super) fn frontend_value(entry: &FrontendEntry) -> FrontendValue {
    let mut options = entry.options;
    let set = flags(&mut options)
        .into_iter()
        .filter(|(option, _)| **option)
        .fold(0, |set, (_, flag)| set | flag);
    FrontendValue {
        service_id: entry.service_id,
        backends: entry.backends,
        local_backends: entry.local_backends,
        flags: set,
        affinity_s: entry.affinity_s,
        algorithm: if options.maglev {
            ALGORITHM_MAGLEV
        } else {
            ALGORITHM_RANDOM
        },
    }
}

fn frontend_entry(value: &FrontendValue) -> FrontendEntry {
    let mut options = FrontendOptions {
        maglev: value.algorithm == ALGORITHM_MAGLEV,
        ..FrontendOptions::default()
    };
    for (option, flag) in flags(&mut options) {
        *option = value.flags & flag != 0;
    }
    FrontendEntry {
        service_id: value.service_id,
        backends: value.backends,
        local_backends: value.local_backends,
        affinity_s: value.affinity_s,
        options,
    }
}

fn source_key<A: Wire>(service_id: u32, network: &IpNetwork) -> Option<SourceRangeKey<A>> {
    Some(SourceRangeKey {
        prefix_bits: SERVICE_BITS + u32::from(network.prefix()),
        service_id,
        address: A::from_address(network.network())?,
    })
}

pub(super) fn frontend_key<A: Wire>(frontend: &Frontend) -> Option<FrontendKey<A>> {
    Some(FrontendKey {
        address: A::from_address(frontend.address)?,
        port: Port::new(frontend.port),
        protocol: frontend.protocol,
        scope: match frontend.scope {
            Scope::All => SCOPE_ALL,
            Scope::External => SCOPE_EXTERNAL,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_survives_the_map() {
        for bits in 0..64u32 {
            let mut options = FrontendOptions {
                maglev: bits & 32 != 0,
                ..FrontendOptions::default()
            };
            for (at, (option, _)) in flags(&mut options).into_iter().enumerate() {
                *option = bits >> at & 1 != 0;
            }
            let entry = FrontendEntry {
                service_id: 7,
                backends: 3,
                local_backends: 2,
                affinity_s: 9,
                options,
            };
            assert_eq!(frontend_entry(&frontend_value(&entry)), entry);
        }
    }
}
