//! What people call the ends of a packet: `namespace/pod`, `node/NAME`, `svc/namespace/name`, an address, or a domain name of
//! a rule. And where packets to them go, by the service tables of this node.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use control_api::desired::{DesiredState, Name};
use control_api::slice;
use control_api::v1::Protocol;
use ipnetwork::IpNetwork;

use super::explain::port_text;
use super::{ServiceTables, View};
use crate::compile::services::{SCTP, TCP, UDP};
use crate::plan::services::Led;

/// What a Service's name starts with.
pub(super) const SERVICE: &str = "svc/";

/// One end of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct End {
    /// As it was asked for, or found.
    pub name: String,
    pub address: IpAddr,
    /// Where it is, as far as that is known.
    pub node: Option<String>,
    pub is_pod: bool,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = self.address.to_string();
        if self.name == address {
            f.write_str(&address)
        } else {
            write!(f, "{} ({address})", self.name)
        }
    }
}

/// Where a packet is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub end: End,
    pub port: u16,
    /// The Service that leads there, and where it was asked.
    pub through: Option<String>,
}

/// The far end of a question: what stands for `TO:PORT/PROTOCOL`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Asked<'a> {
    pub to: &'a str,
    /// Zero for protocols without ports.
    pub port: u16,
    protocol: u8,
}

impl Asked<'_> {
    /// ICMP is another protocol in each family.
    pub(super) fn protocol(&self, v4: bool) -> u8 {
        match (self.protocol, v4) {
            (ICMP | ICMPV6, true) => ICMP,
            (ICMP | ICMPV6, false) => ICMPV6,
            (other, _) => other,
        }
    }
}

const ICMP: u8 = 1;
const ICMPV6: u8 = 58;

const SYNTAX: &str = "write TO:PORT, TO:PORT/PROTOCOL, or TO/PROTOCOL where there are no ports (TO/icmp); TO is namespace/pod, node/NAME, svc/namespace/name, an address (IPv6 in brackets), or a domain name of a rule";

/// `TO:PORT[/PROTOCOL]`, or `TO/PROTOCOL` for protocols without ports, cut. IPv6 addresses stand in brackets.
///
/// # Errors
/// What is missing.
pub(super) fn cut(text: &str) -> Result<Asked<'_>, String> {
    if let Some((to, protocol)) = text.rsplit_once('/')
        && let Ok(protocol) = protocol_number(protocol)
        && !has_ports(protocol)
    {
        let to = without_brackets(to);
        // A lone word is a namespace, and its pod has the protocol's name.
        let whole = to.contains(['/', '.']) && !to.contains(':');
        if whole || to.parse::<IpAddr>().is_ok() {
            let port = 0;
            return Ok(Asked { to, port, protocol });
        }
    }
    let (to, rest) = text
        .rsplit_once(':')
        .ok_or_else(|| format!("{text:?} names no port: {SYNTAX}"))?;
    let (port, protocol) = rest.split_once('/').unwrap_or((rest, "tcp"));
    let port = port
        .parse()
        .map_err(|_| format!("{port:?} is not a port (0 to 65535): {SYNTAX}"))?;
    let protocol = protocol_number(protocol)?;
    Ok(Asked {
        to: without_brackets(to),
        port: if has_ports(protocol) { port } else { 0 },
        protocol,
    })
}

fn without_brackets(text: &str) -> &str {
    let inner = text.strip_prefix('[').and_then(|t| t.strip_suffix(']'));
    inner.unwrap_or(text)
}

fn has_ports(protocol: u8) -> bool {
    matches!(protocol, TCP | UDP | SCTP)
}

fn protocol_number(text: &str) -> Result<u8, String> {
    match text.to_ascii_lowercase().as_str() {
        "tcp" => Ok(TCP),
        "udp" => Ok(UDP),
        "sctp" => Ok(SCTP),
        "icmp" => Ok(ICMP),
        "icmpv6" => Ok(ICMPV6),
        number => number.parse().map_err(|_| {
            format!("{text:?} is not a protocol: tcp, udp, sctp, icmp, icmpv6, or a number")
        }),
    }
}

/// Everybody that a name stands for, an end for each address.
///
/// # Errors
/// That nobody is known by it.
pub(super) fn find(view: &View<'_>, state: &DesiredState, text: &str) -> Result<Vec<End>, String> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Ok(vec![at(view, state, address)]);
    }
    let Some((namespace, name)) = text.split_once('/') else {
        return learnt(view, state, text);
    };
    if text.starts_with(SERVICE) {
        return Err(format!(
            "{text:?} is a service, which sends nothing itself: name one of its pods"
        ));
    }
    if name.contains('/') || namespace.is_empty() || name.is_empty() {
        return Err(format!(
            "{text:?} is neither namespace/pod, node/NAME, svc/namespace/name nor an address"
        ));
    }
    let ends = if namespace == "node" {
        let node = state.nodes.get(name);
        let addresses = node.into_iter().flat_map(|node| &node.internal_ips);
        addresses
            .filter_map(|text| text.parse().ok())
            .map(|address| End {
                name: text.into(),
                address,
                node: Some(name.into()),
                is_pod: false,
            })
            .collect()
    } else {
        pod(view, state, &Name::new(namespace, name))
    };
    if ends.is_empty() {
        return Err(format!(
            "this node knows no address of {text}: it is told only of nodes, of its own pods, and of those that its policies and Services speak of; try the address"
        ));
    }
    Ok(ends)
}

/// The addresses that DNS answers gave to a name of a rule.
fn learnt(view: &View<'_>, state: &DesiredState, name: &str) -> Result<Vec<End>, String> {
    let addresses = view.domains.addresses_of(name);
    let ends: Vec<End> = addresses.map(|address| at(view, state, address)).collect();
    if ends.is_empty() {
        return Err(format!(
            "{name:?} is neither namespace/pod, node/NAME, svc/namespace/name nor an address, and no domain name of a rule whose addresses this node was told"
        ));
    }
    Ok(ends)
}

fn pod(view: &View<'_>, state: &DesiredState, name: &Name) -> Vec<End> {
    let end = |address, node: &str| End {
        name: name.to_string(),
        address,
        node: Some(node.to_owned()),
        is_pod: true,
    };
    let own = view.locals.pods.values();
    let attached: Vec<End> = own
        .filter(|pod| pod.name.as_ref() == Some(name))
        .flat_map(|pod| &pod.addresses)
        .map(|address| end(*address, &view.locals.node_name))
        .collect();
    if !attached.is_empty() {
        return attached;
    }
    let peer = view.peers.get(name);
    let told = peer.into_iter().flat_map(|peer| {
        let addresses = peer.addresses.iter().filter_map(|text| text.parse().ok());
        addresses.map(|address| end(address, &peer.node))
    });
    let told: Vec<End> = told.collect();
    if !told.is_empty() {
        return told;
    }
    let text = name.to_string();
    let behind_services = endpoints(state).filter(|endpoint| endpoint.target_pod() == text);
    let mut ends: Vec<End> = behind_services
        .flat_map(|endpoint| {
            let addresses = endpoint.addresses();
            addresses.map(move |address| end(address, endpoint.node_name()))
        })
        .collect();
    ends.sort_by_key(|end| end.address);
    ends.dedup();
    ends
}

fn endpoints(state: &DesiredState) -> impl Iterator<Item = slice::Endpoint<'_>> {
    let slices = state.endpoint_slices.iter();
    slices.flat_map(|(_, slice)| slice.endpoints())
}

/// Whoever has an address.
#[must_use]
pub(super) fn at(view: &View<'_>, state: &DesiredState, address: IpAddr) -> End {
    let named = |name: String, node: Option<String>, is_pod| End {
        name,
        address,
        node,
        is_pod,
    };
    if let Some((_, pod)) = view.locals.pod_at(address) {
        let name = pod.name.as_ref();
        let name = name.map_or_else(|| address.to_string(), ToString::to_string);
        return named(name, Some(view.locals.node_name.clone()), true);
    }
    let text = address.to_string();
    let mut peers = view.peers.iter();
    if let Some((name, peer)) =
        peers.find(|(name, peer)| !name.namespace.is_empty() && peer.addresses.contains(&text))
    {
        return named(name.to_string(), Some(peer.node.clone()), true);
    }
    let mut nodes = state.nodes.values();
    if let Some(node) = nodes.find(|node| node.internal_ips.contains(&text)) {
        let name = format!("node/{}", node.name);
        return named(name, Some(node.name.clone()), false);
    }
    if view.locals.node_addresses.contains(&address) {
        return named(text, Some(view.locals.node_name.clone()), false);
    }
    // A pod of which this node is not told.
    let is_in = |range: &String| {
        let range = range.parse::<IpNetwork>();
        range.is_ok_and(|range| range.contains(address))
    };
    let mut nodes = state.nodes.values();
    match nodes.find(|node| node.pod_cidrs.iter().any(is_in)) {
        Some(node) => {
            let mut endpoints = endpoints(state);
            let known = endpoints.find(|endpoint| {
                !endpoint.target_pod().is_empty() && endpoint.addresses().any(|own| own == address)
            });
            let name = known.map_or(text, |endpoint| endpoint.target_pod().to_owned());
            named(name, Some(node.name.clone()), true)
        }
        None => named(text, None, false),
    }
}

/// Where packets from an end to a name and port go: policies are asked after services are translated. None when the two have
/// no addresses of one family.
///
/// # Errors
/// That nobody is known by the name, or takes the port.
pub(super) fn targets(
    view: &View<'_>,
    state: &DesiredState,
    services: &dyn ServiceTables,
    source: &End,
    asked: &Asked<'_>,
) -> Result<Vec<Target>, String> {
    let v4 = source.address.is_ipv4();
    let (port, protocol) = (asked.port, asked.protocol(v4));
    let service = asked.to.strip_prefix(SERVICE);
    let mut ends = match service {
        Some(name) => match service_ends(view, state, name, asked, protocol)? {
            Service::Addresses(ends) => ends,
            Service::Headless(targets) => return Ok(targets),
        },
        None => find(view, state, asked.to)?,
    };
    ends.retain(|end| end.address.is_ipv4() == v4);
    // Clients of the cluster are led by their own node, all others by the one that they ask.
    let outside = source.node.is_none() && !view.locals.node_addresses.contains(&source.address);
    let mut targets = Vec::new();
    let mut refused = None;
    for end in ends {
        let destination = SocketAddr::new(end.address, port);
        let led = if end.is_pod {
            Led::Direct
        } else {
            services.lead(destination, protocol, outside)?
        };
        let what = port_text(protocol, port);
        match led {
            Led::Direct if service.is_some() => {
                let why = format!("this node serves no {what} at {}", end.address);
                refused = Some(format!("{why}: weirctl services says more"));
            }
            Led::Direct => targets.push(Target {
                end,
                port,
                through: None,
            }),
            Led::Refused => {
                let address = end.address;
                refused = Some(format!(
                    "{address} is an address of services, and none has {what} there: the node answers itself"
                ));
            }
            Led::Service { owner, backends } => {
                if backends.is_empty() {
                    refused = Some(format!(
                        "{owner} has no ready backend for {what} at {}",
                        end.address
                    ));
                }
                targets.extend(backends.iter().map(|backend| Target {
                    end: at(view, state, backend.ip()),
                    port: backend.port(),
                    through: Some(format!("{owner}, asked at {destination}")),
                }));
            }
        }
    }
    match refused {
        Some(why) if targets.is_empty() => Err(why),
        _ => Ok(targets),
    }
}

/// What a Service's name stands for.
enum Service {
    /// Its cluster addresses.
    Addresses(Vec<End>),
    /// Its ready endpoints: DNS tells clients of them.
    Headless(Vec<Target>),
}

fn service_ends(
    view: &View<'_>,
    state: &DesiredState,
    text: &str,
    asked: &Asked<'_>,
    protocol: u8,
) -> Result<Service, String> {
    let (namespace, name) = text
        .split_once('/')
        .filter(|(_, name)| !name.contains('/'))
        .ok_or_else(|| format!("{:?} is not svc/namespace/name", asked.to))?;
    let name = Name::new(namespace, name);
    let known = state
        .services
        .get(&name)
        .ok_or_else(|| format!("this node knows no service {name}"))?;
    let same = |other: Protocol| i32::from(other) == i32::from(protocol);
    let what = port_text(protocol, asked.port);
    let service_port = known
        .ports
        .iter()
        .find(|own| own.port == u32::from(asked.port) && same(own.protocol()))
        .ok_or_else(|| format!("service {name} has no port {what}"))?;
    let addresses = known
        .cluster_ips
        .iter()
        .filter_map(|text| text.parse().ok());
    let ends: Vec<End> = addresses
        .map(|address| End {
            name: asked.to.into(),
            address,
            node: None,
            is_pod: false,
        })
        .collect();
    if !ends.is_empty() {
        return Ok(Service::Addresses(ends));
    }
    let mut targets = Vec::new();
    for slice in state.slices_of(&name) {
        let Some(own) = slice
            .ports
            .iter()
            .find(|own| own.name == service_port.name && same(own.protocol()))
        else {
            continue;
        };
        for endpoint in slice.endpoints().filter(|endpoint| endpoint.ready()) {
            targets.extend(endpoint.addresses().map(|address| Target {
                end: at(view, state, address),
                port: u16::try_from(own.port).unwrap_or(0),
                through: None,
            }));
        }
    }
    if targets.is_empty() {
        return Err(format!("service {name} has no ready backend for {what}"));
    }
    Ok(Service::Headless(targets))
}
