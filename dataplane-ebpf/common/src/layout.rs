//! Keys and values of the maps. Changing one is a new [`crate::ABI_VERSION`].
//!
//! Every type is `repr(C)` without implicit padding: the kernel compares keys byte by byte, and the verifier refuses
//! to copy bytes that were never written.

use crate::address::{Family, Port, V4, V6};

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
    /// Generation of the policy that judged this flow; zero while no policy selects either end.
    pub policy_generation: u32,
    /// Verdict and rule of that policy.
    pub policy_verdict: u32,
    /// Seconds of the monotonic clock, as all times here.
    pub created_s: u32,
    pub client_seen_s: u32,
    pub server_seen_s: u32,
    /// All TCP flags that the client has sent; each direction writes its own word only.
    pub client_flags: u32,
    pub server_flags: u32,
    pub protocol: u32,
}

/// Service address and port. `scope` leaves room for traffic policies (an external view of the same port).
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Debug)]
pub struct FrontendKey<A> {
    pub address: A,
    pub port: Port,
    pub protocol: u8,
    pub scope: u8,
}

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
    pub algorithm: u32,
}

/// Place of a backend in a service. The value is the backend's id.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Debug)]
pub struct SlotKey {
    pub service_id: u32,
    pub index: u32,
}

/// Where an id leads. A backend belongs to one service port: the same endpoint behind two ports has two ids.
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
    /// TCP connections that exist may go on; nothing else.
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
    pub protocol: u32,
}

/// What only its first fragment carries.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct FragmentPorts {
    pub source_port: Port,
    pub destination_port: Port,
}

/// An address that lives on this node.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Endpoint {
    /// Host side of the pod's link; zero for the node's own addresses.
    pub ifindex: u32,
    /// [`ENDPOINT_NODE`] or [`ENDPOINT_READY`].
    pub flags: u32,
    pub pod_mac: [u8; 6],
    pub host_mac: [u8; 6],
}

/// An address of the node itself.
pub const ENDPOINT_NODE: u32 = 1;
/// The pod's link has its programs: packets may be put into it directly.
pub const ENDPOINT_READY: u32 = 2;

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
    /// [`crate::HOST_SNAT_V4`] or its sibling.
    pub host_source: A,
    /// Peer of the host link, where its program sits; zero while there is none.
    pub host_peer_ifindex: u32,
    /// The side of the host link that has the routes.
    pub host_ifindex: u32,
    pub host_mac: [u8; 6],
    pub peer_mac: [u8; 6],
    /// First uplink; zero while there is none.
    pub uplink_ifindex: u32,
}

macro_rules! assert_layout {
    ($($layout:ty = $size:literal),+ $(,)?) => {
        $(const _: () = assert!(core::mem::size_of::<$layout>() == $size && core::mem::align_of::<$layout>() == 4);)+
    };
}

assert_layout! {
    AffinityKey<V4> = 8, AffinityKey<V6> = 20, Affinity = 12, FragmentKey<V4> = 16, FragmentKey<V6> = 40,
    FlowKey<V4> = 16, FlowKey<V6> = 40, Flow<V4> = 56, Flow<V6> = 80, FrontendKey<V4> = 8, FrontendKey<V6> = 20,
    Frontend = 24, SlotKey = 8, Backend<V4> = 12, Backend<V6> = 24, Endpoint = 20, Link = 24, Node<V4> = 32,
    Node<V6> = 56,
}

impl<A: Family> FlowKey<A> {
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
