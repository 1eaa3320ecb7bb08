//! Who has which load-balancer address. Pure: requests in, addresses or the reason why not out.
//!
//! An address that a Service has is kept as long as it can be: over restarts (its status is adopted), when pools shrink,
//! and when a new wish cannot be met. It is never given twice, except to Services that agree to share.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde_json::{Map, Value};

use super::pools::Pool;
use crate::controllers::runtime::object::{Key, Object};

/// Requested addresses, separated by commas.
pub(super) const ADDRESSES_ANNOTATION: &str = "weir.dev/load-balancer-addresses";
/// Services with the same value may share an address when their ports differ.
pub(super) const SHARING_ANNOTATION: &str = "weir.dev/load-balancer-sharing-key";

/// Protocol and port.
type Port = (String, u64);

/// What a Service asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Request {
    /// True for IPv4, in the order of `spec.ipFamilies`.
    pub(super) families: Vec<bool>,
    /// Fails unless every family gets an address.
    pub(super) require_all: bool,
    /// Asked for by name; text that is no address is an error.
    pub(super) wanted: Vec<String>,
    pub(super) labels: Option<Map<String, Value>>,
    pub(super) sharing: Option<String>,
    pub(super) ports: BTreeSet<Port>,
    /// The pods behind a Service with the Local policy: sharers must have the same, or the address could be announced
    /// where one of them has none.
    pub(super) local_backends: Option<String>,
}

impl Request {
    pub(super) fn of(service: &Value) -> Self {
        let spec = |field| service.text(&["spec", field]);
        let annotation = service.annotation(ADDRESSES_ANNOTATION).unwrap_or_default();
        let asked = if annotation.is_empty() {
            spec("loadBalancerIP")
        } else {
            annotation
        };
        let wanted = asked.split(',').map(str::trim).filter(|a| !a.is_empty());
        let families = service.items(&["spec", "ipFamilies"]).iter();
        let ports = service.items(&["spec", "ports"]).iter();
        let local = spec("externalTrafficPolicy") == "Local";
        let selector = service.at(&["spec", "selector"]);
        Self {
            families: families.map(|f| f.as_str() != Some("IPv6")).collect(),
            require_all: spec("ipFamilyPolicy") == "RequireDualStack",
            wanted: wanted.map(str::to_owned).collect(),
            labels: service.labels().cloned(),
            sharing: service
                .annotation(SHARING_ANNOTATION)
                .filter(|key| !key.is_empty())
                .map(|key| format!("{}/{key}", service.namespace())),
            ports: ports
                .map(|p| {
                    (
                        p.text(&["protocol"]).to_owned(),
                        p.number(&["port"]).unwrap_or(0).unsigned_abs(),
                    )
                })
                .collect(),
            local_backends: local.then(|| selector.map(ToString::to_string).unwrap_or_default()),
        }
    }
}

/// Why a Service lacks addresses it asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Problem {
    /// In CamelCase, for conditions and Events.
    pub(super) reason: &'static str,
    pub(super) message: String,
}

fn problem(reason: &'static str, message: impl Into<String>) -> Problem {
    Problem {
        reason,
        message: message.into(),
    }
}

/// What a Service has after a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    /// In the order of the families.
    pub(super) addresses: Vec<IpAddr>,
    pub(super) problem: Option<Problem>,
    /// What an operator should know about addresses that are kept all the same.
    pub(super) note: Option<String>,
}

#[derive(Clone, Debug)]
struct Holding {
    addresses: Vec<IpAddr>,
    sharing: Option<String>,
    ports: BTreeSet<Port>,
    local_backends: Option<String>,
}

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct Allocator {
    pools: Vec<Pool>,
    held: BTreeMap<Key, Holding>,
    users: BTreeMap<IpAddr, BTreeSet<Key>>,
    /// Addresses that mean something else: of nodes, of balancers of others, external ones.
    foreign: BTreeMap<IpAddr, BTreeSet<Key>>,
    foreign_of: BTreeMap<Key, BTreeSet<IpAddr>>,
}

impl Allocator {
    pub(super) fn set_pools(&mut self, pools: Vec<Pool>) {
        self.pools = pools;
    }

    /// Replaces the addresses that an object uses without having got them here.
    pub(super) fn set_foreign(&mut self, owner: &Key, addresses: &BTreeSet<IpAddr>) {
        let before = self.foreign_of.remove(owner).unwrap_or_default();
        for address in before.difference(addresses) {
            if let Some(owners) = self.foreign.get_mut(address) {
                owners.remove(owner);
                if owners.is_empty() {
                    self.foreign.remove(address);
                }
            }
        }
        for address in addresses.difference(&before) {
            let owners = self.foreign.entry(*address).or_default();
            owners.insert(owner.clone());
        }
        if !addresses.is_empty() {
            self.foreign_of.insert(owner.clone(), addresses.clone());
        }
    }

    /// Takes over what a Service has by its status; what somebody else has already is left to them.
    pub(super) fn adopt(&mut self, key: &Key, request: &Request, addresses: &[IpAddr]) {
        let mut free = addresses.to_vec();
        free.retain(|address| self.obstacle(key, request, *address).is_none());
        self.hold(key, request, free);
    }

    /// Gives back everything of a Service. True when it had something.
    pub(super) fn release(&mut self, key: &Key) -> bool {
        let Some(holding) = self.held.remove(key) else {
            return false;
        };
        for address in &holding.addresses {
            if let Some(users) = self.users.get_mut(address) {
                users.remove(key);
                if users.is_empty() {
                    self.users.remove(address);
                }
            }
        }
        !holding.addresses.is_empty()
    }

    /// Meets a request as well as it can be met.
    pub(super) fn assign(&mut self, key: &Key, request: &Request) -> Outcome {
        let before = self
            .held
            .get(key)
            .map(|h| h.addresses.clone())
            .unwrap_or_default();
        let kept: Vec<IpAddr> = before
            .into_iter()
            .filter(|a| request.families.contains(&a.is_ipv4()))
            .filter(|a| self.obstacle(key, request, *a).is_none())
            .collect();
        let (addresses, problem) = match self.choose(key, request, &kept) {
            Ok(addresses) => (addresses, None),
            // A wish that cannot be met takes nothing away.
            Err(problem) => (kept, Some(problem)),
        };
        let note = self.note(request, &addresses);
        self.hold(key, request, addresses.clone());
        Outcome {
            addresses,
            problem,
            note,
        }
    }

    fn hold(&mut self, key: &Key, request: &Request, addresses: Vec<IpAddr>) {
        self.release(key);
        for address in &addresses {
            self.users.entry(*address).or_default().insert(key.clone());
        }
        let holding = Holding {
            addresses,
            sharing: request.sharing.clone(),
            ports: request.ports.clone(),
            local_backends: request.local_backends.clone(),
        };
        self.held.insert(key.clone(), holding);
    }

    /// Why a Service cannot have an address.
    fn obstacle(&self, key: &Key, request: &Request, address: IpAddr) -> Option<String> {
        if let Some(owner) = self.foreign.get(&address).and_then(|owners| owners.first()) {
            return Some(format!("{address} is an address of {owner}"));
        }
        let mut others = self
            .users
            .get(&address)
            .into_iter()
            .flatten()
            .filter(|k| *k != key);
        others.find_map(|other| {
            let holding = self.held.get(other)?;
            if request.sharing.is_none() || holding.sharing != request.sharing {
                return Some(format!("{address} belongs to {other}"));
            }
            if let Some((protocol, port)) = holding.ports.intersection(&request.ports).next() {
                return Some(format!("{address} is shared with {other}, which has {protocol} port {port} too"));
            }
            let (ours, theirs) = (&request.local_backends, &holding.local_backends);
            let local = ours.is_some() || theirs.is_some();
            (local && ours != theirs)
                .then(|| format!("{address} is shared with {other}, which sends the Local policy's traffic to other pods"))
        })
    }

    fn choose(
        &self,
        key: &Key,
        request: &Request,
        kept: &[IpAddr],
    ) -> Result<Vec<IpAddr>, Problem> {
        let mut chosen = self.wanted(key, request, kept)?;
        for v4 in &request.families {
            // A Service that names its addresses gets no other ones, unless it needs them.
            let enough = !request.wanted.is_empty() && !request.require_all;
            if enough || chosen.iter().any(|a| a.is_ipv4() == *v4) {
                continue;
            }
            let address = kept.iter().copied().find(|a| a.is_ipv4() == *v4);
            let address = address.or_else(|| self.pick(key, request, *v4));
            match address {
                Some(address) => chosen.push(address),
                None if request.require_all => return Err(self.exhausted(request, *v4)),
                None => {}
            }
        }
        if chosen.is_empty() {
            return Err(self.exhausted(request, request.families.first().copied().unwrap_or(true)));
        }
        chosen.sort_by_key(|a| request.families.iter().position(|v4| a.is_ipv4() == *v4));
        Ok(chosen)
    }

    /// The addresses that the Service names.
    fn wanted(
        &self,
        key: &Key,
        request: &Request,
        kept: &[IpAddr],
    ) -> Result<Vec<IpAddr>, Problem> {
        let mut chosen: Vec<IpAddr> = Vec::new();
        for text in &request.wanted {
            let Ok(address) = text.parse::<IpAddr>() else {
                return Err(problem("InvalidAddress", format!("{text:?} is no address")));
            };
            if !request.families.contains(&address.is_ipv4()) {
                let why = format!("{address} is of a family that the Service does not have");
                return Err(problem("InvalidAddress", why));
            }
            if chosen.iter().any(|a| a.is_ipv4() == address.is_ipv4()) {
                let why = format!("{address} is the second one of its family");
                return Err(problem("InvalidAddress", why));
            }
            let pool = self.pools.iter().find(|pool| pool.contains(address));
            match pool {
                _ if kept.contains(&address) => {}
                None => {
                    return Err(problem(
                        "AddressOutsidePools",
                        format!("{address} is in no pool"),
                    ));
                }
                Some(pool) if !pool.serves(request.labels.as_ref()) => {
                    let why = format!(
                        "{address} is of pool {}, whose serviceSelector does not match",
                        pool.name
                    );
                    return Err(problem("AddressOutsidePools", why));
                }
                Some(_) => {}
            }
            if let Some(why) = self.obstacle(key, request, address) {
                return Err(problem("AddressInUse", why));
            }
            chosen.push(address);
        }
        Ok(chosen)
    }

    fn open_pools(&self, request: &Request) -> impl Iterator<Item = &Pool> {
        let labels = request.labels.as_ref();
        self.pools
            .iter()
            .filter(move |pool| pool.auto_assign && pool.serves(labels))
    }

    fn pick(&self, key: &Key, request: &Request, v4: bool) -> Option<IpAddr> {
        if request.sharing.is_some() {
            let shared = self.users.keys().copied().find(|address| {
                address.is_ipv4() == v4
                    && self.obstacle(key, request, *address).is_none()
                    && self.open_pools(request).any(|pool| pool.contains(*address))
            });
            if shared.is_some() {
                return shared;
            }
        }
        let is_free = |a: IpAddr| !self.users.contains_key(&a) && !self.foreign.contains_key(&a);
        self.open_pools(request)
            .find_map(|pool| pool.first_free(v4, is_free))
    }

    fn exhausted(&self, request: &Request, v4: bool) -> Problem {
        let family = if v4 { "IPv4" } else { "IPv6" };
        let names: Vec<&str> = self
            .open_pools(request)
            .map(|pool| pool.name.as_str())
            .collect();
        if self.pools.is_empty() {
            return problem(
                "NoPools",
                "no pool of load-balancer addresses is configured",
            );
        }
        if names.is_empty() {
            return problem(
                "NoPools",
                "no pool assigns addresses to this Service by itself",
            );
        }
        problem(
            "PoolExhausted",
            format!("no {family} address is free in {}", names.join(", ")),
        )
    }

    fn note(&self, request: &Request, addresses: &[IpAddr]) -> Option<String> {
        let labels = request.labels.as_ref();
        let outside = |a: &&IpAddr| {
            !self
                .pools
                .iter()
                .any(|p| p.contains(**a) && p.serves(labels))
        };
        let outside: Vec<String> = addresses
            .iter()
            .filter(outside)
            .map(ToString::to_string)
            .collect();
        if !outside.is_empty() {
            let list = outside.join(", ");
            return Some(format!(
                "{list}: no longer in a pool for this Service, kept while in use"
            ));
        }
        let missing = request
            .families
            .iter()
            .find(|v4| !addresses.iter().any(|a| a.is_ipv4() == **v4))?;
        let named = !request.wanted.is_empty() || addresses.is_empty();
        let family = if *missing { "IPv4" } else { "IPv6" };
        (!named).then(|| format!("no {family} address is free"))
    }
}

#[cfg(test)]
#[path = "core_tests.rs"]
mod tests;
