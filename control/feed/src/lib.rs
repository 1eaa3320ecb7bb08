//! Kubernetes objects in, one node's desired state out.
//!
//! The index is pure: it takes objects and returns snapshots and deltas. Watch sources feed it; they live with the
//! process that has a clock and a network.

mod desired;
mod effects;
mod election;
pub mod frame;
mod index;
mod kind;
mod pod;
mod policy;
pub mod quantity;
#[cfg(test)]
mod tests;
mod translate;
mod volume;

pub use desired::desired_state;
pub use effects::{Effects, Op};
pub use election::{ADDRESSES_CONDITION, LOAD_BALANCER_CLASS};
pub use index::Index;
pub use kind::Kind;
pub use policy::{STAGED_ANNOTATION, is_staged, unknown_parts, unknown_staged};
