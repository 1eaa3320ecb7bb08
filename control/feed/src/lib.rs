//! Kubernetes objects in, one node's desired state out.
//!
//! The index is pure: it takes objects and returns snapshots and deltas. Watch sources feed it.
