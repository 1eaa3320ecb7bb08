//! The flow collector: walks the flow tables in bounded steps and removes what is over. What that is, and how an entry
//! is removed under running packets, is in [`dataplane_common::collect`]. All state is in the maps: another agent goes
//! on where this one ended.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use dataplane_common::collect::{
    Outcome, Store, collect_affinity, collect_flow, collect_reply, is_affinity_over,
};
use dataplane_common::layout::{Affinity, AffinityKey, Flow, FlowKey};
use dataplane_common::{Family, V4, V6};

use super::services::open;
use super::table::{Plain, Position, Table};
use super::{CollectReport, FlowTableStatus, KernelError};

/// Work of one step, once a second, in entries read. Reading one costs about 0.3 µs, so that a step takes less than
/// 4 % of a CPU, and a full table of the default size is walked in four.
const STEP_WORK: usize = 131_072;
/// The same while room is needed.
const PRESSED_STEP_WORK: usize = 4 * STEP_WORK;
/// A reply entry, in entries read: its record is looked up by a system call of its own.
const REPLY_WORK: usize = 4;
/// A removal, in entries read: four system calls or five.
const REMOVAL_WORK: usize = 16;
/// Halves heal themselves as packets find them; those that no packet finds may wait.
const REPLY_PERIOD_S: u32 = 60;
/// Entries fetched by one system call.
const BATCH_ENTRIES: usize = 4_096;
/// Above this share of the table, flows that never were established have to hurry.
const PRESSURE_NUMERATOR: usize = 3;
const PRESSURE_DENOMINATOR: usize = 4;

/// The tables of one family that packets write.
#[derive(Debug)]
struct FlowTables<A> {
    flows: Table<FlowKey<A>, Flow<A>>,
    replies: Table<FlowKey<A>, FlowKey<A>>,
    affinities: Table<AffinityKey<A>, Affinity>,
    states: Table<u32, u32>,
}

#[derive(Debug)]
struct FamilyFlows<A> {
    tables: FlowTables<A>,
    position: Position,
    stage: Stage,
    /// Flows kept so far in this walk, and in the last full one.
    kept: usize,
    count: usize,
    /// Packets found the table full since the last step.
    full: bool,
    /// When the replies were last walked.
    replies_walked_s: Option<u32>,
}

/// Which table a walk is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Flows,
    Replies,
    Affinities,
}

/// Words of backend ids as they were when first asked for in a step: one system call for each backend instead of one
/// for each flow. What they condemn is judged again with the present word.
type States = HashMap<u32, u32>;

#[derive(Debug)]
pub(super) struct Collector {
    v4: FamilyFlows<V4>,
    v6: FamilyFlows<V6>,
    no_room: u64,
    total: CollectReport,
    busy: Duration,
}

impl Collector {
    pub(super) fn open(maps: &Path) -> Result<Self, KernelError> {
        Ok(Self {
            v4: FamilyFlows::open(maps, ["flows_v4", "replies_v4", "affinity_v4", "states_v4"])?,
            v6: FamilyFlows::open(maps, ["flows_v6", "replies_v6", "affinity_v6", "states_v6"])?,
            no_room: 0,
            total: CollectReport::default(),
            busy: Duration::ZERO,
        })
    }

    pub(super) fn flow_count(&self) -> usize {
        self.v4.count + self.v6.count
    }

    pub(super) fn status(&self) -> FlowTableStatus {
        FlowTableStatus {
            flows: [self.v4.count, self.v6.count],
            capacity: [self.v4.capacity(), self.v6.capacity()],
            pressure: [self.v4.under_pressure(), self.v6.under_pressure()],
            total: self.total,
            busy: self.busy,
        }
    }

    /// `no_room` counts the packets that ever found a table full. `hurry` says that backends may have gone: packets know at
    /// once, the memory of their flows goes with a walk that starts now and works harder.
    pub(super) fn step(
        &mut self,
        now_s: u32,
        no_room: u64,
        hurry: bool,
    ) -> Result<CollectReport, KernelError> {
        let started = Instant::now();
        let full = no_room > std::mem::replace(&mut self.no_room, no_room);
        let mut report = CollectReport::default();
        let result = self
            .v4
            .step(now_s, full, hurry, &mut report)
            .and_then(|()| self.v6.step(now_s, full, hurry, &mut report));
        self.total.add(report);
        self.busy += started.elapsed();
        result.map(|()| report)
    }
}

impl<A: Family> FamilyFlows<A>
where
    FlowKey<A>: Plain,
    Flow<A>: Plain,
    AffinityKey<A>: Plain,
{
    fn open(maps: &Path, names: [&'static str; 4]) -> Result<Self, KernelError> {
        let [flows, replies, affinities, states] = names;
        Ok(Self {
            tables: FlowTables {
                flows: open(maps, flows)?,
                replies: open(maps, replies)?,
                affinities: open(maps, affinities)?,
                states: open(maps, states)?,
            },
            position: Position::default(),
            stage: Stage::Flows,
            kept: 0,
            count: 0,
            full: false,
            replies_walked_s: None,
        })
    }

    fn capacity(&self) -> usize {
        self.tables.flows.max_entries as usize
    }

    /// Goes on from where the last step ended, through at most one whole walk.
    fn step(
        &mut self,
        now_s: u32,
        full: bool,
        hurry: bool,
        report: &mut CollectReport,
    ) -> Result<(), KernelError> {
        let newly_full = full && !self.full;
        self.full = full;
        if hurry || newly_full {
            (self.stage, self.position, self.kept) = (Stage::Flows, Position::default(), 0);
        }
        let budget = if hurry || self.under_pressure() {
            PRESSED_STEP_WORK
        } else {
            STEP_WORK
        };
        let mut states = States::new();
        let mut work = 0;
        while work < budget {
            let before = *report;
            let mut unit = 1;
            let (map, result) = match self.stage {
                Stage::Flows => (
                    self.tables.flows.name,
                    self.walk_flows(now_s, &mut states, report),
                ),
                Stage::Replies => {
                    unit = REPLY_WORK;
                    (self.tables.replies.name, self.walk_replies(report))
                }
                Stage::Affinities => (
                    self.tables.affinities.name,
                    self.walk_affinities(now_s, &mut states, report),
                ),
            };
            let last = result.map_err(|source| KernelError::Map {
                attempted: "walk",
                map,
                source,
            })?;
            work += report.work_since(before, unit);
            match (last, self.stage) {
                (false, _) => {}
                (true, Stage::Flows) => {
                    self.count = self.kept;
                    self.stage = if self.replies_are_due(now_s) {
                        self.replies_walked_s = Some(now_s);
                        Stage::Replies
                    } else {
                        Stage::Affinities
                    };
                }
                (true, Stage::Replies) => self.stage = Stage::Affinities,
                (true, Stage::Affinities) => {
                    self.stage = Stage::Flows;
                    self.kept = 0;
                    break;
                }
            }
        }
        Ok(())
    }

    fn replies_are_due(&self, now_s: u32) -> bool {
        self.replies_walked_s
            .is_none_or(|last| now_s.saturating_sub(last) >= REPLY_PERIOD_S)
    }

    fn under_pressure(&self) -> bool {
        let most = self.count.max(self.kept);
        self.full || most * PRESSURE_DENOMINATOR > self.capacity() * PRESSURE_NUMERATOR
    }

    /// One batch. True when it was the last, as for the other walks.
    fn walk_flows(
        &mut self,
        now_s: u32,
        states: &mut States,
        report: &mut CollectReport,
    ) -> io::Result<bool> {
        let batch = self.tables.flows.batch(&mut self.position, BATCH_ENTRIES)?;
        report.walked += batch.entries.len();
        let pressure = self.under_pressure();
        for (key, flow) in &batch.entries {
            let state = self.tables.known_state(flow.backend_id, states)?;
            if !flow.is_over(state, now_s, pressure) {
                self.kept += 1;
                continue;
            }
            match collect_flow(&mut self.tables, key, now_s, pressure)? {
                Outcome::Kept => self.kept += 1,
                Outcome::Removed => report.removed += 1,
                Outcome::Gone => {}
            }
        }
        Ok(batch.last)
    }

    fn walk_replies(&mut self, report: &mut CollectReport) -> io::Result<bool> {
        let batch = self
            .tables
            .replies
            .batch(&mut self.position, BATCH_ENTRIES)?;
        report.walked += batch.entries.len();
        for (key, owner) in &batch.entries {
            if collect_reply(&mut self.tables, key, owner)? == Outcome::Removed {
                report.repaired += 1;
            }
        }
        Ok(batch.last)
    }

    fn walk_affinities(
        &mut self,
        now_s: u32,
        states: &mut States,
        report: &mut CollectReport,
    ) -> io::Result<bool> {
        let batch = self
            .tables
            .affinities
            .batch(&mut self.position, BATCH_ENTRIES)?;
        report.walked += batch.entries.len();
        for (key, affinity) in &batch.entries {
            let state = self.tables.known_state(affinity.backend_id, states)?;
            if is_affinity_over(affinity, state, now_s)
                && collect_affinity(&mut self.tables, key, now_s)? == Outcome::Removed
            {
                report.affinities += 1;
            }
        }
        Ok(batch.last)
    }
}

impl<A> FlowTables<A> {
    fn known_state(&self, id: u32, states: &mut States) -> io::Result<u32> {
        if let Some(word) = states.get(&id) {
            return Ok(*word);
        }
        let word = self.states.get(&id)?.unwrap_or(0);
        states.insert(id, word);
        Ok(word)
    }
}

impl CollectReport {
    fn add(&mut self, step: Self) {
        self.walked += step.walked;
        self.removed += step.removed;
        self.repaired += step.repaired;
        self.affinities += step.affinities;
    }

    /// `unit` is what one entry cost.
    fn work_since(&self, before: Self, unit: usize) -> usize {
        let removals = |report: &Self| report.removed + report.repaired + report.affinities;
        (self.walked - before.walked) * unit + (removals(self) - removals(&before)) * REMOVAL_WORK
    }
}

impl<A: Family> Store<A> for FlowTables<A>
where
    FlowKey<A>: Plain,
    Flow<A>: Plain,
    AffinityKey<A>: Plain,
{
    type Error = io::Error;

    fn backend_state(&mut self, id: u32) -> io::Result<u32> {
        Ok(self.states.get(&id)?.unwrap_or(0))
    }

    fn flow(&mut self, key: &FlowKey<A>) -> io::Result<Option<Flow<A>>> {
        self.flows.get(key)
    }

    fn take_flow(&mut self, key: &FlowKey<A>) -> io::Result<Option<Flow<A>>> {
        self.flows.take(key)
    }

    fn put_back_flow(&mut self, key: &FlowKey<A>, flow: &Flow<A>) -> io::Result<()> {
        self.flows.put_new(key, flow).map(drop)
    }

    fn reply(&mut self, key: &FlowKey<A>) -> io::Result<Option<FlowKey<A>>> {
        self.replies.get(key)
    }

    fn take_reply(&mut self, key: &FlowKey<A>) -> io::Result<Option<FlowKey<A>>> {
        self.replies.take(key)
    }

    fn put_back_reply(&mut self, key: &FlowKey<A>, owner: &FlowKey<A>) -> io::Result<()> {
        self.replies.put_new(key, owner).map(drop)
    }

    fn affinity(&mut self, key: &AffinityKey<A>) -> io::Result<Option<Affinity>> {
        self.affinities.get(key)
    }

    fn take_affinity(&mut self, key: &AffinityKey<A>) -> io::Result<Option<Affinity>> {
        self.affinities.take(key)
    }

    fn put_back_affinity(&mut self, key: &AffinityKey<A>, affinity: &Affinity) -> io::Result<()> {
        self.affinities.put_new(key, affinity).map(drop)
    }
}
