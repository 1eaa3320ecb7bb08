//! Kubernetes Events about what scheduler and controllers did, as `kubectl describe` shows them.
//!
//! Recording never waits and never fails the work it tells about: a full queue drops the event, and an object that
//! causes a flood is cut off.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::object::{Object, time_text};
use crate::client::{ObjectClient, PatchKind, resources};

/// Events that wait to be written; more are dropped.
const QUEUE_LIMIT: usize = 1024;
/// Repeats are counted in one object for as many different events as this.
const MEMORY_LIMIT: usize = 2048;
/// Writes about one object in a burst; one more is earned every [`EARN_S`] seconds.
const BURST: u32 = 25;
const EARN_S: i64 = 300;
/// Longest message that the API accepts.
const MESSAGE_LIMIT: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Severity {
    Normal,
    Warning,
}

#[derive(Clone, Debug)]
struct Note {
    component: &'static str,
    involved: Value,
    severity: Severity,
    reason: &'static str,
    message: String,
}

/// Records events for one component. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Recorder {
    component: &'static str,
    queue: mpsc::Sender<Note>,
}

impl Recorder {
    /// Starts the task that writes; it ends with `shutdown`.
    pub(crate) fn start(client: Arc<dyn ObjectClient>, shutdown: CancellationToken) -> Self {
        let (queue, notes) = mpsc::channel(QUEUE_LIMIT);
        tokio::spawn(write_all(client, notes, shutdown));
        Self {
            component: "weir-control",
            queue,
        }
    }

    /// The same recorder under another component name.
    #[must_use]
    pub(crate) fn named(&self, component: &'static str) -> Self {
        Self {
            component,
            queue: self.queue.clone(),
        }
    }

    pub(crate) fn normal(
        &self,
        about: (&Value, &str, &str),
        reason: &'static str,
        message: String,
    ) {
        self.record(about, Severity::Normal, reason, message);
    }

    pub(crate) fn warning(
        &self,
        about: (&Value, &str, &str),
        reason: &'static str,
        message: String,
    ) {
        self.record(about, Severity::Warning, reason, message);
    }

    /// `about` is the object with its apiVersion and kind.
    fn record(
        &self,
        (object, api_version, kind): (&Value, &str, &str),
        severity: Severity,
        reason: &'static str,
        message: String,
    ) {
        let mut involved = json!({
            "kind": kind, "name": object.name(), "uid": object.uid(), "apiVersion": api_version,
            "resourceVersion": object.text(&["metadata", "resourceVersion"]),
        });
        if !object.namespace().is_empty() {
            involved["namespace"] = object.namespace().into();
        }
        let note = Note {
            component: self.component,
            involved,
            severity,
            reason,
            message,
        };
        if self.queue.try_send(note).is_err() {
            tracing::debug!(reason, "event dropped: the queue of events is full");
        }
    }
}

type Fingerprint = (&'static str, String, Severity, &'static str, String);

#[derive(Debug)]
struct Written {
    name: String,
    count: u64,
}

#[derive(Clone, Copy, Debug)]
struct Allowance {
    left: u32,
    earned_at: Timestamp,
}

/// What has been written, to count repeats and to cut floods.
#[derive(Debug, Default)]
struct Memory {
    written: HashMap<Fingerprint, Written>,
    order: VecDeque<Fingerprint>,
    allowances: HashMap<(&'static str, String), Allowance>,
}

impl Memory {
    fn allow(&mut self, component: &'static str, uid: &str, now: Timestamp) -> bool {
        if self.allowances.len() >= MEMORY_LIMIT {
            // Full ones carry no information.
            self.allowances
                .retain(|_, a| now.as_second() - a.earned_at.as_second() < EARN_S);
            if self.allowances.len() >= MEMORY_LIMIT {
                self.allowances.clear();
            }
        }
        let slot = self
            .allowances
            .entry((component, uid.to_owned()))
            .or_insert(Allowance {
                left: BURST,
                earned_at: now,
            });
        let earned = (now.as_second() - slot.earned_at.as_second()) / EARN_S;
        if earned > 0 {
            slot.left = slot
                .left
                .saturating_add(u32::try_from(earned).unwrap_or(BURST))
                .min(BURST);
            slot.earned_at = now;
        }
        if slot.left == 0 {
            return false;
        }
        slot.left -= 1;
        true
    }

    fn remember(&mut self, fingerprint: Fingerprint, written: Written) {
        if self.written.insert(fingerprint.clone(), written).is_none() {
            self.order.push_back(fingerprint);
        }
        while self.order.len() > MEMORY_LIMIT {
            if let Some(oldest) = self.order.pop_front() {
                self.written.remove(&oldest);
            }
        }
    }
}

async fn write_all(
    client: Arc<dyn ObjectClient>,
    mut notes: mpsc::Receiver<Note>,
    shutdown: CancellationToken,
) {
    let mut memory = Memory::default();
    loop {
        let note = tokio::select! {
            note = notes.recv() => note,
            () = shutdown.cancelled() => return,
        };
        let Some(note) = note else { return };
        let now = Timestamp::now();
        if memory.allow(note.component, note.involved.text(&["uid"]), now) {
            write(client.as_ref(), &mut memory, note, now).await;
        }
    }
}

async fn write(client: &dyn ObjectClient, memory: &mut Memory, mut note: Note, now: Timestamp) {
    if note.message.len() > MESSAGE_LIMIT {
        let end = (0..=MESSAGE_LIMIT)
            .rev()
            .find(|i| note.message.is_char_boundary(*i));
        note.message.truncate(end.unwrap_or(0));
    }
    let fingerprint = (
        note.component,
        note.involved.text(&["uid"]).to_owned(),
        note.severity,
        note.reason,
        note.message.clone(),
    );
    let namespace = match note.involved.text(&["namespace"]) {
        "" => "default".to_owned(),
        namespace => namespace.to_owned(),
    };
    if let Some(written) = memory.written.get_mut(&fingerprint) {
        let patch = json!({"count": written.count + 1, "lastTimestamp": time_text(now)});
        let r = resources::EVENTS;
        match client
            .patch(r, &namespace, &written.name, "", PatchKind::Merge, patch)
            .await
        {
            Ok(_) => {
                written.count += 1;
                return;
            }
            // Expired or deleted: written anew below.
            Err(e) if e.is_not_found() => {}
            Err(e) => {
                tracing::debug!(reason = note.reason, error = %e, "event not counted");
                return;
            }
        }
    }
    let event = event_object(&note, &namespace, now);
    match client.create(resources::EVENTS, &namespace, event).await {
        Ok(made) => {
            memory.remember(
                fingerprint,
                Written {
                    name: made.name().to_owned(),
                    count: 1,
                },
            );
        }
        Err(e) => tracing::debug!(reason = note.reason, error = %e, "event not written"),
    }
}

fn event_object(note: &Note, namespace: &str, now: Timestamp) -> Value {
    let kind = match note.severity {
        Severity::Normal => "Normal",
        Severity::Warning => "Warning",
    };
    let name = format!(
        "{}.{:x}{:04x}",
        note.involved.text(&["name"]),
        now.as_microsecond(),
        rand::random::<u16>()
    );
    json!({
        "apiVersion": "v1", "kind": "Event",
        "metadata": {"name": name, "namespace": namespace},
        "involvedObject": note.involved, "reason": note.reason, "message": note.message,
        "type": kind, "count": 1, "firstTimestamp": time_text(now), "lastTimestamp": time_text(now),
        "eventTime": null, "source": {"component": note.component},
        "reportingComponent": note.component, "reportingInstance": "",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_about_one_object_is_cut_off_and_allowed_again_later() {
        let mut memory = Memory::default();
        let start: Timestamp = "2024-01-01T00:00:00Z".parse().unwrap();
        let allowed = (0..100).filter(|_| memory.allow("c", "uid", start)).count();
        assert_eq!(allowed, 25);
        assert!(
            memory.allow("c", "other", start),
            "another object is not affected"
        );
        let later = start + jiff::SignedDuration::from_secs(EARN_S);
        assert!(memory.allow("c", "uid", later));
        assert!(!memory.allow("c", "uid", later));
    }

    #[test]
    fn memory_is_bounded() {
        let mut memory = Memory::default();
        for i in 0..3 * MEMORY_LIMIT {
            let fingerprint = (
                "c",
                i.to_string(),
                Severity::Normal,
                "Reason",
                "message".to_owned(),
            );
            memory.remember(
                fingerprint,
                Written {
                    name: String::new(),
                    count: 1,
                },
            );
        }
        assert_eq!(memory.written.len(), MEMORY_LIMIT);
        assert_eq!(memory.order.len(), MEMORY_LIMIT);
    }
}
