//! What every pod of the node relies on: sysctls, the host link, the overlay's device, programs on host link and uplinks.
//! Made at start, and made again when somebody takes it away.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use control_api::desired::DesiredState;
use weir_agent::compile::node_addresses::NodeAddresses;
use weir_agent::compile::peers::{self, Tunnels};
use weir_agent::compile::routes;
use weir_agent::compile::surroundings::{Choices, Surroundings, surroundings};
use weir_agent::config::Config;
use weir_agent::kernel::{self, Kernel};
use weir_agent::netlink::changed_sysctls::ChangedSysctls;
use weir_agent::netlink::{Netlink, base, overlay, reserved_ports, sync};

/// Interface indexes that carry our programs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Attached {
    host_link: (u32, u32),
    park_link: (u32, u32),
    uplinks: BTreeMap<String, u32>,
    overlay: Option<u32>,
}

/// Links of ours that routes lead to, and what fits through the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Links {
    pub(super) host_link: u32,
    /// `None` where the overlay is off or cannot be had.
    pub(super) overlay: Option<u32>,
    /// Bytes: the smallest MTU of the uplinks.
    pub(super) uplink_mtu: u32,
}

/// The base of the node, as last put in place.
pub(super) struct Base {
    config: Arc<Config>,
    kernel: Arc<Kernel>,
    /// Bytes, as pods have it.
    mtu: AtomicU32,
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
            mtu: AtomicU32::new(mtu),
            attached: Mutex::default(),
        };
        base.restore(&mut netlink)?;
        Ok(base)
    }

    /// Bytes of the packets that pods and the host link send.
    pub(super) fn mtu(&self) -> u32 {
        self.mtu.load(Ordering::Relaxed)
    }

    /// Gives the host link another MTU. True when it had another.
    pub(super) fn set_mtu(&self, netlink: &mut Netlink, mtu: u32) -> Result<bool> {
        let changed = self.mtu.swap(mtu, Ordering::Relaxed) != mtu;
        if changed {
            base::ensure_host_link(netlink, mtu)?;
        }
        Ok(changed)
    }

    /// Tells the dataplane of the nodes' addresses and of the ranges of pods and services, and keeps the node port range
    /// from the node's own connections.
    pub(super) fn set_surroundings(
        &self,
        netlink: &mut Netlink,
        state: &DesiredState,
    ) -> Result<NodeAddresses> {
        let mut wanted = self.surroundings(netlink, state)?;
        wanted.add_tunnels(&self.tunnels(netlink, state)?);
        self.kernel.set_surroundings(&wanted)?;
        let (first, last) = wanted.node_ports;
        if first != 0 && first <= last {
            reserved_ports::reserve(&self.config.state_dir, &(first..=last))?;
        }
        Ok(wanted.nodes)
    }

    /// The ways through the overlay, as the nodes and this node's routes are now.
    fn tunnels(&self, netlink: &mut Netlink, state: &DesiredState) -> Result<Tunnels> {
        let attached = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        let overlay_link = attached.overlay;
        drop(attached);
        let links = netlink.links()?;
        let name = &self.config.node_name;
        let reach = sync::reach_of(netlink, &peers::addresses(name, &state.nodes), &links)?;
        Ok(peers::tunnels(&routes::Input {
            node_name: name,
            node_ips: &[],
            nodes: &state.nodes,
            service_cidrs: &[],
            service_addresses: &[],
            host_link: 0,
            overlay_link,
            pods: &[],
            reach: &reach,
        }))
    }

    /// What surrounds the node now.
    pub(super) fn surroundings(
        &self,
        netlink: &mut Netlink,
        state: &DesiredState,
    ) -> Result<Surroundings> {
        let own: Vec<IpAddr> = addresses(netlink)?.into_iter().collect();
        let settings = &self.config.dataplane;
        let choices = Choices {
            configured: self.config.node_ips.clone(),
            masquerade: settings.masquerade,
            masquerade_except: settings.masquerade_except.clone(),
            node_port_addresses: settings.node_port_addresses.clone(),
        };
        Ok(surroundings(state, &self.config.node_name, &own, &choices))
    }

    /// Gives an uplink's driver its program, where the configuration asks for it and the driver can.
    fn accelerate(&self, uplink: &str, pair: bool) {
        if !self.config.dataplane.xdp {
            return;
        }
        if pair {
            // Its other end takes frames back only where it receives by polling, and nearly all packets come with
            // checksums that are still to be finished, which the program leaves alone.
            tracing::info!(
                uplink,
                "no XDP program: the uplink is one end of a veth pair"
            );
            return;
        }
        match self.kernel.attach_driver(uplink) {
            Ok(()) => tracing::info!(uplink, "the driver has its XDP program"),
            Err(reason) => tracing::info!(uplink, %reason, "no XDP program"),
        }
    }

    /// Puts everything in place again, whatever was before.
    pub(super) fn restore_all(&self) -> Result<()> {
        *self.attached.lock().unwrap_or_else(PoisonError::into_inner) = Attached::default();
        self.restore(&mut Netlink::open()?).map(drop)
    }

    /// Compares what is with what was put in place, and repairs. Cheap when nothing changed.
    pub(super) fn restore(&self, netlink: &mut Netlink) -> Result<Links> {
        base::set_sysctls(
            &ChangedSysctls::of(&self.config.state_dir),
            &self.config.uplinks,
        )?;
        let host_link = base::ensure_host_link(netlink, self.mtu())?;
        let park_link = base::ensure_park_link(netlink)?;
        let mut now = Attached {
            host_link: (host_link.near.index, host_link.far.index),
            park_link: (park_link.near.index, park_link.far.index),
            uplinks: BTreeMap::new(),
            overlay: None,
        };
        let mut uplink_mtu = None;
        let mut pairs = BTreeSet::new();
        for uplink in &self.config.uplinks {
            // An uplink that is gone gets its program when it comes back; the others work on.
            if let Some(link) = netlink.link(uplink)? {
                uplink_mtu = Some(uplink_mtu.map_or(link.mtu, |least: u32| least.min(link.mtu)));
                now.uplinks.insert(uplink.clone(), link.index);
                pairs.extend(link.veth.then_some(link.index));
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
        if now.park_link != attached.park_link {
            self.kernel.attach_park_link(&park_link.near.name)?;
        }
        if now.uplinks != attached.uplinks {
            let can = |index: &&u32| self.config.dataplane.xdp && !pairs.contains(*index);
            let kept: Vec<u32> = now.uplinks.values().filter(can).copied().collect();
            self.kernel.keep_drivers(&kept)?;
        }
        for (uplink, index) in &now.uplinks {
            if attached.uplinks.get(uplink) != Some(index) {
                self.kernel.attach_uplink(uplink)?;
                self.accelerate(uplink, pairs.contains(index));
            }
        }
        let uplink_mtu = uplink_mtu.unwrap_or_else(|| self.mtu());
        now.overlay = self.restore_overlay(netlink, uplink_mtu, attached.overlay)?;
        if *attached != Attached::default() && *attached != now {
            tracing::warn!(before = ?*attached, now = ?now, "links of the node changed; programs are attached again");
        }
        let links = Links {
            host_link: now.host_link.0,
            overlay: now.overlay,
            uplink_mtu,
        };
        *attached = now;
        Ok(links)
    }

    /// Nodes of the own segment need no overlay, so a kernel without it is no reason to stop. `attached` is the device
    /// that has its programs.
    fn restore_overlay(
        &self,
        netlink: &mut Netlink,
        uplink_mtu: u32,
        attached: Option<u32>,
    ) -> Result<Option<u32>> {
        let settings = &self.config.overlay;
        let link = if settings.enabled {
            let headers = peers::overhead(std::net::Ipv4Addr::LOCALHOST.into());
            match overlay::ensure(netlink, settings.port, uplink_mtu.saturating_sub(headers)) {
                Ok(link) => Some(link),
                Err(e) if e.is_unsupported() => {
                    tracing::warn!(error = %e, "no overlay; nodes behind a router cannot be reached");
                    None
                }
                Err(e) => return Err(e.into()),
            }
        } else {
            overlay::remove(netlink)?;
            None
        };
        let Some(link) = link else {
            self.kernel.set_overlay(None)?;
            return Ok(None);
        };
        if attached != Some(link.index) {
            self.kernel.set_overlay(Some(&kernel::OverlayLink {
                name: link.name,
                ifindex: link.index,
                network: settings.vni,
                port: settings.port,
            }))?;
        }
        if !link.up {
            netlink.set_link_up(link.index, true)?;
        }
        Ok(Some(link.index))
    }
}

/// Addresses by which others know this node.
pub(super) fn addresses(netlink: &mut Netlink) -> Result<BTreeSet<IpAddr>> {
    let all = netlink.addresses()?.into_iter();
    Ok(all
        .map(|(_, address)| address)
        .filter(|address| !is_link_scope(*address))
        .collect())
}

/// Loopback and link-local addresses mean another node on every node.
fn is_link_scope(address: IpAddr) -> bool {
    address.is_loopback()
        || match address {
            IpAddr::V4(v4) => v4.is_link_local(),
            IpAddr::V6(v6) => v6.is_unicast_link_local(),
        }
}
