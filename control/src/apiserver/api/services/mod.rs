//! Cluster IPs and node ports of Services.
//!
//! Every allocation is a key of its own that is written in the transaction of its Service: an IPAddress object per
//! cluster IP, an internal key per node port and protocol. So the store decides races, a failed write takes nothing,
//! and nothing has to be rebuilt after a restart.

use std::collections::BTreeMap;
use std::net::IpAddr;

use bytes::Bytes;
use ipnetwork::IpNetwork;
use serde_json::{Map, Value, json};

use super::{Api, now_text, store_error};
use crate::apiserver::object::{self, map_mut, put, text};
use crate::apiserver::registry::ResourceDef;
use crate::status::{ApiError, Cause};
use crate::store::{Expect, Op};

mod external_ips;
mod families;
mod pick;
mod repair;
#[cfg(test)]
mod tests;

pub(super) use carry::carry_over;
mod carry;

/// What a Service's transaction takes and gives back besides the Service.
#[derive(Debug, Default)]
pub(super) struct Allocation {
    pub(super) ops: Vec<Op>,
}

/// Store key to the value that marks it as taken.
type Claims = BTreeMap<String, Bytes>;

fn ip_key(ip: &str) -> String {
    format!("networking.k8s.io/ipaddresses/{ip}")
}

fn port_key(protocol: &str, port: u64) -> String {
    format!("weir/nodeports/{protocol}/{port}")
}

fn cause(reason: &'static str, field: impl Into<String>, message: impl Into<String>) -> Cause {
    Cause {
        reason,
        message: message.into(),
        field: field.into(),
    }
}

/// `value` as the API prints it: JSON.
fn invalid_value(field: impl Into<String>, value: impl serde::Serialize, why: &str) -> Cause {
    let value = json!(value);
    let message = format!("Invalid value: {value}: {why}");
    cause("FieldValueInvalid", field, message)
}

fn refuse(service: &Value, cause: Cause) -> ApiError {
    ApiError::invalid("", "Service", object::name(service), vec![cause])
}

fn service_type(service: &Value) -> &str {
    match text(service, "/spec/type") {
        "" => "ClusterIP",
        other => other,
    }
}

fn has_cluster_ip(service: &Value) -> bool {
    service_type(service) != "ExternalName"
}

fn has_node_ports(service: &Value) -> bool {
    matches!(service_type(service), "NodePort" | "LoadBalancer")
}

/// A LoadBalancer may do without node ports.
fn wants_node_ports(service: &Value) -> bool {
    has_node_ports(service)
        && (service_type(service) == "NodePort"
            || service["spec"]["allocateLoadBalancerNodePorts"].as_bool() != Some(false))
}

/// externalTrafficPolicy has a meaning.
fn is_external(service: &Value) -> bool {
    has_node_ports(service)
        || (service_type(service) == "ClusterIP"
            && service["spec"]["externalIPs"]
                .as_array()
                .is_some_and(|ips| !ips.is_empty()))
}

fn has_health_port(service: &Value) -> bool {
    service_type(service) == "LoadBalancer"
        && text(service, "/spec/externalTrafficPolicy") == "Local"
}

fn cluster_ips(service: &Value) -> Vec<String> {
    let list = service["spec"]["clusterIPs"].as_array();
    list.into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .map(str::to_owned)
        .collect()
}

fn protocol(port: &Value) -> &str {
    match text(port, "/protocol") {
        "" => "TCP",
        other => other,
    }
}

fn ports(service: &Value) -> &[Value] {
    service["spec"]["ports"]
        .as_array()
        .map_or(&[], Vec::as_slice)
}

/// The keys that a stored Service holds.
fn held(service: &Value) -> Vec<String> {
    let ips = cluster_ips(service)
        .into_iter()
        .filter(|ip| ip != "None")
        .map(|ip| ip_key(&ip));
    let node_ports = ports(service).iter().filter_map(|port| {
        Some(port_key(
            protocol(port),
            port["nodePort"].as_u64().filter(|p| *p > 0)?,
        ))
    });
    let health = service["spec"]["healthCheckNodePort"]
        .as_u64()
        .filter(|p| *p > 0);
    ips.chain(node_ports)
        .chain(health.map(|p| port_key("TCP", p)))
        .collect()
}

/// Gives back what a Service that is removed holds.
pub(super) fn release(def: &ResourceDef, object: &Value) -> Vec<Op> {
    if !def.group.is_empty() || def.kind != "Service" {
        return Vec::new();
    }
    held(object)
        .into_iter()
        .map(|key| Op::Delete {
            key,
            expect: Expect::Any,
        })
        .collect()
}

impl Api {
    /// Chooses or checks addresses and ports, writes them into `service`, and returns the steps that take the new ones
    /// and give back those that `old` no longer needs.
    pub(super) async fn allocate(
        &self,
        service: &mut Value,
        old: Option<&Value>,
    ) -> Result<Allocation, ApiError> {
        self.check_external_ips(service, old).await?;
        let held_before: Vec<String> = old.map(held).unwrap_or_default();
        let mut claims = Claims::new();
        if has_cluster_ip(service) {
            self.assign_families(service, old)?;
            self.assign_ips(service, old, &mut claims).await?;
        }
        self.assign_ports(service, &held_before, &mut claims)
            .await?;
        self.assign_health_port(service, old, &held_before, &mut claims)
            .await?;
        let mut ops = Vec::new();
        for (key, value) in &claims {
            if !held_before.contains(key) {
                let (key, value) = (key.clone(), value.clone());
                ops.push(Op::Put {
                    key,
                    value,
                    expect: Expect::Absent,
                });
            }
        }
        for key in held_before
            .into_iter()
            .filter(|key| !claims.contains_key(key))
        {
            ops.push(Op::Delete {
                key,
                expect: Expect::Any,
            });
        }
        Ok(Allocation { ops })
    }

    fn service_cidr(&self, family: &str) -> Option<IpNetwork> {
        let mut cidrs = self.network.service_cidrs.iter().copied();
        cidrs.find(|cidr| families::family_of_net(*cidr) == family)
    }

    fn assign_families(&self, service: &mut Value, old: Option<&Value>) -> Result<(), ApiError> {
        let cidrs = self.network.service_cidrs.iter();
        let cluster: Vec<&'static str> = cidrs.map(|c| families::family_of_net(*c)).collect();
        families::assign(service, old, &cluster).map_err(|faults| match faults {
            families::Faults::Causes(causes) => {
                ApiError::invalid("", "Service", object::name(service), causes)
            }
            families::Faults::Other(error) => error,
        })
    }

    async fn assign_ips(
        &self,
        service: &mut Value,
        old: Option<&Value>,
        claims: &mut Claims,
    ) -> Result<(), ApiError> {
        let mut wanted = cluster_ips(service);
        if wanted.first().is_some_and(|ip| ip == "None") {
            return Ok(());
        }
        let families = families::of(service);
        for (n, family) in families.iter().enumerate() {
            let Some(cidr) = self.service_cidr(family) else {
                continue;
            };
            let ip = match wanted.get(n) {
                Some(ip) => {
                    let kept = old.is_some_and(|o| cluster_ips(o).contains(ip));
                    if !kept {
                        self.check_ip(service, n, ip, cidr).await?;
                    }
                    ip.clone()
                }
                None => self.pick_ip(cidr).await?.to_string(),
            };
            claims.insert(ip_key(&ip), ip_address(service, &ip, family)?);
            if n < wanted.len() {
                wanted[n] = ip;
            } else {
                wanted.push(ip);
            }
        }
        let spec = map_mut(service, "spec")?;
        put(
            spec,
            "clusterIP",
            wanted.first().map(|ip| ip.as_str().into()),
        );
        spec.insert("clusterIPs".into(), json!(wanted));
        Ok(())
    }

    async fn check_ip(
        &self,
        service: &Value,
        n: usize,
        ip: &str,
        cidr: IpNetwork,
    ) -> Result<(), ApiError> {
        let field = format!("spec.clusterIPs[{n}]");
        let Ok(address) = ip.parse::<IpAddr>() else {
            let why = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)";
            return Err(refuse(service, invalid_value(field, ip, why)));
        };
        if !pick::usable(cidr, address) {
            let why = format!(
                "failed to allocate IP {ip}: the provided IP ({ip}) is not in the valid range. The range of valid IPs is {cidr}"
            );
            return Err(refuse(service, invalid_value(field, [ip], &why)));
        }
        if self
            .store
            .get(&ip_key(&address.to_string()))
            .await
            .map_err(store_error)?
            .is_some()
        {
            let why = format!("failed to allocate IP {ip}: provided IP is already allocated");
            return Err(refuse(service, invalid_value(field, [ip], &why)));
        }
        Ok(())
    }

    async fn assign_ports(
        &self,
        service: &mut Value,
        held_before: &[String],
        claims: &mut Claims,
    ) -> Result<(), ApiError> {
        let wants = wants_node_ports(service);
        let owner = owner(service);
        let mut list = ports(service).to_vec();
        let mut twins: BTreeMap<Option<u64>, u64> = BTreeMap::new();
        // Requested ports first: an automatic choice must not take one of them.
        for automatic in [false, true] {
            for (n, port) in list.iter_mut().enumerate() {
                let requested = port["nodePort"].as_u64().filter(|p| *p > 0);
                if requested.is_some() == automatic {
                    continue;
                }
                let proto = protocol(port).to_owned();
                let number = match requested {
                    Some(number) => {
                        self.check_port(service, n, &proto, number, held_before, claims)
                            .await?;
                        number
                    }
                    None if wants => {
                        // One port number under two protocols (DNS) gets one node port where both are free.
                        let twin = twins.get(&port["port"].as_u64()).copied();
                        match twin {
                            Some(twin) if self.is_free_port(&proto, twin, claims).await? => twin,
                            _ => self.pick_port(&proto, claims).await?,
                        }
                    }
                    None => continue,
                };
                twins.entry(port["port"].as_u64()).or_insert(number);
                claims.insert(port_key(&proto, number), owner.clone());
                if let Value::Object(map) = port {
                    map.insert("nodePort".into(), number.into());
                }
            }
        }
        for port in list.iter_mut().filter_map(Value::as_object_mut) {
            if port.get("nodePort").and_then(Value::as_u64) == Some(0) {
                port.shift_remove("nodePort");
            }
        }
        if !list.is_empty() {
            map_mut(service, "spec")?.insert("ports".into(), Value::Array(list));
        }
        Ok(())
    }

    async fn check_port(
        &self,
        service: &Value,
        n: usize,
        proto: &str,
        number: u64,
        held_before: &[String],
        claims: &Claims,
    ) -> Result<(), ApiError> {
        let field = format!("spec.ports[{n}].nodePort");
        if !has_node_ports(service) {
            let why = format!(
                "Forbidden: may not be used when `type` is '{}'",
                service_type(service)
            );
            return Err(refuse(service, cause("FieldValueForbidden", field, why)));
        }
        self.check_number(service, &field, number)?;
        let key = port_key(proto, number);
        if claims.contains_key(&key) {
            let why = format!("Duplicate value: {number}");
            return Err(refuse(service, cause("FieldValueDuplicate", field, why)));
        }
        if !held_before.contains(&key) && self.is_taken(&key).await? {
            let why = "provided port is already allocated";
            return Err(refuse(service, invalid_value(field, number, why)));
        }
        Ok(())
    }

    async fn assign_health_port(
        &self,
        service: &mut Value,
        old: Option<&Value>,
        held_before: &[String],
        claims: &mut Claims,
    ) -> Result<(), ApiError> {
        const FIELD: &str = "spec.healthCheckNodePort";
        let requested = service["spec"]["healthCheckNodePort"]
            .as_u64()
            .filter(|p| *p > 0);
        if !has_health_port(service) {
            if requested.is_some() {
                let why = "Forbidden: may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'";
                return Err(refuse(service, cause("FieldValueForbidden", FIELD, why)));
            }
            return Ok(());
        }
        let before = old
            .and_then(|o| o["spec"]["healthCheckNodePort"].as_u64())
            .filter(|p| *p > 0);
        if let (Some(requested), Some(before)) = (requested, before)
            && requested != before
        {
            return Err(refuse(
                service,
                invalid_value(FIELD, requested, "field is immutable"),
            ));
        }
        let number = match requested {
            Some(number) => {
                self.check_number(service, FIELD, number)?;
                let key = port_key("TCP", number);
                let own = held_before.contains(&key);
                if claims.contains_key(&key) || (!own && self.is_taken(&key).await?) {
                    let why = "provided port is already allocated";
                    return Err(refuse(service, invalid_value(FIELD, number, why)));
                }
                number
            }
            None => self.pick_port("TCP", claims).await?,
        };
        claims.insert(port_key("TCP", number), owner(service));
        map_mut(service, "spec")?.insert("healthCheckNodePort".into(), number.into());
        Ok(())
    }

    fn check_number(&self, service: &Value, field: &str, number: u64) -> Result<(), ApiError> {
        let (first, last) = (self.network.node_port_first, self.network.node_port_last);
        if (u64::from(first)..=u64::from(last)).contains(&number) {
            return Ok(());
        }
        let why = format!(
            "provided port is not in the valid range. The range of valid ports is {first}-{last}"
        );
        Err(refuse(service, invalid_value(field, number, &why)))
    }

    async fn is_taken(&self, key: &str) -> Result<bool, ApiError> {
        Ok(self.store.get(key).await.map_err(store_error)?.is_some())
    }
}

fn owner(service: &Value) -> Bytes {
    Bytes::from(format!(
        "{}/{}",
        object::namespace(service),
        object::name(service)
    ))
}

/// The IPAddress object that stands for a cluster IP.
fn ip_address(service: &Value, ip: &str, family: &str) -> Result<Bytes, ApiError> {
    let mut labels = Map::new();
    labels.insert(
        "ipaddress.kubernetes.io/managed-by".into(),
        "ipallocator.k8s.io".into(),
    );
    labels.insert("ipaddress.kubernetes.io/ip-family".into(), family.into());
    let parent = json!({"group": "", "resource": "services",
        "namespace": object::namespace(service), "name": object::name(service)});
    object::encode(&json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "IPAddress",
        "metadata": {"name": ip, "uid": uuid::Uuid::new_v4().to_string(),
            "creationTimestamp": now_text(), "labels": labels},
        "spec": {"parentRef": parent},
    }))
}
