//! The cluster's side of Weir: store, API server, scheduler, controllers and the node feed server.

pub mod apiserver;
pub mod client;
pub mod config;
pub mod controllers;
pub mod pki;
pub mod run;
pub mod scheduler;
pub mod serve;
pub mod status;
pub mod store;
