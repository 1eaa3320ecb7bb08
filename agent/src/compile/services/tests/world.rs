//! Services, slices and nodes for tests.

use std::collections::BTreeMap;

use control_api::desired::{Changes, DesiredState, Name};
use control_api::v1::{
    AddressFamily, ClusterConfig, Endpoint, EndpointPort, EndpointSlice, Node, Protocol, Service,
    ServicePort, ServiceType,
};

use crate::compile::node_addresses::{self, NodeAddresses};
use crate::compile::services::{Catalog, NodeIdentity, ServiceOptions, Wanted};

pub(super) const NODE: &str = "n1";
pub(super) const NODE_IP: &str = "192.0.2.11";

pub(super) fn service(name: &str) -> Service {
    Service {
        namespace: "default".into(),
        name: name.into(),
        r#type: ServiceType::ClusterIp.into(),
        cluster_ips: vec!["10.96.0.20".into()],
        ports: vec![ServicePort {
            name: "http".into(),
            protocol: Protocol::Tcp.into(),
            port: 80,
            node_port: 0,
        }],
        ..Service::default()
    }
}

pub(super) fn node_port_service(name: &str, node_port: u32) -> Service {
    let mut service = service(name);
    service.r#type = ServiceType::NodePort.into();
    service.ports[0].node_port = node_port;
    service
}

/// Conditions: `r` ready, `u` not ready, `t` terminating and serving, `d` terminating and not serving.
pub(super) fn endpoint(address: &str, node: &str, condition: char) -> Endpoint {
    Endpoint {
        addresses: vec![address.into()],
        ready: condition == 'r',
        serving: matches!(condition, 'r' | 't'),
        terminating: matches!(condition, 't' | 'd'),
        node_name: node.into(),
        ..Endpoint::default()
    }
}

pub(super) fn slice(name: &str, service: &str, endpoints: Vec<Endpoint>) -> EndpointSlice {
    EndpointSlice {
        namespace: "default".into(),
        name: name.into(),
        service: service.into(),
        family: AddressFamily::Ipv4.into(),
        ports: vec![EndpointPort {
            name: "http".into(),
            protocol: Protocol::Tcp.into(),
            port: 8080,
        }],
        endpoints,
    }
}

pub(super) fn state(
    services: impl IntoIterator<Item = Service>,
    slices: impl IntoIterator<Item = EndpointSlice>,
) -> DesiredState {
    let mut state = DesiredState {
        config: ClusterConfig {
            dns_ips: vec!["10.96.0.10".into()],
            service_cidrs: vec!["10.96.0.0/16".into()],
            pod_cidrs: vec!["10.244.0.0/16".into()],
            external_ips: true,
            ..ClusterConfig::default()
        },
        ..DesiredState::default()
    };
    for (name, ip, zone) in [(NODE, NODE_IP, "a"), ("n2", "192.0.2.12", "b")] {
        let node = Node {
            name: name.into(),
            internal_ips: vec![ip.into()],
            zone: zone.into(),
            ..Node::default()
        };
        state.nodes.insert(name.into(), node);
    }
    for service in services {
        let name = Name::new(&service.namespace, &service.name);
        state.services.insert(name, service);
    }
    for slice in slices {
        let name = Name::new(&slice.namespace, &slice.name);
        state.endpoint_slices.insert(name, slice);
    }
    state
}

pub(super) fn addresses(nodes: &BTreeMap<String, Node>, also: &[&str]) -> NodeAddresses {
    let mut present = vec![NODE_IP.parse().unwrap()];
    present.extend(also.iter().map(|a| a.parse::<std::net::IpAddr>().unwrap()));
    NodeAddresses::new(&node_addresses::Input {
        node_name: NODE,
        configured: &[NODE_IP.parse().unwrap()],
        present: &present,
        nodes,
        node_port_addresses: &[],
    })
}

pub(super) fn catalog(state: &DesiredState, options: ServiceOptions) -> Catalog {
    let node = NodeIdentity {
        name: NODE.into(),
        addresses: vec![NODE_IP.parse().unwrap()],
        dns_port: 10053,
    };
    Catalog::new(node, options, addresses(&state.nodes, &[]))
}

/// The whole state, compiled by a catalog of its own.
pub(super) fn compile(state: &DesiredState) -> (Catalog, Wanted) {
    let mut catalog = catalog(state, ServiceOptions::default());
    let wanted = catalog.compile(state, &Changes::everything());
    (catalog, wanted)
}
