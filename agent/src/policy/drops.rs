//! Packets that policies dropped: a line for some of them, the last ones for whoever asks.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_common::policy::event::DropEvent;
use dataplane_common::policy::verdict;
use dataplane_common::{V4, V6};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::explain::{self, port_text};
use super::{Enforcer, View};
use crate::compile::policy::{Direction, Packet};
use crate::kernel::DropEvents;

/// So many are remembered.
const KEPT: usize = 1_000;
/// At most so many lines in a second.
const LINES_PER_S: u32 = 10;

/// A packet that a policy dropped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drop {
    /// The pod whose policies refuse it.
    pub pod: String,
    pub direction: String,
    pub from: String,
    pub to: String,
    /// As in «80/TCP».
    pub port: String,
    /// The rule that denies it, or what isolates the pod.
    pub why: String,
}

/// The last drops.
#[derive(Debug, Default)]
pub(super) struct Recent {
    drops: VecDeque<(Packet, Drop)>,
}

impl Recent {
    fn add(&mut self, packet: Packet, drop: Drop) {
        if self.drops.len() >= KEPT {
            self.drops.pop_front();
        }
        self.drops.push_back((packet, drop));
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &(Packet, Drop)> {
        self.drops.iter()
    }
}

/// Reads events until shutdown.
///
/// # Errors
/// When the ring cannot be waited for.
pub async fn watch(
    mut events: DropEvents,
    enforcer: Arc<Enforcer>,
    shutdown: CancellationToken,
) -> std::io::Result<()> {
    let mut lines = Lines::default();
    loop {
        let event = tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            event = events.next() => event?,
        };
        let (packet, drop) = enforcer.with(|view| describe(view, &event));
        lines.write(&drop, event.missed);
        enforcer.recent().add(packet, drop);
    }
}

/// An event in words.
pub(super) fn describe(view: &View<'_>, event: &DropEvent) -> (Packet, Drop) {
    let address = |words: [u32; 4]| match event.family {
        4 => IpAddr::from(V4(words[0]).octets()),
        _ => IpAddr::from(V6(words).octets()),
    };
    let direction = if event.verdict & verdict::INGRESS == 0 {
        Direction::Egress
    } else {
        Direction::Ingress
    };
    let packet = Packet {
        source: address(event.source),
        destination: address(event.destination),
        protocol: event.protocol,
        port: event.destination_port.number(),
    };
    let number = verdict::rule_plus_one(event.verdict);
    let pod = view.locals.pods.get(&event.ifindex);
    let pod = pod.and_then(|pod| pod.name.as_ref());
    let drop = Drop {
        pod: pod.map_or_else(|| format!("link {}", event.ifindex), ToString::to_string),
        direction: direction.name().into(),
        from: format!("{}:{}", packet.source, event.source_port.number()),
        to: packet.destination.to_string(),
        port: port_text(packet.protocol, packet.port),
        why: explain::denial(
            view,
            event.ifindex,
            direction,
            number.checked_sub(1),
            number == verdict::PENDING,
        ),
    };
    (packet, drop)
}

/// Writes lines, but not too many.
#[derive(Debug)]
struct Lines {
    since: Instant,
    written: u32,
    left_out: u64,
}

impl Default for Lines {
    fn default() -> Self {
        Self {
            since: Instant::now(),
            written: 0,
            left_out: 0,
        }
    }
}

impl Lines {
    fn write(&mut self, drop: &Drop, missed: u32) {
        self.left_out += u64::from(missed);
        if self.since.elapsed() >= Duration::from_secs(1) {
            (self.since, self.written) = (Instant::now(), 0);
        }
        if self.written >= LINES_PER_S {
            self.left_out += 1;
            return;
        }
        self.written += 1;
        let others = std::mem::take(&mut self.left_out);
        tracing::info!(
            pod = %drop.pod, direction = %drop.direction, from = %drop.from, to = %drop.to, port = %drop.port,
            why = %drop.why, others, "a policy dropped a packet"
        );
    }
}
