//! Address ranges of both families, and the ranges of ports that a longest prefix match can hold.

use std::fmt;
use std::net::IpAddr;

use ipnetwork::IpNetwork;

/// Bits of a port's number.
const PORT_BITS: u8 = 16;

/// An address range. In order, a range comes before those that it holds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Prefix {
    v6: bool,
    /// From the highest bit down, without those that do not count.
    bits: u128,
    /// How many bits count: of an IPv4 address 32 at most.
    pub len: u8,
}

impl Prefix {
    /// The range of one address.
    #[must_use]
    pub fn host(address: IpAddr) -> Self {
        let len = if address.is_ipv4() { 32 } else { 128 };
        Self::new(address, len)
    }

    /// The range of `len` bits around an address.
    #[must_use]
    pub fn new(address: IpAddr, len: u8) -> Self {
        let (v6, bits, most) = match address {
            IpAddr::V4(v4) => (false, u128::from(v4.to_bits()) << 96, 32),
            IpAddr::V6(v6) => (true, v6.to_bits(), 128),
        };
        let len = len.min(most);
        Self {
            v6,
            bits: bits & mask(len),
            len,
        }
    }

    /// A range in CIDR notation; bits beyond the mask do not count.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let network: IpNetwork = text.parse().ok()?;
        Some(Self::new(network.ip(), network.prefix()))
    }

    #[must_use]
    pub fn is_ipv6(self) -> bool {
        self.v6
    }

    /// True for the range of one address.
    #[must_use]
    pub fn is_host(self) -> bool {
        self.len == if self.v6 { 128 } else { 32 }
    }

    /// The first address of the range.
    #[must_use]
    pub fn address(self) -> IpAddr {
        if self.v6 {
            IpAddr::V6(self.bits.into())
        } else {
            let [a, b, c, d, ..] = self.bits.to_be_bytes();
            IpAddr::from([a, b, c, d])
        }
    }

    /// The range of `len` bits that holds this one, or starts where it starts.
    #[must_use]
    pub fn cut(self, len: u8) -> Self {
        Self {
            v6: self.v6,
            bits: self.bits & mask(len),
            len,
        }
    }

    /// True when every address of `inner` is in this range.
    #[must_use]
    pub fn holds(self, inner: Self) -> bool {
        self.v6 == inner.v6 && self.len <= inner.len && inner.bits & mask(self.len) == self.bits
    }
}

fn mask(len: u8) -> u128 {
    match len {
        0 => 0,
        len => u128::MAX << (128 - u32::from(len.min(128))),
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address(), self.len)
    }
}

impl fmt::Debug for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// Protocols and ports that share their first bits. In order, a range comes before those that it holds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct PortPrefix {
    pub protocol: u8,
    /// Host order, without the bits that do not count.
    pub port: u16,
    /// How many bits count: 0 (any protocol), 8 (any port of one), up to 24.
    pub bits: u8,
}

impl PortPrefix {
    /// Whatever the protocol.
    pub const EVERYTHING: Self = Self {
        protocol: 0,
        port: 0,
        bits: 0,
    };

    /// All bits of a protocol and a port.
    pub const ONE_PORT: u8 = 24;

    /// Every port of a protocol.
    #[must_use]
    pub fn protocol(protocol: u8) -> Self {
        Self {
            protocol,
            port: 0,
            bits: 8,
        }
    }

    /// True when this range has everything that `inner` has.
    #[must_use]
    pub fn holds(self, inner: Self) -> bool {
        self.bits <= inner.bits
            && (self.bits == 0
                || (self.protocol == inner.protocol
                    && inner.port & port_mask(self.bits - 8) == self.port))
    }

    /// The fewest ranges that have the ports from `first` to `last` and no other.
    #[must_use]
    pub fn of_range(protocol: u8, first: u16, last: u16) -> Vec<Self> {
        if (first, last) == (0, u16::MAX) {
            return vec![Self::protocol(protocol)];
        }
        let mut ranges = Vec::new();
        let (mut at, last) = (u32::from(first), u32::from(last));
        while at <= last {
            // As large as the start allows, then as the end does.
            let mut size = at.trailing_zeros().min(u32::from(PORT_BITS));
            while at + (1 << size) - 1 > last {
                size -= 1;
            }
            ranges.push(Self {
                protocol,
                port: u16::try_from(at).unwrap_or(u16::MAX),
                bits: 8 + PORT_BITS - u8::try_from(size).unwrap_or(PORT_BITS),
            });
            at += 1 << size;
        }
        ranges
    }
}

fn port_mask(bits: u8) -> u16 {
    match bits {
        0 => 0,
        bits => u16::MAX << (PORT_BITS - bits.min(PORT_BITS)),
    }
}
