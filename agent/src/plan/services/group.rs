//! One service id: its frontends, backends, slots, table and admitted sources.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnetwork::IpNetwork;

use super::{
    BLOCK_SLOTS, BackendUse, Family, FrontendEntry, Operation, Planner, PresentBackend, length,
};
use crate::compile::services::{
    Frontend, FrontendOptions, ServiceKey, WantedBackend, WantedService, maglev,
};
use crate::plan::services::steps::Steps;

/// What the maps hold under one service id.
#[derive(Debug, Default)]
pub(super) struct Group {
    /// Frontends that lead here; some may lead elsewhere by now.
    pub(super) frontends: Vec<Frontend>,
    /// Backend ids in slots 0, 1, …
    pub(super) slots: Vec<u32>,
    /// Ids of its backends, draining ones included.
    pub(super) members: BTreeSet<u32>,
    pub(super) sources: BTreeSet<IpNetwork>,
    /// Blocks of its Maglev table in the maps.
    pub(super) blocks: u32,
    /// The backends that the table was made for, with their ids; empty when that is not known.
    table_of: Vec<(maglev::Key, u32)>,
}

impl Group {
    /// Takes a slot of the maps; they come in their order. Holes are filled with zero, which no backend has: they are
    /// written anew. False when it is so far beyond the others that no agent wrote it.
    pub(super) fn adopt_slot(&mut self, index: u32, id: u32) -> bool {
        const LONGEST_HOLE: usize = 4_096;
        let index = index as usize;
        if index > self.slots.len() + LONGEST_HOLE {
            return false;
        }
        if self.slots.len() <= index {
            self.slots.resize(index + 1, 0);
        }
        self.slots[index] = id;
        true
    }
}

impl Planner {
    pub(super) fn put(
        &mut self,
        key: &ServiceKey,
        wanted: &WantedService,
        gone: &mut BTreeSet<(Family, u32)>,
        steps: &mut Steps,
    ) {
        let family = key.family;
        let Some(service_id) = self.id_of(key, wanted, gone) else {
            let why = "all service ids are in use".to_owned();
            steps.refused.push((name(key, wanted), why));
            return;
        };
        let mut group = self
            .groups
            .remove(&(family, service_id))
            .unwrap_or_default();
        let ids = self.put_backends(family, service_id, &mut group, wanted, steps);
        let fitting = wanted.backends.iter().filter(|b| !b.draining);
        let (usable, found) = (fitting.clone().count(), {
            let with_id = |b: &&WantedBackend| ids.contains_key(&(b.address, b.port));
            fitting.filter(with_id).count()
        });
        if found < usable {
            let why = format!(
                "the table of backends is full ({}): {found} of {usable} endpoints are used",
                self.room(family).backends
            );
            steps.refused.push((name(key, wanted), why));
        }
        put_slots(family, service_id, &mut group, wanted, &ids, steps);
        let with_table = self.put_table(key, service_id, &mut group, wanted, steps);
        let admitted = self.put_sources(key, service_id, &mut group, wanted, steps);
        let local = wanted
            .backends
            .iter()
            .filter(|b| !b.draining && b.local && ids.contains_key(&(b.address, b.port)));
        let entry = |options: FrontendOptions| FrontendEntry {
            service_id,
            backends: length(&group.slots),
            local_backends: u32::try_from(local.clone().count()).unwrap_or(u32::MAX),
            affinity_s: wanted.affinity_s,
            options: FrontendOptions {
                maglev: options.maglev && with_table,
                ..options
            },
        };
        let mut frontends = Vec::with_capacity(wanted.frontends.len());
        for (frontend, options) in &wanted.frontends {
            if options.ranges && !admitted {
                // Half a list of networks would refuse those that are left out; the frontend as a whole says so.
                continue;
            }
            match self.put_frontend(*frontend, entry(*options), steps) {
                Ok(()) => frontends.push(*frontend),
                Err(why) => steps.refused.push((frontend.to_string(), why)),
            }
        }
        for frontend in std::mem::replace(&mut group.frontends, frontends) {
            if !group.frontends.contains(&frontend) {
                self.remove_frontend(&frontend, service_id, steps);
            }
        }
        self.groups.insert((family, service_id), group);
    }

    /// Removes all that an id has.
    pub(super) fn remove(&mut self, (family, service_id): (Family, u32), steps: &mut Steps) {
        let Some(mut group) = self.groups.remove(&(family, service_id)) else {
            return;
        };
        for frontend in &group.frontends {
            self.remove_frontend(frontend, service_id, steps);
        }
        self.drop_sources(family, service_id, &mut group, &BTreeSet::new(), steps);
        self.drop_table(family, service_id, &mut group, steps);
        for index in (0..length(&group.slots)).rev() {
            steps.removals.push(Operation::RemoveSlot {
                family,
                service_id,
                index,
            });
        }
        for id in group.members {
            self.end_backend(family, id, steps);
        }
        if let Some(ids) = self.service_ids.get_mut(&family) {
            ids.give_back(service_id);
        }
    }

    fn end_backend(&mut self, family: Family, id: u32, steps: &mut Steps) {
        self.backends.remove(&(family, id));
        steps.ended.push(Operation::EndBackend { family, id });
        if let Some(ids) = self.backend_ids.get_mut(&family) {
            ids.give_back(id);
        }
    }

    /// Every wanted backend gets an id and its use, as long as there are ids; those no longer wanted end.
    fn put_backends(
        &mut self,
        family: Family,
        service_id: u32,
        group: &mut Group,
        wanted: &WantedService,
        steps: &mut Steps,
    ) -> BTreeMap<(IpAddr, u16), u32> {
        let mut known: BTreeMap<(IpAddr, u16), u32> = BTreeMap::new();
        for id in std::mem::take(&mut group.members) {
            match self.backends.get(&(family, id)) {
                Some(backend) if !known.contains_key(&(backend.address, backend.port)) => {
                    known.insert((backend.address, backend.port), id);
                }
                _ => self.end_backend(family, id, steps),
            }
        }
        let mut ids = BTreeMap::new();
        for backend in &wanted.backends {
            let key = (backend.address, backend.port);
            let id = match known.remove(&key) {
                Some(id) => id,
                // Nothing flows to it yet, so there is nothing to drain.
                None if backend.draining => continue,
                None => match self.backend_ids.get_mut(&family).and_then(super::Ids::take) {
                    Some(id) => id,
                    None => continue,
                },
            };
            self.put_backend(family, id, service_id, backend, steps);
            ids.insert(key, id);
        }
        for id in known.into_values() {
            self.end_backend(family, id, steps);
        }
        group.members = ids.values().copied().collect();
        ids
    }

    fn put_backend(
        &mut self,
        family: Family,
        id: u32,
        service_id: u32,
        wanted: &WantedBackend,
        steps: &mut Steps,
    ) {
        let usage = if wanted.draining {
            BackendUse::Draining
        } else {
            BackendUse::Active
        };
        let WantedBackend {
            address,
            port,
            local,
            ..
        } = *wanted;
        let next = PresentBackend {
            address,
            port,
            local,
            service_id,
            usage,
        };
        let before = self.backends.insert((family, id), next);
        if before.is_none_or(|before| before.local != local) {
            steps.backends.push(Operation::PutBackend {
                family,
                id,
                address,
                port,
                local,
                service_id,
            });
        }
        if before.is_none_or(|before| before.usage != usage) {
            let operation = Operation::SetUse { family, id, usage };
            match usage {
                BackendUse::Active => steps.backends.push(operation),
                // Only once no slot leads there any more.
                BackendUse::Draining => steps.ended.push(operation),
            }
        }
    }

    /// Makes the Maglev table equal to the backends; true when there is one. With a single backend there is nothing to
    /// choose, and with more backends than slots chance is fairer.
    fn put_table(
        &mut self,
        key: &ServiceKey,
        service_id: u32,
        group: &mut Group,
        wanted: &WantedService,
        steps: &mut Steps,
    ) -> bool {
        let family = key.family;
        let size = self.maglev_size as usize;
        let asked = wanted.frontends.iter().any(|(_, options)| options.maglev);
        if !asked || !(2..=size).contains(&group.slots.len()) {
            self.drop_table(family, service_id, group, steps);
            return false;
        }
        let blocks = u32::try_from(size.div_ceil(BLOCK_SLOTS)).unwrap_or(u32::MAX);
        let room = self.room(family).blocks;
        let counts = self.counts.entry(family).or_default();
        let more = (blocks.saturating_sub(group.blocks)) as usize;
        if counts.blocks + more > room {
            let why = format!(
                "the Maglev tables are full ({room} entries): backends are chosen at random",
            );
            steps.refused.push((name(key, wanted), why));
            self.drop_table(family, service_id, group, steps);
            return false;
        }
        counts.blocks += more;
        let mut members: Vec<(maglev::Key, u32)> = group
            .slots
            .iter()
            .filter_map(|id| {
                let backend = self.backends.get(&(family, *id))?;
                Some(((backend.address, backend.port), *id))
            })
            .collect();
        members.sort_unstable();
        if group.table_of == members && group.blocks == blocks {
            return true;
        }
        let before = table(&group.table_of, self.maglev_size);
        let after = table(&members, self.maglev_size);
        let cut = |table: &[u32], block: usize| {
            let mut ids: Vec<u32> = table
                .iter()
                .skip(block * BLOCK_SLOTS)
                .take(BLOCK_SLOTS)
                .copied()
                .collect();
            ids.resize(BLOCK_SLOTS, 0);
            ids
        };
        for block in 0..blocks {
            let backend_ids = cut(&after, block as usize);
            let known = !before.is_empty() && block < group.blocks;
            if !known || cut(&before, block as usize) != backend_ids {
                steps.additions.push(Operation::PutBlock {
                    family,
                    service_id,
                    block,
                    backend_ids,
                });
            }
        }
        (group.blocks, group.table_of) = (blocks, members);
        true
    }

    fn drop_table(
        &mut self,
        family: Family,
        service_id: u32,
        group: &mut Group,
        steps: &mut Steps,
    ) {
        for block in 0..std::mem::take(&mut group.blocks) {
            steps.removals.push(Operation::RemoveBlock {
                family,
                service_id,
                block,
            });
            if let Some(counts) = self.counts.get_mut(&family) {
                counts.blocks -= 1;
            }
        }
        group.table_of.clear();
    }

    /// Admits exactly the wanted networks; false when they do not fit.
    fn put_sources(
        &mut self,
        key: &ServiceKey,
        service_id: u32,
        group: &mut Group,
        wanted: &WantedService,
        steps: &mut Steps,
    ) -> bool {
        let family = key.family;
        let networks: BTreeSet<IpNetwork> = wanted.ranges.iter().copied().collect();
        let room = self.room(family).sources;
        let counts = self.counts.entry(family).or_default();
        let new: Vec<IpNetwork> = networks.difference(&group.sources).copied().collect();
        if counts.sources + new.len() > room {
            let why = format!("the table of source ranges is full ({room})");
            steps.refused.push((name(key, wanted), why));
            return false;
        }
        counts.sources += new.len();
        for network in new {
            group.sources.insert(network);
            steps.additions.push(Operation::PutSource {
                service_id,
                network,
            });
        }
        self.drop_sources(family, service_id, group, &networks, steps);
        true
    }

    fn drop_sources(
        &mut self,
        family: Family,
        service_id: u32,
        group: &mut Group,
        keep: &BTreeSet<IpNetwork>,
        steps: &mut Steps,
    ) {
        let gone: Vec<IpNetwork> = group.sources.difference(keep).copied().collect();
        if let Some(counts) = self.counts.get_mut(&family) {
            counts.sources -= gone.len();
        }
        for network in gone {
            group.sources.remove(&network);
            steps.removals.push(Operation::RemoveSource {
                service_id,
                network,
            });
        }
    }
}

/// What to call a service in messages: its first frontend.
fn name(key: &ServiceKey, wanted: &WantedService) -> String {
    match wanted.frontends.first() {
        Some((frontend, _)) => format!("{}: {frontend}", key.owner),
        None => key.owner.to_string(),
    }
}

/// The table over these backends, as ids. It follows from addresses and ports, whatever the ids are.
fn table(backends: &[(maglev::Key, u32)], size: u32) -> Vec<u32> {
    let keys: Vec<maglev::Key> = backends.iter().map(|(key, _)| *key).collect();
    maglev::table(&keys, size)
        .into_iter()
        .filter_map(|at| backends.get(at as usize).map(|(_, id)| *id))
        .collect()
}

fn put_slots(
    family: Family,
    service_id: u32,
    group: &mut Group,
    wanted: &WantedService,
    ids: &BTreeMap<(IpAddr, u16), u32>,
    steps: &mut Steps,
) {
    let slots = arrange(&group.slots, wanted, ids);
    for (index, backend_id) in (0u32..).zip(&slots) {
        if group.slots.get(index as usize) != Some(backend_id) {
            steps.additions.push(Operation::PutSlot {
                family,
                service_id,
                index,
                backend_id: *backend_id,
            });
        }
    }
    for index in (length(&slots)..length(&group.slots)).rev() {
        steps.removals.push(Operation::RemoveSlot {
            family,
            service_id,
            index,
        });
    }
    group.slots = slots;
}

/// Slots: usable backends, those of this node first; within each half, old ones keep their order and new ones follow.
fn arrange(old: &[u32], wanted: &WantedService, ids: &BTreeMap<(IpAddr, u16), u32>) -> Vec<u32> {
    let mut slots = Vec::with_capacity(wanted.backends.len());
    for local in [true, false] {
        let usable: BTreeSet<u32> = wanted
            .backends
            .iter()
            .filter(|backend| !backend.draining && backend.local == local)
            .filter_map(|backend| ids.get(&(backend.address, backend.port)).copied())
            .collect();
        let mut kept: BTreeSet<u32> = BTreeSet::new();
        // A slot of the maps may be there twice after an agent was cut off.
        slots.extend(
            old.iter()
                .copied()
                .filter(|id| usable.contains(id) && kept.insert(*id)),
        );
        slots.extend(usable.iter().copied().filter(|id| !kept.contains(id)));
    }
    slots
}
