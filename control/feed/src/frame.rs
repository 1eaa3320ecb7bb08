//! Pre-encoded messages: an object is encoded once, and every snapshot and delta that carries it shares the bytes.
//!
//! A protocol buffers message is the concatenation of its fields, so a frame is a small header and the shared pieces.

use bytes::{BufMut, Bytes, BytesMut};
use control_api::v1::{Delta, FeedMessage, Heartbeat, ObjectKey, Snapshot, feed_message};
use prost::Message;
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint, key_len};

use crate::effects::Op;

/// Field numbers of `weir.node.v1`; `frames_equal_encoded_messages` compares them with the generated code.
mod field {
    pub(super) const MESSAGE_SNAPSHOT: u32 = 1;
    pub(super) const MESSAGE_DELTA: u32 = 2;
    pub(super) const SNAPSHOT_OBJECTS: u32 = 5;
    pub(super) const DELTA_UPSERTS: u32 = 3;
}

/// A snapshot is cut into messages of about this size, so that neither side holds a large one.
pub const SNAPSHOT_PART_BYTES: usize = 128 << 10;

/// One part of a snapshot: a `FeedMessage` ready for the wire.
#[must_use]
pub fn snapshot_part(
    revision: u64,
    feed_instance: &str,
    first: bool,
    last: bool,
    objects: &[Bytes],
) -> Bytes {
    let header = Snapshot {
        revision,
        feed_instance: feed_instance.to_owned(),
        first,
        last,
        objects: Vec::new(),
    };
    let lengths: usize = objects
        .iter()
        .map(|o| field_len(field::SNAPSHOT_OBJECTS, o.len()))
        .sum();
    wrap(
        field::MESSAGE_SNAPSHOT,
        header.encoded_len() + lengths,
        |out| {
            put(&header, out);
            for object in objects {
                put_field(field::SNAPSHOT_OBJECTS, object, out);
            }
        },
    )
}

/// How many of `objects` go into the next part.
#[must_use]
pub fn part_length(objects: &[Bytes]) -> usize {
    let mut size = 0;
    let fits = objects.iter().take_while(|object| {
        size += object.len();
        size <= SNAPSHOT_PART_BYTES
    });
    // An object larger than a part travels alone.
    fits.count().max(1).min(objects.len())
}

/// A delta: a `FeedMessage` ready for the wire. No operation at all moves the revision only.
#[must_use]
pub fn delta<'a>(
    revision: u64,
    committed_at_us: i64,
    ops: impl Iterator<Item = &'a Op> + Clone,
) -> Bytes {
    let removals: Vec<ObjectKey> = ops
        .clone()
        .filter_map(|op| match op {
            Op::Remove(key) => Some(key.clone()),
            Op::Upsert(_) => None,
        })
        .collect();
    let upserts = ops.filter_map(|op| match op {
        Op::Upsert(object) => Some(object),
        Op::Remove(_) => None,
    });
    let header = Delta {
        revision,
        committed_at_us,
        upserts: Vec::new(),
        removals,
    };
    let lengths: usize = upserts
        .clone()
        .map(|o| field_len(field::DELTA_UPSERTS, o.len()))
        .sum();
    wrap(
        field::MESSAGE_DELTA,
        header.encoded_len() + lengths,
        |out| {
            put(&header, out);
            for object in upserts {
                put_field(field::DELTA_UPSERTS, object, out);
            }
        },
    )
}

/// A heartbeat.
#[must_use]
pub fn heartbeat(sent_at_us: i64) -> Bytes {
    let kind = Some(feed_message::Kind::Heartbeat(Heartbeat {
        sent_at_us,
        next_in_ms: 0,
    }));
    FeedMessage { kind }.encode_to_vec().into()
}

fn field_len(tag: u32, length: usize) -> usize {
    key_len(tag) + encoded_len_varint(length as u64) + length
}

fn wrap(tag: u32, length: usize, fill: impl FnOnce(&mut BytesMut)) -> Bytes {
    let mut out = BytesMut::with_capacity(field_len(tag, length));
    encode_key(tag, WireType::LengthDelimited, &mut out);
    encode_varint(length as u64, &mut out);
    fill(&mut out);
    out.freeze()
}

fn put(message: &impl Message, out: &mut BytesMut) {
    // A BytesMut grows, so encoding into it cannot run out of room.
    let encoded = message.encode(out);
    debug_assert!(encoded.is_ok());
}

fn put_field(tag: u32, bytes: &[u8], out: &mut BytesMut) {
    encode_key(tag, WireType::LengthDelimited, out);
    encode_varint(bytes.len() as u64, out);
    out.put_slice(bytes);
}
