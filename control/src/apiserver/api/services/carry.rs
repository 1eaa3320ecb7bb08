//! What an update of a Service keeps from the stored one, and what a change of its type drops. Pure.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::{
    cluster_ips, has_cluster_ip, has_health_port, has_node_ports, is_external, ports, service_type,
    wants_node_ports,
};
use crate::apiserver::object::{map_mut, put, text};
use crate::status::ApiError;

/// Fields that the server allocated stay when the body leaves them out, and go with the type that needed them when the
/// body repeats them unchanged.
pub(in crate::apiserver::api) fn carry_over(new: &mut Value, old: &Value) -> Result<(), ApiError> {
    let (kept, dropped) = (new.clone(), new.clone());
    keep_ips(new, &kept, old)?;
    keep_ports(new, old)?;
    drop_by_type(new, &dropped, old)
}

fn keep_ips(new: &mut Value, given: &Value, old: &Value) -> Result<(), ApiError> {
    if !has_cluster_ip(given) || !has_cluster_ip(old) {
        return Ok(());
    }
    let first = text(given, "/spec/clusterIP");
    let list = cluster_ips(given);
    let old_spec = &old["spec"];
    let primary = text(old, "/spec/clusterIP");
    let same_list = list == cluster_ips(old);
    let spec = map_mut(new, "spec")?;
    if first.is_empty() && (list.is_empty() || same_list) {
        put(spec, "clusterIP", old_spec.get("clusterIP").cloned());
        put(spec, "clusterIPs", old_spec.get("clusterIPs").cloned());
    } else if first == primary && list.is_empty() {
        put(spec, "clusterIPs", old_spec.get("clusterIPs").cloned());
    } else if first.is_empty() {
        put(spec, "clusterIP", old_spec.get("clusterIP").cloned());
    } else if first != primary && same_list {
        // A client that knows the older field only.
        put(spec, "clusterIPs", Some(serde_json::json!([first])));
    }
    for key in ["ipFamilyPolicy", "ipFamilies"] {
        let empty = match spec.get(key) {
            None | Some(Value::Null) => true,
            Some(Value::Array(list)) => list.is_empty(),
            Some(_) => false,
        };
        if empty {
            put(spec, key, old_spec.get(key).cloned());
        }
    }
    Ok(())
}

fn node_ports(service: &Value) -> BTreeSet<u64> {
    let numbers = ports(service).iter().filter_map(|p| p["nodePort"].as_u64());
    numbers.filter(|n| *n > 0).collect()
}

/// Node ports stay with the name of their port. One that the body names for another port is not given twice.
fn keep_ports(new: &mut Value, old: &Value) -> Result<(), ApiError> {
    let both = wants_node_ports(new) && has_node_ports(old);
    let health = has_health_port(new) && has_health_port(old);
    let mut used: BTreeSet<u64> = node_ports(old)
        .intersection(&node_ports(new))
        .copied()
        .collect();
    let spec = map_mut(new, "spec")?;
    if both && let Some(Value::Array(list)) = spec.get_mut("ports") {
        let unset = |p: &&mut Value| p["nodePort"].as_u64().unwrap_or(0) == 0;
        for port in list.iter_mut().filter(unset) {
            let name = text(port, "/name").to_owned();
            let before = ports(old).iter().find(|o| text(o, "/name") == name);
            let number = before.and_then(|o| o["nodePort"].as_u64());
            if let (Some(number), Value::Object(map)) = (number, port)
                && number > 0
                && used.insert(number)
            {
                map.insert("nodePort".into(), number.into());
            }
        }
    }
    if health
        && spec
            .get("healthCheckNodePort")
            .and_then(Value::as_u64)
            .unwrap_or(0)
            == 0
    {
        let number = old["spec"].get("healthCheckNodePort").cloned();
        put(spec, "healthCheckNodePort", number);
    }
    Ok(())
}

fn drop_by_type(new: &mut Value, given: &Value, old: &Value) -> Result<(), ApiError> {
    let old_spec = &old["spec"];
    let lost = |need: fn(&Value) -> bool| need(old) && !need(given);
    let balancer: fn(&Value) -> bool = |s| service_type(s) == "LoadBalancer";
    let external_name: fn(&Value) -> bool = |s| service_type(s) == "ExternalName";
    let mut fields: Vec<&str> = Vec::new();
    if lost(has_cluster_ip) {
        fields.extend(["clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy"]);
        fields.push("internalTrafficPolicy");
    }
    if lost(is_external) {
        fields.push("externalTrafficPolicy");
    }
    if lost(has_health_port) {
        fields.push("healthCheckNodePort");
    }
    if lost(balancer) {
        fields.extend(["allocateLoadBalancerNodePorts", "loadBalancerClass"]);
        // What a balancer had been given leads nowhere any more.
        if let Some(status) = new.get_mut("status").and_then(Value::as_object_mut) {
            status.insert("loadBalancer".into(), Value::Object(Map::new()));
        }
    }
    if lost(external_name) {
        fields.push("externalName");
    }
    let no_ports = lost(has_node_ports) && node_ports(given) == node_ports(old);
    let spec = map_mut(new, "spec")?;
    for field in fields {
        drop_unchanged(spec, field, old_spec);
    }
    if no_ports && let Some(Value::Array(list)) = spec.get_mut("ports") {
        for port in list.iter_mut().filter_map(Value::as_object_mut) {
            port.shift_remove("nodePort");
        }
    }
    Ok(())
}

fn drop_unchanged(spec: &mut Map<String, Value>, field: &str, old_spec: &Value) {
    if spec.get(field) == old_spec.get(field) {
        spec.shift_remove(field);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_body_without_allocations_keeps_them() {
        let old = json!({"spec": {"type": "NodePort", "clusterIP": "10.96.0.9", "clusterIPs": ["10.96.0.9"],
            "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack",
            "ports": [{"port": 80, "protocol": "TCP", "nodePort": 30001}]}});
        let mut new = json!({"spec": {"type": "NodePort", "ports": [{"port": 80}, {"port": 81}]}});
        carry_over(&mut new, &old).unwrap();
        assert_eq!(new["spec"]["clusterIPs"], json!(["10.96.0.9"]));
        assert_eq!(
            new["spec"]["ports"],
            json!([{"port": 80, "nodePort": 30001}, {"port": 81}])
        );
    }

    #[test]
    fn a_changed_type_drops_what_it_needed() {
        let old = json!({"spec": {"type": "NodePort", "clusterIP": "10.96.0.9", "clusterIPs": ["10.96.0.9"],
            "externalTrafficPolicy": "Cluster", "ports": [{"port": 80, "nodePort": 30001}]}});
        let mut new = old.clone();
        new["spec"]["type"] = json!("ExternalName");
        new["spec"]["externalName"] = json!("a.example.com");
        carry_over(&mut new, &old).unwrap();
        assert_eq!(
            new["spec"],
            json!({"type": "ExternalName", "externalName": "a.example.com", "ports": [{"port": 80}]})
        );
    }
}
