//! What one step of a plan adds, written by a few calls: a whole cluster's services are hundreds of thousands of entries.

use std::io;

use dataplane_common::Port;
use dataplane_common::layout::{
    BACKEND_LOCAL, Backend, Frontend as FrontendValue, FrontendKey, SlotKey, SourceRangeKey,
    backend_state,
};

use super::tables::{FamilyTables, frontend_key, frontend_value};
use super::{Wire, failed};
use crate::compile::services::Family;
use crate::kernel::KernelError;
use crate::kernel::table::Plain;
use crate::plan::services::Operation;

/// Entries of one family, by map.
struct Additions<'a, A> {
    backends: (Vec<u32>, Vec<Backend<A>>),
    active: Vec<u32>,
    slots: Vec<(SlotKey, u32)>,
    frontends: (Vec<FrontendKey<A>>, Vec<FrontendValue>),
    /// Few, and each by a call of its own.
    others: Vec<&'a Operation>,
}

impl<'a, A: Wire> Additions<'a, A> {
    fn of(operations: impl Iterator<Item = &'a Operation>) -> Self {
        let mut all = Self {
            backends: (Vec::new(), Vec::new()),
            active: Vec::new(),
            slots: Vec::new(),
            frontends: (Vec::new(), Vec::new()),
            others: Vec::new(),
        };
        for operation in operations {
            all.take(operation);
        }
        all
    }

    fn take(&mut self, operation: &'a Operation) {
        match operation {
            Operation::PutBackend {
                id,
                address,
                port,
                local,
                service_id,
                ..
            } => {
                if let Some(address) = A::from_address(*address) {
                    self.backends.0.push(*id);
                    self.backends.1.push(Backend {
                        address,
                        port: Port::new(*port),
                        flags: if *local { BACKEND_LOCAL } else { 0 },
                        service_id: *service_id,
                    });
                }
            }
            Operation::SetUse { id, .. } => self.active.push(*id),
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
                self.slots.push((key, *backend_id));
            }
            Operation::PutFrontend { frontend, entry } => {
                if let Some(key) = frontend_key(frontend) {
                    self.frontends.0.push(key);
                    self.frontends.1.push(frontend_value(entry));
                }
            }
            other => self.others.push(other),
        }
    }
}

impl<A: Wire + 'static> FamilyTables<A>
where
    FrontendKey<A>: Plain,
    Backend<A>: Plain,
    SourceRangeKey<A>: Plain,
{
    /// Carries out the family's part of operations that add something in the same step. `fresh` says that there is
    /// nothing in the maps.
    pub(super) fn add(
        &self,
        family: Family,
        step: &[Operation],
        fresh: bool,
    ) -> Result<(), KernelError> {
        let own = step.iter().filter(|operation| operation.family() == family);
        let all = Additions::<A>::of(own);
        let (ids, backends) = &all.backends;
        let (keys, frontends) = &all.frontends;
        self.backends
            .put_all(ids, backends)
            .map_err(failed("change", self.backends.name()))?;
        self.activate(&all.active, fresh)
            .map_err(failed("change", self.states.name))?;
        self.slots
            .put_all(&all.slots, fresh)
            .map_err(failed("change", self.slots.name()))?;
        self.frontends
            .put_all(keys, frontends)
            .map_err(failed("change", self.frontends.name))?;
        all.others
            .into_iter()
            .try_for_each(|other| self.carry_out(other))
    }

    /// Lets these backends be used.
    fn activate(&self, ids: &[u32], fresh: bool) -> io::Result<()> {
        // Beyond so many it is cheaper to read all words at once.
        const MANY: usize = 8_192;
        let all = if ids.len() >= MANY && !fresh {
            self.states.entries()?
        } else {
            Vec::new()
        };
        let mut words = Vec::with_capacity(ids.len());
        for id in ids {
            let read = usize::try_from(*id).ok().and_then(|at| all.get(at));
            let word = match read.filter(|(own, _)| own == id) {
                Some((_, word)) => *word,
                None if fresh => 0,
                None => self.states.get(id)?.unwrap_or(0),
            };
            words.push(backend_state::with_kind(word, backend_state::ACTIVE));
        }
        self.states.put_all(ids, &words)
    }
}
