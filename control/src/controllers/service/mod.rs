//! Load-balancer addresses of Services, from the pools in the ConfigMap `weir-system/load-balancer-pools`, and word about
//! Services that claim the same address and port.
//!
//! The status of a Service is the record of what it has; nothing else is stored. A condition says whether it has
//! addresses and, if not, why.

mod core;
mod frontends;
mod pools;
mod provider;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use control_feed::ADDRESSES_CONDITION;
use ipnetwork::IpNetwork;
use jiff::Timestamp;
use serde_json::{Value, json};

use self::core::Outcome;
pub(super) use self::frontends::Frontends;
use self::provider::{LoadBalancers, PoolProvider, external_ips, ingress};
use super::runtime::informer::Store;
use super::runtime::object::{Key, Object, set, set_condition};
use super::runtime::session::{Context, Session};
use super::runtime::worker::{Again, Controller, KeyQueue, enqueue_changes};
use crate::client::resources;
use crate::config::Network;
use crate::status::ApiError;

const POOLS_NAMESPACE: &str = "weir-system";
const POOLS_NAME: &str = "load-balancer-pools";
/// As cloud providers use it (KEP-980): the Service stays until its addresses are given back.
const FINALIZER: &str = "service.kubernetes.io/load-balancer-cleanup";
const ABOUT: (&str, &str) = ("v1", "Service");

/// See the module documentation.
pub(super) struct Services {
    services: Arc<Store>,
    nodes: Arc<Store>,
    config_maps: Arc<Store>,
    queue: KeyQueue,
    provider: PoolProvider,
    reserved: Vec<(IpNetwork, &'static str)>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The first work adopts what every Service has.
    adopted: bool,
    /// Without addresses that they want: looked at again when some become free.
    waiting: BTreeSet<Key>,
}

impl Services {
    pub(super) fn new(context: &Context, queue: &KeyQueue, network: &Network) -> Self {
        enqueue_changes(context, resources::SERVICES, queue);
        let config_maps = context.informers.store(resources::CONFIG_MAPS);
        let by_pools = queue.clone();
        config_maps.subscribe(move |change| {
            if change.object().key() == pools_key() {
                by_pools.add(pools_key());
            }
        });
        let nodes = context.informers.store(resources::NODES);
        let by_node = queue.clone();
        nodes.subscribe(move |change| {
            if change.old.as_deref().map(node_addresses)
                != change.new.as_deref().map(node_addresses)
            {
                by_node.add(change.object().key());
            }
        });
        let cidrs =
            |list: &[IpNetwork], what| list.iter().map(|net| (*net, what)).collect::<Vec<_>>();
        let mut reserved = cidrs(&network.service_cidrs, "cluster IPs");
        reserved.extend(cidrs(&network.pod_cidrs, "pods"));
        Self {
            services: context.informers.store(resources::SERVICES),
            nodes,
            config_maps,
            queue: queue.clone(),
            provider: PoolProvider::default(),
            reserved,
            state: Mutex::default(),
        }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Before anything is given: pools, addresses of nodes, and what Services have, older ones first.
    fn adopt_all(&self, session: &Session<'_>) {
        if std::mem::replace(&mut self.state().adopted, true) {
            return;
        }
        self.read_pools(session);
        for node in self.nodes.all() {
            self.provider
                .set_foreign(&node.key(), &node_addresses(&node));
        }
        let mut services = self.services.all();
        services.sort_by_key(|s| {
            (
                s.text(&["metadata", "creationTimestamp"]).to_owned(),
                s.key(),
            )
        });
        for service in services {
            if is_given(&service) && self.provider.serves(&service) && !service.is_deleting() {
                self.provider.adopt(&service);
            } else {
                self.note_foreign(&service);
            }
        }
    }

    /// Addresses that are in use by others' doing are never given.
    fn note_foreign(&self, service: &Value) {
        let mut addresses: BTreeSet<IpAddr> = external_ips(service).into_iter().collect();
        if !is_given(service) {
            addresses.extend(ingress(service));
        }
        self.provider.set_foreign(&service.key(), &addresses);
    }

    fn read_pools(&self, session: &Session<'_>) {
        let map = self.config_maps.get(&pools_key());
        let data = map.as_deref().and_then(|map| map.fields(&["data"]));
        let mut pools = Vec::new();
        for (key, text) in data.into_iter().flatten() {
            match pools::parse(text.as_str().unwrap_or_default(), &self.reserved) {
                Ok(list) => pools.extend(list),
                // The pools of before stay: half a list would take addresses from the wrong place.
                Err(error) => {
                    let message = format!("{key}: {error}; the pools of before stay in force");
                    tracing::warn!(%error, key, "read {POOLS_NAMESPACE}/{POOLS_NAME}");
                    if let Some(map) = &map {
                        let about = (map.as_ref(), "v1", "ConfigMap");
                        session.recorder().warning(about, "InvalidPools", message);
                    }
                    return;
                }
            }
        }
        tracing::info!(pools = pools.len(), "pools of load-balancer addresses");
        self.provider.set_pools(pools);
    }

    fn wake_waiting(&self) {
        let waiting = std::mem::take(&mut self.state().waiting);
        waiting.into_iter().for_each(|key| self.queue.add(key));
    }

    /// The Service has, or had, addresses of ours and is to have none. What another provider has entered stays.
    async fn withdraw(&self, service: Arc<Value>, session: &Session<'_>) -> Result<(), ApiError> {
        if self.provider.release(&service.key()) {
            self.wake_waiting();
        }
        self.state().waiting.remove(&service.key());
        if !is_ours(&service) {
            return Ok(());
        }
        let given = is_given(&service);
        let mut object = Arc::clone(&service);
        // Before the condition, which says that the finalizer is ours: one that is left behind holds the Service for ever.
        if given && has_finalizer(&service) {
            object = set_finalizer(&service, false, session).await?;
            let about = (object.as_ref(), ABOUT.0, ABOUT.1);
            let recorder = session.recorder().named("service-controller");
            recorder.normal(
                about,
                "AddressesReleased",
                "load-balancer addresses were given back".into(),
            );
            if object.is_deleting() && object.items(&["metadata", "finalizers"]).is_empty() {
                return Ok(());
            }
        }
        let mut status = object.at(&["status"]).cloned().unwrap_or_else(|| json!({}));
        if given && object.text(&["spec", "type"]) == "LoadBalancer" {
            set(&mut status, &["loadBalancer"], json!({}));
        }
        let conditions = status.items(&["conditions"]).iter();
        let others: Vec<Value> = conditions
            .filter(|c| c.text(&["type"]) != ADDRESSES_CONDITION)
            .cloned()
            .collect();
        set(&mut status, &["conditions"], Value::Array(others));
        session
            .replace_status(resources::SERVICES, &object, status)
            .await?;
        Ok(())
    }

    async fn provide(&self, service: Arc<Value>, session: &Session<'_>) -> Result<(), ApiError> {
        // Somebody else gives it addresses: a cloud's controller.
        if !is_given(&service) && !ingress(&service).is_empty() {
            return self.withdraw(service, session).await;
        }
        let outcome = self.provider.ensure(&service);
        let mut object = service;
        // Ours is there as long as the Service has addresses of ours; others use the same one.
        let (has, wants) = (has_finalizer(&object), !outcome.addresses.is_empty());
        if has != wants && (wants || is_given(&object)) {
            object = set_finalizer(&object, wants, session).await?;
        }
        if outcome.problem.is_some() {
            self.state().waiting.insert(object.key());
        } else {
            self.state().waiting.remove(&object.key());
        }
        self.show(&object, &outcome, session).await
    }

    async fn show(
        &self,
        service: &Value,
        outcome: &Outcome,
        session: &Session<'_>,
    ) -> Result<(), ApiError> {
        let before = service
            .at(&["status"])
            .cloned()
            .unwrap_or_else(|| json!({}));
        let mut status = before.clone();
        let addresses: Vec<String> = outcome.addresses.iter().map(ToString::to_string).collect();
        let list = addresses
            .iter()
            .map(|ip| json!({"ip": ip, "ipMode": "VIP"}));
        let balancer = match addresses.is_empty() {
            true => json!({}),
            false => json!({"ingress": Value::Array(list.collect())}),
        };
        let moved = ingress(service) != outcome.addresses;
        if moved || !addresses.is_empty() {
            set(&mut status, &["loadBalancer"], balancer);
        }
        let (reason, message) = match (&outcome.problem, &outcome.note) {
            (Some(problem), _) => (problem.reason, problem.message.clone()),
            (None, Some(note)) => ("AddressesKept", note.clone()),
            (None, None) => ("AddressesAssigned", format!("has {}", addresses.join(", "))),
        };
        let state = if addresses.is_empty() {
            "False"
        } else {
            "True"
        };
        let news = set_condition(
            &mut status,
            ADDRESSES_CONDITION,
            state,
            reason,
            &message,
            Timestamp::now(),
        );
        if status == before {
            return Ok(());
        }
        let written = session
            .replace_status(resources::SERVICES, service, status)
            .await?;
        if news {
            let about = (written.as_ref(), ABOUT.0, ABOUT.1);
            let recorder = session.recorder().named("service-controller");
            if outcome.problem.is_none() && outcome.note.is_none() {
                recorder.normal(about, reason, message);
            } else {
                recorder.warning(about, reason, message);
            }
        }
        Ok(())
    }
}

impl Controller for Services {
    const NAME: &'static str = "service";
    /// One decision after the other.
    const WORKERS: usize = 1;

    async fn reconcile(&self, key: &Key, session: &Session<'_>) -> Result<Again, ApiError> {
        self.adopt_all(session);
        if key.namespace.is_empty() {
            let node = self.nodes.get(key);
            let addresses = node.as_deref().map(node_addresses).unwrap_or_default();
            self.provider.set_foreign(key, &addresses);
            return Ok(None);
        }
        if *key == pools_key() {
            self.read_pools(session);
            for service in self.services.all() {
                if self.provider.serves(&service) {
                    self.queue.add(service.key());
                }
            }
        }
        let Some(service) = self.services.get(key) else {
            self.provider.set_foreign(key, &BTreeSet::new());
            self.state().waiting.remove(key);
            if self.provider.release(key) {
                self.wake_waiting();
            }
            return Ok(None);
        };
        self.note_foreign(&service);
        if self.provider.serves(&service) && !service.is_deleting() {
            self.provide(service, session).await?;
        } else {
            self.withdraw(service, session).await?;
        }
        Ok(None)
    }
}

fn pools_key() -> Key {
    Key::new(POOLS_NAMESPACE, POOLS_NAME)
}

fn condition(service: &Value) -> Option<&Value> {
    service.condition(ADDRESSES_CONDITION)
}

/// We have taken care of this Service.
fn is_ours(service: &Value) -> bool {
    condition(service).is_some()
}

/// The addresses in its status are of our giving.
fn is_given(service: &Value) -> bool {
    condition(service).is_some_and(|c| c.text(&["status"]) == "True")
}

fn has_finalizer(service: &Value) -> bool {
    let list = service.items(&["metadata", "finalizers"]);
    list.iter().any(|f| f.as_str() == Some(FINALIZER))
}

async fn set_finalizer(
    service: &Value,
    present: bool,
    session: &Session<'_>,
) -> Result<Arc<Value>, ApiError> {
    let mut list = service.items(&["metadata", "finalizers"]).to_vec();
    list.retain(|finalizer| finalizer.as_str() != Some(FINALIZER));
    if present {
        list.push(FINALIZER.into());
    }
    let mut changed = service.clone();
    set(
        &mut changed,
        &["metadata", "finalizers"],
        Value::Array(list),
    );
    session.update(resources::SERVICES, changed).await
}

fn node_addresses(node: &Value) -> BTreeSet<IpAddr> {
    let list = node.items(&["status", "addresses"]).iter();
    list.filter_map(|a| a.text(&["address"]).parse().ok())
        .collect()
}

#[cfg(test)]
mod tests;
