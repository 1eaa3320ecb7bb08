//! Packet in, packet out: what is answered here, what is forwarded, and how answers fit. [pure]

use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::{DNSClass, Name, RecordType};
use hickory_proto::serialize::binary::{BinDecodable, BinEncodable};

use super::lookup::Answer;
use super::rewrite::{Rewritten, Undo};
use super::zone::Zone;

/// Larger UDP answers are cut, whatever a client offers: they would be fragmented (RFC 9715).
pub const MAX_UDP_BYTES: u16 = 1232;
/// What every client takes without EDNS (RFC 1035), and the least an EDNS offer means (RFC 6891).
const MIN_UDP_BYTES: u16 = 512;
const HEADER_BYTES: usize = 12;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Transport {
    Udp,
    Tcp,
}

/// What to do with a packet.
#[derive(Debug)]
pub enum Step {
    Reply(Vec<u8>),
    /// Nothing can be said to it: not a query.
    Drop,
    /// Ask an upstream server and give its answer to [`Request::relay`] or [`Request::finish`].
    Ask(Box<Request>),
}

/// A query that needs an upstream server.
#[derive(Debug)]
pub struct Request {
    query: Message,
    transport: Transport,
    /// The zone's part of the answer, when the question began here.
    chain: Option<Answer>,
    /// What the answer needs because another question is asked than the client's.
    undo: Option<Undo>,
    /// The most bytes over UDP.
    cap: u16,
    /// What to ask.
    pub name: Name,
    pub record_type: RecordType,
}

/// What is known here of a question.
#[derive(Debug)]
pub(super) struct Known {
    /// None: somebody else's name.
    pub(super) answer: Option<Answer>,
    /// What the question became.
    pub(super) rewritten: Option<Rewritten>,
    /// The most bytes over UDP.
    pub(super) cap: u16,
}

/// Who knows names.
pub(super) trait Names {
    fn look_up(&self, name: &Name, record_type: RecordType) -> Known;

    /// Whether upstream servers can be asked for a name, by those who have the name `place`.
    fn can_ask(&self, place: &Name, name: &Name) -> bool;
}

/// A zone, and upstream servers or none.
struct ZoneAlone<'a> {
    zone: &'a Zone,
    recursion: bool,
    rotation: usize,
}

impl Names for ZoneAlone<'_> {
    fn look_up(&self, name: &Name, record_type: RecordType) -> Known {
        Known {
            answer: self.zone.lookup(name, record_type, self.rotation),
            rewritten: None,
            cap: MAX_UDP_BYTES,
        }
    }

    fn can_ask(&self, _: &Name, _: &Name) -> bool {
        self.recursion
    }
}

/// Handles a packet. `recursion` says whether upstream servers exist.
#[must_use]
pub fn handle(
    zone: &Zone,
    packet: &[u8],
    transport: Transport,
    recursion: bool,
    rotation: usize,
) -> Step {
    let names = ZoneAlone {
        zone,
        recursion,
        rotation,
    };
    handle_by(&names, packet, transport)
}

/// Handles a packet by what is known of names.
pub(super) fn handle_by(names: &dyn Names, packet: &[u8], transport: Transport) -> Step {
    let Ok(query) = Message::from_bytes(packet) else {
        return malformed(packet);
    };
    if query.message_type == MessageType::Response {
        return Step::Drop;
    }
    let only = |rcode| Answer {
        rcode,
        ..Answer::default()
    };
    if let Some(rcode) = refusal(&query) {
        let asked = query.queries.first();
        let format = Format {
            transport,
            recursion: asked
                .is_some_and(|question| names.can_ask(question.name(), question.name())),
            authoritative: false,
            cap: MAX_UDP_BYTES,
        };
        return Step::Reply(reply(&query, format, &only(rcode)));
    }
    let Some(question) = query.queries.first() else {
        return Step::Drop;
    };
    let (asked, asked_type) = (question.name(), question.query_type());
    let known = names.look_up(asked, asked_type);
    let (name, record_type, undo) = match known.rewritten {
        Some(rewritten) => (rewritten.name, rewritten.record_type, Some(rewritten.undo)),
        None => (asked.clone(), asked_type, None),
    };
    let format = Format {
        transport,
        recursion: names.can_ask(asked, &name),
        authoritative: known.answer.is_some(),
        cap: known.cap,
    };
    let request = |name: Name, chain| {
        Step::Ask(Box::new(Request {
            query: query.clone(),
            transport,
            chain,
            undo: undo.clone(),
            cap: known.cap,
            name,
            record_type,
        }))
    };
    let Some(mut answer) = known.answer else {
        if format.recursion {
            return request(name, None);
        }
        return Step::Reply(reply(&query, format, &only(ResponseCode::Refused)));
    };
    if let Some(target) = &answer.chase
        && names.can_ask(target, target)
    {
        return request(target.clone(), Some(answer));
    }
    if let Some(undo) = &undo {
        undo.undo(&mut answer.records);
        undo.undo(&mut answer.additionals);
    }
    Step::Reply(reply(&query, format, &answer))
}

/// Why a query is not looked up at all.
fn refusal(query: &Message) -> Option<ResponseCode> {
    if query.op_code != OpCode::Query {
        return Some(ResponseCode::NotImp);
    }
    let [question] = query.queries.as_slice() else {
        return Some(ResponseCode::FormErr);
    };
    if query.edns.as_ref().is_some_and(|edns| edns.version() != 0) {
        return Some(ResponseCode::BADVERS);
    }
    let transfer = matches!(question.query_type(), RecordType::AXFR | RecordType::IXFR);
    (transfer || question.query_class() != DNSClass::IN).then_some(ResponseCode::Refused)
}

/// FORMERR with the packet's own id, when it is a query that has one.
fn malformed(packet: &[u8]) -> Step {
    let (Some([high, low]), Some(flags)) = (packet.get(..2), packet.get(2)) else {
        return Step::Drop;
    };
    if packet.len() < HEADER_BYTES || flags & 0x80 != 0 {
        return Step::Drop;
    }
    // Response, the same opcode and RD; FORMERR; no sections.
    let mut out = vec![*high, *low, 0x80 | (flags & 0x79), 0x01];
    out.resize(HEADER_BYTES, 0);
    Step::Reply(out)
}

impl Request {
    /// True when the upstream's whole message is the answer.
    #[must_use]
    pub fn is_relay(&self) -> bool {
        self.chain.is_none()
    }

    /// The name that decides who is asked: the client's, or the one at the end of the zone's chain.
    pub(super) fn place(&self) -> &Name {
        match (&self.chain, self.query.queries.first()) {
            (None, Some(question)) => question.name(),
            _ => &self.name,
        }
    }

    #[must_use]
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// The question to put to the upstream server, with this id. The client's wish for DNSSEC data goes along.
    #[must_use]
    pub fn upstream_query(&self, id: u16) -> Option<Vec<u8>> {
        let mut message = Message::new(id, MessageType::Query, OpCode::Query);
        message.metadata.recursion_desired = true;
        message.metadata.checking_disabled = self.query.checking_disabled;
        message.metadata.authentic_data = self.query.authentic_data;
        message.add_query(Query::query(self.name.clone(), self.record_type));
        if self.query.edns.is_some() || self.chain.is_some() {
            let mut edns = Edns::new();
            edns.set_max_payload(self.cap);
            edns.set_dnssec_ok(self.wants_dnssec());
            message.set_edns(edns);
        }
        message.to_vec().ok()
    }

    #[must_use]
    pub fn wants_dnssec(&self) -> bool {
        self.query
            .edns
            .as_ref()
            .is_some_and(|edns| edns.flags().dnssec_ok)
    }

    #[must_use]
    pub fn has_edns(&self) -> bool {
        self.query.edns.is_some()
    }

    #[must_use]
    pub fn checking_disabled(&self) -> bool {
        self.query.checking_disabled
    }

    /// The upstream's message as the client's answer: its id, its spelling of the name, and cut to its size.
    #[must_use]
    pub fn relay(&self, mut upstream: Vec<u8>) -> Vec<u8> {
        if let Some(undo) = &self.undo {
            return self.undone(undo, &upstream);
        }
        let Some(question_end) = question_end(&upstream) else {
            return self.fail(ResponseCode::ServFail);
        };
        upstream[..2].copy_from_slice(&self.query.id.to_be_bytes());
        if let Some(name) = self
            .query
            .queries
            .first()
            .and_then(|q| q.name().to_bytes().ok())
            && HEADER_BYTES + name.len() + 4 == question_end
        {
            upstream[HEADER_BYTES..HEADER_BYTES + name.len()].copy_from_slice(&name);
        }
        if self.transport == Transport::Udp
            && upstream.len() > usize::from(udp_limit(&self.query, self.cap))
        {
            return self.cut(&upstream, question_end);
        }
        upstream
    }

    /// Header and question of a message that does not fit, with TC.
    fn cut(&self, message: &[u8], question_end: usize) -> Vec<u8> {
        let mut out = message[..question_end].to_vec();
        out[2] |= 0x02;
        // Sections: the question alone, and OPT where the client has sent one.
        out[6..HEADER_BYTES].fill(0);
        if self.query.edns.is_some() {
            out[11] = 1;
            let [high, low] = self.cap.to_be_bytes();
            out.extend([0, 0, 41, high, low, 0, 0, 0, 0, 0, 0]);
        }
        out
    }

    /// The chain that began in the zone, completed by what the upstream server said of its last name.
    #[must_use]
    pub fn finish(&self, upstream: Option<&[u8]>) -> Vec<u8> {
        let mut answer = self.chain.clone().unwrap_or_default();
        match upstream.and_then(|bytes| Message::from_bytes(bytes).ok()) {
            Some(message) => {
                answer.rcode = message.response_code;
                answer.records.extend(message.answers);
                if answer.rcode == ResponseCode::NXDomain {
                    answer.soa = message.authorities.into_iter().next();
                }
            }
            None => answer.rcode = ResponseCode::ServFail,
        }
        if let Some(undo) = &self.undo {
            undo.undo(&mut answer.records);
        }
        reply(&self.query, self.format(true), &answer)
    }

    /// The answer to a question that became another one, as one to the client's.
    fn undone(&self, undo: &Undo, upstream: &[u8]) -> Vec<u8> {
        let Ok(message) = Message::from_bytes(upstream) else {
            return self.fail(ResponseCode::ServFail);
        };
        let mut authorities = message.authorities.into_iter();
        let mut answer = Answer {
            rcode: message.metadata.response_code,
            records: message.answers,
            soa: authorities.find(|r| r.record_type() == RecordType::SOA),
            ..Answer::default()
        };
        undo.undo(&mut answer.records);
        let mut reply = reply(&self.query, self.format(false), &answer);
        if message.metadata.truncation
            && let Some(flags) = reply.get_mut(2)
        {
            *flags |= 0x02;
        }
        reply
    }

    fn format(&self, authoritative: bool) -> Format {
        Format {
            transport: self.transport,
            recursion: true,
            authoritative,
            cap: self.cap,
        }
    }

    /// An answer that says only what went wrong.
    #[must_use]
    pub fn fail(&self, rcode: ResponseCode) -> Vec<u8> {
        let answer = Answer {
            rcode,
            ..Answer::default()
        };
        reply(&self.query, self.format(false), &answer)
    }
}

/// What replies look like beside what they say.
#[derive(Clone, Copy)]
struct Format {
    transport: Transport,
    recursion: bool,
    authoritative: bool,
    cap: u16,
}

fn udp_limit(query: &Message, cap: u16) -> u16 {
    let offered = query.edns.as_ref().map_or(MIN_UDP_BYTES, Edns::max_payload);
    offered.clamp(MIN_UDP_BYTES, cap.max(MIN_UDP_BYTES))
}

fn reply(query: &Message, format: Format, answer: &Answer) -> Vec<u8> {
    let mut message = Message::response(query.id, query.op_code);
    message.metadata.recursion_desired = query.recursion_desired;
    message.metadata.recursion_available = format.recursion;
    message.metadata.checking_disabled = query.checking_disabled;
    message.metadata.authoritative = format.authoritative && answer.rcode != ResponseCode::ServFail;
    message.metadata.response_code = answer.rcode;
    message.queries.clone_from(&query.queries);
    message.answers.clone_from(&answer.records);
    message.authorities.extend(answer.soa.clone());
    message.additionals.clone_from(&answer.additionals);
    if query.edns.is_some() {
        let mut edns = Edns::new();
        edns.set_max_payload(format.cap);
        message.edns = Some(edns);
    }
    let limit = match format.transport {
        Transport::Udp => udp_limit(query, format.cap),
        Transport::Tcp => u16::MAX,
    };
    encode(message, limit)
}

/// Encodes within a limit: additional records go first and silently (RFC 2181, 9), then answers, with TC.
fn encode(mut message: Message, limit: u16) -> Vec<u8> {
    let fits = |bytes: &[u8]| bytes.len() <= usize::from(limit);
    if let Ok(bytes) = message.to_vec()
        && fits(&bytes)
        && !is_truncated(&bytes)
    {
        return bytes;
    }
    message.additionals.clear();
    if let Ok(bytes) = message.to_vec()
        && fits(&bytes)
        && !is_truncated(&bytes)
    {
        return bytes;
    }
    message.authorities.clear();
    message.metadata.truncation = true;
    let answers = std::mem::take(&mut message.answers);
    // The most answers that fit lie between these: encoding is the only exact measure, as names are compressed.
    let (mut fitting, mut too_many) = (0, answers.len() + 1);
    while too_many - fitting > 1 {
        let middle = fitting.midpoint(too_many);
        message.answers = answers[..middle].to_vec();
        if message
            .to_vec()
            .is_ok_and(|bytes| fits(&bytes) && count_of_answers(&bytes) == middle)
        {
            fitting = middle;
        } else {
            too_many = middle;
        }
    }
    message.answers = answers[..fitting].to_vec();
    message.to_vec().unwrap_or_default()
}

fn is_truncated(bytes: &[u8]) -> bool {
    bytes.get(2).is_some_and(|flags| flags & 0x02 != 0)
}

fn count_of_answers(bytes: &[u8]) -> usize {
    bytes.get(6..8).map_or(0, |count| {
        usize::from(u16::from_be_bytes([count[0], count[1]]))
    })
}

/// Where the question section of a message with one question ends.
pub(super) fn question_end(message: &[u8]) -> Option<usize> {
    if message.get(4..6)? != [0, 1] {
        return None;
    }
    let mut at = HEADER_BYTES;
    loop {
        match *message.get(at)? {
            0 => break,
            // A compressed name in the first question would point at itself.
            length if length & 0xc0 != 0 => return None,
            length => at += 1 + usize::from(length),
        }
    }
    let end = at + 5;
    (message.len() >= end).then_some(end)
}
