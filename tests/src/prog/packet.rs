//! Packets as values: built to bytes, read from bytes, checksums computed from scratch.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, bail, ensure};

pub const TCP: u8 = 6;
pub const UDP: u8 = 17;

pub const FIN: u8 = 0x01;
pub const SYN: u8 = 0x02;
pub const RST: u8 = 0x04;
pub const ACK: u8 = 0x10;

pub(super) const ETHERNET: usize = 14;
const TCP_HEADER: usize = 20;
const UDP_HEADER: usize = 8;

/// A TCP or UDP packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    pub destination_mac: [u8; 6],
    pub source_mac: [u8; 6],
    pub source: SocketAddr,
    pub destination: SocketAddr,
    pub protocol: u8,
    /// Zero unless TCP.
    pub tcp_flags: u8,
    pub payload: Vec<u8>,
    /// UDP over IPv4 may go without a checksum.
    pub checksum: bool,
}

impl Packet {
    /// # Panics
    /// When an address does not parse: the text is the test's own.
    #[must_use]
    pub fn new(protocol: u8, source: &str, destination: &str) -> Self {
        let parse = |text: &str| {
            text.parse()
                .unwrap_or_else(|error| panic!("{text} is no socket address: {error}"))
        };
        Self {
            destination_mac: [2, 0, 0, 0, 0, 1],
            source_mac: [2, 0, 0, 0, 0, 2],
            source: parse(source),
            destination: parse(destination),
            protocol,
            tcp_flags: if protocol == TCP { SYN } else { 0 },
            payload: b"some payload of odd length!".to_vec(),
            checksum: true,
        }
    }

    #[must_use]
    pub fn with_flags(mut self, flags: u8) -> Self {
        self.tcp_flags = flags;
        self
    }

    /// The answer to this packet: addresses, ports and MACs swapped.
    #[must_use]
    pub fn answer(&self) -> Self {
        let mut answer = self.clone();
        (answer.source, answer.destination) = (self.destination, self.source);
        (answer.source_mac, answer.destination_mac) = (self.destination_mac, self.source_mac);
        answer.tcp_flags = if self.protocol == TCP { SYN | ACK } else { 0 };
        answer
    }

    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut transport = self.transport();
        if self.checksum {
            let sum = match self.sum(&transport) {
                0 if self.protocol == UDP => 0xffff,
                sum => sum,
            };
            self.set_checksum(&mut transport, sum);
        }
        self.frame(&transport)
    }

    /// With the sum of the pseudo header in the place of the transport checksum: what a sender leaves to its device to
    /// finish.
    #[must_use]
    pub fn to_bytes_unfinished(&self) -> Vec<u8> {
        let mut transport = self.transport();
        let pseudo_header = !self.sum(&vec![0; transport.len()]);
        self.set_checksum(&mut transport, pseudo_header);
        self.frame(&transport)
    }

    fn sum(&self, transport: &[u8]) -> u16 {
        let (source, destination) = (self.source.ip(), self.destination.ip());
        pseudo_sum(source, destination, self.protocol, transport)
    }

    fn set_checksum(&self, transport: &mut [u8], sum: u16) {
        let at = if self.protocol == TCP { 16 } else { 6 };
        transport[at..at + 2].copy_from_slice(&sum.to_be_bytes());
    }

    fn frame(&self, transport: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(self.destination_mac);
        bytes.extend(self.source_mac);
        match (self.source.ip(), self.destination.ip()) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                bytes.extend(0x0800u16.to_be_bytes());
                let mut header = vec![0x45, 0, 0, 0, 0x12, 0x34, 0x40, 0, 64, self.protocol, 0, 0];
                header[2..4].copy_from_slice(&length(20 + transport.len()));
                header.extend(source.octets());
                header.extend(destination.octets());
                let sum = fold(sum(&header));
                header[10..12].copy_from_slice(&sum.to_be_bytes());
                bytes.extend(header);
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                bytes.extend(0x86ddu16.to_be_bytes());
                bytes.extend([0x60, 0, 0, 0]);
                bytes.extend(length(transport.len()));
                bytes.extend([self.protocol, 64]);
                bytes.extend(source.octets());
                bytes.extend(destination.octets());
            }
            _ => panic!("source and destination are of one family"),
        }
        bytes.extend(transport);
        bytes
    }

    fn transport(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(self.source.port().to_be_bytes());
        bytes.extend(self.destination.port().to_be_bytes());
        if self.protocol == TCP {
            bytes.extend([
                0,
                0,
                0,
                7,
                0,
                0,
                0,
                9,
                0x50,
                self.tcp_flags,
                0xff,
                0xff,
                0,
                0,
                0,
                0,
            ]);
        } else {
            bytes.extend(length(UDP_HEADER + self.payload.len()));
            bytes.extend([0, 0]);
        }
        bytes.extend(&self.payload);
        bytes
    }

    /// Reads a packet back, and checks every checksum in it.
    ///
    /// # Errors
    /// Says which header is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let ether_type = bytes.get(12..ETHERNET).context("an Ethernet header")?;
        let (source, destination, protocol, transport) = match ether_type {
            [0x08, 0x00] => read_ipv4(&bytes[ETHERNET..])?,
            [0x86, 0xdd] => read_ipv6(&bytes[ETHERNET..])?,
            other => bail!("ether type {other:02x?}"),
        };
        let header = if protocol == TCP {
            TCP_HEADER
        } else {
            UDP_HEADER
        };
        ensure!(
            transport.len() >= header,
            "transport header of {} bytes",
            transport.len()
        );
        let port = |at: usize| u16::from_be_bytes([transport[at], transport[at + 1]]);
        let checksum = protocol == TCP || port(6) != 0;
        if checksum {
            let sum = pseudo_sum(source, destination, protocol, transport);
            ensure!(sum == 0, "the transport checksum is off by {sum:#06x}");
        }
        let mac = |at: usize| <[u8; 6]>::try_from(&bytes[at..at + 6]);
        Ok(Self {
            destination_mac: mac(0)?,
            source_mac: mac(6)?,
            source: SocketAddr::new(source, port(0)),
            destination: SocketAddr::new(destination, port(2)),
            protocol,
            tcp_flags: if protocol == TCP { transport[13] } else { 0 },
            payload: transport[header..].to_vec(),
            checksum,
        })
    }
}

type Read<'a> = (IpAddr, IpAddr, u8, &'a [u8]);

fn read_ipv4(bytes: &[u8]) -> Result<Read<'_>> {
    let header = bytes.get(..20).context("an IPv4 header")?;
    ensure!(
        fold(sum(header)) == 0,
        "the IPv4 header checksum is off by {:#06x}",
        fold(sum(header))
    );
    let address =
        |at: usize| -> Result<IpAddr> { Ok(<[u8; 4]>::try_from(&header[at..at + 4])?.into()) };
    Ok((address(12)?, address(16)?, header[9], &bytes[20..]))
}

fn read_ipv6(bytes: &[u8]) -> Result<Read<'_>> {
    let header = bytes.get(..40).context("an IPv6 header")?;
    let address =
        |at: usize| -> Result<IpAddr> { Ok(<[u8; 16]>::try_from(&header[at..at + 16])?.into()) };
    Ok((address(8)?, address(24)?, header[6], &bytes[40..]))
}

/// A length field.
fn length(bytes: usize) -> [u8; 2] {
    u16::try_from(bytes).unwrap_or(u16::MAX).to_be_bytes()
}

pub(super) fn sum(bytes: &[u8]) -> u32 {
    bytes
        .chunks(2)
        .map(|pair| {
            u32::from(u16::from_be_bytes([
                pair[0],
                pair.get(1).copied().unwrap_or(0),
            ]))
        })
        .sum()
}

pub(super) fn fold(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap_or(0)
}

pub(super) fn pseudo_sum(
    source: IpAddr,
    destination: IpAddr,
    protocol: u8,
    transport: &[u8],
) -> u16 {
    let addresses = match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            sum(&source.octets()) + sum(&destination.octets())
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            sum(&source.octets()) + sum(&destination.octets())
        }
        _ => 0,
    };
    let length = u32::try_from(transport.len()).unwrap_or(0);
    fold(addresses + u32::from(protocol) + length + sum(transport))
}

/// What a port unreachable message quotes, after a check of its headers and checksums.
///
/// # Errors
/// Says what is wrong with the message.
pub fn quoted_by_icmp(bytes: &[u8]) -> Result<&[u8]> {
    let is_v4 = bytes.get(12..ETHERNET).context("an Ethernet header")? == [0x08, 0x00];
    let (source, destination, protocol, message) = if is_v4 {
        read_ipv4(&bytes[ETHERNET..])?
    } else {
        read_ipv6(&bytes[ETHERNET..])?
    };
    ensure!(message.len() > 8, "a message of {} bytes", message.len());
    let (want_protocol, want_type) = if is_v4 { (1, [3, 3]) } else { (58, [1, 4]) };
    ensure!(
        protocol == want_protocol && message[..2] == want_type,
        "{protocol} {:?}",
        &message[..2]
    );
    let sum = if is_v4 {
        fold(sum(message))
    } else {
        pseudo_sum(source, destination, protocol, message)
    };
    ensure!(sum == 0, "the ICMP checksum is off by {sum:#06x}");
    Ok(&message[8..])
}
