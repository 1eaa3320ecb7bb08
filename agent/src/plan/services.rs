//! Wanted service ports against those present: ids that stay, and operations in an order that no reader can trip over.
//!
//! Additions go backends, then slots, then frontends; removals go in reverse. Ids come from what is present, so an
//! agent that starts again gives the same service the same ids. An id that was given back is used again last, and
//! only with a new generation, so that a flow of its earlier life is recognised.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;

use crate::compile::services::{Frontend, WantedBackend, WantedService};

/// The set of maps that an operation is meant for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    V4,
    V6,
}

impl Family {
    #[must_use]
    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() {
            Self::V4
        } else {
            Self::V6
        }
    }
}

/// Whether a backend may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackendUse {
    Active,
    Draining,
}

/// One change of one map entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// A backend appears, unused so far.
    PutBackend {
        family: Family,
        id: u32,
        address: IpAddr,
        port: u16,
        local: bool,
        service_id: u32,
    },
    SetUse {
        family: Family,
        id: u32,
        usage: BackendUse,
    },
    PutSlot {
        family: Family,
        service_id: u32,
        index: u32,
        backend_id: u32,
    },
    PutFrontend {
        frontend: Frontend,
        service_id: u32,
        backends: u32,
        local_backends: u32,
        affinity_s: u32,
    },
    RemoveFrontend {
        frontend: Frontend,
    },
    RemoveSlot {
        family: Family,
        service_id: u32,
        index: u32,
    },
    /// The backend's life ends: its flows are recognised as gone at once.
    EndBackend {
        family: Family,
        id: u32,
    },
}

/// A service port in the maps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PresentService {
    pub service_id: u32,
    /// Backend ids in slots 0, 1, …
    pub slots: Vec<u32>,
    pub local_backends: u32,
    pub affinity_s: u32,
}

/// A backend in the maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PresentBackend {
    pub address: IpAddr,
    pub port: u16,
    pub local: bool,
    pub service_id: u32,
    pub usage: BackendUse,
}

/// What the maps of both families hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Present {
    pub services: BTreeMap<Frontend, PresentService>,
    pub backends: BTreeMap<(Family, u32), PresentBackend>,
    /// Slots that belong to no service port.
    pub stray_slots: Vec<(Family, u32, u32)>,
}

/// How much fits, per family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    pub frontends: usize,
    pub backends: u32,
}

/// Operations, and what does not fit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub operations: Vec<Operation>,
    pub refused: Vec<(Frontend, String)>,
}

/// The planner's memory of the maps.
#[derive(Debug)]
pub struct Planner {
    services: BTreeMap<Frontend, PresentService>,
    /// How many of them each family has.
    counts: BTreeMap<Family, usize>,
    backends: BTreeMap<(Family, u32), PresentBackend>,
    /// Backends of each service.
    members: BTreeMap<(Family, u32), BTreeSet<u32>>,
    service_ids: BTreeMap<Family, Ids>,
    backend_ids: BTreeMap<Family, Ids>,
    room: Room,
    /// What was found in the maps and belongs to nothing.
    strays: Plan,
}

/// Ids given out and given back. Zero is never used.
#[derive(Debug, Default)]
struct Ids {
    next: u32,
    free: VecDeque<u32>,
    limit: u32,
}

impl Ids {
    fn new(used: &BTreeSet<u32>, limit: u32) -> Self {
        let next = used.last().map_or(1, |last| last + 1);
        Self {
            next,
            free: (1..next).filter(|id| !used.contains(id)).collect(),
            limit,
        }
    }

    /// Never used ids first: the longer an id rests, the better.
    fn take(&mut self) -> Option<u32> {
        if self.next < self.limit {
            self.next += 1;
            return Some(self.next - 1);
        }
        self.free.pop_front()
    }

    fn available(&self) -> usize {
        self.free.len() + self.limit.saturating_sub(self.next) as usize
    }
}

/// Operations by their place in the order.
#[derive(Default)]
struct Steps {
    backends: Vec<Operation>,
    slots: Vec<Operation>,
    frontends: Vec<Operation>,
    removed_frontends: Vec<Operation>,
    removed_slots: Vec<Operation>,
    ended: Vec<Operation>,
    refused: Vec<(Frontend, String)>,
}

impl Planner {
    /// Starts from what the maps hold. Service ports that share an id, or lead to backends that are not there, are
    /// taken for absent: they are written anew under other ids.
    #[must_use]
    pub fn new(present: Present, room: Room) -> Self {
        let mut planner = Self {
            services: BTreeMap::new(),
            counts: BTreeMap::new(),
            backends: BTreeMap::new(),
            members: BTreeMap::new(),
            service_ids: BTreeMap::new(),
            backend_ids: BTreeMap::new(),
            room,
            strays: Plan::default(),
        };
        planner.adopt(present);
        planner
    }

    fn adopt(&mut self, present: Present) {
        let mut used: BTreeMap<Family, (BTreeSet<u32>, BTreeSet<u32>)> = BTreeMap::new();
        let mut seen = BTreeSet::new();
        let mut sound = BTreeSet::new();
        for (frontend, service) in present.services {
            let family = Family::of(frontend.address);
            used.entry(family).or_default().0.insert(service.service_id);
            let own = |id: &u32| {
                present
                    .backends
                    .get(&(family, *id))
                    .is_some_and(|b| b.service_id == service.service_id)
            };
            if service.service_id != 0
                && seen.insert((family, service.service_id))
                && service.slots.iter().all(own)
            {
                sound.insert((family, service.service_id));
                self.insert(frontend, service);
            } else {
                // Kept out of the memory: it is written again as if it were new, in place of the broken one.
                self.strays
                    .operations
                    .push(Operation::RemoveFrontend { frontend });
            }
        }
        for (family, service_id, index) in present.stray_slots {
            self.strays.operations.push(Operation::RemoveSlot {
                family,
                service_id,
                index,
            });
        }
        for ((family, id), backend) in present.backends {
            used.entry(family).or_default().1.insert(id);
            if sound.contains(&(family, backend.service_id)) {
                self.members
                    .entry((family, backend.service_id))
                    .or_default()
                    .insert(id);
                self.backends.insert((family, id), backend);
            } else {
                self.strays
                    .operations
                    .push(Operation::EndBackend { family, id });
            }
        }
        for family in [Family::V4, Family::V6] {
            let (services, backends) = used.remove(&family).unwrap_or_default();
            self.service_ids
                .insert(family, Ids::new(&services, u32::MAX));
            self.backend_ids
                .insert(family, Ids::new(&backends, self.room.backends));
        }
    }

    /// Service ports in the maps.
    pub fn frontends(&self) -> impl Iterator<Item = &Frontend> {
        self.services.keys()
    }

    /// Removals of what belongs to nothing; empty after the first call. Only for use with a whole desired state.
    pub fn take_strays(&mut self) -> Vec<Operation> {
        std::mem::take(&mut self.strays.operations)
    }

    /// Plans the given service ports; `None` removes one. The memory then holds the result, so a caller that cannot
    /// carry the plan out must start again from the maps.
    pub fn plan(&mut self, changes: &BTreeMap<Frontend, Option<WantedService>>) -> Plan {
        let mut steps = Steps::default();
        // Removals are planned first, so that their room can be used; they are still carried out last.
        for (frontend, _) in changes.iter().filter(|(_, wanted)| wanted.is_none()) {
            self.remove(frontend, &mut steps);
        }
        for (frontend, wanted) in changes {
            if let Some(wanted) = wanted {
                self.put(frontend, wanted, &mut steps);
            }
        }
        let Steps {
            backends,
            slots,
            frontends,
            removed_frontends,
            removed_slots,
            ended,
            refused,
        } = steps;
        let order = [
            backends,
            slots,
            frontends,
            removed_frontends,
            removed_slots,
            ended,
        ];
        Plan {
            operations: order.into_iter().flatten().collect(),
            refused,
        }
    }

    fn remove(&mut self, frontend: &Frontend, steps: &mut Steps) {
        let Some(service) = self.services.remove(frontend) else {
            return;
        };
        let family = Family::of(frontend.address);
        if let Some(count) = self.counts.get_mut(&family) {
            *count -= 1;
        }
        let service_id = service.service_id;
        steps.removed_frontends.push(Operation::RemoveFrontend {
            frontend: *frontend,
        });
        for index in (0..length(&service.slots)).rev() {
            steps.removed_slots.push(Operation::RemoveSlot {
                family,
                service_id,
                index,
            });
        }
        for id in self
            .members
            .remove(&(family, service_id))
            .unwrap_or_default()
        {
            self.end_backend(family, id, steps);
        }
        if let Some(ids) = self.service_ids.get_mut(&family) {
            ids.free.push_back(service_id);
        }
    }

    fn end_backend(&mut self, family: Family, id: u32, steps: &mut Steps) {
        self.backends.remove(&(family, id));
        steps.ended.push(Operation::EndBackend { family, id });
        if let Some(ids) = self.backend_ids.get_mut(&family) {
            ids.free.push_back(id);
        }
    }

    fn put(&mut self, frontend: &Frontend, wanted: &WantedService, steps: &mut Steps) {
        let family = Family::of(frontend.address);
        if let Err(reason) = self.check_room(family, frontend, wanted) {
            steps.refused.push((*frontend, reason));
            return;
        }
        let before = self.services.get(frontend).cloned();
        let service_id = match &before {
            Some(service) => service.service_id,
            None => match self.service_ids.get_mut(&family).and_then(Ids::take) {
                Some(id) => id,
                None => return,
            },
        };
        let ids = self.put_backends(family, service_id, wanted, steps);
        let slots = arrange(
            before.as_ref().map_or(&[], |service| &service.slots),
            wanted,
            &ids,
        );
        let old = before.as_ref().map_or(&[][..], |service| &service.slots);
        for (index, backend_id) in slots.iter().enumerate() {
            if old.get(index) != Some(backend_id) {
                let index = u32::try_from(index).unwrap_or(u32::MAX);
                steps.slots.push(Operation::PutSlot {
                    family,
                    service_id,
                    index,
                    backend_id: *backend_id,
                });
            }
        }
        for index in (length(&slots)..length(old)).rev() {
            steps.removed_slots.push(Operation::RemoveSlot {
                family,
                service_id,
                index,
            });
        }
        let local = wanted
            .backends
            .iter()
            .filter(|b| !b.draining && b.local)
            .count();
        let service = PresentService {
            service_id,
            local_backends: u32::try_from(local).unwrap_or(u32::MAX),
            affinity_s: wanted.affinity_s,
            slots,
        };
        let changed = before.as_ref().is_none_or(|before| {
            before.slots.len() != service.slots.len()
                || before.local_backends != service.local_backends
                || before.affinity_s != service.affinity_s
        });
        if changed {
            steps.frontends.push(Operation::PutFrontend {
                frontend: *frontend,
                service_id,
                backends: length(&service.slots),
                local_backends: service.local_backends,
                affinity_s: service.affinity_s,
            });
        }
        self.insert(*frontend, service);
    }

    fn insert(&mut self, frontend: Frontend, service: PresentService) {
        if self.services.insert(frontend, service).is_none() {
            *self.counts.entry(Family::of(frontend.address)).or_default() += 1;
        }
    }

    /// Every wanted backend gets an id and its use; those no longer wanted end.
    fn put_backends(
        &mut self,
        family: Family,
        service_id: u32,
        wanted: &WantedService,
        steps: &mut Steps,
    ) -> BTreeMap<(IpAddr, u16), u32> {
        let members = self
            .members
            .remove(&(family, service_id))
            .unwrap_or_default();
        let mut known: BTreeMap<(IpAddr, u16), u32> = BTreeMap::new();
        for id in members {
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
                None => match self.backend_ids.get_mut(&family).and_then(Ids::take) {
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
        self.members
            .insert((family, service_id), ids.values().copied().collect());
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

    fn check_room(
        &self,
        family: Family,
        frontend: &Frontend,
        wanted: &WantedService,
    ) -> Result<(), String> {
        let present = self.services.get(frontend);
        let count = self.counts.get(&family).copied().unwrap_or(0);
        if present.is_none() && count >= self.room.frontends {
            return Err(format!(
                "the table of service ports is full ({})",
                self.room.frontends
            ));
        }
        let members = present.and_then(|service| self.members.get(&(family, service.service_id)));
        let held = members.map_or(0, BTreeSet::len);
        let available = self.backend_ids.get(&family).map_or(0, Ids::available);
        if wanted.backends.len() > held + available {
            return Err(format!(
                "the table of backends is full ({}): {} more are needed, {available} fit",
                self.room.backends,
                wanted.backends.len() - held
            ));
        }
        Ok(())
    }
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
        let kept: BTreeSet<u32> = old
            .iter()
            .copied()
            .filter(|id| usable.contains(id))
            .collect();
        slots.extend(old.iter().copied().filter(|id| usable.contains(id)));
        slots.extend(usable.iter().copied().filter(|id| !kept.contains(id)));
    }
    slots
}

fn length(slots: &[u32]) -> u32 {
    u32::try_from(slots.len()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
