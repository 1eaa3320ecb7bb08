//! Operations by their place in the order.

use std::collections::BTreeMap;

use super::{FrontendEntry, Operation, Plan};
use crate::compile::services::Frontend;

#[derive(Default)]
pub(super) struct Steps {
    pub(super) backends: Vec<Operation>,
    /// Slots, tables and admitted sources.
    pub(super) additions: Vec<Operation>,
    /// What was there before this plan, and what shall be: a frontend may pass from one service to another.
    frontends: BTreeMap<Frontend, (Option<FrontendEntry>, Option<FrontendEntry>)>,
    pub(super) removals: Vec<Operation>,
    pub(super) ended: Vec<Operation>,
    pub(super) refused: Vec<(String, String)>,
}

impl Steps {
    /// Notes what a frontend was, the first time that it is named.
    pub(super) fn touch(&mut self, frontend: Frontend, before: Option<&FrontendEntry>) {
        self.frontends
            .entry(frontend)
            .or_insert((before.copied(), before.copied()));
    }

    pub(super) fn want(&mut self, frontend: Frontend, entry: Option<FrontendEntry>) {
        if let Some((_, wanted)) = self.frontends.get_mut(&frontend) {
            *wanted = entry;
        }
    }

    pub(super) fn into_plan(self) -> Plan {
        let mut put = Vec::new();
        let mut removed = Vec::new();
        for (frontend, (before, wanted)) in self.frontends {
            match wanted {
                Some(entry) if before != Some(entry) => {
                    put.push(Operation::PutFrontend { frontend, entry });
                }
                None if before.is_some() => removed.push(Operation::RemoveFrontend { frontend }),
                _ => {}
            }
        }
        let order = [
            self.backends,
            self.additions,
            put,
            removed,
            self.removals,
            self.ended,
        ];
        Plan {
            operations: order.into_iter().flatten().collect(),
            refused: self.refused,
        }
    }
}
