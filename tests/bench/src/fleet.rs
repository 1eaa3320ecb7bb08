//! The services of a run: most of them only there to be many, a few in between that traffic really goes to.

use std::net::{Ipv4Addr, SocketAddrV4};

use control_api::v1::{
    AddressFamily, ClusterConfig, Endpoint, EndpointPort, EndpointSlice, Node, Object, Protocol,
    Service as FeedService, ServicePort, ServiceType, object,
};

/// Addresses of services.
pub(crate) const SERVICE_CIDR: &str = "10.96.0.0/16";
/// Addresses of pods, those that exist and those that are only named.
pub(crate) const CLUSTER_CIDR: &str = "10.240.0.0/12";
pub(crate) const SERVICE_PORT: u16 = 80;
pub(crate) const NODE_PORT_FIRST: u16 = 30_000;
pub(crate) const NODE_PORT_LAST: u16 = 32_767;
/// Services that traffic goes to, for each place of their backends; spread evenly over the list, so that what walks it
/// finds them half way on average.
pub(crate) const TARGETS: usize = 4;
/// First port of a server pod; each endpoint of a target is one port of it.
pub(crate) const SERVER_PORT: u16 = 8_080;
/// Ports in use by nobody, for endpoints that are only named.
const NAMED_PORT: u16 = 9_376;
const FIRST_SERVICE: u32 = u32::from_be_bytes([10, 96, 1, 0]);
const FIRST_NAMED: u32 = u32::from_be_bytes([10, 248, 0, 0]);
const NAMESPACE: &str = "bench";

/// Where the backends of a target run, seen from the client's node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Place {
    SameNode,
    CrossNode,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Service {
    pub(crate) name: String,
    pub(crate) address: Ipv4Addr,
    pub(crate) backends: Vec<SocketAddrV4>,
    /// Only targets have one.
    pub(crate) node_port: Option<u16>,
    /// `None` for those that only are there.
    pub(crate) place: Option<Place>,
}

impl Service {
    /// Targets serve UDP as well.
    pub(crate) fn protocols(&self) -> &'static [(&'static str, Protocol)] {
        const BOTH: [(&str, Protocol); 2] = [("tcp", Protocol::Tcp), ("udp", Protocol::Udp)];
        if self.place.is_some() {
            &BOTH
        } else {
            &BOTH[..1]
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fleet {
    pub(crate) services: Vec<Service>,
}

impl Fleet {
    /// `count` services with `endpoints` each; those of targets are ports of the two server pods.
    pub(crate) fn new(count: usize, endpoints: usize, same: Ipv4Addr, far: Ipv4Addr) -> Self {
        let wanted = 2 * TARGETS;
        let mut services: Vec<Service> = (0..count).map(|index| named(index, endpoints)).collect();
        for target in 0..wanted.min(count) {
            let index = (2 * target + 1) * count / (2 * wanted.min(count));
            let (place, pod) = if target % 2 == 0 {
                (Place::SameNode, same)
            } else {
                (Place::CrossNode, far)
            };
            let service = &mut services[index];
            service.place = Some(place);
            service.node_port = Some(NODE_PORT_FIRST + number(target));
            service.backends = (0..endpoints)
                .map(|port| SocketAddrV4::new(pod, SERVER_PORT + number(port)))
                .collect();
        }
        Self { services }
    }

    /// Targets with backends at this place.
    pub(crate) fn targets(&self, place: Place) -> impl Iterator<Item = &Service> {
        self.services
            .iter()
            .filter(move |service| service.place == Some(place))
    }

    /// The fleet as the node feed tells it, after the cluster's configuration and its nodes.
    pub(crate) fn objects(&self, nodes: &[Node]) -> Vec<Object> {
        let config = ClusterConfig {
            cluster_domain: "cluster.local".into(),
            service_cidrs: vec![SERVICE_CIDR.into()],
            pod_cidrs: vec![CLUSTER_CIDR.into()],
            node_port_first: NODE_PORT_FIRST.into(),
            node_port_last: NODE_PORT_LAST.into(),
            namespaces: vec![NAMESPACE.into()],
            policies: true,
            ..ClusterConfig::default()
        };
        let mut kinds = vec![object::Kind::Config(config)];
        kinds.extend(nodes.iter().cloned().map(object::Kind::Node));
        for service in &self.services {
            kinds.push(object::Kind::Service(feed_service(service)));
            kinds.extend(slices(service).into_iter().map(object::Kind::EndpointSlice));
        }
        kinds.into_iter().map(into_object).collect()
    }
}

pub(crate) fn into_object(kind: object::Kind) -> Object {
    Object { kind: Some(kind) }
}

fn named(index: usize, endpoints: usize) -> Service {
    let first = FIRST_NAMED + wide(index * endpoints);
    Service {
        name: format!("service-{index:05}"),
        address: (FIRST_SERVICE + wide(index)).into(),
        backends: (0..endpoints)
            .map(|endpoint| SocketAddrV4::new((first + wide(endpoint)).into(), NAMED_PORT))
            .collect(),
        node_port: None,
        place: None,
    }
}

fn feed_service(service: &Service) -> FeedService {
    let kind = if service.node_port.is_some() {
        ServiceType::NodePort
    } else {
        ServiceType::ClusterIp
    };
    FeedService {
        namespace: NAMESPACE.into(),
        name: service.name.clone(),
        uid: format!("uid-{}", service.name),
        r#type: kind.into(),
        cluster_ips: vec![service.address.to_string()],
        ports: service
            .protocols()
            .iter()
            .map(|(name, protocol)| ServicePort {
                name: (*name).into(),
                protocol: (*protocol).into(),
                port: SERVICE_PORT.into(),
                node_port: service.node_port.map_or(0, u32::from),
            })
            .collect(),
        ..FeedService::default()
    }
}

/// One slice for every port that endpoints of the service have: all endpoints of a slice share their ports.
pub(crate) fn slices(service: &Service) -> Vec<EndpointSlice> {
    let mut ports: Vec<u16> = service.backends.iter().map(SocketAddrV4::port).collect();
    ports.sort_unstable();
    ports.dedup();
    let node = match service.place {
        Some(Place::SameNode) => "n1",
        Some(Place::CrossNode) => "n2",
        None => "n3",
    };
    ports
        .into_iter()
        .map(|port| EndpointSlice {
            namespace: NAMESPACE.into(),
            name: format!("{}-{port}", service.name),
            service: service.name.clone(),
            family: AddressFamily::Ipv4.into(),
            ports: service
                .protocols()
                .iter()
                .map(|(name, protocol)| EndpointPort {
                    name: (*name).into(),
                    protocol: (*protocol).into(),
                    port: port.into(),
                })
                .collect(),
            endpoints: service
                .backends
                .iter()
                .filter(|backend| backend.port() == port)
                .map(|backend| endpoint(*backend.ip(), node, &service.name))
                .collect(),
        })
        .collect()
}

fn endpoint(address: Ipv4Addr, node: &str, service: &str) -> Endpoint {
    Endpoint {
        addresses: vec![address.to_string()],
        ready: true,
        serving: true,
        node_name: node.into(),
        target_pod: format!("{NAMESPACE}/{service}-{}", u32::from(address)),
        ..Endpoint::default()
    }
}

fn number(index: usize) -> u16 {
    u16::try_from(index).unwrap_or(u16::MAX)
}

fn wide(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fleet(count: usize) -> Fleet {
        Fleet::new(count, 10, [10, 244, 1, 2].into(), [10, 244, 2, 2].into())
    }

    #[test]
    fn targets_are_spread_evenly_and_lead_to_the_server_pods() {
        for count in [10, 1_000, 10_000] {
            let fleet = fleet(count);
            assert_eq!(fleet.services.len(), count);
            for (place, pod) in [
                (Place::SameNode, Ipv4Addr::new(10, 244, 1, 2)),
                (Place::CrossNode, Ipv4Addr::new(10, 244, 2, 2)),
            ] {
                let targets: Vec<_> = fleet.targets(place).collect();
                assert_eq!(targets.len(), TARGETS, "{count} {place:?}");
                assert!(
                    targets.iter().all(
                        |t| t.backends.len() == 10 && t.backends.iter().all(|b| *b.ip() == pod)
                    )
                );
            }
            let places: Vec<usize> = (0..count)
                .filter(|index| fleet.services[*index].place.is_some())
                .collect();
            let middle = places.iter().sum::<usize>() / places.len();
            assert!(middle.abs_diff(count / 2) <= count / 10, "{places:?}");
        }
    }

    #[test]
    fn endpoints_are_distinct_and_within_the_cluster() {
        let fleet = fleet(10_000);
        let mut seen = std::collections::BTreeSet::new();
        for service in fleet.services.iter().filter(|s| s.place.is_none()) {
            for backend in &service.backends {
                assert!(seen.insert(*backend));
                assert_eq!(backend.ip().octets()[0], 10);
                assert!((240..=255).contains(&backend.ip().octets()[1]));
            }
        }
    }

    #[test]
    fn the_feed_tells_every_endpoint_once() {
        let objects = fleet(20).objects(&[]);
        let endpoints: usize = objects
            .iter()
            .filter_map(|object| match &object.kind {
                Some(object::Kind::EndpointSlice(slice)) => Some(slice.endpoints.len()),
                _ => None,
            })
            .sum();
        assert_eq!(endpoints, 200);
    }
}
