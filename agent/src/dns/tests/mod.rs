mod cached;
mod configured;
mod live;
mod pure;
mod upstreams;

use control_api::desired::{DesiredState, Name};
use control_api::v1::{
    ClusterConfig, Endpoint, EndpointPort, EndpointSlice, Protocol, Service, ServicePort,
    ServiceType,
};

fn state() -> DesiredState {
    let mut state = DesiredState {
        revision: 1,
        config: ClusterConfig {
            cluster_domain: "cluster.local".into(),
            dns_ips: vec!["10.96.0.10".into()],
            service_cidrs: vec!["10.96.0.0/16".into(), "fd00:10:96::/112".into()],
            pod_cidrs: vec!["10.244.0.0/16".into()],
            namespaces: vec!["shop".into(), "data".into()],
            ..ClusterConfig::default()
        },
        ..DesiredState::default()
    };
    put_service(
        &mut state,
        service("shop", "cart", &["10.96.10.5", "fd00:10:96::5"]),
    );
    put_service(
        &mut state,
        Service {
            headless: true,
            ..service("data", "pg", &[])
        },
    );
    put_slice(
        &mut state,
        slice(
            "data",
            "pg",
            &[("10.244.1.10", "pg-0"), ("10.244.2.11", "pg-1")],
        ),
    );
    put_service(
        &mut state,
        Service {
            r#type: ServiceType::ExternalName.into(),
            external_name: "named.example".into(),
            ports: Vec::new(),
            ..service("shop", "out", &[])
        },
    );
    state
}

fn service(namespace: &str, name: &str, ips: &[&str]) -> Service {
    Service {
        namespace: namespace.into(),
        name: name.into(),
        cluster_ips: ips.iter().map(|ip| (*ip).to_owned()).collect(),
        ports: vec![ServicePort {
            name: "http".into(),
            protocol: Protocol::Tcp.into(),
            port: 80,
            node_port: 0,
        }],
        ..Service::default()
    }
}

fn slice(namespace: &str, service: &str, endpoints: &[(&str, &str)]) -> EndpointSlice {
    EndpointSlice {
        namespace: namespace.into(),
        name: format!("{service}-1"),
        service: service.into(),
        ports: vec![EndpointPort {
            name: "http".into(),
            protocol: Protocol::Tcp.into(),
            port: 8080,
        }],
        endpoints: endpoints
            .iter()
            .map(|(address, hostname)| Endpoint {
                addresses: vec![(*address).to_owned()],
                ready: true,
                hostname: (*hostname).to_owned(),
                ..Endpoint::default()
            })
            .collect(),
        ..EndpointSlice::default()
    }
}

fn put_service(state: &mut DesiredState, service: Service) {
    state
        .services
        .insert(Name::new(&service.namespace, &service.name), service);
}

fn put_slice(state: &mut DesiredState, slice: EndpointSlice) {
    state
        .endpoint_slices
        .insert(Name::new(&slice.namespace, &slice.name), slice);
}
