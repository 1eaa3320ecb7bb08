//! An actor is one process inside a network namespace that serves and probes on command.
//!
//! Commands come as JSON lines on standard input, replies leave on standard output; each command runs on a thread of
//! its own, so that a long probe delays nothing.

pub mod command;
pub mod message;
pub mod packet;
mod probe;
mod raw;
mod server;

use std::collections::HashMap;
use std::io::{BufRead, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use command::{Attempt, Command, Numbered, Outcome, Probe, Reply};
use probe::Conn;
use server::{Seen, Servers};

/// A reply body of a server under test is never larger.
const MAX_HTTP_BODY: u64 = 1 << 20;

/// Locks a mutex; a poisoned one is only the sign of an earlier failure.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

struct Watching {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Vec<Attempt>>,
}

#[derive(Default)]
struct Actor {
    servers: Mutex<Servers>,
    seen: Arc<Seen>,
    flows: Arc<Mutex<HashMap<String, Vec<Conn>>>>,
    watches: Mutex<HashMap<String, Watching>>,
}

/// Serves commands until standard input ends.
///
/// # Errors
/// When standard input or output breaks.
pub fn run(
    input: impl BufRead,
    output: impl Write + std::marker::Send + 'static,
) -> std::io::Result<()> {
    let actor = Arc::new(Actor::default());
    let output = Arc::new(Mutex::new(output));
    for line in input.lines() {
        let line = line?;
        let command: Numbered<Command> = serde_json::from_str(&line)?;
        let actor = Arc::clone(&actor);
        let output = Arc::clone(&output);
        std::thread::spawn(move || {
            let work = std::panic::AssertUnwindSafe(|| actor.execute(command.body));
            let panicked = |_| Reply::Failed("the actor panicked".into());
            let reply = Numbered {
                id: command.id,
                body: std::panic::catch_unwind(work).unwrap_or_else(panicked),
            };
            let mut bytes = serde_json::to_vec(&reply).unwrap_or_default();
            bytes.push(b'\n');
            let mut output = lock(&output);
            // The runner went away: the end of standard input follows.
            let _gone = output.write_all(&bytes).and_then(|()| output.flush());
        });
    }
    Ok(())
}

impl Actor {
    fn execute(&self, command: Command) -> Reply {
        match command {
            Command::Listen {
                protocol,
                port,
                name,
            } => done(lock(&self.servers).listen(protocol, port, &name, &self.seen)),
            #[cfg(test)]
            Command::Panic => panic!("as asked"),
            Command::Unlisten => {
                drop(std::mem::take(&mut *lock(&self.servers)));
                Reply::Done
            }
            Command::Probe(asked) => {
                let (attempts, conns) = probe::probe(&asked);
                if let Some(keep) = asked.keep {
                    lock(&self.flows).insert(keep, conns);
                }
                Reply::Attempts(attempts)
            }
            Command::Send(asked) => {
                // Taken out for the time of the exchange, so that other flows are not held up.
                let Some(mut conns) = lock(&self.flows).remove(&asked.flow) else {
                    return Reply::Failed(format!("no flow {}", asked.flow));
                };
                let attempts = probe::send(&mut conns, &asked);
                lock(&self.flows).insert(asked.flow, conns);
                Reply::Attempts(attempts)
            }
            Command::Close { flow } => {
                drop(lock(&self.flows).remove(&flow));
                Reply::Done
            }
            Command::Watch {
                id,
                every_ms,
                reuse,
                overlap,
                probe,
            } => self.begin(id, move |stop| {
                if overlap {
                    overlapping(&probe, every_ms, stop)
                } else {
                    watch(&probe, every_ms, reuse, stop)
                }
            }),
            Command::WatchFlow {
                id,
                flow,
                every_ms,
                timeout_ms,
            } => self.watch_flow(id, flow, every_ms, timeout_ms),
            Command::Unwatch { id } => {
                let Some(watching) = lock(&self.watches).remove(&id) else {
                    return Reply::Failed(format!("no watch {id}"));
                };
                watching.stop.store(true, Ordering::SeqCst);
                match watching.thread.join() {
                    Ok(attempts) => Reply::Attempts(attempts),
                    Err(_) => Reply::Failed(format!("watch {id} panicked")),
                }
            }
            Command::Seen { token } => Reply::Seen(self.seen.contains(token)),
            Command::Http {
                to,
                path,
                timeout_ms,
            } => http(to, &path, Duration::from_millis(timeout_ms)),
            Command::Forge(forged) => done(raw::forge(&forged)),
        }
    }

    /// Watches on a thread of its own until it is told to stop.
    fn begin(
        &self,
        id: String,
        watch: impl FnOnce(&AtomicBool) -> Vec<Attempt> + std::marker::Send + 'static,
    ) -> Reply {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || watch(&stopped));
        lock(&self.watches).insert(id, Watching { stop, thread });
        Reply::Done
    }

    fn watch_flow(&self, id: String, flow: String, every_ms: u64, timeout_ms: u64) -> Reply {
        let Some(mut conns) = lock(&self.flows).remove(&flow) else {
            return Reply::Failed(format!("no flow {flow}"));
        };
        let flows = Arc::clone(&self.flows);
        self.begin(id, move |stop| {
            let attempts = asking(&mut conns, every_ms, timeout_ms, stop);
            lock(&flows).insert(flow, conns);
            attempts
        })
    }
}

fn done(result: std::io::Result<()>) -> Reply {
    match result {
        Ok(()) => Reply::Done,
        Err(e) => Reply::Failed(e.to_string()),
    }
}

fn watch(asked: &Probe, every_ms: u64, reuse: bool, stop: &AtomicBool) -> Vec<Attempt> {
    let mut attempts = Vec::new();
    let mut kept: Vec<Conn> = Vec::new();
    let start = Instant::now();
    let mut next = start;
    while !stop.load(Ordering::SeqCst) {
        let attempt = if kept.is_empty() || !reuse {
            let (attempt, conn) = probe::open(asked);
            kept = conn.into_iter().collect();
            Some(attempt)
        } else {
            let send = command::Send {
                flow: String::new(),
                count: 1,
                size: asked.size,
                timeout_ms: asked.timeout_ms,
                answer_size: asked.answer_size,
                token: asked.token,
            };
            probe::send(&mut kept, &send).pop()
        };
        let since = start.elapsed().as_millis();
        attempts.extend(attempt.map(|attempt| Attempt {
            detail: format!("{} {since} ms into the watch", attempt.detail),
            ..attempt
        }));
        next += Duration::from_millis(every_ms);
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    attempts
}

/// Bytes of the requests of a watched flow.
const WATCHED_BYTES: usize = 32;

fn asking(conns: &mut [Conn], every_ms: u64, timeout_ms: u64, stop: &AtomicBool) -> Vec<Attempt> {
    let send = command::Send {
        flow: String::new(),
        count: 1,
        size: command::Size::Bytes(WATCHED_BYTES),
        timeout_ms,
        answer_size: 0,
        token: 0,
    };
    let mut attempts = Vec::new();
    let mut known = vec![0; conns.len()];
    while !stop.load(Ordering::SeqCst) {
        for (attempt, known) in probe::send(conns, &send).into_iter().zip(&mut known) {
            let conn = &conns[attempt.socket];
            let before = std::mem::replace(known, probe::resent(conn, &attempt, *known));
            let resent = known.saturating_sub(before);
            attempts.push(Attempt { resent, ..attempt });
        }
        std::thread::sleep(Duration::from_millis(every_ms));
    }
    attempts
}

/// Probes on fresh sockets at an even pace; a sample that gets no answer holds up none after it.
fn overlapping(asked: &Probe, every_ms: u64, stop: &AtomicBool) -> Vec<Attempt> {
    let attempts = Mutex::new(Vec::new());
    let start = Instant::now();
    let mut next = start;
    std::thread::scope(|scope| {
        while !stop.load(Ordering::SeqCst) {
            let since = start.elapsed().as_millis();
            let attempts = &attempts;
            scope.spawn(move || {
                let attempt = probe::sample(asked);
                lock(attempts).push((since, attempt));
            });
            next += Duration::from_millis(every_ms);
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
        }
    });
    let mut attempts = attempts
        .into_inner()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    attempts.sort_by_key(|(since, _)| *since);
    let told = |(since, attempt): (u128, Attempt)| Attempt {
        detail: format!("{} begun {since} ms into the watch", attempt.detail),
        ..attempt
    };
    attempts.into_iter().map(told).collect()
}

fn http(to: SocketAddr, path: &str, timeout: Duration) -> Reply {
    let start = Instant::now();
    match get(to, path, timeout) {
        Ok((status, body)) => Reply::Http { status, body },
        Err(e) => Reply::HttpFailed(failed_outcome(&e, start)),
    }
}

fn failed_outcome(e: &std::io::Error, start: Instant) -> Outcome {
    probe::failed(e, start, None).outcome
}

/// A GET by HTTP/1.0, whose answer ends with the connection.
fn get(to: SocketAddr, path: &str, timeout: Duration) -> std::io::Result<(u16, String)> {
    let mut stream = TcpStream::connect_timeout(&to, timeout)?;
    stream.set_read_timeout(Some(timeout))?;
    write!(
        stream,
        "GET {path} HTTP/1.0\r\nHost: {to}\r\nConnection: close\r\n\r\n"
    )?;
    let mut bytes = Vec::new();
    stream.take(MAX_HTTP_BODY).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let status = text.split_whitespace().nth(1).and_then(|s| s.parse().ok());
    let body = text
        .split_once("\r\n\r\n")
        .map(|(_, b)| b.to_owned())
        .unwrap_or_default();
    status
        .map(|s| (s, body))
        .ok_or_else(|| std::io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Default)]
    struct Said(Arc<Mutex<Vec<u8>>>);

    impl Write for Said {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            lock(&self.0).extend(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_panic_is_a_reply() {
        let command = serde_json::to_string(&Numbered {
            id: 7,
            body: Command::Panic,
        });
        let said = Said::default();
        run(command.unwrap().as_bytes(), said.clone()).unwrap();
        let deadline = Instant::now() + Duration::from_secs(5);
        while lock(&said.0).last() != Some(&b'\n') && Instant::now() < deadline {
            std::thread::yield_now();
        }
        let reply: Numbered<Reply> = serde_json::from_slice(&lock(&said.0)).unwrap();
        assert_eq!(reply.id, 7);
        assert!(matches!(reply.body, Reply::Failed(_)));
    }
}
