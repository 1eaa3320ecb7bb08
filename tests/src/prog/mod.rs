//! Running the eBPF programs on given packets: packets as text-book values, and a node made of links that nobody uses.

pub mod packet;
pub mod world;
