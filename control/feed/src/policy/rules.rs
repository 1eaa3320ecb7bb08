//! NetworkPolicy and ClusterNetworkPolicy: Kubernetes JSON to feed messages.
//!
//! An API server validates both, but not every version in the same way. What it should have refused matches nothing, and
//! never everything.

use std::collections::BTreeMap;

use control_api::v1::{
    IpBlock, Policy, PolicyAction, PolicyRule, PolicyRulePeer, PolicyRulePort, PolicyTier,
    Protocol, policy_rule_peer,
};
use serde_json::Value;

use super::address::{Cidr, domain_name, port_name};
use super::selector::{Members, Namespaces, Selector, SetId, namespaced_pods, selected_pods};
use crate::translate::{items, name, namespace, text};

/// With the value `true` a policy reports what it would change and changes nothing.
/// On either kind of policy: `true` stages it, `false` or none enforces it.
pub const STAGED_ANNOTATION: &str = "weir.dev/staged";

/// A policy and what its selectors mean.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Translated {
    pub(crate) message: Policy,
    /// Pods that it applies to; `None` is nobody.
    pub(crate) subject: Option<Members>,
    /// Sets that its rules refer to.
    pub(crate) sets: BTreeMap<SetId, Members>,
}

/// Collects the sets of a policy while its rules are read.
#[derive(Default)]
struct Sets(BTreeMap<SetId, Members>);

impl Sets {
    fn peer(&mut self, members: Members) -> PolicyRulePeer {
        let message = members.message();
        self.0.insert(members.id(), members);
        peer(policy_rule_peer::Kind::Set(message))
    }
}

impl Sets {
    /// A name is a port of whichever pod is the destination. Where rules let that be a pod that no selector speaks of,
    /// the node has to know them all.
    fn name_ports(&mut self, egress: &[PolicyRule]) {
        let by_address =
            |peer: &PolicyRulePeer| matches!(peer.kind, Some(policy_rule_peer::Kind::IpBlock(_)));
        let of_anybody = |rule: &PolicyRule| {
            rule.ports.iter().any(|port| !port.name.is_empty())
                && (rule.any_peer || rule.peers.iter().any(by_address))
        };
        if egress.iter().any(of_anybody) {
            let everyone = Members::of_namespaces(Selector::default());
            self.0.insert(everyone.id(), everyone);
        }
    }
}

fn peer(kind: policy_rule_peer::Kind) -> PolicyRulePeer {
    PolicyRulePeer { kind: Some(kind) }
}

fn base(object: &Value, tier: PolicyTier) -> Policy {
    Policy {
        tier: tier.into(),
        namespace: namespace(object),
        name: name(object),
        uid: text(&object["metadata"]["uid"]),
        staged: is_staged(object),
        ..Policy::default()
    }
}

/// A list as rules read it: absent and empty mean the same, and no restriction.
enum List<'a> {
    Unset,
    Items(&'a [Value]),
    Bad,
}

fn list(value: &Value) -> List<'_> {
    match value {
        Value::Null => List::Unset,
        Value::Array(items) if items.is_empty() => List::Unset,
        Value::Array(items) => List::Items(items),
        _ => List::Bad,
    }
}

/// networking.k8s.io/v1 NetworkPolicy.
pub(crate) fn network_policy(object: &Value) -> Translated {
    let spec = &object["spec"];
    let mut message = base(object, PolicyTier::NetworkPolicy);
    match list(&spec["policyTypes"]) {
        List::Unset => {
            message.isolates_ingress = true;
            message.isolates_egress = items(&spec["egress"]).next().is_some();
        }
        List::Items(types) => {
            message.isolates_ingress = types.iter().any(|kind| kind == "Ingress");
            message.isolates_egress = types.iter().any(|kind| kind == "Egress");
        }
        List::Bad => {}
    }
    let mut sets = Sets::default();
    let mut rules = |isolates: bool, rules: &Value, peers: &str| -> Vec<PolicyRule> {
        let rules = items(rules).filter(|_| isolates);
        rules
            .map(|rule| network_policy_rule(&message.namespace, rule, peers, &mut sets))
            .collect()
    };
    let ingress = rules(message.isolates_ingress, &spec["ingress"], "from");
    let egress = rules(message.isolates_egress, &spec["egress"], "to");
    sets.name_ports(&egress);
    (message.ingress, message.egress) = (ingress, egress);
    let subject = Selector::parse_or_all(&spec["podSelector"]).map(|pods| Members::Pods {
        namespaces: Namespaces::One(message.namespace.clone()),
        pods,
    });
    Translated {
        message,
        subject,
        sets: sets.0,
    }
}

fn network_policy_rule(namespace: &str, rule: &Value, peers: &str, sets: &mut Sets) -> PolicyRule {
    let mut message = PolicyRule {
        action: PolicyAction::Allow.into(),
        ..PolicyRule::default()
    };
    if !rule.is_object() {
        return message;
    }
    match list(&rule[peers]) {
        List::Unset => message.any_peer = true,
        List::Items(items) => {
            let peers = items.iter();
            message.peers = peers
                .filter_map(|item| network_policy_peer(namespace, item, sets))
                .collect();
        }
        List::Bad => {}
    }
    match list(&rule["ports"]) {
        List::Unset => message.any_port = true,
        List::Items(items) => {
            message.ports = items.iter().filter_map(network_policy_port).collect()
        }
        List::Bad => {}
    }
    message
}

fn network_policy_peer(namespace: &str, item: &Value, sets: &mut Sets) -> Option<PolicyRulePeer> {
    let selects = !item["podSelector"].is_null() || !item["namespaceSelector"].is_null();
    match (&item["ipBlock"], selects) {
        (Value::Null, true) => Some(sets.peer(selected_pods(namespace, item)?)),
        (block @ Value::Object(_), false) => {
            let outer = Cidr::parse(block["cidr"].as_str()?)?;
            let mut except = Vec::new();
            for hole in items(&block["except"]) {
                let hole = Cidr::parse(hole.as_str()?)?;
                if !outer.strictly_holds(&hole) {
                    return None;
                }
                except.push(hole.to_string());
            }
            let cidr = outer.to_string();
            Some(peer(policy_rule_peer::Kind::IpBlock(IpBlock {
                cidr,
                except,
            })))
        }
        _ => None,
    }
}

fn network_policy_port(item: &Value) -> Option<PolicyRulePort> {
    let protocol = match item.as_object()?.get("protocol").and_then(Value::as_str) {
        None | Some("TCP") => Protocol::Tcp,
        Some("UDP") => Protocol::Udp,
        Some("SCTP") => Protocol::Sctp,
        Some(_) => return None,
    };
    let mut port = PolicyRulePort {
        protocol: protocol.into(),
        ..PolicyRulePort::default()
    };
    match (&item["port"], &item["endPort"]) {
        (Value::Null, Value::Null) => {}
        (Value::String(name), Value::Null) => port.name = port_name(name)?,
        (first @ Value::Number(_), last) => {
            port.first = number(first)?;
            port.last = if last.is_null() {
                port.first
            } else {
                number(last)?
            };
            if port.last < port.first {
                return None;
            }
        }
        _ => return None,
    }
    Some(port)
}

fn number(value: &Value) -> Option<u32> {
    let number = u16::try_from(value.as_u64()?).ok()?;
    (number != 0).then_some(number.into())
}

/// policy.networking.k8s.io/v1alpha2 ClusterNetworkPolicy; `None` when it has no place in the order of policies.
pub(crate) fn cluster_network_policy(object: &Value) -> Option<Translated> {
    let spec = &object["spec"];
    let tier = match spec["tier"].as_str()? {
        "Admin" => PolicyTier::Admin,
        "Baseline" => PolicyTier::Baseline,
        _ => return None,
    };
    let mut message = base(object, tier);
    message.namespace.clear();
    message.priority = i32::try_from(spec["priority"].as_i64()?).ok()?;
    let mut sets = Sets::default();
    message.ingress = items(&spec["ingress"])
        .map(|rule| cluster_rule(rule, "from", &mut sets))
        .collect();
    message.egress = items(&spec["egress"])
        .map(|rule| cluster_rule(rule, "to", &mut sets))
        .collect();
    sets.name_ports(&message.egress);
    Some(Translated {
        message,
        subject: cluster_subject(spec),
        sets: sets.0,
    })
}

fn cluster_subject(spec: &Value) -> Option<Members> {
    match only_field(&spec["subject"])? {
        ("namespaces", value) => Selector::parse(value).map(Members::of_namespaces),
        ("pods", value) => namespaced_pods(value),
        _ => None,
    }
}

/// True when a policy reports what it would change, and changes nothing. Only the one word says so: what cannot be read must
/// not open what a policy closes.
#[must_use]
pub fn is_staged(policy: &Value) -> bool {
    policy["metadata"]["annotations"][STAGED_ANNOTATION] == "true"
}

/// What an annotation says that neither stages a policy nor does not.
#[must_use]
pub fn unknown_staged(policy: &Value) -> Option<&str> {
    let value = policy["metadata"]["annotations"][STAGED_ANNOTATION].as_str()?;
    (value != "true" && value != "false").then_some(value)
}

/// The only field of an object that may have one of several.
fn only_field(value: &Value) -> Option<(&str, &Value)> {
    let mut fields = value.as_object()?.iter().filter(|(_, v)| !v.is_null());
    let (key, value) = fields.next()?;
    fields.next().is_none().then_some((key.as_str(), value))
}

fn cluster_rule(rule: &Value, peers: &str, sets: &mut Sets) -> PolicyRule {
    let mut message = PolicyRule {
        name: text(&rule["name"]),
        ..PolicyRule::default()
    };
    let Some(action) = action(rule) else {
        // Matches nothing.
        return message;
    };
    message.action = action.into();
    let mut found = Vec::new();
    let understood = items(&rule[peers]).all(|item| {
        let peers = cluster_peer(item, peers == "to", action, sets);
        peers.map(|peers| found.extend(peers)).is_some()
    });
    let ports: Option<Vec<_>> = items(&rule["protocols"]).map(cluster_port).collect();
    let Some(ports) = ports.filter(|_| understood) else {
        return fail_closed(message, action);
    };
    message.peers = found;
    message.any_port = ports.is_empty();
    message.ports = ports;
    message
}

/// The fields of a ClusterNetworkPolicy that are of no kind known here, as paths. A rule with one of them fails closed: when it
/// accepts it matches nothing, else it denies everything. A subject among them selects nobody.
#[must_use]
pub fn unknown_parts(policy: &Value) -> Vec<String> {
    let spec = &policy["spec"];
    let mut found = Vec::new();
    if cluster_subject(spec).is_none() {
        found.push("spec.subject".into());
    }
    for (direction, peers) in [("ingress", "from"), ("egress", "to")] {
        for (place, rule) in items(&spec[direction]).enumerate() {
            let at = format!("spec.{direction}[{place}]");
            let Some(action) = action(rule) else {
                found.push(format!("{at}.action"));
                continue;
            };
            let mut sets = Sets::default();
            for (number, item) in items(&rule[peers]).enumerate() {
                if cluster_peer(item, peers == "to", action, &mut sets).is_none() {
                    found.push(format!("{at}.{peers}[{number}]"));
                }
            }
            for (number, item) in items(&rule["protocols"]).enumerate() {
                if cluster_port(item).is_none() {
                    found.push(format!("{at}.protocols[{number}]"));
                }
            }
        }
    }
    found
}

fn action(rule: &Value) -> Option<PolicyAction> {
    match rule["action"].as_str()? {
        "Accept" => Some(PolicyAction::Allow),
        "Deny" => Some(PolicyAction::Deny),
        "Pass" => Some(PolicyAction::Pass),
        _ => None,
    }
}

/// A rule with a peer of an unknown kind. Upstream: one that accepts matches nothing, any other one denies everything.
fn fail_closed(mut rule: PolicyRule, action: PolicyAction) -> PolicyRule {
    if action != PolicyAction::Allow {
        rule.action = PolicyAction::Deny.into();
        rule.any_peer = true;
        rule.any_port = true;
    }
    rule
}

fn cluster_peer(
    item: &Value,
    egress: bool,
    action: PolicyAction,
    sets: &mut Sets,
) -> Option<Vec<PolicyRulePeer>> {
    let (field, value) = only_field(item)?;
    let set = match (field, egress) {
        ("namespaces", _) => Members::of_namespaces(Selector::parse(value)?),
        ("pods", _) => namespaced_pods(value)?,
        ("nodes", true) => Members::Nodes(Selector::parse(value)?),
        ("networks", true) => {
            let networks = value.as_array()?.iter();
            return networks
                .map(|network| {
                    let cidr = Cidr::parse(network.as_str()?)?.to_string();
                    let except = Vec::new();
                    let block = IpBlock { cidr, except };
                    Some(peer(policy_rule_peer::Kind::IpBlock(block)))
                })
                .collect();
        }
        ("domainNames", true) if action == PolicyAction::Allow => {
            let names = value.as_array()?.iter();
            return names
                .map(|name| {
                    let name = domain_name(name.as_str()?)?;
                    Some(peer(policy_rule_peer::Kind::DomainName(name)))
                })
                .collect();
        }
        _ => return None,
    };
    Some(vec![sets.peer(set)])
}

fn cluster_port(item: &Value) -> Option<PolicyRulePort> {
    let (field, value) = only_field(item)?;
    let protocol = match field {
        "tcp" => Protocol::Tcp,
        "udp" => Protocol::Udp,
        "sctp" => Protocol::Sctp,
        "destinationNamedPort" => {
            return Some(PolicyRulePort {
                name: value.as_str().filter(|name| !name.is_empty())?.to_owned(),
                ..PolicyRulePort::default()
            });
        }
        _ => return None,
    };
    let ("destinationPort", port) = only_field(value)? else {
        return None;
    };
    let (first, last) = match only_field(port)? {
        ("number", value) => (number(value)?, number(value)?),
        ("range", range) => (number(&range["start"])?, number(&range["end"])?),
        _ => return None,
    };
    (first <= last).then_some(PolicyRulePort {
        protocol: protocol.into(),
        first,
        last,
        name: String::new(),
    })
}
