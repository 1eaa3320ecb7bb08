//! The cluster as one node knows it, and what Services mean there. Written from the API's text and the KEPs alone,
//! slowly and without a look at the product's compile room. Pure.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use serde_json::Value;

use super::super::resolve::Services;
use crate::cases::cluster::spec::cidr_holds;

/// A node's addresses and zone.
#[derive(Clone, Debug, Default)]
pub(super) struct NodeView {
    pub(super) addresses: Vec<IpAddr>,
    pub(super) zone: Option<String>,
}

/// Objects as of the moment when a node's agent last followed.
#[derive(Clone, Debug, Default)]
pub(super) struct View {
    /// Different for different states.
    pub(super) edition: u64,
    pub(super) services: Services,
    pub(super) slices: Vec<Value>,
    pub(super) nodes: BTreeMap<String, NodeView>,
    /// Networks of the node addresses that serve node ports; empty for all but loopback.
    pub(super) node_port_networks: Vec<String>,
}

/// By which kind of address a Service port is met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    ClusterIp,
    NodePort,
    Balancer,
    ExternalIp,
}

/// One port of a Service at one of its addresses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frontend<'v> {
    pub(super) name: &'v (String, String),
    pub(super) service: &'v Value,
    pub(super) port: &'v Value,
    pub(super) class: Class,
}

/// What is at an address.
#[derive(Clone, Copy, Debug)]
pub(super) enum Hit<'v> {
    Port(Frontend<'v>),
    /// A Service's address, but none of its ports.
    Address,
    Nothing,
}

/// Endpoints that a new connection may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Pool {
    Usable(Vec<SocketAddr>),
    /// A Local policy hides all that there are: the packet is dropped.
    Elsewhere,
    /// There are none: the client is refused.
    Empty,
}

#[derive(Clone, Debug)]
struct Endpoint {
    address: SocketAddr,
    ready: bool,
    /// Terminating and still serving.
    draining: bool,
    node: String,
    zones: Vec<String>,
    nodes: Vec<String>,
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn names(value: &Value) -> Vec<String> {
    list(value).map(|v| text(&v["name"]).to_owned()).collect()
}

fn holds(addresses: &Value, wanted: IpAddr) -> bool {
    list(addresses).any(|a| text(a).parse() == Ok(wanted))
}

/// Labels by which a Service asks kube-proxy to leave it alone.
fn left_alone(service: &Value) -> bool {
    let labels = &service["metadata"]["labels"];
    ["service-proxy-name", "headless"]
        .iter()
        .any(|l| !labels[format!("service.kubernetes.io/{l}")].is_null())
}

impl View {
    /// Does the node serve node ports at one of its addresses?
    fn serves_node_ports(&self, address: IpAddr) -> bool {
        let networks = &self.node_port_networks;
        !address.is_loopback()
            && (networks.is_empty() || networks.iter().any(|n| cidr_holds(n, address)))
    }

    /// Looks an address up; `node_address` tells whether node ports count there.
    pub(super) fn hit(&self, to: SocketAddr, protocol: &str, node_address: bool) -> Hit<'_> {
        let mut address_known = false;
        for (name, service) in &self.services {
            let spec = &service["spec"];
            if left_alone(service) || spec["type"] == "ExternalName" || spec["clusterIP"] == "None"
            {
                continue;
            }
            let class = self.class_of(service, to.ip(), node_address);
            address_known |= matches!(class, Some(Class::ClusterIp | Class::Balancer));
            let Some(class) = class else {
                continue;
            };
            let key = if class == Class::NodePort {
                "nodePort"
            } else {
                "port"
            };
            let is = |p: &&Value| p[key] == to.port() && p["protocol"] == protocol;
            if let Some(port) = list(&spec["ports"]).find(is) {
                return Hit::Port(Frontend {
                    name,
                    service,
                    port,
                    class,
                });
            }
        }
        if address_known {
            Hit::Address
        } else {
            Hit::Nothing
        }
    }

    fn class_of(&self, service: &Value, ip: IpAddr, node_address: bool) -> Option<Class> {
        let spec = &service["spec"];
        let outward = spec["type"] == "NodePort" || spec["type"] == "LoadBalancer";
        let balanced = |i: &Value| text(&i["ip"]).parse() == Ok(ip) && i["ipMode"] != "Proxy";
        if holds(&spec["clusterIPs"], ip) {
            return Some(Class::ClusterIp);
        }
        if spec["type"] == "LoadBalancer"
            && list(&service["status"]["loadBalancer"]["ingress"]).any(balanced)
        {
            return Some(Class::Balancer);
        }
        if holds(&spec["externalIPs"], ip) {
            return Some(Class::ExternalIp);
        }
        (outward && node_address && self.serves_node_ports(ip)).then_some(Class::NodePort)
    }

    /// Whether a client may use the frontend (spec.loadBalancerSourceRanges; each restricts its own family).
    pub(super) fn admits(frontend: &Frontend<'_>, client: IpAddr) -> bool {
        let ranges = &frontend.service["spec"]["loadBalancerSourceRanges"];
        frontend.class != Class::Balancer
            || !list(ranges).any(|r| text(r).contains(':') == client.is_ipv6())
            || list(ranges).any(|r| cidr_holds(text(r).trim(), client))
    }

    /// Endpoints of a frontend for a new connection that is balanced on `node`. Traffic policy first, then readiness
    /// (KEP-1669), then hints (KEP-2433, KEP-3015), which count among ready endpoints only.
    pub(super) fn pool(&self, frontend: &Frontend<'_>, v6: bool, node: &str, inside: bool) -> Pool {
        let spec = &frontend.service["spec"];
        let local = match frontend.class {
            Class::ClusterIp => spec["internalTrafficPolicy"] == "Local",
            _ => !inside && spec["externalTrafficPolicy"] == "Local",
        };
        let all = self.endpoints(frontend, v6);
        let scoped: Vec<&Endpoint> = all.iter().filter(|e| !local || e.node == node).collect();
        let ready: Vec<&Endpoint> = scoped.iter().copied().filter(|e| e.ready).collect();
        let chosen = if ready.is_empty() {
            scoped.into_iter().filter(|e| e.draining).collect()
        } else if local {
            ready
        } else {
            self.hinted(ready, node)
        };
        if !chosen.is_empty() {
            return Pool::Usable(chosen.iter().map(|e| e.address).collect());
        }
        if all.iter().any(|e| e.ready || e.draining) {
            Pool::Elsewhere
        } else {
            Pool::Empty
        }
    }

    /// Endpoints that an existing UDP flow may stay with: all that serve, draining ones too.
    pub(super) fn serving(&self, frontend: &Frontend<'_>, v6: bool) -> Vec<SocketAddr> {
        let all = self.endpoints(frontend, v6).into_iter();
        let serves = all.filter(|e| e.ready || e.draining);
        serves.map(|e| e.address).collect()
    }

    /// How many ready endpoints of a Service are on a node (KEP-1669: draining ones do not count for balancers).
    pub(super) fn local_ready(&self, name: &(String, String), node: &str) -> usize {
        let Some(service) = self.services.get(name) else {
            return 0;
        };
        let mut addresses = Vec::new();
        for port in list(&service["spec"]["ports"]) {
            let class = Class::ClusterIp;
            let frontend = Frontend {
                name,
                service,
                port,
                class,
            };
            for endpoint in self.endpoints(&frontend, false) {
                if endpoint.ready && endpoint.node == node {
                    addresses.push(endpoint.address.ip());
                }
            }
        }
        addresses.sort_unstable();
        addresses.dedup();
        addresses.len()
    }

    fn hinted<'e>(&self, ready: Vec<&'e Endpoint>, node: &str) -> Vec<&'e Endpoint> {
        let narrowed = |hints: fn(&Endpoint) -> &Vec<String>, own: &str| {
            if ready.iter().any(|e| hints(e).is_empty()) {
                return Vec::new();
            }
            let mine = ready.iter().copied();
            mine.filter(|e| hints(e).iter().any(|h| h == own)).collect()
        };
        let near: Vec<&Endpoint> = narrowed(|e| &e.nodes, node);
        if !near.is_empty() {
            return near;
        }
        let zone = self.nodes.get(node).and_then(|n| n.zone.clone());
        let near: Vec<&Endpoint> = zone.map_or_else(Vec::new, |z| narrowed(|e| &e.zones, &z));
        if near.is_empty() { ready } else { near }
    }

    /// All endpoints of a port, each once; what any slice says in favour of one counts.
    fn endpoints(&self, frontend: &Frontend<'_>, v6: bool) -> Vec<Endpoint> {
        let mut found: BTreeMap<SocketAddr, Endpoint> = BTreeMap::new();
        let family = if v6 { "IPv6" } else { "IPv4" };
        let of_service = |slice: &&Value| {
            let meta = &slice["metadata"];
            meta["namespace"] == frontend.name.0
                && meta["labels"]["kubernetes.io/service-name"] == frontend.name.1
                && slice["addressType"] == family
        };
        for slice in self.slices.iter().filter(of_service) {
            let same = |p: &&Value| {
                text(&p["name"]) == text(&frontend.port["name"])
                    && p["protocol"].as_str().unwrap_or("TCP") == text(&frontend.port["protocol"])
            };
            let port = list(&slice["ports"]).find(same);
            let port = port.and_then(|p| u16::try_from(p["port"].as_u64()?).ok());
            let Some(port) = port else {
                continue;
            };
            for item in list(&slice["endpoints"]) {
                let Some(ip) = list(&item["addresses"]).find_map(|a| text(a).parse().ok()) else {
                    continue;
                };
                if is_nobodys(ip) {
                    continue;
                }
                let seen = endpoint(item, SocketAddr::new(ip, port));
                let known = found.entry(seen.address).or_insert_with(|| seen.clone());
                known.ready |= seen.ready;
                known.draining |= seen.draining;
            }
        }
        found.into_values().collect()
    }
}

/// Addresses that an Endpoints object may not have (API reference, `EndpointAddress`), and 0.0.0.0.
fn is_nobodys(ip: IpAddr) -> bool {
    let local = match ip {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    local || ip.is_loopback() || ip.is_multicast() || ip.is_unspecified()
}

fn endpoint(item: &Value, address: SocketAddr) -> Endpoint {
    let conditions = &item["conditions"];
    let ready = conditions["ready"].as_bool().unwrap_or(true);
    let serving = conditions["serving"].as_bool().unwrap_or(ready);
    Endpoint {
        address,
        ready,
        draining: serving && conditions["terminating"] == true,
        node: text(&item["nodeName"]).to_owned(),
        zones: names(&item["hints"]["forZones"]),
        nodes: names(&item["hints"]["forNodes"]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn view(policy: &str, endpoints: Value) -> View {
        let name = ("default".to_owned(), "web".to_owned());
        let service = json!({"metadata": {"namespace": "default", "name": "web"}, "spec": {
            "type": "ClusterIP", "clusterIPs": ["10.96.0.10"], "internalTrafficPolicy": policy,
            "ports": [{"port": 80, "protocol": "TCP"}]}});
        let slice = json!({"metadata": {"namespace": "default", "labels": {"kubernetes.io/service-name": "web"}},
            "addressType": "IPv4", "ports": [{"port": 8080, "protocol": "TCP"}], "endpoints": endpoints});
        let zone = |z: &str| NodeView {
            addresses: vec![],
            zone: Some(z.into()),
        };
        View {
            edition: 1,
            services: [(name, service)].into(),
            slices: vec![slice],
            nodes: [("n1".into(), zone("a")), ("n2".into(), zone("b"))].into(),
            node_port_networks: vec![],
        }
    }

    fn pool(view: &View) -> Pool {
        let Hit::Port(frontend) = view.hit("10.96.0.10:80".parse().unwrap(), "TCP", false) else {
            panic!("no frontend");
        };
        view.pool(&frontend, false, "n1", true)
    }

    fn usable(addresses: &[&str]) -> Pool {
        let all = addresses
            .iter()
            .map(|a| format!("{a}:8080").parse().unwrap());
        Pool::Usable(all.collect())
    }

    #[test]
    fn policy_then_readiness_then_hints() {
        let one = |ip: &str, node: &str, ready: bool, terminating: bool, zones: &[&str]| {
            let zones: Vec<Value> = zones.iter().map(|z| json!({"name": z})).collect();
            json!({"addresses": [ip], "nodeName": node, "hints": {"forZones": zones},
                "conditions": {"ready": ready, "serving": true, "terminating": terminating}})
        };
        let draining = one("10.0.0.1", "n1", false, true, &["a"]);
        let near = one("10.0.0.2", "n1", true, false, &["a"]);
        let far = one("10.0.0.3", "n2", true, false, &["b"]);
        let bare = one("10.0.0.4", "n2", true, false, &[]);
        let cases = [
            (
                "Cluster",
                json!([draining, near, far]),
                usable(&["10.0.0.2"]),
            ),
            (
                "Cluster",
                json!([near, far, bare]),
                usable(&["10.0.0.2", "10.0.0.3", "10.0.0.4"]),
            ),
            ("Cluster", json!([draining, far]), usable(&["10.0.0.3"])),
            ("Local", json!([draining, far]), usable(&["10.0.0.1"])),
            ("Local", json!([far]), Pool::Elsewhere),
            ("Local", json!([]), Pool::Empty),
        ];
        for (policy, endpoints, expected) in cases {
            assert_eq!(
                pool(&view(policy, endpoints.clone())),
                expected,
                "{policy} {endpoints}"
            );
        }
    }
}
