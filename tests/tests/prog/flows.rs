//! The flow table by numbers: floods, and ports for very many flows to one destination.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use weir_agent::kernel::{Limits, Program};
use weir_tests::prog::packet::{ACK, Packet, SYN, TCP};
use weir_tests::prog::world::{World, unable};

use super::{DROP, FAMILIES, Family, LIMITS, PASS, at};

fn in_each_family(flows: u32, test: fn(&mut World, Family) -> Result<()>) {
    if let Some(reason) = unable() {
        println!("SKIPPED: {reason}");
        return;
    }
    for family in FAMILIES {
        let run = std::thread::spawn(move || {
            let mut world = World::new(Limits { flows, ..LIMITS })?;
            test(&mut world, family)
        });
        if let Err(error) = run.join().expect("the test thread panicked") {
            panic!("{}: {error:?}", family.vip);
        }
    }
}

/// How many entries a map may hold.
fn size(world: &World, map: &str) -> Result<u32> {
    let maps = format!("weir/v{}/maps", dataplane_common::ABI_VERSION);
    let pin = world.bpffs.join(maps).join(map);
    Ok(aya::maps::MapInfo::from_pin(pin)?.max_entries())
}

#[test]
fn tables_follow_a_larger_limit_unless_they_are_in_use() {
    in_each_family(1_024, |world, f| {
        let (used, unused) = if f.vip.contains(':') {
            ("v6", "v4")
        } else {
            ("v4", "v6")
        };
        world.serve(f.vip, &[f.far])?;
        let a = world.a.link.ifindex;
        let request = Packet::new(TCP, &at(f.a, 40_000), &at(f.vip, 80)).with_flags(SYN);
        let sent = pass(world, Program::FromPod, &request, a)?.context("let through")?;
        world.restart(Limits {
            flows: 4_096,
            slots: 1_024,
            ..LIMITS
        })?;
        world.apply()?;
        for (map, before, after) in [
            ("flows", 1_024, 4_096),
            ("replies", 1_024, 4_096),
            ("backends", LIMITS.slots, 1_024),
            ("states", LIMITS.slots, 1_024),
        ] {
            ensure!(
                size(world, &format!("{map}_{used}"))? == before,
                "{map} is in use"
            );
            ensure!(
                size(world, &format!("{map}_{unused}"))? == after,
                "{map} is empty"
            );
        }
        let again = pass(world, Program::FromPod, &request, a)?.context("let through")?;
        ensure!(again.destination == sent.destination && world.counter("flow_created")? == 1);
        Ok(())
    });
}

/// Runs a program; `None` when it dropped the packet.
fn pass(world: &World, program: Program, packet: &Packet, link: u32) -> Result<Option<Packet>> {
    let output = world.test_run(program, &packet.to_bytes(), link, 1)?;
    if output.verdict == DROP {
        return Ok(None);
    }
    Ok(Some(Packet::from_bytes(&output.packet)?))
}

/// A handshake through the service; the number of SYNs that it took, each a retransmission of the same.
fn connect(world: &World, open: &Packet) -> Result<u32> {
    const PATIENCE: u32 = 5;
    for attempt in 1..=PATIENCE {
        let Some(sent) = pass(world, Program::FromPod, open, world.a.link.ifindex)? else {
            continue;
        };
        let answer = sent.answer().with_flags(SYN | ACK);
        let back = pass(world, Program::FromNetwork, &answer, world.uplink)?;
        ensure!(
            back.is_some_and(|back| back.source == open.destination),
            "the answer comes from the service"
        );
        let acknowledge = open.clone().with_flags(ACK);
        pass(world, Program::FromPod, &acknowledge, world.a.link.ifindex)?
            .context("the handshake ends")?;
        return Ok(attempt);
    }
    anyhow::bail!("no place after {PATIENCE} attempts")
}

#[test]
fn a_flood_of_half_open_connections_displaces_no_conversation() {
    const TABLE: u32 = 16_384;
    const ESTABLISHED: u16 = 1_000;
    const FLOOD: u32 = 250_000;
    in_each_family(TABLE, |world, f| {
        world.serve(f.vip, &[f.far])?;
        world.serve(f.other_vip, &[f.far])?;
        let open = |port: u16| Packet::new(TCP, &at(f.a, port), &at(f.vip, 80));
        for port in 1..=ESTABLISHED {
            ensure!(connect(world, &open(port))? == 1);
        }
        let started = Instant::now();
        let (mut dropped, mut worst, mut retried) = (0u32, 1, 0u32);
        for number in 0..FLOOD {
            // The flood comes from the other pod, over and over from all of its ports, to both services.
            let vip = if number & 0x1_0000 == 0 {
                f.vip
            } else {
                f.other_vip
            };
            let port = u16::try_from(number & 0xffff)?.max(1);
            let flood = Packet::new(TCP, &at(f.b, port), &at(vip, 80));
            let sent = pass(world, Program::FromPod, &flood, world.b.link.ifindex)?;
            dropped += u32::from(sent.is_none());
            if number % 2_500 == 0 {
                let port = ESTABLISHED + 1 + u16::try_from(number / 2_500)?;
                let attempts = connect(world, &open(port))?;
                worst = worst.max(attempts);
                retried += u32::from(attempts > 1);
            }
        }
        println!(
            "{}: {FLOOD} SYNs in {:.1?}, {dropped} dropped, {} displaced; of 100 clients among them {retried} had to \
             repeat their SYN, at most {} times",
            f.vip,
            started.elapsed(),
            world.counter("flow_displaced")?,
            worst - 1
        );
        let renewed = world.counter("flow_renewed")?;
        for port in 1..=ESTABLISHED {
            let more = open(port).with_flags(ACK);
            pass(world, Program::FromPod, &more, world.a.link.ifindex)?
                .context("an established connection goes on")?;
        }
        ensure!(world.counter("flow_renewed")? == renewed);
        let report = world.kernel.collect_flows()?;
        ensure!(report.repaired == 0, "no half pairs: {report:?}");
        Ok(())
    });
}

#[test]
fn sixty_thousand_flows_to_one_destination_have_ports_of_their_own() {
    const FLOWS: u16 = 60_000;
    in_each_family(131_072, |world, f| {
        // A pod that reaches itself is seen as the node: every flow needs a port of the node's address.
        world.serve(f.vip, &[f.a])?;
        let mut sources = HashSet::new();
        let mut slowest = Duration::ZERO;
        let started = Instant::now();
        for port in 1..=FLOWS {
            let open = Packet::new(TCP, &at(f.a, port), &at(f.vip, 80));
            let run =
                world.test_run(Program::FromPod, &open.to_bytes(), world.a.link.ifindex, 1)?;
            let sent = Packet::from_bytes(&run.packet)?;
            ensure!(
                run.verdict != DROP
                    && run.verdict != PASS
                    && sent.source.ip() == f.node.parse::<std::net::IpAddr>()?,
                "flow {port}: verdict {} from {}",
                run.verdict,
                sent.source
            );
            ensure!(sources.insert(sent.source), "{} twice", sent.source);
            slowest = slowest.max(run.duration);
        }
        println!(
            "{}: {FLOWS} flows in {:.1?}, the slowest first packet {slowest:?}",
            f.vip,
            started.elapsed()
        );
        ensure!(world.counter("source_ports_exhausted")? == 0);
        Ok(())
    });
}
