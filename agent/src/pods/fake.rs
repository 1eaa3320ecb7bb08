//! A container runtime in memory, for tests: does what it is told, forgets on request, and refuses on request.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use async_trait::async_trait;

use super::cri::{CriError, Labels, Runtime, v1};
use super::shared::now_us;

#[derive(Debug, Default)]
pub(crate) struct Fake {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    next: u32,
    pub(crate) sandboxes: Vec<v1::PodSandbox>,
    pub(crate) containers: Vec<v1::ContainerStatus>,
    /// Sandbox of each container.
    homes: BTreeMap<String, String>,
    /// Calls so far, in order.
    pub(crate) calls: Vec<String>,
    /// Calls that fail, with the message; all calls fail when there is a `*`.
    pub(crate) refuse: BTreeMap<&'static str, String>,
    pub(crate) images: Vec<String>,
    /// Exit codes of commands by their first word; others succeed.
    pub(crate) commands: BTreeMap<String, i32>,
}

impl Fake {
    pub(crate) fn new() -> Arc<Self> {
        let fake = Self::default();
        fake.state().images.push("image".into());
        Arc::new(fake)
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Ends the running instance of this container.
    pub(crate) fn exit(&self, name: &str, code: i32) {
        let mut state = self.state();
        let running = v1::ContainerState::ContainerRunning;
        let containers = state.containers.iter_mut();
        for c in containers.filter(|c| c.state() == running) {
            if c.metadata.as_ref().is_some_and(|m| m.name == name) {
                end(c, code);
            }
        }
    }

    pub(crate) fn count(&self, call: &str) -> usize {
        self.state()
            .calls
            .iter()
            .filter(|c| c.starts_with(call))
            .count()
    }

    fn call(&self, call: &'static str, target: &str) -> Result<MutexGuard<'_, State>, CriError> {
        let mut state = self.state();
        state.calls.push(format!("{call} {target}"));
        let refusal = state
            .refuse
            .get("*")
            .or_else(|| state.refuse.get(call))
            .cloned();
        match refusal {
            None => Ok(state),
            Some(message) => Err(CriError {
                call,
                target: target.into(),
                status: tonic::Status::unavailable(message),
            }),
        }
    }
}

fn end(container: &mut v1::ContainerStatus, code: i32) {
    container.set_state(v1::ContainerState::ContainerExited);
    container.exit_code = code;
    container.finished_at = now_us() * 1000;
}

fn has(labels: &Labels, wanted: &Labels) -> bool {
    wanted.iter().all(|(k, v)| labels.get(k) == Some(v))
}

fn not_found(call: &'static str, id: &str) -> CriError {
    CriError {
        call,
        target: id.into(),
        status: tonic::Status::not_found("no such object"),
    }
}

#[async_trait]
impl Runtime for Fake {
    async fn version(&self) -> Result<v1::VersionResponse, CriError> {
        self.call("version", "").map(drop)?;
        Ok(v1::VersionResponse {
            runtime_name: "fake".into(),
            ..Default::default()
        })
    }

    async fn status(&self) -> Result<v1::RuntimeStatus, CriError> {
        self.call("status", "").map(drop)?;
        let condition = |kind: &str| v1::RuntimeCondition {
            r#type: kind.into(),
            status: true,
            ..Default::default()
        };
        Ok(v1::RuntimeStatus {
            conditions: vec![condition("RuntimeReady"), condition("NetworkReady")],
        })
    }

    async fn list_sandboxes(&self, labels: Labels) -> Result<Vec<v1::PodSandbox>, CriError> {
        let state = self.call("list_sandboxes", "")?;
        Ok(state
            .sandboxes
            .iter()
            .filter(|s| has(&s.labels, &labels))
            .cloned()
            .collect())
    }

    async fn sandbox_status(&self, id: &str) -> Result<v1::PodSandboxStatus, CriError> {
        self.call("sandbox_status", id).map(drop)?;
        Ok(v1::PodSandboxStatus {
            id: id.into(),
            network: Some(v1::PodSandboxNetworkStatus {
                ip: "10.0.0.9".into(),
                additional_ips: Vec::new(),
            }),
            ..Default::default()
        })
    }

    async fn run_sandbox(&self, config: v1::PodSandboxConfig) -> Result<String, CriError> {
        let mut state = self.call("run_sandbox", "")?;
        state.next += 1;
        let id = format!("sandbox{}", state.next);
        state.sandboxes.push(v1::PodSandbox {
            id: id.clone(),
            metadata: config.metadata,
            state: v1::PodSandboxState::SandboxReady.into(),
            created_at: now_us() * 1000,
            labels: config.labels,
            annotations: config.annotations,
        });
        Ok(id)
    }

    async fn stop_sandbox(&self, id: &str) -> Result<(), CriError> {
        let mut state = self.call("stop_sandbox", id)?;
        let homes = state.homes.clone();
        for sandbox in state.sandboxes.iter_mut().filter(|s| s.id == id) {
            sandbox.set_state(v1::PodSandboxState::SandboxNotready);
        }
        for container in &mut state.containers {
            if homes.get(&container.id).is_some_and(|home| home == id)
                && container.state() == v1::ContainerState::ContainerRunning
            {
                end(container, 137);
            }
        }
        Ok(())
    }

    async fn remove_sandbox(&self, id: &str) -> Result<(), CriError> {
        self.call("remove_sandbox", id)?
            .sandboxes
            .retain(|s| s.id != id);
        Ok(())
    }

    async fn list_containers(&self, labels: Labels) -> Result<Vec<v1::Container>, CriError> {
        let state = self.call("list_containers", "")?;
        let listed = state.containers.iter().filter(|c| has(&c.labels, &labels));
        Ok(listed
            .map(|c| v1::Container {
                id: c.id.clone(),
                pod_sandbox_id: state.homes.get(&c.id).cloned().unwrap_or_default(),
                metadata: c.metadata.clone(),
                state: c.state,
                created_at: c.created_at,
                labels: c.labels.clone(),
                annotations: c.annotations.clone(),
                ..Default::default()
            })
            .collect())
    }

    async fn container_status(&self, id: &str) -> Result<v1::ContainerStatus, CriError> {
        let state = self.call("container_status", id)?;
        let found = state.containers.iter().find(|c| c.id == id).cloned();
        found.ok_or_else(|| not_found("container_status", id))
    }

    async fn create_container(
        &self,
        sandbox: &str,
        config: v1::ContainerConfig,
        _: v1::PodSandboxConfig,
    ) -> Result<String, CriError> {
        let name = config
            .metadata
            .as_ref()
            .map(|m| m.name.clone())
            .unwrap_or_default();
        let mut state = self.call("create_container", &name)?;
        state.next += 1;
        let id = format!("{name}{}", state.next);
        state.homes.insert(id.clone(), sandbox.into());
        state.containers.push(v1::ContainerStatus {
            id: id.clone(),
            metadata: config.metadata,
            created_at: now_us() * 1000,
            labels: config.labels,
            annotations: config.annotations,
            image: config.image,
            ..Default::default()
        });
        Ok(id)
    }

    async fn start_container(&self, id: &str) -> Result<(), CriError> {
        let mut state = self.call("start_container", id)?;
        for container in state.containers.iter_mut().filter(|c| c.id == id) {
            container.set_state(v1::ContainerState::ContainerRunning);
            container.started_at = now_us() * 1000;
        }
        Ok(())
    }

    async fn stop_container(&self, id: &str, grace_s: i64) -> Result<(), CriError> {
        let mut state = self.call("stop_container", &format!("{id} {grace_s}"))?;
        let running = v1::ContainerState::ContainerRunning;
        for container in state.containers.iter_mut().filter(|c| c.id == id) {
            if container.state() == running {
                end(container, 143);
            }
        }
        Ok(())
    }

    async fn remove_container(&self, id: &str) -> Result<(), CriError> {
        self.call("remove_container", id)?
            .containers
            .retain(|c| c.id != id);
        Ok(())
    }

    async fn reopen_log(&self, id: &str) -> Result<(), CriError> {
        self.call("reopen_log", id).map(drop)
    }

    async fn exec(
        &self,
        id: &str,
        command: Vec<String>,
        _: i64,
    ) -> Result<v1::ExecSyncResponse, CriError> {
        let state = self.call("exec", id)?;
        let first = command.first().cloned().unwrap_or_default();
        let exit_code = state.commands.get(&first).copied().unwrap_or(0);
        Ok(v1::ExecSyncResponse {
            exit_code,
            ..Default::default()
        })
    }

    async fn image_status(&self, image: &str) -> Result<Option<v1::Image>, CriError> {
        let state = self.call("image_status", image)?;
        let present = state.images.iter().any(|i| i == image);
        Ok(present.then(|| v1::Image {
            id: "sha256:1".into(),
            ..Default::default()
        }))
    }

    async fn pull_image(&self, image: &str, _: v1::PodSandboxConfig) -> Result<String, CriError> {
        self.call("pull_image", image)?.images.push(image.into());
        Ok("sha256:1".into())
    }
}
