//! Lines about answers, in CoreDNS's formats. [pure]

use std::net::SocketAddr;
use std::time::Duration;

use hickory_proto::op::{Edns, Message, ResponseCode};

use super::corefile::{LogClass, LogRule};
use super::message::Transport;
use super::metrics::rcode_name;

const COMMON: &str = "{remote}:{port} - {>id} \"{type} {class} {name} {proto} {size} {>do} {>bufsize}\" {rcode} {>rflags} {rsize} {duration}";
const COMBINED: &str = "{remote}:{port} - {>id} \"{type} {class} {name} {proto} {size} {>do} {>bufsize}\" {rcode} {>rflags} {rsize} {duration} \"{>opcode}\"";
/// What a place holds that has nothing to say.
const EMPTY: &str = "-";

/// One question and its answer, as they were on the wire.
#[derive(Clone, Copy, Debug)]
pub(super) struct Exchange<'a> {
    pub(super) client: SocketAddr,
    pub(super) transport: Transport,
    pub(super) query: &'a [u8],
    pub(super) reply: &'a [u8],
    pub(super) took: Duration,
}

/// The lines that rules want of an exchange.
pub(super) fn lines(rules: &[LogRule], exchange: &Exchange<'_>) -> Vec<String> {
    let (Ok(query), Ok(reply)) = (
        Message::from_vec(exchange.query),
        Message::from_vec(exchange.reply),
    ) else {
        return Vec::new();
    };
    let Some(question) = query.queries.first() else {
        return Vec::new();
    };
    let wants = |rule: &&LogRule| {
        let zones = &rule.zones;
        let named = zones.is_empty() || zones.iter().any(|zone| zone.zone_of(question.name()));
        named && rule.classes.iter().any(|class| is_of(*class, &reply))
    };
    let rules = rules.iter().filter(wants);
    rules
        .map(|rule| fill(&rule.format, exchange, &query, &reply))
        .collect()
}

fn is_of(class: LogClass, reply: &Message) -> bool {
    let code = reply.metadata.response_code;
    let denial = code == ResponseCode::NXDomain
        || (code == ResponseCode::NoError && reply.answers.is_empty());
    match class {
        LogClass::All => true,
        LogClass::Denial => denial,
        LogClass::Success => code == ResponseCode::NoError && !denial,
        LogClass::Error => !denial && code != ResponseCode::NoError,
    }
}

fn fill(format: &str, exchange: &Exchange<'_>, query: &Message, reply: &Message) -> String {
    let format = format
        .replace("{common}", COMMON)
        .replace("{combined}", COMBINED);
    let mut line = String::with_capacity(2 * format.len());
    let mut rest = format.as_str();
    while let Some((before, from)) = rest.split_once('{') {
        line.push_str(before);
        match from.split_once('}') {
            Some((place, after)) => {
                line.push_str(&value(place, exchange, query, reply));
                rest = after;
            }
            None => {
                line.push('{');
                rest = from;
            }
        }
    }
    line + rest
}

fn value(place: &str, exchange: &Exchange<'_>, query: &Message, reply: &Message) -> String {
    let question = query.queries.first();
    let edns = query.edns.as_ref();
    match place {
        "remote" => match exchange.client {
            SocketAddr::V4(v4) => v4.ip().to_string(),
            SocketAddr::V6(v6) => format!("[{}]", v6.ip()),
        },
        "port" => exchange.client.port().to_string(),
        "proto" => match exchange.transport {
            Transport::Udp => "udp".into(),
            Transport::Tcp => "tcp".into(),
        },
        "type" => question.map_or_else(String::new, |q| q.query_type().to_string()),
        "class" => question.map_or_else(String::new, |q| q.query_class().to_string()),
        "name" => question.map_or_else(String::new, |q| q.name().to_ascii()),
        "size" => exchange.query.len().to_string(),
        "rsize" => exchange.reply.len().to_string(),
        "rcode" => rcode_name(exchange.reply.get(3).map_or(0, |flags| flags & 0x0f)),
        "duration" => format!("{:.9}s", exchange.took.as_secs_f64()),
        ">id" => query.metadata.id.to_string(),
        ">opcode" => u8::from(query.metadata.op_code).to_string(),
        ">do" => edns.is_some_and(|edns| edns.flags().dnssec_ok).to_string(),
        ">bufsize" => edns.map_or(512, Edns::max_payload).to_string(),
        ">rflags" => flags(reply),
        _ => EMPTY.into(),
    }
}

fn flags(reply: &Message) -> String {
    let m = &reply.metadata;
    let all = [
        ("aa", m.authoritative),
        ("tc", m.truncation),
        ("rd", m.recursion_desired),
        ("ra", m.recursion_available),
        ("ad", m.authentic_data),
        ("cd", m.checking_disabled),
    ];
    let set = all.iter().filter(|(_, set)| *set).map(|(name, _)| *name);
    let names: Vec<&str> = std::iter::once("qr").chain(set).collect();
    names.join(",")
}

#[cfg(test)]
mod tests {
    use hickory_proto::op::{MessageType, OpCode, Query};
    use hickory_proto::rr::{Name, RecordType};

    use super::*;

    #[test]
    fn lines_of_all_kinds() {
        let mut query = Message::new(7, MessageType::Query, OpCode::Query);
        let name = Name::from_ascii("a.example.").unwrap();
        query.add_query(Query::query(name, RecordType::AAAA));
        query.metadata.recursion_desired = true;
        let mut reply = Message::response(7, OpCode::Query);
        reply.queries.clone_from(&query.queries);
        reply.metadata.response_code = ResponseCode::NXDomain;
        let (query, reply) = (query.to_vec().unwrap(), reply.to_vec().unwrap());
        let exchange = Exchange {
            client: "192.0.2.1:5000".parse().unwrap(),
            transport: Transport::Udp,
            query: &query,
            reply: &reply,
            took: Duration::from_millis(2),
        };
        let rule = |format: &str, class| LogRule {
            zones: Vec::new(),
            format: format.into(),
            classes: vec![class],
        };
        let rules = [
            rule("{common}", LogClass::Denial),
            rule("{name} {strange} {", LogClass::All),
            rule("{name}", LogClass::Success),
            rule("{name}", LogClass::Error),
        ];
        assert_eq!(
            lines(&rules, &exchange),
            [
                "192.0.2.1:5000 - 7 \"AAAA IN a.example. udp 27 false 512\" NXDOMAIN qr 27 0.002000000s",
                "a.example. - {",
            ]
        );
    }
}
