//! The questions about pods and nodes that controllers ask in the scheduler's words.

use std::sync::Arc;

use serde_json::Value;

pub(crate) use super::filters::{tolerates, toleration_covers};
use super::pod::Pod;

/// `nodeSelector` and required node affinity of a pod against a node.
pub(crate) fn accepts_node(pod: &Value, node: &Value) -> bool {
    Pod::read(Arc::new(pod.clone())).accepts(node)
}
