//! What a pod may try to get past its policies, or to be taken for a router.

use anyhow::{Result, ensure};
use dataplane_common::layout::{
    DIRECTION_EGRESS, DIRECTION_INGRESS, IDENTITY_ANY, POLICY_EGRESS, POLICY_INGRESS,
    POLICY_INGRESS_CLOSED, RULE_DENY,
};
use weir_agent::kernel::Program;
use weir_tests::prog::packet::{ACK, FIN, Packet, RST, SYN, TCP, UDP};
use weir_tests::prog::policies::{Policies, Rule};
use weir_tests::prog::wire::{ICMP, ICMPV6, Ip, frame, message};
use weir_tests::prog::world::World;

use crate::{DROP, Family, PASS, REDIRECT, at, each, run};

const POLICY: u32 = 7;
const FORBIDDEN: u16 = 22;
const FREE: u16 = 23;
const ETHERNET: usize = 14;
const IPV4_HEADER: usize = 20;
const IPV6_HEADER: usize = 40;

fn is_v6(f: Family) -> bool {
    f.a.contains(':')
}

/// The transport part of a packet.
fn transport(packet: &Packet) -> Vec<u8> {
    let header = if packet.source.is_ipv6() {
        IPV6_HEADER
    } else {
        IPV4_HEADER
    };
    packet.to_bytes()[ETHERNET + header..].to_vec()
}

fn verdict(world: &World, bytes: &[u8], ifindex: u32) -> Result<i32> {
    let result = world.test_run(Program::FromPod, bytes, ifindex, 1)?;
    Ok(result.verdict)
}

/// A pod that may send everywhere but to one port.
fn forbid(world: &World, protocol: u8) -> Result<u32> {
    let a = world.a.link.ifindex;
    let mut policies = Policies::open(&world.bpffs)?;
    policies.add(&Rule {
        policy_id: POLICY,
        identity: IDENTITY_ANY,
        direction: DIRECTION_EGRESS,
        protocol: Some(protocol),
        port: Some(FORBIDDEN),
        number: 0,
        action: RULE_DENY,
    })?;
    policies.set_pod(a, POLICY, POLICY_EGRESS)?;
    Ok(a)
}

#[test]
fn options_and_extension_headers_hide_no_port() {
    each(|world, f, protocol| {
        let a = forbid(world, protocol)?;
        let sent = |port, options| -> Result<i32> {
            let packet = Packet::new(protocol, &at(f.a, 40_000), &at(f.far, port));
            let ip = Ip {
                options,
                ..Ip::new(f.a, f.far, protocol)
            };
            verdict(world, &frame(&ip.around(&transport(&packet))), a)
        };
        let looked_through: &[usize] = if is_v6(f) { &[0, 1, 4] } else { &[0, 1, 10] };
        for options in looked_through {
            ensure!(sent(FORBIDDEN, *options)? == DROP, "{options} options");
            ensure!(sent(FREE, *options)? == REDIRECT, "{options} options");
        }
        ensure!(world.counter("policy_egress")? == 3 && world.counter("malformed")? == 0);
        if is_v6(f) {
            // What is behind so many is not known.
            ensure!(sent(FORBIDDEN, 5)? == DROP && sent(FREE, 5)? == DROP);
            ensure!(world.counter("malformed")? == 2);
        } else {
            // A route that the sender wishes for changes nothing: the packet is judged by its destination.
            let ip = Ip {
                options: 2,
                ..Ip::new(f.a, f.far, protocol)
            };
            let packet = Packet::new(protocol, &at(f.a, 40_000), &at(f.far, FORBIDDEN));
            let mut bytes = frame(&ip.around(&transport(&packet)));
            let options = ETHERNET + IPV4_HEADER;
            bytes[options..options + 8].copy_from_slice(&[131, 7, 4, 10, 244, 1, 3, 0]);
            ensure!(verdict(world, &bytes, a)? == DROP);
            ensure!(world.counter("policy_egress")? == 4);
        }
        Ok(())
    });
}

#[test]
fn fragments_that_hide_their_ports_go_nowhere() {
    each(|world, f, protocol| {
        let a = forbid(world, protocol)?;
        let part = |port, offset, bytes: std::ops::Range<usize>| -> Result<i32> {
            let packet = Packet::new(protocol, &at(f.a, 40_000), &at(f.far, port));
            let ip = Ip {
                fragment: Some((77, offset, true)),
                ..Ip::new(f.a, f.far, protocol)
            };
            verdict(world, &frame(&ip.around(&transport(&packet)[bytes])), a)
        };
        if protocol == TCP {
            // Its flags would come in the next.
            ensure!(part(FREE, 0, 0..8)? == DROP && world.counter("malformed")? == 1);
            ensure!(
                part(FREE, 8, 8..16)? == DROP,
                "and what follows has no first"
            );
        }
        ensure!(part(FORBIDDEN, 0, 0..24)? == DROP && world.counter("policy_egress")? == 1);
        ensure!(part(FORBIDDEN, 24, 24..32)? == DROP, "nor has this");
        // An allowed first part is no licence for another first part.
        ensure!(part(FREE, 0, 0..24)? == REDIRECT);
        let denied = world.counter("policy_egress")?;
        ensure!(part(FORBIDDEN, 0, 0..24)? == DROP);
        ensure!(world.counter("policy_egress")? == denied + 1);
        Ok(())
    });
}

#[test]
fn no_flags_open_a_closed_pod() {
    each(|world, f, protocol| {
        let (a, b) = (world.a.link.ifindex, world.b.link.ifindex);
        let mut policies = Policies::open(&world.bpffs)?;
        policies.set_pod(b, POLICY, POLICY_INGRESS | POLICY_INGRESS_CLOSED)?;
        let flags = [SYN, ACK, SYN | ACK, RST, FIN, FIN | ACK, 0, 0xff];
        for (sent, flags) in (1..).zip(flags) {
            let mut packet = Packet::new(protocol, &at(f.a, 40_000), &at(f.b, 80));
            if protocol == TCP {
                packet = packet.with_flags(flags);
            }
            let (verdict, _) = run(world, Program::FromPod, &packet, a)?;
            ensure!(verdict == DROP, "flags {flags:#x}");
            ensure!(world.counter("policy_ingress")? == sent);
        }
        ensure!(world.counter("flow_created")? == 0);
        // Nor does an answer to a question that nobody asked.
        policies.add(&Rule::allow(POLICY, DIRECTION_EGRESS))?;
        let unasked = Packet::new(protocol, &at(f.a, 80), &at(f.b, 40_000)).with_flags(ACK);
        ensure!(protocol == UDP || run(world, Program::FromPod, &unasked, a)?.0 == DROP);
        Ok(())
    });
}

#[test]
fn pods_are_no_routers() {
    each(|world, f, protocol| {
        if protocol == UDP {
            return Ok(());
        }
        let a = world.a.link.ifindex;
        let (own, all, number, kinds) = if is_v6(f) {
            ("fe80::5", "ff02::1", ICMPV6, [134, 137])
        } else {
            (f.a, "224.0.0.1", ICMP, [9, 5])
        };
        let said = |source: &str, destination: &str, kind| {
            let ip = Ip {
                hops: 255,
                ..Ip::new(source, destination, number)
            };
            frame(&message(&ip, (kind, 0), [0; 4], &[0; 40]))
        };
        for kind in kinds {
            for (source, destination) in [(own, all), (f.a, f.b), (f.a, f.node)] {
                let bytes = said(source, destination, kind);
                ensure!(
                    verdict(world, &bytes, a)? == DROP,
                    "{kind} to {destination}"
                );
            }
        }
        ensure!(world.counter("spoofed_source")? == 6);
        if is_v6(f) {
            // Solicitations, of routers and of neighbours, go to the node's stack.
            for kind in [133, 135] {
                ensure!(verdict(world, &said(own, all, kind), a)? == PASS);
            }
        }
        // The router on the nodes' own segment says what it has to say.
        let advertised = said(
            if is_v6(f) { "fe80::1" } else { "192.0.2.1" },
            all,
            kinds[0],
        );
        let result = world.test_run(Program::FromNetwork, &advertised, world.uplink, 1)?;
        ensure!(result.verdict == PASS);
        Ok(())
    });
}
