//! Identities: numbers for what policies can tell of an address. The same members keep their number over restarts of the
//! agent, because the kernel's maps, which outlive it, are full of these numbers.

use std::collections::HashMap;
use std::sync::Arc;

use dataplane_common::layout::IDENTITY_ANY;
use serde::{Deserialize, Serialize};

use super::peer::{PeerSet, PeerSets, SetId};

/// A port of a pod, by a name that rules ask for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct NamedPort {
    pub name: SetId,
    pub protocol: u8,
    pub port: u16,
}

/// What addresses of one identity have in common: all that rules ask about.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Members {
    /// Peer sets that hold them. Sorted.
    pub sets: Vec<SetId>,
    /// Sorted.
    pub ports: Vec<NamedPort>,
}

impl Members {
    /// Sorted, and each once.
    #[must_use]
    pub fn new(mut sets: Vec<SetId>, mut ports: Vec<NamedPort>) -> Self {
        sets.sort_unstable();
        sets.dedup();
        ports.sort_unstable();
        ports.dedup();
        Self { sets, ports }
    }

    #[must_use]
    pub fn is_nobody(&self) -> bool {
        self.sets.is_empty() && self.ports.is_empty()
    }
}

/// An identity as it lies on disk.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Record {
    pub id: u32,
    /// [`PeerSet::text`].
    pub sets: Vec<String>,
    /// Name, protocol and port.
    #[serde(default)]
    pub ports: Vec<(String, u8, u16)>,
}

/// All identities that were ever given, but for those that were forgotten.
#[derive(Clone, Debug, Default)]
pub struct Identities {
    by_members: HashMap<Arc<Members>, u32>,
    by_id: HashMap<u32, Arc<Members>>,
    last: u32,
    /// Not on disk yet.
    fresh: Vec<u32>,
}

impl Identities {
    /// Those of an earlier agent. Records that cannot be read are left out; their numbers are not given again.
    pub fn from_records(records: &[Record], sets: &mut PeerSets) -> Self {
        let mut all = Self::default();
        for record in records {
            all.last = all.last.max(record.id);
            let ids: Option<Vec<SetId>> = record
                .sets
                .iter()
                .map(|text| PeerSet::parse(text).map(|set| sets.id(&set)))
                .collect();
            let ports = record.ports.iter().map(|(name, protocol, port)| NamedPort {
                name: sets.id(&PeerSet::PortName(name.clone())),
                protocol: *protocol,
                port: *port,
            });
            let Some(members) = ids.map(|ids| Members::new(ids, ports.collect())) else {
                continue;
            };
            if record.id != IDENTITY_ANY && !members.is_nobody() {
                all.insert(Arc::new(members), record.id);
            }
        }
        all
    }

    /// The same, with the numbers that peer sets have in another table.
    #[must_use]
    pub fn renumbered(&self, from: &PeerSets, to: &mut PeerSets) -> Self {
        Self {
            last: self.last,
            fresh: self.fresh.clone(),
            ..Self::from_records(&self.records(from), to)
        }
    }

    fn insert(&mut self, members: Arc<Members>, id: u32) {
        self.by_members.insert(Arc::clone(&members), id);
        self.by_id.insert(id, members);
    }

    /// The identity of what has these members; nobody's is [`IDENTITY_ANY`].
    pub fn id(&mut self, members: Members) -> u32 {
        if members.is_nobody() {
            return IDENTITY_ANY;
        }
        if let Some(id) = self.by_members.get(&members) {
            return *id;
        }
        self.last = self.last.wrapping_add(1).max(1);
        let id = self.last;
        self.insert(Arc::new(members), id);
        self.fresh.push(id);
        id
    }

    #[must_use]
    pub fn members(&self, id: u32) -> Option<&Arc<Members>> {
        self.by_id.get(&id)
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    /// Forgets all but these. The numbers of the others are not given again.
    pub fn keep(&mut self, wanted: impl Fn(u32) -> bool) {
        self.by_id.retain(|id, _| wanted(*id));
        self.by_members.retain(|_, id| wanted(*id));
    }

    /// Identities that are not on disk yet, as they should lie there.
    pub fn take_fresh(&mut self, sets: &PeerSets) -> Vec<Record> {
        let fresh = std::mem::take(&mut self.fresh);
        fresh
            .into_iter()
            .filter_map(|id| self.record(id, sets))
            .collect()
    }

    /// All of them, as they should lie on disk.
    #[must_use]
    pub fn records(&self, sets: &PeerSets) -> Vec<Record> {
        let mut ids: Vec<u32> = self.by_id.keys().copied().collect();
        ids.sort_unstable();
        let records = ids.into_iter().filter_map(|id| self.record(id, sets));
        records.collect()
    }

    fn record(&self, id: u32, sets: &PeerSets) -> Option<Record> {
        let members = self.by_id.get(&id)?;
        let texts = members.sets.iter().filter_map(|set| sets.get(*set));
        let ports = members
            .ports
            .iter()
            .filter_map(|port| match sets.get(port.name)? {
                PeerSet::PortName(name) => Some((name.clone(), port.protocol, port.port)),
                _ => None,
            });
        Some(Record {
            id,
            sets: texts.map(PeerSet::text).collect(),
            ports: ports.collect(),
        })
    }
}
