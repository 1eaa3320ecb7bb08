//! The addresses and ports of a Service, and what holds for each.
//!
//! Cluster addresses follow the internal traffic policy, everything else the external one (KEP-2086). Policy Local for
//! outward frontends makes two entries: clients inside the cluster use all endpoints, as if they had gone out to the
//! balancer and come back, clients outside those of this node, and are seen as they are.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use control_api::desired::Name;
use control_api::v1::{ClusterConfig, Protocol, Service, ServicePort, ServiceType, TrafficPolicy};
use ipnetwork::IpNetwork;

use super::endpoints::{Endpoints, Place};
use super::{
    Family, Frontend, FrontendOptions, NodeIdentity, Owner, Refusal, SCTP, Scope, ServiceKey,
    ServiceOptions, TCP, UDP, View, WantedBackend, WantedService, unusable,
};
use crate::compile::node_addresses::NodeAddresses;

/// The port that resolvers ask, on every cluster DNS address.
const DNS_PORT: u16 = 53;

/// What compiling a Service depends on besides the Service.
#[derive(Clone, Copy, Debug)]
pub(super) struct Context<'a> {
    pub(super) node: &'a NodeIdentity,
    pub(super) options: &'a ServiceOptions,
    pub(super) addresses: &'a NodeAddresses,
    pub(super) cluster: &'a Cluster,
    pub(super) zone: &'a str,
}

/// The parts of the cluster's configuration that services depend on, parsed once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Cluster {
    pub(super) dns_ips: BTreeSet<IpAddr>,
    pub(super) service_cidrs: Vec<IpNetwork>,
    pub(super) pod_cidrs: Vec<IpNetwork>,
    pub(super) external_ips: bool,
}

impl Cluster {
    pub(super) fn new(config: &ClusterConfig) -> Self {
        let networks = |texts: &[String]| texts.iter().filter_map(|t| t.parse().ok()).collect();
        Self {
            dns_ips: config
                .dns_ips
                .iter()
                .filter_map(|t| t.parse().ok())
                .collect(),
            service_cidrs: networks(&config.service_cidrs),
            pod_cidrs: networks(&config.pod_cidrs),
            external_ips: config.external_ips,
        }
    }
}

/// Kinds of frontends of a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Cluster,
    NodePort,
    Balancer,
    External,
}

/// A frontend with its kind and the Service's port that it is of.
type Entry<'a> = (Frontend, Kind, &'a ServicePort);

/// What a Service asks for.
pub(super) struct Asked<'a> {
    name: &'a Name,
    service: &'a Service,
    frontends: Vec<Entry<'a>>,
    refusals: Vec<Refusal>,
    /// What is asked for depends on the addresses of nodes.
    pub(super) depends_on_nodes: bool,
}

/// What becomes of it on this node.
#[derive(Debug, Default)]
pub(super) struct Compiled {
    pub(super) services: BTreeMap<ServiceKey, WantedService>,
    /// Addresses that are the Service's as a whole: they answer echo requests, and refuse all other ports.
    pub(super) addresses: BTreeSet<IpAddr>,
    pub(super) refusals: Vec<Refusal>,
}

impl<'a> Asked<'a> {
    /// Every frontend that the Service may have. None for headless Services, those of another proxy and external names,
    /// which are a matter of DNS alone.
    pub(super) fn of(context: &Context<'_>, name: &'a Name, service: &'a Service) -> Self {
        let mut asked = Self {
            name,
            service,
            frontends: Vec::new(),
            refusals: Vec::new(),
            depends_on_nodes: false,
        };
        let by_name = service.r#type() == ServiceType::ExternalName;
        if service.headless || service.foreign_proxy || by_name {
            return asked;
        }
        let addresses = asked.addresses(context);
        for port in &service.ports {
            let Some(protocol) = protocol(port) else {
                asked.refuse(
                    format!("port {}", port.port),
                    "its protocol is not TCP, UDP or SCTP",
                );
                continue;
            };
            match number(port.port) {
                Some(number) => {
                    for (address, kind) in &addresses {
                        asked.push(*address, number, protocol, *kind, port);
                    }
                }
                None => asked.refuse(format!("port {}", port.port), "it is no port number"),
            }
            if has_node_ports(service) && port.node_port != 0 {
                asked.node_port(port, protocol);
            }
        }
        asked
    }

    fn node_port(&mut self, port: &'a ServicePort, protocol: u8) {
        let Some(number) = number(port.node_port) else {
            self.refuse(
                format!("node port {}", port.node_port),
                "it is no port number",
            );
            return;
        };
        for family in families(self.service) {
            self.push(family.wildcard(), number, protocol, Kind::NodePort, port);
        }
    }

    fn push(&mut self, address: IpAddr, port: u16, protocol: u8, kind: Kind, of: &'a ServicePort) {
        let frontend = Frontend {
            address,
            port,
            protocol,
            scope: Scope::All,
        };
        if !self.frontends.iter().any(|(other, ..)| *other == frontend) {
            self.frontends.push((frontend, kind, of));
        }
    }

    fn refuse(&mut self, what: impl Into<String>, why: impl Into<String>) {
        self.refusals.push(Refusal {
            owner: Owner::Service(self.name.clone()),
            what: what.into(),
            why: why.into(),
        });
    }

    /// Addresses on which every port of the Service is served.
    fn addresses(&mut self, context: &Context<'_>) -> Vec<(IpAddr, Kind)> {
        let service = self.service;
        let mut addresses = Vec::new();
        for address in parsed(&service.cluster_ips) {
            addresses.push((address, Kind::Cluster));
        }
        if service.r#type() == ServiceType::LoadBalancer {
            // A balancer that is a proxy wants to see the traffic of the cluster itself (KEP-1860).
            let own = service.load_balancer_ingress.iter().filter(|i| !i.proxy);
            for address in own.filter_map(|ingress| ingress.ip.parse().ok()) {
                self.depends_on_nodes = true;
                match reserved(context, address) {
                    Some(why) => self.refuse(format!("balancer address {address}"), why),
                    None => addresses.push((address, Kind::Balancer)),
                }
            }
        }
        for address in parsed(&service.external_ips) {
            self.depends_on_nodes = true;
            match refused_external_ip(context, address) {
                Some(why) => self.refuse(format!("external IP {address}"), why),
                None => addresses.push((address, Kind::External)),
            }
        }
        addresses
    }

    /// The frontends, for [`super::claims::Claims`].
    pub(super) fn frontends(&self) -> Vec<Frontend> {
        self.frontends
            .iter()
            .map(|(frontend, ..)| *frontend)
            .collect()
    }

    /// The services behind the frontends. `holder` tells which Service has a frontend that several ask for.
    pub(super) fn compile<'h>(
        mut self,
        context: &Context<'_>,
        slices: &[&control_api::slice::Slice],
        holder: impl Fn(&Frontend) -> Option<&'h Name>,
    ) -> Compiled {
        let mut compiled = Compiled::default();
        let asked = std::mem::take(&mut self.frontends);
        for family in Family::ALL {
            let of_family = asked
                .iter()
                .filter(|(f, ..)| Family::of(f.address) == family);
            let mut by_port: BTreeMap<(&str, i32), Vec<Entry<'_>>> = BTreeMap::new();
            for (frontend, kind, port) in of_family {
                match holder(frontend).filter(|holder| *holder != self.name) {
                    Some(other) => self.refuse(
                        frontend.to_string(),
                        format!("service {other}, which is older, has it"),
                    ),
                    None => by_port
                        .entry((port.name.as_str(), port.protocol))
                        .or_default()
                        .push((*frontend, *kind, port)),
                }
            }
            for frontends in by_port.values() {
                self.compile_port(context, family, frontends, slices, &mut compiled);
            }
        }
        compiled.refusals = self.refusals;
        compiled
    }

    fn compile_port(
        &mut self,
        context: &Context<'_>,
        family: Family,
        frontends: &[Entry<'_>],
        slices: &[&control_api::slice::Slice],
        compiled: &mut Compiled,
    ) {
        let Some((_, _, port)) = frontends.first() else {
            return;
        };
        let place = Place {
            node: &context.node.name,
            zone: context.zone,
        };
        let endpoints = Endpoints::gather(slices.iter().copied(), port, family, place);
        for (address, why) in &endpoints.refused {
            self.refuse(format!("endpoint {address}"), format!("it is {why}"));
        }
        let mut views: BTreeMap<View, WantedService> = BTreeMap::new();
        for (frontend, kind, _) in frontends {
            let whole = matches!(kind, Kind::Cluster)
                || *kind == Kind::Balancer && !context.addresses.is_node(frontend.address);
            if whole {
                compiled.addresses.insert(frontend.address);
            }
            for (view, scope, options) in self.entries(context, *kind, &endpoints, family) {
                let service = views
                    .entry(view)
                    .or_insert_with(|| self.wanted(&endpoints, view, family));
                let frontend = Frontend { scope, ..*frontend };
                service.frontends.push((frontend, options));
            }
        }
        for (view, mut service) in views {
            if let Some(backend) = cluster_dns(context, frontends) {
                (service.backends, service.affinity_s) = (vec![backend], 0);
            }
            service.frontends.sort_unstable();
            let key = ServiceKey {
                owner: Owner::Service(self.name.clone()),
                family,
                port: port.name.clone(),
                protocol: frontends[0].0.protocol,
                host_port: 0,
                view,
            };
            compiled.services.insert(key, service);
        }
    }

    fn wanted(&self, endpoints: &Endpoints, view: View, family: Family) -> WantedService {
        WantedService {
            frontends: Vec::new(),
            backends: endpoints.view(view),
            affinity_s: self.service.client_ip_affinity_s,
            ranges: self.source_ranges(family).into_iter().collect(),
        }
    }

    /// The entries of one frontend.
    fn entries(
        &self,
        context: &Context<'_>,
        kind: Kind,
        endpoints: &Endpoints,
        family: Family,
    ) -> Vec<(View, Scope, FrontendOptions)> {
        let drop_empty = endpoints.any();
        if kind == Kind::Cluster {
            let local = self.service.internal_traffic_policy() == TrafficPolicy::Local;
            let options = FrontendOptions {
                drop_empty: local && drop_empty,
                ..FrontendOptions::default()
            };
            let view = if local { View::Local } else { View::Cluster };
            return vec![(view, Scope::All, options)];
        }
        let outward = FrontendOptions {
            ranges: kind == Kind::Balancer && self.has_ranges(family),
            maglev: context.options.maglev,
            ..FrontendOptions::default()
        };
        if self.service.external_traffic_policy() == TrafficPolicy::Cluster {
            let options = FrontendOptions {
                dsr: context.options.dsr,
                ..outward
            };
            return vec![(View::Cluster, Scope::All, options)];
        }
        let inside = FrontendOptions {
            external_scope: true,
            ..outward
        };
        let outside = FrontendOptions {
            keep_source: true,
            drop_empty,
            ..outward
        };
        vec![
            (View::Cluster, Scope::All, inside),
            (View::Local, Scope::External, outside),
        ]
    }

    /// Ranges restrict the family that they are of: kube-proxy sorts them by family, and a family without any is open.
    fn has_ranges(&self, family: Family) -> bool {
        self.range_texts(family).next().is_some()
    }

    /// The networks of a family that may use balancer addresses. Ranges that cannot be read admit nobody.
    fn source_ranges(&self, family: Family) -> BTreeSet<IpNetwork> {
        if self.service.r#type() != ServiceType::LoadBalancer {
            return BTreeSet::new();
        }
        self.range_texts(family)
            .filter_map(|text| text.parse::<IpNetwork>().ok())
            .filter_map(|range| IpNetwork::new(range.network(), range.prefix()).ok())
            .collect()
    }

    fn range_texts(&self, family: Family) -> impl Iterator<Item = &str> {
        let texts = self.service.load_balancer_source_ranges.iter();
        texts
            .map(|text| text.trim())
            .filter(move |text| text.contains(':') == (family == Family::V6))
    }
}

fn parsed(texts: &[String]) -> impl Iterator<Item = IpAddr> {
    texts.iter().filter_map(|text| text.parse().ok())
}

fn number(port: u32) -> Option<u16> {
    u16::try_from(port).ok().filter(|number| *number != 0)
}

fn protocol(port: &ServicePort) -> Option<u8> {
    match port.protocol() {
        Protocol::Tcp => Some(TCP),
        Protocol::Udp => Some(UDP),
        Protocol::Sctp => Some(SCTP),
        Protocol::Unspecified => None,
    }
}

fn has_node_ports(service: &Service) -> bool {
    matches!(
        service.r#type(),
        ServiceType::NodePort | ServiceType::LoadBalancer
    )
}

/// A Service has node ports in the families of its cluster addresses.
fn families(service: &Service) -> BTreeSet<Family> {
    parsed(&service.cluster_ips).map(Family::of).collect()
}

/// Why this address cannot be a Service's from outside.
fn reserved(context: &Context<'_>, address: IpAddr) -> Option<String> {
    let cluster = context.cluster;
    let within = |networks: &[IpNetwork]| networks.iter().any(|network| network.contains(address));
    if let Some(what) = unusable(address) {
        Some(format!("it is {what}"))
    } else if cluster.dns_ips.contains(&address) {
        Some("it is the address of cluster DNS".into())
    } else if within(&cluster.service_cidrs) {
        Some("it is in the range of cluster addresses".into())
    } else if within(&cluster.pod_cidrs) || context.addresses.is_pod(address) {
        Some("it is in the range of pod addresses".into())
    } else {
        None
    }
}

fn refused_external_ip(context: &Context<'_>, address: IpAddr) -> Option<String> {
    let allowed = context
        .options
        .external_ips
        .unwrap_or(context.cluster.external_ips);
    if !allowed {
        return Some(
            "external IPs are not served in this cluster: network.allow_external_ips of weir-control allows them"
                .into(),
        );
    }
    if context.addresses.is_node(address) {
        return Some("it is the address of a node".into());
    }
    reserved(context, address)
}

/// Cluster DNS is answered by this node's own server.
fn cluster_dns(context: &Context<'_>, frontends: &[Entry<'_>]) -> Option<WantedBackend> {
    let (frontend, ..) = frontends.iter().find(|(frontend, kind, _)| {
        *kind == Kind::Cluster
            && frontend.port == DNS_PORT
            && context.cluster.dns_ips.contains(&frontend.address)
    })?;
    if context.node.dns_port == 0 || frontend.protocol == SCTP {
        return None;
    }
    let family = Family::of(frontend.address);
    let address = context.addresses.primary(family)?;
    Some(WantedBackend {
        address,
        port: context.node.dns_port,
        local: true,
        draining: false,
    })
}
