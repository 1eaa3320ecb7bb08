//! Wanted services against those present: ids that stay, and operations in an order that no reader can trip over.
//!
//! Additions go backends, then slots, tables and admitted sources, then frontends; removals go in reverse. Ids come
//! from what is present: a service has the id of the frontends that lead to it, so an agent that starts again, and a
//! Service whose port got another name, keep theirs. An id that was given back is used again last, and only with a new
//! generation, so that a flow of its earlier life is recognised.

mod group;
mod ids;
mod lead;
mod present;
mod steps;

use std::collections::{BTreeMap, BTreeSet};

pub use crate::compile::services::Family;
use crate::compile::services::{Frontend, Scope, ServiceKey, Wanted, WantedService};
pub use lead::Led;
pub use present::{BackendUse, FrontendEntry, Operation, Plan, Present, PresentBackend, Room};

use group::Group;
use ids::Ids;
use steps::Steps;

/// Slots of a Maglev table in one map entry.
pub const BLOCK_SLOTS: usize = 64;

/// The planner's memory of the maps. It holds the result of every plan, so a caller that cannot carry a plan out must
/// start again from the maps.
#[derive(Debug)]
pub struct Planner {
    /// Which id each service has.
    services: BTreeMap<ServiceKey, (Family, u32)>,
    groups: BTreeMap<(Family, u32), Group>,
    /// Ids in the maps that no service has asked for yet.
    unclaimed: BTreeSet<(Family, u32)>,
    frontends: BTreeMap<Frontend, FrontendEntry>,
    backends: BTreeMap<(Family, u32), PresentBackend>,
    service_ids: BTreeMap<Family, Ids>,
    backend_ids: BTreeMap<Family, Ids>,
    counts: BTreeMap<Family, Counts>,
    room: BTreeMap<Family, Room>,
    maglev_size: u32,
    /// What was found in the maps and belongs to nothing.
    strays: Vec<Operation>,
}

/// How much of the room is taken.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    frontends: usize,
    sources: usize,
    blocks: usize,
}

impl Planner {
    /// Starts from what the maps hold. `maglev_size` is the number of slots of a Maglev table.
    #[must_use]
    pub fn new(present: Present, room: BTreeMap<Family, Room>, maglev_size: u32) -> Self {
        let mut planner = Self {
            services: BTreeMap::new(),
            groups: BTreeMap::new(),
            unclaimed: BTreeSet::new(),
            frontends: BTreeMap::new(),
            backends: BTreeMap::new(),
            service_ids: BTreeMap::new(),
            backend_ids: BTreeMap::new(),
            counts: Family::ALL.map(|f| (f, Counts::default())).into(),
            room,
            maglev_size,
            strays: Vec::new(),
        };
        planner.adopt(present);
        planner
    }

    /// A group for every id that a frontend leads to. What else there is belongs to nothing.
    fn adopt(&mut self, present: Present) {
        let mut used: BTreeMap<Family, (BTreeSet<u32>, BTreeSet<u32>)> = BTreeMap::new();
        for (frontend, entry) in present.frontends {
            let family = Family::of(frontend.address);
            if is_address(&frontend) || entry.service_id != 0 {
                self.frontends.insert(frontend, entry);
                self.counts.entry(family).or_default().frontends += 1;
            } else {
                self.strays.push(Operation::RemoveFrontend { frontend });
            }
            if entry.service_id != 0 {
                let key = (family, entry.service_id);
                used.entry(family).or_default().0.insert(entry.service_id);
                self.groups.entry(key).or_default().frontends.push(frontend);
                self.unclaimed.insert(key);
            }
        }
        for (family, service_id, network) in present.sources {
            self.counts.entry(family).or_default().sources += 1;
            match self.groups.get_mut(&(family, service_id)) {
                Some(group) => {
                    group.sources.insert(network);
                }
                None => self.strays.push(Operation::RemoveSource {
                    service_id,
                    network,
                }),
            }
        }
        for (family, service_id, block) in present.blocks {
            self.counts.entry(family).or_default().blocks += 1;
            match self.groups.get_mut(&(family, service_id)) {
                Some(group) => group.blocks = group.blocks.max(block + 1),
                None => self.strays.push(Operation::RemoveBlock {
                    family,
                    service_id,
                    block,
                }),
            }
        }
        for ((family, service_id, index), id) in present.slots {
            let group = self.groups.get_mut(&(family, service_id));
            if !group.is_some_and(|group| group.adopt_slot(index, id)) {
                self.strays.push(Operation::RemoveSlot {
                    family,
                    service_id,
                    index,
                });
            }
        }
        for ((family, id), backend) in present.backends {
            used.entry(family).or_default().1.insert(id);
            match self.groups.get_mut(&(family, backend.service_id)) {
                Some(group) => {
                    group.members.insert(id);
                    self.backends.insert((family, id), backend);
                }
                None => self.strays.push(Operation::EndBackend { family, id }),
            }
        }
        for family in Family::ALL {
            let (services, backends) = used.remove(&family).unwrap_or_default();
            let room = self.room(family);
            self.service_ids
                .insert(family, Ids::new(&services, service_limit(&room)));
            self.backend_ids
                .insert(family, Ids::new(&backends, room.backends));
        }
    }

    fn room(&self, family: Family) -> Room {
        self.room.get(&family).copied().unwrap_or_default()
    }

    /// How many frontends, addresses as a whole aside, and usable endpoints the maps hold once the plans are carried
    /// out.
    #[must_use]
    pub fn totals(&self) -> (usize, usize) {
        let frontends = self.frontends.keys().filter(|f| !is_address(f)).count();
        let slots = self.groups.values().map(|group| group.slots.len()).sum();
        (frontends, slots)
    }

    /// The services with what they have in the maps.
    pub fn services(&self) -> impl Iterator<Item = (&ServiceKey, PlannedService<'_>)> {
        self.services.iter().filter_map(|(key, id)| {
            let group = self.groups.get(id)?;
            Some((
                key,
                PlannedService {
                    planner: self,
                    family: id.0,
                    service_id: id.1,
                    group,
                },
            ))
        })
    }

    /// Plans what is wanted.
    pub fn plan(&mut self, wanted: &Wanted) -> Plan {
        let mut steps = Steps::default();
        let mut gone: BTreeSet<(Family, u32)> = BTreeSet::new();
        if wanted.everything {
            steps.ended.append(&mut self.strays);
            let lost: Vec<ServiceKey> = self
                .services
                .keys()
                .filter(|key| !wanted.services.contains_key(*key))
                .cloned()
                .collect();
            gone.extend(lost.iter().filter_map(|key| self.services.remove(key)));
        }
        for (key, _) in wanted.services.iter().filter(|(_, w)| w.is_none()) {
            gone.extend(self.services.remove(key));
        }
        self.plan_addresses(wanted, &mut steps);
        for (key, service) in &wanted.services {
            if let Some(service) = service {
                self.put(key, service, &mut gone, &mut steps);
            }
        }
        if wanted.everything {
            gone.append(&mut self.unclaimed);
        }
        for id in gone {
            self.remove(id, &mut steps);
        }
        for ids in self
            .service_ids
            .values_mut()
            .chain(self.backend_ids.values_mut())
        {
            ids.settle();
        }
        steps.into_plan()
    }

    fn plan_addresses(&mut self, wanted: &Wanted, steps: &mut Steps) {
        if wanted.everything {
            let stale: Vec<Frontend> = self
                .frontends
                .keys()
                .filter(|f| is_address(f) && wanted.addresses.get(&f.address) != Some(&true))
                .copied()
                .collect();
            for frontend in stale {
                self.remove_frontend(&frontend, 0, steps);
            }
        }
        for (address, present) in &wanted.addresses {
            let frontend = Frontend {
                address: *address,
                port: 0,
                protocol: 0,
                scope: Scope::All,
            };
            if !present {
                self.remove_frontend(&frontend, 0, steps);
            } else if let Err(why) = self.put_frontend(frontend, FrontendEntry::default(), steps) {
                steps.refused.push((format!("address {address}"), why));
            }
        }
    }

    /// The id that a service has, or that its frontends have in the maps, or a new one.
    fn id_of(
        &mut self,
        key: &ServiceKey,
        wanted: &WantedService,
        gone: &mut BTreeSet<(Family, u32)>,
    ) -> Option<u32> {
        let family = key.family;
        if let Some((_, id)) = self.services.get(key) {
            return Some(*id);
        }
        let found = wanted.frontends.iter().find_map(|(frontend, _)| {
            let id = (family, self.frontends.get(frontend)?.service_id);
            (self.unclaimed.remove(&id) || gone.remove(&id)).then_some(id.1)
        });
        let id = found.or_else(|| self.service_ids.get_mut(&family)?.take())?;
        self.services.insert(key.clone(), (family, id));
        Some(id)
    }

    fn put_frontend(
        &mut self,
        frontend: Frontend,
        entry: FrontendEntry,
        steps: &mut Steps,
    ) -> Result<(), String> {
        let family = Family::of(frontend.address);
        let room = self.room(family).frontends;
        let counts = self.counts.entry(family).or_default();
        let before = self.frontends.get(&frontend);
        if before.is_none() && counts.frontends >= room {
            return Err(format!("the table of frontends is full ({room})"));
        }
        steps.touch(frontend, before);
        if self.frontends.insert(frontend, entry).is_none() {
            counts.frontends += 1;
        }
        steps.want(frontend, Some(entry));
        Ok(())
    }

    /// Removes a frontend, unless it leads to another service by now.
    fn remove_frontend(&mut self, frontend: &Frontend, service_id: u32, steps: &mut Steps) {
        let Some(entry) = self.frontends.get(frontend) else {
            return;
        };
        if entry.service_id != service_id {
            return;
        }
        steps.touch(*frontend, Some(entry));
        self.frontends.remove(frontend);
        if let Some(counts) = self.counts.get_mut(&Family::of(frontend.address)) {
            counts.frontends -= 1;
        }
        steps.want(*frontend, None);
    }
}

/// What a service has in the maps.
#[derive(Clone, Copy, Debug)]
pub struct PlannedService<'a> {
    planner: &'a Planner,
    family: Family,
    pub service_id: u32,
    group: &'a Group,
}

impl PlannedService<'_> {
    pub fn frontends(&self) -> impl Iterator<Item = (&Frontend, &FrontendEntry)> {
        let entries = &self.planner.frontends;
        let own = move |f: &&Frontend| {
            entries
                .get(*f)
                .is_some_and(|e| e.service_id == self.service_id)
        };
        self.group
            .frontends
            .iter()
            .filter(own)
            .filter_map(move |frontend| Some((frontend, entries.get(frontend)?)))
    }

    pub fn backends(&self) -> impl Iterator<Item = &PresentBackend> {
        self.group
            .members
            .iter()
            .filter_map(|id| self.planner.backends.get(&(self.family, *id)))
    }
}

/// More ids than frontends can ever need, so that an id rests long before it is used again.
fn service_limit(room: &Room) -> u32 {
    u32::try_from(room.frontends.saturating_mul(4).saturating_add(1)).unwrap_or(u32::MAX)
}

/// An address as a whole.
fn is_address(frontend: &Frontend) -> bool {
    frontend.port == 0 && frontend.protocol == 0
}

fn length<T>(list: &[T]) -> u32 {
    u32::try_from(list.len()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
