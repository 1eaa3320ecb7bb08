//! QEMU: one boot, its console line by line, and the choice between KVM and emulation.

use std::fmt;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use super::initramfs::{self, EXIT_MARK, PROBE_MARK, Payload, START_MARK};
use super::kernel::Files;
use crate::repo::{Repo, which};
use crate::run::cmd;

const QEMU: &str = "qemu-system-x86_64";
/// A test run that takes longer hangs.
pub(super) const TEST_LIMIT: Duration = Duration::from_secs(300);
/// A kernel under working KVM boots far faster than this.
const PROBE_LIMIT: Duration = Duration::from_secs(10);
const MEMORY_MB: &str = "768";
/// Console lines that are kept for the message of a failure.
const KEPT_LINES: usize = 15;

/// How the virtual CPU runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Accelerator {
    Kvm,
    Tcg,
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kvm => "KVM",
            Self::Tcg => "emulated",
        })
    }
}

/// How a boot ended.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) exit_code: Option<i32>,
    pub(super) seconds: f64,
    timed_out: bool,
    /// The test program is running.
    started: bool,
    last_lines: Vec<String>,
}

impl Outcome {
    pub(super) fn explain(&self) -> String {
        let what = match (self.exit_code, self.timed_out) {
            (Some(0), _) => "the test program reported no check".to_owned(),
            (Some(code), _) => format!("the test program ended with {code}"),
            (None, true) => format!("no end within {} s", TEST_LIMIT.as_secs()),
            (None, false) => "the machine stopped before the test program ended".to_owned(),
        };
        format!(
            "{what}; the console ends with:\n     {}",
            self.last_lines.join("\n     ")
        )
    }
}

/// KVM where this kernel really boots on it: the device alone proves nothing on nested machines.
pub(super) fn accelerator(repo: &Repo, kernel: &Files, payload: &Payload) -> Result<Accelerator> {
    let usable = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .is_ok();
    if !usable {
        return Ok(Accelerator::Tcg);
    }
    let host = std::fs::read_to_string("/proc/sys/kernel/version").unwrap_or_default();
    let key = format!("{} on {}", kernel.release, host.trim());
    let dir = repo.target().join("vm");
    let memory = dir.join("kvm-probe");
    let known = std::fs::read_to_string(&memory).unwrap_or_default();
    let verdict = known
        .lines()
        .find_map(|l| l.strip_suffix(&format!(" {key}")));
    if let Some(verdict) = verdict {
        return Ok(if verdict == "works" {
            Accelerator::Kvm
        } else {
            Accelerator::Tcg
        });
    }
    let image = dir.join("probe.cpio");
    std::fs::write(&image, initramfs::probe(&payload.busybox)).context("write the probe")?;
    let mut alive = false;
    boot(
        &kernel.image,
        &image,
        Accelerator::Kvm,
        PROBE_LIMIT,
        &mut |line| {
            alive |= line.contains(PROBE_MARK);
        },
    )?;
    let verdict = if alive { "works" } else { "hangs" };
    println!("probe of /dev/kvm with {}: {verdict}", kernel.release);
    std::fs::write(&memory, format!("{known}{verdict} {key}\n"))
        .context("keep the probe's result")?;
    Ok(if alive {
        Accelerator::Kvm
    } else {
        Accelerator::Tcg
    })
}

/// Boots until power-off or the limit; hands every console line to `each`.
pub(super) fn boot(
    kernel: &Path,
    initramfs: &Path,
    accelerator: Accelerator,
    limit: Duration,
    each: &mut dyn FnMut(&str),
) -> Result<Outcome> {
    let program =
        which(QEMU).with_context(|| format!("{QEMU} is missing: run `cargo xtask install`"))?;
    let started = Instant::now();
    let mut qemu = cmd(
        &program.to_string_lossy(),
        ["-nographic", "-no-reboot", "-nic", "none"],
    );
    qemu.args(["-m", MEMORY_MB]);
    match accelerator {
        Accelerator::Kvm => qemu.args(["-smp", "2", "-accel", "kvm", "-cpu", "host"]),
        // One CPU: a kernel patches its own text while it boots, and an emulated CPU on a thread of its own may take
        // the breakpoint of a patch that is already done, which the kernel answers with a panic.
        Accelerator::Tcg => qemu.args(["-smp", "1", "-accel", "tcg,thread=single", "-cpu", "max"]),
    };
    qemu.arg("-kernel")
        .arg(kernel)
        .arg("-initrd")
        .arg(initramfs);
    // Console to the serial line; a panic ends the machine instead of hanging it.
    qemu.args(["-append", "console=ttyS0 panic=-1 quiet loglevel=3"]);
    qemu.stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut child = qemu.spawn().context("start QEMU")?;
    let console = BufReader::new(child.stdout.take().context("QEMU has no output")?);
    let (send, lines) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        for line in console.split(b'\n').map_while(Result::ok) {
            if send
                .send(String::from_utf8_lossy(&line).trim_end().to_owned())
                .is_err()
            {
                return;
            }
        }
    });
    let mut outcome = Outcome::default();
    loop {
        let left = limit.saturating_sub(started.elapsed());
        match lines.recv_timeout(left) {
            Ok(line) => outcome.take(&line, each),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                outcome.timed_out = true;
                break;
            }
        }
    }
    let _ = child.kill();
    child.wait().context("wait for QEMU")?;
    drop(lines);
    let _ = reader.join();
    outcome.seconds = started.elapsed().as_secs_f64();
    Ok(outcome)
}

impl Outcome {
    fn take(&mut self, line: &str, each: &mut dyn FnMut(&str)) {
        let line = plain(line);
        if line.is_empty() {
            return;
        }
        if let Some(code) = line.strip_prefix(EXIT_MARK) {
            self.exit_code = code.parse().ok();
            self.started = false;
            return;
        }
        if line == START_MARK {
            self.started = true;
            return;
        }
        if self.last_lines.len() == KEPT_LINES {
            self.last_lines.remove(0);
        }
        self.last_lines.push(line.clone());
        if self.started || line == PROBE_MARK {
            each(&line);
        }
    }
}

/// The firmware clears the screen with escape sequences; only the text is wanted.
fn plain(line: &str) -> String {
    let mut text = String::with_capacity(line.len());
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        if c == '\u{1b}' {
            // ESC [ parameters letter, or ESC and one character.
            if chars.next() == Some('[') {
                for c in chars.by_ref() {
                    if c.is_ascii_alphabetic() {
                        break;
                    }
                }
            }
        } else if !c.is_control() || c == '\t' {
            text.push(c);
        }
    }
    text.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escape_sequences_of_the_firmware_are_dropped() {
        assert_eq!(plain("\u{1b}c\u{1b}[?7l\u{1b}[2JSeaBIOS\r"), "SeaBIOS");
        assert_eq!(plain("PASS load insns=12"), "PASS load insns=12");
    }

    #[test]
    fn the_exit_mark_is_read_and_not_shown() {
        let mut outcome = Outcome::default();
        let mut shown = Vec::new();
        for line in [
            "Booting",
            "weir-vm start",
            "PASS a",
            "weir-vm exit 3",
            "reboot: Power down",
        ] {
            outcome.take(line, &mut |l| shown.push(l.to_owned()));
        }
        assert_eq!(outcome.exit_code, Some(3));
        assert_eq!(shown, ["PASS a"]);
    }
}
