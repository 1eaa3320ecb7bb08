//! Zones and ports in front of a block's braces. [pure]

use std::net::IpAddr;

use hickory_proto::rr::Name;
use ipnetwork::IpNetwork;

use super::config::Key;

const DNS_PORT: u16 = 53;

/// example.org, .:53, dns://example.org:1053, 10.0.0.0/8, :1053.
pub(super) fn parse(text: &str) -> Result<Vec<Key>, String> {
    let rest = match text.split_once("://") {
        Some(("dns", rest)) => rest,
        Some((scheme, _)) => {
            return Err(format!(
                "{text}: serving {scheme} is not done here, only dns"
            ));
        }
        None => text,
    };
    // A port follows the last colon, and colons of an IPv6 network come before its /.
    let port_at = match rest.rfind('/') {
        Some(slash) => rest[slash..].find(':').map(|at| slash + at),
        None => rest.rfind(':'),
    };
    let (zone, port) = match port_at {
        Some(at) => {
            let port = rest[at + 1..].parse();
            let port = port.map_err(|_| format!("{text}: {:?} is no port", &rest[at + 1..]))?;
            (&rest[..at], port)
        }
        None => (rest, DNS_PORT),
    };
    let zone = if zone.is_empty() { "." } else { zone };
    Ok(zones(zone)?
        .into_iter()
        .map(|zone| Key { zone, port })
        .collect())
}

/// A name, or the reverse zones of a network: more than one where its prefix is none of whole labels.
pub(super) fn zones(text: &str) -> Result<Vec<Name>, String> {
    if text.contains('/') {
        let network: IpNetwork = text.parse().map_err(|_| format!("{text} is no network"))?;
        return Ok(reverse_zones(network));
    }
    let mut name = Name::from_ascii(text).map_err(|why| format!("{text} is no zone: {why}"))?;
    name.set_fqdn(true);
    Ok(vec![name.to_lowercase()])
}

fn reverse_zones(network: IpNetwork) -> Vec<Name> {
    let (bits_per_label, all_bits) = if network.is_ipv4() { (8, 32) } else { (4, 128) };
    let prefix = u32::from(network.prefix());
    let whole = prefix.div_ceil(bits_per_label) * bits_per_label;
    let labels = usize::try_from(whole / bits_per_label).unwrap_or_default() + 2;
    let zone = |number: u32| {
        let address = match network.network() {
            IpAddr::V4(first) => {
                let step = number.checked_shl(all_bits - whole).unwrap_or(0);
                IpAddr::from((u32::from(first) | step).to_be_bytes())
            }
            IpAddr::V6(first) => {
                let step = u128::from(number)
                    .checked_shl(all_bits - whole)
                    .unwrap_or(0);
                IpAddr::from((u128::from(first) | step).to_be_bytes())
            }
        };
        Name::from(address).trim_to(labels)
    };
    (0..1 << (whole - prefix)).map(zone).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_ports() {
        let shown = |text: &str| -> Vec<String> {
            let keys = parse(text).unwrap();
            keys.iter()
                .map(|k| format!("{} {}", k.zone, k.port))
                .collect()
        };
        assert_eq!(shown("."), [". 53"]);
        assert_eq!(shown(".:53"), [". 53"]);
        assert_eq!(shown(":1053"), [". 1053"]);
        assert_eq!(shown("dns://Example.ORG:1053"), ["example.org. 1053"]);
        assert_eq!(shown("10.96.0.0/16"), ["96.10.in-addr.arpa. 53"]);
        assert_eq!(
            shown("10.96.0.0/15:5353"),
            ["96.10.in-addr.arpa. 5353", "97.10.in-addr.arpa. 5353"]
        );
        assert_eq!(shown("0.0.0.0/0"), ["in-addr.arpa. 53"]);
        assert_eq!(shown("::/0"), ["ip6.arpa. 53"]);
        assert_eq!(shown("2001:db8::/31").len(), 2);
        assert_eq!(shown("2001:db8::/32"), ["8.b.d.0.1.0.0.2.ip6.arpa. 53"]);
        assert_eq!(shown("192.0.2.128/25").len(), 128);
        for bad in [
            "tls://.",
            "a..b",
            ".:x",
            ".:70000",
            "10.0.0.0/33",
            "https://x",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
