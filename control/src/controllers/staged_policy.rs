//! Tells of policies that are enforced although they have the annotation that stages: its value is of no meaning. The API
//! server takes no such policy, but its store may have one from before it refused them.

use std::sync::Arc;

use control_feed::{STAGED_ANNOTATION, unknown_staged};

use super::runtime::informer::Store;
use super::runtime::object::{Key, Object};
use super::runtime::session::{Context, Session};
use super::runtime::worker::{Again, Controller, KeyQueue, enqueue_changes};
use crate::client::resources;
use crate::status::ApiError;

const REASON: &str = "NotStaged";
/// Characters of a value that a message repeats.
const MAX_SHOWN: usize = 40;

#[derive(Debug)]
pub(super) struct StagedPolicies {
    namespaced: Arc<Store>,
    cluster: Arc<Store>,
}

impl StagedPolicies {
    pub(super) fn new(context: &Context, queue: &KeyQueue) -> Self {
        let store = |resource| {
            enqueue_changes(context, resource, queue);
            context.informers.store(resource)
        };
        Self {
            namespaced: store(resources::NETWORK_POLICIES),
            cluster: store(resources::CLUSTER_NETWORK_POLICIES),
        }
    }
}

impl Controller for StagedPolicies {
    const NAME: &'static str = "stagedpolicy";
    const WORKERS: usize = 1;

    async fn reconcile(&self, key: &Key, session: &Session<'_>) -> Result<Again, ApiError> {
        let (store, api_version, kind) = if key.namespace.is_empty() {
            let version = "policy.networking.k8s.io/v1alpha2";
            (&self.cluster, version, "ClusterNetworkPolicy")
        } else {
            (&self.namespaced, "networking.k8s.io/v1", "NetworkPolicy")
        };
        let Some(policy) = store.get(key).filter(|policy| !policy.is_deleting()) else {
            return Ok(None);
        };
        if let Some(value) = unknown_staged(&policy) {
            let about = (&*policy, api_version, kind);
            session.recorder().warning(about, REASON, not_staged(value));
        }
        Ok(None)
    }
}

/// Why a policy with this value is enforced.
pub(super) fn not_staged(value: &str) -> String {
    let shown: String = value.chars().take(MAX_SHOWN).collect();
    format!(
        "the annotation {STAGED_ANNOTATION} is {shown:?}, which says nothing, so the policy is enforced: write \"true\" to stage it"
    )
}
