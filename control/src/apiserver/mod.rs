//! Kubernetes REST over the store: discovery, decoding, validation, patch, watch, authentication.

pub mod codec;
pub mod defaults;
pub mod openapi;
pub mod patch;
pub mod registry;
pub mod schema;
pub mod tables;
pub mod validation;
