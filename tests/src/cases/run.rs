//! Runs read cases side by side and reports them in the order of their files.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{Outcome, Summary};
use crate::actor::lock;

/// How a folder is run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan<'a> {
    /// Cases run at once, at least one.
    pub(super) jobs: usize,
    /// Where to write the results as JSON: `{"cases": [{name, outcome, why, seconds}], "passed", "failed", "skipped"}`.
    pub(super) json: Option<&'a Path>,
}

impl Plan<'_> {
    /// One line per case as its turn comes, then the counts; cases that could not be read count as failed.
    ///
    /// # Errors
    /// When the results cannot be written.
    pub(super) fn run<C: Sync>(
        self,
        cases: &[(String, Result<C>)],
        run: impl Fn(&C) -> Outcome + Sync,
        print: impl FnMut(&str) + Send,
    ) -> Result<Summary> {
        let next = AtomicUsize::new(0);
        let report = Mutex::new(Report {
            print,
            done: BTreeMap::new(),
            printed: 0,
            summary: Summary::default(),
            results: Vec::new(),
        });
        std::thread::scope(|scope| {
            for _ in 0..self.jobs.max(1).min(cases.len()) {
                scope.spawn(|| {
                    while let Some((name, case)) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let start = Instant::now();
                        let outcome = match case {
                            Ok(case) => run(case),
                            Err(e) => Outcome::Failed(format!("{e:#}")),
                        };
                        lock(&report).add(name, outcome, start.elapsed(), cases);
                    }
                });
            }
        });
        let report = report
            .into_inner()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(path) = self.json {
            std::fs::write(path, report.json().to_string())
                .with_context(|| format!("write results {}", path.display()))?;
        }
        Ok(report.summary)
    }
}

/// Results as they come, printed in the order of the files.
struct Report<P> {
    print: P,
    done: BTreeMap<String, (Outcome, Duration)>,
    printed: usize,
    summary: Summary,
    results: Vec<Value>,
}

impl<P: FnMut(&str)> Report<P> {
    fn add<C>(
        &mut self,
        name: &str,
        outcome: Outcome,
        took: Duration,
        order: &[(String, anyhow::Result<C>)],
    ) {
        self.done.insert(name.to_owned(), (outcome, took));
        while let Some((name, _)) = order.get(self.printed)
            && let Some((outcome, took)) = self.done.remove(name)
        {
            self.printed += 1;
            self.summary.count(&outcome);
            let (line, word, why) = match outcome {
                Outcome::Passed => (format!("ok      {name}"), "passed", None),
                Outcome::Failed(why) => (format!("FAILED  {name}: {why}"), "failed", Some(why)),
                Outcome::Skipped(why) => (format!("skipped {name}: {why}"), "skipped", Some(why)),
            };
            (self.print)(&line);
            let seconds = took.as_secs_f64();
            self.results
                .push(json!({"name": name, "outcome": word, "why": why, "seconds": seconds}));
        }
    }

    fn json(&self) -> Value {
        let counts = self.summary;
        json!({"cases": self.results, "passed": counts.passed, "failed": counts.failed, "skipped": counts.skipped})
    }
}
