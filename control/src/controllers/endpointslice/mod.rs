//! Publishes the pods that a Service selects as EndpointSlices.

mod core;
mod mirror;

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::Value;

pub(super) use self::mirror::Mirrors;

use self::core::{MANAGED_BY, MANAGED_BY_LABEL, Plan, ZONE_LABEL, plan};
use super::runtime::informer::{Change, Index, SERVICE_NAME_LABEL, Store};
use super::runtime::object::{Key, Object};
use super::runtime::selector::Selector;
use super::runtime::session::{Context, Session};
use super::runtime::worker::{Again, Controller, KeyQueue, enqueue_changes, tolerate_change};
use crate::client::{DeleteOptions, resources};
use crate::status::ApiError;

#[derive(Debug)]
pub(super) struct EndpointSlices {
    services: Arc<Store>,
    pods: Arc<Store>,
    nodes: Arc<Store>,
    slices: Arc<Store>,
}

impl EndpointSlices {
    pub(super) fn new(context: &Context, queue: &KeyQueue) -> Self {
        let services = context.informers.store(resources::SERVICES);
        let pods = context.informers.store(resources::PODS);
        let nodes = context.informers.store(resources::NODES);
        let slices = context.informers.store(resources::ENDPOINT_SLICES);
        enqueue_changes(context, resources::SERVICES, queue);
        let (by_slice, by_pod, by_node) = (queue.clone(), queue.clone(), queue.clone());
        slices.subscribe(move |change| {
            let slice = change.object();
            if let Some(service) = managed_service(slice, MANAGED_BY) {
                by_slice.add(Key::new(slice.namespace(), service));
            }
        });
        let lookup = services.clone();
        pods.subscribe(move |change| {
            if !matters(change) {
                return;
            }
            for service in lookup.in_namespace(change.object().namespace()) {
                let selector = selector(&service);
                let selects = |pod: &Arc<Value>| selector.matches(pod.labels());
                if !selector.is_empty() && change.old.iter().chain(&change.new).any(selects) {
                    by_pod.add(service.key());
                }
            }
        });
        let lookup = services.clone();
        nodes.subscribe(move |change| {
            let zone = |node: &Option<Arc<Value>>| {
                node.as_ref()
                    .and_then(|n| n.label(ZONE_LABEL).map(str::to_owned))
            };
            if zone(&change.old) != zone(&change.new) {
                lookup
                    .all()
                    .iter()
                    .for_each(|service| by_node.add(service.key()));
            }
        });
        Self {
            services,
            pods,
            nodes,
            slices,
        }
    }

    fn zones(&self) -> HashMap<String, String> {
        let nodes = self.nodes.all();
        let zone = |n: &Arc<Value>| Some((n.name().to_owned(), n.label(ZONE_LABEL)?.to_owned()));
        nodes.iter().filter_map(zone).collect()
    }

    /// The slices of a Service that this controller made.
    fn managed(&self, key: &Key) -> Vec<Arc<Value>> {
        let mut slices = self.slices.by(Index::Service, &key.to_string());
        slices.retain(|slice| managed_service(slice, MANAGED_BY).is_some());
        slices
    }
}

impl Controller for EndpointSlices {
    const NAME: &'static str = "endpointslice";
    const WORKERS: usize = 4;

    async fn reconcile(&self, key: &Key, session: &Session<'_>) -> Result<Again, ApiError> {
        let existing = self.managed(key);
        let r = resources::ENDPOINT_SLICES;
        let service = self.services.get(key);
        let Some(service) = service.filter(|s| s.text(&["spec", "type"]) != "ExternalName") else {
            for slice in &existing {
                session.delete(r, slice, DeleteOptions::default()).await?;
            }
            return Ok(None);
        };
        let selector = selector(&service);
        // Without a selector somebody else publishes the endpoints. A Service that goes takes its slices with it.
        if selector.is_empty() || service.is_deleting() {
            return Ok(None);
        }
        let mut pods = self.pods.in_namespace(&key.namespace);
        pods.retain(|pod| selector.matches(pod.labels()));
        let plan = plan(&service, &pods, &self.zones(), &existing);
        carry_out(plan, &service, "Service", session).await?;
        Ok(None)
    }
}

/// Writes a plan. `owner` is who gets to know what failed.
async fn carry_out(
    plan: Plan,
    owner: &Value,
    kind: &str,
    session: &Session<'_>,
) -> Result<(), ApiError> {
    let r = resources::ENDPOINT_SLICES;
    // Additions before removals: an endpoint that moves between slices is never missing.
    for slice in plan.create {
        if let Err(e) = session.create(r, slice).await {
            let message = format!(
                "Failed to create EndpointSlice for {kind} {}: {e}",
                owner.key()
            );
            let recorder = session.recorder().named("endpoint-slice-controller");
            recorder.warning((owner, "v1", kind), "FailedToCreateEndpointSlices", message);
            return Err(e);
        }
    }
    for slice in plan.update {
        tolerate_change(session.update(r, slice).await)?;
    }
    for slice in &plan.delete {
        session.delete(r, slice, DeleteOptions::default()).await?;
    }
    Ok(())
}

fn selector(service: &Value) -> Selector {
    Selector::from_map(service.fields(&["spec", "selector"]))
}

fn managed_service<'a>(slice: &'a Value, manager: &str) -> Option<&'a str> {
    slice
        .label(SERVICE_NAME_LABEL)
        .filter(|_| slice.label(MANAGED_BY_LABEL) == Some(manager))
}

/// Whether a change of a pod can change an endpoint.
fn matters(change: &Change) -> bool {
    let (Some(old), Some(new)) = (&change.old, &change.new) else {
        return true;
    };
    let paths: [&[&str]; 8] = [
        &["metadata", "labels"],
        &["metadata", "deletionTimestamp"],
        &["metadata", "uid"],
        &["spec", "nodeName"],
        &["status", "phase"],
        &["status", "podIP"],
        &["status", "podIPs"],
        &["spec", "hostname"],
    ];
    let ready = super::pods::is_ready;
    ready(old) != ready(new) || paths.iter().any(|path| old.at(path) != new.at(path))
}

#[cfg(test)]
mod tests;
