//! The pod runner (whole-cluster mode): does a kubelet's job against a container runtime over CRI.
//!
//! Level-triggered: what the runtime has is adopted at start, by labels; each pod's worker compares spec and view and
//! takes the next step. Pods that no snapshot lists are stopped and removed, never before the first snapshot. The
//! decisions are in the pure files (`sync`, `status`, `sandbox`, `container`, `env`, `files`); the edges are `cri`,
//! `ops`, `volumes`, `probes`. Networking is not done here: the runtime calls the CNI plugin.

mod backoff;
mod container;
mod cri;
mod downward;
mod env;
#[cfg(test)]
mod fake;
mod feed_source;
mod files;
mod hooks;
mod host;
mod http_get;
mod list;
mod logs;
mod memory;
mod node;
mod node_api;
mod ops;
mod probes;
mod report;
mod runner;
mod sandbox;
mod shared;
mod status;
mod sync;
mod view;
mod volumes;
mod worker;

pub use feed_source::start;
pub use host::NodeReportFields;
pub use node_api::NodeApiError;
pub use report::{ControlPlane, ReportFailure};
pub use runner::{PodRunner, StartError, Update, start_with};
