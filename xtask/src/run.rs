//! Child processes with errors that name the command, and the ticked steps that people read.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::process::{Command, Output, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, bail};

/// How much of a failed command's output an error repeats, in bytes from the end.
const ERROR_TAIL: usize = 4096;

/// The command as a person would type it.
pub(crate) fn shown(command: &Command) -> String {
    let mut text = command.get_program().to_string_lossy().into_owned();
    for arg in command.get_args() {
        let arg = arg.to_string_lossy();
        let plain = !arg.is_empty()
            && arg
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"-_./:=,@%+".contains(&b));
        let _ = if plain {
            write!(text, " {arg}")
        } else {
            write!(text, " {arg:?}")
        };
    }
    text
}

/// Runs with the terminal's own streams.
pub(crate) fn loud(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("start `{}`", shown(command)))?;
    if !status.success() {
        bail!("`{}` failed: {status}", shown(command));
    }
    Ok(())
}

/// Runs, captures both streams and hands them back whatever the exit code is.
pub(crate) fn capture(command: &mut Command) -> Result<Output> {
    command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("start `{}` (is it installed?)", shown(command)))
}

/// Runs silently and returns standard output; a failure repeats the tail of what the command said.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let out = capture(command)?;
    if !out.status.success() {
        let mut said = String::from_utf8_lossy(&out.stderr).into_owned();
        said.push_str(&String::from_utf8_lossy(&out.stdout));
        bail!(
            "`{}` failed: {}\n{}",
            shown(command),
            out.status,
            tail(said.trim())
        );
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Runs silently for its effect.
pub(crate) fn quiet(command: &mut Command) -> Result<()> {
    output(command).map(drop)
}

/// Whether the command can be started and exits with 0.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|s| s.success())
}

/// `Command::new(program)` with arguments, for short call sites.
pub(crate) fn cmd<S: AsRef<OsStr>>(program: &str, args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(program);
    command.args(args);
    command
}

fn tail(text: &str) -> &str {
    let mut start = text.len().saturating_sub(ERROR_TAIL);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    text.get(start..).unwrap_or(text)
}

/// Prints one ticked line per finished step, with the time it took.
#[derive(Debug)]
pub(crate) struct Steps {
    started: Instant,
    last: Instant,
}

impl Steps {
    pub(crate) fn start() -> Self {
        let now = Instant::now();
        Self {
            started: now,
            last: now,
        }
    }

    /// Ticks a step off: what is true now, and the seconds since the step before.
    pub(crate) fn done(&mut self, what: impl AsRef<str>) {
        let now = Instant::now();
        let took = now.duration_since(self.last).as_secs_f64();
        println!(" ✓ {:<58} {took:>5.1}s", what.as_ref());
        self.last = now;
    }

    pub(crate) fn total_s(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }
}

/// Runs `work` for every item on threads of its own and returns the results in order, or the first error.
pub(crate) fn in_parallel<T: Sync, R: Send>(
    items: &[T],
    work: impl Fn(&T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    std::thread::scope(|scope| {
        let handles: Vec<_> = items
            .iter()
            .map(|item| scope.spawn(|| work(item)))
            .collect();
        handles
            .into_iter()
            .map(|h| {
                h.join()
                    .unwrap_or_else(|_| bail!("a worker thread panicked"))
            })
            .collect()
    })
}
