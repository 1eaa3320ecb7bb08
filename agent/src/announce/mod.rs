//! Answers for the load-balancer addresses that the control plane gave this node: ARP and neighbour discovery on the
//! uplinks, and word to the segment when an address comes here.
//!
//! Which node answers is decided by the control plane alone. Its last word holds while it is away, and what it said
//! before a restart of the agent holds until it speaks again: such addresses are answered for, but not proclaimed.
//! Serving the traffic is the dataplane's work; no address is put on a link.

mod link;
mod packet;
mod schedule;
mod socket;
mod stats;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{SystemTime, UNIX_EPOCH};

use control_api::desired::DesiredState;
use control_api::v1::{Announcement, EventReport};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub use stats::Stats;

use crate::feed::{FeedHandle, Origin};

/// What this node answers for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Own {
    /// All addresses.
    answered: BTreeSet<IpAddr>,
    /// Those that the control plane gave since the agent started: the segment is told about them.
    proclaimed: BTreeSet<IpAddr>,
}

/// Starts to answer, on every uplink, until shutdown. A state that was left on disk counts only when `same_boot`: a node
/// that was away longer cannot know who took its addresses.
#[must_use]
pub fn start(
    node_name: &str,
    uplinks: &[String],
    feed: &FeedHandle,
    same_boot: bool,
    shutdown: &CancellationToken,
) -> Stats {
    let stats = Stats::default();
    let (own, _) = watch::channel(Own::default());
    for uplink in uplinks {
        let worker = link::Uplink::new(uplink.clone(), own.subscribe(), stats.clone());
        tokio::spawn(worker.run(shutdown.clone()));
    }
    let follower = Follower {
        node_name: node_name.to_owned(),
        uplinks: uplinks.join(", "),
        feed: feed.clone(),
        same_boot,
        own,
        stats: stats.clone(),
    };
    tokio::spawn(follower.run(shutdown.clone()));
    stats
}

struct Follower {
    node_name: String,
    uplinks: String,
    feed: FeedHandle,
    same_boot: bool,
    own: watch::Sender<Own>,
    stats: Stats,
}

impl Follower {
    async fn run(self, shutdown: CancellationToken) {
        let mut updates = self.feed.updates();
        loop {
            let update = tokio::select! {
                () = shutdown.cancelled() => return,
                update = updates.next() => update,
            };
            if !update.changes.everything && update.changes.announcements.is_empty() {
                continue;
            }
            let mine = addresses_of(&self.node_name, &update.state);
            let own = match update.origin {
                Origin::Server => {
                    let addresses: BTreeSet<IpAddr> = mine.keys().copied().collect();
                    Own {
                        answered: addresses.clone(),
                        proclaimed: addresses,
                    }
                }
                Origin::Disk if self.same_boot => Own {
                    answered: mine.keys().copied().collect(),
                    proclaimed: BTreeSet::new(),
                },
                Origin::Disk => Own::default(),
            };
            drop(update);
            self.take(own, &mine);
        }
    }

    fn take(&self, own: Own, mine: &BTreeMap<IpAddr, Announcement>) {
        let before = self.own.borrow().clone();
        if before == own {
            return;
        }
        let gained = own.proclaimed.difference(&before.proclaimed);
        let events: Vec<EventReport> = gained
            .filter_map(|address| Some(self.event(mine.get(address)?)))
            .collect();
        tracing::info!(addresses = ?own.answered, "load-balancer addresses answered for");
        self.stats.set_addresses(own.answered.len());
        self.own.send_replace(own);
        if !events.is_empty() {
            let feed = self.feed.clone();
            tokio::spawn(async move {
                if let Err(error) = feed.report_events(events).await {
                    tracing::debug!(%error, "report who announces an address");
                }
            });
        }
    }

    fn event(&self, announcement: &Announcement) -> EventReport {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        EventReport {
            kind: "Service".into(),
            namespace: announcement.service_namespace.clone(),
            name: announcement.service_name.clone(),
            uid: announcement.service_uid.clone(),
            r#type: "Normal".into(),
            reason: "AddressAnnounced".into(),
            message: format!(
                "node {} answers for {} on {}",
                self.node_name, announcement.address, self.uplinks
            ),
            at_us: since.map_or(0, |t| i64::try_from(t.as_micros()).unwrap_or(i64::MAX)),
        }
    }
}

/// Announcements of one node; text that is no address is none.
fn addresses_of(node: &str, state: &DesiredState) -> BTreeMap<IpAddr, Announcement> {
    let mine = state.announcements.values().filter(|a| a.node == node);
    mine.filter_map(|a| Some((a.address.parse().ok()?, a.clone())))
        .collect()
}
