//! WATCH: changes as a stream of JSON documents (or protobuf frames).

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use futures::Stream;
use http::{HeaderValue, Response, header};
use rand::Rng as _;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;

use super::call::Call;
use super::negotiate::{Endpoint, Media};
use super::params::ReadParams;
use super::read::{self, EventForm};
use super::respond::Answer;
use crate::apiserver::api::{Api, Listed, read_matches, read_view, serves_stored};
use crate::apiserver::registry::ResourceDef;
use crate::apiserver::{codec, object};
use crate::status::ApiError;
use crate::store::{Event, Record, StoreError, Watch};

/// Chunks that wait for a slow client; the watch itself waits behind them.
const QUEUE: usize = 2;
/// Events of one moment share a chunk up to this size.
const CHUNK_BYTES: usize = 64 << 10;
/// How often an idle watch tells how far it is.
const BOOKMARK_EVERY: Duration = Duration::from_secs(60);
/// The last bookmark comes so long before the end.
const BOOKMARK_BEFORE_END: Duration = Duration::from_secs(2);
/// A watch without a timeout of its own ends after so many seconds, at random so that not all end at once.
const TIMEOUT_S: std::ops::Range<u64> = 1800..3600;
/// No watch lasts longer, whatever it asks for.
const LONGEST_S: u64 = 24 * 3600;
const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";

pub(super) async fn watch(api: &Arc<Api>, def: &Arc<ResourceDef>, call: Call) -> Answer {
    let form = call.form(Endpoint::Watch)?;
    let mut params = ReadParams::parse(def, &call.query, true)?;
    params.list.limit = 0;
    let namespace = &call.path.namespace;
    if let Some(revision) = params.revision.filter(|_| params.initial_events) {
        read::reach(api, revision).await?;
    }
    let replay = params.revision.is_none() || params.initial_events;
    let start = match params.revision.filter(|_| !replay) {
        Some(revision) => Start {
            initial: None,
            revision,
        },
        None => {
            let listed = api.list(def, namespace, &params.list).await?;
            Start {
                revision: listed.revision,
                initial: Some(listed),
            }
        }
    };
    let source = api.watch(def, namespace, start.revision).await?;
    let timeout_s = params.timeout_s.filter(|t| *t > 0);
    let timeout = timeout_s
        .unwrap_or_else(|| rand::rng().random_range(TIMEOUT_S))
        .min(LONGEST_S);
    let writer = Writer {
        def: Arc::clone(def),
        form: EventForm::of(&call, form)?,
    };
    let (frames, stream) = mpsc::channel(QUEUE);
    let session = Session {
        writer,
        params,
        source,
        frames,
        deadline: Instant::now() + Duration::from_secs(timeout),
    };
    tokio::spawn(session.run(start));
    let content_type = match form.media {
        Media::Protobuf => "application/vnd.kubernetes.protobuf;stream=watch",
        _ => "application/json",
    };
    Ok(streaming(content_type, ReceiverStream::new(stream)))
}

fn streaming(
    content_type: &'static str,
    frames: impl Stream<Item = Bytes> + Send + 'static,
) -> Response<Body> {
    use futures::StreamExt as _;
    let mut response = Response::new(Body::from_stream(
        frames.map(Ok::<_, std::convert::Infallible>),
    ));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(
        header::CACHE_CONTROL,
        HeaderValue::from_static("no-cache, private"),
    );
    response
}

struct Start {
    initial: Option<Listed>,
    revision: u64,
}

/// Writes events in the agreed form.
struct Writer {
    def: Arc<ResourceDef>,
    form: EventForm,
}

struct Session {
    writer: Writer,
    params: ReadParams,
    source: Box<dyn Watch>,
    frames: mpsc::Sender<Bytes>,
    deadline: Instant,
}

/// Why a session stops early: the client went away or was told what is wrong.
struct Ended;

impl Session {
    async fn run(mut self, start: Start) {
        // The end of the channel ends the answer, whatever the reason.
        let _ = self.follow(start).await;
    }

    async fn follow(&mut self, start: Start) -> Result<(), Ended> {
        let mut chunk = BytesMut::new();
        for record in start.initial.iter().flat_map(|l| &l.records) {
            self.add(&mut chunk, "ADDED", record).await?;
        }
        self.flush(&mut chunk).await?;
        if self.params.initial_events && self.params.bookmarks {
            self.bookmark(start.revision, true).await?;
        }
        drop(start);
        let mut next_bookmark = Instant::now() + BOOKMARK_EVERY;
        let last_bookmark = self.deadline.checked_sub(BOOKMARK_BEFORE_END);
        let mut last_bookmark = last_bookmark.filter(|_| self.params.bookmarks);
        loop {
            let wake = last_bookmark.unwrap_or(self.deadline).min(next_bookmark);
            tokio::select! {
                events = self.source.next() => self.take(events).await?,
                () = self.frames.closed() => return Err(Ended),
                () = tokio::time::sleep_until(wake.min(self.deadline)) => {
                    let now = Instant::now();
                    if now >= self.deadline {
                        return Ok(());
                    }
                    if self.params.bookmarks {
                        self.bookmark(self.source.progress(), false).await?;
                    }
                    next_bookmark = now + BOOKMARK_EVERY;
                    last_bookmark = last_bookmark.filter(|at| now < *at);
                }
            }
        }
    }

    async fn take(&self, events: Result<Vec<Arc<Event>>, StoreError>) -> Result<(), Ended> {
        let events = match events {
            Ok(events) => events,
            Err(StoreError::Closed) => return Err(Ended),
            Err(e) => return self.fail(&crate::apiserver::api::store_error(e)).await,
        };
        let mut chunk = BytesMut::new();
        for event in events {
            match self.translate(&event) {
                Ok(Some((kind, record))) => self.add(&mut chunk, kind, &record).await?,
                Ok(None) => {}
                Err(e) => {
                    self.flush(&mut chunk).await?;
                    return self.fail(&e).await;
                }
            }
        }
        self.flush(&mut chunk).await
    }

    async fn add(&self, chunk: &mut BytesMut, kind: &str, record: &Record) -> Result<(), Ended> {
        let frame = self.writer.event(kind, record).map_err(unwritable)?;
        if !chunk.is_empty() && chunk.len() + frame.len() > CHUNK_BYTES {
            self.flush(chunk).await?;
        }
        chunk.extend_from_slice(&frame);
        Ok(())
    }

    async fn flush(&self, chunk: &mut BytesMut) -> Result<(), Ended> {
        if chunk.is_empty() {
            return Ok(());
        }
        self.send(Ok(chunk.split().freeze())).await
    }

    /// What an event means to this watch: objects enter and leave its selection.
    fn translate(&self, event: &Event) -> Result<Option<(&'static str, Arc<Record>)>, ApiError> {
        let selected = |record: &Record| read_matches(&self.writer.def, &self.params.list, record);
        let before = event.previous.as_deref().map_or(Ok(false), selected)?;
        let after = !event.deleted && selected(&event.record)?;
        let left = || {
            let value = event
                .previous
                .as_ref()
                .map_or(&event.record.value, |p| &p.value)
                .clone();
            let record = &event.record;
            Arc::new(Record::new(Arc::clone(&record.key), value, record.revision))
        };
        Ok(match (before, after) {
            (false, true) => Some(("ADDED", Arc::clone(&event.record))),
            (true, true) => Some(("MODIFIED", Arc::clone(&event.record))),
            (true, false) => Some(("DELETED", left())),
            (false, false) => None,
        })
    }

    async fn bookmark(&self, revision: u64, initial_end: bool) -> Result<(), Ended> {
        let mut metadata =
            json!({"resourceVersion": revision.to_string(), "creationTimestamp": null});
        if initial_end {
            metadata["annotations"] = json!({INITIAL_EVENTS_END: "true"});
        }
        let object = self.writer.form.bookmark(&self.writer.def, metadata);
        self.send(self.writer.frame("BOOKMARK", &object)).await
    }

    async fn fail(&self, error: &ApiError) -> Result<(), Ended> {
        self.send(self.writer.frame("ERROR", &error.to_status()))
            .await?;
        Err(Ended)
    }

    async fn send(&self, frame: Result<Bytes, ApiError>) -> Result<(), Ended> {
        let sent = self.frames.send(frame.map_err(unwritable)?);
        // A client that does not read keeps its watch no longer than one that does.
        match tokio::time::timeout_at(self.deadline, sent).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(Ended),
        }
    }
}

fn unwritable(error: ApiError) -> Ended {
    tracing::error!(%error, "a watch event cannot be written");
    Ended
}

impl Writer {
    fn event(&self, kind: &str, record: &Record) -> Result<Bytes, ApiError> {
        if self.form.is_plain() && serves_stored(&self.def) {
            let mut frame = Vec::with_capacity(record.value.len() + 64);
            frame.extend_from_slice(b"{\"type\":\"");
            frame.extend_from_slice(kind.as_bytes());
            frame.extend_from_slice(b"\",\"object\":");
            object::write_json(record, &mut frame);
            frame.extend_from_slice(b"}\n");
            return Ok(frame.into());
        }
        let object = read_view(&self.def, record)?;
        self.frame(kind, &self.form.object(&self.def, &object))
    }

    fn frame(&self, kind: &str, object: &Value) -> Result<Bytes, ApiError> {
        if self.form.media() == Media::Protobuf {
            return protobuf_frame(kind, &codec::encode_protobuf(object)?);
        }
        let mut frame = json!({"type": kind, "object": object})
            .to_string()
            .into_bytes();
        frame.push(b'\n');
        Ok(frame.into())
    }
}

/// A meta/v1 WatchEvent, led by its length in four bytes, big endian.
fn protobuf_frame(kind: &str, object: &[u8]) -> Result<Bytes, ApiError> {
    #[derive(Clone, PartialEq, prost::Message)]
    struct RawExtension {
        #[prost(bytes = "vec", tag = "1")]
        raw: Vec<u8>,
    }
    #[derive(Clone, PartialEq, prost::Message)]
    struct WatchEvent {
        #[prost(string, tag = "1")]
        kind: String,
        #[prost(message, optional, tag = "2")]
        object: Option<RawExtension>,
    }
    let event = WatchEvent {
        kind: kind.into(),
        object: Some(RawExtension {
            raw: object.to_vec(),
        }),
    };
    let body = prost::Message::encode_to_vec(&event);
    let length = u32::try_from(body.len()).map_err(|_| {
        ApiError::new(
            500,
            "InternalError",
            "Internal error occurred: an event is too large",
        )
    })?;
    Ok([&length.to_be_bytes()[..], &body].concat().into())
}
