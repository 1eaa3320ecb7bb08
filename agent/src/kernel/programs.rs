//! The programs: loading, pins, and runs on given packets. Attachment is in [`attach`].

mod attach;
mod pins;
mod sockets;

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use aya::maps::ProgramArray;
use aya::programs::{ProgramInfo, SchedClassifier, TestRun as _, TestRunOptions};
use aya::{Ebpf, EbpfLoader};
use dataplane_common::layout::{ENDPOINT_NODE, Endpoint, Link, Node};
use dataplane_common::{HOST_SNAT_V4, HOST_SNAT_V6, TAIL_REFUSE, V4, V6};

use super::services::{Wire, open};
use super::table::{Plain, Table};
use super::{KernelError, Limits, ProgramSize};

use pins::Pins;
pub(super) use pins::cleanup;
use sockets::SocketMaps;
pub use sockets::{SocketError, SocketHook, default_cgroup};

/// The eBPF object; empty when the agent was built without one.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/weir.bpf.o"));

/// A program, by the hook it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Program {
    FromPod,
    ToPod,
    FromNetwork,
    /// On no hook: the end of another program, for packets that are refused.
    Refuse,
}

impl Program {
    pub const ALL: [Self; 4] = [Self::FromPod, Self::ToPod, Self::FromNetwork, Self::Refuse];

    /// Name in the object, in pins and in `bpftool prog`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::FromPod => "from_pod",
            Self::ToPod => "to_pod",
            Self::FromNetwork => "from_network",
            Self::Refuse => "refuse",
        }
    }

    fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|program| program.name() == name)
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a program did with a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TestRun {
    /// The program's return code (`TC_ACT_*`).
    pub verdict: i32,
    /// The packet as the program left it.
    pub packet: Vec<u8>,
    /// Mean time of one run.
    pub duration: Duration,
}

/// The loaded programs and the maps that tell them of links and addresses.
pub(super) struct Programs {
    ebpf: Ebpf,
    pins: Pins,
    links: Table<u32, Link>,
    endpoints_v4: Table<V4, Endpoint>,
    endpoints_v6: Table<V6, Endpoint>,
    node_v4: Table<u32, Node<V4>>,
    node_v6: Table<u32, Node<V6>>,
    sockets: SocketMaps,
}

impl fmt::Debug for Programs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Programs")
            .field("pins", &self.pins)
            .finish_non_exhaustive()
    }
}

/// One eBPF instruction.
const INSTRUCTION_BYTES: u32 = 8;

impl Programs {
    /// Loads the object with its maps pinned, and leads links that are pinned already to the new programs.
    pub(super) fn load(bpffs: &Path, limits: Limits) -> Result<Self, KernelError> {
        if OBJECT.is_empty() {
            return Err(KernelError::NoObject);
        }
        // Kernels before 5.11 charge maps to this limit. Without the right to raise it, loading says so itself.
        let _ = nix::sys::resource::setrlimit(
            nix::sys::resource::Resource::RLIMIT_MEMLOCK,
            nix::sys::resource::RLIM_INFINITY,
            nix::sys::resource::RLIM_INFINITY,
        );
        let pins = Pins::create(bpffs)?;
        let mut loader = EbpfLoader::new();
        loader.default_map_pin_directory(pins.maps());
        for (map, entries) in sizes(limits) {
            loader.map_max_entries(map, entries);
        }
        let mut ebpf = loader.load(OBJECT).map_err(|source| KernelError::Load {
            source: source.into(),
        })?;
        for program in Program::ALL {
            let loaded = classifier(&mut ebpf, program)
                .and_then(|program| program.load())
                .map_err(|source| KernelError::Program {
                    program: program.name(),
                    source: source.into(),
                });
            loaded?;
        }
        let maps = pins.maps();
        let mut programs = Self {
            links: open(maps, "links")?,
            endpoints_v4: open(maps, "endpoints_v4")?,
            endpoints_v6: open(maps, "endpoints_v6")?,
            node_v4: open(maps, "node_v4")?,
            node_v6: open(maps, "node_v6")?,
            sockets: SocketMaps::open(maps)?,
            ebpf,
            pins,
        };
        programs.set_tails()?;
        programs.pin_programs()?;
        programs.adopt_links();
        Ok(programs)
    }

    pub(super) fn map_directory(&self) -> &Path {
        self.pins.maps()
    }

    /// Enters the node's own addresses, and forgets those it had before.
    pub(super) fn set_node_addresses(&self, addresses: &[IpAddr]) -> Result<(), KernelError> {
        set_addresses(&self.endpoints_v4, addresses)?;
        set_addresses(&self.endpoints_v6, addresses)?;
        change(&self.node_v4, |node| {
            node.address = first(addresses);
            node.host_source = V4::new(HOST_SNAT_V4);
        })?;
        change(&self.node_v6, |node| {
            node.address = first(addresses);
            node.host_source = V6::new(HOST_SNAT_V6);
        })
    }

    pub(super) fn test_run(
        &mut self,
        program: Program,
        packet: &[u8],
        ifindex: u32,
        repeat: u32,
    ) -> Result<TestRun, KernelError> {
        /// Offset of `ifindex` in the kernel's `__sk_buff`, and how much of it is given.
        const IFINDEX: usize = 40;
        const CONTEXT: usize = 192;
        const HEADROOM: usize = 256;
        let mut context = [0u8; CONTEXT];
        context[IFINDEX..IFINDEX + 4].copy_from_slice(&ifindex.to_ne_bytes());
        let mut output = vec![0u8; packet.len() + HEADROOM];
        let mut options = TestRunOptions::new();
        options.data_in = Some(packet);
        options.data_out = Some(&mut output);
        options.ctx_in = Some(&context);
        options.repeat = repeat.max(1);
        let result = classifier(&mut self.ebpf, program)
            .and_then(|program| program.test_run(options))
            .map_err(|source| KernelError::Program {
                program: program.name(),
                source: source.into(),
            })?;
        output.truncate(result.data_size_out as usize);
        Ok(TestRun {
            verdict: result.return_value.cast_signed(),
            packet: output,
            duration: result.duration,
        })
    }

    pub(super) fn sizes(&mut self) -> BTreeMap<&'static str, ProgramSize> {
        let mut sizes = BTreeMap::new();
        for program in Program::ALL {
            let info = classifier(&mut self.ebpf, program).and_then(|program| program.info());
            let Ok(info) = info else { continue };
            sizes.insert(program.name(), size_of_program(&info));
        }
        sizes.extend(self.socket_program_sizes());
        sizes
    }

    /// Enters the programs that others end in. Those of an earlier agent are replaced one by one, without a gap.
    fn set_tails(&mut self) -> Result<(), KernelError> {
        let failed = |source| KernelError::Program {
            program: Program::Refuse.name(),
            source,
        };
        let program = classifier(&mut self.ebpf, Program::Refuse).map_err(|e| failed(e.into()))?;
        let fd = program.fd().map_err(|e| failed(e.into()))?;
        let fd = fd.try_clone().map_err(|e| failed(e.into()))?;
        let map = self
            .ebpf
            .map_mut("tails")
            .ok_or_else(|| failed("the object has no map tails".into()))?;
        let mut tails = ProgramArray::try_from(map).map_err(|e| failed(e.into()))?;
        tails.set(TAIL_REFUSE, &fd, 0).map_err(|e| failed(e.into()))
    }

    /// Pins the programs for tools; links keep them alive by themselves.
    fn pin_programs(&mut self) -> Result<(), KernelError> {
        for program in Program::ALL {
            let path = self.pins.program(program);
            remove_if_present(&path)?;
            classifier(&mut self.ebpf, program)
                .map_err(|source| KernelError::Program {
                    program: program.name(),
                    source: source.into(),
                })?
                .pin(&path)
                .map_err(|source| KernelError::Pin {
                    attempted: "pin a program as",
                    path: path.clone(),
                    source: std::io::Error::other(source),
                })?;
        }
        Ok(())
    }
}

fn size_of_program(info: &ProgramInfo) -> ProgramSize {
    ProgramSize {
        loaded: info.size_translated().unwrap_or(0) / INSTRUCTION_BYTES,
        verified: info.verified_instruction_count(),
    }
}

fn sizes(limits: Limits) -> Vec<(&'static str, u32)> {
    let family = |v4, v6, entries| [(v4, entries), (v6, entries)];
    let mut sizes = vec![
        ("links", limits.endpoints),
        // One more for the node itself.
        ("socket_netns", limits.endpoints.saturating_add(1)),
    ];
    sizes.extend(family("endpoints_v4", "endpoints_v6", limits.endpoints));
    sizes.extend(family("frontends_v4", "frontends_v6", limits.frontends));
    sizes.extend(family("slots_v4", "slots_v6", limits.slots));
    sizes.extend(family("backends_v4", "backends_v6", limits.slots));
    sizes.extend(family("states_v4", "states_v6", limits.slots));
    sizes.extend(family("flows_v4", "flows_v6", limits.flows));
    sizes.extend(family("replies_v4", "replies_v6", limits.flows));
    sizes.extend(family("affinity_v4", "affinity_v6", limits.frontends));
    // Sockets for which there is no room are left to the packet path.
    let (connections, datagrams) = (limits.flows / 4, limits.flows / 16);
    for (v4, v6, entries) in [
        ("socket_conns_v4", "socket_conns_v6", connections),
        ("socket_flows_v4", "socket_flows_v6", datagrams),
        ("socket_origs_v4", "socket_origs_v6", datagrams),
        ("socket_uses_v4", "socket_uses_v6", datagrams),
    ] {
        sizes.extend(family(v4, v6, entries));
    }
    sizes
}

fn classifier(
    ebpf: &mut Ebpf,
    program: Program,
) -> Result<&mut SchedClassifier, aya::programs::ProgramError> {
    let found = ebpf.program_mut(program.name());
    found
        .ok_or(aya::programs::ProgramError::NotLoaded)?
        .try_into()
}

fn first<A: Wire + Default>(addresses: &[IpAddr]) -> A {
    addresses
        .iter()
        .find_map(|address| A::from_address(*address))
        .unwrap_or_default()
}

fn set_addresses<A: Wire + Plain + Ord>(
    endpoints: &Table<A, Endpoint>,
    addresses: &[IpAddr],
) -> Result<(), KernelError> {
    let failed = |attempted| {
        move |source| KernelError::Map {
            attempted,
            map: endpoints.name,
            source,
        }
    };
    let own: Vec<A> = addresses
        .iter()
        .filter_map(|address| A::from_address(*address))
        .collect();
    for (address, endpoint) in endpoints.entries().map_err(failed("read"))? {
        if endpoint.flags & ENDPOINT_NODE != 0 && !own.contains(&address) {
            endpoints
                .remove(&address)
                .map_err(failed("remove a node address from"))?;
        }
    }
    for address in own {
        let endpoint = Endpoint {
            flags: ENDPOINT_NODE,
            ..Endpoint::default()
        };
        endpoints
            .put(&address, &endpoint)
            .map_err(failed("add a node address to"))?;
    }
    Ok(())
}

/// Changes the only entry of a node map.
fn change<A: Default>(
    table: &Table<u32, Node<A>>,
    change: impl FnOnce(&mut Node<A>),
) -> Result<(), KernelError>
where
    Node<A>: Plain,
{
    let failed = |attempted| {
        move |source| KernelError::Map {
            attempted,
            map: table.name,
            source,
        }
    };
    let mut node = table
        .get(&0)
        .map_err(failed("read"))?
        .ok_or_else(|| failed("read")(std::io::Error::from(std::io::ErrorKind::NotFound)))?;
    change(&mut node);
    table.put(&0, &node).map_err(failed("change"))
}

fn remove_if_present(path: &PathBuf) -> Result<(), KernelError> {
    match std::fs::remove_file(path) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => Err(KernelError::Pin {
            attempted: "remove",
            path: path.clone(),
            source,
        }),
        _ => Ok(()),
    }
}
