//! A case file as values: nodes, pods, externals, segments, and the addresses they have. Pure.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::actor::command::Protocol;

fn lan() -> String {
    "lan".into()
}
fn default_namespace() -> String {
    "default".into()
}
fn n1() -> String {
    "n1".into()
}
fn yes() -> bool {
    true
}
fn tcp() -> Protocol {
    Protocol::Tcp
}
fn settle() -> f64 {
    3.0
}
fn one_node() -> Vec<NodeSpec> {
    vec![NodeSpec {
        name: n1(),
        segment: lan(),
        zone: None,
        ips: None,
        also: vec![],
        pod_cidrs: None,
        joined: true,
    }]
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::cases) struct Listen {
    pub(in crate::cases) port: u16,
    #[serde(default = "tcp")]
    pub(in crate::cases) protocol: Protocol,
    #[serde(default)]
    pub(in crate::cases) name: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::cases) struct HostPort {
    #[serde(rename = "hostPort")]
    pub(in crate::cases) host_port: u16,
    pub(in crate::cases) port: u16,
    #[serde(default = "tcp")]
    pub(in crate::cases) protocol: Protocol,
    #[serde(default, rename = "hostIP")]
    pub(in crate::cases) host_ip: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::cases) struct SegmentSpec {
    pub(in crate::cases) name: String,
    pub(in crate::cases) path_mtu: Option<u32>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::cases) struct NodeSpec {
    pub(in crate::cases) name: String,
    #[serde(default = "lan")]
    pub(in crate::cases) segment: String,
    pub(in crate::cases) zone: Option<String>,
    pub(in crate::cases) ips: Option<Vec<IpAddr>>,
    #[serde(default)]
    pub(in crate::cases) also: Vec<IpAddr>,
    #[serde(rename = "podCIDRs")]
    pub(in crate::cases) pod_cidrs: Option<Vec<String>>,
    #[serde(default = "yes")]
    pub(in crate::cases) joined: bool,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::cases) struct RouteSpec {
    pub(in crate::cases) to: String,
    pub(in crate::cases) via: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::cases) struct ExternalSpec {
    pub(in crate::cases) name: String,
    #[serde(default = "lan")]
    pub(in crate::cases) segment: String,
    pub(in crate::cases) ips: Option<Vec<IpAddr>>,
    #[serde(default)]
    pub(in crate::cases) owns: Vec<String>,
    #[serde(default)]
    pub(in crate::cases) listen: Vec<Listen>,
    #[serde(default)]
    pub(in crate::cases) routes: Vec<RouteSpec>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::cases) struct PodSpec {
    pub(in crate::cases) name: String,
    #[serde(default = "default_namespace")]
    pub(in crate::cases) namespace: String,
    #[serde(default = "n1")]
    pub(in crate::cases) node: String,
    #[serde(default)]
    pub(in crate::cases) labels: BTreeMap<String, String>,
    #[serde(default)]
    pub(in crate::cases) listen: Vec<Listen>,
    #[serde(default, rename = "hostPorts")]
    pub(in crate::cases) host_ports: Vec<HostPort>,
    #[serde(default = "yes")]
    pub(in crate::cases) ready: bool,
    #[serde(default)]
    pub(in crate::cases) terminating: bool,
    #[serde(default, rename = "hostNetwork")]
    pub(in crate::cases) host_network: bool,
    #[serde(default = "yes")]
    pub(in crate::cases) present: bool,
    /// Addresses that it is to have; none leaves them to the agent.
    #[serde(skip)]
    pub(in crate::cases) wanted_ips: Vec<IpAddr>,
    /// What the API serves of it; made of the rest when there is none.
    #[serde(skip)]
    pub(in crate::cases) api: Option<Value>,
}

impl PodSpec {
    /// How references and answers call it: `name`, or `namespace/name` outside `default`.
    #[must_use]
    pub(in crate::cases) fn key(&self) -> String {
        pod_key(&self.namespace, &self.name)
    }

    /// The pod as the API serves it before it is wired.
    #[must_use]
    pub(in crate::cases) fn object(&self) -> Value {
        let mut object = self.api.clone().unwrap_or_else(|| {
            let port = |l: &Listen| json!({"containerPort": l.port, "protocol": l.protocol.name(), "name": l.name});
            let ports: Vec<Value> = self.listen.iter().map(port).collect();
            json!({"apiVersion": "v1", "kind": "Pod",
                "metadata": {"namespace": self.namespace, "name": self.name, "labels": self.labels},
                "spec": {"nodeName": self.node, "hostNetwork": self.host_network,
                    "containers": [{"name": "c", "image": "none", "ports": ports}]}})
        });
        object["status"] = json!({"phase": "Pending"});
        object
    }

    /// The same with what its wiring and its node tell.
    pub(in crate::cases) fn wired(&self, object: &mut Value, ips: &[IpAddr]) {
        let all: Vec<Value> = ips.iter().map(|ip| json!({"ip": ip.to_string()})).collect();
        let told = self.api.as_ref().map(|api| api["status"].clone());
        let status = told.unwrap_or_else(|| {
            let ready = if self.ready { "True" } else { "False" };
            json!({"phase": "Running", "conditions": [{"type": "Ready", "status": ready}]})
        });
        object["status"] = status;
        object["status"]["podIP"] = all.first().map_or(Value::Null, |ip| ip["ip"].clone());
        object["status"]["podIPs"] = all.into();
    }
}

#[must_use]
pub(in crate::cases) fn pod_key(namespace: &str, name: &str) -> String {
    if namespace == "default" {
        name.to_owned()
    } else {
        format!("{namespace}/{name}")
    }
}

/// A reference to a pod in the form of [`PodSpec::key`].
#[must_use]
pub(in crate::cases) fn normal_key(reference: &str) -> String {
    reference
        .strip_prefix("default/")
        .unwrap_or(reference)
        .to_owned()
}

/// A whole case file.
#[derive(Clone, Debug, Deserialize)]
pub(in crate::cases) struct CaseFile {
    #[serde(default)]
    pub(in crate::cases) needs: Vec<String>,
    #[serde(default)]
    pub(in crate::cases) families: Vec<String>,
    #[serde(default)]
    pub(in crate::cases) agent: serde_json::Map<String, Value>,
    #[serde(default)]
    pub(in crate::cases) segments: Vec<SegmentSpec>,
    #[serde(default = "one_node")]
    pub(in crate::cases) nodes: Vec<NodeSpec>,
    #[serde(default)]
    pub(in crate::cases) external: Vec<ExternalSpec>,
    #[serde(default)]
    pub(in crate::cases) pods: Vec<PodSpec>,
    #[serde(default)]
    pub(in crate::cases) objects: Vec<Value>,
    #[serde(default)]
    pub(in crate::cases) generate: Vec<Value>,
    #[serde(default = "settle")]
    pub(in crate::cases) settle: f64,
    pub(in crate::cases) steps: Vec<Value>,
}

impl CaseFile {
    /// True when IPv6 is the family of names that have both.
    #[must_use]
    pub(in crate::cases) fn prefers_v6(&self) -> bool {
        self.families.first().is_some_and(|f| f == "IPv6")
    }
}

/// A layer-2 segment and its networks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cases) struct Segment {
    pub(in crate::cases) name: String,
    pub(in crate::cases) v4: Ipv4Addr,
    pub(in crate::cases) v6: Ipv6Addr,
    pub(in crate::cases) path_mtu: Option<u32>,
}

/// Prefix lengths of every segment.
pub(in crate::cases) const V4_PREFIX: u8 = 24;
pub(in crate::cases) const V6_PREFIX: u8 = 64;

impl Segment {
    /// The built-in segments, with what a case says about them.
    #[must_use]
    pub(in crate::cases) fn all(specs: &[SegmentSpec]) -> Vec<Self> {
        let built_in = [
            (
                "lan",
                Ipv4Addr::new(192, 0, 2, 0),
                Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 0),
            ),
            (
                "far",
                Ipv4Addr::new(198, 51, 100, 0),
                Ipv6Addr::new(0x2001, 0xdb8, 0x51, 0, 0, 0, 0, 0),
            ),
        ];
        built_in
            .map(|(name, v4, v6)| {
                let spec = specs.iter().find(|s| s.name == name);
                Self {
                    name: name.to_owned(),
                    v4,
                    v6,
                    path_mtu: spec.and_then(|s| s.path_mtu),
                }
            })
            .to_vec()
    }

    /// Host `digits` of both networks; the digits read the same in both families.
    #[must_use]
    pub(in crate::cases) fn host(&self, digits: u8) -> [IpAddr; 2] {
        let v4 = Ipv4Addr::from(u32::from(self.v4) + u32::from(digits));
        let hex = u128::from_str_radix(&digits.to_string(), 16).unwrap_or(0);
        [v4.into(), Ipv6Addr::from(u128::from(self.v6) + hex).into()]
    }

    #[must_use]
    pub(in crate::cases) fn router(&self) -> [IpAddr; 2] {
        self.host(1)
    }

    #[must_use]
    pub(in crate::cases) fn holds(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(a) => u32::from(a) >> 8 == u32::from(self.v4) >> 8,
            IpAddr::V6(a) => u128::from(a) >> 64 == u128::from(self.v6) >> 64,
        }
    }
}

/// Addresses of the i-th node (from 1).
#[must_use]
pub(in crate::cases) fn node_ips(
    spec: &NodeSpec,
    number: usize,
    segments: &[Segment],
) -> Vec<IpAddr> {
    default_ips(spec.ips.as_ref(), &spec.segment, 10 + number, segments)
}

/// Addresses of the j-th external (from 1).
#[must_use]
pub(in crate::cases) fn external_ips(
    spec: &ExternalSpec,
    number: usize,
    segments: &[Segment],
) -> Vec<IpAddr> {
    default_ips(spec.ips.as_ref(), &spec.segment, 100 + number, segments)
}

fn default_ips(
    own: Option<&Vec<IpAddr>>,
    segment: &str,
    host: usize,
    segments: &[Segment],
) -> Vec<IpAddr> {
    let digits = u8::try_from(host).unwrap_or(u8::MAX);
    match (own, segments.iter().find(|s| s.name == segment)) {
        (Some(ips), _) => ips.clone(),
        (None, Some(segment)) => segment.host(digits).to_vec(),
        (None, None) => Vec::new(),
    }
}

/// Pod ranges of the i-th node (from 1).
#[must_use]
pub(in crate::cases) fn pod_cidrs(spec: &NodeSpec, number: usize) -> Vec<String> {
    let defaults = || {
        vec![
            format!("10.244.{number}.0/24"),
            format!("fd00:244:{number}::/64"),
        ]
    };
    spec.pod_cidrs.clone().unwrap_or_else(defaults)
}

/// The address of one family.
#[must_use]
pub(in crate::cases) fn of_family(ips: &[IpAddr], v6: bool) -> Option<IpAddr> {
    ips.iter().copied().find(|ip| ip.is_ipv6() == v6)
}

/// Does a CIDR hold an address?
#[must_use]
pub(in crate::cases) fn cidr_holds(cidr: &str, address: IpAddr) -> bool {
    let Some((net, length)) = cidr.split_once('/') else {
        return cidr.parse() == Ok(address);
    };
    match (net.parse(), address, length.parse::<u32>()) {
        (Ok(IpAddr::V4(n)), IpAddr::V4(a), Ok(length)) if length <= 32 => {
            let mask = u32::MAX.checked_shl(32 - length).unwrap_or(0);
            u32::from(n) & mask == u32::from(a) & mask
        }
        (Ok(IpAddr::V6(n)), IpAddr::V6(a), Ok(length)) if length <= 128 => {
            let mask = u128::MAX.checked_shl(128 - length).unwrap_or(0);
            u128::from(n) & mask == u128::from(a) & mask
        }
        _ => false,
    }
}

/// The n-th address of a CIDR, without regard to network and broadcast addresses, or the n-th after a bare address.
#[must_use]
pub(in crate::cases) fn nth_of(cidr: &str, n: u32) -> Option<IpAddr> {
    let found: IpAddr = match cidr.split('/').next()?.parse().ok()? {
        IpAddr::V4(a) => Ipv4Addr::from(u32::from(a).checked_add(n)?).into(),
        IpAddr::V6(a) => Ipv6Addr::from(u128::from(a).checked_add(u128::from(n))?).into(),
    };
    (!cidr.contains('/') || cidr_holds(cidr, found)).then_some(found)
}

/// The first addresses of one family out of several CIDRs. Those that hold more than one begin after the network's own.
#[must_use]
pub(in crate::cases) fn owned(cidrs: &[String], v6: bool, wanted: usize) -> Vec<IpAddr> {
    let family = cidrs.iter().filter(|c| c.contains(':') == v6);
    let all = family.flat_map(|cidr| {
        let first = u32::from(nth_of(cidr, 1).is_some());
        (first..).map_while(move |n| nth_of(cidr, n))
    });
    all.take(wanted).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_follow_the_numbers() {
        let segments = Segment::all(&[]);
        let ext = segments[1].host(101);
        assert_eq!(
            ext.map(|a| a.to_string()),
            ["198.51.100.101", "2001:db8:51::101"]
        );
        assert!(segments[0].holds("192.0.2.77".parse().unwrap()));
        assert!(cidr_holds("198.18.0.0/22", "198.18.3.255".parse().unwrap()));
        assert!(!cidr_holds("198.18.0.0/22", "198.18.4.0".parse().unwrap()));
        assert!(cidr_holds("0.0.0.0/0", "1.2.3.4".parse().unwrap()));
        assert_eq!(nth_of("198.18.0.0/22", 257), "198.18.1.1".parse().ok());
        assert_eq!(nth_of("198.18.0.0/30", 4), None);
        assert_eq!(nth_of("10.96.20.1", 299), "10.96.21.44".parse().ok());
    }

    #[test]
    fn owned_addresses_go_on_in_the_next_range() {
        let owns = ["198.18.0.0/30", "2001:db8::7/128", "198.18.9.9/32"].map(str::to_owned);
        let texts = |v6, n| -> Vec<String> {
            let all = owned(&owns, v6, n);
            all.iter().map(ToString::to_string).collect()
        };
        assert_eq!(
            texts(false, 4),
            ["198.18.0.1", "198.18.0.2", "198.18.0.3", "198.18.9.9"]
        );
        assert_eq!(texts(true, 3), ["2001:db8::7"]);
    }
}
