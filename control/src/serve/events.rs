//! Event reports: core/v1 Events, repeated ones counted on one object.

use control_api::v1::{EventReport, EventReports};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tonic::Status;

use super::{Feed, api_status, time_text};
use crate::client::{PatchKind, resources};

/// More events in one report are dropped: a node must not be able to flood the store.
const MAX_EVENTS: usize = 256;
/// core/v1 limits a note to this.
const MAX_MESSAGE_BYTES: usize = 1024;
const COMPONENT: &str = "weir-agent";

impl Feed {
    pub(super) async fn report_events(&self, reports: EventReports) -> Result<(), Status> {
        for event in reports.events.iter().take(MAX_EVENTS) {
            self.record(&reports.node_name, event)
                .await
                .map_err(|error| api_status("record an event", &error))?;
        }
        Ok(())
    }

    async fn record(&self, node: &str, event: &EventReport) -> Result<(), crate::status::ApiError> {
        let namespace = if event.namespace.is_empty() {
            "default"
        } else {
            event.namespace.as_str()
        };
        let name = event_name(node, event);
        let at = time_text(event.at_us);
        match self.client.get(resources::EVENTS, namespace, &name).await {
            Ok(existing) => {
                let count = existing["count"].as_i64().unwrap_or(1).saturating_add(1);
                let patch = json!({"count": count, "lastTimestamp": at});
                let patched = self
                    .client
                    .patch(
                        resources::EVENTS,
                        namespace,
                        &name,
                        "",
                        PatchKind::Merge,
                        patch,
                    )
                    .await;
                patched.map(|_| ())
            }
            Err(error) if error.is_not_found() => {
                let object = event_object(node, namespace, &name, &at, event);
                match self
                    .client
                    .create(resources::EVENTS, namespace, object)
                    .await
                {
                    // The namespace is going away: its events have no place any more.
                    Err(error) if error.code == 403 || error.is_not_found() => Ok(()),
                    created => created.map(|_| ()),
                }
            }
            Err(error) => Err(error),
        }
    }
}

/// Equal events have equal names: repetition is counted without any memory in this process.
fn event_name(node: &str, event: &EventReport) -> String {
    let mut hash = Sha256::new();
    for part in [
        node,
        &event.kind,
        &event.uid,
        &event.r#type,
        &event.reason,
        &event.message,
    ] {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    let digest = hash.finalize();
    let suffix: String = digest
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("{}.{suffix}", event.name)
}

fn event_object(node: &str, namespace: &str, name: &str, at: &str, event: &EventReport) -> Value {
    let mut end = event.message.len().min(MAX_MESSAGE_BYTES);
    while !event.message.is_char_boundary(end) {
        end -= 1;
    }
    let version = match event.kind.as_str() {
        "NetworkPolicy" => "networking.k8s.io/v1",
        "ClusterNetworkPolicy" => "policy.networking.k8s.io/v1alpha2",
        _ => "v1",
    };
    let mut involved = json!({
        "apiVersion": version, "kind": event.kind, "name": event.name, "uid": event.uid,
    });
    if !event.namespace.is_empty() {
        involved["namespace"] = json!(event.namespace);
    }
    json!({
        "apiVersion": "v1", "kind": "Event",
        "metadata": {"name": name, "namespace": namespace},
        "involvedObject": involved,
        "type": event.r#type,
        "reason": event.reason,
        "message": &event.message[..end],
        "firstTimestamp": at, "lastTimestamp": at, "count": 1,
        "source": {"component": COMPONENT, "host": node},
        "reportingComponent": COMPONENT, "reportingInstance": node,
    })
}
