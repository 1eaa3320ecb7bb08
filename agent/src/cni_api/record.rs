//! What is remembered of an attachment, and the names that follow from its key. Pure.

use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::bandwidth::Bandwidth;
use super::host_ports::PortMapping;
use crate::netlink::link::Mac;

/// Hex digits of the hash in a host link's name: `weir` and these fill the 15 bytes of an interface name.
const NAME_DIGITS: usize = 11;

/// Start of every host link's name.
pub(super) const LINK_PREFIX: &str = "weir";

/// Identity of an attachment.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Key {
    pub container_id: String,
    pub if_name: String,
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of container {}", self.if_name, self.container_id)
    }
}

impl Key {
    fn digest(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        hash.update(self.container_id.as_bytes());
        hash.update([0]);
        hash.update(self.if_name.as_bytes());
        hash.finalize().into()
    }

    /// Name of the host side of the pair.
    #[must_use]
    pub fn host_name(&self) -> String {
        let mut name = String::from(LINK_PREFIX);
        for byte in self.digest() {
            name.push_str(&format!("{byte:02x}"));
        }
        name.truncate(LINK_PREFIX.len() + NAME_DIGITS);
        name
    }

    /// Name of the device in the pod that limits what it receives.
    #[must_use]
    pub fn ifb_name(&self) -> String {
        self.host_name().replacen(LINK_PREFIX, "wifb", 1)
    }

    /// MAC addresses of host side and pod side: locally administered, the same whenever the pair is made.
    fn macs(&self) -> (Mac, Mac) {
        let digest = self.digest();
        let mac = |at: usize| {
            let mut mac = Mac::default();
            mac.copy_from_slice(&digest[at..at + 6]);
            mac[0] = (mac[0] & 0xfc) | 0x02;
            mac
        };
        (mac(8), mac(14))
    }

    /// Name of the record's file. Both parts are checked before: neither holds a slash or `@` at the wrong place.
    pub(super) fn file_name(&self) -> String {
        format!("{}@{}.json", self.container_id, self.if_name)
    }
}

/// True for names that [`Key::host_name`] makes.
pub(super) fn is_host_name(name: &str) -> bool {
    name.strip_prefix(LINK_PREFIX).is_some_and(|rest| {
        rest.len() == NAME_DIGITS && rest.bytes().all(|b| b.is_ascii_hexdigit())
    })
}

/// One attachment: written before anything uses its addresses, removed after everything that used them is gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    #[serde(flatten)]
    pub key: Key,
    /// Name of the CNI network.
    pub network: String,
    /// One address per family.
    pub addresses: Vec<IpAddr>,
    /// Path of the namespace as the runtime knows it.
    pub netns: String,
    /// The kernel's number of that namespace, where it has one. Of no use after the machine's restart, like the pod.
    #[serde(default)]
    pub netns_cookie: Option<u64>,
    /// Grows with every record of this node: the newest one tells where the next address search starts.
    pub sequence: u64,
    #[serde(default)]
    pub pod: PodName,
    /// Ports of the node that lead here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub port_mappings: Vec<PortMapping>,
    /// MAC address of the pod's side where the runtime asked for one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Bandwidth>,
    /// The addresses come from an IPAM plugin and are given back to that.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub delegated: bool,
}

impl Record {
    /// MAC addresses of host side and pod side.
    #[must_use]
    pub fn macs(&self) -> (Mac, Mac) {
        let (host, pod) = self.key.macs();
        (host, self.mac.unwrap_or(pod))
    }
}

/// Which pod it is, where the runtime told.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodName {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_macs_follow_from_the_key() {
        let key = Key {
            container_id: "c1".into(),
            if_name: "eth0".into(),
        };
        let other = Key {
            container_id: "c1".into(),
            if_name: "net1".into(),
        };
        assert_eq!(key.host_name().len(), 15);
        assert!(is_host_name(&key.host_name()));
        assert_ne!(key.host_name(), other.host_name());
        let (host, pod) = key.macs();
        assert_ne!(host, pod);
        assert!(
            [host, pod].iter().all(|m| m[0] & 3 == 2),
            "locally administered unicast"
        );
    }

    #[test]
    fn the_host_link_is_no_pod_link() {
        for name in [
            "weir_host",
            "weir_hostp",
            "weir",
            "eth0",
            "weir0123456789",
            "weirzzzzzzzzzzz",
        ] {
            assert!(!is_host_name(name), "{name}");
        }
    }
}
