//! Reads what the runtime has into [`PodView`]s, asking in detail only for what changed.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::cri::{CriError, Labels, Runtime, v1};
use super::view::{
    ContainerEntry, ContainerState, PodView, container_entry, container_state, group, label,
};
use super::volumes::termination_message;

pub(crate) struct Lister {
    runtime: Arc<dyn Runtime>,
    cache: Mutex<Cache>,
}

#[derive(Debug, Default)]
struct Cache {
    /// Addresses by sandbox.
    ips: HashMap<String, Vec<String>>,
    containers: HashMap<String, ContainerEntry>,
}

/// Ids and states of a pod's objects: two equal signatures mean that nothing happened.
pub(crate) type Signature = Vec<(String, i32)>;

impl Lister {
    pub(crate) fn new(runtime: Arc<dyn Runtime>) -> Self {
        Self {
            runtime,
            cache: Mutex::default(),
        }
    }

    /// One pod.
    pub(crate) async fn pod(&self, uid: &str) -> Result<PodView, CriError> {
        let selector = Labels::from([(label::POD_UID.to_owned(), uid.to_owned())]);
        let sandboxes = self.runtime.list_sandboxes(selector.clone()).await?;
        let containers = self.runtime.list_containers(selector).await?;
        let mut detailed = Vec::with_capacity(sandboxes.len());
        for sandbox in sandboxes {
            let ips = self.ips(&sandbox).await?;
            detailed.push((sandbox, ips));
        }
        let mut entries = Vec::with_capacity(containers.len());
        for container in &containers {
            entries.extend(self.container(container).await?);
        }
        Ok(group(detailed, entries).remove(uid).unwrap_or_default())
    }

    /// Signatures of all pods that carry our labels. Forgets details of what is gone.
    pub(crate) async fn signatures(&self) -> Result<BTreeMap<String, Signature>, CriError> {
        let sandboxes = self.runtime.list_sandboxes(Labels::new()).await?;
        let containers = self.runtime.list_containers(Labels::new()).await?;
        {
            let mut cache = self.cache();
            cache
                .ips
                .retain(|id, _| sandboxes.iter().any(|s| s.id == *id));
            cache
                .containers
                .retain(|id, _| containers.iter().any(|c| c.id == *id));
        }
        let mut pods: BTreeMap<String, Signature> = BTreeMap::new();
        let all = sandboxes
            .into_iter()
            .map(|s| (s.labels, s.id, s.state))
            .chain(containers.into_iter().map(|c| (c.labels, c.id, c.state)));
        for (mut labels, id, state) in all {
            if let Some(uid) = labels.remove(label::POD_UID) {
                pods.entry(uid).or_default().push((id, state));
            }
        }
        for signature in pods.values_mut() {
            signature.sort();
        }
        Ok(pods)
    }

    /// Id and log file of each running container that has been looked at.
    pub(crate) fn running_logs(&self) -> Vec<(String, String)> {
        let cache = self.cache();
        let views = cache.containers.values().map(|entry| &entry.view);
        views
            .filter(|v| v.state == ContainerState::Running && !v.log_path.is_empty())
            .map(|v| (v.id.clone(), v.log_path.clone()))
            .collect()
    }

    async fn ips(&self, sandbox: &v1::PodSandbox) -> Result<Vec<String>, CriError> {
        if let Some(ips) = self.cache().ips.get(&sandbox.id) {
            return Ok(ips.clone());
        }
        let status = match self.runtime.sandbox_status(&sandbox.id).await {
            Err(error) if error.is_not_found() => return Ok(Vec::new()),
            other => other?,
        };
        let network = status.network.unwrap_or_default();
        let more = network.additional_ips.into_iter().map(|p| p.ip);
        let ips: Vec<String> = std::iter::once(network.ip)
            .chain(more)
            .filter(|ip| !ip.is_empty())
            .collect();
        if !ips.is_empty() {
            self.cache().ips.insert(sandbox.id.clone(), ips.clone());
        }
        Ok(ips)
    }

    async fn container(&self, listed: &v1::Container) -> Result<Option<ContainerEntry>, CriError> {
        let state = container_state(listed.state());
        let known = self.cache().containers.get(&listed.id).cloned();
        let settled = matches!(state, ContainerState::Running | ContainerState::Exited);
        if let Some(known) = known.filter(|k| settled && k.view.state == state) {
            return Ok(Some(known));
        }
        let status = match self.runtime.container_status(&listed.id).await {
            // Removed between the two calls.
            Err(error) if error.is_not_found() => return Ok(None),
            other => other?,
        };
        let Some(mut entry) = container_entry(&listed.pod_sandbox_id, status) else {
            return Ok(None);
        };
        if entry.view.state == ContainerState::Exited {
            let left = termination_message(&entry.view.termination_log);
            if !left.is_empty() {
                entry.view.message = left;
            }
        }
        self.cache()
            .containers
            .insert(listed.id.clone(), entry.clone());
        Ok(Some(entry))
    }

    fn cache(&self) -> MutexGuard<'_, Cache> {
        // Plain values: valid whatever happened to a holder.
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
