use proptest::prelude::*;

use super::super::pools;
use super::*;

fn key(name: &str) -> Key {
    Key::new("d", name)
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn allocator(pools: &str) -> Allocator {
    let mut allocator = Allocator::default();
    allocator.set_pools(pools::parse(pools, &[]).unwrap());
    allocator
}

fn request(families: &[bool]) -> Request {
    Request {
        families: families.to_vec(),
        ports: [("TCP".to_owned(), 80)].into(),
        ..Request::default()
    }
}

fn wish(address: &str) -> Request {
    Request {
        wanted: vec![address.to_owned()],
        ..request(&[true])
    }
}

fn reason(outcome: &Outcome) -> &str {
    outcome.problem.as_ref().map_or("", |p| p.reason)
}

const TWO: &str = "- {name: p, ranges: [192.0.2.1-192.0.2.2]}";
const BOTH: &str = "- {name: p, ranges: [192.0.2.1-192.0.2.2, '2001:db8::1']}";

#[test]
fn a_pool_is_given_out_once_and_returns() {
    let mut a = allocator(TWO);
    assert_eq!(
        a.assign(&key("a"), &request(&[true])).addresses,
        [ip("192.0.2.1")]
    );
    assert_eq!(
        a.assign(&key("b"), &request(&[true])).addresses,
        [ip("192.0.2.2")]
    );
    let none = a.assign(&key("c"), &request(&[true]));
    assert_eq!((none.addresses.len(), reason(&none)), (0, "PoolExhausted"));
    assert!(
        none.problem
            .unwrap()
            .message
            .contains("no IPv4 address is free in p")
    );
    assert!(a.release(&key("a")));
    assert_eq!(
        a.assign(&key("c"), &request(&[true])).addresses,
        [ip("192.0.2.1")]
    );
    assert_eq!(
        reason(&Allocator::default().assign(&key("a"), &request(&[true]))),
        "NoPools"
    );
}

#[test]
fn families_as_the_policy_says() {
    let mut a = allocator(BOTH);
    let both = a.assign(&key("a"), &request(&[false, true]));
    assert_eq!(both.addresses, [ip("2001:db8::1"), ip("192.0.2.1")]);
    let preferring = a.assign(&key("b"), &request(&[true, false]));
    assert_eq!(preferring.addresses, [ip("192.0.2.2")]);
    assert_eq!(preferring.note.as_deref(), Some("no IPv6 address is free"));
    let requiring = Request {
        require_all: true,
        ..request(&[true, false])
    };
    let none = a.assign(&key("c"), &requiring);
    assert_eq!((none.addresses.len(), reason(&none)), (0, "PoolExhausted"));
    let single = a.assign(&key("a"), &request(&[true]));
    assert_eq!(
        single.addresses,
        [ip("192.0.2.1")],
        "a family that goes gives its address back"
    );
    assert_eq!(
        a.assign(&key("d"), &request(&[false])).addresses,
        [ip("2001:db8::1")]
    );
}

#[test]
fn wishes_are_met_or_say_why_not() {
    let mut a = allocator(
        "[{name: p, ranges: [192.0.2.1-192.0.2.2]}, {name: q, ranges: [198.51.100.1], autoAssign: false},
          {name: r, ranges: [203.0.113.1], serviceSelector: {matchLabels: {team: a}}}]",
    );
    assert_eq!(
        a.assign(&key("a"), &wish("192.0.2.2")).addresses,
        [ip("192.0.2.2")]
    );
    assert_eq!(
        a.assign(&key("b"), &wish("198.51.100.1")).addresses,
        [ip("198.51.100.1")]
    );
    for (address, why, text) in [
        ("192.0.2.2", "AddressInUse", "belongs to d/a"),
        ("192.0.2.9", "AddressOutsidePools", "in no pool"),
        ("203.0.113.1", "AddressOutsidePools", "serviceSelector"),
        ("2001:db8::1", "InvalidAddress", "family"),
        ("ten", "InvalidAddress", "no address"),
    ] {
        let outcome = a.assign(&key("c"), &wish(address));
        assert_eq!(
            (outcome.addresses.len(), reason(&outcome)),
            (0, why),
            "{address}"
        );
        assert!(outcome.problem.unwrap().message.contains(text), "{address}");
    }
    // A wish that cannot be met leaves what there is.
    let kept = a.assign(&key("a"), &wish("192.0.2.9"));
    assert_eq!(
        (kept.addresses.clone(), reason(&kept)),
        (vec![ip("192.0.2.2")], "AddressOutsidePools")
    );
    assert_eq!(
        a.assign(&key("a"), &wish("192.0.2.1")).addresses,
        [ip("192.0.2.1")]
    );
    assert_eq!(
        a.assign(&key("c"), &request(&[true])).addresses,
        [ip("192.0.2.2")]
    );
}

#[test]
fn what_is_in_use_outlives_its_pool() {
    let mut a = allocator(TWO);
    a.assign(&key("a"), &request(&[true]));
    a.set_pools(pools::parse("- {name: p, ranges: [198.51.100.1]}", &[]).unwrap());
    let kept = a.assign(&key("a"), &request(&[true]));
    assert_eq!(kept.addresses, [ip("192.0.2.1")]);
    assert!(
        kept.note
            .unwrap()
            .contains("192.0.2.1: no longer in a pool")
    );
    assert_eq!(
        a.assign(&key("a"), &wish("192.0.2.1")).problem,
        None,
        "and may be named"
    );
    assert_eq!(
        a.assign(&key("b"), &request(&[true])).addresses,
        [ip("198.51.100.1")]
    );
    a.release(&key("a"));
    assert_eq!(
        reason(&a.assign(&key("c"), &wish("192.0.2.1"))),
        "AddressOutsidePools"
    );
}

#[test]
fn sharers_agree_on_a_key_and_differ_in_ports() {
    let shares = |port: u64| Request {
        sharing: Some("web".to_owned()),
        ports: [("TCP".to_owned(), port)].into(),
        ..request(&[true])
    };
    let mut a = allocator(TWO);
    assert_eq!(
        a.assign(&key("a"), &shares(80)).addresses,
        [ip("192.0.2.1")]
    );
    assert_eq!(
        a.assign(&key("b"), &shares(443)).addresses,
        [ip("192.0.2.1")]
    );
    assert_eq!(
        a.assign(&key("c"), &shares(80)).addresses,
        [ip("192.0.2.2")]
    );
    let local = Request {
        local_backends: Some("{}".into()),
        wanted: vec!["192.0.2.1".into()],
        ..shares(22)
    };
    assert!(
        a.assign(&key("d"), &local)
            .problem
            .unwrap()
            .message
            .contains("Local policy")
    );
    assert_eq!(
        reason(&a.assign(&key("d"), &wish("192.0.2.1"))),
        "AddressInUse"
    );
    // Whoever changes into a conflict is the one who moves.
    a.release(&key("c"));
    assert_eq!(
        a.assign(&key("b"), &shares(80)).addresses,
        [ip("192.0.2.2")]
    );
}

#[test]
fn addresses_that_mean_something_else_are_left_out() {
    let mut a = allocator(TWO);
    let node = Key::new("", "n1");
    a.set_foreign(&node, &[ip("192.0.2.1")].into());
    assert_eq!(
        a.assign(&key("a"), &request(&[true])).addresses,
        [ip("192.0.2.2")]
    );
    assert!(
        a.assign(&key("b"), &wish("192.0.2.1"))
            .problem
            .unwrap()
            .message
            .contains("address of n1")
    );
    a.set_foreign(&node, &BTreeSet::new());
    assert_eq!(
        a.assign(&key("b"), &wish("192.0.2.1")).addresses,
        [ip("192.0.2.1")]
    );
}

/// A naive model: per Service what it has.
type Statuses = BTreeMap<u8, Vec<IpAddr>>;

fn random_request(bits: u16) -> Request {
    let families: &[bool] = match bits & 3 {
        0 => &[true],
        1 => &[false],
        2 => &[true, false],
        _ => &[false, true],
    };
    Request {
        require_all: bits & 4 != 0 && families.len() == 2,
        wanted: if bits & 8 != 0 {
            vec![format!("192.0.2.{}", (bits >> 8) & 7)]
        } else {
            Vec::new()
        },
        sharing: (bits & 16 != 0).then(|| "k".to_owned()),
        ports: [("TCP".to_owned(), u64::from((bits >> 5) & 3))].into(),
        ..request(families)
    }
}

proptest! {
    #[test]
    fn never_given_twice_and_kept_over_restarts(
        history in proptest::collection::vec((0_u8..6, 0_u8..8, any::<u16>()), 1..80)
    ) {
        let lists = [BOTH, TWO, "[]", "- {name: p, ranges: [192.0.2.0/29, '2001:db8::/126']}"];
        let mut a = allocator(BOTH);
        let mut requests: BTreeMap<u8, Request> = BTreeMap::new();
        let mut statuses = Statuses::new();
        for (what, who, bits) in history {
            let name = key(&who.to_string());
            match what {
                0 => {
                    a.release(&name);
                    requests.remove(&who);
                    statuses.remove(&who);
                }
                1 => a.set_pools(pools::parse(lists[usize::from(bits) % lists.len()], &[]).unwrap()),
                2 => {
                    // A restart: only statuses and requests are left.
                    let pools = std::mem::take(&mut a.pools);
                    a = Allocator::default();
                    a.set_pools(pools);
                    for (n, request) in &requests {
                        a.adopt(&key(&n.to_string()), request, &statuses[n]);
                    }
                    for (n, request) in requests.clone() {
                        let kept = a.assign(&key(&n.to_string()), &request).addresses;
                        for address in &statuses[&n] {
                            let named = !request.wanted.is_empty();
                            prop_assert!(kept.contains(address) || named, "{n} lost {address}");
                        }
                        statuses.insert(n, kept);
                    }
                }
                _ => {
                    let request = random_request(bits);
                    let outcome = a.assign(&name, &request);
                    prop_assert_eq!(&a.assign(&name, &request).addresses, &outcome.addresses, "asked twice");
                    if request.require_all && outcome.problem.is_none() {
                        prop_assert_eq!(outcome.addresses.len(), 2);
                    }
                    requests.insert(who, request);
                    statuses.insert(who, outcome.addresses);
                }
            }
            for (n, addresses) in &statuses {
                for (m, others) in statuses.range(n + 1..) {
                    for address in addresses.iter().filter(|x| others.contains(x)) {
                        let (x, y) = (&requests[n], &requests[m]);
                        prop_assert!(x.sharing.is_some() && x.sharing == y.sharing, "{n} and {m} have {address}");
                        prop_assert!(x.ports.is_disjoint(&y.ports), "{n} and {m} share a port of {address}");
                    }
                }
                for address in addresses {
                    prop_assert!(requests[n].families.contains(&address.is_ipv4()));
                }
            }
        }
    }
}
