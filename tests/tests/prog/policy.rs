//! Policies through the programs: first packets, known flows after a change, both directions, errors, echo, fragments,
//! drivers, events.

use std::time::Duration;

use anyhow::{Result, ensure};
use control_api::desired::{DesiredState, Name};
use control_api::v1::{
    IpBlock, Policy, PolicyAction, PolicyName, PolicyPeer, PolicyRule, PolicyRulePeer,
    PolicyRulePort, Protocol, policy_rule_peer,
};
use dataplane_common::layout::{
    DIRECTION_EGRESS, DIRECTION_INGRESS, IDENTITY_ANY, POLICY_EGRESS, POLICY_EGRESS_CLOSED,
    POLICY_INGRESS, POLICY_INGRESS_CLOSED, RULE_ALLOW,
};
use dataplane_common::policy::verdict;
use dataplane_common::reason::DropReason;
use weir_agent::compile::policy::{LocalPod, Locals, Touched, full};
use weir_agent::kernel::Program;
use weir_agent::plan::policy::{Operation, Planner};
use weir_tests::prog::packet::{ACK, Packet, TCP, UDP};
use weir_tests::prog::policies::{Policies, Rule};
use weir_tests::prog::wire::{ICMP, ICMPV6, Ip, datagram, frame, message};
use weir_tests::prog::world::World;

use crate::drivers::{left_alone, outside, sent_on};
use crate::{DROP, Family, PASS, REDIRECT, at, each, run};

const SHUT_IN: u32 = POLICY_INGRESS | POLICY_INGRESS_CLOSED;
const SHUT_OUT: u32 = POLICY_EGRESS | POLICY_EGRESS_CLOSED;
const POLICY: u32 = 7;
const FRIENDS: u32 = 21;

/// Counters of what may change when a packet passes.
fn traces(world: &World) -> Result<[u64; 2]> {
    Ok([
        world.counter("flow_created")?,
        world.counter("source_port_changed")?,
    ])
}

#[test]
fn a_first_packet_needs_a_rule_of_both_ends_and_leaves_no_trace_without() {
    each(|world, f, protocol| {
        world.serve(f.vip, &[f.b])?;
        let (a, b) = (world.a.link.ifindex, world.b.link.ifindex);
        let mut policies = Policies::open(&world.bpffs)?;
        let request = Packet::new(protocol, &at(f.a, 40_000), &at(f.vip, 80));
        policies.identify(f.b, FRIENDS)?;
        policies.set_pod(a, POLICY, SHUT_OUT)?;
        let none = traces(world)?;
        let (verdict, _) = run(world, Program::FromPod, &request, a)?;
        ensure!(verdict == DROP && world.counter("policy_egress")? == 1);
        // The port of the pod counts, not that of the service.
        let mut out = Rule::allow(POLICY, DIRECTION_EGRESS);
        (out.identity, out.protocol, out.port) = (FRIENDS, Some(protocol), Some(80));
        policies.add(&out)?;
        ensure!(run(world, Program::FromPod, &request, a)?.0 == DROP);
        out.port = Some(8080);
        policies.add(&out)?;
        policies.set_pod(b, POLICY + 1, SHUT_IN)?;
        ensure!(run(world, Program::FromPod, &request, a)?.0 == DROP);
        ensure!(world.counter("policy_ingress")? == 1 && traces(world)? == none);
        policies.add(&Rule::allow(POLICY + 1, DIRECTION_INGRESS))?;
        let (verdict, sent) = run(world, Program::FromPod, &request, a)?;
        ensure!(verdict == REDIRECT && sent.destination == at(f.b, 8080).parse()?);
        // Neither direction alone would allow the answer.
        let (verdict, _) = run(world, Program::FromPod, &sent.answer(), b)?;
        ensure!(verdict == REDIRECT && traces(world)? == [none[0] + 1, none[1]]);
        let events = policies.events();
        ensure!(events.len() == 3, "{events:?}");
        let last = events[2];
        ensure!(last.reason == DropReason::PolicyIngress as u32 && last.ifindex == b);
        ensure!(
            last.verdict == verdict::DENIED | verdict::INGRESS,
            "no rule matched"
        );
        ensure!(last.destination_port.number() == 8080 && last.source_port.number() == 40_000);
        ensure!(last.protocol == protocol && last.family == if f.a.contains(':') { 6 } else { 4 });
        Ok(())
    });
}

#[test]
fn a_revoked_flow_stops_both_ways_and_goes_on_when_it_is_allowed_again() {
    each(|world, f, protocol| {
        world.serve(f.vip, &[f.far])?;
        let a = world.a.link.ifindex;
        let mut policies = Policies::open(&world.bpffs)?;
        let mut request = Packet::new(protocol, &at(f.a, 40_000), &at(f.vip, 80));
        let (_, sent) = run(world, Program::FromPod, &request, a)?;
        let mut answer = sent.answer();
        if protocol == TCP {
            request.tcp_flags = ACK;
            answer.tcp_flags = ACK;
        }
        let passes = |world: &World| -> Result<(bool, bool)> {
            let there = run(world, Program::FromPod, &request, a)?;
            let back = run(world, Program::FromNetwork, &answer, world.uplink)?;
            ensure!(there.0 == DROP || there.1.destination == sent.destination);
            ensure!(back.0 == DROP || back.1.source == request.destination);
            Ok((there.0 == REDIRECT, back.0 == REDIRECT))
        };
        ensure!(passes(world)? == (true, true));
        policies.set_pod(a, POLICY, SHUT_IN)?;
        policies.bump()?;
        ensure!(passes(world)? == (true, true), "answers need no rule");
        policies.set_pod(a, POLICY, SHUT_OUT)?;
        policies.bump()?;
        ensure!(run(world, Program::FromNetwork, &answer, world.uplink)?.0 == DROP);
        for _ in 0..2 {
            ensure!(passes(world)? == (false, false));
        }
        ensure!(world.counter("policy_egress")? == 5);
        // The flow's own ends in both directions, so that the pod is known.
        let events = policies.events();
        ensure!(events.len() == 5);
        for event in &events {
            ensure!((event.source, event.destination) == (events[0].source, events[0].destination));
            ensure!(event.verdict == verdict::DENIED && event.destination_port.number() == 8080);
            ensure!(event.source_port.number() == 40_000);
        }
        policies.set_pod(a, POLICY, 0)?;
        policies.bump()?;
        ensure!(passes(world)? == (true, true) && passes(world)? == (true, true));
        policies.forget_pod(a)?;
        policies.bump()?;
        ensure!(passes(world)? == (false, false) && world.counter("policy_pending")? == 2);
        Ok(())
    });
}

#[test]
fn a_pod_its_own_service_and_its_node_are_never_apart() {
    each(|world, f, protocol| {
        world.serve(f.vip, &[f.a])?;
        let a = world.a.link.ifindex;
        let mut policies = Policies::open(&world.bpffs)?;
        policies.set_pod(a, POLICY, SHUT_IN | SHUT_OUT)?;
        // Through its service the node's address is what it sees.
        let request = Packet::new(protocol, &at(f.a, 40_000), &at(f.vip, 80));
        let (verdict, sent) = run(world, Program::FromPod, &request, a)?;
        ensure!(verdict == REDIRECT);
        policies.bump()?;
        ensure!(run(world, Program::FromPod, &sent.answer(), a)?.0 == REDIRECT);
        let probe = Packet::new(protocol, &at(f.node, 40_001), &at(f.vip, 80));
        let (verdict, sent) = run(world, Program::FromPod, &probe, world.host.peer_ifindex)?;
        ensure!(verdict == REDIRECT);
        ensure!(run(world, Program::FromPod, &sent.answer(), a)?.0 == REDIRECT);
        let direct = Packet::new(protocol, &at(f.node, 40_002), &at(f.a, 8080));
        ensure!(run(world, Program::ToPod, &direct, a)?.0 == PASS);
        ensure!(run(world, Program::FromPod, &direct.answer(), a)?.0 == PASS);
        // What comes in from the network with the node's address is not the node's.
        let forged = Packet::new(protocol, &at(f.node, 40_003), &at(f.a, 8080));
        let (verdict, _) = run(world, Program::FromNetwork, &forged, world.uplink)?;
        ensure!(verdict == DROP && world.counter("policy_ingress")? == 1);
        // A client that the node lends its address is judged by its own.
        let client = outside(world, f)?;
        let request = Packet::new(protocol, &at(client, 40_000), &at(f.vip, 80));
        for (program, link) in [
            (Program::FromPod, world.host.peer_ifindex),
            (Program::FromNetwork, world.uplink),
        ] {
            ensure!(run(world, program, &request, link)?.0 == DROP);
        }
        Ok(())
    });
}

#[test]
fn drivers_leave_flows_that_policies_are_asked_about_to_the_ingress_hook() {
    each(|world, f, protocol| {
        let client = outside(world, f)?;
        world.serve(f.vip, &[f.far])?;
        let mut policies = Policies::open(&world.bpffs)?;
        let request = Packet::new(protocol, &at(client, 40_000), &at(f.vip, 80));
        run(world, Program::FromNetwork, &request, world.uplink)?;
        sent_on(world, &request)?;
        policies.bump()?;
        left_alone(world, &request, "the policies have changed")?;
        ensure!(run(world, Program::FromNetwork, &request, world.uplink)?.0 == REDIRECT);
        sent_on(world, &request)?;
        Ok(())
    });
}

fn icmp(f: Family) -> u8 {
    if f.vip.contains(':') { ICMPV6 } else { ICMP }
}

fn verdict_of(world: &World, program: Program, packet: &[u8], link: u32) -> Result<i32> {
    Ok(world.test_run(program, &frame(packet), link, 1)?.verdict)
}

#[test]
fn messages_follow_their_flows_and_other_protocols_are_judged_alone() {
    each(|world, f, protocol| {
        if protocol != UDP {
            return Ok(());
        }
        let a = world.a.link.ifindex;
        let mut policies = Policies::open(&world.bpffs)?;
        let (unreachable, request, reply) = if f.vip.contains(':') {
            ((1, 4), (128, 0), (129, 0))
        } else {
            ((3, 3), (8, 0), (0, 0))
        };
        let sent = Packet::new(UDP, &at(f.a, 40_000), &at(f.far, 8080));
        run(world, Program::FromPod, &sent, a)?;
        let back = Ip::new(f.far, f.a, icmp(f));
        let error = message(&back, unreachable, [0; 4], &sent.to_bytes()[14..]);
        let arrives = |world: &World, packet: &[u8]| {
            verdict_of(world, Program::FromNetwork, packet, world.uplink)
        };
        policies.set_pod(a, POLICY, SHUT_IN)?;
        policies.bump()?;
        ensure!(arrives(world, &error)? == REDIRECT, "about an allowed flow");
        policies.set_pod(a, POLICY, SHUT_OUT)?;
        policies.bump()?;
        ensure!(arrives(world, &error)? == DROP, "about a denied flow");
        // An echo that went out brings its reply in; one that nobody asked for stays out.
        policies.set_pod(a, POLICY, SHUT_IN)?;
        let ask = message(
            &Ip::new(f.a, f.far, icmp(f)),
            request,
            [0, 9, 0, 1],
            b"hello",
        );
        let answer = message(&back, reply, [0, 9, 0, 1], b"hello");
        let stranger = message(&back, reply, [0, 10, 0, 1], b"hello");
        ensure!(arrives(world, &answer)? == DROP, "before the request");
        policies.set_pod(a, POLICY, SHUT_IN | POLICY_EGRESS)?;
        ensure!(verdict_of(world, Program::FromPod, &ask, a)? == REDIRECT);
        ensure!(arrives(world, &answer)? == REDIRECT && arrives(world, &stranger)? == DROP);
        // A rule for TCP covers no other protocol; one without ports covers all.
        let tunnel = Ip::new(f.far, f.a, 47).around(b"some tunnel");
        let mut rule = Rule::allow(POLICY, DIRECTION_INGRESS);
        rule.protocol = Some(TCP);
        policies.add(&rule)?;
        ensure!(arrives(world, &tunnel)? == DROP);
        policies.add(&Rule::allow(POLICY, DIRECTION_INGRESS))?;
        ensure!(arrives(world, &tunnel)? == REDIRECT);
        Ok(())
    });
}

#[test]
fn later_fragments_have_no_licence_of_their_own() {
    each(|world, f, protocol| {
        if protocol != UDP {
            return Ok(());
        }
        let a = world.a.link.ifindex;
        let mut policies = Policies::open(&world.bpffs)?;
        let mut rule = Rule::allow(POLICY, DIRECTION_EGRESS);
        (rule.protocol, rule.port) = (Some(UDP), Some(8080));
        policies.add(&rule)?;
        policies.set_pod(a, POLICY, SHUT_OUT)?;
        for (id, port, verdict) in [(1, 8080, REDIRECT), (2, 8081, DROP)] {
            let ip = Ip::new(f.a, f.far, UDP);
            let whole = datagram(&ip, (40_000, port), &[0x42; 1_200]);
            for (offset, part) in [(0, &whole[..800]), (800, &whole[800..])] {
                let ip = Ip {
                    fragment: Some((id, offset, offset == 0)),
                    ..ip
                };
                let got = verdict_of(world, Program::FromPod, &ip.around(part), a)?;
                ensure!(got == verdict, "port {port}, offset {offset}: {got}");
            }
        }
        Ok(())
    });
}

#[test]
fn what_the_nodes_stack_forwards_is_judged_at_the_pod() {
    each(|world, f, protocol| {
        /// No link of the dataplane's.
        const OTHER: u32 = 1;
        let a = world.a.link.ifindex;
        let mut policies = Policies::open(&world.bpffs)?;
        let client = outside(world, f)?;
        let forward = |world: &World, packet: &Packet| -> Result<i32> {
            let frame = packet.to_bytes();
            let run = world
                .kernel
                .test_run_forwarded(Program::ToPod, &frame, OTHER, a)?;
            ensure!(run.verdict == DROP || run.packet == frame, "it was changed");
            Ok(run.verdict)
        };
        let ask = Packet::new(protocol, &at(client, 40_000), &at(f.a, 8080));
        policies.set_pod(a, POLICY, SHUT_IN)?;
        ensure!(forward(world, &ask)? == DROP && world.counter("flow_created")? == 0);
        policies.set_pod(a, POLICY, SHUT_OUT)?;
        ensure!(forward(world, &ask)? == PASS && forward(world, &ask)? == PASS);
        ensure!(
            run(world, Program::FromPod, &ask.answer(), a)?.0 != DROP,
            "needs no rule"
        );
        policies.set_pod(a, POLICY, SHUT_IN)?;
        policies.bump()?;
        ensure!(forward(world, &ask)? == DROP);
        ensure!(run(world, Program::FromPod, &ask.answer(), a)?.0 == DROP);
        Ok(())
    });
}

#[test]
fn events_are_few_when_drops_are_many() {
    const PACKETS: u32 = 2_000;
    each(|world, f, protocol| {
        if protocol != UDP {
            return Ok(());
        }
        let a = world.a.link.ifindex;
        let mut policies = Policies::open(&world.bpffs)?;
        policies.set_pod(a, POLICY, SHUT_OUT)?;
        let request = Packet::new(UDP, &at(f.a, 40_000), &at(f.far, 8080));
        world.test_run(Program::FromPod, &request.to_bytes(), a, PACKETS)?;
        ensure!(world.counter("policy_egress")? == u64::from(PACKETS));
        let events = policies.events();
        let told = u32::try_from(events.len())?;
        ensure!((1..PACKETS / 4).contains(&told), "{told} events");
        Ok(())
    });
}

#[test]
fn costs_of_policies_are_printed() {
    /// All flows together fit the table.
    const ROUNDS: u16 = 300;
    each(|world, f, protocol| {
        if protocol != TCP {
            return Ok(());
        }
        let a = world.a.link.ifindex;
        let mut policies = Policies::open(&world.bpffs)?;
        policies.identify(f.far, FRIENDS)?;
        let mut first = 10_000u16;
        for rules in [0u16, 1, 1_000] {
            for number in 0..rules {
                let rule = Rule {
                    policy_id: POLICY,
                    identity: if number % 2 == 0 {
                        FRIENDS
                    } else {
                        IDENTITY_ANY
                    },
                    direction: DIRECTION_EGRESS,
                    protocol: Some(TCP),
                    port: Some(8080 + number),
                    number: number.into(),
                    action: RULE_ALLOW,
                };
                policies.add(&rule)?;
            }
            let flags = if rules == 0 { 0 } else { SHUT_OUT };
            policies.set_pod(a, POLICY, flags)?;
            policies.bump()?;
            let mut costs = [const { Vec::new() }; 3];
            for _ in 0..ROUNDS {
                first += 1;
                let open = Packet::new(TCP, &at(f.a, first), &at(f.far, 8080));
                let cost = |packet: &Packet| -> Result<Duration> {
                    let bytes = packet.to_bytes();
                    let run = world.test_run(Program::FromPod, &bytes, a, 1)?;
                    ensure!(run.verdict == REDIRECT, "{rules} rules: {}", run.verdict);
                    Ok(run.duration)
                };
                costs[0].push(cost(&open)?);
                let more = open.with_flags(ACK);
                costs[1].push(cost(&more)?);
                policies.bump()?;
                costs[2].push(cost(&more)?);
            }
            let [opening, known, changed] = costs.map(|mut costs| {
                costs.sort_unstable();
                costs[costs.len() / 2]
            });
            println!(
                "{}: {rules} rules: first {opening:?}, known {known:?}, after a change {changed:?}",
                f.a
            );
        }
        Ok(())
    });
}

/// A node whose pod has very many rules for what goes out, each about another address, and the last one about this.
fn many_rules(pod: (u32, &str), last: &str) -> Result<(DesiredState, Locals)> {
    let rule = |number: usize| {
        let cidr = match (number == MANY_RULES, last.contains(':')) {
            (true, _) => last.to_owned(),
            (false, true) => format!("2001:db8:ffff::{number:x}"),
            (false, false) => format!("198.18.{}.{}", number >> 8, number & 255),
        };
        let block = IpBlock {
            cidr,
            ..IpBlock::default()
        };
        let kind = Some(policy_rule_peer::Kind::IpBlock(block));
        PolicyRule {
            action: PolicyAction::Allow.into(),
            peers: vec![PolicyRulePeer { kind }],
            ports: vec![PolicyRulePort {
                protocol: Protocol::Tcp.into(),
                first: 8080,
                ..PolicyRulePort::default()
            }],
            ..PolicyRule::default()
        }
    };
    let policy = Policy {
        namespace: "d".into(),
        name: "many".into(),
        isolates_egress: true,
        egress: (1..=MANY_RULES).map(rule).collect(),
        ..Policy::default()
    };
    let peer = PolicyPeer {
        namespace: "d".into(),
        name: "a".into(),
        node: "n1".into(),
        policies: vec![PolicyName {
            namespace: "d".into(),
            name: "many".into(),
        }],
        ..PolicyPeer::default()
    };
    let name = Name::new("d", "a");
    let mut state = DesiredState::default();
    state.policies.insert(Name::new("d", "many"), policy);
    state.policy_peers.insert(name.clone(), peer);
    let local = LocalPod {
        name: Some(name),
        addresses: vec![pod.1.parse()?],
        ..LocalPod::default()
    };
    let locals = Locals {
        node_name: "n1".into(),
        pods: [(pod.0, local)].into(),
        ..Locals::default()
    };
    Ok((state, locals))
}

const MANY_RULES: usize = 12_500;

#[test]
fn the_last_of_very_many_rules_lets_its_packet_pass_and_no_other() {
    each(|world, f, protocol| {
        if protocol != TCP {
            return Ok(());
        }
        let a = world.a.link.ifindex;
        let (state, locals) = many_rules((a, f.a), f.far)?;
        let compiled = full(&state, &locals);
        ensure!(compiled.why_shut(a).is_none(), "{:?}", compiled.why_shut(a));
        let everything = Touched {
            everything: true,
            ..Touched::default()
        };
        let mut planner = Planner::new(world.kernel.read_policies()?);
        let operations = planner.plan(&compiled, &everything);
        let rules = operations.iter();
        let rules = rules.filter(|one| matches!(one, Operation::PutRule(..)));
        ensure!(rules.count() == MANY_RULES);
        world.kernel.write_policies(&operations)?;
        let verdict = |port: u16, to: &str| -> Result<i32> {
            let packet = Packet::new(TCP, &at(f.a, 40_000 + port % 100), &at(to, port));
            let run = world.test_run(Program::FromPod, &packet.to_bytes(), a, 1)?;
            Ok(run.verdict)
        };
        ensure!(verdict(8080, f.far)? == REDIRECT);
        ensure!(verdict(8081, f.far)? == DROP && verdict(8080, f.b)? == DROP);
        ensure!(world.counter("policy_egress")? == 2);
        Ok(())
    });
}
