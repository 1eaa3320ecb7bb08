//! Address families. One source serves both; each has its own set of maps.

use core::fmt::Debug;
use core::hash::Hash;

/// Protocol numbers that have ports.
pub const TCP: u8 = 6;
pub const UDP: u8 = 17;
pub const SCTP: u8 = 132;
pub const ICMP: u8 = 1;
pub const ICMPV6: u8 = 58;

/// An address family, named by its address. Addresses lie in memory as they do in a packet.
pub trait Family: Copy + Eq + Hash + Ord + Default + Debug + 'static {
    /// 32-bit words, for checksums.
    const WORDS: usize;

    /// Word `index` of the address as it lies in memory. `index` is below [`Self::WORDS`].
    fn word(&self, index: usize) -> u32;

    /// Valid on one link only, a group, or unspecified: such packets belong to the stack, never to a fast path.
    fn is_link_scope(&self) -> bool;

    /// Not led on to another link by any router, this node's own stack included.
    fn stays_on_link(&self) -> bool;

    /// Stays inside one network stack.
    fn is_loopback(&self) -> bool;
}

/// An IPv4 address, bytes in network order.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Debug)]
pub struct V4(pub u32);

/// An IPv6 address, bytes in network order.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Debug)]
pub struct V6(pub [u32; 4]);

impl V4 {
    #[must_use]
    pub const fn new(octets: [u8; 4]) -> Self {
        Self(u32::from_ne_bytes(octets))
    }

    #[must_use]
    pub const fn octets(self) -> [u8; 4] {
        self.0.to_ne_bytes()
    }
}

impl V6 {
    #[must_use]
    pub const fn new(o: [u8; 16]) -> Self {
        Self([
            u32::from_ne_bytes([o[0], o[1], o[2], o[3]]),
            u32::from_ne_bytes([o[4], o[5], o[6], o[7]]),
            u32::from_ne_bytes([o[8], o[9], o[10], o[11]]),
            u32::from_ne_bytes([o[12], o[13], o[14], o[15]]),
        ])
    }

    #[must_use]
    pub const fn octets(self) -> [u8; 16] {
        let [a, b, c, d] = self.0;
        let (a, b, c, d) = (
            a.to_ne_bytes(),
            b.to_ne_bytes(),
            c.to_ne_bytes(),
            d.to_ne_bytes(),
        );
        [
            a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], c[0], c[1], c[2], c[3], d[0], d[1],
            d[2], d[3],
        ]
    }

    /// fe80::/10.
    #[inline(always)]
    #[must_use]
    pub fn is_link_local(&self) -> bool {
        u32::from_be(self.0[0]) & 0xffc0_0000 == 0xfe80_0000
    }

    #[inline(always)]
    #[must_use]
    pub fn is_unspecified(&self) -> bool {
        (self.0[0] | self.0[1] | self.0[2] | self.0[3]) == 0
    }
}

impl Family for V4 {
    #[inline(always)]
    fn stays_on_link(&self) -> bool {
        let address = u32::from_be(self.0);
        // 224/4, the broadcast address, 0/8. Link-local addresses and those of class E are routed like others.
        address & 0xf000_0000 == 0xe000_0000 || address == u32::MAX || address < 0x0100_0000
    }

    #[inline(always)]
    fn is_loopback(&self) -> bool {
        u32::from_be(self.0) >> 24 == 127
    }

    const WORDS: usize = 1;

    #[inline(always)]
    fn word(&self, _index: usize) -> u32 {
        self.0
    }

    #[inline(always)]
    fn is_link_scope(&self) -> bool {
        let address = u32::from_be(self.0);
        // 169.254/16, 224/4 and 240/4 (with the broadcast address), 0/8.
        address & 0xffff_0000 == 0xa9fe_0000 || !(0x0100_0000..0xe000_0000).contains(&address)
    }
}

impl Family for V6 {
    #[inline(always)]
    fn stays_on_link(&self) -> bool {
        self.is_link_scope()
    }

    #[inline(always)]
    fn is_loopback(&self) -> bool {
        (self.0[0] | self.0[1] | self.0[2]) == 0 && u32::from_be(self.0[3]) == 1
    }

    const WORDS: usize = 4;

    #[inline(always)]
    fn word(&self, index: usize) -> u32 {
        self.0[index & 3]
    }

    #[inline(always)]
    fn is_link_scope(&self) -> bool {
        self.is_link_local()
            || u32::from_be(self.0[0]) & 0xff00_0000 == 0xff00_0000
            || self.is_unspecified()
    }
}

/// A port, bytes in network order.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Debug)]
pub struct Port(pub u16);

impl Port {
    #[inline(always)]
    #[must_use]
    pub const fn new(number: u16) -> Self {
        Self(number.to_be())
    }

    #[inline(always)]
    #[must_use]
    pub const fn number(self) -> u16 {
        u16::from_be(self.0)
    }
}
