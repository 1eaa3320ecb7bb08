//! Ports of the node that lead to a pod: the CNI capability `portMappings`, as runtimes send it for `hostPort`. Pure.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::record::Record;
use super::{CniError, Code};
use crate::compile::services::{HostPort, SCTP, TCP, UDP};

/// One mapping as libcni writes it (CNI conventions, «port mappings»). Numbers are checked by [`check`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PortMapping {
    /// Zero: the container port is not on the node.
    pub host_port: i64,
    pub container_port: i64,
    /// In any case; empty means TCP.
    pub protocol: String,
    /// Empty: on every address of the node.
    #[serde(rename = "hostIP")]
    pub host_ip: String,
}

/// Leaves out mappings that map nothing.
pub(super) fn check(mappings: &[PortMapping]) -> Result<Vec<PortMapping>, CniError> {
    let asked = mappings.iter().filter(|mapping| mapping.host_port != 0);
    asked
        .map(|mapping| {
            read(mapping).map(|_| mapping.clone()).ok_or_else(|| {
                let message = format!("runtimeConfig.portMappings has {mapping:?}");
                CniError::new(Code::InvalidConfig, message).with_details(
                    "ports are 1 to 65535, protocols tcp, udp and sctp, hostIP an address or empty",
                )
            })
        })
        .collect()
}

/// Host port, container port, protocol, address.
fn read(mapping: &PortMapping) -> Option<(u16, u16, u8, Option<IpAddr>)> {
    let port = |number: i64| u16::try_from(number).ok().filter(|number| *number != 0);
    let protocol = match mapping.protocol.to_ascii_lowercase().as_str() {
        "" | "tcp" => TCP,
        "udp" => UDP,
        "sctp" => SCTP,
        _ => return None,
    };
    let address = match mapping.host_ip.as_str() {
        "" => None,
        text => Some(text.parse().ok()?),
    };
    Some((
        port(mapping.host_port)?,
        port(mapping.container_port)?,
        protocol,
        address,
    ))
}

/// The host ports of an attachment.
pub(super) fn of_record(record: &Record) -> impl Iterator<Item = HostPort> + '_ {
    let pod = if record.pod.name.is_empty() {
        record.key.to_string()
    } else {
        format!("pod {}/{}", record.pod.namespace, record.pod.name)
    };
    let mappings = record.port_mappings.iter().filter_map(read);
    mappings.map(move |(host_port, port, protocol, host_address)| HostPort {
        sequence: record.sequence,
        pod: format!("{pod} ({})", record.key.host_name()),
        addresses: record.addresses.clone(),
        host_address,
        host_port,
        port,
        protocol,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(json: &str) -> PortMapping {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn mappings_are_read_as_libcni_writes_them() {
        let given = [
            mapping(r#"{"hostPort":8000,"containerPort":8080,"protocol":"tcp","hostIP":""}"#),
            mapping(
                r#"{"hostPort":53,"containerPort":5353,"protocol":"UDP","hostIP":"192.0.2.1"}"#,
            ),
            mapping(r#"{"hostPort":9,"containerPort":9,"protocol":"sctp","hostIP":"::"}"#),
            mapping(r#"{"hostPort":0,"containerPort":80}"#),
        ];
        let kept = check(&given).unwrap();
        let read: Vec<_> = kept.iter().filter_map(read).collect();
        let address = |text: &str| Some(text.parse().unwrap());
        assert_eq!(
            read,
            [
                (8000, 8080, TCP, None),
                (53, 5353, UDP, address("192.0.2.1")),
                (9, 9, SCTP, address("::")),
            ]
        );
    }

    #[test]
    fn mappings_that_cannot_be_are_refused() {
        for bad in [
            r#"{"hostPort":65536,"containerPort":80}"#,
            r#"{"hostPort":-1,"containerPort":80}"#,
            r#"{"hostPort":80,"containerPort":0}"#,
            r#"{"hostPort":80,"containerPort":80,"protocol":"icmp"}"#,
            r#"{"hostPort":80,"containerPort":80,"hostIP":"here"}"#,
        ] {
            let refused = check(&[mapping(bad)]).unwrap_err();
            assert_eq!(refused.code, Code::InvalidConfig, "{bad}");
        }
    }
}
