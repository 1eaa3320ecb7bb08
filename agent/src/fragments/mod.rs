//! Fragments that overtake the first of their datagram. Only the first has ports, so the programs cannot know where the
//! others go: they hand them over on a link of our own, and get them back when the first has passed, as if they came in
//! just now. While no agent runs, such fragments are dropped (`early_fragment`).
//!
//! Nothing is decided about packets here, and no fragment waits for long: see the limits of [`room`].

pub mod room;

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::unix::AsyncFd;
use tokio_util::sync::CancellationToken;

use crate::kernel::{Kernel, KernelError, PacketSocket};
use room::Room;

/// How often the table of first fragments is asked, while something waits.
const ASK_PERIOD: Duration = Duration::from_millis(2);
/// How often the programs get a sign of life; see [`dataplane_common::fragment::PARK_ALIVE_S`].
const ALIVE_PERIOD: Duration = Duration::from_secs(1);
/// What may wait in the socket before it is read.
const SOCKET_BYTES: usize = 1 << 20;
/// No frame on the link is longer.
const FRAME_BYTES: usize = 1 << 16;
/// Frames read at once before others get their turn.
const READS_AT_ONCE: usize = 256;

/// The fragments cannot be handed over.
#[derive(Debug, thiserror::Error)]
pub enum FragmentsError {
    #[error("read fragments from link {ifindex}: {source}")]
    Socket {
        ifindex: u32,
        source: std::io::Error,
    },
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// Keeps and gives back fragments that come in on the far end of the link `ifindex`, until `shutdown`.
///
/// # Errors
/// [`FragmentsError`] when the link goes away, or the tables cannot be used. The programs then drop early fragments.
pub async fn run(
    kernel: Arc<Kernel>,
    ifindex: u32,
    shutdown: CancellationToken,
) -> Result<(), FragmentsError> {
    let failed = |source| FragmentsError::Socket { ifindex, source };
    let socket = PacketSocket::open(ifindex, SOCKET_BYTES).map_err(failed)?;
    let socket = AsyncFd::new(socket).map_err(failed)?;
    let mut room = Room::default();
    let mut buffer = vec![0; FRAME_BYTES];
    let mut alive = tokio::time::interval(ALIVE_PERIOD);
    let mut lost = 0u64;
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            _ = alive.tick() => {
                kernel.accept_fragments()?;
                if lost > 0 {
                    tracing::debug!(lost, "fragments waited in vain for the first of their datagram");
                    lost = 0;
                }
            }
            ready = socket.readable() => {
                let mut ready = ready.map_err(failed)?;
                if take_in(socket.get_ref(), &mut room, &mut buffer, &mut lost).map_err(failed)? {
                    ready.clear_ready();
                }
            }
            () = tokio::time::sleep(ASK_PERIOD), if !room.is_empty() => {}
        }
        give_back(&kernel, socket.get_ref(), &mut room)?;
        lost += room.expire(Instant::now()) as u64;
    }
}

/// Reads what there is; true when there is no more.
fn take_in(
    socket: &PacketSocket,
    room: &mut Room,
    buffer: &mut [u8],
    lost: &mut u64,
) -> std::io::Result<bool> {
    let now = Instant::now();
    for _ in 0..READS_AT_ONCE {
        let frame = match socket.receive(buffer) {
            Ok(frame) => frame,
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(true),
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        };
        if let Some(fragment) = room::identify(frame)
            && !room.keep(fragment, frame, now)
        {
            *lost += 1;
        }
    }
    Ok(false)
}

/// Sends on what has its first by now.
fn give_back(
    kernel: &Kernel,
    socket: &PacketSocket,
    room: &mut Room,
) -> Result<(), FragmentsError> {
    if room.is_empty() {
        return Ok(());
    }
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
