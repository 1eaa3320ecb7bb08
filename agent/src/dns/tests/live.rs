//! The server on loopback with upstream servers that do as they are told.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

use control_api::desired::Changes;
use hickory_proto::op::{Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::A;
use hickory_proto::rr::{Name, RData, Record, RecordType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};

use super::state;
use crate::dns::forward::Forwarder;
use crate::dns::metrics::Metrics;
use crate::dns::server::{self, Server};
use crate::dns::{Options, Zone};

const PATIENCE: Duration = Duration::from_secs(10);

/// Answers every A question with so many addresses; over UDP only a truncated stub when told so.
struct Upstream {
    address: SocketAddr,
    asked: Arc<AtomicUsize>,
}

async fn upstream(records: u8, truncate: bool) -> Upstream {
    let udp = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = udp.local_addr().unwrap();
    let tcp = TcpListener::bind(address).await.unwrap();
    let asked = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&asked);
    tokio::spawn(async move {
        let mut buffer = [0; 2048];
        loop {
            let (length, client) = udp.recv_from(&mut buffer).await.unwrap();
            counter.fetch_add(1, Ordering::SeqCst);
            let reply = upstream_reply(
                &buffer[..length],
                if truncate { 0 } else { records },
                truncate,
            );
            udp.send_to(&reply, client).await.unwrap();
        }
    });
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = tcp.accept().await.unwrap();
            let length = stream.read_u16().await.unwrap();
            let mut query = vec![0; length.into()];
            stream.read_exact(&mut query).await.unwrap();
            let reply = upstream_reply(&query, records, false);
            stream
                .write_u16(u16::try_from(reply.len()).unwrap())
                .await
                .unwrap();
            stream.write_all(&reply).await.unwrap();
        }
    });
    Upstream { address, asked }
}

fn upstream_reply(query: &[u8], records: u8, truncated: bool) -> Vec<u8> {
    let query = Message::from_vec(query).unwrap();
    let mut reply = Message::response(query.id, OpCode::Query);
    reply.metadata.truncation = truncated;
    reply.metadata.recursion_available = true;
    let name = query.queries[0].name().clone();
    for last in 1..=records {
        let data = RData::A(A::new(198, 51, 100, last));
        reply.add_answer(Record::from_rdata(name.clone(), 20, data));
    }
    reply.add_queries(query.queries);
    reply.to_vec().unwrap()
}

async fn serve(upstreams: &[SocketAddr]) -> SocketAddr {
    let mut zone = Zone::new(Options::default());
    zone.update(&state(), &Changes::everything());
    zone.set_synced();
    let metrics = Arc::new(Metrics::default());
    let forwarder = Forwarder::new(upstreams, Arc::clone(&metrics));
    let zone = Arc::new(RwLock::new(zone));
    let server = Arc::new(Server::new(zone, forwarder, metrics, Arc::default()));
    let (udp, tcp) = server::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = udp.local_addr().unwrap();
    tokio::spawn(Arc::clone(&server).udp(udp));
    tokio::spawn(server.tcp(tcp));
    address
}

fn question(name: &str) -> Vec<u8> {
    static NEXT_ID: Mutex<u16> = Mutex::new(100);
    let mut id = NEXT_ID.lock().unwrap();
    *id += 1;
    let mut message = Message::new(*id, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(Name::from_ascii(name).unwrap(), RecordType::A));
    message.to_vec().unwrap()
}

async fn ask(server: SocketAddr, name: &str) -> Message {
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

async fn ask_tcp(server: SocketAddr, names: &[&str]) -> Vec<Message> {
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
    let server = serve(&[]).await;
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
    let upstream = upstream(1, false).await;
    let server = serve(&[upstream.address]).await;
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
    let upstream = upstream(60, true).await;
    let server = serve(&[upstream.address]).await;
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
    let alive = upstream(1, false).await;
    let server = serve(&[silent.local_addr().unwrap(), alive.address]).await;
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
    let server = serve(&[closed]).await;
    let reply = ask(server, "www.example.test.").await;
    assert_eq!(reply.response_code, ResponseCode::ServFail);
}
