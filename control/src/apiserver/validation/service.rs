//! Services, and the endpoints behind them.

use std::collections::BTreeSet;
use std::net::IpAddr;

use serde_json::Value;

use super::container::{PROTOCOLS, port_or_name};
use super::cursor::At;
use super::metadata::labels;
use super::names;

const TYPES: &[&str] = &["ClusterIP", "ExternalName", "LoadBalancer", "NodePort"];
const AFFINITY_SECONDS: (i64, i64) = (1, 86_400);
/// The older way to give source ranges: one text, separated by commas.
const SOURCE_RANGES_ANNOTATION: &str = "service.beta.kubernetes.io/load-balancer-source-ranges";
/// A balancer that opened it would open every node's own API.
const KUBELET_PORT: i64 = 10_250;
/// Limits of one EndpointSlice (the API's documentation).
const MAX_ENDPOINTS: usize = 1000;
const MAX_SLICE_PORTS: usize = 20_000;
const MAX_ADDRESSES: usize = 100;

pub(super) fn service(root: &At<'_>) {
    let spec = root.get("spec");
    let kind = spec.get("type");
    let headless = spec.get("clusterIP").text() == "None"
        || spec
            .get("clusterIPs")
            .items()
            .first()
            .is_some_and(|ip| ip.text() == "None");
    kind.needed_one_of(TYPES);
    match kind.text() {
        "ExternalName" => external_name(&spec),
        "LoadBalancer" | "NodePort" if headless => {
            let detail = format!("may not be set to 'None' for {} services", kind.text());
            spec.get("clusterIPs")
                .items()
                .first()
                .unwrap_or(&spec.get("clusterIP"))
                .invalid(detail);
        }
        _ => {}
    }
    if spec.get("ports").is_empty() && !headless && kind.text() != "ExternalName" {
        spec.get("ports").required("");
    }
    ports(&spec);
    labels(&spec.get("selector"));
    let affinity = spec.get("sessionAffinity");
    affinity.needed_one_of(&["ClientIP", "None"]);
    if affinity.text() == "ClientIP" {
        let timeout = spec
            .get("sessionAffinityConfig")
            .get("clientIP")
            .get("timeoutSeconds");
        let (low, high) = AFFINITY_SECONDS;
        if timeout.int().is_none_or(|s| !(low..=high).contains(&s)) {
            timeout.invalid(format!("must be greater than 0 and less than {high}"));
        }
    }
    for address in spec.get("externalIPs").items() {
        external_address(&address);
    }
    families(&spec);
    traffic(&spec);
    balancer(root);
}

fn external_name(spec: &At<'_>) {
    for field in ["clusterIPs", "ipFamilies", "ipFamilyPolicy"] {
        let at = spec.get(field);
        if !at.is_empty() {
            at.forbidden("may not be set for ExternalName services");
        }
    }
    let name = spec.get("externalName");
    if name.needed() {
        name.each_invalid(names::subdomain(name.text().trim_end_matches('.')));
    }
}

fn ports(spec: &At<'_>) {
    let list = spec.get("ports").items();
    let (mut port_names, mut numbers, mut node_ports) =
        (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for port in &list {
        let name = port.get("name");
        if !name.is_empty() {
            name.each_invalid(names::label(name.text()));
            if !port_names.insert(name.text()) {
                name.duplicate();
            }
        } else if list.len() > 1 {
            name.required("");
        }
        let number = port.get("port");
        if number.exists() {
            number.port();
        } else {
            number.invalid_value(0, "must be between 1 and 65535, inclusive");
        }
        port.get("protocol").needed_one_of(PROTOCOLS);
        port_or_name(&port.get("targetPort"));
        let application = port.get("appProtocol");
        if !application.is_empty() {
            application.each_invalid(names::qualified(application.text()));
        }
        if !numbers.insert((number.int(), port.get("protocol").text())) {
            port.duplicate();
        }
        let node_port = port.get("nodePort");
        if let Some(value) = node_port.int().filter(|n| *n != 0) {
            if spec.get("type").text() == "ClusterIP" {
                node_port.forbidden("may not be used when `type` is 'ClusterIP'");
            }
            if !node_ports.insert((value, port.get("protocol").text())) {
                node_port.duplicate();
            }
        }
    }
}

fn external_address(at: &At<'_>) {
    match at.text().parse::<IpAddr>() {
        Err(_) => at.invalid("must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)"),
        Ok(address) => endpoint_address(at, address),
    }
}

/// Addresses that lead nowhere a client could want.
fn endpoint_address(at: &At<'_>, address: IpAddr) {
    if address.is_unspecified() {
        at.invalid(format!("may not be unspecified ({address})"));
    }
    if address.is_loopback() {
        at.invalid("may not be in the loopback range (127.0.0.0/8, ::1/128)");
    }
    let link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    if link_local {
        at.invalid("may not be in the link-local range (169.254.0.0/16, fe80::/10)");
    }
    if address.is_multicast() {
        at.invalid("may not be in the multicast range (224.0.0.0/4, ff00::/8)");
    }
}

fn families(spec: &At<'_>) {
    spec.get("ipFamilyPolicy")
        .one_of(&["PreferDualStack", "RequireDualStack", "SingleStack"]);
    let mut seen = BTreeSet::new();
    for family in spec.get("ipFamilies").items() {
        family.one_of(&["IPv4", "IPv6"]);
        if !seen.insert(family.text()) {
            family.duplicate();
        }
    }
    if seen.len() > 1 && spec.get("ipFamilyPolicy").text() == "SingleStack" {
        spec.get("ipFamilyPolicy").invalid(
            "must be 'RequireDualStack' or 'PreferDualStack' when multiple IP families are specified",
        );
    }
    for (index, address) in spec.get("clusterIPs").items().iter().enumerate() {
        if address.text() == "None" && index == 0 {
            continue;
        }
        if address.text().parse::<IpAddr>().is_err() {
            address.invalid("must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)");
        }
    }
}

fn traffic(spec: &At<'_>) {
    let kind = spec.get("type").text();
    let external = spec.get("externalTrafficPolicy");
    let reachable = matches!(kind, "LoadBalancer" | "NodePort")
        || (kind == "ClusterIP" && !spec.get("externalIPs").is_empty());
    if reachable {
        external.needed_one_of(&["Cluster", "Local"]);
    } else if !external.is_empty() {
        external.invalid("may only be set for externally-accessible services");
    }
    spec.get("internalTrafficPolicy")
        .one_of(&["Cluster", "Local"]);
    spec.get("trafficDistribution")
        .one_of(&["PreferClose", "PreferSameNode", "PreferSameZone"]);
    let check = spec.get("healthCheckNodePort");
    if kind == "LoadBalancer" && external.text() == "Local" {
        if check.int() != Some(0) {
            check.port();
        }
    } else if check.int().unwrap_or(0) != 0 {
        check.invalid(
            "may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'",
        );
    }
}

fn is_cidr(text: &str) -> bool {
    text.contains('/') && text.parse::<ipnetwork::IpNetwork>().is_ok()
}

/// Fields that have a meaning for load balancers only.
fn balancer(root: &At<'_>) {
    const ONLY: &str = "may only be used when `type` is 'LoadBalancer'";
    let spec = root.get("spec");
    let balanced = spec.get("type").text() == "LoadBalancer";
    let (class, allocate) = (
        spec.get("loadBalancerClass"),
        spec.get("allocateLoadBalancerNodePorts"),
    );
    let ranges = spec.get("loadBalancerSourceRanges");
    let annotation = root
        .get("metadata")
        .get("annotations")
        .key(SOURCE_RANGES_ANNOTATION);
    if balanced {
        if class.exists() {
            class.each_invalid(names::qualified(class.text()));
        }
        for port in spec.get("ports").items() {
            if port.get("port").int() == Some(KUBELET_PORT) {
                port.invalid_value(
                    KUBELET_PORT,
                    format!(
                        "may not expose port {KUBELET_PORT} externally since it is used by kubelet"
                    ),
                );
            }
        }
    } else {
        for at in [&class, &allocate] {
            if at.exists() {
                at.forbidden(ONLY);
            }
        }
        for at in [&ranges, &annotation] {
            if !at.is_empty() {
                at.forbidden(ONLY);
            }
        }
    }
    for range in ranges.items() {
        // Spaces around are allowed since the ranges came from the annotation.
        if !is_cidr(range.text().trim()) {
            range.invalid("must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)");
        }
    }
    if ranges.is_empty() && !annotation.is_empty() {
        let mut listed = annotation.text().trim().split(',').map(str::trim);
        if !listed.all(is_cidr) {
            ranges.invalid_value(
                annotation.text(),
                "must be a list of IP ranges. For example, 10.240.0.0/24,10.250.0.0/24 ",
            );
        }
    }
}

/// `status` of a Service, written by whoever provides load balancers.
pub(super) fn service_status(root: &At<'_>) {
    let ingress = root.get("status").get("loadBalancer").get("ingress");
    if !ingress.is_empty() && root.get("spec").get("type").text() != "LoadBalancer" {
        ingress.forbidden("may only be used when `spec.type` is 'LoadBalancer'");
    }
    for entry in ingress.items() {
        let (ip, mode, host) = (entry.get("ip"), entry.get("ipMode"), entry.get("hostname"));
        if !ip.is_empty() {
            if ip.text().parse::<IpAddr>().is_err() {
                ip.invalid("must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)");
            }
            if mode.is_empty() {
                mode.required("must be specified when `ip` is set");
            }
            mode.one_of(&["Proxy", "VIP"]);
        } else if !mode.is_empty() {
            mode.forbidden("may not be specified when `ip` is not set");
        }
        if !host.is_empty() {
            if host.text().parse::<IpAddr>().is_ok() {
                host.invalid("must be a DNS name, not an IP address");
            }
            host.each_invalid(names::subdomain(host.text()));
        }
    }
}

/// Addresses of a Service live as long as its type needs them; the first one never changes meanwhile.
pub(super) fn service_update(new: &At<'_>, old: &At<'_>) {
    let (new, old) = (new.get("spec"), old.get("spec"));
    let typed = |at: &At<'_>| at.get("type").text() != "ExternalName";
    if !typed(&new) || !typed(&old) {
        return;
    }
    let first = |at: &At<'_>, list: &str| at.get(list).items().first().and_then(At::value).cloned();
    for list in ["clusterIPs", "ipFamilies"] {
        if let (Some(before), after) = (first(&old, list), first(&new, list))
            && after.as_ref() != Some(&before)
        {
            let at = new
                .get(list)
                .items()
                .first()
                .cloned()
                .unwrap_or_else(|| new.get(list));
            at.invalid("may not change once set");
        }
    }
    let port = |at: &At<'_>| at.get("healthCheckNodePort").int().unwrap_or(0);
    let needs = |at: &At<'_>| {
        at.get("type").text() == "LoadBalancer" && at.get("externalTrafficPolicy").text() == "Local"
    };
    if needs(&old) && needs(&new) && port(&old) != 0 && port(&old) != port(&new) {
        new.get("healthCheckNodePort").invalid("field is immutable");
    }
    if new.get("type").text() == "LoadBalancer" && old.get("type").text() == "LoadBalancer" {
        let class = |at: &At<'_>| at.get("loadBalancerClass").value().cloned();
        if class(&new) != class(&old) {
            new.get("loadBalancerClass")
                .invalid("may not change once set");
        }
    }
}

pub(super) fn endpoint_slice(root: &At<'_>) {
    let family = root.get("addressType");
    family.needed_one_of(&["FQDN", "IPv4", "IPv6"]);
    let endpoints = root.get("endpoints").items();
    if endpoints.len() > MAX_ENDPOINTS {
        root.get("endpoints").invalid_value(
            endpoints.len(),
            format!("must have at most {MAX_ENDPOINTS} items"),
        );
    }
    for endpoint in &endpoints {
        let addresses = endpoint.get("addresses");
        if addresses.is_empty() {
            addresses.required("must contain at least 1 address");
        }
        if addresses.items().len() > MAX_ADDRESSES {
            addresses.invalid_value(
                addresses.items().len(),
                format!("must have at most {MAX_ADDRESSES} items"),
            );
        }
        for address in addresses.items() {
            slice_address(&address, family.text());
        }
        let host = endpoint.get("hostname");
        if !host.is_empty() {
            host.each_invalid(names::label(host.text()));
        }
    }
    slice_ports(&root.get("ports"));
}

fn slice_address(at: &At<'_>, family: &str) {
    match (family, at.text().parse::<IpAddr>()) {
        ("IPv4", Ok(address @ IpAddr::V4(_))) | ("IPv6", Ok(address @ IpAddr::V6(_))) => {
            endpoint_address(at, address);
        }
        ("IPv4", _) => at.invalid("must be a valid IPv4 address"),
        ("IPv6", _) => at.invalid("must be a valid IPv6 address"),
        _ => at.each_invalid(names::subdomain(at.text())),
    }
}

fn slice_ports(list: &At<'_>) {
    if list.items().len() > MAX_SLICE_PORTS {
        list.invalid_value(
            list.items().len(),
            format!("must have at most {MAX_SLICE_PORTS} items"),
        );
    }
    let mut seen = BTreeSet::new();
    for port in list.items() {
        let name = port.get("name");
        if !name.is_empty() {
            name.each_invalid(names::label(name.text()));
        }
        if !seen.insert(name.text().to_owned()) {
            name.duplicate();
        }
        port.get("protocol").needed_one_of(PROTOCOLS);
        port.get("port").port();
    }
}

pub(super) fn endpoint_slice_update(new: &At<'_>, old: &At<'_>) {
    new.get("addressType").immutable(&old.get("addressType"));
}

pub(super) fn endpoints(root: &At<'_>) {
    for subset in root.get("subsets").items() {
        if subset.get("addresses").is_empty() && subset.get("notReadyAddresses").is_empty() {
            subset.required("must specify `addresses` or `notReadyAddresses`");
        }
        for list in ["addresses", "notReadyAddresses"] {
            for address in subset.get(list).items() {
                external_address(&address.get("ip"));
            }
        }
        let ports = subset.get("ports").items();
        for port in &ports {
            if ports.len() > 1 {
                port.get("name").needed();
            }
            match port.get("port").value() {
                Some(Value::Number(_)) => port.get("port").port(),
                _ => port.get("port").required(""),
            }
            port.get("protocol").needed_one_of(PROTOCOLS);
        }
    }
}
