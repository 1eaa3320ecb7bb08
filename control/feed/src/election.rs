//! Which node answers for each load-balancer address on the local segment (ARP, neighbour discovery).
//!
//! Exactly one node at a time. The choice is a rendezvous hash over the nodes that may have the address, so it is the
//! same wherever it is computed, and a node that comes or goes moves only the addresses that it gains or loses. Pure:
//! which nodes are lost is an argument.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use control_api::desired::Name;
use control_api::v1::Announcement;
use serde_json::Value;

use crate::Kind;
use crate::translate::{flag, items, text};

/// Condition of a Service whose addresses this cluster gives and announces; True while it has some.
pub const ADDRESSES_CONDITION: &str = "weir.dev/LoadBalancerAddresses";
/// `spec.loadBalancerClass` that asks for such addresses; no class means the same.
pub const LOAD_BALANCER_CLASS: &str = "weir.dev/l2";
/// Nodes with this label take no traffic of load balancers (KEP-1143).
const EXCLUDED: &str = "node.kubernetes.io/exclude-from-external-load-balancers";

#[derive(Debug, PartialEq, Eq)]
struct Balanced {
    uid: String,
    addresses: BTreeSet<IpAddr>,
    /// externalTrafficPolicy Local: only nodes with an endpoint can serve.
    local: bool,
}

/// Nodes with endpoints of one slice.
#[derive(Debug, PartialEq, Eq)]
struct Endpoints {
    service: Name,
    ready: BTreeSet<String>,
    /// Serving while they terminate: used where nothing is ready (KEP-1669).
    terminating: BTreeSet<String>,
}

/// The state of all elections.
#[derive(Debug, Default)]
pub(crate) struct Election {
    services: BTreeMap<Name, Balanced>,
    /// Services of each address; several share one.
    owners: BTreeMap<IpAddr, BTreeSet<Name>>,
    slices: BTreeMap<Name, Endpoints>,
    slices_of: BTreeMap<Name, BTreeSet<Name>>,
    /// Nodes that take traffic of balancers, and whether they are Ready; the others are `None`.
    nodes: BTreeMap<String, Option<bool>>,
    lost: BTreeSet<String>,
    elected: BTreeMap<IpAddr, Announcement>,
    dirty: BTreeSet<IpAddr>,
    all_dirty: bool,
}

impl Election {
    /// Takes the present state of an object, or its end.
    pub(crate) fn put(&mut self, kind: Kind, name: &Name, object: Option<&Value>) {
        match kind {
            Kind::Service => self.put_service(name, object.and_then(balanced)),
            Kind::EndpointSlice => self.put_slice(name, object.and_then(endpoints)),
            Kind::Node => {
                let state = object.map(|node| (!is_excluded(node)).then(|| is_ready(node)));
                if self.nodes.get(&name.name) == state.as_ref() {
                    return;
                }
                match state {
                    Some(state) => self.nodes.insert(name.name.clone(), state),
                    None => self.nodes.remove(&name.name),
                };
                self.all_dirty = true;
            }
            Kind::Namespace
            | Kind::Pod
            | Kind::ConfigMap
            | Kind::Secret
            | Kind::NetworkPolicy
            | Kind::ClusterNetworkPolicy => {}
        }
    }

    pub(crate) fn set_lost(&mut self, lost: BTreeSet<String>) {
        if self.lost != lost {
            self.lost = lost;
            self.all_dirty = true;
        }
    }

    pub(crate) fn has_addresses(&self) -> bool {
        !self.owners.is_empty()
    }

    pub(crate) fn nodes(&self) -> impl Iterator<Item = &str> {
        self.nodes.keys().map(String::as_str)
    }

    /// Decides what the changes since the last call may have changed; the addresses whose node is another one now.
    pub(crate) fn settle(&mut self) -> Vec<(String, Option<Announcement>)> {
        let mut dirty = std::mem::take(&mut self.dirty);
        if std::mem::take(&mut self.all_dirty) {
            dirty.extend(self.owners.keys());
        }
        let mut changed = Vec::new();
        for address in dirty {
            let winner = self.elect(address);
            if self.elected.get(&address) == winner.as_ref() {
                continue;
            }
            match &winner {
                Some(winner) => self.elected.insert(address, winner.clone()),
                None => self.elected.remove(&address),
            };
            changed.push((address.to_string(), winner));
        }
        changed
    }

    fn put_service(&mut self, name: &Name, now: Option<Balanced>) {
        if self.services.get(name) == now.as_ref() {
            return;
        }
        if let Some(before) = self.services.remove(name) {
            for address in before.addresses {
                if let Some(owners) = self.owners.get_mut(&address) {
                    owners.remove(name);
                    if owners.is_empty() {
                        self.owners.remove(&address);
                    }
                }
                self.dirty.insert(address);
            }
        }
        if let Some(now) = now {
            for address in &now.addresses {
                self.owners
                    .entry(*address)
                    .or_default()
                    .insert(name.clone());
                self.dirty.insert(*address);
            }
            self.services.insert(name.clone(), now);
        }
    }

    fn put_slice(&mut self, name: &Name, now: Option<Endpoints>) {
        if self.slices.get(name) == now.as_ref() {
            return;
        }
        if let Some(before) = self.slices.remove(name) {
            if let Some(names) = self.slices_of.get_mut(&before.service) {
                names.remove(name);
                if names.is_empty() {
                    self.slices_of.remove(&before.service);
                }
            }
            self.touch(&before.service);
        }
        if let Some(now) = now {
            let names = self.slices_of.entry(now.service.clone()).or_default();
            names.insert(name.clone());
            self.touch(&now.service);
            self.slices.insert(name.clone(), now);
        }
    }

    fn touch(&mut self, service: &Name) {
        if let Some(balanced) = self.services.get(service).filter(|s| s.local) {
            self.dirty.extend(&balanced.addresses);
        }
    }

    fn elect(&self, address: IpAddr) -> Option<Announcement> {
        let owners = self.owners.get(&address)?;
        let local: Vec<BTreeSet<&str>> = owners
            .iter()
            .filter(|name| self.services.get(*name).is_some_and(|s| s.local))
            .map(|name| self.with_endpoints(name))
            .collect();
        let may = |node: &str| local.iter().all(|nodes| nodes.contains(node));
        let all: Vec<(&str, bool)> = self
            .nodes
            .iter()
            .filter_map(|(name, ready)| Some((name.as_str(), (*ready)?)))
            .filter(|(name, _)| may(name))
            .collect();
        let alive = |name: &str| !self.lost.contains(name);
        let best = |ok: &dyn Fn(&(&str, bool)) -> bool| {
            let fit = all.iter().filter(|node| ok(node)).map(|(name, _)| *name);
            fit.max_by_key(|name| (weight(name, address), *name))
        };
        // Where nothing is known to be better, the address stays: after an outage of the control plane every node looks
        // lost, and none of them is.
        let current = self.elected.get(&address).map(|a| a.node.as_str());
        let node = best(&|(name, ready)| *ready && alive(name))
            .or_else(|| best(&|(name, _)| alive(name)))
            .or_else(|| current.filter(|name| all.iter().any(|(n, _)| n == name)))
            .or_else(|| best(&|_| true))?;
        let first = owners.first()?;
        Some(Announcement {
            address: address.to_string(),
            node: node.to_owned(),
            service_namespace: first.namespace.clone(),
            service_name: first.name.clone(),
            service_uid: self.services.get(first)?.uid.clone(),
        })
    }

    /// Nodes that can serve a Service under the Local policy.
    fn with_endpoints(&self, service: &Name) -> BTreeSet<&str> {
        let slices = self.slices_of.get(service).into_iter().flatten();
        let slices: Vec<&Endpoints> = slices.filter_map(|name| self.slices.get(name)).collect();
        let of = |pick: fn(&Endpoints) -> &BTreeSet<String>| -> BTreeSet<&str> {
            let nodes = slices.iter().flat_map(|slice| pick(slice));
            nodes.map(String::as_str).collect()
        };
        let ready = of(|slice| &slice.ready);
        if ready.is_empty() {
            of(|slice| &slice.terminating)
        } else {
            ready
        }
    }
}

/// How much a node is wanted for an address. Stable over versions: both sides of an upgrade choose alike.
fn weight(node: &str, address: IpAddr) -> u64 {
    let bytes = match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    // FNV-1a, then the finalizer of SplitMix64: FNV alone orders similar names alike.
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in bytes.into_iter().chain(node.bytes()) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}

/// The addresses that we gave a Service; `None` for every other Service.
fn balanced(service: &Value) -> Option<Balanced> {
    let spec = &service["spec"];
    let class = spec["loadBalancerClass"].as_str().unwrap_or_default();
    let ours = class.is_empty() || class == LOAD_BALANCER_CLASS;
    let given = items(&service["status"]["conditions"])
        .any(|c| c["type"] == ADDRESSES_CONDITION && c["status"] == "True");
    if spec["type"] != "LoadBalancer" || !ours || !given {
        return None;
    }
    let addresses: BTreeSet<IpAddr> = items(&service["status"]["loadBalancer"]["ingress"])
        .filter(|ingress| ingress["ipMode"] != "Proxy")
        .filter_map(|ingress| ingress["ip"].as_str()?.parse().ok())
        .collect();
    (!addresses.is_empty()).then(|| Balanced {
        uid: text(&service["metadata"]["uid"]),
        addresses,
        local: spec["externalTrafficPolicy"] == "Local",
    })
}

fn endpoints(slice: &Value) -> Option<Endpoints> {
    let metadata = &slice["metadata"];
    let service = text(&metadata["labels"]["kubernetes.io/service-name"]);
    let mut found = Endpoints {
        service: Name::new(text(&metadata["namespace"]), service),
        ready: BTreeSet::new(),
        terminating: BTreeSet::new(),
    };
    for endpoint in items(&slice["endpoints"]) {
        let Some(node) = endpoint["nodeName"].as_str() else {
            continue;
        };
        let conditions = &endpoint["conditions"];
        let ready = conditions["ready"].as_bool().unwrap_or(true);
        if ready {
            found.ready.insert(node.to_owned());
        } else if flag(&conditions["serving"]) && flag(&conditions["terminating"]) {
            found.terminating.insert(node.to_owned());
        }
    }
    let any = !found.ready.is_empty() || !found.terminating.is_empty();
    (any && !found.service.name.is_empty()).then_some(found)
}

fn is_excluded(node: &Value) -> bool {
    !node["metadata"]["labels"][EXCLUDED].is_null()
}

fn is_ready(node: &Value) -> bool {
    items(&node["status"]["conditions"]).any(|c| c["type"] == "Ready" && c["status"] == "True")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn node(name: &str, ready: bool) -> Value {
        let status = if ready { "True" } else { "False" };
        json!({"metadata": {"name": name}, "status": {"conditions": [{"type": "Ready", "status": status}]}})
    }

    fn service(name: &str, addresses: &[&str], policy: &str) -> Value {
        let ingress: Vec<Value> = addresses
            .iter()
            .map(|ip| json!({"ip": ip, "ipMode": "VIP"}))
            .collect();
        json!({"metadata": {"namespace": "d", "name": name, "uid": name},
            "spec": {"type": "LoadBalancer", "externalTrafficPolicy": policy},
            "status": {"loadBalancer": {"ingress": ingress},
                "conditions": [{"type": ADDRESSES_CONDITION, "status": "True"}]}})
    }

    fn slice(service: &str, nodes: &[&str]) -> Value {
        let endpoints: Vec<Value> = nodes
            .iter()
            .map(|n| json!({"addresses": ["10.0.0.1"], "nodeName": n}))
            .collect();
        json!({"metadata": {"namespace": "d", "name": service, "labels": {"kubernetes.io/service-name": service}},
            "endpoints": endpoints})
    }

    impl Election {
        fn set(&mut self, kind: Kind, object: &Value) {
            let name = Name::new(
                text(&object["metadata"]["namespace"]),
                text(&object["metadata"]["name"]),
            );
            self.put(kind, &name, Some(object));
        }

        fn with_nodes(names: &[&str]) -> Self {
            let mut election = Self::default();
            names
                .iter()
                .for_each(|n| election.set(Kind::Node, &node(n, true)));
            election
        }

        fn winner(&mut self, address: &str) -> Option<String> {
            self.settle();
            Some(self.elected.get(&address.parse().unwrap())?.node.clone())
        }
    }

    #[test]
    fn only_what_this_cluster_gave_is_announced() {
        let mut election = Election::with_nodes(&["n1"]);
        let given = service("s", &["192.0.2.7"], "Cluster");
        for (pointer, value) in [
            ("/spec/type", json!("NodePort")),
            ("/spec/loadBalancerClass", json!("example.com/other")),
            ("/status/conditions", json!([])),
            ("/status/loadBalancer/ingress/0/ipMode", json!("Proxy")),
        ] {
            let mut other = given.clone();
            if pointer == "/spec/loadBalancerClass" {
                other["spec"]["loadBalancerClass"] = value;
            } else {
                *other.pointer_mut(pointer).unwrap() = value;
            }
            election.set(Kind::Service, &other);
            assert_eq!(election.winner("192.0.2.7"), None, "{pointer}");
        }
        election.set(Kind::Service, &given);
        assert_eq!(election.winner("192.0.2.7").as_deref(), Some("n1"));
        election.put(Kind::Service, &Name::new("d", "s"), None);
        let gone = election.settle();
        assert_eq!(gone, [("192.0.2.7".to_owned(), None)]);
        assert!(!election.has_addresses());
    }

    #[test]
    fn the_local_policy_needs_an_endpoint_and_terminating_ones_are_better_than_none() {
        let mut election = Election::with_nodes(&["n1", "n2", "n3"]);
        election.set(Kind::Service, &service("s", &["192.0.2.7"], "Local"));
        assert_eq!(election.winner("192.0.2.7"), None);
        for name in ["n1", "n2", "n3"] {
            election.set(Kind::EndpointSlice, &slice("s", &[name]));
            assert_eq!(election.winner("192.0.2.7").as_deref(), Some(name));
        }
        let mut ending = slice("s", &["n2", "n1"]);
        ending["endpoints"][0]["conditions"] =
            json!({"ready": false, "serving": true, "terminating": true});
        ending["endpoints"][1]["conditions"] = json!({"ready": false, "serving": false});
        election.set(Kind::EndpointSlice, &ending);
        assert_eq!(election.winner("192.0.2.7").as_deref(), Some("n2"));
    }

    #[test]
    fn ready_before_alive_before_the_last_before_any() {
        let mut election = Election::with_nodes(&["n1", "n2"]);
        election.set(Kind::Service, &service("s", &["192.0.2.7"], "Cluster"));
        let first = election.winner("192.0.2.7").unwrap();
        let other = if first == "n1" { "n2" } else { "n1" };
        election.set_lost([first.clone()].into());
        assert_eq!(election.winner("192.0.2.7").as_deref(), Some(other));
        election.set_lost([first.clone(), other.to_owned()].into());
        assert_eq!(
            election.winner("192.0.2.7").as_deref(),
            Some(other),
            "stays when all look lost"
        );
        election.set_lost(BTreeSet::new());
        assert_eq!(election.winner("192.0.2.7"), Some(first.clone()));
        election.set(Kind::Node, &node(&first, false));
        assert_eq!(election.winner("192.0.2.7").as_deref(), Some(other));
        let mut excluded = node(other, true);
        excluded["metadata"]["labels"] = json!({EXCLUDED: ""});
        election.set(Kind::Node, &excluded);
        assert_eq!(
            election.winner("192.0.2.7"),
            Some(first),
            "alive, if not ready"
        );
    }

    proptest! {
        /// Whatever the order of events: one live node per address, the same as for an election that saw only the
        /// outcome; and a lost node moves no address but its own.
        #[test]
        fn the_choice_depends_on_the_present_only(
            events in proptest::collection::vec((0_u8..4, 0_u8..6, 0_u8..64), 1..60)
        ) {
            let mut election = Election::default();
            let mut lost = BTreeSet::new();
            let name = |n: u8| format!("n{n}");
            for (what, who, bits) in &events {
                match what {
                    0 => election.set(Kind::Node, &node(&name(*who), bits & 1 == 0)),
                    1 => election.put(Kind::Node, &Name::new("", name(*who)), None),
                    2 => {
                        let address = format!("192.0.2.{who}");
                        election.set(Kind::Service, &service(&format!("s{who}"), &[&address], "Cluster"));
                    }
                    _ => {
                        lost = (0..6).filter(|n| bits >> n & 1 == 1).map(name).collect();
                        let before = election.elected.clone();
                        let was = election.lost.clone();
                        election.set_lost(lost.clone());
                        election.settle();
                        if was.is_subset(&lost) {
                            for (address, old) in before {
                                let kept = election.elected.get(&address).map(|a| &a.node) == Some(&old.node);
                                prop_assert!(kept || lost.contains(&old.node) || !is_usable(&election, &old.node));
                            }
                        }
                    }
                }
                election.settle();
            }
            for (address, owners) in &election.owners {
                prop_assert_eq!(owners.len(), 1);
                let live: Vec<_> = election.nodes.iter().filter(|(n, r)| **r == Some(true) && !lost.contains(*n)).collect();
                let winner = election.elected.get(address);
                prop_assert_eq!(winner.is_none(), election.nodes.is_empty());
                if let Some((best, _)) = live.iter().max_by_key(|(n, _)| (weight(n, *address), *n)) {
                    prop_assert_eq!(&winner.unwrap().node, *best);
                }
            }
        }
    }

    fn is_usable(election: &Election, node: &str) -> bool {
        election.nodes.get(node) == Some(&Some(true))
    }

    #[test]
    fn weights_are_the_same_in_every_version() {
        let known = weight("n1", "192.0.2.7".parse().unwrap());
        assert_eq!(known, 0x53e0_0da8_5784_f056);
        let mut wins = BTreeMap::new();
        for n in 0..300_u32 {
            let address = IpAddr::from([
                192,
                0,
                u8::try_from(n / 250).unwrap(),
                u8::try_from(n % 250).unwrap(),
            ]);
            let best = ["n1", "n2", "n3"]
                .into_iter()
                .max_by_key(|name| weight(name, address));
            *wins.entry(best.unwrap()).or_insert(0) += 1;
        }
        assert!(
            wins.values().all(|count| (60..140).contains(count)),
            "{wins:?}"
        );
    }
}
