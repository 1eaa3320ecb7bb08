//! Fragments that overtake the first of their datagram. Only the first has ports, so the programs cannot know where the
//! others go: they hand them over on a link of our own, and get them back when the first has passed, as if they came in
//! just now. While no agent runs, such fragments are dropped (`early_fragment`).
//!
//! Nothing is decided about packets here, and no fragment waits for long: see the limits of [`room`].

pub mod room;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::kernel::{Kernel, KernelError, PacketSocket};
use crate::netlink::{PARK_LINK, PARK_LINK_PEER};
use room::Room;

/// How often the table of first fragments is asked, while something waits.
const ASK_PERIOD: Duration = Duration::from_millis(2);
/// How often the programs get a sign of life; see [`dataplane_common::fragment::PARK_ALIVE_S`].
const ALIVE_PERIOD: Duration = Duration::from_secs(1);
/// What may wait in the socket before it is read.
const SOCKET_BYTES: usize = 1 << 20;
/// No frame on the link is longer.
const FRAME_BYTES: usize = 1 << 16;
/// Between two attempts to listen on the link.
const RETRY: Duration = Duration::from_secs(1);

/// The fragments cannot be handed over.
#[derive(Debug, thiserror::Error)]
enum FragmentsError {
    #[error("{attempted} on link {link}: {source}")]
    Link {
        attempted: &'static str,
        link: &'static str,
        source: std::io::Error,
    },
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

fn failed(
    attempted: &'static str,
    link: &'static str,
) -> impl FnOnce(std::io::Error) -> FragmentsError {
    move |source| FragmentsError::Link {
        attempted,
        link,
        source,
    }
}

/// Keeps and gives back fragments until `shutdown`. While that does not work, the programs drop early fragments.
pub async fn run(kernel: Arc<Kernel>, shutdown: CancellationToken) {
    let mut failing = false;
    loop {
        let ended = tokio::select! {
            () = shutdown.cancelled() => return,
            ended = serve(&kernel) => ended,
        };
        if let Err(error) = ended {
            if !failing {
                tracing::warn!(%error, "fragments that overtake their first are dropped; trying again");
            }
            failing = true;
        }
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(RETRY) => {}
        }
    }
}

/// Serves the link until it goes away.
async fn serve(kernel: &Kernel) -> Result<(), FragmentsError> {
    let index = |link| {
        nix::net::if_::if_nametoindex(link)
            .map_err(std::io::Error::from)
            .map_err(failed("find the index", link))
    };
    let near = index(PARK_LINK)?;
    let socket = PacketSocket::open(index(PARK_LINK_PEER)?, SOCKET_BYTES)
        .map_err(failed("listen", PARK_LINK_PEER))?;
    let mut room = Room::default();
    let mut buffer = vec![0; FRAME_BYTES];
    let mut alive = tokio::time::interval(ALIVE_PERIOD);
    let mut ask = tokio::time::interval(ASK_PERIOD);
    ask.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut lost = 0;
    loop {
        tokio::select! {
            _ = alive.tick() => {
                kernel.accept_fragments(near)?;
                if lost > 0 {
                    tracing::debug!(lost, "fragments waited in vain for the first of their datagram");
                    lost = 0;
                }
            }
            frame = socket.receive(&mut buffer) => {
                let frame = frame.map_err(failed("read", PARK_LINK_PEER))?;
                if let Some(fragment) = room::identify(frame)
                    && !room.keep(fragment, frame, Instant::now())
                {
                    lost += 1;
                }
            }
            _ = ask.tick(), if !room.is_empty() => {
                give_back(kernel, &socket, &mut room)?;
                lost += room.expire(Instant::now());
            }
        }
    }
}

/// Sends on what has its first by now.
fn give_back(
    kernel: &Kernel,
    socket: &PacketSocket,
    room: &mut Room,
) -> Result<(), FragmentsError> {
    let mut failed = None;
    let free = room.release(|datagram| match kernel.first_has_passed(datagram) {
        Ok(passed) => passed,
        Err(error) => {
            failed = Some(error);
            false
        }
    });
    for frame in free {
        // A full queue loses the frame, as it would lose any other.
        if let Err(error) = socket.send(&frame) {
            tracing::debug!(%error, "a fragment could not be given back");
        }
    }
    failed.map_or(Ok(()), |error| Err(error.into()))
}
