//! Permanent neighbours: pod links never ask for MAC addresses.

use std::net::IpAddr;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::RouteType;

use super::link::Mac;
use super::route::family_of;
use super::{Netlink, NetlinkError};

/// A neighbour entry as the kernel lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neighbour {
    pub link: u32,
    pub address: IpAddr,
    pub mac: Mac,
    pub permanent: bool,
}

impl Netlink {
    /// Sets a permanent neighbour, whatever was there before.
    ///
    /// # Errors
    /// [`NetlinkError`] names address and link.
    pub fn set_neighbour(
        &mut self,
        link: u32,
        address: IpAddr,
        mac: Mac,
    ) -> Result<(), NetlinkError> {
        let mut message = NeighbourMessage::default();
        message.header.family = family_of(address);
        message.header.ifindex = link;
        message.header.state = NeighbourState::Permanent;
        message.header.kind = RouteType::Unicast;
        message.attributes = vec![
            NeighbourAttribute::Destination(address.into()),
            NeighbourAttribute::LinkLayerAddress(mac.to_vec()),
        ];
        self.change(
            RouteNetlinkMessage::NewNeighbour(message),
            NLM_F_CREATE | NLM_F_REPLACE,
        )
        .map_err(|e| NetlinkError::new(format!("set neighbour {address} on link {link}"), e))
    }

    /// All neighbours of the socket's namespace.
    ///
    /// # Errors
    /// [`NetlinkError`] when the kernel refuses the dump.
    pub fn neighbours(&mut self) -> Result<Vec<Neighbour>, NetlinkError> {
        let messages = self
            .dump(&RouteNetlinkMessage::GetNeighbour(
                NeighbourMessage::default(),
            ))
            .map_err(|e| NetlinkError::new("list neighbours", e))?;
        Ok(messages.iter().filter_map(decode).collect())
    }
}

fn decode(message: &RouteNetlinkMessage) -> Option<Neighbour> {
    let RouteNetlinkMessage::NewNeighbour(message) = message else {
        return None;
    };
    let mut address = None;
    let mut mac = Mac::default();
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(ip)) => {
                address = Some(IpAddr::V4(*ip));
            }
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(ip)) => {
                address = Some(IpAddr::V6(*ip));
            }
            NeighbourAttribute::LinkLayerAddress(bytes) => {
                mac = bytes.as_slice().try_into().unwrap_or_default();
            }
            _ => {}
        }
    }
    Some(Neighbour {
        link: message.header.ifindex,
        address: address?,
        mac,
        permanent: message.header.state == NeighbourState::Permanent,
    })
}
