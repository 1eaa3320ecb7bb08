//! Wanted routes against the kernel's: ordered changes.

use ipnetwork::IpNetwork;

use crate::compile::routes::{Path, Routes};

/// A route of ours as the kernel has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PresentRoute {
    pub destination: IpNetwork,
    /// Metric as the kernel shows it.
    pub priority: u32,
    /// `None` for forms that this agent never writes.
    pub path: Option<Path>,
}

/// The metric that the kernel gives to routes of ours.
#[must_use]
pub fn usual_priority(destination: IpNetwork) -> u32 {
    if destination.is_ipv4() { 0 } else { 1024 }
}

/// One change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteChange {
    Delete(PresentRoute),
    Add(IpNetwork, Path),
    /// In one step: there is no moment without a route.
    Replace(IpNetwork, Path),
}

/// Changes that turn what is present into what is wanted: removals first, since a range may have changed hands, then
/// additions. Every present route is looked at, so strays of an earlier life are found.
#[must_use]
pub fn changes(wanted: &Routes, present: &[PresentRoute]) -> Vec<RouteChange> {
    let mut changes = Vec::new();
    let mut kept = std::collections::BTreeMap::new();
    for route in present {
        let usual = route.priority == usual_priority(route.destination);
        match (wanted.get(&route.destination), route.path) {
            (Some(_), Some(path)) if usual && !kept.contains_key(&route.destination) => {
                kept.insert(route.destination, path);
            }
            _ => changes.push(RouteChange::Delete(*route)),
        }
    }
    for (destination, path) in wanted {
        match kept.get(destination) {
            Some(present) if present == path => {}
            Some(present) if replaceable(*present) && replaceable(*path) => {
                changes.push(RouteChange::Replace(*destination, *path));
            }
            Some(present) => {
                changes.push(RouteChange::Delete(PresentRoute {
                    destination: *destination,
                    priority: usual_priority(*destination),
                    path: Some(*present),
                }));
                changes.push(RouteChange::Add(*destination, *path));
            }
            None => changes.push(RouteChange::Add(*destination, *path)),
        }
    }
    changes
}

/// The kernel replaces a route by one with a next hop only (IPv6 would keep an unreachable one beside it).
fn replaceable(path: Path) -> bool {
    !matches!(path, Path::Unreachable)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn destination(n: u8) -> IpNetwork {
        let text = if n.is_multiple_of(2) {
            format!("10.0.{n}.0/24")
        } else {
            format!("fd00:{n:x}::/64")
        };
        text.parse().unwrap()
    }

    fn path(n: u8) -> Path {
        match n % 4 {
            0 => Path::Unreachable,
            2 => Path::Overlay {
                link: 8,
                source: None,
                mtu: 1400 + u32::from(n),
            },
            1 => Path::Link {
                link: 7,
                source: None,
            },
            _ => Path::Via {
                gateway: "192.0.2.1".parse().unwrap(),
                link: u32::from(n),
                source: None,
            },
        }
    }

    fn present(n: u8, p: u8, odd: u8) -> PresentRoute {
        let destination = destination(n);
        PresentRoute {
            destination,
            priority: usual_priority(destination) + u32::from(odd == 0),
            path: (odd != 1).then(|| path(p)),
        }
    }

    proptest! {
        /// Applying the changes to what is present gives what is wanted, and nothing is left to do then.
        #[test]
        fn changes_lead_to_what_is_wanted(
            wanted in proptest::collection::btree_map(0_u8..12, 0_u8..9, 0..10),
            there in proptest::collection::btree_map((0_u8..12, 0_u8..4), 0_u8..9, 0..10),
        ) {
            let wanted: Routes = wanted.iter().map(|(n, p)| (destination(*n), path(*p))).collect();
            let mut table: Vec<PresentRoute> =
                there.iter().map(|((n, odd), p)| present(*n, *p, *odd)).collect();
            table.dedup_by_key(|r| (r.destination, r.priority));
            for change in changes(&wanted, &table) {
                match change {
                    RouteChange::Delete(route) => {
                        let at = table.iter().position(|r| *r == route);
                        prop_assert!(at.is_some(), "deletes only what is there");
                        table.remove(at.unwrap());
                    }
                    RouteChange::Add(destination, path) => {
                        let priority = usual_priority(destination);
                        let taken = |r: &PresentRoute| {
                            r.destination == destination && r.priority == priority
                        };
                        prop_assert!(!table.iter().any(taken));
                        table.push(PresentRoute { destination, priority, path: Some(path) });
                    }
                    RouteChange::Replace(destination, path) => {
                        let priority = usual_priority(destination);
                        let old = table
                            .iter_mut()
                            .find(|r| r.destination == destination && r.priority == priority);
                        prop_assert!(old.is_some());
                        old.unwrap().path = Some(path);
                    }
                }
            }
            let now: Routes =
                table.iter().map(|r| (r.destination, r.path.unwrap())).collect();
            prop_assert_eq!(&now, &wanted);
            prop_assert_eq!(table.len(), wanted.len());
            prop_assert_eq!(changes(&wanted, &table), vec![]);
        }
    }
}
