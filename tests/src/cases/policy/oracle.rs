//! What policies mean, read off the objects as users write them, rule by rule. Slow and obvious on purpose: it shares
//! nothing with the product and is what the product is compared with. Pure.
//!
//! Rules of NetworkPolicy: the API reference of networking.k8s.io/v1; of ClusterNetworkPolicy: policy.networking.k8s.io
//! v1alpha2 (unknown peers and the pod's own Service included).

use std::net::IpAddr;

use anyhow::{Result, ensure};
use serde_json::Value;

use super::case::{Labels, Query};
use super::world::{Pod, World};
use crate::actor::command::Protocol;
use crate::cases::cluster::spec::cidr_holds;

/// A packet after the translation of Services.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packet {
    pub(super) source: IpAddr,
    pub(super) destination: IpAddr,
    /// Zero for protocols without ports.
    pub(super) port: u16,
    pub(super) protocol: Protocol,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Ingress,
    Egress,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Allow,
    Deny,
    /// The tier says nothing more.
    Pass,
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Would a query's packets pass? Every destination that a Service may choose has to agree.
///
/// # Errors
/// When the query names something that is not there, or backends differ.
pub(super) fn allows(world: &World, query: &Query) -> Result<bool> {
    let mut verdicts = Vec::new();
    for (to, port) in world.destinations(query)? {
        let (source, destination) = world.ends(query, &to)?;
        let packet = Packet {
            source,
            destination,
            port,
            protocol: query.protocol,
        };
        let by_service = query.to.starts_with("svc:");
        verdicts.push(passes(world, &query.from, &to, packet, by_service));
    }
    verdicts.dedup();
    ensure!(verdicts.len() == 1, "backends of {query} differ: name one");
    Ok(verdicts[0])
}

fn passes(world: &World, from: &str, to: &str, packet: Packet, by_service: bool) -> bool {
    let own = from == to || (world.pod(from).is_some() && packet.source == packet.destination);
    if own && !by_service {
        return true;
    }
    let judged = |subject: &str, peer: &str, direction| {
        let Some(pod) = world.pod(subject) else {
            return true;
        };
        // A pod and its own node, host-network pods included, always reach each other.
        let is_own_node =
            world.pod(peer).is_none() && world.node_of(peer) == Some(pod.spec.node.as_str());
        is_own_node || judge(world, pod, packet, direction, own)
    };
    judged(from, to, Direction::Egress) && judged(to, from, Direction::Ingress)
}

/// One direction of one pod. A pod that comes back to itself through a Service is not bound by NetworkPolicy.
fn judge(world: &World, pod: &Pod, packet: Packet, direction: Direction, own: bool) -> bool {
    match tier(world, pod, packet, direction, "Admin") {
        Verdict::Allow => return true,
        Verdict::Deny => return false,
        Verdict::Pass => {}
    }
    let isolating: Vec<&Value> = world
        .policies
        .iter()
        .filter(|((kind, namespace, _), _)| {
            kind == "NetworkPolicy" && *namespace == pod.spec.namespace
        })
        .map(|(_, policy)| policy)
        .filter(|policy| {
            is_active(policy) && selects(&policy["spec"]["podSelector"], &pod.spec.labels)
        })
        .filter(|policy| has_type(&policy["spec"], direction))
        .collect();
    if !isolating.is_empty() {
        let allowed = |policy: &&Value| allows_one(world, policy, packet, direction);
        return own || isolating.iter().any(allowed);
    }
    tier(world, pod, packet, direction, "Baseline") != Verdict::Deny
}

/// Staged policies report only.
fn is_active(policy: &Value) -> bool {
    policy["metadata"]["annotations"]["weir.dev/staged"] != "true"
}

fn has_type(spec: &Value, direction: Direction) -> bool {
    let types = list(&spec["policyTypes"]);
    if types.is_empty() {
        return direction == Direction::Ingress || !list(&spec["egress"]).is_empty();
    }
    let wanted = match direction {
        Direction::Ingress => "Ingress",
        Direction::Egress => "Egress",
    };
    types.iter().any(|t| t == wanted)
}

fn allows_one(world: &World, policy: &Value, packet: Packet, direction: Direction) -> bool {
    let namespace = text(&policy["metadata"]["namespace"]);
    let (rules, peers) = match direction {
        Direction::Ingress => (&policy["spec"]["ingress"], "from"),
        Direction::Egress => (&policy["spec"]["egress"], "to"),
    };
    list(rules).iter().any(|rule| {
        let (peers, ports) = (list(&rule[peers]), list(&rule["ports"]));
        let peer_matches = |peer: &Value| peer_of_rule(world, namespace, peer, packet, direction);
        let port_matches = |port: &Value| port_of_rule(world, port, packet);
        (peers.is_empty() || peers.iter().any(peer_matches))
            && (ports.is_empty() || ports.iter().any(port_matches))
    })
}

/// The other end.
fn other(packet: Packet, direction: Direction) -> IpAddr {
    match direction {
        Direction::Ingress => packet.source,
        Direction::Egress => packet.destination,
    }
}

fn peer_of_rule(
    world: &World,
    namespace: &str,
    peer: &Value,
    packet: Packet,
    direction: Direction,
) -> bool {
    let address = other(packet, direction);
    let (pods, namespaces, block) = (
        &peer["podSelector"],
        &peer["namespaceSelector"],
        &peer["ipBlock"],
    );
    if !block.is_null() {
        let lone = pods.is_null() && namespaces.is_null();
        let cut = list(&block["except"])
            .iter()
            .any(|hole| cidr_holds(text(hole), address));
        return lone && cidr_holds(text(&block["cidr"]), address) && !cut;
    }
    if pods.is_null() && namespaces.is_null() {
        // An empty item is refused by the API; it names nobody.
        return false;
    }
    let Some(pod) = world.owner(address) else {
        return false;
    };
    let there = if namespaces.is_null() {
        pod.spec.namespace == namespace
    } else {
        in_namespace(world, namespaces, pod)
    };
    there && (pods.is_null() || selects(pods, &pod.spec.labels))
}

fn in_namespace(world: &World, selector: &Value, pod: &Pod) -> bool {
    let labels = world.namespaces.get(&pod.spec.namespace);
    labels.is_some_and(|labels| selects(selector, labels))
}

fn port_of_rule(world: &World, item: &Value, packet: Packet) -> bool {
    let protocol = item["protocol"].as_str().unwrap_or("TCP");
    if protocol != packet.protocol.name() {
        return false;
    }
    let port = u64::from(packet.port);
    match &item["port"] {
        Value::Null => item["endPort"].is_null(),
        Value::String(name) => {
            let pod = world.owner(packet.destination);
            let found = pod.map(|p| p.named_port(name, Some(packet.protocol)));
            // Only the first port of a name and protocol counts.
            let first = found.and_then(|all| all.first().map(|(number, _)| *number));
            first == Some(packet.port)
        }
        number => {
            let first = number.as_u64().unwrap_or(u64::MAX);
            let last = item["endPort"].as_u64().unwrap_or(first);
            (first..=last).contains(&port)
        }
    }
}

/// What a tier of ClusterNetworkPolicies says: the first rule that matches, in the order of priorities, names and rules.
fn tier(world: &World, pod: &Pod, packet: Packet, direction: Direction, tier: &str) -> Verdict {
    let in_tier = |((kind, _, _), policy): &(&(String, String, String), &Value)| {
        kind == "ClusterNetworkPolicy" && policy["spec"]["tier"] == tier && is_active(policy)
    };
    let mut policies: Vec<(i64, &str, &Value)> = world
        .policies
        .iter()
        .filter(in_tier)
        .map(|((_, _, name), policy)| {
            let spec = &policy["spec"];
            (spec["priority"].as_i64().unwrap_or(0), name.as_str(), spec)
        })
        .filter(|(_, _, spec)| is_subject(world, &spec["subject"], pod))
        .collect();
    policies.sort_by_key(|(priority, name, _)| (*priority, *name));
    let (rules, peers) = match direction {
        Direction::Ingress => ("ingress", "from"),
        Direction::Egress => ("egress", "to"),
    };
    for (_, _, spec) in policies {
        for rule in list(&spec[rules]) {
            if let Some(verdict) = rule_of_tier(world, rule, peers, packet, direction) {
                return verdict;
            }
        }
    }
    Verdict::Pass
}

fn rule_of_tier(
    world: &World,
    rule: &Value,
    peers: &str,
    packet: Packet,
    direction: Direction,
) -> Option<Verdict> {
    let verdict = match text(&rule["action"]) {
        "Accept" => Verdict::Allow,
        "Deny" => Verdict::Deny,
        "Pass" => Verdict::Pass,
        _ => return None,
    };
    let peers = list(&rule[peers]);
    if peers.iter().any(|peer| !is_known_peer(peer, direction)) {
        // Fail closed: such a rule accepts nothing, or denies everything.
        return (verdict != Verdict::Allow).then_some(Verdict::Deny);
    }
    let peer_matches = peers
        .iter()
        .any(|peer| peer_of_tier(world, peer, other(packet, direction)));
    let protocols = list(&rule["protocols"]);
    let protocol_matches = protocols.is_empty()
        || protocols
            .iter()
            .any(|item| protocol_of_rule(world, item, packet));
    (peer_matches && protocol_matches).then_some(verdict)
}

fn is_known_peer(peer: &Value, direction: Direction) -> bool {
    let everywhere = ["namespaces", "pods"].iter();
    let outwards = ["nodes", "networks", "domainNames"].iter();
    let outwards = outwards.take(if direction == Direction::Egress { 3 } else { 0 });
    everywhere
        .chain(outwards)
        .any(|kind| !peer[*kind].is_null())
}

fn peer_of_tier(world: &World, peer: &Value, address: IpAddr) -> bool {
    if let Some(pod) = world.owner(address) {
        if !peer["namespaces"].is_null() && in_namespace(world, &peer["namespaces"], pod) {
            return true;
        }
        let pods = &peer["pods"];
        if !pods.is_null()
            && in_namespace(world, &pods["namespaceSelector"], pod)
            && selects(&pods["podSelector"], &pod.spec.labels)
        {
            return true;
        }
    }
    if list(&peer["networks"])
        .iter()
        .any(|net| cidr_holds(text(net), address))
    {
        return true;
    }
    !peer["nodes"].is_null()
        && world.nodes.values().any(|node| {
            let mut labels = node.labels.clone();
            labels.insert("kubernetes.io/hostname".into(), node.name.clone());
            node.ips.contains(&address) && selects(&peer["nodes"], &labels)
        })
}

fn protocol_of_rule(world: &World, item: &Value, packet: Packet) -> bool {
    if let Some(name) = item["destinationNamedPort"].as_str() {
        let pod = world.owner(packet.destination);
        let all = pod.map(|p| p.named_port(name, None)).unwrap_or_default();
        return all.contains(&(packet.port, packet.protocol));
    }
    let rule = match packet.protocol {
        Protocol::Tcp => &item["tcp"],
        Protocol::Udp => &item["udp"],
        Protocol::Sctp => &item["sctp"],
        Protocol::Icmp => &Value::Null,
    };
    if rule.is_null() {
        return false;
    }
    let (port, wanted) = (u64::from(packet.port), &rule["destinationPort"]);
    if let Some(number) = wanted["number"].as_u64() {
        return number == port;
    }
    let range = &wanted["range"];
    match (range["start"].as_u64(), range["end"].as_u64()) {
        (Some(start), Some(end)) => (start..=end).contains(&port),
        _ => wanted.is_null(),
    }
}

fn is_subject(world: &World, subject: &Value, pod: &Pod) -> bool {
    let (namespaces, pods) = (&subject["namespaces"], &subject["pods"]);
    if !namespaces.is_null() {
        return in_namespace(world, namespaces, pod);
    }
    !pods.is_null()
        && in_namespace(world, &pods["namespaceSelector"], pod)
        && selects(&pods["podSelector"], &pod.spec.labels)
}

/// A LabelSelector: everything it says has to hold; one that says nothing holds.
fn selects(selector: &Value, labels: &Labels) -> bool {
    let pairs = selector["matchLabels"].as_object();
    let equal =
        |(key, value): (&String, &Value)| labels.get(key).map(String::as_str) == value.as_str();
    pairs.into_iter().flatten().all(equal)
        && list(&selector["matchExpressions"])
            .iter()
            .all(|e| holds(e, labels))
}

fn holds(expression: &Value, labels: &Labels) -> bool {
    let label = labels.get(text(&expression["key"]));
    let among = |value: &String| list(&expression["values"]).iter().any(|v| v == value);
    match text(&expression["operator"]) {
        "In" => label.is_some_and(among),
        "NotIn" => !label.is_some_and(among),
        "Exists" => label.is_some(),
        "DoesNotExist" => label.is_none(),
        _ => false,
    }
}
