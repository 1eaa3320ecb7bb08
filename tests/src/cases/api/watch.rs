//! The `watch` and `events` steps.

use std::collections::BTreeMap;
use std::io::BufRead;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::expect::matches;
use super::request;
use super::run::{lock, seconds};
use super::server::Server;
use super::vars::as_text;

const OPEN_WITHIN: Duration = Duration::from_secs(1);
const DEFAULT_WITHIN_S: f64 = 10.0;

#[derive(Debug, Default)]
struct Log {
    events: Vec<Value>,
    begun: bool,
    closed: bool,
}

#[derive(Debug, Default)]
struct Recorder {
    log: Mutex<Log>,
    changed: Condvar,
}

/// A watch recorded in the background.
#[derive(Debug)]
pub(super) struct Watch {
    recorder: Arc<Recorder>,
    cursor: usize,
}

impl Watch {
    /// Opens a watch; returns when the answer has begun or a second has passed.
    ///
    /// # Errors
    /// When the step is malformed.
    pub(super) fn open(server: &Arc<Server>, step: &Value) -> Result<Self, String> {
        let request = request::build(step)?;
        let recorder = Arc::new(Recorder::default());
        let writer = Arc::clone(&recorder);
        let server = Arc::clone(server);
        std::thread::spawn(move || record(&server, &request, &writer));
        let log = lock(&recorder.log);
        let waited = recorder
            .changed
            .wait_timeout_while(log, OPEN_WITHIN, |l| !l.begun);
        drop(waited);
        Ok(Self {
            recorder,
            cursor: 0,
        })
    }

    /// Checks recorded events from the cursor on.
    ///
    /// # Errors
    /// What did not hold, with the events seen.
    pub(super) fn check(&mut self, step: &Value) -> Result<(), String> {
        let within = Duration::from_secs_f64(step["within_s"].as_f64().unwrap_or(DEFAULT_WITHIN_S));
        let deadline = Instant::now() + within;
        let ignore: Vec<String> = match step["ignore"].as_array() {
            Some(list) => list.iter().map(as_text).collect(),
            None => vec!["BOOKMARK".into()],
        };
        let next = self.wait(deadline, |log, from| find(step, log, from, &ignore))?;
        if let Some(next) = next {
            self.cursor = next;
        }
        if !step["quiet_s"].is_null() {
            self.quiet(seconds(&step["quiet_s"]), &ignore)?;
        }
        if step["monotonic"] == true {
            monotonic(&lock(&self.recorder.log).events)?;
        }
        if step["closed"] == true {
            self.wait(deadline, |log, _| {
                if log.closed {
                    Ok(None)
                } else {
                    Err("the stream is still open".into())
                }
            })?;
        }
        Ok(())
    }

    /// Waits until `test` holds; `Ok(Some(n))` moves the cursor.
    fn wait(
        &self,
        deadline: Instant,
        test: impl Fn(&Log, usize) -> Result<Option<usize>, String>,
    ) -> Result<Option<usize>, String> {
        let mut log = lock(&self.recorder.log);
        loop {
            let result = test(&log, self.cursor);
            let left = deadline.saturating_duration_since(Instant::now());
            match result {
                Ok(found) => return Ok(found),
                Err(why) if left.is_zero() => {
                    return Err(format!("{why}; seen: {}", shown(&log, self.cursor)));
                }
                Err(_) => {
                    let waited = self.recorder.changed.wait_timeout(log, left);
                    log = waited.map_or_else(|e| e.into_inner().0, |w| w.0);
                }
            }
        }
    }

    fn quiet(&self, time: Duration, ignore: &[String]) -> Result<(), String> {
        let until = Instant::now() + time;
        let mut log = lock(&self.recorder.log);
        loop {
            let extra = log
                .events
                .iter()
                .skip(self.cursor)
                .find(|e| !ignored(e, ignore));
            if let Some(event) = extra {
                return Err(format!("unexpected further event {}", brief(event)));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            let waited = self.recorder.changed.wait_timeout(log, left);
            log = waited.map_or_else(|e| e.into_inner().0, |w| w.0);
        }
    }
}

fn record(server: &Server, request: &super::server::Request, recorder: &Recorder) {
    let push = |event: Option<Value>, begun: bool, closed: bool| {
        let mut log = lock(&recorder.log);
        log.events.extend(event);
        log.begun |= begun;
        log.closed |= closed;
        drop(log);
        recorder.changed.notify_all();
    };
    match server.send(request, true) {
        Err(e) => push(
            Some(json!({"type": "ERROR", "object": {"message": e.to_string()}})),
            true,
            false,
        ),
        Ok(answer) if !answer.status().is_success() => {
            let body = answer.bytes().unwrap_or_default();
            let status: Value = serde_json::from_slice(&body).unwrap_or_default();
            push(Some(json!({"type": "ERROR", "object": status})), true, true);
        }
        Ok(answer) => {
            push(None, true, false);
            let mut clean = true;
            for line in std::io::BufReader::new(answer).lines() {
                let Ok(line) = line else {
                    clean = false;
                    break;
                };
                if let Ok(event) = serde_json::from_str::<Value>(&line) {
                    push(Some(event), true, false);
                }
            }
            push(None, true, clean);
        }
    }
}

fn ignored(event: &Value, ignore: &[String]) -> bool {
    event["type"]
        .as_str()
        .is_some_and(|t| ignore.iter().any(|i| i == t))
}

fn meets(expected: &Value, event: &Value) -> Result<(), String> {
    if !expected["type"].is_null() && expected["type"] != event["type"] {
        return Err(format!(
            "expected {}, found {}",
            expected["type"],
            brief(event)
        ));
    }
    if expected["want"].is_null() {
        return Ok(());
    }
    super::expect::check_want(&expected["want"], &event["object"])
}

fn find(step: &Value, log: &Log, from: usize, ignore: &[String]) -> Result<Option<usize>, String> {
    if !step["counts"].is_null() {
        return count(&step["counts"], log, from, ignore);
    }
    let Some(list) = step["list"].as_array() else {
        return Ok(None);
    };
    if step["order"] == "any" {
        let mut last = from;
        for expected in list {
            let at = (from..log.events.len()).find(|i| meets(expected, &log.events[*i]).is_ok());
            match at {
                Some(i) => last = last.max(i + 1),
                None => return Err(format!("no event meets {expected}")),
            }
        }
        return Ok(Some(last));
    }
    let mut at = from;
    for expected in list {
        while log.events.get(at).is_some_and(|e| ignored(e, ignore)) {
            at += 1;
        }
        let event = log
            .events
            .get(at)
            .ok_or_else(|| format!("no event yet for {expected}"))?;
        meets(expected, event)?;
        at += 1;
    }
    Ok(Some(at))
}

fn count(
    expected: &Value,
    log: &Log,
    from: usize,
    ignore: &[String],
) -> Result<Option<usize>, String> {
    let mut seen: BTreeMap<String, u64> = BTreeMap::new();
    for event in log.events.iter().skip(from).filter(|e| !ignored(e, ignore)) {
        *seen.entry(as_text(&event["type"])).or_default() += 1;
    }
    let found = serde_json::to_value(&seen).unwrap_or_default();
    matches(expected, Some(&found), false).map_err(|e| format!("counts {found}: {e}"))?;
    Ok(Some(log.events.len()))
}

fn monotonic(events: &[Value]) -> Result<(), String> {
    let mut last = 0_u64;
    for event in events {
        let text = event["object"]["metadata"]["resourceVersion"]
            .as_str()
            .unwrap_or_default();
        let version: u64 = text
            .parse()
            .map_err(|_| format!("no resourceVersion in {}", brief(event)))?;
        if version <= last {
            return Err(format!("resourceVersion {version} after {last}"));
        }
        last = version;
    }
    Ok(())
}

fn brief(event: &Value) -> String {
    let meta = &event["object"]["metadata"];
    format!(
        "{} {}@{}",
        as_text(&event["type"]),
        as_text(&meta["name"]),
        as_text(&meta["resourceVersion"])
    )
}

fn shown(log: &Log, from: usize) -> String {
    let last = log
        .events
        .iter()
        .skip(from)
        .rev()
        .take(8)
        .map(brief)
        .collect::<Vec<_>>();
    let end = if log.closed { " (closed)" } else { "" };
    format!(
        "[{}]{end}",
        last.into_iter().rev().collect::<Vec<_>>().join(", ")
    )
}
