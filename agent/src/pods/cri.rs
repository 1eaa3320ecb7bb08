//! The container runtime: a seam (`Runtime`) and its real occupant over the CRI socket. Nothing here decides.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};

/// Messages and services of CRI `runtime.v1`.
#[allow(
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::unwrap_used,
    clippy::too_many_lines,
    unreachable_pub,
    missing_debug_implementations,
    reason = "generated code"
)]
pub(crate) mod v1 {
    tonic::include_proto!("runtime.v1");
}

use v1::image_service_client::ImageServiceClient;
use v1::runtime_service_client::RuntimeServiceClient;

/// Answers of list calls on a crowded node pass tonic's default of 4 MiB.
const MAX_MESSAGE_BYTES: usize = 16 << 20;
/// «Are you there?»: the node's Ready condition hangs on the answer.
const PING_CALL: Duration = Duration::from_secs(3);
/// Calls that only read or signal.
const SHORT_CALL: Duration = Duration::from_secs(30);
/// Sandbox and container creation: includes the CNI plugin and unpacking.
const LONG_CALL: Duration = Duration::from_secs(4 * 60);
/// A pull is bounded by its own cancellation; this only frees a call the runtime forgot.
const PULL_CALL: Duration = Duration::from_secs(60 * 60);

/// A call to the runtime failed.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{call} {target}: {}", .status.message())]
pub(crate) struct CriError {
    pub(crate) call: &'static str,
    pub(crate) target: String,
    pub(crate) status: tonic::Status,
}

impl CriError {
    /// The object does not exist (any more).
    pub(crate) fn is_not_found(&self) -> bool {
        self.status.code() == tonic::Code::NotFound
    }

    /// What the runtime said, without our context.
    pub(crate) fn reason(&self) -> &str {
        self.status.message()
    }
}

/// Labels to select by.
pub(crate) type Labels = BTreeMap<String, String>;

/// What the pod runner needs of a container runtime.
#[async_trait]
pub(crate) trait Runtime: Send + Sync + 'static {
    async fn version(&self) -> Result<v1::VersionResponse, CriError>;
    async fn status(&self) -> Result<v1::RuntimeStatus, CriError>;
    async fn list_sandboxes(&self, labels: Labels) -> Result<Vec<v1::PodSandbox>, CriError>;
    async fn sandbox_status(&self, id: &str) -> Result<v1::PodSandboxStatus, CriError>;
    async fn run_sandbox(&self, config: v1::PodSandboxConfig) -> Result<String, CriError>;
    async fn stop_sandbox(&self, id: &str) -> Result<(), CriError>;
    async fn remove_sandbox(&self, id: &str) -> Result<(), CriError>;
    async fn list_containers(&self, labels: Labels) -> Result<Vec<v1::Container>, CriError>;
    async fn container_status(&self, id: &str) -> Result<v1::ContainerStatus, CriError>;
    async fn create_container(
        &self,
        sandbox: &str,
        config: v1::ContainerConfig,
        sandbox_config: v1::PodSandboxConfig,
    ) -> Result<String, CriError>;
    async fn start_container(&self, id: &str) -> Result<(), CriError>;
    async fn stop_container(&self, id: &str, grace_s: i64) -> Result<(), CriError>;
    async fn remove_container(&self, id: &str) -> Result<(), CriError>;
    async fn reopen_log(&self, id: &str) -> Result<(), CriError>;
    async fn exec(
        &self,
        id: &str,
        command: Vec<String>,
        timeout_s: i64,
    ) -> Result<v1::ExecSyncResponse, CriError>;
    async fn image_status(&self, image: &str) -> Result<Option<v1::Image>, CriError>;
    async fn pull_image(
        &self,
        image: &str,
        sandbox_config: v1::PodSandboxConfig,
    ) -> Result<String, CriError>;
}

/// containerd (or another CRI v1 runtime) behind a Unix socket. Connects when first used, and again after the runtime
/// restarted.
#[derive(Clone, Debug)]
pub(crate) struct Cri {
    runtime: RuntimeServiceClient<Channel>,
    images: ImageServiceClient<Channel>,
}

impl Cri {
    /// `endpoint` is `unix:///PATH` or a path.
    pub(crate) fn new(endpoint: &str) -> Self {
        let path = endpoint
            .strip_prefix("unix://")
            .unwrap_or(endpoint)
            .to_owned();
        let connector = tower::service_fn(move |_: Uri| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        let channel =
            Endpoint::from_static("http://localhost").connect_with_connector_lazy(connector);
        Self {
            runtime: RuntimeServiceClient::new(channel.clone())
                .max_decoding_message_size(MAX_MESSAGE_BYTES),
            images: ImageServiceClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES),
        }
    }
}

fn request<T>(message: T, deadline: Duration) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.set_timeout(deadline);
    request
}

fn failed(call: &'static str, target: &str) -> impl FnOnce(tonic::Status) -> CriError {
    let target = target.to_owned();
    move |status| CriError {
        call,
        target,
        status,
    }
}

/// The runtime answered a status call without a status.
fn absent(call: &'static str, target: &str) -> CriError {
    failed(call, target)(tonic::Status::not_found("the runtime sent an empty answer"))
}

/// Removing or stopping what is not there is done already.
fn tolerate_absence(result: Result<(), CriError>) -> Result<(), CriError> {
    match result {
        Err(error) if error.is_not_found() => Ok(()),
        other => other,
    }
}

#[async_trait]
impl Runtime for Cri {
    async fn version(&self) -> Result<v1::VersionResponse, CriError> {
        let message = v1::VersionRequest {
            version: "0.1.0".into(),
        };
        let answer = self
            .runtime
            .clone()
            .version(request(message, PING_CALL))
            .await;
        answer
            .map(tonic::Response::into_inner)
            .map_err(failed("ask the version of", "runtime"))
    }

    async fn status(&self) -> Result<v1::RuntimeStatus, CriError> {
        let message = v1::StatusRequest { verbose: false };
        let answer = self
            .runtime
            .clone()
            .status(request(message, PING_CALL))
            .await;
        let answer = answer
            .map_err(failed("ask the status of", "runtime"))?
            .into_inner();
        answer
            .status
            .ok_or_else(|| absent("ask the status of", "runtime"))
    }

    async fn list_sandboxes(&self, labels: Labels) -> Result<Vec<v1::PodSandbox>, CriError> {
        let filter = v1::PodSandboxFilter {
            id: String::new(),
            label_selector: labels,
        };
        let message = v1::ListPodSandboxRequest {
            filter: Some(filter),
        };
        let answer = self
            .runtime
            .clone()
            .list_pod_sandbox(request(message, SHORT_CALL))
            .await;
        answer
            .map(|a| a.into_inner().items)
            .map_err(failed("list", "pod sandboxes"))
    }

    async fn sandbox_status(&self, id: &str) -> Result<v1::PodSandboxStatus, CriError> {
        const CALL: &str = "read status of pod sandbox";
        let message = v1::PodSandboxStatusRequest {
            pod_sandbox_id: id.into(),
            verbose: false,
        };
        let answer = self
            .runtime
            .clone()
            .pod_sandbox_status(request(message, SHORT_CALL))
            .await;
        let answer = answer.map_err(failed(CALL, id))?.into_inner();
        answer.status.ok_or_else(|| absent(CALL, id))
    }

    async fn run_sandbox(&self, config: v1::PodSandboxConfig) -> Result<String, CriError> {
        let name = config
            .metadata
            .as_ref()
            .map(|m| format!("{}/{}", m.namespace, m.name))
            .unwrap_or_default();
        let message = v1::RunPodSandboxRequest {
            config: Some(config),
            runtime_handler: String::new(),
        };
        let answer = self
            .runtime
            .clone()
            .run_pod_sandbox(request(message, LONG_CALL))
            .await;
        answer
            .map(|a| a.into_inner().pod_sandbox_id)
            .map_err(failed("create the sandbox of pod", &name))
    }

    async fn stop_sandbox(&self, id: &str) -> Result<(), CriError> {
        let message = v1::StopPodSandboxRequest {
            pod_sandbox_id: id.into(),
        };
        let answer = self
            .runtime
            .clone()
            .stop_pod_sandbox(request(message, LONG_CALL))
            .await;
        tolerate_absence(answer.map(drop).map_err(failed("stop pod sandbox", id)))
    }

    async fn remove_sandbox(&self, id: &str) -> Result<(), CriError> {
        let message = v1::RemovePodSandboxRequest {
            pod_sandbox_id: id.into(),
        };
        let answer = self
            .runtime
            .clone()
            .remove_pod_sandbox(request(message, LONG_CALL))
            .await;
        tolerate_absence(answer.map(drop).map_err(failed("remove pod sandbox", id)))
    }

    async fn list_containers(&self, labels: Labels) -> Result<Vec<v1::Container>, CriError> {
        let filter = v1::ContainerFilter {
            label_selector: labels,
            ..Default::default()
        };
        let message = v1::ListContainersRequest {
            filter: Some(filter),
        };
        let answer = self
            .runtime
            .clone()
            .list_containers(request(message, SHORT_CALL))
            .await;
        answer
            .map(|a| a.into_inner().containers)
            .map_err(failed("list", "containers"))
    }

    async fn container_status(&self, id: &str) -> Result<v1::ContainerStatus, CriError> {
        const CALL: &str = "read status of container";
        let message = v1::ContainerStatusRequest {
            container_id: id.into(),
            verbose: false,
        };
        let answer = self
            .runtime
            .clone()
            .container_status(request(message, SHORT_CALL))
            .await;
        let answer = answer.map_err(failed(CALL, id))?.into_inner();
        answer.status.ok_or_else(|| absent(CALL, id))
    }

    async fn create_container(
        &self,
        sandbox: &str,
        config: v1::ContainerConfig,
        sandbox_config: v1::PodSandboxConfig,
    ) -> Result<String, CriError> {
        let name = config
            .metadata
            .as_ref()
            .map(|m| m.name.clone())
            .unwrap_or_default();
        let message = v1::CreateContainerRequest {
            pod_sandbox_id: sandbox.into(),
            config: Some(config),
            sandbox_config: Some(sandbox_config),
        };
        let answer = self
            .runtime
            .clone()
            .create_container(request(message, LONG_CALL))
            .await;
        answer
            .map(|a| a.into_inner().container_id)
            .map_err(failed("create container", &name))
    }

    async fn start_container(&self, id: &str) -> Result<(), CriError> {
        let message = v1::StartContainerRequest {
            container_id: id.into(),
        };
        let answer = self
            .runtime
            .clone()
            .start_container(request(message, LONG_CALL))
            .await;
        answer.map(drop).map_err(failed("start container", id))
    }

    async fn stop_container(&self, id: &str, grace_s: i64) -> Result<(), CriError> {
        let grace_s = grace_s.max(0);
        let message = v1::StopContainerRequest {
            container_id: id.into(),
            timeout: grace_s,
        };
        let deadline = LONG_CALL.saturating_add(Duration::from_secs(grace_s.unsigned_abs()));
        let answer = self
            .runtime
            .clone()
            .stop_container(request(message, deadline))
            .await;
        tolerate_absence(answer.map(drop).map_err(failed("stop container", id)))
    }

    async fn remove_container(&self, id: &str) -> Result<(), CriError> {
        let message = v1::RemoveContainerRequest {
            container_id: id.into(),
        };
        let answer = self
            .runtime
            .clone()
            .remove_container(request(message, LONG_CALL))
            .await;
        tolerate_absence(answer.map(drop).map_err(failed("remove container", id)))
    }

    async fn reopen_log(&self, id: &str) -> Result<(), CriError> {
        let message = v1::ReopenContainerLogRequest {
            container_id: id.into(),
        };
        let answer = self
            .runtime
            .clone()
            .reopen_container_log(request(message, SHORT_CALL))
            .await;
        answer
            .map(drop)
            .map_err(failed("reopen the log of container", id))
    }

    async fn exec(
        &self,
        id: &str,
        command: Vec<String>,
        timeout_s: i64,
    ) -> Result<v1::ExecSyncResponse, CriError> {
        let message = v1::ExecSyncRequest {
            container_id: id.into(),
            cmd: command,
            timeout: timeout_s,
        };
        let deadline = SHORT_CALL.saturating_add(Duration::from_secs(timeout_s.unsigned_abs()));
        let answer = self
            .runtime
            .clone()
            .exec_sync(request(message, deadline))
            .await;
        answer
            .map(tonic::Response::into_inner)
            .map_err(failed("run a command in container", id))
    }

    async fn image_status(&self, image: &str) -> Result<Option<v1::Image>, CriError> {
        let spec = v1::ImageSpec {
            image: image.into(),
            ..Default::default()
        };
        let message = v1::ImageStatusRequest { image: Some(spec) };
        let answer = self
            .images
            .clone()
            .image_status(request(message, SHORT_CALL))
            .await;
        answer
            .map(|a| a.into_inner().image)
            .map_err(failed("look up image", image))
    }

    async fn pull_image(
        &self,
        image: &str,
        sandbox_config: v1::PodSandboxConfig,
    ) -> Result<String, CriError> {
        let spec = v1::ImageSpec {
            image: image.into(),
            ..Default::default()
        };
        let message = v1::PullImageRequest {
            image: Some(spec),
            sandbox_config: Some(sandbox_config),
        };
        let answer = self
            .images
            .clone()
            .pull_image(request(message, PULL_CALL))
            .await;
        answer
            .map(|a| a.into_inner().image_ref)
            .map_err(failed("pull image", image))
    }
}
