//! Flows that stay open over the steps of a case.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::super::case::OpenFlow;
use super::super::world::key_of;
use super::Run;
use super::probes::{judge, probe};
use crate::actor::command::{Attempt, Command, Outcome, Send, Size};
use crate::cases::cluster::spec::normal_key;

/// A flow that lives answers by then.
const ANSWER_WITHIN: Duration = Duration::from_millis(3000);
/// A revoked flow has stopped by then.
const CUT_WITHIN: Duration = Duration::from_secs(1);
const SILENT_FOR: Duration = Duration::from_millis(400);
const SMALL: usize = 32;

/// Where a flow begins and ends.
#[derive(Clone, Debug)]
pub(super) struct Flow {
    pub(super) from: String,
    to: String,
}

impl Flow {
    /// Is this pod one of its ends?
    pub(super) fn is_of(&self, pod: &str) -> bool {
        normal_key(&self.from) == pod || normal_key(&self.to) == pod
    }
}

impl Run<'_> {
    /// Opens a flow, which has to be allowed, and keeps its socket.
    pub(super) fn open(&mut self, flow: &OpenFlow) -> Result<()> {
        let query = flow.query();
        let picked = match (flow.to.strip_prefix("svc:"), &flow.backend) {
            (Some(service), Some(pod)) => Some((key_of(service)?, pod.clone())),
            _ => None,
        };
        if let Some((service, pod)) = &picked {
            self.put_slices(Some((service, pod)));
            self.programmed()?;
        }
        let target = self.target(&query)?;
        let mut asked = probe(&query, target.to, ANSWER_WITHIN);
        asked.keep = Some(flow.id.clone());
        let (actor, _, _) = self.cluster.source(&flow.from)?;
        let attempts = actor.attempts(Command::Probe(asked), ANSWER_WITHIN)?;
        for attempt in &attempts {
            judge(attempt, true, &target).with_context(|| format!("open flow {}", flow.id))?;
        }
        let kept = Flow {
            from: flow.from.clone(),
            to: target.servers.first().cloned().unwrap_or_default(),
        };
        self.flows.insert(flow.id.clone(), kept);
        if picked.is_some() {
            self.put_slices(None);
            self.programmed()?;
        }
        Ok(())
    }

    pub(super) fn flow(&self, id: &str) -> Result<&Flow> {
        let flow = self.flows.get(id);
        flow.with_context(|| format!("no flow {id}"))
    }

    /// One more request and its fate.
    pub(super) fn ask_flow(&self, id: &str, flow: &Flow, limit: Duration) -> Result<Attempt> {
        let send = Send {
            flow: id.to_owned(),
            count: 1,
            size: Size::Bytes(SMALL),
            timeout_ms: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
            answer_size: 0,
            token: rand::random(),
        };
        let (actor, _, _) = self.cluster.source(&flow.from)?;
        let attempts = actor.attempts(Command::Send(send), limit)?;
        attempts
            .into_iter()
            .next()
            .context("a flow without sockets")
    }

    /// Does a flow still carry, or has it stopped?
    pub(super) fn check_flow(&self, id: &str, alive: bool) -> Result<()> {
        let flow = self.flow(id)?.clone();
        if alive {
            let attempt = self.ask_flow(id, &flow, ANSWER_WITHIN)?;
            if attempt.outcome != Outcome::Reply {
                bail!(
                    "flow {id} is dead: {:?} {}",
                    attempt.outcome,
                    attempt.detail
                );
            }
            return Ok(());
        }
        let deadline = Instant::now() + CUT_WITHIN;
        loop {
            let attempt = self.ask_flow(id, &flow, SILENT_FOR)?;
            if attempt.outcome != Outcome::Reply {
                return Ok(());
            }
            if Instant::now() >= deadline {
                bail!("flow {id} still answers after {CUT_WITHIN:?}");
            }
        }
    }
}
