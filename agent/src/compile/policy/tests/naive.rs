//! What policies mean, read from the feed's objects one by one for each packet.

use std::net::IpAddr;

use control_api::desired::Name;
use control_api::v1::{
    PolicyAction, PolicyPeer, PolicyRule, PolicyRulePort, PolicyTier, policy_rule_peer,
};
use ipnetwork::IpNetwork;

use super::world::{NODE, World};
use crate::compile::policy::{Direction, Packet};

/// Whether the pods of this node, of those that have an end of the packet, let it pass: source, then destination.
pub(super) fn verdict(world: &World, packet: &Packet) -> [Option<bool>; 2] {
    [
        (Direction::Egress, packet.source, packet.destination),
        (Direction::Ingress, packet.destination, packet.source),
    ]
    .map(|(direction, own, other)| {
        let (_, pod) = world.locals.pod_at(own)?;
        if world.locals.node_addresses.contains(&other) {
            return Some(true);
        }
        let Some(name) = &pod.name else {
            return Some(true);
        };
        let peer = world.state.policy_peers.get(name);
        let known = peer.filter(|p| pod.uid.is_empty() || p.uid.is_empty() || pod.uid == p.uid);
        Some(known.is_some_and(|peer| allows(world, peer, direction, other, packet)))
    })
}

fn allows(
    world: &World,
    pod: &PolicyPeer,
    direction: Direction,
    other: IpAddr,
    packet: &Packet,
) -> bool {
    let mut policies = Vec::new();
    for name in &pod.policies {
        let name = Name::new(&name.namespace, &name.name);
        match world.state.policies.get(&name) {
            Some(policy) if policy.staged => {}
            Some(policy) => policies.push(policy),
            // Not told: nobody may pass.
            None => return false,
        }
    }
    policies.sort_by_key(|p| (p.priority, p.name.clone()));
    let first_match = |tier: PolicyTier| {
        let of_tier = policies.iter().filter(|p| p.tier() == tier);
        let rules = of_tier.flat_map(|p| rules(p, direction));
        let mut matching = rules.filter(|rule| matches(world, rule, pod, direction, other, packet));
        matching.next().map(PolicyRule::action)
    };
    match first_match(PolicyTier::Admin) {
        Some(PolicyAction::Allow) => return true,
        Some(PolicyAction::Deny) => return false,
        _ => {}
    }
    let isolating = |policy: &&control_api::v1::Policy| match direction {
        Direction::Ingress => policy.isolates_ingress,
        Direction::Egress => policy.isolates_egress,
    };
    let mut isolated = policies.iter().copied().filter(isolating).peekable();
    if isolated.peek().is_some() {
        // NetworkPolicy does not keep a pod from itself.
        return packet.source == packet.destination
            || isolated
                .flat_map(|policy| rules(policy, direction))
                .any(|rule| matches(world, rule, pod, direction, other, packet));
    }
    first_match(PolicyTier::Baseline) != Some(PolicyAction::Deny)
}

fn rules(policy: &control_api::v1::Policy, direction: Direction) -> &[PolicyRule] {
    match direction {
        Direction::Ingress => &policy.ingress,
        Direction::Egress => &policy.egress,
    }
}

fn matches(
    world: &World,
    rule: &PolicyRule,
    pod: &PolicyPeer,
    direction: Direction,
    other: IpAddr,
    packet: &Packet,
) -> bool {
    let owner = owner(world, other);
    let peer_matches = rule.any_peer
        || rule.peers.iter().any(|peer| match &peer.kind {
            Some(policy_rule_peer::Kind::Set(set)) => {
                owner.is_some_and(|owner| owner.sets.contains(&set.id))
            }
            Some(policy_rule_peer::Kind::IpBlock(block)) => {
                let inside = |cidr: &String| cidr.parse::<IpNetwork>().unwrap().contains(other);
                inside(&block.cidr) && !block.except.iter().any(inside)
            }
            Some(policy_rule_peer::Kind::DomainName(pattern)) => {
                world.domains.iter().any(|(name, mut addresses)| {
                    let named = match pattern.strip_prefix('*') {
                        Some(suffix) => name.ends_with(suffix),
                        None => name == pattern,
                    };
                    named && addresses.any(|(address, _)| address == other)
                })
            }
            None => false,
        });
    let destination = match direction {
        Direction::Ingress => Some(pod),
        Direction::Egress => owner,
    };
    let port = |port: &PolicyRulePort| port_matches(port, destination, packet);
    peer_matches && (rule.any_port || rule.ports.iter().any(port))
}

fn port_matches(port: &PolicyRulePort, destination: Option<&PolicyPeer>, packet: &Packet) -> bool {
    let own_protocol = i32::from(packet.protocol);
    if !port.name.is_empty() {
        let named = destination.into_iter().flat_map(|peer| &peer.named_ports);
        return named.into_iter().any(|named| {
            named.name == port.name
                && named.protocol == own_protocol
                && (port.protocol == 0 || port.protocol == own_protocol)
                && named.port == u32::from(packet.port)
        });
    }
    let range = if (port.first, port.last) == (0, 0) {
        0..=65535
    } else {
        port.first..=port.last
    };
    port.protocol == own_protocol && range.contains(&u32::from(packet.port))
}

/// Whose an address is: an attached pod's first, else the youngest one's that claims it.
fn owner(world: &World, address: IpAddr) -> Option<&PolicyPeer> {
    let is_local = |peer: &PolicyPeer| !peer.namespace.is_empty() && peer.node == NODE;
    let claims = |peer: &&PolicyPeer| {
        if is_local(peer) {
            world.locals.pods.values().any(|pod| {
                pod.addresses.contains(&address)
                    && pod.name == Some(Name::new(&peer.namespace, &peer.name))
                    && (pod.uid.is_empty() || peer.uid.is_empty() || pod.uid == peer.uid)
            })
        } else {
            peer.addresses.contains(&address.to_string())
        }
    };
    world
        .state
        .policy_peers
        .values()
        .filter(claims)
        .max_by_key(|p| {
            (
                is_local(p),
                p.created_at_us,
                p.namespace.clone(),
                p.name.clone(),
            )
        })
}
