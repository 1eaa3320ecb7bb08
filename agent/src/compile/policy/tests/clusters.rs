//! Random clusters against the naive reading of their policies, and random histories against a fresh start.

use std::net::IpAddr;

use control_api::desired::Changes;

use super::naive;
use super::world::{World, pool, services};
use crate::compile::policy::{
    Compiled, Compiler, Input, Judgement, Limits, Mode, Packet, RuleSet, full, verdict,
};

const CLUSTERS: u64 = 10_000;
const HISTORIES: u64 = 1_500;
const STEPS: usize = 8;

fn packets(world: &World) -> Vec<Packet> {
    let mut packets = Vec::new();
    for pod in world.locals.pods.values() {
        for own in &pod.addresses {
            let others = pool().into_iter().filter(|o| o.is_ipv4() == own.is_ipv4());
            for other in others {
                for (protocol, port) in services() {
                    for (source, destination) in [(*own, other), (other, *own)] {
                        packets.push(Packet {
                            source,
                            destination,
                            protocol,
                            port,
                        });
                    }
                }
            }
        }
    }
    packets
}

fn compare(world: &World, compiled: &Compiled, packets: &[Packet], what: &str) {
    for packet in packets {
        let verdict = verdict(compiled, &world.locals, packet);
        let said = [verdict.egress, verdict.ingress].map(|j| j.map(Judgement::allows));
        let meant = naive::verdict(world, packet);
        assert_eq!(said, meant, "{what}: {packet:?} is judged {verdict:?}");
    }
}

#[test]
fn random_clusters_are_judged_as_they_are_meant() {
    let mut allowed = [0u32; 2];
    for seed in 0..CLUSTERS {
        let mut world = World::new(seed);
        // Domain names are for whoever compiles with answers: see the histories.
        world.domains = Default::default();
        let compiled = full(&world.state, &world.locals);
        let all = packets(&world);
        // Every packet of some clusters, some of every cluster.
        let stride = if seed % 100 == 0 { 1 } else { 29 };
        let some: Vec<Packet> = all
            .iter()
            .skip(usize::try_from(seed).unwrap() % stride)
            .step_by(stride)
            .copied()
            .collect();
        compare(&world, &compiled, &some, &format!("cluster {seed}"));
        for packet in some.iter().take(5) {
            allowed[usize::from(verdict(&compiled, &world.locals, packet).allows())] += 1;
        }
    }
    let [refused, allowed] = allowed;
    assert!(
        refused > 5_000 && allowed > 5_000,
        "{refused} refused, {allowed} allowed: the clusters say nothing"
    );
}

/// What an address is to a rule set, apart from numbers that depend on history.
fn meaning<'a>(compiled: &'a Compiled, set: &'a RuleSet, address: IpAddr) -> Vec<String> {
    let identity = compiled.trie.find(address).unwrap_or(0);
    let entries = set.entries(identity).into_iter().flatten();
    entries.map(|entries| format!("{entries:?}")).collect()
}

#[test]
fn histories_end_where_a_fresh_start_begins() {
    for seed in 0..HISTORIES {
        let mut world = World::new(seed ^ 0x5eed_0000);
        let mut compiler = Compiler::new(Mode::Enforced, Limits::default(), &[]);
        let mut changes = Changes::everything();
        for step in 0..STEPS {
            let input = Input::new(&world.state, &world.locals, &world.domains);
            compiler.update(&input, &changes);
            let mut fresh = Compiler::new(Mode::Enforced, Limits::default(), &[]);
            fresh.update(&input, &Changes::everything());
            let (now, fresh) = (compiler.compiled(), fresh.compiled());
            let what = format!("history {seed}, step {step}");
            assert_eq!(now.trie.len(), fresh.trie.len(), "{what}");
            for (ifindex, state) in &fresh.pods {
                assert_eq!(
                    now.flags(*ifindex),
                    fresh.flags(*ifindex),
                    "{what}: {state:?}"
                );
                let (Some((_, set)), Some((_, other))) =
                    (now.rules_of(*ifindex), fresh.rules_of(*ifindex))
                else {
                    continue;
                };
                assert_eq!(set.len(), other.len(), "{what}: pod {ifindex}");
                for address in pool() {
                    assert_eq!(
                        meaning(now, set, address),
                        meaning(fresh, other, address),
                        "{what}: {address} to {ifindex}"
                    );
                }
            }
            let some: Vec<Packet> = packets(&world).into_iter().skip(step).step_by(29).collect();
            compare(&world, now, &some, &what);
            changes = world.step();
        }
    }
}
