//! Desired state to wanted map entries, routes and DNS zone. Pure.

pub mod node_addresses;
pub mod peers;
pub mod policy;
pub mod routes;
pub mod services;
pub mod surroundings;
