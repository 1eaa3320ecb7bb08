//! NetworkPolicy and ClusterNetworkPolicy.
//!
//! The second is a custom resource upstream: its rules and texts are those of a schema. What they leave open although
//! nothing could be done with it (a selector that cannot be read, domain names that are denied) is refused as well.

use std::net::IpAddr;

use control_feed::STAGED_ANNOTATION;
use ipnetwork::IpNetwork;
use serde_json::Value;

use super::cursor::At;
use super::metadata::label_selector;
use super::names;

const STAGED: &[&str] = &["true", "false"];
const TYPES: &[&str] = &["Ingress", "Egress"];
const PROTOCOLS: &[&str] = &["TCP", "UDP", "SCTP"];
const NO_CIDR: &str = "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)";

pub(super) fn network_policy(root: &At<'_>, old: Option<&At<'_>>) {
    // What stands in the object already may stay, whatever rules came later.
    let known = old.map(blocks).unwrap_or_default();
    staged(root, old);
    let spec = root.get("spec");
    label_selector(&spec.get("podSelector"));
    for (rules, peers) in [("ingress", "from"), ("egress", "to")] {
        for rule in spec.get(rules).items() {
            rule.get("ports").items().iter().for_each(port);
            for item in rule.get(peers).items() {
                peer(&item, &known);
            }
        }
    }
    let types = spec.get("policyTypes");
    if types.items().len() > TYPES.len() {
        types.invalid("may not specify more than two policyTypes");
        return;
    }
    for kind in types.items() {
        if !TYPES.contains(&kind.text()) {
            kind.not_supported(TYPES);
        }
    }
}

/// A policy that its author believes staged must not be enforced for the spelling of a word. What stands there already may
/// stay.
fn staged(root: &At<'_>, old: Option<&At<'_>>) {
    fn annotation<'a>(root: &At<'a>) -> At<'a> {
        let annotations = root.get("metadata").get("annotations");
        annotations.key(STAGED_ANNOTATION)
    }
    let value = annotation(root);
    let stays = old.is_some_and(|old| annotation(old).value() == value.value());
    if value.exists() && !stays && !STAGED.contains(&value.text()) {
        value.not_supported(STAGED);
    }
}

/// Texts of every block in a policy.
fn blocks<'a>(root: &At<'a>) -> Vec<&'a str> {
    let mut texts = Vec::new();
    for (rules, peers) in [("ingress", "from"), ("egress", "to")] {
        for rule in root.get("spec").get(rules).items() {
            for peer in rule.get(peers).items() {
                let block = peer.get("ipBlock");
                texts.push(block.get("cidr").text());
                texts.extend(block.get("except").items().iter().map(At::text));
            }
        }
    }
    texts
}

fn port(item: &At<'_>) {
    let protocol = item.get("protocol");
    if protocol.exists() && !PROTOCOLS.contains(&protocol.text()) {
        protocol.not_supported(PROTOCOLS);
    }
    let (first, last) = (item.get("port"), item.get("endPort"));
    match (first.value(), first.int()) {
        (_, Some(start)) => {
            first.port();
            if last.int().is_some_and(|end| end < start) {
                last.invalid("must be greater than or equal to `port`");
            }
            last.port();
        }
        (Some(_), None) => {
            if last.exists() {
                last.invalid("may not be specified when `port` is non-numeric");
            }
            first.each_invalid(names::port_name(first.text()));
        }
        (None, None) if last.exists() => {
            last.invalid("may not be specified when `port` is not specified");
        }
        (None, None) => {}
    }
}

fn peer(item: &At<'_>, known: &[&str]) {
    let block = item.get("ipBlock");
    let selectors = [item.get("podSelector"), item.get("namespaceSelector")];
    selectors.iter().for_each(label_selector);
    if block.exists() {
        ip_block(&block, known);
    }
    match (block.exists(), selectors.iter().any(At::exists)) {
        (false, false) => item.required("must specify a peer"),
        (true, true) => item.forbidden("may not specify both ipBlock and another peer"),
        _ => {}
    }
}

fn ip_block(block: &At<'_>, known: &[&str]) {
    let cidr = block.get("cidr");
    if !cidr.needed() {
        return;
    }
    let Some(outer) = network(&cidr, known) else {
        return;
    };
    for except in block.get("except").items() {
        let Some(inner) = network(&except, known) else {
            continue;
        };
        if !(outer.contains(inner.ip()) && inner.prefix() > outer.prefix()) {
            except.invalid("must be a strict subset of `cidr`");
        }
    }
}

/// Reads a block as Kubernetes always did, and reports what it has refused in new objects since KEP-4858.
fn network(at: &At<'_>, known: &[&str]) -> Option<IpNetwork> {
    let Some((block, leading_zeros)) = loose_network(at.text()) else {
        at.invalid(NO_CIDR);
        return None;
    };
    let mapped = matches!(block.ip(), IpAddr::V6(ip) if ip.to_ipv4_mapped().is_some());
    let detail = if leading_zeros {
        "must not have leading 0s in IP or prefix length"
    } else if mapped {
        "must not have an IPv4-mapped IPv6 address"
    } else if block.ip() != block.network() {
        "must not have bits set beyond the prefix length"
    } else {
        return Some(block);
    };
    if !known.contains(&at.text()) {
        at.invalid(detail);
    }
    Some(block)
}

/// A block, and whether numbers of it begin with zeros (they are decimal all the same).
fn loose_network(text: &str) -> Option<(IpNetwork, bool)> {
    let (address, length) = text.split_once('/')?;
    let (prefix, padded) = decimal(length)?;
    if let Ok(address) = address.parse::<IpAddr>() {
        return Some((IpNetwork::new(address, prefix).ok()?, padded));
    }
    let octets: Vec<(u8, bool)> = address.split('.').map(decimal).collect::<Option<_>>()?;
    let numbers: Vec<u8> = octets.iter().map(|(number, _)| *number).collect();
    let numbers: [u8; 4] = numbers.try_into().ok()?;
    let zeros = padded || octets.iter().any(|(_, padded)| *padded);
    Some((IpNetwork::new(numbers.into(), prefix).ok()?, zeros))
}

fn decimal(text: &str) -> Option<(u8, bool)> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = digits.then(|| text.parse().ok()).flatten()?;
    Some((number, text.len() > 1 && text.starts_with('0')))
}

// ---- ClusterNetworkPolicy ----

const MAX_ITEMS: usize = 25;
const MAX_RULE_NAME: usize = 100;
const MAX_CIDR: usize = 43;
const DOMAIN_NAME: &str = r"^(\*\.)?([a-zA-z0-9]([-a-zA-Z0-9_]*[a-zA-Z0-9])?\.)+[a-zA-z0-9]([-a-zA-Z0-9_]*[a-zA-Z0-9])?\.?$";
/// Peers of egress rules that are no pods.
const PORTLESS: [&str; 3] = ["networks", "nodes", "domainNames"];

pub(super) fn cluster_network_policy(root: &At<'_>, old: Option<&At<'_>>) {
    staged(root, old);
    let spec = root.get("spec");
    if !spec.exists() {
        spec.required("");
        return;
    }
    schema_enum(&spec.get("tier"), &["Admin", "Baseline"]);
    if !spec.get("priority").exists() {
        spec.get("priority").required("");
    }
    schema_range(&spec.get("priority"), 0, 1000);
    let subject = spec.get("subject");
    if one_field(&subject) {
        pods_by_label(&subject);
    }
    for (rules, peers) in [("ingress", "from"), ("egress", "to")] {
        let rules = spec.get(rules);
        at_most(&rules, rules.items().len(), MAX_ITEMS);
        for rule in rules.items() {
            cluster_rule(&rule, peers);
        }
    }
}

fn cluster_rule(rule: &At<'_>, peers: &str) {
    if rule.get("name").text().chars().count() > MAX_RULE_NAME {
        rule.get("name").too_long(MAX_RULE_NAME);
    }
    schema_enum(&rule.get("action"), &["Accept", "Deny", "Pass"]);
    let (peers, protocols) = (rule.get(peers), rule.get("protocols"));
    if peers.exists() {
        item_count(&peers);
    } else {
        peers.required("");
    }
    if protocols.exists() {
        item_count(&protocols);
    }
    for peer in peers.items() {
        if one_field(&peer) {
            pods_by_label(&peer);
            label_selector(&peer.get("nodes"));
            networks(&peer.get("networks"));
            domain_names(&peer.get("domainNames"), rule.get("action").text());
        }
    }
    protocols.items().iter().for_each(protocol);
    let has = |list: &At<'_>, key: &str| list.items().iter().any(|item| item.get(key).exists());
    if PORTLESS.iter().any(|kind| has(&peers, kind)) && has(&protocols, "destinationNamedPort") {
        rule.invalid(
            "networks/nodes/domainNames peer cannot be set with namedPorts since there are no namedPorts for networks/nodes/domainNames",
        );
    }
}

/// The selectors that subjects and peers have in common.
fn pods_by_label(at: &At<'_>) {
    label_selector(&at.get("namespaces"));
    let pods = at.get("pods");
    if pods.exists() {
        label_selector(&pods.get("namespaceSelector"));
        let selector = pods.get("podSelector");
        if !selector.exists() {
            selector.required("");
        }
        label_selector(&selector);
    }
}

fn networks(list: &At<'_>) {
    if list.exists() {
        item_count(list);
    }
    each_once(list);
    for network in list.items() {
        let text = network.text();
        if text.len() > MAX_CIDR {
            network.too_long(MAX_CIDR);
        } else if !matches!(loose_network(text), Some((block, false)) if !is_mapped(&block)) {
            network.invalid("Invalid CIDR format provided");
        }
    }
}

fn is_mapped(block: &IpNetwork) -> bool {
    matches!(block.ip(), IpAddr::V6(ip) if ip.to_ipv4_mapped().is_some())
}

fn domain_names(list: &At<'_>, action: &str) {
    if !list.exists() {
        return;
    }
    item_count(list);
    each_once(list);
    if action != "Accept" {
        list.forbidden("may only be used in rules with the action Accept");
    }
    for name in list.items() {
        if !is_domain_name(name.text()) {
            let detail = format!("{} in body should match '{DOMAIN_NAME}'", name.path());
            name.invalid(detail);
        }
    }
}

/// Whether a text has the form of [`DOMAIN_NAME`] (with letters alone where its class «A-z» takes more).
fn is_domain_name(text: &str) -> bool {
    let name = text.strip_suffix('.').unwrap_or(text);
    let name = name.strip_prefix("*.").unwrap_or(name);
    let label = |label: &str| {
        let edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
        let bytes = label.as_bytes();
        let inner = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        edge(bytes.first()) && edge(bytes.last()) && bytes.iter().all(inner)
    };
    name.contains('.') && name.split('.').all(label)
}

fn protocol(item: &At<'_>) {
    if !one_field(item) {
        return;
    }
    for name in ["tcp", "udp", "sctp"] {
        let fields = item.get(name);
        if !fields.exists() || !one_field(&fields) {
            continue;
        }
        let port = fields.get("destinationPort");
        if !one_field(&port) {
            continue;
        }
        schema_range(&port.get("number"), 1, 65535);
        let range = port.get("range");
        if !range.exists() {
            continue;
        }
        let (start, end) = (range.get("start"), range.get("end"));
        for edge in [&start, &end] {
            if edge.exists() {
                schema_range(edge, 1, 65535);
            } else {
                edge.required("");
            }
        }
        if let (Some(first), Some(last)) = (start.int(), end.int())
            && first >= last
        {
            range.invalid("Start port must be less than End port");
        }
    }
}

/// metav1.Condition as its schema has it.
pub(super) fn conditions(list: &At<'_>) {
    for condition in list.items() {
        for field in ["type", "lastTransitionTime", "reason", "message"] {
            if !condition.get(field).exists() {
                condition.get(field).required("");
            }
        }
        schema_enum(&condition.get("status"), &["True", "False", "Unknown"]);
        if condition.get("reason").value() == Some(&Value::from("")) {
            let reason = condition.get("reason");
            let detail = format!("{} in body should be at least 1 chars long", reason.path());
            reason.invalid(detail);
        }
    }
}

// ---- what schemas say ----

/// Reports an object that has not exactly one field; unknown fields have been dropped before.
fn one_field(at: &At<'_>) -> bool {
    let Some(fields) = at.value().and_then(Value::as_object) else {
        at.required("");
        return false;
    };
    at_most(at, fields.len(), 1);
    if fields.is_empty() {
        let detail = format!("{} in body should have at least 1 properties", at.path());
        at.invalid_value(0, detail);
    }
    fields.len() == 1
}

fn item_count(list: &At<'_>) {
    let count = list.items().len();
    at_most(list, count, MAX_ITEMS);
    if count == 0 {
        let detail = format!("{} in body should have at least 1 items", list.path());
        list.invalid_value(0, detail);
    }
}

fn at_most(at: &At<'_>, count: usize, limit: usize) {
    if count > limit {
        at.too_many(count, limit);
    }
}

fn each_once(list: &At<'_>) {
    let items = list.items();
    for (i, item) in items.iter().enumerate() {
        if items[..i].iter().any(|other| other.value() == item.value()) {
            item.duplicate();
        }
    }
}

fn schema_enum(at: &At<'_>, words: &[&str]) {
    if !at.exists() {
        at.required("");
    } else if !words.contains(&at.text()) {
        at.not_supported(words);
    }
}

fn schema_range(at: &At<'_>, low: i64, high: i64) {
    let Some(number) = at.int() else { return };
    let path = at.path();
    if number < low {
        at.invalid(format!(
            "{path} in body should be greater than or equal to {low}"
        ));
    } else if number > high {
        at.invalid(format!(
            "{path} in body should be less than or equal to {high}"
        ));
    }
}
