//! Load, attach, pin, and map access. The only room of the agent with `unsafe`, and the only one that names aya.
//!
//! [`Kernel`] is the door: it loads the embedded object, adopts what an earlier agent pinned, and makes the maps equal
//! to the desired state. What the entries should be is decided in `compile`, the order of changes in `plan`.

mod collect;
mod limits;
#[allow(unsafe_code, reason = "links to cgroups and drivers by system call")]
mod link;
#[allow(unsafe_code, reason = "options of the C allocator")]
mod memory;
#[allow(unsafe_code, reason = "socket addresses of packet sockets")]
mod packet_socket;
mod park;
mod places;
mod policy;
mod programs;
mod services;
#[allow(unsafe_code, reason = "map access by system call")]
mod table;

use std::collections::{BTreeMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use control_api::desired::{Changes, DesiredState};
use dataplane_common::fragment::park_mark;
use dataplane_common::reason::{DropReason, Event, SocketEvent};

use crate::compile::node_addresses::NodeAddresses;
use crate::compile::policy::LocalPod;
use crate::compile::services::{Frontend, Owner, Refusal};
pub use crate::compile::services::{HostPort, NodeIdentity, ServiceOptions};
use crate::compile::surroundings::Surroundings;
use crate::plan::policy::{Operation, Present};
use crate::plan::services::{FrontendEntry, Led, PresentBackend};
pub use limits::Limits;
pub use link::namespace_cookie;
pub use memory::{give_back_memory, share_heaps};
pub use packet_socket::PacketSocket;
pub use park::DatagramId;
pub use policy::{DropEvents, ObservedFlow};
pub use programs::{
    DriverError, Program, SocketError, SocketHook, TestRun, Yardstick, default_cgroup,
};

use collect::Collector;
use park::Parking;
use policy::PolicyTables;
use programs::{Links, Programs};
use services::Services;
use table::CounterTable;

/// A pod's link as the dataplane sees it (host side of the pair).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodLink {
    /// Interface index of the host side, in the agent's network namespace.
    pub ifindex: u32,
    pub host_name: String,
    /// MAC address of the pod's own interface.
    pub pod_mac: [u8; 6],
    /// MAC address of the host side.
    pub host_mac: [u8; 6],
    /// At most one address per family.
    pub addresses: Vec<IpAddr>,
    /// The kernel's number of the pod's network namespace ([`namespace_cookie`]); none leaves the pod's sockets to the
    /// packet path.
    pub netns_cookie: Option<u64>,
}

/// The pair through which this node's own processes reach services. Packets of the service ranges are routed out of
/// `weir_host` and meet their program as they come in at the peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostLink {
    /// Name of the peer, where the program sits (`weir_hostp`).
    pub peer_name: String,
    pub peer_ifindex: u32,
    pub peer_mac: [u8; 6],
    /// The side with the routes (`weir_host`).
    pub host_ifindex: u32,
    pub host_mac: [u8; 6],
}

/// The overlay's device and what its packets carry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverlayLink {
    pub name: String,
    pub ifindex: u32,
    /// VXLAN network identifier.
    pub network: u32,
    /// UDP port.
    pub port: u16,
}

/// Instructions of a program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProgramSize {
    pub loaded: u32,
    /// Those that the verifier walked; kernels before 5.16 do not tell.
    pub verified: Option<u32>,
}

/// What the CNI room needs of the dataplane: a seam with three occupants (real, fake, faulty).
pub trait PodPrograms: Send + Sync {
    /// Attaches the pod programs to the host side and enters the pod in the local endpoint tables. Safe to repeat.
    /// When this returns, the first packet of the pod meets its programs; a pod of which no policy was entered is shut.
    ///
    /// # Errors
    /// [`AttachError`] names the link and the step; nothing is left behind.
    fn attach_pod(&self, link: &PodLink) -> Result<(), AttachError>;

    /// Removes what `attach_pod` made, also when the link is already gone. Never fails on absence.
    ///
    /// # Errors
    /// [`AttachError`] when the kernel refuses a removal.
    fn detach_pod(&self, ifindex: u32, addresses: &[IpAddr]) -> Result<(), AttachError>;

    /// Forgets links that have gone without [`Self::detach_pod`].
    fn forget_absent(&self) {}

    /// Says whose link an interface is, before it gets programs: from then on, the policies of that pod judge it; while
    /// none is known, it is shut.
    ///
    /// # Errors
    /// [`AttachError`] when its policy cannot be put in place.
    fn enter_pod(&self, _ifindex: u32, _pod: &LocalPod) -> Result<(), AttachError> {
        Ok(())
    }

    /// As [`Self::enter_pod`], of all pods that an earlier agent attached: nothing that is known of them is forgotten.
    ///
    /// # Errors
    /// [`AttachError`] when the maps cannot be read or changed.
    fn adopt_pods(&self, _pods: Vec<(u32, LocalPod)>) -> Result<(), AttachError> {
        Ok(())
    }

    /// Waits until the policies of a pod are known and in place.
    ///
    /// # Errors
    /// Why they are not, after `patience`.
    fn wait_for_policies(&self, _ifindex: u32, _patience: Duration) -> Result<(), String> {
        Ok(())
    }

    /// Makes the host ports of this node equal to the list. Safe to repeat. One that is taken is logged, and left out.
    ///
    /// # Errors
    /// [`AttachError`] when the maps cannot be changed.
    fn set_host_ports(&self, _host_ports: Vec<HostPort>) -> Result<(), AttachError> {
        Ok(())
    }

    /// True when programs are attached to this link and its addresses are in the endpoint tables (CNI CHECK).
    fn is_attached(&self, link: &PodLink) -> bool;
}

/// A link could not be given its programs.
#[derive(Debug, thiserror::Error)]
#[error("{step} for link {link}: {source}")]
pub struct AttachError {
    pub step: &'static str,
    pub link: String,
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

/// The dataplane could not be opened or changed.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    #[error(
        "this agent was built without its eBPF programs: run `cargo xtask build ebpf`, then build the agent again"
    )]
    NoObject,
    #[error("{path} is not on a bpffs: mount one there with `mount -t bpf bpf {path}`")]
    NotBpffs { path: PathBuf },
    #[error("{attempted} {path}: {source}")]
    Pin {
        attempted: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("load the eBPF object: {source}")]
    Load {
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("load or run the eBPF program {program}: {source}")]
    Program {
        program: &'static str,
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("{attempted} map {map}: {source}")]
    Map {
        attempted: &'static str,
        map: &'static str,
        source: std::io::Error,
    },
}

/// What one `apply` did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ApplyReport {
    /// Revision of the desired state that the kernel now holds.
    pub revision: u64,
    /// Operations done on the maps.
    pub changed: usize,
    /// Everything that is asked for and not programmed, and why. The rest is in place.
    pub failed: Vec<(String, String)>,
    /// Something of it did not fit: it may do so later.
    pub retry: bool,
    /// What was refused since the last report, for whoever asked for it.
    pub news: Vec<Refusal>,
    /// [`Kernel::service_addresses`] may have others now.
    pub addresses_changed: bool,
}

/// Sums over the service maps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceTotals {
    pub frontends: usize,
    /// Usable backends of all services.
    pub endpoints: usize,
    /// What is asked for and not served.
    pub refused: usize,
}

/// One service id in the maps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceDetails {
    pub owner: Owner,
    /// Name of the Service's port.
    pub port: String,
    pub service_id: u32,
    pub frontends: Vec<(Frontend, FrontendEntry)>,
    /// Draining ones included.
    pub backends: Vec<PresentBackend>,
}

/// A counter summed over the CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counter {
    pub kind: CounterKind,
    /// Stable name, for metric labels.
    pub name: &'static str,
    pub packets: u64,
}

/// What a [`Counter`] counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CounterKind {
    /// Packets dropped for the reason `name`.
    Drop,
    /// Packets that took the path `name`.
    Forward,
    /// Sockets and datagrams of processes that socket hooks treated as `name` says.
    Socket,
}

impl FlowTableStatus {
    /// Names of the families, in the order of its pairs.
    pub const FAMILIES: [&'static str; 2] = ["ipv4", "ipv6"];
}

/// What one step of the flow collector did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CollectReport {
    pub walked: usize,
    pub removed: usize,
    /// Halves that had lost their other half.
    pub repaired: usize,
    /// Affinities whose time or backend was over.
    pub affinities: usize,
}

/// How full the flow tables are, and what keeping them costs. Pairs are IPv4 and IPv6.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowTableStatus {
    /// At the end of the last full walk.
    pub flows: [usize; 2],
    pub capacity: [usize; 2],
    /// Flows that were never established have to hurry.
    pub pressure: [bool; 2],
    /// Sum of all steps of this agent.
    pub total: CollectReport,
    pub busy: Duration,
}

/// The loaded dataplane of this node.
#[derive(Debug)]
pub struct Kernel {
    programs: Mutex<Programs>,
    services: Mutex<Services>,
    policies: PolicyTables,
    collector: Mutex<Collector>,
    /// Backends may have gone since the collector's last step. Beside its lock, which that holds for milliseconds: no
    /// change waits for a walk over tables.
    hurry: AtomicBool,
    parking: Parking,
    drops: CounterTable,
    events: CounterTable,
    socket_events: CounterTable,
}

/// A panic while a lock was held leaves at worst a half-applied plan, which the next apply finds and completes.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Kernel {
    /// Loads the programs and adopts the maps and links pinned below `bpffs` by an earlier agent.
    ///
    /// # Errors
    /// [`KernelError`] when the object is missing, bpffs cannot be written, or the kernel refuses a program.
    pub fn open(bpffs: &Path, limits: Limits, node: NodeIdentity) -> Result<Self, KernelError> {
        let programs = Programs::load(bpffs, limits, &node.addresses)?;
        let maps = programs.map_directory();
        let counter = |name| {
            CounterTable::open(maps, name).map_err(|source| KernelError::Map {
                attempted: "open",
                map: name,
                source,
            })
        };
        let (drops, events) = (counter("drops")?, counter("events")?);
        let socket_events = counter("socket_events")?;
        programs.set_node_addresses(&node.addresses)?;
        let services = Services::open(maps, node, programs.has_fresh_maps())?;
        let policies = PolicyTables::open(maps)?;
        let collector = Collector::open(maps)?;
        let parking = Parking::open(maps)?;
        Ok(Self {
            programs: Mutex::new(programs),
            services: Mutex::new(services),
            policies,
            collector: Mutex::new(collector),
            hurry: AtomicBool::new(false),
            parking,
            drops,
            events,
            socket_events,
        })
    }

    /// Attaches the network program to an interface that carries traffic of other nodes. Safe to repeat.
    ///
    /// # Errors
    /// [`AttachError`] names the interface and the step.
    pub fn attach_uplink(&self, name: &str) -> Result<(), AttachError> {
        lock(&self.programs).attach_uplink(name)
    }

    /// Attaches the program for this node's own processes. Safe to repeat.
    ///
    /// # Errors
    /// [`AttachError`] names the interface and the step.
    pub fn attach_host_link(&self, link: &HostLink) -> Result<(), AttachError> {
        lock(&self.programs).attach_host_link(link)
    }

    /// Translates Services at the socket for every process in `cgroup` whose network is the node's or a pod's. To be
    /// called in the node's network namespace. Safe to repeat, also with another cgroup.
    ///
    /// # Errors
    /// [`SocketError`] says why not; then no hook is attached, and Services work by the packet path alone.
    pub fn attach_sockets(&self, cgroup: &Path) -> Result<(), SocketError> {
        lock(&self.programs).attach_sockets(cgroup)
    }

    /// Leaves all sockets to the packet path, also those that an earlier agent's hooks translated. Safe to repeat.
    ///
    /// # Errors
    /// [`KernelError`] when a hook or what is known of sockets cannot be removed.
    pub fn detach_sockets(&self) -> Result<(), KernelError> {
        lock(&self.programs).detach_sockets()
    }

    /// Gives an uplink's driver the program that leads packets of known flows on to other machines. Safe to repeat.
    ///
    /// # Errors
    /// [`DriverError`] says why not; then the driver has none, and the uplink's ingress hook does the work.
    pub fn attach_driver(&self, name: &str) -> Result<(), DriverError> {
        lock(&self.programs).attach_driver(name)
    }

    /// Takes that program from every driver but those of these links, also where an earlier agent gave it.
    ///
    /// # Errors
    /// [`KernelError`] when a program cannot be taken away.
    pub fn keep_drivers(&self, kept: &[u32]) -> Result<(), KernelError> {
        lock(&self.programs).keep_drivers(kept)
    }

    /// Runs the drivers' program on a frame without sending it (`BPF_PROG_TEST_RUN`, Linux 5.15 or newer). The frame
    /// counts as received on `ifindex`. The verdict is an `XDP_*`.
    ///
    /// # Errors
    /// [`KernelError`] when the kernel cannot run it.
    pub fn test_run_driver(
        &self,
        frame: &[u8],
        ifindex: u32,
        repeat: u32,
    ) -> Result<TestRun, KernelError> {
        lock(&self.programs).test_run_driver(frame, ifindex, repeat)
    }

    /// How many entries the socket hooks hold for living sockets.
    ///
    /// # Errors
    /// [`KernelError`] when a map cannot be read.
    pub fn socket_entries(&self) -> Result<usize, KernelError> {
        lock(&self.programs).socket_entries()
    }

    /// Attaches the programs of the overlay's device, or forgets the device. Safe to repeat.
    ///
    /// # Errors
    /// [`AttachError`] names the device and the step.
    pub fn set_overlay(&self, link: Option<&OverlayLink>) -> Result<(), AttachError> {
        let mut programs = lock(&self.programs);
        match link {
            Some(link) => programs.attach_overlay(link),
            None => programs.leave_overlay(),
        }
    }

    /// Makes the tables of node addresses and address ranges equal to what surrounds the node. Safe to repeat; costs what
    /// changed, and a walk over both tables.
    ///
    /// # Errors
    /// [`KernelError`] when a table cannot be read or changed.
    pub fn set_surroundings(&self, wanted: &Surroundings) -> Result<(), KernelError> {
        lock(&self.programs).set_surroundings(wanted)
    }

    /// Takes the addresses of nodes for host ports, balancer and external addresses. True when the next
    /// [`Self::apply`] has something to do for them, whatever else changed.
    pub fn set_node_addresses(&self, addresses: NodeAddresses) -> bool {
        lock(&self.services).set_addresses(addresses)
    }

    /// What the operator chose for services; before the first [`Self::apply`].
    pub fn set_service_options(&self, options: ServiceOptions) {
        lock(&self.services).set_options(options);
    }

    /// Addresses that belong to services as a whole: cluster addresses and those of balancers.
    #[must_use]
    pub fn service_addresses(&self) -> Vec<IpAddr> {
        lock(&self.services).addresses()
    }

    #[must_use]
    pub fn service_totals(&self) -> ServiceTotals {
        lock(&self.services).totals()
    }

    /// What the service maps hold, service by service; and what is asked for and not in them, with the reasons.
    #[must_use]
    pub fn service_details(&self) -> (Vec<ServiceDetails>, Vec<(String, String)>) {
        lock(&self.services).details()
    }

    /// Where a new flow to a destination leads by the service maps. `outside`: its client is not of the cluster. None while it
    /// is not known what they hold.
    #[must_use]
    pub fn lead(&self, destination: SocketAddr, protocol: u8, outside: bool) -> Option<Led> {
        lock(&self.services).lead(destination, protocol, outside)
    }

    /// Makes the service maps equal to the desired state. Compares only what `changes` names; the first call must say
    /// `everything`, and nothing is removed before it.
    ///
    /// # Errors
    /// [`KernelError`] when the maps cannot be used at all; a single service that does not fit is in the report.
    pub fn apply(
        &self,
        desired: &DesiredState,
        changes: &Changes,
    ) -> Result<ApplyReport, KernelError> {
        let report = lock(&self.services).apply(desired, changes)?;
        if report.changed > 0 {
            lock(&self.programs).next_generation()?;
            self.hurry.store(true, Ordering::Relaxed);
        }
        Ok(report)
    }

    /// What the maps hold of policies.
    ///
    /// # Errors
    /// [`KernelError`] when a map cannot be read.
    pub fn read_policies(&self) -> Result<Present, KernelError> {
        self.policies.read()
    }

    /// Carries out a plan for the maps of policies.
    ///
    /// # Errors
    /// [`KernelError`] when a map refuses a change; those before it are made.
    pub fn write_policies(&self, operations: &[Operation]) -> Result<(), KernelError> {
        self.policies.carry_out(operations)
    }

    /// A reader of the packets that policies dropped. There should be one.
    ///
    /// # Errors
    /// [`KernelError`] when the ring cannot be opened.
    pub fn drop_events(&self) -> Result<DropEvents, KernelError> {
        self.policies.drop_events()
    }

    /// Some of the flows as policies see them, about `most` of each family.
    ///
    /// # Errors
    /// [`KernelError`] when a table cannot be read.
    pub fn some_flows(&self, most: usize) -> Result<Vec<ObservedFlow>, KernelError> {
        self.policies.some_flows(most)
    }

    /// Those among some addresses to which a conversation goes that policies allow.
    ///
    /// # Errors
    /// [`KernelError`] when a table cannot be read.
    pub fn destinations_in_use(
        &self,
        among: &HashSet<IpAddr>,
    ) -> Result<HashSet<IpAddr>, KernelError> {
        self.policies.destinations_in_use(among, monotonic_s())
    }

    /// Counts changes of policies; flows that were judged before are judged again.
    ///
    /// # Errors
    /// [`KernelError`] when the map cannot be read.
    pub fn policy_generation(&self) -> Result<u32, KernelError> {
        self.policies.generation()
    }

    /// Attaches the program that takes fragments back, on the near side of their link to user space. Safe to repeat.
    ///
    /// # Errors
    /// [`AttachError`] names the interface and the step.
    pub fn attach_park_link(&self, name: &str) -> Result<(), AttachError> {
        lock(&self.programs).attach_park_link(name)
    }

    /// A sign of life: for some seconds, the programs hand over fragments that came before the first of their datagram,
    /// out of the link `ifindex`.
    ///
    /// # Errors
    /// [`KernelError`] when the table cannot be changed.
    pub fn accept_fragments(&self, ifindex: u32) -> Result<(), KernelError> {
        self.parking.accept(ifindex, monotonic_s())
    }

    /// True when a datagram's other fragments may go on.
    ///
    /// # Errors
    /// [`KernelError`] when the table cannot be read.
    pub fn first_has_passed(&self, datagram: &DatagramId) -> Result<bool, KernelError> {
        self.parking.first_has_passed(datagram, monotonic_s())
    }

    /// Every counter, drops and forwards.
    ///
    /// # Errors
    /// [`KernelError`] when a counter map cannot be read.
    pub fn counters(&self) -> Result<Vec<Counter>, KernelError> {
        let drops = DropReason::ALL
            .iter()
            .filter(|reason| **reason != DropReason::None)
            .map(|reason| {
                (
                    CounterKind::Drop,
                    reason.name(),
                    &self.drops,
                    *reason as u32,
                )
            });
        let events = Event::ALL.iter().map(|event| {
            (
                CounterKind::Forward,
                event.name(),
                &self.events,
                *event as u32,
            )
        });
        let sockets = SocketEvent::ALL.iter().map(|event| {
            (
                CounterKind::Socket,
                event.name(),
                &self.socket_events,
                *event as u32,
            )
        });
        drops
            .chain(events)
            .chain(sockets)
            .map(|(kind, name, table, index)| match table.sum(index) {
                Ok(packets) => Ok(Counter {
                    kind,
                    name,
                    packets,
                }),
                Err(source) => Err(KernelError::Map {
                    attempted: "read",
                    map: table.name,
                    source,
                }),
            })
            .collect()
    }

    /// Flows known at the end of the last full walk of the collector.
    #[must_use]
    pub fn flow_count(&self) -> usize {
        lock(&self.collector).flow_count()
    }

    /// Walks a bounded part of the flow tables and removes what has expired. Call it once a second.
    ///
    /// # Errors
    /// [`KernelError`] when a flow table cannot be read.
    pub fn collect_flows(&self) -> Result<CollectReport, KernelError> {
        let full = DropReason::FlowTableFull;
        let no_room = self
            .drops
            .sum(full as u32)
            .map_err(|source| KernelError::Map {
                attempted: "read",
                map: self.drops.name,
                source,
            })?;
        let hurry = self.hurry.swap(false, Ordering::Relaxed);
        lock(&self.collector).step(monotonic_s(), no_room, hurry)
    }

    /// How full the flow tables are.
    #[must_use]
    pub fn flow_table(&self) -> FlowTableStatus {
        lock(&self.collector).status()
    }

    /// Runs a program on a packet without sending it (`BPF_PROG_TEST_RUN`). The packet counts as received on
    /// `ifindex`.
    ///
    /// # Errors
    /// [`KernelError`] when the kernel cannot run it.
    pub fn test_run(
        &self,
        program: Program,
        packet: &[u8],
        ifindex: u32,
        repeat: u32,
    ) -> Result<TestRun, KernelError> {
        lock(&self.programs).test_run(program, packet, Links::at(ifindex), repeat)
    }

    /// As [`Self::test_run`] for a packet on its way out of a link, which has come in by another (Linux 5.11 or newer).
    ///
    /// # Errors
    /// [`KernelError`] when the kernel cannot run it.
    pub fn test_run_forwarded(
        &self,
        program: Program,
        packet: &[u8],
        came_in_by: u32,
        ifindex: u32,
    ) -> Result<TestRun, KernelError> {
        let links = Links {
            came_in_by,
            ..Links::at(ifindex)
        };
        lock(&self.programs).test_run(program, packet, links, 1)
    }

    /// As [`Self::test_run`] for a packet that has come through the overlay. Test runs have no tunnel key, so it counts
    /// as one that was let in before and parked.
    ///
    /// # Errors
    /// [`KernelError`] when the kernel cannot run it.
    pub fn test_run_from_overlay(
        &self,
        packet: &[u8],
        ifindex: u32,
    ) -> Result<TestRun, KernelError> {
        let links = Links {
            mark: park_mark::TAKEN_BACK,
            ..Links::at(ifindex)
        };
        lock(&self.programs).test_run(Program::FromOverlay, packet, links, 1)
    }

    /// As [`Self::test_run`], for a program that costs what the kernel itself costs.
    ///
    /// # Errors
    /// [`KernelError`] when the kernel cannot load or run it.
    pub fn test_run_yardstick(
        &self,
        yardstick: Yardstick,
        packet: &[u8],
        ifindex: u32,
    ) -> Result<TestRun, KernelError> {
        lock(&self.programs).test_run_yardstick(yardstick, packet, ifindex)
    }

    /// How large each loaded program is.
    #[must_use]
    pub fn program_sizes(&self) -> BTreeMap<&'static str, ProgramSize> {
        lock(&self.programs).sizes()
    }

    /// True while programs of another version of the layouts handle packets, with tables of their own.
    #[must_use]
    pub fn is_taking_over(&self) -> bool {
        lock(&self.programs).is_taking_over()
    }

    /// Puts this agent's programs in the place of those of another version. To be called once the tables are filled; after
    /// it, the node's own links, sockets and drivers are to be attached again. Flows that the others knew are not known.
    ///
    /// # Errors
    /// [`KernelError`] names the pin that could not be moved or removed. Call again: what was done stays done.
    pub fn take_over(&self) -> Result<(), KernelError> {
        lock(&self.programs).take_over()
    }

    /// Removes every pin and attachment below `bpffs`, of every ABI. Traffic through services stops.
    ///
    /// # Errors
    /// [`KernelError`] names the pin that could not be removed; the others are gone.
    pub fn cleanup(bpffs: &Path) -> Result<Vec<PathBuf>, KernelError> {
        programs::cleanup(bpffs)
    }
}

impl PodPrograms for Kernel {
    fn attach_pod(&self, link: &PodLink) -> Result<(), AttachError> {
        lock(&self.programs).attach_pod(link)
    }

    fn detach_pod(&self, ifindex: u32, addresses: &[IpAddr]) -> Result<(), AttachError> {
        lock(&self.programs).detach_pod(ifindex, addresses)
    }

    fn forget_absent(&self) {
        lock(&self.programs).forget_absent();
    }

    fn set_host_ports(&self, host_ports: Vec<HostPort>) -> Result<(), AttachError> {
        let set = || {
            if lock(&self.services).set_host_ports(host_ports)? > 0 {
                lock(&self.programs).next_generation()?;
                self.hurry.store(true, Ordering::Relaxed);
            }
            Ok(())
        };
        set().map_err(|source: KernelError| AttachError {
            step: "enter host ports",
            link: "all".into(),
            source: source.into(),
        })
    }

    fn is_attached(&self, link: &PodLink) -> bool {
        lock(&self.programs).is_attached(link)
    }
}

/// The clock that flow records carry.
fn monotonic_s() -> u32 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC);
    now.ok()
        .and_then(|now| u32::try_from(now.tv_sec()).ok())
        .unwrap_or(0)
}
