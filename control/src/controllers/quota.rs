//! Writes into every ResourceQuota what its namespace uses.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::{Value, json};

use super::runtime::informer::Store;
use super::runtime::object::{Key, Object, set};
use super::runtime::session::{Context, Session};
use super::runtime::worker::{Again, Controller, KeyQueue, enqueue_changes, tolerate_change};
use crate::apiserver::admission::usage::{self, Usage};
use crate::client::{ObjectClient, resources};
use crate::status::ApiError;

pub(super) struct Quotas {
    client: Arc<dyn ObjectClient>,
    quotas: Arc<Store>,
}

impl Quotas {
    pub(super) fn new(context: &Context, queue: &KeyQueue) -> Self {
        enqueue_changes(context, resources::RESOURCE_QUOTAS, queue);
        let quotas = context.informers.store(resources::RESOURCE_QUOTAS);
        for resource in [resources::PODS, resources::SERVICES] {
            let notify = notifier(context, queue);
            context.informers.store(resource).subscribe(move |change| {
                let state = |o: &Arc<Value>| {
                    (
                        super::pods::is_finished(o),
                        o.text(&["status", "qosClass"]).to_owned(),
                    )
                };
                if let (Some(old), Some(new)) = (&change.old, &change.new)
                    && old.at(&["spec"]) == new.at(&["spec"])
                    && state(old) == state(new)
                {
                    return;
                }
                notify(change.object().namespace());
            });
        }
        Self {
            client: context.client.clone(),
            quotas,
        }
    }

    /// What the namespace uses of what the quota limits, as the store has it.
    async fn usage(&self, quota: &Value) -> Result<Usage, ApiError> {
        let hard = quota.fields(&["spec", "hard"]);
        let names = hard.into_iter().flat_map(|h| h.keys());
        let counted: BTreeSet<(&str, &str)> = names.map(|n| usage::counted(n)).collect();
        let catalog = self.client.catalog();
        let mut total = Usage::new();
        for (group, plural) in counted {
            let Some(entry) = catalog
                .iter()
                .find(|e| e.resource.plural == plural && e.resource.group == group && e.namespaced)
            else {
                continue;
            };
            let list = self.client.list(entry.resource, quota.namespace()).await?;
            for object in &list.items {
                usage::add(&mut total, usage::of(group, plural, object, quota));
            }
        }
        Ok(total)
    }
}

/// Adds the quotas of a namespace whose content changed.
pub(super) fn notifier(
    context: &Context,
    queue: &KeyQueue,
) -> impl Fn(&str) + Send + Sync + 'static {
    let quotas = context.informers.store(resources::RESOURCE_QUOTAS);
    let queue = queue.clone();
    move |namespace| {
        for quota in quotas.in_namespace(namespace) {
            queue.add(quota.key());
        }
    }
}

impl Controller for Quotas {
    const NAME: &'static str = "resourcequota";
    const WORKERS: usize = 2;

    async fn reconcile(&self, key: &Key, session: &Session<'_>) -> Result<Again, ApiError> {
        if self.quotas.get(key).is_none_or(|q| q.is_deleting()) {
            return Ok(None);
        }
        // Read before what it counts: a write that is charged meanwhile changes the quota, and this count is then refused.
        let r = resources::RESOURCE_QUOTAS;
        let quota = match self.client.get(r, &key.namespace, &key.name).await {
            Err(e) if e.is_not_found() => return Ok(None),
            quota => quota?,
        };
        let empty = serde_json::Map::new();
        let hard = quota.fields(&["spec", "hard"]).unwrap_or(&empty);
        let used = usage::used(hard, &self.usage(&quota).await?);
        let mut status = quota.at(&["status"]).cloned().unwrap_or_else(|| json!({}));
        set(&mut status, &["hard"], Value::Object(hard.clone()));
        set(&mut status, &["used"], Value::Object(used));
        if quota.at(&["status"]) != Some(&status) {
            tolerate_change(session.replace_status(r, &quota, status).await)?;
        }
        Ok(None)
    }
}
