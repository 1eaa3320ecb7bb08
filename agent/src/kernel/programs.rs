//! The programs: loading, pins, and runs on given packets. Attachment is in [`attach`].

mod attach;
mod driver;
mod load;
mod pins;
mod sockets;
mod yardstick;

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use aya::Ebpf;
use aya::maps::ProgramArray;
use aya::programs::{ProgramInfo, SchedClassifier, TestRun as _, TestRunOptions};
use dataplane_common::layout::{
    ENDPOINT_NODE, ENDPOINT_PEER, Endpoint, Link, Node, Range, RangeKey,
};
use dataplane_common::{V4, V6, tail};
use ipnetwork::IpNetwork;

use super::policy::PolicyTables;
use super::services::{Wire, open};
use super::table::{Plain, Table};
use super::{KernelError, Limits, ProgramSize};
use crate::compile::services::Family;
use crate::compile::surroundings::Surroundings;

pub use driver::DriverError;
use load::{Loaded, Sizes};
use pins::Pins;
pub(super) use pins::cleanup;
use sockets::SocketMaps;
pub use sockets::{SocketError, SocketHook, default_cgroup};
pub use yardstick::Yardstick;

/// The eBPF object; empty when the agent was built without one.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/weir.bpf.o"));

/// A program, by the hook it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Program {
    FromPod,
    ToPod,
    FromNetwork,
    ToNetwork,
    FromOverlay,
    ToOverlay,
    /// On the loopback link: the node's own processes to its own addresses.
    FromSelf,
    /// On the link to user space: fragments that come back.
    FromPark,
    /// From here on: on no hook, but the end of others.
    FromPodV6,
    FromNetworkV6,
    FromOverlayV6,
    OpenV4,
    OpenV6,
    ActV4,
    ActV6,
    RelateV4,
    RelateV6,
    JudgeV4,
    JudgeV6,
    ToPodV6,
    Refuse,
}

impl Program {
    pub const ALL: [Self; 21] = [
        Self::FromPod,
        Self::ToPod,
        Self::FromNetwork,
        Self::ToNetwork,
        Self::FromOverlay,
        Self::ToOverlay,
        Self::FromSelf,
        Self::FromPark,
        Self::FromPodV6,
        Self::FromNetworkV6,
        Self::FromOverlayV6,
        Self::OpenV4,
        Self::OpenV6,
        Self::ActV4,
        Self::ActV6,
        Self::RelateV4,
        Self::RelateV6,
        Self::JudgeV4,
        Self::JudgeV6,
        Self::ToPodV6,
        Self::Refuse,
    ];

    /// Name in the object, in pins and in `bpftool prog`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::FromPod => "from_pod",
            Self::ToPod => "to_pod",
            Self::FromNetwork => "from_network",
            Self::ToNetwork => "to_network",
            Self::FromOverlay => "from_overlay",
            Self::ToOverlay => "to_overlay",
            Self::FromSelf => "from_self",
            Self::FromPark => "from_park",
            Self::FromPodV6 => "from_pod_v6",
            Self::FromNetworkV6 => "from_network_v6",
            Self::FromOverlayV6 => "from_overlay_v6",
            Self::OpenV4 => "open_v4",
            Self::OpenV6 => "open_v6",
            Self::ActV4 => "act_v4",
            Self::ActV6 => "act_v6",
            Self::RelateV4 => "relate_v4",
            Self::RelateV6 => "relate_v6",
            Self::JudgeV4 => "judge_v4",
            Self::JudgeV6 => "judge_v6",
            Self::ToPodV6 => "to_pod_v6",
            Self::Refuse => "refuse",
        }
    }

    /// Place among the programs that others end in; none for those that sit on a hook.
    fn tail(self) -> Option<u32> {
        match self {
            Self::FromPod
            | Self::ToPod
            | Self::FromNetwork
            | Self::ToNetwork
            | Self::FromOverlay
            | Self::ToOverlay
            | Self::FromSelf
            | Self::FromPark => None,
            Self::FromPodV6 => Some(tail::FROM_POD_V6),
            Self::FromNetworkV6 => Some(tail::FROM_NETWORK_V6),
            Self::FromOverlayV6 => Some(tail::FROM_OVERLAY_V6),
            Self::OpenV4 => Some(tail::OPEN_V4),
            Self::OpenV6 => Some(tail::OPEN_V6),
            Self::ActV4 => Some(tail::ACT_V4),
            Self::ActV6 => Some(tail::ACT_V6),
            Self::RelateV4 => Some(tail::RELATE_V4),
            Self::RelateV6 => Some(tail::RELATE_V6),
            Self::JudgeV4 => Some(tail::JUDGE_V4),
            Self::JudgeV6 => Some(tail::JUDGE_V6),
            Self::ToPodV6 => Some(tail::TO_POD_V6),
            Self::Refuse => Some(tail::REFUSE),
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
    policies: PolicyTables,
    sockets: SocketMaps,
    /// Uplinks whose driver has its program; the value says nothing.
    drivers: Table<u32, u32>,
    ranges_v4: Table<RangeKey<V4>, Range>,
    ranges_v6: Table<RangeKey<V6>, Range>,
    /// The service maps were made by this process.
    fresh: bool,
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
    /// Families in which the node has no address get small maps.
    pub(super) fn load(
        bpffs: &Path,
        limits: Limits,
        addresses: &[IpAddr],
    ) -> Result<Self, KernelError> {
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
        let Loaded { ebpf, fresh } = load::load(pins.maps(), &Sizes::new(limits, addresses))?;
        let maps = pins.maps();
        let mut programs = Self {
            links: open(maps, "links")?,
            endpoints_v4: open(maps, "endpoints_v4")?,
            endpoints_v6: open(maps, "endpoints_v6")?,
            node_v4: open(maps, "node_v4")?,
            node_v6: open(maps, "node_v6")?,
            policies: PolicyTables::open(maps)?,
            sockets: SocketMaps::open(maps)?,
            drivers: open(maps, "driver_links")?,
            ranges_v4: open(maps, "ranges_v4")?,
            ranges_v6: open(maps, "ranges_v6")?,
            ebpf,
            pins,
            fresh,
        };
        programs.set_tails()?;
        programs.pin_programs()?;
        programs.adopt_links();
        Ok(programs)
    }

    /// True when there was no service map before.
    pub(super) fn has_fresh_maps(&self) -> bool {
        self.fresh
    }

    pub(super) fn map_directory(&self) -> &Path {
        self.pins.maps()
    }

    /// Enters the node's own addresses; the first of each family is the source of translated packets. What an earlier
    /// agent knew stays until [`Self::set_surroundings`], and so do the ports that are served there.
    pub(super) fn set_node_addresses(&self, addresses: &[IpAddr]) -> Result<(), KernelError> {
        change(&self.node_v4, |node| {
            if node.address == V4::default() {
                node.address = first(addresses);
            }
        })?;
        change(&self.node_v6, |node| {
            if node.address == V6::default() {
                node.address = first(addresses);
            }
        })?;
        add_addresses(&self.endpoints_v4, addresses)?;
        add_addresses(&self.endpoints_v6, addresses)
    }

    /// Makes the tables of addresses and ranges equal to what surrounds the node.
    pub(super) fn set_surroundings(&self, wanted: &Surroundings) -> Result<(), KernelError> {
        const NODES: u32 = ENDPOINT_NODE | ENDPOINT_PEER;
        set_addresses(&self.endpoints_v4, &wanted.addresses, NODES)?;
        set_addresses(&self.endpoints_v6, &wanted.addresses, NODES)?;
        set_ranges(&self.ranges_v4, &wanted.ranges)?;
        set_ranges(&self.ranges_v6, &wanted.ranges)?;
        change(&self.node_v4, |node| {
            wanted.enter(node);
            enter_primary(node, wanted.nodes.primary(Family::V4));
        })?;
        change(&self.node_v6, |node| {
            wanted.enter(node);
            enter_primary(node, wanted.nodes.primary(Family::V6));
        })
    }

    /// Has direct flows compared with the frontends again, since those changed.
    pub(super) fn next_generation(&self) -> Result<(), KernelError> {
        change(&self.node_v4, |node| {
            node.generation = node.generation.wrapping_add(1);
        })?;
        change(&self.node_v6, |node| {
            node.generation = node.generation.wrapping_add(1);
        })
    }

    pub(super) fn test_run(
        &mut self,
        program: Program,
        packet: &[u8],
        links: Links,
        repeat: u32,
    ) -> Result<TestRun, KernelError> {
        classifier(&mut self.ebpf, program)
            .and_then(|loaded| run_on(loaded, packet, links, repeat))
            .map_err(|source| KernelError::Program {
                program: program.name(),
                source: source.into(),
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
        sizes.extend(self.driver_program_size());
        sizes
    }

    /// Enters the programs that others end in. Those of an earlier agent are replaced one by one, without a gap.
    fn set_tails(&mut self) -> Result<(), KernelError> {
        for program in Program::ALL {
            if let Some(place) = program.tail() {
                self.set_tail(program, place)
                    .map_err(|source| KernelError::Program {
                        program: program.name(),
                        source,
                    })?;
            }
        }
        Ok(())
    }

    fn set_tail(
        &mut self,
        program: Program,
        place: u32,
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let fd = classifier(&mut self.ebpf, program)?.fd()?.try_clone()?;
        let map = self
            .ebpf
            .map_mut("tails")
            .ok_or("the object has no map tails")?;
        Ok(ProgramArray::try_from(map)?.set(place, &fd, 0)?)
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

/// Where a packet of a test run is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Links {
    pub(super) at: u32,
    /// Zero for packets of the node's own stack on their way out.
    pub(super) came_in_by: u32,
    /// The packet's, as the kernel keeps it.
    pub(super) mark: u32,
}

impl Links {
    /// The link alone.
    pub(super) fn at(at: u32) -> Self {
        Self {
            at,
            came_in_by: 0,
            mark: 0,
        }
    }
}

fn run_on(
    program: &SchedClassifier,
    packet: &[u8],
    links: Links,
    repeat: u32,
) -> Result<TestRun, aya::programs::ProgramError> {
    /// Offsets of fields in the kernel's `__sk_buff`, and how much of it is given.
    const MARK: usize = 8;
    const INGRESS_IFINDEX: usize = 36;
    const IFINDEX: usize = 40;
    const CONTEXT: usize = 192;
    const HEADROOM: usize = 256;
    let mut context = [0u8; CONTEXT];
    context[IFINDEX..IFINDEX + 4].copy_from_slice(&links.at.to_ne_bytes());
    context[MARK..MARK + 4].copy_from_slice(&links.mark.to_ne_bytes());
    context[INGRESS_IFINDEX..INGRESS_IFINDEX + 4].copy_from_slice(&links.came_in_by.to_ne_bytes());
    let mut output = vec![0u8; packet.len() + HEADROOM];
    let mut options = TestRunOptions::new();
    options.data_in = Some(packet);
    options.data_out = Some(&mut output);
    options.ctx_in = Some(&context);
    options.repeat = repeat.max(1);
    let result = program.test_run(options)?;
    output.truncate(result.data_size_out as usize);
    Ok(TestRun {
        verdict: result.return_value.cast_signed(),
        packet: output,
        duration: result.duration,
    })
}

fn size_of_program(info: &ProgramInfo) -> ProgramSize {
    ProgramSize {
        loaded: info.size_translated().unwrap_or(0) / INSTRUCTION_BYTES,
        verified: info.verified_instruction_count(),
    }
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

fn enter_primary<A: Wire>(node: &mut Node<A>, address: Option<IpAddr>) {
    if let Some(address) = address.and_then(A::from_address) {
        node.address = address;
    }
}

/// Enters addresses of the node that are not there.
fn add_addresses<A: Wire + Plain>(
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
    for address in addresses.iter().filter_map(|a| A::from_address(*a)) {
        let present = endpoints.get(&address).map_err(failed("read"))?;
        if present.is_none_or(|endpoint| endpoint.flags & ENDPOINT_NODE == 0) {
            let endpoint = Endpoint {
                flags: ENDPOINT_NODE,
                ..Endpoint::default()
            };
            endpoints
                .put(&address, &endpoint)
                .map_err(failed("add a node address to"))?;
        }
    }
    Ok(())
}

/// Enters addresses of nodes with these flags, and forgets others that have one of the flags in `kinds`.
fn set_addresses<A: Wire + Plain + Ord>(
    endpoints: &Table<A, Endpoint>,
    addresses: &BTreeMap<IpAddr, u32>,
    kinds: u32,
) -> Result<(), KernelError> {
    let failed = |attempted| {
        move |source| KernelError::Map {
            attempted,
            map: endpoints.name,
            source,
        }
    };
    let wanted: BTreeMap<A, u32> = addresses
        .iter()
        .filter_map(|(address, flags)| Some((A::from_address(*address)?, *flags)))
        .collect();
    let mut present = BTreeMap::new();
    for (address, endpoint) in endpoints.entries().map_err(failed("read"))? {
        if endpoint.flags & kinds != 0 && !wanted.contains_key(&address) {
            endpoints
                .remove(&address)
                .map_err(failed("remove a node address from"))?;
        }
        present.insert(address, endpoint.flags);
    }
    for (address, flags) in wanted {
        if present.get(&address) == Some(&flags) {
            continue;
        }
        let endpoint = Endpoint {
            flags,
            ..Endpoint::default()
        };
        endpoints
            .put(&address, &endpoint)
            .map_err(failed("add a node address to"))?;
    }
    Ok(())
}

/// Enters these ranges, and forgets others. New ones first: an address is never without its range meanwhile.
fn set_ranges<A: Wire + Plain + Ord>(
    table: &Table<RangeKey<A>, Range>,
    ranges: &BTreeMap<IpNetwork, Range>,
) -> Result<(), KernelError>
where
    RangeKey<A>: Plain,
{
    let failed = |attempted| {
        move |source| KernelError::Map {
            attempted,
            map: table.name,
            source,
        }
    };
    let wanted: BTreeMap<RangeKey<A>, Range> = ranges
        .iter()
        .filter_map(|(network, range)| {
            let key = RangeKey {
                prefix_bits: network.prefix().into(),
                address: A::from_address(network.network())?,
            };
            Some((key, *range))
        })
        .collect();
    let present: BTreeMap<_, _> = table
        .entries()
        .map_err(failed("read"))?
        .into_iter()
        .collect();
    for (key, range) in &wanted {
        if present.get(key) != Some(range) {
            table.put(key, range).map_err(failed("add a range to"))?;
        }
    }
    for key in present.keys().filter(|key| !wanted.contains_key(key)) {
        table.remove(key).map_err(failed("remove a range from"))?;
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
