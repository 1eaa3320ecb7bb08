//! Wanted against present: ordered operations. Pure.

pub mod policy;
pub mod routes;
pub mod services;
