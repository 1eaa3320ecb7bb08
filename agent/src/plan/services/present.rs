//! What the service maps hold, as they are read.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnetwork::IpNetwork;

use crate::compile::services::{Family, Frontend, FrontendOptions};

/// Whether a backend may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackendUse {
    Active,
    Draining,
}

/// The value of a frontend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrontendEntry {
    /// Zero for an address as a whole, which leads nowhere.
    pub service_id: u32,
    pub backends: u32,
    pub local_backends: u32,
    /// Seconds; zero means none.
    pub affinity_s: u32,
    pub options: FrontendOptions,
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
    /// Addresses as a whole have port and protocol zero.
    pub frontends: BTreeMap<Frontend, FrontendEntry>,
    /// Backend ids by service and place.
    pub slots: BTreeMap<(Family, u32, u32), u32>,
    pub backends: BTreeMap<(Family, u32), PresentBackend>,
    /// Networks that a service's frontends admit.
    pub sources: BTreeSet<(Family, u32, IpNetwork)>,
    /// Blocks of Maglev tables, by service and number.
    pub blocks: BTreeSet<(Family, u32, u32)>,
}

/// How much fits into the maps of a family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    pub frontends: usize,
    pub backends: u32,
    /// Networks that frontends admit, of all services.
    pub sources: usize,
    /// Blocks of Maglev tables.
    pub blocks: usize,
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
    /// A part of a Maglev table, as backend ids; a whole block, the last one filled up with zeros.
    PutBlock {
        family: Family,
        service_id: u32,
        block: u32,
        backend_ids: Vec<u32>,
    },
    PutSource {
        service_id: u32,
        network: IpNetwork,
    },
    PutFrontend {
        frontend: Frontend,
        entry: FrontendEntry,
    },
    RemoveFrontend {
        frontend: Frontend,
    },
    RemoveSource {
        service_id: u32,
        network: IpNetwork,
    },
    RemoveBlock {
        family: Family,
        service_id: u32,
        block: u32,
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

impl Operation {
    /// Both add something, in the same step of the order: they may be carried out together, in any order.
    #[must_use]
    pub fn adds_with(&self, other: &Self) -> bool {
        let step = |operation: &Self| match operation {
            Self::PutBackend { .. }
            | Self::SetUse {
                usage: BackendUse::Active,
                ..
            } => Some(0),
            Self::PutSlot { .. } | Self::PutBlock { .. } | Self::PutSource { .. } => Some(1),
            Self::PutFrontend { .. } => Some(2),
            _ => None,
        };
        step(self).is_some_and(|own| step(other) == Some(own))
    }

    /// The maps that it changes.
    #[must_use]
    pub fn family(&self) -> Family {
        match self {
            Self::PutFrontend { frontend, .. } | Self::RemoveFrontend { frontend } => {
                Family::of(frontend.address)
            }
            Self::PutSource { network, .. } | Self::RemoveSource { network, .. } => {
                Family::of(network.ip())
            }
            Self::PutBackend { family, .. }
            | Self::SetUse { family, .. }
            | Self::PutSlot { family, .. }
            | Self::PutBlock { family, .. }
            | Self::RemoveBlock { family, .. }
            | Self::RemoveSlot { family, .. }
            | Self::EndBackend { family, .. } => *family,
        }
    }
}

/// Operations, and what does not fit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub operations: Vec<Operation>,
    /// What is left out for want of room, by service or address.
    pub refused: Vec<(String, String)>,
}
