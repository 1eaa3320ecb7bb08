//! What probes and servers say to each other: a short binary head, then padding (request) or JSON (answer). Pure.

use serde::{Deserialize, Serialize};

const MAGIC: u32 = 0x5765_6972;
/// Bytes of a request's head.
pub const REQUEST_HEAD: usize = 25;
/// Bytes before an answer's JSON.
pub const ANSWER_HEAD: usize = 8;
/// The server speaks first about closing: it closes once it has answered.
const FLAG_SERVER_CLOSES: u8 = 1;
/// No message is longer: foreign bytes must not make a server reserve memory.
pub const MAX_MESSAGE: usize = 64 << 20;

/// What a client asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Whole length in bytes, head included.
    pub length: usize,
    pub token: u64,
    /// Least length of the answer in bytes.
    pub answer_size: usize,
    pub answer_after_ms: u32,
    pub server_closes: bool,
}

/// What a server tells about itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    pub name: String,
    /// Address and port that the request reached.
    pub local: String,
    /// Address and port that it came from.
    pub peer: String,
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn length_u32(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

impl Request {
    /// The request's bytes; a length below the head's is raised to it.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let length = self.length.max(REQUEST_HEAD);
        let mut bytes = Vec::with_capacity(length);
        bytes.extend(MAGIC.to_be_bytes());
        bytes.extend(length_u32(length).to_be_bytes());
        bytes.extend(self.token.to_be_bytes());
        bytes.extend(length_u32(self.answer_size).to_be_bytes());
        bytes.extend(self.answer_after_ms.to_be_bytes());
        bytes.push(if self.server_closes {
            FLAG_SERVER_CLOSES
        } else {
            0
        });
        bytes.resize(length, b'.');
        bytes
    }

    /// Reads a head; `None` for foreign bytes.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let head = bytes.get(..REQUEST_HEAD)?;
        let length = usize::try_from(word(head, 4)?).ok()?;
        let answer_size = usize::try_from(word(head, 16)?).ok()?;
        let sane = word(head, 0)? == MAGIC
            && length >= REQUEST_HEAD
            && length.max(answer_size) <= MAX_MESSAGE;
        sane.then_some(Self {
            length,
            token: u64::from_be_bytes(head.get(8..16)?.try_into().ok()?),
            answer_size,
            answer_after_ms: word(head, 20)?,
            server_closes: head.get(24)? & FLAG_SERVER_CLOSES != 0,
        })
    }
}

impl Answer {
    /// The answer's bytes, padded to the length of the request and the size it asked for.
    #[must_use]
    pub fn encode(&self, request: &Request) -> Vec<u8> {
        let json = serde_json::to_vec(self).unwrap_or_default();
        let length = (ANSWER_HEAD + json.len())
            .max(request.length)
            .max(request.answer_size);
        let mut bytes = Vec::with_capacity(length);
        bytes.extend(MAGIC.to_be_bytes());
        bytes.extend(length_u32(length).to_be_bytes());
        bytes.extend(json);
        bytes.resize(length, b' ');
        bytes
    }

    /// Whole length of the answer that begins with these bytes.
    #[must_use]
    pub fn length(head: &[u8]) -> Option<usize> {
        let length = usize::try_from(word(head, 4)?).ok()?;
        (word(head, 0)? == MAGIC && (ANSWER_HEAD..=MAX_MESSAGE).contains(&length)).then_some(length)
    }

    /// Reads a whole answer; `None` for foreign bytes.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let length = Self::length(bytes)?;
        serde_json::from_slice(bytes.get(ANSWER_HEAD..length)?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn requests_survive_the_wire(length in 0_usize..5000, token: u64, size in 0_usize..5000, after: u32, closes: bool) {
            let request = Request { length, token, answer_size: size, answer_after_ms: after, server_closes: closes };
            let decoded = Request::decode(&request.encode());
            prop_assert_eq!(decoded, Some(Request { length: length.max(REQUEST_HEAD), ..request }));
        }

        #[test]
        fn foreign_bytes_are_refused_quietly(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = (Request::decode(&bytes), Answer::decode(&bytes));
        }
    }

    #[test]
    fn answers_are_padded_to_what_was_asked() {
        let request = Request {
            length: 32,
            token: 1,
            answer_size: 900,
            answer_after_ms: 0,
            server_closes: false,
        };
        let answer = Answer {
            name: "w1".into(),
            local: "10.0.0.1:80".into(),
            peer: "10.0.0.2:4".into(),
        };
        let bytes = answer.encode(&request);
        assert_eq!(bytes.len(), 900);
        assert_eq!(Answer::decode(&bytes), Some(answer));
    }
}
