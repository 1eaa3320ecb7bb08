//! The API server over real TLS: identities, bodies, errors, watches.
#![allow(clippy::unwrap_used, reason = "a test may stop at any surprise")]

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, ServerName};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_util::sync::{CancellationToken, DropGuard};
use weir_control::apiserver::api::Api;
use weir_control::apiserver::http::Server;
use weir_control::apiserver::tokens::Tokens;
use weir_control::config::Network;
use weir_control::pki::{CertKey, Pki};
use weir_control::store::{EmbeddedStore, OpenOptions};

const CONFIG_MAPS: &str = "/api/v1/namespaces/default/configmaps";

struct Cluster {
    address: SocketAddr,
    pki: Pki,
    _dir: tempfile::TempDir,
    _stop: DropGuard,
}

impl Cluster {
    async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let pki = Pki::open(dir.path(), &["localhost".into()], &[]).unwrap();
        let options = OpenOptions {
            path: dir.path().join("store"),
            now_us: || 0,
        };
        let store = Arc::new(EmbeddedStore::open(&options).unwrap());
        let api = Arc::new(Api::new(store, Network::default()));
        api.set_tokens(Tokens::open(dir.path(), "https://cluster.example").unwrap());
        api.bootstrap("192.0.2.1:6443".parse().unwrap())
            .await
            .unwrap();
        let stop = CancellationToken::new();
        let server = Arc::new(Server::new(api, &pki, stop.clone()).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(server.serve(listener));
        Self {
            address,
            pki,
            _dir: dir,
            _stop: stop.drop_guard(),
        }
    }

    async fn send(
        &self,
        identity: Option<&CertKey>,
        request: Request<Full<Bytes>>,
    ) -> Response<Incoming> {
        let mut roots = RootCertStore::empty();
        for ca in CertificateDer::pem_slice_iter(self.pki.ca_pem.as_bytes()) {
            roots.add(ca.unwrap()).unwrap();
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots);
        let config = match identity {
            None => builder.with_no_client_auth(),
            Some(pair) => {
                let (certs, key) = pair.der().unwrap();
                builder.with_client_auth_cert(certs, key).unwrap()
            }
        };
        let tcp = TcpStream::connect(self.address).await.unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        let tls = TlsConnector::from(Arc::new(config))
            .connect(name, tcp)
            .await
            .unwrap();
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(tls))
            .await
            .unwrap();
        tokio::spawn(connection);
        sender.send_request(request).await.unwrap()
    }

    async fn call(
        &self,
        method: Method,
        path: &str,
        kind: &str,
        body: &[u8],
    ) -> (StatusCode, Value) {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "localhost")
            .header("content-type", kind)
            .body(Full::new(Bytes::copy_from_slice(body)))
            .unwrap();
        read(self.send(Some(&self.pki.admin), request).await).await
    }

    async fn post(&self, path: &str, object: &Value) -> (StatusCode, Value) {
        self.call(
            Method::POST,
            path,
            "application/json",
            object.to_string().as_bytes(),
        )
        .await
    }

    async fn get(&self, path: &str) -> (StatusCode, Value) {
        self.call(Method::GET, path, "", b"").await
    }
}

async fn read(response: Response<Incoming>) -> (StatusCode, Value) {
    let status = response.status();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
}

fn get(path: &str) -> Request<Full<Bytes>> {
    let request = Request::builder().uri(path).header("host", "localhost");
    request.body(Full::default()).unwrap()
}

fn config_map(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"k": "v"}})
}

#[tokio::test]
async fn only_certificates_of_the_cluster_are_identities() {
    let cluster = Cluster::start().await;
    let other_dir = tempfile::tempdir().unwrap();
    let foreign = Pki::open(other_dir.path(), &[], &[]).unwrap().admin;
    for identity in [None, Some(&foreign)] {
        let (status, body) = read(cluster.send(identity, get("/api/v1/nodes")).await).await;
        assert_eq!(
            (status.as_u16(), &body["reason"]),
            (401, &json!("Unauthorized"))
        );
        let open = cluster.send(identity, get("/readyz")).await;
        assert_eq!(open.status(), 200, "health is open");
    }
    let mut with_token = get("/api/v1/nodes");
    with_token
        .headers_mut()
        .insert("authorization", "Bearer x".parse().unwrap());
    assert_eq!(cluster.send(None, with_token).await.status(), 401);
    assert_eq!(cluster.get("/api/v1/nodes").await.0, 200);
    let mut as_other = get("/api/v1/nodes");
    as_other
        .headers_mut()
        .insert("impersonate-user", "eve".parse().unwrap());
    let (status, body) = read(cluster.send(Some(&cluster.pki.admin), as_other).await).await;
    assert_eq!(status, 403);
    assert_eq!(
        body["message"],
        "nodes is forbidden: User \"eve\" cannot list resource \"nodes\" in API group \"\" at the cluster scope"
    );
}

#[tokio::test]
async fn broken_bodies_are_status_errors() {
    let cluster = Cluster::start().await;
    let huge = vec![b' '; (3 << 20) + 1];
    let wrong_kind = br#"{"apiVersion":"v1","kind":"Secret","metadata":{"name":"a"}}"#;
    let cases: [(&str, &[u8], u16, &str); 8] = [
        (
            "application/json",
            br#"{"apiVersion":"v1","kind":"#,
            400,
            "BadRequest",
        ),
        ("application/json", b"[]", 400, "BadRequest"),
        ("application/json", b"", 400, "BadRequest"),
        ("application/json", wrong_kind, 400, "BadRequest"),
        ("application/yaml", b"a: [", 400, "BadRequest"),
        (
            "application/vnd.kubernetes.protobuf",
            b"k8s\0\xff\xff",
            400,
            "BadRequest",
        ),
        ("text/csv", b"a,b", 415, "UnsupportedMediaType"),
        ("application/json", &huge, 413, "RequestEntityTooLarge"),
    ];
    for (kind, body, code, reason) in cases {
        let (status, answer) = cluster.call(Method::POST, CONFIG_MAPS, kind, body).await;
        assert_eq!(
            (status.as_u16(), answer["reason"].as_str()),
            (code, Some(reason)),
            "{kind}"
        );
        assert_eq!(answer["kind"], "Status");
        assert_eq!(answer["code"], code);
    }
    let elsewhere = "/api/v1/namespaces/missing/configmaps";
    assert_eq!(cluster.post(elsewhere, &config_map("a")).await.0, 404);
    assert_eq!(cluster.get("/apis/nope/v1/things").await.0, 404);
    let posted = cluster
        .post(&format!("{CONFIG_MAPS}/a"), &config_map("a"))
        .await;
    assert_eq!(
        (posted.0.as_u16(), posted.1["reason"].as_str()),
        (405, Some("MethodNotAllowed"))
    );
}

#[tokio::test]
async fn a_watch_follows_a_list_without_a_gap() {
    let cluster = Cluster::start().await;
    cluster.post(CONFIG_MAPS, &config_map("before")).await;
    let (_, list) = cluster.get(CONFIG_MAPS).await;
    let revision = list["metadata"]["resourceVersion"].as_str().unwrap();
    cluster.post(CONFIG_MAPS, &config_map("between")).await;
    let path = format!("{CONFIG_MAPS}?watch=1&resourceVersion={revision}");
    let mut stream = cluster
        .send(Some(&cluster.pki.admin), get(&path))
        .await
        .into_body();
    cluster.post(CONFIG_MAPS, &config_map("after")).await;
    cluster
        .call(Method::DELETE, &format!("{CONFIG_MAPS}/before"), "", b"")
        .await;
    let mut text = String::new();
    while text.lines().count() < 3 {
        let frame = stream.frame().await.unwrap().unwrap();
        text.push_str(std::str::from_utf8(frame.data_ref().unwrap()).unwrap());
    }
    let events: Vec<(String, String)> = text
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .map(|e| {
            (
                e["type"].as_str().unwrap().into(),
                e["object"]["metadata"]["name"].as_str().unwrap().into(),
            )
        })
        .collect();
    let expected = [
        ("ADDED", "between"),
        ("ADDED", "after"),
        ("DELETED", "before"),
    ];
    assert_eq!(events, expected.map(|(t, n)| (t.to_owned(), n.to_owned())));
}

#[tokio::test]
async fn pages_show_one_revision() {
    let cluster = Cluster::start().await;
    for n in 0..5 {
        cluster
            .post(CONFIG_MAPS, &config_map(&format!("c{n}")))
            .await;
    }
    let (_, first) = cluster.get(&format!("{CONFIG_MAPS}?limit=2")).await;
    assert_eq!(first["metadata"]["remainingItemCount"], 3);
    cluster
        .call(Method::DELETE, &format!("{CONFIG_MAPS}/c3"), "", b"")
        .await;
    let token = first["metadata"]["continue"].as_str().unwrap();
    let (_, rest) = cluster
        .get(&format!("{CONFIG_MAPS}?continue={token}"))
        .await;
    let names: Vec<&str> = rest["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|i| i["metadata"]["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["c2", "c3", "c4"]);
    assert_eq!(
        rest["metadata"]["resourceVersion"],
        first["metadata"]["resourceVersion"]
    );
}

fn with_token(method: Method, path: &str, token: &str, body: &Value) -> Request<Full<Bytes>> {
    Request::builder()
        .method(method)
        .uri(path)
        .header("host", "localhost")
        .header("content-type", "application/json")
        .header("authorization", format!("Bearer {token}"))
        .body(Full::new(Bytes::from(body.to_string())))
        .unwrap()
}

#[tokio::test]
async fn tokens_name_their_account_and_die_with_it() {
    let cluster = Cluster::start().await;
    let accounts = "/api/v1/namespaces/default/serviceaccounts";
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "x"}});
    assert_eq!(cluster.post(accounts, &account).await.0, 201);
    let request = |spec: Value| json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec});
    let path = format!("{accounts}/x/token");
    let (status, issued) = cluster.post(&path, &request(json!({}))).await;
    assert_eq!(status, 201, "{issued}");
    let token = issued["status"]["token"].as_str().unwrap();
    let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"});
    let reviews = "/apis/authentication.k8s.io/v1/selfsubjectreviews";
    let asked = cluster
        .send(None, with_token(Method::POST, reviews, token, &review))
        .await;
    let (_, answer) = read(asked).await;
    assert_eq!(
        answer["status"]["userInfo"]["username"],
        "system:serviceaccount:default:x"
    );
    let secrets = "/api/v1/namespaces/default/secrets";
    let list = |token: &str| with_token(Method::GET, secrets, token, &Value::Null);
    assert_eq!(cluster.send(None, list(token)).await.status(), 403);
    assert_eq!(
        cluster
            .send(None, list(&format!("{token}x")))
            .await
            .status(),
        401
    );
    let (_, other) = cluster
        .post(&path, &request(json!({"audiences": ["other"]})))
        .await;
    let other = other["status"]["token"].as_str().unwrap();
    assert_eq!(
        cluster.send(None, list(other)).await.status(),
        401,
        "another audience"
    );
    let short = cluster
        .post(&path, &request(json!({"expirationSeconds": 60})))
        .await;
    assert_eq!(short.0, 422);
    cluster
        .call(Method::DELETE, &format!("{accounts}/x"), "", b"")
        .await;
    assert_eq!(
        cluster.send(None, list(token)).await.status(),
        401,
        "the account is gone"
    );
}
