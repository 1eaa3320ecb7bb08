//! Kubernetes objects in, one node's desired state out.
//!
//! The index is pure: it takes objects and returns snapshots and deltas. Watch sources feed it; they live with the
//! process that has a clock and a network.

mod election;
pub mod frame;
mod index;
mod pod;
pub mod quantity;
#[cfg(test)]
mod tests;
mod translate;
mod volume;

pub use election::{ADDRESSES_CONDITION, LOAD_BALANCER_CLASS};
pub use index::{Effects, Index, Kind, Op};
