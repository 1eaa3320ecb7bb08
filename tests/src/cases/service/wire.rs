//! What captured frames say: which packets belong to a probe, and how they travelled. Pure.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use serde_json::Value;

use crate::actor::packet::{ICMP, ICMP_V6, Place, SCTP, TCP, UDP};

const ETHERNET: usize = 14;
const VXLAN_HEADER: usize = 8;
const ETHERTYPE_V4: u16 = 0x0800;
const ETHERTYPE_V6: u16 = 0x86dd;
const FRAGMENT_HEADER: u8 = 44;
const SYN_OR_FIN: u8 = 0x03;
/// Echo request and reply, in both families.
const ECHOES: [u8; 4] = [0, 8, 128, 129];

/// The headers of one packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Packet {
    pub(super) protocol: u8,
    /// Port 0 where there is none to see: ICMP, and fragments other than the first.
    pub(super) src: SocketAddr,
    pub(super) dst: SocketAddr,
    /// First byte of the transport header.
    kind: u8,
    /// Place after this TCP segment, as its sender sees it.
    pub(super) next: Option<Place>,
}

fn word16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn word32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// IP header: protocol, addresses, whether it is a later fragment, header and total length.
struct Ip {
    protocol: u8,
    src: IpAddr,
    dst: IpAddr,
    later: bool,
    header: usize,
    total: usize,
}

fn ip(bytes: &[u8], ethertype: u16) -> Option<Ip> {
    if ethertype == ETHERTYPE_V4 {
        let address = |at: usize| word32(bytes, at).map(|a| IpAddr::from(Ipv4Addr::from(a)));
        return Some(Ip {
            protocol: *bytes.get(9)?,
            src: address(12)?,
            dst: address(16)?,
            later: word16(bytes, 6)? & 0x1fff != 0,
            header: usize::from(bytes.first()? & 0xf) * 4,
            total: word16(bytes, 2)?.into(),
        });
    }
    let address = |at: usize| {
        let octets: [u8; 16] = bytes.get(at..at + 16)?.try_into().ok()?;
        Some(IpAddr::from(Ipv6Addr::from(octets)))
    };
    let fragment = *bytes.get(6)? == FRAGMENT_HEADER;
    Some(Ip {
        protocol: *bytes.get(if fragment { 40 } else { 6 })?,
        src: address(8)?,
        dst: address(24)?,
        later: fragment && word16(bytes, 42)? & 0xfff8 != 0,
        header: if fragment { 48 } else { 40 },
        total: 40 + usize::from(word16(bytes, 4)?),
    })
}

/// The packet of an Ethernet frame and the frame inside it, if that is VXLAN to `overlay_port`.
fn dissect(frame: &[u8], overlay_port: u16) -> Option<(Packet, Option<&[u8]>)> {
    let ethertype = word16(frame, 12)?;
    if ethertype != ETHERTYPE_V4 && ethertype != ETHERTYPE_V6 {
        return None;
    }
    let bytes = frame.get(ETHERNET..)?;
    let ip = ip(bytes, ethertype)?;
    let transport = bytes.get(ip.header..)?;
    let ports = !ip.later && [TCP, UDP, SCTP].contains(&ip.protocol);
    let port = |at: usize| {
        if ports {
            word16(transport, at).unwrap_or(0)
        } else {
            0
        }
    };
    let packet = Packet {
        protocol: ip.protocol,
        src: SocketAddr::new(ip.src, port(0)),
        dst: SocketAddr::new(ip.dst, port(2)),
        kind: transport.first().copied().unwrap_or(0),
        next: if ports && ip.protocol == TCP {
            after(transport, ip.total.saturating_sub(ip.header))
        } else {
            None
        },
    };
    let wrapped = ports && ip.protocol == UDP && packet.dst.port() == overlay_port;
    let inner = if wrapped {
        transport.get(8 + VXLAN_HEADER..)
    } else {
        None
    };
    Some((packet, inner))
}

fn after(segment: &[u8], length: usize) -> Option<Place> {
    let flags = *segment.get(13)?;
    let payload = length.saturating_sub(usize::from(segment.get(12)? >> 4) * 4);
    let ends = (flags & SYN_OR_FIN).count_ones();
    let moved = u32::try_from(payload).ok()?.wrapping_add(ends);
    Some(Place {
        sequence: word32(segment, 4)?.wrapping_add(moved),
        acknowledged: word32(segment, 8)?,
    })
}

/// Where the sender of a connection is, by its last segment among these frames.
#[must_use]
pub(super) fn last_place<'a>(
    frames: impl Iterator<Item = &'a [u8]>,
    src: SocketAddr,
    dst: SocketAddr,
) -> Option<Place> {
    let packets = frames.filter_map(|f| dissect(f, 0));
    let own = packets.filter(|(p, _)| p.src == src && p.dst == dst);
    own.filter_map(|(p, _)| p.next).last()
}

/// Which packets belong to a probe. An end with port 0 stands for every port of the address.
#[derive(Clone, Debug, Default)]
pub(super) struct Interest {
    pub(super) protocol: u8,
    /// Targets, clients and the servers that answered.
    pub(super) ends: Vec<SocketAddr>,
    /// Traffic of the test's own control side.
    pub(super) never: Vec<IpAddr>,
}

impl Interest {
    fn holds(&self, packet: &Packet) -> bool {
        let icmp = packet.protocol == ICMP || packet.protocol == ICMP_V6;
        if packet.protocol != self.protocol || (icmp && !ECHOES.contains(&packet.kind)) {
            return false;
        }
        let both = [packet.src, packet.dst];
        if both.iter().any(|end| self.never.contains(&end.ip())) {
            return false;
        }
        let is = |end: &SocketAddr, wanted: &SocketAddr| {
            let any_port = wanted.port() == 0 || end.port() == 0;
            end.ip() == wanted.ip() && (any_port || end.port() == wanted.port())
        };
        both.iter()
            .any(|end| self.ends.iter().any(|wanted| is(end, wanted)))
    }
}

/// How many packets of a probe travelled as they are, and how many inside the overlay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Carried {
    pub(super) plain: usize,
    pub(super) vxlan: usize,
}

/// Counts the packets of a probe among the frames of a segment.
#[must_use]
pub(super) fn count<'a>(
    frames: impl Iterator<Item = &'a [u8]>,
    interest: &Interest,
    overlay_port: u16,
) -> Carried {
    let mut carried = Carried::default();
    for frame in frames {
        match dissect(frame, overlay_port) {
            Some((_, Some(inner))) => {
                let packet = dissect(inner, 0).map(|(packet, _)| packet);
                carried.vxlan += usize::from(packet.is_some_and(|p| interest.holds(&p)));
            }
            Some((packet, None)) => carried.plain += usize::from(interest.holds(&packet)),
            None => {}
        }
    }
    carried
}

/// Does a segment carry the probe as a case says?
///
/// # Errors
/// What was seen instead.
pub(super) fn judge(wanted: &Value, carried: Carried) -> Result<(), String> {
    let holds = match wanted["carries"].as_str() {
        Some("plain") => carried.plain > 0 && carried.vxlan == 0,
        Some("vxlan") => carried.vxlan > 0 && carried.plain == 0,
        Some("none") => carried == Carried::default(),
        other => return Err(format!("wire: carries {other:?}")),
    };
    if holds {
        return Ok(());
    }
    Err(format!(
        "segment {} carried {} plain and {} wrapped packets of the probe, expected {}",
        wanted["segment"], carried.plain, carried.vxlan, wanted["carries"]
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actor::packet;
    use proptest::prelude::*;
    use serde_json::json;

    const OVERLAY: u16 = 8472;

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn frame(packet: &[u8]) -> Vec<u8> {
        let v4 = packet[0] >> 4 == 4;
        let mut frame = vec![0; 12];
        frame.extend(if v4 { [8, 0] } else { [0x86, 0xdd] });
        frame.extend(packet);
        frame
    }

    fn interest(protocol: u8, ends: &[&str]) -> Interest {
        Interest {
            protocol,
            ends: ends.iter().map(|e| at(e)).collect(),
            never: vec!["100.127.0.2".parse().unwrap()],
        }
    }

    #[test]
    fn packets_are_told_apart_by_protocol_ends_and_wrapping() {
        let (pod, peer) = (at("10.244.1.2:4000"), at("10.244.2.2:9000"));
        let plain = frame(&packet::udp_packet(pod, peer, b"hello"));
        let bytes = packet::vxlan(&packet::udp_packet(pod, peer, b"hello"), 87, [2; 6]);
        let (node, other) = (at("192.0.2.11:5555"), at("192.0.2.12:8472"));
        let wrapped = frame(&packet::udp_packet(node, other, &bytes));
        let control = frame(&packet::tcp_packet(pod, at("100.127.0.2:6444"), None, b""));
        let six = frame(&packet::tcp_packet(
            at("[fd00::1]:1"),
            at("[fd00::2]:80"),
            None,
            b"",
        ));
        let frames = [plain, wrapped, control, six];
        let count =
            |interest: &Interest| count(frames.iter().map(Vec::as_slice), interest, OVERLAY);
        let both = Carried { plain: 1, vxlan: 1 };
        assert_eq!(count(&interest(UDP, &["10.244.2.2:9000"])), both);
        assert_eq!(count(&interest(UDP, &["10.244.2.2:0"])), both);
        assert_eq!(
            count(&interest(UDP, &["10.244.2.2:9001"])),
            Carried::default()
        );
        assert_eq!(count(&interest(TCP, &["10.244.1.2:0"])), Carried::default());
        let one = Carried { plain: 1, vxlan: 0 };
        assert_eq!(count(&interest(TCP, &["[fd00::2]:80"])), one);
        assert!(judge(&json!({"segment": "lan", "carries": "plain"}), one).is_ok());
        assert!(judge(&json!({"segment": "lan", "carries": "plain"}), both).is_err());
        assert!(judge(&json!({"segment": "lan", "carries": "vxlan"}), one).is_err());
        assert!(judge(&json!({"segment": "lan", "carries": "none"}), one).is_err());
    }

    #[test]
    fn the_last_segment_says_where_its_sender_is() {
        let (pod, peer) = (at("10.244.1.2:4000"), at("10.244.2.2:9000"));
        let segment = |sequence: u32, payload: &[u8]| {
            let place = Place {
                sequence,
                acknowledged: 77,
            };
            frame(&packet::tcp_packet(pod, peer, Some(place), payload))
        };
        let frames = [segment(10, b"ab"), segment(u32::MAX, b"abc")];
        let place = last_place(frames.iter().map(Vec::as_slice), pod, peer);
        assert_eq!(
            place,
            Some(Place {
                sequence: 2,
                acknowledged: 77
            })
        );
        assert_eq!(
            last_place(frames.iter().map(Vec::as_slice), peer, pod),
            None
        );
    }

    proptest! {
        #[test]
        fn foreign_frames_are_read_quietly(bytes in proptest::collection::vec(any::<u8>(), 0..120), v4: bool) {
            let mut bytes = bytes;
            if bytes.len() > 14 {
                bytes[12..14].copy_from_slice(&if v4 { [8, 0] } else { [0x86, 0xdd] });
            }
            let _ = count([bytes.as_slice()].into_iter(), &interest(UDP, &["10.0.0.1:0"]), OVERLAY);
        }
    }
}
