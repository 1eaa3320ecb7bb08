//! Why a packet may pass or not, from the judge that the programs have, on what is in their tables.

use std::net::IpAddr;

use control_api::desired::Name;
use control_api::v1::{PolicyRule, PolicyRulePort, policy_rule_peer};
use serde::{Deserialize, Serialize};

use super::View;
use super::ends::End;
use crate::compile::policy::{
    Direction, Judgement, Packet, Peers, PortPrefix, Rule, RuleSet, Tier, Verdict, ports, verdict,
};

/// More rules that say nothing of a packet are counted, not listed.
const MAX_LISTED: usize = 50;

/// What becomes of one packet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explanation {
    pub from: String,
    pub to: String,
    /// As in «80/TCP».
    pub port: String,
    /// As far as this node judges it: see `undecided`.
    pub allowed: bool,
    /// What other nodes have to say of it, as in «node n2 decides ingress». Empty when this node denies it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub undecided: Vec<String>,
    /// The Service that leads there, and where it was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub through: Option<String>,
    /// Names of rules for which DNS answers gave the destination's address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<String>,
    /// Egress of the source, ingress of the destination.
    pub directions: Vec<DirectionReport>,
}

/// What one end says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectionReport {
    pub direction: String,
    /// Whose policies are asked.
    pub pod: String,
    /// `allowed`, `denied`, `not judged`, or `judged elsewhere`.
    pub verdict: String,
    pub reason: String,
    /// Policies that close the pod in this direction but for what rules allow.
    pub isolated_by: Vec<String>,
    /// The rule that decides.
    pub rule: Option<String>,
    /// What every other rule lacked.
    pub lacking: Vec<String>,
}

/// Explains a packet between two ends. `through`: the Service that leads it to `to`.
#[must_use]
pub(super) fn explain(
    view: &View<'_>,
    from: &End,
    to: &End,
    (protocol, port): (u8, u16),
    through: Option<String>,
) -> Explanation {
    let packet = Packet {
        source: from.address,
        destination: to.address,
        protocol,
        port,
    };
    let said = if from.address == to.address && through.is_none() {
        // It does not leave the pod.
        Verdict {
            egress: Some(Judgement::Exempt),
            ingress: Some(Judgement::Exempt),
        }
    } else {
        verdict(view.compiled, view.locals, &packet)
    };
    let directions = vec![
        direction(view, Direction::Egress, from, to, &packet, said.egress),
        direction(view, Direction::Ingress, to, from, &packet, said.ingress),
    ];
    let allowed = said.allows();
    let judges = [(from, said.egress), (to, said.ingress)];
    let undecided = judges
        .iter()
        .zip([Direction::Egress, Direction::Ingress])
        .filter(|((_, said), _)| allowed && said.is_none())
        .filter_map(|((end, _), direction)| {
            let node = elsewhere(view, end)?;
            Some(format!("node {node} decides {}", direction.name()))
        });
    Explanation {
        from: from.to_string(),
        to: to.to_string(),
        port: port_text(protocol, port),
        allowed,
        undecided: undecided.collect(),
        through,
        names: view
            .domains
            .names_of(to.address)
            .map(str::to_owned)
            .collect(),
        directions,
    }
}

fn direction(
    view: &View<'_>,
    direction: Direction,
    own: &End,
    other: &End,
    packet: &Packet,
    said: Option<Judgement>,
) -> DirectionReport {
    let mut report = DirectionReport {
        direction: direction.name().into(),
        pod: own.name.clone(),
        verdict: String::new(),
        reason: String::new(),
        isolated_by: Vec::new(),
        rule: None,
        lacking: Vec::new(),
    };
    let Some(said) = said else {
        (report.verdict, report.reason) = not_asked(view, own);
        return report;
    };
    report.verdict = if said.allows() { "allowed" } else { "denied" }.into();
    let ifindex = view
        .locals
        .pod_at(own.address)
        .map_or(0, |(index, _)| index);
    let set = view.compiled.rules_of(ifindex).map(|(_, set)| set);
    if let Some(set) = set {
        let side = &set.sides[direction as usize];
        report.isolated_by = side.isolated_by.iter().map(policy_name).collect();
    }
    report.reason = match said {
        Judgement::Exempt if own.address == other.address => "a pod always reaches itself".into(),
        Judgement::Exempt => "a pod and its own node always reach one another".into(),
        Judgement::Open => format!("no policy judges its {}", direction.name()),
        Judgement::NoRule => "no rule speaks of it, and no NetworkPolicy isolates the pod".into(),
        Judgement::Isolated => "no rule allows it to a pod that policies isolate".into(),
        Judgement::Shut => match view.compiled.why_shut(ifindex) {
            Some(why) => format!("nothing may pass to or from the pod: {why}"),
            None => "nothing may pass to or from the pod".into(),
        },
        Judgement::Rule { allow, .. } => {
            let word = if allow { "allows" } else { "denies" };
            format!("a rule {word} it")
        }
    };
    let Some(set) = set else {
        return report;
    };
    let number = match said {
        Judgement::Rule { number, .. } => {
            report.rule = set
                .rule(direction, number)
                .map(|rule| rule_text(view, direction, rule));
            Some(number)
        }
        _ => None,
    };
    if !matches!(said, Judgement::Exempt | Judgement::Open) {
        report.lacking = lacking(view, set, direction, other.address, packet, number);
    }
    report
}

/// The other node that asks the policies of a pod.
fn elsewhere<'a>(view: &View<'_>, own: &'a End) -> Option<&'a str> {
    let node = own.node.as_deref().filter(|_| own.is_pod);
    node.filter(|node| *node != view.locals.node_name)
}

/// What is said of an end whose policies this node does not ask.
fn not_asked(view: &View<'_>, own: &End) -> (String, String) {
    let (verdict, reason) = match elsewhere(view, own) {
        Some(node) => (
            "judged elsewhere",
            format!("a pod of node {node}: ask weirctl there"),
        ),
        None if own.is_pod => (
            "not judged",
            "no pod with this address is attached to this node".into(),
        ),
        None => ("not judged", "no pod: policies do not apply to it".into()),
    };
    (verdict.into(), reason)
}

/// Rules that do not decide, and why: those that come before the one that does, or all.
fn lacking(
    view: &View<'_>,
    set: &RuleSet,
    direction: Direction,
    other: IpAddr,
    packet: &Packet,
    decides: Option<u32>,
) -> Vec<String> {
    let identity = view.compiled.trie.find(other).unwrap_or(0);
    let members = view.compiled.identities.members(identity);
    let one = PortPrefix {
        protocol: packet.protocol,
        port: packet.port,
        bits: PortPrefix::ONE_PORT,
    };
    let mut lines = Vec::new();
    let mut more = 0;
    for (number, rule) in (0..).zip(&set.sides[direction as usize].rules) {
        if decides.is_some_and(|deciding| number >= deciding) {
            break;
        }
        let peer = match &rule.peers {
            Peers::Everybody => true,
            Peers::Sets(sets) => {
                members.is_some_and(|members| sets.iter().any(|set| members.sets.contains(set)))
            }
        };
        let named = match direction {
            Direction::Ingress => set.own_ports(),
            Direction::Egress => members.map_or(&[][..], |members| &members.ports),
        };
        let port = ports(rule, named).iter().any(|range| range.holds(one));
        let why = match (peer, port) {
            (true, true) => "passes it on",
            (true, false) => "the port is not among its ports",
            (false, true) => "the other end is not among its peers",
            (false, false) => "neither the other end nor the port is among its own",
        };
        if lines.len() < MAX_LISTED {
            lines.push(format!("{}: {why}", rule_text(view, direction, rule)));
        } else {
            more += 1;
        }
    }
    if more > 0 {
        lines.push(format!("and {more} more rules"));
    }
    lines
}

/// A policy with its kind.
#[must_use]
pub(super) fn policy_name(name: &Name) -> String {
    if name.namespace.is_empty() {
        format!("ClusterNetworkPolicy {}", name.name)
    } else {
        format!("NetworkPolicy {name}")
    }
}

/// A rule in words.
#[must_use]
pub(super) fn rule_text(view: &View<'_>, direction: Direction, rule: &Rule) -> String {
    let place = rule.index + 1;
    let mut text = format!(
        "{} {} rule {place}",
        policy_name(&rule.policy),
        direction.name()
    );
    if !rule.name.is_empty() {
        text.push_str(&format!(" «{}»", rule.name));
    }
    if rule.tier != Tier::NetworkPolicy {
        text.push_str(&format!(" (tier {})", rule.tier.name()));
    }
    let told = view.policies.get(&rule.policy).and_then(|policy| {
        let rules = match direction {
            Direction::Ingress => &policy.ingress,
            Direction::Egress => &policy.egress,
        };
        rules.get(rule.index)
    });
    let action = rule.action.name();
    match told {
        Some(told) => {
            let word = match direction {
                Direction::Ingress => "from",
                Direction::Egress => "to",
            };
            let (peers, ports) = (peers_text(told), ports_text(told));
            format!("{text}: {action} {word} {peers} on {ports}")
        }
        None => format!("{text}: {action}"),
    }
}

fn peers_text(rule: &PolicyRule) -> String {
    if rule.any_peer {
        return "everybody".into();
    }
    let peers = rule.peers.iter().filter_map(|peer| match &peer.kind {
        Some(policy_rule_peer::Kind::Set(set)) => Some(set.text.clone()),
        Some(policy_rule_peer::Kind::IpBlock(block)) if block.except.is_empty() => {
            Some(block.cidr.clone())
        }
        Some(policy_rule_peer::Kind::IpBlock(block)) => {
            Some(format!("{} except {}", block.cidr, block.except.join(", ")))
        }
        Some(policy_rule_peer::Kind::DomainName(name)) => Some(name.clone()),
        None => None,
    });
    list(peers.collect(), "nobody")
}

fn ports_text(rule: &PolicyRule) -> String {
    if rule.any_port {
        return "every port and protocol".into();
    }
    let ports = rule.ports.iter().map(rule_port_text);
    list(ports.collect(), "no port")
}

fn rule_port_text(port: &PolicyRulePort) -> String {
    let protocol = match port.protocol() {
        control_api::v1::Protocol::Unspecified => String::new(),
        known => format!("/{}", known.as_str_name()),
    };
    match (port.name.as_str(), port.first, port.last) {
        ("", 0, 0) => format!("every port{protocol}"),
        ("", first, last) if last <= first => format!("{first}{protocol}"),
        ("", first, last) => format!("{first}-{last}{protocol}"),
        (name, ..) => format!("port «{name}»{protocol}"),
    }
}

fn list(items: Vec<String>, none: &str) -> String {
    if items.is_empty() {
        none.into()
    } else {
        items.join(" or ")
    }
}

/// As in «80/TCP»; protocols without ports alone.
#[must_use]
pub(super) fn port_text(protocol: u8, port: u16) -> String {
    match protocol {
        1 => "ICMP".into(),
        6 => format!("{port}/TCP"),
        17 => format!("{port}/UDP"),
        58 => "ICMPv6".into(),
        132 => format!("{port}/SCTP"),
        other => format!("protocol {other}"),
    }
}

/// Who dropped a packet, in words: the rule that denies it, or what isolates the pod.
#[must_use]
pub(super) fn denial(
    view: &View<'_>,
    ifindex: u32,
    direction: Direction,
    rule: Option<u32>,
    shut: bool,
) -> String {
    if shut {
        return match view.compiled.why_shut(ifindex) {
            Some(why) => why.to_string(),
            None => "its policies were not known".into(),
        };
    }
    let Some((_, set)) = view.compiled.rules_of(ifindex) else {
        return "by policies that have changed since".into();
    };
    match rule.map(|number| set.rule(direction, number)) {
        Some(Some(rule)) => rule_text(view, direction, rule),
        Some(None) => "by policies that have changed since".into(),
        None => {
            let names = &set.sides[direction as usize].isolated_by;
            let names: Vec<String> = names.iter().map(policy_name).collect();
            format!(
                "no rule allows it; isolated by {}",
                list(names, "nothing any more")
            )
        }
    }
}
