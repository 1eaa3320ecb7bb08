//! ICMP messages that are rewritten: errors about packets of flows, and echo requests to addresses of services.

use aya_ebpf::bindings::BPF_F_RECOMPUTE_CSUM;
use aya_ebpf::helpers::bpf_l3_csum_replace;
use aya_ebpf::programs::TcContext;
use dataplane_common::address::{SCTP, TCP, UDP};
use dataplane_common::icmp::{
    Checksums, Messages, NO_CHECKSUM, Related, WITHOUT_ADDRESSES, echo_checksum, is_virtual,
    move_checksums, relate,
};
use dataplane_common::packet::{FRAGMENT, Packet, Translation};
use dataplane_common::path::{self, Hook};
use dataplane_common::reason::{DropReason, Event};
use dataplane_common::scratch::step;
use dataplane_common::{Tables, V4, V6};

use crate::act::Wire;
use crate::maps::{Handed, MapTables, count_event, drop_packet};
use crate::packet::{ETHERNET_HEADER, Parsed, load, parse_quoted};
use crate::rewrite::store;
use crate::{PASS, go_on};

/// Type, code and checksum, and four bytes that depend on the type.
const HEADER: u32 = 8;
/// Of the checksum in it; of the identifier in an echo message.
const CHECKSUM: u32 = 2;
const IDENTIFIER: u32 = 4;

/// Where fields lie in the header of a family.
pub(crate) trait Fields: Wire + Messages {
    /// Offset of the source address; the destination follows.
    const SOURCE: u32;
    /// Offset of the header's own checksum; zero when there is none.
    const HEADER_CHECKSUM: u32;

    /// As many hops as for a packet that begins here.
    fn renew_hops(context: &TcContext) -> bool;
}

/// Hops of the node's own answers.
const HOPS: u8 = 64;

impl Fields for V4 {
    const SOURCE: u32 = 12;
    const HEADER_CHECKSUM: u32 = 10;

    #[inline(always)]
    fn renew_hops(context: &TcContext) -> bool {
        const AT: u32 = ETHERNET_HEADER + 8;
        let Some(old) = load::<u16>(context, AT) else {
            return false;
        };
        let new = u16::from_ne_bytes([HOPS, old.to_ne_bytes()[1]]);
        let skb = context.skb.skb;
        // SAFETY: the helper checks the offset; two bytes are exchanged.
        let checked = unsafe {
            bpf_l3_csum_replace(
                skb,
                ETHERNET_HEADER + Self::HEADER_CHECKSUM,
                old as u64,
                new as u64,
                size_of::<u16>() as u64,
            )
        };
        checked == 0 && store(skb, AT, &new, 0)
    }
}

impl Fields for V6 {
    const SOURCE: u32 = 8;
    const HEADER_CHECKSUM: u32 = 0;

    #[inline(always)]
    fn renew_hops(context: &TcContext) -> bool {
        const AT: u32 = ETHERNET_HEADER + 7;
        store(context.skb.skb, AT, &HOPS, BPF_F_RECOMPUTE_CSUM as u64)
    }
}

/// Translates an error about a packet of a flow, and leaves where it goes to the next program. Errors that are about
/// nothing we know go the way of packets without a flow.
#[inline(always)]
pub(crate) fn run<A: Fields + Handed>(context: &TcContext, opener: u32, actor: u32) -> i32
where
    MapTables: Tables<A>,
{
    let Some(pending) = A::pending() else {
        return drop_packet(DropReason::ProgramMissing);
    };
    let quote = pending.parsed.transport + HEADER;
    pending.quoted = parse_quoted(context, quote);
    let pending = step(pending);
    let hook = Hook::from_number(pending.hook);
    let (message, quoted) = (&pending.parsed.packet, &pending.quoted);
    pending.related = relate(&mut MapTables, message, &quoted.packet);
    if !quoted.valid || pending.related.translation == Translation::None {
        if hook == Hook::Stack {
            return PASS;
        }
        return go_on(context, opener);
    }
    let pending = step(pending);
    let hook = Hook::from_number(pending.hook);
    let (message, related) = (&pending.parsed, &pending.related);
    // The node's own messages reach its pods.
    if related.unsettled != 0 && hook != Hook::Stack {
        pending.scratch.set_flow(&related.flow);
        return go_on(context, A::JUDGE);
    }
    pending.decision = path::deliver_error(&mut MapTables, hook, &message.packet, related);
    let pending = step(pending);
    let related = &pending.related;
    if related.changes != 0 {
        count_event(Event::TranslatedError);
        if !rewrite(context, &pending.parsed, &pending.quoted, quote, related) {
            return drop_packet(DropReason::RewriteFailed);
        }
    }
    // It is done.
    pending.decision.translation = Translation::None;
    go_on(context, actor)
}

/// Writes addresses, ports and checksums, outside and inside.
#[inline(always)]
fn rewrite<A: Fields>(
    context: &TcContext,
    message: &Parsed<A>,
    quoted: &Parsed<A>,
    quote: u32,
    related: &Related<A>,
) -> bool {
    let skb = context.skb.skb;
    let checksum_at = transport_checksum(&quoted.packet, quoted.transport);
    let Some(old) = checksums(context, message, quoted, quote, checksum_at) else {
        return false;
    };
    let new = move_checksums(old, &message.packet, &quoted.packet, related);
    // All changes together leave a sum over the whole packet as it was, if all of them are counted or none.
    let flags = BPF_F_RECOMPUTE_CSUM as u64;
    let inner = [related.quoted_source, related.quoted_destination];
    let from = (&message.packet.source, &message.packet.destination);
    let to = (&related.source, &related.destination);
    let outer = dataplane_common::checksum::address_difference(from, to);
    let inner_header = A::HEADER_CHECKSUM == 0
        || store(skb, quote + A::HEADER_CHECKSUM, &new.quoted_header, flags);
    let transport =
        old.flags & NO_CHECKSUM != 0 || store(skb, checksum_at, &new.quoted_transport, flags);
    inner_header
        && transport
        && store(skb, quote + A::SOURCE, &inner, flags)
        && write_ports(context, quoted, related)
        && store(skb, message.transport + CHECKSUM, &new.message, flags)
        && A::write(skb, from, to, outer)
}

#[inline(always)]
fn write_ports<A: Fields>(context: &TcContext, quoted: &Parsed<A>, related: &Related<A>) -> bool {
    let skb = context.skb.skb;
    let flags = BPF_F_RECOMPUTE_CSUM as u64;
    let (source, destination) = (
        related.quoted_source_port.0,
        related.quoted_destination_port.0,
    );
    if quoted.packet.protocol == A::PROTOCOL {
        // One of them is zero, the other the identifier.
        let identifier = source | destination;
        return store(skb, quoted.transport + IDENTIFIER, &identifier, flags);
    }
    store(skb, quoted.transport, &[source, destination], flags)
}

/// Offset of the checksum of the quoted transport header.
#[inline(always)]
fn transport_checksum<A: Fields>(quoted: &Packet<A>, transport: u32) -> u32 {
    if quoted.protocol == TCP {
        transport + 16
    } else if quoted.protocol == UDP {
        transport + 6
    } else {
        transport + CHECKSUM
    }
}

/// Reads all checksums that an error has; `None` when it is cut short.
#[inline(always)]
fn checksums<A: Fields>(
    context: &TcContext,
    message: &Parsed<A>,
    quoted: &Parsed<A>,
    quote: u32,
    checksum_at: u32,
) -> Option<Checksums> {
    let mut checksums = Checksums {
        message: load(context, message.transport + CHECKSUM)?,
        quoted_header: 0,
        quoted_transport: 0,
        flags: 0,
    };
    if A::HEADER_CHECKSUM != 0 {
        checksums.quoted_header = load(context, quote + A::HEADER_CHECKSUM)?;
    }
    let protocol = quoted.packet.protocol;
    match load::<u16>(context, checksum_at) {
        Some(checksum) if protocol != SCTP && !(protocol == UDP && checksum == 0) => {
            checksums.quoted_transport = checksum;
        }
        _ => checksums.flags |= NO_CHECKSUM,
    }
    if protocol == A::PROTOCOL && !A::PSEUDO_HEADER {
        checksums.flags |= WITHOUT_ADDRESSES;
    }
    Some(checksums)
}

/// Turns an echo request to an address of a service into its reply; false when it is none. The node has no such
/// address, and no other host is asked.
#[inline(always)]
pub(crate) fn answer_echo<A: Fields>(context: &TcContext, parsed: &Parsed<A>) -> bool
where
    MapTables: Tables<A>,
{
    let packet = &parsed.packet;
    let Some([type_and_code, checksum]) = load::<[u16; 2]>(context, parsed.transport) else {
        return false;
    };
    let request = u16::from_ne_bytes([A::ECHO_REQUEST, 0]);
    let whole = packet.flags & FRAGMENT == 0;
    if !whole || type_and_code != request || !is_virtual(&mut MapTables, packet.destination) {
        return false;
    }
    let reply = u16::from_ne_bytes([A::ECHO_REPLY, 0]);
    let header = [reply, echo_checksum::<A>(checksum)];
    let skb = context.skb.skb;
    let flags = BPF_F_RECOMPUTE_CSUM as u64;
    let from = (&packet.source, &packet.destination);
    let to = (&packet.destination, &packet.source);
    // The addresses change places, which no sum notices.
    let answered = store(skb, parsed.transport, &header, flags)
        && A::write(skb, from, to, 0)
        && A::renew_hops(context);
    if answered {
        count_event(Event::EchoAnswered);
    }
    answered
}
