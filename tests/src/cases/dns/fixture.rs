//! Fixtures: the reduced API objects of a case file as the desired state of a node.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Context as _, Result, bail};
use control_api::desired::{DesiredState, Name as ObjectName};
use control_api::v1::{
    AddressFamily, ClusterConfig, Endpoint, EndpointPort, EndpointSlice, Protocol, Service,
    ServicePort, ServiceType,
};
use hickory_proto::rr::rdata::{A, AAAA};
use hickory_proto::rr::{Name, RData, Record};
use serde_json::Value;

/// Seconds; of the fixture's upstream server.
const UPSTREAM_TTL_S: u32 = 5;

pub(super) fn state(fixture: &Value, zone: &str) -> Result<DesiredState> {
    let namespaces = list(&fixture["namespaces"]).filter_map(Value::as_str);
    let mut state = DesiredState {
        revision: 1,
        config: ClusterConfig {
            cluster_domain: zone.trim_end_matches('.').to_owned(),
            namespaces: namespaces.map(str::to_owned).collect(),
            ..ClusterConfig::default()
        },
        ..DesiredState::default()
    };
    for object in list(&fixture["services"]) {
        let service = service(object)?;
        let name = ObjectName::new(&service.namespace, &service.name);
        state.services.insert(name, service);
    }
    for (number, object) in list(&fixture["endpointslices"]).enumerate() {
        let slice = slice(object, number)?;
        state
            .endpoint_slices
            .insert(ObjectName::new(&slice.namespace, &slice.name), slice);
    }
    Ok(state)
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn number(value: &Value) -> Result<u32> {
    Ok(u32::try_from(value.as_u64().unwrap_or_default())?)
}

fn protocol(value: &Value) -> Result<i32> {
    let protocol = match value.as_str() {
        None | Some("TCP") => Protocol::Tcp,
        Some("UDP") => Protocol::Udp,
        Some("SCTP") => Protocol::Sctp,
        Some(other) => bail!("unknown protocol {other}"),
    };
    Ok(protocol.into())
}

fn service(object: &Value) -> Result<Service> {
    let service_type = match object["type"].as_str() {
        Some("ExternalName") => ServiceType::ExternalName,
        Some("NodePort") => ServiceType::NodePort,
        Some("LoadBalancer") => ServiceType::LoadBalancer,
        _ => ServiceType::ClusterIp,
    };
    let ips: Vec<String> = list(&object["clusterIPs"]).map(text).collect();
    let port = |port: &Value| -> Result<ServicePort> {
        Ok(ServicePort {
            name: text(&port["name"]),
            protocol: protocol(&port["proto"])?,
            port: number(&port["port"])?,
            node_port: number(&port["nodePort"])?,
        })
    };
    Ok(Service {
        namespace: text(&object["ns"]),
        name: text(&object["name"]),
        r#type: service_type.into(),
        headless: ips.iter().any(|ip| ip == "None"),
        cluster_ips: ips.into_iter().filter(|ip| ip != "None").collect(),
        external_name: text(&object["externalName"]),
        ports: list(&object["ports"]).map(port).collect::<Result<_>>()?,
        publish_not_ready_addresses: object["publishNotReadyAddresses"] == true,
        ..Service::default()
    })
}

fn slice(object: &Value, number_of_slice: usize) -> Result<EndpointSlice> {
    let namespace = text(&object["ns"]);
    let service = text(&object["service"]);
    let family = match object["family"].as_str() {
        Some("IPv6") => AddressFamily::Ipv6,
        _ => AddressFamily::Ipv4,
    };
    let port = |port: &Value| -> Result<EndpointPort> {
        Ok(EndpointPort {
            name: text(&port["name"]),
            protocol: protocol(&port["proto"])?,
            port: number(&port["port"])?,
        })
    };
    let endpoint = |endpoint: &Value| {
        let ready = endpoint["ready"].as_bool().unwrap_or(true);
        let target = text(&endpoint["targetPod"]);
        Endpoint {
            addresses: vec![text(&endpoint["ip"])],
            ready,
            serving: endpoint["serving"].as_bool().unwrap_or(ready),
            terminating: endpoint["terminating"] == true,
            hostname: text(&endpoint["hostname"]),
            target_pod: if target.is_empty() {
                target
            } else {
                format!("{namespace}/{target}")
            },
            ..Endpoint::default()
        }
    };
    let mut endpoints: Vec<Endpoint> = list(&object["endpoints"]).map(endpoint).collect();
    if let [first, last] = object["range"].as_array().map_or(&[][..], Vec::as_slice) {
        endpoints.extend(range(first, last)?.map(|ip| Endpoint {
            addresses: vec![ip.to_string()],
            ready: true,
            serving: true,
            ..Endpoint::default()
        }));
    }
    Ok(EndpointSlice {
        name: format!("{service}-{number_of_slice}"),
        ports: list(&object["ports"]).map(port).collect::<Result<_>>()?,
        family: family.into(),
        namespace,
        service,
        endpoints,
    })
}

fn range(first: &Value, last: &Value) -> Result<impl Iterator<Item = Ipv4Addr>> {
    let address = |value: &Value| -> Result<u32> {
        let text = value.as_str().context("a range holds addresses")?;
        Ok(text.parse::<Ipv4Addr>()?.into())
    };
    Ok((address(first)?..=address(last)?).map(Ipv4Addr::from))
}

/// The network of a reverse zone: 10.in-addr.arpa. is 10.0.0.0/8.
pub(super) fn reverse_network(zone: &Name) -> Result<ipnetwork::IpNetwork> {
    let labels: Vec<String> = zone
        .iter()
        .map(|label| String::from_utf8_lossy(label).to_lowercase())
        .collect();
    let [digits @ .., tree, arpa] = labels.as_slice() else {
        bail!("{zone} is no reverse zone")
    };
    let digits: Vec<&str> = digits.iter().rev().map(String::as_str).collect();
    let cidr = match (tree.as_str(), arpa.as_str()) {
        ("in-addr", "arpa") => {
            let mut octets = digits.clone();
            octets.resize(4, "0");
            format!("{}/{}", octets.join("."), digits.len() * 8)
        }
        ("ip6", "arpa") => {
            let mut nibbles = digits.clone();
            nibbles.resize(32, "0");
            let groups: Vec<String> = nibbles.chunks(4).map(<[&str]>::concat).collect();
            format!("{}/{}", groups.join(":"), digits.len() * 4)
        }
        _ => bail!("{zone} is no reverse zone"),
    };
    Ok(cidr.parse()?)
}

pub(super) fn address_record(name: &Name, address: &str) -> Result<Record> {
    let data = match address.parse()? {
        IpAddr::V4(v4) => RData::A(A(v4)),
        IpAddr::V6(v6) => RData::AAAA(AAAA(v6)),
    };
    Ok(Record::from_rdata(name.clone(), UPSTREAM_TTL_S, data))
}
