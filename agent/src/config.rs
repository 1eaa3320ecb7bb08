//! The agent's typed configuration: one TOML file, parsed once, unknown keys refused.

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
}

/// `weir-agent --config FILE`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    pub node_name: String,
    /// InternalIPs of this node, at most one per family. The first is the primary.
    pub node_ips: Vec<IpAddr>,
    /// Interfaces that carry traffic between nodes and to the outside.
    pub uplinks: Vec<String>,
    /// Durable state: IPAM, pod checkpoints, queued DELs. Survives reboots.
    #[serde(default = "defaults::state_dir")]
    pub state_dir: PathBuf,
    /// Sockets and other run-time files. Emptied by a reboot.
    #[serde(default = "defaults::run_dir")]
    pub run_dir: PathBuf,
    /// A bpffs mount; programs, links and maps are pinned below it.
    #[serde(default = "defaults::bpffs")]
    pub bpffs: PathBuf,
    /// Labels for the Node object (whole-cluster mode).
    #[serde(default)]
    pub labels: std::collections::BTreeMap<String, String>,
    /// A cloud's controller initialises the node, as with kubelet's `--cloud-provider=external`: pods wait for it, and
    /// the addresses of the Node object are as it says (whole-cluster mode).
    #[serde(default)]
    pub external_cloud_provider: bool,
    pub feed: Feed,
    #[serde(default)]
    pub dataplane: Dataplane,
    #[serde(default)]
    pub cni: Cni,
    #[serde(default)]
    pub overlay: Overlay,
    #[serde(default)]
    pub dns: Dns,
    #[serde(default)]
    pub policy: Policy,
    #[serde(default)]
    pub flow_table: FlowTable,
    #[serde(default)]
    pub observe: Observe,
    /// Present in whole-cluster mode only: the agent runs pods through this runtime.
    pub pods: Option<Pods>,
}

/// Where the control plane serves the node feed, and the credentials for it (PEM files).
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Feed {
    /// Each `https://HOST:PORT`; tried in order.
    pub servers: Vec<String>,
    /// TLS name to expect of the server.
    #[serde(default = "defaults::feed_server_name")]
    pub server_name: String,
    pub ca: PathBuf,
    pub cert: PathBuf,
    pub key: PathBuf,
}

/// How Services are served, and which packets get the node's address.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Dataplane {
    /// Networks: node ports are served on the node addresses in them. Empty: on all but loopback.
    pub node_port_addresses: Vec<IpNetwork>,
    /// "snat" (backends on other nodes see this node's address and answer through it) or "dsr" (they answer clients
    /// outside directly).
    pub node_port_mode: NodePortMode,
    /// Lead packets to node ports, balancer and external addresses on to other nodes as soon as an uplink receives them
    /// (XDP), where its driver can. Off unless asked for: many drivers interrupt their link to take a program.
    pub xdp: bool,
    /// "random", or "maglev": clients outside are led to the same backend by whatever node they come in.
    pub algorithm: Algorithm,
    /// Pods get the node's address on their way out of the cluster.
    pub masquerade: bool,
    /// Networks outside the cluster that see pods as they are.
    pub masquerade_except: Vec<IpNetwork>,
    /// Serve externalIPs of Services. Unset: as the control plane says (`network.allow_external_ips`).
    pub external_ips: Option<bool>,
    /// Translate at the socket what processes of this node and its pods send to Services, so that their packets need no
    /// translation. Where it is not possible the agent logs why, and every packet is translated instead.
    pub socket_translation: bool,
    /// The cgroup v2 folder with this node's processes and pods. Default: the root of the hierarchy, for an agent in the
    /// machine's own network namespace.
    pub cgroup: Option<PathBuf>,
}

impl Default for Dataplane {
    fn default() -> Self {
        Self {
            node_port_addresses: Vec::new(),
            node_port_mode: NodePortMode::Snat,
            xdp: false,
            algorithm: Algorithm::Random,
            masquerade: true,
            masquerade_except: Vec::new(),
            external_ips: None,
            socket_translation: true,
            cgroup: None,
        }
    }
}

/// How packets from outside reach backends on other nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NodePortMode {
    Snat,
    Dsr,
}

/// How a backend is chosen for a client outside the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Algorithm {
    Random,
    Maglev,
}

impl Dataplane {
    /// What compiling services needs of it.
    #[must_use]
    pub fn service_options(&self) -> crate::compile::services::ServiceOptions {
        crate::compile::services::ServiceOptions {
            maglev: self.algorithm == Algorithm::Maglev,
            dsr: self.node_port_mode == NodePortMode::Dsr,
            external_ips: self.external_ips,
        }
    }
}

/// The socket that `weir-cni` calls and the configuration file written for the runtime.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Cni {
    /// Where to write the network configuration list (for example /etc/cni/net.d); none is written when unset.
    pub conf_dir: Option<PathBuf>,
    /// Unix socket of the CNI API; default RUN_DIR/cni.sock.
    pub socket: Option<PathBuf>,
    /// Pod interface MTU in bytes; default: the smallest MTU of the uplinks, less the overlay's headers while a peer is
    /// reached through it.
    pub mtu: Option<u32>,
    /// Seconds that an address rests after its pod has gone, before another pod gets it; a day at most.
    #[serde(deserialize_with = "cool_down")]
    pub address_cool_down_s: u32,
}

impl Default for Cni {
    fn default() -> Self {
        Self {
            conf_dir: None,
            socket: None,
            mtu: None,
            address_cool_down_s: 30,
        }
    }
}

fn cool_down<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    let seconds = u32::deserialize(deserializer)?;
    if u64::from(seconds) <= crate::cni_api::MAX_COOL_DOWN.as_secs() {
        Ok(seconds)
    } else {
        Err(serde::de::Error::custom("an address rests a day at most"))
    }
}

/// VXLAN between nodes that do not share a segment. Port and VNI must be the same on all nodes.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Overlay {
    /// Without it, pods of nodes behind a router cannot be reached.
    pub enabled: bool,
    /// UDP port; 8472 is the one that Linux and other overlays use, so that firewalls often let it through.
    pub port: u16,
    /// VXLAN network identifier, 24 bits.
    #[serde(deserialize_with = "vni")]
    pub vni: u32,
}

impl Default for Overlay {
    fn default() -> Self {
        Self {
            enabled: true,
            port: 8472,
            vni: 87,
        }
    }
}

fn vni<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    let vni = u32::deserialize(deserializer)?;
    if vni < 1 << 24 {
        Ok(vni)
    } else {
        Err(serde::de::Error::custom("a VNI has 24 bits"))
    }
}

/// Cluster DNS of this node.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Dns {
    /// Port on every node IP and loopback where the server listens; the dataplane leads the cluster DNS address here.
    pub port: u16,
    /// resolv.conf with the upstream servers for names outside the cluster.
    pub resolv_conf: PathBuf,
    /// Upstream servers; when not empty, `resolv_conf` is not read.
    pub upstreams: Vec<SocketAddr>,
    /// Seconds; TTL of cluster records.
    pub ttl_s: u32,
    /// "insecure" (any address below NAMESPACE.pod exists, as kubeadm sets it up) or "disabled".
    pub pods: crate::dns::PodRecords,
}

impl Default for Dns {
    fn default() -> Self {
        Self {
            port: 10053,
            resolv_conf: "/etc/resolv.conf".into(),
            upstreams: Vec::new(),
            ttl_s: 30,
            pods: crate::dns::PodRecords::Insecure,
        }
    }
}

/// Network policies.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Policy {
    /// Seconds; an address that a DNS answer gave to a name of a rule is believed at least so long, however small the answer's
    /// TTL: pods connect a while after they have asked.
    pub min_domain_ttl_s: u32,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            min_domain_ttl_s: 30,
        }
    }
}

/// The table of connections.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FlowTable {
    /// Flows per address family, at least 1,024; default: by the memory of the machine or of the agent's cgroup, from
    /// 65,536 (up to 8 GiB) to 1,048,576. Applies when the table is made: on the first start after a boot or a cleanup.
    pub max_flows: Option<MaxFlows>,
}

/// A size of the flow table that works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "u32")]
pub struct MaxFlows(pub u32);

impl TryFrom<u32> for MaxFlows {
    type Error = String;

    fn try_from(flows: u32) -> Result<Self, Self::Error> {
        const LEAST: u32 = 1_024;
        const MOST: u32 = 1 << 24;
        if (LEAST..=MOST).contains(&flows) {
            Ok(Self(flows))
        } else {
            Err(format!("must be from {LEAST} to {MOST}"))
        }
    }
}

/// HTTP endpoint with /metrics, /livez and /readyz.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Observe {
    pub listen: SocketAddr,
    /// Port of all addresses with /healthz and /livez for balancers, as kube-proxy has them; zero for none.
    pub health_port: u16,
}

impl Default for Observe {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 9965)),
            health_port: 10256,
        }
    }
}

/// The pod runner (whole-cluster mode).
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pods {
    /// CRI socket, for example unix:///run/containerd/containerd.sock.
    pub cri: String,
    /// Cgroup parent of every pod, as the CRI runtime understands it.
    #[serde(default = "defaults::cgroup_parent")]
    pub cgroup_parent: String,
    /// Root of container logs.
    #[serde(default = "defaults::pod_log_dir")]
    pub log_dir: PathBuf,
    /// Port of the node API (logs) on the primary node IP.
    #[serde(default = "defaults::node_api_port")]
    pub node_api_port: u16,
    #[serde(default = "defaults::max_pods")]
    pub max_pods: u32,
    /// An image that is present is used even where imagePullPolicy is Always: for nodes without a registry.
    #[serde(default)]
    pub prefer_present_images: bool,
}

mod defaults {
    use std::path::PathBuf;

    pub(super) fn state_dir() -> PathBuf {
        "/var/lib/weir".into()
    }
    pub(super) fn run_dir() -> PathBuf {
        "/run/weir".into()
    }
    pub(super) fn bpffs() -> PathBuf {
        "/sys/fs/bpf".into()
    }
    pub(super) fn feed_server_name() -> String {
        "weir-control".into()
    }
    pub(super) fn cgroup_parent() -> String {
        "/weir/pods".into()
    }
    pub(super) fn pod_log_dir() -> PathBuf {
        "/var/log/pods".into()
    }
    pub(super) fn node_api_port() -> u16 {
        10250
    }
    pub(super) fn max_pods() -> u32 {
        110
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
        toml::from_str(&text).map_err(|source| ConfigError::Parse {
            path: path.into(),
            source,
        })
    }

    /// Unix socket of the CNI API.
    #[must_use]
    pub fn cni_socket(&self) -> PathBuf {
        self.cni
            .socket
            .clone()
            .unwrap_or_else(|| self.run_dir.join("cni.sock"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: &str = "node_name = \"n1\"\nnode_ips = [\"192.0.2.11\"]\nuplinks = [\"eth0\"]\n[feed]\nservers = []\nca = \"a\"\ncert = \"b\"\nkey = \"c\"\n";

    #[test]
    fn the_dataplane_has_defaults_and_its_keys_are_checked() {
        let parse = |section: &str| toml::from_str::<Config>(&format!("{LEAST}{section}"));
        let plain = parse("").unwrap().dataplane;
        assert!(plain.masquerade && plain.node_port_mode == NodePortMode::Snat);
        let set = parse(
            "[dataplane]\nnode_port_addresses = [\"198.51.100.0/24\"]\nnode_port_mode = \"dsr\"\nxdp = false\n\
             algorithm = \"maglev\"\nmasquerade_except = [\"203.0.113.0/24\"]\nexternal_ips = true\n",
        )
        .unwrap()
        .dataplane;
        let options = set.service_options();
        assert!(options.maglev && options.dsr && options.external_ips == Some(true));
        assert_eq!(set.masquerade_except.len(), 1);
        for bad in [
            "algorithm = \"best\"",
            "node_port_addresses = [\"here\"]",
            "nodeport_mode = \"snat\"",
        ] {
            assert!(parse(&format!("[dataplane]\n{bad}\n")).is_err(), "{bad}");
        }
    }
}
