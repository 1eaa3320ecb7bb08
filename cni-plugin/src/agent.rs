//! One call to the agent: a length-prefixed JSON request out, a length-prefixed JSON reply in.
//!
//! Frame: four bytes of length (big endian), then that many bytes of JSON. The pod's network namespace travels as an
//! open descriptor beside the first bytes, so that the agent needs no path into the runtime's mount namespace.

use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use serde::Deserialize;
use serde_json::Value;

/// How long the agent may take: well below the runtime's own limit of two minutes.
const BUDGET: Duration = Duration::from_secs(30);

/// Bytes of a reply at most.
const MAX_REPLY_BYTES: usize = 1024 * 1024;

/// Why the agent gave no usable answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    #[error("connect to weir-agent at {path}: {source}")]
    Unreachable {
        path: String,
        source: std::io::Error,
    },
    #[error("talk to weir-agent at {path}: {source}")]
    Broken {
        path: String,
        source: std::io::Error,
    },
    #[error("weir-agent at {path} sent a reply that cannot be read: {reason}")]
    Reply { path: String, reason: String },
}

/// What the agent answered.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Reply {
    Ok(Value),
    Error(AgentError),
}

/// A failure that the agent reports, with a code of the CNI specification.
#[derive(Debug, Deserialize)]
pub(crate) struct AgentError {
    pub(crate) code: u32,
    pub(crate) msg: String,
    #[serde(default)]
    pub(crate) details: String,
}

/// Sends one request and waits for its reply, [`BUDGET`] at most.
pub(crate) fn call(
    socket: &Path,
    request: &Value,
    netns: Option<&File>,
) -> Result<Reply, CallError> {
    let path = socket.display().to_string();
    let stream = UnixStream::connect(socket).map_err(|source| CallError::Unreachable {
        path: path.clone(),
        source,
    })?;
    let broken = |source| CallError::Broken {
        path: path.clone(),
        source,
    };
    let deadline = Instant::now() + BUDGET;
    let bytes = exchange(stream, request, netns, deadline).map_err(broken)?;
    serde_json::from_slice(&bytes).map_err(|e| CallError::Reply {
        path,
        reason: e.to_string(),
    })
}

fn exchange(
    mut stream: UnixStream,
    request: &Value,
    netns: Option<&File>,
    deadline: Instant,
) -> std::io::Result<Vec<u8>> {
    let body = serde_json::to_vec(request)?;
    let length = u32::try_from(body.len()).map_err(std::io::Error::other)?;
    stream.set_write_timeout(Some(BUDGET))?;
    let mut frame = length.to_be_bytes().to_vec();
    frame.extend_from_slice(&body);
    let fds: Vec<_> = netns.iter().map(|f| f.as_raw_fd()).collect();
    let rights = [ControlMessage::ScmRights(&fds)];
    let control: &[ControlMessage<'_>] = if fds.is_empty() { &[] } else { &rights };
    let sent = sendmsg::<()>(
        stream.as_raw_fd(),
        &[IoSlice::new(&frame)],
        control,
        MsgFlags::MSG_NOSIGNAL,
        None,
    )?;
    stream.write_all(&frame[sent..])?;
    let mut head = [0; 4];
    read_until(&mut stream, &mut head, deadline)?;
    let length = u32::from_be_bytes(head) as usize;
    if length > MAX_REPLY_BYTES {
        return Err(std::io::Error::other(format!(
            "reply of {length} bytes is too large"
        )));
    }
    let mut reply = vec![0; length];
    read_until(&mut stream, &mut reply, deadline)?;
    Ok(reply)
}

/// `read_exact` with a deadline over all reads together.
fn read_until(
    stream: &mut UnixStream,
    buffer: &mut [u8],
    deadline: Instant,
) -> std::io::Result<()> {
    let mut filled = 0;
    while filled < buffer.len() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(std::io::Error::new(
                std::io::ErrorKind::TimedOut,
                format!("no answer within {} s", BUDGET.as_secs()),
            ));
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut buffer[filled..]) {
            Ok(0) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => filled += n,
            Err(e)
                if matches!(
                    e.kind(),
                    std::io::ErrorKind::Interrupted | std::io::ErrorKind::WouldBlock
                ) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
