//! Packets that policies dropped: a line for some of them, the last ones for whoever asks.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_common::policy::event::DropEvent;
use dataplane_common::policy::verdict;
use dataplane_common::{V4, V6};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::explain::{self, port_text};
use super::{Enforcer, View};
use crate::compile::policy::{Direction, Packet};
use crate::kernel::DropEvents;

/// So many different ones are remembered; the one that was seen longest ago gives way.
const KEPT: usize = 1_000;
/// At most so many lines in a second.
const LINES_PER_S: u32 = 10;

/// A packet that a policy dropped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drop {
    /// The pod whose policies refuse it.
    pub pod: String,
    pub direction: String,
    /// The client's address.
    pub from: String,
    /// The client's port; zero for protocols without ports.
    #[serde(default)]
    pub source_port: u16,
    pub to: String,
    /// As in «80/TCP».
    pub port: String,
    /// The rule that denies it, or what isolates the pod.
    pub why: String,
}

impl Drop {
    /// True of packets that differ in nothing but the client's port.
    fn is_like(&self, other: &Self) -> bool {
        let same = |drop: &Self| Self {
            source_port: 0,
            ..drop.clone()
        };
        same(self) == same(other)
    }
}

/// Packets that policies dropped for the same reason, between the same ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drops {
    /// The last of them.
    #[serde(flatten)]
    pub drop: Drop,
    /// Of those that the kernel told of one by one.
    #[serde(default)]
    pub count: u64,
    /// When the last one was dropped: RFC 3339, UTC.
    #[serde(default)]
    pub last: String,
}

/// The last drops.
#[derive(Debug, Default)]
pub(super) struct Recent {
    /// The newest last.
    drops: VecDeque<(Packet, Drops)>,
    untold: u64,
}

impl Recent {
    /// `untold` packets were dropped before this one and are not known.
    pub(super) fn add(&mut self, packet: Packet, drop: Drop, untold: u32, now: Timestamp) {
        self.untold = self.untold.saturating_add(untold.into());
        let mut known = self.drops.iter();
        let place = known.position(|(_, known)| known.drop.is_like(&drop));
        let before = place.and_then(|place| self.drops.remove(place));
        let count = before.map_or(0, |(_, before)| before.count);
        if self.drops.len() >= KEPT {
            self.drops.pop_front();
        }
        let drops = Drops {
            drop,
            count: count.saturating_add(1),
            last: now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
        };
        self.drops.push_back((packet, drops));
    }

    /// Packets of which no more is known than that policies dropped them.
    pub(super) fn untold(&self) -> u64 {
        self.untold
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &(Packet, Drops)> {
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
        let mut recent = enforcer.recent();
        recent.add(packet, drop, event.missed, Timestamp::now());
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
    let own = match direction {
        Direction::Egress => packet.source,
        Direction::Ingress => packet.destination,
    };
    // A flow remembers its verdict, and not whose it is.
    let ifindex = match (event.ifindex, view.locals.pod_at(own)) {
        (0, Some((ifindex, _))) => ifindex,
        (ifindex, _) => ifindex,
    };
    let pod = view.locals.pods.get(&ifindex);
    let pod = pod.and_then(|pod| pod.name.as_ref());
    let drop = Drop {
        pod: pod.map_or_else(|| format!("the pod at {own}"), ToString::to_string),
        direction: direction.name().into(),
        from: packet.source.to_string(),
        source_port: event.source_port.number(),
        to: packet.destination.to_string(),
        port: port_text(packet.protocol, packet.port),
        why: explain::denial(
            view,
            ifindex,
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
            pod = %drop.pod, direction = %drop.direction, from = %drop.from, source_port = drop.source_port, to = %drop.to, port = %drop.port,
            why = %drop.why, others, "a policy dropped a packet"
        );
    }
}
