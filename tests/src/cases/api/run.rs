//! Runs the steps of one case.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::kubectl;
use super::kubelet::Kubelet;
use super::request;
use super::server::Server;
use super::vars::{Vars, as_text, substitute};
use super::watch::Watch;

/// Between two tries of a step with `within_s` or `for_s`.
const RETRY_EVERY: Duration = Duration::from_millis(250);

/// What the steps of one case share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) server: Arc<Server>,
    /// HOME of this case's kubectl.
    pub(super) home: tempfile::TempDir,
    pub(super) kubeconfig: std::path::PathBuf,
    pub(super) watches: Mutex<HashMap<String, Watch>>,
    pub(super) kubelets: Mutex<HashMap<String, Kubelet>>,
}

/// One line of execution: the main one, or a branch of `parallel`.
#[derive(Clone, Debug)]
pub(super) struct Branch {
    pub(super) shared: Arc<Shared>,
    pub(super) vars: Vars,
    /// Every HTTP status seen, for `tally`.
    pub(super) statuses: Vec<u16>,
}

/// A step failed: why, and the HTTP status that `retry` may want to look at.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) message: String,
    pub(super) status: Option<u16>,
}

impl From<String> for Failure {
    fn from(message: String) -> Self {
        Self {
            message,
            status: None,
        }
    }
}

impl From<anyhow::Error> for Failure {
    fn from(e: anyhow::Error) -> Self {
        format!("{e:#}").into()
    }
}

type Done = Result<(), Failure>;

impl Branch {
    /// Runs steps in order; the first failure ends them.
    ///
    /// # Errors
    /// The failed step, by number and kind.
    pub(super) fn steps(&mut self, steps: &Value) -> Done {
        let list = steps.as_array().map(Vec::as_slice).unwrap_or_default();
        for (index, step) in list.iter().enumerate() {
            self.step(step).map_err(|f| Failure {
                message: format!("step {} {}: {}", index + 1, head(step), f.message),
                status: f.status,
            })?;
        }
        Ok(())
    }

    fn step(&mut self, step: &Value) -> Done {
        let Some((kind, body)) = step.as_object().and_then(|m| m.iter().next()) else {
            return Err("a step is a map with one key".to_owned().into());
        };
        match kind.as_str() {
            // These hold steps whose variables are not set yet: they substitute on their own.
            "parallel" => self.parallel(body),
            "repeat" => self.repeat(body),
            "retry" => self.retry(body),
            _ => {
                let body = substitute(body, &self.vars)?;
                self.plain(kind, &body)
            }
        }
    }

    fn plain(&mut self, kind: &str, body: &Value) -> Done {
        match kind {
            "http" => self.timed(body, |branch| request::http(branch, body)),
            "kubectl" => self.timed(body, |branch| kubectl::run(branch, body)),
            "watch" => {
                let watch = Watch::open(&self.shared.server, body)?;
                let id = as_text(&body["id"]);
                lock(&self.shared.watches).insert(id, watch);
                Ok(())
            }
            "events" => {
                let id = as_text(&body["id"]);
                let mut watches = lock(&self.shared.watches);
                let watch = watches
                    .get_mut(&id)
                    .ok_or_else(|| format!("no watch {id}"))?;
                Ok(watch.check(body)?)
            }
            "node" => self.node(body),
            "pause" => {
                std::thread::sleep(seconds(&body["seconds"]));
                Ok(())
            }
            other => Err(format!("unknown step {other}").into()),
        }
    }

    /// Repeats a try while `within_s` has not passed, or checks that it holds throughout `for_s`.
    fn timed(&mut self, body: &Value, mut attempt: impl FnMut(&mut Self) -> Done) -> Done {
        let start = Instant::now();
        if !body["for_s"].is_null() {
            while start.elapsed() < seconds(&body["for_s"]) {
                attempt(self)?;
                std::thread::sleep(RETRY_EVERY);
            }
            return Ok(());
        }
        let limit = seconds(&body["within_s"]);
        loop {
            match attempt(self) {
                Ok(()) => return Ok(()),
                Err(f) if start.elapsed() >= limit => return Err(f),
                Err(_) => std::thread::sleep(RETRY_EVERY),
            }
        }
    }

    fn node(&mut self, body: &Value) -> Done {
        let mut kubelets = lock(&self.shared.kubelets);
        if let Some(name) = body["start"].as_str() {
            let kubelet = Kubelet::start(&self.shared.server, name, body)?;
            kubelets.insert(name.to_owned(), kubelet);
        } else if let Some(name) = body["stop"].as_str() {
            let kubelet = kubelets
                .get_mut(name)
                .ok_or_else(|| format!("no node {name}"))?;
            kubelet.stop();
        }
        Ok(())
    }

    fn repeat(&mut self, body: &Value) -> Done {
        for i in 0..count(&substitute(&body["times"], &self.vars)?) {
            self.vars.insert("i".into(), Value::String(i.to_string()));
            self.steps(&body["steps"])?;
        }
        Ok(())
    }

    fn retry(&mut self, body: &Value) -> Done {
        let max = count(&body["max"]).max(1);
        let codes: Vec<u64> = body["on_status"]
            .as_array()
            .map(|l| l.iter().filter_map(Value::as_u64).collect())
            .unwrap_or_default();
        let mut last = Failure::from("retry never ran".to_owned());
        for _ in 0..max {
            let seen = self.statuses.len();
            let vars = self.vars.clone();
            match self.steps(&body["steps"]) {
                Ok(()) => return Ok(()),
                Err(f) => {
                    let wanted =
                        codes.is_empty() || f.status.is_some_and(|s| codes.contains(&u64::from(s)));
                    if !wanted {
                        return Err(f);
                    }
                    last = f;
                }
            }
            self.statuses.truncate(seen);
            self.vars = vars;
            let pause = if codes.is_empty() && !body["pause_s"].is_null() {
                seconds(&body["pause_s"])
            } else {
                Duration::from_millis(rand::random_range(5..60))
            };
            std::thread::sleep(pause);
        }
        Err(Failure {
            message: format!("after {max} tries: {}", last.message),
            ..last
        })
    }

    fn parallel(&mut self, body: &Value) -> Done {
        let mut jobs: Vec<(Value, Branch)> = Vec::new();
        if let Some(branches) = body["branches"].as_array() {
            for steps in branches {
                jobs.push((steps.clone(), self.branch(jobs.len())));
            }
        } else {
            for i in 0..count(&substitute(&body["times"], &self.vars)?) {
                jobs.push((body["steps"].clone(), self.branch(i)));
            }
        }
        let results: Vec<(Done, Vec<u16>)> = std::thread::scope(|scope| {
            let handles: Vec<_> = jobs
                .into_iter()
                .map(|(steps, mut branch)| {
                    scope.spawn(move || {
                        let done = branch.steps(&steps);
                        (done, branch.statuses)
                    })
                })
                .collect();
            handles
                .into_iter()
                .map(|h| {
                    h.join()
                        .unwrap_or_else(|_| (Err("branch panicked".to_owned().into()), vec![]))
                })
                .collect()
        });
        let mut tally: BTreeMap<String, u64> = BTreeMap::new();
        for (done, statuses) in results {
            done?;
            for status in statuses {
                self.statuses.push(status);
                *tally.entry(status.to_string()).or_default() += 1;
            }
        }
        check_tally(&substitute(&body["tally"], &self.vars)?, &tally)
    }

    fn branch(&self, i: usize) -> Branch {
        let mut branch = self.clone();
        branch.statuses.clear();
        branch.vars.insert("i".into(), Value::String(i.to_string()));
        branch
    }
}

fn check_tally(expected: &Value, tally: &BTreeMap<String, u64>) -> Done {
    if expected.is_null() {
        return Ok(());
    }
    let found = serde_json::to_value(tally).unwrap_or_default();
    super::expect::matches(expected, Some(&found), false)
        .map_err(|e| format!("tally {found}: {e}").into())
}

/// Locks a mutex; a poisoned one is only the sign of an earlier failure.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// A number of seconds, zero when absent.
#[must_use]
pub(super) fn seconds(value: &Value) -> Duration {
    Duration::from_secs_f64(value.as_f64().unwrap_or(0.0).max(0.0))
}

fn count(value: &Value) -> usize {
    value
        .as_u64()
        .or_else(|| value.as_str().and_then(|s| s.parse().ok()))
        .and_then(|n| usize::try_from(n).ok())
        .unwrap_or(0)
}

fn head(step: &Value) -> String {
    let Some((kind, body)) = step.as_object().and_then(|m| m.iter().next()) else {
        return String::new();
    };
    let detail = match kind.as_str() {
        "http" => format!(
            "{} {}",
            body["method"].as_str().unwrap_or("GET"),
            body["path"].as_str().unwrap_or_default()
        ),
        "kubectl" => body["args"]
            .as_array()
            .map(|a| a.iter().map(as_text).collect::<Vec<_>>().join(" "))
            .unwrap_or_default(),
        _ => body["id"].as_str().unwrap_or_default().to_owned(),
    };
    format!("({kind} {})", detail.chars().take(160).collect::<String>())
}
