//! `weir-agent`: the node's daemon.
fn main() {}
