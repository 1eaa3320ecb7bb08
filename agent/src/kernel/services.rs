//! Carries plans out on the service maps, and reads from them what is present.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::path::Path;

use control_api::desired::{Changes, DesiredState};
use dataplane_common::layout::{
    BACKEND_LOCAL, Backend, Frontend as FrontendValue, FrontendKey, SlotKey, backend_state,
};
use dataplane_common::{Port, V4, V6};

use super::table::{Plain, Table};
use super::{ApplyReport, KernelError};
use crate::compile::node_addresses::{self, NodeAddresses};
use crate::compile::services::{
    Catalog, Family, Frontend, FrontendOptions, HostPort, NodeIdentity, Scope, ServiceOptions,
    Wanted,
};
use crate::plan::services::{
    BackendUse, FrontendEntry, Operation, Planner, Present, PresentBackend, Room,
};

const MAGLEV_SIZE: u32 = 4_093;

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
    catalog: Catalog,
    /// None until the maps were read, and after a plan broke off.
    planner: Option<Planner>,
    /// Services that did not fit, since they were last planned.
    refused: BTreeMap<String, String>,
}

impl Services {
    pub(super) fn open(
        maps: &Path,
        node: NodeIdentity,
        options: ServiceOptions,
    ) -> Result<Self, KernelError> {
        let addresses = NodeAddresses::new(&node_addresses::Input {
            node_name: &node.name,
            configured: &node.addresses,
            present: &[],
            nodes: &BTreeMap::new(),
            node_port_addresses: &[],
        });
        Ok(Self {
            v4: FamilyTables::open(
                maps,
                ["frontends_v4", "slots_v4", "backends_v4", "states_v4"],
            )?,
            v6: FamilyTables::open(
                maps,
                ["frontends_v6", "slots_v6", "backends_v6", "states_v6"],
            )?,
            catalog: Catalog::new(node, options, addresses),
            planner: None,
            refused: BTreeMap::new(),
        })
    }

    pub(super) fn apply(
        &mut self,
        desired: &DesiredState,
        changes: &Changes,
    ) -> Result<ApplyReport, KernelError> {
        let wanted = self.catalog.compile(desired, changes);
        let changed = self.carry_out_wanted(&wanted)?;
        Ok(ApplyReport {
            revision: desired.revision,
            changed,
            failed: self.failed(),
            retry: !self.refused.is_empty(),
        })
    }

    /// Makes the host ports of this node equal to the list.
    pub(super) fn set_host_ports(&mut self, list: Vec<HostPort>) -> Result<usize, KernelError> {
        let wanted = self.catalog.set_host_ports(list);
        self.carry_out_wanted(&wanted)
    }

    /// Everything that is asked for and not in the maps, and why.
    fn failed(&self) -> Vec<(String, String)> {
        let asked = self.catalog.refusals();
        let refusals = asked.map(|r| (format!("{}: {}", r.owner, r.what), r.why.clone()));
        let full = self.refused.iter().map(|(w, why)| (w.clone(), why.clone()));
        refusals.chain(full).collect()
    }

    fn carry_out_wanted(&mut self, wanted: &Wanted) -> Result<usize, KernelError> {
        if *wanted == Wanted::default() {
            return Ok(0);
        }
        let mut planner = match self.planner.take() {
            Some(planner) => planner,
            None => self.read_planner()?,
        };
        let plan = planner.plan(wanted);
        if wanted.everything {
            self.refused.clear();
        }
        self.refused.extend(plan.refused);
        for operation in &plan.operations {
            // The planner is dropped on the way out: the next apply starts from the maps.
            self.carry_out(operation)?;
        }
        self.planner = Some(planner);
        Ok(plan.operations.len())
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
            sources: 0,
            blocks: 0,
        };
        Ok(Planner::new(present, room, MAGLEV_SIZE))
    }

    fn carry_out(&self, operation: &Operation) -> Result<(), KernelError> {
        match operation.family() {
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
            _ => return Ok(()),
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
            Operation::PutFrontend { frontend, entry } => {
                let Some(key) = frontend_key(frontend) else {
                    return Ok(());
                };
                self.frontends.put(&key, &frontend_value(entry))
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
        for (key, id) in entries(&self.slots)? {
            present
                .slots
                .insert((family, key.service_id, key.index), id);
        }
        for (key, value) in entries(&self.frontends)? {
            let frontend = Frontend {
                address: key.address.to_address(),
                port: key.port.number(),
                protocol: key.protocol,
                scope: if key.scope == 0 {
                    Scope::All
                } else {
                    Scope::External
                },
            };
            present.frontends.insert(frontend, frontend_entry(&value));
        }
        Ok(())
    }
}

fn frontend_value(entry: &FrontendEntry) -> FrontendValue {
    FrontendValue {
        service_id: entry.service_id,
        backends: entry.backends,
        local_backends: entry.local_backends,
        affinity_s: entry.affinity_s,
        ..FrontendValue::default()
    }
}

fn frontend_entry(value: &FrontendValue) -> FrontendEntry {
    FrontendEntry {
        service_id: value.service_id,
        backends: value.backends,
        local_backends: value.local_backends,
        affinity_s: value.affinity_s,
        options: FrontendOptions::default(),
    }
}

fn frontend_key<A: Wire>(frontend: &Frontend) -> Option<FrontendKey<A>> {
    Some(FrontendKey {
        address: A::from_address(frontend.address)?,
        port: Port::new(frontend.port),
        protocol: frontend.protocol,
        scope: match frontend.scope {
            Scope::All => 0,
            Scope::External => 1,
        },
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
