//! One run of a probe's or a hook's handler.

use std::time::Duration;

use control_api::v1::{Container, Handler, handler::Kind};
use tokio::net::TcpStream;
use tonic::transport::Endpoint;

use super::cri::Runtime;
use super::http_get;

/// Messages and client of the gRPC health protocol.
#[allow(
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::unwrap_used,
    unreachable_pub,
    missing_debug_implementations,
    reason = "generated code"
)]
mod health {
    tonic::include_proto!("grpc.health.v1");
}

/// HTTP hooks have no timeout of their own; this bounds a server that never answers.
const HOOK_TIMEOUT: Duration = Duration::from_secs(60);
/// Of a command's output, for the message of a failure.
const MAX_OUTPUT: usize = 10 << 10;

/// What a handler said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Success,
    Failure(String),
    /// The question could not be asked (the runtime is away): says nothing about the container.
    Unknown(String),
}

/// Runs a probe's handler once.
pub(crate) async fn probe(
    runtime: &dyn Runtime,
    container: &Container,
    id: &str,
    pod_ip: &str,
    handler: &Handler,
    timeout: Duration,
) -> Verdict {
    match &handler.kind {
        None | Some(Kind::SleepS(_)) => Verdict::Success,
        Some(Kind::Exec(exec)) => {
            let seconds = i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX);
            match runtime.exec(id, exec.command.clone(), seconds).await {
                Ok(done) if done.exit_code == 0 => Verdict::Success,
                Ok(done) => {
                    let mut output = done.stdout;
                    output.extend_from_slice(&done.stderr);
                    output.truncate(MAX_OUTPUT);
                    Verdict::Failure(String::from_utf8_lossy(&output).into_owned())
                }
                Err(error) => match error.status.code() {
                    tonic::Code::Unavailable => Verdict::Unknown(error.to_string()),
                    tonic::Code::DeadlineExceeded => {
                        Verdict::Failure(format!("command timed out after {seconds}s"))
                    }
                    _ => Verdict::Failure(error.reason().to_owned()),
                },
            }
        }
        Some(Kind::HttpGet(action)) => {
            match http_get::get(container, action, pod_ip, timeout).await {
                Ok(status) if (200..400).contains(&status) => Verdict::Success,
                Ok(status) => {
                    Verdict::Failure(format!("HTTP probe failed with statuscode: {status}"))
                }
                Err(message) => Verdict::Failure(message),
            }
        }
        Some(Kind::TcpSocket(action)) => {
            let host = if action.host.is_empty() {
                pod_ip
            } else {
                &action.host
            };
            let connect = async {
                let port = http_get::port_number(container, &action.port)?;
                let connected = TcpStream::connect((host, port)).await;
                connected
                    .map(drop)
                    .map_err(|e| format!("dial tcp {host}:{port}: {e}"))
            };
            match tokio::time::timeout(timeout, connect).await {
                Ok(Ok(())) => Verdict::Success,
                Ok(Err(message)) => Verdict::Failure(message),
                Err(_) => Verdict::Failure(format!("dial tcp {host}:{}: i/o timeout", action.port)),
            }
        }
        Some(Kind::Grpc(action)) => {
            let ask = grpc_health(pod_ip, action.port, &action.service);
            match tokio::time::timeout(timeout, ask).await {
                Ok(verdict) => verdict,
                Err(_) => Verdict::Failure(format!(
                    "timeout: health rpc did not complete within {}s",
                    timeout.as_secs()
                )),
            }
        }
    }
}

async fn grpc_health(pod_ip: &str, port: u32, service: &str) -> Verdict {
    let host = if pod_ip.contains(':') {
        format!("[{pod_ip}]")
    } else {
        pod_ip.to_owned()
    };
    let address = format!("http://{host}:{port}");
    let endpoint = match Endpoint::from_shared(address.clone()) {
        Ok(endpoint) => endpoint,
        Err(error) => return Verdict::Failure(format!("{address:?} is not an address: {error}")),
    };
    let channel = match endpoint.connect().await {
        Ok(channel) => channel,
        Err(error) => return Verdict::Failure(format!("connect to {address}: {error}")),
    };
    let request = health::HealthCheckRequest {
        service: service.to_owned(),
    };
    match health::health_client::HealthClient::new(channel)
        .check(request)
        .await
    {
        Err(status) => Verdict::Failure(format!("health rpc failed: {}", status.message())),
        Ok(answer) => {
            let answer = answer.into_inner();
            match answer.status() {
                health::health_check_response::ServingStatus::Serving => Verdict::Success,
                other => Verdict::Failure(format!(
                    "service unhealthy (responded with {:?})",
                    other.as_str_name()
                )),
            }
        }
    }
}

/// Runs a post-start or pre-stop hook to its end.
pub(crate) async fn run_hook(
    runtime: &dyn Runtime,
    container: &Container,
    id: &str,
    pod_ips: &[String],
    handler: &Handler,
) -> Result<(), String> {
    let pod_ip = pod_ips.first().map_or("127.0.0.1", String::as_str);
    match &handler.kind {
        None => Ok(()),
        Some(Kind::SleepS(seconds)) => {
            tokio::time::sleep(Duration::from_secs(u64::try_from(*seconds).unwrap_or(0))).await;
            Ok(())
        }
        // Any answer to an HTTP hook is a delivery.
        Some(Kind::HttpGet(action)) => http_get::get(container, action, pod_ip, HOOK_TIMEOUT)
            .await
            .map(drop),
        // No limit of its own: the caller ends it.
        Some(Kind::Exec(exec)) => match runtime.exec(id, exec.command.clone(), 0).await {
            Ok(done) if done.exit_code == 0 => Ok(()),
            Ok(done) => {
                let output = String::from_utf8_lossy(&done.stderr).into_owned();
                Err(format!("command exited with {}: {output}", done.exit_code))
            }
            Err(error) => Err(error.to_string()),
        },
        Some(Kind::TcpSocket(_) | Kind::Grpc(_)) => {
            match probe(runtime, container, id, pod_ip, handler, HOOK_TIMEOUT).await {
                Verdict::Success => Ok(()),
                Verdict::Failure(message) | Verdict::Unknown(message) => Err(message),
            }
        }
    }
}
