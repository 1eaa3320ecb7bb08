//! Measurements in turns: what drifts on the machine, drifts for every peer.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::Result;
use clap::Args;

use crate::lab::Length;
use crate::load::client::Seen;
use weir_bench::report::{Report, Skipped};

/// How often and how long.
#[derive(Clone, Debug, Args)]
pub(crate) struct Turns {
    /// Times that everything is measured.
    #[arg(long, default_value_t = 5)]
    pub(crate) rounds: usize,
    /// Milliseconds of one measurement.
    #[arg(long, default_value_t = 300)]
    pub(crate) time_ms: u64,
    /// Slices of a measurement, each a run of its own, in which the peers take turns. The best one counts: what
    /// others do on the machine only takes away.
    #[arg(long, default_value_t = 5)]
    pub(crate) slices: u32,
    /// Run both ends of a measurement before all other processes (SCHED_FIFO): for a machine that others use as well.
    #[arg(long)]
    pub(crate) realtime: bool,
}

/// What was seen of each peer: one for every round.
pub(crate) type Samples<M, P> = BTreeMap<(M, P), Vec<Seen>>;

impl Turns {
    /// Few and short: to see that it works.
    pub(crate) fn shorten(&mut self) {
        self.rounds = self.rounds.min(2);
        self.time_ms = self.time_ms.min(100);
        self.slices = 1;
    }

    /// Every measurement of every peer, round after round. What fails once is left out from then on.
    pub(crate) fn measure<M: Copy + Ord, P: Copy + Ord>(
        &self,
        measurements: &[M],
        peers: impl Fn(M) -> Vec<P>,
        run: impl Fn(M, P, Length) -> Result<Seen>,
        title: impl Fn(M, P) -> String,
        report: &mut Report,
    ) -> Samples<M, P> {
        let slices = self.slices.max(1);
        let time = Duration::from_millis(self.time_ms) / slices;
        let length = Length {
            warm_up: time / 6,
            time,
            realtime: self.realtime,
        };
        let mut samples = Samples::new();
        let mut failed = BTreeSet::new();
        for round in 0..self.rounds {
            eprintln!("round {} of {}", round + 1, self.rounds);
            for measurement in measurements.iter().copied() {
                let taking_part = peers(measurement);
                let mut best = BTreeMap::<P, Seen>::new();
                for peer in (0..slices).flat_map(|_| &taking_part).copied() {
                    let key = (measurement, peer);
                    if failed.contains(&key) {
                        continue;
                    }
                    match run(measurement, peer, length) {
                        Ok(seen) => {
                            best.entry(peer)
                                .and_modify(|best| *best = best.better(&seen))
                                .or_insert(seen);
                        }
                        Err(error) => {
                            failed.insert(key);
                            best.remove(&peer);
                            samples.remove(&key);
                            report.skipped.push(Skipped {
                                name: title(measurement, peer),
                                reason: format!("{error:#}"),
                            });
                        }
                    }
                }
                for (peer, seen) in best {
                    samples.entry((measurement, peer)).or_default().push(seen);
                }
            }
        }
        samples
    }
}

/// One figure of a peer, round by round.
pub(crate) fn values<M: Ord, P: Ord>(
    samples: &Samples<M, P>,
    measurement: M,
    peer: P,
    of: fn(&Seen) -> f64,
) -> Option<Vec<f64>> {
    Some(samples.get(&(measurement, peer))?.iter().map(of).collect())
}
