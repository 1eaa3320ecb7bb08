//! Node tier: the CNI plugin, the agent and its routes on real network namespaces.
#![allow(clippy::unwrap_used, reason = "a test may stop at any surprise")]
#![allow(
    clippy::print_stdout,
    reason = "tests say what they skip and what they measured"
)]

#[path = "node/cni.rs"]
mod cni;
#[path = "node/support.rs"]
mod support;
