//! Single probes: does what may pass get its answer, and does nothing of the rest arrive?

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::super::case::{Expectation, Query};
use super::super::world::{Key, key_of};
use super::{Run, sctp};
use crate::actor::command::{Attempt, Close, Command, Outcome, Probe, Protocol, Reply, Size};
use crate::cases::cluster::spec::normal_key;

/// An answer takes no longer, on a machine with much else to do.
const ANSWER_WITHIN: Duration = Duration::from_millis(3000);
/// Silence so long is a drop; what comes later is still noticed by its token.
const SILENT_FOR: Duration = Duration::from_millis(500);
const SMALL: usize = 32;

/// Where a query's packets are sent.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub(super) to: SocketAddr,
    /// Who may get them.
    pub(super) servers: Vec<String>,
}

impl Run<'_> {
    /// Where a client sends what a query asks.
    ///
    /// # Errors
    /// When the case's world does not have it.
    pub(super) fn target(&self, query: &Query) -> Result<Target> {
        let destinations = self.world.destinations(query)?;
        let (first, _) = destinations.first().context("no destination")?;
        let (_, address) = self.world.ends(query, first)?;
        let to = match query.to.strip_prefix("svc:") {
            Some(name) => {
                let service = self.world.services.get(&key_of(name)?);
                SocketAddr::new(service.context("no such Service")?.cluster_ip, query.port)
            }
            None => SocketAddr::new(address, query.port),
        };
        let servers = destinations.into_iter().map(|(name, _)| name).collect();
        Ok(Target { to, servers })
    }

    /// Looks at every expectation once. Those that want one backend of a Service come one after another, the others
    /// side by side.
    pub(super) fn check(&mut self, expectations: &[Expectation]) -> Result<()> {
        let mut plain: Vec<(&Query, bool)> = Vec::new();
        let mut picky: Vec<(Key, &str, &Query, bool)> = Vec::new();
        for expectation in expectations {
            match expectation {
                Expectation::Flow { id, alive } => self.check_flow(id, *alive)?,
                Expectation::Verdict { query, allow } => {
                    match (query.to.strip_prefix("svc:"), &query.backend) {
                        (Some(name), Some(pod)) => {
                            picky.push((key_of(name)?, pod, query, *allow));
                        }
                        _ => plain.push((query, *allow)),
                    }
                }
            }
        }
        self.check_all(&plain)?;
        let narrowed = !picky.is_empty();
        for (service, pod, query, allow) in picky {
            self.put_slices(Some((&service, pod)));
            self.programmed()?;
            self.check_all(&[(query, allow)])?;
        }
        if narrowed {
            self.put_slices(None);
            self.programmed()?;
        }
        Ok(())
    }

    fn check_all(&self, all: &[(&Query, bool)]) -> Result<()> {
        let results: Vec<Result<()>> = std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for (query, allow) in all {
                let look = || self.look(query, *allow).with_context(|| query.to_string());
                threads.push(scope.spawn(look));
            }
            let joined = threads.into_iter().map(|thread| match thread.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            joined.collect()
        });
        let wrong: Vec<String> = results
            .into_iter()
            .filter_map(|r| r.err().map(|e| format!("{e:#}")))
            .collect();
        ensure!(wrong.is_empty(), "{}", wrong.join("; "));
        Ok(())
    }

    fn look(&self, query: &Query, allow: bool) -> Result<()> {
        if query.protocol == Protocol::Sctp && !self.sctp {
            return sctp::look(self, query, allow);
        }
        let target = self.target(query)?;
        let limit = if allow { ANSWER_WITHIN } else { SILENT_FOR };
        let probe = probe(query, target.to, limit);
        let token = probe.token;
        let (actor, _, _) = self.cluster.source(&query.from)?;
        let attempts = actor.attempts(Command::Probe(probe), limit)?;
        for attempt in &attempts {
            judge(attempt, allow, &target)?;
        }
        ensure!(!attempts.is_empty(), "nothing was sent");
        if !allow {
            self.not_seen(token, &target)?;
        }
        Ok(())
    }

    /// Nothing with this token may have arrived.
    pub(super) fn not_seen(&self, token: u64, target: &Target) -> Result<()> {
        for server in &target.servers {
            let Ok((actor, _, _)) = self.cluster.source(server) else {
                continue;
            };
            match actor.call(Command::Seen { token }, Duration::ZERO)? {
                Reply::Seen(false) => {}
                Reply::Seen(true) => bail!("{server} got what may not pass"),
                other => bail!("unexpected reply {other:?}"),
            }
        }
        Ok(())
    }
}

/// A fresh socket and one request.
pub(super) fn probe(query: &Query, to: SocketAddr, limit: Duration) -> Probe {
    Probe {
        to,
        protocol: query.protocol,
        count: 1,
        size: Size::Bytes(query.size.unwrap_or(SMALL)),
        from_port: 0,
        from_ips: Vec::new(),
        close: Close::Client,
        interval_ms: 0,
        timeout_ms: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
        answer_size: 0,
        answer_after_ms: 0,
        half_close: false,
        dont_fragment: false,
        fragments: None,
        keep: None,
        give_up_after: 0,
        token: rand::random(),
    }
}

/// Is an attempt what it may be?
///
/// # Errors
/// What it was instead.
pub(super) fn judge(attempt: &Attempt, allow: bool, target: &Target) -> Result<()> {
    let (outcome, detail) = (attempt.outcome, &attempt.detail);
    if allow {
        ensure!(
            outcome == Outcome::Reply,
            "no answer: {outcome:?} after {} ms {detail}",
            attempt.took_ms
        );
        let Some(answer) = &attempt.answer else {
            return Ok(());
        };
        let expected = target.servers.iter().any(|s| is_named(&answer.name, s));
        ensure!(
            expected,
            "answered by {}, not {:?}",
            answer.name,
            target.servers
        );
        return Ok(());
    }
    match outcome {
        Outcome::Timeout | Outcome::Unreachable => Ok(()),
        Outcome::Reply => bail!("an answer came {detail}"),
        // Everything that may be probed has a listener: its host got the packet, or somebody refused in its place.
        other => bail!("{other:?} instead of silence {detail}"),
    }
}

/// On the host's network all listeners of a node are one.
fn is_named(name: &str, server: &str) -> bool {
    name == normal_key(server) || name.starts_with("node:") || !server.contains('/')
}
