//! Links: veth pairs, listing, state, and their addresses.

use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::address::{
    AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage, AddressScope,
};
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVeth, InfoVxlan, LinkAttribute, LinkExtentMask, LinkFlags, LinkInfo,
    LinkMessage,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::{Netlink, NetlinkError};

/// A MAC address.
pub type Mac = [u8; 6];

/// A link as the kernel lists it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Link {
    pub index: u32,
    pub name: String,
    pub mac: Mac,
    /// Bytes.
    pub mtu: u32,
    pub up: bool,
    pub veth: bool,
    /// UDP port of a VXLAN device whose tunnel keys come from programs; such a device alone has one.
    pub overlay_port: Option<u16>,
}

/// One end of a veth pair to create.
#[derive(Clone, Copy, Debug)]
pub struct VethEnd<'a> {
    pub name: &'a str,
    pub mac: Mac,
    /// Namespace to create it in; the socket's own when unset.
    pub netns: Option<BorrowedFd<'a>>,
}

impl VethEnd<'_> {
    fn message(&self, mtu: u32) -> LinkMessage {
        let mut message = LinkMessage::default();
        message.attributes = vec![
            LinkAttribute::IfName(self.name.to_owned()),
            LinkAttribute::Address(self.mac.to_vec()),
            LinkAttribute::Mtu(mtu),
        ];
        if let Some(fd) = self.netns {
            message
                .attributes
                .push(LinkAttribute::NetNsFd(fd.as_raw_fd()));
        }
        message
    }
}

impl Netlink {
    /// Creates a veth pair, both ends down. Fails when either name is taken.
    ///
    /// # Errors
    /// [`NetlinkError`] names both ends.
    pub fn create_veth(
        &mut self,
        near: &VethEnd<'_>,
        far: &VethEnd<'_>,
        mtu: u32,
    ) -> Result<(), NetlinkError> {
        let mut message = near.message(mtu);
        message.attributes.push(LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Veth),
            LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(far.message(mtu)))),
        ]));
        self.change(
            RouteNetlinkMessage::NewLink(message),
            NLM_F_CREATE | NLM_F_EXCL,
        )
        .map_err(|e| NetlinkError::new(format!("create veth pair {} - {}", near.name, far.name), e))
    }

    /// Creates a VXLAN device that takes every tunnel key from programs and resolves no neighbours; it is down.
    ///
    /// # Errors
    /// [`NetlinkError`] names the device; [`NetlinkError::is_unsupported`] when the kernel has no VXLAN.
    pub fn create_overlay(
        &mut self,
        name: &str,
        mac: Mac,
        port: u16,
        mtu: u32,
    ) -> Result<(), NetlinkError> {
        let mut message = LinkMessage::default();
        message.header.flags = LinkFlags::Noarp;
        message.header.change_mask = LinkFlags::Noarp;
        message.attributes = vec![
            LinkAttribute::IfName(name.to_owned()),
            LinkAttribute::Address(mac.to_vec()),
            LinkAttribute::Mtu(mtu),
            LinkAttribute::LinkInfo(vec![
                LinkInfo::Kind(InfoKind::Vxlan),
                LinkInfo::Data(InfoData::Vxlan(vec![
                    InfoVxlan::CollectMetadata(true),
                    InfoVxlan::Learning(false),
                    InfoVxlan::Port(port),
                ])),
            ]),
        ];
        self.change(
            RouteNetlinkMessage::NewLink(message),
            NLM_F_CREATE | NLM_F_EXCL,
        )
        .map_err(|e| NetlinkError::new(format!("create VXLAN device {name} on UDP port {port}"), e))
    }

    /// The link of this name, if there is one.
    ///
    /// # Errors
    /// [`NetlinkError`] when the kernel refuses the query.
    pub fn link(&mut self, name: &str) -> Result<Option<Link>, NetlinkError> {
        let mut query = LinkMessage::default();
        query.attributes = vec![
            LinkAttribute::IfName(name.to_owned()),
            LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]),
        ];
        match self.get(RouteNetlinkMessage::GetLink(query)) {
            Ok(RouteNetlinkMessage::NewLink(message)) => Ok(Some(decode(&message))),
            Ok(_) => Ok(None),
            Err(e) if e.raw_os_error() == Some(libc::ENODEV) => Ok(None),
            Err(e) => Err(NetlinkError::new(format!("look up link {name}"), e)),
        }
    }

    /// All links of the socket's namespace.
    ///
    /// # Errors
    /// [`NetlinkError`] when the kernel refuses the dump.
    pub fn links(&mut self) -> Result<Vec<Link>, NetlinkError> {
        let mut query = LinkMessage::default();
        query.attributes = vec![LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats])];
        let messages = self
            .dump(&RouteNetlinkMessage::GetLink(query))
            .map_err(|e| NetlinkError::new("list links", e))?;
        Ok(messages
            .iter()
            .filter_map(|m| match m {
                RouteNetlinkMessage::NewLink(message) => Some(decode(message)),
                _ => None,
            })
            .collect())
    }

    /// Brings a link up or down.
    ///
    /// # Errors
    /// [`NetlinkError`] names the link.
    pub fn set_link_up(&mut self, index: u32, up: bool) -> Result<(), NetlinkError> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        message.header.flags = if up {
            LinkFlags::Up
        } else {
            LinkFlags::empty()
        };
        message.header.change_mask = LinkFlags::Up;
        let state = if up { "up" } else { "down" };
        self.change(RouteNetlinkMessage::SetLink(message), 0)
            .map_err(|e| NetlinkError::new(format!("bring link {index} {state}"), e))
    }

    /// Sets the MTU of a link, in bytes.
    ///
    /// # Errors
    /// [`NetlinkError`] names the link.
    pub fn set_link_mtu(&mut self, index: u32, mtu: u32) -> Result<(), NetlinkError> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        message.attributes = vec![LinkAttribute::Mtu(mtu)];
        self.change(RouteNetlinkMessage::SetLink(message), 0)
            .map_err(|e| NetlinkError::new(format!("set the MTU of link {index} to {mtu}"), e))
    }

    /// Deletes a link, and with a veth end its pair.
    ///
    /// # Errors
    /// [`NetlinkError`]; see [`NetlinkError::is_absent`].
    pub fn delete_link(&mut self, name: &str) -> Result<(), NetlinkError> {
        let mut message = LinkMessage::default();
        message.attributes = vec![LinkAttribute::IfName(name.to_owned())];
        self.change(RouteNetlinkMessage::DelLink(message), 0)
            .map_err(|e| NetlinkError::new(format!("delete link {name}"), e))
    }

    /// Gives a link a host address (/32 or /128) that is usable at once: without duplicate address detection.
    ///
    /// # Errors
    /// [`NetlinkError`] names the address.
    pub fn add_host_address(&mut self, index: u32, address: IpAddr) -> Result<(), NetlinkError> {
        let mut message = AddressMessage::default();
        let (family, prefix_len) = match address {
            IpAddr::V4(_) => (AddressFamily::Inet, 32),
            IpAddr::V6(_) => (AddressFamily::Inet6, 128),
        };
        message.header.family = family;
        message.header.prefix_len = prefix_len;
        message.header.scope = AddressScope::Universe;
        message.header.index = index;
        message.attributes = vec![
            AddressAttribute::Local(address),
            AddressAttribute::Address(address),
        ];
        if address.is_ipv6() {
            message.header.flags = AddressHeaderFlags::Nodad;
            message
                .attributes
                .push(AddressAttribute::Flags(AddressFlags::Nodad));
        }
        self.change(
            RouteNetlinkMessage::NewAddress(message),
            NLM_F_CREATE | NLM_F_REPLACE,
        )
        .map_err(|e| NetlinkError::new(format!("add address {address} to link {index}"), e))
    }

    /// All addresses: link index and address.
    ///
    /// # Errors
    /// [`NetlinkError`] when the kernel refuses the dump.
    pub fn addresses(&mut self) -> Result<Vec<(u32, IpAddr)>, NetlinkError> {
        let messages = self
            .dump(&RouteNetlinkMessage::GetAddress(AddressMessage::default()))
            .map_err(|e| NetlinkError::new("list addresses", e))?;
        Ok(messages
            .iter()
            .filter_map(|m| match m {
                RouteNetlinkMessage::NewAddress(message) => Some(message),
                _ => None,
            })
            .filter_map(|m| {
                let find = |local: bool| {
                    m.attributes.iter().find_map(|a| match a {
                        AddressAttribute::Local(ip) if local => Some(*ip),
                        AddressAttribute::Address(ip) if !local => Some(*ip),
                        _ => None,
                    })
                };
                // On a point-to-point link the address is the peer's; the local one is ours.
                find(true)
                    .or_else(|| find(false))
                    .map(|ip| (m.header.index, ip))
            })
            .collect())
    }
}

fn decode(message: &LinkMessage) -> Link {
    let mut link = Link {
        index: message.header.index,
        up: message.header.flags.contains(LinkFlags::Up),
        ..Link::default()
    };
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name.clone_from(name),
            LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
            LinkAttribute::Address(bytes) => {
                link.mac = bytes.as_slice().try_into().unwrap_or_default();
            }
            LinkAttribute::LinkInfo(infos) => {
                link.veth = infos
                    .iter()
                    .any(|i| matches!(i, LinkInfo::Kind(InfoKind::Veth)));
                link.overlay_port = overlay_port(infos);
            }
            _ => {}
        }
    }
    link
}

fn overlay_port(infos: &[LinkInfo]) -> Option<u16> {
    let settings = infos.iter().find_map(|i| match i {
        LinkInfo::Data(InfoData::Vxlan(settings)) => Some(settings),
        _ => None,
    })?;
    if !settings.contains(&InfoVxlan::CollectMetadata(true)) {
        return None;
    }
    settings.iter().find_map(|s| match s {
        InfoVxlan::Port(port) => Some(*port),
        _ => None,
    })
}
