//! Which endpoints of a Service a node uses.
//!
//! An endpoint in several slices is one: ready in any is ready. In each view those that are ready count; when there is
//! none, those that terminate but still serve (KEP-1669), and never one that is not ready. In the view of the whole
//! cluster, topology hints narrow those that are ready: to this node (KEP-3015), else to its zone (KEP-2433,
//! KEP-4444), each only if every ready endpoint carries hints of that kind and one of them names this node or zone.
//! The local view knows no hints.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use control_api::slice::{Endpoint, Slice};
use control_api::v1::{AddressFamily, ServicePort};

use super::{Family, View, WantedBackend, unusable};

/// Where this node is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<'a> {
    pub(super) node: &'a str,
    /// Empty when the node has none.
    pub(super) zone: &'a str,
}

/// What is known of one endpoint, over all its slices.
#[derive(Clone, Copy, Default)]
#[allow(
    clippy::struct_excessive_bools,
    reason = "independent facts of an endpoint, as the API tells them"
)]
struct Condition {
    ready: bool,
    serving_terminating: bool,
    local: bool,
    has_node_hints: bool,
    hints_this_node: bool,
    has_zone_hints: bool,
    hints_this_zone: bool,
}

impl Condition {
    fn usable(&self) -> bool {
        self.ready || self.serving_terminating
    }
}

/// Which ready endpoints topology leaves.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Topology {
    All,
    SameZone,
    SameNode,
}

/// The endpoints of one service port in one family.
pub(super) struct Endpoints {
    conditions: BTreeMap<(IpAddr, u16), Condition>,
    topology: Topology,
    /// Addresses that were left out, with the reason.
    pub(super) refused: BTreeMap<IpAddr, &'static str>,
}

impl Endpoints {
    pub(super) fn gather<'a>(
        slices: impl Iterator<Item = &'a Slice>,
        port: &ServicePort,
        family: Family,
        place: Place<'_>,
    ) -> Self {
        let mut conditions: BTreeMap<(IpAddr, u16), Condition> = BTreeMap::new();
        let mut refused = BTreeMap::new();
        for slice in slices.filter(|slice| is_of(slice, family)) {
            let Some(target_port) = slice_port(slice, port) else {
                continue;
            };
            for endpoint in slice.endpoints() {
                let Some(address) = endpoint.address().filter(|a| Family::of(*a) == family) else {
                    continue;
                };
                if let Some(why) = unusable(address) {
                    refused.insert(address, why);
                    continue;
                }
                let condition = conditions.entry((address, target_port)).or_default();
                condition.add(endpoint, place);
            }
        }
        let topology = topology(conditions.values());
        Self {
            conditions,
            topology,
            refused,
        }
    }

    /// There is an endpoint that a node could use, wherever it is.
    pub(super) fn any(&self) -> bool {
        self.conditions.values().any(Condition::usable)
    }

    /// The endpoints in their order. Those that serve without being used are marked as draining: they keep the flows that
    /// they have, as with kube-proxy, which ends datagram flows of endpoints that do not serve only.
    pub(super) fn view(&self, view: View) -> Vec<WantedBackend> {
        let in_scope = |condition: &Condition| match view {
            View::Cluster => true,
            View::Local => condition.local,
        };
        let any_ready = self
            .conditions
            .values()
            .any(|condition| condition.ready && in_scope(condition));
        let used = |condition: &Condition| {
            in_scope(condition)
                && if any_ready {
                    condition.ready && (view == View::Local || self.near(condition))
                } else {
                    condition.serving_terminating
                }
        };
        self.conditions
            .iter()
            .filter(|(_, condition)| condition.usable())
            .map(|((address, port), condition)| WantedBackend {
                address: *address,
                port: *port,
                local: condition.local,
                draining: !used(condition),
            })
            .collect()
    }

    fn near(&self, condition: &Condition) -> bool {
        match self.topology {
            Topology::All => true,
            Topology::SameZone => condition.hints_this_zone,
            Topology::SameNode => condition.hints_this_node,
        }
    }
}

impl Condition {
    fn add(&mut self, endpoint: Endpoint<'_>, place: Place<'_>) {
        self.ready |= endpoint.ready();
        self.serving_terminating |= endpoint.serving() && endpoint.terminating();
        self.local |= endpoint.node_name() == place.node && !place.node.is_empty();
        self.has_node_hints |= endpoint.hint_nodes().next().is_some();
        self.hints_this_node |= endpoint.hint_nodes().any(|hint| hint == place.node);
        self.has_zone_hints |= endpoint.hint_zones().next().is_some();
        self.hints_this_zone |=
            !place.zone.is_empty() && endpoint.hint_zones().any(|hint| hint == place.zone);
    }
}

fn topology<'a>(conditions: impl Iterator<Item = &'a Condition> + Clone) -> Topology {
    let mut ready = conditions.filter(|condition| condition.ready).peekable();
    let (mut node_hints, mut this_node) = (ready.peek().is_some(), false);
    let (mut zone_hints, mut this_zone) = (node_hints, false);
    for condition in ready {
        node_hints &= condition.has_node_hints;
        this_node |= condition.hints_this_node;
        zone_hints &= condition.has_zone_hints;
        this_zone |= condition.hints_this_zone;
    }
    if node_hints && this_node {
        Topology::SameNode
    } else if zone_hints && this_zone {
        Topology::SameZone
    } else {
        Topology::All
    }
}

/// How many ready endpoints of a Service are on this node, over all its ports: what health checks of balancers are
/// told. In a dual-stack Service an endpoint has an address per family, and the family with more counts.
#[must_use]
pub fn local_ready<'a>(slices: impl Iterator<Item = &'a Slice>, node: &str) -> usize {
    let mut addresses: BTreeMap<AddressFamily, BTreeSet<IpAddr>> = BTreeMap::new();
    for slice in slices {
        let ready = slice
            .endpoints()
            .filter(|endpoint| endpoint.ready() && endpoint.node_name() == node);
        addresses
            .entry(slice.family())
            .or_default()
            .extend(ready.filter_map(Endpoint::address));
    }
    addresses
        .values()
        .map(BTreeSet::len)
        .max()
        .unwrap_or_default()
}

fn is_of(slice: &Slice, family: Family) -> bool {
    match family {
        Family::V4 => slice.family() == AddressFamily::Ipv4,
        Family::V6 => slice.family() == AddressFamily::Ipv6,
    }
}

/// The slice's port with the name of the service's port. A slice without it does not serve that port.
fn slice_port(slice: &Slice, port: &ServicePort) -> Option<u16> {
    let found = slice
        .ports
        .iter()
        .find(|candidate| candidate.name == port.name && candidate.protocol() == port.protocol())?;
    u16::try_from(found.port).ok().filter(|number| *number != 0)
}
