//! IP, UDP, ICMP and VXLAN packets by hand. Pure.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

pub const ICMP: u8 = 1;
pub const TCP: u8 = 6;
pub const UDP: u8 = 17;
pub const ICMP_V6: u8 = 58;
pub const SCTP: u8 = 132;
const FRAGMENT_HEADER: u8 = 44;
const TCP_SYN: u8 = 0x02;
const TCP_PUSH_ACK: u8 = 0x18;
const TCP_WINDOW: u16 = 502;
const TTL: u8 = 64;

/// The Internet checksum (RFC 1071) over several parts; all but the last must have even length.
#[must_use]
pub fn checksum(parts: &[&[u8]]) -> u16 {
    let mut sum = 0_u32;
    for part in parts {
        for pair in part.chunks(2) {
            sum += u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |b| u32::from(*b));
        }
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap_or(0)
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(a) => a.octets().to_vec(),
        IpAddr::V6(a) => a.octets().to_vec(),
    }
}

fn len16(n: usize) -> [u8; 2] {
    u16::try_from(n).unwrap_or(u16::MAX).to_be_bytes()
}

/// A UDP datagram with its checksum.
#[must_use]
pub fn udp(src: SocketAddr, dst: SocketAddr, payload: &[u8]) -> Vec<u8> {
    let mut datagram = Vec::with_capacity(8 + payload.len());
    datagram.extend(src.port().to_be_bytes());
    datagram.extend(dst.port().to_be_bytes());
    datagram.extend(len16(8 + payload.len()));
    datagram.extend([0, 0]);
    datagram.extend(payload);
    let length = len16(datagram.len());
    let pseudo = [0, UDP, length[0], length[1]];
    let sum = checksum(&[&octets(src.ip()), &octets(dst.ip()), &pseudo, &datagram]);
    datagram[6..8].copy_from_slice(&(if sum == 0 { 0xffff } else { sum }).to_be_bytes());
    datagram
}

/// A whole UDP packet.
#[must_use]
pub fn udp_packet(src: SocketAddr, dst: SocketAddr, payload: &[u8]) -> Vec<u8> {
    let datagram = udp(src, dst, payload);
    ip(src.ip(), dst.ip(), UDP, &datagram, None)
}

/// The first packet of an SCTP association (RFC 9260 section 3.3.2): nobody else's has this tag.
#[must_use]
pub fn sctp_init(src: SocketAddr, dst: SocketAddr, tag: u32) -> Vec<u8> {
    let mut packet = Vec::with_capacity(32);
    packet.extend(src.port().to_be_bytes());
    packet.extend(dst.port().to_be_bytes());
    // Verification tag zero, the checksum's place, an INIT of 20 bytes.
    packet.extend([0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 20]);
    packet.extend(tag.to_be_bytes());
    // Receiver window, a stream each way, the first sequence number.
    packet.extend([0, 1, 0, 0, 0, 1, 0, 1]);
    packet.extend(tag.to_be_bytes());
    let sum = crc32c(&packet);
    packet[8..12].copy_from_slice(&sum.to_le_bytes());
    ip(src.ip(), dst.ip(), SCTP, &packet, None)
}

/// RFC 9260 appendix A, bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, byte: &u8| {
        (0..8).fold(crc ^ u32::from(*byte), |c, _| {
            (c >> 1) ^ (if c & 1 == 1 { 0x82f6_3b78 } else { 0 })
        })
    };
    !bytes.iter().fold(u32::MAX, step)
}

/// What tells one TCP segment of a connection from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub sequence: u32,
    pub acknowledged: u32,
}

/// A whole TCP packet: a segment at a place of a connection, or its first SYN.
#[must_use]
pub fn tcp_packet(
    src: SocketAddr,
    dst: SocketAddr,
    place: Option<Place>,
    payload: &[u8],
) -> Vec<u8> {
    let flags = if place.is_some() {
        TCP_PUSH_ACK
    } else {
        TCP_SYN
    };
    let place = place.unwrap_or(Place {
        sequence: 1,
        acknowledged: 0,
    });
    let mut segment = Vec::with_capacity(20 + payload.len());
    segment.extend(src.port().to_be_bytes());
    segment.extend(dst.port().to_be_bytes());
    segment.extend(place.sequence.to_be_bytes());
    segment.extend(place.acknowledged.to_be_bytes());
    segment.extend([0x50, flags]);
    segment.extend(TCP_WINDOW.to_be_bytes());
    segment.extend([0; 4]);
    segment.extend(payload);
    let length = len16(segment.len());
    let pseudo = [0, TCP, length[0], length[1]];
    let sum = checksum(&[&octets(src.ip()), &octets(dst.ip()), &pseudo, &segment]);
    segment[16..18].copy_from_slice(&sum.to_be_bytes());
    ip(src.ip(), dst.ip(), TCP, &segment, None)
}

/// A datagram as fragments that carry at most `size` bytes each (rounded down to eights).
#[must_use]
pub fn fragments(
    src: SocketAddr,
    dst: SocketAddr,
    payload: &[u8],
    size: usize,
    id: u16,
) -> Vec<Vec<u8>> {
    let datagram = udp(src, dst, payload);
    let step = (size / 8 * 8).max(8);
    let pieces: Vec<&[u8]> = datagram.chunks(step).collect();
    let last = pieces.len().saturating_sub(1);
    let cut = |(i, piece): (usize, &&[u8])| {
        let cut = Cut {
            id,
            offset: i * step / 8,
            more: i < last,
        };
        ip(src.ip(), dst.ip(), UDP, piece, Some(cut))
    };
    pieces.iter().enumerate().map(cut).collect()
}

#[derive(Clone, Copy)]
struct Cut {
    id: u16,
    /// In units of eight bytes.
    offset: usize,
    more: bool,
}

fn ip(src: IpAddr, dst: IpAddr, protocol: u8, body: &[u8], cut: Option<Cut>) -> Vec<u8> {
    let mut packet = Vec::with_capacity(48 + body.len());
    let offset = |c: Cut| u16::try_from(c.offset).unwrap_or(0);
    if src.is_ipv4() {
        packet.extend([0x45, 0]);
        packet.extend(len16(20 + body.len()));
        let (id, flags) = cut.map_or((0, 0), |c| {
            (c.id, offset(c) | if c.more { 0x2000 } else { 0 })
        });
        packet.extend(id.to_be_bytes());
        packet.extend(flags.to_be_bytes());
        packet.extend([TTL, protocol, 0, 0]);
        packet.extend(octets(src));
        packet.extend(octets(dst));
        let sum = checksum(&[&packet]);
        packet[10..12].copy_from_slice(&sum.to_be_bytes());
    } else {
        let extra = if cut.is_some() { 8 } else { 0 };
        packet.extend([0x60, 0, 0, 0]);
        packet.extend(len16(extra + body.len()));
        packet.extend([
            if cut.is_some() {
                FRAGMENT_HEADER
            } else {
                protocol
            },
            TTL,
        ]);
        packet.extend(octets(src));
        packet.extend(octets(dst));
        if let Some(c) = cut {
            packet.extend([protocol, 0]);
            packet.extend((offset(c) << 3 | u16::from(c.more)).to_be_bytes());
            packet.extend(u32::from(c.id).to_be_bytes());
        }
    }
    packet.extend(body);
    packet
}

/// A packet inside VXLAN (RFC 7348): header, Ethernet frame from a locally administered address, packet.
#[must_use]
pub fn vxlan(packet: &[u8], vni: u32, to: [u8; 6]) -> Vec<u8> {
    let mut bytes = vec![0x08, 0, 0, 0];
    bytes.extend((vni << 8).to_be_bytes());
    bytes.extend(to);
    bytes.extend([2, 0, 0, 0, 0, 2]);
    let v4 = packet.first().is_some_and(|b| b >> 4 == 4);
    bytes.extend(if v4 { [0x08, 0x00] } else { [0x86, 0xdd] });
    bytes.extend(packet);
    bytes
}

/// An ICMP or ICMPv6 echo request. The kernel fills in the checksum of ICMPv6.
#[must_use]
pub fn echo_request(v4: bool, id: u16, sequence: u16) -> Vec<u8> {
    let mut message = vec![if v4 { 8 } else { 128 }, 0, 0, 0];
    message.extend(id.to_be_bytes());
    message.extend(sequence.to_be_bytes());
    message.extend([0x57; 16]);
    if v4 {
        let sum = checksum(&[&message]);
        message[2..4].copy_from_slice(&sum.to_be_bytes());
    }
    message
}

/// The ICMP message of a raw IPv4 socket's packet.
#[must_use]
pub fn icmp_of(packet: &[u8]) -> Option<(Ipv4Addr, &[u8])> {
    let header = usize::from(packet.first()? & 0xf) * 4;
    let source: [u8; 4] = packet.get(12..16)?.try_into().ok()?;
    Some((Ipv4Addr::from(source), packet.get(header..)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_of_sctp_is_that_of_the_rfc() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn a_packet_sums_to_zero_and_fragments_add_up() {
        let src: SocketAddr = "10.0.0.1:4000".parse().unwrap();
        let dst: SocketAddr = "10.0.0.2:53".parse().unwrap();
        let payload = [7; 101];
        let packet = udp_packet(src, dst, &payload);
        assert_eq!(checksum(&[&packet[..20]]), 0);
        let pseudo = [0, 17, 0, 109];
        assert_eq!(checksum(&[&packet[12..20], &pseudo, &packet[20..]]), 0);
        let cut = fragments(src, dst, &payload, 40, 9);
        assert_eq!(cut.len(), 3);
        let whole: Vec<u8> = cut.iter().flat_map(|f| f[20..].to_vec()).collect();
        assert_eq!(whole, packet[20..]);
        assert_eq!(u16::from_be_bytes([cut[1][6], cut[1][7]]), 0x2000 | 5);
        assert_eq!(u16::from_be_bytes([cut[2][6], cut[2][7]]), 10);
    }
}
