//! Where a packet leads by what is in the maps: what the programs look up (`dataplane_common::open`), for explanations.

use std::net::SocketAddr;

use super::{BackendUse, Family, Planner};
use crate::compile::services::{Frontend, Scope};

/// Where a new flow to a destination leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Led {
    /// To the destination itself: it is no service's.
    Direct,
    /// Nowhere: an address of services, none of which has the port.
    Refused,
    /// To one of these, all of which may be chosen for some client.
    Service {
        /// As in «service shop/db».
        owner: String,
        backends: Vec<SocketAddr>,
    },
}

impl Planner {
    /// Where a new flow to a destination leads. `node_ports`: a node has the address and serves node ports there; `outside`:
    /// the client is not of the cluster.
    #[must_use]
    pub fn lead(&self, to: SocketAddr, protocol: u8, node_ports: bool, outside: bool) -> Led {
        let family = Family::of(to.ip());
        let exact = Frontend {
            address: to.ip(),
            port: to.port(),
            protocol,
            scope: Scope::All,
        };
        let wildcard = Frontend {
            address: family.wildcard(),
            ..exact
        };
        let candidates = [Some(exact), node_ports.then_some(wildcard)];
        let mut known = candidates.into_iter().flatten();
        let found = known.find_map(|frontend| Some((frontend, self.frontends.get(&frontend)?)));
        // An address as a whole is under port and protocol zero.
        let (Some((frontend, entry)), 1..) = (found, to.port()) else {
            let whole = Frontend {
                port: 0,
                protocol: 0,
                ..exact
            };
            return if self.frontends.contains_key(&whole) {
                Led::Refused
            } else {
                Led::Direct
            };
        };
        let external = Frontend {
            scope: Scope::External,
            ..frontend
        };
        let entry = match self.frontends.get(&external) {
            Some(external) if outside && entry.options.external_scope => external,
            _ => entry,
        };
        let id = (family, entry.service_id);
        let mut owners = self.services.iter();
        let owner = owners.find(|(_, own)| **own == id);
        let members = self.groups.get(&id).map(|group| &group.members);
        let backends = members
            .into_iter()
            .flatten()
            .filter_map(|id| self.backends.get(&(family, *id)))
            .filter(|backend| backend.usage == BackendUse::Active)
            .map(|backend| SocketAddr::new(backend.address, backend.port));
        Led::Service {
            owner: owner.map_or_else(|| "a service".into(), |(key, _)| key.owner.to_string()),
            backends: backends.collect(),
        }
    }
}
