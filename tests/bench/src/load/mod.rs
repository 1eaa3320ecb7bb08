//! The two ends of a measurement, each a process of its own: `serve` answers, `drive` asks, counts and times.
//!
//! Both are pinned to a CPU and poll without sleeping while there is traffic: what is measured is the work done for a
//! packet, not how long an idle CPU takes to wake up. Everything is bounded in time and in number.

pub(crate) mod client;
pub(crate) mod server;

use anyhow::{Context as _, Result};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

/// First byte of a request, and of a connection that only sends.
pub(crate) const ECHO: u8 = b'e';
pub(crate) const SINK: u8 = b's';

/// Bytes of a request and of its answer.
pub(crate) const MESSAGE: usize = 64;

/// Keeps the calling process on one CPU.
pub(crate) fn pin(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu)
        .and_then(|()| sched_setaffinity(Pid::from_raw(0), &set))
        .with_context(|| format!("stay on CPU {cpu}"))
}
