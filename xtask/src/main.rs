//! The developer and user door: every task is a `cargo xtask` command.
fn main() {}
