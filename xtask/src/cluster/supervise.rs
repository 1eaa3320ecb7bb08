//! The supervisor of a local cluster: a detached process that starts the cluster's programs and restarts them.
//!
//! It holds the API listener on the machine's loopback and hands it to `weir-control` the way systemd does
//! (LISTEN_FDS): a socket stays in the namespace where it was made, so the machine reaches an API server that itself
//! lives in a namespace. The wanted programs stand in a file; SIGHUP makes the supervisor read it again, SIGTERM makes
//! it stop everything. Programs die with their supervisor; containers do not.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::process::Process;
use crate::repo::write_atomically;

const FIRST_BACK_OFF: Duration = Duration::from_millis(100);
const LAST_BACK_OFF: Duration = Duration::from_secs(5);
/// A program that ran this long starts over with the first back-off.
const STABLE_AFTER: Duration = Duration::from_secs(10);
/// Time between SIGTERM and SIGKILL.
const STOP_GRACE: Duration = Duration::from_secs(3);
/// A log that is longer at a start is set aside as NAME.log.1.
const MAX_LOG_BYTES: u64 = 16 << 20;

/// Files by which `up`, `down` and `status` talk to the supervisor.
#[derive(Clone, Debug)]
pub(crate) struct Files {
    pub(crate) spec: PathBuf,
    pub(crate) state: PathBuf,
    pub(crate) pid: PathBuf,
    pub(crate) log: PathBuf,
}

impl Files {
    pub(crate) fn of(dir: &Path) -> Self {
        let supervisor = dir.join("supervisor");
        Self {
            spec: supervisor.join("programs.json"),
            state: supervisor.join("state.json"),
            pid: supervisor.join("process.json"),
            log: dir.join("logs/supervisor.log"),
        }
    }
}

/// What the supervisor shall run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Spec {
    /// Loopback address whose listener is handed to the program with `takes_listener`.
    pub(crate) listen: Option<SocketAddr>,
    pub(crate) programs: BTreeMap<String, Program>,
}

/// One program. A changed entry makes the supervisor restart it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Program {
    pub(crate) argv: Vec<String>,
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) log: PathBuf,
    pub(crate) takes_listener: bool,
    /// Version of the program's file and its configuration: a new build is a changed entry.
    pub(crate) version: String,
}

/// What a program is doing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Running {
    pub(crate) process: Option<Process>,
    pub(crate) starts: u64,
    pub(crate) last_exit: Option<String>,
}

pub(crate) type State = BTreeMap<String, Running>;

/// Reads the state file; an absent one is an empty state.
pub(crate) fn read_state(files: &Files) -> State {
    std::fs::read(&files.state)
        .ok()
        .and_then(|bytes| serde_json::from_slice(&bytes).ok())
        .unwrap_or_default()
}

/// Everything the threads share.
struct Shared {
    state: Mutex<State>,
    file: PathBuf,
    listener: Option<TcpListener>,
}

impl Shared {
    fn update(&self, name: &str, change: impl FnOnce(&mut Running)) {
        let mut state = lock(&self.state);
        change(state.entry(name.to_owned()).or_default());
        self.publish(&state);
    }

    fn forget(&self, name: &str) {
        let mut state = lock(&self.state);
        state.remove(name);
        self.publish(&state);
    }

    fn publish(&self, state: &State) {
        let written = serde_json::to_vec_pretty(state)
            .context("encode the state")
            .and_then(|bytes| write_atomically(&self.file, &bytes, 0o644));
        if let Err(e) = written {
            eprintln!("supervisor: {e:#}");
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The supervisor's main: runs until SIGTERM or SIGINT.
pub(crate) fn run(dir: &Path) -> Result<()> {
    let files = Files::of(dir);
    // Fails only for a process group leader, which is detached from the caller's terminal just as well.
    let _ = nix::unistd::setsid();
    // Handlers, not a blocked mask: programs inherit a mask, and a container that cannot be told to end is a nuisance.
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP]).context("handle signals")?;
    let spec = read_spec(&files)?;
    let listener = match spec.listen {
        Some(address) => Some(
            TcpListener::bind(address)
                .with_context(|| format!("listen on {address} for the API server"))?,
        ),
        None => None,
    };
    let shared = Arc::new(Shared {
        state: Mutex::default(),
        file: files.state.clone(),
        listener,
    });
    shared.publish(&State::new());
    let pid = i32::try_from(std::process::id()).context("own pid")?;
    Process::of(pid)
        .context("own start time")?
        .store(&files.pid)?;
    let mut workers = BTreeMap::new();
    reconcile(&shared, &mut workers, &spec);
    for signal in signals.forever() {
        if signal != SIGHUP {
            break;
        }
        match read_spec(&files) {
            Ok(new) => reconcile(&shared, &mut workers, &new),
            Err(e) => eprintln!("supervisor: keep the old programs: {e:#}"),
        }
    }
    reconcile(&shared, &mut workers, &Spec::default());
    let _ = std::fs::remove_file(&files.pid);
    Ok(())
}

fn read_spec(files: &Files) -> Result<Spec> {
    let bytes =
        std::fs::read(&files.spec).with_context(|| format!("read {}", files.spec.display()))?;
    serde_json::from_slice(&bytes).with_context(|| format!("decode {}", files.spec.display()))
}

/// Stops what is no longer wanted as it is, all at once, then starts what is missing.
fn reconcile(shared: &Arc<Shared>, workers: &mut BTreeMap<String, Worker>, spec: &Spec) {
    let stale: Vec<String> = workers
        .iter()
        .filter(|(name, worker)| spec.programs.get(*name) != Some(&worker.program))
        .map(|(name, _)| name.clone())
        .collect();
    let stopping: Vec<(String, Worker)> = stale
        .into_iter()
        .filter_map(|name| workers.remove_entry(&name))
        .collect();
    for (_, worker) in &stopping {
        worker.control.stop();
    }
    let deadline = Instant::now() + STOP_GRACE;
    for (name, worker) in stopping {
        worker.finish(deadline);
        shared.forget(&name);
    }
    for (name, program) in &spec.programs {
        if !workers.contains_key(name) {
            let worker = Worker::start(Arc::clone(shared), name.clone(), program.clone());
            workers.insert(name.clone(), worker);
        }
    }
}

/// One supervised program and the thread that runs it.
struct Worker {
    program: Program,
    control: Arc<Control>,
    thread: JoinHandle<()>,
}

#[derive(Default)]
struct Control {
    inner: Mutex<ControlState>,
    changed: Condvar,
}

#[derive(Default)]
struct ControlState {
    stop: bool,
    /// Set while the process is not reaped: until then its pid cannot belong to anybody else.
    pid: Option<Pid>,
}

impl Control {
    fn stop(&self) {
        let mut inner = lock(&self.inner);
        inner.stop = true;
        if let Some(pid) = inner.pid {
            let _ = kill(pid, Signal::SIGTERM);
        }
        self.changed.notify_all();
    }

    fn kill(&self) {
        if let Some(pid) = lock(&self.inner).pid {
            let _ = kill(pid, Signal::SIGKILL);
        }
    }

    /// Sleeps, unless told to stop. Returns whether to go on.
    fn pause(&self, time: Duration) -> bool {
        let inner = lock(&self.inner);
        let waited = self
            .changed
            .wait_timeout_while(inner, time, |state| !state.stop);
        !waited.unwrap_or_else(PoisonError::into_inner).0.stop
    }

    fn set_pid(&self, pid: Option<Pid>) {
        let mut inner = lock(&self.inner);
        inner.pid = pid;
        self.changed.notify_all();
        if let (true, Some(pid)) = (inner.stop, pid) {
            let _ = kill(pid, Signal::SIGTERM);
        }
    }

    /// Waits until no process runs; false when `limit` has passed.
    fn wait_ended(&self, limit: Duration) -> bool {
        let inner = lock(&self.inner);
        let waited = self
            .changed
            .wait_timeout_while(inner, limit, |state| state.pid.is_some());
        waited
            .unwrap_or_else(PoisonError::into_inner)
            .0
            .pid
            .is_none()
    }
}

impl Worker {
    fn start(shared: Arc<Shared>, name: String, program: Program) -> Self {
        let control = Arc::new(Control::default());
        let thread = std::thread::spawn({
            let (program, control) = (program.clone(), Arc::clone(&control));
            move || keep_running(&shared, &name, &program, &control)
        });
        Self {
            program,
            control,
            thread,
        }
    }

    fn finish(self, deadline: Instant) {
        if !self
            .control
            .wait_ended(deadline.saturating_duration_since(Instant::now()))
        {
            self.control.kill();
        }
        if self.thread.join().is_err() {
            eprintln!(
                "supervisor: the thread of {:?} panicked",
                self.program.argv.first()
            );
        }
    }
}

fn keep_running(shared: &Shared, name: &str, program: &Program, control: &Control) {
    let mut back_off = FIRST_BACK_OFF;
    // A stop that came before the first start is seen here as well.
    while control.pause(Duration::ZERO) {
        let started = Instant::now();
        let exit = match run_once(shared, name, program, control) {
            Ok(exit) => exit,
            Err(e) => format!("{e:#}"),
        };
        eprintln!("supervisor: {name}: {exit}");
        shared.update(name, |running| {
            running.process = None;
            running.last_exit = Some(exit);
        });
        if started.elapsed() >= STABLE_AFTER {
            back_off = FIRST_BACK_OFF;
        }
        if !control.pause(back_off) {
            return;
        }
        back_off = (back_off * 2).min(LAST_BACK_OFF);
    }
}

/// Starts the program and waits for its end; returns how it ended.
fn run_once(shared: &Shared, name: &str, program: &Program, control: &Control) -> Result<String> {
    let mut child = command(shared, program)?
        .spawn()
        .with_context(|| format!("start {}", program.argv.join(" ")))?;
    let pid = i32::try_from(child.id()).context("pid")?;
    control.set_pid(Some(Pid::from_raw(pid)));
    shared.update(name, |running| {
        running.process = Process::of(pid);
        running.starts += 1;
    });
    // Look without reaping, so that a signal sent meanwhile cannot hit a stranger with the same pid.
    while waitid(
        Id::Pid(Pid::from_raw(pid)),
        WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT,
    ) == Err(nix::errno::Errno::EINTR)
    {}
    control.set_pid(None);
    let status = child.wait().context("wait for the program")?;
    Ok(status.to_string())
}

/// `setpriv` ties the program to this thread's life; a shell moves the listener to descriptor 3.
fn command(shared: &Shared, program: &Program) -> Result<Command> {
    rotate(&program.log);
    let log = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(&program.log)
        .with_context(|| format!("open {}", program.log.display()))?;
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]);
    match &shared.listener {
        Some(listener) if program.takes_listener => {
            let copy = listener.try_clone().context("copy the API listener")?;
            command
                .args([
                    "sh",
                    "-c",
                    r#"exec 3<&0 0</dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec "$@""#,
                    "sh",
                ])
                .stdin(Stdio::from(OwnedFd::from(copy)));
        }
        _ => {
            command.stdin(Stdio::null());
        }
    }
    command
        .args(&program.argv)
        .envs(&program.env)
        .stdout(log.try_clone().context("copy the log's descriptor")?)
        .stderr(log);
    Ok(command)
}

fn rotate(log: &Path) {
    if log.metadata().is_ok_and(|m| m.len() > MAX_LOG_BYTES) {
        // Losing the old log is better than not starting.
        let _ = std::fs::rename(log, log.with_extension("log.1"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::process::wait_for;

    const LIMIT: Duration = Duration::from_secs(10);

    fn shared(dir: &Path) -> Arc<Shared> {
        Arc::new(Shared {
            state: Mutex::default(),
            file: dir.join("state.json"),
            listener: Some(TcpListener::bind("127.0.0.1:0").unwrap()),
        })
    }

    fn program(dir: &Path, script: &str) -> Program {
        Program {
            argv: ["sh", "-c", script].map(String::from).into(),
            env: BTreeMap::new(),
            log: dir.join("log"),
            takes_listener: true,
            version: String::new(),
        }
    }

    fn spec(program: Program) -> Spec {
        Spec {
            listen: None,
            programs: BTreeMap::from([("p".into(), program)]),
        }
    }

    #[test]
    fn a_program_that_ends_is_started_again_and_a_stop_is_final() {
        let dir = tempfile::tempdir().unwrap();
        let shared = shared(dir.path());
        let mut workers = BTreeMap::new();
        reconcile(&shared, &mut workers, &spec(program(dir.path(), "exit 3")));
        let starts = || lock(&shared.state).get("p").map_or(0, |r| r.starts);
        assert!(
            wait_for(LIMIT, || starts() >= 2),
            "started {} times",
            starts()
        );
        reconcile(&shared, &mut workers, &Spec::default());
        assert!(workers.is_empty() && lock(&shared.state).is_empty());
    }

    #[test]
    fn the_listener_arrives_as_descriptor_three_and_no_signal_is_blocked() {
        let dir = tempfile::tempdir().unwrap();
        let shared = shared(dir.path());
        let mut workers = BTreeMap::new();
        let script = r#"test "$LISTEN_PID" = $$ && readlink /proc/self/fd/3; grep SigBlk /proc/self/status; exec sleep 1000"#;
        reconcile(&shared, &mut workers, &spec(program(dir.path(), script)));
        let log = dir.path().join("log");
        let said = || std::fs::read_to_string(&log).unwrap_or_default();
        assert!(
            wait_for(LIMIT, || said().starts_with("socket:")),
            "{}",
            said()
        );
        let process = lock(&shared.state)["p"].process.unwrap();
        reconcile(&shared, &mut workers, &Spec::default());
        assert!(!process.alive());
    }

    #[test]
    fn only_a_changed_program_is_restarted() {
        let dir = tempfile::tempdir().unwrap();
        let shared = shared(dir.path());
        let mut workers = BTreeMap::new();
        let mut wanted = program(dir.path(), "exec sleep 1000");
        let current = || lock(&shared.state).get("p").and_then(|r| r.process);
        reconcile(&shared, &mut workers, &spec(wanted.clone()));
        assert!(wait_for(LIMIT, || current().is_some()));
        let first = current();
        reconcile(&shared, &mut workers, &spec(wanted.clone()));
        assert_eq!(current(), first);
        wanted.version = "2".into();
        reconcile(&shared, &mut workers, &spec(wanted));
        assert!(wait_for(LIMIT, || current().is_some_and(|p| Some(p) != first)));
        reconcile(&shared, &mut workers, &Spec::default());
    }
}
