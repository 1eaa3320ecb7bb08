//! The held state and its subscribers. Each subscriber has a mailbox of one: what changed since it last looked.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use control_api::desired::{Changes, DesiredState};
use control_api::v1::Delta;
use tokio::sync::Notify;

/// Where a state came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Left by an earlier run: old, and without secrets. Program services from it; remove nothing because of it.
    Disk,
    /// A control plane said so: complete.
    Server,
}

/// One coalesced change. Drop `state` when done with it: while somebody holds it, the next delta has to copy it.
#[derive(Clone, Debug)]
pub struct Update {
    pub state: Arc<DesiredState>,
    pub changes: Changes,
    pub origin: Origin,
    /// Commit time of the oldest delta in this update, microseconds since the Unix epoch; none for a snapshot.
    pub committed_at_us: Option<i64>,
}

#[derive(Debug)]
struct Held {
    state: Arc<DesiredState>,
    origin: Option<Origin>,
    mailboxes: Vec<Weak<Mailbox>>,
}

#[derive(Debug, Default)]
struct Mailbox {
    pending: Mutex<Option<Pending>>,
    notify: Notify,
}

#[derive(Clone, Debug, Default)]
struct Pending {
    changes: Changes,
    committed_at_us: Option<i64>,
}

/// Publishes states to any number of subscribers.
#[derive(Clone, Debug)]
pub(super) struct Publisher {
    held: Arc<Mutex<Held>>,
}

/// A subscription; see [`super::FeedHandle::updates`].
#[derive(Debug)]
pub struct Updates {
    held: Arc<Mutex<Held>>,
    mailbox: Arc<Mailbox>,
}

impl Default for Publisher {
    fn default() -> Self {
        let held = Held {
            state: Arc::default(),
            origin: None,
            mailboxes: Vec::new(),
        };
        Self {
            held: Arc::new(Mutex::new(held)),
        }
    }
}

impl Publisher {
    pub(super) fn subscribe(&self) -> Updates {
        let mailbox = Arc::new(Mailbox::default());
        let mut held = lock(&self.held);
        if held.origin.is_some() {
            mailbox.post(Changes::everything(), None);
        }
        held.mailboxes.push(Arc::downgrade(&mailbox));
        Updates {
            held: Arc::clone(&self.held),
            mailbox,
        }
    }

    pub(super) fn state(&self) -> Arc<DesiredState> {
        Arc::clone(&lock(&self.held).state)
    }

    /// Whether the cluster has addresses that nodes answer for.
    pub(super) fn has_announcements(&self) -> bool {
        !lock(&self.held).state.announcements.is_empty()
    }

    /// A whole new state.
    pub(super) fn replace(&self, state: DesiredState, origin: Origin) {
        let mut held = lock(&self.held);
        held.state = Arc::new(state);
        held.origin = Some(origin);
        held.post(&Changes::everything(), None);
    }

    pub(super) fn apply(&self, delta: Delta) {
        let mut held = lock(&self.held);
        let committed_at_us = (delta.committed_at_us != 0).then_some(delta.committed_at_us);
        let changes = Arc::make_mut(&mut held.state).apply(delta);
        held.post(&changes, committed_at_us);
    }
}

impl Held {
    fn post(&mut self, changes: &Changes, committed_at_us: Option<i64>) {
        self.mailboxes.retain(|mailbox| match mailbox.upgrade() {
            Some(mailbox) => {
                mailbox.post(changes.clone(), committed_at_us);
                true
            }
            None => false,
        });
    }
}

impl Mailbox {
    fn post(&self, changes: Changes, committed_at_us: Option<i64>) {
        let mut slot = lock(&self.pending);
        let pending = slot.get_or_insert_default();
        pending.changes.merge(changes);
        pending.committed_at_us = match (pending.committed_at_us, committed_at_us) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        self.notify.notify_one();
    }
}

impl Updates {
    /// The next update: everything that changed since the last call. Cancel-safe: what was not returned is kept.
    pub async fn next(&mut self) -> Update {
        loop {
            if let Some(update) = self.try_next() {
                return update;
            }
            self.mailbox.notify.notified().await;
        }
    }

    /// The next update when one is pending.
    pub fn try_next(&mut self) -> Option<Update> {
        // The state is read under the same lock that posts take, so changes and state belong together.
        let held = lock(&self.held);
        let pending = lock(&self.mailbox.pending).take()?;
        Some(Update {
            state: Arc::clone(&held.state),
            changes: pending.changes,
            origin: held.origin.unwrap_or(Origin::Server),
            committed_at_us: pending.committed_at_us,
        })
    }
}

/// The values behind these locks are valid after any panic of a holder.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
