//! ARP (RFC 826, RFC 5227) and neighbour discovery (RFC 4861) as far as answering for an address needs them. Pure; every
//! byte that comes from the segment is foreign.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::netlink::link::Mac;

pub(super) const ETH_P_ARP: u16 = 0x0806;
pub(super) const ETH_P_IPV6: u16 = 0x86dd;
const BROADCAST: Mac = [0xff; 6];
const ETHERNET: usize = 14;
const ARP: usize = 28;
const IPV6: usize = 40;
/// Neighbour solicitation and advertisement up to their options.
const NEIGHBOUR: usize = 24;
const OPTION: usize = 8;
const ICMPV6: u8 = 58;
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
/// Neighbour discovery never crosses a router.
const HOP_LIMIT: u8 = 255;
const FLAG_SOLICITED: u8 = 0x40;
const FLAG_OVERRIDE: u8 = 0x20;
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

/// Somebody wants to know who has an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Question {
    pub(super) target: IpAddr,
    asker: IpAddr,
    asker_mac: Mac,
}

/// Somebody else claims an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) address: IpAddr,
    pub(super) mac: Mac,
}

/// What a frame says, as far as it concerns us.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Heard {
    Question(Question),
    Claim(Claim),
}

fn array<const N: usize>(frame: &[u8], at: usize) -> Option<[u8; N]> {
    frame.get(at..at.checked_add(N)?)?.try_into().ok()
}

/// Reads a frame with its Ethernet header; `None` for everything that is malformed or no business of ours.
pub(super) fn parse(frame: &[u8]) -> Option<Heard> {
    match u16::from_be_bytes(array(frame, 12)?) {
        ETH_P_ARP => parse_arp(frame),
        ETH_P_IPV6 => parse_solicitation(frame),
        _ => None,
    }
}

fn parse_arp(frame: &[u8]) -> Option<Heard> {
    let arp: [u8; ARP] = array(frame, ETHERNET)?;
    // Ethernet, IPv4, and their lengths.
    if arp[..6] != [0, 1, 8, 0, 6, 4] {
        return None;
    }
    let sender_mac: Mac = array(&arp, 8)?;
    let sender = Ipv4Addr::from(array::<4>(&arp, 14)?);
    let target = Ipv4Addr::from(array::<4>(&arp, 24)?);
    if sender_mac[0] & 1 == 1 || sender_mac == [0; 6] {
        return None;
    }
    match arp[7] {
        1 if sender != target => Some(Heard::Question(Question {
            target: target.into(),
            asker: sender.into(),
            asker_mac: sender_mac,
        })),
        1 | 2 if !sender.is_unspecified() => Some(Heard::Claim(Claim {
            address: sender.into(),
            mac: sender_mac,
        })),
        _ => None,
    }
}

/// Checks all that RFC 4861, section 7.1.1 asks for.
fn parse_solicitation(frame: &[u8]) -> Option<Heard> {
    let ip: [u8; IPV6] = array(frame, ETHERNET)?;
    let length = usize::from(u16::from_be_bytes([ip[4], ip[5]]));
    if ip[0] >> 4 != 6 || ip[6] != ICMPV6 || ip[7] != HOP_LIMIT || length < NEIGHBOUR {
        return None;
    }
    let source = Ipv6Addr::from(array::<16>(&ip, 8)?);
    let destination = Ipv6Addr::from(array::<16>(&ip, 24)?);
    let start = ETHERNET + IPV6;
    let message = frame.get(start..start.checked_add(length)?)?;
    if message[0] != SOLICITATION || message[1] != 0 {
        return None;
    }
    if checksum(source, destination, message) != 0 || source.is_multicast() {
        return None;
    }
    let target = Ipv6Addr::from(array::<16>(message, 8)?);
    let from_options = source_mac(message.get(NEIGHBOUR..)?)?;
    let probe = source.is_unspecified();
    if target.is_multicast()
        || (probe && (from_options.is_some() || destination != solicited_node(target)))
    {
        return None;
    }
    let asker_mac: Mac = match from_options {
        Some(mac) => mac,
        None => array(frame, 6)?,
    };
    Some(Heard::Question(Question {
        target: target.into(),
        asker: source.into(),
        asker_mac,
    }))
}

/// The source link-layer address of the options, if there is one; `None` when the options are malformed.
fn source_mac(mut options: &[u8]) -> Option<Option<Mac>> {
    let mut found = None;
    while !options.is_empty() {
        let length = usize::from(*options.get(1)?) * 8;
        if length == 0 {
            return None;
        }
        let option = options.get(..length)?;
        if option[0] == 1 && length == OPTION {
            found = array(option, 2);
        }
        options = options.get(length..)?;
    }
    Some(found)
}

/// The multicast group in which a solicitation for this address comes.
pub(super) fn solicited_node(address: Ipv6Addr) -> Ipv6Addr {
    let [.., a, b, c] = address.octets();
    Ipv6Addr::from([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, a, b, c])
}

fn multicast_mac(group: Ipv6Addr) -> Mac {
    let [.., a, b, c, d] = group.octets();
    [0x33, 0x33, a, b, c, d]
}

/// The frame that says that `mac` has what was asked for.
pub(super) fn answer(question: &Question, mac: Mac) -> Vec<u8> {
    match (question.target, question.asker) {
        (IpAddr::V4(target), IpAddr::V4(asker)) => arp(
            2,
            (mac, target),
            (question.asker_mac, asker),
            question.asker_mac,
        ),
        (IpAddr::V6(target), IpAddr::V6(asker)) if !asker.is_unspecified() => {
            let flags = FLAG_SOLICITED | FLAG_OVERRIDE;
            advertisement(target, mac, (asker, question.asker_mac), flags)
        }
        (target, _) => proclamations(target, mac).pop().unwrap_or_default(),
    }
}

/// The frames that tell everybody that `mac` has the address from now on. Some hosts listen to one kind of ARP packet
/// only.
pub(super) fn proclamations(address: IpAddr, mac: Mac) -> Vec<Vec<u8>> {
    match address {
        IpAddr::V4(v4) => [1, 2]
            .map(|operation| {
                let target_mac = if operation == 1 { [0; 6] } else { BROADCAST };
                arp(operation, (mac, v4), (target_mac, v4), BROADCAST)
            })
            .into(),
        IpAddr::V6(v6) => {
            let to = (ALL_NODES, multicast_mac(ALL_NODES));
            vec![advertisement(v6, mac, to, FLAG_OVERRIDE)]
        }
    }
}

fn arp(operation: u8, sender: (Mac, Ipv4Addr), target: (Mac, Ipv4Addr), to: Mac) -> Vec<u8> {
    let mut frame = Vec::with_capacity(ETHERNET + ARP);
    frame.extend(to);
    frame.extend(sender.0);
    frame.extend(ETH_P_ARP.to_be_bytes());
    frame.extend([0, 1, 8, 0, 6, 4, 0, operation]);
    for (mac, address) in [sender, target] {
        frame.extend(mac);
        frame.extend(address.octets());
    }
    frame
}

fn advertisement(target: Ipv6Addr, mac: Mac, to: (Ipv6Addr, Mac), flags: u8) -> Vec<u8> {
    let mut message = vec![ADVERTISEMENT, 0, 0, 0, flags, 0, 0, 0];
    message.extend(target.octets());
    message.extend([2, 1]);
    message.extend(mac);
    let sum = checksum(target, to.0, &message);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    let mut frame = Vec::with_capacity(ETHERNET + IPV6 + message.len());
    frame.extend(to.1);
    frame.extend(mac);
    frame.extend(ETH_P_IPV6.to_be_bytes());
    frame.extend([0x60, 0, 0, 0, 0, 32, ICMPV6, HOP_LIMIT]);
    frame.extend(target.octets());
    frame.extend(to.0.octets());
    frame.extend(message);
    frame
}

/// The checksum of an `ICMPv6` message, whose own checksum field counts: zero for a message with a right one.
fn checksum(source: Ipv6Addr, destination: Ipv6Addr, message: &[u8]) -> u16 {
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    let pseudo = [source.octets(), destination.octets()].concat();
    let tail = [length.to_be_bytes(), u32::from(ICMPV6).to_be_bytes()].concat();
    let mut sum = 0_u32;
    for part in [&pseudo[..], &tail, message] {
        for pair in part.chunks(2) {
            let word = u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]);
            sum += u32::from(word);
        }
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OURS: Mac = [2, 0, 0, 0, 0, 9];
    const THEIRS: Mac = [2, 0, 0, 0, 0, 1];

    fn arp_request(sender: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
        arp(1, (THEIRS, sender), ([0; 6], target), BROADCAST)
    }

    fn solicitation(source: Ipv6Addr, target: Ipv6Addr, with_option: bool) -> Vec<u8> {
        let mut message = vec![SOLICITATION, 0, 0, 0, 0, 0, 0, 0];
        message.extend(target.octets());
        if with_option {
            message.extend([1, 1]);
            message.extend(THEIRS);
        }
        let group = solicited_node(target);
        let sum = checksum(source, group, &message);
        message[2..4].copy_from_slice(&sum.to_be_bytes());
        let mut frame = multicast_mac(group).to_vec();
        frame.extend(THEIRS);
        frame.extend(ETH_P_IPV6.to_be_bytes());
        frame.extend([
            0x60,
            0,
            0,
            0,
            0,
            u8::try_from(message.len()).unwrap(),
            ICMPV6,
            HOP_LIMIT,
        ]);
        frame.extend(source.octets());
        frame.extend(group.octets());
        frame.extend(message);
        frame
    }

    fn question(frame: &[u8]) -> Option<Question> {
        match parse(frame) {
            Some(Heard::Question(question)) => Some(question),
            _ => None,
        }
    }

    #[test]
    fn a_request_is_answered_to_who_asked() {
        let (asker, target) = ([192, 0, 2, 1].into(), [192, 0, 2, 77].into());
        let asked = question(&arp_request(asker, target)).unwrap();
        let reply = answer(&asked, OURS);
        assert_eq!(reply[..6], THEIRS);
        assert_eq!(
            parse(&reply),
            Some(Heard::Claim(Claim {
                address: target.into(),
                mac: OURS
            }))
        );
        // A probe (RFC 5227) has no address yet and is answered too; an announcement is no question.
        assert!(question(&arp_request(Ipv4Addr::UNSPECIFIED, target)).is_some());
        assert_eq!(question(&arp_request(target, target)), None);
    }

    #[test]
    fn a_solicitation_is_answered_with_a_valid_advertisement() {
        let asker: Ipv6Addr = "fe80::1".parse().unwrap();
        let target: Ipv6Addr = "2001:db8::77".parse().unwrap();
        for with_option in [false, true] {
            let asked = question(&solicitation(asker, target, with_option)).unwrap();
            assert_eq!(asked.target, IpAddr::from(target));
            let reply = answer(&asked, OURS);
            assert_eq!(reply[..12], [THEIRS, OURS].concat());
            assert_eq!(checksum(target, asker, &reply[54..]), 0);
            assert_eq!(
                (reply[54], reply[58]),
                (ADVERTISEMENT, FLAG_SOLICITED | FLAG_OVERRIDE)
            );
            assert_eq!(reply[62..78], target.octets());
            assert_eq!(reply[80..86], OURS);
        }
        // Duplicate address detection: all nodes learn of it, and it is not called solicited.
        let probe = question(&solicitation(Ipv6Addr::UNSPECIFIED, target, false)).unwrap();
        let reply = answer(&probe, OURS);
        assert_eq!(reply[..6], [0x33, 0x33, 0, 0, 0, 1]);
        assert_eq!(reply[58], FLAG_OVERRIDE);
        assert_eq!(
            question(&solicitation(Ipv6Addr::UNSPECIFIED, target, true)),
            None
        );
    }

    #[test]
    fn what_crossed_a_router_or_was_damaged_is_not_answered() {
        let good = solicitation(
            "fe80::1".parse().unwrap(),
            "2001:db8::77".parse().unwrap(),
            true,
        );
        for (at, why) in [
            (21, "hop limit"),
            (56, "checksum"),
            (55, "code"),
            (79, "length of an option"),
        ] {
            let mut bad = good.clone();
            bad[at] = bad[at].wrapping_sub(1);
            assert_eq!(question(&bad), None, "{why}");
        }
        for end in 0..good.len() {
            assert_eq!(parse(&good[..end]), None);
        }
    }

    #[test]
    fn everybody_is_told_in_both_kinds_of_arp() {
        let address: IpAddr = [192, 0, 2, 77].into();
        let frames = proclamations(address, OURS);
        assert_eq!(frames.len(), 2);
        for frame in frames {
            assert_eq!(frame[..6], BROADCAST);
            assert_eq!(
                parse(&frame),
                Some(Heard::Claim(Claim { address, mac: OURS }))
            );
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic(mut frame in proptest::collection::vec(any::<u8>(), 0..200), kind in 0_u8..3) {
            if frame.len() >= 14 && kind < 2 {
                let ether_type = [ETH_P_ARP, ETH_P_IPV6][usize::from(kind)];
                frame[12..14].copy_from_slice(&ether_type.to_be_bytes());
            }
            if let Some(Heard::Question(asked)) = parse(&frame) {
                prop_assert!(!answer(&asked, OURS).is_empty());
            }
        }

        /// A damaged solicitation is refused, or differs in what no checksum covers.
        #[test]
        fn one_changed_byte_never_asks_for_another_address(at in 0_usize..86, by in 1_u8..255) {
            let target: Ipv6Addr = "2001:db8::77".parse().unwrap();
            let mut frame = solicitation("fe80::1".parse().unwrap(), target, true);
            frame[at] = frame[at].wrapping_add(by);
            if let Some(asked) = question(&frame) {
                prop_assert_eq!(asked.target, IpAddr::from(target));
            }
        }
    }
}
