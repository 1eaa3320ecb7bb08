//! Learnt answers against a naive list, and which names rules ask for.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

use control_api::v1::{Policy, PolicyRule, PolicyRulePeer, policy_rule_peer};
use proptest::prelude::*;

use crate::compile::policy::domains::{
    ADDRESSES, ADDRESSES_PER_NAME, DomainAnswers, DomainLimit, NAMES, Wanted, patterns,
};

#[derive(Clone, Debug)]
enum Event {
    Learn(usize, Vec<u8>, i64),
    /// At a time, with addresses that are in use.
    Expire(i64, BTreeSet<u8>),
}

const SPELLINGS: [&str; 6] = [
    "a.example",
    "A.Example.",
    "b.example",
    "c.b.example",
    "C.B.EXAMPLE",
    "d.test.",
];

fn address(last: u8) -> IpAddr {
    Ipv4Addr::new(192, 0, 2, last).into()
}

fn event() -> impl Strategy<Value = Event> {
    let last = 0..6_u8;
    prop_oneof![
        3 => (0..SPELLINGS.len(), prop::collection::vec(last.clone(), 0..4), 0..20_i64)
            .prop_map(|(name, addresses, until)| Event::Learn(name, addresses, until)),
        1 => (0..20_i64, prop::collection::btree_set(last, 0..3))
            .prop_map(|(now, used)| Event::Expire(now, used)),
    ]
}

/// One row for each name and address, with every promise ever made.
#[derive(Default)]
struct Naive(Vec<(String, IpAddr, i64)>);

impl Naive {
    fn rows(&self) -> BTreeSet<(String, IpAddr, i64)> {
        let latest = |name: &str, address: IpAddr| {
            let same = self.0.iter();
            same.filter(|row| row.0 == name && row.1 == address)
                .map(|row| row.2)
                .max()
        };
        let rows = self.0.iter();
        rows.filter_map(|(name, address, _)| {
            Some((name.clone(), *address, latest(name, *address)?))
        })
        .collect()
    }
}

proptest! {
    #[test]
    fn answers_are_a_list_of_promises(events in prop::collection::vec(event(), 0..40)) {
        let mut answers = DomainAnswers::default();
        let mut naive = Naive::default();
        for event in events {
            let before = naive.rows();
            match event {
                Event::Learn(name, addresses, until) => {
                    let addresses: Vec<IpAddr> = addresses.into_iter().map(address).collect();
                    let lesson = answers.learn(SPELLINGS[name], &addresses, until);
                    let plain = SPELLINGS[name].to_lowercase();
                    let plain = plain.trim_end_matches('.').to_owned();
                    naive.0.extend(addresses.iter().map(|one| (plain.clone(), *one, until)));
                    let after = naive.rows();
                    let pairs = |rows: &BTreeSet<(String, IpAddr, i64)>| -> BTreeSet<_> {
                        rows.iter().map(|row| (row.0.clone(), row.1)).collect()
                    };
                    let new: BTreeSet<_> = lesson.new.iter().map(|one| (plain.clone(), *one)).collect();
                    prop_assert_eq!(&new, &(&pairs(&after) - &pairs(&before)));
                    prop_assert_eq!(new.is_empty() && !lesson.extended, before == after);
                    prop_assert_eq!((lesson.refused, lesson.limit), (0, None));
                }
                Event::Expire(now, used) => {
                    let used: BTreeSet<IpAddr> = used.into_iter().map(address).collect();
                    let latest = naive.rows();
                    prop_assert_eq!(answers.has_expired(now), latest.iter().any(|row| row.2 <= now));
                    // Only `a.example` cares for use.
                    let stays = |name: &str, one: IpAddr| name == "a.example" && used.contains(&one);
                    let went = answers.expire(now, stays);
                    naive.0 = latest.into_iter().filter(|row| row.2 > now || stays(&row.0, row.1)).collect();
                    prop_assert_eq!(went, naive.rows() != before);
                }
            }
            let rows = naive.rows();
            let found: BTreeSet<_> = answers
                .iter()
                .flat_map(|(name, all)| all.map(move |(one, until)| (name.to_owned(), one, until)))
                .collect();
            prop_assert_eq!(answers.address_count(), rows.len());
            let names: BTreeSet<&String> = rows.iter().map(|row| &row.0).collect();
            prop_assert_eq!(answers.name_count(), names.len());
            prop_assert_eq!(&found, &rows);
        }
    }

    /// What is learnt for a name is what some rule's peer set matches.
    #[test]
    fn wanted_names_are_those_with_a_pattern(
        name in "[ab]{1,2}(\\.[ab]{1,2}){0,3}",
        asked in prop::collection::vec("(\\*\\.)?[ab]{1,2}(\\.[ab]{1,2}){1,2}", 0..4),
    ) {
        let wanted = Wanted::of([&policy(&asked)]);
        let of_sets = asked.iter().any(|pattern| patterns(&name).contains(pattern));
        let labels: Vec<&str> = name.split('.').collect();
        let naive = asked.iter().any(|pattern| match pattern.strip_prefix("*.") {
            Some(suffix) => {
                let suffix: Vec<&str> = suffix.split('.').collect();
                labels.len() > suffix.len() && labels.ends_with(&suffix)
            }
            None => *pattern == name,
        });
        prop_assert_eq!(wanted.asks_for(&name), naive);
        prop_assert_eq!(of_sets, naive);
    }
}

fn policy(names: &[String]) -> Policy {
    let peer = |name: &String| PolicyRulePeer {
        kind: Some(policy_rule_peer::Kind::DomainName(name.clone())),
    };
    let rule = PolicyRule {
        peers: names.iter().map(peer).collect(),
        ..PolicyRule::default()
    };
    Policy {
        egress: vec![rule],
        ..Policy::default()
    }
}

#[test]
fn wanted_names_know_neither_case_nor_closing_dots() {
    let wanted = Wanted::of([&policy(&["*.Example.ORG.".into(), "One.Test".into()])]);
    for (name, asked) in [
        ("www.example.org", true),
        ("a.b.example.org", true),
        ("example.org", false),
        (".example.org", false),
        ("badexample.org", false),
        ("one.test", true),
        ("two.one.test", false),
        ("", false),
    ] {
        assert_eq!(wanted.asks_for(name), asked, "{name}");
    }
    assert!(Wanted::of([&Policy::default()]).is_empty());
}

#[test]
fn what_does_not_fit_is_refused_and_the_rest_stays() {
    let many = |count: usize, first: u32| -> Vec<IpAddr> {
        let all = (0..u32::try_from(count).unwrap()).map(|one| Ipv4Addr::from(first + one));
        all.map(IpAddr::from).collect()
    };
    let mut answers = DomainAnswers::default();
    let lesson = answers.learn("a.example", &many(ADDRESSES_PER_NAME + 3, 0), 5);
    assert_eq!(lesson.new.len(), ADDRESSES_PER_NAME);
    assert_eq!(
        (lesson.refused, lesson.limit),
        (3, Some(DomainLimit::AddressesPerName))
    );
    let others = ADDRESSES / ADDRESSES_PER_NAME;
    for name in 1..others {
        answers.learn(&format!("n{name}.example"), &many(ADDRESSES_PER_NAME, 0), 5);
    }
    assert_eq!(answers.address_count(), ADDRESSES);
    let lesson = answers.learn("late.example", &many(1, 0), 5);
    assert_eq!(lesson.limit, Some(DomainLimit::Addresses));
    assert_eq!(answers.addresses_of("late.example").count(), 0);
    assert_eq!(
        answers.name_count(),
        others,
        "a name without addresses is none"
    );
    // What is known is believed for longer, however full it is.
    assert!(answers.learn("a.example", &many(1, 0), 9).extended);
    assert!(answers.expire(5, |_, _| false));
    assert_eq!((answers.name_count(), answers.address_count()), (1, 1));

    for name in 1..NAMES {
        answers.learn(&format!("n{name}.example"), &many(1, 0), 5);
    }
    let lesson = answers.learn("late.example", &many(1, 0), 5);
    assert_eq!(lesson.limit, Some(DomainLimit::Names));
    assert_eq!(answers.learn("a.example", &many(2, 0), 5).new.len(), 1);
}
