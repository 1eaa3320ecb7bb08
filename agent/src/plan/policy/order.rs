//! What goes first when both change: identities of addresses, and rules of pods.
//!
//! While a pod still has its old rules, an address that has its new identity already must be judged as with its old one;
//! or, where a pod has its new rules already, an address with its old identity as with its new one. Often one of the two
//! holds by itself, or can be arranged: a policy that comes with new peer sets splits identities that the old rules did
//! not tell apart, a policy that goes joins some that the new rules do not tell apart. Otherwise addresses go through
//! identities of their own meanwhile, under which old rules say what was, and new ones what will be.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use dataplane_common::layout::IDENTITY_ANY;

use super::present::{Present, same};
use super::{Flip, NOTHING, Operation, Planner, wanted};
use crate::compile::policy::{Compiled, Entries, Prefix, RuleSetId, Touched};

/// Identities from here on stand in while both change.
const STAND_INS: u32 = 1 << 31;

/// An address range that gets another identity, or loses its own to the range around it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Move {
    pub(super) range: Prefix,
    /// Its own entry before, where it had one.
    pub(super) had: Option<u32>,
    /// What its addresses had.
    pub(super) from: u32,
    /// What they will have.
    pub(super) to: u32,
    /// Whether the range has an entry of its own then.
    pub(super) stays: bool,
}

/// Old and new identity.
type Pair = (u32, u32);

/// Policy and identity, and what it says meanwhile.
type Extras = BTreeMap<(u32, u32), [Entries; 2]>;

pub(super) enum Order {
    /// Identities, then pods: old policies get these rules for new identities.
    IdentitiesFirst(Extras),
    /// Pods, then identities: new policies get these rules for old identities.
    PodsFirst(Extras),
    /// Both, by way of these. With them, the policies that pods leave.
    Through(Through),
}

pub(super) struct Through {
    stand_ins: BTreeMap<Pair, u32>,
    left: BTreeSet<u32>,
}

impl Planner {
    /// Ranges that change, in an order in which every address goes from its old identity straight to its new one. The
    /// trie is as they leave it afterwards.
    pub(super) fn moves(&mut self, compiled: &Compiled, touched: &Touched) -> Vec<Move> {
        let (before, after) = (&mut self.present.trie, &compiled.trie);
        let all: BTreeSet<Prefix> = if touched.everything {
            let present = before.iter().map(|(range, _)| range);
            present
                .chain(after.iter().map(|(range, _)| range))
                .collect()
        } else {
            touched.ranges.clone()
        };
        let (mut new, mut other, mut gone) = (Vec::new(), Vec::new(), Vec::new());
        for range in all {
            match (before.get(range), after.get(range)) {
                (None, Some(_)) => new.push(range),
                (Some(old), Some(now)) if old != now => other.push(range),
                (Some(_), None) => gone.push(range),
                _ => {}
            }
        }
        // Inner ranges before outer ones, lest addresses get what is meant for those around them; and the other way
        // round where ranges go.
        new.sort_unstable_by_key(|range| std::cmp::Reverse(range.len));
        gone.sort_unstable_by_key(|range| range.len);
        let mut moves = Vec::with_capacity(new.len() + other.len() + gone.len());
        for range in new.into_iter().chain(other) {
            let from = before.around(range).unwrap_or(IDENTITY_ANY);
            let to = after.get(range).unwrap_or(IDENTITY_ANY);
            moves.push(Move {
                range,
                had: before.insert(range, to),
                from,
                to,
                stays: true,
            });
        }
        for range in gone {
            let had = before.remove(range);
            moves.push(Move {
                range,
                had,
                from: had.unwrap_or(IDENTITY_ANY),
                to: before.around(range).unwrap_or(IDENTITY_ANY),
                stays: false,
            });
        }
        moves
    }

    pub(super) fn order(
        &self,
        compiled: &Compiled,
        flips: &[Flip],
        moves: &[Move],
        fresh: &BTreeSet<u32>,
    ) -> Order {
        let pairs: BTreeSet<Pair> = moves
            .iter()
            .map(|one| (one.from, one.to))
            .filter(|(from, to)| from != to)
            .collect();
        let left: BTreeSet<u32> = flips
            .iter()
            .filter_map(|flip| Some(flip.from?.policy_id))
            .filter(|id| self.present.rules.contains_key(id))
            .collect();
        let entered: BTreeSet<u32> = flips
            .iter()
            .map(|flip| flip.to.policy_id)
            .filter(|id| self.present.rules.contains_key(id))
            .collect();
        let sets: HashMap<u32, RuleSetId> = self.ids.iter().map(|(set, id)| (*id, *set)).collect();
        if let Some(extras) = self.old_rules_agree(compiled, &pairs, &left, &sets) {
            return Order::IdentitiesFirst(extras);
        }
        if let Some(extras) = self.new_rules_agree(compiled, &pairs, &entered, &sets, fresh) {
            return Order::PodsFirst(extras);
        }
        let taken = |id: &u32| self.present.live.contains_key(id);
        let free = (STAND_INS..u32::MAX).filter(|id| !taken(id));
        Order::Through(Through {
            stand_ins: pairs.into_iter().zip(free).collect(),
            left,
        })
    }

    /// What to add to the policies that pods leave so that they judge new identities like old ones, if they can.
    fn old_rules_agree(
        &self,
        compiled: &Compiled,
        pairs: &BTreeSet<Pair>,
        left: &BTreeSet<u32>,
        sets: &HashMap<u32, RuleSetId>,
    ) -> Option<Extras> {
        let mut extras = Extras::new();
        for id in left {
            let kept = sets.get(id);
            for (from, to) in pairs {
                let old = self.present.rules_of(*id, *from);
                let fixed = match kept {
                    // Some pods stay, and judge by what is wanted.
                    Some(set) if !self.present.has(*to) => Some(rules_of(compiled, *set, *to)),
                    _ if self.present.has(*to) => Some(self.present.rules_of(*id, *to)),
                    _ => None,
                };
                let now = match fixed {
                    Some(fixed) => fixed,
                    None => extras
                        .entry((*id, *to))
                        .or_insert_with(|| old.clone())
                        .clone(),
                };
                if !same(Some(&now), &old) {
                    return None;
                }
            }
        }
        Some(extras)
    }

    /// What to add to the policies that pods get so that they judge old identities like new ones, if they can.
    fn new_rules_agree(
        &self,
        compiled: &Compiled,
        pairs: &BTreeSet<Pair>,
        entered: &BTreeSet<u32>,
        sets: &HashMap<u32, RuleSetId>,
        fresh: &BTreeSet<u32>,
    ) -> Option<Extras> {
        let mut extras = Extras::new();
        for id in entered {
            let set = *sets.get(id)?;
            for (from, to) in pairs {
                let new = rules_of(compiled, set, *to);
                let stays = *from == IDENTITY_ANY || compiled.live.contains_key(from);
                let before = if !fresh.contains(id) {
                    self.present.rules_of(*id, *from)
                } else if stays {
                    rules_of(compiled, set, *from)
                } else {
                    extras
                        .entry((*id, *from))
                        .or_insert_with(|| new.clone())
                        .clone()
                };
                if !same(Some(&before), &new) {
                    return None;
                }
            }
        }
        Some(extras)
    }
}

impl Present {
    /// What a policy says of an identity alone; of what has none, nothing.
    fn rules_of(&self, id: u32, identity: u32) -> [Entries; 2] {
        if identity == IDENTITY_ANY {
            return NOTHING();
        }
        self.get(id, identity).cloned().unwrap_or_else(NOTHING)
    }

    /// True when some address has it.
    fn has(&self, identity: u32) -> bool {
        identity == IDENTITY_ANY || self.live.contains_key(&identity)
    }
}

impl Order {
    /// Rules that are needed meanwhile.
    pub(super) fn extras(
        &self,
        present: &Present,
        compiled: &Compiled,
        ids: &HashMap<RuleSetId, u32>,
    ) -> Extras {
        let through = match self {
            Self::IdentitiesFirst(extras) | Self::PodsFirst(extras) => return extras.clone(),
            Self::Through(through) => through,
        };
        let mut extras = Extras::new();
        for ((from, to), stand_in) in &through.stand_ins {
            for id in &through.left {
                extras.insert((*id, *stand_in), present.rules_of(*id, *from));
            }
            for (set, id) in ids {
                extras.insert((*id, *stand_in), rules_of(compiled, *set, *to));
            }
        }
        extras
    }

    /// What is done before pods get their rules.
    pub(super) fn first(&self, moves: &[Move], steps: &mut Vec<Operation>) {
        match self {
            Self::IdentitiesFirst(_) => steps.extend(moves.iter().map(Move::step)),
            Self::PodsFirst(_) => {}
            Self::Through(through) => {
                for one in moves {
                    match through.stand_ins.get(&(one.from, one.to)) {
                        Some(stand_in) => {
                            steps.push(Operation::PutIdentity(one.range, *stand_in));
                        }
                        // It keeps its identity, whatever the range around it has meanwhile.
                        None if one.stays => steps.push(one.step()),
                        None => {}
                    }
                }
            }
        }
    }

    /// What is done after pods have got their rules.
    pub(super) fn last(&self, moves: &[Move], steps: &mut Vec<Operation>) {
        match self {
            Self::IdentitiesFirst(_) => {}
            Self::PodsFirst(_) => steps.extend(moves.iter().map(Move::step)),
            Self::Through(_) => {
                let open = |one: &&Move| !one.stays || one.from != one.to;
                steps.extend(moves.iter().filter(open).map(Move::step));
            }
        }
    }
}

impl Move {
    fn step(&self) -> Operation {
        if self.stays {
            Operation::PutIdentity(self.range, self.to)
        } else {
            Operation::RemoveIdentity(self.range)
        }
    }
}

/// As [`wanted`], but of what has no identity, nothing.
fn rules_of(compiled: &Compiled, set: RuleSetId, identity: u32) -> [Entries; 2] {
    if identity == IDENTITY_ANY {
        NOTHING()
    } else {
        wanted(compiled, set, identity)
    }
}
