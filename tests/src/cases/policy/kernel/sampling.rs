//! Continuous probes: a sample every few milliseconds, each of which has to be as the step has it.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::super::case::{Expectation, Query};
use super::Run;
use super::probes::{Target, judge, probe};
use crate::actor::command::{Attempt, Command, Outcome, Protocol};

/// Between two samples.
const EVERY_MS: u64 = 20;
/// What may not pass gets no answer in this time. Below the second after which TCP says a lost SYN again.
const SILENT_WITHIN: Duration = Duration::from_millis(900);
/// What may pass is answered in this time, on a machine with much else to do. A lost datagram is never answered, and a lost
/// segment is sent again, which is a loss as well.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);
/// Sockets of the last samples are closed by then.
const ENDS_WITHIN: Duration = Duration::from_secs(10);
/// No fewer samples make a watch.
const LEAST: usize = 5;

/// One watch of fresh sockets.
#[derive(Debug)]
struct Watch {
    id: String,
    query: Query,
    allow: bool,
    target: Target,
    token: u64,
}

/// One watch of a kept flow.
#[derive(Debug)]
struct FlowWatch {
    id: String,
    from: String,
    alive: bool,
}

/// All watches of a step.
#[derive(Debug, Default)]
pub(super) struct Sampler {
    watches: Vec<Watch>,
    flows: Vec<FlowWatch>,
}

impl Sampler {
    /// Begins to watch these, from now on.
    ///
    /// # Errors
    /// When a source does not do as told.
    pub(super) fn begin(&mut self, run: &Run<'_>, expectations: &[&Expectation]) -> Result<()> {
        for expectation in expectations {
            match expectation {
                Expectation::Flow { id, alive } => self.watch_flow(run, id, *alive)?,
                Expectation::Verdict { query, allow } => {
                    let raw = query.protocol == Protocol::Sctp && !run.sctp;
                    // One backend of a Service is chosen by the slices, which stay as they are during a step.
                    if !raw && query.backend.is_none() {
                        self.watch(run, query, *allow)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn watch(&mut self, run: &Run<'_>, query: &Query, allow: bool) -> Result<()> {
        let target = run.target(query)?;
        let limit = if allow {
            ANSWERED_WITHIN
        } else {
            SILENT_WITHIN
        };
        let probe = probe(query, target.to, limit);
        let watch = Watch {
            id: format!("watch-{}", self.watches.len()),
            query: query.clone(),
            allow,
            token: probe.token,
            target,
        };
        let command = Command::Watch {
            id: watch.id.clone(),
            every_ms: EVERY_MS,
            reuse: false,
            overlap: true,
            probe,
        };
        let (actor, _, _) = run.cluster.source(&query.from)?;
        actor.call(command, Duration::ZERO)?;
        self.watches.push(watch);
        Ok(())
    }

    fn watch_flow(&mut self, run: &Run<'_>, id: &str, alive: bool) -> Result<()> {
        let from = run.flow(id)?.from.clone();
        let command = Command::WatchFlow {
            id: flow_watch(id),
            flow: id.to_owned(),
            every_ms: EVERY_MS,
            timeout_ms: millis(if alive {
                ANSWERED_WITHIN
            } else {
                SILENT_WITHIN
            }),
        };
        let (actor, _, _) = run.cluster.source(&from)?;
        actor.call(command, Duration::ZERO)?;
        self.flows.push(FlowWatch {
            id: id.to_owned(),
            from,
            alive,
        });
        Ok(())
    }

    /// Ends all watches and judges every sample.
    ///
    /// # Errors
    /// The first sample that differs.
    pub(super) fn end(self, run: &Run<'_>) -> Result<()> {
        let mut done = Ok(());
        for watch in self.watches {
            let ended =
                end_watch(run, &watch).with_context(|| format!("all along: {}", watch.query));
            done = done.and(ended);
        }
        for watch in self.flows {
            let ended = end_flow_watch(run, &watch);
            done = done.and(ended.with_context(|| format!("all along: flow {}", watch.id)));
        }
        done
    }
}

fn flow_watch(flow: &str) -> String {
    format!("flow-{flow}")
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Every answer came to what was sent first.
fn nothing_lost(attempts: &[Attempt]) -> Result<()> {
    let late = |a: &&Attempt| a.outcome == Outcome::Reply && a.resent > 0;
    let lost = attempts.iter().filter(late).count();
    if let Some(first) = attempts.iter().find(late) {
        let (all, took, detail) = (attempts.len(), first.took_ms, &first.detail);
        anyhow::bail!(
            "{lost} of {all} samples were sent again, the first answered after {took} ms {detail}"
        );
    }
    Ok(())
}

fn end_flow_watch(run: &Run<'_>, watch: &FlowWatch) -> Result<()> {
    let (actor, _, _) = run.cluster.source(&watch.from)?;
    let unwatch = Command::Unwatch {
        id: flow_watch(&watch.id),
    };
    let attempts = actor.attempts(unwatch, ENDS_WITHIN)?;
    ensure!(
        attempts.len() >= LEAST || !watch.alive,
        "only {} samples",
        attempts.len()
    );
    let differs = |a: &&Attempt| (a.outcome == Outcome::Reply) != watch.alive;
    if let Some(wrong) = attempts.iter().find(differs) {
        let (outcome, detail, all) = (wrong.outcome, &wrong.detail, attempts.len());
        anyhow::bail!("one of {all} samples was {outcome:?} {detail}");
    }
    nothing_lost(&attempts)
}

fn end_watch(run: &Run<'_>, watch: &Watch) -> Result<()> {
    let Ok((actor, _, _)) = run.cluster.source(&watch.query.from) else {
        // The pod went within the step, and its samples with it.
        return Ok(());
    };
    let unwatch = Command::Unwatch {
        id: watch.id.clone(),
    };
    let attempts = actor.attempts(unwatch, ENDS_WITHIN)?;
    ensure!(attempts.len() >= LEAST, "only {} samples", attempts.len());
    let judged = attempts
        .iter()
        .map(|a| judge(a, watch.allow, &watch.target));
    let wrong: Vec<anyhow::Error> = judged.filter_map(Result::err).collect();
    if let Some(first) = wrong.first() {
        let (wrong, all) = (wrong.len(), attempts.len());
        anyhow::bail!("{wrong} of {all} samples differ, the first: {first:#}");
    }
    if watch.allow {
        return nothing_lost(&attempts);
    }
    run.not_seen(watch.token, &watch.target)
}
