//! Fragments that came before the first of their datagram: handed to user space, and taken back.

use aya_ebpf::bindings::BPF_F_INGRESS;
use aya_ebpf::helpers::bpf_redirect;
use aya_ebpf::programs::TcContext;
use dataplane_common::fragment::park_mark;
use dataplane_common::path::Hook;
use dataplane_common::reason::{DropReason, Event};

use crate::DROP;
use crate::maps::{count_event, drop_packet};
use crate::packet::{ifindex, load};
use crate::rewrite::store;

/// Offset of the source's Ethernet address.
const SOURCE_MAC: u32 = 6;

/// Sends a fragment out of the link to user space, marked with where it was met.
#[inline(always)]
pub(crate) fn hand_over(context: &TcContext, hook: u32, link: u32) -> i32 {
    let mark = park_mark::write(hook, ifindex(context));
    if !store(context.skb.skb, SOURCE_MAC, &mark, 0) {
        return drop_packet(DropReason::RewriteFailed);
    }
    count_event(Event::Parked);
    // SAFETY: plain numbers; the kernel looks the link up.
    unsafe { bpf_redirect(link, 0) as i32 }
}

/// True once for a fragment that was parked after it had come through the overlay.
#[inline(always)]
pub(crate) fn is_taken_back(context: &TcContext) -> bool {
    // SAFETY: the context is valid for the program's run.
    let taken = unsafe { (*context.skb.skb).mark } == park_mark::TAKEN_BACK;
    if taken {
        set_mark(context, 0);
    }
    taken
}

#[inline(always)]
fn set_mark(context: &TcContext, mark: u32) {
    // SAFETY: the context is valid for the program's run.
    unsafe { (*context.skb.skb).mark = mark };
}

/// Lets a fragment come in once more where it came in first.
#[inline(always)]
pub(crate) fn take_back(context: &TcContext) -> i32 {
    let Some(mark) = load::<[u8; 6]>(context, SOURCE_MAC) else {
        return DROP;
    };
    let Some((hook, link)) = park_mark::read(mark) else {
        return DROP;
    };
    if hook == Hook::Overlay as u32 {
        // Its tunnel key, which let it in, is gone by now.
        set_mark(context, park_mark::TAKEN_BACK);
    }
    // SAFETY: plain numbers; the kernel looks the link up.
    unsafe { bpf_redirect(link, BPF_F_INGRESS.into()) as i32 }
}
