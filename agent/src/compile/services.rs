//! Services and endpoint slices to service ports and their backends, as this node must balance them.
//!
//! Rules: an endpoint counts when it is ready; when none is, those that terminate but still serve (KEP-1669), and
//! never one that is not ready. The internal traffic policy narrows first. An endpoint in several slices is one, and
//! ready in any slice is ready. Endpoints that are listed but not eligible keep the connections they have.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use control_api::desired::{DesiredState, Name};
use control_api::v1::{
    AddressFamily, Endpoint, EndpointSlice, Protocol, Service, ServicePort, ServiceType,
    TrafficPolicy,
};

/// The port that resolvers ask, on every cluster DNS address.
const DNS_PORT: u16 = 53;

/// Who this node is, as far as packets show it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeIdentity {
    pub name: String,
    /// The node's addresses; the first of each family is the source of translated packets.
    pub addresses: Vec<IpAddr>,
    /// Where this node's cluster DNS listens on those addresses.
    pub dns_port: u16,
}

/// A service port as packets name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Frontend {
    pub address: IpAddr,
    pub port: u16,
    /// IP protocol number.
    pub protocol: u8,
}

impl std::fmt::Display for Frontend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let socket = std::net::SocketAddr::new(self.address, self.port);
        match self.protocol {
            6 => write!(f, "{socket}/TCP"),
            17 => write!(f, "{socket}/UDP"),
            other => write!(f, "{socket}/{other}"),
        }
    }
}

/// One endpoint of a service port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WantedBackend {
    pub address: IpAddr,
    pub port: u16,
    /// Runs on this node.
    pub local: bool,
    /// Gets no new flows.
    pub draining: bool,
}

/// What a service port should lead to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WantedService {
    /// In the order of address and port, each once.
    pub backends: Vec<WantedBackend>,
    /// Seconds; zero means none.
    pub affinity_s: u32,
}

/// Slices by the service they belong to, so that a whole state is compiled in one pass.
#[derive(Debug, Default)]
pub struct SliceIndex<'a>(BTreeMap<(&'a str, &'a str), Vec<&'a EndpointSlice>>);

impl<'a> SliceIndex<'a> {
    /// Every slice.
    #[must_use]
    pub fn new(desired: &'a DesiredState) -> Self {
        let mut index: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for slice in desired.endpoint_slices.values() {
            index
                .entry((slice.namespace.as_str(), slice.service.as_str()))
                .or_default()
                .push(slice);
        }
        Self(index)
    }

    /// The slices of the named services only.
    #[must_use]
    pub fn of_services(desired: &'a DesiredState, names: &'a BTreeSet<Name>) -> Self {
        let wanted: BTreeSet<_> = names
            .iter()
            .map(|n| (n.namespace.as_str(), n.name.as_str()))
            .collect();
        let mut index: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for slice in desired.endpoint_slices.values() {
            let key = (slice.namespace.as_str(), slice.service.as_str());
            if wanted.contains(&key) {
                index.entry(key).or_default().push(slice);
            }
        }
        Self(index)
    }

    fn of<'s>(&'s self, name: &'s Name) -> &'s [&'s EndpointSlice] {
        self.0
            .get(&(name.namespace.as_str(), name.name.as_str()))
            .map_or(&[], Vec::as_slice)
    }
}

/// Every service port of one service. Empty when the service does not exist or has no address.
#[must_use]
pub fn compile_service(
    desired: &DesiredState,
    slices: &SliceIndex<'_>,
    node: &NodeIdentity,
    name: &Name,
) -> BTreeMap<Frontend, WantedService> {
    let mut compiled = BTreeMap::new();
    let Some(service) = desired.services.get(name) else {
        return compiled;
    };
    if service.headless || service.r#type() == ServiceType::ExternalName {
        return compiled;
    }
    for address in addresses(service) {
        for port in &service.ports {
            let Some(frontend) = frontend(address, port) else {
                continue;
            };
            let wanted = match cluster_dns(desired, node, &frontend) {
                Some(backend) => WantedService {
                    backends: vec![backend],
                    affinity_s: 0,
                },
                None => WantedService {
                    backends: backends(service, port, address, slices.of(name), node),
                    affinity_s: service.client_ip_affinity_s,
                },
            };
            compiled.insert(frontend, wanted);
        }
    }
    compiled
}

fn addresses(service: &Service) -> impl Iterator<Item = IpAddr> + '_ {
    service
        .cluster_ips
        .iter()
        .filter_map(|text| text.parse().ok())
}

fn frontend(address: IpAddr, port: &ServicePort) -> Option<Frontend> {
    let protocol = match port.protocol() {
        Protocol::Tcp => 6,
        Protocol::Udp => 17,
        Protocol::Sctp => 132,
        Protocol::Unspecified => return None,
    };
    let number = u16::try_from(port.port)
        .ok()
        .filter(|number| *number != 0)?;
    Some(Frontend {
        address,
        port: number,
        protocol,
    })
}

/// Cluster DNS is answered by this node's own server.
fn cluster_dns(
    desired: &DesiredState,
    node: &NodeIdentity,
    frontend: &Frontend,
) -> Option<WantedBackend> {
    let is_dns = frontend.port == DNS_PORT
        && desired
            .config
            .dns_ips
            .iter()
            .any(|text| text.parse() == Ok(frontend.address));
    if !is_dns || node.dns_port == 0 {
        return None;
    }
    let address = *node
        .addresses
        .iter()
        .find(|own| own.is_ipv4() == frontend.address.is_ipv4())?;
    Some(WantedBackend {
        address,
        port: node.dns_port,
        local: true,
        draining: false,
    })
}

/// What is known of one endpoint, over all its slices.
#[derive(Clone, Copy, Default)]
struct Condition {
    ready: bool,
    serving_terminating: bool,
    local: bool,
}

fn backends(
    service: &Service,
    port: &ServicePort,
    address: IpAddr,
    slices: &[&EndpointSlice],
    node: &NodeIdentity,
) -> Vec<WantedBackend> {
    let family = if address.is_ipv4() {
        AddressFamily::Ipv4
    } else {
        AddressFamily::Ipv6
    };
    let mut seen: BTreeMap<(IpAddr, u16), Condition> = BTreeMap::new();
    for slice in slices.iter().filter(|slice| slice.family() == family) {
        let Some(target_port) = slice_port(slice, port) else {
            continue;
        };
        for endpoint in &slice.endpoints {
            let Some(target) = target(endpoint, address) else {
                continue;
            };
            let condition = seen.entry((target, target_port)).or_default();
            condition.ready |= endpoint.ready;
            condition.serving_terminating |= endpoint.serving && endpoint.terminating;
            condition.local |= endpoint.node_name == node.name;
        }
    }
    let local_only = service.internal_traffic_policy() == TrafficPolicy::Local;
    let in_scope = |condition: &Condition| !local_only || condition.local;
    let any_ready = seen
        .values()
        .any(|condition| condition.ready && in_scope(condition));
    seen.iter()
        .map(|((address, port), condition)| {
            let counts = if any_ready {
                condition.ready
            } else {
                condition.serving_terminating
            };
            WantedBackend {
                address: *address,
                port: *port,
                local: condition.local,
                draining: !(counts && in_scope(condition)),
            }
        })
        .collect()
}

/// The slice's port with the name of the service's port. A slice without it does not serve that port.
fn slice_port(slice: &EndpointSlice, port: &ServicePort) -> Option<u16> {
    let found = slice
        .ports
        .iter()
        .find(|candidate| candidate.name == port.name && candidate.protocol() == port.protocol())?;
    u16::try_from(found.port).ok().filter(|number| *number != 0)
}

/// The endpoint's address, unless packets must not be led there: translation would reach what only the node itself
/// may reach.
fn target(endpoint: &Endpoint, like: IpAddr) -> Option<IpAddr> {
    let address: IpAddr = endpoint.addresses.first()?.parse().ok()?;
    let refused = address.is_loopback()
        || address.is_unspecified()
        || address.is_multicast()
        || match address {
            IpAddr::V4(v4) => v4.is_link_local() || v4.is_broadcast(),
            IpAddr::V6(v6) => v6.is_unicast_link_local() || v6.to_ipv4_mapped().is_some(),
        };
    (address.is_ipv4() == like.is_ipv4() && !refused).then_some(address)
}

#[cfg(test)]
mod tests {
    use super::*;
    use control_api::v1::{ClusterConfig, EndpointPort};

    fn endpoint(address: &str, ready: bool, serving: bool, terminating: bool) -> Endpoint {
        Endpoint {
            addresses: vec![address.into()],
            ready,
            serving,
            terminating,
            node_name: "n1".into(),
            ..Endpoint::default()
        }
    }

    fn slice(name: &str, endpoints: Vec<Endpoint>) -> EndpointSlice {
        EndpointSlice {
            namespace: "default".into(),
            name: name.into(),
            service: "web".into(),
            family: AddressFamily::Ipv4.into(),
            ports: vec![EndpointPort {
                name: "http".into(),
                protocol: Protocol::Tcp.into(),
                port: 8080,
            }],
            endpoints,
        }
    }

    fn desired(slices: Vec<EndpointSlice>) -> DesiredState {
        let mut state = DesiredState::default();
        let service = Service {
            namespace: "default".into(),
            name: "web".into(),
            r#type: ServiceType::ClusterIp.into(),
            cluster_ips: vec!["10.96.0.20".into()],
            ports: vec![ServicePort {
                name: "http".into(),
                protocol: Protocol::Tcp.into(),
                port: 80,
                node_port: 0,
            }],
            ..Service::default()
        };
        state.services.insert(Name::new("default", "web"), service);
        for slice in slices {
            state
                .endpoint_slices
                .insert(Name::new("default", &slice.name), slice);
        }
        state
    }

    fn node() -> NodeIdentity {
        NodeIdentity {
            name: "n1".into(),
            addresses: vec!["192.0.2.11".parse().unwrap()],
            dns_port: 10053,
        }
    }

    fn eligible(state: &DesiredState) -> Vec<String> {
        let compiled = compile_service(
            state,
            &SliceIndex::new(state),
            &node(),
            &Name::new("default", "web"),
        );
        compiled
            .values()
            .flat_map(|service| &service.backends)
            .filter(|backend| !backend.draining)
            .map(|backend| format!("{}:{}", backend.address, backend.port))
            .collect()
    }

    #[test]
    fn only_ready_endpoints_count_while_there_are_any() {
        let state = desired(vec![slice(
            "a",
            vec![
                endpoint("10.244.0.1", true, true, false),
                endpoint("10.244.0.2", false, false, false),
                endpoint("10.244.0.3", false, true, true),
            ],
        )]);
        assert_eq!(eligible(&state), ["10.244.0.1:8080"]);
    }

    #[test]
    fn without_a_ready_one_those_that_terminate_and_serve_count() {
        let state = desired(vec![slice(
            "a",
            vec![
                endpoint("10.244.0.2", false, false, false),
                endpoint("10.244.0.3", false, true, true),
                endpoint("10.244.0.4", false, false, true),
            ],
        )]);
        assert_eq!(eligible(&state), ["10.244.0.3:8080"]);
    }

    #[test]
    fn an_endpoint_in_two_slices_is_one_and_ready_wins() {
        let state = desired(vec![
            slice("a", vec![endpoint("10.244.0.1", false, false, false)]),
            slice("b", vec![endpoint("10.244.0.1", true, true, false)]),
        ]);
        assert_eq!(eligible(&state), ["10.244.0.1:8080"]);
    }

    #[test]
    fn a_slice_without_the_named_port_does_not_serve_it() {
        let mut other = slice("a", vec![endpoint("10.244.0.1", true, true, false)]);
        other.ports[0].name = "metrics".into();
        assert!(eligible(&desired(vec![other])).is_empty());
    }

    #[test]
    fn the_local_policy_narrows_before_readiness() {
        let mut far = endpoint("10.244.1.1", true, true, false);
        far.node_name = "n2".into();
        let mut state = desired(vec![slice(
            "a",
            vec![far, endpoint("10.244.0.3", false, true, true)],
        )]);
        for service in state.services.values_mut() {
            service.internal_traffic_policy = TrafficPolicy::Local.into();
        }
        assert_eq!(eligible(&state), ["10.244.0.3:8080"]);
    }

    #[test]
    fn addresses_that_only_the_node_may_reach_are_refused() {
        let state = desired(vec![slice(
            "a",
            vec![
                endpoint("127.0.0.1", true, true, false),
                endpoint("169.254.1.2", true, true, false),
            ],
        )]);
        assert!(eligible(&state).is_empty());
    }

    #[test]
    fn cluster_dns_is_led_to_this_node() {
        let mut state = desired(vec![slice(
            "a",
            vec![endpoint("10.244.0.1", true, true, false)],
        )]);
        state.config = ClusterConfig {
            dns_ips: vec!["10.96.0.20".into()],
            ..ClusterConfig::default()
        };
        for service in state.services.values_mut() {
            service.ports[0].port = 53;
        }
        assert_eq!(eligible(&state), ["192.0.2.11:10053"]);
    }

    #[test]
    fn headless_and_external_services_have_no_frontend() {
        for kind in [ServiceType::ExternalName, ServiceType::ClusterIp] {
            let mut state = desired(vec![]);
            for service in state.services.values_mut() {
                service.headless = kind == ServiceType::ClusterIp;
                service.r#type = kind.into();
            }
            let compiled = compile_service(
                &state,
                &SliceIndex::new(&state),
                &node(),
                &Name::new("default", "web"),
            );
            assert!(compiled.is_empty());
        }
    }
}
