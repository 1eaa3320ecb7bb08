//! A small HTTP client that runs inside any network namespace and counts who answered.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use nix::sched::{CloneFlags, setns};

use crate::support::Result;

/// A packet lost and sent again costs a second; two losses in a row are a fault.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Runs the work on a thread of its own inside the namespace.
pub(crate) fn inside<T: Send>(netns: &Path, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let file = File::open(netns).with_context(|| format!("open {}", netns.display()))?;
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            setns(&file, CloneFlags::CLONE_NEWNET).context("enter the namespace")?;
            work()
        });
        thread
            .join()
            .unwrap_or_else(|_| bail!("the thread in the namespace panicked"))
    })
}

/// One request on a new connection; returns the pod that answered.
pub(crate) fn fetch(address: SocketAddr) -> Result<String> {
    Connection::open(address)?.request("close")
}

/// A connection that stays open.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: TcpStream,
}

impl Connection {
    pub(crate) fn open(address: SocketAddr) -> Result<Self> {
        Self::open_within(address, TIMEOUT)
    }

    /// As [`Self::open`], for a client that waits so long at each step.
    pub(crate) fn open_within(address: SocketAddr, patience: Duration) -> Result<Self> {
        let stream = TcpStream::connect_timeout(&address, patience)
            .with_context(|| format!("connect to {address}"))?;
        stream.set_read_timeout(Some(patience))?;
        stream.set_write_timeout(Some(patience))?;
        stream.set_nodelay(true)?;
        Ok(Self { stream })
    }

    /// Asks for the page; `connection` is the header of that name. Returns the pod that answered.
    pub(crate) fn request(&mut self, connection: &str) -> Result<String> {
        // HTTP/1.0 bodies end with the stream; HTTP/1.1 ones are chunked here, and end with an empty chunk.
        let request = format!("GET / HTTP/1.1\r\nHost: web\r\nConnection: {connection}\r\n\r\n");
        self.stream
            .write_all(request.as_bytes())
            .context("send the request")?;
        let mut answer = Vec::new();
        let mut buffer = [0_u8; 4096];
        while !answer.ends_with(b"\r\n0\r\n\r\n") {
            let n = self.stream.read(&mut buffer).context("read the answer")?;
            ensure!(n > 0, "the answer ends after {} bytes", answer.len());
            answer.extend(buffer.get(..n).unwrap_or_default());
        }
        let text = String::from_utf8_lossy(&answer);
        ensure!(
            text.starts_with("HTTP/1.1 200 "),
            "answer: {}",
            text.lines().next().unwrap_or("")
        );
        let server = text.lines().find_map(|l| l.strip_prefix("X-Served-By: "));
        Ok(server.context("the answer names no pod")?.trim().to_owned())
    }
}

/// Every replica must have answered at least this share of the requests, in percent.
pub(crate) const LEAST_SHARE_PERCENT: usize = 20;

/// Checks the spread over the replicas and returns it for the figures.
pub(crate) fn spread(answers: &[String], replicas: usize) -> Result<String> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for pod in answers {
        *counts.entry(pod).or_default() += 1;
    }
    let least = counts.values().min().copied().unwrap_or_default();
    let text = counts
        .values()
        .map(usize::to_string)
        .collect::<Vec<_>>()
        .join("/");
    ensure!(
        counts.len() == replicas,
        "{} of {replicas} replicas answered: {counts:?}",
        counts.len()
    );
    ensure!(
        least * 100 >= answers.len() * LEAST_SHARE_PERCENT,
        "a replica got less than {LEAST_SHARE_PERCENT} %: {counts:?}"
    );
    Ok(text)
}
