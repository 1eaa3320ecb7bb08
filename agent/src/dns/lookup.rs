//! One question to the zone: its records, NODATA, NXDOMAIN, or somebody else's name. [pure]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::rdata::{A, AAAA, CNAME, HINFO, NS, PTR, SOA, SRV, TXT};
use hickory_proto::rr::{Name, RData, Record, RecordType};
use ipnetwork::IpNetwork;

use super::zone::{Addresses, Endpoint, Kind, PodRecords, Port, Service, Zone};

/// Version of the specification that these records follow.
const SCHEMA_VERSION: &str = "1.1.0";
/// Seconds.
const SCHEMA_VERSION_TTL_S: u32 = 28_800;
/// A chain of ExternalName Services longer than this is cut.
const MAX_CHAIN: usize = 8;
const SRV_WEIGHT: u16 = 100;

/// What the zone says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    pub rcode: ResponseCode,
    pub records: Vec<Record>,
    pub additionals: Vec<Record>,
    /// SOA of the zone, for negative answers.
    pub soa: Option<Record>,
    /// The chain of records ends at this name outside the zone: ask there for the rest.
    pub chase: Option<Name>,
}

/// What a name inside the zone is.
enum Node<'a> {
    Missing,
    /// Exists, without any record of its own.
    Empty,
    Apex,
    NameServer,
    Version,
    Service {
        namespace: String,
        name: String,
        service: &'a Service,
    },
    Endpoint {
        namespace: String,
        name: String,
        label: String,
        endpoint: &'a Endpoint,
    },
    /// _PORT._PROTOCOL below a Service.
    Ports {
        namespace: String,
        name: String,
        service: &'a Service,
        port: String,
        protocol: String,
    },
    Pod(IpAddr),
}

impl Zone {
    /// Looks up a name of class IN; `None` when it is somebody else's. `rotation` spreads clients over several addresses: any number will do.
    #[must_use]
    pub fn lookup(&self, name: &Name, record_type: RecordType, rotation: usize) -> Option<Answer> {
        let found = if self.name.zone_of(name) {
            self.forward_lookup(name, record_type, rotation)
        } else if let Some(reverse) = Reverse::parse(name)
            && let Some(network) = self.reverse.iter().find(|n| reverse.overlaps(**n))
        {
            self.reverse_lookup(name, record_type, &reverse, *network)
        } else {
            return None;
        };
        let missing = found.rcode == ResponseCode::NXDomain;
        if missing
            && self
                .options
                .fallthrough
                .iter()
                .any(|zone| zone.zone_of(name))
        {
            return None;
        }
        let negative = missing || (found.records.is_empty() && found.chase.is_none());
        if negative && !self.synced {
            // What is missing here may exist: the first complete state has not come yet.
            let answer = Answer {
                rcode: ResponseCode::ServFail,
                ..Answer::default()
            };
            return Some(answer);
        }
        Some(found)
    }

    fn forward_lookup(&self, name: &Name, record_type: RecordType, rotation: usize) -> Answer {
        let mut answer = Answer::default();
        let mut owner = name.clone();
        loop {
            let node = self.node(&owner);
            let external = match &node {
                Node::Service {
                    service:
                        Service {
                            kind: Kind::External(target),
                            ..
                        },
                    ..
                } => target,
                _ => {
                    self.end_chain(&owner, &node, record_type, rotation, &mut answer);
                    return answer;
                }
            };
            let Ok(mut target) = Name::from_ascii(external) else {
                answer.rcode = ResponseCode::ServFail;
                return answer;
            };
            target.set_fqdn(true);
            let looped = target == *name || answer.records.iter().any(|r| r.name == target);
            answer
                .records
                .push(self.record(&owner, RData::CNAME(CNAME(target.clone()))));
            if looped || record_type == RecordType::CNAME || answer.records.len() >= MAX_CHAIN {
                return answer;
            }
            if !self.name.zone_of(&target) {
                answer.chase = Some(target);
                return answer;
            }
            owner = target;
        }
    }

    /// The last name of a chain: its records, or why there are none.
    fn end_chain(
        &self,
        owner: &Name,
        node: &Node<'_>,
        record_type: RecordType,
        rotation: usize,
        answer: &mut Answer,
    ) {
        if matches!(node, Node::Missing) {
            answer.rcode = ResponseCode::NXDomain;
            answer.soa = Some(self.soa(&self.name));
            return;
        }
        let mut records = match record_type {
            RecordType::ANY => self.any(owner),
            RecordType::SRV => self.srv(owner, node, &mut answer.additionals),
            _ => self.plain(owner, node, record_type),
        };
        if records.is_empty() {
            answer.soa = Some(self.soa(&self.name));
        } else {
            let by = rotation % records.len();
            records.rotate_left(by);
        }
        answer.records.extend(records);
    }

    /// RFC 8482: one small record in place of everything.
    fn any(&self, owner: &Name) -> Vec<Record> {
        vec![self.record(
            owner,
            RData::HINFO(HINFO::new("RFC8482".into(), String::new())),
        )]
    }

    fn plain(&self, owner: &Name, node: &Node<'_>, record_type: RecordType) -> Vec<Record> {
        match (node, record_type) {
            (Node::Apex, RecordType::SOA) => vec![self.soa(owner)],
            (Node::Apex, RecordType::NS) => self
                .name_server()
                .map(|ns| self.record(owner, RData::NS(NS(ns))))
                .into_iter()
                .collect(),
            (Node::Version, RecordType::TXT) => {
                let text = TXT::new(vec![SCHEMA_VERSION.into()]);
                vec![Record::from_rdata(
                    owner.clone(),
                    SCHEMA_VERSION_TTL_S,
                    RData::TXT(text),
                )]
            }
            (Node::NameServer, _) => self.addresses(owner, &self.name_servers, record_type),
            (Node::Endpoint { endpoint, .. }, _) => {
                self.addresses(owner, &endpoint.addresses, record_type)
            }
            (Node::Pod(IpAddr::V4(v4)), RecordType::A) => {
                vec![self.record(owner, RData::A(A(*v4)))]
            }
            (Node::Pod(IpAddr::V6(v6)), RecordType::AAAA) => {
                vec![self.record(owner, RData::AAAA(AAAA(*v6)))]
            }
            (Node::Service { service, .. }, _) => match &service.kind {
                Kind::ClusterIp { addresses, .. } => self.addresses(owner, addresses, record_type),
                _ => {
                    let endpoints = service.endpoints.values();
                    let all: Addresses = endpoints.flat_map(|e| e.addresses.iter()).collect();
                    self.addresses(owner, &all, record_type)
                }
            },
            _ => Vec::new(),
        }
    }

    fn addresses(
        &self,
        owner: &Name,
        addresses: &Addresses,
        record_type: RecordType,
    ) -> Vec<Record> {
        match record_type {
            RecordType::A => addresses
                .v4
                .iter()
                .map(|ip| self.record(owner, RData::A(A(*ip))))
                .collect(),
            RecordType::AAAA => addresses
                .v6
                .iter()
                .map(|ip| self.record(owner, RData::AAAA(AAAA(*ip))))
                .collect(),
            _ => Vec::new(),
        }
    }

    fn srv(&self, owner: &Name, node: &Node<'_>, additionals: &mut Vec<Record>) -> Vec<Record> {
        let (namespace, name, service, wanted) = match node {
            Node::Service {
                namespace,
                name,
                service,
            } => (namespace, name, *service, None),
            Node::Ports {
                namespace,
                name,
                service,
                port,
                protocol,
            } => (
                namespace,
                name,
                *service,
                Some((port.as_str(), protocol.as_str())),
            ),
            Node::Endpoint {
                namespace,
                name,
                label,
                endpoint,
            } => {
                let target = self.target(namespace, name, Some(label));
                let ports = endpoint.ports.iter();
                return self.srv_of(owner, target, ports, None, &endpoint.addresses, additionals);
            }
            _ => return Vec::new(),
        };
        match &service.kind {
            Kind::ClusterIp { addresses, ports } => {
                let target = self.target(namespace, name, None);
                self.srv_of(owner, target, ports.iter(), wanted, addresses, additionals)
            }
            Kind::Headless => {
                let endpoints = service.endpoints.iter();
                endpoints
                    .flat_map(|(label, endpoint)| {
                        let target = self.target(namespace, name, Some(label));
                        let (ports, addresses) = (endpoint.ports.iter(), &endpoint.addresses);
                        self.srv_of(owner, target, ports, wanted, addresses, additionals)
                    })
                    .collect()
            }
            Kind::External(_) => Vec::new(),
        }
    }

    fn srv_of<'a>(
        &self,
        owner: &Name,
        target: Option<Name>,
        ports: impl Iterator<Item = &'a Port>,
        wanted: Option<(&str, &str)>,
        addresses: &Addresses,
        additionals: &mut Vec<Record>,
    ) -> Vec<Record> {
        let Some(target) = target else {
            return Vec::new();
        };
        let records: Vec<Record> = ports
            .filter(|p| wanted.is_none_or(|w| w == (p.name.as_str(), p.protocol)))
            .map(|p| {
                let srv = SRV::new(0, SRV_WEIGHT, p.port, target.clone());
                self.record(owner, RData::SRV(srv))
            })
            .collect();
        if !records.is_empty() {
            additionals.extend(self.addresses(&target, addresses, RecordType::A));
            additionals.extend(self.addresses(&target, addresses, RecordType::AAAA));
        }
        records
    }

    /// [LABEL.]SERVICE.NAMESPACE.svc.ZONE; none when it is too long to be a name.
    fn target(&self, namespace: &str, service: &str, label: Option<&str>) -> Option<Name> {
        let labels = label.into_iter().chain([service, namespace, "svc"]);
        let mut name = Name::from_labels(labels.map(str::as_bytes)).ok()?;
        name.set_fqdn(false);
        name.append_domain(&self.name).ok()
    }

    fn name_server(&self) -> Option<Name> {
        let mut name = Name::from_labels([b"ns".as_slice(), b"dns"]).ok()?;
        name.set_fqdn(false);
        name.append_domain(&self.name).ok()
    }

    fn record(&self, owner: &Name, data: RData) -> Record {
        Record::from_rdata(owner.clone(), self.options.ttl_s, data)
    }

    fn soa(&self, zone: &Name) -> Record {
        let server = self.name_server().unwrap_or_default();
        let mailbox = Name::from_labels([b"hostmaster".as_slice()])
            .and_then(|mut name| {
                name.set_fqdn(false);
                name.append_domain(&self.name)
            })
            .unwrap_or_default();
        let ttl = self.options.ttl_s;
        let soa = SOA::new(server, mailbox, self.serial, 7200, 1800, 86_400, ttl);
        Record::from_rdata(zone.clone(), ttl, RData::SOA(soa))
    }

    /// Walks a name of the zone from its right end.
    fn node(&self, name: &Name) -> Node<'_> {
        let depth = usize::from(name.num_labels()).saturating_sub(self.name.num_labels().into());
        let mut labels = Vec::with_capacity(depth);
        for label in name.iter().take(depth) {
            match std::str::from_utf8(label) {
                Ok(text) => labels.push(text.to_ascii_lowercase()),
                Err(_) => return Node::Missing,
            }
        }
        let Some(kind) = labels.pop() else {
            return Node::Apex;
        };
        match (kind.as_str(), labels.as_slice()) {
            ("dns-version", []) => Node::Version,
            ("dns", []) => Node::Empty,
            ("dns", [label]) if label == "ns" => Node::NameServer,
            ("svc", _) => self.below_svc(labels),
            ("pod", _) => self.below_pod(&labels),
            _ => Node::Missing,
        }
    }

    fn namespace_exists(&self, namespace: &str) -> bool {
        self.namespaces.contains(namespace) || self.services.contains_key(namespace)
    }

    fn below_svc(&self, mut labels: Vec<String>) -> Node<'_> {
        let Some(namespace) = labels.pop() else {
            return Node::Empty;
        };
        if !self.namespace_exists(&namespace) {
            return Node::Missing;
        }
        let Some(name) = labels.pop() else {
            return Node::Empty;
        };
        let services = self.services.get(&namespace);
        let Some(service) = services
            .and_then(|s| s.get(&name))
            .filter(|s| s.exists(&self.options))
        else {
            return Node::Missing;
        };
        match labels.as_mut_slice() {
            [] => Node::Service {
                namespace,
                name,
                service,
            },
            [label] => match service.endpoints.get(label) {
                Some(endpoint) => Node::Endpoint {
                    namespace,
                    name,
                    label: std::mem::take(label),
                    endpoint,
                },
                None if service.has_protocol(label) => Node::Empty,
                None => Node::Missing,
            },
            [port, protocol] => {
                let (Some(port), Some(protocol)) =
                    (port.strip_prefix('_'), protocol.strip_prefix('_'))
                else {
                    return Node::Missing;
                };
                if !service
                    .ports()
                    .any(|p| p.name == port && p.protocol == protocol && !port.is_empty())
                {
                    return Node::Missing;
                }
                let (port, protocol) = (port.to_owned(), protocol.to_owned());
                Node::Ports {
                    namespace,
                    name,
                    service,
                    port,
                    protocol,
                }
            }
            _ => Node::Missing,
        }
    }

    fn below_pod(&self, labels: &[String]) -> Node<'_> {
        match labels {
            [] => Node::Empty,
            [namespace] if self.namespace_exists(namespace) => Node::Empty,
            [address, namespace]
                if self.options.pods == PodRecords::Insecure
                    && self.namespace_exists(namespace) =>
            {
                parse_dashed(address).map_or(Node::Missing, Node::Pod)
            }
            _ => Node::Missing,
        }
    }

    fn reverse_lookup(
        &self,
        owner: &Name,
        record_type: RecordType,
        reverse: &Reverse,
        network: IpNetwork,
    ) -> Answer {
        let mut answer = Answer::default();
        let mut below = self.pointers.range((reverse.first, Arc::default())..);
        let records: Vec<Record> = match below.next().filter(|(at, _)| *at <= reverse.last) {
            Some((address, _)) if reverse.is_complete() => match record_type {
                RecordType::PTR => self.pointers_of(owner, *address),
                RecordType::ANY => self.any(owner),
                _ => Vec::new(),
            },
            Some(_) => Vec::new(),
            // The zone's own name exists without anything below it.
            None if reverse.covers(network) => Vec::new(),
            None => {
                answer.rcode = ResponseCode::NXDomain;
                Vec::new()
            }
        };
        if records.is_empty() {
            answer.soa = Some(self.soa(&reverse_apex(network)));
        }
        answer.records = records;
        answer
    }

    /// A cluster IP belongs to its Service alone; an endpoint to every Service that selects it.
    fn pointers_of(&self, owner: &Name, address: IpAddr) -> Vec<Record> {
        let mut targets: Vec<_> = self.pointers_to(address).collect();
        if targets.iter().any(|(_, label)| label.is_none()) {
            targets.retain(|(_, label)| label.is_none());
        }
        let names = targets
            .into_iter()
            .filter_map(|(name, label)| self.target(&name.namespace, &name.name, label));
        names
            .map(|name| self.record(owner, RData::PTR(PTR(name))))
            .collect()
    }
}

impl Service {
    fn ports(&self) -> Box<dyn Iterator<Item = &Port> + '_> {
        match &self.kind {
            Kind::ClusterIp { ports, .. } => Box::new(ports.iter()),
            Kind::Headless => Box::new(self.endpoints.values().flat_map(|e| e.ports.iter())),
            Kind::External(_) => Box::new(std::iter::empty()),
        }
    }

    /// True for _PROTOCOL when a named port lies below it: the name exists (RFC 8020).
    fn has_protocol(&self, label: &str) -> bool {
        label.strip_prefix('_').is_some_and(|protocol| {
            self.ports()
                .any(|p| p.protocol == protocol && !p.name.is_empty())
        })
    }
}

/// 10-244-1-30 or fd00-244-1--30.
fn parse_dashed(label: &str) -> Option<IpAddr> {
    if label.contains(['.', ':']) {
        return None;
    }
    let v4 = label.replace('-', ".").parse::<Ipv4Addr>().map(IpAddr::V4);
    v4.or_else(|_| label.replace('-', ":").parse::<Ipv6Addr>().map(IpAddr::V6))
        .ok()
}

/// A name below in-addr.arpa or ip6.arpa: one address, or a range of them when it has fewer labels.
pub(super) struct Reverse {
    first: IpAddr,
    last: IpAddr,
}

impl Reverse {
    pub(super) fn parse(name: &Name) -> Option<Self> {
        let labels: Vec<&[u8]> = name.iter().collect();
        let [digits @ .., tree, arpa] = labels.as_slice() else {
            return None;
        };
        if !arpa.eq_ignore_ascii_case(b"arpa") {
            return None;
        }
        if tree.eq_ignore_ascii_case(b"in-addr") && digits.len() <= 4 {
            let mut first = [0; 4];
            let mut last = [u8::MAX; 4];
            for (i, label) in digits.iter().rev().enumerate() {
                let value = decimal(label)?;
                (first[i], last[i]) = (value, value);
            }
            return Some(Self {
                first: Ipv4Addr::from(first).into(),
                last: Ipv4Addr::from(last).into(),
            });
        }
        if tree.eq_ignore_ascii_case(b"ip6") && digits.len() <= 32 {
            let mut first = 0u128;
            let mut last = u128::MAX;
            for (i, label) in digits.iter().rev().enumerate() {
                let [digit] = label else { return None };
                let value = u128::from(char::from(*digit).to_digit(16)?);
                let shift = 124 - 4 * i;
                first |= value << shift;
                last &= !((0xf ^ value) << shift);
            }
            return Some(Self {
                first: Ipv6Addr::from(first).into(),
                last: Ipv6Addr::from(last).into(),
            });
        }
        None
    }

    fn is_complete(&self) -> bool {
        self.first == self.last
    }

    /// The address, when it is one.
    pub(super) fn address(&self) -> Option<IpAddr> {
        self.is_complete().then_some(self.first)
    }

    /// The network of these addresses.
    pub(super) fn network(&self) -> Option<IpNetwork> {
        let same = match (self.first, self.last) {
            (IpAddr::V4(a), IpAddr::V4(b)) => (u32::from(a) ^ u32::from(b)).leading_zeros(),
            (IpAddr::V6(a), IpAddr::V6(b)) => (u128::from(a) ^ u128::from(b)).leading_zeros(),
            _ => return None,
        };
        IpNetwork::new(self.first, u8::try_from(same).ok()?).ok()
    }

    /// True inside the network, and for its own name where that is rounded to a whole label.
    fn overlaps(&self, network: IpNetwork) -> bool {
        network.contains(self.first) && network.contains(self.last) || self.covers(network)
    }

    fn covers(&self, network: IpNetwork) -> bool {
        let (apex_first, apex_last) = apex_range(network);
        self.first == apex_first && self.last == apex_last
    }
}

/// One to three digits without a superfluous zero, as reverse names are written.
fn decimal(label: &[u8]) -> Option<u8> {
    let text = std::str::from_utf8(label).ok()?;
    let canonical = !text.starts_with('+') && (text.len() == 1 || !text.starts_with('0'));
    text.parse().ok().filter(|_| canonical)
}

/// Labels of a network's reverse name: its prefix in whole octets or nibbles.
fn whole_labels(network: IpNetwork) -> usize {
    usize::from(network.prefix()) / if network.is_ipv4() { 8 } else { 4 }
}

fn apex_range(network: IpNetwork) -> (IpAddr, IpAddr) {
    match network {
        IpNetwork::V4(v4) => {
            let host = u32::MAX
                .checked_shr(8 * u32::from(v4.prefix() / 8))
                .unwrap_or(0);
            let first = u32::from(v4.network()) & !host;
            (
                Ipv4Addr::from(first).into(),
                Ipv4Addr::from(first | host).into(),
            )
        }
        IpNetwork::V6(v6) => {
            let host = u128::MAX
                .checked_shr(4 * u32::from(v6.prefix() / 4))
                .unwrap_or(0);
            let first = u128::from(v6.network()) & !host;
            (
                Ipv6Addr::from(first).into(),
                Ipv6Addr::from(first | host).into(),
            )
        }
    }
}

/// The reverse zone of a network, for example 96.10.in-addr.arpa.
fn reverse_apex(network: IpNetwork) -> Name {
    let full = Name::from(network.ip());
    full.trim_to(whole_labels(network) + 2)
}
