//! ICMP errors, echo, refusals, fragments and SCTP through the programs. What comes out is compared with packets that
//! were written from scratch.

use anyhow::{Result, ensure};
use weir_agent::kernel::Program;
use weir_tests::prog::packet::{Packet, TCP, UDP};
use weir_tests::prog::wire::{ICMP, ICMPV6, Ip, SCTP, checked, datagram, frame, message, sctp};
use weir_tests::prog::world::World;

use crate::{DROP, Family, LOOPBACK, PASS, REDIRECT, at, each, run};

/// A host outside the cluster, and a router: neither is known to the node.
fn outside(f: Family) -> (&'static str, &'static str) {
    if is_v6(f) {
        ("2001:db8:51::100", "2001:db8:2::1")
    } else {
        ("198.51.100.100", "192.0.2.1")
    }
}

fn is_v6(f: Family) -> bool {
    f.vip.contains(':')
}

fn icmp(f: Family) -> u8 {
    if is_v6(f) { ICMPV6 } else { ICMP }
}

/// Type, code and rest of «packet too big».
fn too_big(f: Family) -> ((u8, u8), [u8; 4]) {
    if is_v6(f) {
        ((2, 0), [0, 0, 5, 20])
    } else {
        ((3, 4), [0, 0, 5, 20])
    }
}

/// «Port unreachable».
fn port_unreachable(f: Family) -> ((u8, u8), [u8; 4]) {
    if is_v6(f) {
        ((1, 4), [0; 4])
    } else {
        ((3, 3), [0; 4])
    }
}

/// The IP packet of a test packet, cut to its header and so many bytes after it.
fn quote(f: Family, packet: &Packet, bytes: usize) -> Vec<u8> {
    let header = if is_v6(f) { 40 } else { 20 };
    let mut quote = packet.to_bytes()[14..].to_vec();
    quote.truncate(header + bytes);
    quote
}

/// Runs a program and gives the verdict and the IP packet that came out.
fn pass(world: &World, program: Program, packet: &[u8], ifindex: u32) -> Result<(i32, Vec<u8>)> {
    let result = world.test_run(program, &frame(packet), ifindex, 1)?;
    let packet = match checked(&result.packet) {
        Ok(packet) => packet.to_vec(),
        Err(error) => anyhow::bail!("what {program} made of it: {error}: {:02x?}", result.packet),
    };
    Ok((result.verdict, packet))
}

/// Runs a program on an error about `about`, and expects one about `known`.
struct Expect<'a> {
    program: Program,
    ifindex: u32,
    /// Source and destination before and after.
    before: (&'a str, &'a str),
    after: (&'a str, &'a str),
    about: &'a Packet,
    known: &'a Packet,
    verdict: i32,
}

impl Expect<'_> {
    /// For quotes of eight bytes, of a whole header, and of everything.
    fn check(&self, world: &World, f: Family, kind: ((u8, u8), [u8; 4])) -> Result<()> {
        for bytes in [8, 20, 400] {
            let error = |(source, destination): (&str, &str), about: &Packet| {
                let ip = Ip::new(source, destination, icmp(f));
                message(&ip, kind.0, kind.1, &quote(f, about, bytes))
            };
            let sent = error(self.before, self.about);
            let (verdict, got) = pass(world, self.program, &sent, self.ifindex)?;
            let wanted = error(self.after, self.known);
            ensure!(
                verdict == self.verdict && got == wanted,
                "{} with {bytes} bytes quoted: verdict {verdict}\n   got {got:02x?}\nwanted {wanted:02x?}\n{:?}",
                self.program,
                world
                    .kernel
                    .counters()?
                    .iter()
                    .filter(|c| c.packets > 0)
                    .map(|c| (c.name, c.packets))
                    .collect::<Vec<_>>(),
            );
        }
        Ok(())
    }
}

#[test]
fn an_error_about_a_request_comes_to_the_client_as_about_what_it_sent() {
    each(|world, f, protocol| {
        world.serve(f.vip, &[f.far])?;
        let (_, router) = outside(f);
        let request = Packet::new(protocol, &at(f.a, 40000), &at(f.vip, 80));
        let (_, sent) = run(world, Program::FromPod, &request, world.a.link.ifindex)?;
        let from_router = Expect {
            program: Program::FromNetwork,
            ifindex: world.uplink,
            before: (router, f.a),
            after: (router, f.a),
            about: &sent,
            known: &request,
            verdict: REDIRECT,
        };
        from_router.check(world, f, too_big(f))?;
        // The backend itself speaks for the service.
        let from_backend = Expect {
            before: (f.far, f.a),
            after: (f.vip, f.a),
            ..from_router
        };
        from_backend.check(world, f, port_unreachable(f))?;
        // The node's own stack, on the way into the pod.
        let from_stack = Expect {
            program: Program::ToPod,
            ifindex: world.a.link.ifindex,
            before: (f.node, f.a),
            after: (f.node, f.a),
            verdict: PASS,
            ..from_router
        };
        from_stack.check(world, f, too_big(f))?;
        ensure!(world.counter("translated_error")? == 9);
        Ok(())
    });
}

#[test]
fn an_error_about_an_answer_comes_to_the_backend_as_about_what_it_sent() {
    each(|world, f, protocol| {
        world.serve(f.vip, &[f.b])?;
        let request = Packet::new(protocol, &at(f.a, 40000), &at(f.vip, 80));
        let a = world.a.link.ifindex;
        let (_, sent) = run(world, Program::FromPod, &request, a)?;
        let answer = sent.answer();
        let (_, known) = run(world, Program::FromPod, &answer, world.b.link.ifindex)?;
        // The client's pod refuses the answer.
        let from_client = Expect {
            program: Program::FromPod,
            ifindex: a,
            before: (f.a, f.vip),
            after: (f.a, f.b),
            about: &known,
            known: &answer,
            verdict: REDIRECT,
        };
        from_client.check(world, f, port_unreachable(f))?;
        Ok(())
    });
}

#[test]
fn an_error_for_a_process_of_the_node_is_about_the_service() {
    each(|world, f, protocol| {
        world.serve(f.vip, &[f.far])?;
        let (_, router) = outside(f);
        let request = Packet::new(protocol, &at(f.node, 40000), &at(f.vip, 80));
        let (_, sent) = run(world, Program::FromPod, &request, world.host.peer_ifindex)?;
        let expect = Expect {
            program: Program::FromNetwork,
            ifindex: world.uplink,
            before: (router, f.node),
            after: (router, f.node),
            about: &sent,
            known: &request,
            verdict: REDIRECT,
        };
        expect.check(world, f, too_big(f))?;
        Ok(())
    });
}

#[test]
fn a_hairpin_flow_gets_its_errors_too() {
    each(|world, f, protocol| {
        world.serve(f.vip, &[f.a])?;
        let a = world.a.link.ifindex;
        let request = Packet::new(protocol, &at(f.a, 40000), &at(f.vip, 80));
        let (_, sent) = run(world, Program::FromPod, &request, a)?;
        // The pod, as its own server, refuses what the node seemed to send.
        let expect = Expect {
            program: Program::FromPod,
            ifindex: a,
            before: (f.a, f.node),
            after: (f.vip, f.a),
            about: &sent,
            known: &request,
            verdict: REDIRECT,
        };
        expect.check(world, f, port_unreachable(f))?;
        Ok(())
    });
}

#[test]
fn an_error_without_a_flow_stays_as_it_is() {
    each(|world, f, protocol| {
        let (_, router) = outside(f);
        let never_sent = Packet::new(protocol, &at(f.a, 40000), &at(f.far, 80));
        let expect = Expect {
            program: Program::FromNetwork,
            ifindex: world.uplink,
            before: (router, f.a),
            after: (router, f.a),
            about: &never_sent,
            known: &never_sent,
            verdict: REDIRECT,
        };
        expect.check(world, f, too_big(f))?;
        // A pod may speak for itself only.
        let forged = message(
            &Ip::new(router, f.b, icmp(f)),
            too_big(f).0,
            too_big(f).1,
            &quote(f, &never_sent, 8),
        );
        let (verdict, _) = pass(world, Program::FromPod, &forged, world.a.link.ifindex)?;
        ensure!(verdict == DROP && world.counter("spoofed_source")? == 1);
        ensure!(world.counter("translated_error")? == 0);
        Ok(())
    });
}

/// An echo request, or the reply to it.
fn echo(f: Family, source: &str, destination: &str, reply: bool) -> Vec<u8> {
    let kind = match (is_v6(f), reply) {
        (false, false) => 8,
        (false, true) => 0,
        (true, false) => 128,
        (true, true) => 129,
    };
    let ip = Ip::new(source, destination, icmp(f));
    message(&ip, (kind, 0), [0x12, 0x34, 0, 7], b"are you there?")
}

#[test]
fn an_echo_request_to_a_service_is_answered_by_the_node() {
    each(|world, f, protocol| {
        if protocol != UDP {
            return Ok(());
        }
        world.serve(f.vip, &[f.far])?;
        let (client, _) = outside(f);
        for (program, ifindex, source) in [
            (Program::FromPod, world.a.link.ifindex, f.a),
            (Program::FromPod, world.host.peer_ifindex, f.node),
            (Program::FromNetwork, world.uplink, client),
        ] {
            let request = echo(f, source, f.vip, false);
            let (verdict, got) = pass(world, program, &request, ifindex)?;
            ensure!(
                verdict == REDIRECT && got == echo(f, f.vip, source, true),
                "{program} {source}: {verdict} {got:02x?}"
            );
        }
        ensure!(world.counter("echo_answered")? == 3);
        // Pods answer for themselves.
        let request = echo(f, f.a, f.b, false);
        let (verdict, got) = pass(world, Program::FromPod, &request, world.a.link.ifindex)?;
        ensure!(verdict == REDIRECT && got == request);
        Ok(())
    });
}

#[test]
fn a_refusal_quotes_headers_with_options() {
    each(|world, f, protocol| {
        if protocol != UDP {
            return Ok(());
        }
        world.serve(f.vip, &[])?;
        let options: &[usize] = if is_v6(f) { &[0, 1] } else { &[0, 1, 10] };
        for options in options {
            let ip = Ip {
                options: *options,
                ..Ip::new(f.a, f.vip, UDP)
            };
            let request = ip.around(&datagram(&ip, (40000, 80), b"what is served here?"));
            let (verdict, got) = pass(world, Program::FromPod, &request, world.a.link.ifindex)?;
            let header = match (is_v6(f), options) {
                (true, options) => 40 + options * 8,
                (false, options) => 20 + options * 4,
            };
            let body = if is_v6(f) { 48 } else { 28 };
            ensure!(
                verdict == REDIRECT && got[body..] == request[..header + 8],
                "{options} options: {verdict} {got:02x?}"
            );
        }
        // Neither is what comes after the first fragment answered, nor a message about another packet.
        let ip = Ip {
            fragment: Some((9, 800, true)),
            ..Ip::new(f.a, f.vip, UDP)
        };
        let (verdict, _) = pass(
            world,
            Program::FromPod,
            &ip.around(&[7; 80]),
            world.a.link.ifindex,
        )?;
        ensure!(verdict == DROP);
        Ok(())
    });
}

#[test]
fn clients_outside_and_processes_of_the_node_are_refused_too() {
    each(|world, f, protocol| {
        world.serve(f.vip, &[])?;
        let (client, _) = outside(f);
        let request = Packet::new(protocol, &at(client, 40000), &at(f.vip, 80));
        let result = world.test_run(Program::FromNetwork, &request.to_bytes(), world.uplink, 1)?;
        ensure!(result.verdict == REDIRECT, "{}", result.verdict);
        let packet = checked(&result.packet)?;
        let source = if is_v6(f) {
            &packet[8..24]
        } else {
            &packet[12..16]
        };
        let wanted = request.to_bytes();
        let destination = if is_v6(f) {
            &wanted[38..54]
        } else {
            &wanted[30..34]
        };
        ensure!(source == destination, "the service speaks");
        ensure!(world.counter("refused")? == 1);
        Ok(())
    });
}

#[test]
fn refusals_by_message_are_limited_and_resets_are_not() {
    const FLOOD: u32 = 400;
    each(|world, f, protocol| {
        world.serve(f.vip, &[])?;
        let request = Packet::new(protocol, &at(f.a, 40000), &at(f.vip, 80));
        for _ in 0..FLOOD {
            world.test_run(
                Program::FromPod,
                &request.to_bytes(),
                world.a.link.ifindex,
                1,
            )?;
        }
        let (refused, limited) = (world.counter("refused")?, world.counter("refusal_limited")?);
        ensure!(
            refused + limited == u64::from(FLOOD) && refused > 0,
            "{refused} {limited}"
        );
        if protocol == TCP {
            ensure!(limited == 0, "{limited}");
        }
        Ok(())
    });
}

/// The parts of a datagram, as IP packets, in their order.
fn cut(source: &str, destination: &str, id: u16, payload: &[u8]) -> Vec<Vec<u8>> {
    const SIZE: usize = 800;
    let ip = Ip::new(source, destination, UDP);
    let whole = datagram(&ip, (40000, 80), payload);
    let count = whole.len().div_ceil(SIZE);
    let parts = whole.chunks(SIZE).enumerate().map(|(index, part)| {
        let offset = u16::try_from(index * SIZE).unwrap_or(0);
        let ip = Ip {
            fragment: Some((id, offset, index + 1 < count)),
            ..ip
        };
        ip.around(part)
    });
    parts.collect()
}

#[test]
fn fragments_wait_for_their_first_and_then_follow_it() {
    each(|world, f, protocol| {
        if protocol != UDP {
            return Ok(());
        }
        world.serve(f.vip, &[f.far])?;
        let a = world.a.link.ifindex;
        let parts = cut(f.a, f.vip, 77, &[0x42; 2_000]);
        // Nobody keeps them: dropped by name.
        let (verdict, _) = pass(world, Program::FromPod, &parts[2], a)?;
        ensure!(verdict == DROP && world.counter("early_fragment")? == 1);

        world.kernel.accept_fragments(world.uplink)?;
        let result = world.test_run(Program::FromPod, &frame(&parts[2]), a, 1)?;
        ensure!(result.verdict == REDIRECT && world.counter("parked")? == 1);
        ensure!(result.packet[14..] == parts[2], "it waits as it came");
        let fragment = weir_agent::fragments::room::identify(&result.packet);
        let Some(fragment) = fragment else {
            anyhow::bail!("the agent does not know it: {:02x?}", result.packet);
        };
        ensure!(fragment.ifindex == a && !world.kernel.first_has_passed(&fragment.datagram)?);

        let (verdict, first) = pass(world, Program::FromPod, &parts[0], a)?;
        ensure!(verdict == REDIRECT && world.kernel.first_has_passed(&fragment.datagram)?);
        // Back by the link to user space, in once more where it came in first.
        let back = world.test_run(Program::FromPark, &result.packet, world.uplink, 1)?;
        ensure!(back.verdict == REDIRECT);
        for index in [2, 1] {
            let (verdict, later) = pass(world, Program::FromPod, &parts[index], a)?;
            let addresses = if is_v6(f) { 8..40 } else { 12..20 };
            ensure!(
                verdict == REDIRECT && later[addresses.clone()] == first[addresses],
                "part {index}: {verdict}"
            );
        }
        // All have passed: another datagram of this identification is its own.
        ensure!(!world.kernel.first_has_passed(&fragment.datagram)?);
        Ok(())
    });
}

#[test]
fn sctp_keeps_its_checksum_over_a_change_of_ports() {
    each(|world, f, protocol| {
        const INIT: u8 = 1;
        const ABORT: u8 = 6;
        if protocol != UDP {
            return Ok(());
        }
        world.serve(f.vip, &[f.far])?;
        let a = world.a.link.ifindex;
        let odd = vec![0x77; 333];
        for (chunk, value) in [(INIT, &odd[..16]), (0, &odd[..]), (ABORT, &[])] {
            for sealed in [true, false] {
                let ip = Ip::new(f.a, f.vip, SCTP);
                let request = ip.around(&sctp((40000, 80), chunk, value, sealed));
                let (verdict, got) = pass(world, Program::FromPod, &request, a)?;
                let mut ip = Ip::new(f.a, f.far, SCTP);
                // The way to another node is a hop.
                ip.hops -= 1;
                let wanted = ip.around(&sctp((40000, 8080), chunk, value, sealed));
                ensure!(
                    verdict == REDIRECT && got == wanted,
                    "chunk {chunk}: {verdict}\n   got {got:02x?}\nwanted {wanted:02x?}"
                );
                let ip = Ip::new(f.far, f.a, SCTP);
                let answer = ip.around(&sctp((8080, 40000), chunk.max(2), value, sealed));
                let (verdict, got) = pass(world, Program::FromNetwork, &answer, world.uplink)?;
                let ip = Ip::new(f.vip, f.a, SCTP);
                let wanted = ip.around(&sctp((80, 40000), chunk.max(2), value, sealed));
                ensure!(verdict == REDIRECT && got == wanted, "{verdict}");
            }
        }
        ensure!(world.counter("flow_created")? == 1);
        Ok(())
    });
}

/// The checksum covers more than any fragment has: none goes on, the first no more than the rest.
#[test]
fn sctp_fragments_that_would_need_other_ports_are_dropped_by_name() {
    each(|world, f, protocol| {
        if protocol != UDP {
            return Ok(());
        }
        world.serve(f.vip, &[f.far])?;
        let a = world.a.link.ifindex;
        let whole = sctp((40000, 80), 0, &[0x77; 333], true);
        let (first, rest) = whole.split_at(160);
        let mut dropped = 0;
        for (offset, part, more) in [(0, first, true), (160, rest, false)] {
            let mut ip = Ip::new(f.a, f.vip, SCTP);
            ip.fragment = Some((99, offset, more));
            let (verdict, _) = pass(world, Program::FromPod, &ip.around(part), a)?;
            dropped += 1;
            ensure!(
                verdict == DROP && world.counter("sctp_fragment")? == dropped,
                "fragment at {offset}: {verdict}"
            );
        }
        // Between pods nothing changes, and fragments pass.
        let mut ip = Ip::new(f.a, f.b, SCTP);
        ip.fragment = Some((98, 0, true));
        let (verdict, _) = pass(world, Program::FromPod, &ip.around(first), a)?;
        ensure!(verdict == REDIRECT && world.counter("sctp_fragment")? == dropped);
        Ok(())
    });
}

#[test]
fn loopback_is_where_a_refusal_to_a_process_stays() {
    each(|world, f, protocol| {
        // No port of a service: what a process says to its own node is the stack's.
        let request = Packet::new(protocol, &at(f.node, 40000), &at(f.node, 80));
        let result = world.test_run(Program::FromSelf, &request.to_bytes(), LOOPBACK, 1)?;
        ensure!(result.verdict == PASS && result.packet == request.to_bytes());
        Ok(())
    });
}
