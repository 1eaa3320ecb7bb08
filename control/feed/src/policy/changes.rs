//! Policies that come, change and go.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use control_api::desired::Name;
use control_api::v1::object;

use super::graph::{Graph, Policy};
use super::rules::Translated;
use crate::effects::encode;

impl Graph {
    pub(super) fn put_policy(&mut self, name: &Name, translated: Option<Translated>) {
        let known = self.policy_ids.get(name).copied();
        match (known, translated) {
            (None, None) => {}
            (Some(id), None) => self.drop_policy(id, name),
            (known, Some(translated)) => {
                let id = known.unwrap_or_else(|| self.add_policy(name));
                let current = self.policies.get(id);
                if known.is_none() || current.is_some_and(|p| p.translated != translated) {
                    self.change_policy(id, translated);
                }
            }
        }
    }

    fn add_policy(&mut self, name: &Name) -> u32 {
        let id = self.policies.insert(Policy {
            name: name.clone(),
            translated: Translated::default(),
            bytes: Bytes::new(),
            version: 0,
            subject: None,
            sets: BTreeSet::new(),
            nodes: BTreeMap::new(),
        });
        self.policy_ids.insert(name.clone(), id);
        id
    }

    fn change_policy(&mut self, id: u32, translated: Translated) {
        let sets: BTreeSet<u32> = translated.sets.values().map(|s| self.acquire(s)).collect();
        let subject = translated.subject.as_ref().map(|of| self.acquire(of));
        let version = self.version();
        let Some(policy) = self.policies.get(id) else {
            return;
        };
        let nodes: Vec<Arc<str>> = policy.nodes.keys().cloned().collect();
        let (old_sets, old_subject) = (policy.sets.clone(), policy.subject);
        for node in &nodes {
            self.touch_policy(node, id);
            for set in sets.difference(&old_sets) {
                self.refer(node, *set);
            }
            for set in old_sets.difference(&sets) {
                self.unrefer(node, *set);
            }
        }
        if let Some(policy) = self.policies.get_mut(id) {
            let bytes = encode(object::Kind::Policy(translated.message.clone()));
            if policy.bytes != bytes {
                policy.bytes = bytes;
                policy.version = version;
            }
            policy.translated = translated;
            policy.sets = sets;
            policy.subject = subject;
        }
        self.change_subject(id, old_subject, subject);
        for set in old_sets.into_iter().chain(old_subject) {
            self.release(set);
        }
    }

    fn change_subject(&mut self, policy: u32, from: Option<u32>, to: Option<u32>) {
        if from == to {
            return;
        }
        let mut members = |set: Option<u32>, applies: bool| {
            let entry = set.and_then(|set| self.sets.get_mut(set));
            let Some(entry) = entry else {
                return BTreeSet::new();
            };
            if applies {
                entry.subjects.insert(policy);
            } else {
                entry.subjects.remove(&policy);
            }
            entry.members.clone()
        };
        let (old, new) = (members(from, false), members(to, true));
        for id in new.difference(&old) {
            self.select(policy, *id);
        }
        for id in old.difference(&new) {
            self.deselect(policy, *id);
        }
    }

    fn drop_policy(&mut self, id: u32, name: &Name) {
        let Some(policy) = self.policies.get(id) else {
            return;
        };
        let (subject, sets) = (policy.subject, policy.sets.clone());
        self.change_subject(id, subject, None);
        self.policy_ids.remove(name);
        self.policies.remove(id);
        self.touched.policy_left(id, name);
        for set in sets.into_iter().chain(subject) {
            self.release(set);
        }
    }
}
