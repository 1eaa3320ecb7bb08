//! The Corefile: CoreDNS's configuration language, read into what this server does. [pure]
//!
//! `lex` and `syntax` read the language, `plugins` what its directives mean. What this server does not do is an error
//! with file and line: a configuration is taken as a whole or not at all.

mod args;
mod config;
mod keys;
mod lex;
mod plugins;
mod rewrites;
mod syntax;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use config::{
    Cache, CacheClass, Corefile, Forward, Health, Hosts, Key, Kubernetes, LogClass, LogRule,
    Policy, Prefetch, Reload, ServeStale, ServerBlock, Target, Tls,
};
pub use rewrites::{AnswerRule, Field, Match, NameRule, Replacement, RewriteRule, TtlRange};
pub use syntax::{Line, RawBlock, read};

/// Why a Corefile is not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}:{}: {what}", place.file, place.line)]
pub struct CorefileError {
    pub place: Place,
    pub what: String,
}

/// Where something was read. Places are all equal: two configurations are the same wherever they are written.
#[derive(Clone, Debug, Eq)]
pub struct Place {
    pub file: Arc<str>,
    /// From 1.
    pub line: u32,
}

impl PartialEq for Place {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Place {
    pub(super) fn error(&self, what: impl Into<String>) -> CorefileError {
        CorefileError {
            place: self.clone(),
            what: what.into(),
        }
    }
}

/// What a Corefile refers to outside itself.
pub trait Sources {
    /// The text of a file.
    ///
    /// # Errors
    /// What is wrong with it, for people.
    fn read(&self, path: &str) -> Result<String, String>;

    /// Paths that match a pattern (* and ? within one folder), sorted.
    fn matching(&self, pattern: &str) -> Vec<String>;

    /// An environment variable; empty when it is not set.
    ///
    /// # Errors
    /// Why there are none here.
    fn variable(&self, name: &str) -> Result<String, String>;
}

/// Files in memory by path: keys of ConfigMaps, as they would be mounted. Their writers see nothing of the machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mounted(pub BTreeMap<String, String>);

impl Sources for Mounted {
    fn read(&self, path: &str) -> Result<String, String> {
        let file = self.0.get(path).cloned();
        file.ok_or_else(|| format!("there is no {path} among the keys of the ConfigMaps"))
    }

    fn matching(&self, pattern: &str) -> Vec<String> {
        let paths = self.0.keys();
        paths
            .filter(|path| matches(pattern, path))
            .cloned()
            .collect()
    }

    fn variable(&self, name: &str) -> Result<String, String> {
        Err(format!(
            "there is no environment variable {name}: a Corefile from a ConfigMap has none"
        ))
    }
}

/// True when a path matches a pattern whose last part may hold * and ?.
pub(super) fn matches(pattern: &str, path: &str) -> bool {
    let split = |text: &'_ str| {
        let at = text.rfind('/').map_or(0, |at| at + 1);
        (text[..at].to_owned(), text[at..].to_owned())
    };
    let ((folder, pattern), (own, name)) = (split(pattern), split(path));
    folder == own && glob(pattern.as_bytes(), name.as_bytes())
}

/// Whether * (any text) and ? (one byte) can stand for the text.
fn glob(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    // Where to go on when the last * has to take one more byte.
    let mut retry = None;
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                retry = Some((p + 1, t + 1));
                p += 1;
            }
            Some(c) if *c == b'?' || *c == text[t] => {
                p += 1;
                t += 1;
            }
            _ => match retry {
                Some((after, from)) => {
                    (p, t) = (after, from);
                    retry = Some((after, from + 1));
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|c| *c == b'*')
}
