//! Carries plans out on the service maps, and reads from them what is present.

mod additions;
mod tables;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use control_api::desired::{Changes, DesiredState};
use dataplane_common::layout::MAGLEV_SIZE;
use dataplane_common::{V4, V6};

use super::table::{Plain, Table};
use super::{ApplyReport, KernelError, ServiceDetails, ServiceTotals};
use crate::compile::node_addresses::{self, NodeAddresses};
use crate::compile::services::{
    Catalog, Family, HostPort, NodeIdentity, Refusal, ServiceOptions, Wanted,
};
use crate::plan::services::{Led, Operation, Planner, Present};
use tables::FamilyTables;

/// More of what is asked for and not served is counted, not listed.
const MAX_LISTED: usize = 100;

/// Addresses of the maps to and from those of the standard library.
pub(super) trait Wire: Copy + Default {
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
    /// Nothing was written to the maps since they were made.
    fresh: bool,
    /// Services that did not fit, since they were last planned.
    refused: BTreeMap<String, String>,
    /// Refusals that were logged already.
    told: BTreeSet<Refusal>,
}

impl Services {
    /// `fresh` says that the maps were made just now: there is nothing in them.
    pub(super) fn open(maps: &Path, node: NodeIdentity, fresh: bool) -> Result<Self, KernelError> {
        let addresses = NodeAddresses::new(&node_addresses::Input {
            node_name: &node.name,
            configured: &node.addresses,
            present: &[],
            nodes: &BTreeMap::new(),
            node_port_addresses: &[],
        });
        Ok(Self {
            v4: FamilyTables::open(maps, &tables::NAMES_V4)?,
            v6: FamilyTables::open(maps, &tables::NAMES_V6)?,
            catalog: Catalog::new(node, ServiceOptions::default(), addresses),
            planner: None,
            fresh,
            refused: BTreeMap::new(),
            told: BTreeSet::new(),
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
            news: self.news(),
            addresses_changed: wanted.everything || !wanted.addresses.is_empty(),
        })
    }

    /// Makes the host ports of this node equal to the list.
    pub(super) fn set_host_ports(&mut self, list: Vec<HostPort>) -> Result<usize, KernelError> {
        let wanted = self.catalog.set_host_ports(list);
        let changed = self.carry_out_wanted(&wanted);
        self.news();
        changed
    }

    pub(super) fn set_options(&mut self, options: ServiceOptions) {
        self.catalog.set_options(options);
    }

    /// Takes the addresses of nodes. True when the next [`Self::apply`] has something to do for them.
    pub(super) fn set_addresses(&mut self, addresses: NodeAddresses) -> bool {
        self.catalog.set_addresses(addresses)
    }

    /// Addresses that belong to services as a whole.
    pub(super) fn addresses(&self) -> Vec<IpAddr> {
        self.catalog.service_addresses().collect()
    }

    pub(super) fn totals(&self) -> ServiceTotals {
        let (frontends, endpoints) = self
            .planner
            .as_ref()
            .map(Planner::totals)
            .unwrap_or_default();
        ServiceTotals {
            frontends,
            endpoints,
            refused: self.catalog.refusals().count() + self.refused.len(),
        }
    }

    /// What the maps hold, service by service, and what is not in them.
    pub(super) fn details(&self) -> (Vec<ServiceDetails>, Vec<(String, String)>) {
        let services = self.planner.iter().flat_map(Planner::services);
        let details = services.map(|(key, service)| ServiceDetails {
            owner: key.owner.clone(),
            port: key.port.clone(),
            service_id: service.service_id,
            frontends: service.frontends().map(|(f, e)| (*f, *e)).collect(),
            backends: service.backends().copied().collect(),
        });
        (details.collect(), self.failed())
    }

    /// Where a new flow leads; None while it is not known what the maps hold.
    pub(super) fn lead(&self, to: SocketAddr, protocol: u8, outside: bool) -> Option<Led> {
        let addresses = self.catalog.addresses();
        let mut nodes = addresses.own().chain(addresses.peers());
        let node_ports = nodes.any(|(address, serves)| serves && address == to.ip());
        let planner = self.planner.as_ref()?;
        Some(planner.lead(to, protocol, node_ports, outside))
    }

    /// Everything that is asked for and not in the maps, and why; the first [`MAX_LISTED`] of it.
    fn failed(&self) -> Vec<(String, String)> {
        let asked = self.catalog.refusals();
        let refusals = asked.map(|r| (format!("{}: {}", r.owner, r.what), r.why.clone()));
        let full = self.refused.iter().map(|(w, why)| (w.clone(), why.clone()));
        full.chain(refusals).take(MAX_LISTED).collect()
    }

    /// Refusals since the last call; each is logged once for as long as it lasts.
    fn news(&mut self) -> Vec<Refusal> {
        let now: BTreeSet<Refusal> = self.catalog.refusals().take(MAX_LISTED).cloned().collect();
        let news: Vec<Refusal> = now.difference(&self.told).cloned().collect();
        for refusal in &news {
            tracing::warn!(owner = %refusal.owner, what = %refusal.what, why = %refusal.why, "not served");
        }
        self.told = now;
        news
    }

    fn carry_out_wanted(&mut self, wanted: &Wanted) -> Result<usize, KernelError> {
        if *wanted == Wanted::default() {
            return Ok(0);
        }
        let fresh = std::mem::take(&mut self.fresh);
        let mut planner = match self.planner.take() {
            Some(planner) => planner,
            None => self.read_planner(fresh)?,
        };
        let plan = planner.plan(wanted);
        if wanted.everything {
            self.refused.clear();
        }
        self.refused.extend(plan.refused);
        // The planner is dropped on the way out: the next apply starts from the maps.
        self.carry_out(&plan.operations, fresh)?;
        self.planner = Some(planner);
        Ok(plan.operations.len())
    }

    /// `fresh` as in [`Self::carry_out`].
    fn read_planner(&self, fresh: bool) -> Result<Planner, KernelError> {
        let mut present = Present::default();
        if !fresh {
            self.v4.read(Family::V4, &mut present)?;
            self.v6.read(Family::V6, &mut present)?;
        }
        let room = [(Family::V4, self.v4.room()), (Family::V6, self.v6.room())];
        Ok(Planner::new(present, room.into(), MAGLEV_SIZE))
    }

    /// Carries operations out in their order. Additions of one step go into the maps together: nobody looks at any of
    /// them before the step that follows. `fresh` says that there is nothing in the maps.
    fn carry_out(&self, operations: &[Operation], fresh: bool) -> Result<(), KernelError> {
        for step in operations.chunk_by(Operation::adds_with) {
            match step {
                [one] if !one.adds_with(one) => match one.family() {
                    Family::V4 => self.v4.carry_out(one)?,
                    Family::V6 => self.v6.carry_out(one)?,
                },
                _ => {
                    self.v4.add(Family::V4, step, fresh)?;
                    self.v6.add(Family::V6, step, fresh)?;
                }
            }
        }
        Ok(())
    }
}

pub(super) fn open<K: Plain, V: Plain>(
    maps: &Path,
    name: &'static str,
) -> Result<Table<K, V>, KernelError> {
    Table::open(maps, name).map_err(failed("open", name))
}

/// An error of a map.
pub(super) fn failed(
    attempted: &'static str,
    map: &'static str,
) -> impl FnOnce(std::io::Error) -> KernelError {
    move |source| KernelError::Map {
        attempted,
        map,
        source,
    }
}

pub(super) fn entries<K: Plain, V: Plain>(table: &Table<K, V>) -> Result<Vec<(K, V)>, KernelError> {
    table.entries().map_err(failed("read", table.name))
}
