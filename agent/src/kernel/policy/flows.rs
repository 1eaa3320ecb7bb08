//! Flows as policies see them, for comparisons.

use std::net::IpAddr;
use std::path::Path;

use dataplane_common::layout::{Flow, FlowKey};
use dataplane_common::{V4, V6};

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
