//! `weirctl`: the operator's tool.
fn main() {}
