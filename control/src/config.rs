//! The control plane's typed configuration: one TOML file, parsed once, unknown keys refused.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use ipnetwork::IpNetwork;
use serde::Deserialize;

/// Why a configuration could not be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("read configuration {path}: {source}")]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    /// The message carries line, column, the offending key and the keys that exist.
    #[error("parse configuration {path}: {source}")]
    Parse {
        path: PathBuf,
        source: toml::de::Error,
    },
    #[error("configuration {path}: {why}")]
    Invalid { path: PathBuf, why: String },
}

/// `weir-control serve --config FILE`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Store, CA and issued certificates.
    pub data_dir: PathBuf,
    /// API server listeners. Sockets passed by LISTEN_FDS (systemd socket activation) are served as well.
    #[serde(default)]
    pub api_listen: Vec<SocketAddr>,
    /// Address that pods and nodes use to reach the API server: endpoint of the `kubernetes` Service.
    pub advertise: SocketAddr,
    /// Node feed listener (gRPC, mTLS).
    pub feed_listen: SocketAddr,
    /// Plain HTTP with /metrics, /livez and /readyz.
    #[serde(default)]
    pub metrics_listen: Option<SocketAddr>,
    /// Further DNS names and addresses for the serving certificate.
    #[serde(default)]
    pub extra_names: Vec<String>,
    #[serde(default)]
    pub network: Network,
}

/// Addresses of pods and services; at most one CIDR per family in each list.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Network {
    pub cluster_domain: String,
    pub pod_cidrs: Vec<IpNetwork>,
    /// Prefix length of one node's share, IPv4.
    pub node_prefix_v4: u8,
    /// Prefix length of one node's share, IPv6.
    pub node_prefix_v6: u8,
    pub service_cidrs: Vec<IpNetwork>,
    /// ClusterIPs of the kube-dns Service; default: the tenth address of each service CIDR.
    pub dns_ips: Vec<IpAddr>,
    pub node_port_first: u16,
    pub node_port_last: u16,
    /// Lets Services name `externalIPs`. Off by default: whoever may make Services could draw traffic of others to
    /// their pods.
    pub allow_external_ips: bool,
}

impl Default for Network {
    fn default() -> Self {
        let net = |s: &str| s.parse::<IpNetwork>().ok();
        Self {
            cluster_domain: "cluster.local".into(),
            pod_cidrs: net("10.244.0.0/16")
                .into_iter()
                .chain(net("fd00:10:244::/56"))
                .collect(),
            node_prefix_v4: 24,
            node_prefix_v6: 64,
            service_cidrs: net("10.96.0.0/16")
                .into_iter()
                .chain(net("fd00:10:96::/112"))
                .collect(),
            dns_ips: Vec::new(),
            node_port_first: 30000,
            node_port_last: 32767,
            allow_external_ips: false,
        }
    }
}

impl Network {
    /// What makes these addresses unusable, and which setting to change.
    fn problem(&self) -> Option<String> {
        if self.node_port_first == 0 || self.node_port_first > self.node_port_last {
            return Some(format!(
                "network.node_port_first = {} and network.node_port_last = {} hold no ports",
                self.node_port_first, self.node_port_last
            ));
        }
        for (setting, cidrs) in [
            ("pod_cidrs", &self.pod_cidrs),
            ("service_cidrs", &self.service_cidrs),
        ] {
            if cidrs.is_empty() {
                return Some(format!(
                    "network.{setting} is empty: name a CIDR per address family"
                ));
            }
            let of = |v4: bool| cidrs.iter().filter(|c| c.is_ipv4() == v4).count();
            if of(true) > 1 || of(false) > 1 {
                return Some(format!(
                    "network.{setting} holds two CIDRs of one address family"
                ));
            }
        }
        for pods in &self.pod_cidrs {
            // Of two networks that overlap, one contains the other's address.
            let services = self.service_cidrs.iter();
            let mut both = services.filter(|s| s.contains(pods.ip()) || pods.contains(s.ip()));
            if let Some(services) = both.next() {
                return Some(format!(
                    "network.pod_cidrs has {pods} and network.service_cidrs {services}, which overlap: name ranges apart"
                ));
            }
        }
        let tiny = |c: &&IpNetwork| c.prefix() > if c.is_ipv4() { 28 } else { 124 };
        let small = self.service_cidrs.iter().find(tiny)?;
        Some(format!(
            "network.service_cidrs: {small} is too small for the cluster's own Services"
        ))
    }

    /// ClusterIPs of cluster DNS, one per service CIDR.
    #[must_use]
    pub fn cluster_dns(&self) -> Vec<IpAddr> {
        if self.dns_ips.is_empty() {
            self.service_cidrs
                .iter()
                .filter_map(|c| nth_address(*c, 10))
                .collect()
        } else {
            self.dns_ips.clone()
        }
    }
}

/// The n-th address of a network (0 is the network address itself), when it is inside.
#[must_use]
pub fn nth_address(net: IpNetwork, n: u32) -> Option<IpAddr> {
    match net {
        IpNetwork::V4(v4) => v4.nth(n).map(IpAddr::V4),
        IpNetwork::V6(v6) => {
            let address = std::net::Ipv6Addr::from(u128::from(v6.network()) + u128::from(n));
            v6.contains(address).then_some(IpAddr::V6(address))
        }
    }
}

impl Config {
    /// Reads and checks a configuration file.
    ///
    /// # Errors
    /// [`ConfigError`] with the path, and line and column for syntax and unknown keys.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
            path: path.into(),
            source,
        })?;
        let config: Self = toml::from_str(&text).map_err(|source| ConfigError::Parse {
            path: path.into(),
            source,
        })?;
        match config.network.problem() {
            Some(why) => Err(ConfigError::Invalid {
                path: path.into(),
                why,
            }),
            None => Ok(config),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(network: &str) -> Result<Config, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.toml");
        let text = format!(
            "data_dir = \"d\"\nadvertise = \"192.0.2.1:1\"\nfeed_listen = \"192.0.2.1:2\"\n[network]\n{network}"
        );
        std::fs::write(&path, text).unwrap();
        Config::load(&path).map_err(|e| e.to_string())
    }

    #[test]
    fn addresses_that_cannot_work_name_their_setting() {
        load("").unwrap();
        for (network, named) in [
            ("node_port_first = 2\nnode_port_last = 1", "node_port_first"),
            ("service_cidrs = []", "service_cidrs is empty"),
            ("service_cidrs = [\"10.0.0.0/30\"]", "too small"),
            ("pod_cidrs = [\"10.96.4.0/24\"]", "overlap"),
            (
                "pod_cidrs = [\"10.0.0.0/16\", \"10.1.0.0/16\"]",
                "two CIDRs",
            ),
            ("pod_cidr = []", "unknown field `pod_cidr`"),
        ] {
            let error = load(network).unwrap_err();
            assert!(error.contains(named), "{network}: {error}");
        }
    }
}
