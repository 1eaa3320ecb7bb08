//! The scheduler's state and its decisions, free of I/O: events in, decisions out, time as a value.

use std::sync::Arc;
use std::time::Instant;

use serde_json::Value;

use super::cluster::{Cluster, Node};
use super::filters::{self, Cause, Refusal};
use super::pod::{Pod, wants_node};
use super::queue::{Hopes, News, Queue};
use super::scores;
use crate::controllers::pods::is_finished;
use crate::controllers::runtime::informer::Change;
use crate::controllers::runtime::object::Object;

/// What to do about one pod.
#[derive(Debug)]
pub(super) enum Decision {
    /// The pod counts against the node already; [`Core::bound`] or [`Core::not_bound`] must follow.
    Bind {
        pod: Arc<Pod>,
        node: String,
    },
    Unschedulable {
        pod: Arc<Pod>,
        message: String,
    },
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Core {
    pub(super) cluster: Cluster,
    queue: Queue,
    turn: usize,
}

impl Core {
    pub(super) fn pod_changed(&mut self, change: &Change, now: Instant) {
        let Some(new) = &change.new else {
            let uid = change.object().uid();
            self.queue.remove(uid);
            if self.cluster.lift(uid) {
                self.queue.wake(News::PodGone, now);
            }
            return;
        };
        let uid = new.uid();
        if new.text(&["spec", "nodeName"]).is_empty() {
            if wants_node(new) {
                // One that is being bound counts already; its next form comes with a node.
                if !self.cluster.is_placed(uid) {
                    self.queue.put(Arc::new(Pod::read(new.clone())), now);
                }
            } else {
                self.queue.remove(uid);
                if is_finished(new) {
                    self.cluster.lift(uid);
                }
            }
            return;
        }
        self.queue.remove(uid);
        if is_finished(new) {
            if self.cluster.lift(uid) {
                self.queue.wake(News::PodGone, now);
            }
            return;
        }
        let labels = ["metadata", "labels"];
        let resources = ["spec", "containers"];
        let known = self.cluster.is_placed(uid)
            && change.old.as_ref().is_some_and(|old| {
                old.text(&["spec", "nodeName"]) == new.text(&["spec", "nodeName"])
                    && old.at(&labels) == new.at(&labels)
                    && old.at(&resources) == new.at(&resources)
                    && old.is_deleting() == new.is_deleting()
            });
        if !known {
            let pod = Arc::new(Pod::read(new.clone()));
            let node = pod.node().to_owned();
            self.cluster.place(pod, &node);
            self.queue.wake(News::PodPlaced, now);
        }
    }

    pub(super) fn node_changed(&mut self, change: &Change, now: Instant) {
        let Some(new) = &change.new else {
            self.cluster.remove_node(change.object().name());
            return;
        };
        let paths: [&[&str]; 4] = [
            &["metadata", "labels"],
            &["spec", "taints"],
            &["spec", "unschedulable"],
            &["status", "allocatable"],
        ];
        let same = change
            .old
            .as_ref()
            .is_some_and(|old| paths.iter().all(|path| old.at(path) == new.at(path)));
        self.cluster.put_node(new.clone());
        if !same {
            self.queue.wake(News::Node, now);
        }
    }

    /// Decides about the next waiting pod, if one is due.
    pub(super) fn next(&mut self, now: Instant) -> Option<Decision> {
        let pod = self.queue.take(now)?;
        match self.choose(&pod) {
            Ok(node) => {
                self.turn = self.turn.wrapping_add(1);
                self.cluster.place(pod.clone(), &node);
                Some(Decision::Bind { pod, node })
            }
            Err(refusals) => {
                let hopes = Hopes {
                    pod_gone: refusals.iter().any(|(_, r)| r.cause == Cause::Occupied),
                    pod_placed: false,
                };
                self.queue.park(&pod.uid, hopes, now);
                let reasons = refusals.iter().map(|(_, r)| r);
                let message = filters::message(refusals.len(), reasons);
                Some(Decision::Unschedulable { pod, message })
            }
        }
    }

    /// The best node, or why each was refused.
    fn choose(&self, pod: &Pod) -> Result<String, Vec<(String, Refusal)>> {
        let mut fitting: Vec<(&String, &Node)> = Vec::new();
        let mut refusals = Vec::new();
        for (name, node) in self.cluster.nodes() {
            match filters::check(pod, name, node) {
                Ok(()) => fitting.push((name, node)),
                Err(refusal) => refusals.push((name.clone(), refusal)),
            }
        }
        scores::best(pod, &fitting, &[], self.turn)
            .cloned()
            .ok_or(refusals)
    }

    /// The API took the binding; the pod's next form carries the node.
    pub(super) fn bound(&mut self, uid: &str) {
        self.queue.remove(uid);
    }

    /// The API refused the binding: the pod does not count any more and is tried again, unless it is gone.
    pub(super) fn not_bound(&mut self, uid: &str, gone: bool, now: Instant) {
        self.cluster.lift(uid);
        if gone {
            self.queue.remove(uid);
        } else {
            self.queue.retry(uid, now);
        }
        self.queue.wake(News::PodGone, now);
    }

    pub(super) fn wake_overdue(&mut self, now: Instant) {
        self.queue.wake_overdue(now);
    }

    pub(super) fn due(&self) -> Option<Instant> {
        self.queue.due()
    }

    /// A pod that a bind was refused for may have been bound by somebody else meanwhile.
    pub(super) fn replace(&mut self, object: Option<Arc<Value>>, now: Instant) {
        // Gone from the queue means that its end or its binding has been seen meanwhile.
        if let Some(new) = object.filter(|o| self.queue.contains(o.uid())) {
            self.pod_changed(
                &Change {
                    old: None,
                    new: Some(new),
                },
                now,
            );
        }
    }
}
