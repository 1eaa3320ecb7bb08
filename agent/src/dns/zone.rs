//! The cluster's names: built from desired state, kept up from what deltas touched. [pure]
//!
//! Rules: Kubernetes DNS specification 1.1.0, and what clients rely on beyond it (labels and PTR records for endpoints
//! of every Service).

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use control_api::desired::{Changes, DesiredState, Name as ObjectName};
use control_api::slice::{self, Slice};
use control_api::v1::{self, Protocol, ServiceType};
use hickory_proto::rr::Name;
use ipnetwork::IpNetwork;

/// Whether names like 10-244-1-30.NAMESPACE.pod.ZONE exist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PodRecords {
    Disabled,
    /// Every address exists in every namespace, as kubeadm sets up CoreDNS.
    #[default]
    Insecure,
}

/// What is set rather than learned from the feed.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Seconds, of cluster records; also the negative TTL.
    pub ttl_s: u32,
    pub pods: PodRecords,
    /// Endpoints without a hostname are named after their pod instead of their address.
    pub endpoint_pod_names: bool,
    /// A Service with a cluster IP and no ready endpoint does not exist.
    pub ignore_empty_service: bool,
    /// Zones whose missing names are asked elsewhere.
    pub fallthrough: Vec<Name>,
    /// Networks whose reverse zones are answered here, besides those of the feed's configuration.
    pub reverse: Vec<IpNetwork>,
    /// The cluster's zone; none: what the feed's configuration says.
    pub zone: Option<Name>,
    /// Endpoints have no names, and headless Services no addresses.
    pub no_endpoints: bool,
    /// Only these exist; empty: all.
    pub namespaces: Vec<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            ttl_s: 30,
            pods: PodRecords::default(),
            endpoint_pod_names: false,
            ignore_empty_service: false,
            fallthrough: Vec::new(),
            reverse: Vec::new(),
            zone: None,
            no_endpoints: false,
            namespaces: Vec::new(),
        }
    }
}

/// Addresses of one name, sorted, each once. There is one of these for every endpoint of the cluster: no room to grow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Addresses {
    pub(super) v4: Box<[Ipv4Addr]>,
    pub(super) v6: Box<[Ipv6Addr]>,
}

impl FromIterator<IpAddr> for Addresses {
    fn from_iter<I: IntoIterator<Item = IpAddr>>(addresses: I) -> Self {
        let (mut v4, mut v6) = (Vec::new(), Vec::new());
        for address in addresses {
            match address {
                IpAddr::V4(address) => v4.push(address),
                IpAddr::V6(address) => v6.push(address),
            }
        }
        v4.sort_unstable();
        v4.dedup();
        v6.sort_unstable();
        v6.dedup();
        Self {
            v4: v4.into(),
            v6: v6.into(),
        }
    }
}

impl Addresses {
    pub(super) fn iter(&self) -> impl Iterator<Item = IpAddr> + '_ {
        let v4 = self.v4.iter().copied().map(IpAddr::V4);
        v4.chain(self.v6.iter().copied().map(IpAddr::V6))
    }
}

/// A port as SRV records tell it. Protocols are labels without the underscore.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Port {
    pub(super) name: String,
    pub(super) protocol: &'static str,
    pub(super) port: u16,
}

/// What one endpoint label stands for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Endpoint {
    pub(super) addresses: Addresses,
    /// Sorted, each once. Endpoints of one slice share them.
    pub(super) ports: Arc<[Port]>,
}

/// Endpoints by label, sorted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Endpoints(Box<[(Box<str>, Endpoint)]>);

impl Endpoints {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn get(&self, label: &str) -> Option<&Endpoint> {
        let place = self
            .0
            .binary_search_by(|(own, _)| (**own).cmp(label))
            .ok()?;
        self.0.get(place).map(|(_, endpoint)| endpoint)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &Endpoint)> {
        self.0.iter().map(|(label, endpoint)| (&**label, endpoint))
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &Endpoint> {
        self.0.iter().map(|(_, endpoint)| endpoint)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    ClusterIp {
        addresses: Addresses,
        ports: Vec<Port>,
    },
    Headless,
    External(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Service {
    pub(super) kind: Kind,
    /// Ready endpoints by label.
    pub(super) endpoints: Endpoints,
}

/// See the module documentation.
#[derive(Clone, Debug)]
pub struct Zone {
    pub(super) options: Options,
    pub(super) name: Name,
    pub(super) reverse: Vec<IpNetwork>,
    pub(super) name_servers: Addresses,
    pub(super) namespaces: HashSet<String>,
    pub(super) services: HashMap<String, HashMap<String, Service>>,
    /// Which Services an address belongs to, as cluster IP or as endpoint.
    pub(super) pointers: BTreeSet<(IpAddr, Arc<ObjectName>)>,
    pub(super) serial: u32,
    pub(super) synced: bool,
}

/// Used until the feed says otherwise, so that names of the usual zone are never forwarded meanwhile.
const DEFAULT_ZONE: &str = "cluster.local.";

impl Zone {
    /// An empty zone that knows nothing yet: missing names are SERVFAIL.
    #[must_use]
    pub fn new(options: Options) -> Self {
        let name = options.zone.clone();
        Self {
            reverse: options.reverse.clone(),
            options,
            name: name.unwrap_or_else(|| Name::from_ascii(DEFAULT_ZONE).unwrap_or_default()),
            name_servers: Addresses::default(),
            namespaces: HashSet::new(),
            services: HashMap::new(),
            pointers: BTreeSet::new(),
            serial: 0,
            synced: false,
        }
    }

    /// Takes other options; an update with everything has to follow.
    pub(super) fn set_options(&mut self, options: Options) {
        self.options = options;
    }

    /// From now on a name that is missing here does not exist.
    pub fn set_synced(&mut self) {
        self.synced = true;
    }

    /// Takes a state and what of it changed.
    pub fn update(&mut self, state: &DesiredState, changes: &Changes) {
        self.serial = u32::try_from(state.revision & u64::from(u32::MAX)).unwrap_or_default();
        if changes.everything || changes.config {
            self.configure(&state.config);
        }
        if changes.everything {
            self.services.clear();
            self.pointers.clear();
            for (name, service) in &state.services {
                self.insert(name, service, state.slices_of(name));
            }
            return;
        }
        for name in &changes.services {
            self.remove(name);
            if let Some(service) = state.services.get(name) {
                self.insert(name, service, state.slices_of(name));
            }
        }
    }

    fn configure(&mut self, config: &v1::ClusterConfig) {
        if let Some(zone) = &self.options.zone {
            self.name = zone.clone();
        } else if let Ok(mut name) = Name::from_ascii(&config.cluster_domain)
            && name.num_labels() > 0
        {
            name.set_fqdn(true);
            self.name = name.to_lowercase();
        }
        let networks = config.service_cidrs.iter().chain(&config.pod_cidrs);
        self.reverse = self.options.reverse.clone();
        self.reverse
            .extend(networks.filter_map(|cidr| cidr.parse::<IpNetwork>().ok()));
        self.name_servers = parsed(&config.dns_ips).collect();
        let namespaces = config.namespaces.iter().cloned();
        self.namespaces = namespaces.filter(|name| self.shows(name)).collect();
    }

    fn shows(&self, namespace: &String) -> bool {
        self.options.namespaces.is_empty() || self.options.namespaces.contains(namespace)
    }

    fn insert<'a>(
        &mut self,
        name: &ObjectName,
        service: &v1::Service,
        slices: impl Iterator<Item = &'a Slice>,
    ) {
        if !self.shows(&name.namespace) {
            return;
        }
        let service = self.translate(service, slices);
        let owner = Arc::new(name.clone());
        let pointers = service.pointers();
        self.pointers
            .extend(pointers.map(|(address, _)| (address, Arc::clone(&owner))));
        let namespace = self.services.entry(name.namespace.clone()).or_default();
        namespace.insert(name.name.clone(), service);
    }

    fn remove(&mut self, name: &ObjectName) {
        let Some(services) = self.services.get_mut(&name.namespace) else {
            return;
        };
        let Some(service) = services.remove(&name.name) else {
            return;
        };
        if services.is_empty() {
            self.services.remove(&name.namespace);
        }
        let owner = Arc::new(name.clone());
        for (address, _) in service.pointers() {
            self.pointers.remove(&(address, Arc::clone(&owner)));
        }
    }

    /// Where an address leads back to: Services, with the label of the endpoint; none for a cluster IP.
    pub(super) fn pointers_to(
        &self,
        address: IpAddr,
    ) -> impl Iterator<Item = (&ObjectName, Option<&str>)> {
        let owners = self
            .pointers
            .range((address, Arc::default())..)
            .take_while(move |(own, _)| *own == address);
        owners.flat_map(move |(_, owner)| {
            let services = self.services.get(&owner.namespace);
            let service = services.and_then(|services| services.get(&owner.name));
            let all = service.into_iter().flat_map(Service::pointers);
            all.filter(move |(own, _)| *own == address)
                .map(|(_, label)| (&**owner, label))
        })
    }

    fn translate<'a>(
        &self,
        service: &v1::Service,
        slices: impl Iterator<Item = &'a Slice>,
    ) -> Service {
        if service.r#type() == ServiceType::ExternalName {
            let kind = Kind::External(service.external_name.clone());
            return Service {
                kind,
                endpoints: Endpoints::default(),
            };
        }
        let endpoints = self.endpoints(slices);
        let kind = if service.headless || service.cluster_ips.is_empty() {
            Kind::Headless
        } else {
            let addresses = parsed(&service.cluster_ips).collect();
            let ports = service
                .ports
                .iter()
                .filter_map(|p| port(&p.name, p.protocol(), p.port))
                .collect();
            Kind::ClusterIp { addresses, ports }
        };
        Service { kind, endpoints }
    }

    fn endpoints<'a>(&self, slices: impl Iterator<Item = &'a Slice>) -> Endpoints {
        let mut found: BTreeMap<String, (Vec<IpAddr>, Arc<[Port]>)> = BTreeMap::new();
        for slice in slices.take_while(|_| !self.options.no_endpoints) {
            let ports: BTreeSet<Port> = slice
                .ports
                .iter()
                .filter_map(|p| port(&p.name, p.protocol(), p.port))
                .collect();
            let ports: Arc<[Port]> = ports.into_iter().collect();
            // publishNotReadyAddresses needs no case of its own: such endpoints are reported ready.
            for endpoint in slice.endpoints().filter(|endpoint| endpoint.ready()) {
                for address in endpoint.addresses() {
                    let (addresses, all) = found
                        .entry(self.label(endpoint, address))
                        .or_insert_with(|| (Vec::new(), Arc::clone(&ports)));
                    addresses.push(address);
                    if **all != *ports {
                        let both: BTreeSet<Port> = all.iter().chain(&*ports).cloned().collect();
                        *all = both.into_iter().collect();
                    }
                }
            }
        }
        let endpoints = found.into_iter().map(|(label, (addresses, ports))| {
            let addresses = addresses.into_iter().collect();
            (label.into_boxed_str(), Endpoint { addresses, ports })
        });
        Endpoints(endpoints.collect())
    }

    /// The label of an endpoint below its Service.
    fn label(&self, endpoint: slice::Endpoint<'_>, address: IpAddr) -> String {
        if !endpoint.hostname().is_empty() {
            return endpoint.hostname().to_ascii_lowercase();
        }
        if self.options.endpoint_pod_names
            && let Some((_, pod)) = endpoint.target_pod().split_once('/')
        {
            return pod.to_owned();
        }
        address.to_string().replace(['.', ':'], "-")
    }
}

impl Service {
    /// True when the Service's own name exists.
    pub(super) fn exists(&self, options: &Options) -> bool {
        match self.kind {
            Kind::ClusterIp { .. } => !options.ignore_empty_service || !self.endpoints.is_empty(),
            Kind::Headless => !self.endpoints.is_empty(),
            Kind::External(_) => true,
        }
    }

    /// Addresses that lead back to this Service, with the label of the endpoint; none for a cluster IP.
    fn pointers(&self) -> impl Iterator<Item = (IpAddr, Option<&str>)> {
        let own = match &self.kind {
            Kind::ClusterIp { addresses, .. } => Some(addresses),
            _ => None,
        };
        let own = own
            .into_iter()
            .flat_map(Addresses::iter)
            .map(|address| (address, None));
        let endpoints = self.endpoints.iter().flat_map(|(label, endpoint)| {
            endpoint
                .addresses
                .iter()
                .map(move |address| (address, Some(label)))
        });
        own.chain(endpoints)
    }
}

fn parsed(addresses: &[String]) -> impl Iterator<Item = IpAddr> {
    addresses.iter().filter_map(|address| address.parse().ok())
}

fn port(name: &str, protocol: Protocol, port: u32) -> Option<Port> {
    let protocol = match protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
        Protocol::Sctp => "sctp",
        Protocol::Unspecified => return None,
    };
    let port = u16::try_from(port).ok()?;
    Some(Port {
        name: name.to_ascii_lowercase(),
        protocol,
        port,
    })
}
