//! The row of a pod: its status is read from the states of its containers.

use serde_json::Value;

use super::row::{NONE, Row, member};

pub(super) fn pod(row: &Row<'_>) -> Vec<Value> {
    let state = State::of(row);
    let restarts = match (&state.last_restart, state.restarts) {
        (Some(time), 1..) => format!("{} ({} ago)", state.restarts, row.since_text(time)),
        _ => state.restarts.to_string(),
    };
    vec![
        row.name(),
        format!("{}/{}", state.ready, state.total).into(),
        state.reason.into(),
        restarts.into(),
        row.age(),
        row.text_or("/status/podIPs/0/ip", NONE).into(),
        row.text_or("/spec/nodeName", NONE).into(),
        row.text_or("/status/nominatedNodeName", NONE).into(),
        readiness_gates(row).into(),
    ]
}

fn readiness_gates(row: &Row<'_>) -> String {
    let gates = row.list("/spec/readinessGates");
    if gates.is_empty() {
        return NONE.to_owned();
    }
    let met = gates
        .iter()
        .filter(|gate| row.has_condition(member(gate, "conditionType")))
        .count();
    format!("{met}/{}", gates.len())
}

struct State {
    ready: usize,
    total: usize,
    restarts: i64,
    last_restart: Option<String>,
    reason: String,
}

impl State {
    fn of(row: &Row<'_>) -> Self {
        let phase = row.text("/status/phase");
        let gated = row.list("/status/conditions").iter().any(|c| {
            member(c, "type") == "PodScheduled" && member(c, "reason") == "SchedulingGated"
        });
        let reason = match row.text("/status/reason") {
            _ if gated => "SchedulingGated",
            "" => phase,
            reason => reason,
        };
        let sidecars = row
            .list("/spec/initContainers")
            .iter()
            .filter(|c| is_sidecar(c))
            .count();
        let mut state = Self {
            ready: 0,
            total: row.list("/spec/containers").len() + sidecars,
            restarts: 0,
            last_restart: None,
            reason: reason.to_owned(),
        };
        let (initializing, sidecar_restarts) = state.init_containers(row);
        if !initializing || row.has_condition("Initialized") {
            (state.restarts, state.last_restart) = sidecar_restarts;
            state.containers(row);
        }
        if row.is_deleted() {
            if row.text("/status/reason") == "NodeLost" {
                state.reason = "Unknown".into();
            } else if !matches!(phase, "Succeeded" | "Failed") {
                state.reason = "Terminating".into();
            }
        }
        state
    }

    /// Whether the pod is still initializing, and the restarts of the init containers that keep running.
    fn init_containers(&mut self, row: &Row<'_>) -> (bool, (i64, Option<String>)) {
        let specs = row.list("/spec/initContainers");
        let mut sidecars = (0, None);
        for (index, status) in row.list("/status/initContainerStatuses").iter().enumerate() {
            let sidecar = specs
                .iter()
                .any(|c| member(c, "name") == member(status, "name") && is_sidecar(c));
            self.count_restarts(status);
            if sidecar {
                sidecars.0 += restart_count(status);
                keep_latest(&mut sidecars.1, status);
            }
            let terminated = status.pointer("/state/terminated");
            if terminated.is_some_and(|t| exit_code(t) == 0) {
                continue;
            }
            if sidecar && status.get("started") == Some(&Value::Bool(true)) {
                self.ready += usize::from(status.get("ready") == Some(&Value::Bool(true)));
                continue;
            }
            let waiting = status
                .pointer("/state/waiting/reason")
                .and_then(Value::as_str);
            self.reason = match (terminated, waiting) {
                (Some(terminated), _) => format!("Init:{}", ended(terminated)),
                (None, Some(reason)) if !reason.is_empty() && reason != "PodInitializing" => {
                    format!("Init:{reason}")
                }
                _ => format!("Init:{index}/{}", specs.len()),
            };
            return (true, sidecars);
        }
        (false, sidecars)
    }

    fn containers(&mut self, row: &Row<'_>) {
        let mut running = false;
        let mut error = None;
        for status in row.list("/status/containerStatuses").iter().rev() {
            self.count_restarts(status);
            let waiting = status
                .pointer("/state/waiting/reason")
                .and_then(Value::as_str);
            if let Some(reason) = waiting.filter(|r| !r.is_empty()) {
                self.reason = reason.to_owned();
            } else if let Some(terminated) = status.pointer("/state/terminated") {
                self.reason = ended(terminated);
                if exit_code(terminated) != 0 {
                    error = Some(self.reason.clone());
                }
            } else if status.get("ready") == Some(&Value::Bool(true))
                && status.pointer("/state/running").is_some()
            {
                running = true;
                self.ready += 1;
            }
        }
        if self.reason == "Completed" {
            if running && row.has_condition("Ready") {
                self.reason = "Running".into();
            } else if let Some(error) = error {
                self.reason = error;
            } else if running {
                self.reason = "NotReady".into();
            }
        }
    }

    fn count_restarts(&mut self, status: &Value) {
        self.restarts += restart_count(status);
        keep_latest(&mut self.last_restart, status);
    }
}

fn restart_count(status: &Value) -> i64 {
    status
        .get("restartCount")
        .and_then(Value::as_i64)
        .unwrap_or_default()
}

/// Times of one precision sort as text.
fn keep_latest(latest: &mut Option<String>, status: &Value) {
    let finished = status
        .pointer("/lastState/terminated/finishedAt")
        .and_then(Value::as_str);
    if let Some(finished) = finished
        && latest.as_deref().is_none_or(|l| l < finished)
    {
        *latest = Some(finished.to_owned());
    }
}

fn is_sidecar(container: &Value) -> bool {
    member(container, "restartPolicy") == "Always"
}

fn exit_code(terminated: &Value) -> i64 {
    terminated
        .get("exitCode")
        .and_then(Value::as_i64)
        .unwrap_or_default()
}

fn ended(terminated: &Value) -> String {
    let reason = member(terminated, "reason");
    let signal = terminated
        .get("signal")
        .and_then(Value::as_i64)
        .unwrap_or_default();
    if !reason.is_empty() {
        reason.to_owned()
    } else if signal != 0 {
        format!("Signal:{signal}")
    } else {
        format!("ExitCode:{}", exit_code(terminated))
    }
}
