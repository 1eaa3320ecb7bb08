//! Arbitrary frames at every hook that frames meet, the drivers' among them, a few at a time, so that they meet the flows of those before them. Bounded by
//! default; `WEIR_FUZZ_CASES` runs more histories, `WEIR_FUZZ_SEED` other ones.
//!
//! Named invariants: a frame that goes on keeps its length and what its checksums were off by (a broken packet stays
//! as broken as it came, a good one good); only an answer in place of a refused packet has another length, and it is good.

use std::cell::RefCell;

use anyhow::{Context, Result, ensure};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, RngSeed, TestRunner};
use weir_agent::kernel::Program;
use weir_tests::prog::frame::{self, Residue};
use weir_tests::prog::packet::{Packet, TCP, UDP};
use weir_tests::prog::policies::Policies;
use weir_tests::prog::world::{NODE_V4, NODE_V6, PEER_V4, PEER_V6, World, received, unable};

use super::drivers::XDP_PASS;
use super::{DROP, FAMILIES, Family, LIMITS, at};

const CASES: u32 = 1_500;
const SEED: u64 = 0x7765_6972;
/// `None` is the program at an uplink's driver. What it does, only flows from the network can show.
const HOOKS: [Option<Program>; 12] = [
    Some(Program::FromNetwork),
    Some(Program::FromNetwork),
    None,
    Some(Program::FromPod),
    Some(Program::ToPod),
    Some(Program::FromNetwork),
    Some(Program::ToNetwork),
    Some(Program::FromOverlay),
    Some(Program::ToOverlay),
    Some(Program::FromSelf),
    Some(Program::FromPark),
    None,
];

/// A frame on its way to a hook.
#[derive(Clone, Debug)]
struct Arrival {
    hook: Option<Program>,
    /// Which of the world's links.
    link: usize,
    frame: Vec<u8>,
    /// Came in by a link without programs.
    forwarded: bool,
    /// What pod `a` gets for a policy before.
    policy: Option<u32>,
}

/// What is done to a good frame.
#[derive(Clone, Debug)]
enum Damage {
    Cut(usize),
    Flip(usize, u8),
    /// Zeroes before the transport header, as IPv4 options; their length in words.
    Options(u8),
    /// The fragment field of IPv4.
    Fragment(u16),
    /// An extension header of IPv6 with this number and length.
    Extension(u8, u8),
    Protocol(u8),
}

fn addresses(f: Family) -> Vec<&'static str> {
    let v6 = f.vip.contains(':');
    let (node, peer) = if v6 {
        (NODE_V6, PEER_V6)
    } else {
        (NODE_V4, PEER_V4)
    };
    vec![f.vip, f.other_vip, f.a, f.b, f.far, node, peer, outside(f)]
}

fn damage() -> impl Strategy<Value = Damage> {
    prop_oneof![
        (0usize..1_500).prop_map(Damage::Cut),
        (0usize..90, any::<u8>()).prop_map(|(at, bits)| Damage::Flip(at, bits)),
        (1u8..11).prop_map(Damage::Options),
        any::<u16>().prop_map(Damage::Fragment),
        select(vec![0x2000u16, 1, 0x2001, 0x4000]).prop_map(Damage::Fragment),
        (select(vec![0u8, 43, 44, 51, 60]), 0u8..3)
            .prop_map(|(kind, words)| Damage::Extension(kind, words)),
        select(vec![1u8, 2, 4, 41, 47, 58, 132]).prop_map(Damage::Protocol),
    ]
}

fn apply(frame: &mut Vec<u8>, damage: &Damage) {
    let v4 = frame.get(12..14) == Some(&[8, 0]);
    let set = |frame: &mut Vec<u8>, at: usize, value: &[u8]| {
        if let Some(bytes) = frame.get_mut(at..at + value.len()) {
            bytes.copy_from_slice(value);
        }
    };
    match *damage {
        Damage::Cut(length) => frame.truncate(length.max(14)),
        Damage::Flip(at, bits) => {
            if let Some(byte) = frame.get_mut(at) {
                *byte ^= bits;
            }
        }
        Damage::Options(words) if v4 && frame.len() >= 34 => {
            frame[14] = 0x40 | (5 + words);
            frame.splice(34..34, vec![1; 4 * usize::from(words)]);
        }
        Damage::Fragment(field) if v4 => set(frame, 20, &field.to_be_bytes()),
        Damage::Extension(kind, words) if !v4 && frame.len() >= 54 => {
            let mut header = vec![frame[20], words];
            header.resize(8 * (1 + usize::from(words)), 0);
            frame[20] = kind;
            frame.splice(54..54, header);
        }
        Damage::Protocol(number) => set(frame, if v4 { 23 } else { 20 }, &[number]),
        Damage::Options(_) | Damage::Fragment(_) | Damage::Extension(..) => {}
    }
}

fn frame(f: Family) -> impl Strategy<Value = Vec<u8>> {
    let address = || select(addresses(f));
    let port = || select(vec![80u16, 8_080, 40_000, 61_000, 30_080, 0]);
    let built = (
        select(vec![TCP, UDP]),
        (address(), port()),
        (address(), port()),
        any::<u8>(),
        vec(any::<u8>(), 0..64),
        vec(damage(), 0..3),
    )
        .prop_map(|(protocol, source, destination, flags, payload, damages)| {
            let mut packet = Packet::new(
                protocol,
                &at(source.0, source.1),
                &at(destination.0, destination.1),
            );
            if protocol == TCP {
                packet.tcp_flags = flags;
            }
            packet.payload = payload;
            let mut frame = packet.to_bytes();
            for damage in &damages {
                apply(&mut frame, damage);
            }
            frame
        });
    let noise = (
        select(vec![0x0800u16, 0x86dd, 0x0806, 0x8100]),
        vec(any::<u8>(), 0..200),
    )
        .prop_map(|(kind, rest)| {
            let mut frame = vec![2; 12];
            frame.extend(kind.to_be_bytes());
            frame.extend(rest);
            frame
        });
    let clients = vec![f.a, f.b, outside(f)];
    let asked = (
        select(vec![TCP, UDP]),
        select(clients),
        select(vec![f.vip, f.other_vip]),
    )
        .prop_map(|(protocol, source, service)| {
            Packet::new(protocol, &at(source, 40_000), &at(service, 80)).to_bytes()
        });
    prop_oneof![9 => built, 4 => asked, 1 => noise]
}

fn outside(f: Family) -> &'static str {
    if f.vip.contains(':') {
        "2001:db8:51::9"
    } else {
        "198.51.100.9"
    }
}

fn arrivals(f: Family) -> impl Strategy<Value = Vec<Arrival>> {
    let policy = prop_oneof![4 => Just(None), 1 => (0u32..32).prop_map(Some)];
    let arrival = (
        select(&HOOKS[..]),
        0usize..4,
        frame(f),
        any::<bool>(),
        policy,
    )
        .prop_map(|(hook, link, frame, forwarded, policy)| Arrival {
            hook,
            link,
            frame,
            forwarded,
            policy,
        });
    // The same frame once more, elsewhere.
    vec((arrival, any::<bool>()), 1..6).prop_map(|arrivals| {
        let mut all: Vec<Arrival> = Vec::new();
        for (mut arrival, again) in arrivals {
            if let Some(last) = all.last().filter(|_| again) {
                arrival.frame.clone_from(&last.frame);
            }
            all.push(arrival);
        }
        all
    })
}

/// Runs one frame and judges what comes out.
fn judge(world: &Entries, policies: &mut Policies, arrival: &Arrival) -> Result<()> {
    let Entries { world, overlay } = world;
    let links = [
        world.a.link.ifindex,
        world.b.link.ifindex,
        world.uplink,
        world.host.peer_ifindex,
    ];
    // The kernel runs no program on a frame that ends in its network header.
    let least = match arrival.frame.get(12..14) {
        Some([0x08, 0x00]) => 14 + 20,
        Some([0x86, 0xdd]) => 14 + 40,
        _ => 14 + 1,
    };
    if arrival.frame.len() < least {
        return Ok(());
    }
    if let Some(flags) = arrival.policy {
        policies.set_pod(world.a.link.ifindex, 1, flags)?;
        policies.bump()?;
    }
    let link = links[arrival.link];
    let frame = received(arrival.hook.unwrap_or(Program::FromNetwork), &arrival.frame);
    let kernel = &world.kernel;
    let output = match arrival.hook {
        None => {
            let output = kernel.test_run_driver(&frame, world.uplink, 1)?;
            let passed = output.verdict == XDP_PASS;
            ensure!(!passed || output.packet == frame, "changed and passed");
            output
        }
        Some(Program::FromOverlay) => kernel.test_run_from_overlay(&frame, *overlay)?,
        Some(hook) => {
            let egress = [Program::ToPod, Program::ToOverlay].contains(&hook);
            let came_in_by = u32::from(arrival.forwarded && egress);
            let at = if hook == Program::ToOverlay {
                *overlay
            } else {
                link
            };
            kernel.test_run_forwarded(hook, &frame, came_in_by, at)?
        }
    };
    if output.verdict == DROP && arrival.hook.is_some() {
        return Ok(());
    }
    let whole = frame::residue(&output.packet) == Residue::GOOD;
    if whole && frame::is_answer(&frame, &output.packet) {
        return Ok(());
    }
    ensure!(
        output.packet.len() == arrival.frame.len(),
        "{} bytes became {}",
        arrival.frame.len(),
        output.packet.len()
    );
    let (before, after) = (
        frame::residue(&arrival.frame),
        frame::residue(&output.packet),
    );
    ensure!(
        before == after,
        "checksums were off by {before:?} and are by {after:?}: {:02x?}",
        output.packet
    );
    Ok(())
}

/// What frames are thrown at.
struct Entries {
    world: World,
    /// The overlay's device.
    overlay: u32,
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(default)
}

fn fuzz(f: Family) -> Result<()> {
    let mut world = World::new(LIMITS)?;
    world.serve(f.vip, &[f.far, f.b, f.a])?;
    world.serve(f.other_vip, &[f.far])?;
    super::drivers::outside(&world, f)?;
    let overlay = world.overlay()?;
    let entries = Entries { world, overlay };
    let world = &entries.world;
    let policies = RefCell::new(Policies::open(&world.bpffs)?);
    let config = Config {
        cases: u32::try_from(number("WEIR_FUZZ_CASES", CASES.into()))?,
        rng_seed: RngSeed::Fixed(number("WEIR_FUZZ_SEED", SEED)),
        failure_persistence: None,
        ..Config::default()
    };
    let result = TestRunner::new(config).run(&arrivals(f), |arrivals| {
        for arrival in &arrivals {
            judge(&entries, &mut policies.borrow_mut(), arrival)
                .map_err(|error| TestCaseError::fail(format!("{error:#}")))?;
        }
        Ok(())
    });
    result
        .map_err(|error| anyhow::anyhow!("{error}"))
        .context("frames")?;
    let malformed = world.counter("malformed")?;
    let created = world.counter("flow_created")?;
    let denied = world.counter("policy_ingress")? + world.counter("policy_pending")?;
    let led_on = world.counter("forwarded_at_driver")?;
    println!(
        "{}: {malformed} malformed, {created} flows, {led_on} led on at the driver",
        f.vip
    );
    ensure!(
        malformed > 0 && created > 0 && denied > 0 && led_on > 0,
        "the frames missed what they are for"
    );
    Ok(())
}

#[test]
fn arbitrary_frames_come_out_whole_or_not_at_all() {
    if let Some(reason) = unable() {
        println!("SKIPPED: {reason}");
        return;
    }
    for family in FAMILIES {
        let run = std::thread::spawn(move || fuzz(family));
        if let Err(error) = run.join().expect("the test thread panicked") {
            panic!("{}: {error:?}", family.vip);
        }
    }
}
