//! Readiness: named checks that the rooms fulfil, and what is missing while they have not.

use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

/// One condition of readiness.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    pub name: String,
    /// Why it is not fulfilled; none once it is.
    pub missing: Option<String>,
}

/// All conditions. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Checks {
    list: Arc<Mutex<Vec<Check>>>,
}

impl Checks {
    /// Conditions with what to say until they are fulfilled.
    #[must_use]
    pub fn new(conditions: &[(&str, &str)]) -> Self {
        let list = conditions
            .iter()
            .map(|(name, missing)| Check {
                name: (*name).to_owned(),
                missing: Some((*missing).to_owned()),
            })
            .collect();
        Self {
            list: Arc::new(Mutex::new(list)),
        }
    }

    /// Notes that a condition is fulfilled.
    pub fn pass(&self, name: &str) {
        self.set(name, None);
    }

    /// Notes that a condition is not fulfilled, and why.
    pub fn fail(&self, name: &str, why: impl Into<String>) {
        self.set(name, Some(why.into()));
    }

    #[must_use]
    pub fn list(&self) -> Vec<Check> {
        self.list
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.list().iter().all(|check| check.missing.is_none())
    }

    fn set(&self, name: &str, missing: Option<String>) {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        match list.iter_mut().find(|check| check.name == name) {
            Some(check) => check.missing = missing,
            None => list.push(Check {
                name: name.to_owned(),
                missing,
            }),
        }
    }

    /// One line per check, as the Kubernetes components answer.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for check in self.list() {
            match check.missing {
                None => text.push_str(&format!("[+]{} ok\n", check.name)),
                Some(why) => text.push_str(&format!("[-]{} failed: {why}\n", check.name)),
            }
        }
        text.push_str(if self.is_ready() {
            "ready\n"
        } else {
            "not ready\n"
        });
        text
    }
}
