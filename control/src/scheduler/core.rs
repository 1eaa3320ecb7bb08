//! The scheduler's state and its decisions, free of I/O: events in, decisions out, time as a value.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use serde_json::Value;

use super::cluster::{Cluster, Node};
use super::filters::{self, Cause, Refusal};
use super::pod::{Pod, wants_node};
use super::preempt::{self, Preemption};
use super::queue::{Hopes, News, Queue};
use super::rules::Prepared;
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
    /// These pods must go so that the pod can come; it waits for their end.
    Preempt {
        pod: Arc<Pod>,
        node: String,
        victims: Vec<Arc<Pod>>,
        message: String,
    },
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Core {
    pub(super) cluster: Cluster,
    queue: Queue,
    turn: usize,
    /// PodDisruptionBudgets by uid.
    budgets: BTreeMap<String, Arc<Value>>,
}

impl Core {
    pub(super) fn pod_changed(&mut self, change: &Change, now: Instant) {
        let Some(new) = &change.new else {
            let uid = change.object().uid();
            self.cluster.withdraw_nomination(uid);
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

    pub(super) fn namespace_changed(&mut self, change: &Change) {
        match &change.new {
            Some(new) => self.cluster.put_namespace(new.clone()),
            None => self.cluster.remove_namespace(change.object().name()),
        }
    }

    pub(super) fn budget_changed(&mut self, change: &Change) {
        match &change.new {
            Some(new) => self.budgets.insert(new.uid().to_owned(), new.clone()),
            None => self.budgets.remove(change.object().uid()),
        };
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
            Err(refusals) => Some(self.give_up_for_now(pod, &refusals, now)),
        }
    }

    fn give_up_for_now(
        &mut self,
        pod: Arc<Pod>,
        refusals: &[(String, Refusal)],
        now: Instant,
    ) -> Decision {
        let hopes = Hopes {
            pod_gone: refusals
                .iter()
                .any(|(_, r)| matches!(r.cause, Cause::Occupied | Cause::Neighbours)),
            pod_placed: pod.rules.look_at_others(),
        };
        self.queue.park(&pod.uid, hopes, now);
        let mut message = filters::message(refusals.len(), refusals.iter().map(|(_, r)| r));
        let budgets: Vec<Arc<Value>> = self.budgets.values().cloned().collect();
        match preempt::find(&pod, refusals, &mut self.cluster, &budgets) {
            Some(Preemption { node, victims }) => {
                self.cluster.nominate(pod.clone(), &node);
                Decision::Preempt {
                    pod,
                    node,
                    victims,
                    message,
                }
            }
            None => {
                if !refusals.is_empty() {
                    message.push(' ');
                    message.push_str(&filters::preemption_message(refusals));
                }
                Decision::Unschedulable { pod, message }
            }
        }
    }

    /// The best node, or why each was refused.
    fn choose(&self, pod: &Pod) -> Result<String, Vec<(String, Refusal)>> {
        let prepared = Prepared::new(pod, &self.cluster);
        let mut fitting: Vec<(&String, &Node)> = Vec::new();
        let mut refusals = Vec::new();
        for (name, node) in self.cluster.nodes() {
            let checked = filters::check(pod, name, node, &self.cluster)
                .and_then(|()| prepared.check(pod, node));
            match checked {
                Ok(()) => fitting.push((name, node)),
                Err(refusal) => refusals.push((name.clone(), refusal)),
            }
        }
        // Room was made for the pod there.
        let nominated = self.cluster.nomination(&pod.uid);
        if let Some((name, _)) = fitting
            .iter()
            .find(|(name, _)| Some(name.as_str()) == nominated)
        {
            return Ok((*name).clone());
        }
        let extra = prepared.scores(pod, &fitting);
        scores::best(pod, &fitting, &extra, self.turn)
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

    /// A pod could not be told to leave: the one that needs its place decides again.
    pub(super) fn make_room_again(&mut self, uid: &str, now: Instant) {
        self.cluster.withdraw_nomination(uid);
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
