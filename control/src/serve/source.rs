//! Watch sources of the hub: list, watch, and list again when a watch is lost.

use std::sync::Arc;
use std::time::Duration;

use control_feed::Kind;

use super::hub::Hub;
use super::now_us;
use crate::client::{EventKind, ObjectClient, Resource, resources};

const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(5);
/// How often a cluster without an optional kind is asked whether it has it now.
const ABSENT_PERIOD: Duration = Duration::from_secs(10);

pub(super) fn resource(kind: Kind) -> Resource {
    match kind {
        Kind::Namespace => resources::NAMESPACES,
        Kind::Node => resources::NODES,
        Kind::Service => resources::SERVICES,
        Kind::EndpointSlice => resources::ENDPOINT_SLICES,
        Kind::Pod => resources::PODS,
        Kind::ConfigMap => resources::CONFIG_MAPS,
        Kind::Secret => resources::SECRETS,
        Kind::NetworkPolicy => resources::NETWORK_POLICIES,
        Kind::ClusterNetworkPolicy => resources::CLUSTER_NETWORK_POLICIES,
    }
}

/// Keeps one kind of the hub's index current, for ever.
pub(super) async fn follow(client: Arc<dyn ObjectClient>, hub: Arc<Hub>, kind: Kind) {
    let mut retry = RETRY_FIRST;
    loop {
        match list_and_watch(&*client, &hub, kind).await {
            // The watch had worked: list again at once.
            Ok(()) => retry = RETRY_FIRST,
            Err(error) if kind.is_optional() && error.is_not_found() => {
                hub.absent(kind, now_us());
                tokio::time::sleep(ABSENT_PERIOD).await;
            }
            Err(error) => {
                tracing::warn!(?kind, %error, "list or watch for the node feed failed; retrying");
                tokio::time::sleep(retry).await;
                retry = (retry * 2).min(RETRY_MAX);
            }
        }
    }
}

async fn list_and_watch(
    client: &dyn ObjectClient,
    hub: &Hub,
    kind: Kind,
) -> Result<(), crate::status::ApiError> {
    let list = client.list(resource(kind), "").await?;
    hub.replace(
        kind,
        list.items.iter().map(|item| &**item),
        list.revision,
        now_us(),
    );
    let revision = list.revision;
    drop(list);
    let mut events = client.watch(resource(kind), revision).await?;
    while let Some(event) = events.recv().await {
        match event.kind {
            EventKind::Bookmark => hub.bookmark(kind, event.revision),
            change => hub.change(
                kind,
                change == EventKind::Deleted,
                &event.object,
                event.revision,
                event.committed_at_us,
            ),
        }
    }
    Ok(())
}
