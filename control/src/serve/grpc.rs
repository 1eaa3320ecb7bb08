//! The gRPC face: routing, the codec that sends pre-encoded frames, and who may speak for which node.
//!
//! Written by hand in place of the generated server, whose Follow could only send messages that it encodes itself, once
//! per node.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{BufMut, Bytes};
use control_api::v1::{
    EventReports, EventReportsReply, FollowRequest, NodeReport, NodeReportReply, PodReports,
    PodReportsReply,
};
use futures::Stream;
use futures::future::BoxFuture;
use http::Request as HttpRequest;
use tonic::body::Body;
use tonic::codec::{BufferSettings, Codec, EncodeBuf, Encoder};
use tonic::server::{Grpc, NamedService, StreamingService, UnaryService};
use tonic::{Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;
use tower::Service;

use super::Feed;
use super::stream;
use crate::pki::NODE_PREFIX;

/// Larger than any frame but one with a huge object, so that frames leave in one piece.
const ENCODE_BUFFER_BYTES: usize = 8 << 10;
const YIELD_BYTES: usize = 32 << 10;

/// Sends frames as they are.
#[derive(Clone, Copy, Debug, Default)]
struct FrameCodec;

#[derive(Debug)]
struct FrameEncoder;

impl Encoder for FrameEncoder {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, out: &mut EncodeBuf<'_>) -> Result<(), Status> {
        out.put(item);
        Ok(())
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::new(ENCODE_BUFFER_BYTES, YIELD_BYTES)
    }
}

type RequestCodec = ProstCodec<NodeReportReply, FollowRequest>;

impl Codec for FrameCodec {
    type Encode = Bytes;
    type Decode = FollowRequest;
    type Encoder = FrameEncoder;
    type Decoder = <RequestCodec as Codec>::Decoder;

    fn encoder(&mut self) -> FrameEncoder {
        FrameEncoder
    }

    fn decoder(&mut self) -> Self::Decoder {
        RequestCodec::raw_decoder(BufferSettings::default())
    }
}

/// The NodeFeed service.
#[derive(Clone, Debug)]
pub(super) struct NodeFeedService {
    pub(super) feed: Arc<Feed>,
}

impl NamedService for NodeFeedService {
    const NAME: &'static str = "weir.node.v1.NodeFeed";
}

impl Service<HttpRequest<Body>> for NodeFeedService {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: HttpRequest<Body>) -> Self::Future {
        let feed = Arc::clone(&self.feed);
        Box::pin(async move {
            let method = request.uri().path().rsplit('/').next().unwrap_or_default();
            Ok(match method {
                "Follow" => Grpc::new(FrameCodec).streaming(Follow(feed), request).await,
                "ReportNode" => {
                    Grpc::new(ProstCodec::default())
                        .unary(Report(feed), request)
                        .await
                }
                "ReportPods" => {
                    Grpc::new(ProstCodec::default())
                        .unary(Pods(feed), request)
                        .await
                }
                "ReportEvents" => {
                    Grpc::new(ProstCodec::default())
                        .unary(Events(feed), request)
                        .await
                }
                other => {
                    Status::unimplemented(format!("NodeFeed has no method {other}")).into_http()
                }
            })
        })
    }
}

struct Follow(Arc<Feed>);
struct Report(Arc<Feed>);
struct Pods(Arc<Feed>);
struct Events(Arc<Feed>);

type FrameStream = Pin<Box<dyn Stream<Item = Result<Bytes, Status>> + Send>>;

impl StreamingService<FollowRequest> for Follow {
    type Response = Bytes;
    type ResponseStream = FrameStream;
    type Future = BoxFuture<'static, Result<Response<FrameStream>, Status>>;

    fn call(&mut self, request: Request<Streaming<FollowRequest>>) -> Self::Future {
        let feed = Arc::clone(&self.0);
        Box::pin(async move {
            let caller = Caller::of(&request)?;
            let mut requests = request.into_inner();
            let hello = stream::hello(&mut requests).await?;
            caller.must_be(&hello.node_name)?;
            feed.synced().await?;
            tracing::info!(
                node = hello.node_name,
                agent = hello.agent_version,
                resume = hello.resume_revision,
                "a node follows the feed"
            );
            let frames = stream::follow(Arc::clone(&feed.hub), &hello, requests);
            Ok(Response::new(Box::pin(frames) as FrameStream))
        })
    }
}

impl UnaryService<NodeReport> for Report {
    type Response = NodeReportReply;
    type Future = BoxFuture<'static, Result<Response<NodeReportReply>, Status>>;

    fn call(&mut self, request: Request<NodeReport>) -> Self::Future {
        let feed = Arc::clone(&self.0);
        Box::pin(async move {
            Caller::of(&request)?.must_be(&request.get_ref().name)?;
            Ok(Response::new(feed.report_node(request.into_inner()).await?))
        })
    }
}

impl UnaryService<PodReports> for Pods {
    type Response = PodReportsReply;
    type Future = BoxFuture<'static, Result<Response<PodReportsReply>, Status>>;

    fn call(&mut self, request: Request<PodReports>) -> Self::Future {
        let feed = Arc::clone(&self.0);
        Box::pin(async move {
            Caller::of(&request)?.must_be(&request.get_ref().node_name)?;
            feed.report_pods(request.into_inner()).await?;
            Ok(Response::new(PodReportsReply {}))
        })
    }
}

impl UnaryService<EventReports> for Events {
    type Response = EventReportsReply;
    type Future = BoxFuture<'static, Result<Response<EventReportsReply>, Status>>;

    fn call(&mut self, request: Request<EventReports>) -> Self::Future {
        let feed = Arc::clone(&self.0);
        Box::pin(async move {
            Caller::of(&request)?.must_be(&request.get_ref().node_name)?;
            feed.report_events(request.into_inner()).await?;
            Ok(Response::new(EventReportsReply {}))
        })
    }
}

/// The node that a client certificate names.
struct Caller {
    node: String,
}

impl Caller {
    fn of<T>(request: &Request<T>) -> Result<Self, Status> {
        let certificates = request
            .peer_certs()
            .ok_or_else(|| Status::unauthenticated("present a client certificate"))?;
        let common_name = certificates
            .first()
            .and_then(|certificate| common_name(certificate))
            .ok_or_else(|| Status::unauthenticated("the client certificate has no common name"))?;
        match common_name.strip_prefix(NODE_PREFIX) {
            Some(node) if !node.is_empty() => Ok(Self {
                node: node.to_owned(),
            }),
            _ => Err(Status::permission_denied(format!(
                "{common_name} is not a node: the certificate's common name must be {NODE_PREFIX}NAME"
            ))),
        }
    }

    fn must_be(&self, node: &str) -> Result<(), Status> {
        if self.node == node {
            return Ok(());
        }
        Err(Status::permission_denied(format!(
            "the certificate is node {}'s and cannot speak for {node:?}",
            self.node
        )))
    }
}

fn common_name(der: &[u8]) -> Option<String> {
    let (_, certificate) = x509_parser::parse_x509_certificate(der).ok()?;
    let name = certificate.subject().iter_common_name().next()?;
    name.as_str().ok().map(str::to_owned)
}
