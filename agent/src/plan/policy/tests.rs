//! Random histories: after every single write, each pod says of each packet what it said before or what it says after.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;

use control_api::desired::Changes;
use dataplane_common::Port;
use dataplane_common::layout::{PodPolicy, PolicyRule, PolicyRuleKey};
use dataplane_common::policy::{Peer, PolicyRules, is_judged, judge_direction};

use super::{Operation, Planner, Present, RuleKey};
use crate::compile::policy::world::{World, pool};
use crate::compile::policy::{
    Compiled, Compiler, Direction, Input, Limits, Mode, Packet, PortPrefix, Prefix, SHUT_FLAGS,
    Trie,
};

const HISTORIES: u64 = 400;
const STEPS: usize = 6;
const SERVICES: [(u8, u16); 7] = [
    (6, 1),
    (6, 80),
    (17, 3),
    (17, 1023),
    (132, 8),
    (6, 65535),
    (1, 0),
];

/// The maps.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Maps {
    pub(crate) pods: BTreeMap<u32, PodPolicy>,
    rules: HashMap<(u32, u32, u8), BTreeMap<PortPrefix, PolicyRule>>,
    trie: Trie,
    pub(crate) generation: u32,
}

impl PolicyRules for Maps {
    fn policy_rule(&mut self, key: &PolicyRuleKey) -> Option<&PolicyRule> {
        let rules = self
            .rules
            .get(&(key.policy_id, key.identity, key.direction))?;
        let one = PortPrefix {
            protocol: key.protocol,
            port: key.port.number(),
            bits: PortPrefix::ONE_PORT,
        };
        let mut holding = rules.iter().rev().filter(|(ports, _)| ports.holds(one));
        holding.next().map(|(_, rule)| rule)
    }
}

impl Maps {
    pub(crate) fn write(&mut self, operation: &Operation) {
        match operation {
            Operation::PutRule(key, rule) => {
                let rules = self
                    .rules
                    .entry((key.policy_id, key.identity, key.direction));
                rules.or_default().insert(key.ports, *rule);
            }
            Operation::RemoveRule(key) => {
                let place = (key.policy_id, key.identity, key.direction);
                let rules = self.rules.get_mut(&place).expect("rules to remove from");
                assert!(rules.remove(&key.ports).is_some(), "{key:?} was not there");
                if rules.is_empty() {
                    self.rules.remove(&place);
                }
            }
            Operation::PutIdentity(range, identity) => {
                self.trie.insert(*range, *identity);
            }
            Operation::RemoveIdentity(range) => {
                assert!(self.trie.remove(*range).is_some(), "{range} was not there");
            }
            Operation::PutPod(ifindex, pod) => {
                self.pods.insert(*ifindex, *pod);
            }
            Operation::RemovePod(ifindex) => {
                self.pods.remove(ifindex);
            }
            Operation::NextGeneration => self.generation += 1,
        }
    }

    pub(crate) fn read(&self) -> Present {
        let rules = self
            .rules
            .iter()
            .flat_map(|((policy_id, identity, direction), rules)| {
                rules.iter().map(move |(ports, rule)| {
                    let key = RuleKey {
                        policy_id: *policy_id,
                        identity: *identity,
                        direction: *direction,
                        ports: *ports,
                    };
                    (key, *rule)
                })
            });
        Present::new(self.pods.clone(), rules, self.trie.iter())
    }

    pub(crate) fn allows(
        &mut self,
        ifindex: u32,
        direction: Direction,
        other: IpAddr,
        service: (u8, u16),
    ) -> bool {
        let closed = PodPolicy {
            policy_id: 0,
            flags: SHUT_FLAGS,
        };
        let policy = self.pods.get(&ifindex).copied().unwrap_or(closed);
        if policy.flags == SHUT_FLAGS {
            return false;
        }
        if !is_judged(&policy, direction.number()) {
            return true;
        }
        let peer = Peer {
            identity: self.trie.find(other).unwrap_or(0),
            direction: direction.number(),
            protocol: service.0,
            port: Port::new(service.1),
            own: 0,
        };
        judge_direction(self, &policy, &peer).allowed != 0
    }

    /// What each pod says of every packet.
    fn verdicts(&mut self) -> BTreeMap<u32, Vec<bool>> {
        let mut all = BTreeMap::new();
        for ifindex in 10..14 {
            let mut list = Vec::new();
            for direction in Direction::BOTH {
                for other in pool() {
                    for service in SERVICES {
                        list.push(self.allows(ifindex, direction, other, service));
                    }
                }
            }
            all.insert(ifindex, list);
        }
        all
    }
}

/// Carries out operations; no verdict may be anything but what it was or what it will be.
fn carry_out(maps: &mut Maps, operations: &[Operation], what: &str) {
    let before = maps.verdicts();
    let mut end = maps.clone();
    for operation in operations {
        end.write(operation);
    }
    let after = end.verdicts();
    let mut last = before.clone();
    for (place, operation) in operations.iter().enumerate() {
        maps.write(operation);
        let now = maps.verdicts();
        // Pods that have left say nothing.
        for (ifindex, now) in now
            .iter()
            .filter(|(ifindex, _)| end.pods.contains_key(ifindex))
        {
            let pairs = before[ifindex].iter().zip(&after[ifindex]);
            for (packet, ((before, after), now)) in pairs.zip(now).enumerate() {
                assert!(
                    now == before || now == after,
                    "{what}: packet {packet} of pod {ifindex} after {operation:?}, number {place} of {operations:#?}"
                );
            }
            if !matches!(operation, Operation::PutPod(..) | Operation::RemovePod(_))
                && !moves(operation)
            {
                assert_eq!(
                    last[ifindex], *now,
                    "{what}: {operation:?} changes verdicts"
                );
            }
        }
        last = now;
    }
    let attached = |ifindex: &u32| end.pods.contains_key(ifindex);
    let differ = before
        .iter()
        .any(|(ifindex, said)| attached(ifindex) && after[ifindex] != *said);
    let again = operations.contains(&Operation::NextGeneration);
    assert!(again || !differ, "{what}: flows are not judged again");
}

fn check_end(maps: &mut Maps, compiled: &Compiled, what: &str) {
    for ifindex in compiled.pods.keys() {
        for direction in Direction::BOTH {
            for other in pool() {
                for service in SERVICES {
                    let said = maps.allows(*ifindex, direction, other, service);
                    let packet = Packet {
                        source: other,
                        destination: other,
                        protocol: service.0,
                        port: service.1,
                    };
                    let meant = compiled.judge(*ifindex, direction, other, false, &packet);
                    assert_eq!(
                        said,
                        meant.allows(),
                        "{what}: {ifindex} {direction:?} {other} {service:?}"
                    );
                }
            }
        }
    }
    assert_eq!(maps.trie, compiled.trie, "{what}");
    let pods: Vec<&u32> = maps.pods.keys().collect();
    assert_eq!(pods, compiled.pods.keys().collect::<Vec<_>>(), "{what}");
    let rules: usize = maps.rules.values().map(BTreeMap::len).sum();
    let meant: usize = compiled.rule_sets.values().map(|set| set.len()).sum();
    assert_eq!(rules, meant, "{what}: something is left over");
}

/// What happens to a history besides changes.
#[derive(Clone, Copy, PartialEq)]
enum Trouble {
    None,
    /// Between two changes.
    Restart,
    /// In the middle of one; the next agent finds what is there.
    Crash,
}

fn history(seed: u64, trouble: Trouble) {
    let mut world = World::new(seed);
    let mut compiler = Compiler::new(Mode::Enforced, Limits::default(), &[]);
    let mut planner = Planner::default();
    let mut maps = Maps::default();
    let mut changes = Changes::everything();
    let mut records = Vec::new();
    for step in 0..STEPS {
        let what = format!("history {seed}, step {step}");
        let input = Input::new(&world.state, &world.locals, &world.domains);
        let mut touched = compiler.update(&input, &changes);
        records.extend(compiler.take_fresh_identities());
        let mut operations = planner.plan(compiler.compiled(), &touched);
        if trouble == Trouble::Crash && operations.len() > 1 {
            let rest = operations.split_off(operations.len() * (step + 1) / (STEPS + 1));
            carry_out_part(&mut maps, &operations, &rest, &what);
            (compiler, touched) = fresh(&input, &records);
            planner = Planner::new(maps.read());
            operations = planner.plan(compiler.compiled(), &touched);
        }
        carry_out(&mut maps, &operations, &what);
        check_end(&mut maps, compiler.compiled(), &what);
        if trouble == Trouble::Restart {
            (compiler, touched) = fresh(&input, &records);
            planner = Planner::new(maps.read());
            let again = planner.plan(compiler.compiled(), &touched);
            assert_eq!(again, [], "{what}: a restart changes nothing");
        }
        changes = world.step();
    }
}

fn fresh(
    input: &Input<'_>,
    records: &[crate::compile::policy::Record],
) -> (Compiler, crate::compile::policy::Touched) {
    let mut compiler = Compiler::new(Mode::Enforced, Limits::default(), records);
    let touched = compiler.update(input, &Changes::everything());
    (compiler, touched)
}

/// Carries out the first part of a plan, whose verdicts may already be those at its end.
fn carry_out_part(maps: &mut Maps, part: &[Operation], rest: &[Operation], what: &str) {
    let mut start = maps.clone();
    let all: Vec<Operation> = part.iter().chain(rest).copied().collect();
    carry_out(&mut start, &all, what);
    for operation in part {
        maps.write(operation);
    }
}

/// True when an address may have another identity after it.
fn moves(operation: &Operation) -> bool {
    matches!(
        operation,
        Operation::PutIdentity(..) | Operation::RemoveIdentity(_)
    )
}

#[test]
fn no_packet_is_judged_by_a_mixture() {
    for seed in 0..HISTORIES {
        history(seed, Trouble::None);
    }
}

#[test]
fn a_restart_adopts_what_is_there() {
    for seed in 0..HISTORIES / 2 {
        history(seed ^ 0x0add_0000, Trouble::Restart);
    }
}

#[test]
fn a_crash_in_the_middle_is_mended() {
    for seed in 0..HISTORIES / 2 {
        history(seed ^ 0x0bad_0000, Trouble::Crash);
    }
}

/// An address moves to another identity while its pod gets other rules, in both directions at once.
#[test]
fn ranges_inside_ranges_never_show_what_is_around_them() {
    let range = |text: &str| Prefix::parse(text).unwrap();
    let mut before = Trie::default();
    before.insert(range("10.0.0.0/24"), 1);
    before.insert(range("10.0.0.0/30"), 2);
    before.insert(range("10.0.0.1/32"), 3);
    let mut compiled = Compiled::default();
    compiled.trie.insert(range("10.0.0.0/24"), 4);
    compiled.trie.insert(range("10.0.0.128/25"), 1);
    compiled.trie.insert(range("10.0.0.200/32"), 5);
    let present = Present::new([], [], before.iter());
    let mut maps = Maps {
        trie: before.clone(),
        ..Maps::default()
    };
    let touched = crate::compile::policy::Touched {
        everything: true,
        ..Default::default()
    };
    for operation in Planner::new(present).plan(&compiled, &touched) {
        maps.write(&operation);
        for last in 0..=255u8 {
            let address = IpAddr::from([10, 0, 0, last]);
            let (now, old, new) = (
                maps.trie.find(address),
                before.find(address),
                compiled.trie.find(address),
            );
            assert!(now == old || now == new, "{address} after {operation:?}");
        }
    }
    assert_eq!(maps.trie, compiled.trie);
}
