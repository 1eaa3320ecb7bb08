//! Who has a frontend that several Services ask for: the one that is older, then the one with the lower uid. The others
//! have it when that one lets go.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use control_api::desired::Name;

use super::Frontend;

/// A Service, ordered by its right to a frontend.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Claimant {
    pub(super) created_at_us: i64,
    pub(super) uid: String,
    pub(super) name: Name,
}

/// All claims.
#[derive(Debug, Default)]
pub(super) struct Claims {
    /// In the order of right. Nearly always one.
    claimants: BTreeMap<Frontend, Vec<Arc<Claimant>>>,
    frontends: BTreeMap<Name, (Arc<Claimant>, Vec<Frontend>)>,
}

impl Claims {
    /// Sets what a Service claims; no frontends remove it. Returns other Services for which a frontend has another holder
    /// by it.
    pub(super) fn set(&mut self, claimant: Claimant, frontends: Vec<Frontend>) -> BTreeSet<Name> {
        let name = claimant.name.clone();
        let mut affected = BTreeSet::new();
        if let Some((before, claimed)) = self.frontends.get(&name)
            && **before == claimant
            && *claimed == frontends
        {
            return affected;
        }
        if let Some((_, before)) = self.frontends.remove(&name) {
            for frontend in before {
                self.release(&frontend, &name, &mut affected);
            }
        }
        if frontends.is_empty() {
            return affected;
        }
        let claimant = Arc::new(claimant);
        for frontend in &frontends {
            let list = self.claimants.entry(*frontend).or_default();
            let at = list.partition_point(|other| **other < *claimant);
            if at == 0 {
                affected.extend(list.iter().map(|loser| loser.name.clone()));
            }
            list.insert(at, Arc::clone(&claimant));
        }
        self.frontends.insert(name, (claimant, frontends));
        affected
    }

    fn release(&mut self, frontend: &Frontend, name: &Name, affected: &mut BTreeSet<Name>) {
        let Some(list) = self.claimants.get_mut(frontend) else {
            return;
        };
        let had_it = list.first().is_some_and(|first| first.name == *name);
        list.retain(|claimant| claimant.name != *name);
        if had_it {
            affected.extend(list.iter().map(|heir| heir.name.clone()));
        }
        if list.is_empty() {
            self.claimants.remove(frontend);
        }
    }

    /// The Service that has this frontend.
    pub(super) fn holder(&self, frontend: &Frontend) -> Option<&Name> {
        let list = self.claimants.get(frontend)?;
        list.first().map(|claimant| &claimant.name)
    }

    /// Services that claim anything.
    pub(super) fn names(&self) -> impl Iterator<Item = &Name> {
        self.frontends.keys()
    }
}
