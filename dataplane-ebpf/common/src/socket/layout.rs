//! Keys and values of the tables that only socket hooks use. Rules as for [`crate::layout`].

use crate::address::{Port, V4, V6};

/// The kernel's number of a socket, never used twice. Two words, so that keys need no padding for it.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Debug)]
pub struct Cookie(pub [u32; 2]);

impl Cookie {
    #[inline(always)]
    #[must_use]
    #[allow(clippy::cast_possible_truncation, reason = "both halves are kept")]
    pub const fn new(number: u64) -> Self {
        Self([number as u32, (number >> 32) as u32])
    }
}

/// An address and a port.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Debug)]
pub struct Place<A> {
    pub address: A,
    pub port: Port,
    pub pad: u16,
}

impl<A> Place<A> {
    #[inline(always)]
    #[must_use]
    pub const fn new(address: A, port: Port) -> Self {
        Self {
            address,
            port,
            pad: 0,
        }
    }
}

/// Whose a network namespace is.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Namespace {
    /// [`NAMESPACE_NODE`], or zero for a pod's.
    pub flags: u32,
    /// Host side of the pod's link; zero for the node's own.
    pub ifindex: u32,
    /// Addresses that its processes send from; all zero for none.
    pub v4: V4,
    pub v6: V6,
}

/// The node's own processes.
pub const NAMESPACE_NODE: u32 = 1;

/// The translated connection of a stream socket. Key: its cookie.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Connection<A> {
    /// Where the kernel has connected it.
    pub backend: Place<A>,
    /// Where the process did.
    pub service: Place<A>,
}

/// A destination that a datagram socket wrote to.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Debug)]
pub struct DestinationKey<A> {
    pub cookie: Cookie,
    pub place: Place<A>,
}

/// An address that datagrams come from.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Debug)]
pub struct SourceKey<A> {
    pub cookie: Cookie,
    pub place: Place<A>,
}

/// Number `index` among the destinations of a datagram socket.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Debug)]
pub struct UseKey {
    pub cookie: Cookie,
    pub index: u32,
}

/// Where a socket's datagrams to one destination go.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct SocketFlow<A> {
    pub backend: Place<A>,
    /// Zero when packets to this destination are translated on their way.
    pub backend_id: u32,
    /// State word of the backend when it was chosen.
    pub backend_state: u32,
    pub service_id: u32,
    /// Seconds of the monotonic clock.
    pub seen_s: u32,
}

macro_rules! assert_layout {
    ($($layout:ty = $size:literal),+ $(,)?) => {
        $(const _: () = assert!(core::mem::size_of::<$layout>() == $size && core::mem::align_of::<$layout>() == 4);)+
    };
}

assert_layout! {
    Place<V4> = 8, Place<V6> = 20, Namespace = 28, Connection<V4> = 16, Connection<V6> = 40, DestinationKey<V4> = 16,
    DestinationKey<V6> = 28, SourceKey<V4> = 16, SourceKey<V6> = 28, UseKey = 12, SocketFlow<V4> = 24,
    SocketFlow<V6> = 36,
}
