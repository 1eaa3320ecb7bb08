//! SCTP where the kernel has no sockets for it: the first packet of an association, forged, and a look at who gets it.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::super::case::Query;
use super::Run;
use crate::actor::command::{Command, Forged};
use crate::actor::packet;
use crate::cases::cluster::capture::Capture;

/// A packet that may pass has arrived by then.
const ARRIVES_WITHIN: Duration = Duration::from_secs(2);
/// One that may not has not arrived by then.
const SILENT_FOR: Duration = Duration::from_millis(400);

/// Does this kernel have SCTP sockets?
pub(super) fn has_sockets() -> bool {
    let protocol = Some(socket2::Protocol::SCTP);
    socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, protocol).is_ok()
}

/// Looks at one query.
///
/// # Errors
/// When the packet's fate is not the expected one, or cannot be told.
pub(super) fn look(run: &Run<'_>, query: &Query, allow: bool) -> Result<()> {
    let target = run.target(query)?;
    let [server] = target.servers.as_slice() else {
        bail!("SCTP to several backends: name one");
    };
    ensure!(
        !server.starts_with("node:"),
        "what a node's sockets get of SCTP cannot be told from what its links see"
    );
    let (actor, own, _) = run.cluster.source(&query.from)?;
    let (_, _, there) = run.cluster.source(server)?;
    let same = own.iter().find(|ip| ip.is_ipv4() == target.to.is_ipv4());
    let source = SocketAddr::new(
        *same.context("no address of the family")?,
        rand::random_range(20_000..60_000),
    );
    let tag: u32 = rand::random();
    let capture = Capture::start(there)?;
    let forged = Forged {
        packet: packet::sctp_init(source, target.to, tag),
        to: target.to.ip(),
        inside: None,
    };
    actor.call(Command::Forge(forged), Duration::ZERO)?;
    let limit = if allow { ARRIVES_WITHIN } else { SILENT_FOR };
    let deadline = Instant::now() + limit;
    let arrived = || {
        let frames = capture.frames();
        frames
            .iter()
            .any(|f| f.bytes.windows(4).any(|w| w == tag.to_be_bytes()))
    };
    let mut seen = arrived();
    while !seen && Instant::now() < deadline {
        seen = arrived();
    }
    match (allow, seen) {
        (true, false) => bail!("the packet did not arrive within {limit:?}"),
        (false, true) => bail!("{server} got what may not pass"),
        _ => Ok(()),
    }
}
