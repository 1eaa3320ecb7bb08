//! The flow collector: walks the flow tables in bounded steps, removes flows that are over and entries that lost their
//! other half. It judges with the same code as the packet path, for which a flow past its time is no flow: nothing
//! that a packet could still use is removed.

use std::io;
use std::path::Path;

use dataplane_common::layout::{Affinity, AffinityKey, Flow, FlowKey};
use dataplane_common::{Family, V4, V6};

use super::services::open;
use super::table::{Plain, Position, Table};
use super::{CollectReport, KernelError};

/// Entries looked at in one step, once a second: a full table of the default size is walked in four.
const STEP_ENTRIES: usize = 65_536;
/// Entries fetched by one system call.
const BATCH_ENTRIES: usize = 4_096;
/// Above this share of the table, flows that never were established have to hurry.
const PRESSURE_NUMERATOR: usize = 3;
const PRESSURE_DENOMINATOR: usize = 4;

#[derive(Debug)]
struct FamilyFlows<A> {
    flows: Table<FlowKey<A>, Flow<A>>,
    replies: Table<FlowKey<A>, FlowKey<A>>,
    affinities: Table<AffinityKey<A>, Affinity>,
    states: Table<u32, u32>,
    position: Position,
    stage: Stage,
    /// Flows kept so far in this walk, and in the last full one.
    kept: usize,
    count: usize,
}

/// Which table a walk is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Flows,
    Replies,
    Affinities,
}

#[derive(Debug)]
pub(super) struct Collector {
    v4: FamilyFlows<V4>,
    v6: FamilyFlows<V6>,
    walk_all: bool,
}

impl Collector {
    pub(super) fn open(maps: &Path) -> Result<Self, KernelError> {
        Ok(Self {
            v4: FamilyFlows::open(maps, ["flows_v4", "replies_v4", "affinity_v4", "states_v4"])?,
            v6: FamilyFlows::open(maps, ["flows_v6", "replies_v6", "affinity_v6", "states_v6"])?,
            walk_all: false,
        })
    }

    /// The next step goes through everything: backends may have gone, and their flows go within a second.
    pub(super) fn walk_all_next(&mut self) {
        self.walk_all = true;
    }

    pub(super) fn flow_count(&self) -> usize {
        self.v4.count + self.v6.count
    }

    pub(super) fn step(&mut self, now_s: u32) -> Result<CollectReport, KernelError> {
        let mut report = CollectReport::default();
        let budget = if std::mem::take(&mut self.walk_all) {
            usize::MAX
        } else {
            STEP_ENTRIES
        };
        self.v4.step(now_s, budget, &mut report)?;
        self.v6.step(now_s, budget, &mut report)?;
        Ok(report)
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
            flows: open(maps, flows)?,
            replies: open(maps, replies)?,
            affinities: open(maps, affinities)?,
            states: open(maps, states)?,
            position: Position::default(),
            stage: Stage::Flows,
            kept: 0,
            count: 0,
        })
    }

    /// Goes on from where the last step ended, through at most `budget` entries and at most one whole walk.
    fn step(
        &mut self,
        now_s: u32,
        budget: usize,
        report: &mut CollectReport,
    ) -> Result<(), KernelError> {
        if budget == usize::MAX {
            (self.stage, self.position, self.kept) = (Stage::Flows, Position::default(), 0);
        }
        let mut walked = 0;
        while walked < budget {
            let (map, result) = match self.stage {
                Stage::Flows => (self.flows.name, self.walk_flows(now_s, report)),
                Stage::Replies => (self.replies.name, self.walk_replies(report)),
                Stage::Affinities => (self.affinities.name, self.walk_affinities(now_s)),
            };
            let (entries, last) = result.map_err(|source| KernelError::Map {
                attempted: "walk",
                map,
                source,
            })?;
            walked += entries;
            report.walked += entries;
            match (last, self.stage) {
                (false, _) => {}
                (true, Stage::Flows) => {
                    self.count = self.kept;
                    self.stage = Stage::Replies;
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

    fn under_pressure(&self) -> bool {
        let most = self.count.max(self.kept);
        most * PRESSURE_DENOMINATOR > self.flows.max_entries as usize * PRESSURE_NUMERATOR
    }

    fn walk_flows(&mut self, now_s: u32, report: &mut CollectReport) -> io::Result<(usize, bool)> {
        let batch = self.flows.batch(&mut self.position, BATCH_ENTRIES)?;
        let pressure = self.under_pressure();
        for (key, flow) in &batch.entries {
            if !self.is_over(flow, now_s, pressure)? {
                self.kept += 1;
                continue;
            }
            // Looked at again just before: a packet may have revived it since the batch was read.
            let Some(flow) = self.flows.get(key)? else {
                continue;
            };
            if !self.is_over(&flow, now_s, pressure)? {
                self.kept += 1;
                continue;
            }
            // The reply first: if we stop in between, the record is found again by the next walk.
            let reply_key = flow.reply_key();
            if self.replies.get(&reply_key)?.as_ref() == Some(key) {
                self.replies.remove(&reply_key)?;
            }
            if self.flows.remove(key)? {
                report.removed += 1;
            }
        }
        Ok((batch.entries.len(), batch.last))
    }

    fn is_over(&self, flow: &Flow<A>, now_s: u32, pressure: bool) -> io::Result<bool> {
        Ok(flow.is_expired(now_s, pressure)
            || flow.is_orphaned(self.states.get(&flow.backend_id)?.unwrap_or(0)))
    }

    fn walk_replies(&mut self, report: &mut CollectReport) -> io::Result<(usize, bool)> {
        let batch = self.replies.batch(&mut self.position, BATCH_ENTRIES)?;
        for (key, owner) in &batch.entries {
            if self.is_half(key, owner)? && self.is_half(key, owner)? && self.replies.remove(key)? {
                report.repaired += 1;
            }
        }
        Ok((batch.entries.len(), batch.last))
    }

    /// Affinities whose time is over choose anew with or without their entry.
    fn walk_affinities(&mut self, now_s: u32) -> io::Result<(usize, bool)> {
        let batch = self.affinities.batch(&mut self.position, BATCH_ENTRIES)?;
        for (key, affinity) in &batch.entries {
            if now_s > affinity.expires_s {
                self.affinities.remove(key)?;
            }
        }
        Ok((batch.entries.len(), batch.last))
    }

    /// A reply entry whose record is missing or answers to another tuple. A flow in the making looks like this for a
    /// moment, between its two insertions.
    fn is_half(&self, key: &FlowKey<A>, owner: &FlowKey<A>) -> io::Result<bool> {
        Ok(self
            .flows
            .get(owner)?
            .is_none_or(|flow| flow.reply_key() != *key))
    }
}
