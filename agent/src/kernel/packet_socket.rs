//! A raw socket on one link: whole Ethernet frames in and out (packet(7)).

use std::io;
use std::mem::{MaybeUninit, size_of};

use socket2::{Domain, Protocol, SockAddr, SockAddrStorage, Socket, Type};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Frames of every protocol that come in on one link; what is sent goes out of it.
#[derive(Debug)]
pub struct PacketSocket {
    socket: AsyncFd<Socket>,
}

impl PacketSocket {
    /// Opens a socket, for a task of the runtime. `receive_bytes` bounds what waits in the kernel.
    ///
    /// # Errors
    /// When the kernel refuses: no right, or no such link.
    pub fn open(ifindex: u32, receive_bytes: usize) -> io::Result<Self> {
        let every = u16::try_from(libc::ETH_P_ALL).unwrap_or_default().to_be();
        // Without a protocol nothing is received until the socket is bound to its link.
        let socket = Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(0)))?;
        socket.set_nonblocking(true)?;
        socket.set_recv_buffer_size(receive_bytes)?;
        let mut storage = SockAddrStorage::zeroed();
        // SAFETY: `sockaddr_ll` is a socket address, for which all zero is valid, and fits into the storage.
        let link = unsafe { storage.view_as::<libc::sockaddr_ll>() };
        link.sll_family = libc::AF_PACKET.try_into().unwrap_or_default();
        link.sll_protocol = every;
        link.sll_ifindex = ifindex.try_into().unwrap_or(0);
        let length = size_of::<libc::sockaddr_ll>().try_into().unwrap_or(0);
        // SAFETY: the storage holds a `sockaddr_ll` of this length.
        let address = unsafe { SockAddr::new(storage, length) };
        socket.bind(&address)?;
        // SAFETY: the socket owns its descriptor, and is neither replaced nor closed before `AsyncFd` is dropped.
        let socket = unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE) }?;
        Ok(Self { socket })
    }

    /// The next frame, cut to the buffer's size. Nothing is lost when the call is dropped.
    ///
    /// # Errors
    /// When the link is down or gone.
    pub async fn receive<'a>(&self, buffer: &'a mut [u8]) -> io::Result<&'a [u8]> {
        // SAFETY: `MaybeUninit<u8>` has the layout of `u8`, and the kernel only writes initialised bytes.
        let room = unsafe { &mut *(std::ptr::from_mut(buffer) as *mut [MaybeUninit<u8>]) };
        let length = loop {
            let mut ready = self.socket.readable().await?;
            if let Ok(length) = ready.try_io(|socket| socket.get_ref().recv(room)) {
                break length?;
            }
        };
        Ok(buffer.get(..length).unwrap_or_default())
    }

    /// Sends one frame, without waiting.
    ///
    /// # Errors
    /// When the link is down or its queue full.
    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        self.socket.get_ref().send(frame).map(drop)
    }
}
