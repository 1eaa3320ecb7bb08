//! The node feed protocol and the desired-state model of one node.
//!
//! Pure: no I/O, no clock. Nothing here knows Kubernetes types; `control-feed` translates them.

pub mod desired;
pub mod name_map;
pub mod slice;
pub mod slices;

/// Protocol buffers messages and services of `weir.node.v1`.
#[allow(
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::unwrap_used,
    clippy::too_many_lines,
    unreachable_pub,
    missing_debug_implementations,
    reason = "generated code"
)]
pub mod v1 {
    tonic::include_proto!("weir.node.v1");
}
