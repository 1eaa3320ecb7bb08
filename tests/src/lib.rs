//! Topology builder, case runner and the test tiers that need more than one room.

pub mod actor;
pub mod cases;
pub mod prog;
pub mod topology;
