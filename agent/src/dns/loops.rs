//! Finds upstream servers that lead back here: each is sent a name that nobody else knows, and should not hear of it again.
//!
//! Such a server is not asked any more, and is looked at again later. Nothing ends because of it. One that does not lead
//! back here is left in peace.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use hickory_proto::op::{Message, MessageType, OpCode, Query};
use hickory_proto::rr::{Name, RecordType};
use rand::Rng as _;

use super::block::{Block, Blocks};
use super::forward::{Forwarder, Upstream, lock};

/// Names that were sent out, and whether they came in.
#[derive(Debug, Default)]
pub(super) struct Loops {
    sent: Mutex<HashMap<Name, Arc<AtomicBool>>>,
}

impl Loops {
    /// True when a question is one of ours that came back.
    pub(super) fn comes_back(&self, name: &Name, record_type: RecordType) -> bool {
        if record_type != RecordType::HINFO {
            return false;
        }
        let sent = lock(&self.sent);
        let seen = sent.get(&name.to_lowercase());
        seen.inspect(|seen| seen.store(true, Ordering::Relaxed))
            .is_some()
    }

    /// Looks at every server of every block that wants it; how many lead back here.
    pub(super) async fn look(&self, blocks: &Blocks) -> i64 {
        let mut looks = Vec::new();
        for block in blocks.all.iter().filter(|block| block.config.finds_loops) {
            for forward in &block.forwards {
                let upstreams = forward.upstreams();
                let unknown: Vec<_> = upstreams
                    .iter()
                    .filter(|u| !u.leads_on())
                    .cloned()
                    .collect();
                let look = |upstream: Arc<Upstream>| async move {
                    self.look_at(block, forward, &upstream).await
                };
                looks.extend(unknown.into_iter().map(look));
            }
        }
        let found = futures::future::join_all(looks).await;
        found.into_iter().map(i64::from).sum()
    }

    async fn look_at(&self, block: &Block, forward: &Forwarder, upstream: &Upstream) -> bool {
        let zone = &forward.options.from;
        let label = |_| rand::rng().random::<u64>().to_string();
        let labels: Vec<String> = (0..2).map(label).collect();
        let name = Name::from_labels(labels.iter().map(String::as_bytes)).map(|mut name| {
            name.set_fqdn(false);
            name.append_domain(zone)
        });
        let Ok(Ok(name)) = name else { return false };
        let mut query = Message::new(rand::rng().random(), MessageType::Query, OpCode::Query);
        query.metadata.recursion_desired = true;
        query.add_query(Query::query(name.clone(), RecordType::HINFO));
        let Ok(query) = query.to_vec() else {
            return false;
        };
        let seen = Arc::new(AtomicBool::new(false));
        lock(&self.sent).insert(name.to_lowercase(), Arc::clone(&seen));
        let answered = forward.poke(upstream, &query).await;
        lock(&self.sent).remove(&name.to_lowercase());
        let loops = seen.load(Ordering::Relaxed);
        if upstream.set_loops(loops, answered) {
            let (place, address) = (&block.config.place, upstream.server.address);
            let at = format!("{}:{}", place.file, place.line);
            if loops {
                tracing::warn!(%address, at, "an upstream DNS server leads back here and is not asked any more: name another one");
            } else {
                tracing::info!(%address, at, "an upstream DNS server does not lead back here any more");
            }
        }
        loops
    }
}
