//! What all pods of this node share.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use control_api::v1::{EventReport, PodSpec};

use super::cri::Runtime;
use super::list::Lister;
use super::node::NodeFacts;
use super::report::{ControlPlane, Outbox};
use super::view::Micros;

pub(crate) struct Shared {
    pub(crate) runtime: Arc<dyn Runtime>,
    pub(crate) lister: Lister,
    pub(crate) node: NodeFacts,
    pub(crate) control: Arc<dyn ControlPlane>,
    pub(crate) outbox: Arc<Outbox>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Severity {
    Normal,
    Warning,
}

impl Shared {
    /// Records an event on a pod.
    pub(crate) fn event(
        &self,
        spec: &PodSpec,
        severity: Severity,
        reason: &'static str,
        message: String,
    ) {
        self.outbox.event(EventReport {
            kind: "Pod".into(),
            namespace: spec.namespace.clone(),
            name: spec.name.clone(),
            uid: spec.uid.clone(),
            r#type: format!("{severity:?}"),
            reason: reason.into(),
            message,
            at_us: now_us(),
        });
    }
}

pub(crate) fn now_us() -> Micros {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    Micros::try_from(since.as_micros()).unwrap_or(Micros::MAX)
}
