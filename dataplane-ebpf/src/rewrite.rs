//! Writing a decision's addresses and ports into the packet, checksums included.

use aya_ebpf::bindings::{__sk_buff, BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR, BPF_F_RECOMPUTE_CSUM};
use aya_ebpf::helpers::{bpf_l3_csum_replace, bpf_l4_csum_replace, bpf_skb_store_bytes};
use aya_ebpf::programs::TcContext;
use dataplane_common::address::{ICMP, ICMPV6, SCTP, TCP};
use dataplane_common::checksum;
use dataplane_common::packet::{Decision, LATER_FRAGMENT};
use dataplane_common::sctp;
use dataplane_common::{Family, Port, V4, V6};

use crate::packet::{ETHERNET_HEADER, Headers, Parsed, load};

/// Families whose addresses can be written.
pub(crate) trait Addresses: Family {
    /// Writes both addresses, and what depends on them alone.
    fn write(
        skb: *mut __sk_buff,
        from: (&Self, &Self),
        to: (&Self, &Self),
        difference: u32,
    ) -> bool;

    /// Writes the time to live or hop limit, and what depends on it.
    fn write_hops(skb: *mut __sk_buff, from: u8, to: u8) -> bool;
}

/// Rewrites the packet as decided. False when the kernel refused a part: the packet is not fit to travel.
#[inline(always)]
pub(crate) fn rewrite<A: Addresses + Headers>(
    context: &TcContext,
    parsed: &Parsed<A>,
    decision: &Decision<A>,
) -> bool {
    let skb = context.skb.skb;
    let packet = &parsed.packet;
    let from = (&packet.source, &packet.destination);
    let to = (&decision.source, &decision.destination);
    let addresses = checksum::address_difference(from, to);
    if !A::write(skb, from, to, addresses) {
        return false;
    }
    if packet.flags & LATER_FRAGMENT != 0 {
        // Ports and checksum travel in the first.
        return true;
    }
    let from = (packet.source_port, packet.destination_port);
    let to = (decision.source_port, decision.destination_port);
    let ports = checksum::port_difference(from, to);
    if packet.protocol == ICMP || packet.protocol == ICMPV6 {
        // One of each pair is zero, the other the identifier.
        let identifier = to.0.0 | to.1.0;
        let at = parsed.transport + 2;
        // SAFETY: as below.
        return unsafe {
            (packet.protocol == ICMP
                || bpf_l4_csum_replace(skb, at, 0, addresses as u64, BPF_F_PSEUDO_HDR as u64) == 0)
                && bpf_l4_csum_replace(skb, at, 0, ports as u64, 0) == 0
        } && store(skb, parsed.transport + 4, &identifier, 0);
    }
    if packet.protocol == SCTP {
        return from == to || rewrite_sctp(context, parsed, from, to);
    }
    let (at, flags) = if packet.protocol == TCP {
        (parsed.transport + 16, 0)
    } else {
        // A datagram over IPv4 without a checksum stays without.
        (parsed.transport + 6, BPF_F_MARK_MANGLED_0 as u64)
    };
    // SAFETY: the helpers check the offsets against the packet. A size of zero says that the value is a difference.
    unsafe {
        bpf_l4_csum_replace(
            skb,
            at,
            0,
            addresses as u64,
            flags | BPF_F_PSEUDO_HDR as u64,
        ) == 0
            && (from == to
                || (bpf_l4_csum_replace(skb, at, 0, ports as u64, flags) == 0
                    && store(skb, parsed.transport, &[to.0.0, to.1.0], 0)))
    }
}

/// A function of its own, which the verifier looks at once, whoever calls it.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn sctp_product(a: u32, b: u32) -> u32 {
    sctp::multiply(a, b)
}

/// SCTP's checksum covers the ports, and no address. It spans fragments: those were dropped before.
#[inline(always)]
fn rewrite_sctp<A: Headers>(
    context: &TcContext,
    parsed: &Parsed<A>,
    from: (Port, Port),
    to: (Port, Port),
) -> bool {
    let at = parsed.transport + sctp::CHECKSUM_OFFSET;
    let Some(old) = load::<u32>(context, at) else {
        return false;
    };
    let bytes = A::bytes_from(context, parsed.transport);
    // The compiler knows bounds of this number that older verifiers lose, and leaves out the masks on which they insist.
    // SAFETY: a number on the stack.
    let bytes = unsafe { core::ptr::read_volatile(&bytes) };
    let new = sctp::checksum_by(|a, b| sctp_product(a, b), old, bytes, from, to);
    let skb = context.skb.skb;
    // A sum over the whole packet that the device gave must follow.
    let flags = BPF_F_RECOMPUTE_CSUM as u64;
    store(skb, parsed.transport, &[to.0.0, to.1.0], flags) && store(skb, at, &new, flags)
}

/// Takes one from the `hops` that the packet has left, which are at least one.
#[inline(always)]
pub(crate) fn count_hop<A: Addresses>(context: &TcContext, hops: u8) -> bool {
    A::write_hops(context.skb.skb, hops, hops - 1)
}

/// Writes the Ethernet addresses.
#[inline(always)]
pub(crate) fn write_macs(context: &TcContext, destination: &[u8; 6], source: &[u8; 6]) -> bool {
    let macs = [*destination, *source];
    store(context.skb.skb, 0, &macs, 0)
}

#[inline(always)]
pub(crate) fn store<T: Copy>(skb: *mut __sk_buff, offset: u32, value: &T, flags: u64) -> bool {
    // SAFETY: `value` is readable for its size; the helper checks the offset.
    unsafe {
        bpf_skb_store_bytes(
            skb,
            offset,
            core::ptr::from_ref(value).cast(),
            size_of::<T>() as u32,
            flags,
        ) == 0
    }
}

impl Addresses for V4 {
    #[inline(always)]
    fn write(
        skb: *mut __sk_buff,
        _from: (&Self, &Self),
        to: (&Self, &Self),
        difference: u32,
    ) -> bool {
        const CHECKSUM: u32 = ETHERNET_HEADER + 10;
        const SOURCE: u32 = ETHERNET_HEADER + 12;
        let both = [*to.0, *to.1];
        // SAFETY: the helper checks the offset; a size of zero says that the value is a difference.
        store(skb, SOURCE, &both, 0)
            && unsafe { bpf_l3_csum_replace(skb, CHECKSUM, 0, difference as u64, 0) } == 0
    }

    #[inline(always)]
    fn write_hops(skb: *mut __sk_buff, from: u8, to: u8) -> bool {
        const HOPS: u32 = ETHERNET_HEADER + 8;
        const CHECKSUM: u32 = ETHERNET_HEADER + 10;
        // The first byte of its word.
        let word = |hops: u8| u16::from_ne_bytes([hops, 0]) as u64;
        // SAFETY: the helper checks the offset.
        store(skb, HOPS, &to, 0)
            && unsafe { bpf_l3_csum_replace(skb, CHECKSUM, word(from), word(to), 2) } == 0
    }
}

impl Addresses for V6 {
    #[inline(always)]
    fn write(
        skb: *mut __sk_buff,
        _from: (&Self, &Self),
        to: (&Self, &Self),
        _difference: u32,
    ) -> bool {
        const SOURCE: u32 = ETHERNET_HEADER + 8;
        let both = [*to.0, *to.1];
        // There is no header checksum that outweighs the change, so a sum over the whole packet that the device gave
        // must follow the addresses; the transport's pseudo header takes it back.
        store(skb, SOURCE, &both, BPF_F_RECOMPUTE_CSUM as u64)
    }

    #[inline(always)]
    fn write_hops(skb: *mut __sk_buff, _from: u8, to: u8) -> bool {
        const HOPS: u32 = ETHERNET_HEADER + 7;
        store(skb, HOPS, &to, BPF_F_RECOMPUTE_CSUM as u64)
    }
}
