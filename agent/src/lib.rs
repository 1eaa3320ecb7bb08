//! The node's side of Weir: desired state in; maps, routes, links, DNS answers and pods out.
//!
//! Flow: `feed` -> `compile` -> `plan` -> `kernel` / `netlink` / `dns` / `pods`. Observed state (`observe`) never
//! becomes desired state.

pub mod announce;
pub mod cni_api;
pub mod compile;
pub mod config;
pub mod dns;
pub mod feed;
pub mod fragments;
pub mod health_check;
pub mod kernel;
pub mod netlink;
pub mod observe;
pub mod plan;
pub mod pods;
pub mod policy;
