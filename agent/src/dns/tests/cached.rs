//! Answers that are kept: their time, their bounds, and what is given when it is over.

use std::time::{Duration, Instant};

use hickory_proto::op::{Message, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::{A, CNAME, SOA};
use hickory_proto::rr::{Name, RData, Record, RecordType};
use proptest::prelude::*;

use crate::dns::cache::{Cache, Key};
use crate::dns::corefile::{Corefile, Mounted};

fn cache(options: &str) -> Cache {
    let text = format!(". {{\ncache {options}\n}}");
    let corefile = Corefile::parse(&text, "F", &Mounted::default()).unwrap();
    Cache::new(corefile.blocks[0].cache.clone().unwrap())
}

fn key(name: &str) -> Key {
    Key {
        name: name.into(),
        record_type: 1,
        edns: false,
        dnssec: false,
        checking_disabled: false,
    }
}

fn www() -> Name {
    Name::from_ascii("www.example.test.").unwrap()
}

fn answer(rcode: ResponseCode, ttl: u32, soa: Option<(u32, u32)>) -> Vec<u8> {
    let mut message = Message::response(1, OpCode::Query);
    message.metadata.response_code = rcode;
    message.add_query(Query::query(www(), RecordType::A));
    if rcode == ResponseCode::NoError && soa.is_none() {
        let target = Name::from_ascii("a.example.test.").unwrap();
        let cname = RData::CNAME(CNAME(target.clone()));
        message.add_answer(Record::from_rdata(www(), ttl, cname));
        let address = RData::A(A::new(192, 0, 2, 1));
        message.add_answer(Record::from_rdata(target, ttl + 5, address));
    }
    if let Some((ttl, minimum)) = soa {
        let soa = SOA::new(www(), www(), 1, 2, 3, 4, minimum);
        message.add_authority(Record::from_rdata(www(), ttl, RData::SOA(soa)));
    }
    message.to_vec().unwrap()
}

fn good(ttl: u32) -> Vec<u8> {
    answer(ResponseCode::NoError, ttl, None)
}

fn ttls(message: &[u8]) -> Vec<u32> {
    let message = Message::from_vec(message).unwrap();
    message.answers.iter().map(|r| r.ttl).collect()
}

#[test]
fn answers_age_and_end() {
    let mut cache = cache("{\n success 4096 3600 0\n denial 4096 1800 0\n servfail 0\n}");
    let now = Instant::now();
    let after = |s| now + Duration::from_secs(s);
    cache.put(key("a."), &www(), &mut good(20), now);
    let hit = cache.get(&key("a."), after(3)).unwrap();
    assert_eq!(ttls(&hit.message), [17, 22]);
    assert!(!hit.stale && !hit.refresh);
    assert!(cache.get(&key("a."), after(20)).is_none());
    assert_eq!(cache.len(), (0, 0));

    // RFC 2308: the smaller of the SOA's TTL and its minimum.
    let mut missing = answer(ResponseCode::NXDomain, 0, Some((60, 2)));
    cache.put(key("n."), &www(), &mut missing, now);
    assert!(cache.get(&key("n."), after(1)).is_some());
    assert!(cache.get(&key("n."), after(2)).is_none());

    let mut cut = good(20);
    cut[2] |= 0x02;
    for mut unfit in [
        answer(ResponseCode::ServFail, 20, None),
        answer(ResponseCode::Refused, 20, None),
        answer(ResponseCode::NXDomain, 0, None),
        good(0),
        cut,
    ] {
        cache.put(key("u."), &www(), &mut unfit, now);
        assert!(cache.get(&key("u."), now).is_none());
    }
    for i in 0..10_000 {
        cache.put(key(&format!("{i}.")), &www(), &mut good(20 + i % 50), now);
    }
    let (all, successes) = cache.len();
    assert!(all <= 4096 && all > 2000 && all == successes, "{all}");
}

#[test]
fn times_have_bounds() {
    let mut cache = cache("30 {\n denial 10 8 6\n}");
    let now = Instant::now();
    let after = |s| now + Duration::from_secs(s);
    let mut long = good(300);
    cache.put(key("a."), &www(), &mut long, now);
    assert_eq!(ttls(&long), [30, 30], "the first client sees the bound too");
    assert_eq!(
        ttls(&cache.get(&key("a."), after(10)).unwrap().message),
        [20, 20]
    );
    assert!(cache.get(&key("a."), after(30)).is_none());
    cache.put(key("b."), &www(), &mut good(0), now);
    assert!(cache.get(&key("b."), after(4)).is_some() && cache.get(&key("b."), after(5)).is_none());
    for (minimum, end) in [(1, 6), (100, 8)] {
        let mut missing = answer(ResponseCode::NXDomain, 0, Some((3600, minimum)));
        cache.put(key("n."), &www(), &mut missing, now);
        assert!(cache.get(&key("n."), after(end - 1)).is_some());
        assert!(cache.get(&key("n."), after(end)).is_none());
    }
    // SERVFAIL is kept for five seconds unless told otherwise, and answers of other zones as long as they say.
    let mut failed = answer(ResponseCode::ServFail, 0, None);
    cache.put(key("f."), &www(), &mut failed, now);
    assert!(cache.get(&key("f."), after(4)).is_some() && cache.get(&key("f."), after(5)).is_none());
}

#[test]
fn zones_can_be_left_out() {
    let mut cache = cache("30 {\n disable success example.test\n}");
    let now = Instant::now();
    cache.put(key("a."), &www(), &mut good(20), now);
    assert!(cache.get(&key("a."), now).is_none());
    let mut missing = answer(ResponseCode::NXDomain, 0, Some((20, 20)));
    cache.put(key("a."), &www(), &mut missing, now);
    assert!(cache.get(&key("a."), now).is_some());
}

#[test]
fn stale_answers_are_given_for_a_time() {
    let mut cache = cache("{\n serve_stale 60s\n}");
    let now = Instant::now();
    let after = |s| now + Duration::from_secs(s);
    cache.put(key("a."), &www(), &mut good(20), now);
    let hit = cache.get(&key("a."), after(21)).unwrap();
    assert!(hit.stale && hit.refresh);
    assert_eq!(ttls(&hit.message), [30, 30]);
    let again = cache.get(&key("a."), after(22)).unwrap();
    assert!(
        again.stale && !again.refresh,
        "one question upstream is enough"
    );
    cache.refresh_failed(&key("a."));
    assert!(cache.get(&key("a."), after(23)).unwrap().refresh);
    assert!(cache.get(&key("a."), after(80)).is_none());
}

#[test]
fn popular_answers_are_asked_for_before_their_end() {
    let mut cache = cache("{\n prefetch 3 10s 20%\n}");
    let now = Instant::now();
    let after = |s| now + Duration::from_secs(s);
    cache.put(key("a."), &www(), &mut good(100), now);
    let mut refresh = |s| cache.get(&key("a."), after(s)).unwrap().refresh;
    assert_eq!([75, 85, 86].map(&mut refresh), [false, false, true]);
    assert!(!refresh(87));
    // A pause makes it unpopular.
    let mut quiet = self::cache("{\n prefetch 3 10s 20%\n}");
    quiet.put(key("a."), &www(), &mut good(100), now);
    let mut refresh = |s| quiet.get(&key("a."), after(s)).unwrap().refresh;
    assert_eq!([60, 80, 91].map(&mut refresh), [false, false, false]);
}

proptest! {
    #[test]
    fn no_upstream_answer_panics_the_cache(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        noise in prop::collection::vec(any::<u8>(), 0..100),
    ) {
        let mut bent = answer(ResponseCode::NoError, 9, None);
        for (at, value) in changes {
            let at = at.index(bent.len());
            bent[at] = value;
        }
        let mut cache = cache("{\n serve_stale\n prefetch 1\n}");
        let now = Instant::now();
        for mut message in [bent, noise] {
            cache.put(key("x."), &www(), &mut message, now);
            cache.get(&key("x."), now);
        }
    }
}
