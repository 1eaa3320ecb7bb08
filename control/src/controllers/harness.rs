//! For tests of this crate: a real API on a store in a temporary folder, the controllers and the scheduler on it, and
//! kubelets that only write status.

use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::runtime::informer::Store;
use super::runtime::object::{Key, Object, time_text};
use super::{Informers, Settings};
use crate::apiserver::api::Api;
use crate::apiserver::local::LocalClient;
use crate::client::{DeleteOptions, ObjectClient, PatchKind, Resource, resources};
use crate::config::Network;
use crate::status::ApiError;
use crate::store::{EmbeddedStore, OpenOptions};

/// No condition of a test takes longer, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);
/// The annotation that tells a kubelet what to report: ready (default), unready, hold, succeed, fail.
pub(crate) const OUTCOME: &str = "test/outcome";

pub(crate) struct Cluster {
    pub(crate) client: Arc<dyn ObjectClient>,
    pub(crate) informers: Informers,
    shutdown: CancellationToken,
    _folder: tempfile::TempDir,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

impl Cluster {
    /// With controllers and scheduler, without nodes.
    pub(crate) async fn start() -> Self {
        Self::start_behind(|client| client).await
    }

    /// Controllers and scheduler see the API through `door`; the test and the kubelets use it directly.
    pub(crate) async fn start_behind(
        door: impl FnOnce(Arc<dyn ObjectClient>) -> Arc<dyn ObjectClient>,
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let now_us = || Timestamp::now().as_microsecond();
        let path = folder.path().join("store");
        let store = EmbeddedStore::open(&OpenOptions { path, now_us }).unwrap();
        let network = Network::default();
        let api = Arc::new(Api::new(Arc::new(store), network.clone()));
        api.bootstrap("192.0.2.1:6443".parse().unwrap())
            .await
            .unwrap();
        let client: Arc<dyn ObjectClient> = Arc::new(LocalClient::new(api, "test"));
        let shutdown = CancellationToken::new();
        let informers = Informers::new(client.clone(), shutdown.clone());
        let settings = Settings {
            network,
            ca_certificate_pem: "test certificate".into(),
        };
        let through = door(client.clone());
        let cached = Informers::new(through.clone(), shutdown.clone());
        tokio::spawn(super::run(
            through.clone(),
            cached.clone(),
            settings,
            shutdown.clone(),
        ));
        tokio::spawn(crate::scheduler::run(through, cached, shutdown.clone()));
        Self {
            client,
            informers,
            shutdown,
            _folder: folder,
        }
    }

    pub(crate) fn store(&self, resource: Resource) -> Arc<Store> {
        self.informers.store(resource)
    }

    /// A ready node with a kubelet.
    pub(crate) async fn node(&self, name: &str, allocatable: Value) {
        let now = time_text(Timestamp::now());
        let node = json!({
            "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
            "status": {"allocatable": allocatable, "capacity": allocatable},
        });
        self.client
            .create(resources::NODES, "", node)
            .await
            .unwrap();
        let status = json!({"status": {
            "allocatable": allocatable, "capacity": allocatable,
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady",
                "lastHeartbeatTime": now, "lastTransitionTime": now}],
        }});
        let patch = self.client.patch(
            resources::NODES,
            "",
            name,
            "status",
            PatchKind::Merge,
            status,
        );
        patch.await.unwrap();
        tokio::spawn(kubelet(
            self.client.clone(),
            self.informers.clone(),
            name.to_owned(),
        ));
        self.until(resources::NODES, |nodes| {
            nodes
                .get(&Key::new("", name))
                .is_some_and(|n| n.items(&["spec", "taints"]).is_empty())
        })
        .await;
    }

    pub(crate) async fn nodes(&self, count: usize) {
        for n in 1..=count {
            self.node(
                &format!("n{n}"),
                json!({"cpu": "4", "memory": "8Gi", "pods": "110"}),
            )
            .await;
        }
    }

    pub(crate) async fn create(&self, resource: Resource, object: Value) -> Arc<Value> {
        // The namespace's default account is made by a controller; a pod made before it is refused.
        let start = Instant::now();
        loop {
            let namespace = object.namespace().to_owned();
            match self
                .client
                .create(resource, &namespace, object.clone())
                .await
            {
                Ok(made) => {
                    self.seen(resource, &made).await;
                    return made;
                }
                Err(e) if e.code == 403 && start.elapsed() < PATIENCE => {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                Err(e) => panic!("create {}: {e}", resource.plural),
            }
        }
    }

    pub(crate) async fn merge(&self, resource: Resource, key: &Key, patch: Value) -> Arc<Value> {
        let Key { namespace, name } = key;
        let patched = self
            .client
            .patch(resource, namespace, name, "", PatchKind::Merge, patch);
        let made = patched.await.unwrap();
        self.seen(resource, &made).await;
        made
    }

    /// Returns when the cache that the test reads shows a write of the test itself.
    async fn seen(&self, resource: Resource, made: &Value) {
        let revision = made.revision();
        let store = self.store(resource);
        let waited = store.wait_until(|_, seen| seen >= revision);
        assert!(
            tokio::time::timeout(PATIENCE, waited).await.is_ok(),
            "the cache stands still"
        );
    }

    pub(crate) async fn delete(&self, resource: Resource, key: &Key) {
        let deleted = self.client.delete(
            resource,
            &key.namespace,
            &key.name,
            DeleteOptions::default(),
        );
        deleted.await.unwrap();
    }

    pub(crate) async fn get(&self, resource: Resource, key: &Key) -> Result<Arc<Value>, ApiError> {
        self.client.get(resource, &key.namespace, &key.name).await
    }

    /// Returns when `holds` does; it is asked after every change of the resource.
    pub(crate) async fn until(&self, resource: Resource, holds: impl Fn(&Store) -> bool) {
        let store = self.store(resource);
        let waited =
            tokio::time::timeout(PATIENCE, store.wait_until(|store, _| holds(store))).await;
        if waited.is_err() {
            let all: Vec<String> = store.all().iter().map(ToString::to_string).collect();
            panic!(
                "waited in vain; {} are:\n{}",
                resource.plural,
                all.join("\n")
            );
        }
    }
}

/// Reports for the pods of one node what their annotation says, and confirms deletions.
async fn kubelet(client: Arc<dyn ObjectClient>, informers: Informers, node: String) {
    let (sender, mut changed) = tokio::sync::mpsc::unbounded_channel();
    let mine = node.clone();
    informers.store(resources::PODS).subscribe(move |change| {
        if let Some(pod) = &change.new
            && pod.text(&["spec", "nodeName"]) == mine
        {
            let _ = sender.send(pod.clone());
        }
    });
    let mut last = 0_u32;
    while let Some(pod) = changed.recv().await {
        let (namespace, name) = (pod.namespace(), pod.name());
        if pod.is_deleting() {
            let now = DeleteOptions {
                grace_period_s: Some(0),
                uid: Some(pod.uid().to_owned()),
                ..DeleteOptions::default()
            };
            let _ = client.delete(resources::PODS, namespace, name, now).await;
            continue;
        }
        let (phase, ready) = match pod.annotation(OUTCOME).unwrap_or("ready") {
            "hold" => continue,
            "unready" => ("Running", "False"),
            "succeed" => ("Succeeded", "False"),
            "fail" => ("Failed", "False"),
            _ => ("Running", "True"),
        };
        let reported = pod.condition("Ready").map(|c| c.text(&["status"]));
        if pod.text(&["status", "phase"]) == phase && reported == Some(ready) {
            continue;
        }
        last += 1;
        let ip = format!("10.{}.{}.{}", node.len(), last / 250, last % 250 + 1);
        let now = time_text(Timestamp::now());
        let scheduled = pod.condition("PodScheduled").cloned();
        let mut conditions: Vec<Value> = scheduled.into_iter().collect();
        for kind in ["ContainersReady", "Ready"] {
            conditions.push(json!({"type": kind, "status": ready, "lastTransitionTime": now}));
        }
        let patch = json!({"status": {
            "phase": phase, "podIP": ip, "podIPs": [{"ip": ip}], "conditions": conditions,
        }});
        let r = resources::PODS;
        let _ = client
            .patch(r, namespace, name, "status", PatchKind::Merge, patch)
            .await;
    }
}

/// A Deployment in the namespace default.
pub(crate) fn deployment(name: &str, replicas: u32, image: &str) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "default", "labels": {"app": name}},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": {"app": name}},
                "spec": {"containers": [{"name": "c", "image": image}]},
            },
        },
    })
}
