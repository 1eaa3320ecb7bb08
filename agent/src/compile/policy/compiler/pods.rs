//! Which rules every pod has.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use control_api::desired::Name;

use super::super::hosts::{LocalPod, named_ports};
use super::super::identity::NamedPort;
use super::super::peer::PeerSet;
use super::super::rule_set::{RuleSet, RuleSetId};
use super::super::rules::{self, Direction, Read};
use super::super::{PodState, Shut, Touched};
use super::ranges::Turnover;
use super::{Compiler, Input, Key};

impl Compiler {
    /// Keeps rule sets up with identities that came and went.
    pub(super) fn adapt_rule_sets(&mut self, turnover: &Turnover, touched: &mut Touched) {
        if turnover.is_empty() {
            return;
        }
        // What did not fit may do so now: it is worked out from the start.
        let sets = &self.compiled.rule_sets;
        self.keys
            .retain(|_, id| sets.get(id).is_some_and(|set| !set.is_too_large()));
        for id in self.keys.values() {
            let Some(set) = self.compiled.rule_sets.get_mut(id) else {
                continue;
            };
            for identity in &turnover.dead {
                if set.remove(*identity) {
                    touched.rules.insert((*id, *identity));
                }
            }
            for identity in &turnover.born {
                let members = self.compiled.identities.members(*identity);
                if members.is_some_and(|members| set.add(*identity, members)) {
                    touched.rules.insert((*id, *identity));
                }
            }
        }
    }

    /// Forgets the rule sets of policies that changed.
    pub(super) fn forget_rule_sets(&mut self, dirty: &BTreeSet<Name>) {
        if !dirty.is_empty() {
            self.keys
                .retain(|(names, _), _| !names.iter().any(|name| dirty.contains(name)));
        }
    }

    /// Gives every attached pod its rules, and drops the rule sets that none has.
    pub(super) fn assign_pods(&mut self, input: &Input<'_>, touched: &mut Touched) {
        let locals = std::mem::take(&mut self.locals);
        let mut pods = BTreeMap::new();
        let mut keys: HashMap<Key, RuleSetId> = HashMap::new();
        for (ifindex, pod) in &locals.pods {
            let now = match self.key(input, pod) {
                Err(known) => known,
                Ok((key, policies)) => {
                    let present = keys.get(&key).or_else(|| self.keys.get(&key)).copied();
                    let id = present.unwrap_or_else(|| self.new_rule_set(&policies, &key.1));
                    if present.is_none() {
                        touched.rule_sets.insert(id);
                    }
                    keys.insert(key, id);
                    PodState::Judged(id)
                }
            };
            pods.insert(*ifindex, now);
        }
        self.locals = locals;
        self.keys = keys;
        let kept: BTreeSet<RuleSetId> = self.keys.values().copied().collect();
        self.compiled.rule_sets.retain(|id, _| {
            let keep = kept.contains(id);
            if !keep {
                touched.rule_sets.insert(*id);
            }
            keep
        });
        let before = std::mem::replace(&mut self.compiled.pods, pods);
        let now = &self.compiled.pods;
        let all = before.keys().chain(now.keys());
        let changed = all.filter(|ifindex| before.get(ifindex) != now.get(ifindex));
        touched.pods.extend(changed.copied());
    }

    /// What the rules of a pod depend on; or what it is without.
    fn key(&self, input: &Input<'_>, pod: &LocalPod) -> Result<(Key, Vec<Arc<Read>>), PodState> {
        let Some(name) = &pod.name else {
            return Err(PodState::Open);
        };
        let peer = input
            .peers
            .get(name)
            .filter(|peer| pod.is(peer))
            .ok_or(PodState::Shut(Shut::Unknown))?;
        let mut policies = Vec::with_capacity(peer.policies.len());
        for policy in &peer.policies {
            let name = Name::new(&policy.namespace, &policy.name);
            match self.read.get(&name) {
                Some(read) => policies.push(Arc::clone(read)),
                // Staged ones are not meant to count.
                None if input.policies.contains_key(&name) => {}
                None => return Err(PodState::Shut(Shut::Missing(name))),
            }
        }
        if policies.is_empty() {
            return Err(PodState::Open);
        }
        let asked: BTreeSet<_> = policies
            .iter()
            .flat_map(|read| &read.rules[Direction::Ingress as usize])
            .flat_map(|rule| rule.named_ports().map(|(_, name)| name))
            .collect();
        let number = |name: &str| {
            let id = self.compiled.sets.find(&PeerSet::PortName(name.into()));
            id.filter(|id| asked.contains(id))
        };
        let own_ports = if asked.is_empty() {
            Vec::new()
        } else {
            named_ports(peer, number)
        };
        let names = policies.iter().map(|read| read.name.clone()).collect();
        Ok(((names, own_ports), policies))
    }

    fn new_rule_set(&mut self, policies: &[Arc<Read>], own_ports: &[NamedPort]) -> RuleSetId {
        let (flags, sides) = rules::combine(policies);
        let limit = self.limits.rules_per_policy;
        let mut set = RuleSet::new(flags, sides, own_ports.to_vec(), limit);
        let asked = set.sets();
        let identities = asked.iter().filter_map(|set| self.by_set.get(set));
        let identities: BTreeSet<u32> = identities.flatten().copied().collect();
        for identity in identities {
            if let Some(members) = self.compiled.identities.members(identity) {
                set.add(identity, members);
            }
        }
        self.last_rule_set += 1;
        let id = RuleSetId(self.last_rule_set);
        self.compiled.rule_sets.insert(id, set);
        id
    }

    /// Shuts the pods of rule sets that are too large, or for which nothing is left. The older ones have their place.
    pub(super) fn shut_what_does_not_fit(&mut self, touched: &mut Touched) {
        let mut left = self.limits.rules;
        let mut shut: BTreeMap<RuleSetId, Shut> = BTreeMap::new();
        for (id, set) in &self.compiled.rule_sets {
            if set.is_too_large() {
                shut.insert(*id, Shut::TooManyRules);
            } else if set.len() > left {
                shut.insert(*id, Shut::NoRoom);
            } else {
                left -= set.len();
            }
        }
        if shut != self.compiled.shut {
            let pods = self.compiled.pods.iter();
            touched
                .pods
                .extend(pods.filter_map(|(ifindex, state)| match state {
                    PodState::Judged(id) => {
                        (shut.get(id) != self.compiled.shut.get(id)).then_some(*ifindex)
                    }
                    _ => None,
                }));
            self.compiled.shut = shut;
        }
    }
}
