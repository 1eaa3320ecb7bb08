//! The server under test: its address, admin credentials, and requests to it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use base64::Engine as _;
use reqwest::blocking::{Client, Response};
use serde_json::Value;

/// Who sends a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Identity {
    Admin,
    Anonymous,
    Token(String),
}

/// One HTTP request of a case.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) method: String,
    pub(super) path: String,
    pub(super) headers: Vec<(String, String)>,
    pub(super) identity: Identity,
    pub(super) body: Option<Vec<u8>>,
}

/// A live API server with its admin's credentials, taken from a kubeconfig.
#[derive(Debug)]
pub(super) struct Server {
    pub(super) url: String,
    pub(super) kubeconfig: PathBuf,
    pub(super) kubectl: PathBuf,
    admin: Client,
    anonymous: Client,
}

const REQUEST_TIMEOUT: Duration = Duration::from_secs(70);

impl Server {
    /// Reads server, CA and client certificate from a kubeconfig's first cluster and user.
    ///
    /// # Errors
    /// When the kubeconfig lacks something.
    pub(super) fn from_kubeconfig(kubeconfig: &Path, kubectl: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(kubeconfig)
            .with_context(|| format!("read kubeconfig {}", kubeconfig.display()))?;
        let config: Value = serde_yaml_ng::from_str(&text)?;
        let cluster = &config["clusters"][0]["cluster"];
        let user = &config["users"][0]["user"];
        let Some(url) = cluster["server"].as_str() else {
            bail!("no server in {}", kubeconfig.display())
        };
        let ca = pem_of(cluster, "certificate-authority")?;
        let mut identity = pem_of(user, "client-certificate")?;
        identity.extend(pem_of(user, "client-key")?);
        let root = reqwest::Certificate::from_pem(&ca)?;
        let base = || {
            Client::builder()
                .use_rustls_tls()
                .timeout(None)
                .add_root_certificate(root.clone())
        };
        Ok(Self {
            url: url.trim_end_matches('/').to_owned(),
            kubeconfig: kubeconfig.into(),
            kubectl: kubectl.into(),
            admin: base()
                .identity(reqwest::Identity::from_pem(&identity)?)
                .build()?,
            anonymous: base().build()?,
        })
    }

    /// Sends a request and waits for the head of the answer.
    ///
    /// # Errors
    /// Transport failures.
    pub(super) fn send(&self, request: &Request, streaming: bool) -> anyhow::Result<Response> {
        let client = match request.identity {
            Identity::Admin => &self.admin,
            Identity::Anonymous | Identity::Token(_) => &self.anonymous,
        };
        let method = reqwest::Method::from_bytes(request.method.as_bytes())?;
        let mut builder = client.request(method, format!("{}{}", self.url, request.path));
        if !streaming {
            builder = builder.timeout(REQUEST_TIMEOUT);
        }
        for (name, value) in &request.headers {
            builder = builder.header(name, value);
        }
        if let Identity::Token(token) = &request.identity {
            builder = builder.header("Authorization", format!("Bearer {token}"));
        }
        if let Some(body) = &request.body {
            builder = builder.body(body.clone());
        }
        Ok(builder.send()?)
    }

    /// A JSON request as admin: the status code and the parsed body (null when it is not JSON).
    ///
    /// # Errors
    /// Transport failures.
    pub(super) fn json(
        &self,
        method: &str,
        path: &str,
        content_type: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<(u16, Value)> {
        let mut headers = vec![("Accept".to_owned(), "application/json".to_owned())];
        if body.is_some() {
            headers.push(("Content-Type".into(), content_type.into()));
        }
        let request = Request {
            method: method.into(),
            path: path.into(),
            headers,
            identity: Identity::Admin,
            body: body.map(|b| b.to_string().into_bytes()),
        };
        let answer = self.send(&request, false)?;
        let status = answer.status().as_u16();
        Ok((
            status,
            serde_json::from_slice(&answer.bytes()?).unwrap_or(Value::Null),
        ))
    }
}

fn pem_of(map: &Value, key: &str) -> anyhow::Result<Vec<u8>> {
    if let Some(data) = map[format!("{key}-data")].as_str() {
        return Ok(base64::engine::general_purpose::STANDARD.decode(data)?);
    }
    match map[key].as_str() {
        Some(path) => std::fs::read(path).with_context(|| format!("read {key} {path}")),
        None => bail!("kubeconfig has neither {key} nor {key}-data"),
    }
}
