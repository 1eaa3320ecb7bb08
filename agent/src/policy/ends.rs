//! What people call the ends of a packet: `namespace/pod`, `node/NAME`, `svc/namespace/name`, an address, or a domain name of
//! a rule.

use std::fmt;
use std::net::IpAddr;

use control_api::desired::{DesiredState, Name};
use control_api::v1::Protocol;

use super::View;

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
}

/// `TO:PORT[/PROTO]`, cut. IPv6 addresses stand in brackets.
///
/// # Errors
/// What is missing.
pub(super) fn cut(text: &str) -> Result<(&str, u16, u8), String> {
    let (to, rest) = text
        .rsplit_once(':')
        .ok_or_else(|| format!("{text:?} names no port: write TO:PORT or TO:PORT/PROTOCOL"))?;
    let (port, protocol) = rest.split_once('/').unwrap_or((rest, "tcp"));
    let port = port
        .parse()
        .map_err(|_| format!("{port:?} is not a port (0 to 65535)"))?;
    let to = to.strip_prefix('[').unwrap_or(to);
    let to = to.strip_suffix(']').unwrap_or(to);
    Ok((to, port, protocol_number(protocol)?))
}

fn protocol_number(text: &str) -> Result<u8, String> {
    match text.to_ascii_lowercase().as_str() {
        "tcp" => Ok(6),
        "udp" => Ok(17),
        "sctp" => Ok(132),
        "icmp" => Ok(1),
        "icmpv6" => Ok(58),
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
        pod(view, &Name::new(namespace, name))
    };
    if ends.is_empty() {
        return Err(format!(
            "this node knows no address of {text}: it is told only of its own pods and of those that its policies speak of; try the address"
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

fn pod(view: &View<'_>, name: &Name) -> Vec<End> {
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
    told.collect()
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
    match nodes.find(|node| node.internal_ips.contains(&text)) {
        Some(node) => named(
            format!("node/{}", node.name),
            Some(node.name.clone()),
            false,
        ),
        None => named(text, None, false),
    }
}

/// Where packets to a name and port go: policies are asked after services are translated.
///
/// # Errors
/// That nobody is known by the name, or takes the port.
pub(super) fn targets(
    view: &View<'_>,
    state: &DesiredState,
    to: &str,
    port: u16,
    protocol: u8,
) -> Result<Vec<Target>, String> {
    let Some(service) = to.strip_prefix(SERVICE) else {
        let ends = find(view, state, to)?.into_iter();
        return Ok(ends.map(|end| Target { end, port }).collect());
    };
    let (namespace, name) = service
        .split_once('/')
        .ok_or_else(|| format!("{to:?} is not svc/namespace/name"))?;
    let name = Name::new(namespace, name);
    let known = state
        .services
        .get(&name)
        .ok_or_else(|| format!("this node knows no service {name}"))?;
    let same = |other: Protocol| i32::from(other) == i32::from(protocol);
    let service_port = known
        .ports
        .iter()
        .find(|own| own.port == u32::from(port) && same(own.protocol()))
        .ok_or_else(|| format!("service {name} has no port {port} of that protocol"))?;
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
            }));
        }
    }
    if targets.is_empty() {
        return Err(format!(
            "service {name} has no ready backend for port {port}"
        ));
    }
    Ok(targets)
}
