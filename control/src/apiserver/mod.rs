//! Kubernetes REST over the store: discovery, decoding, validation, patch, watch, authentication.

pub mod admission;
pub mod api;
pub mod codec;
pub mod defaults;
pub mod http;
pub mod local;
pub mod logs;
pub mod object;
pub mod openapi;
pub mod patch;
pub mod registry;
pub mod schema;
pub mod selector;
pub mod tables;
pub mod tokens;
pub mod validation;
