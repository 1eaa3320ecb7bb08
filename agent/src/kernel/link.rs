//! Links between programs and cgroups or drivers by `bpf(2)`: aya cannot lead all of them to another program. Also the
//! cookie of the calling thread's network namespace.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::table::bpf;

const BPF_OBJ_PIN: libc::c_int = 6;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const BPF_LINK_CREATE: libc::c_int = 28;
const BPF_LINK_UPDATE: libc::c_int = 29;
/// Since Linux 5.14.
const SO_NETNS_COOKIE: libc::c_int = 71;

#[allow(
    clippy::cast_sign_loss,
    reason = "an open file descriptor is not negative"
)]
fn number(fd: BorrowedFd<'_>) -> u32 {
    fd.as_raw_fd() as u32
}

/// Attaches a program to a cgroup, beside those of others. The attachment lasts as long as the link.
pub(super) fn attach_to_cgroup(
    program: BorrowedFd<'_>,
    cgroup: &File,
    attach_type: u32,
) -> io::Result<OwnedFd> {
    create(program, number(cgroup.as_fd()), attach_type, 0)
}

/// Attaches an XDP program to a link's driver, and to nothing if the driver cannot run it.
pub(super) fn attach_to_driver(program: BorrowedFd<'_>, ifindex: u32) -> io::Result<OwnedFd> {
    const BPF_XDP: u32 = 37;
    const XDP_FLAGS_DRV_MODE: u32 = 4;
    create(program, ifindex, BPF_XDP, XDP_FLAGS_DRV_MODE)
}

fn create(
    program: BorrowedFd<'_>,
    target: u32,
    attach_type: u32,
    flags: u32,
) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct CreateAttr {
        prog_fd: u32,
        target: u32,
        attach_type: u32,
        flags: u32,
    }
    let mut attr = CreateAttr {
        prog_fd: number(program),
        target,
        attach_type,
        flags,
    };
    // SAFETY: the structure holds no address.
    let fd = unsafe { bpf(BPF_LINK_CREATE, &mut attr) }?;
    let fd = i32::try_from(fd).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
    // SAFETY: the kernel gave this descriptor to us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Puts another program in the place of a link's, without a gap.
pub(super) fn update_link(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    #[repr(C)]
    struct UpdateAttr {
        link_fd: u32,
        new_prog_fd: u32,
        flags: u32,
        old_prog_fd: u32,
    }
    let mut attr = UpdateAttr {
        link_fd: number(link),
        new_prog_fd: number(program),
        flags: 0,
        old_prog_fd: 0,
    };
    // SAFETY: the structure holds no address.
    unsafe { bpf(BPF_LINK_UPDATE, &mut attr) }.map(drop)
}

/// The id of the cgroup that a link is attached to: the inode of its folder. Zero when the cgroup is gone.
pub(super) fn link_cgroup(link: BorrowedFd<'_>) -> io::Result<u64> {
    /// The start of the kernel's `bpf_link_info`, as it is for cgroups.
    #[repr(C, align(8))]
    #[derive(Default)]
    struct LinkInfo {
        kind: u32,
        id: u32,
        prog_id: u32,
        pad: u32,
        cgroup_id: u64,
        attach_type: u32,
        tail: u32,
    }
    #[repr(C)]
    struct InfoAttr {
        bpf_fd: u32,
        info_len: u32,
        info: u64,
    }
    let mut info = LinkInfo::default();
    let mut attr = InfoAttr {
        bpf_fd: number(link),
        info_len: u32::try_from(size_of::<LinkInfo>()).unwrap_or(0),
        info: std::ptr::from_mut(&mut info) as u64,
    };
    // SAFETY: the kernel writes no more than the length given.
    unsafe { bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr) }?;
    Ok(info.cgroup_id)
}

/// Pins a link.
pub(super) fn pin(fd: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    #[repr(C)]
    struct PinAttr {
        pathname: u64,
        bpf_fd: u32,
        file_flags: u32,
    }
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = PinAttr {
        pathname: path.as_ptr() as u64,
        bpf_fd: number(fd),
        file_flags: 0,
    };
    // SAFETY: the path ends in a zero byte and outlives the call.
    unsafe { bpf(BPF_OBJ_PIN, &mut attr) }.map(drop)
}

/// The kernel's number of the calling thread's network namespace; never used twice while the machine runs.
///
/// # Errors
/// `Unsupported` on kernels before 5.14.
pub fn namespace_cookie() -> io::Result<u64> {
    let socket = std::net::UdpSocket::bind((std::net::Ipv4Addr::LOCALHOST, 0))
        .or_else(|_| std::net::UdpSocket::bind((std::net::Ipv4Addr::UNSPECIFIED, 0)))?;
    let mut cookie = 0u64;
    let mut length = libc::socklen_t::try_from(size_of::<u64>()).unwrap_or(0);
    // SAFETY: `cookie` has the length given.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            std::ptr::from_mut(&mut cookie).cast(),
            &raw mut length,
        )
    };
    if result == 0 {
        return Ok(cookie);
    }
    let error = io::Error::last_os_error();
    Err(if error.raw_os_error() == Some(libc::ENOPROTOOPT) {
        io::Error::new(
            io::ErrorKind::Unsupported,
            "the kernel does not number network namespaces (it does from 5.14 on)",
        )
    } else {
        error
    })
}
