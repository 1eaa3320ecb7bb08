//! Services, endpoint slices, nodes, ConfigMaps and Secrets: Kubernetes JSON to feed messages.
//!
//! Objects come from an API server that has validated and defaulted them; what is missing or odd all the same is read
//! as unset, never an error: one strange object must not stop the feed of a node.

use std::collections::BTreeMap;
use std::net::IpAddr;

use base64::Engine;
use control_api::desired::Name;
use control_api::v1::{
    AddressFamily, Endpoint, EndpointPort, EndpointSlice, KeyedData, LoadBalancerIngress, Node,
    Protocol, Service, ServicePort, ServiceType, TrafficPolicy,
};
use serde_json::Value;

/// ClientIP affinity when sessionAffinityConfig is unset (three hours, as in core/v1).
const DEFAULT_AFFINITY_S: u32 = 10_800;

/// Set by cluster autoscalers on a node that they are about to remove (KEP-3836).
const LEAVING_TAINT: &str = "ToBeDeletedByClusterAutoscaler";

pub(crate) fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

pub(crate) fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

pub(crate) fn texts(value: &Value) -> Vec<String> {
    items(value)
        .filter_map(Value::as_str)
        .map(str::to_owned)
        .collect()
}

pub(crate) fn text_map(value: &Value) -> BTreeMap<String, String> {
    let entries = value.as_object().into_iter().flatten();
    entries
        .filter_map(|(key, v)| Some((key.clone(), v.as_str()?.to_owned())))
        .collect()
}

/// Microseconds since the epoch; zero when it is no time.
pub(crate) fn micros(timestamp: &Value) -> i64 {
    timestamp
        .as_str()
        .and_then(|t| t.parse::<jiff::Timestamp>().ok())
        .map_or(0, jiff::Timestamp::as_microsecond)
}

pub(crate) fn flag(value: &Value) -> bool {
    value.as_bool().unwrap_or_default()
}

pub(crate) fn unsigned(value: &Value) -> u32 {
    value
        .as_u64()
        .and_then(|n| u32::try_from(n).ok())
        .unwrap_or_default()
}

pub(crate) fn protocol(value: &Value) -> Protocol {
    match value.as_str() {
        None | Some("" | "TCP") => Protocol::Tcp,
        Some("UDP") => Protocol::Udp,
        Some("SCTP") => Protocol::Sctp,
        Some(_) => Protocol::Unspecified,
    }
}

/// Addresses in canonical form; what is none (as "None" of a headless Service) is left out.
pub(crate) fn addresses<'a>(values: impl Iterator<Item = &'a Value>) -> Vec<String> {
    values
        .filter_map(|value| value.as_str()?.parse::<IpAddr>().ok())
        .map(|address| address.to_string())
        .collect()
}

pub(crate) fn namespace(object: &Value) -> String {
    text(&object["metadata"]["namespace"])
}

pub(crate) fn name(object: &Value) -> String {
    text(&object["metadata"]["name"])
}

fn traffic_policy(value: &Value) -> i32 {
    let policy = if value == "Local" {
        TrafficPolicy::Local
    } else {
        TrafficPolicy::Cluster
    };
    policy.into()
}

/// Labels of Services that kube-proxy leaves to somebody else, whatever their value (KEP-2447, and core/v1's headless
/// label).
const LEFT_ALONE: [&str; 2] = [
    "service.kubernetes.io/service-proxy-name",
    "service.kubernetes.io/headless",
];

pub(crate) fn service(object: &Value) -> Service {
    let spec = &object["spec"];
    let service_type = match spec["type"].as_str() {
        Some("NodePort") => ServiceType::NodePort,
        Some("LoadBalancer") => ServiceType::LoadBalancer,
        Some("ExternalName") => ServiceType::ExternalName,
        _ => ServiceType::ClusterIp,
    };
    let external = service_type == ServiceType::ExternalName;
    let cluster_ips = match addresses(items(&spec["clusterIPs"])) {
        _ if external => Vec::new(),
        list if list.is_empty() => addresses(std::iter::once(&spec["clusterIP"])),
        list => list,
    };
    let affinity = match spec["sessionAffinity"].as_str() {
        Some("ClientIP") => {
            match unsigned(&spec["sessionAffinityConfig"]["clientIP"]["timeoutSeconds"]) {
                0 => DEFAULT_AFFINITY_S,
                seconds => seconds,
            }
        }
        _ => 0,
    };
    Service {
        namespace: namespace(object),
        name: name(object),
        uid: text(&object["metadata"]["uid"]),
        r#type: service_type.into(),
        headless: !external && spec["clusterIP"] == "None",
        cluster_ips,
        external_name: if external {
            text(&spec["externalName"])
        } else {
            String::new()
        },
        ports: items(&spec["ports"]).map(service_port).collect(),
        client_ip_affinity_s: affinity,
        internal_traffic_policy: traffic_policy(&spec["internalTrafficPolicy"]),
        external_traffic_policy: traffic_policy(&spec["externalTrafficPolicy"]),
        load_balancer_ingress: items(&object["status"]["loadBalancer"]["ingress"])
            .filter_map(load_balancer_ingress)
            .collect(),
        external_ips: addresses(items(&spec["externalIPs"])),
        load_balancer_source_ranges: texts(&spec["loadBalancerSourceRanges"]),
        health_check_node_port: unsigned(&spec["healthCheckNodePort"]),
        publish_not_ready_addresses: flag(&spec["publishNotReadyAddresses"]),
        traffic_distribution: text(&spec["trafficDistribution"]),
        created_at_us: micros(&object["metadata"]["creationTimestamp"]),
        foreign_proxy: LEFT_ALONE
            .iter()
            .any(|label| !object["metadata"]["labels"][label].is_null()),
    }
}

fn service_port(port: &Value) -> ServicePort {
    ServicePort {
        name: text(&port["name"]),
        protocol: protocol(&port["protocol"]).into(),
        port: unsigned(&port["port"]),
        node_port: unsigned(&port["nodePort"]),
    }
}

fn load_balancer_ingress(ingress: &Value) -> Option<LoadBalancerIngress> {
    let ip = addresses(std::iter::once(&ingress["ip"])).pop()?;
    Some(LoadBalancerIngress {
        ip,
        proxy: ingress["ipMode"] == "Proxy",
    })
}

/// `None` for slices that belong to no Service and for FQDN slices, which no dataplane can use.
pub(crate) fn endpoint_slice(object: &Value) -> Option<EndpointSlice> {
    let service = text(&object["metadata"]["labels"]["kubernetes.io/service-name"]);
    let family = match object["addressType"].as_str() {
        Some("IPv4") => AddressFamily::Ipv4,
        Some("IPv6") => AddressFamily::Ipv6,
        _ => return None,
    };
    if service.is_empty() {
        return None;
    }
    Some(EndpointSlice {
        namespace: namespace(object),
        name: name(object),
        service,
        family: family.into(),
        ports: items(&object["ports"])
            .map(|port| EndpointPort {
                name: text(&port["name"]),
                protocol: protocol(&port["protocol"]).into(),
                port: unsigned(&port["port"]),
            })
            .collect(),
        endpoints: items(&object["endpoints"]).map(endpoint).collect(),
    })
}

fn endpoint(endpoint: &Value) -> Endpoint {
    let conditions = &endpoint["conditions"];
    // Unset means ready; unset serving means the same as ready (discovery/v1 EndpointConditions).
    let ready = conditions["ready"].as_bool().unwrap_or(true);
    let target = &endpoint["targetRef"];
    let target_pod = match (target["kind"].as_str(), target["name"].as_str()) {
        (Some("Pod"), Some(pod)) => format!("{}/{pod}", text(&target["namespace"])),
        _ => String::new(),
    };
    let hints = |key: &str| {
        items(&endpoint["hints"][key])
            .map(|hint| text(&hint["name"]))
            .collect::<Vec<_>>()
    };
    Endpoint {
        addresses: addresses(items(&endpoint["addresses"])),
        ready,
        serving: conditions["serving"].as_bool().unwrap_or(ready),
        terminating: flag(&conditions["terminating"]),
        node_name: text(&endpoint["nodeName"]),
        zone: text(&endpoint["zone"]),
        hostname: text(&endpoint["hostname"]),
        hint_zones: hints("forZones"),
        hint_nodes: hints("forNodes"),
        target_pod,
    }
}

pub(crate) fn node(object: &Value) -> Node {
    let status = &object["status"];
    let of_type = |wanted: &str| {
        addresses(
            items(&status["addresses"])
                .filter(|address| address["type"] == *wanted)
                .map(|address| &address["address"]),
        )
    };
    let mut pod_cidrs = texts(&object["spec"]["podCIDRs"]);
    if pod_cidrs.is_empty() {
        pod_cidrs.extend(object["spec"]["podCIDR"].as_str().map(str::to_owned));
    }
    Node {
        name: name(object),
        internal_ips: of_type("InternalIP"),
        external_ips: of_type("ExternalIP"),
        pod_cidrs,
        zone: text(&object["metadata"]["labels"]["topology.kubernetes.io/zone"]),
        ready: items(&status["conditions"])
            .any(|condition| condition["type"] == "Ready" && condition["status"] == "True"),
        leaving: object["metadata"]["deletionTimestamp"].is_string()
            || items(&object["spec"]["taints"]).any(|taint| taint["key"] == LEAVING_TAINT),
    }
}

/// `data` of a ConfigMap is text and `binaryData` base64; of a Secret, `data` is base64.
pub(crate) fn keyed_data(object: &Value, secret: bool) -> KeyedData {
    let mut data = BTreeMap::new();
    let encoded = if secret {
        &object["data"]
    } else {
        &object["binaryData"]
    };
    for (key, value) in encoded.as_object().into_iter().flatten() {
        let decoded = value
            .as_str()
            .and_then(|v| base64::engine::general_purpose::STANDARD.decode(v).ok());
        if let Some(bytes) = decoded {
            data.insert(key.clone(), bytes);
        }
    }
    if !secret {
        for (key, value) in text_map(&object["data"]) {
            data.insert(key, value.into_bytes());
        }
    }
    KeyedData {
        namespace: namespace(object),
        name: name(object),
        data,
    }
}

/// Bytes of all files of cluster DNS: every node gets them with every change of a namespace. Those beyond are left out,
/// and a node says what it misses.
const MAX_DNS_BYTES: usize = 256 << 10;

/// Where CoreDNS has the keys of a ConfigMap, as kubeadm and k3s mount it; none for every other ConfigMap.
pub(crate) fn dns_folder(name: &Name) -> Option<&'static str> {
    match (name.namespace.as_str(), name.name.as_str()) {
        ("kube-system", "coredns") => Some("/etc/coredns"),
        ("kube-system", "coredns-custom") => Some("/etc/coredns/custom"),
        _ => None,
    }
}

/// The files of cluster DNS by path.
pub(crate) fn dns_files(maps: &BTreeMap<Name, KeyedData>) -> BTreeMap<String, Vec<u8>> {
    let mut room = MAX_DNS_BYTES;
    let mut files = BTreeMap::new();
    for (name, map) in maps {
        let Some(folder) = dns_folder(name) else {
            continue;
        };
        for (key, text) in &map.data {
            if let Some(rest) = room.checked_sub(text.len()) {
                room = rest;
                files.insert(format!("{folder}/{key}"), text.clone());
            }
        }
    }
    files
}
