//! The control side of a case: objects in memory behind the control plane's own client trait, and its feed server.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use async_trait::async_trait;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use weir_control::client::{
    DeleteOptions, EventKind, List, ObjectClient, PatchKind, Resource, WatchEvent, resources,
};
use weir_control::config::Network;
use weir_control::pki::{Authority, Pki, write_pair};
use weir_control::serve::{Feed, FeedStatus, FeedTls};
use weir_control::status::ApiError;

use crate::actor::lock;
use crate::topology::Namespace;

const WATCH_BUFFER: usize = 65_536;
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// A control plane that starts anew has its policies no earlier.
const SLOW_READ: Duration = Duration::from_millis(1500);

type Key = (String, String, String);

#[derive(Default)]
struct Inner {
    revision: u64,
    objects: BTreeMap<Key, Arc<Value>>,
    history: Vec<(String, WatchEvent)>,
    watchers: Vec<(String, mpsc::Sender<WatchEvent>)>,
    /// Lists of policies are answered from then on.
    policies_from: Option<Instant>,
}

/// Objects in memory; every change has its revision.
#[derive(Default)]
pub(in crate::cases) struct Objects {
    inner: Mutex<Inner>,
}

impl std::fmt::Debug for Objects {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Objects")
            .field("revision", &self.revision())
            .finish_non_exhaustive()
    }
}

/// The plural of a kind that cases use.
#[must_use]
pub(in crate::cases) fn plural(kind: &str) -> String {
    match kind {
        "NetworkPolicy" => "networkpolicies".into(),
        "ClusterNetworkPolicy" => "clusternetworkpolicies".into(),
        _ => format!("{}s", kind.to_lowercase()),
    }
}

fn key_of(plural: &str, object: &Value) -> Key {
    let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
    let meta = &object["metadata"];
    (
        plural.to_owned(),
        text(&meta["namespace"]),
        text(&meta["name"]),
    )
}

/// An object without what the store itself writes into it.
fn without_marks(object: &Value) -> Value {
    let mut bare = object.clone();
    if let Some(meta) = bare["metadata"].as_object_mut() {
        meta.retain(|k, _| !matches!(k.as_str(), "resourceVersion" | "uid" | "creationTimestamp"));
    }
    bare
}

impl Objects {
    #[must_use]
    pub(in crate::cases) fn revision(&self) -> u64 {
        lock(&self.inner).revision
    }

    /// Creates or replaces an object; what is the same already stays.
    pub(in crate::cases) fn put(&self, plural: &str, mut object: Value) -> Arc<Value> {
        let mut inner = lock(&self.inner);
        let key = key_of(plural, &object);
        let before = inner.objects.get(&key).cloned();
        if let Some(before) = &before
            && without_marks(before) == without_marks(&object)
        {
            return Arc::clone(before);
        }
        inner.revision += 1;
        if object["metadata"]["creationTimestamp"].is_null() {
            let made = before
                .as_ref()
                .map(|b| b["metadata"]["creationTimestamp"].clone());
            object["metadata"]["creationTimestamp"] =
                made.unwrap_or_else(|| jiff::Timestamp::now().to_string().into());
        }
        object["metadata"]["resourceVersion"] = inner.revision.to_string().into();
        if object["metadata"]["uid"].is_null() {
            let kept = before.as_ref().map(|b| b["metadata"]["uid"].clone());
            object["metadata"]["uid"] =
                kept.unwrap_or_else(|| format!("uid-{}", inner.revision).into());
        }
        let kind = if before.is_some() {
            EventKind::Modified
        } else {
            EventKind::Added
        };
        let object = Arc::new(object);
        inner.objects.insert(key, Arc::clone(&object));
        inner.publish(plural, kind, &object);
        object
    }

    /// Removes an object; says whether it was there.
    pub(in crate::cases) fn remove(&self, plural: &str, namespace: &str, name: &str) -> bool {
        let mut inner = lock(&self.inner);
        let key = (plural.to_owned(), namespace.to_owned(), name.to_owned());
        let Some(object) = inner.objects.remove(&key) else {
            return false;
        };
        inner.revision += 1;
        inner.publish(plural, EventKind::Deleted, &object);
        true
    }

    #[must_use]
    pub(in crate::cases) fn all(&self, plural: &str) -> Vec<Arc<Value>> {
        let inner = lock(&self.inner);
        inner
            .objects
            .iter()
            .filter(|(k, _)| k.0 == plural)
            .map(|(_, o)| Arc::clone(o))
            .collect()
    }
}

impl Inner {
    fn publish(&mut self, plural: &str, kind: EventKind, object: &Arc<Value>) {
        let now = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default();
        let event = WatchEvent {
            kind,
            object: Arc::clone(object),
            revision: self.revision,
            committed_at_us: i64::try_from(now.as_micros()).unwrap_or(0),
        };
        self.watchers
            .retain(|(p, sender)| p != plural || sender.try_send(event.clone()).is_ok());
        self.history.push((plural.to_owned(), event));
    }
}

#[async_trait]
impl ObjectClient for Objects {
    async fn get(&self, r: Resource, namespace: &str, name: &str) -> Result<Arc<Value>, ApiError> {
        let key = (r.plural.to_owned(), namespace.to_owned(), name.to_owned());
        let found = lock(&self.inner).objects.get(&key).cloned();
        found.ok_or_else(|| ApiError::not_found(r.group, r.plural, name))
    }

    async fn list(&self, r: Resource, namespace: &str) -> Result<List, ApiError> {
        let slow = r.plural.ends_with("networkpolicies");
        let from = lock(&self.inner).policies_from.filter(|_| slow);
        if let Some(from) = from {
            tokio::time::sleep_until(from.into()).await;
        }
        let revision = self.revision();
        let mut items = self.all(r.plural);
        items.retain(|o| namespace.is_empty() || o["metadata"]["namespace"] == namespace);
        Ok(List { items, revision })
    }

    async fn watch(
        &self,
        r: Resource,
        revision: u64,
    ) -> Result<mpsc::Receiver<WatchEvent>, ApiError> {
        let (sender, receiver) = mpsc::channel(WATCH_BUFFER);
        let mut inner = lock(&self.inner);
        for (plural, event) in &inner.history {
            if plural == r.plural && event.revision > revision {
                // A receiver that cannot hold the history is closed by what follows: the watcher lists again.
                let _full = sender.try_send(event.clone());
            }
        }
        inner.watchers.push((r.plural.to_owned(), sender));
        Ok(receiver)
    }

    async fn create(
        &self,
        r: Resource,
        namespace: &str,
        mut object: Value,
    ) -> Result<Arc<Value>, ApiError> {
        if !namespace.is_empty() {
            object["metadata"]["namespace"] = namespace.into();
        }
        let key = key_of(r.plural, &object);
        if lock(&self.inner).objects.contains_key(&key) {
            return Err(ApiError::already_exists(r.group, r.plural, &key.2));
        }
        Ok(self.put(r.plural, object))
    }

    async fn update(&self, r: Resource, object: Value) -> Result<Arc<Value>, ApiError> {
        Ok(self.put(r.plural, object))
    }

    /// The case says what nodes and pods are; what agents report of them changes nothing.
    async fn update_status(&self, r: Resource, object: Value) -> Result<Arc<Value>, ApiError> {
        let key = key_of(r.plural, &object);
        self.get(r, &key.1, &key.2).await
    }

    async fn patch(
        &self,
        r: Resource,
        namespace: &str,
        name: &str,
        _subresource: &str,
        _kind: PatchKind,
        _patch: Value,
    ) -> Result<Arc<Value>, ApiError> {
        self.get(r, namespace, name).await
    }

    async fn delete(
        &self,
        r: Resource,
        namespace: &str,
        name: &str,
        _: DeleteOptions,
    ) -> Result<(), ApiError> {
        if self.remove(r.plural, namespace, name) {
            return Ok(());
        }
        Err(ApiError::not_found(r.group, r.plural, name))
    }

    async fn bind(&self, _namespace: &str, pod: &str, _node: &str) -> Result<(), ApiError> {
        Err(ApiError::bad_request(format!(
            "the case has bound pod {pod} already"
        )))
    }
}

/// The running control side.
#[derive(Debug)]
pub(in crate::cases) struct Control {
    pub(in crate::cases) objects: Arc<Objects>,
    server: FeedServer,
    authority: Authority,
    pub(in crate::cases) address: SocketAddr,
    folder: PathBuf,
    network: Network,
}

/// A feed server in a thread of its own; ends with the value.
#[derive(Debug)]
struct FeedServer {
    status: FeedStatus,
    shutdown: CancellationToken,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl FeedServer {
    fn start(
        objects: &Arc<Objects>,
        namespace: &Arc<Namespace>,
        address: SocketAddr,
        folder: &Path,
        network: &Network,
    ) -> Result<Self> {
        let pki = Pki::open(folder, &["weir-control".to_owned()], &[address.ip()])?;
        let tls = FeedTls {
            ca_pem: pki.ca_pem.clone(),
            server: pki.server.clone(),
        };
        let client: Arc<dyn ObjectClient> = Arc::clone(objects) as _;
        let feed = Feed::new(client, &tls, network);
        let status = feed.status();
        let shutdown = CancellationToken::new();
        let stop = shutdown.clone();
        let inside = Arc::clone(namespace);
        let (ready, is_ready) = std::sync::mpsc::channel::<Result<()>>();
        let thread = std::thread::spawn(move || {
            let told = ready.clone();
            let ran = inside.enter(move || {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build()?;
                runtime.block_on(async move {
                    let listener = tokio::net::TcpListener::bind(address).await?;
                    let _waits = told.send(Ok(()));
                    feed.serve(&tls, listener, stop).await?;
                    Ok(())
                })
            });
            // After the start nobody listens any more, and that is fine.
            let _told = ready.send(ran);
        });
        is_ready.recv().context("the feed server ended early")??;
        Ok(Self {
            status,
            shutdown,
            thread: Some(thread),
        })
    }

    fn stop(&mut self) {
        self.shutdown.cancel();
        if let Some(thread) = self.thread.take() {
            let _ended = thread.join();
        }
    }
}

impl Drop for FeedServer {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Control {
    /// Starts the feed server inside a namespace.
    ///
    /// # Errors
    /// When certificates cannot be made or the address cannot be had.
    pub(in crate::cases) fn start(
        namespace: &Arc<Namespace>,
        address: SocketAddr,
        folder: &Path,
        network: &Network,
    ) -> Result<Self> {
        let objects = Arc::new(Objects::default());
        for name in ["default", "kube-system"] {
            let namespace =
                json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
            objects.put(resources::NAMESPACES.plural, namespace);
        }
        let server = FeedServer::start(&objects, namespace, address, folder, network)?;
        Ok(Self {
            objects,
            server,
            authority: Authority::load(folder)?,
            address,
            folder: folder.into(),
            network: network.clone(),
        })
    }

    /// Another feed server on the same objects, which are slow to be read: policies come last.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub(in crate::cases) fn restart(&mut self, namespace: &Arc<Namespace>) -> Result<()> {
        self.server.stop();
        lock(&self.objects.inner).policies_from = Some(Instant::now() + SLOW_READ);
        self.server = FeedServer::start(
            &self.objects,
            namespace,
            self.address,
            &self.folder,
            &self.network,
        )?;
        Ok(())
    }

    /// Writes a node's certificate, key and CA; the `[feed]` section that names them.
    ///
    /// # Errors
    /// When they cannot be issued or written.
    pub(in crate::cases) fn feed_section(
        &self,
        node: &str,
        ips: &[std::net::IpAddr],
        folder: &Path,
    ) -> Result<String> {
        let pair = self.authority.issue_node(node, ips)?;
        write_pair(folder, "node", &pair)?;
        let ca = self.folder.join("pki/ca.crt");
        Ok(format!(
            "[feed]\nservers = [\"https://{}\"]\nca = {ca:?}\ncert = {:?}\nkey = {:?}\n",
            self.address,
            folder.join("node.crt"),
            folder.join("node.key"),
        ))
    }

    /// Waits until these nodes have everything up to now in their kernels, at most `limit`; says who has not.
    #[must_use]
    pub(in crate::cases) fn settle(&self, nodes: &[String], limit: Duration) -> Vec<String> {
        let revision = self.objects.revision();
        let deadline = Instant::now() + limit;
        loop {
            // What a node that is away has applied says nothing of the agent that is to come.
            let present = self.server.status.nodes();
            let is_behind = |name: &&String| {
                present
                    .get(*name)
                    .is_none_or(|node| !node.connected || node.applied_revision < revision)
            };
            let behind: Vec<String> = nodes.iter().filter(is_behind).cloned().collect();
            if behind.is_empty() || Instant::now() >= deadline {
                return behind;
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Waits until the end of a node's agent was noticed, at most `limit`: what the next agent confirms is its own then.
    pub(in crate::cases) fn part(&self, node: &str, limit: Duration) {
        let deadline = Instant::now() + limit;
        let follows = || {
            let nodes = self.server.status.nodes();
            nodes.get(node).is_some_and(|status| status.connected)
        };
        while follows() && Instant::now() < deadline {
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// How far one node is, and what it said about its last apply.
    #[must_use]
    pub(in crate::cases) fn standing(&self, node: &str) -> String {
        let wanted = self.objects.revision();
        let Some(status) = self.server.status.nodes().remove(node) else {
            return format!("{node} has never followed the feed (revision {wanted})");
        };
        let connection = if status.connected {
            "connected"
        } else {
            "not connected"
        };
        let error = if status.apply_error.is_empty() {
            "without an error"
        } else {
            &status.apply_error
        };
        format!(
            "{node} is {connection}, at revision {} of {wanted}, {error}",
            status.applied_revision
        )
    }
}

/// Service and pod ranges of the Service cases.
pub(super) fn network() -> Network {
    let nets = |list: [&str; 2]| list.iter().filter_map(|n| n.parse().ok()).collect();
    Network {
        pod_cidrs: nets(["10.244.0.0/16", "fd00:244::/32"]),
        service_cidrs: nets(["10.96.0.0/16", "fd00:96::/112"]),
        dns_ips: vec![std::net::Ipv4Addr::new(10, 96, 255, 10).into()],
        allow_external_ips: true,
        ..Network::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_object_again_is_no_change() {
        let objects = Objects::default();
        let web = |port: u16| json!({"metadata": {"namespace": "d", "name": "web"}, "port": port});
        let first = objects.put("services", web(1));
        assert_eq!(objects.put("services", web(1)), first);
        assert_eq!(objects.revision(), 1);
        let second = objects.put("services", web(2));
        assert_eq!(objects.revision(), 2);
        for kept in ["uid", "creationTimestamp"] {
            assert_eq!(second["metadata"][kept], first["metadata"][kept]);
        }
    }
}
