//! The room against a list that is searched, and frames that no program would hand over.

use std::time::{Duration, Instant};

use dataplane_common::fragment::park_mark;
use proptest::prelude::*;

use super::{Fragment, MAX_BYTES, MAX_FRAMES, MAX_FRAMES_OF_LINK, Room, WAIT, identify};
use crate::kernel::DatagramId;

const HOOK: u32 = 2;
const IFINDEX: u32 = 77;

fn ethernet(kind: [u8; 2]) -> Vec<u8> {
    let mut frame = vec![0x0a; 6];
    frame.extend(park_mark::write(HOOK, IFINDEX));
    frame.extend(kind);
    frame
}

fn frame_v4(identification: u16) -> Vec<u8> {
    let mut frame = ethernet([0x08, 0x00]);
    frame.extend([0x45, 0, 0, 28]);
    frame.extend(identification.to_be_bytes());
    frame.extend([0x00, 0x10, 64, 17, 0, 0, 192, 0, 2, 100, 192, 0, 2, 11]);
    frame.extend([0xaa; 8]);
    frame
}

fn frame_v6(identification: u32, options_first: bool) -> Vec<u8> {
    let mut frame = ethernet([0x86, 0xdd]);
    frame.extend([
        0x60,
        0,
        0,
        0,
        0,
        24,
        if options_first { 60 } else { 44 },
        64,
    ]);
    frame.extend([1; 16]);
    frame.extend([2; 16]);
    if options_first {
        frame.extend([44, 0, 1, 4, 0, 0, 0, 0]);
    }
    frame.extend([17, 0, 0x05, 0x01]);
    frame.extend(identification.to_be_bytes());
    frame.extend([0xaa; 8]);
    frame
}

#[test]
fn a_parked_frame_says_where_it_was_met_and_what_it_is_part_of() {
    let fragment = identify(&frame_v4(0x1234)).expect("parked");
    let DatagramId::V4(key) = fragment.datagram else {
        panic!("{fragment:?}")
    };
    assert_eq!(fragment.ifindex, IFINDEX);
    assert_eq!(key.source.octets(), [192, 0, 2, 100]);
    assert_eq!(key.destination.octets(), [192, 0, 2, 11]);
    assert_eq!(key.identification, u32::from(0x1234u16.to_be()));
    assert_eq!(key.protocol, 17 | HOOK << 8);
    for options_first in [false, true] {
        let fragment = identify(&frame_v6(0x1234_5678, options_first)).expect("parked");
        let DatagramId::V6(key) = fragment.datagram else {
            panic!("{fragment:?}")
        };
        assert_eq!(
            (key.source.octets(), key.destination.octets()),
            ([1; 16], [2; 16])
        );
        assert_eq!(
            (key.identification, key.protocol),
            (0x1234_5678u32.to_be(), 17 | HOOK << 8)
        );
    }
}

#[test]
fn the_room_is_bounded_in_frames_frames_of_a_link_and_bytes() {
    let now = Instant::now();
    let fragment = |ifindex| Fragment {
        ifindex,
        ..identify(&frame_v4(1)).expect("parked")
    };
    let mut room = Room::default();
    let kept = (0..MAX_FRAMES_OF_LINK + 5)
        .filter(|_| room.keep(fragment(1), &[0; 60], now))
        .count();
    assert_eq!(kept, MAX_FRAMES_OF_LINK);
    for link in 2..100 {
        for _ in 0..MAX_FRAMES_OF_LINK {
            room.keep(fragment(link), &[0; 60], now);
        }
    }
    assert_eq!(room.len(), MAX_FRAMES);
    assert_eq!(room.expire(now + WAIT), MAX_FRAMES);
    assert!(room.is_empty());
    // What left makes room again.
    assert!(room.keep(fragment(1), &[0; 60], now));

    let mut room = Room::default();
    let large = vec![0; 60_000];
    let kept = (0..200)
        .filter(|i| room.keep(fragment(*i), &large, now))
        .count();
    assert_eq!(kept, MAX_BYTES / large.len());
}

proptest! {
    #[test]
    fn frames_leave_in_the_order_of_arrival_once_their_first_has_passed(
        steps in prop::collection::vec((0u16..6, 0u64..900, any::<bool>()), 1..200)
    ) {
        let mut room = Room::default();
        let mut model: Vec<(u16, usize, Instant)> = Vec::new();
        let mut now = Instant::now();
        for (index, (identification, pause_ms, release)) in steps.into_iter().enumerate() {
            now += Duration::from_millis(pause_ms);
            let expired = model.iter().filter(|(_, _, since)| now >= *since + WAIT).count();
            model.retain(|(_, _, since)| now < *since + WAIT);
            prop_assert_eq!(room.expire(now), expired);
            if release {
                let wanted: Vec<_> = model.iter().filter(|(id, ..)| *id == identification).map(|(_, index, _)| *index).collect();
                model.retain(|(id, ..)| *id != identification);
                let passed = identify(&frame_v4(identification)).expect("parked").datagram;
                let got = room.release(|datagram| *datagram == passed);
                let got: Vec<_> = got.iter().map(|frame| usize::from_be_bytes(frame[frame.len() - 8..].try_into().expect("eight"))).collect();
                prop_assert_eq!(got, wanted);
            } else {
                let mut frame = frame_v4(identification);
                frame.extend(index.to_be_bytes());
                let fragment = identify(&frame).expect("parked");
                if room.keep(fragment, &frame, now) {
                    model.push((identification, index, now));
                }
            }
            prop_assert_eq!(room.len(), model.len());
        }
    }

    #[test]
    fn no_frame_is_too_strange(bytes in prop::collection::vec(any::<u8>(), 0..120), parked in any::<bool>(), v6 in any::<bool>()) {
        let mut frame = if parked { ethernet(if v6 { [0x86, 0xdd] } else { [0x08, 0x00] }) } else { Vec::new() };
        frame.extend(&bytes);
        let _ = identify(&frame);
        for end in 0..frame.len() {
            let _ = identify(&frame[..end]);
        }
    }
}
