//! Deployment: from the Deployment and its ReplicaSets to the next writes. Pure: one call is one round; the sets'
//! own changes lead to the next round.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::Value;

use super::progress;
use super::sets::{
    Bounds, annotate, annotate_size, bounds, build, count, desired_replicas, find_new, is_rolling,
    max_replicas, replicas, revision,
};
use crate::controllers::runtime::object::{Object, set, unset};

/// One write.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Action {
    Create(Value),
    /// The changed set, and its size before when that changes.
    Update {
        set: Value,
        was: Option<i64>,
    },
    Delete(Arc<Value>),
}

/// The pods of one set as they are now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PodCounts {
    /// Neither finished nor on their way out.
    pub(super) active: i64,
    pub(super) available: i64,
}

/// The next round.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) actions: Vec<Action>,
    /// The revision that the Deployment's own annotation should name.
    pub(super) revision: Option<i64>,
    pub(super) status: Value,
    /// When the passing of time alone changes the status.
    pub(super) again: Option<Duration>,
}

/// The sets of a Deployment, and the changed copies of them.
struct Round<'a> {
    d: &'a Value,
    new: Option<&'a Arc<Value>>,
    /// Oldest first.
    old: Vec<&'a Arc<Value>>,
    bounds: Bounds,
    pods: &'a HashMap<String, PodCounts>,
    created: Option<Value>,
    edits: BTreeMap<String, Value>,
    deletions: Vec<Arc<Value>>,
}

/// `old_pods_left` says whether a pod of a set other than the new one still exists (finished ones excepted).
/// `pods` counts the pods by the uid of their set: the statuses of the sets lag behind their pods, and counts from before
/// the last scaling would let too many pods go, or come.
pub(super) fn plan(
    d: &Value,
    sets: &[Arc<Value>],
    pods: &HashMap<String, PodCounts>,
    old_pods_left: bool,
    now: Timestamp,
) -> Plan {
    let new = find_new(d, sets);
    let mut old: Vec<&Arc<Value>> = sets
        .iter()
        .filter(|rs| new.is_none_or(|n| n.uid() != rs.uid()))
        .collect();
    old.sort_by_key(|rs| (rs.created_at(), rs.name().to_owned()));
    let mut round = Round {
        d,
        new,
        old,
        bounds: bounds(d),
        pods,
        created: None,
        edits: BTreeMap::new(),
        deletions: Vec::new(),
    };
    let mut named_revision = None;
    if !d.is_deleting() {
        named_revision = round.sync_revision();
        round.advance(old_pods_left);
    }
    let (status, again) = progress::status(d, new, &round.old, round.created.as_ref(), now);
    let mut actions: Vec<Action> = round.created.into_iter().map(Action::Create).collect();
    for (name, edit) in round.edits {
        let before = sets
            .iter()
            .find(|rs| rs.name() == name)
            .map(|rs| replicas(rs));
        let was = before.filter(|b| *b != replicas(&edit));
        actions.push(Action::Update { set: edit, was });
    }
    actions.extend(round.deletions.into_iter().map(Action::Delete));
    Plan {
        actions,
        revision: named_revision,
        status,
        again,
    }
}

impl<'a> Round<'a> {
    fn wanted(&self) -> i64 {
        replicas(self.d)
    }

    fn all(&self) -> impl Iterator<Item = &&'a Arc<Value>> {
        self.old.iter().chain(self.new.iter())
    }

    fn active(&self) -> Vec<&'a Arc<Value>> {
        self.all().filter(|rs| replicas(rs) > 0).copied().collect()
    }

    fn total(&self) -> i64 {
        self.all().map(|rs| replicas(rs)).sum()
    }

    /// Pods of the set that are available and will stay.
    fn available(&self, rs: &Value) -> i64 {
        self.counts(rs).available.min(replicas(rs))
    }

    fn counts(&self, rs: &Value) -> PodCounts {
        self.pods.get(rs.uid()).copied().unwrap_or_default()
    }

    /// Pods that are there or asked for. A set that was scaled down still has its pods for a moment.
    fn occupied(&self) -> i64 {
        self.all()
            .map(|rs| replicas(rs).max(self.counts(rs).active))
            .sum()
    }

    fn edit(&mut self, rs: &Arc<Value>) -> &mut Value {
        self.edits
            .entry(rs.name().to_owned())
            .or_insert_with(|| rs.as_ref().clone())
    }

    /// Sets the size; true when it changes.
    fn scale(&mut self, rs: &Arc<Value>, size: i64) -> bool {
        let changes = replicas(rs) != size;
        let mut sized = self.edits.get(rs.name()).unwrap_or(rs).clone();
        annotate_size(&mut sized, self.d);
        set(&mut sized, &["spec", "replicas"], size.into());
        if &sized != rs.as_ref() {
            self.edits.insert(rs.name().to_owned(), sized);
        }
        changes
    }

    /// Gives the new set the highest revision, and says which one the Deployment should name.
    fn sync_revision(&mut self) -> Option<i64> {
        let next = self.old.iter().map(|rs| revision(rs)).max().unwrap_or(0) + 1;
        let new = self.new?;
        let mut updated = new.as_ref().clone();
        annotate(&mut updated, self.d, next);
        match self
            .d
            .number(&["spec", "minReadySeconds"])
            .filter(|m| *m > 0)
        {
            Some(seconds) => set(&mut updated, &["spec", "minReadySeconds"], seconds.into()),
            None => {
                if new
                    .number(&["spec", "minReadySeconds"])
                    .is_some_and(|m| m != 0)
                {
                    unset(&mut updated, &["spec", "minReadySeconds"]);
                }
            }
        }
        let named = revision(&updated);
        if &updated != new.as_ref() {
            *self.edit(new) = updated;
        }
        Some(named)
    }

    fn advance(&mut self, old_pods_left: bool) {
        if self.d.flag(&["spec", "paused"]) {
            self.resize();
            self.clean_up();
        } else if self.is_resized() {
            self.resize();
        } else if is_rolling(self.d) {
            self.roll();
        } else {
            self.recreate(old_pods_left);
        }
    }

    /// The wanted size changed since the sets were last sized.
    fn is_resized(&self) -> bool {
        let wanted = self.wanted();
        self.active()
            .iter()
            .any(|rs| desired_replicas(rs).is_some_and(|size| size != wanted))
    }

    /// Spreads a new size over the sets without moving the rollout on.
    fn resize(&mut self) {
        let active = self.active();
        let single = match active.as_slice() {
            [] => self.new.or(self.old.last().copied()),
            [one] => Some(*one),
            _ => None,
        };
        if let Some(one) = single {
            self.scale(one, self.wanted());
        } else if self.new.is_some_and(|new| self.is_saturated(new)) {
            for rs in self.old.clone() {
                if replicas(rs) > 0 {
                    self.scale(rs, 0);
                }
            }
        } else if is_rolling(self.d) {
            self.resize_in_proportion(active);
        }
    }

    fn is_saturated(&self, new: &Value) -> bool {
        let wanted = self.wanted();
        replicas(new) == wanted
            && desired_replicas(new) == Some(wanted)
            && self.available(new) == wanted
    }

    fn resize_in_proportion(&mut self, mut active: Vec<&'a Arc<Value>>) {
        let wanted = self.wanted();
        let allowed = if wanted > 0 {
            wanted + self.bounds.surge
        } else {
            0
        };
        let to_add = allowed - active.iter().map(|rs| replicas(rs)).sum::<i64>();
        // Larger sets take the rounding; among equals the newer grow and the older shrink first.
        active.sort_by(|a, b| {
            let age = a.created_at().cmp(&b.created_at());
            let by_age = if to_add > 0 { age.reverse() } else { age };
            replicas(b).cmp(&replicas(a)).then(by_age)
        });
        let mut added = 0;
        let mut sizes: Vec<i64> = Vec::with_capacity(active.len());
        for rs in &active {
            let share = self.share(rs, allowed, to_add, added);
            added += share;
            sizes.push(replicas(rs) + share);
        }
        if let Some(first) = sizes.first_mut() {
            *first = (*first + to_add - added).max(0);
        }
        for (rs, size) in active.into_iter().zip(sizes) {
            self.scale(rs, size);
        }
    }

    /// This set's part of `to_add`, of which `added` is given out already.
    fn share(&self, rs: &Value, allowed: i64, to_add: i64, added: i64) -> i64 {
        let size = replicas(rs);
        if size == 0 || to_add == added {
            return 0;
        }
        let fraction = if allowed == 0 {
            -size
        } else {
            let before = max_replicas(rs)
                .filter(|m| *m > 0)
                .unwrap_or_else(|| count(self.d, "replicas").max(1));
            // Rounded half up; all numbers are small and positive.
            (2 * size * allowed + before) / (2 * before) - size
        };
        if to_add > 0 {
            fraction.clamp(0, to_add - added)
        } else {
            fraction.clamp(to_add - added, 0)
        }
    }

    /// One step of a rolling update: the new set up within the surge, then old ones down within availability.
    fn roll(&mut self) {
        let room = self.wanted() + self.bounds.surge - self.occupied();
        match self.new {
            None => {
                let size = room.clamp(0, self.wanted());
                self.create(size);
                return;
            }
            Some(new) => {
                let size = replicas(new);
                let target = if size > self.wanted() {
                    self.wanted()
                } else {
                    size + room.clamp(0, self.wanted() - size)
                };
                if target != size && self.scale(new, target) {
                    return;
                }
            }
        }
        if !self.scale_old_down() && progress::is_complete(self.d, self.new, &self.old) {
            self.clean_up();
        }
    }

    fn create(&mut self, size: i64) {
        let next = self.old.iter().map(|rs| revision(rs)).max().unwrap_or(0) + 1;
        self.created = Some(build(self.d, size, next));
    }

    fn scale_old_down(&mut self) -> bool {
        let Some(new) = self.new else { return false };
        let least = self.wanted() - self.bounds.unavailable;
        let missing_in_new = replicas(new) - self.available(new);
        let mut may_go = self.total() - least - missing_in_new;
        if may_go <= 0 {
            return false;
        }
        // Pods that serve nobody go first; they do not count as available.
        let mut sizes: Vec<(&'a Arc<Value>, i64)> = self
            .old
            .iter()
            .map(|rs| (*rs, replicas(rs)))
            .filter(|(_, size)| *size > 0)
            .collect();
        for (rs, size) in &mut sizes {
            let idle = (*size - self.available(rs)).clamp(0, may_go);
            *size -= idle;
            may_go -= idle;
        }
        let available: i64 = self.all().map(|rs| self.available(rs)).sum();
        let mut spare = (available - least).max(0).min(may_go);
        for (_, size) in &mut sizes {
            let cut = (*size).min(spare);
            *size -= cut;
            spare -= cut;
        }
        let mut scaled = false;
        for (rs, size) in sizes {
            if size != replicas(rs) {
                scaled |= self.scale(rs, size);
            }
        }
        scaled
    }

    fn recreate(&mut self, old_pods_left: bool) {
        let mut scaled = false;
        for rs in self.old.clone() {
            if replicas(rs) > 0 {
                scaled |= self.scale(rs, 0);
            }
        }
        if scaled || old_pods_left {
            return;
        }
        match self.new {
            None => self.create(self.wanted()),
            Some(new) if replicas(new) != self.wanted() => {
                self.scale(new, self.wanted());
            }
            Some(_) if progress::is_complete(self.d, self.new, &self.old) => self.clean_up(),
            Some(_) => {}
        }
    }

    /// Deletes the empty old sets beyond the history limit, lowest revisions first.
    fn clean_up(&mut self) {
        let Some(limit) = self.d.number(&["spec", "revisionHistoryLimit"]) else {
            return;
        };
        let mut idle: Vec<&'a Arc<Value>> = self
            .old
            .iter()
            .copied()
            .filter(|rs| !rs.is_deleting())
            .collect();
        let surplus = idle
            .len()
            .saturating_sub(usize::try_from(limit).unwrap_or(usize::MAX));
        idle.sort_by_key(|rs| (revision(rs), rs.created_at()));
        for rs in idle.into_iter().take(surplus) {
            let observed = count(rs, "observedGeneration") >= rs.generation();
            if replicas(rs) == 0 && count(rs, "replicas") == 0 && observed {
                self.deletions.push(rs.clone());
            }
        }
    }
}
