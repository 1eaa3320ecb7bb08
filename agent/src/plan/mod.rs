//! Wanted against present: ordered operations. Pure.

pub mod routes;
pub mod services;
