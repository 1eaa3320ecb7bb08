//! One HTTP GET as probes and hooks send it: own connection, no proxy, no certificate check, few redirects.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use control_api::v1::{Container, HttpGetAction};
use http::{HeaderValue, Request, Uri, header};
use http_body_util::{BodyExt, Empty};
use hyper_util::rt::TokioIo;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use tokio::net::TcpStream;

const USER_AGENT: &str = concat!("kube-probe/weir-", env!("CARGO_PKG_VERSION"));
/// How much of the answer's body is read, so that the server can finish its answer.
const MAX_BODY_BYTES: usize = 10 << 10;
const MAX_REDIRECTS: usize = 10;

/// The number of a port that is given as a number or as the name of one of the container's ports.
pub(crate) fn port_number(container: &Container, port: &str) -> Result<u16, String> {
    if let Ok(number) = port.parse() {
        return Ok(number);
    }
    let named = container.ports.iter().find(|p| p.name == port);
    named
        .and_then(|p| u16::try_from(p.container_port).ok())
        .ok_or_else(|| format!("container {} has no port named {port:?}", container.name))
}

/// Sends the request; redirects within the same host are followed, others count as the answer.
pub(crate) async fn get(
    container: &Container,
    action: &HttpGetAction,
    pod_ip: &str,
    timeout: Duration,
) -> Result<u16, String> {
    let port = port_number(container, &action.port)?;
    let host = if action.host.is_empty() {
        pod_ip
    } else {
        &action.host
    };
    let scheme = if action.scheme.eq_ignore_ascii_case("https") {
        "https"
    } else {
        "http"
    };
    let authority = if host.contains(':') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    };
    let slash = if action.path.starts_with('/') {
        ""
    } else {
        "/"
    };
    let url = format!("{scheme}://{authority}{slash}{}", action.path);
    let run = async {
        let mut uri: Uri = url
            .parse()
            .map_err(|e| format!("{url:?} is not a URL: {e}"))?;
        for _ in 0..MAX_REDIRECTS {
            let (status, location) = once(&uri, action).await?;
            let next = location.and_then(|to| redirect(&uri, &to));
            match next {
                Some(next) => uri = next,
                None => return Ok(status),
            }
        }
        Err(format!(
            "Get {url:?}: stopped after {MAX_REDIRECTS} redirects"
        ))
    };
    match tokio::time::timeout(timeout, run).await {
        Ok(result) => result,
        Err(_) => Err(format!(
            "Get {url:?}: context deadline exceeded (no answer within {} s)",
            timeout.as_secs()
        )),
    }
}

/// Where a redirect leads when it stays on the same host.
fn redirect(from: &Uri, location: &str) -> Option<Uri> {
    let to: Uri = location.parse().ok()?;
    match to.authority() {
        None => {
            let path = if location.starts_with('/') {
                location.into()
            } else {
                format!("/{location}")
            };
            Uri::builder()
                .scheme(from.scheme()?.clone())
                .authority(from.authority()?.clone())
                .path_and_query(path)
                .build()
                .ok()
        }
        Some(authority) if Some(authority.host()) == from.host() => Some(to),
        Some(_) => None,
    }
}

async fn once(uri: &Uri, action: &HttpGetAction) -> Result<(u16, Option<String>), String> {
    let failed = |e: &dyn std::fmt::Display| format!("Get \"{uri}\": {e}");
    let host = uri
        .host()
        .unwrap_or_default()
        .trim_start_matches('[')
        .trim_end_matches(']');
    let tls = uri.scheme_str() == Some("https");
    let port = uri.port_u16().unwrap_or(if tls { 443 } else { 80 });
    let stream = TcpStream::connect((host, port))
        .await
        .map_err(|e| failed(&e))?;
    if tls {
        let name = ServerName::try_from(host.to_owned()).map_err(|e| failed(&e))?;
        let connector = tokio_rustls::TlsConnector::from(tls_config()?);
        let stream = connector
            .connect(name, stream)
            .await
            .map_err(|e| failed(&e))?;
        exchange(TokioIo::new(stream), uri, action)
            .await
            .map_err(|e| failed(&e))
    } else {
        exchange(TokioIo::new(stream), uri, action)
            .await
            .map_err(|e| failed(&e))
    }
}

async fn exchange<S>(
    io: S,
    uri: &Uri,
    action: &HttpGetAction,
) -> Result<(u16, Option<String>), Box<dyn std::error::Error + Send + Sync>>
where
    S: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
{
    let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await?;
    let connection = tokio::spawn(connection);
    let path = uri.path_and_query().map_or("/", |p| p.as_str());
    let mut request = Request::get(path).body(Empty::<bytes::Bytes>::new())?;
    let headers = request.headers_mut();
    headers.insert(header::USER_AGENT, HeaderValue::from_static(USER_AGENT));
    headers.insert(header::ACCEPT, HeaderValue::from_static("*/*"));
    headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    if let Some(authority) = uri.authority() {
        headers.insert(header::HOST, HeaderValue::from_str(authority.as_str())?);
    }
    let mut seen = std::collections::HashSet::new();
    for wanted in &action.headers {
        let name = header::HeaderName::from_bytes(wanted.name.as_bytes())?;
        let value = HeaderValue::from_str(&wanted.value)?;
        // The first of a name replaces our default, further ones add to it.
        if seen.insert(name.clone()) {
            headers.insert(name, value);
        } else {
            headers.append(name, value);
        }
    }
    let response = sender.send_request(request).await?;
    let status = response.status();
    let location = response.headers().get(header::LOCATION);
    let location = location.filter(|_| status.is_redirection());
    let location = location.and_then(|l| l.to_str().ok()).map(str::to_owned);
    let mut body = response.into_body();
    let mut read = 0;
    while read < MAX_BODY_BYTES {
        match body.frame().await {
            Some(Ok(frame)) => read += frame.data_ref().map_or(0, bytes::Bytes::len),
            // The status decides; a body cut short does not change it.
            Some(Err(_)) | None => break,
        }
    }
    connection.abort();
    Ok((status.as_u16(), location))
}

fn tls_config() -> Result<Arc<ClientConfig>, String> {
    static CONFIG: OnceLock<Arc<ClientConfig>> = OnceLock::new();
    if let Some(config) = CONFIG.get() {
        return Ok(Arc::clone(config));
    }
    let provider = Arc::new(ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| format!("set up TLS for probes: {e}"))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyCertificate))
        .with_no_client_auth();
    Ok(Arc::clone(CONFIG.get_or_init(|| Arc::new(config))))
}

/// Probes ask whether a server answers, not who it is: pods serve certificates for names that the node does not know.
#[derive(Debug)]
struct AnyCertificate;

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        ring::default_provider()
            .signature_verification_algorithms
            .supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use control_api::v1::{ContainerPort, HttpHeader};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    async fn serve(answers: Vec<&'static str>) -> (u16, tokio::task::JoinHandle<Vec<String>>) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let task = tokio::spawn(async move {
            let mut requests = Vec::new();
            for answer in answers {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = vec![0; 4096];
                let n = stream.read(&mut request).await.unwrap();
                requests.push(String::from_utf8_lossy(&request[..n]).into_owned());
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
            requests
        });
        (port, task)
    }

    #[tokio::test]
    async fn sends_headers_and_follows_redirects_on_the_same_host() {
        let (port, task) = serve(vec![
            "HTTP/1.1 302 Found\r\nlocation: /new\r\ncontent-length: 0\r\n\r\n",
            "HTTP/1.1 503 No\r\ncontent-length: 4\r\n\r\nbusy",
        ])
        .await;
        let ports = vec![ContainerPort {
            name: "web".into(),
            container_port: u32::from(port),
            ..ContainerPort::default()
        }];
        let container = Container {
            ports,
            ..Container::default()
        };
        let action = HttpGetAction {
            port: "web".into(),
            path: "/old".into(),
            headers: vec![HttpHeader {
                name: "X-A".into(),
                value: "1".into(),
            }],
            ..HttpGetAction::default()
        };
        let status = get(&container, &action, "127.0.0.1", Duration::from_secs(5)).await;
        assert_eq!(status, Ok(503));
        let requests = task.await.unwrap();
        assert!(
            requests[0].starts_with("GET /old HTTP/1.1\r\n"),
            "{requests:?}"
        );
        assert!(requests[0].contains("x-a: 1\r\n"), "{requests:?}");
        assert!(
            requests[1].starts_with("GET /new HTTP/1.1\r\n"),
            "{requests:?}"
        );
    }

    #[tokio::test]
    async fn unknown_port_names_are_named() {
        let action = HttpGetAction {
            port: "nope".into(),
            ..HttpGetAction::default()
        };
        let error = get(
            &Container::default(),
            &action,
            "127.0.0.1",
            Duration::from_secs(1),
        )
        .await
        .unwrap_err();
        assert!(error.contains("\"nope\""), "{error}");
    }
}
