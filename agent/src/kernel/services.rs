//! Carries plans out on the service maps, and reads from them what is present.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::path::Path;

use control_api::desired::{Changes, DesiredState, Name};
use dataplane_common::layout::{
    BACKEND_LOCAL, Backend, Frontend as FrontendValue, FrontendKey, SlotKey, backend_state,
};
use dataplane_common::{Port, V4, V6};

use super::table::{Plain, Table};
use super::{ApplyReport, KernelError};
use crate::compile::services::{
    Frontend, NodeIdentity, SliceIndex, WantedService, compile_service,
};
use crate::plan::services::{
    BackendUse, Family, Operation, Planner, Present, PresentBackend, PresentService, Room,
};

/// The service maps of one family.
#[derive(Debug)]
struct FamilyTables<A> {
    frontends: Table<FrontendKey<A>, FrontendValue>,
    slots: Table<SlotKey, u32>,
    backends: Table<u32, Backend<A>>,
    states: Table<u32, u32>,
}

/// Addresses of the maps to and from those of the standard library.
pub(super) trait Wire: Sized + Copy {
    fn to_address(self) -> IpAddr;
    fn from_address(address: IpAddr) -> Option<Self>;
}

impl Wire for V4 {
    fn to_address(self) -> IpAddr {
        IpAddr::from(self.octets())
    }

    fn from_address(address: IpAddr) -> Option<Self> {
        match address {
            IpAddr::V4(v4) => Some(Self::new(v4.octets())),
            IpAddr::V6(_) => None,
        }
    }
}

impl Wire for V6 {
    fn to_address(self) -> IpAddr {
        IpAddr::from(self.octets())
    }

    fn from_address(address: IpAddr) -> Option<Self> {
        match address {
            IpAddr::V4(_) => None,
            IpAddr::V6(v6) => Some(Self::new(v6.octets())),
        }
    }
}

/// The service maps, and what is known of them.
#[derive(Debug)]
pub(super) struct Services {
    v4: FamilyTables<V4>,
    v6: FamilyTables<V6>,
    node: NodeIdentity,
    /// None until the maps were read, and after a plan broke off.
    planner: Option<Planner>,
    /// Service ports by the service that owns them, since the first whole state.
    owned: Option<BTreeMap<Name, BTreeSet<Frontend>>>,
}

impl Services {
    pub(super) fn open(maps: &Path, node: NodeIdentity) -> Result<Self, KernelError> {
        Ok(Self {
            v4: FamilyTables::open(
                maps,
                ["frontends_v4", "slots_v4", "backends_v4", "states_v4"],
            )?,
            v6: FamilyTables::open(
                maps,
                ["frontends_v6", "slots_v6", "backends_v6", "states_v6"],
            )?,
            node,
            planner: None,
            owned: None,
        })
    }

    pub(super) fn apply(
        &mut self,
        desired: &DesiredState,
        changes: &Changes,
    ) -> Result<ApplyReport, KernelError> {
        let everything = changes.everything || changes.config || self.owned.is_none();
        if everything && !changes.everything && self.owned.is_none() {
            // A part of the state does not say what should not be there.
            return Ok(ApplyReport {
                revision: desired.revision,
                ..ApplyReport::default()
            });
        }
        let mut planner = match self.planner.take() {
            Some(planner) => planner,
            None => self.read_planner()?,
        };
        let mut report = ApplyReport {
            revision: desired.revision,
            ..ApplyReport::default()
        };
        let strays = if everything {
            planner.take_strays()
        } else {
            Vec::new()
        };
        let owned = self.owned.take().unwrap_or_default();
        let (wanted, owned) = if everything {
            self.want_everything(desired, &planner)
        } else {
            self.want_changed(desired, changes, owned)
        };
        let plan = planner.plan(&wanted);
        report.failed.extend(
            plan.refused
                .iter()
                .map(|(f, why)| (f.to_string(), why.clone())),
        );
        self.owned = Some(owned);
        for operation in strays.iter().chain(&plan.operations) {
            // The planner is dropped on the way out: the next apply starts from the maps.
            self.carry_out(operation)?;
        }
        report.changed = strays.len() + plan.operations.len();
        self.planner = Some(planner);
        Ok(report)
    }

    /// The union of what is wanted and what is present.
    fn want_everything(
        &self,
        desired: &DesiredState,
        planner: &Planner,
    ) -> (
        BTreeMap<Frontend, Option<WantedService>>,
        BTreeMap<Name, BTreeSet<Frontend>>,
    ) {
        let mut wanted: BTreeMap<_, _> = planner.frontends().map(|f| (*f, None)).collect();
        let mut owned: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
        let slices = SliceIndex::new(desired);
        for name in desired.services.keys() {
            for (frontend, service) in compile_service(desired, &slices, &self.node, name) {
                wanted.insert(frontend, Some(service));
                owned.entry(name.clone()).or_default().insert(frontend);
            }
        }
        (wanted, owned)
    }

    fn want_changed(
        &self,
        desired: &DesiredState,
        changes: &Changes,
        mut owned: BTreeMap<Name, BTreeSet<Frontend>>,
    ) -> (
        BTreeMap<Frontend, Option<WantedService>>,
        BTreeMap<Name, BTreeSet<Frontend>>,
    ) {
        let mut wanted: BTreeMap<_, Option<_>> = BTreeMap::new();
        let slices = SliceIndex::of_services(desired, &changes.services);
        for name in &changes.services {
            for frontend in owned.remove(name).unwrap_or_default() {
                wanted.entry(frontend).or_insert(None);
            }
            let compiled = compile_service(desired, &slices, &self.node, name);
            if !compiled.is_empty() {
                owned.insert(name.clone(), compiled.keys().copied().collect());
            }
            wanted.extend(
                compiled
                    .into_iter()
                    .map(|(frontend, service)| (frontend, Some(service))),
            );
        }
        (wanted, owned)
    }

    fn read_planner(&self) -> Result<Planner, KernelError> {
        let mut present = Present::default();
        self.v4.read(Family::V4, &mut present)?;
        self.v6.read(Family::V6, &mut present)?;
        let room = Room {
            frontends: self
                .v4
                .frontends
                .max_entries
                .min(self.v6.frontends.max_entries) as usize,
            backends: self.v4.states.max_entries.min(self.v6.states.max_entries),
        };
        Ok(Planner::new(present, room))
    }

    fn carry_out(&self, operation: &Operation) -> Result<(), KernelError> {
        let family = match operation {
            Operation::PutFrontend { frontend, .. } | Operation::RemoveFrontend { frontend } => {
                Family::of(frontend.address)
            }
            Operation::PutBackend { family, .. }
            | Operation::SetUse { family, .. }
            | Operation::PutSlot { family, .. }
            | Operation::RemoveSlot { family, .. }
            | Operation::EndBackend { family, .. } => *family,
        };
        match family {
            Family::V4 => self.v4.carry_out(operation),
            Family::V6 => self.v6.carry_out(operation),
        }
    }
}

impl<A: Wire + 'static> FamilyTables<A>
where
    FrontendKey<A>: Plain,
    Backend<A>: Plain,
{
    fn open(maps: &Path, names: [&'static str; 4]) -> Result<Self, KernelError> {
        let [frontends, slots, backends, states] = names;
        Ok(Self {
            frontends: open(maps, frontends)?,
            slots: open(maps, slots)?,
            backends: open(maps, backends)?,
            states: open(maps, states)?,
        })
    }

    fn carry_out(&self, operation: &Operation) -> Result<(), KernelError> {
        let (map, result) = match operation {
            Operation::PutBackend { .. } | Operation::EndBackend { .. } => {
                (self.backends.name, self.change_backend(operation))
            }
            Operation::SetUse { id, usage, .. } => {
                let kind = match usage {
                    BackendUse::Active => backend_state::ACTIVE,
                    BackendUse::Draining => backend_state::DRAINING,
                };
                let change = |word| backend_state::with_kind(word, kind);
                (self.states.name, self.set_state(*id, change))
            }
            Operation::PutSlot {
                service_id,
                index,
                backend_id,
                ..
            } => {
                let key = SlotKey {
                    service_id: *service_id,
                    index: *index,
                };
                (self.slots.name, self.slots.put(&key, backend_id))
            }
            Operation::RemoveSlot {
                service_id, index, ..
            } => {
                let key = SlotKey {
                    service_id: *service_id,
                    index: *index,
                };
                (self.slots.name, self.slots.remove(&key).map(drop))
            }
            Operation::PutFrontend { .. } | Operation::RemoveFrontend { .. } => {
                (self.frontends.name, self.change_frontend(operation))
            }
        };
        result.map_err(|source| KernelError::Map {
            attempted: "change",
            map,
            source,
        })
    }

    fn change_backend(&self, operation: &Operation) -> io::Result<()> {
        match operation {
            Operation::PutBackend {
                id,
                address,
                port,
                local,
                service_id,
                ..
            } => {
                let Some(address) = A::from_address(*address) else {
                    return Ok(());
                };
                let flags = if *local { BACKEND_LOCAL } else { 0 };
                let port = Port::new(*port);
                let backend = Backend {
                    address,
                    port,
                    flags,
                    service_id: *service_id,
                };
                self.backends.put(id, &backend)
            }
            // The state first: from that moment every flow of this backend is recognised as gone.
            Operation::EndBackend { id, .. } => {
                self.set_state(*id, backend_state::ended)?;
                self.backends.remove(id).map(drop)
            }
            _ => Ok(()),
        }
    }

    fn change_frontend(&self, operation: &Operation) -> io::Result<()> {
        match operation {
            Operation::PutFrontend {
                frontend,
                service_id,
                backends,
                local_backends,
                affinity_s,
            } => {
                let Some(key) = frontend_key(frontend) else {
                    return Ok(());
                };
                let value = FrontendValue {
                    service_id: *service_id,
                    backends: *backends,
                    local_backends: *local_backends,
                    affinity_s: *affinity_s,
                    ..FrontendValue::default()
                };
                self.frontends.put(&key, &value)
            }
            Operation::RemoveFrontend { frontend } => {
                let Some(key) = frontend_key(frontend) else {
                    return Ok(());
                };
                self.frontends.remove(&key).map(drop)
            }
            _ => Ok(()),
        }
    }

    fn set_state(&self, id: u32, change: impl Fn(u32) -> u32) -> io::Result<()> {
        let word = self.states.get(&id)?.unwrap_or(0);
        self.states.put(&id, &change(word))
    }

    fn read(&self, family: Family, present: &mut Present) -> Result<(), KernelError> {
        let backends = entries(&self.backends)?;
        for (id, backend) in backends {
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
        let mut slots: BTreeMap<(u32, u32), u32> = entries(&self.slots)?
            .into_iter()
            .map(|(key, id)| ((key.service_id, key.index), id))
            .collect();
        for (key, value) in entries(&self.frontends)? {
            let id = value.service_id;
            // A missing slot reads as backend zero, which no service has: the planner writes the port anew.
            let slots = (0..value.backends)
                .map(|index| slots.remove(&(id, index)).unwrap_or(0))
                .collect();
            let frontend = Frontend {
                address: key.address.to_address(),
                port: key.port.number(),
                protocol: key.protocol,
            };
            let service = PresentService {
                service_id: id,
                slots,
                local_backends: value.local_backends,
                affinity_s: value.affinity_s,
            };
            present.services.insert(frontend, service);
        }
        present.stray_slots.extend(
            slots
                .into_keys()
                .map(|(service, index)| (family, service, index)),
        );
        Ok(())
    }
}

fn frontend_key<A: Wire>(frontend: &Frontend) -> Option<FrontendKey<A>> {
    Some(FrontendKey {
        address: A::from_address(frontend.address)?,
        port: Port::new(frontend.port),
        protocol: frontend.protocol,
        scope: 0,
    })
}

pub(super) fn open<K: Plain, V: Plain>(
    maps: &Path,
    name: &'static str,
) -> Result<Table<K, V>, KernelError> {
    Table::open(maps, name).map_err(|source| KernelError::Map {
        attempted: "open",
        map: name,
        source,
    })
}

fn entries<K: Plain, V: Plain>(table: &Table<K, V>) -> Result<Vec<(K, V)>, KernelError> {
    table.entries().map_err(|source| KernelError::Map {
        attempted: "read",
        map: table.name,
        source,
    })
}
