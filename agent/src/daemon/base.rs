//! What every pod of the node relies on: sysctls, the host link, programs on host link and uplinks. Made at start, and
//! made again when somebody takes it away.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use weir_agent::config::Config;
use weir_agent::kernel::{self, Kernel};
use weir_agent::netlink::{Netlink, base};

/// Interface indexes that carry our programs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Attached {
    host_link: (u32, u32),
    uplinks: BTreeMap<String, u32>,
}

/// The base of the node, as last put in place.
pub(super) struct Base {
    config: Arc<Config>,
    kernel: Arc<Kernel>,
    /// Bytes: the smallest of the uplinks.
    pub(super) mtu: u32,
    attached: Mutex<Attached>,
}

impl Base {
    /// Puts everything in place for the first time in this process.
    pub(super) fn ensure(config: Arc<Config>, kernel: Arc<Kernel>) -> Result<Self> {
        let mut netlink = Netlink::open()?;
        let mtu = base::uplink_mtu(&mut netlink, &config.uplinks)?;
        let base = Self {
            config,
            kernel,
            mtu,
            attached: Mutex::default(),
        };
        base.restore(&mut netlink)?;
        Ok(base)
    }

    /// Compares what is with what was put in place, and repairs. Returns the index of the host link. Cheap when nothing
    /// changed.
    pub(super) fn restore(&self, netlink: &mut Netlink) -> Result<u32> {
        base::set_sysctls(&self.config.uplinks)?;
        let host_link = base::ensure_host_link(netlink, self.mtu)?;
        let mut now = Attached {
            host_link: (host_link.near.index, host_link.far.index),
            uplinks: BTreeMap::new(),
        };
        for uplink in &self.config.uplinks {
            // An uplink that is gone gets its program when it comes back; the others work on.
            if let Some(link) = netlink.link(uplink)? {
                now.uplinks.insert(uplink.clone(), link.index);
            }
        }
        let mut attached = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        if now.host_link != attached.host_link {
            self.kernel.attach_host_link(&kernel::HostLink {
                peer_name: host_link.far.name,
                peer_ifindex: host_link.far.index,
                peer_mac: host_link.far.mac,
                host_ifindex: host_link.near.index,
                host_mac: host_link.near.mac,
            })?;
        }
        for (uplink, index) in &now.uplinks {
            if attached.uplinks.get(uplink) != Some(index) {
                self.kernel.attach_uplink(uplink)?;
            }
        }
        if *attached != Attached::default() && *attached != now {
            tracing::warn!(before = ?*attached, now = ?now, "links of the node changed; programs are attached again");
        }
        let index = now.host_link.0;
        *attached = now;
        Ok(index)
    }
}
