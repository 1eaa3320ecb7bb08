//! Turning a refused packet into the answer to it, and sending that back where the packet came from.

use aya_ebpf::bindings::{__sk_buff, bpf_adj_room_mode::BPF_ADJ_ROOM_MAC};
use aya_ebpf::helpers::{
    bpf_csum_diff, bpf_redirect, bpf_skb_adjust_room, bpf_skb_change_tail, bpf_skb_load_bytes,
};
use aya_ebpf::programs::TcContext;
use dataplane_common::Tables;
use dataplane_common::packet::tcp;
use dataplane_common::reason::Event;
use dataplane_common::refuse::{MAX_QUOTE, Quote, Refuse, Segment, Unreachable, may_answer};

use crate::icmp::{Fields, answer_echo};
use crate::maps::{MapTables, count_event, message_allowed};
use crate::packet::{ETHERNET_HEADER, Parsed, ifindex, load};
use crate::rewrite::{store, write_macs};
use crate::{DROP, PASS};

/// The loopback link has this index in every network namespace.
const LOOPBACK: u32 = 1;

/// Answers the packet, or drops it where an answer would be wrong, too much, or cannot be built.
#[inline(always)]
pub(crate) fn answer<A: Fields + Refuse>(context: &TcContext, parsed: &Parsed<A>) -> i32
where
    MapTables: Tables<A>,
{
    let packet = &parsed.packet;
    let Some(macs) = load::<[[u8; 6]; 2]>(context, 0) else {
        return DROP;
    };
    if !may_answer(packet) || is_for_many(context) {
        return DROP;
    }
    let built = if packet.is_tcp() {
        packet.has_ports() && reset(context, parsed)
    } else if packet.protocol == A::PROTOCOL && answer_echo(context, parsed) {
        return send_back(context, &macs);
    } else {
        notify(context, parsed)
    };
    if !built {
        return DROP;
    }
    count_event(Event::Refused);
    send_back(context, &macs)
}

/// Back where the packet came from.
#[inline(always)]
fn send_back(context: &TcContext, macs: &[[u8; 6]; 2]) -> i32 {
    if ifindex(context) == LOOPBACK {
        // What leaves the loopback link comes in there. Sent in anew it would be a stranger with an address of ours.
        return PASS;
    }
    if !write_macs(context, &macs[1], &macs[0]) {
        return DROP;
    }
    // SAFETY: plain numbers; the kernel looks the link up.
    unsafe { bpf_redirect(ifindex(context), 0) as i32 }
}

/// Sent to a group on the link, whatever the IP header says.
#[inline(always)]
fn is_for_many(context: &TcContext) -> bool {
    const BROADCAST: u32 = 1;
    const MULTICAST: u32 = 2;
    // SAFETY: the context is valid for the program's run.
    let kind = unsafe { (*context.skb.skb).pkt_type };
    kind == BROADCAST || kind == MULTICAST
}

#[inline(always)]
fn reset<A: Fields + Refuse>(context: &TcContext, parsed: &Parsed<A>) -> bool {
    if parsed.packet.tcp_flags & tcp::RST != 0 {
        return false;
    }
    let Some(header) = load::<[u16; 10]>(context, parsed.transport) else {
        return false;
    };
    let word = |high: u16, low: u16| ((u16::from_be(high) as u32) << 16) | u16::from_be(low) as u32;
    let header_bytes = ((u16::from_be(header[6]) >> 12) as u32) * 4;
    let segment = Segment {
        sequence: word(header[2], header[3]),
        acknowledgement: word(header[4], header[5]),
        flags: parsed.packet.tcp_flags,
        payload: A::bytes_from(context, parsed.transport + header_bytes),
    };
    let answer = A::reset(&parsed.packet, &segment);
    let skb = context.skb.skb;
    set_length(skb, ETHERNET_HEADER + size_of::<A::Reset>() as u32)
        && store(skb, ETHERNET_HEADER, &answer, 0)
}

#[inline(always)]
fn notify<A: Fields + Refuse>(context: &TcContext, parsed: &Parsed<A>) -> bool {
    let packet = &parsed.packet;
    let message = packet.protocol == A::PROTOCOL;
    if message && !packet.has_ports() {
        // An error, or nothing that we know to be none.
        return false;
    }
    let Some(quote) = quote(context, parsed.transport + QUOTED_TRANSPORT) else {
        return false;
    };
    if !message_allowed() {
        count_event(Event::RefusalLimited);
        return false;
    }
    let what = if packet.has_ports() && !message {
        Unreachable::Port
    } else {
        Unreachable::Host
    };
    let notice = A::notice(packet, what, &quote);
    let skb = context.skb.skb;
    // SAFETY: plain numbers; the kernel checks them against the packet.
    set_length(skb, ETHERNET_HEADER + quote.bytes as u32)
        && unsafe {
            bpf_skb_adjust_room(skb, size_of::<A::Notice>() as i32, BPF_ADJ_ROOM_MAC, 0) == 0
        }
        && store(skb, ETHERNET_HEADER, &notice, 0)
}

/// Bytes of the transport header that are quoted.
const QUOTED_TRANSPORT: u32 = 8;

/// Sums up what is quoted: from the IP header to `end`. `None` when the packet is shorter, or has more headers than are
/// looked through.
#[inline(always)]
fn quote(context: &TcContext, end: u32) -> Option<Quote> {
    /// Larger than any quote, so that a mask is all that bounds a length for the verifier. Headers are summed up in one
    /// go, with the zeroes after them: a loop would multiply the paths that lead here.
    const ROOM: usize = 256;
    let bytes = end - ETHERNET_HEADER;
    if bytes == 0 || bytes > MAX_QUOTE {
        return None;
    }
    let mut headers = [0u32; ROOM / size_of::<u32>()];
    // The compiler would leave out what it knows to change nothing.
    // SAFETY: a number on the stack.
    let length = unsafe { core::ptr::read_volatile(&bytes) };
    let length = (length.wrapping_sub(1) & (ROOM as u32 - 1)) + 1;
    // SAFETY: `headers` is writable for any length that the mask leaves; the kernel checks it against the packet.
    let loaded = unsafe {
        bpf_skb_load_bytes(
            context.skb.skb.cast(),
            ETHERNET_HEADER,
            headers.as_mut_ptr().cast(),
            length,
        )
    };
    if loaded != 0 {
        return None;
    }
    // SAFETY: `headers` is readable for its size, and nothing is taken away from the sum.
    let sum = unsafe {
        bpf_csum_diff(
            core::ptr::null_mut(),
            0,
            headers.as_mut_ptr(),
            ROOM as u32,
            0,
        )
    };
    Some(Quote {
        bytes: bytes as u16,
        sum: sum as u32,
    })
}

#[inline(always)]
fn set_length(skb: *mut __sk_buff, bytes: u32) -> bool {
    // SAFETY: plain numbers; the kernel checks them against the packet.
    unsafe { bpf_skb_change_tail(skb, bytes, 0) == 0 }
}
