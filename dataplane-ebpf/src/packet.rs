//! Reading headers. Bytes are loaded by helper, so that packets whose headers are not linear are read alike.

use core::mem::MaybeUninit;

use aya_ebpf::helpers::bpf_skb_load_bytes;
use aya_ebpf::programs::TcContext;
use dataplane_common::address::{SCTP, TCP, UDP};
use dataplane_common::fragment::Extent;
use dataplane_common::icmp::{Messages, Related};
use dataplane_common::packet::{
    Decision, ERROR, FRAGMENT, LATER_FRAGMENT, Packet, ROUTER, WITH_PORTS,
};
use dataplane_common::path::Scratch;
use dataplane_common::sctp;
use dataplane_common::{Port, V4, V6};

pub(crate) const IPV4: u16 = 0x0800;
pub(crate) const IPV6: u16 = 0x86dd;
pub(crate) const ARP: u16 = 0x0806;

pub(crate) const ETHERNET_HEADER: u32 = 14;
const IPV6_HEADER: u32 = 40;
/// Packets with more extension headers than this are malformed: nobody can tell what is behind them.
const MAX_EXTENSION_HEADERS: u32 = 4;

/// A packet's headers and where they are.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Parsed<A> {
    pub(crate) packet: Packet<A>,
    /// Offset of the transport header.
    pub(crate) transport: u32,
    /// Offset of the header that says which fragment this is; only for fragments.
    pub(crate) fragment: u32,
    /// Time to live, or hop limit.
    pub(crate) hops: u8,
    pub(crate) valid: bool,
}

/// A packet on its way from one program to the next.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Pending<A> {
    /// Number of the `Hook` where the packet was met.
    pub(crate) hook: u32,
    pub(crate) parsed: Parsed<A>,
    pub(crate) decision: Decision<A>,
    pub(crate) scratch: Scratch<A>,
    /// Of an ICMP error: the packet that it quotes, and what that is about.
    pub(crate) quoted: Parsed<A>,
    pub(crate) related: Related<A>,
}

/// Families that can be read off the wire.
pub(crate) trait Headers: Messages {
    /// Reads the IP header at `at`, and those between it and the transport's.
    fn read(context: &TcContext, at: u32) -> Parsed<Self>;

    /// What a packet's headers say of its length, in bytes from the header at `from` on; padding is not counted.
    fn bytes_from(context: &TcContext, from: u32) -> u32;

    /// Which part of its datagram a fragment is.
    fn extent(context: &TcContext, parsed: &Parsed<Self>) -> Extent;
}

#[inline(always)]
pub(crate) fn ether_type(context: &TcContext) -> u16 {
    // SAFETY: the context is valid for the program's run.
    u16::from_be(unsafe { (*context.skb.skb).protocol } as u16)
}

#[inline(always)]
pub(crate) fn ifindex(context: &TcContext) -> u32 {
    // SAFETY: the context is valid for the program's run.
    unsafe { (*context.skb.skb).ifindex }
}

/// The link that the packet came in by; zero for packets of the node's own stack.
#[inline(always)]
pub(crate) fn came_in_by(context: &TcContext) -> u32 {
    // SAFETY: the context is valid for the program's run.
    unsafe { (*context.skb.skb).ingress_ifindex }
}

/// True for a frame that a switch has sent to every port, since it did not know the machine that it is for.
#[inline(always)]
pub(crate) fn is_for_another_host(context: &TcContext) -> bool {
    /// `PACKET_OTHERHOST` of linux/if_packet.h.
    const OTHER_HOST: u32 = 3;
    // SAFETY: the context is valid for the program's run.
    unsafe { (*context.skb.skb).pkt_type == OTHER_HOST }
}

#[inline(always)]
pub(crate) fn parse<A: Headers>(context: &TcContext) -> Parsed<A> {
    let mut parsed = A::read(context, ETHERNET_HEADER);
    if parsed.valid && parsed.packet.flags & WITH_PORTS != 0 {
        read_ports(context, &mut parsed);
    }
    parsed
}

/// As [`parse`] for a packet that an ICMP error quotes at `at`. Of its transport header eight bytes are there for sure.
#[inline(always)]
pub(crate) fn parse_quoted<A: Headers>(context: &TcContext, at: u32) -> Parsed<A> {
    let mut parsed = A::read(context, at);
    if parsed.valid && parsed.packet.flags & WITH_PORTS != 0 {
        if parsed.packet.protocol == A::PROTOCOL {
            read_identifier(context, &mut parsed);
        } else {
            read_port_header(context, &mut parsed);
        }
    }
    parsed
}

/// Protocols whose first bytes are looked at for ports.
#[inline(always)]
fn has_ports<A: Messages>(protocol: u8) -> bool {
    protocol == TCP || protocol == UDP || protocol == SCTP || protocol == A::PROTOCOL
}

/// Reads a header of `T`'s size. `T` has no padding and takes any bytes.
#[inline(always)]
pub(crate) fn load<T: Copy>(context: &TcContext, offset: u32) -> Option<T> {
    let mut header = MaybeUninit::<T>::uninit();
    // SAFETY: the helper writes all of `T`, or fails.
    let failed = unsafe {
        bpf_skb_load_bytes(
            context.skb.skb.cast(),
            offset,
            header.as_mut_ptr().cast(),
            size_of::<T>() as u32,
        )
    };
    if failed != 0 {
        return None;
    }
    // SAFETY: written above.
    Some(unsafe { header.assume_init() })
}

#[repr(C)]
#[derive(Clone, Copy)]
struct PortHeader {
    source: u16,
    destination: u16,
}

#[inline(always)]
fn read_ports<A: Headers>(context: &TcContext, parsed: &mut Parsed<A>) {
    let protocol = parsed.packet.protocol;
    if protocol == TCP || protocol == SCTP {
        let Some(header) = load::<[u16; 7]>(context, parsed.transport) else {
            parsed.valid = false;
            return;
        };
        let [chunk, tcp_flags] = header[6].to_ne_bytes();
        parsed.packet.tcp_flags = if protocol == TCP {
            tcp_flags
        } else {
            sctp::flags(chunk)
        };
        parsed.packet.source_port = Port(header[0]);
        parsed.packet.destination_port = Port(header[1]);
    } else if protocol == UDP {
        read_port_header(context, parsed);
    } else {
        read_identifier(context, parsed);
    }
}

#[inline(always)]
fn read_port_header<A>(context: &TcContext, parsed: &mut Parsed<A>) {
    let Some(header) = load::<PortHeader>(context, parsed.transport) else {
        parsed.valid = false;
        return;
    };
    parsed.packet.source_port = Port(header.source);
    parsed.packet.destination_port = Port(header.destination);
}

/// The identifier of an echo message stands for a port. Other ICMP messages have none.
#[inline(always)]
fn read_identifier<A: Headers>(context: &TcContext, parsed: &mut Parsed<A>) {
    let Some(header) = load::<[u16; 3]>(context, parsed.transport) else {
        parsed.valid = false;
        return;
    };
    let kind = header[0].to_ne_bytes()[0];
    if kind == A::ECHO_REQUEST {
        parsed.packet.source_port = Port(header[2]);
    } else if kind == A::ECHO_REPLY {
        parsed.packet.destination_port = Port(header[2]);
    } else {
        parsed.packet.flags &= !WITH_PORTS;
        if A::is_error(kind) {
            parsed.packet.flags |= ERROR;
        }
        if A::is_of_router(kind) {
            parsed.packet.flags |= ROUTER;
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Ipv4Header {
    version_length: u8,
    service: u8,
    total_length: u16,
    identification: u16,
    fragment: u16,
    time_to_live: u8,
    protocol: u8,
    checksum: u16,
    source: V4,
    destination: V4,
}

impl Headers for V4 {
    #[inline(always)]
    fn read(context: &TcContext, at: u32) -> Parsed<Self> {
        const MORE_OR_OFFSET: u16 = 0x3fff;
        const OFFSET: u16 = 0x1fff;
        let mut parsed = Parsed {
            packet: Packet::default(),
            transport: 0,
            fragment: 0,
            hops: 0,
            valid: false,
        };
        let Some(header) = load::<Ipv4Header>(context, at) else {
            return parsed;
        };
        let length = ((header.version_length & 0x0f) as u32) * 4;
        if length < 20 {
            return parsed;
        }
        parsed.valid = true;
        parsed.transport = at + length;
        parsed.fragment = at;
        parsed.packet.source = header.source;
        parsed.packet.destination = header.destination;
        parsed.packet.protocol = header.protocol;
        parsed.hops = header.time_to_live;
        let fragment = u16::from_be(header.fragment);
        if fragment & MORE_OR_OFFSET != 0 {
            parsed.packet.flags |= FRAGMENT;
            parsed.packet.identification = header.identification as u32;
        }
        if fragment & OFFSET != 0 {
            parsed.packet.flags |= LATER_FRAGMENT;
        }
        if fragment & OFFSET == 0 && has_ports::<Self>(header.protocol) {
            parsed.packet.flags |= WITH_PORTS;
        }
        parsed
    }

    #[inline(always)]
    fn bytes_from(context: &TcContext, from: u32) -> u32 {
        const TOTAL_LENGTH: u32 = ETHERNET_HEADER + 2;
        let Some(total) = load::<u16>(context, TOTAL_LENGTH) else {
            return 0;
        };
        (u16::from_be(total) as u32 + ETHERNET_HEADER).saturating_sub(from)
    }

    #[inline(always)]
    fn extent(context: &TcContext, parsed: &Parsed<Self>) -> Extent {
        const MORE: u16 = 0x2000;
        const OFFSET: u16 = 0x1fff;
        const AT: u32 = ETHERNET_HEADER + 6;
        let field = match load::<u16>(context, AT) {
            Some(field) => u16::from_be(field),
            None => 0,
        };
        Extent {
            offset: (field & OFFSET) as u32 * 8,
            bytes: Self::bytes_from(context, parsed.transport),
            more: (field & MORE != 0) as u32,
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Ipv6Header {
    version_class_label: u32,
    payload_length: u16,
    next_header: u8,
    hop_limit: u8,
    source: V6,
    destination: V6,
}

/// Hop-by-hop, routing and destination options share this start.
#[repr(C)]
#[derive(Clone, Copy)]
struct ExtensionHeader {
    next_header: u8,
    length: u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct FragmentHeader {
    next_header: u8,
    reserved: u8,
    fragment: u16,
    identification: u32,
}

impl Headers for V6 {
    #[inline(always)]
    fn read(context: &TcContext, at: u32) -> Parsed<Self> {
        const HOP_BY_HOP: u8 = 0;
        const ROUTING: u8 = 43;
        const FRAGMENT_HEADER: u8 = 44;
        const DESTINATION: u8 = 60;
        const OFFSET: u16 = 0xfff8;
        let mut parsed = Parsed {
            packet: Packet::default(),
            transport: 0,
            fragment: 0,
            hops: 0,
            valid: false,
        };
        let Some(header) = load::<Ipv6Header>(context, at) else {
            return parsed;
        };
        parsed.packet.source = header.source;
        parsed.packet.destination = header.destination;
        parsed.hops = header.hop_limit;
        let mut protocol = header.next_header;
        let mut offset = at + IPV6_HEADER;
        let mut first = true;
        let mut count = 0;
        while count < MAX_EXTENSION_HEADERS {
            count += 1;
            if protocol == FRAGMENT_HEADER {
                let Some(extension) = load::<FragmentHeader>(context, offset) else {
                    return parsed;
                };
                parsed.packet.flags |= FRAGMENT;
                parsed.packet.identification = extension.identification;
                parsed.fragment = offset;
                first = u16::from_be(extension.fragment) & OFFSET == 0;
                if !first {
                    parsed.packet.flags |= LATER_FRAGMENT;
                }
                protocol = extension.next_header;
                offset += 8;
                if !first {
                    break;
                }
            } else if protocol == HOP_BY_HOP || protocol == ROUTING || protocol == DESTINATION {
                let Some(extension) = load::<ExtensionHeader>(context, offset) else {
                    return parsed;
                };
                protocol = extension.next_header;
                offset += (extension.length as u32 + 1) * 8;
            } else {
                break;
            }
        }
        let is_extension = protocol == HOP_BY_HOP
            || protocol == ROUTING
            || protocol == DESTINATION
            || protocol == FRAGMENT_HEADER;
        // Of a later fragment, what is behind its header is no header of the packet's.
        if first && is_extension {
            return parsed;
        }
        parsed.valid = true;
        parsed.transport = offset;
        parsed.packet.protocol = protocol;
        if first && has_ports::<Self>(protocol) {
            parsed.packet.flags |= WITH_PORTS;
        }
        parsed
    }

    #[inline(always)]
    fn bytes_from(context: &TcContext, from: u32) -> u32 {
        const PAYLOAD_LENGTH: u32 = ETHERNET_HEADER + 4;
        let Some(payload) = load::<u16>(context, PAYLOAD_LENGTH) else {
            return 0;
        };
        (u16::from_be(payload) as u32 + ETHERNET_HEADER + IPV6_HEADER).saturating_sub(from)
    }

    #[inline(always)]
    fn extent(context: &TcContext, parsed: &Parsed<Self>) -> Extent {
        const MORE: u16 = 1;
        const OFFSET: u16 = 0xfff8;
        let Some(header) = load::<FragmentHeader>(context, parsed.fragment) else {
            return Extent::default();
        };
        let field = u16::from_be(header.fragment);
        Extent {
            offset: (field & OFFSET) as u32,
            bytes: Self::bytes_from(
                context,
                parsed.fragment + size_of::<FragmentHeader>() as u32,
            ),
            more: (field & MORE) as u32,
        }
    }
}
