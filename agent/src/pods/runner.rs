//! Ties the pod runner together: desired state to workers, the runtime's changes to workers, orphans to removal.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use control_api::desired::{Changes, DesiredState};
use control_api::v1::{PodSpec, PodStatus};
use prost::Message;
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::cri::{Cri, Runtime};
use super::host::{self, NodeReportFields};
use super::list::{Lister, Signature};
use super::logs::rotate;
use super::node::{NodeFacts, ResolvConf, is_component};
use super::node_api;
use super::report::{ControlPlane, Outbox};
use super::shared::Shared;
use super::volumes;
use super::worker::{Handle, Input, Worker};
use crate::config::Config;

/// How often the runtime is asked what it has: containers end without telling.
const RELIST_PERIOD: Duration = Duration::from_secs(1);

/// The pod runner could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("the configuration has no [pods] section: this node does not run pods")]
    NotConfigured,
    #[error(transparent)]
    NodeApi(#[from] node_api::NodeApiError),
    #[error("create folder {path} for pods: {source}")]
    Folder {
        path: PathBuf,
        source: std::io::Error,
    },
}

/// A change of the desired state.
#[derive(Clone, Debug)]
pub struct Update {
    pub changes: Changes,
    /// True when a control plane sent a complete state: pods that it does not list must go.
    pub authoritative: bool,
}

/// The running pod runner.
#[derive(Clone)]
pub struct PodRunner {
    shared: Arc<Shared>,
    max_pods: u32,
}

impl std::fmt::Debug for PodRunner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PodRunner")
            .field("node", &self.shared.node)
            .finish_non_exhaustive()
    }
}

impl PodRunner {
    /// What the node's report says about runtime and machine, asked now.
    pub async fn node_report_fields(&self) -> NodeReportFields {
        host::node_report_fields(
            self.shared.runtime.as_ref(),
            &self.shared.node,
            self.max_pods,
        )
        .await
    }
}

impl PodRunner {
    /// Serves this node's API (container logs) on the primary node IP, until `shutdown`.
    ///
    /// # Errors
    /// [`StartError`] when credentials cannot be read or the configuration has no `[pods]` section.
    pub fn serve_node_api(
        &self,
        config: &Config,
        shutdown: CancellationToken,
    ) -> Result<(), StartError> {
        let pods = config.pods.as_ref().ok_or(StartError::NotConfigured)?;
        node_api::start(
            config,
            pods.node_api_port,
            Arc::clone(&self.shared),
            shutdown,
        )?;
        Ok(())
    }
}

/// Starts to run the pods of this node; `updates` announces changes of `control.state()`. Ends with `shutdown`, leaving
/// pods running.
///
/// # Errors
/// [`StartError`] without a `[pods]` section, or when its folders cannot be made.
pub fn start_with(
    config: &Config,
    control: Arc<dyn ControlPlane>,
    updates: mpsc::Receiver<Update>,
    shutdown: CancellationToken,
) -> Result<PodRunner, StartError> {
    let pods = config.pods.as_ref().ok_or(StartError::NotConfigured)?;
    let machine = host::machine();
    let resolv = std::fs::read_to_string(&config.dns.resolv_conf).unwrap_or_default();
    let node = NodeFacts {
        name: config.node_name.clone(),
        ips: config.node_ips.clone(),
        cpu_millis: machine.cpu_millis,
        memory_bytes: machine.memory_bytes,
        cgroup_parent: pods.cgroup_parent.clone(),
        log_dir: pods.log_dir.clone(),
        pods_dir: config.state_dir.join("pods"),
        resolv: ResolvConf::parse(&resolv),
        prefer_present_images: pods.prefer_present_images,
    };
    for path in [&node.pods_dir, &node.log_dir] {
        std::fs::create_dir_all(path).map_err(|source| StartError::Folder {
            path: path.clone(),
            source,
        })?;
    }
    let runtime: Arc<dyn Runtime> = Arc::new(Cri::new(&pods.cri));
    let outbox = Arc::new(Outbox::default());
    let shared = Arc::new(Shared {
        lister: Lister::new(Arc::clone(&runtime)),
        runtime,
        node,
        control: Arc::clone(&control),
        outbox: Arc::clone(&outbox),
    });
    let runner = Runner {
        shared: Arc::clone(&shared),
        workers: BTreeMap::new(),
        signatures: BTreeMap::new(),
        authoritative: false,
        runtime_down: false,
    };
    let rotating = Arc::clone(&shared);
    tokio::spawn(async move {
        tokio::select! {
            () = runner.run(updates) => {}
            () = rotate::run(rotating.runtime.as_ref(), &rotating.lister) => {}
            () = outbox.run(control) => {}
            () = shutdown.cancelled() => {}
        }
    });
    Ok(PodRunner {
        shared,
        max_pods: pods.max_pods,
    })
}

struct Runner {
    shared: Arc<Shared>,
    /// By pod UID.
    workers: BTreeMap<String, Handle>,
    signatures: BTreeMap<String, Signature>,
    authoritative: bool,
    runtime_down: bool,
}

impl Runner {
    async fn run(mut self, mut updates: mpsc::Receiver<Update>) {
        let mut relist = tokio::time::interval(RELIST_PERIOD);
        relist.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                update = updates.recv() => match update {
                    Some(update) => self.update(update).await,
                    None => return,
                },
                _ = relist.tick() => self.relist().await,
            }
        }
    }

    async fn update(&mut self, update: Update) {
        let fresh_snapshot = update.authoritative && !self.authoritative;
        self.authoritative |= update.authoritative;
        let state = self.shared.control.state();
        let changes = &update.changes;
        let everything = changes.everything || fresh_snapshot;
        let listed: BTreeSet<&str> = state.pods.values().map(|p| p.uid.as_str()).collect();
        let unlisted: Vec<String> = self
            .workers
            .keys()
            .filter(|uid| !listed.contains(uid.as_str()))
            .cloned()
            .collect();
        for uid in unlisted {
            if self.authoritative {
                self.send(&uid, Input::Removed).await;
            }
        }
        for (name, pod) in &state.pods {
            let changed = everything || changes.pods.contains(name);
            let known = self.workers.contains_key(&pod.uid);
            if (changed || !known) && (known || self.authoritative || self.lives(&pod.uid).await) {
                self.pod(pod).await;
            }
        }
        let references =
            everything || !changes.config_maps.is_empty() || !changes.secrets.is_empty();
        if references {
            let uids: Vec<String> = self.workers.keys().cloned().collect();
            for uid in uids {
                if everything || refers_to_change(&state, &uid, changes) {
                    self.send(&uid, Input::Refresh).await;
                }
            }
        }
        if fresh_snapshot {
            self.relist().await;
            self.orphans_on_disk(&state);
        }
    }

    /// True for a pod that was up before the agent started. Only such pods are looked after on the word of an old state:
    /// others may run elsewhere by now.
    async fn lives(&self, uid: &str) -> bool {
        let view = self.shared.lister.pod(uid).await;
        view.is_ok_and(|v| v.sandboxes.iter().any(|s| s.ready))
    }

    async fn pod(&mut self, pod: &PodSpec) {
        if !is_component(&pod.uid) || !is_component(&pod.namespace) || !is_component(&pod.name) {
            tracing::error!(uid = %pod.uid, "a pod without a usable uid, namespace or name is ignored");
            return;
        }
        let spec = Arc::new(pod.clone());
        if self.workers.contains_key(&pod.uid) {
            self.send(&pod.uid, Input::Spec(spec)).await;
        } else {
            let worker = Worker::spawn(Arc::clone(&self.shared), spec, true);
            self.workers.insert(pod.uid.clone(), worker);
        }
    }

    async fn send(&mut self, uid: &str, input: Input) {
        let Some(worker) = self.workers.get(uid) else {
            return;
        };
        if worker.inbox.send(input).await.is_err() {
            self.workers.remove(uid);
        }
    }

    /// Wakes the workers of pods whose objects in the runtime changed.
    async fn relist(&mut self) {
        self.workers.retain(|_, worker| !worker.task.is_finished());
        let signatures = match self.shared.lister.signatures().await {
            Ok(signatures) => signatures,
            Err(error) => {
                if !self.runtime_down {
                    tracing::warn!(%error, "container runtime not reachable, will keep asking");
                }
                self.runtime_down = true;
                return;
            }
        };
        if std::mem::take(&mut self.runtime_down) {
            tracing::info!("container runtime is back");
        }
        let changed: BTreeSet<String> = signatures
            .iter()
            .filter(|(uid, signature)| self.signatures.get(*uid) != Some(signature))
            .map(|(uid, _)| uid.clone())
            .chain(
                self.signatures
                    .keys()
                    .filter(|uid| !signatures.contains_key(*uid))
                    .cloned(),
            )
            .collect();
        for uid in &changed {
            self.send(uid, Input::Dirty).await;
        }
        if self.authoritative {
            let orphans: Vec<String> = signatures
                .keys()
                .filter(|uid| !self.workers.contains_key(*uid))
                .cloned()
                .collect();
            for uid in orphans {
                self.orphan(&uid).await;
            }
        }
        self.signatures = signatures;
    }

    /// A pod in the runtime that the control plane does not list.
    async fn orphan(&mut self, uid: &str) {
        let listed = self
            .shared
            .control
            .state()
            .pods
            .values()
            .any(|p| p.uid == uid);
        if listed || !is_component(uid) {
            return;
        }
        let Ok(view) = self.shared.lister.pod(uid).await else {
            return;
        };
        if view.is_empty() {
            return;
        }
        tracing::info!(uid, pod = %view.name, namespace = %view.namespace, "removing a pod that is not listed");
        self.remove_unlisted(uid, view.namespace, view.name);
    }

    fn remove_unlisted(&mut self, uid: &str, namespace: String, name: String) {
        let spec = PodSpec {
            namespace,
            name,
            uid: uid.to_owned(),
            deleting: true,
            deletion_grace_s: ORPHAN_GRACE_S,
            ..PodSpec::default()
        };
        let worker = Worker::spawn(Arc::clone(&self.shared), Arc::new(spec), false);
        self.workers.insert(uid.to_owned(), worker);
    }

    /// Folders of pods that neither the control plane nor the runtime knows.
    fn orphans_on_disk(&mut self, state: &DesiredState) {
        for uid in volumes::known_pods(&self.shared.node) {
            if self.workers.contains_key(&uid) || state.pods.values().any(|p| p.uid == uid) {
                continue;
            }
            let saved = volumes::load_status(&self.shared.node, &uid)
                .and_then(|bytes| PodStatus::decode(bytes.as_slice()).ok())
                .unwrap_or_default();
            self.remove_unlisted(&uid, saved.namespace, saved.name);
        }
    }
}

/// Seconds that the processes of an unlisted pod get to end.
const ORPHAN_GRACE_S: i64 = 1;

/// True when the pod's namespace holds one of the changed ConfigMaps or Secrets: a coarse net, the pod itself compares.
fn refers_to_change(state: &DesiredState, uid: &str, changes: &Changes) -> bool {
    let Some(pod) = state.pods.values().find(|p| p.uid == uid) else {
        return false;
    };
    changes
        .config_maps
        .iter()
        .chain(&changes.secrets)
        .any(|n| n.namespace == pod.namespace)
}
