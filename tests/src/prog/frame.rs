//! What is wrong with a frame's checksums, however broken the frame is.

use std::net::IpAddr;

use super::packet::{ETHERNET, TCP, UDP, fold, pseudo_sum, sum};

const ICMP: u8 = 1;
const ICMPV6: u8 = 58;

/// What the checksums of a frame are off by: zero where they are right, or where there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Residue {
    pub network: u16,
    pub transport: u16,
}

impl Residue {
    pub const GOOD: Self = Self {
        network: 0,
        transport: 0,
    };
}

/// Parts of a frame that carry checksums.
struct Parts<'a> {
    /// Of IPv4.
    header: Option<&'a [u8]>,
    addresses: (IpAddr, IpAddr),
    protocol: u8,
    /// The first fragment's, or a whole datagram's.
    transport: Option<&'a [u8]>,
}

/// See [`Residue`].
#[must_use]
pub fn residue(frame: &[u8]) -> Residue {
    let Some(parts) = parts(frame) else {
        return Residue::GOOD;
    };
    let network = parts.header.map_or(0, |header| off_by(sum(header)));
    let transport = parts
        .transport
        .and_then(|transport| transport_residue(&parts, transport))
        .unwrap_or(0);
    Residue { network, transport }
}

fn transport_residue(parts: &Parts<'_>, transport: &[u8]) -> Option<u16> {
    let (source, destination) = parts.addresses;
    match parts.protocol {
        UDP if source.is_ipv4() && transport.get(6..8)? == [0, 0] => None,
        TCP if transport.len() < 18 => None,
        UDP if transport.len() < 8 => None,
        TCP | UDP | ICMPV6 => Some(canonical(!pseudo_sum(
            source,
            destination,
            parts.protocol,
            transport,
        ))),
        ICMP => Some(off_by(sum(transport))),
        _ => None,
    }
}

/// Zero and all ones are one number in this arithmetic.
fn canonical(folded: u16) -> u16 {
    if folded == 0xffff { 0 } else { folded }
}

fn off_by(sum: u32) -> u16 {
    canonical(!fold(sum))
}

fn parts(frame: &[u8]) -> Option<Parts<'_>> {
    match frame.get(12..ETHERNET)? {
        [0x08, 0x00] => ipv4(&frame[ETHERNET..]),
        [0x86, 0xdd] => ipv6(&frame[ETHERNET..]),
        _ => None,
    }
}

fn ipv4(bytes: &[u8]) -> Option<Parts<'_>> {
    let length = usize::from(bytes.first()? & 0x0f) * 4;
    let header = bytes.get(..length).filter(|header| header.len() >= 20)?;
    let address = |at: usize| {
        <[u8; 4]>::try_from(&header[at..at + 4])
            .ok()
            .map(IpAddr::from)
    };
    let later = u16::from_be_bytes([header[6], header[7]]) & 0x1fff != 0;
    Some(Parts {
        header: Some(header),
        addresses: (address(12)?, address(16)?),
        protocol: header[9],
        transport: (!later).then_some(&bytes[length..]),
    })
}

fn ipv6(bytes: &[u8]) -> Option<Parts<'_>> {
    /// As many as the programs look through.
    const EXTENSIONS: usize = 4;
    const FRAGMENT: u8 = 44;
    let header = bytes.get(..40)?;
    let address = |at: usize| {
        <[u8; 16]>::try_from(&header[at..at + 16])
            .ok()
            .map(IpAddr::from)
    };
    let addresses = (address(8)?, address(24)?);
    let mut protocol = header[6];
    let mut offset = 40;
    for _ in 0..EXTENSIONS {
        if ![0, 43, FRAGMENT, 60].contains(&protocol) {
            break;
        }
        let extension = bytes.get(offset..offset + 8)?;
        if protocol == FRAGMENT {
            if u16::from_be_bytes([extension[2], extension[3]]) & 0xfff8 != 0 {
                return None;
            }
            offset += 8;
        } else {
            offset += (usize::from(extension[1]) + 1) * 8;
        }
        protocol = extension[0];
    }
    Some(Parts {
        header: None,
        addresses,
        protocol,
        transport: bytes.get(offset..),
    })
}

/// True when `output` is what a program sends back in place of `input`: its source is what the other's destination
/// was, and it is a reset or a message about a packet.
#[must_use]
pub fn is_answer(input: &[u8], output: &[u8]) -> bool {
    let (Some(input), Some(output)) = (parts(input), parts(output)) else {
        return false;
    };
    output.addresses == (input.addresses.1, input.addresses.0)
        && (output.protocol == ICMP || output.protocol == ICMPV6 || output.protocol == TCP)
}
