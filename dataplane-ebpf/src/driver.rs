//! The program at an uplink's driver: reads a frame where it lies, and sends what is led on to another machine out again.
//! Frames that are not changed go on to the link's ingress hook.

use core::mem::zeroed;

use aya_ebpf::bindings::xdp_action::{XDP_PASS, XDP_TX};
use aya_ebpf::bindings::{BPF_FIB_LKUP_RET_SUCCESS, bpf_fib_lookup as FibLookup};
use aya_ebpf::helpers::{bpf_fib_lookup, bpf_redirect};
use aya_ebpf::macros::xdp;
use aya_ebpf::programs::XdpContext;
use dataplane_common::address::{TCP, UDP};
use dataplane_common::packet::{Action, Decision, Packet, Translation, WITH_PORTS};
use dataplane_common::reason::Event;
use dataplane_common::{Port, Tables, V4, V6, checksum, driver};

use crate::act::Wire;
use crate::maps::{MapTables, count_event, has_driver_program};
use crate::packet::{IPV4, IPV6};

/// A frame's first header. Everything in a frame lies at even offsets, and no better.
#[repr(C)]
struct Ethernet {
    destination: [u16; 3],
    source: [u16; 3],
    kind: u16,
}

/// An IPv4 header without options.
#[repr(C)]
struct Ipv4 {
    version_service: u16,
    total_length: u16,
    identification: u16,
    fragment: u16,
    time_protocol: u16,
    checksum: u16,
    source: [u16; 2],
    destination: [u16; 2],
}

#[repr(C)]
struct Ipv6 {
    version_class_label: [u16; 2],
    payload_length: u16,
    next_hops: u16,
    source: [u16; 8],
    destination: [u16; 8],
}

#[repr(C)]
struct Tcp {
    source: u16,
    destination: u16,
    numbers: [u16; 4],
    offset_flags: u16,
    window: u16,
    checksum: u16,
    urgent: u16,
}

#[repr(C)]
struct Udp {
    source: u16,
    destination: u16,
    length: u16,
    checksum: u16,
}

const ETHERNET_HEADER: usize = size_of::<Ethernet>();

/// The header at an offset, if the frame holds all of it.
#[inline(always)]
fn header<T>(context: &XdpContext, offset: usize) -> Option<*mut T> {
    let start = context.data() + offset;
    if start + size_of::<T>() > context.data_end() {
        return None;
    }
    Some(start as *mut T)
}

/// Families that can be read and written in a frame.
trait Frame: Wire {
    /// Offset of the transport header.
    const TRANSPORT: usize;

    /// Fills in addresses and protocol, and the length for the route lookup. False for what is left alone; so are packets
    /// without a hop to spare, whose senders the stack tells.
    fn read_frame(context: &XdpContext, packet: &mut Packet<Self>, lookup: &mut FibLookup) -> bool;
    /// Writes the addresses, takes a hop, and writes the header's own checksum where there is one.
    fn write_frame(context: &XdpContext, decision: &Decision<Self>, difference: u32) -> bool;
}

#[xdp]
#[inline(always)]
pub fn at_driver(context: XdpContext) -> u32 {
    let Some(ethernet) = header::<Ethernet>(&context, 0) else {
        return XDP_PASS;
    };
    // SAFETY: `header` has checked the bounds, here and below; the frame is this program's alone.
    match u16::from_be(unsafe { (*ethernet).kind }) {
        IPV4 => run::<V4>(&context),
        IPV6 => run::<V6>(&context),
        _ => XDP_PASS,
    }
}

#[inline(always)]
fn run<A: Frame>(context: &XdpContext) -> u32
where
    MapTables: Tables<A>,
{
    let mut packet = Packet::default();
    // SAFETY: a C structure of integers, for which zero is valid.
    let mut lookup: FibLookup = unsafe { zeroed() };
    if !A::read_frame(context, &mut packet, &mut lookup) {
        return XDP_PASS;
    }
    // SAFETY: `read_frame` has filled the length in; every member of the union is a number.
    let bytes = unsafe { lookup.__bindgen_anon_1.tot_len };
    if !read_transport(context, &mut packet, bytes) {
        return XDP_PASS;
    }
    let decision = driver::at_driver(&mut MapTables, &packet);
    if decision.action != Action::Network {
        return XDP_PASS;
    }
    let came_in_by = context.ingress_ifindex() as u32;
    lookup.l4_protocol = packet.protocol;
    lookup.sport = decision.source_port.0;
    lookup.dport = decision.destination_port.0;
    lookup.ifindex = came_in_by;
    A::ask(&mut lookup, &decision.source, &decision.destination);
    // SAFETY: the structure is as large as said.
    let result = unsafe {
        bpf_fib_lookup(
            context.ctx.cast(),
            core::ptr::from_mut(&mut lookup),
            size_of::<FibLookup>() as i32,
            0,
        )
    };
    // No neighbour yet, too large, no route: the link's ingress hook knows what to do.
    if result != BPF_FIB_LKUP_RET_SUCCESS as i64 {
        return XDP_PASS;
    }
    if lookup.ifindex == came_in_by {
        if !is_for(context, &lookup.smac) {
            return XDP_PASS;
        }
    } else if !has_driver_program(lookup.ifindex) {
        return XDP_PASS;
    }
    if !rewrite(context, &packet, &decision, &lookup) {
        return XDP_PASS;
    }
    count_event(if decision.translation == Translation::Reply {
        Event::TranslatedReply
    } else {
        Event::TranslatedForward
    });
    count_event(Event::ForwardedAtDriver);
    if lookup.ifindex == came_in_by {
        return XDP_TX;
    }
    // SAFETY: plain numbers; the kernel looks the link up.
    unsafe { bpf_redirect(lookup.ifindex, 0) as u32 }
}

/// Reads ports and flags. `bytes` is the length of the packet. False for what is left alone; so are packets whose
/// checksum their sender has left to its device, for that is not known any more once they leave from here.
#[inline(always)]
fn read_transport<A: Frame>(context: &XdpContext, packet: &mut Packet<A>, bytes: u16) -> bool {
    let checksum;
    if packet.protocol == TCP {
        let Some(tcp) = header::<Tcp>(context, A::TRANSPORT) else {
            return false;
        };
        // SAFETY: see `at_driver`.
        unsafe {
            packet.source_port = Port((*tcp).source);
            packet.destination_port = Port((*tcp).destination);
            packet.tcp_flags = u16::from_be((*tcp).offset_flags) as u8;
            checksum = (*tcp).checksum;
        }
    } else if packet.protocol == UDP {
        let Some(udp) = header::<Udp>(context, A::TRANSPORT) else {
            return false;
        };
        // SAFETY: see `at_driver`.
        unsafe {
            packet.source_port = Port((*udp).source);
            packet.destination_port = Port((*udp).destination);
            checksum = (*udp).checksum;
        }
    } else {
        return false;
    }
    packet.flags = WITH_PORTS;
    let length = bytes.wrapping_sub((A::TRANSPORT - ETHERNET_HEADER) as u16);
    !checksum::is_unfinished(
        checksum,
        &packet.source,
        &packet.destination,
        packet.protocol,
        length,
    )
}

/// True for a frame to this machine: a switch that does not know where another one is sends its frames here too.
#[inline(always)]
fn is_for(context: &XdpContext, own: &[u8; 6]) -> bool {
    let Some(ethernet) = header::<Ethernet>(context, 0) else {
        return false;
    };
    // SAFETY: see `at_driver`.
    unsafe { (*ethernet).destination == words(own) }
}

/// Writes addresses, ports, checksums and the Ethernet header. Bounds are looked at before anything is written.
#[inline(always)]
fn rewrite<A: Frame>(
    context: &XdpContext,
    packet: &Packet<A>,
    decision: &Decision<A>,
    lookup: &FibLookup,
) -> bool {
    let addresses = checksum::address_difference(
        (&packet.source, &packet.destination),
        (&decision.source, &decision.destination),
    );
    let ports = checksum::port_difference(
        (packet.source_port, packet.destination_port),
        (decision.source_port, decision.destination_port),
    );
    let Some(ethernet) = header::<Ethernet>(context, 0) else {
        return false;
    };
    let (source, destination) = (decision.source_port.0, decision.destination_port.0);
    if packet.protocol == TCP {
        let Some(tcp) = header::<Tcp>(context, A::TRANSPORT) else {
            return false;
        };
        // SAFETY: see `at_driver`.
        unsafe {
            (*tcp).source = source;
            (*tcp).destination = destination;
            (*tcp).checksum = checksum::apply(checksum::apply((*tcp).checksum, addresses), ports);
        }
    } else {
        let Some(udp) = header::<Udp>(context, A::TRANSPORT) else {
            return false;
        };
        // SAFETY: see `at_driver`.
        unsafe {
            (*udp).source = source;
            (*udp).destination = destination;
            // Zero says that there is none, so a sum that comes to zero is written in its other form.
            if (*udp).checksum != 0 {
                let sum = checksum::apply(checksum::apply((*udp).checksum, addresses), ports);
                (*udp).checksum = if sum == 0 { 0xffff } else { sum };
            }
        }
    }
    if !A::write_frame(context, decision, addresses) {
        return false;
    }
    // SAFETY: see `at_driver`.
    unsafe {
        (*ethernet).destination = words(&lookup.dmac);
        (*ethernet).source = words(&lookup.smac);
    }
    true
}

#[inline(always)]
fn words(mac: &[u8; 6]) -> [u16; 3] {
    [
        u16::from_ne_bytes([mac[0], mac[1]]),
        u16::from_ne_bytes([mac[2], mac[3]]),
        u16::from_ne_bytes([mac[4], mac[5]]),
    ]
}

/// One word of an address out of its halves, as they lie in memory.
#[inline(always)]
fn word(halves: [u16; 2]) -> u32 {
    let ([a, b], [c, d]) = (halves[0].to_ne_bytes(), halves[1].to_ne_bytes());
    u32::from_ne_bytes([a, b, c, d])
}

#[inline(always)]
fn halves(word: u32) -> [u16; 2] {
    let [a, b, c, d] = word.to_ne_bytes();
    [u16::from_ne_bytes([a, b]), u16::from_ne_bytes([c, d])]
}

#[inline(always)]
fn address_of(halves: [u16; 8]) -> V6 {
    V6([
        word([halves[0], halves[1]]),
        word([halves[2], halves[3]]),
        word([halves[4], halves[5]]),
        word([halves[6], halves[7]]),
    ])
}

#[inline(always)]
fn halves_of(address: &V6) -> [u16; 8] {
    let [a, b, c, d] = [
        halves(address.0[0]),
        halves(address.0[1]),
        halves(address.0[2]),
        halves(address.0[3]),
    ];
    [a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1]]
}

impl Frame for V4 {
    const TRANSPORT: usize = ETHERNET_HEADER + size_of::<Ipv4>();

    #[inline(always)]
    fn read_frame(context: &XdpContext, packet: &mut Packet<Self>, lookup: &mut FibLookup) -> bool {
        /// Version 4, five words of header.
        const PLAIN: u8 = 0x45;
        const MORE_OR_OFFSET: u16 = 0x3fff;
        let Some(ip) = header::<Ipv4>(context, ETHERNET_HEADER) else {
            return false;
        };
        // SAFETY: see `at_driver`.
        unsafe {
            let fragment = u16::from_be((*ip).fragment) & MORE_OR_OFFSET;
            let [hops, protocol] = (*ip).time_protocol.to_ne_bytes();
            if (*ip).version_service.to_ne_bytes()[0] != PLAIN || fragment != 0 || hops <= 1 {
                return false;
            }
            packet.source = V4(word((*ip).source));
            packet.destination = V4(word((*ip).destination));
            packet.protocol = protocol;
            lookup.__bindgen_anon_1.tot_len = u16::from_be((*ip).total_length);
        }
        true
    }

    #[inline(always)]
    fn write_frame(context: &XdpContext, decision: &Decision<Self>, difference: u32) -> bool {
        let Some(ip) = header::<Ipv4>(context, ETHERNET_HEADER) else {
            return false;
        };
        // SAFETY: see `at_driver`.
        unsafe {
            (*ip).source = halves(decision.source.0);
            (*ip).destination = halves(decision.destination.0);
            let before = (*ip).time_protocol;
            let [hops, protocol] = before.to_ne_bytes();
            let after = u16::from_ne_bytes([hops.wrapping_sub(1), protocol]);
            (*ip).time_protocol = after;
            let taken = checksum::word_difference(before, after);
            (*ip).checksum = checksum::apply(checksum::apply((*ip).checksum, difference), taken);
        }
        true
    }
}

impl Frame for V6 {
    const TRANSPORT: usize = ETHERNET_HEADER + size_of::<Ipv6>();

    #[inline(always)]
    fn read_frame(context: &XdpContext, packet: &mut Packet<Self>, lookup: &mut FibLookup) -> bool {
        const HEADER: u16 = size_of::<Ipv6>() as u16;
        let Some(ip) = header::<Ipv6>(context, ETHERNET_HEADER) else {
            return false;
        };
        // SAFETY: see `at_driver`.
        unsafe {
            packet.source = address_of((*ip).source);
            packet.destination = address_of((*ip).destination);
            // Extension headers are neither TCP nor UDP.
            let [next, hops] = (*ip).next_hops.to_ne_bytes();
            if hops <= 1 {
                return false;
            }
            packet.protocol = next;
            lookup.__bindgen_anon_1.tot_len =
                u16::from_be((*ip).payload_length).saturating_add(HEADER);
        }
        true
    }

    #[inline(always)]
    fn write_frame(context: &XdpContext, decision: &Decision<Self>, _difference: u32) -> bool {
        let Some(ip) = header::<Ipv6>(context, ETHERNET_HEADER) else {
            return false;
        };
        // SAFETY: see `at_driver`.
        unsafe {
            (*ip).source = halves_of(&decision.source);
            (*ip).destination = halves_of(&decision.destination);
            let [next, hops] = (*ip).next_hops.to_ne_bytes();
            (*ip).next_hops = u16::from_ne_bytes([next, hops.wrapping_sub(1)]);
        }
        true
    }
}
