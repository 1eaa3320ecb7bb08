//! Brings the kernel's routes in line with the wanted ones.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::link::Link;
use super::{Netlink, NetlinkError, absent_is_done};
use crate::compile::peers::Reach;
use crate::compile::routes::Routes;
use crate::plan::routes::{RouteChange, changes};

/// Bytes.
const ETHERNET_MTU: u32 = 1500;

/// What one pass did.
#[derive(Debug, Default)]
pub struct RouteSync {
    pub changed: usize,
    /// Changes that the kernel refused; the others were made nevertheless.
    pub errors: Vec<NetlinkError>,
}

/// Whether routes that are not wanted go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removals {
    Make,
    /// Adds and replaces only: what is wanted is known from an old source.
    Skip,
}

/// How each address is reached right now. `links` are all links of the namespace.
///
/// # Errors
/// [`NetlinkError`] when the kernel refuses a lookup.
pub fn reach_of(
    netlink: &mut Netlink,
    addresses: &BTreeSet<IpAddr>,
    links: &[Link],
) -> Result<BTreeMap<IpAddr, Reach>, NetlinkError> {
    let link_mtu: BTreeMap<u32, u32> = links.iter().map(|l| (l.index, l.mtu)).collect();
    let mut reach = BTreeMap::new();
    for address in addresses {
        let answer = match netlink.lookup(*address)? {
            None => Reach::Unknown,
            Some(found) => {
                // A link that came after the list was taken is looked at again: its coming is an event.
                let widest = link_mtu.get(&found.link).copied().unwrap_or(ETHERNET_MTU);
                let mtu = found.mtu.unwrap_or(widest).min(widest);
                if found.gateway {
                    Reach::Routed { mtu }
                } else {
                    Reach::OnLink {
                        link: found.link,
                        mtu,
                    }
                }
            }
        };
        reach.insert(*address, answer);
    }
    Ok(reach)
}

/// Compares all routes of ours with the wanted ones and makes the changes. Safe to repeat; routes of others are neither
/// changed nor removed.
///
/// # Errors
/// [`NetlinkError`] when the present routes cannot be listed. Refused changes are in the result.
pub fn sync(
    netlink: &mut Netlink,
    wanted: &Routes,
    removals: Removals,
) -> Result<RouteSync, NetlinkError> {
    let present = netlink.own_routes()?;
    let mut done = RouteSync::default();
    for change in changes(wanted, &present) {
        let result = match change {
            RouteChange::Delete(route)
                if removals == Removals::Skip && !wanted.contains_key(&route.destination) =>
            {
                continue;
            }
            RouteChange::Delete(route) => absent_is_done(netlink.delete_route(&route)),
            RouteChange::Add(destination, path) => netlink.add_route(destination, path),
            RouteChange::Replace(destination, path) => netlink.replace_route(destination, path),
        };
        match result {
            Ok(()) => done.changed += 1,
            Err(e) => done.errors.push(e),
        }
    }
    Ok(done)
}

/// Removes every route of ours and returns how many there were.
///
/// # Errors
/// [`NetlinkError`] names the first route that could not be removed.
pub fn remove_all(netlink: &mut Netlink) -> Result<usize, NetlinkError> {
    let present = netlink.own_routes()?;
    for route in &present {
        absent_is_done(netlink.delete_route(route))?;
    }
    Ok(present.len())
}
