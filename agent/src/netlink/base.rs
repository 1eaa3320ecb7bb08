//! What a node needs before its first pod: forwarding, filters that would drop translated packets, and the host link.

use std::net::IpAddr;

use super::link::{Link, VethEnd};
use super::{HOST_LINK, HOST_LINK_PEER, Netlink, NetlinkError, absent_is_done, sysctl};
use crate::compile::routes::gateway_for;

/// MAC addresses of the host link: locally administered, the same on every node since the link never leaves it.
const HOST_LINK_MAC: [u8; 6] = [0x0a, 0x57, 0x45, 0x49, 0x52, 0x01];
const HOST_LINK_PEER_MAC: [u8; 6] = [0x0a, 0x57, 0x45, 0x49, 0x52, 0x02];

/// The veth pair through which the node's own processes reach services.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostLink {
    /// Where the service routes point.
    pub near: Link,
    /// Where the programs see the packets arrive.
    pub far: Link,
}

/// Sets the sysctls of the node as a whole and of its uplinks.
///
/// # Errors
/// [`NetlinkError`] names the sysctl.
pub fn set_sysctls(uplinks: &[String]) -> Result<(), NetlinkError> {
    sysctl::release_rp_filter_of_all()?;
    sysctl::set("net/ipv4/ip_forward", "1")?;
    // Forwarding would end router advertisements on the uplinks; 2 keeps them where they were in use.
    for uplink in uplinks {
        let key = format!("net/ipv6/conf/{uplink}/accept_ra");
        if sysctl::get(&key).as_deref() == Some("1") {
            sysctl::set(&key, "2")?;
        }
        // Replies of services arrive here with an address whose route leads over the host link.
        let key = format!("net/ipv4/conf/{uplink}/rp_filter");
        if sysctl::get(&key).as_deref() == Some("1") {
            sysctl::set(&key, "2")?;
        }
    }
    sysctl::set_if_present("net/ipv6/conf/all/forwarding", "1")
}

/// Makes or adopts the host link, up and with its permanent neighbours.
///
/// # Errors
/// [`NetlinkError`] names the step.
pub fn ensure_host_link(netlink: &mut Netlink, mtu: u32) -> Result<HostLink, NetlinkError> {
    let host_link = match find(netlink)? {
        Some(found) => found,
        None => create(netlink, mtu)?,
    };
    for name in [HOST_LINK, HOST_LINK_PEER] {
        quiet(name)?;
        sysctl::set(&format!("net/ipv4/conf/{name}/accept_local"), "1")?;
        sysctl::set(&format!("net/ipv4/conf/{name}/forwarding"), "1")?;
    }
    for link in [&host_link.near, &host_link.far] {
        if link.mtu != mtu {
            netlink.set_link_mtu(link.index, mtu)?;
        }
        if !link.up {
            netlink.set_link_up(link.index, true)?;
        }
    }
    for family in [
        IpAddr::V4(std::net::Ipv4Addr::LOCALHOST),
        IpAddr::V6(std::net::Ipv6Addr::LOCALHOST),
    ] {
        if family.is_ipv4() || ipv6_is_on() {
            netlink.set_neighbour(host_link.near.index, gateway_for(family), host_link.far.mac)?;
        }
    }
    Ok(host_link)
}

/// True unless IPv6 is compiled out or switched off at boot.
#[must_use]
pub fn ipv6_is_on() -> bool {
    std::path::Path::new("/proc/sys/net/ipv6").exists()
}

/// Sysctls of a link of ours on the node: no reverse-path filter, no addresses or chatter of its own.
///
/// # Errors
/// [`NetlinkError`] names the sysctl.
pub fn quiet(name: &str) -> Result<(), NetlinkError> {
    sysctl::set(&format!("net/ipv4/conf/{name}/rp_filter"), "0")?;
    for (key, value) in [
        ("disable_ipv6", "0"),
        ("accept_ra", "0"),
        ("accept_dad", "0"),
        ("addr_gen_mode", "1"),
    ] {
        sysctl::set_if_present(&format!("net/ipv6/conf/{name}/{key}"), value)?;
    }
    Ok(())
}

/// Removes the host link; true when there was one.
///
/// # Errors
/// [`NetlinkError`] when the kernel refuses.
pub fn remove_host_link(netlink: &mut Netlink) -> Result<bool, NetlinkError> {
    let there = netlink.link(HOST_LINK)?.is_some();
    if there {
        absent_is_done(netlink.delete_link(HOST_LINK))?;
    }
    Ok(there)
}

/// Both ends, or nothing: a half (somebody's link of that name) is cleared away first.
fn find(netlink: &mut Netlink) -> Result<Option<HostLink>, NetlinkError> {
    match (netlink.link(HOST_LINK)?, netlink.link(HOST_LINK_PEER)?) {
        (Some(near), Some(far)) if near.veth && far.veth => Ok(Some(HostLink { near, far })),
        (None, None) => Ok(None),
        (near, far) => {
            for link in near.into_iter().chain(far) {
                absent_is_done(netlink.delete_link(&link.name))?;
            }
            Ok(None)
        }
    }
}

fn create(netlink: &mut Netlink, mtu: u32) -> Result<HostLink, NetlinkError> {
    let near = VethEnd {
        name: HOST_LINK,
        mac: HOST_LINK_MAC,
        netns: None,
    };
    let far = VethEnd {
        name: HOST_LINK_PEER,
        mac: HOST_LINK_PEER_MAC,
        netns: None,
    };
    netlink.create_veth(&near, &far, mtu)?;
    find(netlink)?.ok_or_else(|| {
        NetlinkError::new(
            "find the host link just created",
            std::io::ErrorKind::NotFound.into(),
        )
    })
}

/// The smallest MTU of the uplinks, for pods and the host link.
///
/// # Errors
/// [`NetlinkError`] when an uplink does not exist.
pub fn uplink_mtu(netlink: &mut Netlink, uplinks: &[String]) -> Result<u32, NetlinkError> {
    let mut mtu = None;
    for name in uplinks {
        let link = netlink.link(name)?.ok_or_else(|| {
            NetlinkError::new(
                format!("find uplink {name} (key \"uplinks\" of the configuration)"),
                std::io::Error::from_raw_os_error(libc::ENODEV),
            )
        })?;
        mtu = Some(mtu.map_or(link.mtu, |least: u32| least.min(link.mtu)));
    }
    Ok(mtu.unwrap_or(1500))
}
