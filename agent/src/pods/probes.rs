//! Probes of running containers: a task per probe and container instance, which ends with the instance.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use control_api::v1::{Container, Probe};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::cri::Runtime;
use super::hooks::{Verdict, probe};
use super::shared::now_us;
use super::view::Micros;

/// Until a container is ready for the first time, its readiness is asked for more often than its period: from this
/// delay, doubling up to the period. Failures in between are not reported.
const EAGER_FIRST: Duration = Duration::from_millis(100);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Startup,
    Readiness,
    Liveness,
}

impl Kind {
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Startup => "Startup",
            Self::Readiness => "Readiness",
            Self::Liveness => "Liveness",
        }
    }

    fn of(self, container: &Container) -> Option<&Probe> {
        match self {
            Self::Startup => container.startup.as_ref(),
            Self::Readiness => container.readiness.as_ref(),
            Self::Liveness => container.liveness.as_ref(),
        }
    }
}

/// News of a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct News {
    pub(crate) container: String,
    pub(crate) container_id: String,
    pub(crate) kind: Kind,
    pub(crate) what: What,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// As many successes in a row as the probe asks for.
    Passed,
    /// As many failures in a row as the probe allows.
    Failed(String),
    /// One failure, to be told in an event.
    Complaint(String),
}

/// Counts results against the thresholds. [pure]
#[derive(Clone, Debug, Default)]
pub(crate) struct Counter {
    successes: i32,
    failures: i32,
    last: Option<bool>,
}

impl Counter {
    /// The new verdict when this result changes it (or, for failures, repeats it).
    pub(crate) fn count(&mut self, probe: &Probe, success: bool) -> Option<bool> {
        if success {
            self.failures = 0;
            self.successes = self.successes.saturating_add(1);
            let reached = self.successes >= probe.success_threshold.max(1);
            (reached && self.last.replace(true) != Some(true)).then_some(true)
        } else {
            self.successes = 0;
            self.failures = self.failures.saturating_add(1);
            let reached = self.failures >= probe.failure_threshold.max(1);
            (reached && self.last.replace(false) != Some(false)).then_some(false)
        }
    }
}

/// Tasks of one pod, by container and kind.
#[derive(Debug, Default)]
pub(crate) struct Tasks {
    running: BTreeMap<(String, Kind), (String, AbortHandle)>,
}

/// What a probe task works on.
pub(crate) struct Target {
    pub(crate) runtime: Arc<dyn Runtime>,
    pub(crate) container: Container,
    pub(crate) container_id: String,
    pub(crate) started_us: Micros,
    pub(crate) pod_ip: String,
    /// An instance from before a restart of the agent that was ready: its first answers are no news.
    pub(crate) was_ready: bool,
}

impl Tasks {
    /// Starts the probe for this instance unless it runs already; an older instance's ends.
    pub(crate) fn ensure<N>(&mut self, kind: Kind, target: Target, news: mpsc::Sender<N>)
    where
        N: From<News> + Send + 'static,
    {
        let Some(wanted) = kind.of(&target.container).cloned() else {
            return;
        };
        let key = (target.container.name.clone(), kind);
        if self
            .running
            .get(&key)
            .is_some_and(|(id, _)| *id == target.container_id)
        {
            return;
        }
        let id = target.container_id.clone();
        let task = tokio::spawn(run(kind, wanted, target, news)).abort_handle();
        if let Some((_, old)) = self.running.insert(key, (id, task)) {
            old.abort();
        }
    }

    /// Ends probes that `keep` does not want.
    pub(crate) fn retain(&mut self, keep: impl Fn(&str, &str, Kind) -> bool) {
        self.running.retain(|(name, kind), (id, task)| {
            let stays = keep(name, id, *kind);
            if !stays {
                task.abort();
            }
            stays
        });
    }
}

impl Drop for Tasks {
    fn drop(&mut self) {
        self.retain(|_, _, _| false);
    }
}

async fn run<N: From<News>>(kind: Kind, wanted: Probe, target: Target, news: mpsc::Sender<N>) {
    let period = seconds(wanted.period_s, 10);
    let timeout = seconds(wanted.timeout_s, 1);
    let handler = wanted.handler.clone().unwrap_or_default();
    let initial = i64::from(wanted.initial_delay_s.max(0)) * 1_000_000;
    let wait = (target.started_us + initial).saturating_sub(now_us());
    tokio::time::sleep(Duration::from_micros(u64::try_from(wait).unwrap_or(0))).await;
    let mut counter = Counter::default();
    let mut eager = (kind == Kind::Readiness && !target.was_ready).then_some(EAGER_FIRST);
    loop {
        let (runtime, id) = (target.runtime.as_ref(), &target.container_id);
        let verdict = probe(
            runtime,
            &target.container,
            id,
            &target.pod_ip,
            &handler,
            timeout,
        )
        .await;
        let mut send = Vec::new();
        match verdict {
            Verdict::Unknown(message) => {
                tracing::debug!(container = %id, ?kind, message, "probe could not be run");
            }
            Verdict::Success => {
                if counter.count(&wanted, true).is_some() {
                    send.push(What::Passed);
                }
                eager = None;
            }
            Verdict::Failure(_) if eager.is_some_and(|delay| delay < period) => {}
            Verdict::Failure(message) => {
                send.push(What::Complaint(message.clone()));
                if counter.count(&wanted, false).is_some() {
                    send.push(What::Failed(message));
                }
            }
        }
        for what in send {
            let one = News {
                container: target.container.name.clone(),
                container_id: id.clone(),
                kind,
                what: what.clone(),
            };
            if news.send(one.into()).await.is_err() {
                return;
            }
            if kind == Kind::Startup && what == What::Passed {
                return;
            }
        }
        let pause = eager.map_or(period, |delay| delay.min(period));
        eager = eager.map(|delay| delay * 2);
        tokio::time::sleep(pause).await;
    }
}

fn seconds(value: i32, default: u64) -> Duration {
    Duration::from_secs(
        u64::try_from(value)
            .ok()
            .filter(|v| *v > 0)
            .unwrap_or(default),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds_decide_and_repeats_are_no_news() {
        let probe = Probe {
            success_threshold: 2,
            failure_threshold: 3,
            ..Probe::default()
        };
        let mut counter = Counter::default();
        let results = [
            true, true, true, false, false, true, false, false, false, false, true, true,
        ];
        let news: Vec<Option<bool>> = results.iter().map(|r| counter.count(&probe, *r)).collect();
        let none = None;
        assert_eq!(
            news,
            [
                none,
                Some(true),
                none,
                none,
                none,
                none,
                none,
                none,
                Some(false),
                none,
                none,
                Some(true)
            ]
        );
    }
}
