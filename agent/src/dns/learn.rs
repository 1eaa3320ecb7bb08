//! What an answer says of the addresses of the name that was asked for. [pure]

use std::collections::HashSet;
use std::net::IpAddr;

use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::{Name, RData};
use hickory_proto::serialize::binary::BinDecodable as _;

use super::message::question_end;
use crate::policy::domains::Answer;

/// Aliases are followed so far; resolvers give up earlier.
const MAX_CHAIN: usize = 16;
const HEADER_BYTES: usize = 12;
const TYPES: [[u8; 2]; 2] = [[0, 1], [0, 28]];

/// The name of a question for addresses: lower case, without a closing dot. None for other questions, and for names that
/// no rule can have.
pub(super) fn asked_name(message: &[u8]) -> Option<String> {
    let end = question_end(message)?;
    let (mut labels, rest) = message
        .get(HEADER_BYTES..end)?
        .split_at_checked(end - HEADER_BYTES - 4)?;
    if !TYPES.iter().any(|known| rest.starts_with(known)) {
        return None;
    }
    let mut name = String::new();
    while let Some((length, after)) = labels.split_first()
        && *length > 0
    {
        let (label, next) = after.split_at_checked(usize::from(*length))?;
        if !name.is_empty() {
            name.push('.');
        }
        for byte in label {
            // A dot within a label must not look like one between labels.
            if !byte.is_ascii_alphanumeric() && !matches!(byte, b'-' | b'_') {
                return None;
            }
            name.push(char::from(byte.to_ascii_lowercase()));
        }
        labels = next;
    }
    (!name.is_empty()).then_some(name)
}

/// The addresses that an answer gives to the name that was asked for, over aliases. Records of other names do not count.
pub(super) fn answer(message: &[u8]) -> Option<Answer> {
    let name = asked_name(message)?;
    let message = Message::from_bytes(message).ok()?;
    if message.response_code != ResponseCode::NoError {
        return None;
    }
    let asked = message.queries.first()?.name().to_lowercase();
    let (names, mut ttl_s) = aliases(&message, asked);
    let mut addresses = Vec::new();
    for record in &message.answers {
        let address: IpAddr = match &record.data {
            RData::A(a) => a.0.into(),
            RData::AAAA(aaaa) => aaaa.0.into(),
            _ => continue,
        };
        if names.contains(&record.name.to_lowercase()) {
            addresses.push(address);
            ttl_s = ttl_s.min(record.ttl);
        }
    }
    (!addresses.is_empty()).then_some(Answer {
        name,
        addresses,
        ttl_s,
    })
}

/// A name and those that it is an alias of, in whatever order the records come, and the smallest TTL among them.
fn aliases(message: &Message, asked: Name) -> (HashSet<Name>, u32) {
    let mut names = HashSet::from([asked]);
    let mut ttl_s = u32::MAX;
    for _ in 0..MAX_CHAIN {
        let before = names.len();
        for record in &message.answers {
            if let RData::CNAME(target) = &record.data
                && names.contains(&record.name.to_lowercase())
                && names.insert(target.0.to_lowercase())
            {
                ttl_s = ttl_s.min(record.ttl);
            }
        }
        if names.len() == before {
            break;
        }
    }
    (names, ttl_s)
}

#[cfg(test)]
mod tests {
    use hickory_proto::op::{OpCode, Query};
    use hickory_proto::rr::rdata::{A, AAAA, CNAME};
    use hickory_proto::rr::{Record, RecordType};
    use proptest::prelude::*;

    use super::*;

    fn name(text: &str) -> Name {
        Name::from_ascii(text).unwrap()
    }

    /// A reply to a question for the addresses of a name; `alias>target` is a CNAME, the others are addresses.
    fn reply(asked: Name, records: &[(&str, &str, u32)]) -> Message {
        let mut message = Message::response(7, OpCode::Query);
        message.add_query(Query::query(asked, RecordType::A));
        for (owner, data, ttl) in records {
            let data = match data.parse() {
                Ok(IpAddr::V4(v4)) => RData::A(A(v4)),
                Ok(IpAddr::V6(v6)) => RData::AAAA(AAAA(v6)),
                Err(_) => RData::CNAME(CNAME(name(data))),
            };
            message.add_answer(Record::from_rdata(name(owner), *ttl, data));
        }
        message
    }

    fn learnt(asked: &str, records: &[(&str, &str, u32)]) -> Option<Answer> {
        answer(&reply(name(asked), records).to_vec().unwrap())
    }

    #[test]
    fn the_name_that_was_asked_for_counts_over_aliases_in_any_order() {
        let records = [
            ("cdn.example.net.", "192.0.2.1", 60),
            ("Edge.example.net.", "cdn.EXAMPLE.net.", 20),
            ("www.example.org.", "edge.example.net.", 300),
            ("evil.example.com.", "198.51.100.1", 1),
            ("cdn.example.net.", "2001:db8::1", 90),
        ];
        let found = learnt("WWW.example.org.", &records).unwrap();
        assert_eq!(found.name, "www.example.org");
        let wanted: [IpAddr; 2] = ["192.0.2.1".parse().unwrap(), "2001:db8::1".parse().unwrap()];
        assert_eq!(found.addresses, wanted);
        assert_eq!(found.ttl_s, 20);
    }

    #[test]
    fn what_gives_no_addresses_teaches_nothing() {
        assert_eq!(learnt("www.example.org.", &[]), None);
        let loops = [
            ("www.example.org.", "a.example.", 5),
            ("a.example.", "www.example.org.", 5),
        ];
        assert_eq!(learnt("www.example.org.", &loops), None);
        let found = [("www.example.org.", "192.0.2.1", 5)];
        assert_eq!(learnt("other.example.org.", &found), None);
        let mut failed = reply(name("www.example.org."), &found);
        failed.metadata.response_code = ResponseCode::ServFail;
        assert_eq!(answer(&failed.to_vec().unwrap()), None);
        let mut text = reply(name("www.example.org."), &found);
        text.queries[0].set_query_type(RecordType::TXT);
        assert_eq!(answer(&text.to_vec().unwrap()), None);
    }

    #[test]
    fn a_dot_within_a_label_is_no_dot_between_labels() {
        let odd = Name::from_labels([&b"www.example"[..], b"org"]).unwrap();
        let message = reply(odd, &[]).to_vec().unwrap();
        assert_eq!(asked_name(&message), None);
        let plain = reply(name("_a-1.Example.ORG."), &[]).to_vec().unwrap();
        assert_eq!(asked_name(&plain).as_deref(), Some("_a-1.example.org"));
        assert_eq!(
            asked_name(&reply(Name::root(), &[]).to_vec().unwrap()),
            None
        );
    }

    proptest! {
        #[test]
        fn foreign_bytes_do_no_harm(
            bytes in prop::collection::vec(any::<u8>(), 0..80),
            cut in any::<prop::sample::Index>(),
            flip in any::<u8>(),
        ) {
            let _ = answer(&bytes);
            let found = [("www.example.org.", "192.0.2.1", 5)];
            let mut message = reply(name("www.example.org."), &found).to_vec().unwrap();
            let at = cut.index(message.len());
            message[at] ^= flip;
            let _ = answer(&message);
            let _ = answer(&message[..at]);
        }
    }
}
