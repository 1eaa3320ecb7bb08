//! The program at an uplink's driver, and frames that are for other machines.

use anyhow::{Context, Result, ensure};
use weir_agent::compile::routes::Path as RoutePath;
use weir_agent::kernel::Program;
use weir_agent::netlink::Netlink;
use weir_tests::prog::packet::{Packet, UDP};
use weir_tests::prog::world::{PEER_MAC, PEER_V4, PEER_V6, UPLINK_MAC, World};

use super::{Family, LIMITS, PASS, REDIRECT, at, each, run};

/// Verdicts of the drivers' program.
pub(crate) const XDP_PASS: i32 = 2;
const XDP_TX: i32 = 3;

/// A client outside the cluster, behind the other node.
pub(crate) fn outside(world: &World, f: Family) -> Result<&'static str> {
    let (client, range, gateway) = if f.vip.contains(':') {
        ("2001:db8:51::9", "2001:db8:51::/64", PEER_V6)
    } else {
        ("198.51.100.9", "198.51.100.0/24", PEER_V4)
    };
    let path = RoutePath::Via {
        gateway: gateway.parse()?,
        link: world.uplink,
        source: None,
    };
    Netlink::open()?.add_route(range.parse()?, path)?;
    Ok(client)
}

/// A frame to the node.
fn to_node(packet: &Packet) -> Vec<u8> {
    addressed(packet.to_bytes())
}

fn addressed(mut frame: Vec<u8>) -> Vec<u8> {
    frame[..6].copy_from_slice(&UPLINK_MAC);
    frame
}

/// Where a frame has its time to live or hop limit.
fn hops_at(f: Family) -> usize {
    if f.vip.contains(':') { 21 } else { 22 }
}

/// Runs the drivers' program, and expects the frame to go on as it is.
pub(crate) fn left_alone(world: &World, packet: &Packet, why: &str) -> Result<()> {
    frame_left_alone(world, &to_node(packet), why)
}

fn frame_left_alone(world: &World, frame: &[u8], why: &str) -> Result<()> {
    let result = world.kernel.test_run_driver(frame, world.uplink, 1)?;
    ensure!(
        result.verdict == XDP_PASS && result.packet == frame,
        "{why}: verdict {}",
        result.verdict
    );
    Ok(())
}

/// Runs the drivers' program, and expects the frame to leave for the other node.
pub(crate) fn sent_on(world: &World, packet: &Packet) -> Result<Packet> {
    let result = world
        .kernel
        .test_run_driver(&to_node(packet), world.uplink, 1)?;
    ensure!(result.verdict == XDP_TX, "verdict {}", result.verdict);
    ensure!(
        result.packet[..6] == PEER_MAC,
        "sent to {:x?}",
        &result.packet[..6]
    );
    Packet::from_bytes(&result.packet).context("the packet that came out")
}

#[test]
fn drivers_lead_known_flows_on_as_the_ingress_hook_does() {
    each(|world, f, protocol| {
        let client = outside(world, f)?;
        world.serve(f.vip, &[f.far])?;
        let request = Packet::new(protocol, &at(client, 40_000), &at(f.vip, 80));
        left_alone(world, &request, "there is no flow yet")?;
        let (verdict, opened) = run(world, Program::FromNetwork, &request, world.uplink)?;
        ensure!(verdict == REDIRECT, "verdict {verdict}");
        let sent = sent_on(world, &request)?;
        ensure!(
            (sent.source, sent.destination) == (opened.source, opened.destination),
            "{} -> {}, by the hook {} -> {}",
            sent.source,
            sent.destination,
            opened.source,
            opened.destination
        );
        ensure!(sent.destination.to_string() == at(f.far, 8080));
        ensure!(sent.payload == request.payload);
        let back = sent_on(world, &sent.answer())?;
        ensure!(
            back.source.to_string() == at(f.vip, 80),
            "from {}",
            back.source
        );
        ensure!(
            back.destination.to_string() == at(client, 40_000),
            "to {}",
            back.destination
        );
        ensure!(world.counter("forwarded_at_driver")? == 2);
        Ok(())
    });
}

#[test]
fn drivers_leave_everything_else_to_the_ingress_hook() {
    each(|world, f, protocol| {
        let client = outside(world, f)?;
        let request = Packet::new(protocol, &at(client, 40_000), &at(f.vip, 80));
        // To a pod of this node, and its answer's direction.
        world.serve(f.vip, &[f.a])?;
        run(world, Program::FromNetwork, &request, world.uplink)?;
        left_alone(world, &request, "the backend is on this node")?;
        // A pod's own connection comes back.
        let asked = Packet::new(protocol, &at(f.b, 40_000), &at(f.far, 8080));
        run(world, Program::FromPod, &asked, world.b.link.ifindex)?;
        left_alone(world, &asked.answer(), "the client is on this node")?;
        // A backend that has gone, and a service without any.
        let other = Packet::new(protocol, &at(client, 40_001), &at(f.other_vip, 80));
        world.serve(f.other_vip, &[f.far])?;
        run(world, Program::FromNetwork, &other, world.uplink)?;
        sent_on(world, &other)?;
        if protocol == UDP {
            world.serve(f.other_vip, &[])?;
            left_alone(world, &other, "the backend has gone")?;
        }
        // Frames that are cut short.
        for length in [14, 33, 40] {
            let mut frame = to_node(&other);
            frame.truncate(length);
            let result = world.kernel.test_run_driver(&frame, world.uplink, 1)?;
            ensure!(result.verdict == XDP_PASS && result.packet == frame);
        }
        Ok(())
    });
}

#[test]
fn drivers_take_a_hop_and_leave_packets_without_one_to_the_stack() {
    each(|world, f, protocol| {
        let client = outside(world, f)?;
        world.serve(f.vip, &[f.far])?;
        let request = Packet::new(protocol, &at(client, 40_000), &at(f.vip, 80));
        run(world, Program::FromNetwork, &request, world.uplink)?;
        let frame = to_node(&request);
        let result = world.kernel.test_run_driver(&frame, world.uplink, 1)?;
        ensure!(result.verdict == XDP_TX, "verdict {}", result.verdict);
        let (before, after) = (frame[hops_at(f)], result.packet[hops_at(f)]);
        ensure!(after == before - 1, "{before} hops became {after}");
        Packet::from_bytes(&result.packet).context("checksums of what came out")?;
        for hops in [0, 1] {
            let mut last = frame.clone();
            last[hops_at(f)] = hops;
            frame_left_alone(world, &last, "the stack tells its sender")?;
        }
        Ok(())
    });
}

/// Between veth links checksums are finished by nobody, and a frame that a driver sends out has lost the note of it.
#[test]
fn drivers_leave_packets_whose_checksum_is_not_finished() {
    each(|world, f, protocol| {
        let client = outside(world, f)?;
        world.serve(f.vip, &[f.far])?;
        let request = Packet::new(protocol, &at(client, 40_000), &at(f.vip, 80));
        run(world, Program::FromNetwork, &request, world.uplink)?;
        sent_on(world, &request)?;
        let unfinished = addressed(request.to_bytes_unfinished());
        frame_left_alone(world, &unfinished, "the checksum is of the pseudo header")
    });
}

/// A switch that has forgotten where a machine is sends its frames to every port.
#[test]
fn frames_to_other_machines_are_left_alone() {
    each(|world, f, protocol| {
        let client = outside(world, f)?;
        world.serve(f.vip, &[f.far])?;
        let request = Packet::new(protocol, &at(client, 40_000), &at(f.vip, 80));
        let mut frame = to_node(&request);
        frame[5] ^= 1;
        let passed = |frame: &[u8]| -> Result<()> {
            let program = Program::FromNetwork;
            let result = world.kernel.test_run(program, frame, world.uplink, 1)?;
            ensure!(
                result.verdict == PASS && result.packet == frame,
                "verdict {}",
                result.verdict
            );
            Ok(())
        };
        passed(&frame)?;
        ensure!(world.counter("flow_created")? == 0);
        // Nor is a flow of this node carried on for another.
        run(world, Program::FromNetwork, &request, world.uplink)?;
        passed(&frame)?;
        frame_left_alone(world, &frame, "it is for another machine")
    });
}

#[test]
fn drivers_take_and_lose_their_program() {
    each(|world, _, _| {
        let pin = world
            .bpffs
            .join(format!("weir/v{}/links", dataplane_common::ABI_VERSION))
            .join(format!("driver-{}", world.uplink));
        for _ in 0..2 {
            world.kernel.attach_driver("uplink")?;
            ensure!(pin.exists());
            world.restart(LIMITS)?;
        }
        world.kernel.attach_driver("uplink")?;
        world.kernel.keep_drivers(&[world.uplink])?;
        ensure!(pin.exists());
        world.kernel.keep_drivers(&[])?;
        ensure!(!pin.exists());
        // The loopback device's driver runs no programs.
        let error = world
            .kernel
            .attach_driver("lo")
            .err()
            .context("lo took it")?;
        ensure!(error.to_string().contains("does not take"), "{error}");
        Ok(())
    });
}
