//! EndpointSlices of Services with a selector, derived as the folder's README says. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde_json::{Value, json};

use super::spec::{Listen, PodSpec};

/// Label value that marks slices made here.
pub(in crate::cases) const MANAGER: &str = "weir-cases";

/// A pod as slices see it.
#[derive(Clone, Debug)]
pub(in crate::cases) struct PodView {
    pub(in crate::cases) namespace: String,
    pub(in crate::cases) name: String,
    pub(in crate::cases) labels: BTreeMap<String, String>,
    pub(in crate::cases) node: String,
    pub(in crate::cases) zone: Option<String>,
    pub(in crate::cases) ips: Vec<IpAddr>,
    pub(in crate::cases) listen: Vec<Listen>,
    pub(in crate::cases) ready: bool,
    pub(in crate::cases) terminating: bool,
}

impl PodView {
    /// A pod with these addresses, on a node in this zone.
    pub(in crate::cases) fn new(spec: &PodSpec, ips: &[IpAddr], zone: Option<&str>) -> Self {
        Self {
            namespace: spec.namespace.clone(),
            name: spec.name.clone(),
            labels: spec.labels.clone(),
            node: spec.node.clone(),
            zone: zone.map(str::to_owned),
            ips: ips.to_vec(),
            listen: spec.listen.clone(),
            ready: spec.ready,
            terminating: spec.terminating,
        }
    }
}

/// Fills in what the API server would.
pub(in crate::cases) fn default_service(service: &mut Value) {
    if service["metadata"]["namespace"].is_null() {
        service["metadata"]["namespace"] = "default".into();
    }
    let spec = &mut service["spec"];
    for (key, value) in [
        ("type", "ClusterIP"),
        ("internalTrafficPolicy", "Cluster"),
        ("sessionAffinity", "None"),
    ] {
        if spec[key].is_null() {
            spec[key] = value.into();
        }
    }
    if spec["type"] != "ClusterIP" && spec["externalTrafficPolicy"].is_null() {
        spec["externalTrafficPolicy"] = "Cluster".into();
    }
    if spec["sessionAffinity"] == "ClientIP" && spec["sessionAffinityConfig"].is_null() {
        spec["sessionAffinityConfig"] = json!({"clientIP": {"timeoutSeconds": 10800}});
    }
    if spec["clusterIPs"].is_null() && spec["clusterIP"].is_string() {
        spec["clusterIPs"] = json!([spec["clusterIP"]]);
    }
    if spec["ipFamilies"].is_null() {
        let family = |ip: &Value| {
            if ip.as_str().is_some_and(|s| s.contains(':')) {
                "IPv6"
            } else {
                "IPv4"
            }
        };
        let families: Vec<&str> = spec["clusterIPs"]
            .as_array()
            .into_iter()
            .flatten()
            .map(family)
            .collect();
        spec["ipFamilies"] = json!(if families.is_empty() {
            vec!["IPv4"]
        } else {
            families
        });
    }
    for port in spec["ports"].as_array_mut().into_iter().flatten() {
        if port["protocol"].is_null() {
            port["protocol"] = "TCP".into();
        }
        if port["targetPort"].is_null() {
            port["targetPort"] = port["port"].clone();
        }
    }
}

/// The slices of one Service: one per family and set of ports.
#[must_use]
pub(in crate::cases) fn derive(service: &Value, pods: &[PodView]) -> Vec<Value> {
    let spec = &service["spec"];
    let Some(selector) = spec["selector"].as_object().filter(|s| !s.is_empty()) else {
        return Vec::new();
    };
    let namespace = service["metadata"]["namespace"]
        .as_str()
        .unwrap_or_default();
    let selected = |pod: &&PodView| {
        pod.namespace == namespace
            && selector
                .iter()
                .all(|(k, v)| pod.labels.get(k).map(String::as_str) == v.as_str())
    };
    let mut slices = Vec::new();
    for family in spec["ipFamilies"].as_array().into_iter().flatten() {
        let mut by_ports: BTreeMap<String, (Value, Vec<Value>)> = BTreeMap::new();
        for pod in pods.iter().filter(selected) {
            let Some(ip) = pod.ips.iter().find(|ip| ip.is_ipv6() == (family == "IPv6")) else {
                continue;
            };
            let ports = ports_on(service, pod);
            let entry = by_ports
                .entry(ports.to_string())
                .or_insert((ports, Vec::new()));
            entry.1.push(endpoint(service, pod, *ip));
        }
        for (number, (_, (ports, endpoints))) in by_ports.into_iter().enumerate() {
            slices.push(slice(service, family, number, &ports, &endpoints));
        }
    }
    slices
}

fn slice(
    service: &Value,
    family: &Value,
    number: usize,
    ports: &Value,
    endpoints: &[Value],
) -> Value {
    let name = service["metadata"]["name"].as_str().unwrap_or_default();
    let family_name = family.as_str().unwrap_or_default().to_lowercase();
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "name": format!("{name}-{family_name}-{number}"),
            "namespace": service["metadata"]["namespace"],
            "labels": {
                "kubernetes.io/service-name": name,
                "endpointslice.kubernetes.io/managed-by": MANAGER,
            },
        },
        "addressType": family, "ports": ports, "endpoints": endpoints,
    })
}

/// The Service's ports as this pod offers them: a named target that it lacks is left out.
fn ports_on(service: &Value, pod: &PodView) -> Value {
    let mut ports = Vec::new();
    for port in service["spec"]["ports"].as_array().into_iter().flatten() {
        let protocol = port["protocol"].as_str().unwrap_or("TCP");
        let number = match &port["targetPort"] {
            Value::String(name) => pod
                .listen
                .iter()
                .find(|l| l.name == *name && l.protocol.name() == protocol)
                .map(|l| Value::from(l.port)),
            number => Some(number.clone()),
        };
        if let Some(number) = number {
            let name = if port["name"].is_null() {
                json!("")
            } else {
                port["name"].clone()
            };
            ports.push(json!({"name": name, "protocol": protocol, "port": number}));
        }
    }
    Value::Array(ports)
}

fn endpoint(service: &Value, pod: &PodView, ip: IpAddr) -> Value {
    let spec = &service["spec"];
    let publish = spec["publishNotReadyAddresses"] == true;
    let mut endpoint = json!({
        "addresses": [ip.to_string()],
        "conditions": {
            "ready": publish || (pod.ready && !pod.terminating),
            "serving": pod.ready,
            "terminating": pod.terminating,
        },
        "nodeName": pod.node,
        "targetRef": {"kind": "Pod", "namespace": pod.namespace, "name": pod.name},
    });
    if let Some(zone) = &pod.zone {
        endpoint["zone"] = json!(zone);
    }
    let mut hints = serde_json::Map::new();
    let distribution = spec["trafficDistribution"].as_str().unwrap_or_default();
    let by_zone = matches!(
        distribution,
        "PreferClose" | "PreferSameZone" | "PreferSameNode"
    );
    if let (true, Some(zone)) = (by_zone, &pod.zone) {
        hints.insert("forZones".into(), json!([{"name": zone}]));
    }
    if distribution == "PreferSameNode" {
        hints.insert("forNodes".into(), json!([{"name": pod.node}]));
    }
    if !hints.is_empty() {
        endpoint["hints"] = Value::Object(hints);
    }
    endpoint
}

/// Objects of a `generate` item.
///
/// # Errors
/// When the item is malformed.
pub(in crate::cases) fn generate(item: &Value) -> Result<Vec<Value>, String> {
    let number = |key: &str| {
        item[key]
            .as_u64()
            .ok_or_else(|| format!("generate: {key} is missing"))
    };
    let name = item["name"].as_str().ok_or("generate: name is missing")?;
    let count = u32::try_from(number("count")?).map_err(|e| e.to_string())?;
    let address = |key: &str, n: u32| {
        let first = item[key].as_str().unwrap_or_default();
        super::spec::nth_of(first, n)
            .map(|a| a.to_string())
            .ok_or_else(|| format!("generate: bad {key} {first}"))
    };
    let mut objects = Vec::new();
    if item["kind"] == "Service" {
        for i in 0..count {
            objects.push(json!({
                "apiVersion": "v1", "kind": "Service", "metadata": {"name": format!("{name}-{i}")},
                "spec": {"clusterIP": address("clusterIP", i)?, "selector": item["selector"], "ports": item["ports"]},
            }));
        }
        return Ok(objects);
    }
    let per_slice = u32::try_from(number("per_slice")?)
        .map_err(|e| e.to_string())?
        .max(1);
    for (index, start) in (0..count)
        .step_by(usize::try_from(per_slice).unwrap_or(1))
        .enumerate()
    {
        let end = (start + per_slice).min(count);
        let endpoints: Result<Vec<Value>, String> = (start..end)
            .map(|i| {
                Ok(json!({"addresses": [address("address", i)?], "conditions": {"ready": true}}))
            })
            .collect();
        objects.push(json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {"name": format!("{name}-{index}"), "labels": {"kubernetes.io/service-name": item["service"]}},
            "addressType": "IPv4", "ports": item["ports"], "endpoints": endpoints?,
        }));
    }
    Ok(objects)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actor::command::Protocol;

    #[test]
    fn a_named_target_splits_pods_by_their_numbers() {
        let pod = |name: &str, port: u16, ready: bool| PodView {
            namespace: "default".into(),
            name: name.into(),
            labels: [("app".to_owned(), "web".to_owned())].into(),
            node: "n1".into(),
            zone: None,
            ips: vec![format!("10.244.1.{port}").parse().unwrap()],
            listen: vec![Listen {
                port,
                protocol: Protocol::Tcp,
                name: "http".into(),
            }],
            ready,
            terminating: false,
        };
        let mut service = json!({"metadata": {"name": "web"}, "spec": {"clusterIP": "10.96.0.9",
            "selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": "http"}]}});
        default_service(&mut service);
        let slices = derive(
            &service,
            &[pod("a", 80, true), pod("b", 81, false), pod("c", 80, true)],
        );
        assert_eq!(slices.len(), 2);
        assert_eq!(slices[0]["endpoints"].as_array().unwrap().len(), 2);
        assert_eq!(slices[1]["ports"][0]["port"], 81);
        assert_eq!(slices[1]["endpoints"][0]["conditions"]["ready"], false);
    }
}
