//! Which addresses pods of this node may have: the node's own ranges, unless they overlap what others have. Pure.

use std::net::IpAddr;

use control_api::desired::DesiredState;
use ipnetwork::IpNetwork;

/// Why no pod can be given an address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoRanges {
    #[error("this node has no pod range yet: the control plane has not told one; try again")]
    Unknown,
    /// Traffic to such an address would go to one of the two and be missed by the other.
    #[error(
        "pod range {range} of this node overlaps {what} {other}; give the node another pod range"
    )]
    Overlap {
        range: IpNetwork,
        /// What it is, and whose.
        what: String,
        other: String,
    },
}

/// The pod ranges of a node, as the control plane has told them.
///
/// # Errors
/// [`NoRanges`]: none yet, or one that overlaps a service range, a node's address or another node's pod range.
pub fn of_node(state: &DesiredState, name: &str) -> Result<Vec<IpNetwork>, NoRanges> {
    let node = state.nodes.get(name).ok_or(NoRanges::Unknown)?;
    let ranges: Vec<IpNetwork> = parse(&node.pod_cidrs).collect();
    if ranges.is_empty() {
        return Err(NoRanges::Unknown);
    }
    let collision = |what: &dyn Fn() -> String, other: IpNetwork| {
        let range = ranges.iter().find(|range| overlap(**range, other))?;
        let single = matches!((other, other.prefix()), (IpNetwork::V4(_), 32) | (_, 128));
        Some(NoRanges::Overlap {
            range: *range,
            what: what(),
            other: if single {
                other.ip().to_string()
            } else {
                other.to_string()
            },
        })
    };
    let services = parse(&state.config.service_cidrs);
    let found = services
        .filter_map(|other| collision(&|| "the service range".into(), other))
        .next();
    let found = found.or_else(|| {
        state.nodes.values().find_map(|peer| {
            let addresses = peer.internal_ips.iter();
            let addresses = addresses.filter_map(|ip| ip.parse::<IpAddr>().ok());
            let address = addresses
                .filter_map(|ip| {
                    collision(&|| format!("the address of node {}", peer.name), ip.into())
                })
                .next();
            address.or_else(|| {
                let ranges = (peer.name != name).then(|| parse(&peer.pod_cidrs));
                let mut ranges = ranges.into_iter().flatten();
                ranges.find_map(|other| {
                    collision(&|| format!("the pod range of node {}", peer.name), other)
                })
            })
        })
    });
    found.map_or(Ok(ranges.clone()), Err)
}

fn parse(texts: &[String]) -> impl Iterator<Item = IpNetwork> + '_ {
    texts.iter().filter_map(|text| text.parse().ok())
}

/// Of two networks that overlap, one contains the other's address.
fn overlap(a: IpNetwork, b: IpNetwork) -> bool {
    a.contains(b.network()) || b.contains(a.network())
}

#[cfg(test)]
mod tests {
    use control_api::v1::Node;

    use super::*;

    fn node(name: &str, ip: &str, cidrs: &[&str]) -> (String, Node) {
        let node = Node {
            name: name.into(),
            internal_ips: vec![ip.into()],
            pod_cidrs: cidrs.iter().map(|c| (*c).into()).collect(),
            ..Node::default()
        };
        (name.into(), node)
    }

    fn state(ours: &[&str], peer: &[&str]) -> DesiredState {
        let mut state = DesiredState::default();
        state.config.service_cidrs = vec!["10.96.0.0/16".into(), "fd00:96::/112".into()];
        state.nodes = [
            node("n1", "192.0.2.11", ours),
            node("n2", "2001:db8::12", peer),
        ]
        .into();
        state
    }

    #[test]
    fn ranges_that_nobody_else_has_are_used() {
        let state = state(
            &["10.244.1.0/24", "10.244.9.0/24", "fd00:1::/64"],
            &["10.244.2.0/24"],
        );
        assert_eq!(of_node(&state, "n1").unwrap().len(), 3);
        assert_eq!(of_node(&state, "n3"), Err(NoRanges::Unknown));
        let empty = self::state(&[], &[]);
        assert_eq!(of_node(&empty, "n1"), Err(NoRanges::Unknown));
    }

    #[test]
    fn overlaps_are_named() {
        let cases = [
            (["10.96.3.0/24"], "overlaps the service range 10.96.0.0/16"),
            (["10.0.0.0/8"], "overlaps the service range 10.96.0.0/16"),
            (
                ["192.0.2.0/24"],
                "overlaps the address of node n1 192.0.2.11;",
            ),
            (
                ["2001:db8::/64"],
                "overlaps the address of node n2 2001:db8::12;",
            ),
            (
                ["10.244.2.128/25"],
                "overlaps the pod range of node n2 10.244.2.0/24",
            ),
        ];
        for (ours, said) in cases {
            let error = of_node(&state(&ours, &["10.244.2.0/24"]), "n1").unwrap_err();
            assert!(error.to_string().contains(said), "{error}");
        }
    }
}
