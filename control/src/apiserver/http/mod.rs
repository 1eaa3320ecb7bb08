//! The HTTPS server: connections, identities, routing.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::body::Body;
use http::{Method, Request, Response};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use self::authn::Identity;
use self::call::Call;
use self::negotiate::{Endpoint, Media, Transform, negotiate};
use self::respond::Answer;
use self::route::{Query, ResourcePath, Route};
use self::tls::Tls;
use super::api::{Api, no_such_path};
use super::registry::{ResourceDef, SubresourceKind, Verb};
use crate::pki::Pki;
use crate::status::ApiError;

mod authn;
mod budget;
mod call;
mod discovery;
mod documents;
mod log;
mod metrics;
mod negotiate;
mod params;
mod read;
mod respond;
mod reviews;
mod route;
mod tls;
mod watch;
mod write;

pub use tls::TlsError;

/// A client has so long for the TLS handshake, and for the head of a request.
const HANDSHAKE: Duration = Duration::from_secs(10);
const HEAD: Duration = Duration::from_secs(60);
/// Requests at once on one HTTP/2 connection: informers hold one per watch.
const STREAMS: u32 = 1000;
/// After a failed accept (no file descriptors left) the listener rests.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Connections at once; more wait in the listener's backlog.
const CONNECTIONS: usize = 16_384;
/// Longest time for a request other than watches and logs.
const REQUEST: Duration = Duration::from_secs(60);

/// The API server on its listeners.
#[derive(Debug)]
pub struct Server {
    api: Arc<Api>,
    tls: Tls,
    documents: documents::Documents,
    counters: metrics::Counters,
    connections: Arc<Semaphore>,
    budget: budget::Budget,
    shutdown: CancellationToken,
}

impl Server {
    /// # Errors
    /// [`TlsError`] when the certificates cannot be used.
    pub fn new(api: Arc<Api>, pki: &Pki, shutdown: CancellationToken) -> Result<Self, TlsError> {
        let tls = Tls::new(pki)?;
        let documents = documents::Documents::default();
        Ok(Self {
            api,
            tls,
            documents,
            counters: metrics::Counters::default(),
            connections: Arc::new(Semaphore::new(CONNECTIONS)),
            budget: budget::Budget::default(),
            shutdown,
        })
    }

    /// Numbers about this process, for scrapers.
    pub async fn metrics(&self) -> String {
        self.counters.text(&self.api).await
    }

    /// Serves a listener until shutdown.
    pub async fn serve(self: Arc<Self>, listener: TcpListener) {
        loop {
            let Ok(permit) = Arc::clone(&self.connections).acquire_owned().await else {
                return;
            };
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = self.shutdown.cancelled() => return,
            };
            match accepted {
                Ok((stream, _)) => {
                    tokio::spawn(Arc::clone(&self).connection(stream, permit));
                }
                Err(error) => {
                    tracing::warn!(%error, "accept a connection to the API");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    async fn connection(self: Arc<Self>, stream: TcpStream, permit: OwnedSemaphorePermit) {
        let _held = (permit, metrics::Held::new(&self.counters.connections));
        if let Err(error) = self.converse(stream).await {
            tracing::debug!(%error, "a connection to the API ended");
        }
    }

    async fn converse(
        self: &Arc<Self>,
        stream: TcpStream,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        stream.set_nodelay(true)?;
        let acceptor = TlsAcceptor::from(Arc::clone(&self.tls.config));
        let accepted = tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await;
        let stream = accepted.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        let identity = Arc::new(self.tls.identify(stream.get_ref().1.peer_certificates()));
        let server = Arc::clone(self);
        let service = service_fn(move |request: Request<Incoming>| {
            let (server, identity) = (Arc::clone(&server), Arc::clone(&identity));
            async move { Ok::<_, std::convert::Infallible>(server.respond(identity, request).await) }
        });
        let mut builder = auto::Builder::new(TokioExecutor::new());
        builder
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD);
        builder
            .http2()
            .timer(TokioTimer::new())
            .max_concurrent_streams(STREAMS);
        let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
        tokio::pin!(connection);
        tokio::select! {
            ended = connection.as_mut() => ended,
            () = self.shutdown.cancelled() => {
                connection.as_mut().graceful_shutdown();
                Ok(())
            }
        }
    }

    async fn respond(
        &self,
        certificate: Arc<Option<Identity>>,
        request: Request<Incoming>,
    ) -> Response<Body> {
        self.counters.requests.fetch_add(1, Ordering::Relaxed);
        let (head, body) = request.into_parts();
        let accept = head
            .headers
            .get(http::header::ACCEPT)
            .and_then(|v| v.to_str().ok());
        let media = negotiate(accept.unwrap_or_default(), Endpoint::Other)
            .unwrap_or_default()
            .media;
        let path = head.uri.path().to_owned();
        let mut call = Call {
            identity: Identity::default(),
            method: head.method,
            query: Query::parse(head.uri.query()),
            headers: head.headers,
            path: ResourcePath::default(),
            body: Some(body),
        };
        let route = route::parse(&path);
        let answer = match &route {
            Route::Health { check } => Ok(self.documents.health(&self.api, check, &call).await),
            Route::Version => documents::version(),
            _ => match authn::authenticate(&self.api, (*certificate).as_ref(), &call.headers).await
            {
                Err(e) => Err(e),
                Ok(identity) => {
                    call.identity = identity;
                    // Watches and logs answer at once and stream afterwards.
                    let answer = self.route(route, &path, call);
                    tokio::time::timeout(REQUEST, answer)
                        .await
                        .unwrap_or_else(|_| Err(timeout()))
                }
            },
        };
        let answer = match answer {
            Ok(answer) => self.budget.charge(answer).await,
            refused => refused,
        };
        answer.unwrap_or_else(|e| respond::error(media, &e))
    }

    async fn route(&self, route: Route, path: &str, mut call: Call) -> Answer {
        if let Route::Resource(target) = route {
            call.path = target;
            return self.resource(call).await;
        }
        let verb = call.method.as_str().to_ascii_lowercase();
        let readable = matches!(
            route,
            Route::LegacyVersions
                | Route::Groups
                | Route::Group { .. }
                | Route::Resources { .. }
                | Route::OpenApiV2
                | Route::OpenApiV3Index
                | Route::OpenApiV3 { .. }
        );
        if !call.identity.is_admin() && !readable {
            return Err(authn::forbidden_path(&call.identity, &verb, path));
        }
        if route == Route::Compact && call.method == Method::POST {
            let revision = self.api.compact().await?;
            let answer = serde_json::json!({"compactedRevision": revision.to_string()});
            return respond::value(200, Media::Json, &answer);
        }
        if !matches!(call.method, Method::GET | Method::HEAD) {
            return Err(method_not_allowed());
        }
        let registry = self.api.registry();
        match route {
            Route::LegacyVersions | Route::Groups => {
                let core = route == Route::LegacyVersions;
                let form = call.form(Endpoint::Discovery)?;
                if let Transform::Discovery { beta } = form.transform {
                    let list = discovery::aggregated(&registry, core, beta).to_string();
                    return Ok(respond::bytes(
                        200,
                        discovery::aggregated_content_type(beta),
                        list,
                    ));
                }
                let plain = if core {
                    discovery::legacy_versions()
                } else {
                    discovery::groups(&registry)
                };
                respond::value(200, plain_media(form.media), &plain)
            }
            Route::Group { group } => {
                let found = discovery::group(&registry, &group).ok_or_else(no_such_path)?;
                respond::value(200, plain_media(call.form(Endpoint::Other)?.media), &found)
            }
            Route::Resources { group, version } => {
                let found = discovery::resources(&registry, &group, &version);
                let media = plain_media(call.form(Endpoint::Other)?.media);
                respond::value(200, media, &found.ok_or_else(no_such_path)?)
            }
            Route::Metrics => {
                let text = self.metrics().await;
                Ok(respond::bytes(200, "text/plain; version=0.0.4", text))
            }
            Route::OpenApiV2 => self.documents.openapi_v2(&registry, &call),
            Route::OpenApiV3Index => self.documents.openapi_v3_index(&registry, &call),
            Route::OpenApiV3 { path } => self.documents.openapi_v3(&registry, &path, &call),
            Route::Compact => Err(method_not_allowed()),
            _ => Err(no_such_path()),
        }
    }

    async fn resource(&self, call: Call) -> Answer {
        let path = &call.path;
        let registry = self.api.registry();
        let def = registry.find(&path.group, &path.version, &path.plural);
        let watching = path.watch || call.query.flag("watch");
        let verb = route::verb(&call.method, path, watching);
        let review = def.is_some_and(|d| reviews::GROUPS.contains(&&*d.group));
        let about_self = review && path.plural.starts_with("selfsubject");
        if !call.identity.is_admin() && !about_self {
            return Err(authn::forbidden_resource(&call.identity, verb, path));
        }
        let def = def.ok_or_else(no_such_path)?;
        if !path.namespace.is_empty() && !def.namespaced {
            return Err(no_such_path());
        }
        if def.namespaced && path.namespace.is_empty() && !path.name.is_empty() {
            return Err(no_such_path());
        }
        if !path.subresource.is_empty() {
            return self.subresource(def, call).await;
        }
        let single = !path.name.is_empty();
        // A watch of one object is a list with its name selected.
        match (call.method.clone(), single) {
            (Method::GET | Method::HEAD, _) if watching && def.allows(Verb::Watch) => {
                let call = if single { watch_one(call) } else { call };
                watch::watch(&self.api, def, call).await
            }
            (Method::GET | Method::HEAD, true) if def.allows(Verb::Get) => {
                read::get(&self.api, def, call).await
            }
            (Method::GET | Method::HEAD, false) if def.allows(Verb::List) => {
                read::list(&self.api, def, call).await
            }
            (Method::POST, false) if review => reviews::review(&self.api, def, call).await,
            (Method::POST, false)
                if def.allows(Verb::Create) && def.namespaced != path.namespace.is_empty() =>
            {
                write::create(&self.api, def, call).await
            }
            (Method::PUT, true) if def.allows(Verb::Update) => {
                write::update(&self.api, def, None, call).await
            }
            (Method::PATCH, true) if def.allows(Verb::Patch) => {
                write::patch(&self.api, def, None, call).await
            }
            (Method::DELETE, true) if def.allows(Verb::Delete) => {
                write::delete(&self.api, def, call).await
            }
            (Method::DELETE, false) if def.allows(Verb::DeleteCollection) => {
                write::delete_collection(&self.api, def, call).await
            }
            _ => Err(method_not_allowed()),
        }
    }

    async fn subresource(&self, def: &Arc<ResourceDef>, call: Call) -> Answer {
        let sub = def
            .subresource(&call.path.subresource)
            .ok_or_else(no_such_path)?;
        let allowed = |verb| sub.verbs.contains(&verb);
        match call.method {
            Method::GET if sub.what == SubresourceKind::Log => log::log(&self.api, call).await,
            Method::GET if allowed(Verb::Get) => {
                read::get_subresource(&self.api, def, sub, call).await
            }
            Method::POST if allowed(Verb::Create) => {
                write::post_subresource(&self.api, def, sub, call).await
            }
            Method::PUT if allowed(Verb::Update) => {
                write::update(&self.api, def, Some(sub), call).await
            }
            Method::PATCH if allowed(Verb::Patch) => {
                write::patch(&self.api, def, Some(sub), call).await
            }
            _ => Err(method_not_allowed()),
        }
    }
}

/// Discovery has no protobuf form here.
fn plain_media(media: Media) -> Media {
    if media == Media::Protobuf {
        Media::Json
    } else {
        media
    }
}

fn watch_one(mut call: Call) -> Call {
    let name = std::mem::take(&mut call.path.name);
    call.query
        .add_field_selector(&format!("metadata.name={name}"));
    call
}

fn timeout() -> ApiError {
    let message = "Timeout: request did not complete within the allotted timeout";
    ApiError::new(504, "Timeout", message)
}

fn method_not_allowed() -> ApiError {
    ApiError::new(
        405,
        "MethodNotAllowed",
        "the server does not allow this method on the requested resource",
    )
}
