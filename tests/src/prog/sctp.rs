//! SCTP between namespaces, one association per socket. Kernels without the protocol say so.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv6Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use socket2::{Domain, Protocol, Socket, Type};

use super::nodes::{SERVER_PORT, inside};

const SCTP: i32 = 132;
const PATIENCE: Duration = Duration::from_secs(5);

fn socket(domain: Domain) -> std::io::Result<Socket> {
    Socket::new(domain, Type::STREAM, Some(Protocol::from(SCTP)))
}

/// Says why SCTP cannot be tried here, if it cannot.
#[must_use]
pub fn unable() -> Option<String> {
    socket(Domain::IPV4)
        .err()
        .map(|error| format!("this kernel has no SCTP sockets: {error}"))
}

/// A server on every address of a namespace, which sends back what it gets. It ends with the process.
///
/// # Errors
/// When the socket cannot be opened.
pub fn start_server(netns: &File) -> Result<()> {
    inside(netns, || {
        let listener = socket(Domain::IPV6).context("an SCTP socket")?;
        listener.set_only_v6(false)?;
        let address = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), SERVER_PORT);
        listener.bind(&address.into()).context("bind for SCTP")?;
        listener.listen(16).context("listen for SCTP")?;
        std::thread::spawn(move || {
            while let Ok((association, _)) = listener.accept() {
                std::thread::spawn(move || echo(association));
            }
        });
        Ok(())
    })
}

fn echo(mut association: Socket) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(length) = association.read(&mut buffer) {
        if length == 0 || association.write_all(&buffer[..length]).is_err() {
            return;
        }
    }
}

/// Sends `payload` from inside a namespace, and expects it back.
///
/// # Errors
/// When anything but the whole payload comes back in time.
pub fn exchange(netns: &File, to: SocketAddr, payload: &[u8]) -> Result<()> {
    inside(netns, || {
        let mut association = socket(Domain::for_address(to)).context("an SCTP socket")?;
        association.set_read_timeout(Some(PATIENCE))?;
        association
            .connect_timeout(&to.into(), PATIENCE)
            .with_context(|| format!("connect to {to}"))?;
        association.write_all(payload).context("send")?;
        let mut received: Vec<u8> = Vec::new();
        let mut buffer = vec![0; 1 << 16];
        while received.len() < payload.len() {
            let length = association.read(&mut buffer).context("read the answer")?;
            ensure!(length > 0, "the association ended");
            received.extend(&buffer[..length]);
        }
        ensure!(received == payload, "{} bytes came back", received.len());
        Ok(())
    })
}
