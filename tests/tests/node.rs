//! Node tier: the CNI plugin, the agent and its routes on real network namespaces.
#![allow(clippy::unwrap_used, reason = "a test may stop at any surprise")]
#![allow(
    clippy::print_stdout,
    reason = "tests say what they skip and what they measured"
)]

#[path = "node/agents.rs"]
mod agents;
#[path = "node/announce.rs"]
mod announce;
#[path = "node/cases.rs"]
mod cases;
#[path = "node/chains.rs"]
mod chains;
#[path = "node/churn.rs"]
mod churn;
#[path = "node/clients.rs"]
mod clients;
#[path = "node/cluster.rs"]
mod cluster;
#[path = "node/cni.rs"]
mod cni;
#[path = "node/domains.rs"]
mod domains;
#[path = "node/faults.rs"]
mod faults;
#[path = "node/feed.rs"]
mod feed;
#[path = "node/overlay.rs"]
mod overlay;
#[path = "node/policies.rs"]
mod policies;
#[path = "node/support.rs"]
mod support;
