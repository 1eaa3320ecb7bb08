//! Rows of Services, endpoints and the networking group.

use serde_json::Value;

use super::row::{NONE, Row, labels, member, selector_or_none, with_more};

/// Endpoints and ports shown before «+ N more».
const SHOWN: usize = 3;

pub(super) fn cells(kind: &str, row: &Row<'_>) -> Option<Vec<Value>> {
    Some(match kind {
        "Service" => service(row),
        "Endpoints" => vec![row.name(), endpoints(row).into(), row.age()],
        "EndpointSlice" => endpoint_slice(row),
        "Ingress" => ingress(row),
        "IngressClass" => vec![
            default_marked(row, "ingressclass.kubernetes.io/is-default-class"),
            row.text("/spec/controller").into(),
            class_parameters(row).into(),
            row.age(),
        ],
        "NetworkPolicy" => vec![
            row.name(),
            selector_or_none(row.at("/spec/podSelector")),
            row.age(),
        ],
        "ClusterNetworkPolicy" => vec![
            row.name(),
            row.text("/spec/tier").into(),
            row.at("/spec/priority")
                .map(ToString::to_string)
                .unwrap_or_default()
                .into(),
            row.age(),
        ],
        "IPAddress" => vec![row.name(), parent(row).into(), row.age()],
        "ServiceCIDR" => vec![
            row.name(),
            row.texts("/spec/cidrs").join(",").into(),
            row.age(),
        ],
        _ => return None,
    })
}

/// The name, marked when an annotation makes the object the default of its kind.
pub(super) fn default_marked(row: &Row<'_>, annotation: &str) -> Value {
    let name = row.text("/metadata/name");
    let set = row
        .at("/metadata/annotations")
        .is_some_and(|a| member(a, annotation) == "true");
    if set {
        format!("{name} (default)").into()
    } else {
        name.into()
    }
}

fn service(row: &Row<'_>) -> Vec<Value> {
    let ports: Vec<String> = row.list("/spec/ports").iter().map(service_port).collect();
    let ports = if ports.is_empty() {
        NONE.to_owned()
    } else {
        ports.join(",")
    };
    vec![
        row.name(),
        row.text("/spec/type").into(),
        row.text_or("/spec/clusterIPs/0", NONE).into(),
        external_addresses(row).into(),
        ports.into(),
        row.age(),
        labels(row.at("/spec/selector")).into(),
    ]
}

fn service_port(port: &Value) -> String {
    let number = |key: &str| port.get(key).and_then(Value::as_i64).unwrap_or_default();
    let protocol = member(port, "protocol");
    match number("nodePort") {
        0 => format!("{}/{protocol}", number("port")),
        node_port => format!("{}:{node_port}/{protocol}", number("port")),
    }
}

fn external_addresses(row: &Row<'_>) -> String {
    let mut addresses: Vec<String> = row
        .texts("/spec/externalIPs")
        .into_iter()
        .map(str::to_owned)
        .collect();
    match row.text("/spec/type") {
        "ExternalName" => row.text("/spec/externalName").to_owned(),
        "LoadBalancer" => {
            let mut all = balancer_addresses(row);
            all.append(&mut addresses);
            if all.is_empty() {
                "<pending>".to_owned()
            } else {
                all.join(",")
            }
        }
        "ClusterIP" | "NodePort" if addresses.is_empty() => NONE.to_owned(),
        "ClusterIP" | "NodePort" => addresses.join(","),
        _ => "<unknown>".to_owned(),
    }
}

/// Addresses or host names of a load balancer's status, sorted.
fn balancer_addresses(row: &Row<'_>) -> Vec<String> {
    let mut addresses: Vec<String> = row
        .list("/status/loadBalancer/ingress")
        .iter()
        .map(|i| {
            if member(i, "ip").is_empty() {
                member(i, "hostname")
            } else {
                member(i, "ip")
            }
        })
        .filter(|text| !text.is_empty())
        .map(str::to_owned)
        .collect();
    addresses.sort();
    addresses.dedup();
    addresses
}

fn endpoints(row: &Row<'_>) -> String {
    let mut all = Vec::new();
    for subset in row.list("/subsets") {
        let list = |key: &str| {
            subset
                .get(key)
                .and_then(Value::as_array)
                .into_iter()
                .flatten()
        };
        let ports: Vec<i64> = list("ports")
            .filter_map(|p| p.get("port")?.as_i64())
            .collect();
        for address in list("addresses").map(|a| member(a, "ip")) {
            if ports.is_empty() {
                all.push(address.to_owned());
            }
            for port in &ports {
                let host = if address.contains(':') {
                    format!("[{address}]")
                } else {
                    address.to_owned()
                };
                all.push(format!("{host}:{port}"));
            }
        }
    }
    if all.is_empty() {
        NONE.to_owned()
    } else {
        with_more(&all, SHOWN)
    }
}

fn endpoint_slice(row: &Row<'_>) -> Vec<Value> {
    let ports: Vec<String> = row
        .list("/ports")
        .iter()
        .map(|port| {
            match (
                port.get("port").and_then(Value::as_i64),
                member(port, "name"),
            ) {
                (Some(number), _) => number.to_string(),
                (None, "") => "*".to_owned(),
                (None, name) => name.to_owned(),
            }
        })
        .collect();
    let addresses: Vec<String> = row
        .list("/endpoints")
        .iter()
        .filter_map(|e| e.get("addresses")?.as_array())
        .flatten()
        .filter_map(|a| a.as_str().map(str::to_owned))
        .collect();
    vec![
        row.name(),
        row.text("/addressType").into(),
        with_more(&ports, SHOWN).into(),
        with_more(&addresses, SHOWN).into(),
        row.age(),
    ]
}

fn ingress(row: &Row<'_>) -> Vec<Value> {
    let hosts: Vec<String> = row
        .list("/spec/rules")
        .iter()
        .map(|r| member(r, "host").to_owned())
        .filter(|host| !host.is_empty())
        .collect();
    let hosts = if hosts.is_empty() {
        "*".to_owned()
    } else {
        with_more(&hosts, SHOWN)
    };
    let ports = if row.list("/spec/tls").is_empty() {
        "80"
    } else {
        "80, 443"
    };
    vec![
        row.name(),
        row.text_or("/spec/ingressClassName", NONE).into(),
        hosts.into(),
        balancer_addresses(row).join(",").into(),
        ports.into(),
        row.age(),
    ]
}

fn class_parameters(row: &Row<'_>) -> String {
    let Some(parameters) = row.at("/spec/parameters") else {
        return NONE.to_owned();
    };
    let kind = member(parameters, "kind");
    let name = member(parameters, "name");
    match member(parameters, "apiGroup") {
        "" => format!("{kind}/{name}"),
        group => format!("{kind}.{group}/{name}"),
    }
}

fn parent(row: &Row<'_>) -> String {
    let Some(parent) = row.at("/spec/parentRef") else {
        return NONE.to_owned();
    };
    let resource = match member(parent, "group") {
        "" => member(parent, "resource").to_owned(),
        group => format!("{}.{group}", member(parent, "resource")),
    };
    [
        resource.as_str(),
        member(parent, "namespace"),
        member(parent, "name"),
    ]
    .into_iter()
    .filter(|part| !part.is_empty())
    .collect::<Vec<_>>()
    .join("/")
}
