//! Flows as policies see them, for comparisons.

use std::collections::HashSet;
use std::net::IpAddr;
use std::path::Path;

use dataplane_common::layout::{Flow, FlowKey};
use dataplane_common::policy::verdict;
use dataplane_common::{Family, V4, V6};

use crate::kernel::KernelError;
use crate::kernel::services::{Wire, failed, open};
use crate::kernel::table::{Plain, Position, Table};

/// Read at once.
const BATCH: usize = 4_096;

/// A flow by what its first packet was after services were translated.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ObservedFlow {
    /// As the client wrote it.
    pub source: IpAddr,
    pub destination: IpAddr,
    pub protocol: u8,
    /// The destination's.
    pub port: u16,
}

/// The flows of both families.
#[derive(Debug)]
pub(in crate::kernel) struct FlowTables {
    v4: Table<FlowKey<V4>, Flow<V4>>,
    v6: Table<FlowKey<V6>, Flow<V6>>,
}

impl FlowTables {
    pub(in crate::kernel) fn open(maps: &Path) -> Result<Self, KernelError> {
        Ok(Self {
            v4: open(maps, "flows_v4")?,
            v6: open(maps, "flows_v6")?,
        })
    }

    /// Some of the flows, about `most` of each family.
    pub(in crate::kernel) fn some(&self, most: usize) -> Result<Vec<ObservedFlow>, KernelError> {
        let mut all = some(&self.v4, most)?;
        all.extend(some(&self.v6, most)?);
        Ok(all)
    }

    /// Those among some addresses to which a conversation goes that policies allow. Walks all flows.
    pub(in crate::kernel) fn destinations(
        &self,
        among: &HashSet<IpAddr>,
        now_s: u32,
    ) -> Result<HashSet<IpAddr>, KernelError> {
        let mut found = HashSet::new();
        used(&self.v4, among, now_s, &mut found)?;
        used(&self.v6, among, now_s, &mut found)?;
        Ok(found)
    }
}

fn used<A>(
    table: &Table<FlowKey<A>, Flow<A>>,
    among: &HashSet<IpAddr>,
    now_s: u32,
    found: &mut HashSet<IpAddr>,
) -> Result<(), KernelError>
where
    A: Family + Wire,
    FlowKey<A>: Plain,
    Flow<A>: Plain,
{
    let mut position = Position::default();
    loop {
        let batch = table
            .batch(&mut position, BATCH)
            .map_err(failed("read", table.name))?;
        for (_, flow) in &batch.entries {
            let destination = flow.backend.to_address();
            let denied = flow.policy.verdict() & verdict::DENIED != 0;
            if among.contains(&destination)
                && !denied
                && !flow.is_disposable()
                && !flow.is_expired(now_s, false)
            {
                found.insert(destination);
            }
        }
        if batch.last {
            return Ok(());
        }
    }
}

fn some<A>(
    table: &Table<FlowKey<A>, Flow<A>>,
    most: usize,
) -> Result<Vec<ObservedFlow>, KernelError>
where
    A: Wire,
    FlowKey<A>: Plain,
    Flow<A>: Plain,
{
    let mut position = Position::default();
    let mut all = Vec::new();
    while all.len() < most {
        let batch = table
            .batch(&mut position, BATCH)
            .map_err(failed("read", table.name))?;
        all.extend(batch.entries.iter().map(|(key, flow)| ObservedFlow {
            source: key.source.to_address(),
            destination: flow.backend.to_address(),
            protocol: u8::try_from(key.protocol).unwrap_or(0),
            port: flow.backend_port.number(),
        }));
        if batch.last {
            break;
        }
    }
    Ok(all)
}
