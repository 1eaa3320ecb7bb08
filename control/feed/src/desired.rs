//! One node's desired state straight from a list of Kubernetes objects: what a fresh index would send.

use control_api::desired::DesiredState;
use control_api::v1::{ClusterConfig, Object, Snapshot};
use prost::Message;
use serde_json::Value;

use crate::{Index, Kind};

/// What a node holds in a cluster of these objects. Those of kinds that the feed does not read are passed over.
#[must_use]
pub fn desired_state<'a>(
    config: ClusterConfig,
    objects: impl IntoIterator<Item = &'a Value>,
    node: &str,
    runs_pods: bool,
) -> DesiredState {
    let mut index = Index::new(config);
    index.set_quiet(true);
    for object in objects {
        if let Some(kind) = Kind::of(object) {
            index.upsert(kind, object, 1);
        }
    }
    index.desired_state(node, runs_pods, 1)
}

impl Index {
    /// What a node holds after a snapshot at this revision.
    #[must_use]
    pub fn desired_state(&self, node: &str, runs_pods: bool, revision: u64) -> DesiredState {
        let objects = self.snapshot(node, runs_pods).into_iter();
        DesiredState::from_snapshot([Snapshot {
            revision,
            first: true,
            last: true,
            // They were encoded by the index.
            objects: objects.filter_map(|o| Object::decode(o).ok()).collect(),
            ..Snapshot::default()
        }])
    }
}
