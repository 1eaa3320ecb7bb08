//! The `prog` tier: the eBPF programs under `BPF_PROG_TEST_RUN`. A packet in, a verdict, a packet out; every checksum
//! is computed from scratch. Needs root and an embedded object.

#[path = "prog/attacks.rs"]
mod attacks;
#[path = "prog/drivers.rs"]
mod drivers;
#[path = "prog/flows.rs"]
mod flows;
#[path = "prog/fuzz.rs"]
mod fuzz;
#[path = "prog/messages.rs"]
mod messages;
#[path = "prog/policy.rs"]
mod policy;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use weir_agent::kernel::{Limits, PodPrograms, Program};
use weir_tests::prog::packet::{ACK, FIN, Packet, RST, SYN, TCP, UDP};
use weir_tests::prog::world::{
    NODE_V4, NODE_V6, POD_A, POD_B, POD_FAR, PROTOCOLS, World, attach_open_pod, unable,
};

/// Verdicts of the programs.
const PASS: i32 = -1;
const DROP: i32 = 2;
const REDIRECT: i32 = 7;

/// Index of the loopback link in every namespace.
const LOOPBACK: u32 = 1;

const VIP_V4: &str = "10.96.0.20";
const VIP_V6: &str = "fd00:96::20";
const OTHER_VIP_V4: &str = "10.96.0.21";
const OTHER_VIP_V6: &str = "fd00:96::21";

/// Small tables, so that a full one is reached quickly.
const LIMITS: Limits = Limits {
    flows: 1_024,
    frontends: 64,
    slots: 256,
    endpoints: 64,
    maglev_blocks: 4_096,
};

/// The addresses of one family.
#[derive(Clone, Copy)]
struct Family {
    vip: &'static str,
    other_vip: &'static str,
    a: &'static str,
    b: &'static str,
    far: &'static str,
    node: &'static str,
}

const FAMILIES: [Family; 2] = [
    Family {
        vip: VIP_V4,
        other_vip: OTHER_VIP_V4,
        a: POD_A.0,
        b: POD_B.0,
        far: POD_FAR.0,
        node: NODE_V4,
    },
    Family {
        vip: VIP_V6,
        other_vip: OTHER_VIP_V6,
        a: POD_A.1,
        b: POD_B.1,
        far: POD_FAR.1,
        node: NODE_V6,
    },
];

fn at(address: &str, port: u16) -> String {
    if address.contains(':') {
        format!("[{address}]:{port}")
    } else {
        format!("{address}:{port}")
    }
}

/// Builds a world and runs the test for both families and protocols, each in a world of its own.
fn each(test: impl Fn(&mut World, Family, u8) -> Result<()> + Copy + Send + Sync + 'static) {
    if let Some(reason) = unable() {
        println!("SKIPPED: {reason}");
        return;
    }
    for family in FAMILIES {
        for protocol in PROTOCOLS {
            // Namespaces belong to a thread.
            let run = std::thread::spawn(move || {
                let mut world = World::new(LIMITS)?;
                test(&mut world, family, protocol)
            });
            let result = run.join().expect("the test thread panicked");
            if let Err(error) = result {
                panic!("{} protocol {protocol}: {error:?}", family.vip);
            }
        }
    }
}

/// Runs a program once, and reads what comes out.
fn run(world: &World, program: Program, packet: &Packet, ifindex: u32) -> Result<(i32, Packet)> {
    let result = world.test_run(program, &packet.to_bytes(), ifindex, 1)?;
    let output = Packet::from_bytes(&result.packet).context("the packet that came out")?;
    ensure!(output.payload == packet.payload, "the payload changed");
    Ok((result.verdict, output))
}

/// Runs, and expects verdict, source and destination.
fn expect(
    world: &World,
    program: Program,
    packet: &Packet,
    ifindex: u32,
    wanted: (i32, &str, &str),
) -> Result<Packet> {
    let (verdict, output) = run(world, program, packet, ifindex)?;
    let (want_verdict, source, destination) = wanted;
    ensure!(
        verdict == want_verdict
            && output.source == source.parse()?
            && output.destination == destination.parse()?,
        "{program} on {} -> {}: verdict {verdict}, {} -> {}; expected {want_verdict}, {source} -> {destination}; {:?}",
        packet.source,
        packet.destination,
        output.source,
        output.destination,
        world
            .kernel
            .counters()?
            .iter()
            .filter(|c| c.packets > 0)
            .map(|c| (c.name, c.packets))
            .collect::<Vec<_>>(),
    );
    Ok(output)
}

#[test]
fn a_backend_on_another_node_is_reached_over_the_network_and_answers_as_the_service() {
    each(|world, f, protocol| {
        world.serve(f.vip, &[f.far])?;
        let request = Packet::new(protocol, &at(f.a, 40000), &at(f.vip, 80));
        let sent = expect(
            world,
            Program::FromPod,
            &request,
            world.a.link.ifindex,
            (REDIRECT, &at(f.a, 40000), &at(f.far, 8080)),
        )?;
        let back = expect(
            world,
            Program::FromNetwork,
            &sent.answer(),
            world.uplink,
            (REDIRECT, &at(f.vip, 80), &at(f.a, 40000)),
        )?;
        ensure!(
            back.destination_mac == world.a.link.pod_mac,
            "addressed to the pod's interface"
        );
        ensure!(world.counter("flow_created")? == 1);
        Ok(())
    });
}

#[test]
fn a_backend_on_the_same_node_is_reached_directly() {
    each(|world, f, protocol| {
        world.serve(f.vip, &[f.b])?;
        let request = Packet::new(protocol, &at(f.a, 40000), &at(f.vip, 80));
        let (a, b) = (world.a.link.clone(), world.b.link.clone());
        let wanted = (REDIRECT, &*at(f.a, 40000), &*at(f.b, 8080));
        let sent = expect(world, Program::FromPod, &request, a.ifindex, wanted)?;
        ensure!(sent.destination_mac == b.pod_mac && sent.source_mac == b.host_mac);
        let wanted = (REDIRECT, &*at(f.vip, 80), &*at(f.a, 40000));
        let back = expect(world, Program::FromPod, &sent.answer(), b.ifindex, wanted)?;
        ensure!(back.destination_mac == a.pod_mac && back.source_mac == a.host_mac);
        Ok(())
    });
}

#[test]
fn a_backend_that_is_the_node_itself_is_reached_through_its_stack() {
    each(|world, f, protocol| {
        world.serve(f.vip, &[f.node])?;
        let request = Packet::new(protocol, &at(f.a, 40000), &at(f.vip, 80));
        let ifindex = world.a.link.ifindex;
        let wanted = (PASS, &*at(f.a, 40000), &*at(f.node, 8080));
        let sent = expect(world, Program::FromPod, &request, ifindex, wanted)?;
        let wanted = (PASS, &*at(f.vip, 80), &*at(f.a, 40000));
        expect(world, Program::ToPod, &sent.answer(), ifindex, wanted)?;
        Ok(())
    });
}

#[test]
fn a_pod_reaches_itself_through_its_service() {
    each(|world, f, protocol| {
        world.serve(f.vip, &[f.a])?;
        let ifindex = world.a.link.ifindex;
        let request = Packet::new(protocol, &at(f.a, 40000), &at(f.vip, 80));
        let (verdict, sent) = run(world, Program::FromPod, &request, ifindex)?;
        ensure!(verdict == REDIRECT && sent.destination == at(f.a, 8080).parse()?);
        ensure!(
            sent.source.ip() == f.node.parse::<std::net::IpAddr>()?,
            "seen from {}",
            sent.source
        );
        ensure!(sent.source.port() >= 1_024 && sent.source.port() != 40_000);
        let wanted = (REDIRECT, &*at(f.vip, 80), &*at(f.a, 40000));
        expect(world, Program::FromPod, &sent.answer(), ifindex, wanted)?;
        Ok(())
    });
}

#[test]
fn a_process_of_the_node_reaches_pods_here_and_elsewhere() {
    each(|world, f, protocol| {
        world.serve(f.vip, &[f.b])?;
        let request = Packet::new(protocol, &at(f.node, 40000), &at(f.vip, 80));
        let host = world.host.clone();
        let wanted = (REDIRECT, &*at(f.node, 40000), &*at(f.b, 8080));
        let sent = expect(world, Program::FromPod, &request, host.peer_ifindex, wanted)?;
        let wanted = (REDIRECT, &*at(f.vip, 80), &*at(f.node, 40000));
        let back = expect(
            world,
            Program::FromPod,
            &sent.answer(),
            world.b.link.ifindex,
            wanted,
        )?;
        ensure!(
            back.destination_mac == host.host_mac,
            "comes in where the service range is routed to"
        );

        world.serve(f.other_vip, &[f.far])?;
        let request = Packet::new(protocol, &at(f.node, 40000), &at(f.other_vip, 80));
        let wanted = (REDIRECT, &*at(f.node, 40000), &*at(f.far, 8080));
        let sent = expect(world, Program::FromPod, &request, host.peer_ifindex, wanted)?;
        let wanted = (REDIRECT, &*at(f.other_vip, 80), &*at(f.node, 40000));
        expect(
            world,
            Program::FromNetwork,
            &sent.answer(),
            world.uplink,
            wanted,
        )?;
        Ok(())
    });
}

#[test]
fn a_process_of_the_node_reaches_a_backend_that_is_the_node() {
    each(|world, f, protocol| {
        world.serve(f.vip, &[f.node])?;
        let request = Packet::new(protocol, &at(f.node, 40000), &at(f.vip, 80));
        let peer = world.host.peer_ifindex;
        let wanted = (REDIRECT, &*at(f.node, 40000), &*at(f.node, 8080));
        let sent = expect(world, Program::FromPod, &request, peer, wanted)?;
        ensure!(sent.destination_mac == world.host.host_mac);
        let wanted = (REDIRECT, &*at(f.vip, 80), &*at(f.node, 40000));
        expect(world, Program::FromSelf, &sent.answer(), LOOPBACK, wanted)?;
        Ok(())
    });
}

#[test]
fn a_client_from_outside_that_is_routed_here_is_answered_through_here() {
    each(|world, f, protocol| {
        world.serve(f.vip, &[f.far])?;
        let outside = if f.vip.contains(':') {
            "2001:db8:2::100"
        } else {
            "192.0.2.100"
        };
        let request = Packet::new(protocol, &at(outside, 40000), &at(f.vip, 80));
        let (verdict, sent) = run(world, Program::FromPod, &request, world.host.peer_ifindex)?;
        ensure!(verdict == REDIRECT && sent.source.ip() == f.node.parse::<std::net::IpAddr>()?);
        let wanted = (PASS, &*at(f.vip, 80), &*at(outside, 40000));
        expect(
            world,
            Program::FromNetwork,
            &sent.answer(),
            world.uplink,
            wanted,
        )?;
        Ok(())
    });
}

#[test]
fn packets_that_are_for_no_service_go_their_way_unchanged() {
    each(|world, f, protocol| {
        let (a, b) = (world.a.link.ifindex, world.b.link.clone());
        let direct = Packet::new(protocol, &at(f.a, 40000), &at(f.b, 8080));
        let wanted = (REDIRECT, &*at(f.a, 40000), &*at(f.b, 8080));
        let sent = expect(world, Program::FromPod, &direct, a, wanted)?;
        ensure!(sent.destination_mac == b.pod_mac);
        let far = Packet::new(protocol, &at(f.a, 40000), &at(f.far, 8080));
        let wanted = (REDIRECT, &*at(f.a, 40000), &*at(f.far, 8080));
        expect(world, Program::FromPod, &far, a, wanted)?;
        let node = Packet::new(protocol, &at(f.a, 40000), &at(f.node, 22));
        let wanted = (PASS, &*at(f.a, 40000), &*at(f.node, 22));
        expect(world, Program::FromPod, &node, a, wanted)?;
        let wanted = (REDIRECT, &*at(f.far, 8080), &*at(f.a, 40000));
        expect(
            world,
            Program::FromNetwork,
            &far.answer(),
            world.uplink,
            wanted,
        )?;
        ensure!(world.counter("flow_created")? == 3);
        ensure!(
            world.counter("translated_forward")? == 0 && world.counter("translated_reply")? == 0
        );
        Ok(())
    });
}

#[test]
fn a_source_that_is_not_the_pods_own_is_dropped() {
    each(|world, f, protocol| {
        world.serve(f.vip, &[f.far])?;
        for source in [f.b, f.node, f.far] {
            let packet = Packet::new(protocol, &at(source, 40000), &at(f.vip, 80));
            let (verdict, _) = run(world, Program::FromPod, &packet, world.a.link.ifindex)?;
            ensure!(verdict == DROP, "{source} got {verdict}");
        }
        ensure!(world.counter("spoofed_source")? == 3);
        Ok(())
    });
}

#[test]
fn a_link_without_an_entry_sends_nothing() {
    each(|world, f, protocol| {
        world
            .kernel
            .detach_pod(world.a.link.ifindex, &world.a.link.addresses)?;
        let packet = Packet::new(protocol, &at(f.a, 40000), &at(f.b, 80));
        let (verdict, _) = run(world, Program::FromPod, &packet, world.a.link.ifindex)?;
        ensure!(verdict == DROP && world.counter("unknown_link")? == 1);
        ensure!(
            !world.kernel.is_attached(&world.a.link) && world.kernel.is_attached(&world.b.link)
        );
        world.kernel.attach_pod(&world.a.link)?;
        ensure!(world.kernel.is_attached(&world.a.link));
        let (verdict, _) = run(world, Program::FromPod, &packet, world.a.link.ifindex)?;
        ensure!(
            verdict == DROP && world.counter("policy_pending")? == 1,
            "a pod of which nobody entered a policy is shut"
        );
        attach_open_pod(&world.kernel, &world.a.link)?;
        let (verdict, _) = run(world, Program::FromPod, &packet, world.a.link.ifindex)?;
        ensure!(verdict == REDIRECT);
        Ok(())
    });
}

#[test]
fn a_service_without_backends_and_an_address_without_a_service_refuse_by_name() {
    each(|world, f, protocol| {
        world.serve(f.vip, &[])?;
        let a = world.a.link.ifindex;
        let none = Packet::new(protocol, &at(f.a, 40000), &at(f.vip, 80));
        is_refused(world, &none, a)?;
        ensure!(world.counter("no_backend")? == 1);
        let unknown = Packet::new(protocol, &at(f.a, 40000), &at(f.vip, 81));
        is_refused(world, &unknown, a)?;
        let host = Packet::new(protocol, &at(f.node, 40000), &at(f.vip, 81));
        is_refused(world, &host, world.host.peer_ifindex)?;
        ensure!(world.counter("no_frontend")? == 2 && world.counter("refused")? == 3);
        if protocol == TCP {
            let reset = none.with_flags(RST);
            let result = world.test_run(Program::FromPod, &reset.to_bytes(), a, 1)?;
            ensure!(result.verdict == DROP, "a reset is not answered");
        }
        Ok(())
    });
}

/// The answer goes back out of the link: a reset for TCP, a port unreachable message that quotes a datagram.
fn is_refused(world: &World, packet: &Packet, ifindex: u32) -> Result<()> {
    let sent = packet.to_bytes();
    let result = world.test_run(Program::FromPod, &sent, ifindex, 1)?;
    ensure!(result.verdict == REDIRECT, "verdict {}", result.verdict);
    if packet.protocol == TCP {
        let answer = Packet::from_bytes(&result.packet)?;
        ensure!(
            answer.tcp_flags == RST | ACK && answer.payload.is_empty(),
            "{answer:?}"
        );
        ensure!(answer.source == packet.destination && answer.destination == packet.source);
        ensure!(answer.destination_mac == packet.source_mac);
        return Ok(());
    }
    let quote = weir_tests::prog::packet::quoted_by_icmp(&result.packet)?;
    let header = if packet.source.is_ipv4() { 20 } else { 40 };
    ensure!(
        *quote == sent[14..14 + header + 8],
        "the datagram's start is quoted"
    );
    Ok(())
}

#[test]
fn two_services_with_one_backend_and_one_client_port_stay_apart() {
    each(|world, f, protocol| {
        world.serve(f.vip, &[f.far])?;
        world.serve(f.other_vip, &[f.far])?;
        let a = world.a.link.ifindex;
        let mut sent = Vec::new();
        for vip in [f.vip, f.other_vip] {
            let request = Packet::new(protocol, &at(f.a, 40000), &at(vip, 80));
            let (verdict, output) = run(world, Program::FromPod, &request, a)?;
            ensure!(verdict == REDIRECT && output.destination == at(f.far, 8080).parse()?);
            sent.push((vip, output));
        }
        ensure!(sent[0].1.source.port() == 40000 && sent[1].1.source.port() != 40_000);
        for (vip, output) in sent {
            let wanted = (REDIRECT, &*at(vip, 80), &*at(f.a, 40000));
            expect(
                world,
                Program::FromNetwork,
                &output.answer(),
                world.uplink,
                wanted,
            )?;
        }
        ensure!(world.counter("source_port_changed")? == 1);
        Ok(())
    });
}

#[test]
fn flows_leave_a_backend_that_goes_and_are_collected() {
    each(|world, f, protocol| {
        world.serve(f.vip, &[f.b])?;
        let a = world.a.link.ifindex;
        let request = Packet::new(protocol, &at(f.a, 40000), &at(f.vip, 80));
        let wanted = (REDIRECT, &*at(f.a, 40000), &*at(f.b, 8080));
        expect(world, Program::FromPod, &request, a, wanted)?;
        world.serve(f.vip, &[f.far])?;
        let wanted = (REDIRECT, &*at(f.a, 40000), &*at(f.far, 8080));
        expect(world, Program::FromPod, &request, a, wanted)?;
        ensure!(world.counter("flow_renewed")? == 1);
        world.kernel.collect_flows()?;
        ensure!(world.kernel.flow_count() == 1, "the live flow stays");
        world.end(f.vip)?;
        let report = world.kernel.collect_flows()?;
        // A connection would go on without its service; datagrams do not.
        let removed = usize::from(protocol == UDP);
        ensure!(
            report.removed == removed && world.kernel.flow_count() == 1 - removed,
            "{report:?}"
        );
        is_refused(world, &request, a)?;
        ensure!(world.counter("no_frontend")? == 1);
        Ok(())
    });
}

#[test]
fn a_restart_keeps_flows_and_services() {
    each(|world, f, protocol| {
        world.serve(f.vip, &[f.far, f.b])?;
        let a = world.a.link.ifindex;
        let request = Packet::new(protocol, &at(f.a, 40000), &at(f.vip, 80));
        let (_, sent) = run(world, Program::FromPod, &request, a)?;
        world.restart(LIMITS)?;
        ensure!(world.kernel.is_attached(&world.a.link));
        for _ in 0..8 {
            let (verdict, again) = run(world, Program::FromPod, &request, a)?;
            ensure!(verdict == REDIRECT && again.destination == sent.destination);
        }
        world.apply()?;
        let (_, again) = run(world, Program::FromPod, &request, a)?;
        ensure!(
            again.destination == sent.destination,
            "ids stay over the first apply"
        );
        ensure!(world.counter("flow_renewed")? == 0 && world.counter("flow_created")? == 1);
        Ok(())
    });
}

#[test]
fn a_full_flow_table_displaces_half_open_flows_and_keeps_conversations() {
    each(|world, f, protocol| {
        world.serve(f.vip, &[f.far])?;
        let a = world.a.link.ifindex;
        let limit = u16::try_from(LIMITS.flows)?;
        let request = |port| Packet::new(protocol, &at(f.a, port), &at(f.vip, 80));
        let (_, sent) = run(world, Program::FromPod, &request(10_000), a)?;
        run(world, Program::FromNetwork, &sent.answer(), world.uplink)?;
        let established = request(10_000).with_flags(if protocol == TCP { ACK } else { 0 });
        run(world, Program::FromPod, &established, a)?;
        let mut dropped = 0;
        for port in 10_001..10_001 + limit + 200 {
            if run(world, Program::FromPod, &request(port), a)?.0 == DROP {
                dropped += 1;
            }
        }
        let displaced = world.counter("flow_displaced")?;
        ensure!(
            dropped + displaced >= 200 && displaced >= 20,
            "{dropped} dropped, {displaced} displaced"
        );
        ensure!(world.counter("flow_table_full")? == dropped);
        let (_, again) = run(world, Program::FromPod, &established, a)?;
        ensure!(again.destination == sent.destination);
        ensure!(
            world.counter("flow_renewed")? == 0,
            "a conversation goes on"
        );
        let report = world.kernel.collect_flows()?;
        ensure!(report.repaired == 0, "no half pairs: {report:?}");
        Ok(())
    });
}

#[test]
fn a_datagram_without_checksum_stays_without() {
    each(|world, f, protocol| {
        if protocol != UDP || f.vip.contains(':') {
            return Ok(());
        }
        world.serve(f.vip, &[f.far])?;
        let mut request = Packet::new(UDP, &at(f.a, 40000), &at(f.vip, 80));
        request.checksum = false;
        let wanted = (REDIRECT, &*at(f.a, 40000), &*at(f.far, 8080));
        let sent = expect(
            world,
            Program::FromPod,
            &request,
            world.a.link.ifindex,
            wanted,
        )?;
        ensure!(!sent.checksum);
        Ok(())
    });
}

#[test]
fn a_new_connection_from_a_port_that_has_closed_chooses_again() {
    each(|world, f, protocol| {
        if protocol != TCP {
            return Ok(());
        }
        world.serve(f.vip, &[f.far])?;
        let a = world.a.link.ifindex;
        let open = Packet::new(TCP, &at(f.a, 40000), &at(f.vip, 80));
        let (_, sent) = run(world, Program::FromPod, &open, a)?;
        for answer in [SYN | ACK, FIN | ACK, RST] {
            run(
                world,
                Program::FromNetwork,
                &sent.answer().with_flags(answer),
                world.uplink,
            )?;
        }
        run(world, Program::FromPod, &open.clone().with_flags(ACK), a)?;
        ensure!(
            world.counter("flow_renewed")? == 0,
            "stray segments use the old flow"
        );
        run(world, Program::FromPod, &open, a)?;
        ensure!(world.counter("flow_renewed")? == 1);
        Ok(())
    });
}

#[test]
fn programs_are_cheap_to_verify() {
    if let Some(reason) = unable() {
        println!("SKIPPED: {reason}");
        return;
    }
    // Namespaces belong to a thread.
    let run = std::thread::spawn(|| World::new(LIMITS)?.check_verified());
    let result = run.join().expect("the test thread panicked");
    if let Err(error) = result {
        panic!("{error:?}");
    }
}

#[test]
fn costs_are_printed() {
    const ROUNDS: u32 = 2_000;
    each(|world, f, protocol| {
        world.serve(f.vip, &[f.b])?;
        let request = Packet::new(protocol, &at(f.a, 40000), &at(f.vip, 80)).with_flags(ACK);
        let a = world.a.link.ifindex;
        run(world, Program::FromPod, &request, a)?;
        // A repeated run goes on with the changed packet, so the service's path is measured run by run.
        let mut service = Duration::ZERO;
        for _ in 0..ROUNDS {
            service += world
                .test_run(Program::FromPod, &request.to_bytes(), a, 1)?
                .duration;
        }
        println!(
            "from_pod {} protocol {protocol}, known flow: {:?}",
            f.vip,
            service / ROUNDS
        );
        let direct = Packet::new(protocol, &at(f.a, 40000), &at(f.b, 8080));
        let result = world.test_run(Program::FromPod, &direct.to_bytes(), a, 200_000)?;
        println!(
            "from_pod {} protocol {protocol}, no service: {:?}",
            f.vip, result.duration
        );
        println!("verified instructions: {:?}", world.kernel.program_sizes());
        Ok(())
    });
}
