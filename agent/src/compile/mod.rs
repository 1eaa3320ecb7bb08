//! Desired state to wanted map entries, routes and DNS zone. Pure.

pub mod routes;
pub mod services;
