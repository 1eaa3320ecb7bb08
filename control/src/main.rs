//! `weir-control`: the control plane in one process.
fn main() {}
