//! A pod's link: made, checked and removed.

use std::fs::File;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use control_api::desired::Name;
use ipnetwork::IpNetwork;

use super::record::{Key, Record};
use super::{CniError, Code};
use crate::compile::policy::LocalPod;
use crate::compile::routes::{Path, gateway_for};
use crate::kernel::{PodLink, PodPrograms, namespace_cookie};
use crate::netlink::link::{Link, VethEnd};
use crate::netlink::{Netlink, NetlinkError, absent_is_done, base, netns, sysctl};

impl From<NetlinkError> for CniError {
    fn from(e: NetlinkError) -> Self {
        Self::new(Code::Setup, e.to_string())
    }
}

/// Makes and removes pod links.
pub(super) struct Wiring {
    pub(super) programs: Arc<dyn PodPrograms>,
    /// Bytes.
    pub(super) mtu: AtomicU32,
    pub(super) node_ips: Vec<IpAddr>,
}

impl std::fmt::Debug for Wiring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wiring")
            .field("mtu", &self.mtu)
            .finish_non_exhaustive()
    }
}

impl Wiring {
    pub(super) fn mtu(&self) -> u32 {
        self.mtu.load(Ordering::Relaxed)
    }

    /// Gives a pod's link that lives the current MTU, the pod's side first: it never sends what does not fit.
    pub(super) fn adapt_mtu(
        &self,
        netlink: &mut Netlink,
        record: &Record,
        host: &Link,
    ) -> Result<(), NetlinkError> {
        let mtu = self.mtu();
        let netns = File::open(&record.netns)
            .map_err(|e| NetlinkError::new(format!("open the namespace {}", record.netns), e))?;
        let (_, pod_mac) = record.macs();
        netns::inside(&netns, || {
            let mut netlink = Netlink::open()?;
            match netlink.link(&record.key.if_name)? {
                Some(link) if link.mac == pod_mac => netlink.set_link_mtu(link.index, mtu),
                // Another namespace goes by that path now.
                _ => Ok(()),
            }
        })?;
        netlink.set_link_mtu(host.index, mtu)
    }

    /// Everything between a durable record and a pod that can talk. A failure is followed by [`Self::undo`]. Returns the
    /// interface index of the host side.
    pub(super) fn set_up(&self, record: &Record, netns: &File) -> Result<u32, CniError> {
        let host_name = record.key.host_name();
        let mut netlink = Netlink::open()?;
        if netlink.link(&host_name)?.is_some() {
            // No record, so nobody uses it: left by a crash between link and answer.
            absent_is_done(netlink.delete_link(&host_name))?;
        }
        self.create(&mut netlink, record, netns)?;
        self.connect(&mut netlink, record, netns)
    }

    /// Takes back what [`Self::set_up`] made before it failed. Tried twice: what fails once may be for want of memory.
    pub(super) fn undo(&self, record: &Record) -> Result<(), CniError> {
        self.tear_down(&record.key, Some(record), 0)
            .or_else(|_| self.tear_down(&record.key, Some(record), 0))
    }

    fn create(&self, netlink: &mut Netlink, record: &Record, netns: &File) -> Result<(), CniError> {
        let (host_mac, pod_mac) = record.macs();
        let host_name = record.key.host_name();
        let near = VethEnd {
            name: &host_name,
            mac: host_mac,
            netns: None,
        };
        let far = VethEnd {
            name: &record.key.if_name,
            mac: pod_mac,
            netns: Some(netns.as_fd()),
        };
        netlink.create_veth(&near, &far, self.mtu()).map_err(|e| {
            if e.exists() {
                let name = &record.key.if_name;
                let message = format!("the container's namespace already has an interface {name}");
                return CniError::new(Code::Exists, message).with_details(e);
            }
            e.into()
        })
    }

    /// Programs first, then the links come up, the pod's last.
    fn connect(
        &self,
        netlink: &mut Netlink,
        record: &Record,
        netns: &File,
    ) -> Result<u32, CniError> {
        let host_name = record.key.host_name();
        base::quiet(&host_name)?;
        sysctl::set(&format!("net/ipv4/conf/{host_name}/forwarding"), "1")?;
        let host = find(netlink, &host_name)?;
        self.attach(record, &host)?;
        netlink.set_link_up(host.index, true)?;
        netns::inside(netns, || set_up_pod_side(record, self.mtu()))?;
        self.route_to_pod(netlink, record, &host)?;
        Ok(host.index)
    }

    /// Takes over the policies of pods that an earlier agent attached, by the index of their link.
    pub(super) fn adopt(&self, pods: Vec<(u32, LocalPod)>) -> Result<(), CniError> {
        self.programs.adopt_pods(pods).map_err(|e| {
            let source = std::error::Error::source(&e).map(ToString::to_string);
            CniError::new(Code::Setup, e.to_string()).with_details(source.unwrap_or_default())
        })
    }

    /// Gives a pod's link its policies, then its programs; safe to repeat.
    pub(super) fn attach(&self, record: &Record, host: &Link) -> Result<(), CniError> {
        self.programs
            .enter_pod(host.index, &local_pod(record))
            .and_then(|()| self.programs.attach_pod(&pod_link(record, host)))
            .map_err(|e| {
                let source = std::error::Error::source(&e).map(ToString::to_string);
                CniError::new(Code::Setup, e.to_string()).with_details(source.unwrap_or_default())
            })
    }

    /// Lets the node's own stack find the pod; safe to repeat.
    pub(super) fn route_to_pod(
        &self,
        netlink: &mut Netlink,
        record: &Record,
        host: &Link,
    ) -> Result<(), CniError> {
        let (_, pod_mac) = record.macs();
        for address in &record.addresses {
            let source = self
                .node_ips
                .iter()
                .copied()
                .find(|ip| ip.is_ipv4() == address.is_ipv4());
            netlink.set_neighbour(host.index, *address, pod_mac)?;
            // The source is a preference of the node's own connections; routes are compared again later, so an address
            // that is not usable yet (still being checked for duplicates) must not fail the pod.
            let path = Path::Link {
                link: host.index,
                source,
            };
            match netlink.add_route(IpNetwork::from(*address), path) {
                Err(e) if e.exists() => {
                    netlink.replace_route(IpNetwork::from(*address), path)?;
                }
                Err(e) if e.source.raw_os_error() == Some(libc::EINVAL) => {
                    let path = Path::Link {
                        link: host.index,
                        source: None,
                    };
                    netlink.add_route(IpNetwork::from(*address), path)?;
                }
                other => other?,
            }
        }
        Ok(())
    }

    /// Removes the link, then what the dataplane holds about it. Nothing of it need exist. `known_index` is the link's
    /// interface index, or zero; it matters once the link is gone.
    pub(super) fn tear_down(
        &self,
        key: &Key,
        record: Option<&Record>,
        known_index: u32,
    ) -> Result<(), CniError> {
        let host_name = key.host_name();
        let mut netlink = Netlink::open()?;
        let link = netlink.link(&host_name)?;
        let index = link.as_ref().map_or(known_index, |l| l.index);
        // The wire is cut first: no packet passes a link without programs.
        if link.is_some() {
            absent_is_done(netlink.delete_link(&host_name))?;
        }
        record.inspect(|record| clear_pod_side(record));
        let addresses = record.map_or(&[][..], |r| &r.addresses);
        self.programs.detach_pod(index, addresses).map_err(|e| {
            let source = std::error::Error::source(&e).map(ToString::to_string);
            CniError::new(Code::Setup, e.to_string()).with_details(source.unwrap_or_default())
        })
    }

    /// CHECK: names the first thing that is not as ADD left it.
    pub(super) fn verify(&self, record: &Record, netns: &File) -> Result<(), CniError> {
        let broken = |message: String| Err(CniError::new(Code::Broken, message));
        let host_name = record.key.host_name();
        let mut netlink = Netlink::open()?;
        let Some(host) = netlink.link(&host_name)? else {
            return broken(format!("host link {host_name} is gone"));
        };
        if !host.up {
            return broken(format!("host link {host_name} is down"));
        }
        let (_, pod_mac) = record.macs();
        let neighbours = netlink.neighbours()?;
        let routes = netlink.own_routes()?;
        for address in &record.addresses {
            let known = neighbours.iter().any(|n| {
                n.link == host.index && n.address == *address && n.mac == pod_mac && n.permanent
            });
            if !known {
                return broken(format!("the node lacks the permanent neighbour {address}"));
            }
            let destination = IpNetwork::from(*address);
            let routed = routes.iter().any(|r| {
                r.destination == destination
                    && matches!(r.path, Some(Path::Link { link, .. }) if link == host.index)
            });
            if !routed {
                return broken(format!(
                    "the node lacks the route {address} dev {host_name}"
                ));
            }
        }
        if !self.programs.is_attached(&pod_link(record, &host)) {
            return broken(format!("host link {host_name} lacks its eBPF programs"));
        }
        netns::inside(netns, || verify_pod_side(record))
    }
}

/// Whose the attachment is, for policies.
pub(super) fn local_pod(record: &Record) -> LocalPod {
    let pod = &record.pod;
    LocalPod {
        name: (!pod.name.is_empty()).then(|| Name::new(&pod.namespace, &pod.name)),
        uid: pod.uid.clone(),
        addresses: record.addresses.clone(),
    }
}

fn pod_link(record: &Record, host: &Link) -> PodLink {
    let (_, pod_mac) = record.macs();
    PodLink {
        ifindex: host.index,
        host_name: host.name.clone(),
        pod_mac,
        host_mac: host.mac,
        addresses: record.addresses.clone(),
        netns_cookie: record.netns_cookie,
    }
}

/// The kernel's number of a namespace; none where it has none (Linux before 5.14).
pub(super) fn netns_cookie(netns: &File) -> Option<u64> {
    let cookie = netns::inside(netns, || {
        namespace_cookie().map_err(|e| NetlinkError::new("number the pod's network namespace", e))
    });
    cookie
        .inspect_err(|error| tracing::debug!(%error, "the pod's sockets are left alone"))
        .ok()
}

fn find(netlink: &mut Netlink, name: &str) -> Result<Link, NetlinkError> {
    netlink.link(name)?.ok_or_else(|| {
        NetlinkError::new(
            format!("find link {name}"),
            std::io::Error::from_raw_os_error(libc::ENODEV),
        )
    })
}

fn default_route(address: IpAddr) -> Option<IpNetwork> {
    let any: IpAddr = match address {
        IpAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    };
    IpNetwork::new(any, 0).ok()
}

/// Runs inside the pod's namespace.
fn set_up_pod_side(record: &Record, mtu: u32) -> Result<(), CniError> {
    let name = &record.key.if_name;
    let (host_mac, _) = record.macs();
    // Addresses come from us alone, and are usable the moment the pod starts.
    for (key, value) in [
        ("disable_ipv6", "0"),
        ("accept_ra", "0"),
        ("accept_dad", "0"),
    ] {
        sysctl::set_if_present(&format!("net/ipv6/conf/{name}/{key}"), value)?;
    }
    let mut netlink = Netlink::open()?;
    let link = find(&mut netlink, name)?;
    for address in &record.addresses {
        netlink.add_host_address(link.index, *address)?;
    }
    limit_bandwidth(&mut netlink, record, link.index, mtu)?;
    netlink.set_link_up(link.index, true)?;
    if let Some(lo) = netlink.link("lo")?
        && !lo.up
    {
        netlink.set_link_up(lo.index, true)?;
    }
    for address in &record.addresses {
        let gateway = gateway_for(*address);
        netlink.set_neighbour(link.index, gateway, host_mac)?;
        if gateway.is_ipv4() {
            // The kernel would take it on our word; others that make routes by way of the gateway must find it.
            let path = Path::Link {
                link: link.index,
                source: None,
            };
            netlink.add_route(IpNetwork::from(gateway), path)?;
        }
        if let Some(default) = default_route(*address) {
            let path = Path::Via {
                gateway,
                link: link.index,
                source: None,
            };
            netlink.add_route(default, path)?;
        }
    }
    Ok(())
}

/// Shapes what the pod sends and receives. Runs inside the pod's namespace: only there every packet passes a queue, since
/// the programs put packets straight into the pod's side of the link.
fn limit_bandwidth(
    netlink: &mut Netlink,
    record: &Record,
    link: u32,
    mtu: u32,
) -> Result<(), NetlinkError> {
    let Some(bandwidth) = record.bandwidth else {
        return Ok(());
    };
    if let Some(bucket) = bandwidth.egress(mtu) {
        netlink.shape(link, bucket)?;
    }
    if let Some(bucket) = bandwidth.ingress(mtu) {
        let name = record.key.ifb_name();
        netlink.create_ifb(&name, mtu)?;
        let ifb = find(netlink, &name)?;
        netlink.shape(ifb.index, bucket)?;
        netlink.set_link_up(ifb.index, true)?;
        netlink.lead_ingress(link, ifb.index)?;
    }
    Ok(())
}

/// Removes what is in the pod's namespace beside the link itself, if that namespace is still there.
fn clear_pod_side(record: &Record) {
    let limited = record.bandwidth.is_some_and(|b| b.ingress_rate != 0);
    let Some(netns) = limited.then(|| File::open(&record.netns).ok()).flatten() else {
        return;
    };
    if record.netns_cookie.is_some() && netns_cookie(&netns) != record.netns_cookie {
        // Another namespace goes by that path now.
        return;
    }
    let name = record.key.ifb_name();
    let removed = netns::inside(&netns, || {
        absent_is_done(Netlink::open()?.delete_link(&name))
    });
    if let Err(e) = removed {
        tracing::warn!(link = %name, error = %e, "the device that limited a pod's traffic stays in its namespace");
    }
}

/// Runs inside the pod's namespace.
fn verify_pod_side(record: &Record) -> Result<(), CniError> {
    let broken = |message: String| Err(CniError::new(Code::Broken, message));
    let name = &record.key.if_name;
    let (host_mac, pod_mac) = record.macs();
    let mut netlink = Netlink::open()?;
    let Some(link) = netlink.link(name)? else {
        return broken(format!("the container's interface {name} is gone"));
    };
    if !link.up {
        return broken(format!("the container's interface {name} is down"));
    }
    let limited = record.bandwidth.is_some_and(|b| b.ingress_rate != 0);
    if limited && netlink.link(&record.key.ifb_name())?.is_none() {
        return broken(format!(
            "the device that limits what {name} receives is gone"
        ));
    }
    if link.mac != pod_mac {
        return broken(format!(
            "the container's interface {name} has another MAC address"
        ));
    }
    let addresses = netlink.addresses()?;
    let neighbours = netlink.neighbours()?;
    // In any table: plugins after us may have moved them.
    let routes = netlink.all_routes()?;
    for address in &record.addresses {
        if !addresses.contains(&(link.index, *address)) {
            return broken(format!(
                "the container's interface {name} lacks the address {address}"
            ));
        }
        let gateway = gateway_for(*address);
        let known = neighbours.iter().any(|n| {
            n.link == link.index && n.address == gateway && n.mac == host_mac && n.permanent
        });
        if !known {
            return broken(format!(
                "the container lacks the permanent neighbour {gateway}"
            ));
        }
        let through = |path: Option<Path>| match path {
            Some(Path::Via {
                gateway: via,
                link: l,
                ..
            }) => via == gateway && l == link.index,
            // The same with an MTU, which a chained plugin may have set.
            Some(Path::Overlay { link: l, .. }) => l == link.index,
            _ => false,
        };
        let default = default_route(*address);
        if !routes
            .iter()
            .any(|r| Some(r.destination) == default && through(r.path))
        {
            return broken(format!(
                "the container lacks the default route via {gateway}"
            ));
        }
    }
    Ok(())
}
