//! Running the eBPF programs on given packets: packets as text-book values, a node made of links that nobody uses, and
//! nodes with pods whose sockets are real.

pub mod cgroup;
pub mod frame;
pub mod nodes;
pub mod packet;
pub mod policies;
pub mod sctp;
pub mod wire;
pub mod world;
