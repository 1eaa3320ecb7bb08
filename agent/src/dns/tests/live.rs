//! The server on loopback with upstream servers that do as they are told.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hickory_proto::op::{Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::{Name, RecordType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};

use super::state;
use super::upstreams::{Says, upstream};
use crate::dns::Options;
use crate::dns::corefile::{Corefile, Mounted};
use crate::dns::runtime::Runtime;
use crate::dns::server;
use crate::dns::upstream::Surroundings;

pub(super) const PATIENCE: Duration = Duration::from_secs(10);

pub(super) struct Running {
    pub(super) address: SocketAddr,
    pub(super) runtime: Arc<Runtime>,
}

/// Serves a configuration on a port of loopback, with the cluster's names where it has kubernetes.
pub(super) fn serve_corefile(text: &str, files: &Mounted) -> Running {
    let corefile = Corefile::parse(text, "Corefile", files).unwrap();
    let runtime = Runtime::new(Surroundings::default(), Options::default(), Arc::default());
    let taken = runtime.take(corefile, Arc::new(files.clone()), Some(&state()));
    taken.unwrap();
    runtime.zone.write().unwrap().set_synced();
    let server = runtime.server(53);
    let (udp, tcp) = server::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = udp.local_addr().unwrap();
    tokio::spawn(Arc::clone(&server).udp(udp));
    tokio::spawn(server.tcp(tcp));
    Running {
        address,
        runtime: Arc::new(runtime),
    }
}

fn serve(upstreams: &[SocketAddr]) -> SocketAddr {
    let to: Vec<String> = upstreams.iter().map(ToString::to_string).collect();
    let forward = match to.as_slice() {
        [] => String::new(),
        to => format!("forward . {} {{\n policy round_robin\n }}", to.join(" ")),
    };
    let text = format!(". {{\n kubernetes cluster.local 10.0.0.0/8\n cache\n {forward}\n}}");
    serve_corefile(&text, &Mounted::default()).address
}

pub(super) fn question(name: &str) -> Vec<u8> {
    static NEXT_ID: Mutex<u16> = Mutex::new(100);
    let mut id = NEXT_ID.lock().unwrap();
    *id += 1;
    let mut message = Message::new(*id, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(Name::from_ascii(name).unwrap(), RecordType::A));
    message.to_vec().unwrap()
}

pub(super) async fn ask(server: SocketAddr, name: &str) -> Message {
    let query = question(name);
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    socket.send_to(&query, server).await.unwrap();
    let mut buffer = vec![0; 4096];
    let (length, from) = tokio::time::timeout(PATIENCE, socket.recv_from(&mut buffer))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(from, server);
    let reply = Message::from_vec(&buffer[..length]).unwrap();
    assert_eq!(reply.id.to_be_bytes(), query[..2]);
    reply
}

pub(super) async fn ask_tcp(server: SocketAddr, names: &[&str]) -> Vec<Message> {
    let mut stream = TcpStream::connect(server).await.unwrap();
    for name in names {
        let query = question(name);
        stream
            .write_u16(u16::try_from(query.len()).unwrap())
            .await
            .unwrap();
        stream.write_all(&query).await.unwrap();
    }
    let mut replies = Vec::new();
    for _ in names {
        let length = tokio::time::timeout(PATIENCE, stream.read_u16())
            .await
            .unwrap()
            .unwrap();
        let mut reply = vec![0; length.into()];
        stream.read_exact(&mut reply).await.unwrap();
        replies.push(Message::from_vec(&reply).unwrap());
    }
    replies
}

#[tokio::test]
async fn cluster_names_by_udp_and_by_pipelined_tcp() {
    let server = serve(&[]);
    let reply = ask(server, "cart.shop.svc.cluster.local.").await;
    assert_eq!(reply.answers[0].data.to_string(), "10.96.10.5");
    let names = [
        "cart.shop.svc.cluster.local.",
        "ghost.shop.svc.cluster.local.",
        "www.example.test.",
    ];
    let replies = ask_tcp(server, &names).await;
    let codes: Vec<ResponseCode> = replies.iter().map(|r| r.response_code).collect();
    assert_eq!(
        codes,
        [
            ResponseCode::NoError,
            ResponseCode::NXDomain,
            ResponseCode::Refused
        ]
    );
}

#[tokio::test]
async fn forwarded_answers_come_from_the_cache_the_second_time() {
    let upstream = upstream(Says::addresses(1)).await;
    let server = serve(&[upstream.address]);
    for spelling in ["www.example.test.", "WWW.Example.TEST."] {
        let reply = ask(server, spelling).await;
        assert_eq!(reply.answers[0].data.to_string(), "198.51.100.1");
        assert_eq!(reply.queries[0].name().to_ascii(), spelling);
        assert!(!reply.authoritative && reply.recursion_available);
    }
    assert_eq!(upstream.asked.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn truncation_upstream_reaches_udp_clients_and_not_tcp_clients() {
    let upstream = upstream(Says {
        cut: true,
        ..Says::addresses(60)
    })
    .await;
    let server = serve(&[upstream.address]);
    let reply = ask(server, "many.example.test.").await;
    assert!(reply.truncation && reply.answers.is_empty());
    let replies = ask_tcp(server, &["many.example.test."]).await;
    assert!(!replies[0].truncation);
    assert_eq!(replies[0].answers.len(), 60);
    // The whole answer is cached now, and still too long for a datagram of 512 bytes.
    let reply = ask(server, "many.example.test.").await;
    assert!(reply.truncation && reply.answers.is_empty());
}

#[tokio::test]
async fn a_silent_upstream_costs_the_first_questions_only() {
    // Bound and never read: questions to it are lost without an error.
    let silent = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let alive = upstream(Says::addresses(1)).await;
    let server = serve(&[silent.local_addr().unwrap(), alive.address]);
    let began = Instant::now();
    for number in 0..20 {
        let asked = Instant::now();
        let reply = ask(server, &format!("{number}.example.test.")).await;
        assert_eq!(reply.response_code, ResponseCode::NoError);
        assert!(
            number < 4 || asked.elapsed() < Duration::from_millis(100),
            "question {number}"
        );
    }
    assert!(
        began.elapsed() < Duration::from_millis(2500),
        "{:?}",
        began.elapsed()
    );
}

#[tokio::test]
async fn without_an_answer_from_upstream_clients_are_told_so() {
    let closed = UdpSocket::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap();
    let server = serve(&[closed]);
    let reply = ask(server, "www.example.test.").await;
    assert_eq!(reply.response_code, ResponseCode::ServFail);
}
