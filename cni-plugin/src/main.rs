//! `weir-cni`: the CNI spec in, one call to the agent out.
fn main() {}
