//! What a case needs of namespaces: segments, ranges of pods, listeners on every probed port. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::Result;
use serde_json::Map;
use weir_control::config::Network;

use super::case::{Change, Expectation, HostSpec, PodSpec, Query, Traffic};
use super::world::{Pod, World};
use crate::actor::command::Protocol;
use crate::cases::cluster::Layout;
use crate::cases::cluster::spec::{self, Listen, Segment};

/// Ports to listen on, by the reference of who does.
pub(super) type Listeners = BTreeMap<String, BTreeSet<(u16, u8)>>;

const PROTOCOLS: [Protocol; 3] = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp];

/// The network of an address that a segment has.
fn network_of(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(a) => Ipv4Addr::from(u32::from(a) & !0xff).into(),
        IpAddr::V6(a) => Ipv6Addr::from(u128::from(a) >> 64 << 64).into(),
    }
}

/// Segments that hold the addresses of all hosts: one for each pair of networks that a host is the first of.
fn segments(hosts: &[&HostSpec]) -> Vec<Segment> {
    let mut all: Vec<Segment> = Vec::new();
    for host in hosts {
        let homeless: Vec<IpAddr> = host
            .ips
            .iter()
            .copied()
            .filter(|ip| !all.iter().any(|s| s.holds(*ip)))
            .collect();
        if homeless.is_empty() {
            continue;
        }
        let number = u16::try_from(all.len()).unwrap_or(u16::MAX);
        let [high, low] = number.to_be_bytes();
        let mut segment = Segment {
            name: format!("s{number}"),
            // Of a family that the host has not: a network that nobody speaks of.
            v4: Ipv4Addr::new(100, 96 | high, low, 0),
            v6: Ipv6Addr::new(0xfd77, number, 0, 0, 0, 0, 0, 0),
            path_mtu: None,
        };
        for ip in homeless {
            match network_of(ip) {
                IpAddr::V4(v4) => segment.v4 = v4,
                IpAddr::V6(v6) => segment.v6 = v6,
            }
        }
        all.push(segment);
    }
    all
}

fn home_of(host: &HostSpec, segments: &[Segment]) -> String {
    let holds = |s: &&Segment| host.ips.iter().any(|ip| s.holds(*ip));
    segments
        .iter()
        .find(holds)
        .map_or_else(String::new, |s| s.name.clone())
}

/// Every pod that the case has or makes.
fn pods_of(case: &Traffic) -> impl Iterator<Item = &PodSpec> {
    let made = case
        .steps
        .iter()
        .flat_map(|s| &s.changes)
        .filter_map(|c| match c {
            Change::CreatePod(spec) => Some(spec),
            _ => None,
        });
    case.pods.iter().chain(made)
}

/// Ranges of a node's pods: whole networks, or single addresses where another node has pods in the same network.
fn pod_cidrs(case: &Traffic, node: &str) -> Vec<String> {
    let own = |p: &&PodSpec| !p.host_network;
    let mut cidrs = BTreeSet::new();
    for ip in pods_of(case)
        .filter(own)
        .filter(|p| p.node == node)
        .flat_map(|p| &p.ips)
    {
        let network = network_of(*ip);
        let mut others = pods_of(case).filter(own).filter(|p| p.node != node);
        let shared = others.any(|p| p.ips.iter().any(|other| network_of(*other) == network));
        cidrs.insert(match (shared, ip.is_ipv4()) {
            (false, true) => format!("{network}/{}", spec::V4_PREFIX),
            (false, false) => format!("{network}/{}", spec::V6_PREFIX),
            (true, true) => format!("{ip}/32"),
            (true, false) => format!("{ip}/128"),
        });
    }
    cidrs.into_iter().collect()
}

/// The world of a case, without its pods.
pub(super) fn layout(case: &Traffic) -> Layout {
    let hosts: Vec<&HostSpec> = case.nodes.iter().chain(&case.externals).collect();
    let segments = segments(&hosts);
    let node = |host: &HostSpec| spec::NodeSpec {
        name: host.name.clone(),
        segment: home_of(host, &segments),
        zone: None,
        ips: Some(host.ips.clone()),
        also: Vec::new(),
        pod_cidrs: Some(pod_cidrs(case, &host.name)),
        joined: true,
    };
    let external = |host: &HostSpec| spec::ExternalSpec {
        name: host.name.clone(),
        segment: home_of(host, &segments),
        ips: Some(host.ips.clone()),
        owns: Vec::new(),
        listen: Vec::new(),
        routes: Vec::new(),
    };
    let nodes: Vec<spec::NodeSpec> = case.nodes.iter().map(node).collect();
    let nets = |texts: &BTreeSet<String>| texts.iter().filter_map(|t| t.parse().ok()).collect();
    let pods = nodes
        .iter()
        .flat_map(|n| n.pod_cidrs.clone().unwrap_or_default())
        .collect();
    let virtual_ips = case
        .services
        .iter()
        .map(|s| s.cluster_ip.to_string())
        .collect();
    Layout {
        externals: case.externals.iter().map(external).collect(),
        network: Network {
            pod_cidrs: nets(&pods),
            service_cidrs: nets(&virtual_ips),
            ..Network::default()
        },
        segments,
        nodes,
        pods: Vec::new(),
        options: Map::new(),
    }
}

/// Who has to listen where, over all of the case: only then silence means a drop.
///
/// # Errors
/// When the case speaks of things that are not there.
pub(super) fn listeners(case: &Traffic) -> Result<Listeners> {
    let mut all = Listeners::new();
    let mut world = World::new(case)?;
    listen_for(&world, &case.expectations, &mut all)?;
    for step in &case.steps {
        for change in &step.changes {
            world.change(change)?;
            if let Change::OpenFlow(flow) = change {
                add(&world, &flow.query(), &mut all)?;
            }
        }
        listen_for(&world, &step.expectations, &mut all)?;
    }
    Ok(all)
}

fn listen_for(world: &World, expectations: &[Expectation], all: &mut Listeners) -> Result<()> {
    for expectation in expectations {
        if let Expectation::Verdict { query, .. } = expectation {
            add(world, query, all)?;
        }
    }
    Ok(())
}

fn add(world: &World, query: &Query, all: &mut Listeners) -> Result<()> {
    let protocol = PROTOCOLS.iter().position(|p| *p == query.protocol);
    let Some(protocol) = protocol.and_then(|p| u8::try_from(p).ok()) else {
        return Ok(());
    };
    for (to, port) in world.destinations(query)? {
        all.entry(to).or_default().insert((port, protocol));
    }
    Ok(())
}

/// The ports of one listener; SCTP only where the host has it.
pub(super) fn listen(all: &Listeners, reference: &str, sctp: bool) -> Vec<Listen> {
    let ports = all.get(reference).into_iter().flatten();
    let listen = |(port, protocol): &(u16, u8)| Listen {
        port: *port,
        protocol: PROTOCOLS[usize::from(*protocol)],
        name: String::new(),
    };
    ports
        .map(listen)
        .filter(|l| sctp || l.protocol != Protocol::Sctp)
        .collect()
}

/// A pod as the world on namespaces makes it.
pub(super) fn pod_spec(pod: &Pod, listeners: &Listeners, sctp: bool) -> spec::PodSpec {
    let own = &pod.spec;
    let reference = format!("{}/{}", own.namespace, own.name);
    spec::PodSpec {
        name: own.name.clone(),
        namespace: own.namespace.clone(),
        node: own.node.clone(),
        labels: own.labels.clone(),
        listen: listen(listeners, &reference, sctp),
        host_ports: Vec::new(),
        ready: own.ready.unwrap_or(true),
        terminating: own.deletion_timestamp.is_some(),
        host_network: own.host_network,
        present: true,
        wanted_ips: if own.host_network {
            Vec::new()
        } else {
            own.ips.clone()
        },
        api: Some(World::pod_object(pod, true)),
    }
}
