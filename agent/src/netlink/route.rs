//! Routes of ours in the kernel's main table, and route lookups.

use std::net::IpAddr;

use ipnetwork::IpNetwork;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric,
    RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::{Netlink, NetlinkError, ROUTE_PROTOCOL};
use crate::compile::routes::{Path, gateway_for};
use crate::plan::routes::PresentRoute;

pub(super) fn family_of(address: IpAddr) -> AddressFamily {
    if address.is_ipv4() {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    }
}

impl Netlink {
    /// Adds a route; fails when anybody's route of that destination and metric exists.
    ///
    /// # Errors
    /// [`NetlinkError`] names the destination.
    pub fn add_route(&mut self, destination: IpNetwork, path: Path) -> Result<(), NetlinkError> {
        self.write_route(
            destination,
            path,
            RouteProtocol::Other(ROUTE_PROTOCOL),
            NLM_F_EXCL,
        )
    }

    /// Replaces a route of ours.
    ///
    /// # Errors
    /// [`NetlinkError`] names the destination.
    pub fn replace_route(
        &mut self,
        destination: IpNetwork,
        path: Path,
    ) -> Result<(), NetlinkError> {
        self.write_route(
            destination,
            path,
            RouteProtocol::Other(ROUTE_PROTOCOL),
            NLM_F_REPLACE,
        )
    }

    fn write_route(
        &mut self,
        destination: IpNetwork,
        path: Path,
        protocol: RouteProtocol,
        flags: u16,
    ) -> Result<(), NetlinkError> {
        let mut message = message(destination, path);
        message.header.protocol = protocol;
        self.change(RouteNetlinkMessage::NewRoute(message), NLM_F_CREATE | flags)
            .map_err(|e| NetlinkError::new(format!("add route {destination} {path:?}"), e))
    }

    /// Deletes a route of ours; one of another protocol never matches.
    ///
    /// # Errors
    /// [`NetlinkError`]; see [`NetlinkError::is_absent`].
    pub fn delete_route(&mut self, route: &PresentRoute) -> Result<(), NetlinkError> {
        let mut message = RouteMessage::default();
        message.header = RouteHeader {
            address_family: family_of(route.destination.ip()),
            destination_prefix_length: route.destination.prefix(),
            table: RouteHeader::RT_TABLE_MAIN,
            protocol: RouteProtocol::Other(ROUTE_PROTOCOL),
            scope: RouteScope::NoWhere,
            kind: RouteType::Unspec,
            ..RouteHeader::default()
        };
        message.attributes = vec![RouteAttribute::Priority(route.priority)];
        if route.destination.prefix() > 0 {
            message.attributes.push(RouteAttribute::Destination(
                route.destination.network().into(),
            ));
        }
        self.change(RouteNetlinkMessage::DelRoute(message), 0)
            .map_err(|e| NetlinkError::new(format!("delete route {}", route.destination), e))
    }

    /// All routes with our protocol number, both families.
    ///
    /// # Errors
    /// [`NetlinkError`] when the kernel refuses the dump.
    pub fn own_routes(&mut self) -> Result<Vec<PresentRoute>, NetlinkError> {
        let mut own = Vec::new();
        for route in self.main_table()? {
            if route.header.protocol == RouteProtocol::Other(ROUTE_PROTOCOL)
                && let Some(present) = decode(&route)
            {
                own.push(present);
            }
        }
        Ok(own)
    }

    /// Every route of every table as the kernel has it, whoever owns it.
    ///
    /// # Errors
    /// [`NetlinkError`] when the kernel refuses the dump.
    pub fn all_routes(&mut self) -> Result<Vec<PresentRoute>, NetlinkError> {
        Ok(self.every_table()?.iter().filter_map(decode).collect())
    }

    fn main_table(&mut self) -> Result<Vec<RouteMessage>, NetlinkError> {
        let mut table = self.every_table()?;
        table.retain(|route| route.header.table == RouteHeader::RT_TABLE_MAIN);
        Ok(table)
    }

    fn every_table(&mut self) -> Result<Vec<RouteMessage>, NetlinkError> {
        let mut table = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut query = RouteMessage::default();
            query.header.address_family = family;
            let messages = self
                .dump(&RouteNetlinkMessage::GetRoute(query))
                .map_err(|e| NetlinkError::new("list routes", e))?;
            table.extend(messages.into_iter().filter_map(|m| match m {
                RouteNetlinkMessage::NewRoute(route) => Some(route),
                _ => None,
            }));
        }
        Ok(table)
    }

    /// Asks the kernel how packets to an address leave.
    ///
    /// # Errors
    /// [`NetlinkError`] when the kernel refuses for another reason than having no route.
    pub fn lookup(&mut self, address: IpAddr) -> Result<Option<Lookup>, NetlinkError> {
        let mut query = RouteMessage::default();
        query.header.address_family = family_of(address);
        query.header.destination_prefix_length = if address.is_ipv4() { 32 } else { 128 };
        query.attributes = vec![RouteAttribute::Destination(address.into())];
        let route = match self.get(RouteNetlinkMessage::GetRoute(query)) {
            Ok(RouteNetlinkMessage::NewRoute(route)) => route,
            Ok(_) => return Ok(None),
            Err(e)
                if matches!(
                    e.raw_os_error(),
                    Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::EINVAL | libc::EACCES)
                ) =>
            {
                return Ok(None);
            }
            Err(e) => {
                return Err(NetlinkError::new(
                    format!("look up the route to {address}"),
                    e,
                ));
            }
        };
        if route.header.kind != RouteType::Unicast {
            return Ok(None);
        }
        let (mut link, mut gateway, mut mtu) = (None, false, None);
        for attribute in &route.attributes {
            match attribute {
                RouteAttribute::Gateway(_) | RouteAttribute::Via(_) => gateway = true,
                RouteAttribute::Oif(index) => link = Some(*index),
                RouteAttribute::Metrics(metrics) => mtu = mtu_of(metrics),
                _ => {}
            }
        }
        Ok(link.map(|link| Lookup { link, gateway, mtu }))
    }
}

/// How packets to an address leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lookup {
    pub link: u32,
    /// Through a gateway on that link.
    pub gateway: bool,
    /// Bytes that fit the path, where the route says so or the kernel has learned it.
    pub mtu: Option<u32>,
}

fn mtu_of(metrics: &[RouteMetric]) -> Option<u32> {
    metrics.iter().find_map(|metric| match metric {
        RouteMetric::Mtu(mtu) => Some(*mtu),
        _ => None,
    })
}

fn message(destination: IpNetwork, path: Path) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header = RouteHeader {
        address_family: family_of(destination.ip()),
        destination_prefix_length: destination.prefix(),
        table: RouteHeader::RT_TABLE_MAIN,
        kind: RouteType::Unicast,
        ..RouteHeader::default()
    };
    if destination.prefix() > 0 {
        message
            .attributes
            .push(RouteAttribute::Destination(destination.network().into()));
    }
    match path {
        Path::Link { link, source } => {
            message.header.scope = RouteScope::Link;
            message.attributes.push(RouteAttribute::Oif(link));
            message
                .attributes
                .extend(source.map(|s| RouteAttribute::PrefSource(s.into())));
        }
        Path::Via {
            gateway,
            link,
            source,
        } => {
            // The gateway is a neighbour whatever the addresses on the link say.
            message.header.flags = RouteFlags::Onlink;
            message
                .attributes
                .push(RouteAttribute::Gateway(gateway.into()));
            message.attributes.push(RouteAttribute::Oif(link));
            message
                .attributes
                .extend(source.map(|s| RouteAttribute::PrefSource(s.into())));
        }
        Path::Overlay { link, source, mtu } => {
            let via = gateway_for(destination.ip());
            message.header.flags = RouteFlags::Onlink;
            message.attributes.extend([
                RouteAttribute::Gateway(via.into()),
                RouteAttribute::Oif(link),
                RouteAttribute::Metrics(vec![RouteMetric::Mtu(mtu)]),
            ]);
            message
                .attributes
                .extend(source.map(|s| RouteAttribute::PrefSource(s.into())));
        }
        Path::Unreachable => message.header.kind = RouteType::Unreachable,
    }
    message
}

fn decode(message: &RouteMessage) -> Option<PresentRoute> {
    let header = &message.header;
    let mut destination = match header.address_family {
        AddressFamily::Inet => IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED),
        AddressFamily::Inet6 => IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED),
        _ => return None,
    };
    let (mut link, mut gateway, mut source, mut mtu, mut priority) = (None, None, None, None, 0);
    let mut foreign_form = false;
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(a) => destination = ip(a)?,
            RouteAttribute::Oif(index) => link = Some(*index),
            RouteAttribute::Gateway(a) => gateway = ip(a),
            RouteAttribute::PrefSource(a) => source = ip(a),
            RouteAttribute::Priority(metric) => priority = *metric,
            RouteAttribute::Metrics(metrics) => mtu = mtu_of(metrics),
            RouteAttribute::MultiPath(_) | RouteAttribute::Via(_) | RouteAttribute::Encap(_) => {
                foreign_form = true;
            }
            _ => {}
        }
    }
    let path = match (header.kind, link, gateway, mtu) {
        _ if foreign_form => None,
        (RouteType::Unreachable, ..) => Some(Path::Unreachable),
        (RouteType::Unicast, Some(link), Some(gateway), Some(mtu))
            if gateway == gateway_for(gateway) =>
        {
            Some(Path::Overlay { link, source, mtu })
        }
        (RouteType::Unicast, Some(link), Some(gateway), _) => Some(Path::Via {
            gateway,
            link,
            source,
        }),
        (RouteType::Unicast, Some(link), None, _) => Some(Path::Link { link, source }),
        _ => None,
    };
    let destination = IpNetwork::new(destination, header.destination_prefix_length).ok()?;
    Some(PresentRoute {
        destination,
        priority,
        path,
    })
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(v4) => Some(IpAddr::V4(*v4)),
        RouteAddress::Inet6(v6) => Some(IpAddr::V6(*v6)),
        _ => None,
    }
}
