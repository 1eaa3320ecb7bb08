//! Mirrors Endpoints that people write by hand for Services without a selector: every reader of EndpointSlices finds
//! them.

use std::sync::Arc;

use serde_json::Value;

use super::core::{self, MIRRORED_BY, Plan};
use super::{carry_out, managed_service, selector};
use crate::client::resources;
use crate::controllers::runtime::informer::{Index, Store};
use crate::controllers::runtime::object::{Key, Object};
use crate::controllers::runtime::session::{Context, Session};
use crate::controllers::runtime::worker::{Again, Controller, KeyQueue, enqueue_changes};
use crate::status::ApiError;

const SKIP_LABEL: &str = "endpointslice.kubernetes.io/skip-mirror";
/// Endpoints that are no endpoints: an old way to elect a leader.
const LEADER_ANNOTATION: &str = "control-plane.alpha.kubernetes.io/leader";

/// See the module documentation.
pub(in crate::controllers) struct Mirrors {
    services: Arc<Store>,
    endpoints: Arc<Store>,
    slices: Arc<Store>,
}

impl Mirrors {
    pub(in crate::controllers) fn new(context: &Context, queue: &KeyQueue) -> Self {
        enqueue_changes(context, resources::SERVICES, queue);
        enqueue_changes(context, resources::ENDPOINTS, queue);
        let slices = context.informers.store(resources::ENDPOINT_SLICES);
        let by_slice = queue.clone();
        slices.subscribe(move |change| {
            let slice = change.object();
            if let Some(service) = managed_service(slice, MIRRORED_BY) {
                by_slice.add(Key::new(slice.namespace(), service));
            }
        });
        Self {
            services: context.informers.store(resources::SERVICES),
            endpoints: context.informers.store(resources::ENDPOINTS),
            slices,
        }
    }

    /// The Endpoints to mirror, if there are some.
    fn wanted(&self, key: &Key) -> Option<Arc<Value>> {
        let service = self.services.get(key)?;
        let endpoints = self.endpoints.get(key)?;
        let by_hand = selector(&service).is_empty()
            && service.text(&["spec", "type"]) != "ExternalName"
            && endpoints.label(SKIP_LABEL) != Some("true")
            && endpoints.annotation(LEADER_ANNOTATION).is_none()
            && !endpoints.is_deleting();
        by_hand.then_some(endpoints)
    }
}

impl Controller for Mirrors {
    const NAME: &'static str = "endpointslicemirroring";
    const WORKERS: usize = 2;

    async fn reconcile(&self, key: &Key, session: &Session<'_>) -> Result<Again, ApiError> {
        let mut existing = self.slices.by(Index::Service, &key.to_string());
        existing.retain(|slice| managed_service(slice, MIRRORED_BY).is_some());
        match self.wanted(key) {
            Some(endpoints) => {
                let plan = core::mirror(&endpoints, &existing);
                carry_out(plan, &endpoints, "Endpoints", session).await?;
            }
            None if existing.is_empty() => {}
            None => {
                let plan = Plan {
                    delete: existing,
                    ..Plan::default()
                };
                carry_out(plan, &Value::Null, "Endpoints", session).await?;
            }
        }
        Ok(None)
    }
}
