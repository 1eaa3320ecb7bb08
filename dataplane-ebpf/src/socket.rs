//! Socket hooks: what the kernel tells of a socket goes to `dataplane_common::socket`, its answer is written back.
//! IPv6 sockets may speak IPv4: addresses of ::ffff:0:0/96 are IPv4's.

use core::ptr::{addr_of, addr_of_mut};

use aya_ebpf::EbpfContext as _;
use aya_ebpf::bindings::{bpf_sock, bpf_sock_addr};
use aya_ebpf::helpers::{bpf_get_netns_cookie, bpf_get_socket_cookie};
use aya_ebpf::macros::{cgroup_sock, cgroup_sock_addr};
use aya_ebpf::programs::{SockAddrContext, SockContext};
use dataplane_common::socket::{
    self, BOUND_TO_LINK, CONNECTED, ClientFamily, Cookie, Place, Socket, SocketTables, Steering,
};
use dataplane_common::{Port, V4, V6};

use crate::maps::MapTables;

/// The system call goes on.
const GO_ON: i32 = 1;
const AF_INET6: u32 = 10;
/// State of a datagram socket that has a peer.
const TCP_ESTABLISHED: u32 = 1;
/// Third word of an IPv6 address that carries an IPv4 address.
const MAPPED: u32 = 0xffff_u32.to_be();

#[cgroup_sock_addr(connect4)]
#[inline(always)]
pub fn connect4(context: SockAddrContext) -> i32 {
    ask(&context, named_v4(&context), socket::connect, write_v4)
}

#[cgroup_sock_addr(connect6)]
#[inline(always)]
pub fn connect6(context: SockAddrContext) -> i32 {
    let place = named_v6(&context);
    if is_mapped(&place) {
        return ask(&context, carried(&place), socket::connect, write_mapped);
    }
    ask(&context, place, socket::connect, write_v6)
}

#[cgroup_sock_addr(sendmsg4)]
#[inline(always)]
pub fn sendmsg4(context: SockAddrContext) -> i32 {
    ask(&context, named_v4(&context), socket::send, write_v4)
}

/// Mapped destinations come to [`sendmsg4`].
#[cgroup_sock_addr(sendmsg6)]
#[inline(always)]
pub fn sendmsg6(context: SockAddrContext) -> i32 {
    ask(&context, named_v6(&context), socket::send, write_v6)
}

#[cgroup_sock_addr(recvmsg4)]
#[inline(always)]
pub fn recvmsg4(context: SockAddrContext) -> i32 {
    tell(&context, named_v4(&context), socket::receive, write_v4)
}

#[cgroup_sock_addr(recvmsg6)]
#[inline(always)]
pub fn recvmsg6(context: SockAddrContext) -> i32 {
    let place = named_v6(&context);
    if is_mapped(&place) {
        return tell(&context, carried(&place), socket::receive, write_mapped);
    }
    tell(&context, place, socket::receive, write_v6)
}

#[cgroup_sock_addr(getpeername4)]
#[inline(always)]
pub fn getpeername4(context: SockAddrContext) -> i32 {
    tell(&context, named_v4(&context), socket::peer_name, write_v4)
}

#[cgroup_sock_addr(getpeername6)]
#[inline(always)]
pub fn getpeername6(context: SockAddrContext) -> i32 {
    let place = named_v6(&context);
    if is_mapped(&place) {
        return tell(&context, carried(&place), socket::peer_name, write_mapped);
    }
    tell(&context, place, socket::peer_name, write_v6)
}

#[cgroup_sock(sock_release)]
#[inline(always)]
pub fn sock_release(context: SockContext) -> i32 {
    let cookie = cookie(&context);
    // SAFETY: the kernel's own structure; these fields are readable here.
    let (family, protocol) = unsafe {
        (
            addr_of!((*context.sock).family).read_volatile(),
            addr_of!((*context.sock).protocol).read_volatile(),
        )
    };
    socket::release_by::<V4, _>(&mut MapTables, &cookie, protocol, |_, cookie, index| {
        release_v4(cookie.0[0], cookie.0[1], index) != 0
    });
    if family == AF_INET6 {
        socket::release_by::<V6, _>(&mut MapTables, &cookie, protocol, |_, cookie, index| {
            release_v6(cookie.0[0], cookie.0[1], index) != 0
        });
    }
    GO_ON
}

/// A function of its own, which the verifier looks at once, and not for every destination that a socket may have.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn release_v4(low: u32, high: u32, index: u32) -> u32 {
    socket::release_destination::<V4, _>(&mut MapTables, &Cookie([low, high]), index) as u32
}

/// As [`release_v4`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn release_v6(low: u32, high: u32, index: u32) -> u32 {
    socket::release_destination::<V6, _>(&mut MapTables, &Cookie([low, high]), index) as u32
}

/// Families whose sockets the hooks can read.
trait SocketFamily: ClientFamily {
    /// The address that a socket is bound to.
    fn bound(sock: *const bpf_sock) -> Self;
}

#[inline(always)]
fn ask<A: SocketFamily>(
    context: &SockAddrContext,
    place: Place<A>,
    decide: impl FnOnce(&mut MapTables, &Socket<A>, &Place<A>) -> Steering<A>,
    write: impl FnOnce(*mut bpf_sock_addr, &A),
) -> i32
where
    MapTables: SocketTables<A>,
{
    let address = context.sock_addr;
    // SAFETY: the kernel's own structure; the socket of an address hook is always there.
    let (protocol, link, state, source) = unsafe {
        let sock = addr_of!((*address).__bindgen_anon_1.sk).read_volatile();
        (
            addr_of!((*address).protocol).read_volatile(),
            addr_of!((*sock).bound_dev_if).read_volatile(),
            addr_of!((*sock).state).read_volatile(),
            A::bound(sock),
        )
    };
    let mut flags = 0;
    if link != 0 {
        flags |= BOUND_TO_LINK;
    }
    if state == TCP_ESTABLISHED {
        flags |= CONNECTED;
    }
    let asking = Socket {
        // SAFETY: the context is this program's own.
        namespace: unsafe { bpf_get_netns_cookie(context.as_ptr()) },
        cookie: cookie(context),
        source,
        flags,
        protocol,
    };
    answer(context, &decide(&mut MapTables, &asking, &place), write)
}

#[inline(always)]
fn tell<A: SocketFamily>(
    context: &SockAddrContext,
    place: Place<A>,
    decide: impl FnOnce(&mut MapTables, &Cookie, &Place<A>) -> Steering<A>,
    write: impl FnOnce(*mut bpf_sock_addr, &A),
) -> i32
where
    MapTables: SocketTables<A>,
{
    let steering = decide(&mut MapTables, &cookie(context), &place);
    answer(context, &steering, write)
}

#[inline(always)]
fn answer<A: SocketFamily>(
    context: &SockAddrContext,
    steering: &Steering<A>,
    write: impl FnOnce(*mut bpf_sock_addr, &A),
) -> i32 {
    if steering.is_translated() {
        let address = context.sock_addr;
        write(address, &steering.place.address);
        // SAFETY: the kernel's own structure; it takes whole words only.
        unsafe {
            addr_of_mut!((*address).user_port).write_volatile(steering.place.port.0 as u32);
        }
    }
    GO_ON
}

#[inline(always)]
fn cookie<C: aya_ebpf::EbpfContext>(context: &C) -> Cookie {
    // SAFETY: the context is this program's own.
    Cookie::new(unsafe { bpf_get_socket_cookie(context.as_ptr()) })
}

#[inline(always)]
fn port(context: &SockAddrContext) -> Port {
    // SAFETY: the kernel's own structure.
    Port(unsafe { addr_of!((*context.sock_addr).user_port).read_volatile() } as u16)
}

#[inline(always)]
fn named_v4(context: &SockAddrContext) -> Place<V4> {
    // SAFETY: the kernel's own structure.
    let address = unsafe { addr_of!((*context.sock_addr).user_ip4).read_volatile() };
    Place::new(V4(address), port(context))
}

#[inline(always)]
fn named_v6(context: &SockAddrContext) -> Place<V6> {
    let address = context.sock_addr;
    // SAFETY: the kernel's own structure, read word by word.
    let words = unsafe {
        [
            addr_of!((*address).user_ip6[0]).read_volatile(),
            addr_of!((*address).user_ip6[1]).read_volatile(),
            addr_of!((*address).user_ip6[2]).read_volatile(),
            addr_of!((*address).user_ip6[3]).read_volatile(),
        ]
    };
    Place::new(V6(words), port(context))
}

#[inline(always)]
fn is_mapped(place: &Place<V6>) -> bool {
    let words = place.address.0;
    (words[0] | words[1]) == 0 && words[2] == MAPPED
}

/// The IPv4 address that a mapped IPv6 address carries.
#[inline(always)]
fn carried(place: &Place<V6>) -> Place<V4> {
    Place::new(V4(place.address.0[3]), place.port)
}

// The verifier lets a program touch only the fields of its own family, so who writes is settled by the hook.

#[inline(always)]
fn write_v4(context: *mut bpf_sock_addr, address: &V4) {
    // SAFETY: the kernel's own structure, written in whole words, here and below.
    unsafe { addr_of_mut!((*context).user_ip4).write_volatile(address.0) };
}

#[inline(always)]
fn write_mapped(context: *mut bpf_sock_addr, address: &V4) {
    // SAFETY: as in `write_v4`.
    unsafe { addr_of_mut!((*context).user_ip6[3]).write_volatile(address.0) };
}

#[inline(always)]
fn write_v6(context: *mut bpf_sock_addr, address: &V6) {
    // SAFETY: as in `write_v4`.
    unsafe {
        addr_of_mut!((*context).user_ip6[0]).write_volatile(address.0[0]);
        addr_of_mut!((*context).user_ip6[1]).write_volatile(address.0[1]);
        addr_of_mut!((*context).user_ip6[2]).write_volatile(address.0[2]);
        addr_of_mut!((*context).user_ip6[3]).write_volatile(address.0[3]);
    }
}

impl SocketFamily for V4 {
    #[inline(always)]
    fn bound(sock: *const bpf_sock) -> Self {
        // SAFETY: the caller's socket.
        Self(unsafe { addr_of!((*sock).src_ip4).read_volatile() })
    }
}

impl SocketFamily for V6 {
    #[inline(always)]
    fn bound(sock: *const bpf_sock) -> Self {
        // SAFETY: the caller's socket.
        Self(unsafe {
            [
                addr_of!((*sock).src_ip6[0]).read_volatile(),
                addr_of!((*sock).src_ip6[1]).read_volatile(),
                addr_of!((*sock).src_ip6[2]).read_volatile(),
                addr_of!((*sock).src_ip6[3]).read_volatile(),
            ]
        })
    }
}
