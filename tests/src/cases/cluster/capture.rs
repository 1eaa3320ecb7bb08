//! Captures the frames of a network namespace while a step runs.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::socket::{
    AddressFamily, LinkAddr, SockFlag, SockProtocol, SockType, recvfrom, setsockopt, socket,
    sockopt,
};
use nix::sys::time::TimeVal;

use crate::actor::lock;
use crate::topology::Namespace;

/// Bytes kept of a frame: enough for Ethernet, IPv6, UDP, VXLAN and the headers inside.
const KEPT: usize = 256;
/// A whole upload may wait here while the reader is not scheduled.
const SOCKET_BUFFER: usize = 64 << 20;
const LOOK_EVERY_US: i64 = 20_000;
/// Packets that a step's last action sent may still be on their way.
const GRACE: Duration = Duration::from_millis(60);
/// No capture keeps more frames: a flood must not eat the machine's memory.
const MAX_FRAMES: usize = 1 << 20;

/// A frame on one link, cut to its first bytes.
#[derive(Clone, Debug)]
pub(in crate::cases) struct Frame {
    /// Index of the link in its namespace.
    pub(in crate::cases) link: usize,
    pub(in crate::cases) bytes: Vec<u8>,
}

/// A running capture on all links of a namespace; ends with the value.
#[derive(Debug)]
pub(in crate::cases) struct Capture {
    stop: Arc<AtomicBool>,
    frames: Arc<Mutex<Vec<Frame>>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Capture {
    /// Starts; every frame from now on is seen.
    ///
    /// # Errors
    /// When there are no packet sockets (root).
    pub(in crate::cases) fn start(namespace: &Namespace) -> Result<Self> {
        let socket = namespace.enter(|| {
            let socket = socket(
                AddressFamily::Packet,
                SockType::Raw,
                SockFlag::SOCK_CLOEXEC,
                SockProtocol::EthAll,
            )
            .context("open a packet socket")?;
            setsockopt(&socket, sockopt::RcvBufForce, &SOCKET_BUFFER)?;
            let wait = TimeVal::new(0, LOOK_EVERY_US);
            setsockopt(&socket, sockopt::ReceiveTimeout, &wait)?;
            Ok(socket)
        })?;
        let stop = Arc::new(AtomicBool::new(false));
        let frames: Arc<Mutex<Vec<Frame>>> = Arc::default();
        let (stopped, kept) = (Arc::clone(&stop), Arc::clone(&frames));
        let thread = std::thread::spawn(move || read(&socket, &stopped, &kept));
        Ok(Self {
            stop,
            frames,
            thread: Some(thread),
        })
    }

    /// What was seen so far.
    #[must_use]
    pub(in crate::cases) fn frames(&self) -> Vec<Frame> {
        std::thread::sleep(GRACE);
        lock(&self.frames).clone()
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ended = thread.join();
        }
    }
}

fn read(socket: &OwnedFd, stop: &AtomicBool, frames: &Mutex<Vec<Frame>>) {
    let mut buffer = [0; KEPT];
    while !stop.load(Ordering::SeqCst) {
        // Nothing came in time: look whether this is to end.
        let Ok((length, Some(from))) = recvfrom::<LinkAddr>(socket.as_raw_fd(), &mut buffer) else {
            continue;
        };
        let mut frames = lock(frames);
        if frames.len() < MAX_FRAMES {
            frames.push(Frame {
                link: from.ifindex(),
                bytes: buffer[..length.min(KEPT)].to_vec(),
            });
        }
    }
}
