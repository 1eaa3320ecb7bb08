//! Processes by identity: a pid alone may have been given to somebody else.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

/// How often a wait for a process looks again.
const POLL: Duration = Duration::from_millis(10);
/// Position of `starttime` in /proc/PID/stat behind the parenthesised name (proc(5): field 22, the name is field 2).
const START_AFTER_NAME: usize = 19;

/// A pid together with the moment the process started, in clock ticks since boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    pub(crate) started: u64,
}

impl Process {
    /// The process that has this pid now.
    pub(crate) fn of(pid: i32) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let (_, fields) = stat.rsplit_once(") ")?;
        let mut fields = fields.split(' ');
        let state = fields.clone().next()?;
        let started = fields.nth(START_AFTER_NAME)?.parse().ok()?;
        // A zombie has nothing left to stop.
        (state != "Z").then_some(Self { pid, started })
    }

    pub(crate) fn alive(self) -> bool {
        Self::of(self.pid) == Some(self)
    }

    pub(crate) fn signal(self, signal: Signal) {
        if self.alive() {
            // It may end between the look and the call: then there is nothing left to signal.
            let _ = kill(Pid::from_raw(self.pid), signal);
        }
    }

    /// Waits until it is gone; false when it still lives after `limit`.
    pub(crate) fn wait_gone(self, limit: Duration) -> bool {
        wait_for(limit, || !self.alive())
    }

    pub(crate) fn command_line(self) -> String {
        let raw = std::fs::read(format!("/proc/{}/cmdline", self.pid)).unwrap_or_default();
        let words: Vec<_> = raw
            .split(|b| *b == 0)
            .map(String::from_utf8_lossy)
            .collect();
        words.join(" ").trim().to_owned()
    }

    /// Resident memory in kB.
    pub(crate) fn rss_kb(self) -> Option<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid)).ok()?;
        let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
        line.split_whitespace().next()?.parse().ok()
    }

    /// Seconds since it started.
    pub(crate) fn age_s(self) -> Option<u64> {
        let uptime = std::fs::read_to_string("/proc/uptime").ok()?;
        let seconds: u64 = uptime.split('.').next()?.parse().ok()?;
        // USER_HZ is 100 on every architecture that Weir runs on.
        Some(seconds.saturating_sub(self.started / 100))
    }

    pub(crate) fn load(path: &Path) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(path).ok()?).ok()
    }

    pub(crate) fn store(self, path: &Path) -> Result<()> {
        let bytes = serde_json::to_vec(&self).context("encode a process")?;
        crate::repo::write_atomically(path, &bytes, 0o644)
    }
}

/// Every process of the machine.
pub(crate) fn all() -> Vec<Process> {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|e| e.file_name().to_string_lossy().parse().ok())
        .filter_map(Process::of)
        .collect()
}

/// Looks every few milliseconds until `done` holds; false when `limit` has passed.
pub(crate) fn wait_for(limit: Duration, mut done: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        if done() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(POLL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_start_time_is_another_process() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let me = Process::of(pid).unwrap();
        assert!(me.alive());
        assert!(
            !Process {
                started: me.started + 1,
                ..me
            }
            .alive()
        );
        assert!(me.command_line().contains("xtask"));
        assert!(all().contains(&me));
    }

    #[test]
    fn a_child_that_ended_is_gone_before_it_is_reaped() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        assert!(wait_for(Duration::from_secs(5), || Process::of(pid).is_none()));
        child.wait().unwrap();
    }
}
