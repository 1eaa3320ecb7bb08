//! Addresses of domain names, as DNS answers told pods of this node.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

/// More addresses of one name are not learnt: an answer cannot carry so many.
pub(super) const ADDRESSES_PER_NAME: usize = 1_024;
/// More names are not learnt: pods could ask for names without end.
pub(super) const NAMES: usize = 10_000;

/// Which addresses names have, and until when that is believed (microseconds of any clock that does not go back).
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DomainAnswers {
    /// Lower case, without a closing dot.
    names: BTreeMap<String, BTreeMap<IpAddr, i64>>,
}

impl DomainAnswers {
    /// Takes an answer. True when an address is new to the name; one that does not fit is not learnt.
    pub fn learn(&mut self, name: &str, addresses: &[IpAddr], until_us: i64) -> bool {
        let name = canonical(name);
        if !self.names.contains_key(&name) && self.names.len() >= NAMES {
            return false;
        }
        let known = self.names.entry(name).or_default();
        let mut new = false;
        for address in addresses {
            if let Some(until) = known.get_mut(address) {
                *until = until_us.max(*until);
            } else if known.len() < ADDRESSES_PER_NAME {
                known.insert(*address, until_us);
                new = true;
            }
        }
        new
    }

    /// Forgets what is over, but for addresses that flows use. True when something went.
    pub fn expire(&mut self, now_us: i64, in_use: impl Fn(IpAddr) -> bool) -> bool {
        let mut gone = false;
        self.names.retain(|_, addresses| {
            addresses.retain(|address, until| {
                let stays = *until > now_us || in_use(*address);
                gone |= !stays;
                stays
            });
            !addresses.is_empty()
        });
        gone
    }

    /// Names with their addresses.
    pub fn iter(&self) -> impl Iterator<Item = (&str, impl Iterator<Item = (IpAddr, i64)>)> {
        self.names.iter().map(|(name, addresses)| {
            let addresses = addresses.iter().map(|(address, until)| (*address, *until));
            (name.as_str(), addresses)
        })
    }
}

/// The form in which names are compared.
#[must_use]
pub(super) fn canonical(name: &str) -> String {
    name.trim_end_matches('.').to_ascii_lowercase()
}

/// What rules may call a name: itself, and `*.` before each suffix of it.
pub(super) fn patterns(name: &str) -> BTreeSet<String> {
    let dots = name.match_indices('.');
    let suffixes = dots.map(|(at, _)| format!("*{}", &name[at..]));
    suffixes.chain([name.to_owned()]).collect()
}
