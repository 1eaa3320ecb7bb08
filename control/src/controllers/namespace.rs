//! Furnishes namespaces with what every pod needs, and empties those that are being deleted.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::runtime::informer::Store;
use super::runtime::object::{Key, Object, set_condition};
use super::runtime::session::{Context, Session};
use super::runtime::worker::{Again, Controller, KeyQueue, enqueue_changes, tolerate_change};
use crate::client::{CatalogEntry, DeleteOptions, ObjectClient, Propagation, resources};
use crate::status::ApiError;

const FINALIZER: &str = "kubernetes";
const ACCOUNT: &str = "default";
const ROOT_CA: &str = "kube-root-ca.crt";
/// Removals wake the controller; this is for what disappears without one.
const LOOK_AGAIN: Duration = Duration::from_secs(2);

pub(super) struct Namespaces {
    client: Arc<dyn ObjectClient>,
    namespaces: Arc<Store>,
    accounts: Arc<Store>,
    config_maps: Arc<Store>,
    ca_certificate_pem: String,
}

impl Namespaces {
    pub(super) fn new(context: &Context, queue: &KeyQueue, ca_certificate_pem: String) -> Self {
        enqueue_changes(context, resources::NAMESPACES, queue);
        for (resource, name) in [
            (resources::SERVICE_ACCOUNTS, ACCOUNT),
            (resources::CONFIG_MAPS, ROOT_CA),
        ] {
            let queue = queue.clone();
            context.informers.store(resource).subscribe(move |change| {
                // Only what disappears or differs needs work; what is there from the start is looked at anyway.
                let object = change.object();
                if object.name() == name && change.old.is_some() {
                    queue.add(Key::new("", object.namespace()));
                }
            });
        }
        Self {
            client: context.client.clone(),
            namespaces: context.informers.store(resources::NAMESPACES),
            accounts: context.informers.store(resources::SERVICE_ACCOUNTS),
            config_maps: context.informers.store(resources::CONFIG_MAPS),
            ca_certificate_pem,
        }
    }

    async fn furnish(&self, namespace: &str, session: &Session<'_>) -> Result<(), ApiError> {
        if self.accounts.get(&Key::new(namespace, ACCOUNT)).is_none() {
            let account = json!({
                "apiVersion": "v1", "kind": "ServiceAccount",
                "metadata": {"name": ACCOUNT, "namespace": namespace},
            });
            tolerate_furnished(session.create(resources::SERVICE_ACCOUNTS, account).await)?;
        }
        let data = json!({"ca.crt": self.ca_certificate_pem});
        let key = Key::new(namespace, ROOT_CA);
        match self.config_maps.get(&key) {
            None => {
                let map = json!({
                    "apiVersion": "v1", "kind": "ConfigMap",
                    "metadata": {
                        "name": ROOT_CA, "namespace": namespace,
                        "annotations": {"kubernetes.io/description":
                            "Contains a CA bundle that can be used to verify the kube-apiserver."},
                    },
                    "data": data,
                });
                tolerate_furnished(session.create(resources::CONFIG_MAPS, map).await)
            }
            Some(map) if map.at(&["data"]) != Some(&data) => {
                let mut repaired = map.as_ref().clone();
                super::runtime::object::set(&mut repaired, &["data"], data);
                tolerate_change(session.update(resources::CONFIG_MAPS, repaired).await)?;
                Ok(())
            }
            Some(_) => Ok(()),
        }
    }

    /// Deletes everything in it; tells what is left. Pods go first and alone: a policy, a Secret or a Service must not
    /// be taken from under one that still runs (KEP-5080).
    async fn empty(&self, namespace: &str) -> Result<Leftovers, ApiError> {
        let mut left = Leftovers::default();
        let catalog = self.client.catalog();
        let (pods, others): (Vec<&CatalogEntry>, Vec<&CatalogEntry>) = catalog
            .iter()
            .filter(|entry| entry.namespaced)
            .partition(|entry| entry.resource == resources::PODS);
        for entry in pods {
            self.empty_of(entry, namespace, &mut left).await?;
        }
        if !left.resources.is_empty() {
            return Ok(left);
        }
        for entry in others {
            self.empty_of(entry, namespace, &mut left).await?;
        }
        Ok(left)
    }

    async fn empty_of(
        &self,
        entry: &CatalogEntry,
        namespace: &str,
        left: &mut Leftovers,
    ) -> Result<(), ApiError> {
        let list = match self.client.list(entry.resource, namespace).await {
            Ok(list) => list,
            // No longer served, so nothing is stored under it.
            Err(e) if e.is_not_found() || e.code == 405 => return Ok(()),
            Err(e) => return Err(e),
        };
        for object in list.items {
            if !object.is_deleting() {
                let options = DeleteOptions {
                    uid: Some(object.uid().to_owned()),
                    propagation: Some(Propagation::Background),
                    ..DeleteOptions::default()
                };
                let r = entry.resource;
                match self
                    .client
                    .delete(r, namespace, object.name(), options)
                    .await
                {
                    Ok(()) => {}
                    Err(e) if e.is_not_found() || e.is_conflict() => {}
                    Err(e) => return Err(e),
                }
                // Without finalizers and grace it is gone already.
                match self.client.get(r, namespace, object.name()).await {
                    Err(e) if e.is_not_found() => continue,
                    _ => {}
                }
            }
            left.add(entry, &object);
        }
        Ok(())
    }

    async fn terminate(&self, namespace: &Value, session: &Session<'_>) -> Result<Again, ApiError> {
        let finalizers = namespace.items(&["spec", "finalizers"]);
        if !finalizers.iter().any(|f| f.as_str() == Some(FINALIZER)) {
            return Ok(None);
        }
        let left = self.empty(namespace.name()).await?;
        if !left.resources.is_empty() {
            let mut status = namespace
                .at(&["status"])
                .cloned()
                .unwrap_or_else(|| json!({}));
            left.describe(&mut status, Timestamp::now());
            if namespace.at(&["status"]) != Some(&status) {
                let r = resources::NAMESPACES;
                tolerate_change(session.replace_status(r, namespace, status).await)?;
            }
            return Ok(Some(LOOK_AGAIN));
        }
        let others: Vec<&Value> = finalizers
            .iter()
            .filter(|f| f.as_str() != Some(FINALIZER))
            .collect();
        let patch = json!({"spec": {"finalizers": others}});
        let key = namespace.key();
        // Its end comes back as a deletion, not as a revision of the object, so the session must not wait for one.
        let patched = self.client.patch(
            resources::NAMESPACES,
            "",
            &key.name,
            "finalize",
            crate::client::PatchKind::Merge,
            patch,
        );
        tolerate_change(patched.await)?;
        Ok(None)
    }
}

impl Controller for Namespaces {
    const NAME: &'static str = "namespace";
    const WORKERS: usize = 4;

    async fn reconcile(&self, key: &Key, session: &Session<'_>) -> Result<Again, ApiError> {
        let Some(namespace) = self.namespaces.get(key) else {
            return Ok(None);
        };
        if namespace.is_deleting() {
            return self.terminate(&namespace, session).await;
        }
        self.furnish(&key.name, session).await?;
        Ok(None)
    }
}

/// Somebody else made it meanwhile, or the namespace began to go: both are fine.
fn tolerate_furnished(result: Result<Arc<Value>, ApiError>) -> Result<(), ApiError> {
    match result {
        Err(e) if !(e.is_already_exists() || e.is_not_found() || e.code == 403) => Err(e),
        _ => Ok(()),
    }
}

/// What a terminating namespace still holds.
#[derive(Debug, Default)]
struct Leftovers {
    resources: BTreeMap<String, usize>,
    finalizers: BTreeMap<String, usize>,
}

impl Leftovers {
    fn add(&mut self, entry: &CatalogEntry, object: &Value) {
        let resource = match entry.resource.group {
            "" => format!("{}.", entry.resource.plural),
            group => format!("{}.{group}", entry.resource.plural),
        };
        *self.resources.entry(resource).or_insert(0) += 1;
        for finalizer in object
            .items(&["metadata", "finalizers"])
            .iter()
            .filter_map(Value::as_str)
        {
            *self.finalizers.entry(finalizer.to_owned()).or_insert(0) += 1;
        }
    }

    fn describe(&self, status: &mut Value, now: Timestamp) {
        let list = |counts: &BTreeMap<String, usize>, what: &str| {
            let parts: Vec<String> = counts
                .iter()
                .map(|(name, n)| format!("{name} {what} {n} resource instances"))
                .collect();
            parts.join(", ")
        };
        let done = [
            (
                "NamespaceDeletionDiscoveryFailure",
                "ResourcesDiscovered",
                "All resources successfully discovered",
            ),
            (
                "NamespaceDeletionGroupVersionParsingFailure",
                "ParsedGroupVersions",
                "All legacy kube types successfully parsed",
            ),
            (
                "NamespaceDeletionContentFailure",
                "ContentDeleted",
                "All content successfully deleted, may be waiting on finalization",
            ),
        ];
        for (kind, reason, message) in done {
            set_condition(status, kind, "False", reason, message, now);
        }
        let message = format!(
            "Some resources are remaining: {}",
            list(&self.resources, "has")
        );
        let kind = "NamespaceContentRemaining";
        set_condition(status, kind, "True", "SomeResourcesRemain", &message, now);
        let kind = "NamespaceFinalizersRemaining";
        if self.finalizers.is_empty() {
            let message = "All content-preserving finalizers finished";
            set_condition(
                status,
                kind,
                "False",
                "ContentHasNoFinalizers",
                message,
                now,
            );
        } else {
            let message = format!(
                "Some content in the namespace has finalizers remaining: {}",
                list(&self.finalizers, "in")
            );
            set_condition(status, kind, "True", "SomeFinalizersRemain", &message, now);
        }
    }
}
