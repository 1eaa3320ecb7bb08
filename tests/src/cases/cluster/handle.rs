//! The runner's end of an actor: starts it inside a namespace and speaks its protocol.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::node::tail;
use crate::actor::command::{Attempt, Command, Numbered, Reply};
use crate::actor::lock;
use crate::topology::Namespace;

/// No command takes longer than this on top of what its own limits allow.
const SLACK: Duration = Duration::from_secs(60);

type Waiting = Arc<Mutex<HashMap<u64, Sender<Reply>>>>;

/// A running actor; ends with the value.
#[derive(Debug)]
pub(in crate::cases) struct Handle {
    child: Child,
    stdin: Mutex<Option<ChildStdin>>,
    waiting: Waiting,
    next: AtomicU64,
    log: PathBuf,
}

impl Handle {
    /// Starts this program as an actor inside the namespace; what it says on standard error goes to `log`.
    ///
    /// # Errors
    /// When it cannot be started.
    pub(in crate::cases) fn start(namespace: &Namespace, log: &Path) -> Result<Self> {
        let program = std::env::current_exe()?;
        let errors =
            std::fs::File::create(log).with_context(|| format!("create {}", log.display()))?;
        let mut child = namespace
            .command(&program.display().to_string())
            .arg("actor")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors)
            .spawn()
            .context("start an actor")?;
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().context("an actor without output")?;
        let waiting: Waiting = Arc::default();
        let answers = Arc::clone(&waiting);
        std::thread::spawn(move || {
            for line in BufReader::new(stdout)
                .lines()
                .map_while(std::io::Result::ok)
            {
                if let Ok(reply) = serde_json::from_str::<Numbered<Reply>>(&line)
                    && let Some(sender) = lock(&answers).remove(&reply.id)
                {
                    // Nobody waits any more: the step timed out and said so.
                    let _late = sender.send(reply.body);
                }
            }
            lock(&answers).clear();
        });
        Ok(Self {
            child,
            stdin: Mutex::new(stdin),
            waiting,
            next: AtomicU64::new(1),
            log: log.to_owned(),
        })
    }

    /// Its process id.
    #[must_use]
    pub(in crate::cases) fn process(&self) -> u32 {
        self.child.id()
    }

    /// Sends a command and waits for its reply, at most `limit` plus slack.
    ///
    /// # Errors
    /// When the actor is gone, too late, or says that it failed.
    pub(in crate::cases) fn call(&self, command: Command, limit: Duration) -> Result<Reply> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = channel();
        lock(&self.waiting).insert(id, sender);
        let mut line = serde_json::to_vec(&Numbered { id, body: command })?;
        line.push(b'\n');
        match lock(&self.stdin).as_mut() {
            Some(stdin) => stdin
                .write_all(&line)
                .and_then(|()| stdin.flush())
                .context("speak to an actor")?,
            None => bail!("the actor was stopped"),
        }
        match receiver.recv_timeout(limit + SLACK) {
            Ok(Reply::Failed(why)) => bail!("actor: {why}\n{}", tail(&self.log)),
            Ok(reply) => Ok(reply),
            Err(e) => bail!("no reply of an actor: {e}\n{}", tail(&self.log)),
        }
    }

    /// How it ended, if it did, and the end of its log.
    ///
    /// # Errors
    /// When the process cannot be asked after.
    pub(in crate::cases) fn ended(&mut self) -> Result<Option<String>> {
        let status = self.child.try_wait()?;
        Ok(status.map(|s| format!("{s}\n{}", tail(&self.log))))
    }

    /// A command whose reply holds attempts.
    ///
    /// # Errors
    /// As [`Handle::call`].
    pub(in crate::cases) fn attempts(
        &self,
        command: Command,
        limit: Duration,
    ) -> Result<Vec<Attempt>> {
        match self.call(command, limit)? {
            Reply::Attempts(attempts) => Ok(attempts),
            other => bail!("unexpected reply {other:?}"),
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        drop(lock(&self.stdin).take());
        // It may have ended with its input already; either way it is ours and reaped here.
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}
