//! Upstream servers that do as they are told, and what a configuration makes of them.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hickory_proto::op::{Message, OpCode, ResponseCode};
use hickory_proto::rr::rdata::A;
use hickory_proto::rr::{RData, Record};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, UdpSocket};

use super::live::{PATIENCE, ask, ask_tcp, question, serve_corefile};
use crate::dns::corefile::{Corefile, Mounted};

/// What an upstream server says to every question.
#[derive(Clone, Copy, Debug)]
pub(super) struct Says {
    pub(super) records: u8,
    pub(super) ttl: u32,
    pub(super) rcode: ResponseCode,
    /// Nothing over UDP but that it is too long.
    pub(super) cut: bool,
    pub(super) silent: bool,
}

impl Says {
    pub(super) fn addresses(records: u8) -> Self {
        Self {
            records,
            ttl: 20,
            rcode: ResponseCode::NoError,
            cut: false,
            silent: false,
        }
    }

    fn code(rcode: ResponseCode) -> Self {
        Self {
            rcode,
            ..Self::addresses(0)
        }
    }

    fn reply(self, query: &[u8], udp: bool) -> Vec<u8> {
        let query = Message::from_vec(query).unwrap();
        let mut reply = Message::response(query.id, OpCode::Query);
        reply.metadata.truncation = self.cut && udp;
        reply.metadata.recursion_available = true;
        reply.metadata.response_code = self.rcode;
        let name = query.queries[0].name().clone();
        let records = if self.cut && udp { 0 } else { self.records };
        for last in 1..=records {
            let data = RData::A(A::new(198, 51, 100, last));
            reply.add_answer(Record::from_rdata(name.clone(), self.ttl, data));
        }
        reply.add_queries(query.queries);
        reply.to_vec().unwrap()
    }
}

pub(super) struct Upstream {
    pub(super) address: SocketAddr,
    /// Questions over UDP, questions over streams, and connections.
    pub(super) asked: Arc<AtomicUsize>,
    asked_by_stream: Arc<AtomicUsize>,
    connections: Arc<AtomicUsize>,
    says: Arc<Mutex<Says>>,
}

impl Upstream {
    fn now_says(&self, says: Says) {
        *self.says.lock().unwrap() = says;
    }
}

pub(super) async fn upstream(says: Says) -> Upstream {
    let udp = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = udp.local_addr().unwrap();
    let tcp = TcpListener::bind(address).await.unwrap();
    let upstream = Upstream {
        address,
        asked: Arc::default(),
        asked_by_stream: Arc::default(),
        connections: Arc::default(),
        says: Arc::new(Mutex::new(says)),
    };
    let (counter, said) = (Arc::clone(&upstream.asked), Arc::clone(&upstream.says));
    tokio::spawn(async move {
        let mut buffer = [0; 2048];
        loop {
            let (length, client) = udp.recv_from(&mut buffer).await.unwrap();
            counter.fetch_add(1, Ordering::SeqCst);
            let says = *said.lock().unwrap();
            if !says.silent {
                let reply = says.reply(&buffer[..length], true);
                udp.send_to(&reply, client).await.unwrap();
            }
        }
    });
    let (asked, said) = (
        Arc::clone(&upstream.asked_by_stream),
        Arc::clone(&upstream.says),
    );
    let connections = Arc::clone(&upstream.connections);
    tokio::spawn(async move {
        loop {
            let (stream, _) = tcp.accept().await.unwrap();
            connections.fetch_add(1, Ordering::SeqCst);
            tokio::spawn(stream_of(stream, Arc::clone(&asked), Arc::clone(&said)));
        }
    });
    upstream
}

async fn stream_of(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    asked: Arc<AtomicUsize>,
    says: Arc<Mutex<Says>>,
) -> std::io::Result<()> {
    loop {
        let length = stream.read_u16().await?;
        let mut query = vec![0; length.into()];
        stream.read_exact(&mut query).await?;
        asked.fetch_add(1, Ordering::SeqCst);
        let says = *says.lock().unwrap();
        if says.silent {
            continue;
        }
        let reply = says.reply(&query, false);
        let mut framed = u16::try_from(reply.len()).unwrap().to_be_bytes().to_vec();
        framed.extend_from_slice(&reply);
        stream.write_all(&framed).await?;
    }
}

fn serve(text: &str) -> SocketAddr {
    serve_corefile(text, &Mounted::default()).address
}

fn first(message: &Message) -> String {
    let records = message.answers.first();
    records.map_or_else(|| message.response_code.to_string(), ToString::to_string)
}

#[tokio::test]
async fn the_longest_zone_has_the_name() {
    let (corp, world) = (
        upstream(Says::addresses(1)).await,
        upstream(Says::addresses(2)).await,
    );
    let server = serve(&format!(
        ".:53 {{\n kubernetes cluster.local\n forward . {}\n}}\ncorp.example a.corp.example {{\n forward . {}\n}}\n",
        world.address, corp.address
    ));
    for (name, records) in [
        ("www.example.", 2),
        ("x.CORP.example.", 1),
        ("corp.example.", 1),
        ("notcorp.example.", 2),
        ("cart.shop.svc.cluster.local.", 1),
    ] {
        assert_eq!(ask(server, name).await.answers.len(), records, "{name}");
    }
    assert_eq!(corp.asked.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn hosts_come_first_and_rewritten_names_are_told_as_they_were_asked() {
    let world = upstream(Says::addresses(1)).await;
    let files = Mounted([("/h".to_owned(), "192.0.2.8 filed.example\n".to_owned())].into());
    let text = format!(
        ". {{\n rewrite name shop.example cart.shop.svc.cluster.local\n rewrite name suffix .old.example .new.example\n\
         kubernetes cluster.local\n hosts /h {{\n 192.0.2.7 named.example\n fallthrough\n ttl 77\n }}\n forward . {}\n}}",
        world.address
    );
    let server = serve_corefile(&text, &files).address;
    for (name, wanted) in [
        ("named.example.", "named.example. 77 IN A 192.0.2.7"),
        ("filed.example.", "filed.example. 77 IN A 192.0.2.8"),
        ("shop.example.", "shop.example. 5 IN A 10.96.10.5"),
        ("x.old.example.", "x.old.example. 20 IN A 198.51.100.1"),
        ("www.example.", "www.example. 20 IN A 198.51.100.1"),
    ] {
        let reply = ask(server, name).await;
        assert_eq!(first(&reply), wanted);
        assert_eq!(reply.queries[0].name().to_ascii(), name);
    }
    // A chain that begins in the cluster ends in the table.
    let reply = ask(server, "out.shop.svc.cluster.local.").await;
    let shown: Vec<String> = reply.answers.iter().map(ToString::to_string).collect();
    assert_eq!(
        shown,
        [
            "out.shop.svc.cluster.local. 5 IN CNAME named.example.",
            "named.example. 77 IN A 192.0.2.7"
        ]
    );
}

#[tokio::test]
async fn policies_choose_and_codes_lead_on() {
    let (a, b) = (
        upstream(Says::addresses(1)).await,
        upstream(Says::addresses(2)).await,
    );
    let both = format!("{} {}", a.address, b.address);
    let counts = || [&a, &b].map(|u| u.asked.swap(0, Ordering::SeqCst));
    for (policy, wanted) in [("sequential", [4, 0]), ("round_robin", [2, 2])] {
        let server = serve(&format!(
            ". {{\n forward . {both} {{\n policy {policy}\n }}\n}}"
        ));
        for _ in 0..4 {
            ask(server, "www.example.").await;
        }
        assert_eq!(counts(), wanted, "{policy}");
    }
    a.now_says(Says::code(ResponseCode::ServFail));
    let server = serve(&format!(
        ". {{\n forward . {both} {{\n policy sequential\n failover SERVFAIL\n }}\n}}"
    ));
    assert_eq!(ask(server, "www.example.").await.answers.len(), 2);
    a.now_says(Says::code(ResponseCode::NXDomain));
    let server = serve(&format!(
        ". {{\n forward . {} {{\n next NXDOMAIN\n except plain.example\n }}\n forward . {}\n}}",
        a.address, b.address
    ));
    counts();
    assert_eq!(ask(server, "www.example.").await.answers.len(), 2);
    assert_eq!(ask(server, "plain.example.").await.answers.len(), 2);
    assert_eq!(counts(), [1, 2]);
}

#[tokio::test]
async fn too_many_questions_in_flight_are_refused() {
    let silent = upstream(Says {
        silent: true,
        ..Says::addresses(1)
    })
    .await;
    let server = serve(&format!(
        ". {{\n forward . {} {{\n max_concurrent 1\n }}\n}}",
        silent.address
    ));
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    socket
        .send_to(&question("a.example."), server)
        .await
        .unwrap();
    while silent.asked.load(Ordering::SeqCst) == 0 {
        tokio::task::yield_now().await;
    }
    let reply = ask(server, "b.example.").await;
    assert_eq!(reply.response_code, ResponseCode::Refused);
}

#[tokio::test]
async fn a_server_that_is_down_is_left_out_until_a_probe_is_answered() {
    let (a, b) = (
        upstream(Says::addresses(1)).await,
        upstream(Says::addresses(2)).await,
    );
    let silent = Says {
        silent: true,
        ..Says::addresses(1)
    };
    a.now_says(silent);
    let server = serve(&format!(
        ". {{\n forward . {} {} {{\n policy sequential\n max_fails 1\n health_check 20ms\n }}\n}}",
        a.address, b.address
    ));
    assert_eq!(ask(server, "www.example.").await.answers.len(), 2);
    let began = Instant::now();
    assert_eq!(ask(server, "www.example.").await.answers.len(), 2);
    assert!(
        began.elapsed() < Duration::from_millis(500),
        "{:?}",
        began.elapsed()
    );
    a.now_says(Says::addresses(1));
    let deadline = Instant::now() + PATIENCE;
    while ask(server, "www.example.").await.answers.len() == 2 {
        assert!(Instant::now() < deadline, "the server is never asked again");
    }
}

#[tokio::test]
async fn streams_are_used_again() {
    let one = upstream(Says::addresses(1)).await;
    let server = serve(&format!(
        ". {{\n forward . {} {{\n force_tcp\n }}\n}}",
        one.address
    ));
    for _ in 0..3 {
        assert_eq!(ask(server, "www.example.").await.answers.len(), 1);
    }
    let load = |counter: &AtomicUsize| counter.load(Ordering::SeqCst);
    assert_eq!(load(&one.asked), 0);
    assert_eq!((load(&one.asked_by_stream), load(&one.connections)), (3, 1));
    // What is too long for UDP is asked for again by TCP clients only, or where they prefer UDP.
    one.now_says(Says {
        cut: true,
        ..Says::addresses(60)
    });
    let server = serve(&format!(
        ". {{\n forward . {} {{\n prefer_udp\n }}\n}}",
        one.address
    ));
    let replies = ask_tcp(server, &["many.example."]).await;
    assert_eq!(replies[0].answers.len(), 60);
    assert_eq!((load(&one.asked), load(&one.connections)), (1, 2));
}

/// A server that speaks TLS, with a certificate for this name; the certificate in PEM.
async fn tls_upstream(name: &str) -> (SocketAddr, String) {
    let key = rcgen::KeyPair::generate().unwrap();
    let parameters = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
    let certificate = parameters.self_signed(&key).unwrap();
    let private = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], private)
        .unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            if let Ok(stream) = acceptor.accept(stream).await {
                let says = Arc::new(Mutex::new(Says::addresses(1)));
                tokio::spawn(stream_of(stream, Arc::default(), says));
            }
        }
    });
    (address, certificate.pem())
}

#[tokio::test]
async fn tls_is_used_and_certificates_are_checked() {
    let (address, pem) = tls_upstream("dns.example").await;
    let files = Mounted([("/ca.pem".to_owned(), pem)].into());
    for (name, wanted) in [
        ("dns.example", "www.example. 20 IN A 198.51.100.1"),
        ("other.example", "Server Failure"),
    ] {
        let text = format!(
            ". {{\n forward . tls://{address} {{\n tls /ca.pem\n tls_servername {name}\n }}\n}}"
        );
        let server = serve_corefile(&text, &files).address;
        assert_eq!(first(&ask(server, "www.example.").await), wanted);
    }
}

#[tokio::test]
async fn answers_outlive_their_servers_where_that_is_wanted() {
    let short = Says {
        ttl: 1,
        ..Says::addresses(1)
    };
    let failed = Says::code(ResponseCode::ServFail);
    for mode in ["immediate", "verify"] {
        let world = upstream(short).await;
        let server = serve(&format!(
            ". {{\n cache {{\n success 100 1 1\n serve_stale 1h {mode}\n }}\n forward . {}\n}}",
            world.address
        ));
        assert_eq!(ask(server, "www.example.").await.answers[0].ttl, 1);
        world.now_says(failed);
        // The time of the answer has to pass.
        tokio::time::sleep(Duration::from_millis(1100)).await;
        let reply = ask(server, "www.example.").await;
        assert_eq!(first(&reply), "www.example. 30 IN A 198.51.100.1", "{mode}");
        // When the server is back, so is a fresh answer.
        world.now_says(Says::addresses(2));
        let deadline = Instant::now() + PATIENCE;
        while ask(server, "www.example.").await.answers.len() != 2 {
            assert!(Instant::now() < deadline, "{mode}: the answer stays stale");
        }
    }
}

#[tokio::test]
async fn a_server_that_leads_back_here_is_found_and_not_asked() {
    // The port is known only when it is bound: forward to one, then serve on it.
    let between = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = between.local_addr().unwrap();
    let running = serve_corefile(
        &format!(". {{\n loop\n forward . {address}\n}}"),
        &Mounted::default(),
    );
    let here = running.address;
    tokio::spawn(async move {
        let (mut buffer, mut client) = ([0; 2048], None);
        loop {
            let (length, from) = between.recv_from(&mut buffer).await.unwrap();
            let to = if from == here {
                client
            } else {
                client = Some(from);
                Some(here)
            };
            between
                .send_to(&buffer[..length], to.unwrap())
                .await
                .unwrap();
        }
    });
    running.runtime.look_for_loops().await;
    assert_eq!(running.runtime.metrics.loops.get(), 1);
    let began = Instant::now();
    let reply = ask(here, "www.example.").await;
    assert_eq!(reply.response_code, ResponseCode::ServFail);
    assert!(began.elapsed() < Duration::from_secs(1));
}

async fn http(address: SocketAddr, path: &str) -> String {
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    text
}

#[tokio::test]
async fn a_wrong_configuration_changes_nothing_and_pages_follow_a_good_one() {
    // Ports that are free now: nobody else on loopback takes them from this range so quickly.
    let free = || async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        listener.local_addr().unwrap()
    };
    let (health, ready) = (free().await, free().await);
    let world = upstream(Says::addresses(1)).await;
    let text = |rest: &str| {
        format!(
            ". {{\n health {health}\n ready {ready}\n prometheus {health}\n forward . {}\n {rest}\n}}",
            world.address
        )
    };
    let running = serve_corefile(&text(""), &Mounted::default());
    assert!(http(health, "/health").await.ends_with("OK"));
    assert!(http(ready, "/ready").await.ends_with("OK"));
    ask(running.address, "www.example.").await;
    let metrics = http(health, "/metrics").await;
    assert!(
        metrics.contains("coredns_dns_requests_total{proto=\"udp\",family=\"1\"} 1"),
        "{metrics}"
    );
    assert!(http(ready, "/metrics").await.starts_with("HTTP/1.1 404"));

    let take = |rest: &str| {
        let corefile = Corefile::parse(&text(rest), "Corefile", &Mounted::default())?;
        let files = Arc::new(Mounted::default());
        running.runtime.take(corefile, files, None)
    };
    let error = take("hosts /nowhere").unwrap_err().to_string();
    assert!(error.starts_with("Corefile:6: "), "{error}");
    assert_eq!(ask(running.address, "www.example.").await.answers.len(), 1);
    take("hosts {\n 192.0.2.9 www.example\n}").unwrap();
    assert!(first(&ask(running.address, "www.example.").await).ends_with("192.0.2.9"));
    running.runtime.status.set_ending();
    assert!(http(ready, "/ready").await.starts_with("HTTP/1.1 503"));
    assert!(http(health, "/health").await.ends_with("OK"));
}
