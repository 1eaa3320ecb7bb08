//! Turning a refused packet into the answer to it, and sending that back where the packet came from.

use aya_ebpf::bindings::{__sk_buff, bpf_adj_room_mode::BPF_ADJ_ROOM_MAC};
use aya_ebpf::helpers::{bpf_redirect, bpf_skb_adjust_room, bpf_skb_change_tail};
use aya_ebpf::programs::TcContext;
use dataplane_common::packet::tcp;
use dataplane_common::reason::Event;
use dataplane_common::refuse::{Refuse, Segment};

use crate::DROP;
use crate::act::Wire;
use crate::maps::count_event;
use crate::packet::{ETHERNET_HEADER, Parsed, ifindex, load};
use crate::rewrite::{store, write_macs};

/// Answers the packet, or drops it where an answer would be wrong or cannot be built.
#[inline(always)]
pub(crate) fn answer<A: Wire + Refuse>(context: &TcContext, parsed: &Parsed<A>) -> i32 {
    let Some(macs) = load::<[[u8; 6]; 2]>(context, 0) else {
        return DROP;
    };
    let built = if parsed.packet.is_tcp() {
        reset(context, parsed)
    } else if parsed.packet.has_ports() {
        notify(context, parsed)
    } else {
        false
    };
    if !built || !write_macs(context, &macs[1], &macs[0]) {
        return DROP;
    }
    count_event(Event::Refused);
    // SAFETY: plain numbers; the kernel looks the link up.
    unsafe { bpf_redirect(ifindex(context), 0) as i32 }
}

#[inline(always)]
fn reset<A: Wire + Refuse>(context: &TcContext, parsed: &Parsed<A>) -> bool {
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
        payload: context
            .len()
            .saturating_sub(parsed.transport + header_bytes),
    };
    let answer = A::reset(&parsed.packet, &segment);
    let skb = context.skb.skb;
    set_length(skb, ETHERNET_HEADER + size_of::<A::Reset>() as u32)
        && store(skb, ETHERNET_HEADER, &answer, 0)
}

#[inline(always)]
fn notify<A: Wire + Refuse>(context: &TcContext, parsed: &Parsed<A>) -> bool {
    let quote_bytes = size_of::<A::Quote>() as u32;
    // The quote is the IP header and eight bytes; headers with options are not taken apart.
    if parsed.transport + 8 != ETHERNET_HEADER + quote_bytes {
        return false;
    }
    let Some(quote) = load::<A::Quote>(context, ETHERNET_HEADER) else {
        return false;
    };
    let notice = A::notice(&parsed.packet, &quote);
    let skb = context.skb.skb;
    // SAFETY: plain numbers; the kernel checks them against the packet.
    set_length(skb, ETHERNET_HEADER + quote_bytes)
        && unsafe {
            bpf_skb_adjust_room(skb, size_of::<A::Notice>() as i32, BPF_ADJ_ROOM_MAC, 0) == 0
        }
        && store(skb, ETHERNET_HEADER, &notice, 0)
}

#[inline(always)]
fn set_length(skb: *mut __sk_buff, bytes: u32) -> bool {
    // SAFETY: plain numbers; the kernel checks them against the packet.
    unsafe { bpf_skb_change_tail(skb, bytes, 0) == 0 }
}
