//! Carries out one [`Action`] against the runtime and the node, and says how it went. Decides nothing about the pod.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use control_api::v1::{Container, PodSpec};
use futures::future::join_all;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::container::{StartFacts, check_user, container_config};
use super::cri::{CriError, v1};
use super::env::{ConfigError, Context};
use super::hooks::run_hook;
use super::logs::rotate;
use super::sandbox::sandbox_config;
use super::shared::{Severity, Shared};
use super::sync::{Action, Which};
use super::view::{ContainerView, PodView};
use super::volumes::{self, VolumeError};

/// How an action ended.
#[derive(Debug)]
pub(crate) enum Outcome {
    Done,
    /// The pod as a whole: sandbox, volumes, removal.
    PodFailed {
        reason: &'static str,
        message: String,
    },
    Started {
        which: Which,
        container_id: String,
        hook_failure: Option<String>,
    },
    StartFailed {
        which: Which,
        failure: StartFailure,
    },
    Removed,
}

/// Why a container did not start, in the words of its waiting state.
#[derive(Debug)]
pub(crate) struct StartFailure {
    pub(crate) reason: &'static str,
    pub(crate) message: String,
}

/// Everything an action works on.
#[derive(Clone)]
pub(crate) struct Op {
    pub(crate) shared: Arc<Shared>,
    pub(crate) spec: Arc<PodSpec>,
    pub(crate) view: PodView,
    /// Ends pulls and hooks when the pod is to go.
    pub(crate) cancel: CancellationToken,
    /// Grace period in seconds; may shrink while the pod stops.
    pub(crate) grace: watch::Receiver<i64>,
}

impl Op {
    pub(crate) async fn perform(self, action: Action) -> Outcome {
        match action {
            Action::CreateSandbox { attempt } => self.create_sandbox(attempt).await,
            Action::StartContainer {
                container,
                sandbox_id,
                attempt,
            } => match self.start_container(container, &sandbox_id, attempt).await {
                Ok((container_id, hook_failure)) => Outcome::Started {
                    which: container,
                    container_id,
                    hook_failure,
                },
                Err(failure) => {
                    let image = failure.reason.contains("Image");
                    let what = if image {
                        failure.reason
                    } else {
                        &failure.message
                    };
                    self.warn("Failed", format!("Error: {what}"));
                    Outcome::StartFailed {
                        which: container,
                        failure,
                    }
                }
            },
            Action::KillContainer {
                id,
                container,
                grace_s,
                message,
            } => {
                let spec = container.of(&self.spec);
                self.report(self.kill(&id, spec, grace_s, &message, false).await)
            }
            Action::StopPod { grace_s } => self.report(self.stop_pod(grace_s).await),
            Action::RemoveContainer { id } => self.report(self.remove_container(&id).await),
            Action::RemoveSandbox { id } => self.report(self.remove_sandbox(&id).await),
            Action::RemovePod => self.remove_pod().await,
        }
    }

    fn report(&self, result: Result<(), CriError>) -> Outcome {
        match result {
            Ok(()) => Outcome::Done,
            Err(error) => Outcome::PodFailed {
                reason: "FailedKillPod",
                message: error.to_string(),
            },
        }
    }

    async fn create_sandbox(&self, attempt: u32) -> Outcome {
        if let Err(error) = self.ensure_volumes(Vec::new()).await {
            let message = format!("MountVolume.SetUp failed: {error}");
            return Outcome::PodFailed {
                reason: "FailedMount",
                message,
            };
        }
        let (spec, shared) = (&self.spec, &self.shared);
        // An older sandbox must give up its network before the next one asks for one.
        for old in &self.view.sandboxes {
            if let Err(error) = shared.runtime.stop_sandbox(&old.id).await {
                return Outcome::PodFailed {
                    reason: "FailedKillPod",
                    message: error.to_string(),
                };
            }
        }
        let logs = shared
            .node
            .pod_log_dir(&spec.namespace, &spec.name, &spec.uid);
        if let Err(error) = tokio::fs::create_dir_all(&logs).await {
            let message = format!("create log folder {}: {error}", logs.display());
            return Outcome::PodFailed {
                reason: "FailedCreatePodSandBox",
                message,
            };
        }
        let config = sandbox_config(spec, &shared.control.state().config, &shared.node, attempt);
        match shared.runtime.run_sandbox(config).await {
            Ok(_) => Outcome::Done,
            Err(error) => Outcome::PodFailed {
                reason: "FailedCreatePodSandBox",
                message: format!("Failed to create pod sandbox: {}", error.reason()),
            },
        }
    }

    async fn ensure_volumes(&self, pod_ips: Vec<String>) -> Result<(), VolumeError> {
        let (shared, spec) = (Arc::clone(&self.shared), Arc::clone(&self.spec));
        blocking(move || {
            let desired = shared.control.state();
            let context = Context {
                spec: &spec,
                desired: &desired,
                node: &shared.node,
                pod_ips: &pod_ips,
            };
            volumes::ensure(context)
        })
        .await
    }

    async fn start_container(
        &self,
        which: Which,
        sandbox_id: &str,
        attempt: u32,
    ) -> Result<(String, Option<String>), StartFailure> {
        let shared = &self.shared;
        let Some(container) = which.of(&self.spec) else {
            return Err(StartFailure {
                reason: "CreateContainerConfigError",
                message: "the pod's spec no longer has this container".into(),
            });
        };
        let pod_ips = self
            .view
            .sandboxes
            .first()
            .map(|s| s.ips.clone())
            .unwrap_or_default();
        self.ensure_volumes(pod_ips.clone())
            .await
            .map_err(config_failure)?;
        let sandbox_config = sandbox_config(
            &self.spec,
            &shared.control.state().config,
            &shared.node,
            self.view.sandboxes.first().map_or(0, |s| s.attempt),
        );
        let image = self.ensure_image(container, &sandbox_config).await?;
        check_user(&self.spec, container, &image).map_err(config_failure)?;
        let config = self
            .container_config(which, image.id, attempt, pod_ips)
            .await?;
        let id = shared
            .runtime
            .create_container(sandbox_id, config, sandbox_config)
            .await
            .map_err(|error| {
                let message = error.reason().to_owned();
                StartFailure {
                    reason: "CreateContainerError",
                    message,
                }
            })?;
        let name = &container.name;
        self.note("Created", format!("Created container: {name}"));
        shared.runtime.start_container(&id).await.map_err(|error| {
            let message = error.reason().to_owned();
            StartFailure {
                reason: "RunContainerError",
                message,
            }
        })?;
        self.note("Started", format!("Started container {name}"));
        Ok((id.clone(), self.post_start(container, &id).await))
    }

    /// Why the post-start hook failed, when it did.
    async fn post_start(&self, container: &Container, id: &str) -> Option<String> {
        let hook = container.post_start.as_ref()?;
        let ips = self
            .view
            .sandboxes
            .first()
            .map(|s| s.ips.clone())
            .unwrap_or_default();
        let run = run_hook(self.shared.runtime.as_ref(), container, id, &ips, hook);
        let failure = tokio::select! {
            result = run => result.err()?,
            () = self.cancel.cancelled() => return None,
        };
        self.warn(
            "FailedPostStartHook",
            format!("PostStartHook failed: {failure}"),
        );
        Some(failure)
    }

    async fn container_config(
        &self,
        which: Which,
        image_id: String,
        attempt: u32,
        pod_ips: Vec<String>,
    ) -> Result<v1::ContainerConfig, StartFailure> {
        let (shared, spec) = (Arc::clone(&self.shared), Arc::clone(&self.spec));
        blocking(move || {
            let desired = shared.control.state();
            let context = Context {
                spec: &spec,
                desired: &desired,
                node: &shared.node,
                pod_ips: &pod_ips,
            };
            let container = which
                .of(&spec)
                .ok_or_else(|| VolumeError::Invalid("the container left the spec".into()))?;
            let (mounts, termination_log) = volumes::mounts(context, container, attempt)?;
            let logs = shared
                .node
                .pod_log_dir(&spec.namespace, &spec.name, &spec.uid);
            let logs = logs.join(&container.name);
            std::fs::create_dir_all(&logs).map_err(|source| VolumeError::Io {
                action: "create log folder",
                path: logs.clone(),
                source,
            })?;
            let facts = StartFacts {
                attempt,
                image_id,
                mounts,
                termination_log,
            };
            container_config(context, container, facts).map_err(|source| VolumeError::Config {
                volume: container.name.clone(),
                source,
            })
        })
        .await
        .map_err(|error| match error {
            VolumeError::Config { source, .. } => config_failure(source),
            other => config_failure(other),
        })
    }

    /// The image on the node, pulled when the policy asks for it.
    async fn ensure_image(
        &self,
        container: &Container,
        sandbox: &v1::PodSandboxConfig,
    ) -> Result<v1::Image, StartFailure> {
        let runtime = &self.shared.runtime;
        let name = &container.image;
        if name.trim().is_empty() || name.contains(char::is_whitespace) {
            let message = format!(
                "Failed to apply default image tag {name:?}: couldn't parse image name {name:?}: invalid reference format"
            );
            self.warn("InspectFailed", message.clone());
            return Err(StartFailure {
                reason: "InvalidImageName",
                message,
            });
        }
        let inspect = |error: CriError| {
            let message = format!("Failed to inspect image {name:?}: {}", error.reason());
            StartFailure {
                reason: "ImageInspectError",
                message,
            }
        };
        let present = runtime.image_status(name).await.map_err(inspect)?;
        let policy = match container.image_pull_policy.as_str() {
            "Always" if self.shared.node.prefer_present_images => "IfNotPresent",
            other => other,
        };
        match present {
            Some(image) if policy != "Always" => {
                let message = format!("Container image {name:?} already present on machine");
                self.note("Pulled", message);
                return Ok(image);
            }
            None if policy == "Never" => {
                let message =
                    format!("Container image {name:?} is not present with pull policy of Never");
                self.warn("ErrImageNeverPull", message.clone());
                return Err(StartFailure {
                    reason: "ErrImageNeverPull",
                    message,
                });
            }
            _ => {}
        }
        self.note("Pulling", format!("Pulling image {name:?}"));
        let began = Instant::now();
        let pull = runtime.pull_image(name, sandbox.clone());
        let pulled = tokio::select! {
            result = pull => result.map_err(|e| e.reason().to_owned()),
            () = self.cancel.cancelled() => Err("the pod is being deleted".into()),
        };
        if let Err(reason) = pulled {
            let message = format!("failed to pull image {name:?}: {reason}");
            self.warn("Failed", format!("Failed to pull image {name:?}: {reason}"));
            return Err(StartFailure {
                reason: "ErrImagePull",
                message,
            });
        }
        let took = began.elapsed().as_millis();
        self.note(
            "Pulled",
            format!("Successfully pulled image {name:?} in {took}ms"),
        );
        let image = runtime.image_status(name).await.map_err(inspect)?;
        image.ok_or_else(|| StartFailure {
            reason: "ImageInspectError",
            message: format!("image {name:?} was pulled but the runtime does not list it"),
        })
    }

    fn note(&self, reason: &'static str, message: String) {
        self.shared
            .event(&self.spec, Severity::Normal, reason, message);
    }

    fn warn(&self, reason: &'static str, message: String) {
        self.shared
            .event(&self.spec, Severity::Warning, reason, message);
    }

    /// Main containers together, then sidecars from the last to the first, then the sandboxes.
    async fn stop_pod(&self, grace_s: i64) -> Result<(), CriError> {
        let deadline = Instant::now() + Duration::from_secs(grace_s.max(0).unsigned_abs());
        let sidecar = |c: &&ContainerView| {
            self.spec
                .init_containers
                .iter()
                .position(|s| s.sidecar && s.name == c.name)
        };
        let mut sidecars: Vec<&ContainerView> = self
            .view
            .running()
            .filter(|c| sidecar(c).is_some())
            .collect();
        sidecars.sort_by_key(|c| std::cmp::Reverse(sidecar(c)));
        let mains = self.view.running().filter(|c| sidecar(c).is_none());
        let stops = mains.map(|c| self.stop_one(c, grace_s));
        join_all(stops)
            .await
            .into_iter()
            .collect::<Result<(), _>>()?;
        for container in sidecars {
            let left = deadline.saturating_duration_since(Instant::now()).as_secs();
            self.stop_one(container, i64::try_from(left).unwrap_or(0))
                .await?;
        }
        for sandbox in &self.view.sandboxes {
            self.shared.runtime.stop_sandbox(&sandbox.id).await?;
        }
        Ok(())
    }

    async fn stop_one(&self, container: &ContainerView, grace_s: i64) -> Result<(), CriError> {
        let mut all = self
            .spec
            .containers
            .iter()
            .chain(&self.spec.init_containers);
        let spec = all.find(|c| c.name == container.name);
        let message = format!("Stopping container {}", container.name);
        self.kill(&container.id, spec, grace_s, &message, true)
            .await
    }

    /// Pre-stop hook, then the stop signal, then SIGKILL when the grace period is over.
    async fn kill(
        &self,
        id: &str,
        spec: Option<&Container>,
        grace_s: i64,
        message: &str,
        follow_grace: bool,
    ) -> Result<(), CriError> {
        /// What is left for the process after a hook that used up the grace period.
        const MIN_AFTER_HOOK_S: u64 = 2;
        let runtime = &self.shared.runtime;
        self.note("Killing", message.to_owned());
        let mut grace = self.grace.clone();
        let mut left_s = grace_s.max(0).unsigned_abs();
        if let Some((container, hook)) = spec.and_then(|c| Some((c, c.pre_stop.as_ref()?))) {
            let began = Instant::now();
            let ips = self
                .view
                .sandboxes
                .first()
                .map(|s| s.ips.clone())
                .unwrap_or_default();
            let run = run_hook(runtime.as_ref(), container, id, &ips, hook);
            let shortened = async {
                match follow_grace {
                    true => wait_shorter(&mut grace, grace_s).await,
                    false => std::future::pending().await,
                }
            };
            tokio::select! {
                result = tokio::time::timeout(Duration::from_secs(left_s), run) => {
                    if let Ok(Err(failure)) = result {
                        self.warn("FailedPreStopHook", format!("PreStopHook failed: {failure}"));
                    }
                }
                () = shortened => {}
            }
            left_s = left_s
                .saturating_sub(began.elapsed().as_secs())
                .max(MIN_AFTER_HOOK_S);
        }
        let left_s = i64::try_from(left_s).unwrap_or(i64::MAX);
        let stop = runtime.stop_container(id, left_s);
        tokio::pin!(stop);
        if !follow_grace {
            return stop.await;
        }
        tokio::select! {
            result = &mut stop => return result,
            () = wait_shorter(&mut grace, left_s) => {}
        }
        let now = *grace.borrow();
        runtime.stop_container(id, now).await?;
        stop.await
    }

    /// The instance with its log and termination log.
    async fn remove_container(&self, id: &str) -> Result<(), CriError> {
        self.shared.runtime.remove_container(id).await?;
        if let Some(container) = self.view.containers.iter().find(|c| c.id == id) {
            if !container.log_path.is_empty() {
                rotate::remove(Path::new(&container.log_path));
            }
            if !container.termination_log.is_empty() {
                let _ = std::fs::remove_file(&container.termination_log);
            }
        }
        Ok(())
    }

    async fn remove_sandbox(&self, id: &str) -> Result<(), CriError> {
        self.shared.runtime.stop_sandbox(id).await?;
        self.shared.runtime.remove_sandbox(id).await
    }

    async fn remove_pod(&self) -> Outcome {
        let failed = |message: String| Outcome::PodFailed {
            reason: "FailedKillPod",
            message,
        };
        for container in &self.view.containers {
            if let Err(error) = self.shared.runtime.remove_container(&container.id).await {
                return failed(error.to_string());
            }
        }
        for sandbox in &self.view.sandboxes {
            if let Err(error) = self.remove_sandbox(&sandbox.id).await {
                return failed(error.to_string());
            }
        }
        let (shared, spec) = (Arc::clone(&self.shared), Arc::clone(&self.spec));
        let removed = blocking(move || {
            let node = &shared.node;
            let logs = node.pod_log_dir(&spec.namespace, &spec.name, &spec.uid);
            volumes::remove(node, &spec.uid, &logs)
        })
        .await;
        match removed {
            Ok(()) => Outcome::Removed,
            Err(error) => failed(error.to_string()),
        }
    }
}

fn config_failure(error: impl std::fmt::Display) -> StartFailure {
    StartFailure {
        reason: "CreateContainerConfigError",
        message: error.to_string(),
    }
}

impl From<ConfigError> for StartFailure {
    fn from(error: ConfigError) -> Self {
        config_failure(error)
    }
}

/// Returns when the grace period has become shorter than `than_s`.
async fn wait_shorter(grace: &mut watch::Receiver<i64>, than_s: i64) {
    if grace.wait_for(|now| *now < than_s).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// File work off the async threads.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, VolumeError> + Send + 'static,
) -> Result<T, VolumeError> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(VolumeError::Invalid(format!("file work ended: {error}"))))
}
