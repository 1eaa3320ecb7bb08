//! Blocks of addresses, names of domains and of ports, as policies write them.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A block of addresses without host bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cidr {
    address: IpAddr,
    prefix: u8,
}

impl Cidr {
    /// Reads what API servers take: host bits, octets with leading zeros (decimal), and IPv4 as a mapped IPv6 block.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (address, prefix) = text.split_once('/')?;
        if prefix.is_empty() || !prefix.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        let prefix: u8 = prefix.parse().ok()?;
        let address = match address.parse::<IpAddr>() {
            Ok(address) => address,
            Err(_) => IpAddr::V4(loose_v4(address)?),
        };
        match address {
            IpAddr::V4(v4) if prefix <= 32 => Some(Self::v4(v4, prefix)),
            IpAddr::V6(v6) if prefix <= 128 => match v6.to_ipv4_mapped() {
                Some(v4) if prefix >= 96 => Some(Self::v4(v4, prefix - 96)),
                _ => {
                    let mask = u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
                    let address = Ipv6Addr::from_bits(v6.to_bits() & mask).into();
                    Some(Self { address, prefix })
                }
            },
            _ => None,
        }
    }

    fn v4(address: Ipv4Addr, prefix: u8) -> Self {
        let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
        let address = Ipv4Addr::from_bits(address.to_bits() & mask).into();
        Self { address, prefix }
    }

    /// Whether `inner` is a part of this block, and not all of it.
    pub(crate) fn strictly_holds(&self, inner: &Self) -> bool {
        let wider = Self::parse(&format!("{}/{}", inner.address, self.prefix));
        inner.prefix > self.prefix && wider.as_ref() == Some(self)
    }
}

fn loose_v4(text: &str) -> Option<Ipv4Addr> {
    let mut octets = [0; 4];
    let mut parts = text.split('.');
    for octet in &mut octets {
        let part = parts.next()?;
        if part.is_empty() || !part.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        *octet = part.parse().ok()?;
    }
    parts.next().is_none().then(|| octets.into())
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

/// The name of a container's port: lower case letters, digits and single hyphens within, at least one letter (RFC 6335).
pub(crate) fn port_name(name: &str) -> Option<String> {
    let characters = name
        .bytes()
        .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    let valid = characters
        && name.len() <= 15
        && name.bytes().any(|byte| byte.is_ascii_lowercase())
        && !name.contains("--")
        && !name.starts_with('-')
        && !name.ends_with('-');
    valid.then(|| name.to_owned())
}

/// A domain name or `*.` and a suffix, in lower case and without the final dot.
pub(crate) fn domain_name(name: &str) -> Option<String> {
    let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    let suffix = name.strip_prefix("*.").unwrap_or(&name);
    let label = |label: &str| {
        let edges = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
        let bytes = label.as_bytes();
        edges(bytes.first())
            && edges(bytes.last())
            && bytes
                .iter()
                .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
    };
    (suffix.contains('.') && suffix.split('.').all(label)).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn canonical(text: &str) -> Option<String> {
        Cidr::parse(text).map(|cidr| cidr.to_string())
    }

    #[test]
    fn blocks_lose_their_host_bits_and_odd_spellings() {
        for (text, wanted) in [
            ("10.1.2.3/8", "10.0.0.0/8"),
            ("010.1.2.3/32", "10.1.2.3/32"),
            ("0.0.0.0/0", "0.0.0.0/0"),
            ("FD00:0::1/64", "fd00::/64"),
            ("::/0", "::/0"),
            ("::ffff:10.1.0.0/112", "10.1.0.0/16"),
        ] {
            assert_eq!(canonical(text).as_deref(), Some(wanted), "{text}");
        }
        for text in [
            "10.0.0.1",
            "10.0.0.0/33",
            "::/129",
            "10.0.0/8",
            "/8",
            "10.0.0.0/",
            "10.0.0.0/+8",
            "x/8",
        ] {
            assert_eq!(canonical(text), None, "{text}");
        }
    }

    #[test]
    fn a_part_is_smaller_and_of_the_same_family() {
        let outer = Cidr::parse("10.0.0.0/16").unwrap();
        for (inner, held) in [
            ("10.0.1.0/24", true),
            ("10.0.0.0/16", false),
            ("10.1.0.0/24", false),
            ("10.0.0.0/8", false),
            ("fd00::/64", false),
        ] {
            assert_eq!(
                outer.strictly_holds(&Cidr::parse(inner).unwrap()),
                held,
                "{inner}"
            );
        }
        let all = Cidr::parse("::/0").unwrap();
        assert!(all.strictly_holds(&Cidr::parse("fd00::/8").unwrap()));
        assert!(!all.strictly_holds(&Cidr::parse("10.0.0.0/8").unwrap()));
    }

    #[test]
    fn names_of_domains_and_ports() {
        assert_eq!(
            domain_name("*.Example.COM.").as_deref(),
            Some("*.example.com")
        );
        for bad in ["com", "*.com", "*", "a..b", "a.*.b", "-a.b", ""] {
            assert_eq!(domain_name(bad), None, "{bad}");
        }
        assert_eq!(
            port_name("a23456789012345").as_deref(),
            Some("a23456789012345")
        );
        for bad in ["HTTP", "80", "a--b", "-a", "a23456789012345x", ""] {
            assert_eq!(port_name(bad), None, "{bad}");
        }
    }
}
