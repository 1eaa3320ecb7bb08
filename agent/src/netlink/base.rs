//! What a node needs before its first pod: forwarding, filters that would drop translated packets, and the host link.

use std::net::IpAddr;

use super::changed_sysctls::ChangedSysctls;
use super::link::{Link, VethEnd};
use super::{
    HOST_LINK, HOST_LINK_PEER, Netlink, NetlinkError, PARK_LINK, PARK_LINK_PEER, absent_is_done,
    sysctl,
};
use crate::compile::routes::gateway_for;

/// MAC addresses of the host link: locally administered, the same on every node since the link never leaves it.
const HOST_LINK_MAC: [u8; 6] = [0x0a, 0x57, 0x45, 0x49, 0x52, 0x01];
const HOST_LINK_PEER_MAC: [u8; 6] = [0x0a, 0x57, 0x45, 0x49, 0x52, 0x02];

const PARK_LINK_MAC: [u8; 6] = [0x0a, 0x57, 0x45, 0x49, 0x52, 0x05];
const PARK_LINK_PEER_MAC: [u8; 6] = [0x0a, 0x57, 0x45, 0x49, 0x52, 0x06];
/// No fragment is longer, whatever link it came by.
const PARK_LINK_MTU: u32 = 65_535;

/// The veth pair through which the node's own processes reach services.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostLink {
    /// Where the service routes point.
    pub near: Link,
    /// Where the programs see the packets arrive.
    pub far: Link,
}

/// The veth pair on which the programs hand fragments to the agent, and get them back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParkLink {
    /// Where the programs send them, and take them back.
    pub near: Link,
    /// Where the agent listens.
    pub far: Link,
}

/// Sets the sysctls of the node as a whole and of its uplinks.
///
/// # Errors
/// [`NetlinkError`] names the sysctl.
pub fn set_sysctls(changed: &ChangedSysctls, uplinks: &[String]) -> Result<(), NetlinkError> {
    release_rp_filter_of_all(changed)?;
    // Setting it sets it for every link as well.
    let carried = of_every_link("net/ipv4/conf", "forwarding")?;
    changed.set_with("net/ipv4/ip_forward", "1", &carried)?;
    // Forwarding would end router advertisements on the uplinks; 2 keeps them where they were in use.
    for uplink in uplinks {
        let key = format!("net/ipv6/conf/{uplink}/accept_ra");
        if sysctl::get(&key).as_deref() == Some("1") {
            changed.set(&key, "2")?;
        }
        // Replies of services arrive here with an address whose route leads over the host link.
        let key = format!("net/ipv4/conf/{uplink}/rp_filter");
        if sysctl::get(&key).as_deref() == Some("1") {
            changed.set(&key, "2")?;
        }
    }
    let carried = of_every_link("net/ipv6/conf", "forwarding")?;
    changed.set_with("net/ipv6/conf/all/forwarding", "1", &carried)
}

/// Switches reverse-path filtering off for one link and keeps it for all others. The kernel takes the larger of the
/// value for `all` and that of the link, so `all` must be zero; links that relied on it get its value as their own.
fn release_rp_filter_of_all(changed: &ChangedSysctls) -> Result<(), NetlinkError> {
    const ALL: &str = "net/ipv4/conf/all/rp_filter";
    let number = |key: &str| {
        let value = sysctl::get(key);
        value.and_then(|v| v.parse::<u8>().ok()).unwrap_or(0)
    };
    let all = number(ALL);
    if all == 0 {
        return Ok(());
    }
    for key in of_every_link("net/ipv4/conf", "rp_filter")? {
        if key != ALL && number(&key) < all {
            changed.set(&key, &all.to_string())?;
        }
    }
    changed.set(ALL, "0")
}

/// The sysctl of this name of every link that is not ours, and of `all` and `default`.
fn of_every_link(folder: &str, name: &str) -> Result<Vec<String>, NetlinkError> {
    let path = format!("/proc/sys/{folder}");
    let failed = |e| NetlinkError::new(format!("list {path}"), e);
    let entries = match std::fs::read_dir(&path) {
        // IPv6 may be switched off.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut keys = Vec::new();
    for entry in entries {
        let link = entry.map_err(failed)?.file_name();
        let link = link.to_string_lossy();
        if !link.starts_with("weir") {
            keys.push(format!("{folder}/{link}/{name}"));
        }
    }
    Ok(keys)
}

/// Makes or adopts the host link, up and with its permanent neighbours.
///
/// # Errors
/// [`NetlinkError`] names the step.
pub fn ensure_host_link(netlink: &mut Netlink, mtu: u32) -> Result<HostLink, NetlinkError> {
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
    let (near, far) = ensure_pair(netlink, &near, &far, mtu)?;
    let host_link = HostLink { near, far };
    for name in [HOST_LINK, HOST_LINK_PEER] {
        quiet(name)?;
        sysctl::set(&format!("net/ipv4/conf/{name}/accept_local"), "1")?;
        sysctl::set(&format!("net/ipv4/conf/{name}/forwarding"), "1")?;
    }
    for link in [&host_link.near, &host_link.far] {
        if link.mtu != mtu {
            netlink.set_link_mtu(link.index, mtu)?;
        }
    }
    raise(netlink, [&host_link.near, &host_link.far])?;
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

/// Makes or adopts the link for fragments, up. Nothing but the programs and the agent speaks on it.
///
/// # Errors
/// [`NetlinkError`] names the step.
pub fn ensure_park_link(netlink: &mut Netlink) -> Result<ParkLink, NetlinkError> {
    let near = VethEnd {
        name: PARK_LINK,
        mac: PARK_LINK_MAC,
        netns: None,
    };
    let far = VethEnd {
        name: PARK_LINK_PEER,
        mac: PARK_LINK_PEER_MAC,
        netns: None,
    };
    let (near, far) = ensure_pair(netlink, &near, &far, PARK_LINK_MTU)?;
    for name in [PARK_LINK, PARK_LINK_PEER] {
        sysctl::set_if_present(&format!("net/ipv6/conf/{name}/disable_ipv6"), "1")?;
    }
    raise(netlink, [&near, &far])?;
    Ok(ParkLink { near, far })
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

/// Removes the pair that has `name` at one end; true when there was one.
///
/// # Errors
/// [`NetlinkError`] when the kernel refuses.
pub fn remove_pair(netlink: &mut Netlink, name: &str) -> Result<bool, NetlinkError> {
    let there = netlink.link(name)?.is_some();
    if there {
        absent_is_done(netlink.delete_link(name))?;
    }
    Ok(there)
}

/// Adopts a pair of ours, or makes it.
fn ensure_pair(
    netlink: &mut Netlink,
    near: &VethEnd<'_>,
    far: &VethEnd<'_>,
    mtu: u32,
) -> Result<(Link, Link), NetlinkError> {
    if let Some(pair) = find_pair(netlink, near.name, far.name)? {
        return Ok(pair);
    }
    netlink.create_veth(near, far, mtu)?;
    find_pair(netlink, near.name, far.name)?.ok_or_else(|| {
        NetlinkError::new(
            format!("find the link {} just created", near.name),
            std::io::ErrorKind::NotFound.into(),
        )
    })
}

/// Both ends, or nothing: a half (somebody's link of that name) is cleared away first.
fn find_pair(
    netlink: &mut Netlink,
    near: &str,
    far: &str,
) -> Result<Option<(Link, Link)>, NetlinkError> {
    match (netlink.link(near)?, netlink.link(far)?) {
        (Some(near), Some(far)) if near.veth && far.veth => Ok(Some((near, far))),
        (None, None) => Ok(None),
        (near, far) => {
            for link in near.into_iter().chain(far) {
                absent_is_done(netlink.delete_link(&link.name))?;
            }
            Ok(None)
        }
    }
}

fn raise(netlink: &mut Netlink, links: [&Link; 2]) -> Result<(), NetlinkError> {
    for link in links {
        if !link.up {
            netlink.set_link_up(link.index, true)?;
        }
    }
    Ok(())
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
