//! Map definitions, and `Tables` over them. Sizes here are defaults; the loader sets the configured ones.

use aya_ebpf::bindings::{BPF_F_NO_PREALLOC, BPF_NOEXIST};
use aya_ebpf::helpers::{
    bpf_get_prandom_u32, bpf_ktime_get_coarse_ns, bpf_ktime_get_ns, bpf_sk_lookup_udp,
    bpf_sk_release, bpf_skc_lookup_tcp,
};
use aya_ebpf::macros::map;
use aya_ebpf::maps::lpm_trie::Key;
use aya_ebpf::maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, ProgramArray};
use aya_ebpf::programs::TcContext;
use dataplane_common::address::{TCP, UDP};
use dataplane_common::layout::{
    Affinity, AffinityKey, Backend, Datagram, Endpoint, Flow, FlowKey, FragmentKey, Frontend,
    FrontendKey, Link, MAGLEV_BLOCK, MaglevBlock, MaglevKey, Node, Park, Range, SlotBlock, SlotKey,
};
use dataplane_common::limit::Bucket;
use dataplane_common::reason::{DropReason, Event};
use dataplane_common::tables::{Inserted, Tables};
use dataplane_common::{Family, V4, V6, tail};

use crate::DROP;
use crate::packet::Pending;

const FLOWS: u32 = 262_144;
const FRONTENDS: u32 = 65_536;
const SLOTS: u32 = 262_144;
const SLOT_BLOCKS: u32 = 81_920;
const ENDPOINTS: u32 = 16_384;
/// Address ranges of the cluster and of exceptions.
const RANGES: u32 = 16_384;
/// Source ranges of services.
const SOURCES: u32 = 65_536;
/// Blocks of Maglev tables.
const MAGLEV_BLOCKS: u32 = 262_144;
/// Datagrams in fragments that may be on their way at one time; the oldest is forgotten.
const FRAGMENTS: u32 = 2_048;
const LINKS: u32 = 1_024;
const DRIVERS: u32 = 64;

/// Uplinks whose driver runs the program for it.
#[map(name = "driver_links")]
static DRIVER_LINKS: HashMap<u32, u32> = HashMap::pinned(DRIVERS, BPF_F_NO_PREALLOC);
#[map(name = "links")]
static LINK_TABLE: HashMap<u32, Link> = HashMap::pinned(LINKS, BPF_F_NO_PREALLOC);
/// Programs that are called at the end of another: see [`dataplane_common::tail`].
#[map(name = "tails")]
static TAILS: ProgramArray = ProgramArray::pinned(dataplane_common::tail::COUNT, 0);
#[map(name = "drops")]
static DROPS: PerCpuArray<u64> = PerCpuArray::pinned(64, 0);
#[map(name = "events")]
static EVENTS: PerCpuArray<u64> = PerCpuArray::pinned(64, 0);

/// Where fragments go that came before the first of their datagram.
#[map(name = "park")]
static PARK: Array<Park> = Array::pinned(1, 0);
/// What ICMP messages of the programs themselves are counted by.
#[map(name = "messages")]
static MESSAGES: PerCpuArray<Bucket> = PerCpuArray::pinned(1, 0);

/// Not zero where the kernel tells the time of its last tick (Linux 5.11), which is a fraction of the work of reading a
/// clock. Set by the loader; the verifier then leaves out the other way.
#[unsafe(no_mangle)]
static COARSE_CLOCK: u32 = 0;

/// Monotonic nanoseconds, at most a tick late.
#[inline(always)]
fn now_ns() -> u64 {
    // SAFETY: the helpers take nothing and cannot fail. The loader sets the value before the programs are loaded, which
    // the compiler must not foresee.
    unsafe {
        if core::ptr::read_volatile(&raw const COARSE_CLOCK) != 0 {
            bpf_ktime_get_coarse_ns()
        } else {
            bpf_ktime_get_ns()
        }
    }
}

/// A packet between two programs, which run one after the other on one CPU. Pinned: while an agent starts, the first may be
/// that of the agent before.
#[map(name = "pending_v4")]
static PENDING_V4: PerCpuArray<Pending<V4>> = PerCpuArray::pinned(1, 0);
#[map(name = "pending_v6")]
static PENDING_V6: PerCpuArray<Pending<V6>> = PerCpuArray::pinned(1, 0);

/// Families whose packets can be handed to another program.
pub(crate) trait Handed: Sized {
    /// Place of the program for ICMP errors, and of the one that asks the policies again.
    const RELATE: u32;
    const JUDGE: u32;

    /// This CPU's place for a packet.
    fn pending() -> Option<&'static mut Pending<Self>>;
}

impl Handed for V4 {
    const RELATE: u32 = tail::RELATE_V4;
    const JUDGE: u32 = tail::JUDGE_V4;

    #[inline(always)]
    fn pending() -> Option<&'static mut Pending<Self>> {
        // SAFETY: this CPU's own value; programs of one hook do not interrupt one another.
        PENDING_V4
            .get_ptr_mut(0)
            .map(|pending| unsafe { &mut *pending })
    }
}

impl Handed for V6 {
    const RELATE: u32 = tail::RELATE_V6;
    const JUDGE: u32 = tail::JUDGE_V6;

    #[inline(always)]
    fn pending() -> Option<&'static mut Pending<Self>> {
        // SAFETY: as for IPv4.
        PENDING_V6
            .get_ptr_mut(0)
            .map(|pending| unsafe { &mut *pending })
    }
}

/// What [`LpmTrie`] holds for a service's source ranges, after the prefix length.
#[repr(C)]
#[derive(Clone, Copy)]
struct Source<A> {
    service_id: u32,
    address: A,
}

/// Hash maps hold one entry per use (`BPF_F_NO_PREALLOC`): memory grows with use, and an entry that is read while it is
/// removed stays whole until its readers are done. Backends lie in an array: ids are dense, and are used again last.
macro_rules! family_maps {
    ($family:ty, $module:ident, $($name:ident = $text:literal),+) => {
        pub(crate) mod $module {
            use super::*;
            family_maps!(@maps $family, $($name = $text),+);
        }

        impl Tables<$family> for MapTables {
            family_maps!(@methods $family, $module);
        }

        impl Tables<$family> for Opening<'_> {
            family_maps!(@methods $family, $module);

            #[inline(always)]
            fn is_bound(&mut self, reply: &FlowKey<$family>) -> bool {
                has_socket(self.0, reply)
            }
        }
    };
    (@methods $family:ty, $module:ident) => {
            #[inline(always)]
            fn now_s(&mut self) -> u32 {
                (now_ns() / 1_000_000_000) as u32
            }

            #[inline(always)]
            fn random(&mut self) -> u32 {
                // SAFETY: the helper takes nothing and cannot fail.
                unsafe { bpf_get_prandom_u32() }
            }

            #[inline(always)]
            fn count(&mut self, event: Event) {
                count_event(event);
            }

            #[inline(always)]
            fn node(&mut self) -> Option<&Node<$family>> {
                $module::NODE.get(0)
            }

            #[inline(always)]
            fn frontend(&mut self, key: &FrontendKey<$family>) -> Option<&Frontend> {
                // SAFETY: entries are freed after their readers (see above), and never written in place.
                unsafe { $module::FRONTEND.get(key) }
            }

            #[inline(always)]
            fn slot(&mut self, key: &SlotKey) -> Option<&u32> {
                // SAFETY: as for `frontend`.
                let block = unsafe { $module::SLOT.get(&key.block()) }?;
                block.backends.get(key.within())
            }

            #[inline(always)]
            fn backend(&mut self, id: u32) -> Option<&Backend<$family>> {
                match $module::BACKEND.get(id) {
                    Some(backend) if backend.service_id != 0 => Some(backend),
                    _ => None,
                }
            }

            #[inline(always)]
            fn backend_state(&mut self, id: u32) -> u32 {
                match $module::BACKEND_STATE.get(id) {
                    Some(word) => *word,
                    None => 0,
                }
            }

            #[inline(always)]
            fn maglev(&mut self, service_id: u32, place: u32) -> u32 {
                let key = MaglevKey {
                    service_id,
                    block: place / MAGLEV_BLOCK,
                };
                // SAFETY: as for `frontend`.
                match unsafe { $module::MAGLEV.get(&key) } {
                    Some(block) => block.backends[(place % MAGLEV_BLOCK) as usize],
                    None => 0,
                }
            }

            #[inline(always)]
            fn source_allowed(&mut self, service_id: u32, source: &$family) -> bool {
                let source = Source {
                    service_id,
                    address: *source,
                };
                let bits = 8 * size_of::<Source<$family>>() as u32;
                $module::SOURCES_OF.get(&Key::new(bits, source)).is_some()
            }

            #[inline(always)]
            fn range(&mut self, address: &$family) -> Option<&Range> {
                let bits = 8 * size_of::<$family>() as u32;
                $module::RANGE.get(&Key::new(bits, *address))
            }

            #[inline(always)]
            fn affinity(&mut self, key: &AffinityKey<$family>) -> Option<&Affinity> {
                // SAFETY: as for `frontend`.
                unsafe { $module::AFFINITY.get(key) }
            }

            #[inline(always)]
            fn set_affinity(&mut self, key: &AffinityKey<$family>, affinity: &Affinity) {
                // A full table forgets it: see the trait.
                let _ = $module::AFFINITY.insert(key, affinity, 0);
            }

            #[inline(always)]
            fn datagram(&mut self, key: &FragmentKey<$family>) -> Option<&mut Datagram> {
                // SAFETY: an entry that is given to another datagram meanwhile leads this fragment astray at worst.
                $module::FRAGMENT
                    .get_ptr_mut(key)
                    .map(|datagram| unsafe { &mut *datagram })
            }

            #[inline(always)]
            fn set_datagram(&mut self, key: &FragmentKey<$family>, datagram: &Datagram) {
                // Without it, later fragments stay without ports.
                let _ = $module::FRAGMENT.insert(key, datagram, 0);
            }

            #[inline(always)]
            fn park(&mut self) -> Park {
                match PARK.get(0) {
                    Some(park) => *park,
                    None => Park::default(),
                }
            }

            #[inline(always)]
            fn flow(&mut self, key: &FlowKey<$family>) -> Option<&mut Flow<$family>> {
                // SAFETY: the entry outlives its readers. CPUs may write one record at the same time; every field is a
                // word that is right whichever write comes last.
                $module::FLOW.get_ptr_mut(key).map(|flow| unsafe { &mut *flow })
            }

            #[inline(always)]
            fn insert_flow(&mut self, key: &FlowKey<$family>, flow: &Flow<$family>) -> Inserted {
                inserted($module::FLOW.insert(key, flow, BPF_NOEXIST.into()))
            }

            #[inline(always)]
            fn remove_flow(&mut self, key: &FlowKey<$family>) {
                let _ = $module::FLOW.remove(key);
            }

            #[inline(always)]
            fn reply(&mut self, key: &FlowKey<$family>) -> Option<&FlowKey<$family>> {
                // SAFETY: as for `frontend`.
                unsafe { $module::REPLY.get(key) }
            }

            #[inline(always)]
            fn insert_reply(
                &mut self,
                key: &FlowKey<$family>,
                flow: &FlowKey<$family>,
            ) -> Inserted {
                inserted($module::REPLY.insert(key, flow, BPF_NOEXIST.into()))
            }

            #[inline(always)]
            fn remove_reply(&mut self, key: &FlowKey<$family>) {
                let _ = $module::REPLY.remove(key);
            }

            #[inline(always)]
            fn recent(&mut self, place: u32) -> Option<&FlowKey<$family>> {
                $module::RECENT.get(place)
            }

            #[inline(always)]
            fn set_recent(&mut self, place: u32, key: &FlowKey<$family>) {
                if let Some(slot) = $module::RECENT.get_ptr_mut(place) {
                    // SAFETY: the entry lives as long as the map. A key that two CPUs write at once is nobody's.
                    unsafe { *slot = *key };
                }
            }

            #[inline(always)]
            fn port_cursor(&mut self, index: u32) -> u32 {
                $module::CURSOR.get(index).copied().unwrap_or(0)
            }

            #[inline(always)]
            fn set_port_cursor(&mut self, index: u32, cursor: u32) {
                if let Some(slot) = $module::CURSOR.get_ptr_mut(index) {
                    // SAFETY: as for `set_recent`; whichever CPU writes last, the search goes on from there.
                    unsafe { *slot = cursor };
                }
            }
    };
    (@maps $family:ty, $node:ident = $node_text:literal, $endpoint:ident = $endpoint_text:literal,
     $frontend:ident = $frontend_text:literal, $slot:ident = $slot_text:literal,
     $backend:ident = $backend_text:literal, $state:ident = $state_text:literal,
     $flow:ident = $flow_text:literal, $reply:ident = $reply_text:literal,
     $affinity:ident = $affinity_text:literal, $fragment:ident = $fragment_text:literal,
     $range:ident = $range_text:literal, $sources:ident = $sources_text:literal,
     $maglev:ident = $maglev_text:literal, $recent:ident = $recent_text:literal,
     $cursor:ident = $cursor_text:literal) => {
        #[map(name = $node_text)]
        pub(super) static $node: Array<Node<$family>> = Array::pinned(1, 0);
        #[map(name = $endpoint_text)]
        pub(crate) static $endpoint: HashMap<$family, Endpoint> =
            HashMap::pinned(ENDPOINTS, BPF_F_NO_PREALLOC);
        #[map(name = $frontend_text)]
        pub(super) static $frontend: HashMap<FrontendKey<$family>, Frontend> =
            HashMap::pinned(FRONTENDS, BPF_F_NO_PREALLOC);
        #[map(name = $slot_text)]
        pub(super) static $slot: HashMap<SlotKey, SlotBlock> =
            HashMap::pinned(SLOT_BLOCKS, BPF_F_NO_PREALLOC);
        #[map(name = $backend_text)]
        pub(super) static $backend: Array<Backend<$family>> = Array::pinned(SLOTS, 0);
        #[map(name = $state_text)]
        pub(super) static $state: Array<u32> = Array::pinned(SLOTS, 0);
        #[map(name = $flow_text)]
        pub(super) static $flow: HashMap<FlowKey<$family>, Flow<$family>> =
            HashMap::pinned(FLOWS, BPF_F_NO_PREALLOC);
        #[map(name = $reply_text)]
        pub(super) static $reply: HashMap<FlowKey<$family>, FlowKey<$family>> =
            HashMap::pinned(FLOWS, BPF_F_NO_PREALLOC);
        #[map(name = $affinity_text)]
        pub(super) static $affinity: HashMap<AffinityKey<$family>, Affinity> =
            HashMap::pinned(FRONTENDS, BPF_F_NO_PREALLOC);
        #[map(name = $fragment_text)]
        pub(super) static $fragment: LruHashMap<FragmentKey<$family>, Datagram> =
            LruHashMap::pinned(FRAGMENTS, 0);
        #[map(name = $range_text)]
        pub(super) static $range: LpmTrie<$family, Range> =
            LpmTrie::pinned(RANGES, BPF_F_NO_PREALLOC);
        #[map(name = $sources_text)]
        pub(super) static $sources: LpmTrie<Source<$family>, u32> =
            LpmTrie::pinned(SOURCES, BPF_F_NO_PREALLOC);
        #[map(name = $maglev_text)]
        pub(super) static $maglev: HashMap<MaglevKey, MaglevBlock> =
            HashMap::pinned(MAGLEV_BLOCKS, BPF_F_NO_PREALLOC);
        #[map(name = $recent_text)]
        pub(super) static $recent: Array<FlowKey<$family>> =
            Array::pinned(dataplane_common::RECENT_FLOWS, 0);
        #[map(name = $cursor_text)]
        pub(super) static $cursor: Array<u32> = Array::pinned(dataplane_common::PORT_CURSORS, 0);
    };
}

/// The maps as the decisions see them.
pub(crate) struct MapTables;

/// The same for the program that opens flows, which asks for sockets too.
pub(crate) struct Opening<'a>(pub(crate) &'a TcContext);

/// True when a socket of this node takes packets with this tuple: one connected so, or one that takes them from
/// anybody.
#[inline(always)]
fn has_socket<A: Family>(context: &TcContext, tuple: &FlowKey<A>) -> bool {
    /// `BPF_F_CURRENT_NETNS`.
    const THIS_NAMESPACE: u64 = -1i64 as u64;
    let skb = context.skb.skb.cast();
    // The kernel's tuple of a socket is the start of a flow's key.
    let socket_tuple = core::ptr::from_ref(tuple).cast_mut().cast();
    let size = (size_of::<FlowKey<A>>() - size_of::<u32>()) as u32;
    if tuple.protocol == TCP as u32 {
        // SAFETY: the tuple is readable for `size` bytes; the socket is released below.
        let socket = unsafe { bpf_skc_lookup_tcp(skb, socket_tuple, size, THIS_NAMESPACE, 0) };
        if socket.is_null() {
            return false;
        }
        // SAFETY: held since the lookup.
        unsafe { bpf_sk_release(socket.cast()) };
        true
    } else if tuple.protocol == UDP as u32 {
        // SAFETY: as for TCP.
        let socket = unsafe { bpf_sk_lookup_udp(skb, socket_tuple, size, THIS_NAMESPACE, 0) };
        if socket.is_null() {
            return false;
        }
        // SAFETY: held since the lookup.
        unsafe { bpf_sk_release(socket.cast()) };
        true
    } else {
        false
    }
}

family_maps!(
    V4,
    v4,
    NODE = "node_v4",
    ENDPOINT = "endpoints_v4",
    FRONTEND = "frontends_v4",
    SLOT = "slots_v4",
    BACKEND = "backends_v4",
    BACKEND_STATE = "states_v4",
    FLOW = "flows_v4",
    REPLY = "replies_v4",
    AFFINITY = "affinity_v4",
    FRAGMENT = "fragments_v4",
    RANGE = "ranges_v4",
    SOURCES_OF = "sources_v4",
    MAGLEV = "maglev_v4",
    RECENT = "recent_v4",
    CURSOR = "cursors_v4"
);
family_maps!(
    V6,
    v6,
    NODE = "node_v6",
    ENDPOINT = "endpoints_v6",
    FRONTEND = "frontends_v6",
    SLOT = "slots_v6",
    BACKEND = "backends_v6",
    BACKEND_STATE = "states_v6",
    FLOW = "flows_v6",
    REPLY = "replies_v6",
    AFFINITY = "affinity_v6",
    FRAGMENT = "fragments_v6",
    RANGE = "ranges_v6",
    SOURCES_OF = "sources_v6",
    MAGLEV = "maglev_v6",
    RECENT = "recent_v6",
    CURSOR = "cursors_v6"
);

/// True when the link's driver can send what another driver hands to it.
#[inline(always)]
pub(crate) fn has_driver_program(ifindex: u32) -> bool {
    // SAFETY: the value is not looked at.
    unsafe { DRIVER_LINKS.get(&ifindex) }.is_some()
}

/// What is known of the link with this index.
#[inline(always)]
pub(crate) fn link(ifindex: u32) -> Option<&'static Link> {
    // SAFETY: entries are freed after their readers, and never written in place.
    unsafe { LINK_TABLE.get(&ifindex) }
}

/// Host side of this node's host link, zero while there is none.
#[inline(always)]
pub(crate) fn host_ifindex() -> u32 {
    match v4::NODE.get(0) {
        Some(node) => node.host_ifindex,
        None => 0,
    }
}

/// The overlay's device; zero while there is none.
#[inline(always)]
pub(crate) fn overlay_ifindex() -> u32 {
    match v4::NODE.get(0) {
        Some(node) => node.overlay_ifindex,
        None => 0,
    }
}

/// VXLAN network identifier of the overlay.
#[inline(always)]
pub(crate) fn overlay_network() -> u32 {
    match v4::NODE.get(0) {
        Some(node) => node.overlay_network,
        None => 0,
    }
}

/// Where the host link's program runs, and the first uplink; each is zero while there is none.
#[inline(always)]
pub(crate) fn host_peer_and_uplink() -> (u32, u32) {
    match v4::NODE.get(0) {
        Some(node) => (node.host_peer_ifindex, node.uplink_ifindex),
        None => (0, 0),
    }
}

/// Counts a drop and gives its verdict.
#[inline(always)]
pub(crate) fn drop_packet(reason: DropReason) -> i32 {
    if let Some(counter) = DROPS.get_ptr_mut(reason as u32) {
        // SAFETY: this CPU's own value; programs of one hook do not interrupt one another.
        unsafe { *counter += 1 };
    }
    DROP
}

/// Takes a token for an ICMP message of our own; false when there is none left.
#[inline(always)]
pub(crate) fn message_allowed() -> bool {
    let Some(bucket) = MESSAGES.get_ptr_mut(0) else {
        return false;
    };
    // SAFETY: the helper takes nothing and cannot fail.
    let now_ms = (unsafe { bpf_ktime_get_ns() } / 1_000_000) as u32;
    // SAFETY: this CPU's own value; programs of one hook do not interrupt one another.
    unsafe { (*bucket).take(now_ms) }
}

/// Goes on in another program, and does not come back unless that is not loaded.
#[inline(always)]
pub(crate) fn call(context: &TcContext, place: u32) {
    // SAFETY: the program is of the same type as its caller.
    let _ = unsafe { TAILS.tail_call(context, place) };
}

#[inline(always)]
pub(crate) fn count_event(event: Event) {
    if let Some(counter) = EVENTS.get_ptr_mut(event as u32) {
        // SAFETY: as in `drop_packet`.
        unsafe { *counter += 1 };
    }
}

#[inline(always)]
pub(crate) fn inserted(result: Result<(), i32>) -> Inserted {
    const EEXIST: i32 = -17;
    match result {
        Ok(()) => Inserted::Done,
        Err(EEXIST) => Inserted::Exists,
        // E2BIG, or no memory at this moment: there is no room either way.
        Err(_) => Inserted::Full,
    }
}
