//! Packets that are no plain TCP or UDP: ICMP messages that quote others, fragments, headers with options, SCTP. As
//! bytes, with every checksum from scratch.

use std::net::IpAddr;

use anyhow::{Context, Result, bail, ensure};

pub const ICMP: u8 = 1;
pub const ICMPV6: u8 = 58;
pub const SCTP: u8 = 132;

const ETHERNET: usize = 14;
/// IPv6 extension header: options for the destination.
const DESTINATION_OPTIONS: u8 = 60;
const FRAGMENT: u8 = 44;

/// An IP header.
#[derive(Clone, Copy, Debug)]
pub struct Ip {
    pub source: IpAddr,
    pub destination: IpAddr,
    pub protocol: u8,
    /// Identification, offset in bytes, more to come.
    pub fragment: Option<(u16, u16, bool)>,
    /// Words of four bytes of options, IPv4; or extension headers of eight bytes, IPv6.
    pub options: usize,
    /// Time to live, or hop limit.
    pub hops: u8,
}

impl Ip {
    /// # Panics
    /// When an address does not parse: the text is the test's own.
    #[must_use]
    pub fn new(source: &str, destination: &str, protocol: u8) -> Self {
        let parse = |text: &str| match text.parse() {
            Ok(address) => address,
            Err(error) => panic!("{text} is no address: {error}"),
        };
        Self {
            source: parse(source),
            destination: parse(destination),
            protocol,
            fragment: None,
            options: 0,
            hops: 64,
        }
    }

    /// The header and what follows it.
    #[must_use]
    pub fn around(&self, payload: &[u8]) -> Vec<u8> {
        match (self.source, self.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let length = 20 + self.options * 4;
                let version_length = 0x40 | byte(length / 4);
                let mut header = vec![version_length, 0];
                header.extend(field(length + payload.len()));
                let (id, offset, more) = self.fragment.unwrap_or((0x1234, 0, false));
                let mut fragment = offset / 8;
                if more {
                    fragment |= 0x2000;
                }
                if self.fragment.is_none() {
                    fragment = 0x4000;
                }
                header.extend(id.to_be_bytes());
                header.extend(fragment.to_be_bytes());
                header.extend([self.hops, self.protocol, 0, 0]);
                header.extend(source.octets());
                header.extend(destination.octets());
                // No operation.
                header.extend(vec![1; self.options * 4]);
                let sum = checksum(&[&header]);
                header[10..12].copy_from_slice(&sum.to_be_bytes());
                header.extend(payload);
                header
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let mut chain = Vec::new();
                let mut next = self.protocol;
                if let Some((id, offset, more)) = self.fragment {
                    let mut extension = vec![next, 0];
                    extension.extend((offset | u16::from(more)).to_be_bytes());
                    extension.extend(u32::from(id).to_be_bytes());
                    chain = extension;
                    next = FRAGMENT;
                }
                for _ in 0..self.options {
                    let mut extension = vec![next, 0, 1, 4, 0, 0, 0, 0];
                    extension.extend(&chain);
                    chain = extension;
                    next = DESTINATION_OPTIONS;
                }
                let mut header = vec![0x60, 0, 0, 0];
                header.extend(field(chain.len() + payload.len()));
                header.extend([next, self.hops]);
                header.extend(source.octets());
                header.extend(destination.octets());
                header.extend(chain);
                header.extend(payload);
                header
            }
            _ => panic!("source and destination are of one family"),
        }
    }

    fn pseudo(&self, bytes: usize) -> Vec<u8> {
        let mut pseudo = Vec::new();
        for address in [self.source, self.destination] {
            match address {
                IpAddr::V4(v4) => pseudo.extend(v4.octets()),
                IpAddr::V6(v6) => pseudo.extend(v6.octets()),
            }
        }
        pseudo.extend([0, self.protocol]);
        pseudo.extend(field(bytes));
        pseudo
    }
}

fn byte(value: usize) -> u8 {
    u8::try_from(value).unwrap_or(u8::MAX)
}

fn field(value: usize) -> [u8; 2] {
    u16::try_from(value).unwrap_or(u16::MAX).to_be_bytes()
}

fn checksum(parts: &[&[u8]]) -> u16 {
    let mut sum = 0u32;
    for part in parts {
        for pair in part.chunks(2) {
            sum += u32::from(u16::from_be_bytes([
                pair[0],
                pair.get(1).copied().unwrap_or(0),
            ]));
        }
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap_or(0)
}

/// An Ethernet frame around an IP packet.
#[must_use]
pub fn frame(packet: &[u8]) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    frame.extend(if packet[0] >> 4 == 4 {
        [0x08, 0x00]
    } else {
        [0x86, 0xdd]
    });
    frame.extend(packet);
    frame
}

/// An ICMP message as an IP packet: its type and code, the rest of its header, and its body.
#[must_use]
pub fn message(ip: &Ip, kind: (u8, u8), rest: [u8; 4], body: &[u8]) -> Vec<u8> {
    let mut message = vec![kind.0, kind.1, 0, 0];
    message.extend(rest);
    message.extend(body);
    let sum = if ip.protocol == ICMPV6 {
        checksum(&[&ip.pseudo(message.len()), &message])
    } else {
        checksum(&[&message])
    };
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    ip.around(&message)
}

/// A datagram's transport part.
#[must_use]
pub fn datagram(ip: &Ip, ports: (u16, u16), payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(ports.0.to_be_bytes());
    bytes.extend(ports.1.to_be_bytes());
    bytes.extend(field(8 + payload.len()));
    bytes.extend([0, 0]);
    bytes.extend(payload);
    let sum = checksum(&[&ip.pseudo(bytes.len()), &bytes]);
    let sum = if sum == 0 { 0xffff } else { sum };
    bytes[6..8].copy_from_slice(&sum.to_be_bytes());
    bytes
}

/// An SCTP packet's transport part with one chunk of this type. `sealed` is false when the device adds the checksum.
#[must_use]
pub fn sctp(ports: (u16, u16), chunk: u8, value: &[u8], sealed: bool) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(ports.0.to_be_bytes());
    bytes.extend(ports.1.to_be_bytes());
    bytes.extend([0xca, 0xfe, 0xba, 0xbe]);
    bytes.extend([0; 4]);
    bytes.extend([chunk, 0]);
    bytes.extend(field(4 + value.len()));
    bytes.extend(value);
    if sealed {
        let sum = crc32c(&bytes);
        bytes[8..12].copy_from_slice(&sum.to_le_bytes());
    }
    bytes
}

fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 {
                (crc >> 1) ^ 0x82f6_3b78
            } else {
                crc >> 1
            };
        }
    }
    !crc
}

/// The IP packet in a frame, after a check of the header's checksum and of the ICMP message's.
///
/// # Errors
/// Says which is wrong.
pub fn checked(frame: &[u8]) -> Result<&[u8]> {
    let packet = frame.get(ETHERNET..).context("an Ethernet header")?;
    match frame[12..ETHERNET] {
        [0x08, 0x00] => {
            let header = packet.get(..20).context("an IPv4 header")?;
            let length = usize::from(header[0] & 0xf) * 4;
            let header = packet.get(..length).context("IPv4 options")?;
            ensure!(
                checksum(&[header]) == 0,
                "the IPv4 header's checksum is wrong"
            );
            let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
            ensure!(
                total == packet.len(),
                "{total} bytes said, {} there",
                packet.len()
            );
            if header[9] == ICMP && header[6..8] != [0x20, 0] {
                ensure!(
                    checksum(&[&packet[length..]]) == 0,
                    "the ICMP checksum is wrong"
                );
            }
        }
        [0x86, 0xdd] => {
            let header = packet.get(..40).context("an IPv6 header")?;
            let payload = usize::from(u16::from_be_bytes([header[4], header[5]]));
            ensure!(
                payload + 40 == packet.len(),
                "{payload} bytes said, {} there",
                packet.len()
            );
            if header[6] == ICMPV6 {
                let length = u32::try_from(payload)?.to_be_bytes();
                let sum = checksum(&[&header[8..40], &length, &[0, ICMPV6], &packet[40..]]);
                ensure!(sum == 0, "the ICMPv6 checksum is wrong");
            }
        }
        ref other => bail!("ether type {other:02x?}"),
    }
    Ok(packet)
}
