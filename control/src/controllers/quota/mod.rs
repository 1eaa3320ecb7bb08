//! Writes into every ResourceQuota what its namespace uses.

mod usage;

use std::sync::Arc;

use serde_json::{Value, json};

use self::usage::Usage;
use super::runtime::informer::Store;
use super::runtime::object::{Key, Object, set};
use super::runtime::quantity::milli;
use super::runtime::session::{Context, Session};
use super::runtime::worker::{Again, Controller, KeyQueue, enqueue_changes, tolerate_change};
use crate::client::{ObjectClient, resources};
use crate::status::ApiError;

/// Objects of the core group that a quota limits by their bare plural.
const PLAIN_COUNTS: [&str; 5] = [
    "secrets",
    "configmaps",
    "persistentvolumeclaims",
    "replicationcontrollers",
    "resourcequotas",
];

pub(super) struct Quotas {
    client: Arc<dyn ObjectClient>,
    quotas: Arc<Store>,
    pods: Arc<Store>,
    services: Arc<Store>,
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
            pods: context.informers.store(resources::PODS),
            services: context.informers.store(resources::SERVICES),
        }
    }

    async fn usage(&self, quota: &Value) -> Result<Usage, ApiError> {
        let namespace = quota.namespace();
        let mut usage = usage::of_pods(&self.pods.in_namespace(namespace), quota);
        usage.extend(usage::of_services(&self.services.in_namespace(namespace)));
        for name in quota
            .fields(&["spec", "hard"])
            .into_iter()
            .flat_map(|h| h.keys())
        {
            if let Some(count) = self.count(namespace, name).await? {
                usage.insert(name.clone(), count);
            }
        }
        Ok(usage)
    }

    /// The number of objects, or of bytes claimed, under a name that pods and Services do not cover.
    async fn count(&self, namespace: &str, name: &str) -> Result<Option<i128>, ApiError> {
        let claimed = name == "requests.storage";
        let plural = match name.strip_prefix("count/") {
            Some(full) => full,
            None if PLAIN_COUNTS.contains(&name) => name,
            None if claimed => "persistentvolumeclaims",
            None => return Ok(None),
        };
        let (plural, group) = plural.split_once('.').unwrap_or((plural, ""));
        let catalog = self.client.catalog();
        let Some(entry) = catalog
            .iter()
            .find(|e| e.resource.plural == plural && e.resource.group == group && e.namespaced)
        else {
            return Ok(None);
        };
        let list = self.client.list(entry.resource, namespace).await?;
        if claimed {
            let path = ["spec", "resources", "requests", "storage"];
            let bytes = list.items.iter().filter_map(|c| milli(c.at(&path)?));
            return Ok(Some(bytes.map(i128::from).sum()));
        }
        Ok(Some(
            i128::try_from(list.items.len())
                .unwrap_or(i128::MAX)
                .saturating_mul(1000),
        ))
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
        let Some(quota) = self.quotas.get(key).filter(|q| !q.is_deleting()) else {
            return Ok(None);
        };
        let empty = serde_json::Map::new();
        let hard = quota.fields(&["spec", "hard"]).unwrap_or(&empty);
        let used = usage::used(hard, &self.usage(&quota).await?);
        let mut status = quota.at(&["status"]).cloned().unwrap_or_else(|| json!({}));
        set(&mut status, &["hard"], Value::Object(hard.clone()));
        set(&mut status, &["used"], Value::Object(used));
        if quota.at(&["status"]) != Some(&status) {
            let r = resources::RESOURCE_QUOTAS;
            tolerate_change(session.replace_status(r, &quota, status).await)?;
        }
        Ok(None)
    }
}
