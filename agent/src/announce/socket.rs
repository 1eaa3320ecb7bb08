//! Packet sockets on one link, and the multicast groups that solicitations come in.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd as _;

use nix::sys::socket::{LinkAddr, bind};
use socket2::{Domain, Protocol, SockFilter, Socket, Type};

use super::packet::{ETH_P_ARP, ETH_P_IPV6, solicited_node};

/// Longest frame of interest; longer ones are cut, which no parser minds.
const FRAME_BYTES: usize = 256;

/// A raw socket that sees the frames of one kind on one link, and sends there.
#[derive(Debug)]
pub(super) struct PacketSocket {
    /// No UDP at all: to receive and send without addresses, every kind of socket is alike to the reactor.
    socket: tokio::net::UdpSocket,
}

impl PacketSocket {
    /// Sees ARP.
    pub(super) fn arp(link: &LinkAddr) -> io::Result<Self> {
        Self::open(link, ETH_P_ARP, &[])
    }

    /// Sees neighbour solicitations, and no other IPv6 packet: the kernel sorts them out.
    pub(super) fn solicitations(link: &LinkAddr) -> io::Result<Self> {
        // Load byte, compare and jump, return: next header at 20 is ICMPv6, type at 54 is 135.
        let (load, compare, done) = (0x30, 0x15, 0x06);
        let filter = [
            SockFilter::new(load, 0, 0, 20),
            SockFilter::new(compare, 0, 3, 58),
            SockFilter::new(load, 0, 0, 54),
            SockFilter::new(compare, 0, 1, 135),
            SockFilter::new(done, 0, 0, u32::MAX),
            SockFilter::new(done, 0, 0, 0),
        ];
        Self::open(link, ETH_P_IPV6, &filter)
    }

    fn open(link: &LinkAddr, ether_type: u16, filter: &[SockFilter]) -> io::Result<Self> {
        let protocol = Protocol::from(i32::from(ether_type.to_be()));
        let socket = Socket::new(Domain::PACKET, Type::RAW, Some(protocol))?;
        socket.set_nonblocking(true)?;
        if !filter.is_empty() {
            socket.attach_filter(filter)?;
        }
        // An address without a protocol keeps that of the socket.
        bind(socket.as_raw_fd(), link)?;
        Ok(Self {
            socket: tokio::net::UdpSocket::from_std(socket.into())?,
        })
    }

    /// The next frame. Cancel-safe.
    pub(super) async fn receive(&self) -> io::Result<Vec<u8>> {
        let mut frame = [0_u8; FRAME_BYTES];
        let length = self.socket.recv(&mut frame).await?;
        Ok(frame[..length].to_vec())
    }

    /// Sends a whole frame. A full queue of the link drops it, as the network may.
    pub(super) fn send(&self, frame: &[u8]) -> io::Result<()> {
        match self.socket.try_send(frame) {
            Err(e) if e.kind() != io::ErrorKind::WouldBlock => Err(e),
            _ => Ok(()),
        }
    }
}

/// Memberships on one link: cards and switches that filter multicast let solicitations through.
#[derive(Debug)]
pub(super) struct Groups {
    ifindex: u32,
    members: BTreeMap<Ipv6Addr, UdpSocket>,
}

impl Groups {
    pub(super) fn new(ifindex: u32) -> Self {
        Self {
            ifindex,
            members: BTreeMap::new(),
        }
    }

    /// Joins the groups of these addresses and leaves all others. The first failure is returned; the others are tried.
    pub(super) fn set(&mut self, addresses: impl Iterator<Item = Ipv6Addr>) -> io::Result<()> {
        let wanted: std::collections::BTreeSet<Ipv6Addr> = addresses.map(solicited_node).collect();
        self.members.retain(|group, _| wanted.contains(group));
        let mut result = Ok(());
        for group in wanted {
            if self.members.contains_key(&group) {
                continue;
            }
            match self.join(group) {
                Ok(socket) => {
                    self.members.insert(group, socket);
                }
                Err(e) => result = result.and(Err(e)),
            }
        }
        result
    }

    fn join(&self, group: Ipv6Addr) -> io::Result<UdpSocket> {
        // A socket per group: the kernel bounds the memberships of one.
        let socket = UdpSocket::bind(SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)))?;
        socket.join_multicast_v6(&group, self.ifindex)?;
        Ok(socket)
    }
}
