//! One question to one upstream server: UDP, TCP or TLS, with connections that are kept for the next question.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio_rustls::TlsConnector;

use super::message::question_end;

/// The largest answer asked for is far smaller; some servers ignore the limit.
const RECEIVE_BYTES: usize = 4096;
/// Connections to one server that wait for a question; others are closed.
const MAX_IDLE: usize = 16;

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// How a server is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Server {
    pub(super) address: SocketAddr,
    /// The name in its certificate; none: no TLS.
    pub(super) tls: Option<ServerName<'static>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Udp,
    /// UDP, and TCP when that answer is cut.
    UdpThenTcp,
    Tcp,
}

/// Connections that wait for a question, the newest last.
#[derive(Default)]
pub(super) struct Connections(Mutex<Vec<(Instant, Box<dyn Stream>)>>);

impl std::fmt::Debug for Connections {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Connections").finish_non_exhaustive()
    }
}

impl Connections {
    /// One that was used within this time.
    fn take(&self, expire: Duration) -> Option<Box<dyn Stream>> {
        let mut idle = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let young = |at: &Instant| at.elapsed() < expire;
        idle.retain(|(at, _)| young(at));
        idle.pop().map(|(_, stream)| stream)
    }

    fn keep(&self, stream: Box<dyn Stream>) {
        let mut idle = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < MAX_IDLE {
            idle.push((Instant::now(), stream));
        }
    }
}

/// What connections to a server need.
#[derive(Clone)]
pub(super) struct Dialer {
    pub(super) tls: Option<TlsConnector>,
    pub(super) expire: Duration,
}

impl std::fmt::Debug for Dialer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dialer")
            .field("expire", &self.expire)
            .finish_non_exhaustive()
    }
}

impl Dialer {
    pub(super) fn new(tls: Option<Arc<rustls::ClientConfig>>, expire: Duration) -> Self {
        Self {
            tls: tls.map(TlsConnector::from),
            expire,
        }
    }

    /// The server's answer. Servers with TLS are asked that way whatever `way` says.
    pub(super) async fn exchange(
        &self,
        server: &Server,
        idle: &Connections,
        query: &[u8],
        way: Way,
    ) -> std::io::Result<Vec<u8>> {
        if server.tls.is_none() && way != Way::Tcp {
            let message = exchange_udp(server.address, query).await?;
            let truncated = message.get(2).is_some_and(|flags| flags & 0x02 != 0);
            if !truncated || way == Way::Udp {
                return Ok(message);
            }
        }
        if let Some(mut stream) = idle.take(self.expire) {
            // The server may have closed it meanwhile: then a new one is made.
            if let Ok(message) = exchange_stream(&mut stream, query).await {
                idle.keep(stream);
                return Ok(message);
            }
        }
        let mut stream = self.connect(server).await?;
        let message = exchange_stream(&mut stream, query).await?;
        idle.keep(stream);
        Ok(message)
    }

    async fn connect(&self, server: &Server) -> std::io::Result<Box<dyn Stream>> {
        let stream = TcpStream::connect(server.address).await?;
        stream.set_nodelay(true)?;
        match (&server.tls, &self.tls) {
            (None, _) => Ok(Box::new(stream)),
            (Some(name), Some(tls)) => Ok(Box::new(tls.connect(name.clone(), stream).await?)),
            (Some(_), None) => Err(std::io::ErrorKind::Unsupported.into()),
        }
    }
}

/// A socket of its own for every question: its port is as hard to guess as its id.
async fn exchange_udp(server: SocketAddr, query: &[u8]) -> std::io::Result<Vec<u8>> {
    let local: SocketAddr = if server.is_ipv4() {
        ([0, 0, 0, 0], 0).into()
    } else {
        ([0u16; 8], 0).into()
    };
    let socket = UdpSocket::bind(local).await?;
    socket.connect(server).await?;
    socket.send(query).await?;
    let mut buffer = vec![0; RECEIVE_BYTES];
    loop {
        let length = socket.recv(&mut buffer).await?;
        if answers(&buffer[..length], query) {
            buffer.truncate(length);
            return Ok(buffer);
        }
    }
}

async fn exchange_stream(stream: &mut dyn Stream, query: &[u8]) -> std::io::Result<Vec<u8>> {
    let invalid = || std::io::Error::from(std::io::ErrorKind::InvalidData);
    let length = u16::try_from(query.len()).map_err(|_| invalid())?;
    let mut framed = length.to_be_bytes().to_vec();
    framed.extend_from_slice(query);
    stream.write_all(&framed).await?;
    stream.flush().await?;
    let length = stream.read_u16().await?;
    let mut message = vec![0; length.into()];
    stream.read_exact(&mut message).await?;
    if answers(&message, query) {
        Ok(message)
    } else {
        Err(invalid())
    }
}

/// True for a response with the query's id and question.
fn answers(message: &[u8], query: &[u8]) -> bool {
    let Some(end) = question_end(query) else {
        return false;
    };
    let same_question = message
        .get(12..end)
        .zip(query.get(12..end))
        .is_some_and(|(a, b)| {
            // Lengths of labels are below 64, so ignoring case changes letters only.
            a.eq_ignore_ascii_case(b)
        });
    message.get(..2) == query.get(..2)
        && message.get(2).is_some_and(|flags| flags & 0x80 != 0)
        && same_question
}
