//! The network configuration on stdin.
//!
//! Keys that this plugin does not know are accepted: runtimes inject their own (`cniVersions`, `runtimeConfig`,
//! `cni.dev/…`), and the specification asks plugins to ignore them.

use std::path::PathBuf;

use serde::Deserialize;
use serde_json::Value;

use crate::environment::is_identifier;
use crate::ipam::Delegate;
use crate::spec::{Code, Error, SUPPORTED, Version};

/// Where the agent listens unless the configuration says otherwise.
const DEFAULT_SOCKET: &str = "/run/weir/cni.sock";

/// The agent's state directory unless the configuration says otherwise.
const DEFAULT_STATE_DIR: &str = "/var/lib/weir";

#[derive(Debug, Deserialize)]
struct Raw {
    #[serde(rename = "cniVersion", default)]
    cni_version: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    socket: Option<PathBuf>,
    #[serde(rename = "stateDir", default)]
    state_dir: Option<PathBuf>,
    #[serde(rename = "prevResult", default)]
    prev_result: Option<Value>,
    #[serde(default)]
    dns: Option<Value>,
    #[serde(default)]
    ipam: Option<Value>,
    #[serde(rename = "cni.dev/valid-attachments", default)]
    valid_attachments: Option<Vec<Attachment>>,
    /// The key that early drafts of GC used; libcni writes both.
    #[serde(rename = "cni.dev/attachments", default)]
    attachments: Option<Vec<Attachment>>,
    #[serde(rename = "runtimeConfig", default)]
    runtime_config: Option<RuntimeConfig>,
}

/// Values of capabilities that the configuration declares (CNI conventions, «Dynamic plugin specific fields»).
#[derive(Debug, Default, Deserialize)]
struct RuntimeConfig {
    #[serde(rename = "portMappings", default)]
    port_mappings: Option<Vec<Value>>,
    #[serde(default)]
    ips: Option<Vec<String>>,
    #[serde(default)]
    mac: Option<String>,
    #[serde(default)]
    bandwidth: Option<Value>,
}

/// Keys of `runtimeConfig.portMappings` and `runtimeConfig.bandwidth` (CNI conventions).
const CAPABILITY_KEYS: [&str; 8] = [
    "hostPort",
    "containerPort",
    "protocol",
    "hostIP",
    "ingressRate",
    "ingressBurst",
    "egressRate",
    "egressBurst",
];

/// Writes the keys of capability values as the conventions do. Runtimes in Go may send the names of their fields
/// (containerd: `HostPort`), and plugins in Go take keys in any case.
fn with_known_keys(value: Value) -> Value {
    let Value::Object(fields) = value else {
        return value;
    };
    let known = |key: String| {
        let same = |known: &&&str| known.eq_ignore_ascii_case(&key);
        match CAPABILITY_KEYS.iter().find(same) {
            Some(known) => (*known).to_owned(),
            None => key,
        }
    };
    let fields = fields.into_iter();
    Value::Object(fields.map(|(key, value)| (known(key), value)).collect())
}

/// One container interface that still exists, in the input of GC.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
pub(crate) struct Attachment {
    #[serde(rename = "containerID")]
    pub(crate) container_id: String,
    pub(crate) ifname: String,
}

/// What this plugin needs of a network configuration.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) version: Version,
    pub(crate) name: String,
    pub(crate) socket: PathBuf,
    pub(crate) state_dir: PathBuf,
    pub(crate) prev_result: Option<Value>,
    pub(crate) dns: Option<Value>,
    /// `None` when the runtime sent no list, which GC must not take for an empty one.
    pub(crate) valid_attachments: Option<Vec<Attachment>>,
    /// Ports of the node that lead to the pod, as the runtime wrote them: the agent reads them.
    pub(crate) port_mappings: Vec<Value>,
    /// Addresses that the runtime wants for the pod, with or without a prefix length; none leaves the choice to the agent.
    pub(crate) ips: Vec<String>,
    /// MAC address that the runtime wants for the pod.
    pub(crate) mac: Option<String>,
    /// What the pod may send and receive, as the runtime wrote it.
    pub(crate) bandwidth: Option<Value>,
    /// Who gives the addresses; the agent where there is none.
    pub(crate) ipam: Option<Delegate>,
}

/// An error with the version to answer in: the one asked for where it could be read.
#[derive(Debug)]
pub(crate) struct ConfigError {
    pub(crate) error: Error,
    pub(crate) version: Option<Version>,
}

impl Config {
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, ConfigError> {
        // By way of an object: serde would take a JSON list for a struct's fields in order.
        let raw: Raw = serde_json::from_slice::<serde_json::Map<String, Value>>(bytes)
            .and_then(|object| serde_json::from_value(Value::Object(object)))
            .map_err(|e| ConfigError {
                error: Error::new(Code::Decode, "network configuration on stdin is not valid")
                    .details(e),
                version: None,
            })?;
        let version = Version::parse(&raw.cni_version);
        let fail = |error| ConfigError { error, version };
        if raw.name.is_empty() {
            let error = Error::new(
                Code::InvalidConfig,
                "network configuration lacks the key \"name\"",
            );
            return Err(fail(error));
        }
        if !is_identifier(&raw.name) {
            let message = format!(
                "network name {:?} has characters that CNI forbids",
                raw.name
            );
            return Err(fail(Error::new(Code::InvalidConfig, message)));
        }
        let Some(version) = version else {
            let asked = if raw.cni_version.is_empty() {
                "0.1.0 (none)"
            } else {
                &raw.cni_version
            };
            let message = format!(
                "cniVersion {asked} is not supported; use one of {}",
                SUPPORTED.join(", ")
            );
            return Err(fail(Error::new(Code::IncompatibleVersion, message)));
        };
        let ipam = Delegate::parse(raw.ipam.as_ref(), bytes).map_err(fail)?;
        let runtime = raw.runtime_config.unwrap_or_default();
        let mappings = runtime.port_mappings.unwrap_or_default();
        Ok(Self {
            version,
            name: raw.name,
            socket: raw.socket.unwrap_or_else(|| DEFAULT_SOCKET.into()),
            state_dir: raw.state_dir.unwrap_or_else(|| DEFAULT_STATE_DIR.into()),
            prev_result: raw.prev_result.filter(|v| !v.is_null()),
            dns: raw.dns.filter(|v| !v.is_null()),
            valid_attachments: raw.valid_attachments.or(raw.attachments),
            port_mappings: mappings.into_iter().map(with_known_keys).collect(),
            ips: runtime.ips.unwrap_or_default(),
            mac: runtime.mac,
            bandwidth: runtime
                .bandwidth
                .filter(|v| !v.is_null())
                .map(with_known_keys),
            ipam,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_read_as_containerd_writes_them() {
        let sent = r#"{"cniVersion": "1.0.0", "name": "weir", "type": "weir-cni", "runtimeConfig": {
            "portMappings": [{"HostPort": 8080, "ContainerPort": 80, "Protocol": "tcp", "HostIP": "192.0.2.1"}],
            "bandwidth": {"IngressRate": 1000, "IngressBurst": 2000, "EgressRate": 0, "EgressBurst": 0}
        }}"#;
        let config = Config::parse(sent.as_bytes()).unwrap();
        assert_eq!(
            config.port_mappings,
            [serde_json::json!({
                "hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": "192.0.2.1"
            })]
        );
        assert_eq!(
            config.bandwidth.unwrap(),
            serde_json::json!({
                "ingressRate": 1000, "ingressBurst": 2000, "egressRate": 0, "egressBurst": 0
            })
        );
    }
}
