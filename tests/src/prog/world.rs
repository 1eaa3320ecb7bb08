//! A node in a network namespace and a bpffs of the calling thread's own, with two pods' links, the host link and an
//! uplink. Everything goes with the thread.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use control_api::desired::{Changes, DesiredState, Name};
use control_api::v1::{
    AddressFamily, ClusterConfig, Endpoint, EndpointPort, EndpointSlice, Protocol, Service,
    ServicePort, ServiceType,
};
use dataplane_common::layout::PodPolicy;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use weir_agent::compile::peers::Tunnel;
use weir_agent::compile::routes::Path as RoutePath;
use weir_agent::compile::surroundings::{Choices, surroundings};
use weir_agent::kernel::{
    HostLink, Kernel, Limits, NodeIdentity, OverlayLink, PodLink, PodPrograms, Program, TestRun,
};
use weir_agent::netlink::Netlink;
use weir_agent::netlink::link::VethEnd;
use weir_agent::netlink::overlay;
use weir_agent::plan::policy::Operation;
use weir_agent::policy::PolicyMaps as _;

use super::packet::{TCP, UDP};

pub const NODE_V4: &str = "192.0.2.11";
pub const NODE_V6: &str = "2001:db8:2::11";
/// The other node, and a pod there.
pub const PEER_V4: &str = "192.0.2.12";
pub const PEER_V6: &str = "2001:db8:2::12";
pub const PEER_MAC: [u8; 6] = [2, 0, 0, 0, 9, 9];

/// Of the uplink.
pub const UPLINK_MAC: [u8; 6] = [2, 0, 0, 0, UPLINK_NUMBER, 1];
const UPLINK_NUMBER: u8 = 3;

/// Addresses of the pods `a` and `b` of this node.
pub const POD_A: (&str, &str) = ("10.244.1.2", "fd00:244:1::2");
pub const POD_B: (&str, &str) = ("10.244.1.3", "fd00:244:1::3");
/// A pod of the other node.
pub const POD_FAR: (&str, &str) = ("10.244.2.2", "fd00:244:2::2");
/// Of all its pods.
const PEER_RANGES: (&str, &str) = ("10.244.2.0/24", "fd00:244:2::/64");

/// Instructions that the verifier may walk in one program, and in all of them: nearly all of an agent's start on a small
/// node is the verifier. It walks about one in a microsecond.
pub const VERIFIED_AT_MOST: u32 = 60_000;
pub const ALL_VERIFIED_AT_MOST: u32 = 400_000;

/// A pod's link, made for the test.
#[derive(Clone, Debug)]
pub struct Pod {
    pub link: PodLink,
}

#[derive(Debug)]
pub struct World {
    pub kernel: Kernel,
    pub bpffs: PathBuf,
    pub a: Pod,
    pub b: Pod,
    pub host: HostLink,
    pub uplink: u32,
    desired: DesiredState,
    _mount: tempfile::TempDir,
}

/// Gives a pod's link an open entry, as whoever enforces policies does, and its programs.
///
/// # Errors
/// When the kernel refuses either.
pub fn attach_open_pod(kernel: &Kernel, link: &PodLink) -> Result<()> {
    let open = Operation::PutPod(link.ifindex, PodPolicy::default());
    kernel.write(&[open])?;
    Ok(kernel.attach_pod(link)?)
}

/// Says why the tests that need a kernel cannot run here, if they cannot.
#[must_use]
pub fn unable() -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("the programs need root to load".into());
    }
    None
}

impl World {
    /// Fails when a program costs the verifier more than it may, or all of those that are loaded together do. Kernels
    /// before 5.16 do not tell.
    ///
    /// # Errors
    /// Names the programs and what the verifier walked.
    pub fn check_verified(&self) -> Result<()> {
        let sizes = self.kernel.program_sizes();
        let verified = || {
            let told = sizes.iter();
            told.filter_map(|(program, size)| Some((*program, size.verified?)))
        };
        let dear: Vec<_> = verified()
            .filter(|(_, walked)| *walked > VERIFIED_AT_MOST)
            .collect();
        ensure!(
            dear.is_empty(),
            "the verifier walks more than {VERIFIED_AT_MOST} instructions of {dear:?}"
        );
        let all: u32 = verified().map(|(_, walked)| walked).sum();
        ensure!(
            all <= ALL_VERIFIED_AT_MOST,
            "the verifier walks {all} instructions of all programs, more than {ALL_VERIFIED_AT_MOST}"
        );
        Ok(())
    }

    /// Moves the calling thread into namespaces of its own and builds a node there.
    ///
    /// # Errors
    /// Says which part could not be made.
    pub fn new(limits: Limits) -> Result<Self> {
        unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS)
            .context("enter new namespaces")?;
        let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
        mount(None::<&str>, "/", None::<&str>, private, None::<&str>)
            .context("make mounts private")?;
        let directory = tempfile::tempdir().context("a folder for bpffs")?;
        let bpffs = directory.path().to_owned();
        mount(
            Some("bpf"),
            &bpffs,
            Some("bpf"),
            MsFlags::empty(),
            None::<&str>,
        )
        .context("mount a bpffs")?;
        let mut netlink = Netlink::open()?;
        forward()?;
        let a = pod(&mut netlink, "a", 1, POD_A)?;
        let b = pod(&mut netlink, "b", 2, POD_B)?;
        let uplink = uplink(&mut netlink)?;
        let host = host_link(&mut netlink)?;
        let kernel = open(&bpffs, limits)?;
        kernel.attach_uplink("uplink")?;
        kernel.attach_host_link(&host)?;
        attach_open_pod(&kernel, &a.link)?;
        attach_open_pod(&kernel, &b.link)?;
        let desired = DesiredState {
            config: ClusterConfig::default(),
            ..DesiredState::default()
        };
        let world = Self {
            kernel,
            bpffs,
            a,
            b,
            host,
            uplink,
            desired,
            _mount: directory,
        };
        world.apply()?;
        Ok(world)
    }

    /// Serves `address`:80 (TCP and UDP) by these endpoints, in place of whatever it was.
    ///
    /// # Errors
    /// When the maps cannot be changed.
    pub fn serve(&mut self, address: &str, backends: &[&str]) -> Result<()> {
        serve(&mut self.desired, address, backends);
        self.apply()
    }

    /// As [`Self::serve`], and at this port of the node's addresses (TCP).
    ///
    /// # Errors
    /// When the maps cannot be changed.
    pub fn serve_node_port(&mut self, address: &str, port: u16, backends: &[&str]) -> Result<()> {
        serve(&mut self.desired, address, backends);
        if let Some(service) = self.desired.services.get_mut(&name_of(address)) {
            service.r#type = ServiceType::NodePort.into();
            service.ports.truncate(1);
            for service_port in &mut service.ports {
                service_port.node_port = port.into();
            }
        }
        let addresses: Vec<IpAddr> = vec![NODE_V4.parse()?, NODE_V6.parse()?];
        let surroundings = surroundings(&self.desired, "n1", &addresses, &Choices::default());
        self.kernel.set_surroundings(&surroundings)?;
        self.apply()
    }

    /// Gives the node an overlay, through which the pods of the other node can be reached besides. Returns its device.
    ///
    /// # Errors
    /// When the device cannot be made or the maps not be changed.
    pub fn overlay(&self) -> Result<u32> {
        const PORT: u16 = 8472;
        const MTU: u32 = 1450;
        let device = overlay::ensure(&mut Netlink::open()?, PORT, MTU)?;
        self.kernel.set_overlay(Some(&OverlayLink {
            name: device.name,
            ifindex: device.index,
            network: 87,
            port: PORT,
        }))?;
        let addresses: Vec<IpAddr> = vec![NODE_V4.parse()?, NODE_V6.parse()?];
        let mut surroundings = surroundings(&self.desired, "n1", &addresses, &Choices::default());
        let tunnel = Tunnel {
            remote: PEER_V4.parse()?,
            mtu: MTU,
            needed: false,
        };
        let ranges = [PEER_RANGES.0.parse()?, PEER_RANGES.1.parse()?];
        surroundings.add_tunnels(&ranges.map(|range| (range, tunnel)).into());
        self.kernel.set_surroundings(&surroundings)?;
        Ok(device.index)
    }

    /// Ends the service at `address`.
    ///
    /// # Errors
    /// When the maps cannot be changed.
    pub fn end(&mut self, address: &str) -> Result<()> {
        end(&mut self.desired, address);
        self.apply()
    }

    /// Opens the dataplane anew, as an agent that starts again does.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn restart(&mut self, limits: Limits) -> Result<()> {
        self.kernel = open(&self.bpffs, limits)?;
        Ok(())
    }

    /// Applies the whole desired state.
    ///
    /// # Errors
    /// When the maps cannot be changed, or a service did not fit.
    pub fn apply(&self) -> Result<()> {
        let everything = Changes {
            everything: true,
            ..Changes::default()
        };
        let report = self.kernel.apply(&self.desired, &everything)?;
        anyhow::ensure!(
            report.failed.is_empty(),
            "not programmed: {:?}",
            report.failed
        );
        Ok(())
    }

    /// Runs a program once or more on a packet that came in by a link. What comes from the network is for this node.
    ///
    /// # Errors
    /// When the kernel cannot run it.
    pub fn test_run(
        &self,
        program: Program,
        packet: &[u8],
        ifindex: u32,
        repeat: u32,
    ) -> Result<TestRun> {
        let packet = received(program, packet);
        Ok(self.kernel.test_run(program, &packet, ifindex, repeat)?)
    }

    /// A counter by name.
    ///
    /// # Errors
    /// When it cannot be read or does not exist.
    pub fn counter(&self, name: &str) -> Result<u64> {
        let counters = self.kernel.counters()?;
        let found = counters.iter().find(|counter| counter.name == name);
        Ok(found.with_context(|| format!("no counter {name}"))?.packets)
    }
}

/// A frame as the program's link receives it: what comes from the network is for this node.
#[must_use]
pub fn received(program: Program, frame: &[u8]) -> Vec<u8> {
    let mut frame = frame.to_vec();
    if program == Program::FromNetwork
        && let Some(destination) = frame.first_chunk_mut()
    {
        *destination = UPLINK_MAC;
    }
    frame
}

fn name_of(address: &str) -> Name {
    Name::new(
        "default",
        format!("service-{}", address.replace([':', '.'], "-")),
    )
}

/// Puts a service at `address`:80 (TCP and UDP) with these endpoints at port 8080 into the desired state.
pub fn serve(desired: &mut DesiredState, address: &str, backends: &[&str]) {
    let name = name_of(address);
    let family = if address.contains(':') {
        AddressFamily::Ipv6
    } else {
        AddressFamily::Ipv4
    };
    let protocols = [
        ("tcp", Protocol::Tcp),
        ("udp", Protocol::Udp),
        ("sctp", Protocol::Sctp),
    ];
    let service = Service {
        namespace: name.namespace.clone(),
        name: name.name.clone(),
        r#type: ServiceType::ClusterIp.into(),
        cluster_ips: vec![address.into()],
        ports: protocols
            .map(|(name, protocol)| ServicePort {
                name: name.into(),
                protocol: protocol.into(),
                port: 80,
                node_port: 0,
            })
            .into(),
        ..Service::default()
    };
    let endpoint = |address: &&str| Endpoint {
        addresses: vec![(*address).into()],
        ready: true,
        serving: true,
        ..Endpoint::default()
    };
    let slice = EndpointSlice {
        namespace: name.namespace.clone(),
        name: name.name.clone(),
        service: name.name.clone(),
        family: family.into(),
        ports: protocols
            .map(|(name, protocol)| EndpointPort {
                name: name.into(),
                protocol: protocol.into(),
                port: 8080,
            })
            .into(),
        endpoints: backends.iter().map(endpoint).collect(),
    };
    desired.services.insert(name.clone(), service);
    desired.endpoint_slices.insert(name, slice);
}

/// Takes the service at `address` out of the desired state.
pub fn end(desired: &mut DesiredState, address: &str) {
    let name = name_of(address);
    desired.services.remove(&name);
    desired.endpoint_slices.remove(&name);
}

fn open(bpffs: &Path, limits: Limits) -> Result<Kernel> {
    let node = NodeIdentity {
        name: "n1".into(),
        addresses: vec![NODE_V4.parse()?, NODE_V6.parse()?],
        dns_port: 10053,
    };
    Ok(Kernel::open(bpffs, limits, node)?)
}

fn forward() -> Result<()> {
    for key in [
        "net/ipv4/ip_forward",
        "net/ipv6/conf/all/forwarding",
        "net/ipv6/conf/default/forwarding",
    ] {
        let path = Path::new("/proc/sys").join(key);
        std::fs::write(&path, "1").with_context(|| format!("set {}", path.display()))?;
    }
    // Addresses that are being checked for duplicates cannot be used yet.
    std::fs::write("/proc/sys/net/ipv6/conf/default/accept_dad", "0").context("no duplicate checks")
}

fn veth(netlink: &mut Netlink, near: &str, far: &str, number: u8) -> Result<(u32, u32)> {
    let near = VethEnd {
        name: near,
        mac: [2, 0, 0, 0, number, 1],
        netns: None,
    };
    let far = VethEnd {
        name: far,
        mac: [2, 0, 0, 0, number, 2],
        netns: None,
    };
    netlink.create_veth(&near, &far, 1500)?;
    let mut index = |name: &str| -> Result<u32> {
        let link = netlink
            .link(name)?
            .with_context(|| format!("link {name}"))?;
        netlink.set_link_up(link.index, true)?;
        Ok(link.index)
    };
    Ok((index(near.name)?, index(far.name)?))
}

fn pod(netlink: &mut Netlink, name: &str, number: u8, addresses: (&str, &str)) -> Result<Pod> {
    let host_name = format!("pod-{name}");
    let (ifindex, _) = veth(netlink, &host_name, &format!("in-{name}"), number)?;
    let addresses: Vec<IpAddr> = vec![addresses.0.parse()?, addresses.1.parse()?];
    for address in &addresses {
        netlink.add_route(
            (*address).into(),
            RoutePath::Link {
                link: ifindex,
                source: None,
            },
        )?;
        netlink.set_neighbour(ifindex, *address, [2, 0, 0, 0, number, 2])?;
    }
    let (pod_mac, host_mac) = ([2, 0, 0, 0, number, 2], [2, 0, 0, 0, number, 1]);
    Ok(Pod {
        link: PodLink {
            ifindex,
            host_name,
            pod_mac,
            host_mac,
            addresses,
            netns_cookie: None,
        },
    })
}

fn uplink(netlink: &mut Netlink) -> Result<u32> {
    let (uplink, _) = veth(netlink, "uplink", "wire", UPLINK_NUMBER)?;
    for (own, peer, range) in [
        (NODE_V4, PEER_V4, PEER_RANGES.0),
        (NODE_V6, PEER_V6, PEER_RANGES.1),
    ] {
        let (own, gateway): (IpAddr, IpAddr) = (own.parse()?, peer.parse()?);
        netlink.add_host_address(uplink, own)?;
        netlink.add_route(
            gateway.into(),
            RoutePath::Link {
                link: uplink,
                source: None,
            },
        )?;
        netlink.set_neighbour(uplink, gateway, PEER_MAC)?;
        netlink.add_route(
            range.parse()?,
            RoutePath::Via {
                gateway,
                link: uplink,
                source: None,
            },
        )?;
    }
    Ok(uplink)
}

fn host_link(netlink: &mut Netlink) -> Result<HostLink> {
    let (host_ifindex, peer_ifindex) = veth(netlink, "weir_host", "weir_hostp", 4)?;
    for range in ["10.96.0.0/16", "fd00:96::/112"] {
        let path = RoutePath::Link {
            link: host_ifindex,
            source: None,
        };
        netlink.add_route(range.parse()?, path)?;
    }
    Ok(HostLink {
        peer_name: "weir_hostp".into(),
        peer_ifindex,
        peer_mac: [2, 0, 0, 0, 4, 2],
        host_ifindex,
        host_mac: [2, 0, 0, 0, 4, 1],
    })
}

/// Both protocols that services are translated for.
pub const PROTOCOLS: [u8; 2] = [TCP, UDP];
