//! Socket hooks: attachment to a cgroup, all of them or none. Links are pinned, so processes keep their services while
//! no agent runs, and an agent that starts puts its own programs in their place.

use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use aya::Ebpf;
use aya::programs::Program as AyaProgram;
use dataplane_common::layout::Node;
use dataplane_common::socket::{
    Connection, Cookie, DestinationKey, NAMESPACE_NODE, Namespace, Place, SocketFlow, SourceKey,
    UseKey,
};
use dataplane_common::{V4, V6};

use super::Programs;
use crate::kernel::link::{attach_to_cgroup, link_cgroup, namespace_cookie, pin, update_link};
use crate::kernel::services::{Wire, open};
use crate::kernel::table::{Plain, Table, detach_link, open_pin};
use crate::kernel::{KernelError, PodLink, ProgramSize};

/// A hook, in the order of attachment: whatever is translated forward can be translated back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketHook {
    Release,
    PeerNameV4,
    PeerNameV6,
    ReceiveV4,
    ReceiveV6,
    SendV4,
    SendV6,
    ConnectV4,
    ConnectV6,
}

impl SocketHook {
    pub const ALL: [Self; 9] = [
        Self::Release,
        Self::PeerNameV4,
        Self::PeerNameV6,
        Self::ReceiveV4,
        Self::ReceiveV6,
        Self::SendV4,
        Self::SendV6,
        Self::ConnectV4,
        Self::ConnectV6,
    ];

    /// Name in the object, in pins and in `bpftool prog`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Release => "sock_release",
            Self::PeerNameV4 => "getpeername4",
            Self::PeerNameV6 => "getpeername6",
            Self::ReceiveV4 => "recvmsg4",
            Self::ReceiveV6 => "recvmsg6",
            Self::SendV4 => "sendmsg4",
            Self::SendV6 => "sendmsg6",
            Self::ConnectV4 => "connect4",
            Self::ConnectV6 => "connect6",
        }
    }

    /// Number of the hook in the kernel's `bpf_attach_type`.
    fn attach_type(self) -> u32 {
        match self {
            Self::ConnectV4 => 10,
            Self::ConnectV6 => 11,
            Self::SendV4 => 14,
            Self::SendV6 => 15,
            Self::ReceiveV4 => 19,
            Self::ReceiveV6 => 20,
            Self::PeerNameV4 => 29,
            Self::PeerNameV6 => 30,
            Self::Release => 34,
        }
    }
}

/// Why Services are not translated at the socket. The packet path serves them.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    #[error("no cgroup is named in the configuration, and {0}")]
    NoCgroup(&'static str),
    #[error("cgroup {path}: {source}")]
    Cgroup { path: PathBuf, source: io::Error },
    #[error("{path} is no folder of a cgroup v2 hierarchy")]
    NotUnified { path: PathBuf },
    #[error("number the node's network namespace: {0}")]
    Namespace(io::Error),
    #[error("load the eBPF program {hook}: {source}")]
    Load {
        hook: &'static str,
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("attach the eBPF program {hook} to the cgroup: {source}")]
    Attach {
        hook: &'static str,
        source: io::Error,
    },
    #[error(transparent)]
    Map(#[from] KernelError),
}

/// The maps of the socket hooks that user space writes.
#[derive(Debug)]
pub(super) struct SocketMaps {
    namespaces: Table<u64, Namespace>,
    v4: FamilyMaps<V4>,
    v6: FamilyMaps<V6>,
}

#[derive(Debug)]
struct FamilyMaps<A> {
    connections: Table<Cookie, Connection<A>>,
    flows: Table<DestinationKey<A>, SocketFlow<A>>,
    origins: Table<SourceKey<A>, Place<A>>,
    uses: Table<UseKey, Place<A>>,
}

impl<A: 'static> FamilyMaps<A>
where
    Connection<A>: Plain,
    DestinationKey<A>: Plain,
    SocketFlow<A>: Plain,
    SourceKey<A>: Plain,
    Place<A>: Plain,
{
    fn open(maps: &Path, names: [&'static str; 4]) -> Result<Self, KernelError> {
        let [connections, flows, origins, uses] = names;
        Ok(Self {
            connections: open(maps, connections)?,
            flows: open(maps, flows)?,
            origins: open(maps, origins)?,
            uses: open(maps, uses)?,
        })
    }

    fn clear(&self) -> Result<(), KernelError> {
        clear(&self.connections)?;
        clear(&self.origins)?;
        clear(&self.flows)?;
        clear(&self.uses)
    }

    fn count(&self) -> Result<usize, KernelError> {
        let failed = |source| KernelError::Map {
            attempted: "read",
            map: "socket maps",
            source,
        };
        let mut count = self.connections.entries().map_err(failed)?.len();
        count += self.flows.entries().map_err(failed)?.len();
        count += self.origins.entries().map_err(failed)?.len();
        count += self.uses.entries().map_err(failed)?.len();
        Ok(count)
    }
}

fn clear<K: Plain, V: Plain>(table: &Table<K, V>) -> Result<(), KernelError> {
    let failed = |attempted| {
        move |source| KernelError::Map {
            attempted,
            map: table.name,
            source,
        }
    };
    for (key, _) in table.entries().map_err(failed("read"))? {
        table.remove(&key).map_err(failed("remove an entry of"))?;
    }
    Ok(())
}

impl SocketMaps {
    pub(super) fn open(maps: &Path) -> Result<Self, KernelError> {
        Ok(Self {
            namespaces: open(maps, "socket_netns")?,
            v4: FamilyMaps::open(
                maps,
                [
                    "socket_conns_v4",
                    "socket_flows_v4",
                    "socket_origs_v4",
                    "socket_uses_v4",
                ],
            )?,
            v6: FamilyMaps::open(
                maps,
                [
                    "socket_conns_v6",
                    "socket_flows_v6",
                    "socket_origs_v6",
                    "socket_uses_v6",
                ],
            )?,
        })
    }

    /// Enters the pod's network namespace where its number is known. Sockets of unknown ones are left alone.
    pub(super) fn enter_pod(&self, link: &PodLink) -> io::Result<()> {
        let Some(cookie) = link.netns_cookie else {
            return Ok(());
        };
        let namespace = Namespace {
            flags: 0,
            ifindex: link.ifindex,
            v4: first(&link.addresses),
            v6: first(&link.addresses),
        };
        self.namespaces.put(&cookie, &namespace)
    }

    /// Forgets the namespace behind a pod's link.
    pub(super) fn forget_pod(&self, ifindex: u32) -> io::Result<()> {
        for (cookie, namespace) in self.namespaces.entries()? {
            if namespace.ifindex == ifindex && namespace.flags & NAMESPACE_NODE == 0 {
                self.namespaces.remove(&cookie)?;
            }
        }
        Ok(())
    }

    fn set_node(&self, cookie: Option<u64>, v4: V4, v6: V6) -> io::Result<()> {
        for (known, namespace) in self.namespaces.entries()? {
            if namespace.flags & NAMESPACE_NODE != 0 && cookie != Some(known) {
                self.namespaces.remove(&known)?;
            }
        }
        let Some(cookie) = cookie else {
            return Ok(());
        };
        let namespace = Namespace {
            flags: NAMESPACE_NODE,
            ifindex: 0,
            v4,
            v6,
        };
        self.namespaces.put(&cookie, &namespace)
    }
}

fn first<A: Wire + Default>(addresses: &[IpAddr]) -> A {
    addresses
        .iter()
        .find_map(|address| A::from_address(*address))
        .unwrap_or_default()
}

/// Where socket hooks go when the configuration does not say: to the root of the cgroup v2 hierarchy, if this agent's
/// network is the machine's own. An agent in a namespace of its own shares the machine with others.
///
/// # Errors
/// [`SocketError::NoCgroup`] says what stands against it.
pub fn default_cgroup() -> Result<PathBuf, SocketError> {
    const ROOTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
    let inode = |path: &str| std::fs::metadata(path).map(|m| (m.dev(), m.ino()));
    match (inode("/proc/1/ns/net"), inode("/proc/self/ns/net")) {
        (Ok(first), Ok(own)) if first == own => {}
        (Ok(_), Ok(_)) => {
            return Err(SocketError::NoCgroup(
                "the network namespace of this agent is not the machine's",
            ));
        }
        _ => {
            return Err(SocketError::NoCgroup(
                "the machine's network namespace cannot be told",
            ));
        }
    }
    let unified = ROOTS.into_iter().map(PathBuf::from).find(|p| is_unified(p));
    unified.ok_or(SocketError::NoCgroup(
        "no cgroup v2 hierarchy is mounted at /sys/fs/cgroup",
    ))
}

fn is_unified(path: &Path) -> bool {
    nix::sys::statfs::statfs(path)
        .is_ok_and(|kind| kind.filesystem_type() == nix::sys::statfs::CGROUP2_SUPER_MAGIC)
}

impl Programs {
    /// Attaches the socket hooks to `cgroup`, or leads those that are there to this agent's programs. To be called in
    /// the node's network namespace. On failure none is left. Hooks of another version stay until they are taken over.
    pub(in crate::kernel) fn attach_sockets(&mut self, cgroup: &Path) -> Result<(), SocketError> {
        if self.is_taking_over() {
            return Ok(());
        }
        let attached = self.try_attach_sockets(cgroup);
        if attached.is_err()
            && let Err(error) = self.detach_sockets()
        {
            tracing::warn!(%error, "socket hooks are left");
        }
        attached
    }

    fn try_attach_sockets(&mut self, cgroup: &Path) -> Result<(), SocketError> {
        let failed = |source| SocketError::Cgroup {
            path: cgroup.into(),
            source,
        };
        let folder = File::open(cgroup).map_err(failed)?;
        if !is_unified(cgroup) {
            return Err(SocketError::NotUnified {
                path: cgroup.into(),
            });
        }
        let id = folder.metadata().map_err(failed)?.ino();
        let mut programs = Vec::new();
        for hook in SocketHook::ALL {
            let program = load(&mut self.ebpf, hook).map_err(|source| SocketError::Load {
                hook: hook.name(),
                source,
            })?;
            programs.push((hook, program));
        }
        let cookie = namespace_cookie().map_err(SocketError::Namespace)?;
        let node = |source| KernelError::Map {
            attempted: "enter the node in",
            map: "socket_netns",
            source,
        };
        let v4: Option<Node<V4>> = self.node_v4.get(&0).map_err(node)?;
        let v6: Option<Node<V6>> = self.node_v6.get(&0).map_err(node)?;
        self.sockets
            .set_node(
                Some(cookie),
                v4.unwrap_or_default().address,
                v6.unwrap_or_default().address,
            )
            .map_err(node)?;
        for (hook, program) in programs {
            let pinned = self.pins.socket(hook);
            attach(&program, hook, &folder, id, &pinned).map_err(|source| SocketError::Attach {
                hook: hook.name(),
                source,
            })?;
        }
        Ok(())
    }

    /// Takes the socket hooks away and forgets all sockets. Connections that were translated go on: they lead to their
    /// backends.
    pub(in crate::kernel) fn detach_sockets(&mut self) -> Result<(), KernelError> {
        for hook in SocketHook::ALL.into_iter().rev() {
            let path = self.pins.socket(hook);
            // Absent, or its cgroup is gone: detached either way.
            let _ = detach_link(&path);
            super::remove_if_present(&path)?;
        }
        self.sockets
            .set_node(None, V4::default(), V6::default())
            .map_err(|source| KernelError::Map {
                attempted: "remove the node from",
                map: "socket_netns",
                source,
            })?;
        self.sockets.v4.clear()?;
        self.sockets.v6.clear()
    }

    /// Entries in the tables of the socket hooks.
    pub(in crate::kernel) fn socket_entries(&self) -> Result<usize, KernelError> {
        Ok(self.sockets.v4.count()? + self.sockets.v6.count()?)
    }

    pub(in crate::kernel) fn socket_program_sizes(&mut self) -> Vec<(&'static str, ProgramSize)> {
        let mut sizes = Vec::new();
        for hook in SocketHook::ALL {
            let info = match self.ebpf.program(hook.name()) {
                Some(AyaProgram::CgroupSockAddr(program)) => program.info(),
                Some(AyaProgram::CgroupSock(program)) => program.info(),
                _ => continue,
            };
            if let Ok(info) = info {
                sizes.push((hook.name(), super::size_of_program(&info)));
            }
        }
        sizes
    }
}

fn load(
    ebpf: &mut Ebpf,
    hook: SocketHook,
) -> Result<OwnedFd, Box<dyn std::error::Error + Send + Sync>> {
    let fd = match ebpf.program_mut(hook.name()) {
        Some(AyaProgram::CgroupSockAddr(program)) => {
            if program.fd().is_err() {
                program.load()?;
            }
            program.fd()?.try_clone()?
        }
        Some(AyaProgram::CgroupSock(program)) => {
            if program.fd().is_err() {
                program.load()?;
            }
            program.fd()?.try_clone()?
        }
        _ => return Err("the object has no such program".into()),
    };
    Ok(fd.as_fd().try_clone_to_owned()?)
}

/// Leads the pinned link to `program` when it is attached to this cgroup, else makes another in its place.
fn attach(
    program: &OwnedFd,
    hook: SocketHook,
    cgroup: &File,
    cgroup_id: u64,
    pinned: &Path,
) -> io::Result<()> {
    if let Ok(link) = open_pin(pinned)
        && link_cgroup(link.as_fd()).is_ok_and(|id| id == cgroup_id)
        && update_link(link.as_fd(), program.as_fd()).is_ok()
    {
        return Ok(());
    }
    // To another cgroup, or to one that is gone.
    let _ = detach_link(pinned);
    match std::fs::remove_file(pinned) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let link = attach_to_cgroup(program.as_fd(), cgroup, hook.attach_type())?;
    pin(link.as_fd(), pinned)
}
