//! Service semantics, said again without any of the compiler's structures: for one packet, which backends may answer.
//!
//! It looks through every Service for every packet and knows no views, ids or flags. Sources: the Service and
//! EndpointSlice API, KEP-1669, KEP-2086, KEP-2433, KEP-3015, KEP-1860, and the order of kube-proxy's decisions.

use std::collections::BTreeSet;
use std::net::IpAddr;

use control_api::desired::{DesiredState, Name};
use control_api::v1::{Endpoint, EndpointSlice, Service, ServicePort, ServiceType, TrafficPolicy};

use super::world::NODE;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Client {
    Inside,
    Outside,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// No Service has this address and port.
    Unknown,
    Refused,
    Dropped,
    /// By any of these.
    Answered(BTreeSet<String>),
}

/// What becomes of a TCP connection to `address` and `port` that comes to this node. `None` for a node address.
pub(super) fn fate(
    state: &DesiredState,
    client: Client,
    address: Option<IpAddr>,
    port: u32,
) -> Fate {
    let mut claims: Vec<(&Name, &Service, &ServicePort, bool)> = Vec::new();
    for (name, service) in &state.services {
        for service_port in &service.ports {
            if let Some(inward) = asks_for(service, service_port, address, port) {
                claims.push((name, service, service_port, inward));
            }
        }
    }
    claims.sort_by_key(|(name, service, ..)| {
        (service.created_at_us, service.uid.clone(), (*name).clone())
    });
    let Some((name, service, service_port, inward)) = claims.first() else {
        return Fate::Unknown;
    };
    let local = if *inward {
        service.internal_traffic_policy() == TrafficPolicy::Local
    } else {
        service.external_traffic_policy() == TrafficPolicy::Local && client == Client::Outside
    };
    let endpoints = endpoints(state, name, service_port);
    let endpoints: Vec<&Endpoint> = endpoints.iter().collect();
    let answering = if local {
        let own: Vec<&Endpoint> = endpoints
            .iter()
            .copied()
            .filter(|e| e.node_name == NODE)
            .collect();
        prefer_ready(&own)
    } else {
        nearest(state, &prefer_ready(&endpoints))
    };
    if !answering.is_empty() {
        return Fate::Answered(answering.iter().map(|e| e.addresses[0].clone()).collect());
    }
    if local && !prefer_ready(&endpoints).is_empty() {
        Fate::Dropped
    } else {
        Fate::Refused
    }
}

/// Whether the Service wants this address and port, and if so, whether as a cluster address.
fn asks_for(
    service: &Service,
    service_port: &ServicePort,
    address: Option<IpAddr>,
    port: u32,
) -> Option<bool> {
    if service.headless || service.r#type() == ServiceType::ExternalName {
        return None;
    }
    let Some(address) = address else {
        let serves = service.r#type() != ServiceType::ClusterIp && service_port.node_port == port;
        return (serves && port != 0).then_some(false);
    };
    if service_port.port != port {
        return None;
    }
    let text = address.to_string();
    if service.cluster_ips.contains(&text) {
        return Some(true);
    }
    let balanced = service.r#type() == ServiceType::LoadBalancer
        && service
            .load_balancer_ingress
            .iter()
            .any(|ingress| ingress.ip == text && !ingress.proxy);
    (balanced || service.external_ips.contains(&text)).then_some(false)
}

fn endpoints(state: &DesiredState, name: &Name, service_port: &ServicePort) -> Vec<Endpoint> {
    let of_service =
        |slice: &EndpointSlice| slice.namespace == name.namespace && slice.service == name.name;
    let with_port = |slice: &EndpointSlice| slice.ports.iter().any(|p| p.name == service_port.name);
    state
        .endpoint_slices
        .iter()
        .map(|(name, slice)| slice.to_message(&name.namespace, &name.name))
        .filter(of_service)
        .filter(with_port)
        .flat_map(|slice| slice.endpoints)
        .collect()
}

fn prefer_ready<'a>(endpoints: &[&'a Endpoint]) -> Vec<&'a Endpoint> {
    let ready: Vec<&Endpoint> = endpoints.iter().copied().filter(|e| e.ready).collect();
    if !ready.is_empty() {
        return ready;
    }
    endpoints
        .iter()
        .copied()
        .filter(|e| e.serving && e.terminating)
        .collect()
}

fn nearest<'a>(state: &DesiredState, chosen: &[&'a Endpoint]) -> Vec<&'a Endpoint> {
    let all = chosen.to_vec();
    if chosen.iter().any(|e| !e.ready) {
        return all;
    }
    let zone = &state.nodes[NODE].zone;
    let narrowed = |hints: fn(&Endpoint) -> &Vec<String>, own: &str| {
        let hinted = chosen.iter().all(|e| !hints(e).is_empty());
        let near: Vec<&Endpoint> = chosen
            .iter()
            .copied()
            .filter(|e| hints(e).iter().any(|hint| hint == own))
            .collect();
        (hinted && !near.is_empty()).then_some(near)
    };
    narrowed(|e| &e.hint_nodes, NODE)
        .or_else(|| narrowed(|e| &e.hint_zones, zone))
        .unwrap_or(all)
}
