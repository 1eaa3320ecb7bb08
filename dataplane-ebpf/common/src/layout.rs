//! Keys and values of the maps. Changing one is a new [`crate::ABI_VERSION`].
//!
//! Every type is `repr(C)` without implicit padding: the kernel compares keys byte by byte, and the verifier refuses
//! to copy bytes that were never written.

use crate::address::{Family, Port, V4, V6};
use crate::packet::Packet;

/// A connection as one side writes it on the wire. Key of the flow table (as the client writes it) and of the reply
/// table (as the backend answers it).
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Debug)]
pub struct FlowKey<A> {
    pub source: A,
    pub destination: A,
    pub source_port: Port,
    pub destination_port: Port,
    /// A whole word, so that no byte of the key is padding.
    pub protocol: u32,
}

/// The one record of a flow: both translations, what admitted it, and how alive it is. The reply table leads the
/// other direction here.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Flow<A> {
    /// Where the client's packets go.
    pub backend: A,
    /// What the backend sees as their source.
    pub source: A,
    pub backend_port: Port,
    pub source_port: Port,
    pub backend_id: u32,
    /// State word of the backend when the flow was made; another generation there means that it is gone.
    pub backend_state: u32,
    pub service_id: u32,
    pub policy: Remembered,
    /// Seconds of the monotonic clock, as all times here.
    pub created_s: u32,
    pub client_seen_s: u32,
    pub server_seen_s: u32,
    /// All TCP flags that the client has sent; each direction writes its own word only.
    pub client_flags: u32,
    pub server_flags: u32,
    pub protocol: u32,
    /// [`FLOW_SERVICE`] and its siblings.
    pub flags: u32,
    /// [`Node::generation`] when a direct flow was last compared with the frontends.
    pub generation: u32,
}

/// What the policies said of a flow, and when: one word, which is read and written as one. Two CPUs that judge a flow while
/// the policies change cannot leave the older verdict with the newer generation.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Remembered(u64);

impl Remembered {
    /// `verdict` as in [`crate::policy::verdict`]; `generation` is [`PolicyState::generation`] before the policies were asked.
    #[inline(always)]
    #[must_use]
    pub const fn new(verdict: u32, generation: u32) -> Self {
        Self((verdict as u64) << 32 | generation as u64)
    }

    #[inline(always)]
    #[must_use]
    pub const fn verdict(self) -> u32 {
        (self.0 >> 32) as u32
    }

    #[allow(clippy::cast_possible_truncation, reason = "the lower half")]
    #[inline(always)]
    #[must_use]
    pub const fn generation(self) -> u32 {
        self.0 as u32
    }
}

/// The flow goes through a service port; without it client and backend talk to each other directly.
pub const FLOW_SERVICE: u32 = 1;
/// Nothing in its packets changes.
pub const FLOW_PLAIN: u32 = 2;
/// The source became the node's address.
pub const FLOW_MASQUERADED: u32 = 4;
/// Opened by a packet from another machine.
pub const FLOW_INBOUND: u32 = 8;
/// Its packets go unchanged through the overlay to the backend's node, which answers the client itself.
pub const FLOW_DSR: u32 = 16;

/// Service address and port. The address is all zero for ports that every node address serves (NodePorts, hostPorts
/// without an address of their own). Port and protocol are zero for an address that serves no other ports: echo requests
/// to it are answered, everything else is refused.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Debug)]
pub struct FrontendKey<A> {
    pub address: A,
    pub port: Port,
    pub protocol: u8,
    /// [`SCOPE_ALL`] or [`SCOPE_EXTERNAL`].
    pub scope: u8,
}

/// Seen by every client, unless [`FRONTEND_EXTERNAL_SCOPE`] leads those outside the cluster elsewhere.
pub const SCOPE_ALL: u8 = 0;
/// Seen by clients outside the cluster.
pub const SCOPE_EXTERNAL: u8 = 1;

/// A service port.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Frontend {
    pub service_id: u32,
    /// Slots 0..backends hold usable backends; those of this node come first.
    pub backends: u32,
    pub local_backends: u32,
    pub flags: u32,
    /// Seconds; zero means no affinity.
    pub affinity_s: u32,
    /// [`ALGORITHM_RANDOM`] or [`ALGORITHM_MAGLEV`].
    pub algorithm: u32,
}

/// Clients outside the cluster have an entry of their own under [`SCOPE_EXTERNAL`].
pub const FRONTEND_EXTERNAL_SCOPE: u32 = 1;
/// Clients outside the cluster keep their address: their backends are on this node.
pub const FRONTEND_KEEP_SOURCE: u32 = 2;
/// Without a usable backend packets are dropped in silence instead of being refused: there are backends elsewhere.
pub const FRONTEND_DROP_EMPTY: u32 = 4;
/// Sources must be in the table of source ranges.
pub const FRONTEND_RANGES: u32 = 8;
/// Backends on other nodes answer the client themselves.
pub const FRONTEND_DSR: u32 = 16;

/// Any backend, with equal chances.
pub const ALGORITHM_RANDOM: u32 = 0;
/// Clients outside the cluster get the backend that a table names for their 5-tuple, the same on every node.
pub const ALGORITHM_MAGLEV: u32 = 1;

/// A block of a service's Maglev table; the value holds [`MAGLEV_BLOCK`] backend ids.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Debug)]
pub struct MaglevKey {
    pub service_id: u32,
    pub block: u32,
}

/// Backend ids of a block; zero names none.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MaglevBlock {
    pub backends: [u32; MAGLEV_BLOCK as usize],
}

/// Places in a service's Maglev table: a prime, as the construction asks for.
pub const MAGLEV_SIZE: u32 = 4_093;
/// Places in one block.
pub const MAGLEV_BLOCK: u32 = 64;

/// A source range of a service, for a longest prefix match.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Debug)]
pub struct SourceRangeKey<A> {
    /// Bits that count: 32 for the service's id, and those of the range.
    pub prefix_bits: u32,
    pub service_id: u32,
    pub address: A,
}

/// An address range, for a longest prefix match.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Debug)]
pub struct RangeKey<A> {
    pub prefix_bits: u32,
    pub address: A,
}

/// What is known of an address range.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Range {
    /// [`RANGE_EXEMPT`] and its siblings.
    pub flags: u32,
    /// The node that has these addresses can be reached through the overlay, needed or not; one address is all zero.
    /// Both are where it cannot, and for addresses of no node.
    pub remote_v4: V4,
    pub remote_v6: V6,
}

/// Pods keep their address on the way there.
pub const RANGE_EXEMPT: u32 = 1;
/// The pods of this node: an address without an endpoint is nobody, and senders are told so.
pub const RANGE_OWN: u32 = 2;
/// Reached through the overlay.
pub const RANGE_OVERLAY: u32 = 4;
/// Addresses of services: one without a frontend is nobody, and senders are told so.
pub const RANGE_SERVICE: u32 = 8;

/// Place of a backend in a service. The value is the backend's id. The map holds [`SLOT_BLOCK`] places in one entry,
/// under the same key with the number of the block for index.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Debug)]
pub struct SlotKey {
    pub service_id: u32,
    pub index: u32,
}

/// Places in one entry of the map: few services have more backends.
pub const SLOT_BLOCK: u32 = 16;

/// Backend ids of a block of places; zero names none.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct SlotBlock {
    pub backends: [u32; SLOT_BLOCK as usize],
}

impl SlotKey {
    /// The key of the block that this place is in.
    #[inline(always)]
    #[must_use]
    pub const fn block(&self) -> Self {
        Self {
            service_id: self.service_id,
            index: self.index / SLOT_BLOCK,
        }
    }

    /// The place within its block.
    #[inline(always)]
    #[must_use]
    pub const fn within(&self) -> usize {
        (self.index % SLOT_BLOCK) as usize
    }
}

/// Where an id leads. A backend belongs to one service port: the same endpoint behind two ports has two ids. Entries are
/// found by place: one whose service is zero leads nowhere.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Backend<A> {
    pub address: A,
    pub port: Port,
    /// [`BACKEND_LOCAL`].
    pub flags: u16,
    pub service_id: u32,
}

/// The endpoint runs on this node.
pub const BACKEND_LOCAL: u16 = 1;

/// What may be done with a backend id: the low byte of its state word. The rest counts the id's lives, so that a flow
/// of an earlier life is recognised. One word, because readers must never see half a change.
pub mod backend_state {
    /// No backend has this id.
    pub const ABSENT: u32 = 0;
    /// New and old flows may use it.
    pub const ACTIVE: u32 = 1;
    /// Flows that exist may go on; nothing else.
    pub const DRAINING: u32 = 2;

    const KIND_MASK: u32 = 0xff;
    const ONE_LIFE: u32 = 0x100;

    #[inline(always)]
    #[must_use]
    pub const fn kind(word: u32) -> u32 {
        word & KIND_MASK
    }

    #[inline(always)]
    #[must_use]
    pub const fn same_life(a: u32, b: u32) -> bool {
        a & !KIND_MASK == b & !KIND_MASK
    }

    #[inline(always)]
    #[must_use]
    pub const fn with_kind(word: u32, kind: u32) -> u32 {
        (word & !KIND_MASK) | kind
    }

    /// The word after the backend's end: absent, and a new life for whoever gets the id next.
    #[inline(always)]
    #[must_use]
    pub const fn ended(word: u32) -> u32 {
        (word & !KIND_MASK).wrapping_add(ONE_LIFE)
    }
}

/// A client of a service port with affinity.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Debug)]
pub struct AffinityKey<A> {
    pub client: A,
    pub service_id: u32,
}

/// The backend that a client's new flows go to, while it may be used and `expires_s` is not past.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Affinity {
    pub backend_id: u32,
    /// State word of the backend when it was chosen.
    pub backend_state: u32,
    /// Seconds of the monotonic clock.
    pub expires_s: u32,
}

/// A datagram that travels in fragments.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Debug)]
pub struct FragmentKey<A> {
    pub source: A,
    pub destination: A,
    pub identification: u32,
    /// Protocol number, and the hook's number in the second byte.
    pub protocol: u32,
}

/// What only its first fragment carries, and how much of it has passed.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Datagram {
    pub source_port: Port,
    pub destination_port: Port,
    /// Payload bytes of the fragments that have passed.
    pub bytes: u32,
    /// Of the whole datagram; zero until its last fragment has passed.
    pub total: u32,
    /// Seconds of the monotonic clock when the first fragment passed.
    pub seen_s: u32,
    /// One when every fragment has passed: its identification may come again.
    pub complete: u32,
}

/// Where fragments go that came before the first of their datagram.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Park {
    /// Near side of the link to user space; zero while there is none.
    pub ifindex: u32,
    /// Seconds of the monotonic clock of the last sign of life.
    pub alive_s: u32,
}

/// An address that lives on this node, or that another node has.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Endpoint {
    /// Host side of the pod's link; zero for addresses of nodes.
    pub ifindex: u32,
    /// [`ENDPOINT_NODE`], [`ENDPOINT_READY`] or [`ENDPOINT_PEER`], and [`ENDPOINT_NODE_PORTS`].
    pub flags: u32,
    pub pod_mac: [u8; 6],
    pub host_mac: [u8; 6],
}

/// An address of the node itself.
pub const ENDPOINT_NODE: u32 = 1;
/// The pod's link has its programs: packets may be put into it directly.
pub const ENDPOINT_READY: u32 = 2;
/// An address of another node.
pub const ENDPOINT_PEER: u32 = 4;
/// NodePorts are served on this address of a node.
pub const ENDPOINT_NODE_PORTS: u32 = 8;

/// What a program needs to know of the link it runs on.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Link {
    /// [`LINK_POD`] or [`LINK_HOST`], and which addresses are set.
    pub flags: u32,
    pub v4: V4,
    pub v6: V6,
}

/// A pod's link: sources must be its own.
pub const LINK_POD: u32 = 1;
/// The link of the node's own processes.
pub const LINK_HOST: u32 = 2;
pub const LINK_HAS_V4: u32 = 4;
pub const LINK_HAS_V6: u32 = 8;

/// What the programs know of their node, per family.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Node<A> {
    /// Primary address; all zero when the node has none of this family.
    pub address: A,
    /// Peer of the host link, where its program sits; zero while there is none.
    pub host_peer_ifindex: u32,
    /// The side of the host link that has the routes.
    pub host_ifindex: u32,
    pub host_mac: [u8; 6],
    pub peer_mac: [u8; 6],
    /// First uplink; zero while there is none.
    pub uplink_ifindex: u32,
    /// [`NODE_MASQUERADE`].
    pub flags: u32,
    /// Counts changes of the frontends: direct flows of an earlier one are compared with them again.
    pub generation: u32,
    /// The NodePort range, which translation gives to no source. Host order.
    pub node_port_first: u16,
    pub node_port_last: u16,
    /// The overlay's device; zero while there is none.
    pub overlay_ifindex: u32,
    /// VXLAN network identifier of the overlay.
    pub overlay_network: u32,
    /// UDP port of the overlay. Host order.
    pub overlay_port: u16,
    pub reserved: u16,
}

/// Pods get the node's address on their way out of the cluster.
pub const NODE_MASQUERADE: u32 = 1;

/// Which policy judges a pod's packets. Key: interface index of the host side of its link. A pod without an entry is closed.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Debug)]
pub struct PodPolicy {
    /// First part of the keys of its rules. Pods that rules treat alike share it.
    pub policy_id: u32,
    /// [`POLICY_INGRESS`] and its siblings.
    pub flags: u32,
}

/// Packets to the pod are judged; without it they are all allowed.
pub const POLICY_INGRESS: u32 = 1;
/// Packets from the pod are judged; without it they are all allowed.
pub const POLICY_EGRESS: u32 = 2;
/// What no rule speaks of may not come in.
pub const POLICY_INGRESS_CLOSED: u32 = 4;
/// What no rule speaks of may not go out.
pub const POLICY_EGRESS_CLOSED: u32 = 8;
/// Nothing is allowed, whatever rules say: what applies to the pod is not known, or did not fit.
pub const POLICY_SHUT: u32 = 16;

/// What a rule matches, for a longest prefix match. The bits that count: policy, identity and direction always (72),
/// then the protocol (80, without it any), then those of the port that a block of ports shares (up to 96, without them any).
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Debug)]
pub struct PolicyRuleKey {
    pub prefix_bits: u32,
    pub policy_id: u32,
    /// Of the other end; [`IDENTITY_ANY`] for rules about everybody. Both are asked, and the rule that comes first wins.
    pub identity: u32,
    /// [`DIRECTION_INGRESS`] or [`DIRECTION_EGRESS`].
    pub direction: u8,
    pub protocol: u8,
    /// The destination's.
    pub port: Port,
}

/// Bits of a [`PolicyRuleKey`] that say policy, identity and direction.
pub const RULE_BITS_ANY_PROTOCOL: u32 = 72;
/// Those and the protocol.
pub const RULE_BITS_ANY_PORT: u32 = 80;
/// All.
pub const RULE_BITS_ONE_PORT: u32 = 96;

/// Everybody, in the cluster or not. Also what an address is that no peer set holds.
pub const IDENTITY_ANY: u32 = 0;

pub const DIRECTION_INGRESS: u8 = 0;
pub const DIRECTION_EGRESS: u8 = 1;

/// The first of a policy's rules that match a [`PolicyRuleKey`], by their number: the order in which they are asked. The
/// number of the tier Admin comes first; another is wanted where that passes, or has no rule.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct PolicyRule {
    /// Of the tier Admin; [`NO_RULE`] when none matches.
    pub admin_rule: u32,
    /// [`RULE_ALLOW`], [`RULE_DENY`] or [`RULE_PASS`].
    pub admin_action: u32,
    /// Of the tiers after Admin; [`NO_RULE`] when none matches.
    pub rule: u32,
    /// [`RULE_ALLOW`] or [`RULE_DENY`].
    pub action: u32,
}

/// Greater than every rule's number.
pub const NO_RULE: u32 = u32::MAX;
pub const RULE_ALLOW: u32 = 1;
pub const RULE_DENY: u32 = 2;
pub const RULE_PASS: u32 = 3;

/// What all policies of the node share.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PolicyState {
    /// Counts changes of policies and identities: flows that were judged before one are judged again.
    pub generation: u32,
}

macro_rules! assert_layout {
    ($($layout:ty = $size:literal),+; aligned to $align:literal) => {
        $(const _: () = assert!(core::mem::size_of::<$layout>() == $size && core::mem::align_of::<$layout>() == $align);)+
    };
}

assert_layout! {
    AffinityKey<V4> = 8, AffinityKey<V6> = 20, Affinity = 12, FragmentKey<V4> = 16, FragmentKey<V6> = 40, Datagram = 20, Park = 8,
    FlowKey<V4> = 16, FlowKey<V6> = 40, FrontendKey<V4> = 8, FrontendKey<V6> = 20,
    Frontend = 24, SlotKey = 8, SlotBlock = 64, Backend<V4> = 12, Backend<V6> = 24, Endpoint = 20, Link = 24, Node<V4> = 52,
    Node<V6> = 64, MaglevKey = 8, MaglevBlock = 256, SourceRangeKey<V4> = 12, SourceRangeKey<V6> = 24, RangeKey<V4> = 8,
    RangeKey<V6> = 20, Range = 24, PodPolicy = 8, PolicyRuleKey = 16, PolicyRule = 16, PolicyState = 4;
    aligned to 4
}

assert_layout! { Flow<V4> = 64, Flow<V6> = 88; aligned to 8 }

impl<A: Family> FlowKey<A> {
    /// The same number on every node for the same 5-tuple.
    #[inline(always)]
    #[must_use]
    pub fn hash(&self) -> u32 {
        let ports = (self.source_port.0 as u32) << 16 | self.destination_port.0 as u32;
        let mut hash = mix(ports ^ self.protocol);
        let mut index = 0;
        while index < A::WORDS {
            hash = mix(hash ^ self.source.word(index));
            hash = mix(hash.rotate_left(5) ^ self.destination.word(index));
            index += 1;
        }
        hash
    }

    /// The same connection as the other side writes it.
    #[inline(always)]
    #[must_use]
    pub fn reversed(&self) -> Self {
        Self {
            source: self.destination,
            destination: self.source,
            source_port: self.destination_port,
            destination_port: self.source_port,
            protocol: self.protocol,
        }
    }
}

/// Spreads the bits of a word over all of it.
#[inline(always)]
const fn mix(word: u32) -> u32 {
    let word = (word ^ (word >> 16)).wrapping_mul(0x7feb_352d);
    let word = (word ^ (word >> 15)).wrapping_mul(0x846c_a68b);
    word ^ (word >> 16)
}

impl<A: Family> Flow<A> {
    /// A flow from a packet's source straight to its destination, as it is when it begins. Times in seconds of the
    /// monotonic clock.
    #[inline(always)]
    #[must_use]
    pub fn of_packet(packet: &Packet<A>, now_s: u32) -> Self {
        Self {
            backend: packet.destination,
            source: packet.source,
            backend_port: packet.destination_port,
            source_port: packet.source_port,
            backend_id: 0,
            backend_state: 0,
            service_id: 0,
            policy: Remembered::default(),
            created_s: now_s,
            client_seen_s: now_s,
            server_seen_s: 0,
            client_flags: crate::flow::noted(0, packet.tcp_flags, now_s),
            server_flags: 0,
            protocol: packet.protocol as u32,
            flags: 0,
            generation: 0,
        }
    }
}
