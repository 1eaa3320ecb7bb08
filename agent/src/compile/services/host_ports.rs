//! Ports of this node that lead to one of its pods (`hostPort` of a container, the CNI capability `portMappings`).
//!
//! A host port without an address is on every address of this node; it is entered once for each, since the wildcard
//! entry of node ports is also looked up for addresses of other nodes. Services come first: a host port on what a
//! Service has is refused.

use std::collections::BTreeMap;
use std::net::IpAddr;

use control_api::desired::Name;

use super::{
    Family, Frontend, FrontendOptions, Owner, Refusal, Scope, ServiceKey, View, WantedBackend,
    WantedService,
};
use crate::compile::node_addresses::NodeAddresses;

/// One port of this node for one pod.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostPort {
    /// Grows with every attachment of this node: of two pods that want the same port, the first one has it.
    pub sequence: u64,
    /// What to call the pod in messages; different for every pod.
    pub pod: String,
    /// Addresses of the pod, at most one per family.
    pub addresses: Vec<IpAddr>,
    /// None and the unspecified address stand for all addresses of the node.
    pub host_address: Option<IpAddr>,
    pub host_port: u16,
    pub port: u16,
    /// IP protocol number.
    pub protocol: u8,
}

/// Services of host ports. `holder` tells which Service has a frontend.
pub(super) fn compile<'h>(
    host_ports: &[HostPort],
    addresses: &NodeAddresses,
    holder: impl Fn(&Frontend) -> Option<&'h Name>,
) -> (BTreeMap<ServiceKey, WantedService>, Vec<Refusal>) {
    let mut services = BTreeMap::new();
    let mut refusals = Vec::new();
    let mut taken: BTreeMap<Frontend, String> = BTreeMap::new();
    let mut ordered: Vec<&HostPort> = host_ports.iter().collect();
    ordered.sort_unstable();
    for host_port in ordered {
        for pod_address in &host_port.addresses {
            let family = Family::of(*pod_address);
            let mut frontends = Vec::new();
            for (frontend, serves_node_ports) in wanted(host_port, addresses, family) {
                let wildcard = Frontend {
                    address: family.wildcard(),
                    ..frontend
                };
                let service = holder(&frontend)
                    .or_else(|| serves_node_ports.then(|| holder(&wildcard)).flatten())
                    .map(|name| format!("service {name}"));
                match service.or_else(|| taken.get(&frontend).cloned()) {
                    Some(other) => refusals.push(Refusal {
                        owner: Owner::HostPort(host_port.pod.clone()),
                        what: frontend.to_string(),
                        why: format!("{other} has it"),
                    }),
                    None => {
                        taken.insert(frontend, host_port.pod.clone());
                        let options = FrontendOptions {
                            keep_source: true,
                            ..FrontendOptions::default()
                        };
                        frontends.push((frontend, options));
                    }
                }
            }
            if !frontends.is_empty() {
                services.insert(
                    key(host_port, family),
                    WantedService {
                        frontends,
                        backends: vec![WantedBackend {
                            address: *pod_address,
                            port: host_port.port,
                            local: true,
                            draining: false,
                        }],
                        affinity_s: 0,
                        ranges: Vec::new(),
                    },
                );
            }
        }
    }
    (services, refusals)
}

fn key(host_port: &HostPort, family: Family) -> ServiceKey {
    ServiceKey {
        owner: Owner::HostPort(host_port.pod.clone()),
        family,
        // Two mappings of one number on two addresses are two services.
        port: host_port
            .host_address
            .filter(|address| !address.is_unspecified())
            .map(|address| address.to_string())
            .unwrap_or_default(),
        protocol: host_port.protocol,
        host_port: host_port.host_port,
        view: View::Local,
    }
}

/// The frontends of a host port in one family, and whether node ports are served on the address.
fn wanted(
    host_port: &HostPort,
    addresses: &NodeAddresses,
    family: Family,
) -> Vec<(Frontend, bool)> {
    let given = host_port.host_address;
    addresses
        .own()
        .filter(|(own, _)| Family::of(*own) == family)
        .filter(|(own, _)| match given {
            None => true,
            Some(given) if given.is_unspecified() => Family::of(given) == family,
            Some(given) => given == *own,
        })
        .map(|(address, serves_node_ports)| {
            let frontend = Frontend {
                address,
                port: host_port.host_port,
                protocol: host_port.protocol,
                scope: Scope::All,
            };
            (frontend, serves_node_ports)
        })
        .collect()
}
